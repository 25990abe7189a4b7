"""FedAvg of a linear classifier: many clients' local SGD in one batched product per step.

All clients take their steps at once, in coordinates in which a rate of 1 suits every encoder. On a
GPU a round is captured and replayed; on a CPU groups of clients are shared out among its cores.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ssfl import seeding
from ssfl.cores import crew
from ssfl.evaluation.options import LinearOptions
from ssfl.evaluation.replay import Replayed

Classifier = tuple[Tensor, Tensor, float]
"""Weight (classes, d), bias (classes,), and mean cross-entropy on the training features."""

_BLOCK = 2**26  # elements gathered per step: more clients than this allows go in groups
_GROUPS = 4  # of clients on a CPU, for its cores to share out; so many on any, for the same bits


def fedavg(
    client_features: Sequence[Tensor],
    client_labels: Sequence[Tensor],
    classes: int,
    options: LinearOptions,
    seed: int,
    *,
    keep_momentum: bool = False,
) -> Classifier:
    """The classifier after `rounds` of local SGD weighted by |D_k|."""
    x = torch.cat([*client_features])
    space = _space(x, options)
    x = space.enter(x)
    y = torch.cat([*client_labels]).to(x.device, torch.long)
    sizes = [len(features) for features in client_features]
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(x.device)
    plans = _plans(sizes, options, x)
    model = x.new_zeros(classes, x.shape[1])
    momenta = [model.expand(len(plan.weights), -1, -1).clone() for plan in plans]
    shuffled = torch.empty(options.local_epochs * len(x), dtype=torch.long, device=x.device)
    sgd = _LocalSGD(x, y, shuffled, x.new_zeros(()), options.momentum, space.decay)

    def one_group(number: int) -> Tensor:
        plan, momentum = plans[number], momenta[number]
        local = model.expand(len(plan.weights), -1, -1).clone()
        if not keep_momentum:
            momentum.zero_()
        sgd.run(local, momentum, plan)
        mean: Tensor = torch.tensordot(plan.weights, local, dims=1)
        return mean

    with crew(len(plans)) if x.is_cpu else nullcontext(map) as in_turn:

        def one_round() -> None:
            total = torch.zeros_like(model)
            for part in in_turn(one_group, range(len(plans))):
                total += part
            model.copy_(total)

        play = Replayed(one_round, x.device)
        for number in range(options.rounds):
            sgd.lr.fill_(options.lr * 0.5 * (1 + math.cos(math.pi * number / options.rounds)))
            shuffled.copy_(_shuffled(owner, options.local_epochs, seed, number))
            play()
    return *space.leave(model), F.cross_entropy(x @ model.T, y).item()


class _Space(NamedTuple):
    """The coordinates that SGD works in."""

    mean: Tensor
    turn: Tensor | None
    """(d, d): what centred features are multiplied by; None where they are taken as they are."""
    decay: Tensor | None
    """The penalty on each coordinate."""

    def enter(self, features: Tensor) -> Tensor:
        """Features here. One more column carries the bias; three of zeros keep rows of a GPU's
        liking, in fours."""
        x = features if self.turn is None else (features - self.mean) @ self.turn
        x = F.pad(x, (0, 4))
        x[:, len(self.mean)] = 1
        return x

    def leave(self, model: Tensor) -> tuple[Tensor, Tensor]:
        """Weight and bias, on raw features, of a classifier here."""
        width = len(self.mean)
        weight = model[:, :width] if self.turn is None else model[:, :width] @ self.turn.T
        return weight, model[:, width] - weight @ self.mean


def _space(features: Tensor, options: LinearOptions) -> _Space:
    """Raw features, or those in which SGD's steps are of the right length."""
    mean, turn = torch.zeros_like(features[0]), None
    penalty = torch.full_like(mean, options.weight_decay)
    if options.standardise:
        mean, turn, share = _pooled(features, options.l2)
        penalty = penalty + share
    decay = F.pad(penalty, (0, 4)) if options.standardise or options.weight_decay else None
    return _Space(mean, turn, decay)


def _pooled(x: Tensor, l2: float) -> tuple[Tensor, Tensor, Tensor]:
    """From what adding up the clients' sums and products gives: the mean, the coordinates in which
    SGD's steps are of the right length, and the penalty there.

    In the eigenbasis of the covariance, each direction is scaled by the root of Böhning's bound on
    the objective's curvature, ½·λ + l2/n · mean(λ). Then no curvature exceeds one, whatever the
    encoder, and the optimum is that of the probe.
    """
    mean = x.mean(0)
    centred = x - mean
    values, vectors = torch.linalg.eigh((centred.T @ centred).double() / len(x))
    square = float(values.clamp_min(0).mean())
    penalty = l2 / len(x) * square
    bound = 0.5 * values.clamp_min(0) + max(penalty, 1e-6 * square, 1e-30)
    return mean, (vectors / bound.sqrt()).to(x.dtype), (penalty / bound).to(x.dtype)


