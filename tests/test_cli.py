"""The command line: quick to answer, and every mistake one sentence with exit code 2."""

import errno
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console
from typer.main import get_command

import ssfl as package
from ssfl import __version__, cli, experiment
from ssfl.commands.evaluate import _show_health
from ssfl.commands.reproduce import Terminal
from ssfl.config import load_config, to_toml
from ssfl.data import download
from ssfl.display import Bars
from ssfl.errors import CheckpointError
from ssfl.federation import client, online, trainer
from ssfl.federation.messages import Reply
from ssfl.models.backbones import BACKBONES
from ssfl.protocols.scores import Evaluation
from ssfl.recipes import recipes
from ssfl.run import Run
from ssfl.tracking import JsonLines, Row
from tiny import tiny

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ssfl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Call:
    """ssfl("train", "demo"): exit code, output and errors of the command, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SSFL_DATA", str(tmp_path / "data"))

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ssfl", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(to_toml(tiny(server={"rounds": 2})))
    return path


def assert_one_sentence(answer: tuple[int, str, str], *parts: str) -> None:
    code, out, err = answer
    assert code == 2, (out, err)
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert "Traceback" not in out + err
    for part in parts:
        assert part in err


# Quick help


PARTS = {"data": ["get"], "site": ["init", "start"]}
"""Commands of commands."""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--help"], "Train encoders, or go on with a run."),
        (["-h"], "Train encoders, or go on with a run."),
        ([], "Train encoders, or go on with a run."),
        (["--version"], __version__),
        (["recipes"], "per-ssfl"),
        (["reproduce", "--list"], "Table 2: personal encoders"),
    ],
)
def test_help_and_lists_import_nothing_heavy(arguments: list[str], wanted: str) -> None:
    assert wanted in said_without_heavy_imports(arguments)


@pytest.mark.processes
def test_help_of_commands_imports_nothing_heavy() -> None:
    calls = [[name, part] for name in cli.COMMANDS for part in ["", *PARTS.get(name, [])]]
    said = said_without_heavy_imports(*([*filter(None, call), "--help"] for call in calls))
    assert said.count("Usage:") == len(calls)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "whole"),
    [("train --res", "--resume"), ("config per", "per-ssfl"), ("reproduce table2", "table2")],
)
def test_completion_knows_options_and_names_and_imports_nothing_heavy(
    monkeypatch: pytest.MonkeyPatch, words: str, whole: str
) -> None:
    monkeypatch.setenv("_SSFL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"ssfl {words}")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert said_without_heavy_imports([]).splitlines()[0] == whole


def said_without_heavy_imports(*calls: list[str]) -> str:
    """What a new process says to these calls of the command, one after the other."""
    script = """if True:
        import json, sys
        from ssfl.cli import main
        for call in json.loads(sys.argv[1]):
            sys.argv = ["ssfl", *call]
            try:
                main()
            except SystemExit:
                pass
        heavy = {"torch", "pydantic", "numpy", "sklearn", "matplotlib", "PIL", "flwr", "ray"}
        print("HEAVY", sorted(heavy & set(sys.modules)))
    """
    process = [sys.executable, "-c", script, json.dumps(calls)]
    done = subprocess.run(process, capture_output=True, text=True, check=True)
    assert "HEAVY []" in done.stdout, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help_of_its_own_with_an_example(ssfl: Call, command: str) -> None:
    code, out, _ = ssfl(command, "--help")
    assert code == 0
    assert f"ssfl {command}" in out
    for part in PARTS.get(command, []):
        _, out, _ = ssfl(command, part, "--help")
    assert "Example: ssfl" in out


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_is_whole_on_a_narrow_terminal(
    ssfl: Call, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    for part in PARTS.get(command, [None]):
        _, out, _ = ssfl(*filter(None, (command, part)), "--help")
        assert "Example: ssfl" in out
        assert "…" not in out


def test_help_says_what_every_argument_is(ssfl: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # so that no line is broken
    assert "A recipe's name, or the path of a .toml file." in ssfl("train", "--help")[1]
    assert "A run directory." in ssfl("info", "--help")[1]
    assert "Image files, or folders of them." in ssfl("embed", "--help")[1]


def test_a_short_option_is_short_for_the_same_long_one_in_every_command() -> None:
    groups = [get_command(cli.app), *(cli._load(name) for name in cli.COMMANDS)]
    members = [command for group in groups for command in getattr(group, "commands", {}).values()]
    options = [set(option.opts) for command in (*groups, *members) for option in command.params]
    names = set().union(*options)
    for short in (name for name in names if len(name) == 2):
        (together,) = {tuple(sorted(these)) for these in options if short in these}
        (long,) = set(together) - {short}
        assert all(short in these for these in options if long in these), (short, long)
    assert {"-o", "-p", "-v"} <= names


def test_an_unknown_command_is_refused(ssfl: Call) -> None:
    code, _, err = ssfl("trian")
    assert code == 2
    assert "No such command 'trian'. Did you mean 'train'?" in err
    assert err.count("Did you mean") == 1


def test_only_the_command_itself_offers_to_be_completed(ssfl: Call) -> None:
    assert "--install-completion" in ssfl("--help")[1]
    for group in ("data", "site"):
        assert "completion" not in ssfl(group, "--help")[1]


def test_the_package_shows_what_it_offers() -> None:
    assert set(package.__all__) <= set(dir(package))


# The usual way


def test_a_run_is_trained_shown_and_told_to_a_script(ssfl: Call, recipe: Path) -> None:
    code, out, err = ssfl("train", recipe, "--set", "evaluation.baselines=true")
    assert code == 0, err
    folder = Path("runs/tiny")
    assert str(folder) in out
    for column in ("raw pixels", "before training", "trained"):
        assert column in out
    run = Run(folder)
    assert run.config.evaluation.baselines

    code, out, _ = ssfl("info", folder, "--json")
    assert code == 0
    final = json.loads(out)
    assert final == run.final
    last = [row for row in run.metrics if row["kind"] == "evaluation"][-1]
    for figure in ("knn_mean", "knn_weighted", "knn_global", "effective_rank", "std_ratio"):
        assert final[figure] == last[figure]
    for figure in ("pixels_knn_mean", "untrained_knn_mean", "loss", "rounds", "seconds"):
        assert isinstance(final[figure], (int, float))

    code, out, _ = ssfl("info", folder)
    assert code == 0
    assert "2 of 2 rounds saved" in out
    code, _, _ = ssfl("train", recipe)
    assert code == 0
    assert Path("runs/tiny-2").is_dir()  # nothing is overwritten


def test_config_prints_what_can_be_read_back(ssfl: Call) -> None:
    for arguments in (["demo"], ["demo", "--bare", "--set", "algorithm.name=per-ssfl"]):
        code, out, _ = ssfl("config", *arguments)
        assert code == 0
        settings = [argument for argument in arguments if "=" in argument]
        assert tomllib.loads(out) == tomllib.loads(to_toml(load_config("demo", settings)))
    assert "#" not in out


def test_recipes_are_listed_with_what_they_are(ssfl: Call) -> None:
    code, out, _ = ssfl("recipes")
    assert code == 0
    assert all(name in out for name in recipes())


def test_partition_shows_who_holds_what(ssfl: Call, recipe: Path) -> None:
    code, out, _ = ssfl("partition", recipe, "--out", "pictures")
    assert code == 0
    assert "digits: 539 images" in out
    assert "classes: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9\n" in out
    counts = [line.split("│")[4] for line in out.splitlines() if line.startswith("│")]
    assert len(counts) == 4
    ends = {tuple(number.end() for number in re.finditer(r"\d+", row)) for row in counts}
    assert len(ends) == 1  # one below the other
    assert list(Path("pictures").iterdir())
    code, _, err = ssfl("partition", "demo", "--set", "data.source=sites")
    assert code == 2
    assert "these images are at sites" in err


def test_partition_names_natural_clients_and_broken_files(
    ssfl: Call, recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "sites").mkdir()
    folder_of_images(tmp_path / "sites" / "north [1]", good=10, corrupt=1)
    folder_of_images(tmp_path / "sites" / "south", good=10, corrupt=0)
    settings = ["data.source=folder", "data.path=sites", "data.image_size=16"]
    settings += ["data.layout=clients", "partition.kind=natural"]
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    code, out, _ = ssfl("partition", recipe, *arguments)
    assert code == 0
    assert "north [1]" in out
    assert "1 of 21 images in sites could not be read: north [1]/corrupt-0.png" in " ".join(
        out.split()
    )


def test_a_round_is_told_with_the_figures_of_its_own_evaluation(ssfl: Call, recipe: Path) -> None:
    settings = ["server.rounds=5", "evaluation.every=2"]
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    code, out, err = ssfl("train", recipe, "--no-report", *arguments)
    assert code == 0, err
    lines = [line for line in out.splitlines() if " round " in line]
    rows = Run("runs/tiny").metrics
    judged = {row["round"]: row["knn_mean"] for row in rows if row["kind"] == "evaluation"}
    assert list(judged) == [2, 4, 5]
    assert "kNN" not in lines[0]
    assert lines[1].endswith(f"kNN {judged[2]:.3f}")
    assert lines[2].endswith(f"kNN {judged[2]:.3f} (round 2)")
    assert lines[4].endswith(f"kNN {judged[5]:.3f}")


def test_a_coordinator_is_told_the_rank_that_its_sites_measured(
    ssfl: Call, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_labels(replies: list[Reply]) -> dict[str, object]:
        ranks = {str(r.client): {"effective_rank": 3.0 + r.client} for r in replies}
        return {"clients": ranks}

    monkeypatch.setattr(online.OnlineEvaluation, "shared", lambda self, theta: {})
    monkeypatch.setattr(online, "_client_row", without_labels)
    more = ["--set", "server.rounds=5", "--set", "evaluation.every=2"]
    _, out, _ = ssfl("train", recipe, "--no-report", *more)
    endings = [line.split()[3:] for line in out.splitlines() if " round " in line]
    assert [words[2:] for words in endings] == [
        [],
        ["rank", "4"],
        ["rank", "4", "(round", "2)"],
        ["rank", "4"],
        ["rank", "4"],
    ]
    assert "\nafter 5 rounds, " in out
    assert "effective rank 4.0 (mean over clients)\n" in out


def test_a_round_is_not_said_of_figures_that_nobody_measured(
    ssfl: Call, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online.OnlineEvaluation, "measure", lambda self: {})
    more = ["--set", "server.rounds=3", "--set", "evaluation.every=2"]
    _, out, _ = ssfl("train", recipe, "--no-report", *more)
    assert "(round" not in out


@pytest.mark.parametrize("width", [50, 80])
def test_the_bars_show_rounds_and_figures_in_any_terminal(
    width: int, recipe: Path, tmp_path: Path
) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, color_system=None)
    config = load_config(recipe, ["server.rounds=12"])
    run = experiment.train(config, out=tmp_path / "run", display=Bars(console))
    last = [line for line in screen.getvalue().splitlines() if "rounds" in line][-1]
    assert "12/12" in last
    assert f"kNN {run.final['knn_mean']:.3f}" in last


def test_no_figure_of_health_is_cut_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr("ssfl.commands.console.console", Console(file=screen, width=50))
    figures = {
        "effective_rank": 123.456,
        "std_ratio": 0.29871,
        "uniformity": -0.37123,
        "alignment": 0.12345,
        "epsilon_share": 0.00012,
    }
    health = dict.fromkeys(("global", "0", "10"), figures)
    _show_health(Evaluation(rounds=1, scores=[], health=health))
    rows = [line.split() for line in screen.getvalue().splitlines()[-3:]]
    assert [" ".join(row[:-5]) for row in rows] == ["shared", "client 0", "client 10"]
    assert all(row[-5:] == ["123.5", "0.299", "-0.371", "0.123", "0.0001"] for row in rows)


def test_one_round_is_no_rounds(ssfl: Call, recipe: Path) -> None:
    _, out, _ = ssfl("train", recipe, "--no-report", "--set", "server.rounds=1")
    assert "4 clients, 1 round\n" in out
    assert "after 1 round, " in out


@pytest.mark.parametrize("given", [Path, str, dict])
def test_training_starts_from_a_file_or_from_tables(
    given: type, recipe: Path, tmp_path: Path
) -> None:
    source = tomllib.loads(recipe.read_text()) if given is dict else given(recipe)
    run = package.train(source, out=tmp_path / "run")
    assert run.config == load_config(recipe)


def test_an_accuracy_is_not_shown_after_an_evaluation_that_found_none() -> None:
    bars = Bars(Console(file=io.StringIO()))
    bars.row({"kind": "evaluation", "round": 2, "knn_mean": 0.4, "knn_global": 0.5})
    bars.row({"kind": "round", "round": 2, "loss": 0.1})
    assert bars._summary() == "loss 0.100 kNN 0.400"
    bars.row({"kind": "evaluation", "round": 3, "knn_global": math.nan})  # it has diverged
    assert bars._summary() == "loss 0.100 kNN nan"


def test_brackets_in_names_are_shown_as_they_are(ssfl: Call, recipe: Path) -> None:
    _, out, _ = ssfl("train", recipe, "--no-report", "--out", "run[of]mine")
    assert "run directory run[of]mine\n" in out
    assert out.endswith("all of it: run[of]mine\n")


def test_what_a_study_says_of_a_failed_run_is_shown_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    remedy = "mlflow is not installed: `pip install 'ssfl[mlflow]'`"
    Terminal().say(remedy)
    assert capsys.readouterr().out == f"{remedy}\n"


# Stopped


Start = Callable[..., subprocess.Popen[str]]


def interrupt(process: subprocess.Popen[str], when: Callable[[], bool]) -> str:
    """Ctrl-C as soon as something is so; what the process said."""
    while process.poll() is None and not when():
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT), output  # to a shell both are 130
    return output


@pytest.mark.processes
@pytest.mark.parametrize("library", ["_pydantic_core", "libtorch_cpu", "_multiarray_umath"])
def test_ctrl_c_while_libraries_are_imported_ends_without_a_word(
    library: str, recipe: Path, start: Start, tmp_path: Path
) -> None:
    process = start("train", recipe, "--out", tmp_path / "run")
    maps = Path(f"/proc/{process.pid}/maps")
    assert interrupt(process, lambda: library in maps.read_text()) == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.processes
def test_sigterm_ends_any_command_like_ctrl_c_and_lets_it_tidy_up(tmp_path: Path) -> None:
    script = f"""
