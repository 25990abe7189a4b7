"""MLflow and Weights & Biases hear every row, through stand-ins for their libraries."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ssfl.errors import ConfigError
from ssfl.tracking import default_trackers, log_all, need_trackers, read_rows

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


def test_a_tracker_that_is_not_installed_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"asks for wandb, .* `pip install 'ssfl\[wandb\]'`"):
        need_trackers(["wandb"])
