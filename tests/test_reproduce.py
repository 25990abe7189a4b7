"""Studies: small ones run to their end, cut off and gone on with; the paper's are sound."""

import csv
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.figure
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import ssfl
from ssfl.commands.reproduce import reproduce as command
from ssfl.config import load_config
from ssfl.errors import CheckpointError, ConfigError
from ssfl.experiment import Quiet
from ssfl.federation.messages import Reply, TaskKind
from ssfl.locks import claimed
from ssfl.protocols.judge import ProtocolOptions
from ssfl.protocols.scores import Score
from ssfl.reproduce import StudyResult, estimate, load_study, made, reproduce, studies
from ssfl.reproduce.alike import differences
from ssfl.reproduce.estimate import LEAST_ROUNDS, Timing, fitting_rounds, parse_duration
from ssfl.reproduce.jobs import Job
from ssfl.reproduce.pages import collect, readme, write_pages
from ssfl.reproduce.pictures import below
from ssfl.reproduce.records import Figure, Partition, Result, Unfinished
from ssfl.reproduce.results import load_result
from ssfl.reproduce.rows import common_settings
from ssfl.reproduce.study import _CURVE_POINTS as CURVE_POINTS
from ssfl.reproduce.study import protocols
from ssfl.reproduce.synthetic import make_gld23k
from ssfl.reproduce.watch import Clock, OutOfTime, Plan, Until, Unwatched
from ssfl.run import Run

SMALL = [
    "data.test_fraction=0.7",
    "partition.clients=3",
    "model.width=4",
    "ssl.projector_width=16",
    "ssl.predictor_width=8",
    "evaluation.baselines=false",
    "device.device=cpu",
    "device.workers=1",
    "run.checkpoint_every=1",
]
ARMS = """
[[arms]]
name = "plain"
label = "Plain"
recipe = "digits"
settings = {plain}
figures = ["global_federated_linear", "effective_rank"]
paper = {{ global_federated_linear = 0.75 }}

[[arms]]
name = "personal"
label = "Personal"
recipe = "digits"
settings = {personal}
"""


def write_study(folder: Path, name: str = "tiny", figures: str = '"personal_knn"') -> Path:
    path = folder / f"{name}.toml"
    head = (
        'title = "A tiny study"\nrepeats = "nothing"\nrounds = 800\nseeds = 2\n'
        f"figures = [{figures}]\n[options.linear]\nrounds = 3\niterations = 20\n"
    )
    personal = ["algorithm.name=per-ssfl", *SMALL]
    path.write_text(head + ARMS.format(plain=json.dumps(SMALL), personal=json.dumps(personal)))
    return path


class Seen(Unwatched):
    """Remembers what was planned and begun; may break off a run between two rounds."""

    def __init__(self, breaks: type[BaseException] | None = None, at: int = 1) -> None:
        self.begun: list[str] = []
        self.judged: list[str] = []
        self.planned: list[Plan] = []
        self.totals: list[float | None] = []
        self.breaks, self.at = breaks, at

    def plan(self, plan: Plan) -> None:
        self.planned.append(plan)
        self.totals.append(plan.total())  # before anything is done

    def begin(self, job: Job, place: int, total: int) -> Any:
        self.begun.append(job.name)
        breaks = self.breaks if len(self.begun) > self.at else None

        class Breaking(Quiet):
            def begin_round(self, round_: int, clients: int) -> None:
                if breaks is not None and round_ == 1:
                    raise breaks

        return Breaking()

    def evaluation(self, job: Job) -> Any:
        self.judged.append(job.name)
        return super().evaluation(job)


class Killed(BaseException):
    """Nothing is saved on the way out."""


class Whole:
    """A tiny study that ran undisturbed."""

    def __init__(self, folder: Path) -> None:
        self.study, self.out, self.seen = write_study(folder), folder / "results", Seen()
        self.folder = self.out / "tiny"
        dry = reproduce(self.study, rounds=2, out=self.out, watch=self.seen, dry_run=True)
        assert not dry.results
        started = time.perf_counter()
        self.result = reproduce(self.study, rounds=2, out=self.out, watch=self.seen, command="it")
        self.seconds = time.perf_counter() - started


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(tmp_path_factory.mktemp("whole"))


def figures(result: StudyResult) -> dict[tuple[str, int], Any]:
    return {(r.arm, r.seed): (r.rounds, r.figures, r.health, r.curve) for r in result.results}


# A study as a whole


def test_every_arm_and_seed_is_run_the_first_seed_of_all_arms_first(whole: Whole) -> None:
    expected = ["plain-seed0", "personal-seed0", "plain-seed1", "personal-seed1"]
    assert whole.seen.begun == expected
    assert {(r.arm, r.seed) for r in whole.result.results} == set(figures(whole.result))
    assert not whole.result.unfinished


def test_a_figure_comes_with_all_that_made_it(whole: Whole) -> None:
    raw = json.loads((whole.folder / "results.json").read_text())
    for result in raw["results"]:
        assert result["command"] == "it"
        assert result["version"]
        assert result["device"]
        assert "commit" in result
        assert result["rounds"] == 2
        run = whole.folder / result["run"]
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        spent = {
            k: sum(r["seconds"] for r in rows if r["kind"] == k) for k in ("round", "evaluation")
        }
        assert result["seconds"] == pytest.approx(spent["round"])
        assert result["evaluation_seconds"] > spent["evaluation"] > 0
        losses = {r["round"] + 1: r["loss"] for r in rows if r["kind"] == "round"}
        assert result["curve"]["loss"] == [losses[1], losses[2]]
        facts = json.loads((run / "facts.json").read_text())
        assert (result["clients"], result["train_images"]) == (3, facts["train_images"])
        assert facts["train_images"] != facts["test_images"]
        assert result["config"]["seed"] == result["seed"]
        assert (run / "final.json").is_file()
    personal = next(r for r in raw["results"] if r["arm"] == "personal")
    clients = personal["figures"]["personal_knn"]["clients"]
    assert len(clients) == 3
    value = personal["figures"]["personal_knn"]["value"]
    assert value == pytest.approx(sum(clients.values()) / 3)


def test_figures_are_those_of_the_last_evaluation_not_the_best(whole: Whole) -> None:
    for result in whole.result.results:
        saved = json.loads((whole.folder / result.run / "final.json").read_text())
        assert result.figures["global_knn"].value == pytest.approx(saved["knn_global"])
        assert result.curve["round"] == [1, 2]


def test_the_page_says_the_rounds_and_the_difference(whole: Whole) -> None:
    page = (whole.folder / "README.md").read_text()
    values = [r.figures["global_federated_linear"].value for r in whole.result.results[:2]]
    mean, std = np.mean(values), np.std(values, ddof=1)
    row = next(line for line in page.splitlines() if line.startswith("| Plain"))
    assert "0.7500" in row
    assert f"{mean:.4f} ± {std:.4f}" in row
    assert f"{mean - 0.75:+.4f}".replace("-", "−") in row
    assert "**2**, not 800" in row
    assert "`it`: 4 runs" in page
    assert "± is the standard deviation over seeds; bands around curves span them." in page


def test_there_are_tables_and_pictures(whole: Whole) -> None:
    for name in ("curves.png", "figures.png"):
        assert (whole.folder / name).read_bytes().startswith(b"\x89PNG")
        assert f"({name})" in (whole.folder / "README.md").read_text()
    lines = (whole.folder / "results.csv").read_text().splitlines()
    assert lines[0].startswith("study,arm,label")
    assert sum(",global_federated_linear," in line for line in lines) == 2


@pytest.mark.parametrize(
    ("label", "columns"),
    [("rate 0.2", 4), ("rate 0.2, weight decay 1e-3, momentum kept", 2), ("long " * 40, 1)],
)
def test_a_legend_below_has_as_many_columns_as_there_is_room_for(label: str, columns: int) -> None:
    figure = matplotlib.figure.Figure(figsize=(11.5, 4.4), dpi=100, layout="constrained")
    axes = figure.subplots()
    lines = [axes.plot([0, 1], [0, place])[0] for place in range(11)]
    below(figure, lines, [f"{place}: {label}" for place in range(11)])
    figure.draw_without_rendering()
    (legend,) = figure.legends
    boxes = [text.get_window_extent() for text in legend.get_texts()]
    assert len({round(box.x0) for box in boxes}) == columns
    if columns > 1:
        assert all(box.x0 > 0 and box.x1 < figure.bbox.width for box in boxes)
    assert axes.bbox.height > 300  # the legend's room is not the lines'


def test_the_estimate_is_of_the_right_size(whole: Whole) -> None:
    estimate = whole.seen.totals[0]
    assert estimate is not None
    assert whole.seconds / 4 < estimate < 4 * whole.seconds


def test_what_is_done_is_not_done_again(whole: Whole) -> None:
    seen, before = Seen(), (whole.folder / "results.json").read_text()
    again = reproduce(whole.study, rounds=2, out=whole.out, watch=seen)
    assert not seen.begun
    assert not seen.judged
    assert figures(again) == figures(whole.result)
    assert (whole.folder / "results.json").read_text() == before


def test_another_configuration_in_the_same_place_is_refused(whole: Whole) -> None:
    with pytest.raises(ConfigError, match=r"server\.rounds is 2 there and 5 here.*--rounds 2"):
        reproduce(whole.study, rounds=5, out=whole.out)
    with pytest.raises(ConfigError, match=r"local\.lr is 0\.05 there and 0\.5 here"):
        reproduce(whole.study, rounds=2, out=whole.out, settings=["local.lr=0.5"])


def test_a_run_of_another_study_is_judged_and_not_trained_again(whole: Whole) -> None:
    other = write_study(whole.study.parent, "other", '"personal_linear"')
    seen = Seen()
    result = reproduce(
        other, rounds=2, seeds=1, arms=["personal"], out=whole.out, watch=seen, timing=False
    )
    assert not seen.begun
    assert seen.judged == ["personal-seed0"]
    assert result.results[0].run == "../tiny/runs/personal-seed0"
    mine = next(r for r in whole.result.results if r.arm == "personal" and r.seed == 0)
    assert result.results[0].figures["personal_knn"] == mine.figures["personal_knn"]
    assert [arm.name for arm in result.not_run()] == ["plain"]
    assert "- Plain: not run" in (whole.out / "other" / "README.md").read_text()


