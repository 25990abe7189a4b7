"""Many updates into one: Δ̄ = Σ_k w_k Δ_k with w_k = |D_k| / Σ|D_j| over those who took part.

Updates are folded one by one, so memory does not grow with clients, and in the order they were
asked for (`in_order`), so the sum has the same bits whatever order they arrived in. FedNova and
L-DAWA only change what of an update is folded, so all of them may be summed in parts: a site may
send the mean of its clients (`join`) in place of their updates.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssfl.algorithms.learner import effective_steps
from ssfl.errors import FederationError
from ssfl.federation.messages import Joint, Reply
from ssfl.federation.options import ServerOptions
from ssfl.federation.spares import Spares
from ssfl.models.flat import Layout


@dataclass(frozen=True)
class Update:
    """One client's part in a round: Δ_k over the shared entries, and what it weighs."""

    client: int
    delta: Tensor
    weight: float
    steps: int = 0
    control: Tensor | None = None
    """SCAFFOLD's Δc_k."""


@dataclass(frozen=True)
class Mean:
    """What a round's updates come to."""

    delta: Tensor
    weight: float
    count: int
    control: Tensor | None = None
    """SCAFFOLD's Δc_k, with the same weights; late updates weigh, but have none."""
    effective_steps: float = 1.0
    """FedNova's τ_eff, by which its normalised mean is to be multiplied; 1 for other means."""


@dataclass(frozen=True)
class Partial:
    """A sum over some of a round's clients, for others to go on from (`Aggregator.merge`)."""

    delta: Tensor
    weight: float
    expected: float
    count: int
    control: Tensor | None
    effective_steps: float


class Aggregator:
    """The mean weighted by |D_k|. `expected` is the weight of all who were asked; `spares` lends
    memory from one round to the next."""

    def __init__(self, expected: float, spares: Spares | None = None) -> None:
        if expected <= 0:
            raise FederationError("the clients of a round hold no images between them")
        self.expected = expected
        self._spares = spares or Spares()
        self.weight = 0.0
        self.count = 0
        self._delta: Tensor | None = None
        self._control: Tensor | None = None
        self._steps = 0.0

    def add(self, update: Update) -> None:
        """Fold one update in."""
        share = update.weight / self.expected
        self._fold(self.prepare(update), update.control, share)
        self._steps += share * self.counted(update)
        self.weight += update.weight
        self.count += 1

    def merge(self, part: Partial) -> None:
        """Fold in the sum of other clients, made elsewhere by an aggregator of the same kind."""
        share = part.expected / self.expected
        self._fold(part.delta, part.control, share)
        self._steps += share * part.effective_steps
        self.weight += part.weight
        self.count += part.count

    def partial(self) -> Partial:
        """The sum so far."""
        if self._delta is None:
            raise FederationError("no client's update arrived: there is nothing to average")
        return Partial(
            self._delta, self.weight, self.expected, self.count, self._control, self._steps
        )

    def finish(self) -> Mean:
        """The mean of what was folded: weights are normalised over those who took part."""
        part = self.partial()
        if part.weight <= 0:
            raise FederationError("the updates of a round weigh nothing: they cannot be averaged")
        rescale = part.expected / part.weight  # exactly 1 when all who were asked took part
        control = None if part.control is None else part.control * rescale
        delta = part.delta if rescale == 1 else part.delta * rescale
        return Mean(delta, part.weight, part.count, control, part.effective_steps * rescale)

    def prepare(self, update: Update) -> Tensor:
        """What of an update is averaged."""
        return update.delta

    def counted(self, update: Update) -> float:
        """What an update counts for in τ_eff."""
        return 1.0

    def _fold(self, delta: Tensor, control: Tensor | None, share: float) -> None:
        if self._delta is None:
            self._delta = torch.mul(delta, share, out=self._spares.take(delta))
        else:
            self._delta.add_(delta, alpha=share)
        if control is not None:
            if self._control is None:
                self._control = torch.zeros_like(control)
            self._control.add_(control, alpha=share)


