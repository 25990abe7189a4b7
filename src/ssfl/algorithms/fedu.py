"""FedU (Zhuang et al. 2021): the divergence-aware predictor update.

Training is Global-SSFL's. What differs is what a client takes of the Θ that arrives: always the
encoder, the predictor only if the global encoder is near its own (divergence below μ). A client
far from the others would be confused by a predictor learned elsewhere.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ssfl.algorithms.base import AlgorithmOptions, Models
from ssfl.algorithms.divergence import divergence, keep_targets
from ssfl.algorithms.global_ssfl import GlobalSSFL
from ssfl.models.flat import Kind


class FedUOptions(AlgorithmOptions):
    """When a client takes the global predictor."""

    name: Literal["fedu"] = "fedu"
    threshold: float = Field(0.4, ge=0)
    """μ: the divergence of encoders from which on a client keeps its own predictor."""


class FedU(GlobalSSFL):
    """Global-SSFL whose clients may keep their own predictor."""

    Options = FedUOptions
    remembers = True

    def __init__(self, options: FedUOptions) -> None:
        super().__init__(options)
        self.threshold = options.threshold

    def arrive(
        self, models: Models, theta: Tensor, mine: Tensor | None, memory: Tensor | None
    ) -> Tensor | None:
        flat, prefix = models.global_.flat, models.global_.method.predictor_prefix
        flat.shared.copy_(theta)
        if mine is None:
            return None
        keep_targets(flat.layout, flat.vector, mine)
        near = divergence(flat.layout, theta, mine) < self.threshold
        for entry in flat.layout.entries:
            if prefix is not None and entry.name.startswith(prefix) and entry.kind != Kind.HOME:
                own, shared = mine[entry.range], theta[entry.range]
                flat.vector[entry.range] = torch.where(near, shared, own)
        return None
