"""BYOL (Grill et al.): predict what a slow copy of yourself makes of the other view.

L = ‖p̄1 − t̄2‖² + ‖p̄2 − t̄1‖² = (2 + 2 D(p1, t2)) + (2 + 2 D(p2, t1)), where t are projections of
a target network ξ that no gradient moves: ξ ← τ ξ + (1 − τ) θ after every step, τ rising to 1 as
1 − (1 − τ₀) (cos πk + 1)/2 with progress k. The target is averaged with the weights (memory.py).
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ssfl.models.backbones import Backbone
from ssfl.models.heads import mlp
from ssfl.ssl.base import Batch, Method, MethodOptions, Outputs, ViewWishes, negative_cosine
from ssfl.ssl.memory import follow, frozen_copy


class BYOLOptions(MethodOptions):
    """BYOL's heads, and how slowly its target follows."""

    method: Literal["byol"] = "byol"
    projector_width: int = Field(4096, ge=1)
    """Width of the projector's hidden layer."""
    projection_width: int = Field(256, ge=1)
    """Width of the projections and predictions."""
    predictor_width: int = Field(4096, ge=1)
    """Width of the predictor's hidden layer."""
    momentum: float = Field(0.99, ge=0, le=1)
    """τ₀: share of itself that the target keeps in the first step; rises to 1 by a cosine."""


class BYOL(Method):
    """Backbone, projector and predictor, and a target copy of the first two."""

    Options = BYOLOptions
    predictor_prefix = "predictor."
    wishes = ViewWishes(jitter=(0.4, 0.4, 0.2, 0.1), solarize=(0.0, 0.2))

    def __init__(self, backbone: Backbone, options: BYOLOptions) -> None:
        super().__init__(backbone)
        width = options.projection_width
        self.projector = mlp(backbone.features, options.projector_width, width)
        self.predictor = mlp(width, options.predictor_width, width)
        self.target_backbone = frozen_copy(backbone)
        self.target_projector = frozen_copy(self.projector)
        self.momentum = options.momentum

    @torch.no_grad()
    def target(self, x: Tensor) -> Tensor:
        z: Tensor = self.target_projector(self.target_backbone(x))
        return z

    def forward(self, batch: Batch) -> Outputs:
        z = self.each(self.project, batch.views)
        return Outputs(z, self.each(self.predictor, z), self.each(self.target, batch.views))

    def loss(self, outputs: Outputs) -> Tensor:
        (p1, p2), (t1, t2) = outputs.p, outputs.target
        return (2 + 2 * negative_cosine(p1, t2)) + (2 + 2 * negative_cosine(p2, t1))

    def after_step(self, progress: Tensor) -> None:
        rate = (1 - self.momentum) * (torch.cos(torch.pi * progress) + 1) / 2
        follow(self.target_backbone, self.backbone, rate)
        follow(self.target_projector, self.projector, rate)
