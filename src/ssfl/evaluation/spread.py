"""A few out of many, evenly spaced: they cover what is sorted by class, and need no dice."""

import torch
from torch import Tensor


def spread(n: int, limit: int, device: torch.device | None = None) -> Tensor:
    """At most `limit` indices below `n`."""
    count = min(n, limit)
    return torch.arange(count, device=device) * n // max(1, count)


def thin(rows: Tensor, limit: int) -> Tensor:
    """At most `limit` of the rows."""
    return rows if len(rows) <= limit else rows[spread(len(rows), limit, rows.device)]
