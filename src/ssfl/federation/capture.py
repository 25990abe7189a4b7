"""A step captured once per batch shape into a CUDA graph, and replayed for every client.

A replay launches the whole step (views, forward, backward, optimizer, of however many models) at
once, from indices and random numbers written into fixed buffers. The models' vectors are read and
written where they always are, so whichever client's they hold just then is trained.
"""

import logging
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from ssfl.cuda_graphs import beside, record
from ssfl.federation.engine import Engine, Step

log = logging.getLogger(__name__)

WARM_UPS = 3
"""Runs before the capture: compilation, cuDNN's choice of algorithms and allocations."""

_one_at_a_time = threading.Lock()
"""Compilation and capture are no work for several trainers at once."""


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    index: Tensor
    uniforms: Tensor
    totals: Tensor


class CapturedStep:
    """A step that is captured for each shape it meets. `ready` runs it on whatever the models
    hold, so it must come before a client's vectors are loaded."""

    def __init__(self, run: Step, engine: Engine) -> None:
        self._run, self._engine = run, engine
        self._captured: dict[tuple[int, ...], _Captured] = {}
        self._memory = torch.cuda.graph_pool_handle()  # replays never overlap: one pool for all
        self._capture = True

    def ready(self, index: Tensor, uniforms: Tensor) -> None:
        """Capture the step for this shape if it is new; what does not work is done without."""
        shape = tuple(index.shape)
        if not self._capture or shape in self._captured:
            return
        try:
            with _one_at_a_time:
                self._captured[shape] = self._record(index.clone(), uniforms.clone())
        except torch.OutOfMemoryError:
            raise  # without compilation it would need more
        except Exception as error:
            if self._engine.compile:
                log.warning("steps are captured but not compiled: %s", _first_line(error))
                self._engine.compile = False
                self.ready(index, uniforms)
            else:
                log.warning("steps are neither compiled nor captured: %s", _first_line(error))
                self._capture = False

    def _record(self, index: Tensor, uniforms: Tensor) -> _Captured:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with beside(side):
            for _ in range(WARM_UPS):
                self._run(index, uniforms)
        graph, totals = record(lambda: self._run(index, uniforms), side, self._memory)
        return _Captured(graph, index, uniforms, totals)

    def __call__(self, index: Tensor, uniforms: Tensor) -> Tensor:
        if not self._capture:
            return self._run(index, uniforms)
        captured = self._captured[tuple(index.shape)]
        captured.index.copy_(index)
        captured.uniforms.copy_(uniforms)
        captured.graph.replay()
        return captured.totals


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
