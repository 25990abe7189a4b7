"""Summaries over clients: the paper's plain mean, and SciPy's confidence interval."""

import numpy as np
import pytest
from scipy import stats

from ssfl.errors import DataError
from ssfl.evaluation.summary import summarise


def test_the_mean_is_plain_and_the_weighted_one_counts_samples() -> None:
    summary = summarise([0.5, 1.0], [300, 100])
    assert summary.mean == 0.75
    assert summary.weighted_mean == 0.625
    assert summary.n == 2


def test_the_interval_is_students() -> None:
    values = np.random.default_rng(0).uniform(size=10)
    summary = summarise(values.tolist(), [1] * 10)
    low, high = stats.t.interval(0.95, 9, loc=values.mean(), scale=stats.sem(values))
    assert summary.ci95 is not None
    assert summary.mean - summary.ci95 == pytest.approx(low)
    assert summary.mean + summary.ci95 == pytest.approx(high)
    assert summary.std == pytest.approx(values.std(ddof=1))


def test_without_counts_both_means_are_one() -> None:
    summary = summarise([0.1, 0.2, 0.6])
    assert summary.mean == pytest.approx(summary.weighted_mean)


def test_a_single_client_has_no_interval() -> None:
    summary = summarise([0.8], [10])
    assert (summary.mean, summary.weighted_mean) == (0.8, 0.8)
    assert (summary.std, summary.ci95, summary.n) == (0.0, None, 1)


def test_a_client_without_samples_counts_in_the_plain_mean_alone() -> None:
    summary = summarise([0.5, 1.0], [0, 7])
    assert (summary.mean, summary.weighted_mean) == (0.75, 1.0)


@pytest.mark.parametrize(
    ("values", "weights", "says"),
    [
        ([], [], "no client has a figure"),
        ([1.0], [1, 2], "1 figures need 1 sample counts"),
        ([1.0, 1.0], [0, 0], "not all zero"),
        ([1.0, 1.0], [-1, 2], "none negative"),
    ],
)
def test_figures_and_counts_that_do_not_fit_are_refused(
    values: list[float], weights: list[float], says: str
) -> None:
    with pytest.raises(DataError, match=says):
        summarise(values, weights)
