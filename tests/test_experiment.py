"""A whole run: repeatable, stoppable at any moment, and the same wherever its clients work."""

import errno
import fcntl
import json
import os
import pty
import random
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import ssfl.assemble
import ssfl.experiment
import ssfl.run
from ssfl.algorithms.global_ssfl import GlobalSSFL
from ssfl.comm import COMMUNICATORS
from ssfl.comm.local import LocalCommunicator
from ssfl.config import Config, to_toml
from ssfl.data.sources import load_dataset
from ssfl.errors import CheckpointError, ConfigError, FederationError
from ssfl.evaluation.features import extract
from ssfl.experiment import Quiet, resume, train
from ssfl.federation.checkpoint import latest_checkpoint
from ssfl.federation.client import Client, Host
from ssfl.federation.engine import DeviceOptions, Engine
from ssfl.federation.messages import Reply, Task
from ssfl.federation.online import OnlineEvaluation
from ssfl.federation.server import Server
from ssfl.federation.trainer import Trainer
from ssfl.files import write_text
from ssfl.models.backbones import BACKBONES, Backbone
from ssfl.report import write_report
from ssfl.run import Run
from ssfl.ssl import METHODS
from ssfl.ssl.base import Batch, Method, MethodOptions, Outputs, negative_cosine
from tiny import outcome, same_bits, tiny

