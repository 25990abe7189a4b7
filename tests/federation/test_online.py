"""What is made of the figures that clients send of their own encoders."""

import math
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace

import pytest
import torch

from ssfl.assemble import build_host, load_federated
from ssfl.config import Config, parse
from ssfl.data.federated import FederatedData, federate
from ssfl.data.images import DataSet, Images
from ssfl.evaluation.health import ROWS, health
from ssfl.evaluation.knn import knn_accuracy
from ssfl.federation.messages import Reply, Task, TaskKind
from ssfl.federation.online import OnlineEvaluation, _client_row
from ssfl.federation.store import StateStore
from ssfl.federation.wellbeing import ALIGNED


@pytest.mark.parametrize("held_out", [0, 20], ids=["no test images", "test images"])
def test_of_images_without_labels_no_more_are_looked_at_than_health_needs(
    tmp_path: Path, held_out: int
) -> None:
    """And the figures are those of the features of all."""
    pixels = torch.randint(256, (ROWS + 900, 1, 8, 8), dtype=torch.uint8)
    test = Images(pixels[:held_out].contiguous()) if held_out else None
    dataset = DataSet("x", Images(pixels), test, None, None, (0.5,), (0.2,), "digits")
    small = {"model": {"backbone": "small", "width": 4}, "device": {"device": "cpu"}}
    config = parse({**small, "partition": {"kind": "iid", "clients": 1}})
    data = federate(dataset, config.partition, config.seed)
    host = build_host(config, data, StateStore(tmp_path, 1 << 20))
    trainer, seen = host.trainer, []
    theta = trainer.models.global_.flat.shared.clone()
    backbone = trainer.models.global_.method.backbone
    expected = health(trainer.features(backbone, dataset.train, None, 512)).effective_rank
    backbone.register_forward_hook(lambda _, batch, __: seen.append(len(batch[0])))

    task = Task(TaskKind.EVALUATE, 0, theta, trainer.layout.digest)
    reply = host.handle(0, task)
    assert sum(seen) == ROWS + 2 * ALIGNED
    assert reply.metrics["effective_rank"] == expected
    assert reply.samples == (held_out or len(pixels))

    seen.clear()
    found = OnlineEvaluation(config.evaluation, data, trainer, None).shared(theta)  # type: ignore[arg-type]
    assert sum(seen) == (3 * held_out or ROWS + 2 * ALIGNED)
    assert held_out or found["effective_rank"] == expected


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


def test_clients_that_diverge_where_theta_does_not_are_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    well = {"std_ratio": 0.9, "effective_rank": 30.0, "uniformity": -2.0, "knn": 0.8}
    thin = well | {"std_ratio": 0.01, "effective_rank": 1.0}  # Θ's own figures tell of that
    said = [well, dict.fromkeys(well, math.nan), thin]
    replies = [Reply(k, TaskKind.EVALUATE, 4, samples=5, metrics=m) for k, m in enumerate(said)]
    width = SimpleNamespace(method=SimpleNamespace(backbone=SimpleNamespace(features=64)))
    trainer = SimpleNamespace(
        algorithm=SimpleNamespace(sends=True), models=SimpleNamespace(global_=width)
    )
    server = SimpleNamespace(theta=None, clients=lambda: range(3), evaluate=lambda _: replies)
    config, data = digits(clients=3)
    online = OnlineEvaluation(config.evaluation, data, trainer, server)  # type: ignore[arg-type]
    monkeypatch.setattr(online, "shared", lambda theta: {})
    assert online.measure()["warning"].startswith("client 1: features are not finite")
    monkeypatch.setattr(online, "shared", lambda theta: {"warning": "Θ is worse"})
    assert online.measure()["warning"] == "Θ is worse"
    said[1].update(well)
    monkeypatch.setattr(online, "shared", lambda theta: {})
    assert "warning" not in online.measure()


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