def test_runs_of_a_study_that_has_changed_are_never_averaged(whole: Whole, tmp_path: Path) -> None:
    """Of the runs before only results.json is left, as in a repository."""
    (tmp_path / "tiny").mkdir()
    shutil.copy(whole.folder / "results.json", tmp_path / "tiny")
    path = write_study(tmp_path)
    faster = json.dumps([*SMALL, "local.lr=0.5", "local.batch=32"])
    path.write_text(path.read_text().replace(json.dumps(SMALL), faster))
    common: dict[str, Any] = {"rounds": 2, "seeds": 1, "arms": ["plain"], "timing": False}
    found = reproduce(path, out=tmp_path, **common)
    then = ("local.batch=64", "local.lr=0.05")
    rows = [row for row in found.rows() if row.figure == "global_federated_linear"]
    assert [(row.seeds, row.outdated) for row in rows] == [((0,), ()), ((0, 1), then)]
    old = [row for row in whole.result.rows() if row.figure == "global_federated_linear"]
    assert rows[1].values == old[0].values
    page = (tmp_path / "tiny" / "README.md").read_text()
    assert "| Plain (`local.batch=64`, `local.lr=0.05`) |" in page
    assert "Settings in brackets were in the place of the study's." in page
    assert "| Personal |" in page  # as the study still says
    assert reproduce(path, out=tmp_path, **common) == found


def test_runs_are_judged_again_when_the_study_judges_otherwise(
    whole: Whole, tmp_path: Path
) -> None:
    shutil.copytree(whole.out, tmp_path / "out")
    common: dict[str, Any] = {"rounds": 2, "seeds": 1, "out": tmp_path / "out"}
    record = tmp_path / "out" / "tiny" / "runs" / "plain-seed0.json"
    noted = json.loads(record.read_text())
    record.write_text(json.dumps({k: v for k, v in noted.items() if k != "options"}))
    path = write_study(tmp_path)
    path.write_text(path.read_text().replace("[options.", "[options]\nclients = 2\n[options."))
    seen, again = Seen(), Seen()
    found = reproduce(path, watch=seen, timing=False, **common)
    assert not seen.begun
    assert seen.judged == ["personal-seed0"]  # of the other it was not noted how
    personal = [row for row in found.rows() if row.arm.name == "personal"]
    assert [(row.seeds, row.outdated) for row in personal] == [
        ((0,), ()),
        ((1,), ("options.clients=100",)),
    ]
    judged = next(r for r in found.results if (r.arm, r.seed) == ("personal", 0))
    assert len(judged.figures["personal_knn"].clients) == 2
    reproduce(path, watch=again, **common)
    assert not again.judged


def test_runs_of_an_arm_that_left_are_kept_and_come_back_with_it(
    whole: Whole, tmp_path: Path
) -> None:
    shutil.copytree(whole.out / "tiny", tmp_path / "out" / "tiny")
    path, common = write_study(tmp_path), {"rounds": 2, "out": tmp_path / "out", "timing": False}
    before = path.read_text()
    path.write_text(before.replace('name = "plain"', 'name = "simple"'))
    seen = Seen()
    found = reproduce(path, seeds=1, watch=seen, **common)  # type: ignore[arg-type]
    assert not seen.begun  # the former arm's run is of the same configuration
    assert [(r.arm, r.seed) for r in found.former] == [("plain", 0), ("plain", 1)]
    assert [(row.arm.name, row.seeds) for row in found.rows()] == [
        *[("simple", (0,))] * 2,
        ("personal", (0, 1)),
    ]
    page = (tmp_path / "out" / "tiny" / "README.md").read_text()
    assert "- there too, of arms that have left the study: plain" in page
    assert "plain" not in (tmp_path / "out" / "tiny" / "results.csv").read_text()
    collect(tmp_path / "out", tmp_path / "RESULTS.md")
    path.write_text(before)
    back = reproduce(path, **common)  # type: ignore[arg-type]
    assert figures(back) == figures(whole.result)
    assert [r.arm for r in back.former] == ["simple"]


def test_a_folder_with_another_studys_results_is_refused(whole: Whole, tmp_path: Path) -> None:
    path = write_study(tmp_path)
    text = path.read_text().replace('"A tiny study"', '"Another"')
    path.write_text(text)  # its title alone is new: still the same study
    reproduce(path, rounds=2, out=whole.out, dry_run=True)
    path.write_text(text.replace('"plain"', '"one"').replace('"personal"', '"other"'))
    results = (whole.folder / "results.json").read_bytes()
    told = r"another study \(A tiny study\): choose another --out, or give your file another name"
    with pytest.raises(ConfigError, match=told):
        reproduce(path, rounds=2, out=whole.out)
    assert (whole.folder / "results.json").read_bytes() == results


def test_a_seed_or_an_arm_named_twice_is_run_once(whole: Whole, tmp_path: Path) -> None:
    seen, twice = Seen(), ["plain", "plain"]
    common: dict[str, Any] = {"out": tmp_path, "timing": False, "dry_run": True, "watch": seen}
    reproduce(whole.study, rounds=2, seeds=[3, 3], arms=twice, **common)
    assert [job.name for job in seen.planned[0].jobs] == ["plain-seed3"]


def test_health_that_was_not_asked_for_before_is_measured(whole: Whole, tmp_path: Path) -> None:
    shutil.copytree(whole.out / "tiny" / "runs", tmp_path / "tiny" / "runs")
    options = load_study(whole.study)[1].options
    for record in (tmp_path / "tiny" / "runs").glob("*.json"):
        record.unlink()
    run = tmp_path / "tiny" / "runs" / "plain-seed0"
    (run / "evaluation.json").unlink()
    ssfl.evaluate(run, ["federated-linear"], options=options)
    common: dict[str, Any] = {"rounds": 2, "seeds": 1, "arms": ["plain"], "timing": False}
    found = reproduce(whole.study, out=tmp_path, **common)
    assert (
        found.value("plain", "effective_rank") == whole.result.results[0].health["effective_rank"]
    )


@pytest.mark.parametrize("broken", ["cut", "unknown"])
def test_a_record_that_cannot_be_read_is_made_again(
    whole: Whole, tmp_path: Path, broken: str
) -> None:
    shutil.copytree(whole.out / "tiny" / "runs", tmp_path / "tiny" / "runs")
    record = tmp_path / "tiny" / "runs" / "plain-seed0.json"
    text = record.read_text()
    record.write_text(text[:99] if broken == "cut" else text.replace('"batch"', '"gone"', 1))
    seen = Seen()
    found = reproduce(whole.study, rounds=2, out=tmp_path, watch=seen, timing=False)
    assert not seen.begun
    assert seen.judged == ["plain-seed0"]
    assert figures(found) == figures(whole.result)


def test_a_broken_file_of_a_run_is_named_with_what_mends_it(whole: Whole, tmp_path: Path) -> None:
    shutil.copytree(whole.out / "tiny", tmp_path / "tiny")
    path = tmp_path / "tiny" / "runs" / "personal-seed0"
    for name in ("final.json", "facts.json", "evaluation.json"):
        (path / name).write_text('{"rounds": 2, "clie')
    with pytest.raises(
        CheckpointError, match=r"final\.json cannot be read .*: delete it, and `ssfl"
    ):
        _ = Run(path).final
    with pytest.raises(
        CheckpointError, match=r"facts\.json cannot be read .*: delete it, and `ssfl"
    ):
        _ = Run(path).facts
    with pytest.raises(CheckpointError, match=r"evaluation\.json cannot be read .*ssfl evaluate"):
        ssfl.evaluate(path, ["knn"])
    for name in ("final.json", "facts.json", "evaluation.json"):
        (path / name).unlink()
    ssfl.resume(path)
    assert Run(path).final["rounds"] == 2
    assert Run(path).facts["clients"] == 3


def test_a_broken_run_is_no_twin_and_no_hindrance(whole: Whole, tmp_path: Path) -> None:
    shutil.copytree(whole.out / "tiny", tmp_path / "tiny")
    (tmp_path / "tiny" / "runs" / "personal-seed0" / "final.json").write_bytes(b"\xff")
    other, seen = write_study(tmp_path, "other"), Seen()
    common: dict[str, Any] = {"out": tmp_path, "timing": False, "dry_run": True, "watch": seen}
    reproduce(other, rounds=2, seeds=1, **common)
    assert [job.twin is None for job in seen.planned[0].jobs] == [False, True]


def adapted_study(folder: Path, leash: str, foot: str, seeds: int = 1) -> Path:
    """A study whose second arm judges an adapted Θ, as the first one's run may have trained it."""
    path = folder / "leash.toml"
    leashed = json.dumps(["algorithm.name=bilevel-ssfl", *SMALL, leash])
    adapted = json.dumps(["algorithm.name=la-ssfl", "algorithm.adapt_lr=0.5", *SMALL, foot])
    head = 'title = "Leash"\nrepeats = "nothing"\nrounds = 800\nfigures = ["personal_linear"]\n'
    path.write_text(
        f"{head}seeds = {seeds}\n[options.linear]\nrounds = 3\niterations = 20\n"
        + ARMS.format(plain=leashed, personal=adapted)
    )
    return path


def test_theta_that_another_algorithms_run_has_trained_is_not_trained_again(tmp_path: Path) -> None:
    path, seen, alone = adapted_study(tmp_path, "local.lr=0.05", "local.lr=0.05"), Seen(), Seen()
    common: dict[str, Any] = {"rounds": 2, "timing": False}
    found = reproduce(path, out=tmp_path / "both", watch=seen, **common)
    assert seen.begun == ["plain-seed0"]
    assert seen.judged == ["plain-seed0", "personal-seed0"]
    theirs = reproduce(
        path, out=tmp_path / "alone", arms=["personal"], watch=alone, command="it", **common
    )
    assert alone.begun == ["personal-seed0"]
    shared, own = found.results[1], theirs.results[0]
    assert (shared.arm, shared.theta_of, own.theta_of) == ("personal", "bilevel-ssfl", "")
    assert shared.figures == own.figures
    assert shared.figures["personal_knn"] != found.results[0].figures["personal_knn"]
    assert shared.health == own.health
    assert shared.config["algorithm"] == own.config["algorithm"]
    assert shared.seconds == 0
    assert own.seconds > 0
    assert shared.curve == {k: v for k, v in own.curve.items() if k != "knn_mean"}
    page = (tmp_path / "both" / "leash" / "README.md").read_text()
    assert "; personal by the Θ of bilevel-ssfl's run" in page
    assert (tmp_path / "both" / "leash" / "curves.png").is_file()
    again = Seen()
    same = reproduce(path, out=tmp_path / "both", watch=again, **common)
    assert not again.judged
    assert figures(same) == figures(found)


