"""Ten clients' accuracies as one line: mean, weighted mean, spread and confidence interval.

The paper's figure is the plain mean over clients, each counting the same however many images it
holds; the sample-weighted mean stands beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ssfl.errors import DataError


@dataclass(frozen=True)
class Summary:
    """Figures over clients; `ci95` is the half-width of the 95 % interval of the plain mean."""

    mean: float
    weighted_mean: float
    std: float
    """Sample standard deviation (n - 1); 0 for a single value."""
    ci95: float | None
    """Student's t times std / √n; None for a single value, which says nothing of spread."""
    n: int


def summarise(values: Sequence[float], weights: Sequence[float] | None = None) -> Summary:
    """Summarise per-client `values`; `weights` are sample counts (equal if not given)."""
    x = np.asarray(values, dtype=np.float64)
    w = np.ones_like(x) if weights is None else np.asarray(weights, dtype=np.float64)
    if x.ndim != 1 or len(x) == 0:
        raise DataError("there is nothing to summarise: no client has a figure")
    if w.shape != x.shape or (w < 0).any() or w.sum() == 0:
        raise DataError(
            f"{len(x)} figures need {len(x)} sample counts, none negative and not all zero"
        )
    mean, weighted = float(x.mean()), float((w * x).sum() / w.sum())
    if len(x) == 1:
        return Summary(mean, weighted, std=0.0, ci95=None, n=1)
    std = float(x.std(ddof=1))
    return Summary(mean, weighted, std, _t975(len(x) - 1) * std / len(x) ** 0.5, n=len(x))


def _t975(freedom: int) -> float:
    """The 97.5 % point of Student's t."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]  # comes with scikit-learn

    return float(stdtrit(freedom, 0.975))
