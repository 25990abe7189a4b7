"""SimSiam (Chen & He): two views, one predictor, a stop-gradient, nothing else.

L = D(p1, z2)/2 + D(p2, z1)/2 with D the negative cosine similarity and no gradient through z
(the paper's equation 1, symmetrised as in its listings).
"""

from typing import Literal

from pydantic import Field
from torch import Tensor

from ssfl.models.backbones import Backbone
from ssfl.models.heads import mlp
from ssfl.ssl.base import Batch, Method, MethodOptions, Outputs, negative_cosine


class SimSiamOptions(MethodOptions):
    """SimSiam's heads."""

    method: Literal["simsiam"] = "simsiam"
    projector_width: int = Field(2048, ge=1)
    """Width of the projector, and of the projections it ends in."""
    projector_layers: Literal[2, 3] = 2
    """Layers of the projector: two on CIFAR-sized images, three with the ImageNet stem."""
    predictor_width: int = Field(512, ge=1)
    """Width of the predictor's bottleneck."""


class SimSiam(Method):
    """Backbone, projector and predictor; the listing's F is projector ∘ backbone, H the rest."""

    Options = SimSiamOptions
    predictor_prefix = "predictor."

    def __init__(self, backbone: Backbone, options: SimSiamOptions) -> None:
        super().__init__(backbone)
        width, hidden = options.projector_width, options.predictor_width
        self.projector = mlp(backbone.features, *[width] * options.projector_layers, last="plain")
        self.predictor = mlp(width, hidden, width)

    def forward(self, batch: Batch) -> Outputs:
        z = self.each(self.project, batch.views)
        return Outputs(z, self.each(self.predictor, z))

    def loss(self, outputs: Outputs) -> Tensor:
        (z1, z2), (p1, p2) = outputs.z, outputs.p
        return negative_cosine(p1, z2) / 2 + negative_cosine(p2, z1) / 2
