"""What turns a round's mean Δ̄ into the next Θ: the paper's ServerOpt.

Δ̄ is taken for a pseudo-gradient (Reddi et al. 2020), without bias correction and with v starting
at τ². Only what clients move by gradients follows these rules; EMA targets and batch-norm
statistics are plainly averaged, and a running variance never becomes negative.
"""

from typing import ClassVar

import torch
from torch import Tensor

from ssfl.errors import CheckpointError
from ssfl.federation.aggregate import Mean
from ssfl.federation.options import ServerOptions
from ssfl.federation.spares import Spares
from ssfl.models.flat import Kind, Layout


class ServerOptimizer:
    """Base of server optimizers, and FedAvg: Θ ← Θ + η Δ̄."""

    keeps: ClassVar[tuple[str, ...]] = ()
    """Names of the vectors it keeps between rounds."""

    def __init__(self, options: ServerOptions, layout: Layout) -> None:
        self.options = options
        self._trainable = layout.trainable
        self._variances = [
            entry.range
            for entry in layout.entries
            if entry.kind is Kind.STATISTIC and entry.name.endswith("running_var")
        ]
        self._spares = Spares()
        begin = {"second": options.tau**2}  # v; what else is kept begins at zero
        self._state = {
            name: torch.full((self._trainable,), begin.get(name, 0.0)) for name in self.keeps
        }

    def step(self, theta: Tensor, mean: Mean) -> Tensor:
        """The next Θ (shared part); `theta` is left as it is."""
        self._state = {name: kept.to(theta.device) for name, kept in self._state.items()}
        after = self._spares.take(theta)
        moving, other = slice(self._trainable), slice(self._trainable, None)
        moved = self.move(mean.delta[moving], mean)
        torch.add(theta[moving], moved, alpha=self.options.lr, out=after[moving])
        torch.add(theta[other], mean.delta[other], out=after[other])
        for variance in self._variances:
            after[variance].clamp_(min=0)  # rounding, or an update to an older Θ
        return after

    def move(self, delta: Tensor, mean: Mean) -> Tensor:
        """The direction of a unit step, from the trainable part of Δ̄."""
        return delta

    def state(self) -> dict[str, Tensor]:
        """What must be kept for a resumed run to go on alike."""
        return {name: kept.clone() for name, kept in self._state.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take up a state that `state` gave."""
        if set(state) != set(self.keeps) or any(
            kept.shape != (self._trainable,) for kept in state.values()
        ):
            raise CheckpointError(
                f"the saved state of the server optimizer does not fit {self.options.optimizer}: "
                "resume with the options the run was started with"
            )
        self._state = {name: kept.clone() for name, kept in state.items()}


class FedAvgM(ServerOptimizer):
    """Hsu et al. 2019: v ← μ v + Δ̄; Θ ← Θ + η v."""

    keeps = ("momentum",)

    def move(self, delta: Tensor, mean: Mean) -> Tensor:
        return self._state["momentum"].mul_(self.options.momentum).add_(delta)


class FedNova(ServerOptimizer):
    """Wang et al. 2020: Θ ← Θ + η τ_eff Σ_k w_k Δ_k/‖a_k‖₁; the sum is the aggregator's."""

    def move(self, delta: Tensor, mean: Mean) -> Tensor:
        return mean.effective_steps * delta


class FedAdam(ServerOptimizer):
    """m ← β₁ m + (1 − β₁) Δ̄; v ← β₂ v + (1 − β₂) Δ̄²; Θ ← Θ + η m / (√v + τ)."""

    keeps = ("first", "second")

    def move(self, delta: Tensor, mean: Mean) -> Tensor:
        beta1 = self.options.momentum
        first = self._state["first"].mul_(beta1).add_(delta, alpha=1 - beta1)
        second = self.second(self._state["second"], delta.square())
        return first / (second.sqrt() + self.options.tau)

    def second(self, second: Tensor, square: Tensor) -> Tensor:
        """The second moment after Δ̄², in place."""
        return second.mul_(self.options.beta2).add_(square, alpha=1 - self.options.beta2)


class FedYogi(FedAdam):
    """FedAdam with v ← v − (1 − β₂) Δ̄² sign(v − Δ̄²)."""

    def second(self, second: Tensor, square: Tensor) -> Tensor:
        change = square * (second - square).sign()
        return second.sub_(change, alpha=1 - self.options.beta2)


class FedAdagrad(ServerOptimizer):
    """v ← v + Δ̄²; Θ ← Θ + η Δ̄ / (√v + τ): β₁ is 0, as in the paper's experiments."""

    keeps = ("second",)

    def move(self, delta: Tensor, mean: Mean) -> Tensor:
        second = self._state["second"].add_(delta.square())
        return delta / (second.sqrt() + self.options.tau)


OPTIMIZERS: dict[str, type[ServerOptimizer]] = {
    "fedavg": ServerOptimizer,
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedadagrad": FedAdagrad,
    "fednova": FedNova,
}


def build_server_optimizer(options: ServerOptions, layout: Layout) -> ServerOptimizer:
    """The server optimizer that `options` name."""
    return OPTIMIZERS[options.optimizer](options, layout)