PERSONAL: dict[str, Any] = {
    "algorithm": {"name": "per-ssfl"},
    "partition": {"clients": 6},
    "server": {"rounds": 12, "clients_per_round": 3, "optimizer": "fedadam", "lr": 0.01},
    "evaluation": {"every": 4},
    "run": {"checkpoint_every": 3},
}


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A Per-SSFL run that nothing happened to."""
    return train(tiny(**PERSONAL), out=tmp_path_factory.mktemp("runs") / "left-alone")


def figures(run: Run) -> list[dict[str, Any]]:
    """Every row that counts, but for times and traces of resuming."""
    rows = [row for row in run.metrics if row["kind"] != "resume"]
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]


def assert_same_end(run: Run, expected: Run) -> None:
    assert same_bits(outcome(run), outcome(expected))
    assert figures(run) == figures(expected)
    timeless = [
        {k: v for k, v in end.final.items() if "seconds" not in k} for end in (run, expected)
    ]
    assert timeless[0] == timeless[1]


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(
    left_alone: Run, tmp_path: Path
) -> None:
    again = train(tiny(**PERSONAL), out=tmp_path / "again")
    assert_same_end(again, left_alone)
    other = train(tiny(**PERSONAL, seed=4), out=tmp_path / "other")
    one, two = outcome(other), outcome(left_alone)
    assert not torch.equal(one["theta"], two["theta"])


def test_two_workers_end_with_the_same_bits_as_one(left_alone: Run, tmp_path: Path) -> None:
    two = train(tiny(**PERSONAL, device={"workers": 2}), out=tmp_path / "two")
    assert_same_end(two, left_alone)


def test_two_workers_end_with_the_same_bits_as_one_in_bfloat16_too(tmp_path: Path) -> None:
    """Threads share what autocast remembers."""
    common: dict[str, Any] = {"server": {"rounds": 6}}
    ends = [
        outcome(
            train(
                tiny(**common, device={"precision": "bf16", "workers": workers}),
                out=tmp_path / str(workers),
            )
        )
        for workers in (1, 2)
    ]
    assert same_bits(*ends)


def test_an_adaptive_server_left_at_its_own_rate_does_not_collapse(tmp_path: Path) -> None:
    widths = dict.fromkeys(("projector_width", "predictor_width", "projection_width"), 64)
    config = tiny(
        algorithm={"name": "per-ssfl"},
        ssl={"method": "byol", **widths},
        server={"rounds": 4, "optimizer": "fedadam"},
    )
    assert train(config, out=tmp_path / "run").final["effective_rank"] > 5  # at a rate of 1: 1.7


# Stopped by others


Start = Callable[..., subprocess.Popen[str]]


def rounds_begun(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count('"kind": "round"') if path.exists() else 0


def wait_for_rounds(process: subprocess.Popen[str], folder: Path, more: int = 1) -> None:
    """Until the process has played `more` rounds (or has ended)."""
    before = rounds_begun(folder)
    while process.poll() is None and rounds_begun(folder) < before + more:
        time.sleep(0.01)


@pytest.mark.processes
def test_killed_at_random_moments_and_resumed_a_run_ends_with_the_same_bits(
    left_alone: Run, start: Start, tmp_path: Path
) -> None:
    seed = random.randrange(10**6)
    print(f"moments drawn with seed {seed}")
    moments = random.Random(seed)
    recipe, folder = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(to_toml(tiny(**PERSONAL)))
    arguments = ["train", str(recipe), "--out", str(folder)]
    pace = sum(row["seconds"] for row in left_alone.metrics if row["kind"] == "round") / 12
    kills = 0
    for _ in range(3):
        process = start(*arguments)
        wait_for_rounds(process, folder)
        time.sleep(moments.uniform(0, 4 * pace))
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
        arguments = ["train", "--resume", str(folder)]
    last = start(*arguments)
    output, _ = last.communicate(timeout=200)
    assert last.returncode == 0, output
    assert kills >= 1
    assert_same_end(Run(folder), left_alone)


@pytest.mark.processes
def test_ctrl_c_saves_and_exits_with_130_and_the_resumed_run_ends_the_same(
    left_alone: Run, start: Start, tmp_path: Path
) -> None:
    recipe, folder = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(to_toml(tiny(**{**PERSONAL, "run": {"checkpoint_every": 1000}})))
    process = start("train", str(recipe), "--out", str(folder))
    wait_for_rounds(process, folder, more=2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert f"ssfl train --resume {folder}" in output
    saved = latest_checkpoint(folder / "checkpoints")
    assert saved is not None
    assert saved.rounds >= 2
    assert same_bits(outcome(resume(folder)), outcome(left_alone))
    assert figures(Run(folder)) == figures(left_alone)


@pytest.mark.processes
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGHUP])
def test_kill_saves_and_ends_a_background_job_of_a_script_too(
    sign: signal.Signals, start: Start, tmp_path: Path
) -> None:
    recipe, folder = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(to_toml(tiny(**{**PERSONAL, "server": {"rounds": 10_000}})))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for `ssfl ... &`
    try:
        process = start("train", str(recipe), "--out", str(folder))
    finally:
        signal.signal(signal.SIGINT, before)
    wait_for_rounds(process, folder, more=2)
    process.send_signal(sign)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 130, output
    assert f"ssfl train --resume {folder}" in output
    saved = latest_checkpoint(folder / "checkpoints")
    assert saved is not None
    assert saved.rounds >= 2


@pytest.mark.processes
@pytest.mark.parametrize("onlooker", ["terminal", "pipe"])
def test_a_run_whose_onlooker_has_gone_is_saved(onlooker: str, tmp_path: Path) -> None:
    recipe, folder = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(to_toml(tiny(server={"rounds": 100}, run={"checkpoint_every": 100})))
    looking, shown = pty.openpty() if onlooker == "terminal" else os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "ssfl", "train", str(recipe), "--out", str(folder)],
        stdout=shown,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        preexec_fn=lambda: onlooker == "terminal" and fcntl.ioctl(1, termios.TIOCSCTTY, 0),
    )
    os.close(shown)
    wait_for_rounds(process, folder, more=2)
    os.close(looking)
    process.wait(100)
    saved = latest_checkpoint(folder / "checkpoints")
    assert saved is not None
    assert saved.rounds == rounds_begun(folder) < 100


class Killed(BaseException):
    """Death in the midst of something: nobody catches it."""


def small_steps() -> Config:
    return tiny(
        algorithm={"name": "per-ssfl"},
        partition={"clients": 2},
        data={"source": "digits", "test_fraction": 0.9},
        server={"rounds": 2},
        evaluation={"every": 1, "clients": 1},
        run={"checkpoint_every": 1},
    )


@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_around_any_file_it_writes_a_run_resumes_to_the_same_bits(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(small_steps(), out=tmp_path / "expected")
    replace = Path.replace
    written: list[str] = []

    def die_at(target_count: int) -> None:
        def replaced(self: Path, target: Path) -> Path:
            written.append(Path(target).name)
            if len(written) != target_count:
                return replace(self, target)
            if moment == "after":
                replace(self, target)
            raise Killed

        written.clear()
        monkeypatch.setattr(Path, "replace", replaced)

    deaths = 0
    for count in range(3, 30):  # the first two are the configuration and the facts
        folder = tmp_path / f"run-{count}"
        die_at(count)
        try:
            train(small_steps(), out=folder)
        except Killed:
            deaths += 1
        monkeypatch.setattr(Path, "replace", replace)
        (folder / "clients" / "000000").mkdir(parents=True, exist_ok=True)
        (folder / "clients" / "000000" / ".round-000001.safetensors.7.tmp").touch()
        assert_same_end(resume(folder), expected)
        assert not [*folder.rglob("*.tmp")]  # neither ours nor one that SIGKILL left
        if len(written) < count:
            break
    assert deaths == 7  # twice two states and a checkpoint, and the final figures


def interrupted(
    at: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, where: Any, name: str, call: int
) -> None:
    """Play until the given call of where.name, and get a Ctrl-C just there."""
    original, calls = getattr(where, name), []

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(where, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            at()


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (Server, "gather"),
        (Server, "advance"),
        (ssfl.experiment, "_round_row"),
        (OnlineEvaluation, "measure"),
        (ssfl.experiment, "save_checkpoint"),
    ],
)
def test_ctrl_c_at_any_step_of_a_round_loses_and_doubles_nothing(
    where: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(small_steps(), out=tmp_path / "expected")
    for call in (1, 2):
        folder = tmp_path / f"run-{call}"
        interrupted(
            lambda out=folder: train(small_steps(), out=out), monkeypatch, where, name, call
        )
        if folder.exists():
            assert_same_end(resume(folder), expected)
        else:
            assert (where, name, call) == (Server, "gather", 1)  # before anything was done


def test_ctrl_c_while_the_last_round_is_saved_does_not_lose_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, config = tmp_path / "run", tiny(run={"checkpoint_every": 100})
    where, name = ssfl.experiment, "save_checkpoint"
    interrupted(lambda: train(config, out=folder), monkeypatch, where, name, call=1)
    assert Run(folder).checkpoint().rounds == config.server.rounds


def test_ctrl_c_pressed_again_while_a_run_is_saved_does_not_lose_what_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, config = tmp_path / "run", tiny(run={"checkpoint_every": 100})
    where, name = ssfl.experiment, "save_checkpoint"
    stopped = lambda: train(config, out=folder, display=Stopping(True))  # noqa: E731
    interrupted(stopped, monkeypatch, where, name, call=1)
    assert Run(folder).checkpoint().rounds == 2


def test_ctrl_c_pressed_again_while_a_run_is_taken_back_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    stopped = lambda: train(tiny(), out=folder, display=Stopping(True, before=0))  # noqa: E731
    interrupted(stopped, monkeypatch, ssfl.run, "latest_checkpoint", call=1)
    assert not folder.exists()


def test_a_transport_that_cannot_even_be_closed_does_not_cost_what_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: LocalCommunicator) -> None:
        raise RuntimeError("the cluster is gone")

    monkeypatch.setattr(LocalCommunicator, "close", broken)
    with pytest.raises(RuntimeError, match="the cluster is gone"):
        train(tiny(run={"checkpoint_every": 100}), out=tmp_path / "run", display=Stopping(True))
    assert Run(tmp_path / "run").checkpoint().rounds == 2


# The record


def test_the_record_is_only_appended_to_and_counts_no_round_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    config = tiny(server={"rounds": 5}, run={"checkpoint_every": 4})
    advance = Server.advance
    for rounds in (3, 4):  # killed before there is any checkpoint, then after one

        def die(self: Server, *args: Any, after: int = rounds) -> Any:
            if self.rounds_done == after:
                raise Killed
            return advance(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(Server, "advance", die)
            with pytest.raises(Killed):
                resume(path.parent) if path.exists() else train(config, out=path.parent)
        before = path.read_bytes()
        with path.open("ab") as file:
            file.write(b'{"kind": "round", "round": 3, "lo')  # cut short by the kill
    run = resume(path.parent)
    assert path.read_bytes().startswith(before)
    rounds = [row["round"] for row in run.metrics if row["kind"] == "round"]
    assert rounds == [0, 1, 2, 3, 4]
    assert [row["round"] for row in run.metrics if row["kind"] == "resume"] == [0, 4]
    lines = path.read_text().splitlines()
    assert sum('"kind": "round"' in line for line in lines) > 5  # all of it is still to be seen


def test_what_the_record_says_is_on_disk_before_the_checkpoint_that_it_belongs_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, rename, durable, saved = os.fsync, os.replace, [""], []

    def noted(handle: int) -> None:
        fsync(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.name == "metrics.jsonl":
            durable.append(path.read_text())

    def in_place(temporary: Path, path: Path) -> None:
        if path.parent.name == "checkpoints":  # after a power cut, the record may be this and more
            saved.append(int(path.stem.split("-")[1]))
            assert durable[-1].count('"kind": "round"') == saved[-1]
        rename(temporary, path)

    monkeypatch.setattr(os, "replace", in_place)

    monkeypatch.setattr(os, "fsync", noted)
    train(tiny(server={"rounds": 5}), out=tmp_path / "run")
    assert saved == [2, 4, 5]
    assert len(durable) == 4


def test_a_run_does_not_go_back_further_than_its_clients_can(tmp_path: Path) -> None:
    config = tiny(algorithm={"name": "per-ssfl"}, server={"rounds": 4})
    run = train(config, out=tmp_path / "run")
    newest = run.checkpoints / "round-000004.safetensors"
    before, content = outcome(run), newest.read_bytes()
    newest.unlink()
    with pytest.raises(CheckpointError, match=r"is of round 2, and client \d .*kept later states"):
        resume(run.path)
    newest.write_bytes(content)
    resume(run.path)
    assert same_bits(outcome(run), before)


def test_a_finished_run_that_is_resumed_stays_as_it_is(tmp_path: Path) -> None:
    run = train(tiny(), out=tmp_path / "run")
    before, rows, final = outcome(run), figures(run), run.final
    for it in (run, run.path):  # opened, or by its path
        resume(it)
        assert same_bits(outcome(run), before)
        assert figures(run) == rows
        assert run.final == final


class Stopping(Quiet):
    """Takes its time over a round, and ends the first session before the third (or another)."""

    def __init__(self, stops: bool, before: int = 2) -> None:
        self.stops, self.before = stops, before

    def begin_round(self, round_: int, clients: int) -> None:
        if self.stops and round_ == self.before:
            raise KeyboardInterrupt
        time.sleep(0.3)


def test_the_seconds_of_a_run_are_those_of_all_its_sessions(tmp_path: Path) -> None:
    config = tiny(server={"rounds": 3}, run={"checkpoint_every": 1})
    with pytest.raises(KeyboardInterrupt):
        train(config, out=tmp_path / "run", display=Stopping(True))
    run = resume(tmp_path / "run", display=Stopping(False))
    took = [row["train_seconds"] for row in run.metrics if "train_seconds" in row]
    assert took == sorted(took)
    assert run.final["train_seconds"] >= took[-1] >= 3 * 0.3


class Counting(Quiet):
    """Counts every client's states on disk before each round, and is stopped before one."""

    def __init__(self, clients: Path, stopped_before: int) -> None:
        self.clients, self.stopped_before = clients, stopped_before
        self.most = 0

    def begin_round(self, round_: int, clients: int) -> None:
        counts = [len(list(folder.iterdir())) for folder in self.clients.glob("*")]
        self.most = max([self.most, *counts])
        if round_ == self.stopped_before:
            raise KeyboardInterrupt