def _shuffled(owner: Tensor, epochs: int, seed: int, number: int) -> Tensor:
    """Every client's rows in a new order each epoch, clients still one after another.

    Drawn for all clients at once, on the device: sorting random numbers within each client.
    """
    dice = seeding.torch_generator(seed, "linear", number, device=owner.device)
    shape = (epochs, len(owner))
    numbers = torch.rand(shape, generator=dice, dtype=torch.float64, device=owner.device)
    return (numbers + owner).argsort(dim=1).flatten()


class _Plan(NamedTuple):
    """How a round's shuffled rows are dealt out as mini-batches: the same in every round."""

    weights: Tensor
    """(clients,): |D_k| / |D|."""
    places: Tensor
    """(steps, clients, batch): where a row stands in what `_shuffled` gives."""
    shares: Tensor
    """(steps, clients, 1, batch): 1 / batch size, 0 for padding."""
    active: list[int]
    """Clients still at work at each step: the first so many."""


def _plans(sizes: list[int], options: LinearOptions, x: Tensor) -> list[_Plan]:
    """A plan for each group of clients that take their steps together."""
    # Largest first, so that the clients still at work at any step are the first few.
    order = sorted((c for c in range(len(sizes)) if sizes[c] > 0), key=lambda c: -sizes[c])
    group = max(1, _BLOCK // (options.batch * x.shape[1]))
    if x.is_cpu:
        group = min(group, math.ceil(len(order) / _GROUPS))
    return [
        _plan(order[first : first + group], sizes, options, x)
        for first in range(0, len(order), group)
    ]


def _plan(clients: list[int], sizes: list[int], options: LinearOptions, x: Tensor) -> _Plan:
    batch = min(options.batch, sizes[clients[0]])
    per_epoch = [math.ceil(sizes[client] / batch) for client in clients]
    steps = per_epoch[0] * options.local_epochs
    places = torch.zeros(len(clients), steps * batch, dtype=torch.long)
    shares = torch.zeros(len(clients), steps * batch, dtype=x.dtype)
    for row, client in enumerate(clients):
        size, first = sizes[client], sum(sizes[:client])
        tail = size - (per_epoch[row] - 1) * batch
        for epoch in range(options.local_epochs):
            at = epoch * per_epoch[row] * batch
            places[row, at : at + size] = torch.arange(size) + first + epoch * len(x)
            shares[row, at : at + size] = 1 / batch
            shares[row, at + size - tail : at + size] = 1 / tail
    weights = torch.tensor([sizes[c] / len(x) for c in clients], dtype=x.dtype)
    shape = (len(clients), steps, batch)
    return _Plan(
        weights.to(x.device),
        places.view(shape).transpose(0, 1).contiguous().to(x.device),
        shares.view(shape).transpose(0, 1).unsqueeze(2).contiguous().to(x.device),
        [sum(n * options.local_epochs > step for n in per_epoch) for step in range(steps)],
    )


class _LocalSGD(NamedTuple):
    """What the local steps of all clients share; `shuffled` and `lr` change from round to round."""

    x: Tensor
    y: Tensor
    shuffled: Tensor
    lr: Tensor
    momentum: float
    decay: Tensor | None

    def run(self, local: Tensor, velocities: Tensor, plan: _Plan) -> None:
        """Move every client's model in `local` through its steps, in place: seven kernels a
        step."""
        rows = self.shuffled[plan.places]
        # An error of logits is an image's share × (chances − one for its class): here the latter.
        wanted = self.x.new_zeros(*plan.shares.shape[:2], local.shape[1], plan.shares.shape[3])
        wanted.scatter_(2, self.y[rows].unsqueeze(2), -plan.shares)
        gathered = self.x.new_empty(rows[0].numel(), self.x.shape[1])
        for at, target, share, active in zip(rows, wanted, plan.shares, plan.active, strict=True):
            at, target, share = at[:active], target[:active], share[:active]
            model, velocity = local[:active], velocities[:active]
            features = gathered[: at.numel()]
            torch.index_select(self.x, 0, at.flatten(), out=features)
            features = features.view(*at.shape, -1)
            # Classes before images: softmax over a short last dimension is slow on a CPU.
            chance = torch.bmm(model, features.mT).softmax(1)
            error = torch.addcmul(target, chance, share)
            velocity.baddbmm_(error, features, beta=self.momentum)
            if self.decay is not None:
                velocity.addcmul_(self.decay, model)
            model.addcmul_(velocity, self.lr, value=-1)
