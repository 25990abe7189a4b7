"""How far a client's encoder has gone from the global one, as FedU and FedEMA measure it."""

import torch
from torch import Tensor

from ssfl.models.flat import Kind, Layout


def divergence(layout: Layout, theta: Tensor, mine: Tensor) -> Tensor:
    """Mean, over the backbone's weight tensors, of their Euclidean distance; a 0-d tensor."""
    ranges = [
        entry.range
        for entry in layout.entries
        if entry.kind is Kind.WEIGHT and entry.name.startswith("backbone.")
    ]
    return torch.stack([torch.dist(theta[r], mine[r]) for r in ranges]).mean()


def keep_targets(layout: Layout, into: Tensor, mine: Tensor) -> None:
    """Put the client's own EMA target weights back: in both papers they are not communicated."""
    for entry in layout.entries:
        if entry.kind is Kind.TARGET:
            into[entry.range] = mine[entry.range]