def test_theta_of_other_settings_or_seeds_is_trained(tmp_path: Path) -> None:
    path, seen = adapted_study(tmp_path, "local.lr=0.05", "local.lr=0.04", seeds=2), Seen()
    reproduce(path, rounds=1, out=tmp_path, timing=False, watch=seen)
    assert seen.begun == ["plain-seed0", "personal-seed0", "plain-seed1", "personal-seed1"]
    (tmp_path / "less").mkdir()
    same, less = adapted_study(tmp_path / "less", "local.lr=0.05", "local.lr=0.05", seeds=2), Seen()
    arms: dict[str, Any] = {"rounds": 1, "timing": False, "watch": less, "out": tmp_path / "less"}
    reproduce(same, arms=["plain"], seeds=1, **arms)
    reproduce(same, arms=["personal"], seeds=(1,), **arms)
    assert less.begun == ["plain-seed0", "personal-seed1"]


def test_a_run_with_personal_encoders_is_judged_by_no_other_algorithms(tmp_path: Path) -> None:
    path = adapted_study(tmp_path, "local.lr=0.05", "local.lr=0.05")
    path.write_text(path.read_text().replace('"algorithm.adapt_lr=0.5", ', ""))
    path.write_text(path.read_text().replace("la-ssfl", "per-ssfl"))
    seen = Seen()
    reproduce(path, rounds=1, out=tmp_path, timing=False, watch=seen)
    assert seen.begun == ["plain-seed0", "personal-seed0"]


def test_what_comes_with_another_run_is_timed_as_an_evaluation(tmp_path: Path) -> None:
    path, seen = adapted_study(tmp_path, "local.lr=0.05", "local.lr=0.05"), Seen()
    reproduce(path, rounds=2, out=tmp_path, dry_run=True, watch=seen)
    (plan,) = seen.planned
    first, second = plan.jobs
    assert plan.seconds(second) == plan.timings["personal"].evaluation
    assert plan.seconds(first) > plan.timings["plain"].evaluation  # type: ignore[operator]


def test_without_a_global_encoder_the_personal_figures_are_kept(tmp_path: Path) -> None:
    path = write_study(tmp_path, figures='"personal_linear"')
    path.write_text(path.read_text().replace("per-ssfl", "local-only"))
    found = reproduce(path, rounds=1, seeds=1, arms=["personal"], out=tmp_path, timing=False)
    assert set(found.results[0].figures) == {"personal_linear", "personal_knn"}


def test_a_run_that_cannot_be_judged_costs_itself_alone(tmp_path: Path) -> None:
    path, text = write_study(tmp_path, figures='"personal_linear"'), "algorithm.name=per-ssfl"
    mad = 'algorithm.name=local-only", "local.lr=1e9", "local.steps=1'
    path.write_text(path.read_text().replace(text, mad))
    found = reproduce(path, rounds=1, seeds=2, out=tmp_path, timing=False)
    assert [(result.arm, result.seed) for result in found.results] == [("plain", 0), ("plain", 1)]
    assert [left.arm for left in found.unfinished] == ["personal", "personal"]
    for left in found.unfinished:
        assert left.why.startswith("failed: personal_linear cannot be measured on this run")
        assert "training has diverged" in left.why


@pytest.mark.parametrize("how", [KeyboardInterrupt, Killed])
def test_cut_off_and_gone_on_with_it_comes_to_the_same_figures(
    whole: Whole, tmp_path: Path, how: type[BaseException]
) -> None:
    common: dict[str, Any] = {"rounds": 2, "seeds": 1, "out": tmp_path, "timing": False}
    with pytest.raises(how):
        reproduce(whole.study, watch=Seen(how), **common)
    part = load_result(tmp_path / "tiny" / "results.json")
    assert part is not None
    assert [r.arm for r in part.results] == ["plain"]
    assert [u.why for u in part.unfinished] == [
        "stopped before it was done (saved after 1 of 2 rounds)"
    ]
    seen = Seen()
    result = reproduce(whole.study, watch=seen, **common)
    assert seen.begun == ["personal-seed0"]
    expected = {key: value for key, value in figures(whole.result).items() if key[1] == 0}
    assert figures(result) == expected
    assert not result.unfinished


def test_a_spent_budget_leaves_the_rest_as_not_run(whole: Whole, tmp_path: Path) -> None:
    (tmp_path / "tiny" / "runs").mkdir(parents=True)
    timing = (whole.folder / "runs" / "timing.json").read_bytes()  # nothing need be timed again
    (tmp_path / "tiny" / "runs" / "timing.json").write_bytes(timing)
    seen = Seen()
    result = reproduce(whole.study, rounds=2, budget=1e-3, out=tmp_path, watch=seen)
    assert not seen.begun
    assert len(result.unfinished) == 4
    assert {u.why for u in result.unfinished} == {"the budget was spent"}
    assert "- Plain: not run" in (tmp_path / "tiny" / "README.md").read_text()


def test_a_budget_for_given_rounds_needs_no_timing(whole: Whole, tmp_path: Path) -> None:
    seen = Seen()
    result = reproduce(
        whole.study, rounds=2, seeds=1, budget=1e-3, out=tmp_path, timing=False, watch=seen
    )
    assert not seen.planned[0].timings
    assert not (tmp_path / "tiny" / "runs" / "timing.json").exists()
    assert {u.why.partition(" (")[0] for u in result.unfinished} == {"the budget was spent"}


def test_a_budget_decides_the_rounds_and_says_so(whole: Whole, tmp_path: Path) -> None:
    (tmp_path / "tiny" / "runs").mkdir(parents=True)
    known = json.loads((whole.folder / "runs" / "timing.json").read_text())
    for timing in known.values():  # of a device where everything but rounds is free
        timing |= dict.fromkeys(timing, 0.0) | {"round": 1.0, "partial": False}
    (tmp_path / "tiny" / "runs" / "timing.json").write_text(json.dumps(known))
    common: dict[str, Any] = {"out": tmp_path, "dry_run": True}
    seen = Seen()
    settings = ["evaluation.every=0"]
    reproduce(whole.study, seeds=1, budget=20 / 0.9, settings=settings, watch=seen, **common)
    plan = seen.planned[0]
    assert {job.config.server.rounds for job in plan.jobs} == {10}
    assert plan.total() == pytest.approx(20)
    reproduce(whole.study, budget=20, watch=seen, **common)
    assert f"no room for {LEAST_ROUNDS} rounds" in seen.planned[1].notes[0]
    assert "the study: 800" in seen.planned[1].notes[0]


def test_a_command_with_a_name_in_it_that_is_no_text_can_be_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / os.fsdecode(b"bad\xff")
    folder.mkdir()
    path, asked = write_study(folder), {"rounds": 1, "seeds": 1, "timing": False}
    monkeypatch.setattr(sys, "argv", ["ssfl", "reproduce", str(path)])
    found = reproduce(path, **asked, arms=["plain"], out=tmp_path)
    assert "bad\N{REPLACEMENT CHARACTER}/tiny.toml" in found.results[0].command


def test_a_figures_commit_is_the_one_its_program_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = iter(["then", "now", "now"])
    monkeypatch.setattr(made, "commit", lambda: next(commits))
    found = reproduce(write_study(tmp_path), rounds=1, seeds=1, timing=False, out=tmp_path)
    assert [result.commit for result in found.results] == ["then", "then"]


# Time


def test_rounds_fit_into_a_budget_as_a_closed_form_says() -> None:
    config = load_config("digits", ["evaluation.every=0", "run.checkpoint_every=100000"])
    timing = Timing(setup=3, warmup=2, round=0.5, judging=1, saving=1, evaluation=4)
    for jobs, seconds in ((1, 111.0), (4, 333.3), (7, 2000.0)):
        expected = int((seconds / jobs - 3 - 2 - 1 - 1 - 4) / 0.5)
        assert fitting_rounds([(timing, config)] * jobs, seconds, 10_000) == expected
    assert fitting_rounds([(timing, config)], 1e9, 800) == 800
    assert fitting_rounds([(timing, config)], 11.2, 800) is None


def test_a_resumed_run_is_reckoned_by_what_is_left() -> None:
    config = load_config("digits", ["evaluation.every=0", "server.rounds=50"])
    timing = Timing(setup=3, warmup=2, round=0.5, judging=1, saving=0, evaluation=4)
    assert timing.run(config) == pytest.approx(3 + 2 + 25 + 1 + 4)
    assert timing.run(config, done=40) == pytest.approx(3 + 2 + 5 + 1 + 4)
    assert timing.run(config, done=50) == pytest.approx(4)


def test_rounds_of_theta_alone_are_reckoned_by_what_they_take() -> None:
    settings = ["evaluation.every=0", "algorithm.begin=0.75", "server.rounds=50"]
    config = load_config("digits", ["algorithm.name=per-ssfl", *settings])
    timing = Timing(
        setup=3, warmup=2, round=0.5, judging=1, saving=0, evaluation=4, alone=0.125
    )  # θ_k begins with the 39th round, the first at 38 / 50 >= 0.75
    assert timing.run(config) == pytest.approx(3 + 2 + 38 * 0.125 + 12 * 0.5 + 1 + 4)
    assert timing.run(config, done=30) == pytest.approx(3 + 2 + 8 * 0.125 + 12 * 0.5 + 1 + 4)
    assert timing.run(config, done=40) == pytest.approx(3 + 2 + 10 * 0.5 + 1 + 4)


