"""Knobs of the evaluation that runs beside the training."""

from pydantic import Field

from ssfl.section import Section


class EvaluationOptions(Section):
    """The online indicator: kNN where labels are known, label-free health everywhere."""

    every: int = Field(10, ge=0)
    """Rounds between evaluations (0: only at the end); the last round is always evaluated."""
    k: int = Field(200, ge=1)
    """Neighbours that vote (fewer where the bank is smaller)."""
    temperature: float = Field(0.1, gt=0)
    """Temperature of the votes' weights exp(similarity/T)."""
    clients: int = Field(100, ge=0)
    """Clients that are evaluated at a time, spread over all of them (0: none)."""
    bank: int = Field(50_000, ge=1)
    """Training images in the bank of the global indicator, spread over all of them."""
    batch: int = Field(512, ge=1)
    """Images in a forward pass of the evaluation (on a CPU never more than its caches hold)."""
    baselines: bool = False
    """Also measure raw pixels and the untrained encoder, to have something to compare with."""
