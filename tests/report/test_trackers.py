"""MLflow and Weights & Biases hear every row, through stand-ins for their libraries."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ssfl.errors import ConfigError
from ssfl.experiment import resume, train
from ssfl.federation.server import Server
from ssfl.tracking import default_trackers, log_all, need_trackers, read_rows
from tiny import tiny

ROWS = [
    {"kind": "round", "round": 0, "loss": -0.5, "failures": {}},
    {"kind": "evaluation", "round": 1, "knn_mean": 0.75, "clients": {"0": {"knn": 0.75}}},
]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the stand-ins were told."""
    said: list[Any] = []
    mlflow = SimpleNamespace(
        set_experiment=lambda name: None,
        start_run=lambda run_name: said.append(("start", run_name)),
        log_params=lambda parameters: said.append(parameters),
        log_metrics=lambda figures, step: said.append((figures, step)),
        end_run=lambda: said.append("end"),
    )
    run = SimpleNamespace(log=said.append, finish=lambda: said.append("end"))
    wandb = SimpleNamespace(
        init=lambda **about: (said.append((about["name"], about["config"])), run)[1]
    )
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return said


def track(folder: Path, asked: list[str]) -> None:
    trackers = default_trackers(folder, asked, {"local.lr": 0.1})
    for row in ROWS:
        log_all(trackers, row)
    for tracker in trackers:
        tracker.close()


def test_mlflow_gets_the_configuration_and_the_plain_numbers_of_every_row(
    tmp_path: Path, heard: list[Any]
) -> None:
    track(tmp_path, ["mlflow"])
    assert heard == [
        ("start", tmp_path.name),
        {"local.lr": "0.1"},
        ({"round/loss": -0.5}, 0),
        ({"evaluation/knn_mean": 0.75}, 1),
        "end",
    ]
    assert read_rows(tmp_path / "metrics.jsonl") == ROWS


def test_wandb_gets_the_round_as_a_figure(tmp_path: Path, heard: list[Any]) -> None:
    track(tmp_path, ["wandb"])
    assert heard == [
        (tmp_path.name, {"local.lr": 0.1}),
        {"round/loss": -0.5, "round": 0},
        {"evaluation/knn_mean": 0.75, "round": 1},
        "end",
    ]


def test_a_tracker_in_trouble_is_named_once_and_costs_the_run_nothing(
    tmp_path: Path,
    heard: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def away(figures: object, step: int) -> None:
        raise RuntimeError("no route to host")

    monkeypatch.setattr(sys.modules["mlflow"], "log_metrics", away)
    track(tmp_path, ["mlflow", "wandb"])
    assert read_rows(tmp_path / "metrics.jsonl") == ROWS
    assert [what for what in heard if what == "end"] == ["end"]  # to the other one
    (warning,) = caplog.messages
    assert warning.startswith("mlflow hears no more of this run (RuntimeError: no route to host)")


def test_a_tracker_that_is_away_when_it_is_opened_costs_the_run_nothing_begun_or_resumed(
    tmp_path: Path,
    heard: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def away(name: str) -> None:
        raise ConnectionError("no route to host")

    advance = Server.advance

    def stopped(server: Server, *gathered: Any) -> Any:
        if server.rounds_done == 2:
            raise KeyboardInterrupt
        return advance(server, *gathered)

    monkeypatch.setattr(sys.modules["mlflow"], "set_experiment", away)
    monkeypatch.setattr("ssfl.experiment.need_trackers", lambda asked: None)  # a stand-in is there
    with monkeypatch.context() as patch:
        patch.setattr(Server, "advance", stopped)
        with pytest.raises(KeyboardInterrupt):
            train(tiny(run={"trackers": ["mlflow"]}), out=tmp_path / "run")
    assert resume(tmp_path / "run").final["rounds"] == 3
    assert not heard
    told = [text for text in caplog.messages if text.startswith("mlflow hears no more of this run")]
    assert len(told) == 2  # once by each
    assert "(ConnectionError: no route to host); the record goes on" in told[0]


def test_a_tracker_of_a_run_that_records_nothing_is_never_opened(
    tmp_path: Path, heard: list[Any]
) -> None:
    for tracker in default_trackers(tmp_path, ["mlflow", "wandb"]):
        tracker.close()
    assert not heard
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_tracker_that_is_not_installed_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"asks for wandb, .* `pip install 'ssfl\[wandb\]'`"):
        need_trackers(["wandb"])