@pytest.mark.parametrize("every", [7, 10, 300])
def test_evaluations_and_checkpoints_are_reckoned_one_by_one(every: int) -> None:
    config = load_config("digits", [f"evaluation.every={every}", "run.checkpoint_every=9"])
    timing = Timing(setup=0, warmup=0, round=0.5, judging=10, saving=1000, evaluation=0)
    points = min(every, 200 // CURVE_POINTS)
    judged = sum(done % points == 0 or done == 200 for done in range(1, 201))
    saved = sum(done % 9 == 0 or done == 200 for done in range(1, 201))
    assert timing.run(config, 200) == 100 + 10 * judged + 1000 * saved


class Pretence:
    """`train` and `evaluate` that take the time they are told, by a clock of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rounds: list[list[tuple[float, int]]]):
        self.now, self.rounds = 100.0, rounds
        monkeypatch.setattr(estimate, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(estimate, "train", self.train)
        monkeypatch.setattr(estimate, "evaluate", self.evaluate)

    def train(self, config: Any, out: Path, display: Any) -> Any:
        assert (config.server.rounds, config.evaluation.every) == (3, 0)
        self.now += 5
        run = SimpleNamespace(config=config, facts={"train_images": 1000})
        display.start(run, 10, 3, 0)
        for number, replies in enumerate(self.rounds):
            display.begin_round(number, len(replies))
            for seconds, samples in replies:
                self.now += seconds
                display.reply(Reply(0, TaskKind.TRAIN, number, samples=samples))
            display.row({"kind": "round"})
        self.now += 0.5
        display.row({"kind": "evaluation"})
        self.now += 0.25
        return run

    def evaluate(self, *given: Any, **options: Any) -> None:
        self.now += 7


def measured(*settings: str) -> Timing:
    config = load_config("digits", settings)
    return estimate.measure(config, ("knn",), ProtocolOptions(), Path("nowhere"))


def test_parts_of_a_run_are_told_apart_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    Pretence(monkeypatch, [[(3, 1), (61, 1)], [(1, 1)], [(2, 1)]])
    monkeypatch.setattr(estimate, "PATIENCE", 65.0)
    assert measured() == Timing(
        setup=5, warmup=64 - 1.5, round=1.5, judging=0.5, saving=0.25, evaluation=7
    )


def test_where_theta_k_begins_late_both_kinds_of_rounds_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = []

    class Both(Pretence):
        def train(self, config: Any, out: Path, display: Any) -> Any:
            trained.append(config.algorithm)
            seconds = 8.0 if config.algorithm.name == "per-ssfl" else 3.0
            self.rounds = [[(seconds, 1)]] * 3
            return super().train(config, out, display)

    Both(monkeypatch, [])
    found = measured("algorithm.name=per-ssfl", "algorithm.weight=2", "algorithm.begin=0.75")
    assert (found.round, found.alone) == (8, 3)
    assert [options.name for options in trained] == ["per-ssfl", "global-ssfl"]
    assert (trained[0].weight, trained[0].begin) == (2, 0)


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ((), 1),
        (("server.clients_per_round=4",), 0.4),
        (("partition.kind=natural", "server.clients_per_round=20"), 1),
        (("server.clients_per_round=4", "partition.labelled=0.5"), 0.2),
        (("local.steps=9", "local.epochs=1", "local.batch=10"), 0.25),  # ten alike: 5 × 70 s
    ],
)
def test_a_round_that_takes_too_long_is_reckoned_by_the_images_seen(
    settings: tuple[str, ...], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first client is waited for, however long it takes; then 50 images took 70 seconds."""
    Pretence(monkeypatch, [[(1, 40), (2, 60)], [(61, 30), (9, 20), (1e9, 1)]])
    per_round = 70 / 50 * 1000 * share
    assert measured(*settings) == Timing(5, 0, pytest.approx(per_round), 0, 0, 0, partial=True)


def test_arms_that_cost_the_same_are_timed_once_and_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "costs.toml"
    path.write_text(
        'title = "Costs"\nrepeats = "nothing"\nfigures = ["global_knn"]\n'
        + "".join(
            f'[[arms]]\nname = "{name}"\nlabel = "{name}"\nrecipe = "digits"\n'
            f'settings = ["{setting}"]\n'
            for name, setting in (
                ("slow", "local.lr=0.01"),
                ("decayed", "local.weight_decay=0.1"),
                ("larger", "local.batch=7"),
            )
        )
    )
    timed: list[int] = []

    def once(config: Any, *_: Any) -> Timing:
        timed.append(config.local.batch)
        if len(timed) == 3:
            raise ConfigError("no more")
        return Timing(setup=0, warmup=0, round=1, judging=0, saving=0, evaluation=0)

    monkeypatch.setattr(estimate, "measure", once)
    usual = load_config("digits").local.batch
    reproduce(path, seeds=1, out=tmp_path, dry_run=True)
    assert timed == [usual, 7]
    with pytest.raises(ConfigError, match="no more"):
        reproduce(path, seeds=1, out=tmp_path, settings=["model.width=4"], dry_run=True)
    assert [path.name for path in (tmp_path / "costs/runs/.timing").iterdir()] == [".lock"]


def test_what_a_killed_timing_left_is_removed_and_one_under_way_is_let_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, run = tmp_path / "tiny/runs/.timing", tmp_path / "tiny/runs/timing-x-seed0"
    for name in ("killed/plain/checkpoints", "under-way/plain"):
        (place / name).mkdir(parents=True)
    run.mkdir()  # of an arm of that name
    taken = Timing(setup=0, warmup=0, round=1, judging=0, saving=0, evaluation=0)
    monkeypatch.setattr(estimate, "measure", lambda *_: taken)
    with claimed(place / "under-way" / ".lock"):
        reproduce(write_study(tmp_path), rounds=1, seeds=1, out=tmp_path, dry_run=True)
    assert sorted(path.name for path in place.iterdir()) == [".lock", "under-way"]
    assert (place / "under-way" / "plain").is_dir()
    assert run.is_dir()


def wild_and_tame(folder: Path, *settings: str) -> Path:
    """Two arms; all updates of the first are refused."""
    path = folder / "wild-and-tame.toml"
    head = 'title = "Wild and tame"\nrepeats = "nothing"\nrounds = 50\nfigures = ["global_knn"]\n'
    arms = {"wild": [*SMALL, "local.lr=1e30", *settings], "tame": SMALL}
    path.write_text(
        head
        + "".join(
            f'[[arms]]\nname = "{name}"\nlabel = "{name.title()}"\nrecipe = "digits"\n'
            f"settings = {json.dumps(given)}\n"
            for name, given in arms.items()
        )
    )
    return path


@pytest.mark.parametrize(
    ("settings", "timed"),
    [((), {"wild", "tame"}), (("local.batch=7",), {"tame"})],
    ids=["an arm that costs the same is timed", "nothing costs the same"],
)
def test_an_arm_that_fails_while_it_is_timed_is_named_and_costs_itself_alone(
    tmp_path: Path, settings: tuple[str, ...], timed: set[str]
) -> None:
    path, seen = wild_and_tame(tmp_path, *settings), Seen()
    found = reproduce(path, rounds=1, out=tmp_path, watch=seen)
    assert [result.arm for result in found.results] == ["tame"]
    assert [(left.arm, left.why[:7]) for left in found.unfinished] == [("wild", "failed:")]
    plan = seen.planned[0]
    assert set(plan.timings) == timed
    (note,) = plan.notes
    assert note.startswith("Wild failed while it was timed: round 1: only 0 of 3 clients replied")


@pytest.mark.parametrize(
    ("arms", "planned"), [([], "50 rounds fit"), (["wild"], "nothing could be timed: 50 rounds")]
)
def test_a_budget_is_planned_without_what_could_not_be_timed(
    tmp_path: Path, arms: list[str], planned: str
) -> None:
    path, seen = wild_and_tame(tmp_path, "local.batch=7"), Seen()
    reproduce(path, budget=1e9, out=tmp_path, arms=arms, watch=seen, dry_run=True)
    failed, fitted = seen.planned[0].notes
    assert failed.startswith("Wild failed while it was timed: ")
    assert fitted.startswith(planned)
    assert seen.planned[0].at_least
    assert (seen.totals[0] is None) == bool(arms)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("20min", 1200), ("1h30min", 5400), ("0.5h", 1800)]
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["20", "min", "0s", "", "2 days", "1.2.3h"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write it as 90s, 20min or 1h30min"):
        parse_duration(text)


def test_a_run_ends_between_rounds_when_time_is_up() -> None:
    Until(Quiet(), Clock(None), reserve=1e9).begin_round(0, 1)
    with pytest.raises(OutOfTime):
        Until(Quiet(), Clock(60.0), reserve=61.0).begin_round(0, 1)
    assert issubclass(OutOfTime, KeyboardInterrupt)  # which a run takes as: save and stop


# Results


def result(arm: str, seed: int, rounds: int, value: float, **more: Any) -> Result:
    figure = "global_federated_linear" if arm == "plain" else "personal_knn"
    return Result(arm=arm, seed=seed, rounds=rounds, figures={figure: Figure(value=value)}, **more)


@pytest.fixture
def empty(tmp_path: Path) -> StudyResult:
    return StudyResult(name="tiny", study=load_study(write_study(tmp_path))[1])


def test_runs_of_different_rounds_are_never_averaged(empty: StudyResult, tmp_path: Path) -> None:
    runs = [result("plain", seed, 800, 0.8 + seed / 100) for seed in range(3)]
    found = empty.model_copy(update={"results": [*runs, result("plain", 0, 200, 0.5)]})
    rows = found.rows()
    assert [(row.rounds, len(row.values)) for row in rows] == [(800, 3), (200, 1)]
    assert rows[0].mean == pytest.approx(0.81)
    assert rows[0].std == pytest.approx(statistics.stdev([0.80, 0.81, 0.82]))
    assert found.value("plain", "global_federated_linear") == pytest.approx(0.81)
    with pytest.raises(KeyError, match="personal_knn of plain was not measured"):
        found.value("plain", "personal_knn")
    page = readme(found, tmp_path)
    assert "| 0.5000 | −0.2500 | **200**, not 800 |" in page
    assert "| 0.8100 ± 0.0100 | +0.0600 | 800 |" in page


def test_rows_are_in_the_order_of_arms_rounds_and_seeds_whatever_came_first(
    empty: StudyResult,
) -> None:
    runs = [
        result("personal", 0, 900, 0.9),
        result("plain", 0, 200, 0.5),
        result("plain", 2, 800, 0.7),
        result("plain", 0, 800, 0.6),
    ]
    rows = empty.model_copy(update={"results": runs}).rows()
    assert [(row.arm.name, row.rounds, row.seeds) for row in rows] == [
        ("plain", 800, (0, 2)),
        ("plain", 200, (0,)),
        ("personal", 900, (0,)),
    ]
    assert rows[0].values == (0.6, 0.7)
    assert rows[0].std == pytest.approx(0.1 / math.sqrt(2))  # two make a spread
    assert rows[1].std is None


def test_a_spread_over_clients_is_the_mean_over_seeds(empty: StudyResult) -> None:
    def over_clients(seed: int, std: float | None) -> Result:
        figure = Figure(value=0.5, over="clients", std=std)
        return Result(arm="personal", seed=seed, rounds=5, figures={"personal_knn": figure})

    found = empty.model_copy(update={"results": [over_clients(0, 0.1), over_clients(1, 0.3)]})
    assert found.rows()[0].client_std == pytest.approx(0.2)
    found = empty.model_copy(update={"results": [over_clients(0, None), over_clients(1, 0.3)]})
    assert found.rows()[0].client_std == 0.3
    found = empty.model_copy(update={"results": [over_clients(0, None)]})
    assert found.rows()[0].client_std is None


def test_a_figure_has_all_that_its_score_has() -> None:
    score = Score("personal_knn", 0.5, "clients", 2, 0.1, 0.6, 0.2, {0: 0.4, 3: 0.6})
    figure = Figure.of(score).model_dump()
    assert figure == {key: value for key, value in asdict(score).items() if key != "name"}


def test_what_every_row_has_is_common_and_nothing_else(empty: StudyResult) -> None:
    ways = ("local.lr=0.3", "model.width=4"), ("model.width=4", "run.x=1"), ("model.width=4",)
    runs = [result("plain", 0, 5, 0.1, settings=settings) for settings in ways]
    rows = empty.model_copy(update={"results": runs}).rows()
    assert common_settings(rows) == ("model.width=4",)
    assert common_settings(rows[:1]) == ways[0]
    assert common_settings([]) == ()
    # Other images are not the paper's; another rate is our affair.
    assert rows[0].difference == pytest.approx(0.1 - 0.75)


def test_a_run_is_unfinished_for_its_own_arm_and_seed_alone() -> None:
    left = Unfinished(arm="plain", seed=1, why="stopped")
    assert left.which == "seed 1"
    assert left.is_of(result("plain", 1, 5, 0.1))
    assert not left.is_of(result("plain", 0, 5, 0.1))
    assert not left.is_of(result("personal", 1, 5, 0.1))


def test_what_is_quoted_is_as_the_study_says_now_where_there_is_such_a_row(
    empty: StudyResult,
) -> None:
    judged_then = empty.study.options.model_dump(mode="json") | {"clients": 7}
    others = [
        result("plain", 0, 800, 0.1, settings=("local.lr=9.0",)),
        result("plain", 0, 800, 0.2, options=judged_then),
        result("plain", 0, 800, 0.3, synthetic=True),
    ]
    as_it_says = [result("plain", 0, 5, 0.4), result("plain", 0, 9, 0.5)]
    found = empty.model_copy(update={"results": [*others, *as_it_says]})
    assert found.value("plain", "global_federated_linear") == 0.5
    assert [found.outdated(run) for run in others] == [(), ("options.clients=7",), ()]
    found = empty.model_copy(update={"results": others[:1]})
    assert found.value("plain", "global_federated_linear") == 0.1


def test_label_free_figures_have_three_digits_whatever_their_size(
    empty: StudyResult, tmp_path: Path
) -> None:
    arms = tuple(
        arm.model_copy(update={"figures": ("epsilon_share", "effective_rank"), "paper": {}})
        for arm in empty.study.arms
    )
    study = empty.study.model_copy(update={"arms": arms, "baseline": "plain"})
    values = {"plain": (5.24e-05, 178.6), "personal": (4.0e-05, 1234.5)}
    runs = [
        Result(
            arm=arm,
            seed=0,
            rounds=800,
            figures={
                "epsilon_share": Figure(value=share, over="features"),
                "effective_rank": Figure(value=rank, over="features"),
            },
        )
        for arm, (share, rank) in values.items()
    ]
    page = readme(empty.model_copy(update={"study": study, "results": runs}), tmp_path)
    cells = [
        [c.strip() for c in line.split("|")[3:5]] for line in page.splitlines() if "Θ'" in line
    ]
    assert cells == [
        ["5.24e-05", "–"],
        ["179", "–"],
        ["4.00e-05", "−1.24e-05"],
        ["1234", "+1056"],
    ]


def test_what_was_tried_stands_below_what_was_not_run(empty: StudyResult, tmp_path: Path) -> None:
    study = empty.study.model_copy(update={"tried": "- twice the rate: no better\n"})
    found = empty.model_copy(update={"study": study, "results": [result("plain", 0, 5, 0.1)]})
    page = readme(found, tmp_path)
    assert "What was tried:\n\n- twice the rate: no better\n\nMade by:" in page
    assert page.index("| Plain |") < page.index("Not run:") < page.index("What was tried:")
    assert "What was tried" not in readme(empty, tmp_path)


def test_a_bar_in_a_label_does_not_break_the_table(empty: StudyResult, tmp_path: Path) -> None:
    arms = [arm.model_copy(update={"label": "p(x|y)"}) for arm in empty.study.arms]
    study = empty.study.model_copy(update={"arms": tuple(arms)})
    found = empty.model_copy(update={"study": study, "results": [result("plain", 0, 5, 0.1)]})
    assert "| p(x\\|y) |" in readme(found, tmp_path)


def test_a_page_shows_the_pictures_of_its_own_results_alone(
    empty: StudyResult, tmp_path: Path
) -> None:
    for name in ("against.png", "curves.png", "mine.png"):
        (tmp_path / name).write_bytes(b"of another day")
    found = empty.model_copy(update={"results": [result("plain", 0, 5, 0.1)]})
    write_pages(found, tmp_path)
    shown = re.findall(r"\((.*?\.png)\)", (tmp_path / "README.md").read_text())
    assert shown == ["figures.png"]
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["figures.png", "mine.png"]


def test_results_of_two_machines_are_put_together(empty: StudyResult) -> None:
    left = [Unfinished(arm="plain", seed=1, why="the budget was spent")]
    here = empty.model_copy(update={"results": [result("plain", 0, 5, 0.1)], "unfinished": left})
    there = empty.model_copy(
        update={"results": [result("plain", 0, 5, 0.9), result("plain", 1, 5, 0.2)]}
    )
    both = here.joined(there)
    assert [(r.seed, r.figures["global_federated_linear"].value) for r in both.results] == [
        (0, 0.1),
        (1, 0.2),
    ]
    assert not both.unfinished


def test_of_two_records_nothing_is_lost_and_nothing_is_twice(empty: StudyResult) -> None:
    ours, theirs, gone = (Partition(data=name, sizes=[1]) for name in ("ours", "theirs", "gone"))
    judged_then = empty.study.options.model_dump(mode="json") | {"clients": 7}
    runs = [
        result("personal", 0, 5, 0.1),
        result("plain", 1, 5, 0.2, options=judged_then),
        result("plain", 1, 9, 0.3),
    ]
    here = empty.model_copy(
        update={
            "results": [result("plain", 0, 5, 0.4)],
            "partitions": {"plain": ours},
            "unfinished": [
                Unfinished(arm="plain", seed=3, rounds=5, why="ours"),
                Unfinished(arm="plain", seed=1, rounds=5, why="only judged as it was then"),
            ],
        }
    )
    there = empty.model_copy(
        update={
            "results": [*runs, result("gone", 0, 5, 0.5)],
            "former": [result("long gone", 0, 5, 0.6)],
            "partitions": {"plain": theirs, "personal": theirs, "gone": gone},
            "unfinished": [
                Unfinished(arm="plain", seed=3, rounds=5, why="theirs"),
                Unfinished(arm="personal", seed=7, rounds=5, why="left"),
                Unfinished(arm="gone", seed=7, rounds=5, why="nobody asks"),
            ],
        }
    )
    both = here.joined(there)
    assert [(r.arm, r.rounds, r.seed) for r in both.results] == [
        ("plain", 9, 1),
        ("plain", 5, 0),
        ("plain", 5, 1),
        ("personal", 5, 0),
    ]
    assert [r.arm for r in both.former] == ["gone", "long gone"]
    assert both.partitions == {"plain": ours, "personal": theirs}
    assert [u.why for u in both.unfinished] == ["left", "ours", "only judged as it was then"]
    assert both.joined(there) == both
    assert [
        arm.name for arm in empty.model_copy(update={"partitions": {"plain": ours}}).not_run()
    ] == ["personal"]


def test_options_added_since_count_as_their_defaults_and_lost_ones_as_they_were(
    empty: StudyResult,
) -> None:
    config = empty.study.config(empty.study.arms[0], name="x", seed=0, rounds=5)
    now = config.model_dump(mode="json")
    elsewhere = {**now, "seed": 1, "device": {**now["device"], "device": "cuda", "workers": 8}}
    older = {**now, "local": {k: v for k, v in now["local"].items() if k != "keep_momentum"}}
    lost = {**now, "local": {**now["local"], "haste": True}}
    runs = [
        result("plain", seed, 5, 0.1, config=config)
        for seed, config in enumerate([now, elsewhere, older, lost])
    ]
    found = empty.model_copy(update={"results": runs})
    assert [(row.seeds, row.outdated) for row in found.rows()] == [
        ((0, 1, 2), ()),
        ((3,), ("local.haste=true",)),
    ]


def test_made_up_images_may_be_other_images_and_nothing_else(empty: StudyResult) -> None:
    config = empty.study.config(empty.study.arms[0], name="x", seed=0, rounds=5)
    then = config.model_dump(mode="json")
    then["data"]["test_fraction"], then["local"]["lr"] = 0.25, 7.0
    real, made_up = (
        result("plain", 0, 5, 0.1, config=then, synthetic=synthetic) for synthetic in (False, True)
    )
    assert empty.outdated(real) == ("data.test_fraction=0.25", "local.lr=7.0")
    assert empty.outdated(made_up) == ("local.lr=7.0",)
    asked = result("plain", 0, 5, 0.1, config=then, settings=("local.lr=7.0",))
    assert empty.outdated(asked) == ("data.test_fraction=0.25",)


def test_a_record_is_read_as_it_was_written_and_lists_of_numbers_take_a_line(
    empty: StudyResult, tmp_path: Path
) -> None:
    figure = Figure(value=0.25, over="clients", n=2, std=0.1, weighted_mean=0.3)
    judged_then = empty.study.options.model_dump(mode="json") | {"clients": 7}
    run = Result(
        arm="plain",
        seed=4,
        rounds=9,
        settings=("model.width=4",),
        options=judged_then,
        figures={"global_federated_linear": figure},
        curve={"round": [1, 2], "loss": [None, 1.5e-05]},
        seconds=12.345,
    )
    part = Partition(data="d", sizes=[3, 4], classes=["cat", "dog"], counts=[[1, 2], [0, 4]])
    found = empty.model_copy(update={"results": [run], "partitions": {"personal": part}})
    found.save(tmp_path)
    assert load_result(tmp_path / "results.json") == found
    text = (tmp_path / "results.json").read_text()
    assert '"loss": [ null, 1.5e-05 ]' in text
    assert text.endswith("}\n")
    with (tmp_path / "results.csv").open(newline="") as file:
        first, *clients = csv.DictReader(file)
    expected = {
        "study": "tiny",
        "arm": "plain",
        "label": "Plain",
        "settings": "model.width=4 options.clients=7",
        "seed": "4",
        "rounds": "9",
        "figure": "global_federated_linear",
        "value": "0.25",
        "std_over_clients": "0.1",
        "weighted_mean": "0.3",
        "paper": "0.75",
        "study_rounds": "800",
        "seconds": "12.3",
    }
    assert {key: first[key] for key in expected} == expected
    shown = [[line[key] for key in ("arm", "client", "images", "cat", "dog")] for line in clients]
    assert shown == [["personal", "0", "3", "1", "2"], ["personal", "1", "4", "0", "4"]]
    broken = run.model_copy(update={"curve": {"loss": [math.nan]}})
    with pytest.raises(ValueError, match="Out of range"):
        found.model_copy(update={"results": [broken]}).save(tmp_path)


def test_a_recipe_that_is_elsewhere_says_nothing_and_runs_are_told_apart_all_the_same(
    empty: StudyResult,
) -> None:
    arm = empty.study.arms[0].model_copy(update={"recipe": "gone.toml"})
    configs = [
        load_config("digits", [f"local.lr={rate}"]).model_dump(mode="json") for rate in (1, 1, 2)
    ]
    runs = [result("plain", seed, 5, 0.1, config=config) for seed, config in enumerate(configs)]
    study = empty.study.model_copy(update={"arms": (arm,)})
    found = empty.model_copy(update={"study": study, "results": runs})
    assert [(row.seeds, row.outdated) for row in found.rows()] == [((0, 1), ()), ((2,), ())]


def test_what_is_unfinished_is_known_by_its_rounds_and_settings(
    empty: StudyResult, tmp_path: Path
) -> None:
    slow = ("local.lr=0.1",)
    left = [
        Unfinished(arm="plain", seed=0, rounds=rounds, settings=settings, why="stopped")
        for rounds, settings in ((5, ()), (800, ()), (5, slow))
    ]
    before = empty.model_copy(
        update={"unfinished": [*left, Unfinished(arm="plain", seed=0, why="not noted of which")]}
    )
    found = empty.model_copy(update={"results": [result("plain", 0, 5, 0.1)]}).joined(before)
    assert found.unfinished == left[1:]
    page = readme(found, tmp_path)
    assert "- Plain, seed 0, 800 rounds: stopped" in page
    assert "- Plain, seed 0, 5 rounds, `local.lr=0.1`: stopped" in page


def test_settings_are_named_where_they_are_not_the_studys(
    empty: StudyResult, tmp_path: Path
) -> None:
    both = ("model.width=4", "local.lr=0.3"), ("model.width=4",)
    runs = [result("plain", 0, 5, 0.1, settings=settings) for settings in both]
    page = readme(empty.model_copy(update={"results": runs}), tmp_path)
    assert "**Changed in every run:** `model.width=4`." in page
    assert "| Plain (`local.lr=0.3`) |" in page
    assert "| Plain |" in page


def test_how_often_a_run_was_looked_at_or_saved_makes_it_no_other_experiment(
    empty: StudyResult,
) -> None:
    seldom = ("local.lr=0.3", "evaluation.every=50", "run.checkpoint_every=9", "device.device=cpu")
    runs = [
        result("plain", 0, 5, 0.1, settings=("local.lr=0.3",)),
        result("plain", 1, 5, 0.3, settings=seldom),
    ]
    rows = empty.model_copy(update={"results": runs}).rows()
    assert [(row.settings, row.values) for row in rows] == [(("local.lr=0.3",), (0.1, 0.3))]


def test_synthetic_images_are_named_and_not_compared(empty: StudyResult, tmp_path: Path) -> None:
    found = empty.model_copy(update={"results": [result("plain", 0, 800, 0.9, synthetic=True)]})
    assert found.rows()[0].difference is None
    elsewhere = result("plain", 0, 800, 0.9, settings=("data.source=shapes",))
    assert empty.model_copy(update={"results": [elsewhere]}).rows()[0].difference is None
    page = readme(found, tmp_path)
    assert "| Plain (*synthetic*) |" in page
    assert "not on GLD-23K" in page


def test_one_page_gathers_all_and_names_what_was_not_run(whole: Whole, tmp_path: Path) -> None:
    page = tmp_path / "RESULTS.md"
    found = collect(whole.out, page)
    text = page.read_text()
    assert "tiny" in [study.name for study in found]
    assert "| Plain |" in text
    for name, study in studies().items():
        assert f"| {study.title} | `{name}` | {study.repeats} | **not run** |" in text
    assert "| [A tiny study](#a-tiny-study) | `tiny` | " in text
    assert "results/tiny/figures.png)" in text


def test_two_studies_of_one_name_are_apart_on_the_page_of_all(
    empty: StudyResult, tmp_path: Path
) -> None:
    arms = (empty.study.arms[0].model_copy(update={"name": "other", "label": "Other"}),)
    study = empty.study.model_copy(update={"title": "Another", "arms": arms})
    runs = {"a": (empty.study, "plain"), "b": (study, "other")}
    for folder, (its, arm) in runs.items():
        figure = {"global_federated_linear": Figure(value=0.5)}
        made = [Result(arm=arm, seed=0, rounds=5, figures=figure)]
        StudyResult(name="rates", study=its, results=made).save(tmp_path / folder)
    found = collect(tmp_path, tmp_path / "RESULTS.md")
    assert [(one.name, one.study.title) for one in found] == [
        ("rates", "A tiny study"),
        ("rates", "Another"),
    ]
    text = (tmp_path / "RESULTS.md").read_text()
    one, other = text.split("## A tiny study")[1].split("## Another")
    assert "| Plain |" in one
    assert "| Other |" not in one
    assert "| Other |" in other
    assert text.count("**not run**") == len(studies())


def test_pages_that_are_gathered_have_the_packages_studies_as_they_are_now(tmp_path: Path) -> None:
    study = studies()["table1"]
    then = study.model_copy(update={"note": "As it was."})
    figure = {"global_knn": Figure(value=0.5)}
    made = [Result(arm=study.arms[0].name, seed=0, rounds=5, figures=figure)]
    StudyResult(name="table1", study=then, results=made).save(tmp_path / "table1")
    before = (tmp_path / "table1" / "results.json").read_text()
    collect(tmp_path, tmp_path / "RESULTS.md")
    assert (tmp_path / "table1" / "results.json").read_text() == before
    for page in ("RESULTS.md", "table1/README.md"):
        text = (tmp_path / page).read_text()
        assert "As it was." not in text
        assert study.note in text
        assert "| 0.5000 |" in text
        assert "figures.png)" in text
    assert (tmp_path / "table1" / "figures.png").is_file()


def test_the_page_of_all_sets_the_papers_figures_against_the_nearest_of_ours(
    tmp_path: Path,
) -> None:
    def found(arm: str, seed: int, value: float, figure: str = "global_federated_linear") -> Result:
        return Result(arm=arm, seed=seed, rounds=800, figures={figure: Figure(value=value)})

    made = [
        found("ssfl-iid", 0, 0.84),
        found("ssfl-iid-128", 0, 0.91),
        found("ssfl-iid-128", 1, 0.93),
        found("ssfl-iid-64", 0, 0.76),
        found("supervised-iid", 0, 0.9, "global_classifier"),
        found("supervised-iid", 0, 0.99, "global_knn"),  # of which the paper has no figure
    ]
    StudyResult(name="table1", study=studies()["table1"], results=made).save(tmp_path / "table1")
    collect(tmp_path, tmp_path / "RESULTS.md")
    text = (tmp_path / "RESULTS.md").read_text()
    table = text.split("**The paper's figures")[1].split("\n\n")[1].splitlines()[2:]
    linear, own = "Linear, classifier trained by FedAvg (Θ)", "Its own classifier (Θ)"
    assert table == [
        f"| `table1` | SSFL, IID | {linear} | 0.9140 | 0.9200 ± 0.0141 | +0.0060 | 800 | 2 | "
        "SSFL, IID, batch 128, norms spared |",
        f"| `table1` | SSFL, α = 0.1 | {linear} | 0.8470 | **not run** |  |  |  |  |",
        f"| `table1` | Supervised FL, IID | {own} | 0.9320 | 0.9000 | −0.0320 | 800 | 1 |  |",
        f"| `table1` | Supervised FL, α = 0.1 | {own} | 0.8812 | **not run** |  |  |  |  |",
    ]


def test_figures_of_one_experiment_are_quoted_from_one_run(tmp_path: Path) -> None:
    def found(arm: str, indicator: float, evaluation: float) -> Result:
        figures = {"personal_knn": indicator, "personal_linear": evaluation}
        return Result(
            arm=arm,
            seed=0,
            rounds=800,
            figures={name: Figure(value=value) for name, value in figures.items()},
        )

    # The paper: 0.9388 and 0.8310. The first and the last are best by one figure each.
    made = [
        found("per-ssfl-late", 0.95, 0.82),
        found("per-ssfl-last", 0.94, 0.832),
        found("per-ssfl-end", 0.93, 0.84),
    ]
    StudyResult(name="table2", study=studies()["table2"], results=made).save(tmp_path / "table2")
    collect(tmp_path, tmp_path / "RESULTS.md")
    text = (tmp_path / "RESULTS.md").read_text()
    table = text.split("**The paper's figures")[1].split("\n\n")[1].splitlines()
    ours = [line.split(" | ")[4:] for line in table if line.startswith("| `table2` | Per-SSFL")]
    how = "Per-SSFL, θ_k from the last 6 %, 2 local epochs |"
    assert ours == [
        ["0.9400", "+0.0012", "800", "1", how],
        ["0.8320", "+0.0010", "800", "1", how],
    ]


def test_results_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"version": 1}')
    with pytest.raises(Exception, match=r"results\.json cannot be read"):
        load_result(tmp_path / "results.json")


