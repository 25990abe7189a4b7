"""Knobs of the server: who takes part, how updates are combined, and how patient it is."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from ssfl.section import Section

ADAPTIVE = ("fedadam", "fedyogi", "fedadagrad")
"""Server optimizers that divide Δ̄ by its own size: η is then how far a weight moves in a round."""
READ_BY = {
    "momentum": ("fedavgm", "fedadam", "fedyogi"),
    "beta2": ("fedadam", "fedyogi"),
    "tau": ADAPTIVE,
}
"""Which server optimizers have a use for an option."""


class ServerOptions(Section):
    """The server: who takes part, how updates are combined, and how patient it is."""

    rounds: int = Field(100, ge=1)
    """Communication rounds T."""
    start: Path | None = None
    """What Θ begins as: a run directory, an encoder that `ssfl export` wrote, or a file of a
    network's tensors (not set: random weights, from the seed)."""
    clients_per_round: int = Field(0, ge=0)
    """Clients that take part in a round (0: all)."""
    sampler: Literal["uniform", "weighted", "round-robin"] = "uniform"
    """How the clients of a round are drawn: uniformly, by their size, or in turn."""
    optimizer: Literal["fedavg", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "fednova"] = (
        "fedavg"
    )
    """What turns the mean Δ into the next Θ."""
    lr: float = Field(1.0, gt=0)
    """Server learning rate (1 is plain FedAvg). If not set, fedadam, fedyogi and fedadagrad take
    0.01."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Server momentum (FedAvgM) and β₁ (FedAdam, FedYogi)."""
    beta2: float = Field(0.99, ge=0, lt=1)
    """β₂ of FedAdam and FedYogi."""
    tau: float = Field(1e-3, gt=0)
    """Adaptivity τ of FedAdam, FedYogi and FedAdagrad."""
    aggregation: Literal["mean", "l-dawa"] = "mean"
    """How updates are weighed: by |D_k|, or L-DAWA's layer-wise agreement with Θ."""
    updates: Literal["single", "summed"] = "single"
    """What leaves a site with several clients: each one's update, or their weighted mean alone.
    (Only Flower has sites; elsewhere updates are always single.)"""
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
    """Refuse an update whose norm, over the root of its steps, is this many times the median of the
    last round's (round 0: a norm this many times Θ's own)."""

    @model_validator(mode="before")
    @classmethod
    def _adaptive_rules_take_short_steps(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("optimizer") in ADAPTIVE:
            return {"lr": 0.01, **given}
        return given

    @model_validator(mode="after")
    def _one_rule_says_what_an_update_counts_for(self) -> "ServerOptions":
        if self.aggregation == "l-dawa" and self.optimizer == "fednova":
            raise ValueError(
                "aggregation 'l-dawa' and optimizer 'fednova' both say what an update counts for: "
                "choose one of them"
            )
        return self

    @model_validator(mode="after")
    def _sums_need_no_single_updates(self) -> "ServerOptions":
        if self.updates == "summed" and (self.oversample > 0 or self.late == "discount"):
            raise ValueError(
                "updates 'summed' leaves the server no single update to hold back or discount: "
                "set server.oversample = 0 and server.late = 'drop', or server.updates = 'single'"
            )
        return self

    @model_validator(mode="after")
    def _nothing_is_set_in_vain(self) -> "ServerOptions":
        """FedAvg with a momentum would pass for FedAvgM."""
        for name, rules in READ_BY.items():
            if self.optimizer not in rules and self._is_set(name):
                raise ValueError(
                    f"optimizer {self.optimizer!r} has no {name}: set server.optimizer to "
                    f"{' or '.join(map(repr, rules))}, or leave server.{name} out"
                )
        if self.late == "drop" and self._is_set("staleness"):
            raise ValueError(
                "late updates are dropped: set server.late = 'discount', or leave "
                "server.staleness out"
            )
        if self.oversample > 0 and self.clients_per_round == 0:
            raise ValueError(
                "all clients are asked, so none is left to stand in for others: set "
                "server.clients_per_round, or server.oversample = 0"
            )
        return self

    def _is_set(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).model_fields[name].default)
