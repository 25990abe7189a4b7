"""Linear evaluation: a linear classifier on a frozen encoder's features, in the paper's three ways.

`linear_probe` (one encoder, the whole training set), `federated_linear` (one encoder, a classifier
trained by FedAvg over clients: Global-SSFL's protocol) and `naive_federated_linear` (FedAvg over
clients that each use their own encoder: section 5.5 shows that it misleads, and it is kept to show
it). Test labels are read only after the classifier is made.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from ssfl import seeding
from ssfl.cores import crew
from ssfl.errors import DataError
from ssfl.evaluation.logistic import fit_logistics
from ssfl.evaluation.replay import Replayed
from ssfl.section import Section


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


@dataclass(frozen=True)
class LinearResult:
    """A linear classifier on raw features, and what it scores."""

    accuracy: float
    """Share of test images right; with `per_client`, the plain mean of those."""
    weight: Tensor
    """(classes, d)."""
    bias: Tensor
    """(classes,)."""
    loss: float
    """Mean cross-entropy on the training features."""
    per_client: tuple[float, ...] = ()
    """Each client's own accuracy, where each was tested on features of its own."""

    def predict(self, features: Tensor) -> Tensor:
        """The class of each row of `features`."""
        return _predicted(self.weight, self.bias, features)


_Classifier = tuple[Tensor, Tensor, float]
"""Weight, bias and loss of a `LinearResult`."""


class ClientFeatures(NamedTuple):
    """One client's images as its own encoder sees them."""

    train_features: Tensor
    train_labels: Tensor
    test_features: Tensor
    test_labels: Tensor


def linear_probe(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    classes: int,
    options: LinearOptions,
    seed: int = 0,
) -> LinearResult:
    """Logistic regression on all training features. Only the `sgd` solver draws on `seed`."""
    train, test = [train_features], [test_features]
    return linear_probes(train, train_labels, test, test_labels, classes, options, seed)[0]


def linear_probes(
    train_features: Sequence[Tensor],
    train_labels: Tensor,
    test_features: Sequence[Tensor],
    test_labels: Tensor,
    classes: int,
    options: LinearOptions,
    seed: int = 0,
) -> list[LinearResult]:
    """A classifier for each encoder that saw the same images; on a GPU, all in one go."""
    for features in train_features:
        _check([features], [train_labels], classes)
    if options.solver == "lbfgs":
        classifiers = _optima(train_features, train_labels, classes, options)
    else:
        classifiers = _by_sgd(train_features, train_labels, classes, options, seed)
    return [
        LinearResult(_accuracy(weight, bias, features, test_labels), weight, bias, loss)
        for (weight, bias, loss), features in zip(classifiers, test_features, strict=True)
    ]


def _optima(
    features: Sequence[Tensor], labels: Tensor, classes: int, options: LinearOptions
) -> list[_Classifier]:
    found = fit_logistics(
        features,
        labels,
        classes,
        l2=options.l2,
        iterations=options.iterations,
        tolerance=options.tolerance,
    )
    return list(zip(*found, strict=True))


def _by_sgd(
    features: Sequence[Tensor], labels: Tensor, classes: int, options: LinearOptions, seed: int
) -> list[_Classifier]:
    """Centralised SGD is FedAvg with one client, its momentum kept from epoch to epoch."""
    epochs = {"rounds": options.rounds * options.local_epochs, "local_epochs": 1}
    whole = options.model_copy(update=epochs)
    return [_fedavg([x], [labels], classes, whole, seed, keep_momentum=True) for x in features]


def federated_linear(
    client_features: Sequence[Tensor],
    client_labels: Sequence[Tensor],
    test_features: Tensor,
    test_labels: Tensor,
    classes: int,
    options: LinearOptions,
    seed: int = 0,
) -> LinearResult:
    """One encoder's classifier, trained by FedAvg over the clients, on the global test set."""
    weight, bias, loss = _fedavg(client_features, client_labels, classes, options, seed)
    return LinearResult(_accuracy(weight, bias, test_features, test_labels), weight, bias, loss)


def naive_federated_linear(
    clients: Sequence[ClientFeatures], classes: int, options: LinearOptions, seed: int = 0
) -> LinearResult:
    """One classifier by FedAvg over features of different encoders, tested client by client."""
    weight, bias, loss = _fedavg(
        [client.train_features for client in clients],
        [client.train_labels for client in clients],
        classes,
        options,
        seed,
    )
    scores = tuple(_accuracy(weight, bias, c.test_features, c.test_labels) for c in clients)
    return LinearResult(sum(scores) / len(scores), weight, bias, loss, scores)


def _accuracy(weight: Tensor, bias: Tensor, features: Tensor, labels: Tensor) -> float:
    if len(features) == 0:
        raise DataError("a linear classifier needs at least one test image to be scored on")
    right = _predicted(weight, bias, features.to(weight)) == labels.to(weight.device)
    return float(right.double().mean())


