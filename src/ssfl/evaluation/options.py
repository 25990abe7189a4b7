"""Knobs of the evaluation beside the training, and of linear classifiers after it."""

from typing import Literal

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


class LinearOptions(Section):
    """How linear classifiers are trained on frozen features."""

    solver: Literal["lbfgs", "sgd"] = "lbfgs"
    """Per-encoder probe: `lbfgs` to the optimum, or `sgd` with the federated settings below."""
    l2: float = Field(1.0, ge=0)
    """L2 penalty, on the weights and not the bias, of features scaled to a mean square of one:
    scikit-learn's 1/C, in the lbfgs probe and, with `standardise`, in the federated classifier."""
    iterations: int = Field(200, ge=1)
    """Most iterations of lbfgs."""
    tolerance: float = Field(3e-4, gt=0)
    """lbfgs stops when no component of the gradient (of features scaled to a mean square of one)
    exceeds this share of the loss."""
    # Chosen by training loss on features of trained and untrained encoders, 64 to 2048 wide, on
    # even and skewed clients. No momentum: what a client gathers of it in a round is drift.
    rounds: int = Field(300, ge=1)
    """FedAvg rounds of the federated classifier, every client in each."""
    local_epochs: int = Field(1, ge=1)
    """Passes of each client over its features per round."""
    batch: int = Field(256, ge=1)
    """Features per local SGD step; a smaller tail is used too."""
    lr: float = Field(1.0, gt=0)
    """Learning rate of local SGD: cosine over rounds, constant inside one. With `standardise`, 1
    is right for every encoder."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Momentum of local SGD, reset each round."""
    weight_decay: float = Field(0.0, ge=0)
    """A further penalty on local SGD, on the weights as it sees them."""
    standardise: bool = True
    """SGD sees features centred, uncorrelated and evenly curved, by statistics pooled from the
    clients' sums and products."""
