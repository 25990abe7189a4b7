"""FedEMA (Zhuang et al. 2022): divergence-aware mixing of the client's model with the global one.

Training is Global-SSFL's. When Θ arrives the client goes on from μ_k·mine + (1 − μ_k)·Θ with
μ_k = min(λ_k · divergence, 1): the further it has gone, the more it keeps. λ_k scales itself so
that μ_k = τ the first time the two meet apart, and is remembered from then on.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ssfl.algorithms.base import AlgorithmOptions, Models
from ssfl.algorithms.divergence import divergence, keep_targets
from ssfl.algorithms.global_ssfl import GlobalSSFL

APART = 1e-5
"""Divergence, as a share of Θ's own length, from which on two models differ by more than rounding:
a client that alone took part in a round meets its own model again."""


class FedEMAOptions(AlgorithmOptions):
    """How much of its own model a client keeps."""

    name: Literal["fedema"] = "fedema"
    tau: float = Field(0.7, ge=0, le=1)
    """τ: share of its own model that a client keeps when it meets Θ for the second time."""


class FedEMA(GlobalSSFL):
    """Global-SSFL whose clients start a round between their own model and Θ."""

    Options = FedEMAOptions
    remembers = True

    def __init__(self, options: FedEMAOptions) -> None:
        super().__init__(options)
        self.tau = options.tau

    def arrive(
        self, models: Models, theta: Tensor, mine: Tensor | None, memory: Tensor | None
    ) -> Tensor | None:
        flat = models.global_.flat
        flat.shared.copy_(theta)
        if mine is None:
            return None
        distance = divergence(flat.layout, theta, mine)
        apart = distance > APART * divergence(flat.layout, theta, torch.zeros_like(theta))
        scale = torch.where(apart, self.tau / distance, 0.0)  # 0: λ_k waits for another meeting
        if memory is not None:
            scale = torch.where(memory > 0, memory, scale)
        keep = (scale * distance).clamp(max=1)
        flat.shared.copy_(torch.lerp(theta, mine, keep))
        keep_targets(flat.layout, flat.vector, mine)
        return scale
