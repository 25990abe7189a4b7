"""SimCLR (Chen et al.): tell the other view of an image from all other images of the batch.

ℓ(i, j) = −log( exp(s_ij / T) / Σ_{k ≠ i} exp(s_ik / T) ) with s the cosine similarity, averaged
over the 2N ordered pairs (i, j) of views of the same image (NT-Xent, the SimCLR paper's eq. 1).
"""

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from ssfl.models.backbones import Backbone
from ssfl.models.heads import mlp
from ssfl.ssl.base import Method, MethodOptions, Outputs, ViewWishes


class SimCLROptions(MethodOptions):
    """SimCLR's projector and temperature."""

    method: Literal["simclr"] = "simclr"
    projector_width: int = Field(2048, ge=1)
    """Width of the projector's hidden layer."""
    projection_width: int = Field(256, ge=1)
    """Width of the projections."""
    temperature: float = Field(0.2, gt=0)
    """Temperature T of the softmax over similarities (0.5 is also usual)."""


class SimCLR(Method):
    """Backbone and projector, without batch norm in the projector."""

    Options = SimCLROptions
    joint_statistics = True
    wishes = ViewWishes(jitter=(0.8, 0.8, 0.8, 0.2))

    def __init__(self, backbone: Backbone, options: SimCLROptions) -> None:
        super().__init__(backbone)
        hidden, width = options.projector_width, options.projection_width
        self.projector = mlp(backbone.features, hidden, width, norm=False)
        self.temperature = options.temperature

    def loss(self, outputs: Outputs) -> Tensor:
        z1, z2 = outputs.z
        return nt_xent(z1, z2, self.temperature)


def nt_xent(z1: Tensor, z2: Tensor, temperature: float) -> Tensor:
    """NT-Xent of two views z1, z2 (N×d each): a number."""
    with torch.autocast(z1.device.type, enabled=False):
        z = F.normalize(torch.cat([z1, z2]).float(), dim=-1)
        similarity = z @ z.T / temperature
        itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
        other_view = torch.arange(len(z), device=z.device).roll(len(z1))
        return F.cross_entropy(similarity.masked_fill(itself, float("-inf")), other_view)
