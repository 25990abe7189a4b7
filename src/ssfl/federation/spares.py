"""Memory for updates, used again once nobody reads it.

On a CPU a fresh vector of a whole model costs a page fault for every 4 KB, several times the
subtraction that fills it.
"""

import torch
from torch import Tensor

KEPT = 4
"""Vectors kept for reuse; more updates than these at a time get memory of their own."""


class Spares:
    """Vectors of one shape. One is free when no tensor but ours shares its storage."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def take(self, like: Tensor) -> Tensor:
        """A vector like `like`, its content arbitrary, that nobody else reads or writes."""
        if like.device.type != "cpu":  # CUDA's allocator does the same
            return torch.empty_like(like)
        for vector in self._kept:
            if vector.shape == like.shape and _readers(vector) == 0:
                return vector.view(-1)
        vector = torch.empty_like(like)
        if len(self._kept) < KEPT:
            self._kept.append(vector)
            return vector.view(-1)
        return vector


def _readers(vector: Tensor) -> int:
    """Tensors besides `vector` that share its storage, whoever made them."""
    storage = vector.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 2  # `vector` and `storage`
