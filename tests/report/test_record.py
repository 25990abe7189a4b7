"""What pages say of a run, against sums and means taken by hand of rows that were written down."""

import math
import statistics
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scipy import stats

from ssfl.protocols.scores import Evaluation, over_images, title
from ssfl.report.record import Record
from ssfl.report.words import duration
from tiny import tiny

ROWS: list[dict[str, Any]] = [
    {"kind": "round", "round": 0, "loss": 2.0, "seconds": 3.0, "images": 100},
    {"kind": "baseline", "seconds": 1.0},
    {"kind": "evaluation", "round": 1, "knn_global": 0.4, "std_ratio": 0.8, "seconds": 0.5},
    {
        "kind": "round",
        "round": 1,
        "loss": None,
        "seconds": 2.0,
        "images": 50,
        "late": 2,
        "failures": {"diverged": 1, "lost": 3},
    },
    {"kind": "round", "round": 2, "loss": 1.5, "seconds": None, "failures": {"diverged": 4}},
    {
        "kind": "evaluation",
        "round": 3,
        "knn_global": 0.5,
        "knn_mean": 0.61,
        "knn_weighted": 0.65,
        "std_ratio": 0.9,
        "seconds": 0.25,
        "clients": {
            "0": {"knn": 0.5, "std_ratio": 0.2},
            "3": {"knn": 0.7, "std_ratio": 0.4},
            "4": {"knn": None},
        },
    },
]


def record(
    folder: Path,
    found: Evaluation | None = None,
    *,
    rows: list[dict[str, Any]] = ROWS,
    images: int = 99,
    **sections: Any,
) -> Record:
    """Of a run that consists of `rows` and what an evaluation found."""
    if found is not None:
        found.save(folder / "evaluation.json")
    run = SimpleNamespace(
        config=tiny(**sections),
        metrics=rows,
        facts={"train_images": images, "test_images": 40, "clients": 5},
        clients=range(5),
        final={"train_seconds": 10.0} if rows else {},
        evaluation=folder / "evaluation.json",
    )
    return Record(run)  # type: ignore[arg-type]


def test_curves_are_against_the_rounds_done(tmp_path: Path) -> None:
    run = record(tmp_path)
    assert run.done == 3
    assert run.curve("round", "loss") == [(1, 2.0), (3, 1.5)]
    assert run.curve("evaluation", "knn_global") == [(1, 0.4), (3, 0.5)]
    assert run.curve("evaluation", "knn_mean") == [(3, 0.61)]
    assert run.health_curve("std_ratio") == [(1, 0.8), (3, 0.9)]


@pytest.mark.parametrize("where", [{"images": 0}, {"algorithm": {"name": "local-only"}}])
def test_without_a_shared_encoder_to_look_at_health_is_the_mean_over_clients(
    where: dict[str, Any], tmp_path: Path
) -> None:
    run = record(tmp_path, **where)
    assert run.health_curve("std_ratio") == [(3, pytest.approx(0.3))]
    assert run.health(run.last, "uniformity") is None


def test_failures_are_added_up_by_reason_and_what_comes_late_is_none(tmp_path: Path) -> None:
    run = record(tmp_path)
    assert run.failures == Counter({"lost": 3, "diverged": 5})
    assert run.late == 2


def test_seconds_are_those_of_all_parts_and_the_rest(tmp_path: Path) -> None:
    spent = {"total": 7.0, "knn": 1.0, "linear": 2.5, "some-thing": 0.5}
    run = record(tmp_path, Evaluation(3, [], {}, seconds=spent))
    assert run.seconds == [
        ("training", 5.0),
        ("evaluation beside it", 1.75),
        ("checkpoints and the rest", 3.25),
        ("protocols after training", 7.0),
    ]
    assert run.judging == [
        ("the rest", 3.0),
        ("linear classifiers", 2.5),
        ("kNN", 1.0),
        ("some thing", 0.5),
    ]
    twice = record(tmp_path, local={"epochs": 2})
    assert twice.images_per_second == 150 * 2 / 5
    rows = [{"kind": "round", "round": 0, "seconds": 5.0, "images": 150, "accepted": 3}]
    counted = record(tmp_path, rows=rows, local={"steps": 4, "batch": 7})
    assert counted.images_per_second == 3 * 4 * 7 / 5


def test_where_there_was_no_evaluation_the_indicators_are_the_figures(tmp_path: Path) -> None:
    shared, personal = record(tmp_path).scores
    assert (shared.name, shared.value, shared.over, shared.n) == ("global_knn", 0.5, "images", 40)
    assert shared.ci95 is None
    assert (personal.name, personal.value, personal.over) == ("personal_knn", 0.61, "clients")
    assert personal.clients == {0: 0.5, 3: 0.7}
    assert (personal.n, personal.weighted_mean) == (2, 0.65)
    assert personal.std == pytest.approx(statistics.stdev([0.5, 0.7]))
    half = stats.t.ppf(0.975, 1) * statistics.stdev([0.5, 0.7]) / math.sqrt(2)
    assert personal.ci95 == pytest.approx(half)


def test_an_evaluation_of_this_very_checkpoint_goes_before_the_indicators(tmp_path: Path) -> None:
    found = Evaluation(3, [over_images("global_knn", 0.7, 40)], {})
    names = [(score.name, score.value) for score in record(tmp_path, found).scores]
    assert names == [("global_knn", 0.7), ("personal_knn", 0.61)]
    older = Evaluation(2, [over_images("global_knn", 0.7, 40)], {})
    assert record(tmp_path, older).evaluation is None
    assert record(tmp_path, older).scores[0].value == 0.5


def test_where_nothing_was_judged_beside_the_training_the_evaluations_health_is_the_last(
    tmp_path: Path,
) -> None:
    health = {"global": {"std_ratio": 0.5}, "2": {"std_ratio": 0.4}}
    run = record(tmp_path, Evaluation(1, [], health), rows=ROWS[:1])
    assert run.last == {"std_ratio": 0.5, "clients": {"2": {"std_ratio": 0.4}}}
    with_labels = Evaluation(1, [over_images("global_knn", 0.7, 40)], health)
    assert record(tmp_path, with_labels, rows=ROWS[:1]).last == {}
    whole = record(tmp_path, Evaluation(3, [], health))
    assert whole.last == ROWS[-1]


def test_a_run_that_has_only_begun_has_nothing_to_tell(tmp_path: Path) -> None:
    run = record(tmp_path, rows=[])
    assert (run.done, run.last, run.scores, run.seconds) == (0, {}, [], [])
    assert run.images_per_second is None
    assert run.judging == [("the rest", 0.0)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("global_linear", "Linear"),
        ("global_linear_1pct", "Linear with 1 % of the labels"),
        ("personal_finetune_0.5pct", "Fine-tuning with 0.5 % of the labels"),
    ],
)
def test_a_figure_is_named_in_words(name: str, words: str) -> None:
    assert title(name) == over_images(name, 0.5, 4).title == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.24, "0.2 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (60, "1 min"),
        (61, "1 min 1 s"),
        (599, "9 min 59 s"),
        (601, "10 min"),
        (3599.6, "1 h 0 min"),
        (3600 * 25 + 119, "25 h 1 min"),
    ],
)
def test_durations_are_in_the_units_of_people(seconds: float, words: str) -> None:
    assert duration(seconds) == words
