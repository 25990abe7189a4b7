"""A step captured once per batch shape into a CUDA graph, and replayed for every client.

A replay launches the whole step (views, forward, backward, optimizer, of however many models) at
once, from indices and random numbers written into fixed buffers. The models' vectors are read and
written where they always are, so whichever client's they hold just then is trained.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ssfl.federation.engine import Step

WARM_UPS = 3
"""Runs before the capture: compilation, cuDNN's choice of algorithms and allocations."""


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    index: Tensor
    uniforms: Tensor
    totals: Tensor


class CapturedStep:
    """A step that is captured for each shape it meets. `ready` runs it on whatever the models
    hold, so it must come before a client's vectors are loaded."""

    def __init__(self, run: Step) -> None:
        self._run = run
        self._captured: dict[tuple[int, ...], _Captured] = {}

    def ready(self, index: Tensor, uniforms: Tensor) -> None:
        """Capture the step for this shape, if it is new."""
        if index.shape in self._captured:
            return
        index, uniforms = index.clone(), uniforms.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._run(index, uniforms)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            totals = self._run(index, uniforms)
        self._captured[tuple(index.shape)] = _Captured(graph, index, uniforms, totals)

    def __call__(self, index: Tensor, uniforms: Tensor) -> Tensor:
        captured = self._captured[tuple(index.shape)]
        captured.index.copy_(index)
        captured.uniforms.copy_(uniforms)
        captured.graph.replay()
        return captured.totals
