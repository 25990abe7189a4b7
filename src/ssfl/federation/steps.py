"""A local step as it is called: plainly, or captured once per batch shape into a CUDA graph that is
replayed for every client.

A replay launches the whole step (views, forward, backward, optimizer, of however many models) at
once, from indices and random numbers written into fixed buffers. The models' vectors are read and
written where they always are, so whichever client's they hold just then is trained.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ssfl.cuda_graphs import beside, record

Step = Callable[[Tensor, Tensor], Tensor]
"""Indices and random numbers to metrics."""

log = logging.getLogger(__name__)

WARM_UPS = 3
"""Runs before the capture: compilation, cuDNN's choice of algorithms and allocations."""

_one_at_a_time = threading.Lock()
"""Compilation and capture are no work for several trainers at once."""


class RunnableStep(Protocol):
    """A step that can be called, and shown beforehand what it will be called with."""

    def ready(self, index: Tensor, uniforms: Tensor) -> None: ...

    def __call__(self, index: Tensor, uniforms: Tensor) -> Tensor: ...


class PlainStep:
    """A step that is simply called."""

    def __init__(self, run: Step) -> None:
        self._run = run

    def ready(self, index: Tensor, uniforms: Tensor) -> None:
        """Nothing to prepare."""

    def __call__(self, index: Tensor, uniforms: Tensor) -> Tensor:
        return self._run(index, uniforms)


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    index: Tensor
    uniforms: Tensor
    totals: Tensor


class CapturedStep:
    """A step that is captured for each shape it meets. `ready` runs it on whatever the models
    hold, so it must come before a client's vectors are loaded.

    `stop_compiling` makes `run` call plainly what it has compiled, and tells whether it had.
    """

    def __init__(self, run: Step, stop_compiling: Callable[[], bool]) -> None:
        self._run, self._stop_compiling = run, stop_compiling
        self._captured: dict[tuple[int, ...], _Captured] = {}
        self._memory = torch.cuda.graph_pool_handle()  # replays never overlap: one pool for all
        self._capture = True

    def ready(self, index: Tensor, uniforms: Tensor) -> None:
        """Capture the step for this shape if it is new; what does not work is done without."""
        shape = tuple(index.shape)
        while self._capture and shape not in self._captured:
            with _one_at_a_time:  # also for what follows a failure: the next must know of it
                try:
                    self._captured[shape] = self._record(index.clone(), uniforms.clone())
                except torch.OutOfMemoryError:
                    raise  # without compilation it would need more
                except Exception as error:
                    self._capture = self._stop_compiling()
                    how = "captured but not" if self._capture else "neither captured nor"
                    log.warning("steps are %s compiled: %s", how, _first_line(error))

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
