"""The kNN indicator against scikit-learn, in float64, and against votes counted longhand."""

import inspect
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from ssfl.errors import DataError
from ssfl.evaluation import knn
from ssfl.evaluation.knn import _chunk, knn_accuracy, knn_predict, knn_votes
from ssfl.evaluation.options import EvaluationOptions


def blobs(n: int, d: int, classes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(classes, d))
    labels = rng.integers(classes, size=n)
    points = centres[labels] + 1.5 * rng.normal(size=(n, d))
    return torch.from_numpy(points), torch.from_numpy(labels)


def scikit_learn(k: int, temperature: float) -> KNeighborsClassifier:
    return KNeighborsClassifier(
        k, metric="cosine", algorithm="brute", weights=lambda gap: np.exp((1 - gap) / temperature)
    )


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.1), (5, 0.1), (200, 0.1), (200, 0.5)])
def test_votes_and_predictions_are_those_of_scikit_learn_in_float64(
    k: int, temperature: float
) -> None:
    bank, labels = blobs(600, 24, 7, seed=0)
    queries, truth = blobs(150, 24, 7, seed=1)
    peer = scikit_learn(k, temperature).fit(bank.numpy(), labels.numpy())

    votes = knn_votes(bank, labels, queries, k=k, temperature=temperature)
    predicted = knn_predict(bank, labels, queries, k=k, temperature=temperature)
    accuracy = knn_accuracy(bank, labels, queries, truth, k=k, temperature=temperature)

    assert votes.dtype == torch.float64
    np.testing.assert_allclose(votes.numpy(), peer.predict_proba(queries.numpy()), atol=1e-12)
    np.testing.assert_array_equal(predicted.numpy(), peer.predict(queries.numpy()))
    assert accuracy == peer.score(queries.numpy(), truth.numpy())


def test_predictions_on_real_digits_are_those_of_scikit_learn() -> None:
    pixels, labels = load_digits(return_X_y=True)
    peer = scikit_learn(200, 0.1).fit(pixels[:1200], labels[:1200])
    ours = knn_predict(*map(torch.from_numpy, (pixels[:1200], labels[:1200], pixels[1200:])))
    np.testing.assert_array_equal(ours.numpy(), peer.predict(pixels[1200:]))


def test_votes_are_exponential_similarities_summed_per_class() -> None:
    bank = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]], dtype=torch.float64)
    labels = torch.tensor([0, 1, 1])
    votes = knn_votes(bank, labels, torch.tensor([[5.0, 0.0]], dtype=torch.float64), k=3)
    raw = np.array([np.exp(1 / 0.1), np.exp(0 / 0.1) + np.exp(np.sqrt(0.5) / 0.1)])
    np.testing.assert_allclose(votes[0].numpy(), raw / raw.sum(), rtol=1e-12)


def test_a_tied_vote_goes_to_the_lowest_class() -> None:
    bank = torch.eye(4, dtype=torch.float64)
    query = torch.ones(1, 4, dtype=torch.float64)
    assert knn_predict(bank, torch.tensor([3, 1, 2, 3]), query, k=4).item() == 3
    assert knn_predict(bank, torch.tensor([3, 1, 2, 0]), query, k=4).item() == 0


def test_k_larger_than_the_bank_means_the_whole_bank() -> None:
    bank, labels = blobs(30, 8, 3, seed=0)
    queries, _ = blobs(10, 8, 3, seed=1)
    whole = knn_votes(bank, labels, queries, k=30)
    torch.testing.assert_close(knn_votes(bank, labels, queries, k=200), whole, rtol=0, atol=0)


def test_a_very_low_temperature_does_not_overflow_in_float32() -> None:
    bank, labels = blobs(50, 8, 3, seed=0)
    queries, _ = blobs(10, 8, 3, seed=1)
    votes = knn_votes(bank.float(), labels, queries.float(), temperature=0.001)
    nearest = knn_predict(bank, labels, queries, k=1)
    assert votes.isfinite().all()
    torch.testing.assert_close(votes.argmax(1), nearest)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 1000))
def test_the_chunk_size_changes_no_vote(chunk: int, k: int, seed: int) -> None:
    bank, labels = blobs(60, 6, 4, seed)
    queries, _ = blobs(41, 6, 4, seed + 1)
    whole = knn_votes(bank, labels, queries, k=k, chunk=41)
    torch.testing.assert_close(knn_votes(bank, labels, queries, k=k, chunk=chunk), whole)


@pytest.mark.parametrize(("bank", "k", "classes"), [(50_000, 200, 10), (500, 200, 203), (9, 1, 2)])
def test_a_chunk_and_its_ballots_take_all_of_128_mib_and_no_more(
    bank: int, k: int, classes: int
) -> None:
    a_query = bank * 4 + k * classes * (8 + 4)  # similarities; ballots as int64 and as float32
    chunk = _chunk(torch.empty(bank, 3), k * classes)
    assert chunk * a_query <= 2**27 < (chunk + 1) * a_query
    assert _chunk(torch.empty(10, 3), 2**30) == 1  # and never none


def test_votes_are_counted_a_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    multiply = torch.mm

    def watched(some: torch.Tensor, *rest: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        rows.append(len(some))
        return multiply(some, *rest, out=out)

    asked: list[tuple[int, int]] = []

    def sixteen(bank: torch.Tensor, ballot: int) -> int:
        asked.append((len(bank), ballot))
        return 16

    monkeypatch.setattr(torch, "mm", watched)
    monkeypatch.setattr(knn, "_chunk", sixteen)
    bank, labels = blobs(60, 6, 4, seed=0)
    knn_votes(bank, labels, bank[:41], k=5)
    assert rows == [16, 16, 9]
    assert asked == [(60, 5 * 4)]


def test_what_is_not_said_is_as_in_the_options() -> None:
    usual = EvaluationOptions()
    for function in (knn_votes, knn_predict, knn_accuracy):
        said = inspect.signature(function).parameters
        assert (said["k"].default, said["temperature"].default) == (usual.k, usual.temperature)


def test_labels_may_be_bytes() -> None:
    bank, labels = blobs(30, 6, 4, seed=0)
    votes = knn_votes(bank, labels.byte(), bank, k=5)
    torch.testing.assert_close(votes, knn_votes(bank, labels, bank, k=5))


@pytest.mark.parametrize(("bank", "queries"), [(0, 1), (1, 0)])
def test_an_empty_bank_or_nothing_to_classify_is_an_error_for_people(
    bank: int, queries: int
) -> None:
    with pytest.raises(DataError, match="at least one labelled image"):
        knn_predict(torch.ones(bank, 3), torch.zeros(bank), torch.ones(queries, 3))


@pytest.mark.parametrize("broken", ["bank", "queries"])
def test_features_that_are_not_finite_have_no_accuracy(broken: str) -> None:
    features = {"bank": torch.rand(20, 4), "queries": torch.rand(10, 4)}
    features[broken][3, 1] = math.nan
    labels = torch.zeros(20, dtype=torch.long)
    assert math.isnan(knn_accuracy(features["bank"], labels, features["queries"], labels[:10]))


def test_features_that_a_gradient_could_flow_into_are_judged_like_any() -> None:
    x, y = torch.randn(30, 4), torch.arange(30) % 3
    votes = knn_votes(x.requires_grad_(), y, x, k=5)
    torch.testing.assert_close(votes, knn_votes(x.detach(), y, x.detach(), k=5))
