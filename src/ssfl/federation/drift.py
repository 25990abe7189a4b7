"""What holds a client's Θ_k near the others' while it trains: FedProx and SCAFFOLD.

FedProx (Li et al. 2018) adds μ/2 ‖Θ_k − Θ‖² to the loss. SCAFFOLD (Karimireddy et al. 2020) adds
c − c_k to every gradient, where c_k estimates the client's mean gradient and c that of all.

c is the mean of the c_k, weighted by |D_k| as updates are: by a plain one (the published rule, the
same for clients of one size) Θ would rest where the plain mean of the clients' losses is smallest.
It stays the mean: a client whose last round the server did not fold (it was lost, late, refused, or
not needed) goes on from the c_k before it. Once batch-norm statistics are frozen, steps are made on
other numbers (models/frozen.py): c and the c_k begin anew at zero.
"""

from dataclasses import replace

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
    then Δc_k. Control variates cover the trainable entries, but for those at home (a mask): what
    every client has of its own (FedBN's norms) does not drift from the others'.
    """

    def __init__(self, options: LocalOptions, models: Models, home: Tensor | None = None) -> None:
        self.change: Tensor | None = None
        self._models, self._home = models, home
        self._own: Tensor | None = None
        self._start = torch.empty(0)
        learner = models.global_
        if options.correction == "scaffold":
            learner.drift = torch.zeros_like(learner.flat.gradient)
        elif options.correction == "fedprox":
            learner.hold(models.received, options.proximal)

    def begin(self, client: int, task: Task, state: ClientState) -> None:
        """Before the first step: drift = c − c_k, each zero until it is known."""
        self.change = None
        drift = self._models.global_.drift
        if drift is None:
            return
        self._start = self._models.global_.flat.trainable.clone()  # FedU and FedEMA: not Θ itself
        self._own = known_control(state, task.folded.get(client, -1))
        drift.zero_()
        if task.control is not None:
            drift.add_(task.control.to(drift.device))
        if self._own is not None:
            drift.sub_(self._own)

    def finish(self, task: Task, kept: ClientState, steps: int) -> ClientState:
        """What the client keeps, with SCAFFOLD's c_k⁺ = c_k − c + (Θ − Θ_k)/(steps·β) (option II),
        where Θ is the point its steps began at.

        Steps are counted as momentum multiplies them (`effective_steps`), or c_k would be up to
        1/(1 − ρ) gradients long; without momentum this is option II to the letter.
        """
        learner = self._models.global_
        if learner.drift is None:
            return kept
        before = torch.zeros_like(learner.drift) if self._own is None else self._own
        if steps == 0 or task.rate == 0:
            self.change = torch.zeros_like(learner.drift)
        else:
            mean = learner.mean_gradient(self._start, steps)
            if self._home is not None:
                mean[self._home] = 0
            self.change = mean - learner.drift - before
        return replace(
            kept,
            control=before + self.change,
            control_before=before,
            control_round=torch.full((), task.round, device=before.device),
        )


def known_control(state: ClientState, folded: int) -> Tensor | None:
    """The c_k that is part of c: with the change of the client's last round only if the server has
    folded that round. Nothing where it has folded none (`folded` below 0): before the client's
    first, and after c began anew."""
    after, before, round_ = state.control, state.control_before, state.control_round
    if after is None or before is None or round_ is None or folded < 0:
        return None
    return torch.where(round_ == folded, after, before)


def move_control(control: Tensor, mean: Mean, images: int) -> Tensor:
    """The server's side: c ← c + Σ_k |D_k|/|D| Δc_k, with |D| = `images` of all clients."""
    if mean.control is None:
        return control
    return control + mean.control * (mean.weight / images)
