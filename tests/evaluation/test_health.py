"""Label-free health against closed forms and longhand NumPy."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ssfl.errors import DataError
from ssfl.evaluation.health import (
    Health,
    alignment,
    effective_rank,
    feature_std,
    health,
    healths,
    trouble,
    uniformity,
)
from ssfl.evaluation.spread import spread, thin


def gaussian(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def test_isotropic_features_fill_the_sphere_and_use_every_dimension() -> None:
    figures = health(gaussian(4000, 32))
    assert figures.std_ratio == pytest.approx(1, abs=0.02)
    assert figures.std == pytest.approx(1 / math.sqrt(32), rel=0.02)
    assert figures.effective_rank == pytest.approx(32, rel=0.01)
    assert trouble(figures) is None


def test_std_is_numpys_on_normalised_rows() -> None:
    x = gaussian(50, 7) + 50
    exact = x.double().numpy()
    unit = exact / np.linalg.norm(exact, axis=1, keepdims=True)
    expected = unit.std(0, ddof=1).mean()
    assert feature_std(x) == pytest.approx((expected, expected * math.sqrt(7)), rel=1e-12)


@pytest.mark.parametrize("shape", [(200, 12), (12, 200), (30, 30)])
def test_effective_rank_is_the_entropy_of_singular_values_for_any_shape(
    shape: tuple[int, int],
) -> None:
    x = gaussian(*shape) * torch.logspace(0, -3, shape[1]) + 0.2
    shares = np.linalg.svd(x.double().numpy(), compute_uv=False)
    shares = shares / shares.sum()
    assert effective_rank(x) == pytest.approx(np.exp(-(shares * np.log(shares)).sum()), rel=1e-6)


def test_effective_rank_counts_equal_directions_exactly() -> None:
    x = torch.zeros(90, 50)
    x[:, :3] = torch.eye(3).repeat(30, 1)
    assert effective_rank(x) == pytest.approx(3, abs=1e-6)
    assert effective_rank(x[:, :1] + torch.zeros(90, 50)) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_rounding_is_not_taken_for_small_dimensions(scale: float) -> None:
    x = scale * gaussian(200, 3).double() @ gaussian(3, 50, 1).double()
    shares = np.linalg.svd(x.numpy(), compute_uv=False)[:3]
    shares = shares / shares.sum()
    assert effective_rank(x) == pytest.approx(np.exp(-(shares * np.log(shares)).sum()), rel=1e-9)
    assert effective_rank(0 * x) == 1  # nothing, in no direction


def test_alignment_is_the_mean_power_of_distances_on_the_sphere() -> None:
    a, b = gaussian(40, 6, 0), gaussian(40, 6, 1)
    exact_a, exact_b = a.double().numpy(), b.double().numpy()
    unit_a = exact_a / np.linalg.norm(exact_a, axis=1, keepdims=True)
    unit_b = exact_b / np.linalg.norm(exact_b, axis=1, keepdims=True)
    gaps = np.linalg.norm(unit_a - unit_b, axis=1)
    assert alignment(a, b) == pytest.approx((gaps**2).mean(), rel=1e-12)
    assert alignment(a, b, alpha=1) == pytest.approx(gaps.mean(), rel=1e-12)
    assert alignment(a, 3 * a) == pytest.approx(0, abs=1e-12)
    assert alignment(a, -a) == pytest.approx(4)


def test_uniformity_is_the_log_mean_potential_of_all_pairs() -> None:
    x = gaussian(40, 6)
    unit = x.double().numpy() / np.linalg.norm(x.double().numpy(), axis=1, keepdims=True)
    pairs = [
        np.exp(-3 * ((unit[i] - unit[j]) ** 2).sum()) for i in range(40) for j in range(i + 1, 40)
    ]
    assert uniformity(x, t=3) == pytest.approx(np.log(np.mean(pairs)), abs=1e-5)
    assert uniformity(torch.ones(10, 4)) == pytest.approx(0, abs=1e-5)
    opposite = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert uniformity(opposite) == pytest.approx(-2 * 4)


@pytest.mark.parametrize(
    ("features", "word"),
    [
        (torch.ones(100, 64), "look alike"),
        (torch.ones(100, 64) + 0.02 * gaussian(100, 64), "look alike"),
        (gaussian(100, 1) * torch.ones(1, 64), "dimensions"),
        (torch.full((100, 64), math.nan), "not finite"),
        (torch.zeros(100, 64), "look alike"),
    ],
    ids=["constant", "constant with noise", "a line", "diverged", "dead"],
)
def test_collapse_is_named_in_one_sentence(features: Tensor, word: str) -> None:
    sentence = trouble(health(features))
    assert sentence is not None
    assert word in sentence
    assert "\n" not in sentence


def test_one_image_whose_features_are_not_finite_is_enough_to_say_so() -> None:
    features = gaussian(100, 64)
    features[17, 3] = math.inf
    figures = health(features)
    assert all(map(math.isnan, (figures.std, figures.std_ratio, figures.uniformity)))
    assert math.isnan(figures.effective_rank)
    assert "not finite" in str(trouble(figures))


def test_several_encoders_have_the_figures_that_each_has_alone() -> None:
    broken = torch.full((50, 8), math.nan)
    several = [gaussian(50, 8, 1), broken, gaussian(40, 12, 2), gaussian(50, 8, 3) + 1]
    found = healths(several)
    assert trouble(found[1]) == trouble(health(broken))
    for place in (0, 2, 3):
        assert found[place].dimensions == several[place].shape[1]
        for name in ("std", "std_ratio", "effective_rank", "uniformity"):
            alone = getattr(health(several[place]), name)
            assert getattr(found[place], name) == pytest.approx(alone), (place, name)


@pytest.mark.parametrize(
    ("changes", "collapsed"),
    [
        ({"std_ratio": 0.049}, True),
        ({"std_ratio": 0.051}, False),
        ({"effective_rank": 1.9}, True),
        ({"effective_rank": 2.1}, False),
        ({"effective_rank": 1.9, "dimensions": 3}, True),
        ({"effective_rank": 1.9, "dimensions": 2}, False),  # it has no more to use
    ],
)
def test_collapse_is_a_spread_below_a_twentieth_or_fewer_than_two_dimensions(
    changes: dict[str, float], collapsed: bool
) -> None:
    figures = replace(health(gaussian(100, 8)), **changes)
    assert (trouble(figures) is not None) == collapsed


def test_rectified_features_of_a_few_clusters_are_not_called_collapsed() -> None:
    centres = gaussian(10, 128, seed=1)
    x = (centres[torch.arange(500) % 10] + 0.3 * gaussian(500, 128)).relu()
    assert trouble(health(x)) is None


def test_an_encoder_that_withers_is_told_so_before_it_collapses() -> None:
    sound = health(gaussian(100, 8))
    assert trouble(replace(sound, epsilon_share=0.4)) is None
    sentence = trouble(replace(sound, epsilon_share=0.8))
    assert sentence is not None
    assert "80%" in sentence
    assert "weight_decay" in sentence


def test_alignment_is_not_to_be_had_of_one_view() -> None:
    x = gaussian(30, 5)
    assert health(x).alignment is None
    with pytest.raises(DataError, match="same images"):
        alignment(x, x[:5])


@pytest.mark.parametrize(("n", "limit"), [(10, 4), (10, 3), (7, 7), (3, 9), (5, 1), (4, 0), (0, 4)])
def test_a_few_out_of_many_are_evenly_spaced(n: int, limit: int) -> None:
    count = min(n, limit)
    expected = [math.floor(place * n / count) for place in range(count)]
    assert spread(n, limit).tolist() == expected
    assert thin(10 * torch.arange(n), limit).tolist() == [10 * place for place in expected]


def test_large_sets_are_thinned_evenly_and_the_same_way_each_time() -> None:
    sorted_by_class = gaussian(30_000, 16) + 3 * gaussian(10, 16).repeat_interleave(3000, dim=0)
    first, second = health(sorted_by_class), health(sorted_by_class)
    assert first == second
    shares = np.linalg.svd(sorted_by_class.double().numpy(), compute_uv=False)
    shares = shares / shares.sum()
    whole = np.exp(-(shares * np.log(shares)).sum())
    assert first.effective_rank == pytest.approx(whole, rel=0.01)


@pytest.mark.parametrize("figure", [health, feature_std, uniformity])
def test_one_image_is_too_few_to_have_a_spread(figure: Callable[[Tensor], object]) -> None:
    with pytest.raises(DataError, match="at least 2 images"):
        figure(torch.ones(1, 4))


def test_one_image_has_a_rank_and_none_has_not() -> None:
    assert effective_rank(torch.ones(1, 4)) == pytest.approx(1)
    with pytest.raises(DataError, match="at least 1 images"):
        effective_rank(torch.ones(0, 4))


def test_health_is_a_plain_frozen_value() -> None:
    figures = health(gaussian(20, 4))
    assert all(
        isinstance(value, float)
        for value in (figures.std, figures.std_ratio, figures.effective_rank, figures.uniformity)
    )
    with pytest.raises(AttributeError):
        figures.std = 1.0  # type: ignore[misc]
    assert isinstance(figures, Health)