def _predicted(weight: Tensor, bias: Tensor, features: Tensor) -> Tensor:
    return (features @ weight.T + bias).argmax(1)


def _check(features: Sequence[Tensor], labels: Sequence[Tensor], classes: int) -> None:
    for x, y in zip(features, labels, strict=True):
        if len(x) != len(y):
            raise DataError(f"{len(x)} feature rows came with {len(y)} labels; they must match")
        if len(y) and not (int(y.min()) >= 0 and int(y.max()) < classes):
            raise DataError(
                f"labels run from {int(y.min())} to {int(y.max())}, but a linear classifier of "
                f"{classes} classes needs 0 to {classes - 1}"
            )
    if sum(map(len, features)) == 0:
        raise DataError("a linear classifier needs at least one labelled training image")


# --- FedAvg of a linear classifier, many clients' local SGD in one batched product per step ---

_BLOCK = 2**26  # elements gathered per step: more clients than this allows go in groups
_GROUPS = 4  # of clients on a CPU, for its cores to share out; so many on any, for the same bits


def _fedavg(
    client_features: Sequence[Tensor],
    client_labels: Sequence[Tensor],
    classes: int,
    options: LinearOptions,
    seed: int,
    *,
    keep_momentum: bool = False,
) -> _Classifier:
    """The classifier after `rounds` of local SGD weighted by |D_k|."""
    _check(client_features, client_labels, classes)
    x = torch.cat([*client_features])
    y = torch.cat([*client_labels]).to(x.device, torch.long)
    width, mean, turn = x.shape[1], torch.zeros_like(x[0]), None
    penalty = torch.full_like(mean, options.weight_decay)
    if options.standardise:
        mean, turn, share = _pooled(x, options.l2)
        x, penalty = (x - mean) @ turn, penalty + share
    # One more column carries the bias; three of zeros keep rows of a GPU's liking, in fours.
    x = F.pad(x, (0, 4))
    x[:, width] = 1
    decay = F.pad(penalty, (0, 4)) if options.standardise or options.weight_decay else None

    sizes = [len(features) for features in client_features]
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(x.device)
    # Largest first, so that the clients still at work at any step are the first few.
    order = sorted((c for c in range(len(sizes)) if sizes[c] > 0), key=lambda c: -sizes[c])
    group = max(1, _BLOCK // (options.batch * x.shape[1]))
    if x.is_cpu:
        group = min(group, math.ceil(len(order) / _GROUPS))
    plans = [
        _plan(order[first : first + group], sizes, options, x)
        for first in range(0, len(order), group)
    ]
    model = x.new_zeros(classes, x.shape[1])
    momenta = [model.expand(len(plan.weights), -1, -1).clone() for plan in plans]
    shuffled = torch.empty(options.local_epochs * len(x), dtype=torch.long, device=x.device)
    lr = x.new_zeros(())

    def one_group(number: int) -> Tensor:
        plan, momentum = plans[number], momenta[number]
        local = model.expand(len(plan.weights), -1, -1).clone()
        if not keep_momentum:
            momentum.zero_()
        _local_sgd(local, momentum, x, y, plan, shuffled, lr, options.momentum, decay)
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
            lr.fill_(options.lr * 0.5 * (1 + math.cos(math.pi * number / options.rounds)))
            shuffled.copy_(_shuffled(owner, options.local_epochs, seed, number))
            play()
    loss = F.cross_entropy(x @ model.T, y).item()
    weight = model[:, :width] if turn is None else model[:, :width] @ turn.T
    return weight, model[:, width] - weight @ mean, loss


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


def _local_sgd(
    local: Tensor,
    momentum: Tensor,
    x: Tensor,
    y: Tensor,
    plan: _Plan,
    shuffled: Tensor,
    lr: Tensor,
    beta: float,
    decay: Tensor | None,
) -> None:
    """Move every client's model in `local` through its steps, in place: seven kernels a step."""
    rows = shuffled[plan.places]
    # The error of an image's logits is its share × (chances − one for its class): the latter here.
    wanted = x.new_zeros(*plan.shares.shape[:2], local.shape[1], plan.shares.shape[3])
    wanted.scatter_(2, y[rows].unsqueeze(2), -plan.shares)
    gathered = x.new_empty(rows[0].numel(), x.shape[1])
    for at, target, share, active in zip(rows, wanted, plan.shares, plan.active, strict=True):
        at, target, share = at[:active], target[:active], share[:active]
        model, velocity = local[:active], momentum[:active]
        features = gathered[: at.numel()]
        torch.index_select(x, 0, at.flatten(), out=features)
        features = features.view(*at.shape, -1)
        # Classes before images: softmax over a short last dimension is slow on a CPU.
        chance = torch.bmm(model, features.mT).softmax(1)
        error = torch.addcmul(target, chance, share)
        velocity.baddbmm_(error, features, beta=beta)
        if decay is not None:
            velocity.addcmul_(decay, model)
        model.addcmul_(velocity, lr, value=-1)
