"""What is made of the figures that clients send of their own encoders."""

import math
from pathlib import Path
from threading import get_ident

import pytest
import torch

from ssfl.assemble import build_host, load_federated
from ssfl.config import Config, parse
from ssfl.data.federated import FederatedData
from ssfl.evaluation.knn import knn_accuracy
from ssfl.federation.messages import Reply, TaskKind
from ssfl.federation.online import OnlineEvaluation, _client_row
from ssfl.federation.store import StateStore


@pytest.mark.parametrize("claim", [math.nan, math.inf, -0.1, 50.0])
def test_an_accuracy_that_is_none_does_not_spoil_the_mean_of_the_others(claim: float) -> None:
    said = {0: (0.5, 10), 1: (claim, 1 << 61), 2: (0.8, 20), 3: (1.0, 0)}
    replies = [
        Reply(client, TaskKind.EVALUATE, 4, samples=samples, metrics={"knn": knn})
        for client, (knn, samples) in said.items()
    ]
    row = _client_row(replies)
    assert row["knn_mean"] == pytest.approx(0.65)
    assert row["knn_weighted"] == pytest.approx(0.7)
    assert set(row["clients"]) == {"0", "1", "2", "3"}  # what was said stays on record


def pixels_of(config: Config, data: FederatedData) -> dict[str, float]:
    return OnlineEvaluation(config.evaluation, data, None, None)._pixels()  # type: ignore[arg-type]


def digits(**evaluation: int) -> tuple[Config, FederatedData]:
    raw = {
        "data": {"source": "digits"},
        "partition": {"clients": 6, "min_size": 20},
        "evaluation": {"k": 5, **evaluation},
    }
    config = parse(raw)
    return config, load_federated(config)


def test_raw_pixels_are_judged_on_the_clients_and_the_bank_that_encoders_are_judged_on() -> None:
    config, data = digits(clients=2, bank=100)
    train, test = data.dataset.train, data.dataset.test
    assert test is not None

    def by_hand(own: torch.Tensor, held_out: torch.Tensor) -> float:
        bank, queries = (x.flatten(1).float() for x in (train.pixels[own], test.pixels[held_out]))
        return knn_accuracy(bank, train.labels[own], queries, test.labels[held_out], k=5)

    found = pixels_of(config, data)
    judged = [by_hand(data.train_indices(k), data.test_indices(k)) for k in (0, 3)]
    assert found["pixels_knn_mean"] == pytest.approx(sum(judged) / 2)
    everywhere = by_hand(torch.arange(100) * len(train) // 100, torch.arange(len(test)))
    assert found["pixels_knn_global"] == pytest.approx(everywhere)


def test_raw_pixels_have_a_figure_where_no_client_is_judged() -> None:
    assert set(pixels_of(*digits(clients=0))) == {"pixels_knn_global"}


def test_while_the_shared_encoder_is_judged_the_cores_of_all_workers_are_at_work(
    tmp_path: Path,
) -> None:
    """And its figures are those that one alone would find."""
    config, data = digits()
    trainer = build_host(config, data, StateStore(tmp_path, 1 << 20)).trainer
    theta = trainer.models.global_.flat.shared.clone()
    seen: set[int] = set()
    trainer.models.global_.method.backbone.register_forward_hook(lambda *_: seen.add(get_ident()))
    before, figures = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for workers in (1, 2):
            seen.clear()
            judge = OnlineEvaluation(config.evaluation, data, trainer, None, workers)  # type: ignore[arg-type]
            figures.append(judge.shared(theta))
            assert (seen == {get_ident()}) is (workers == 1)
    finally:
        torch.set_num_threads(before)
    assert figures[0] == figures[1]