def test_disk_holds_a_clients_last_states_alone_before_the_first_checkpoint_too(
    tmp_path: Path,
) -> None:
    config = tiny(
        algorithm={"name": "per-ssfl"},
        server={"rounds": 9},
        run={"store_mb": 0, "checkpoint_every": 100},
    )
    begun = Counting(tmp_path / "run" / "clients", stopped_before=5)
    with pytest.raises(KeyboardInterrupt):
        train(config, out=tmp_path / "run", display=begun)
    assert begun.most == 2
    gone_on = Counting(begun.clients, stopped_before=9)
    resume(tmp_path / "run", display=gone_on)
    assert gone_on.most == 3  # and that of the checkpoint


class Moving(Quiet):
    """Gives the run directory another name in the midst of the run."""

    def start(self, run: Run, clients: int, rounds: int, done: int) -> None:
        self.folder = run.path

    def begin_round(self, round_: int, clients: int) -> None:
        if round_ == 3:
            self.folder.rename(self.folder.with_name("moved"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's
def test_a_run_directory_that_is_moved_away_ends_the_run_and_is_gone_on_with_elsewhere(
    left_alone: Run, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"run/metrics.jsonl: No such file"):
        train(tiny(**PERSONAL), out=tmp_path / "run", display=Moving())
    assert not (tmp_path / "run").exists()  # not begun anew, with half of what belongs to it
    assert_same_end(resume(tmp_path / "moved"), left_alone)


# Several processes in one place


@pytest.mark.processes
def test_a_run_that_another_process_is_at_is_left_to_it(start: Start, tmp_path: Path) -> None:
    recipe, folder = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(to_toml(tiny(server={"rounds": 10_000})))
    first = start("train", str(recipe), "--out", str(folder), "--no-report")
    wait_for_rounds(first, folder)
    with pytest.raises(FederationError, match="another process is at work in"):
        resume(folder)
    with pytest.raises(ConfigError, match="holds a run already"):
        train(tiny(), out=folder)
    first.send_signal(signal.SIGINT)
    output, _ = first.communicate(timeout=100)
    assert first.returncode == 130, output
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rounds = [row["round"] for row in map(json.loads, lines) if row["kind"] == "round"]
    assert rounds == list(range(len(rounds)))


def test_a_place_that_two_ask_for_at_once_is_given_to_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: Run.create(tiny()), range(8)))
        tries = [pool.submit(Run.create, tiny(), tmp_path / "chosen") for _ in range(8)]
    assert len({run.path for run in runs}) == 8
    refused = [one.exception() for one in tries if one.exception() is not None]
    assert len(refused) == 7
    assert all("holds a run already" in str(error) for error in refused)
    Run(tmp_path / "chosen").withdraw()
    assert not (tmp_path / "chosen").exists()


