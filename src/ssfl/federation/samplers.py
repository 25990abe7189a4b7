"""Who takes part in a round.

A draw is a function of (seed, round) and of who there is, and of nothing remembered, so a resumed
run draws what the first would have. The largest client comes first: that is the order in which
tasks are handed out, which keeps workers busy to the end of a round, and in which updates are
folded.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ssfl.federation.options import ServerOptions
from ssfl.seeding import numpy_generator


class Sampler(Protocol):
    """What the server knows of a sampler."""

    def draw(
        self, round: int, count: int, clients: Sequence[int], sizes: Sequence[int], seed: int
    ) -> list[int]:
        """`count` of `clients` (0, or more than there are: all), largest first, ties by id.

        `sizes` are the clients' |D_k|, in the order of `clients`.
        """
        ...


class _Sampler(ABC):
    """Ranks clients for a round and takes the first `count`; subclasses say how to rank."""

    def draw(
        self, round: int, count: int, clients: Sequence[int], sizes: Sequence[int], seed: int
    ) -> list[int]:
        size_of = dict(zip(clients, sizes, strict=True))
        known = sorted(size_of)
        chosen = known
        if 0 < count < len(known):
            ranked = self.rank(round, count, [size_of[client] for client in known], seed)
            chosen = [known[place] for place in ranked[:count]]
        return sorted(chosen, key=lambda client: (-size_of[client], client))

    @abstractmethod
    def rank(self, round: int, count: int, sizes: list[int], seed: int) -> list[int]: ...


class UniformSampler(_Sampler):
    """Every set of `count` clients is as likely as any other."""

    def rank(self, round: int, count: int, sizes: list[int], seed: int) -> list[int]:
        return list(numpy_generator(seed, "sample", round).permutation(len(sizes)))


class WeightedSampler(_Sampler):
    """One after another, each with a chance proportional to its size among those left.

    That is the order of log(u_k)/|D_k| for uniform u_k (Efraimidis & Spirakis 2006); clients
    without images come last.
    """

    def rank(self, round: int, count: int, sizes: list[int], seed: int) -> list[int]:
        uniform = 1 - numpy_generator(seed, "sample", round).random(len(sizes))  # in (0, 1]
        with np.errstate(divide="ignore", invalid="ignore"):
            keys = np.log(uniform) / np.asarray(sizes, dtype=np.float64)
        keys[np.asarray(sizes) == 0] = -np.inf
        return list(np.argsort(-keys, kind="stable"))


class RoundRobinSampler(_Sampler):
    """In turn, by id: `count` a round, beginning anew at the end of the list."""

    def rank(self, round: int, count: int, sizes: list[int], seed: int) -> list[int]:
        return [(round * count + place) % len(sizes) for place in range(count)]


SAMPLERS: dict[str, Sampler] = {
    "uniform": UniformSampler(),
    "weighted": WeightedSampler(),
    "round-robin": RoundRobinSampler(),
}


def build_sampler(options: ServerOptions) -> Sampler:
    """The sampler that `options` name."""
    return SAMPLERS[options.sampler]
