"""VICReg (Bardes et al.): views agree, every feature varies, no two features covary.

L = λ s(Z, Z′) + μ (v(Z) + v(Z′)) + ν (c(Z) + c(Z′)): s the mean squared difference, v the hinge
mean_j max(0, 1 − √(Var z_j + ε)), c the sum of squared off-diagonal covariances over d. The VICReg
paper's equation sums s over features where its listing averages; the usual weights 25, 25, 1 are
the listing's, so s is averaged here.

c grows with the fourth power of z, which nothing normalises: a step that makes z ten times as long
makes the next gradient a thousand times as long. Where that happens (second-order MAML on small
batches, where batch norm bends most), set `local.max_gradient`, as the recipe `vicreg` does.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from ssfl.models.backbones import Backbone
from ssfl.models.heads import mlp
from ssfl.ssl.base import Method, MethodOptions, Outputs, ViewWishes

EPSILON = 1e-4  # inside the square root of the variance term


class VICRegOptions(MethodOptions):
    """VICReg's expander and weights."""

    method: Literal["vicreg"] = "vicreg"
    projector_width: int = Field(2048, ge=1)
    """Width of the expander's three layers, and of the projections."""
    invariance: float = Field(25.0, ge=0)
    """Weight λ of the difference between views."""
    variance: float = Field(25.0, ge=0)
    """Weight μ of the hinge on each feature's standard deviation."""
    covariance: float = Field(1.0, ge=0)
    """Weight ν of the covariances between features."""
    scale: float = Field(0.04, gt=0)
    """Factor on the whole loss, which else is too large for SGD."""


class VICReg(Method):
    """Backbone and a three-layer projector (the expander)."""

    Options = VICRegOptions
    wishes = ViewWishes(jitter=(0.4, 0.4, 0.2, 0.1), solarize=(0.0, 0.2))

    def __init__(self, backbone: Backbone, options: VICRegOptions) -> None:
        super().__init__(backbone)
        width = options.projector_width
        self.projector = mlp(backbone.features, width, width, width)
        self.weights = (options.invariance, options.variance, options.covariance)
        self.scale = options.scale

    def loss(self, outputs: Outputs) -> Tensor:
        z1, z2 = outputs.z
        return self.scale * vicreg_loss(z1, z2, *self.weights)


def vicreg_loss(
    z1: Tensor, z2: Tensor, invariance: float, variance: float, covariance: float
) -> Tensor:
    """VICReg's loss of two views z1, z2 (N×d each) with weights λ, μ, ν: a number."""
    with torch.autocast(z1.device.type, enabled=False):
        z1, z2 = z1.float(), z2.float()
        return (
            invariance * F.mse_loss(z1, z2)
            + variance * (_too_still(z1) + _too_still(z2))
            + covariance * (_redundant(z1) + _redundant(z2))
        )


def _too_still(z: Tensor) -> Tensor:
    """v: how far the features' standard deviations fall short of one."""
    return F.relu(1 - torch.sqrt(z.var(dim=0) + EPSILON)).mean()


def _redundant(z: Tensor) -> Tensor:
    """c: squared covariances between different features, summed, over d."""
    centred = z - z.mean(dim=0)
    covariance = centred.T @ centred / (len(z) - 1)
    return (covariance.square().sum() - covariance.diagonal().square().sum()) / z.shape[1]
