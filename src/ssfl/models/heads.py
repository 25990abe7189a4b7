"""Heads: what stands between a backbone's features and an SSL loss, as a list of layers.

    projector = mlp([Layer(512, 2048), Layer(2048, 2048, norm="plain", relu=False)])

is SimSiam's projector: two linear layers, batch norm on both, no scale and shift on the last.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import nn

from ssfl.models.norm import BatchNorm


class Layer(NamedTuple):
    """A linear layer, then batch norm with or without scale and shift (or none), then ReLU."""

    inputs: int
    outputs: int
    norm: Literal["affine", "plain"] | None = "affine"
    relu: bool = True


def mlp(layers: Sequence[Layer]) -> nn.Sequential:
    """The layers one after another. A linear layer has a bias only where no batch norm follows,
    which would take it away again."""
    modules: list[nn.Module] = []
    for layer in layers:
        modules.append(nn.Linear(layer.inputs, layer.outputs, bias=layer.norm is None))
        if layer.norm is not None:
            modules.append(BatchNorm(layer.outputs, affine=layer.norm == "affine"))
        if layer.relu:
            modules.append(nn.ReLU(inplace=True))
    return nn.Sequential(*modules)