def test_a_run_finds_itself_when_the_working_directory_is_another_and_else_is_called_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = train(tiny(server={"rounds": 1}), out="mine")
    assert (repr(run), run.way_on) == ("Run('mine')", "ssfl train --resume mine")
    known = run.final
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run.final == known
    assert run.checkpoint().rounds == 1
    assert run.way_on == f"ssfl train --resume {tmp_path / 'mine'}"
    assert write_report(run).is_file()
    monkeypatch.chdir(tmp_path)
    assert str(run.path) == "mine"


def test_ctrl_c_while_the_run_directory_is_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path, content: str) -> None:
        write_text(path, content)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("ssfl.run.write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_cannot_be_written_down_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    for place in (None, "runs/mine"):
        with pytest.raises(CheckpointError, match="No space left"):
            Run.create(tiny(), place)
    assert not [*(tmp_path / "runs").iterdir()]


def test_a_place_that_cannot_be_written_to_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("no folder")
    for place in (None, "runs/mine"):
        with pytest.raises(CheckpointError, match=r"could not \w+ runs/\w+"):
            Run.create(tiny(), place)


def test_nothing_that_clients_report_replaces_a_fact_of_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Client._train

    def boastful(client: Client, task: Task) -> Reply:
        reply = honest(client, task)
        return replace(reply, metrics=reply.metrics | {"kind": 5.0, "round": 7.0, "best": 1.0})

    monkeypatch.setattr(Client, "_train", boastful)
    monkeypatch.setattr(GlobalSSFL, "metrics", ("round",))  # an unlucky name
    run = train(tiny(server={"rounds": 1}), out=tmp_path / "run")
    (row,) = [row for row in run.metrics if row["kind"] == "round"]
    assert row["round"] == 0
    assert "best" not in row


def test_with_a_deadline_the_judge_has_models_but_no_engine_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[Engine] = []
    trainers: list[Trainer] = []

    class Counted(Engine):
        def __init__(self, options: DeviceOptions) -> None:
            super().__init__(options)
            engines.append(self)

    class Kept(Trainer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            trainers.append(self)

    monkeypatch.setattr(ssfl.assemble, "Engine", Counted)
    monkeypatch.setattr(ssfl.assemble, "Trainer", Kept)
    train(tiny(server={"rounds": 1, "deadline": 60.0}), out=tmp_path / "run")
    assert len(trainers) == 2  # a worker's and the judge's
    assert len(engines) == 1


def test_the_final_figures_are_those_of_the_last_round(left_alone: Run) -> None:
    last = [row for row in left_alone.metrics if row["kind"] == "evaluation"][-1]
    assert last["round"] == left_alone.final["rounds"] == 12
    assert left_alone.final["knn_mean"] == last["knn_mean"]
    assert left_alone.final["loss"] == left_alone.metrics[-2]["loss"]
    assert json.loads((left_alone.path / "final.json").read_text()) == left_alone.final


# One centralised step


class Plain(Backbone):
    """A network without batch norm, whose loss is a mean over images."""

    features = 12

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, stride=2)
        self.linear = nn.Linear(27, 12)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.conv(x)).flatten(1)
        return torch.tanh(self.linear(hidden))


