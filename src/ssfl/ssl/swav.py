"""SwAV (Caron et al.): predict one view's cluster from the other's, clusters learned on the way.

L = ℓ(z1, q2) + ℓ(z2, q1) with ℓ(z, q) = −Σ_k q_k log softmax(z·c / T)_k over prototypes c (the
SwAV paper's eq. 1 and 2). The codes q come from Sinkhorn: the assignment of the batch to the
prototypes that uses all of them equally. Prototypes are weights, shared and averaged; averages of
unit vectors are shorter than one, so only their direction is ever read.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ssfl.models.backbones import Backbone
from ssfl.models.heads import mlp
from ssfl.ssl.base import Batch, Method, MethodOptions, Outputs, ViewWishes
from ssfl.ssl.memory import push


class SwAVOptions(MethodOptions):
    """SwAV's projector and prototypes, and how codes are made."""

    method: Literal["swav"] = "swav"
    projector_width: int = Field(2048, ge=1)
    """Width of the projector's hidden layer."""
    projection_width: int = Field(128, ge=1)
    """Width of the projections and prototypes."""
    prototypes: int = Field(512, ge=2)
    """Number of prototypes (512 without a queue, 3000 with one of 3840)."""
    temperature: float = Field(0.1, gt=0)
    """Temperature T of the softmax over prototypes."""
    epsilon: float = Field(0.05, gt=0)
    """Sinkhorn's entropy weight ε: larger makes softer codes."""
    sinkhorn_steps: int = Field(3, ge=1)
    """Sinkhorn's iterations."""
    freeze_share: float = Field(0.05, ge=0, le=1)
    """Share of the experiment during which no gradient moves the prototypes; else they gather
    where all projections of a fresh network lie."""
    queue: int = Field(0, ge=0)
    """Past projections per view that join the batch when codes are made (0: none)."""
    queue_share: float = Field(0.05, ge=0, le=1)
    """Share of the experiment before the queue joins."""


class Assignments(NamedTuple):
    """Each view's similarities to the prototypes, and its codes: V×N×K both."""

    scores: Tensor
    codes: Tensor


class SwAV(Method):
    """Backbone, projector and prototypes (unit vectors, K×d).

    The buffer `progress` is where the experiment stands, so that thawing the prototypes and letting
    the queue in need no host: a captured step just sees another number there.
    """

    Options = SwAVOptions
    joint_statistics = True
    home = ("queue", "progress")
    wishes = ViewWishes(jitter=(0.8, 0.8, 0.8, 0.2))

    queue: Tensor | None
    progress: Tensor

    def __init__(self, backbone: Backbone, options: SwAVOptions) -> None:
        super().__init__(backbone)
        hidden, width = options.projector_width, options.projection_width
        self.projector = mlp(backbone.features, hidden, width)
        start = torch.randn(options.prototypes, width)
        self.prototypes = nn.Parameter(F.normalize(start, dim=-1))
        empty = torch.zeros(self.views, options.queue, width) if options.queue else None
        self.register_buffer("queue", empty)
        self.register_buffer("progress", torch.zeros(()))
        self.options = options

    def forward(self, batch: Batch) -> Outputs:
        z = self.each(self.project, batch.views)
        with torch.autocast(z.device.type, enabled=False):
            points = F.normalize(z.float(), dim=-1)
            directions = self.directions()
            scores = points @ directions.T
            codes = self.codes(points, scores, directions)
        return Outputs(z, z, Assignments(scores, codes))

    def directions(self) -> Tensor:
        """The prototypes as unit vectors; no gradient while they are frozen."""
        thawed = self.progress >= self.options.freeze_share
        prototypes = torch.where(thawed, self.prototypes, self.prototypes.detach())
        length = torch.linalg.vector_norm(prototypes.detach(), dim=-1, keepdim=True)
        directions: Tensor = prototypes / length
        return directions

    @torch.no_grad()
    def codes(self, points: Tensor, scores: Tensor, directions: Tensor) -> Tensor:
        """Codes of each view's points (V×N×d), made among the queue's too if there is one."""
        epsilon, steps = self.options.epsilon, self.options.sinkhorn_steps
        if self.queue is None:
            return sinkhorn(scores, epsilon, steps)
        joined = torch.cat([scores, self.queue @ directions.T], dim=1)
        filled = self.queue.any(dim=-1) & (self.progress >= self.options.queue_share)
        counted = torch.cat([filled.new_ones(scores.shape[:2]), filled], dim=1)
        if self.training:
            push(self.queue, points)
        return sinkhorn(joined, epsilon, steps, counted)[:, : scores.shape[1]]

    def loss(self, outputs: Outputs) -> Tensor:
        (s1, s2), (q1, q2) = outputs.target
        temperature = self.options.temperature
        return code_loss(s1, q2, temperature) + code_loss(s2, q1, temperature)

    @torch.no_grad()
    def begin(self, progress: Tensor) -> None:
        self.progress.copy_(progress)

    @torch.no_grad()
    def after_step(self, progress: Tensor) -> None:
        self.prototypes.copy_(F.normalize(self.prototypes, dim=-1))


@torch.no_grad()
def sinkhorn(scores: Tensor, epsilon: float, steps: int, counted: Tensor | None = None) -> Tensor:
    """Codes (...×N×K, rows sum to one) nearest to `scores` that use all K prototypes equally.

    `counted` (...×N, boolean) says which rows take part, all if None; the others' codes are zero.
    """
    with torch.autocast(scores.device.type, enabled=False):
        exact = scores.float() / epsilon
        if counted is not None:
            exact = exact.masked_fill(~counted[..., None], torch.finfo(exact.dtype).min)
        # The first step in logarithms: afterwards no sum is so small that it could vanish.
        codes = exact.log_softmax(dim=-2).softmax(dim=-1)
        if counted is not None:
            codes = codes * counted[..., None]
        for _ in range(steps - 1):
            codes = _scale(_scale(codes, dim=-2), dim=-1)
        return codes


def _scale(codes: Tensor, dim: int) -> Tensor:
    """Make sums along `dim` one; sums of zero stay zero."""
    tiny = torch.finfo(codes.dtype).tiny
    return codes / codes.sum(dim=dim, keepdim=True).clamp_min(tiny)


def code_loss(scores: Tensor, codes: Tensor, temperature: float) -> Tensor:
    """Mean cross-entropy between codes and softmax(scores / T), both N×K: a number."""
    with torch.autocast(scores.device.type, enabled=False):
        guess = F.log_softmax(scores.float() / temperature, dim=-1)
        return -(codes.detach().float() * guess).sum(dim=-1).mean()
