"""Work that repeats on the same tensors, replayed on a GPU without asking Python again.

Training a small classifier takes thousands of kernels of a few microseconds each, and launching
one from Python takes longer than running it. Captured into a CUDA graph, all of a round's kernels
are launched at once.
"""

from collections.abc import Callable

import torch

from ssfl.cuda_graphs import beside, record


class Replayed:
    """Calls `work`, which reads and writes the same tensors every time. On a GPU the first call
    runs it as it stands, the second records it, and every later one replays the record."""

    def __init__(self, work: Callable[[], None], device: torch.device) -> None:
        self._work = work
        self._stream: torch.cuda.Stream | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._calls = 0

    def __call__(self) -> None:
        self._calls += 1
        if self._stream is None:
            self._work()
        elif self._calls == 1:
            with beside(self._stream):
                self._work()
        else:
            if self._graph is None:
                self._graph, _ = record(self._work, self._stream)
            self._graph.replay()
