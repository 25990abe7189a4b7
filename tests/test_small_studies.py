"""Studies in small: what `--small` runs, where it puts it, and what its page says."""

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ssfl.commands.reproduce import reproduce as command
from ssfl.config import Config
from ssfl.errors import ConfigError
from ssfl.reproduce import load_study, reproduce, studies
from ssfl.reproduce.pages import collect
from ssfl.reproduce.records import Figure, Result
from ssfl.reproduce.results import StudyResult
from ssfl.reproduce.small import HEADS, SETTINGS
from ssfl.reproduce.watch import Unwatched
from ssfl.ssl import METHODS
from ssfl.studies import packaged

WITH_SMALL_FORMS = [name for name, tables in packaged().items() if "small" in tables]
WIDEST = 256
OWN = """
title = "Own"
repeats = "nothing"
note = "Of the large runs."
tried = "Much, in large."
figures = ["global_knn"]
settings = ["partition.clients=3", "evaluation.baselines=false", "device.workers=1"]
{small}
[[arms]]
name = "one"
label = "One"
recipe = "digits"
paper = {{ global_knn = 0.9 }}
[[arms]]
name = "other"
label = "Other"
recipe = "digits"
settings = ["local.lr=0.05"]
paper = {{ global_knn = 0.8 }}
"""


def own_study(folder: Path, small: str = "[small]\nrounds = 1\ntried = 'Little.'") -> Path:
    path = folder / "own.toml"
    path.write_text(OWN.format(small=small))
    return path


def images(config: Config) -> int:
    """How many CIFAR-10 images a run of ten clients trains on."""
    local, clients = config.local, 10
    of_a_round = local.steps * local.batch * clients if local.steps else local.epochs * 50_000
    return config.server.rounds * of_a_round


@pytest.mark.parametrize("name", WITH_SMALL_FORMS)
def test_every_arm_in_small_is_a_small_network_on_the_same_question(name: str) -> None:
    whole, (label, small) = studies()[name], load_study(name, small=True)
    assert label == f"{name}-small"
    assert {arm.name for arm in small.arms} <= {arm.name for arm in whole.arms}
    for arm in small.arms:
        config = small.config(arm, name="x", seed=0, rounds=None)
        large = whole.config(whole.arm(arm.name), name="x", seed=0, rounds=None)
        assert (config.model.backbone, config.model.width) == ("small", 16)
        assert config.local.batch <= large.local.batch
        widths = {k: v for k, v in config.ssl.model_dump().items() if k.endswith("_width")}
        assert max(widths.values(), default=0) <= WIDEST
        assert config.server.rounds == small.rounds
        assert images(config) < images(large) / 2
        # The question is the same: only size, heads, rounds, batch and rate are not.
        for section in ("data", "partition", "algorithm", "views", "server"):
            one, other = (getattr(c, section).model_dump() for c in (config, large))
            one.pop("rounds", None), other.pop("rounds", None)
            assert one == other
        assert config.ssl.method == large.ssl.method
        for setting in whole.arm(arm.name).settings:  # what an arm is about stays
            assert setting in arm.settings


@pytest.mark.parametrize("name", WITH_SMALL_FORMS)
def test_nothing_of_the_papers_is_put_beside_small_figures(name: str) -> None:
    small = load_study(name, small=True)[1]
    assert not any(arm.paper for arm in small.arms)
    whole = studies()[name]
    assert small.note.startswith("**In small**")
    for words in (whole.note, whole.tried):  # which are about other runs
        assert not words or words not in small.note + small.tried


def test_every_method_has_heads_that_suit_a_small_network() -> None:
    assert set(HEADS) == set(METHODS) - {"supervised"}


def test_the_settings_of_a_study_in_small_give_way_to_its_arms(tmp_path: Path) -> None:
    more = "[small]\nsettings = ['local.lr=0.2', 'model.width=8']"
    small = load_study(own_study(tmp_path, more), small=True)[1]
    configs = [small.config(arm, name="x", seed=0, rounds=None) for arm in small.arms]
    assert {"model.width=16", "local.batch=64"} <= set(SETTINGS)
    assert [config.local.lr for config in configs] == [0.2, 0.05]  # the second names its own
    assert [(config.model.width, config.local.batch) for config in configs] == [(8, 64)] * 2


