"""Where a trainer queues its work: on a GPU in a stream of its own, so that several clients are in
flight at once and one's small kernels fill the gaps that another's leave.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Lane:
    """Work is done as it is called for: a CPU's way."""

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Queue what is called inside the block in this lane."""
        yield

    def hand_over(self, tensor: Tensor | None) -> None:
        """`tensor`, made in this lane, will be read outside it."""


class StreamLane(Lane):
    """A CUDA stream. Work in it starts after what was queued in the device's default stream (Θ is
    made there); whoever leaves the lane reads something back first, so its results are there."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._outside = torch.cuda.default_stream(device)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self._stream.wait_stream(self._outside)
        with torch.cuda.stream(self._stream):
            yield

    def hand_over(self, tensor: Tensor | None) -> None:
        if tensor is not None:  # else its memory could be reused before the server has read it
            tensor.record_stream(self._outside)
