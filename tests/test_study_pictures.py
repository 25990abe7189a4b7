"""A study's pictures and page, of results written by hand: every line, dot and number is of the arm
that it is named after."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure as Canvas

from ssfl.reproduce import StudyResult, pictures
from ssfl.reproduce.pages import collect, readme
from ssfl.reproduce.records import Figure, Partition, Result
from ssfl.reproduce.study import Study

STUDY = Study.model_validate(
    {
        "title": "A study",
        "repeats": "nothing",
        "rounds": 4,
        "figures": ["global_linear"],
        "arms": [
            {"name": "plain", "label": "Plain", "recipe": "digits",
             "paper": {"global_linear": 0.75}},
            {"name": "own", "label": "Own", "recipe": "digits",
             "figures": ["personal_linear", "global_linear"]},
            {"name": "never", "label": "Never", "recipe": "digits"},
        ],
        "axis": {
            "label": "batch",
            "scale": "linear",
            "lines": [
                {"label": "of Θ", "points": [
                    {"x": 8, "arm": "plain", "figure": "global_linear"},
                    {"x": 64, "arm": "own", "figure": "global_linear"},
                ]},
                {"label": "of clients", "points": [
                    {"x": 32, "arm": "own", "figure": "personal_linear"},
                ]},
            ],
        },
    }
)  # fmt: skip


def result(arm: str, seed: int, figures: dict[str, float], **curve: list[float | None]) -> Result:
    return Result(
        arm=arm,
        seed=seed,
        rounds=4,
        figures={
            name: Figure(value=value, std=0.3 if name.startswith("personal") else None)
            for name, value in figures.items()
        },
        curve={"round": [2, 4], **curve},
        seconds=70.0,
        evaluation_seconds=10.0,
        command="it",
        device="a machine",
    )


PLAIN = [
    result("plain", 0, {"global_linear": 0.6}, loss=[5.0, 3.0], knn_global=[0.2, 0.4],
           knn_mean=[0.9, 0.9]),
    result("plain", 1, {"global_linear": 0.8}, loss=[7.0, 5.0], knn_global=[0.4, 0.8],
           knn_mean=[0.9, 0.9]),
]  # fmt: skip
OWN = result("own", 0, {"personal_linear": 0.5, "global_linear": 0.4}, loss=[2.0, None],
             knn_global=[0.9, 0.9], knn_mean=[0.1, 0.3])  # fmt: skip


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """The axes of the study's pictures, by their names."""
    return axes_of(monkeypatch, tmp_path, [*PLAIN, OWN])


def axes_of(monkeypatch: pytest.MonkeyPatch, folder: Path, results: list[Result]) -> dict[str, Any]:
    kept: dict[str, Any] = {}

    @contextmanager
    def held(path: Path, width: float, height: float, *, columns: int = 1, style: Any) -> Iterator:
        kept[path.stem] = Canvas(figsize=(width, height), layout="constrained").subplots(1, columns)
        yield kept[path.stem]

    monkeypatch.setattr(pictures, "picture", held)
    pictures.draw(StudyResult(name="it", study=STUDY, results=results), folder)
    return kept


def lines(axes: Any) -> dict[str, list[tuple[float, float]]]:
    handles, labels = axes.get_legend_handles_labels()
    found = {}
    for handle, label in zip(handles, labels, strict=True):
        line = handle[0] if isinstance(handle, tuple) else handle
        xs, ys = line.get_data()
        found[label] = [(float(x), pytest.approx(float(y))) for x, y in zip(xs, ys, strict=True)]
    return found


def test_curves_are_means_over_seeds_of_what_each_arm_is_judged_by(drawn: dict[str, Any]) -> None:
    left, right = drawn["curves"]
    assert lines(left) == {"Plain": [(2, 0.3), (4, 0.6)], "Own": [(2, 0.1), (4, 0.3)]}
    assert lines(right) == {"Plain": [(2, 6.0), (4, 4.0)], "Own": [(2, 2.0)]}
    # A line through one point would not be seen.
    assert [line.get_marker() for line in right.lines] == ["", "o"]
    (band,) = left.collections  # of the arm with two seeds
    corners = {(float(x), round(float(y), 6)) for x, y in band.get_paths()[0].vertices}
    assert corners == {(2, 0.2), (2, 0.4), (4, 0.4), (4, 0.8)}