def test_a_study_runs_in_small_beside_its_large_form(tmp_path: Path) -> None:
    found = reproduce(
        own_study(tmp_path), out=tmp_path / "results", seeds=1, small=True, timing=False
    )
    assert (found.name, found.study.title) == ("own-small", "Own, in small")
    assert [(r.arm, r.rounds, r.config["model"]["width"]) for r in found.results] == [
        ("one", 1, 16),
        ("other", 1, 16),
    ]
    page = (tmp_path / "results" / "own-small" / "README.md").read_text()
    assert not (tmp_path / "results" / "own").exists()
    assert "**In small**" in page
    assert "Little." in page
    assert "Much, in large." not in page
    assert "paper |" not in page
    assert "0.9000" not in page


class Heard(Unwatched):
    """Remembers what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize(("small", "hint"), [(False, 1), (True, 0)])
def test_who_has_no_gpu_is_told_of_the_small_form(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: bool, hint: int
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    heard = Heard()
    reproduce(
        own_study(tmp_path), out=tmp_path, small=small, timing=False, dry_run=True, watch=heard
    )
    assert sum("--small" in text for text in heard.said) == hint


def test_a_study_without_a_small_form_speaks_of_none(tmp_path: Path) -> None:
    heard = Heard()
    reproduce(own_study(tmp_path, ""), out=tmp_path, timing=False, dry_run=True, watch=heard)
    assert not heard.said


def test_some_arms_may_be_left_out_in_small(tmp_path: Path) -> None:
    small = load_study(own_study(tmp_path, "[small]\narms = ['other']"), small=True)[1]
    assert [arm.name for arm in small.arms] == ["other"]


def test_a_study_without_a_small_form_says_so_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^backbones has no small form: .* \[small\]"):
        load_study("backbones", small=True)
    with pytest.raises(ConfigError, match=r"^own has no small form"):
        load_study(own_study(tmp_path, small=""), small=True)


def test_a_study_of_ones_own_may_not_have_the_name_of_a_small_one(tmp_path: Path) -> None:
    path = own_study(tmp_path).rename(tmp_path / "table2-small.toml")
    with pytest.raises(ConfigError, match="has the name of a study of the package"):
        load_study(path)


def test_small_results_stand_behind_the_large_ones_and_are_not_missed(tmp_path: Path) -> None:
    label, small = load_study("alpha", small=True)
    runs = [Result(arm="alpha-0.1", seed=0, rounds=20, figures={"global_knn": Figure(value=0.4)})]
    then = small.model_copy(update={"tried": "As it was."})
    StudyResult(name=label, study=then, results=runs).save(tmp_path / label)
    collect(tmp_path, tmp_path / "RESULTS.md")
    lines = (tmp_path / "RESULTS.md").read_text().splitlines()
    names = [line.split("|")[2].strip() for line in lines if line.startswith("| ") and "`" in line]
    names = [name.strip("`") for name in names if name.strip("`") in {*packaged(), label}]
    in_order = [name for name in names if name in {"alpha", "alpha-small", "protocol"}]
    assert in_order[:3] == ["alpha", "alpha-small", "protocol"]
    assert "table2-small" not in "\n".join(lines)
    assert "As it was." not in "\n".join(lines)  # the study is as it is now


def app() -> Any:
    single = typer.Typer()
    single.command()(command)
    return single


def test_the_list_says_which_studies_have_a_small_form() -> None:
    done = CliRunner().invoke(app(), ["--list"], env={"COLUMNS": "200"})
    rows = {line.split()[0]: line.split()[2] for line in done.output.splitlines()[1:]}
    assert [name for name, cell in rows.items() if cell == "yes"] == WITH_SMALL_FORMS