class PlainOptions(MethodOptions):
    method: Literal["plain"] = "plain"


class PlainMethod(Method):
    """SimSiam's loss with a linear predictor and no projector."""

    Options = PlainOptions

    def __init__(self, backbone: Backbone, options: PlainOptions) -> None:
        super().__init__(backbone)
        self.predictor = nn.Linear(backbone.features, backbone.features)

    def forward(self, batch: Batch) -> Outputs:
        z = self.each(self.backbone, batch.views)
        return Outputs(z, self.each(self.predictor, z))

    def loss(self, outputs: Outputs) -> Tensor:
        (z1, z2), (p1, p2) = outputs.z, outputs.p
        return negative_cosine(p1, z2) / 2 + negative_cosine(p2, z1) / 2


def test_fedavg_over_equal_clients_with_one_full_batch_step_is_one_centralised_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BACKBONES, "_targets", {**BACKBONES.targets, "plain": f"{__name__}:Plain"})
    monkeypatch.setattr(
        METHODS, "_targets", {**METHODS.targets, "plain": f"{__name__}:PlainMethod"}
    )
    rounds = 5

    def federated(clients: int) -> Run:
        config = tiny(
            model={"backbone": "plain", "width": None},
            ssl={"method": "plain"},
            views={"preset": "none"},  # the views of an image are the image, whoever holds it
            partition={"clients": clients},
            data={"source": "digits", "test_fraction": 0.75},  # leaves 450 images: 5 × 90
            local={"batch": 450, "lr": 0.5, "momentum": 0.9},
            server={"rounds": rounds},
        )
        return train(config, out=tmp_path / f"{clients}-clients")

    many, one = federated(5), federated(1)
    assert {row["images"] for row in many.metrics if row["kind"] == "round"} == {450}
    theta = many.checkpoint().tensors["theta"]
    torch.testing.assert_close(theta, one.checkpoint().tensors["theta"], rtol=1e-5, atol=1e-6)

    # And the same longhand: full-batch gradient descent on all images in one place.
    config = one.config
    digits = load_dataset(config.data, seed=config.seed)
    images = (digits.train.pixels.float() / 255 - digits.mean[0]) / digits.std[0]
    method = ssfl.experiment.build_host(
        config, ssfl.experiment.load_federated(config), one.store
    ).trainer.models.global_.method
    for round_ in range(rounds):
        rate = 0.5 * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * round_ / rounds)).item())
        z = method.backbone(images)
        p = method.predictor(z)
        loss = -torch.nn.functional.cosine_similarity(p, z.detach(), dim=1).mean()
        gradients = torch.autograd.grad(loss, list(method.parameters()))
        with torch.no_grad():
            for weight, gradient in zip(method.parameters(), gradients, strict=True):
                weight -= rate * (gradient + 5e-4 * weight)
    end = ssfl.run.FlatModel(method).vector
    torch.testing.assert_close(theta, end, rtol=1e-4, atol=1e-5)