def test_a_mean_over_seeds_is_drawn_where_all_of_them_were_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    often = result("plain", 1, {"global_linear": 0.7}, knn_global=[0.5, 0.7, 0.7, None])
    often.curve["round"] = [1, 2, 3, 4]
    left, _ = axes_of(monkeypatch, tmp_path, [PLAIN[0], often])["curves"]
    assert lines(left) == {"Plain": [(2, 0.45)]}
    left, _ = axes_of(monkeypatch, tmp_path, [often])["curves"]
    assert lines(left) == {"Plain": [(1, 0.5), (2, 0.7), (3, 0.7)]}


@pytest.mark.parametrize(
    ("results", "title"),
    [
        (PLAIN, "kNN accuracy of Θ"),
        ([OWN], "kNN accuracy, mean over clients"),
        ([*PLAIN, OWN], "kNN accuracy"),
    ],
    ids=["shared", "personal", "both"],
)
def test_the_title_says_whose_accuracy_it_is_where_it_is_one(
    results: list[Result], title: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    left, _ = axes_of(monkeypatch, tmp_path, results)["curves"]
    assert left.get_title() == title


def test_dots_are_ours_and_diamonds_the_papers(drawn: dict[str, Any]) -> None:
    axes = drawn["figures"]
    places = dict(
        zip(axes.get_yticks().round(9), (t.get_text() for t in axes.get_yticklabels()), strict=True)
    )
    plain, own, own_too = 0.0, 1.2, 1.8  # the last two are figures of one run
    assert places == {plain: "Plain", (own + own_too) / 2: "Own"}
    dots: dict[float, Any] = {}
    diamonds: dict[float, Any] = {}
    for line in axes.lines:
        if line.get_marker() in ("o", "D"):
            ((x, y),) = line.get_xydata()
            (dots if line.get_marker() == "o" else diamonds)[round(y, 9)] = pytest.approx(x)
    assert dots == {plain: 0.7, own: 0.5, own_too: 0.4}
    assert diamonds == {plain: 0.75}
    spread = 0.1 * 2**0.5  # of 0.6 and 0.8
    assert [(text.get_text(), *text.xy) for text in axes.texts] == [  # where their spread ends
        ("0.700", pytest.approx(0.7 - spread), pytest.approx(plain)),
        ("0.500", pytest.approx(0.5), pytest.approx(own)),
        ("0.400", pytest.approx(0.4), pytest.approx(own_too)),
    ]
    whole, *_ = (bar.get_segments() for bar in axes.collections if len(bar.get_segments()))
    (start, end) = whole[0]
    assert (start[0], end[0]) == (pytest.approx(0.7 - spread), pytest.approx(0.7 + spread))
    (legend,) = axes.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "Linear (Θ)",
        "Linear (personal)",
        "the paper (4 rounds)",
    ]


def test_a_line_against_a_quantity_has_its_own_arms_figures(drawn: dict[str, Any]) -> None:
    axes = drawn["against"]
    assert lines(axes) == {"of Θ": [(8, 0.7), (64, 0.4)], "of clients": [(32, 0.5)]}
    assert [text.get_text() for text in axes.get_xticklabels()] == ["8", "32", "64"]
    assert axes.get_xlabel() == "batch"


def test_a_picture_against_a_quantity_says_the_rounds_of_what_it_shows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere = result("never", 0, {"global_linear": 0.5}).model_copy(update={"rounds": 20})
    axes = axes_of(monkeypatch, tmp_path, [*PLAIN, elsewhere])["against"]
    assert [text.get_text() for text in axes.texts] == ["4 rounds"]


def test_the_page_says_how_long_it_took_and_who_holds_how_much(tmp_path: Path) -> None:
    part = Partition(sizes=[30, 1200, 70], data="digits", version="1", command="it")
    found = StudyResult(name="it", study=STUDY, results=PLAIN, partitions={"own": part})
    page = readme(found, tmp_path)
    assert "- `it`: 2 runs, 2 min 40 s on a machine;" in page
    assert "**Own**: 1,300 training images of digits over 3 clients, from 30 to 1,200 each." in page


def test_the_map_of_all_studies_counts_the_arms_that_have_figures(tmp_path: Path) -> None:
    StudyResult(name="it", study=STUDY, results=PLAIN).save(tmp_path / "it")
    collect(tmp_path, tmp_path / "RESULTS.md")
    assert "| `it` | nothing | 1 of 3 |" in (tmp_path / "RESULTS.md").read_text()
