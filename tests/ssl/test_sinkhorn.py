"""Sinkhorn's codes: their marginals, their limit, and their shape."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssfl.seeding import torch_generator
from ssfl.ssl.swav import sinkhorn


def scores(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.rand(n, k, generator=torch_generator(seed, "scores")) - 1


@settings(max_examples=25, deadline=None)
@given(n=st.integers(2, 40), k=st.integers(2, 40), steps=st.integers(1, 5), seed=st.integers(0, 9))
def test_each_image_has_one_unit_of_code(n: int, k: int, steps: int, seed: int) -> None:
    codes = sinkhorn(scores(n, k, seed), 0.05, steps)
    assert (codes >= 0).all()
    torch.testing.assert_close(codes.sum(dim=1), torch.ones(n))


@settings(max_examples=10, deadline=None)
@given(n=st.integers(2, 40), k=st.integers(2, 40), seed=st.integers(0, 9))
def test_in_the_limit_each_prototype_has_an_equal_share(n: int, k: int, seed: int) -> None:
    codes = sinkhorn(scores(n, k, seed), 0.25, 500)
    torch.testing.assert_close(codes.sum(dim=0), torch.full((k,), n / k), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(codes.sum(dim=1), torch.ones(n))


def longhand(s: torch.Tensor, epsilon: float, steps: int) -> torch.Tensor:
    """As SwAV's paper writes it down (prototypes × images, of mass one), in float64."""
    q = np.exp(s.double().numpy() / epsilon).T
    prototypes, images = q.shape
    q /= q.sum()
    for _ in range(steps):
        q /= q.sum(axis=1, keepdims=True) * prototypes
        q /= q.sum(axis=0, keepdims=True) * images
    return torch.from_numpy(q.T * images).float()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_steps_are_alternations_in_float64(steps: int) -> None:
    s = scores(12, 5)
    expected = longhand(s, 0.05, steps)
    torch.testing.assert_close(sinkhorn(s, 0.05, steps), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("epsilon", [0.05, 0.01, 0.005])
def test_an_image_or_a_prototype_far_from_all_others_keeps_its_share(epsilon: float) -> None:
    """exp((−0.9 − 0.9) / 0.01) is 0 in float32."""
    s = scores(12, 5) / 10 + 0.8
    s[3], s[:, 2] = s[3] - 1.7, s[:, 2] - 1.7
    codes = sinkhorn(s, epsilon, 3)
    torch.testing.assert_close(codes, longhand(s, epsilon, 3), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(codes.sum(dim=1), torch.ones(12))
    near = torch.cat([s, torch.full((4, 5), 1.0)])  # these do not count, though nearer than any
    counted = torch.tensor([True] * 12 + [False] * 4)
    torch.testing.assert_close(sinkhorn(near, epsilon, 3, counted)[:12], codes)


def test_codes_are_scores_scaled_by_rows_and_columns_only() -> None:
    s = scores(8, 6)
    residue = sinkhorn(s, 0.25, 3).log() - s / 0.25
    residue = residue - residue.mean(dim=0) - residue.mean(dim=1, keepdim=True) + residue.mean()
    torch.testing.assert_close(residue, torch.zeros(8, 6), atol=1e-5, rtol=0)


def test_codes_do_not_collapse_when_all_scores_prefer_one_prototype() -> None:
    s = 0.2 * scores(30, 3)
    s[:, 0] += 0.7
    assert (s.argmax(dim=1) == 0).all()
    shares = sinkhorn(s, 0.05, 3).sum(dim=0) / 30
    assert shares.min() > 0.2


def test_views_are_balanced_one_by_one() -> None:
    both = torch.stack([scores(8, 4, 1), scores(8, 4, 2)])
    each = torch.stack([sinkhorn(view, 0.05, 3) for view in both])
    torch.testing.assert_close(sinkhorn(both, 0.05, 3), each)


def test_rows_that_do_not_count_change_nothing_and_get_nothing() -> None:
    s, other = scores(6, 4, 1), scores(5, 4, 2)
    counted = torch.tensor([True] * 6 + [False] * 5)
    codes = sinkhorn(torch.cat([s, other]), 0.05, 3, counted)
    torch.testing.assert_close(codes[:6], sinkhorn(s, 0.05, 3))
    assert torch.equal(codes[6:], torch.zeros(5, 4))


def test_codes_know_no_zero_of_scores_however_large() -> None:
    s = scores(12, 5)
    for shift in (-9.0, 9.0):  # exp(9 / 0.05) is beyond float32, and its inverse as well
        torch.testing.assert_close(
            sinkhorn(s + shift, 0.05, 3), sinkhorn(s, 0.05, 3), rtol=1e-3, atol=1e-5
        )