# What a run gives back


def test_a_runs_encoders_give_the_features_that_the_evaluation_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []

    def remember(*args: Any, **kwargs: Any) -> Tensor:
        features = extract(*args, **kwargs)
        seen.append(features)
        return features

    monkeypatch.setattr("ssfl.federation.trainer.extract", remember)
    config = tiny(algorithm={"name": "per-ssfl"}, evaluation={"clients": 4})
    run = train(config, out=tmp_path / "run")
    data = ssfl.experiment.load_federated(config)
    test_set, train_set = data.dataset.test, data.dataset.train
    assert test_set is not None
    of_theta, _, *of_clients = seen
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(run.global_encoder()(test_set.pixels), of_theta, **close)
    for client in range(4):
        held = data.test_indices(client)
        assert held is not None
        encoder = run.personal_encoder(client)
        bank, queries = of_clients[2 * client : 2 * client + 2]
        own = train_set.pixels[data.train_indices(client)]
        torch.testing.assert_close(encoder(own), bank, **close)
        torch.testing.assert_close(encoder(test_set.pixels[held]), queries, **close)
    as_floats = run.global_encoder()(test_set.pixels.float() / 255)
    torch.testing.assert_close(as_floats, of_theta, **close)


closed: list[bool] = []


def connect_watched(config: Config, folder: Path, hosts: list[Host]) -> LocalCommunicator:
    """A transport that says when it is closed."""

    class Watched(LocalCommunicator):
        def close(self) -> None:
            closed.append(True)
            super().close()

    return Watched(hosts)


