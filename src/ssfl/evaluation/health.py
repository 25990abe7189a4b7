"""Is an encoder any good, without a single label?

Feature spread against 1/√d (SimSiam's sign of collapse), effective rank (RankMe, Garrido et al.
2023), alignment and uniformity (Wang and Isola 2020). Cheap enough to read every round: large
sets are thinned to evenly spaced rows, so the figures are the same every time.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ssfl.errors import DataError
from ssfl.evaluation.spread import thin

ROWS = 4096
"""Rows looked at, at most: several times the width of the usual backbones, as RankMe needs."""
PAIR_ROWS = 2048
"""Rows whose pairs are looked at, at most: two million pairs fix a mean to three digits."""


@dataclass(frozen=True)
class Health:
    """Label-free figures of one set of features."""

    std: float
    """Standard deviation of L2-normalised features, mean over dimensions."""
    std_ratio: float
    """`std` times √d: about 1 when directions fill the sphere, 0 when all features are one."""
    effective_rank: float
    """RankMe: how many dimensions are in use, between 1 and d."""
    uniformity: float
    """Log mean Gaussian potential of pairs: 0 when all are one, lower is more even."""
    alignment: float | None = None
    """Mean squared distance of an image's two views; lower is closer. None without views."""
    epsilon_share: float | None = None
    """What the worst batch norm loses to its ε, 0 to 1. None where only features are known."""
    dimensions: int = 0


def health(features: Tensor) -> Health:
    """All figures that `features` (n, d) alone tell."""
    (found,) = healths([features])
    return found


def healths(features: Sequence[Tensor]) -> list[Health]:
    """The figures of several encoders' features, their eigenvalues found together."""
    thinned = [thin(one, ROWS) for one in features]
    sound = [bool(one.isfinite().all()) for one in thinned]
    ranks = iter(effective_ranks([one for one, fine in zip(thinned, sound, strict=True) if fine]))
    found = []
    for one, fine in zip(thinned, sound, strict=True):
        std, ratio = feature_std(one) if fine else (math.nan, math.nan)
        rank, spread = (next(ranks), uniformity(one)) if fine else (math.nan, math.nan)
        found.append(Health(std, ratio, rank, spread, dimensions=one.shape[1]))
    return found


def trouble(health: Health) -> str | None:
    """One sentence if the encoder looks collapsed or broken, else None.

    Two ways to collapse, each with its own sign. Complete: every image gets one direction and the
    spread goes to 0 (a constant plus 3 % noise has a ratio of 0.03). 0.05 is half of what an
    untrained ResNet-18 shows, so a run's first round does not set it off. Dimensional: images lie
    on a line, where the spread may look fine but fewer than two dimensions are in use. Before
    either, an encoder may wither: batch norms that lose half of what they get to their ε.
    """
    if math.isnan(health.std):
        return "features are not finite: training has diverged, try a lower learning rate"
    if health.std_ratio < 0.05:
        return (
            f"features look collapsed: their spread is {health.std_ratio:.3f} of that of "
            "evenly spread directions, so all images look alike to the encoder"
        )
    if health.effective_rank < 2 and health.dimensions > 2:
        return (
            f"features look collapsed: they use {health.effective_rank:.1f} of "
            f"{health.dimensions} dimensions"
        )
    if health.epsilon_share is not None and health.epsilon_share > 0.5:
        return (
            "weight decay has shrunk the weights until batch norm no longer normalises "
            f"({health.epsilon_share:.0%} of a layer is lost to its ε): lower local.weight_decay "
            "or set local.decay_norms = false"
        )
    return None


def feature_std(features: Tensor) -> tuple[float, float]:
    """(mean over dimensions of the std of L2-normalised features, the same times √d)."""
    _need_rows(features, 2)
    std = float(F.normalize(features.double(), dim=1).std(0).mean())
    return std, std * features.shape[1] ** 0.5


def effective_rank(features: Tensor) -> float:
    """RankMe: exp of the entropy of the singular values (not centred), taken as shares."""
    return effective_ranks([features])[0]


def effective_ranks(features: Sequence[Tensor]) -> list[float]:
    """RankMe of each, equal sizes at once.

    From the eigenvalues of the smaller Gram matrix, in float64: squaring costs half the digits,
    and eight are left.
    """
    grams: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
    for place, one in enumerate(features):
        _need_rows(one, 1)
        x = thin(one, ROWS).double()
        gram = x.T @ x if len(x) >= x.shape[1] else x @ x.T
        grams[len(gram)].append((place, gram))
    ranks = [math.nan] * len(features)
    for same in grams.values():
        places, matrices = zip(*same, strict=True)
        for place, rank in zip(places, _ranks(torch.stack(matrices)), strict=True):
            ranks[place] = rank
    return ranks


def _ranks(grams: Tensor) -> list[float]:
    values = torch.linalg.eigvalsh(grams)
    # Below rounding, an eigenvalue is noise whose root would count as a small dimension.
    floor = values.amax(1, keepdim=True) * grams.shape[1] * torch.finfo(values.dtype).eps
    singular = torch.where(values > floor, values, 0).sqrt()
    shares = singular / singular.sum(1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)
    entropy = -torch.special.xlogy(shares, shares).sum(1)
    return [math.exp(value) for value in entropy.tolist()]


def alignment(z1: Tensor, z2: Tensor, alpha: float = 2) -> float:
    """Mean distance, to the power `alpha`, of two views of the same images on the sphere."""
    if z1.shape != z2.shape:
        raise DataError(
            f"alignment compares two views of the same images, not {tuple(z1.shape)} with "
            f"{tuple(z2.shape)} features"
        )
    gap = F.normalize(z1.double(), dim=1) - F.normalize(z2.double(), dim=1)
    return float(gap.norm(dim=1).pow(alpha).mean())


def uniformity(z: Tensor, t: float = 2) -> float:
    """Log of the mean of exp(-t·distance²) over all pairs on the sphere."""
    _need_rows(z, 2)
    z = F.normalize(thin(z, PAIR_ROWS).float(), dim=1)
    potential = torch.exp(-t * (2 - 2 * (z @ z.T)).clamp_min(0))
    pairs = len(z) * (len(z) - 1)
    potential.fill_diagonal_(0)
    return float((potential.sum(dtype=torch.float64) / pairs).log())


def _need_rows(features: Tensor, rows: int) -> None:
    if len(features) < rows:
        raise DataError(f"health figures need at least {rows} images, {len(features)} given")