def test_a_search_is_sorted_best_first_and_set_against_its_baseline(
    empty: StudyResult, tmp_path: Path
) -> None:
    study = empty.study.model_copy(
        update={"figures": ("global_knn",), "sort": "global_knn", "baseline": "plain"}
    )
    arms = tuple(
        study.arms[0].model_copy(update={"name": name, "label": name, "figures": (), "paper": {}})
        for name in ("plain", "worse", "better")
    )
    runs = [("plain", 5, 0.5), ("worse", 5, 0.4), ("better", 5, 0.75), ("better", 9, 0.3)]
    results = [
        Result(arm=a, seed=0, rounds=r, figures={"global_knn": Figure(value=v)}) for a, r, v in runs
    ]
    found = empty.model_copy(
        update={"study": study.model_copy(update={"arms": arms}), "results": results}
    )
    shown = [(row.arm.name, row.rounds, row.gain) for row in found.rows()]
    assert shown == [
        ("better", 9, None),  # of other rounds than the baseline: not compared
        ("better", 5, pytest.approx(0.25)),
        ("plain", 5, None),
        ("worse", 5, pytest.approx(-0.1)),
    ]
    page = readme(found, tmp_path)
    assert "| figure | ours | against plain | rounds | seeds |" in page
    assert "| worse | kNN (Θ) | 0.4000 | −0.1000 |" in page
    both = study.model_copy(update={"arms": arms, "figures": ("global_knn", "effective_rank")})
    rank = {"effective_rank": Figure(value=9.0, over="features")}
    ranked = [r.model_copy(update={"figures": {**r.figures, **rank}}) for r in results[:3]]
    ranked[1] = results[1].model_copy(update={"figures": rank})  # the sort's own is not there
    rows = found.model_copy(update={"study": both, "results": ranked}).rows()
    assert [row.arm.name for row in rows] == ["better", "better", "plain", "plain", "worse"]