class NormalisedAggregator(Aggregator):
    """FedNova (Wang et al. 2020): the mean of Δ_k / ‖a_k‖₁, so that no client counts for more
    because it made more steps. `momentum` is that of the clients' SGD, started from zero.
    Entries that no gradient moves are plainly averaged.
    """

    def __init__(
        self, expected: float, layout: Layout, momentum: float, spares: Spares | None = None
    ) -> None:
        super().__init__(expected, spares)
        self._trainable = layout.trainable
        self._momentum = momentum

    def prepare(self, update: Update) -> Tensor:
        delta = self._spares.take(update.delta).copy_(update.delta)
        delta[: self._trainable] /= self.counted(update)
        return delta

    def counted(self, update: Update) -> float:
        return effective_steps(max(update.steps, 1), self._momentum)


class LayerwiseAggregator(Aggregator):
    """L-DAWA (Rehman et al. 2023): Θ⁺_l = Σ_k w_k cos(Θ_kl, Θ_l) Θ_kl for every layer l.

    A layer that turned away from the global one counts for less; the sum is not normalised again,
    as published. Layers that are all zero have no direction and, like entries that no gradient
    moves, are plainly averaged.
    """

    def __init__(
        self, expected: float, layout: Layout, theta: Tensor, spares: Spares | None = None
    ) -> None:
        super().__init__(expected, spares)
        self._theta = theta
        self._layers = [e.range for e in layout.entries if e.range.stop <= layout.trainable]

    def prepare(self, update: Update) -> Tensor:
        delta = update.delta.clone()
        for layer in self._layers:
            before = self._theta[layer]
            after = before + delta[layer]
            norms = before.norm() * after.norm()
            # Not torch.dot: its last digit is another where Θ lies otherwise in memory, as it does
            # in the first round of a resumed run.
            cosine = (before * after).sum() / norms
            agreement = torch.where(norms > 0, cosine.clamp(max=1), 1.0)
            delta[layer] = agreement * after - before
        return delta


def build_aggregator(
    options: ServerOptions,
    layout: Layout,
    theta: Tensor,
    expected_weight: float,
    *,
    momentum: float = 0.0,
    spares: Spares | None = None,
) -> Aggregator:
    """The aggregator of one round from Θ = `theta`; `momentum` is that of the clients' SGD."""
    if options.aggregation == "l-dawa":
        return LayerwiseAggregator(expected_weight, layout, theta, spares)
    if options.optimizer == "fednova":
        return NormalisedAggregator(expected_weight, layout, momentum, spares)
    return Aggregator(expected_weight, spares)


def fold(aggregator: Aggregator, reply: Reply, weight: float) -> None:
    """Fold what a reply brings, be it one client's update or the mean of several."""
    if reply.delta is None:  # an algorithm that keeps everything at home
        return
    if reply.joint is None:
        aggregator.add(Update(reply.client, reply.delta, weight, reply.steps, reply.control))
        return
    count = len(reply.joint.clients)
    steps = reply.joint.effective_steps
    aggregator.merge(Partial(reply.delta, weight, weight, count, reply.control, steps))


def join(replies: Sequence[Reply], aggregator: Aggregator) -> Reply:
    """One reply in place of those whose updates `aggregator` has folded."""
    mean = aggregator.finish() if aggregator.count else None
    samples = sum(reply.samples for reply in replies)
    metrics: dict[str, float] = {}
    for reply in replies:
        for name, value in reply.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value * reply.samples / samples
    return replace(
        replies[0],
        delta=mean.delta if mean else None,
        samples=samples,
        steps=sum(reply.steps for reply in replies),
        metrics=metrics,
        control=mean.control if mean else None,
        joint=Joint(
            tuple(reply.client for reply in replies), mean.effective_steps if mean else 1.0
        ),
    )


def in_order(replies: Iterable[Reply], order: Sequence[int]) -> Iterator[Reply]:
    """Replies in the order their clients were asked, holding back only those that came early.

    A client that never replies is passed over at the end; a second reply of the same client, and
    one of a client that was not asked, are dropped. A reply for several has the place of the first.
    """
    early: dict[int, Reply | None] = {}
    awaited = list(reversed(order))
    open_ = set(order)
    for reply in replies:
        if not open_.issuperset(reply.clients):
            continue
        open_.difference_update(reply.clients)
        early |= dict.fromkeys(reply.clients)
        early[reply.client] = reply
        while awaited and awaited[-1] in early:
            if (its_turn := early.pop(awaited.pop())) is not None:
                yield its_turn
    for client in reversed(awaited):
        if (its_turn := early.pop(client, None)) is not None:
            yield its_turn
