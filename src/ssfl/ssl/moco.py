"""MoCo v2 (He et al., Chen et al.): tell an image's key from the keys of a queue of past images.

ℓ(q, k) = −log( exp(q·k / T) / (exp(q·k / T) + Σ_m exp(q·m / T)) ) over unit vectors, m running
over the queue; L = ℓ(q1, k2)/2 + ℓ(q2, k1)/2. Keys come from a slow copy of the network, which is
averaged with the weights (memory.py); the queue stays home and starts empty, so a client's first
step ever has no negatives and no gradient. Shuffled batch norm is left out: on one device,
shuffling a batch does not change its statistics.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from ssfl.models.backbones import Backbone
from ssfl.models.heads import mlp
from ssfl.ssl.base import Batch, Method, MethodOptions, Outputs, ViewWishes
from ssfl.ssl.memory import follow, frozen_copy, push


class MoCoOptions(MethodOptions):
    """MoCo's projector, queue and temperature, and how slowly its keys' network follows."""

    method: Literal["moco"] = "moco"
    projector_width: int = Field(2048, ge=1)
    """Width of the projector's hidden layer."""
    projection_width: int = Field(256, ge=1)
    """Width of the projections."""
    queue: int = Field(4096, ge=1)
    """Past keys that serve as negatives, of both views (4096 to 32768 are usual)."""
    temperature: float = Field(0.2, gt=0)
    """Temperature T of the softmax over similarities."""
    momentum: float = Field(0.99, ge=0, le=1)
    """Share of itself that the keys' network keeps in a step."""


class Keys(NamedTuple):
    """What queries are held against: the views' keys (V×N×d) and the queue (L×d), unit vectors."""

    views: Tensor
    queue: Tensor


class MoCo(Method):
    """Backbone and projector, a slow copy of both for the keys, and a queue of past keys."""

    Options = MoCoOptions
    home = ("queue",)
    wishes = ViewWishes(jitter=(0.4, 0.4, 0.4, 0.1))

    queue: Tensor

    def __init__(self, backbone: Backbone, options: MoCoOptions) -> None:
        super().__init__(backbone)
        hidden, width = options.projector_width, options.projection_width
        self.projector = mlp(backbone.features, hidden, width, norm=False)
        self.target_backbone = frozen_copy(backbone)
        self.target_projector = frozen_copy(self.projector)
        self.register_buffer("queue", torch.zeros(options.queue, width))
        self.temperature = options.temperature
        self.momentum = options.momentum

    @torch.no_grad()
    def key(self, x: Tensor) -> Tensor:
        return F.normalize(self.target_projector(self.target_backbone(x)).float(), dim=-1)

    def forward(self, batch: Batch) -> Outputs:
        z = self.each(self.project, batch.views)
        keys = Keys(self.each(self.key, batch.views), self.queue.clone())
        if self.training:  # here, not in after_step, so that every micro-batch's keys enter
            push(self.queue, keys.views.flatten(0, 1))
        return Outputs(z, z, keys)

    def loss(self, outputs: Outputs) -> Tensor:
        (z1, z2), ((k1, k2), queue) = outputs.z, outputs.target
        return (
            info_nce(z1, k2, queue, self.temperature) / 2
            + info_nce(z2, k1, queue, self.temperature) / 2
        )

    def after_step(self, progress: Tensor) -> None:
        follow(self.target_backbone, self.backbone, 1 - self.momentum)
        follow(self.target_projector, self.projector, 1 - self.momentum)


def info_nce(queries: Tensor, keys: Tensor, queue: Tensor, temperature: float) -> Tensor:
    """InfoNCE of `queries` (N×d, any length) with unit `keys` (N×d) and `queue` (L×d): a number.

    No gradient reaches the keys or the queue. Rows of zeros are places in the queue not yet taken
    and count for nothing: random vectors there would reward a network that maps all images to one
    point, away from them.
    """
    with torch.autocast(queries.device.type, enabled=False):
        q = F.normalize(queries.float(), dim=-1)
        positive = (q * keys.detach().float()).sum(dim=-1, keepdim=True)
        past = queue.detach().float()
        negatives = (q @ past.T).masked_fill(~past.any(dim=-1), float("-inf"))
        logits = torch.cat([positive, negatives], dim=1) / temperature
        return (logits.logsumexp(dim=1) - logits[:, 0]).mean()