def against_plain(empty: StudyResult, *runs: tuple[str, int, float, str]) -> list[float | None]:
    """What rows gain over the arm `plain`; the last of a run says how it was judged."""
    arms = tuple(arm.model_copy(update={"figures": (), "paper": {}}) for arm in empty.study.arms)
    study = empty.study.model_copy(
        update={"figures": ("global_knn",), "baseline": "plain", "arms": arms}
    )
    then = empty.study.options.model_dump(mode="json") | {"clients": 7}
    results = [
        Result(
            arm=arm,
            seed=seed,
            rounds=5,
            figures={"global_knn": Figure(value=value)},
            options=then if when == "then" else None,
        )
        for arm, seed, value, when in runs
    ]
    rows = empty.model_copy(update={"study": study, "results": results}).rows()
    return [row.gain for row in rows]


def test_a_gain_is_over_the_same_seeds(empty: StudyResult) -> None:
    plain = ("plain", 0, 0.5, "now"), ("plain", 1, 0.1, "now")
    personal = ("personal", 1, 0.3, "now"), ("personal", 2, 0.9, "now")
    assert against_plain(empty, *plain, *personal) == [None, pytest.approx(0.2)]
    assert against_plain(empty, plain[0], *personal) == [None, None]


def test_a_gain_is_over_the_baseline_of_the_same_time_where_there_is_one(
    empty: StudyResult,
) -> None:
    plain = ("plain", 0, 0.1, "now"), ("plain", 0, 0.2, "then")
    personal = ("personal", 0, 0.5, "now"), ("personal", 0, 0.9, "then")
    gains = against_plain(empty, *plain, *personal)
    assert gains == [None, None, pytest.approx(0.4), pytest.approx(0.7)]
    assert against_plain(empty, plain[1], personal[0]) == [None, pytest.approx(0.3)]


