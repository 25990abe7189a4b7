"""Barlow Twins (Zbontar et al.): views agree feature by feature, features say different things.

L = Σ_i (1 − C_ii)² + λ Σ_i Σ_{j≠i} C_ij², with C (d×d) the cross-correlation of the two views'
projections over the batch.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ssfl.models.backbones import Backbone
from ssfl.models.heads import mlp
from ssfl.ssl.base import Method, MethodOptions, Outputs, ViewWishes


class BarlowTwinsOptions(MethodOptions):
    """Barlow Twins' projector and weights."""

    method: Literal["barlow-twins"] = "barlow-twins"
    projector_width: int = Field(2048, ge=1)
    """Width of the projector's three layers, and of the projections."""
    redundancy: float = Field(0.0051, ge=0)
    """Weight λ of the off-diagonal terms."""
    scale: float = Field(0.1, gt=0)
    """Factor on the whole loss, which else is large for SGD."""


class BarlowTwins(Method):
    """Backbone and a three-layer projector."""

    Options = BarlowTwinsOptions
    wishes = ViewWishes(jitter=(0.4, 0.4, 0.2, 0.1), solarize=(0.0, 0.2))

    def __init__(self, backbone: Backbone, options: BarlowTwinsOptions) -> None:
        super().__init__(backbone)
        width = options.projector_width
        self.projector = mlp(backbone.features, width, width, width)
        self.redundancy = options.redundancy
        self.scale = options.scale

    def loss(self, outputs: Outputs) -> Tensor:
        z1, z2 = outputs.z
        return self.scale * barlow_twins_loss(z1, z2, self.redundancy)


def barlow_twins_loss(z1: Tensor, z2: Tensor, redundancy: float) -> Tensor:
    """Barlow Twins' loss of two views z1, z2 (N×d each), λ = `redundancy`: a number."""
    with torch.autocast(z1.device.type, enabled=False):
        correlation = _standardise(z1.float()).T @ _standardise(z2.float()) / len(z1)
        agreement = correlation.diagonal()
        off_diagonal = correlation.square().sum() - agreement.square().sum()
        return (1 - agreement).square().sum() + redundancy * off_diagonal


def _standardise(z: Tensor) -> Tensor:
    """Mean zero, variance one over the batch; a constant feature becomes zero."""
    centred = z - z.mean(dim=0)
    return centred * torch.rsqrt(centred.square().mean(dim=0) + 1e-8)
