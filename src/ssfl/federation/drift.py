"""What holds a client's Θ_k near the others' while it trains: FedProx and SCAFFOLD.

FedProx (Li et al. 2018) adds μ/2 ‖Θ_k − Θ‖² to the loss. SCAFFOLD (Karimireddy et al. 2020) adds
c − c_k to every gradient, where c_k estimates the client's mean gradient and c that of all.
"""

import torch
from torch import Tensor

from ssfl.algorithms.base import Models
from ssfl.algorithms.options import LocalOptions
from ssfl.federation.aggregate import Mean
from ssfl.federation.messages import Task
from ssfl.federation.state import ClientState


class Drift:
    """The client's side. It sets up the learner once, in place, so that a step may be captured.

    `begin` comes after the models are this client's, `finish` after its last step; `change` is
    then Δc_k. Control variates cover the trainable entries.
    """

    def __init__(self, options: LocalOptions, models: Models) -> None:
        self.change: Tensor | None = None
        self._models = models
        self._scaffold = options.correction == "scaffold"
        learner = models.global_
        if self._scaffold:
            learner.drift = torch.zeros_like(learner.flat.gradient)
        elif options.correction == "fedprox":
            learner.anchor, learner.pull = models.received, options.proximal

    def begin(self, task: Task, state: ClientState) -> None:
        """Before the first step: drift = c − c_k, each zero until it is known."""
        self.change = None
        drift = self._models.global_.drift
        if not self._scaffold or drift is None:
            return
        drift.zero_()
        if task.control is not None:
            drift.add_(task.control.to(drift.device))
        if state.control is not None:
            drift.sub_(state.control.to(drift.device))

    def finish(self, task: Task, state: ClientState, steps: int) -> Tensor | None:
        """The new c_k = c_k − c + (Θ − Θ_k)/(steps·β) (option II), None without SCAFFOLD.

        Steps are counted as momentum multiplies them (`effective_steps`), or c_k would be up to
        1/(1 − ρ) gradients long; without momentum this is option II to the letter.
        """
        learner = self._models.global_
        if not self._scaffold or learner.drift is None:
            return None
        before = state.control
        if before is None:
            before = torch.zeros_like(learner.drift)
        if steps == 0 or task.rate == 0:
            self.change = torch.zeros_like(learner.drift)
            return before
        self.change = learner.mean_gradient(self._models.received, steps) - learner.drift - before
        return before + self.change


def move_control(control: Tensor | None, mean: Mean, clients: int) -> Tensor | None:
    """The server's side: c ← c + (|S|/K) · mean of Δc_k, with K = `clients` in all."""
    if mean.control is None:
        return control
    step = mean.control * (mean.count / clients)
    return step if control is None else control + step
