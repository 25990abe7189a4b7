"""Heads: what stands between a backbone's features and an SSL loss.

    projector = mlp(512, 2048, 2048, last="plain")

is SimSiam's projector: two linear layers, batch norm on both, no scale and shift on the last.
"""

from itertools import pairwise
from typing import Literal

from torch import nn

from ssfl.models.norm import BatchNorm


def mlp(*widths: int, norm: bool = True, last: Literal["plain"] | None = None) -> nn.Sequential:
    """Linear layers from each width to the next: two or more widths.

    Between layers stand batch norm (unless `norm` is off) and ReLU; after the last nothing, or
    batch norm without scale and shift ("plain"). A layer has a bias only where no batch norm
    follows, which would take it away again.
    """
    modules: list[nn.Module] = []
    for inputs, outputs in pairwise(widths[:-1]):
        modules.append(nn.Linear(inputs, outputs, bias=not norm))
        if norm:
            modules.append(BatchNorm(outputs))
        modules.append(nn.ReLU(inplace=True))
    modules.append(nn.Linear(widths[-2], widths[-1], bias=last is None))
    if last == "plain":
        modules.append(BatchNorm(widths[-1], affine=False))
    return nn.Sequential(*modules)