import signal, sys, tempfile
from ssfl import cli
from ssfl.data import download

def put(archive, root, via, progress):
    with tempfile.TemporaryDirectory(dir=root):
        signal.raise_signal(signal.SIGTERM)

download._put = put
sys.argv = ["ssfl", "data", "get", "cifar10", "--root", {str(tmp_path)!r}]
cli.main()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.processes
def test_ctrl_c_ends_the_command_without_a_word_before_it_knows_what_is_asked() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "ssfl", "--help"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.rstrip().endswith(" click.core"):
                process.send_signal(signal.SIGINT)
        assert process.wait() == -signal.SIGINT
    assert line.startswith("import time:")  # and no traceback after it


@pytest.mark.processes
def test_ctrl_c_before_the_first_round_leaves_nothing_behind(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for sign in ("config.toml", "metrics.jsonl"):  # images are being made; baselines are measured
        process = start("train", "demo", "--out", folder)
        output = interrupt(process, (folder / sign).exists)
        assert "stopped before anything was done" in output
        assert not folder.exists()


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_while_the_report_is_drawn_says_how_to_have_it_drawn(
    ssfl: Call, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("ssfl.report.single.write_report", interrupted)
        code, _, err = ssfl("train", recipe, "--out", "run")
    assert code == 130
    assert err == "stopped; what was done is saved: go on with `ssfl train --resume run`\n"
    assert ssfl("train", "--resume", "run")[0] == 0
    assert Path("run/report.html").is_file()


def test_ctrl_c_before_a_resumed_run_has_begun_does_not_call_it_gone(
    ssfl: Call, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ssfl("train", recipe, "--out", "run", "--no-report")[0] == 0
    monkeypatch.setattr(experiment, "load_federated", interrupted)
    code, _, err = ssfl("train", "--resume", "run")
    assert code == 130
    assert err == "stopped; what was done is saved: go on with `ssfl train --resume run`\n"


# Mistakes


def test_mistakes_in_the_configuration_are_one_sentence(ssfl: Call, recipe: Path) -> None:
    def setting(value: str) -> tuple[int, str, str]:
        return ssfl("train", recipe, "--set", value)

    assert_one_sentence(setting("local.lrr=1"), "unknown key local.lrr")
    assert_one_sentence(setting("local.lr=-1"), "local.lr = -1", "greater than 0")
    assert_one_sentence(setting("server.clients_per_round=5"), "only 4 clients")
    assert_one_sentence(setting("version=9"), "version 9", "version 1")
    assert_one_sentence(setting("model.backbone=resnet9"), "'resnet9'", "resnet18")
    assert_one_sentence(setting("views.preset=x"), "'x'", "cifar")
    assert_one_sentence(setting("device.device=tpu0"), "'tpu0' is not a device")
    assert_one_sentence(setting("local.lr"), "section.key=value")
    assert_one_sentence(ssfl("train", "dmeo"), "no recipe 'dmeo'", "demo")
    assert_one_sentence(ssfl("train"), "either a recipe", "--resume")
    assert_one_sentence(ssfl("train", recipe, "--resume", "x"), "either a recipe")
    assert_one_sentence(ssfl("train", recipe, "--comm", "pigeon"), "'pigeon'", "local")
    assert_one_sentence(ssfl("train", recipe, "--comm", "flower"), "`ssfl serve`")
    assert_one_sentence(ssfl("train", "--resume", "nowhere"), "nowhere is not a run directory")
    assert_one_sentence(
        ssfl("train", "--resume", "x", "--workers", 2, "--out", "y"), "leave out --out, --workers\n"
    )
    both = ("--set", "server.aggregation=l-dawa", "--set", "server.optimizer=fednova")
    assert_one_sentence(ssfl("train", recipe, *both), "choose one of them")
    assert_one_sentence(ssfl("info", "nowhere"), "nowhere is not a run directory: there is no such")
    assert_one_sentence(ssfl("info", recipe), "is not a run directory: it is a file")
    for answer in (ssfl("train", recipe, "-o", recipe), ssfl("partition", recipe, "-o", recipe)):
        assert_one_sentence(answer, "is no folder")
    assert_one_sentence(ssfl("config", "dmeo"), "no recipe 'dmeo'")
    assert not Path("runs").exists() or not list(Path("runs").iterdir())


def test_a_run_that_asks_for_a_tracker_which_is_not_there_leaves_nothing_behind(
    ssfl: Call, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    answer = ssfl("train", recipe, "--set", 'run.trackers=["wandb"]')
    assert_one_sentence(answer, "pip install 'ssfl[wandb]'")
    assert not list(Path("runs").iterdir())


def test_the_folder_of_all_runs_is_no_run(ssfl: Call, recipe: Path) -> None:
    assert ssfl("train", recipe, "--no-report")[0] == 0
    wanted = "runs is not a run directory: it has no config.toml, but runs/tiny has"
    assert_one_sentence(ssfl("report", "runs"), wanted)


def test_a_run_directory_is_no_recipe(ssfl: Call, recipe: Path) -> None:
    Run.create(load_config(recipe), "run")
    assert_one_sentence(ssfl("train", "run"), "`ssfl train --resume run`", "run/config.toml")


def test_a_run_without_a_round_says_how_to_get_one(ssfl: Call, recipe: Path) -> None:
    Run.create(load_config(recipe), "run")
    for command in (["evaluate", "run"], ["export", "run", "-o", "encoder.pt"]):
        assert_one_sentence(ssfl(*command), "no checkpoint yet", "`ssfl train --resume run`")


def test_a_run_of_somebodys_own_algorithm_says_once_that_it_must_be_imported(
    ssfl: Call, recipe: Path
) -> None:
    Run.create(load_config(recipe), "run")
    path = Path("run/config.toml")
    path.write_text(path.read_text().replace('name = "global-ssfl"', 'name = "mine"'))
    for command in ("info", "report", "evaluate"):
        assert_one_sentence(ssfl(command, "run"), "unknown algorithm 'mine'", "SSFL_PLUGINS")


def test_updates_that_run_away_come_with_what_to_lower(ssfl: Call, recipe: Path) -> None:
    settings = ["server.optimizer=fedadam", "server.lr=1e6", "server.retries=0"]
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    code, _, err = ssfl("train", recipe, *arguments)
    assert code == 2
    assert "refused" in err
    assert "lower local.lr or server.lr" in err.splitlines()[-1]


def test_a_plugin_that_fails_before_the_first_round_leaves_no_run_behind(
    ssfl: Call, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BACKBONES, "_targets", BACKBONES.targets | {"mine": "math:sqrt"})
    with pytest.raises(TypeError, match="sqrt"):
        ssfl("train", recipe, "--out", "here", "--set", "model.backbone=mine")
    assert not Path("here").exists()


def test_a_share_of_a_gpu_is_refused_where_nothing_is_shared_out(ssfl: Call, recipe: Path) -> None:
    answer = ssfl("train", recipe, "--out", "here", "--gpus-per-worker", "0.5")
    assert_one_sentence(answer, "--gpus-per-worker is for --comm ray")


def test_a_partition_that_cannot_be_met_is_one_sentence(ssfl: Call, recipe: Path) -> None:
    for settings, parts in (
        (["partition.clients=300"], ("300 clients", "539 images")),
        (
            ["partition.kind=dirichlet", "partition.alpha=0.01", "partition.min_size=130"],
            ("min_size is 130", "alpha"),
        ),
        (["partition.kind=natural"], ("natural", "owners")),
        (["partition.kind=shards", "partition.classes_per_client=11"], ("11", "10 classes")),
    ):
        arguments = [argument for setting in settings for argument in ("--set", setting)]
        assert_one_sentence(ssfl("train", recipe, "--out", "here", *arguments), *parts)
        assert_one_sentence(ssfl("partition", recipe, *arguments), *parts)
        assert not Path("here").exists()  # the place is free for a better try


def test_a_missing_data_set_is_one_sentence(
    ssfl: Call, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = replace(download.ARCHIVES["cifar10"], url="http://127.0.0.1:9/cifar.tar.gz")
    monkeypatch.setitem(download.ARCHIVES, "cifar10", nowhere)
    answer = ssfl("train", recipe, "--set", "data.source=cifar10")
    assert_one_sentence(answer, "cifar10 is not in", "ssfl data get cifar10 --via npm")
    answer = ssfl("train", recipe, "--set", "data.source=folder", "--set", "data.path=nowhere")
    assert_one_sentence(answer, "nowhere", "data.path")


def test_half_a_data_set_is_one_sentence(ssfl: Call, recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    (folder / "data_batch_1.bin").write_bytes(bytes(10_000 * 3073 // 2))
    answer = ssfl("train", recipe, "--set", "data.source=cifar10")
    assert_one_sentence(answer, "data_batch_1.bin is damaged", "ssfl data get cifar10")
    (folder / "data_batch_1.bin").write_bytes(bytes(10_000 * 3073))
    answer = ssfl("train", recipe, "--set", "data.source=cifar10")
    assert_one_sentence(answer, "incomplete", "data_batch_2.bin is missing")


def folder_of_images(folder: Path, good: int, corrupt: int) -> None:
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    folder.mkdir()
    for number in range(good):
        pixels = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"good-{number:02}.png")
    for number in range(corrupt):
        (folder / f"corrupt-{number}.png").write_bytes(b"\x89PNG not really")


def test_a_corrupt_image_is_named_and_too_many_of_them_are_one_sentence(
    ssfl: Call, recipe: Path, tmp_path: Path
) -> None:
    settings = ["data.source=folder", "data.image_size=16", "partition.clients=2", "local.batch=4"]
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    folder_of_images(tmp_path / "few", good=19, corrupt=1)
    code, out, _ = ssfl("train", recipe, *arguments, "--set", "data.path=few")
    assert code == 0
    assert "corrupt-0.png" in out.replace("\n", "")
    folder_of_images(tmp_path / "many", good=8, corrupt=4)
    answer = ssfl("train", recipe, *arguments, "--set", "data.path=many")
    assert_one_sentence(answer, "corrupt-0.png", "4 of")


def test_a_run_on_a_folder_of_images_is_judged_from_anywhere(
    ssfl: Call, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["data.source=folder", "data.image_size=16", "partition.clients=2", "local.batch=4"]
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    folder_of_images(tmp_path / "photos", good=20, corrupt=0)
    run = tmp_path / "run"
    command = ["train", str(recipe.resolve()), *arguments, "--set", "data.path=photos"]
    assert ssfl(*command, "--out", str(run))[0] == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    code, out, err = ssfl("evaluate", str(run), "-p", "health")
    assert code == 0, out + err


def test_a_home_is_known_wherever_a_path_is_given(
    ssfl: Call, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    recipe.rename(home / "tiny.toml")
    Path("beside").mkdir()
    Path("beside/own.toml").write_text('extends = "~/tiny.toml"')
    train = ["train", "beside/own.toml", "--no-report"]
    assert ssfl(*train, "--out=~/run")[0] == 0  # which no shell writes out
    assert ssfl(*train, "--set", "server.start=~/run", "--out", "on")[0] == 0
    assert ssfl("export", "~/run", "-o", "~/encoder.pt")[0] == 0
    assert sorted(path.name for path in home.iterdir()) == ["encoder.pt", "run", "tiny.toml"]
    assert not Path("~").exists()


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["--set", "server.start=~nosuchuser/enc.pt"], "server.start"),
        (["--set", "data.source=folder", "--set", "data.path=~nosuchuser/img"], "data.path"),
        (["--out", "~nosuchuser/run"], "--out"),
    ],
)
def test_a_home_that_nobody_has_is_one_sentence(
    arguments: list[str], where: str, ssfl: Call, recipe: Path
) -> None:
    answer = ssfl("train", recipe, *arguments)
    assert_one_sentence(answer, f"{where}: ~nosuchuser/", "write out the whole path")
    assert [path.name for path in Path().iterdir()] == ["tiny.toml"]


def test_a_run_whose_name_is_no_text_is_refused_and_one_that_came_to_it_has_its_pages(
    ssfl: Call, recipe: Path
) -> None:
    bad, shown = os.fsdecode(b"bad\xff"), "bad\N{REPLACEMENT CHARACTER}"
    assert_one_sentence(ssfl("train", recipe, "--out", bad), f"{shown} is not in UTF-8", "--out")
    assert not Path(bad).exists()
    assert ssfl("train", recipe, "--out", "fine", "--no-report")[0] == 0
    shutil.copytree("fine", bad)
    code, out, err = ssfl("report", bad)
    assert code == 0, err
    assert "bad?/report.html" in out
    assert f"<h1>{shown}</h1>" in Path(bad, "report.html").read_text()
    code, _, err = ssfl("compare", bad, "fine", "--out", "both")
    assert code == 0, err
    assert 'href="../bad%FF/report.html"' in Path("both/comparison.html").read_text()
    assert shown in Path("both/comparison.csv").read_text()
    assert shown in Path("both/comparison.md").read_text()
    assert_one_sentence(ssfl("evaluate", bad), "could not read", "not valid UTF-8")


def test_a_path_of_images_that_is_no_text_is_refused_and_leaves_nothing_behind(
    ssfl: Call, recipe: Path, tmp_path: Path
) -> None:
    folder_of_images(tmp_path / os.fsdecode(b"img\xff"), good=20, corrupt=0)
    given = ["--set", "data.source=folder", "--set", os.fsdecode(b"data.path=img\xff")]
    answer = ssfl("train", recipe, *given, "--out", "run")
    assert_one_sentence(answer, "data.path: ", "/img\N{REPLACEMENT CHARACTER} is not in UTF-8")
    assert not Path("run").exists()
    study = 'title = "T"\nrepeats = ""\nfigures = ["global_knn"]\n[[arms]]\nname = "one"\n'
    Path("own.toml").write_text(f'{study}label = "One"\nrecipe = "{recipe}"\n')
    answer = ssfl("reproduce", "own.toml", "--no-timing", *given)
    assert_one_sentence(answer, "is not in UTF-8")


def test_a_run_of_another_version_or_model_is_one_sentence(ssfl: Call, recipe: Path) -> None:
    assert ssfl("train", recipe, "--out", "run")[0] == 0
    assert_one_sentence(ssfl("train", recipe, "--out", "run"), "run holds a run already")
    path = Path("run/config.toml")
    text = path.read_text()
    path.write_text(text.replace("version = 1", "version = 3"))
    assert_one_sentence(ssfl("train", "--resume", "run"), "version 3")
    path.write_text(text.replace("width = 4", "width = 5"))
    answer = ssfl("train", "--resume", "run")
    assert_one_sentence(answer, "does not fit the configured model", "config.toml")
    assert_one_sentence(ssfl("evaluate", "run"), "does not fit the configured model")
    with pytest.raises(CheckpointError, match="does not fit"):
        Run("run").global_encoder()
    path.write_text(text.replace('optimizer = "fedavg"', 'optimizer = "fedadam"'))
    assert_one_sentence(ssfl("train", "--resume", "run"), "does not fit fedadam")
    path.write_text(text)
    (saved,) = Path("run/checkpoints").iterdir()
    saved.write_bytes(saved.read_bytes()[:-100])
    assert_one_sentence(ssfl("train", "--resume", "run"), "could not read", saved.name)


def fill_the_disk_for(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has `what` in its path finds no room; it is written to a name that begins with a
    dot, beside its own."""
    fsync = os.fsync

    def full(handle: int) -> None:
        if what in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)


def test_a_full_disk_is_one_sentence(
    ssfl: Call, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_the_disk_for("checkpoints", monkeypatch)
    answer = ssfl("train", recipe, "--out", "run")
    assert_one_sentence(answer, "No space left on device", "run/checkpoints", "--resume run`")


@pytest.mark.parametrize("at", ["round", "evaluation"])
def test_a_disk_that_fills_between_checkpoints_is_one_sentence(
    at: str, ssfl: Call, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = JsonLines.log

    def filling(record: JsonLines, row: Row) -> None:  # every write finds no room
        if row["kind"] == at:
            record._file = Path("/dev/full").open("a")  # noqa: SIM115
        log(record, row)

    monkeypatch.setattr(JsonLines, "log", filling)
    answer = ssfl("train", recipe, "--out", "run")
    assert_one_sentence(answer, "No space left on device", "run/metrics.jsonl")
    there = Path("run").exists()
    assert there == (at == "evaluation")  # else nothing was done, and nothing is left behind
    assert ("go on with `ssfl train --resume run`" in answer[2]) == there


def test_a_place_that_cannot_be_written_is_one_sentence(ssfl: Call, recipe: Path) -> None:
    assert ssfl("train", recipe, "--out", "run", "--no-report")[0] == 0
    Path("file").touch()
    written = ssfl("export", "run", "-o", "file/encoder.pt")
    assert_one_sentence(written, "could not write file/encoder.pt: file is no folder")
    drawn = ssfl("partition", recipe, "--out", "file/pictures")
    assert_one_sentence(drawn, "file/pictures cannot be used: ")


def test_mistakes_in_an_evaluation_are_one_sentence(ssfl: Call, recipe: Path) -> None:
    assert ssfl("train", recipe, "--out", "run", "--no-report")[0] == 0

    def setting(*values: str) -> tuple[int, str, str]:
        return ssfl("evaluate", "run", *(part for value in values for part in ("--set", value)))

    assert_one_sentence(setting("linear.nope=1"), "unknown key linear.nope", "known here are")
    assert_one_sentence(setting("finetune.epochs=-1"), "finetune.epochs = -1", "greater than")
    assert_one_sentence(setting("linear=1", "linear.l2=2"), "linear is not a section")
    assert_one_sentence(setting("fractions=[0.1, 2.0]"), "fractions.1 = 2.0", "or equal to 1")
    assert_one_sentence(setting("linear"), "section.key=value", "finetune.epochs=20")
    assert_one_sentence(ssfl("evaluate", "run", "-p", "nope"), "'nope'", "semi-linear")
    assert_one_sentence(ssfl("evaluate", "run", "-p", "knn", "--all"), "leave out --protocol")


def test_figures_that_cannot_be_saved_are_shown_all_the_same(
    ssfl: Call, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ssfl("train", recipe, "--out", "run", "--no-report")[0] == 0
    fill_the_disk_for("run/.", monkeypatch)
    answer = ssfl("evaluate", "run", "-p", "knn")
    assert_one_sentence(answer, "could not write run/evaluation.json", "No space left on device")
    assert re.search(r"kNN\b.* 0\.\d{4} ", answer[1])


def test_features_that_cannot_be_saved_leave_those_of_before(
    ssfl: Call, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ssfl("train", recipe, "--out", "run", "--no-report")[0] == 0
    Image.new("L", (8, 8)).save("image.png")
    assert ssfl("embed", "run", "image.png", "-o", "features.npy")[0] == 0
    before = Path("features.npy").read_bytes()
    Image.new("L", (8, 8), 99).save("image.png")
    fill_the_disk_for("/.", monkeypatch)
    answer = ssfl("embed", "run", "image.png", "-o", "features.npy")
    assert_one_sentence(answer, "could not write features.npy: No space left on device")
    assert Path("features.npy").read_bytes() == before
    assert not [*Path().glob(".*.tmp")]


def test_an_evaluation_says_which_figures_it_drops(ssfl: Call, recipe: Path) -> None:
    assert ssfl("train", recipe, "--out", "run", "--no-report")[0] == 0
    assert "dropped" not in ssfl("evaluate", "run", "-p", "linear")[1]
    _, out, _ = ssfl("evaluate", "run", "-p", "knn", "--set", "clients=2")
    assert "note: dropped what was measured with another setting of clients: personal_linear" in (
        " ".join(out.split())
    )


def test_health_is_shown_when_it_is_asked_for(ssfl: Call, recipe: Path) -> None:
    assert ssfl("train", recipe, "--out", "run", "--no-report")[0] == 0
    assert "lost to ε" not in ssfl("evaluate", "run", "-p", "knn")[1]
    assert "lost to ε" in ssfl("evaluate", "run", "-p", "health")[1]


def test_a_run_whose_clients_all_fail_is_one_sentence_and_can_be_resumed(
    ssfl: Call, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(client.log, "exception", lambda *_: None)
    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_one_step", broken)
        answer = ssfl("train", recipe, "--out", "run")
        assert_one_sentence(
            (*answer[:2], answer[2].splitlines(keepends=True)[-1]), "round 1", "no luck"
        )
    code, _, err = ssfl("train", "--resume", "run")
    assert code == 0, err
