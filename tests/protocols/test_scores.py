"""Figures of two evaluations in one file: what stays, what gives way, in which order."""

import json
from pathlib import Path
from typing import Any

import pytest

from ssfl.errors import CheckpointError
from ssfl.protocols.scores import Evaluation, load_evaluation, over_clients, over_images

OPTIONS = {"linear": {"l2": 1.0}, "finetune": {"epochs": 60}, "clients": 100}
EARLIER = Evaluation(
    3,
    [
        over_images("global_knn", 0.5, 100),
        over_images("global_linear", 0.6, 100),
        over_clients("personal_linear", {0: 0.5, 2: 1.0}, [30, 10]),
    ],
    {"global": {"std": 0.1}, "0": {"std": 0.2}},
    seconds={"knn": 1.0, "linear": 30.0, "features": 4.0, "total": 40.0},
    options=OPTIONS,
)
LATER = Evaluation(
    3,
    [
        over_images("global_knn", 0.7, 100),
        over_images("global_finetune_1pct", 0.8, 100),
        over_clients("personal_knn", {0: 0.25, 2: 0.75}, [30, 10]),
    ],
    {"global": {"std": 0.3}},
    seconds={"knn": 2.0, "semi-finetune": 7.0, "features": 5.0, "total": 16.0},
    options=OPTIONS | {"finetune": {"epochs": 5}, "linear": {"l2": 9.0}},
)


def test_a_later_evaluation_adds_to_an_earlier_one_and_replaces_what_it_measures_again() -> None:
    both = EARLIER.updated(LATER)
    assert [(score.name, score.value) for score in both.scores] == [
        ("global_knn", 0.7),
        ("global_linear", 0.6),
        ("global_finetune_1pct", 0.8),
        ("personal_linear", 0.75),
        ("personal_knn", 0.5),
    ]
    assert both.health == {"global": {"std": 0.3}, "0": {"std": 0.2}}
    # Options as the figures that read them were measured: nothing linear was measured again.
    assert both.options == OPTIONS | {"finetune": {"epochs": 5}}
    assert both.notes == []


def test_the_time_of_two_evaluations_is_that_of_the_parts_that_stand() -> None:
    """Else a page would show a part, of the first, longer than the whole, of the second."""
    seconds = EARLIER.updated(LATER).seconds
    parts = {"knn": 2.0, "linear": 30.0, "features": 5.0, "semi-finetune": 7.0}
    assert seconds == parts | {"total": 16.0 + 30.0}


@pytest.mark.parametrize(
    ("option", "measured", "dropped"),
    [
        ({"clients": 1}, "personal_finetune_1pct", "clients: personal_linear"),
        ({"linear": {"l2": 9.0}}, "personal_linear_1pct", "linear: global_linear, personal_linear"),
    ],
)
def test_a_note_names_the_option_that_has_changed_and_the_figures_that_read_it(
    option: dict[str, Any], measured: str, dropped: str
) -> None:
    score = over_clients(measured, {0: 0.5}, [30])
    both = EARLIER.updated(Evaluation(3, [score], {}, options=OPTIONS | option))
    assert both.notes == [f"dropped what was measured with another setting of {dropped}"]
    assert not {one.name for one in both.scores} & {*dropped.split(": ")[1].split(", ")}


def test_a_figure_that_was_not_measured_is_named_with_those_that_were() -> None:
    with pytest.raises(
        KeyError, match="svm was not measured; there are: global_knn, global_linear"
    ):
        EARLIER["svm"]


def test_a_file_of_another_version_is_not_read_as_if_it_were_ours(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    assert load_evaluation(path) is None
    EARLIER.save(path)
    assert load_evaluation(path) == EARLIER
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2}))
    with pytest.raises(CheckpointError, match=r"evaluation\.json is of another version: run `ssfl"):
        load_evaluation(path)