# Several processes


def test_two_processes_share_a_study_and_neither_loses_the_others_results(
    whole: Whole, tmp_path: Path
) -> None:
    """Started at once on the same folder: each run is made once, and one table has all of them."""
    program = (
        "import sys; from ssfl.reproduce import reproduce; "
        "reproduce(sys.argv[1], rounds=2, seeds=1, out=sys.argv[2], timing=False)"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", program, whole.study, tmp_path]) for _ in range(2)
    ]
    assert [process.wait(timeout=300) for process in both] == [0, 0]
    found = load_result(tmp_path / "tiny" / "results.json")
    assert found is not None
    assert figures(found) == {k: v for k, v in figures(whole.result).items() if k[1] == 0}
    assert not found.unfinished
    for run in (tmp_path / "tiny" / "runs").glob("*-seed*/metrics.jsonl"):
        rounds = [json.loads(line) for line in run.read_text().splitlines()]
        assert [row["round"] for row in rounds if row["kind"] == "round"] == [0, 1]


def test_a_run_that_another_process_is_at_is_left_to_it(whole: Whole, tmp_path: Path) -> None:
    common: dict[str, Any] = {"rounds": 2, "seeds": 1, "out": tmp_path, "timing": False}
    seen = Seen()
    with claimed(tmp_path / "tiny" / "runs" / ".plain-seed0.lock") as mine:
        assert mine
        found = reproduce(whole.study, watch=seen, arms=["plain"], **common)
    assert not seen.begun
    assert [u.why for u in found.unfinished] == ["another process is at it"]


# The studies that come with the package

PAPER = {
    "table1": {
        "supervised-iid": [0.932],
        "supervised-noniid": [0.8812],
        "ssfl-iid": [0.914],
        "ssfl-noniid": [0.847],
    },
    "table2": {
        "la-ssfl": [0.9217, 0.8013],
        "maml-ssfl": [0.9355, 0.8235],
        "bilevel-ssfl": [0.9304, 0.8137],
        "per-ssfl": [0.9388, 0.8310],
    },
    "table3": {
        "la-ssfl": [0.6011, 0.4112],
        "maml-ssfl": [0.6237, 0.4365],
        "bilevel-ssfl": [0.6195, 0.4233],
        "per-ssfl": [0.6371, 0.4467],
        "supervised": [0.47],
    },
}
RATES = {"la-ssfl": 0.1, "maml-ssfl": 0.03, "bilevel-ssfl": 0.1, "per-ssfl": 0.03}


@pytest.mark.parametrize("name", studies())
def test_every_arm_is_a_valid_configuration_with_known_figures(name: str) -> None:
    study = studies()[name]
    for arm in study.arms:
        config = study.config(arm, name="x", seed=1, rounds=7)
        assert (config.seed, config.server.rounds) == (1, 7)
        usual = study.config(arm, name="x", seed=0, rounds=None).server.rounds
        assert usual == study.rounds or study.pictures_only
        assert set(study.figures_of(arm)) <= set(protocols(study.options))


def test_settings_of_a_study_hold_for_every_arm_but_where_it_says_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(
        'title = "Own"\nrepeats = "nothing"\nfigures = ["global_knn"]\n'
        'settings = ["local.lr=0.5", "local.batch=7"]\n'
        '[[arms]]\nname = "as-it-is"\nlabel = "a"\nrecipe = "digits"\n'
        '[[arms]]\nname = "slow"\nlabel = "b"\nrecipe = "digits"\nsettings = ["local.lr=0.1"]\n'
    )
    study = load_study(path)[1]
    found = [study.config(arm, name="x", seed=0, rounds=1).local for arm in study.arms]
    assert [(local.lr, local.batch) for local in found] == [(0.5, 7), (0.1, 7)]


def own_study(folder: Path, *, head: str = "", arm: str = "", name: str = "own") -> Path:
    """A study of one's own that says as little as it may."""
    path = folder / f"{name}.toml"
    path.write_text(
        f'title = "Own"\nrepeats = "nothing"\nfigures = ["global_knn"]\n{head}\n'
        f'[[arms]]\nname = "one"\nlabel = "One"\nrecipe = "digits"\n{arm}\n'
    )
    return path


@pytest.mark.parametrize(
    ("head", "arm", "rounds"),
    [
        ("", "", load_config("digits").server.rounds),
        ("rounds = 2", "", 2),
        ("rounds = 2", 'settings = ["server.rounds=3"]', 3),
    ],
)
def test_a_study_runs_the_rounds_it_names_or_its_recipes(
    tmp_path: Path, head: str, arm: str, rounds: int
) -> None:
    path, seen = own_study(tmp_path, head=head, arm=arm), Seen()
    reproduce(path, out=tmp_path, timing=False, dry_run=True, watch=seen)
    assert [job.config.server.rounds for job in seen.planned[0].jobs] == [rounds]


def test_a_study_without_the_papers_figures_or_rounds_is_not_measured_by_them(
    tmp_path: Path,
) -> None:
    study = load_study(own_study(tmp_path))[1]
    runs = [Result(arm="one", seed=0, rounds=5, figures={"global_knn": Figure(value=0.5)})]
    page = readme(StudyResult(name="own", study=study, results=runs), tmp_path)
    assert "| One | kNN (Θ) | 0.5000 | 5 | 1 |" in page
    assert "paper" not in page
    assert "800" not in page


