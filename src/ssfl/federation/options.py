"""Knobs of the federation: what a client does in a round, and what the server does with it."""

from typing import Literal

from pydantic import Field

from ssfl.section import Section


class LocalOptions(Section):
    """Local training: what a client does with its images in one round."""

    epochs: int = Field(1, ge=1)
    """Passes over the client's images in a round."""
    batch: int = Field(256, ge=2)
    """Images in a step."""
    micro_batch: int = Field(0, ge=0)
    """Split each step into micro-batches of about this many images (0: don't); batch norm then
    sees only these."""
    lr: float = Field(0.1, gt=0)
    """Learning rate of round 0."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """How the rate moves over rounds; it is constant inside a round."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """SGD momentum."""
    weight_decay: float = Field(5e-4, ge=0)
    """SGD weight decay, on all parameters."""
    keep_momentum: bool = False
    """Keep each client's momentum from round to round instead of starting from zero."""
    predictor_rate: Literal["scheduled", "constant"] = "scheduled"
    """'constant' leaves the predictor's rate at `lr` while the rest follows the schedule."""
    correction: Literal["none", "fedprox", "scaffold"] = "none"
    """What holds a client's Θ_k near the others': nothing, FedProx, or SCAFFOLD."""
    proximal: float = Field(0.01, ge=0)
    """FedProx: weight μ of μ/2 ‖Θ_k − Θ‖²."""
    batch_norm: Literal["shared", "fedbn"] = "shared"
    """'fedbn' keeps batch-norm scale, shift and statistics with the client."""


class ServerOptions(Section):
    """The server: who takes part, how updates are combined, and how patient it is."""

    rounds: int = Field(100, ge=1)
    """Communication rounds T."""
    clients_per_round: int = Field(0, ge=0)
    """Clients that take part in a round (0: all)."""
    sampler: Literal["uniform", "weighted", "round-robin"] = "uniform"
    """How the clients of a round are drawn: uniformly, by their size, or in turn."""
    optimizer: Literal["fedavg", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "fednova"] = (
        "fedavg"
    )
    """What turns the mean Δ into the next Θ."""
    lr: float = Field(1.0, gt=0)
    """Server learning rate (1 is plain FedAvg)."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Server momentum (FedAvgM) and β₁ (FedAdam, FedYogi)."""
    beta2: float = Field(0.99, ge=0, lt=1)
    """β₂ of FedAdam and FedYogi."""
    tau: float = Field(1e-3, gt=0)
    """Adaptivity τ of FedAdam, FedYogi and FedAdagrad."""
    aggregation: Literal["mean", "l-dawa"] = "mean"
    """How updates are weighed: by |D_k|, or L-DAWA's layer-wise agreement with Θ."""
    min_replies: float = Field(0.5, gt=0, le=1)
    """Share of the asked clients that must reply for a round to count."""
    retries: int = Field(2, ge=0)
    """Times a round with too few replies is tried again before the run stops."""
    deadline: float = Field(0.0, ge=0)
    """Seconds to wait for the replies of a round (0: as long as it takes)."""
    oversample: float = Field(0.0, ge=0)
    """Ask this share more clients than needed, to stand in for those that fail or are too slow."""
    late: Literal["drop", "discount"] = "drop"
    """What a reply after the deadline is worth: nothing, or its update at a discount."""
    staleness: float = Field(0.5, ge=0)
    """Exponent a of the discount (1 + rounds late)^(−a)."""
    max_norm_ratio: float = Field(30.0, gt=1)
    """Refuse an update whose norm is this many times the median of the last round's (round 0: of
    Θ's own norm)."""