def test_whatever_keeps_a_run_from_its_first_round_a_transport_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its workers would wait for ever."""
    (tmp_path / "metrics.jsonl").mkdir()  # where the record should be
    monkeypatch.setitem(COMMUNICATORS._targets, "watched", f"{__name__}:connect_watched")
    closed.clear()
    with pytest.raises(OSError, match="directory"):
        train(tiny(), out=tmp_path, comm="watched")
    assert closed == [True]


def test_a_test_set_of_one_image_ends_no_run(tmp_path: Path) -> None:
    for number in range(9):
        image = Image.new("RGB", (16, 16), (20 * number, 100, 200))
        (tmp_path / "images").mkdir(exist_ok=True)
        image.save(tmp_path / "images" / f"{number}.png")
    source = {"source": "folder", "path": tmp_path / "images", "test_fraction": 0.1}
    config = tiny(data=source, partition={"clients": 2}, server={"rounds": 1})
    run = train(config, out=tmp_path / "run")
    assert (run.facts["test_images"], run.final["rounds"]) == (1, 1)


def test_more_classes_than_the_classifier_has_are_said_before_anything_is_done(
    tmp_path: Path,
) -> None:
    config = tiny(ssl={"method": "supervised", "classes": 7})
    with pytest.raises(ConfigError, match=r"ssl\.classes is 7.*digits.*set ssl\.classes = 10"):
        train(config, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_without_personal_models_says_so(tmp_path: Path) -> None:
    run = train(tiny(server={"rounds": 1}), out=tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"client 1 has no personal model .*global-ssfl"):
        run.personal_encoder(1)


# A full disk


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that holds two checkpoints of what follows, but not three."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode == 0:
        yield folder
        subprocess.run(["umount", str(folder)], check=True)
        return
    fsync = os.fsync

    def full(handle: int) -> None:
        held = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
        if held > 1200 * 1024:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    yield folder


def test_a_full_disk_at_checkpoint_time_leaves_the_checkpoint_before(small_disk: Path) -> None:
    config = tiny(
        ssl={"projector_width": 200, "predictor_width": 200},
        run={"checkpoint_every": 1},
        server={"rounds": 4},
    )
    with pytest.raises(CheckpointError) as caught:
        train(config, out=small_disk / "run")
    message = str(caught.value)
    assert message.startswith(f"could not write {small_disk}")
    assert "No space left on device" in message
    assert "\n" not in message
    left = sorted(path.name for path in (small_disk / "run" / "checkpoints").iterdir())
    assert left == ["round-000001.safetensors", "round-000002.safetensors"]
    run = Run(small_disk / "run")
    assert run.checkpoint().rounds == 2
    assert bool(run.checkpoint().tensors["theta"].isfinite().all())