def test_a_study_of_ones_own_may_not_have_the_name_of_one_of_the_packages(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rates\.toml has the name of .* another name"):
        load_study(own_study(tmp_path, name="rates"))


@pytest.mark.parametrize("name", ["my étude", "a b", os.fsdecode(b"bad\xff")])
def test_a_study_whose_file_cannot_give_its_runs_a_name_is_refused(
    name: str, tmp_path: Path
) -> None:
    path = own_study(tmp_path, name=name)
    with pytest.raises(ConfigError, match=r"\.toml: .* called as the file is, .* letters, digits"):
        reproduce(path, dry_run=True, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_study_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_bytes('title = "Größe"'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"own\.toml cannot be read: .*utf-8"):
        load_study(path)


@pytest.mark.parametrize(
    ("where", "known"),
    [
        ({"head": "round = 2"}, r"round: known here are title, .*, rounds, "),
        ({"arm": 'recipes = "x"'}, r"arms\.0\.recipes: known here are name, label, recipe, "),
        ({"arm": "[options.linear]\nsteps = 2"}, r"options\.linear\.steps: known .*, iterations"),
        (
            {"arm": '[axis]\nlabel = "x"\n[[axis.lines]]\nlabl = "y"'},
            r"axis\.lines\.0\.labl: known here are label, points$",
        ),
    ],
)
def test_an_unknown_key_of_a_study_is_told_with_those_that_are_known(
    tmp_path: Path, where: dict[str, str], known: str
) -> None:
    path = own_study(tmp_path, **where)
    with pytest.raises(ConfigError) as caught:
        load_study(path)
    assert re.search(f"study own: .*unknown key {known}", str(caught.value))


@pytest.mark.parametrize("name", PAPER)
def test_tables_have_the_papers_figures(name: str) -> None:
    study = studies()[name]
    papers = {arm.name: arm for arm in study.arms if arm.name in PAPER[name]}
    assert {each: list(arm.paper.values()) for each, arm in papers.items()} == PAPER[name]
    by_recipe = {arm.recipe: arm.paper for arm in papers.values()}
    ours = [arm for arm in study.arms if arm.name not in papers]  # beside the same figures
    assert all(arm.paper == by_recipe[arm.recipe] for arm in ours)
    assert study.seeds == 3


@pytest.mark.parametrize("name", ["table2", "table3"])
def test_personal_methods_have_the_papers_rates_and_weights(name: str) -> None:
    study = studies()[name]
    for arm in study.arms:
        if arm.name == "supervised":
            continue
        config = study.config(arm, name="x", seed=0, rounds=None)
        method = config.algorithm.name
        if arm.name in PAPER[name]:  # others change something, and say so
            assert method == arm.name
            assert config.local.lr == RATES[method]
        if method in ("bilevel-ssfl", "per-ssfl"):
            assert config.algorithm.weight == (1.0 if method == "bilevel-ssfl" else 0.1)


def test_methods_are_compared_on_the_same_work() -> None:
    study = studies()["methods"]
    configs = [study.config(arm, name="x", seed=0, rounds=None) for arm in study.arms]
    assert {c.ssl.method for c in configs} >= {"simsiam", "simclr", "byol", "swav"}
    for section in ("data", "partition", "model", "server", "algorithm"):
        assert len({str(getattr(c, section)) for c in configs}) == 1
    assert {(c.local.batch, c.local.epochs) for c in configs} == {(256, 1)}


def test_batches_go_from_8_to_512_true_and_accumulated() -> None:
    study = studies()["batch-size"]
    configs = [study.config(arm, name="x", seed=0, rounds=None).local for arm in study.arms]
    true = [c.batch for c in configs if not c.micro_batch]
    assert true == [8, 16, 32, 64, 128, 256, 512]
    assert [(c.batch, c.micro_batch) for c in configs if c.micro_batch] == [
        (64, 32),
        (128, 32),
        (256, 32),
        (512, 32),
    ]


def test_the_search_changes_one_thing_at_a_time_or_joins_what_is_also_tried_alone() -> None:
    study = studies()["search"]
    arms = [arm for arm in study.arms if arm.name != "central"]
    base, *others = (study.config(arm, name="x", seed=0, rounds=None) for arm in arms)
    changed = [differences(base, other) for other in others]
    alone = [change for change in changed if len(change) == 1]
    for change in changed:
        assert change
        assert all({key: change[key]} in alone for key in change)
    assert set().union(*alone) == {
        *("local.lr", "local.schedule", "local.keep_momentum", "local.weight_decay"),
        *(
            "local.batch",
            "local.micro_batch",
            "local.epochs",
            "local.predictor_rate",
            "server.lr",
            "views.crop_scale",
            "views.size",
        ),
    }


@pytest.mark.parametrize(("arm", "share"), [("supervised-1", 0.01), ("supervised-10", 0.1)])
def test_supervised_clients_have_the_labels_that_the_classifier_on_ssfl_gets(
    arm: str, share: float
) -> None:
    from ssfl.assemble import load_federated
    from ssfl.data.split import labelled_images

    study = studies()["labels"]
    assert share in study.options.fractions
    # Enough images of every class that the share is no accident of rounding.
    shapes = ("data.source=shapes", "data.train=3000", "data.test=10", "partition.clients=2")
    few, whole = (
        load_federated(study.config(study.arm(a), name="x", seed=5, rounds=1, settings=shapes))
        for a in (arm, "ssfl")
    )
    labels = whole.dataset.train.labels
    assert labels is not None
    held = sorted(image for k in few.clients() for image in few.train_indices(k).tolist())
    assert held == labelled_images(labels, share, seed=5).tolist()
    assert len(held) == round(share * 3000)
    for k in few.clients():
        assert few.test_indices(k).tolist() == whole.test_indices(k).tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"personal_knn"', '"personal_knm"'), "unknown figure 'personal_knm' .*personal_knn"),
        (('"personal_knn"', '"personal_finetune_1pct"'), "unknown .*global_finetune_1pct"),
        (('name = "plain"', 'name = "personal"'), "two arms have the same name"),
        (("{ global_federated_linear", "{ global_knn"), "a paper value of no figure: global_knn"),
        (("repeats =", "repeat ="), "repeats is missing"),
        (("rounds = 800", 'rounds = 800\nbaseline = "simple"'), "there is no 'simple'"),
        (("rounds = 800", 'rounds = 800\nsort = "personal_knn"'), "plain has no personal_knn"),
    ],
)
def test_a_study_that_does_not_hold_together_is_refused(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    path = write_study(tmp_path)
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(ConfigError, match=message):
        load_study(path)


def test_an_unknown_study_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no study 'table9' \(known: alpha, .*table3\)"):
        load_study("table9")


# GLD-23K, where it is not at hand


def test_made_up_photographers_are_read_as_gld23k(tmp_path: Path) -> None:
    from ssfl.assemble import load_federated

    settings = make_gld23k(tmp_path / "gld")
    data = load_federated(load_config("gld23k-per-ssfl", settings))
    assert len(data.clients()) == 10  # two of twelve have fewer than 100 images
    sizes = data.sizes() + [len(part) for part in data.test_parts or []]
    assert sorted(sizes) == [100, 110, 120, 130, 140, 150, 160, 170, 180, 240]
    stamp = (tmp_path / "gld" / "mini_gld_train_split.csv").stat().st_mtime_ns
    make_gld23k(tmp_path / "gld")
    assert (tmp_path / "gld" / "mini_gld_train_split.csv").stat().st_mtime_ns == stamp


def test_without_gld23k_made_up_images_stand_in_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSFL_DATA", str(tmp_path / "nothing"))
    monkeypatch.setattr("ssfl.reproduce.synthetic.SIZES", (100,))
    monkeypatch.chdir(tmp_path)
    seen = Seen()
    reproduce("table3", rounds=1, seeds=1, timing=False, dry_run=True, watch=seen)
    assert "not to be compared with the paper's" in seen.planned[0].notes[0]
    assert "GLD-23K is not there" in seen.planned[0].notes[0]
    assert all(job.synthetic for job in seen.planned[0].jobs)
    assert (tmp_path / "results/table3/runs/synthetic-gld23k/images").is_dir()


def test_made_up_images_that_were_asked_for_are_not_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ssfl.reproduce.synthetic.SIZES", (100,))
    seen = Seen()
    common: dict[str, Any] = {"timing": False, "dry_run": True, "watch": seen}
    reproduce("table3", rounds=1, seeds=1, out=tmp_path, synthetic_data=True, **common)
    assert seen.planned[0].notes[0].startswith("as asked: a small set of made-up images")


def test_made_up_images_stand_in_for_gld23k_and_for_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSFL_DATA", str(tmp_path / "nothing"))
    monkeypatch.setattr("ssfl.reproduce.synthetic.SIZES", (100,))
    path, seen = tmp_path / "both.toml", Seen()
    arms = [
        f'[[arms]]\nname = "{name}"\nlabel = "{name}"\nrecipe = "{recipe}"\n'
        for name, recipe in (("photographs", "gld23k-per-ssfl"), ("digits", "digits"))
    ]
    path.write_text(
        'title = "B"\nrepeats = "nothing"\nfigures = ["personal_knn"]\n' + "".join(arms)
    )
    reproduce(path, rounds=1, seeds=1, out=tmp_path, timing=False, dry_run=True, watch=seen)
    photographs, digits = seen.planned[0].jobs
    assert (photographs.synthetic, digits.synthetic) == (True, False)
    assert photographs.config.data.path.name == "synthetic-gld23k"
    assert digits.config.data == load_config("digits").data


def test_partitions_are_drawn_without_training(tmp_path: Path) -> None:
    text = (
        'title = "Parts"\nrepeats = "nothing"\npictures_only = true\n'
        '[[arms]]\nname = "skewed"\nlabel = "Skewed"\nrecipe = "digits"\n'
    )
    (tmp_path / "parts.toml").write_text(text)
    found = reproduce(tmp_path / "parts.toml", out=tmp_path / "out", command="typed")
    part = found.partitions["skewed"]
    assert isinstance(part, Partition)
    assert sum(part.sizes) == sum(map(sum, part.counts))
    assert (tmp_path / "out/parts/skewed/partition_labels.png").is_file()
    page = (tmp_path / "out/parts/README.md").read_text()
    assert "(skewed/partition_labels.png)" in page
    assert f"- `typed`; ssfl {ssfl.__version__}, commit " in page
    assert "**Skewed**" in page


def test_a_dry_run_draws_nothing_and_what_is_for_training_is_refused(tmp_path: Path) -> None:
    asked = ["partition", "--out", str(tmp_path / "out"), "--dry-run"]
    done = CliRunner().invoke(app(), asked, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert f"4 partitions would be drawn to {tmp_path / 'out' / 'partition'}" in done.output
    assert not (tmp_path / "out").exists()
    for more in (["--rounds", "3"], ["--seeds", "2"], ["--budget", "1min"]):
        refused = CliRunner().invoke(app(), [*asked, *more])
        assert "leave out --rounds, --seeds and --budget" in str(refused.exception)


# The command


def app() -> typer.Typer:
    single = typer.Typer()
    single.command()(command)
    return single


def test_the_command_lists_all_studies() -> None:
    done = CliRunner().invoke(app(), ["--list"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    for name, study in studies().items():
        assert any(
            line.split()[:2] == [name, str(len(study.arms))] for line in done.output.splitlines()
        )


def test_the_command_shows_the_table_of_a_finished_studys_page(
    whole: Whole, tmp_path: Path
) -> None:
    shutil.copytree(whole.out / "tiny", tmp_path / "out" / "tiny")
    path = write_study(tmp_path)
    path.write_text(path.read_text().replace("seeds = 2", 'seeds = 2\nbaseline = "plain"'))
    arguments = [str(path), "--rounds", "2", "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(app(), arguments, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert done.output.count("done") >= 4
    lines = (tmp_path / "out" / "tiny" / "README.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("| ") and "---" not in line]
    assert len(table) == 1 + 3
    assert "against Plain" in table[0]
    assert "**2**, not 800" in table[1]
    for line in table:
        cells = (re.escape(cell.strip()) for cell in line.replace("*", "").split("|"))
        assert re.search(r"\s+".join(filter(None, cells)), done.output)


def test_the_command_fails_where_a_run_has_failed_and_only_there(tmp_path: Path) -> None:
    path, text = write_study(tmp_path), "algorithm.name=per-ssfl"
    path.write_text(path.read_text().replace(text, f'{text}", "local.lr=1e30'))
    arguments = [str(path), "--rounds", "1", "--seeds", "1", "--out", str(tmp_path), "--no-timing"]
    spent = CliRunner().invoke(app(), [*arguments, "--arm", "plain", "--budget", "0.001s"])
    assert spent.exit_code == 0, spent.output
    assert "the budget was spent" in spent.output
    failed = CliRunner().invoke(app(), [*arguments, "--arm", "personal"])
    assert failed.exit_code == 1, failed.output
    assert "personal-seed0: round 1: only 0 of 3 clients replied" in failed.output
    fine = CliRunner().invoke(app(), [*arguments, "--arm", "plain"])
    assert fine.exit_code == 0, fine.output


def test_the_command_counts_what_it_gathered(whole: Whole, tmp_path: Path) -> None:
    asked = ["--collect", str(whole.folder), "-o", str(tmp_path / "page.md")]
    done = CliRunner().invoke(app(), asked, env={"COLUMNS": "200"})
    assert done.output.startswith("1 study: ")
    assert (tmp_path / "page.md").read_text().startswith("# Results")


def test_the_command_asks_for_one_thing_at_a_time() -> None:
    done = CliRunner().invoke(app(), [])
    assert isinstance(done.exception, ConfigError)
    done = CliRunner().invoke(app(), ["table1", "--seeds", "some"])
    assert isinstance(done.exception, ConfigError)
    assert "--seeds some" in str(done.exception)
