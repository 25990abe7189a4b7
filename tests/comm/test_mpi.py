"""Clients in MPI ranks, started by mpiexec as a user would."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from six_clients import (
    assert_free_of_data,
    assert_same_bits,
    bad_days,
    outcome,
    recipe,
    reference,
    rows,
)

from ssfl import __version__
from ssfl.assemble import load_federated
from ssfl.comm import mpi as transport
from ssfl.comm import way_on
from ssfl.comm.mpi import STOP, Ranks, connect
from ssfl.errors import ConfigError
from ssfl.experiment import train
from ssfl.federation.client import Client
from ssfl.run import Run

pytest.importorskip("mpi4py", exc_type=ImportError)

MPIEXEC = Path(sys.executable).with_name("mpiexec")
SCRIPT = Path(__file__).with_name("six_clients.py")
SAME = "install the same version on all machines"
DIED = "ssfl: a rank of the MPI job died"

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec beside this Python"),
]


def start(ranks: int, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    command = [MPIEXEC, "-n", ranks, sys.executable, SCRIPT, "mpi", *arguments]
    return subprocess.Popen(
        [str(part) for part in command],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(job: subprocess.Popen[str], patience: float = 240) -> subprocess.CompletedProcess[str]:
    try:
        out, err = job.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(job.args, job.returncode, out, err)


def mpi(ranks: int, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return end(start(ranks, *arguments, **environment))


def completed(run: Path) -> int:
    """Rounds that a run has recorded so far."""
    record = run / "metrics.jsonl"
    lines = record.read_text().splitlines() if record.exists() else []
    return sum(json.loads(line)["kind"] == "round" for line in lines if line.endswith("}"))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of three ranks, and what each of them sent."""
    folder = tmp_path_factory.mktemp("mpi")
    done = mpi(3, folder / "run", RECORD=str(folder))
    assert done.returncode == 0, done.stderr
    assert DIED not in done.stderr
    return folder


def test_three_ranks_end_with_the_same_bits_as_one_process(recorded: Path) -> None:
    assert_same_bits(Run(recorded / "run"), reference())


def test_a_finished_run_keeps_one_state_per_client(recorded: Path) -> None:
    files = sorted((recorded / "run" / "clients").rglob("*.safetensors"))
    assert [file.name for file in files] == ["round-000003.safetensors"] * 6


def test_ranks_send_updates_and_neither_images_nor_labels(recorded: Path) -> None:
    sent = [(recorded / f"rank-{rank}").read_bytes() for rank in range(3)]
    assert_free_of_data(sent, load_federated(recipe()))
    theta = reference().checkpoint().tensors["theta"]
    assert sum(map(len, sent[1:])) < (3 * 6 + 1) * 4 * len(theta)  # 18 updates, and words
    assert len(sent[0]) < (5 + 1) * 4 * len(theta)  # five tasks, each broadcast once


def test_a_killed_rank_stops_the_job_in_one_line_and_it_resumes_to_the_same_end(
    tmp_path: Path,
) -> None:
    run, stamp = tmp_path / "run", tmp_path / "killed"
    died = mpi(3, run, KILLED="3:2", STAMP=str(stamp))
    assert died.returncode != 0
    assert time.time() - stamp.stat().st_mtime < 30  # at once, on however busy a machine
    (line,) = [line for line in died.stderr.splitlines() if line.startswith("ssfl: ")]
    assert line.startswith(DIED)
    assert line.endswith(f"mpiexec -n 3 ssfl train --resume {run} --comm mpi")
    assert "Traceback" not in died.stderr
    assert Run(run).checkpoint().rounds == 2
    resumed = mpi(3, run, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert_same_bits(Run(run), reference())


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_or_sigterm_saves_what_was_done_and_the_run_resumes_to_the_same_end(
    sign: signal.Signals, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = start(3, run, "run.checkpoint_every=100", SLOW="0:2")
    while not completed(run):
        assert job.poll() is None, job.communicate()[1]
        time.sleep(0.02)
    os.killpg(job.pid, sign)  # as a terminal or a scheduler does: to mpiexec and all below it
    stopped = end(job)
    assert stopped.returncode == 130
    assert DIED not in stopped.stderr
    done = completed(run)
    assert 1 <= done < 3
    assert Run(run).checkpoint().rounds == done
    resumed = mpi(3, run, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert_same_bits(Run(run), reference())


def test_a_slow_client_and_a_broken_one_cost_their_own_updates_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("server.rounds=1", "server.deadline=10")
    done = mpi(3, tmp_path / "run", *settings, SLOW="2:12", BROKEN="4")
    assert done.returncode == 0, done.stderr
    (row,) = rows(Run(tmp_path / "run"))
    assert row["failures"] == {"deadline": 1, "error": 1}
    monkeypatch.setattr(Client, "_train", Client._train)  # what bad_days does is undone
    bad_days({"BROKEN": "4"})
    bad_days({"BROKEN": "2"})
    without = train(recipe(server={"rounds": 1}), out=tmp_path / "without")
    assert torch.equal(outcome(Run(tmp_path / "run"))[0], outcome(without)[0])


def test_a_server_that_cannot_start_sends_its_ranks_home(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")  # the folder holds a run already
    failed = mpi(2, tmp_path)
    assert failed.returncode == 1
    assert failed.stderr.count("holds a run already") == 1
    assert DIED not in failed.stderr


def test_without_mpiexec_it_is_said_how_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ssfl.comm.mpi._world", lambda: SimpleNamespace(rank=0, size=1))
    with pytest.raises(ConfigError, match="start it by `mpiexec -n N ssfl train"):
        connect(recipe(), tmp_path, [])


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What rank 0 tells two ranks, which are there only in word and stop one after the other."""
    told: list[tuple[str, int]] = []
    leaving = iter((2, 1))
    for name, stand_in in {
        "_world": lambda: SimpleNamespace(rank=0, size=3),
        "_local_rank": lambda: 0,
        "_send": lambda fields, to, tag: told.append((fields["do"], to)),
        "_receive": lambda *_: {"machine": "here", "version": __version__},
        "_probe": lambda *_: SimpleNamespace(source=next(leaving), tag=STOP),
        "_receive_bytes": lambda found: b"",
    }.items():
        monkeypatch.setattr(transport, name, stand_in)
    return told


def ctrl_c(*_: object) -> None:
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_while_ranks_open_sends_them_home_and_is_nobodys_death(
    sent: list[tuple[str, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(transport, "_receive", ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        Ranks(tmp_path)
    assert sent == [("open", 1), ("open", 2), ("stop", 1), ("stop", 2)]
    assert DIED not in capfd.readouterr().err


@pytest.mark.parametrize("at", ["_send", "_receive_bytes"])
def test_a_close_that_ctrl_c_interrupts_goes_on_from_where_it_was(
    at: str,
    sent: list[tuple[str, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    ranks, do = Ranks(tmp_path), getattr(transport, at)

    def do_and_be_interrupted(*told: object) -> object:
        monkeypatch.setattr(transport, at, do)
        done = do(*told)
        ctrl_c()
        return done

    monkeypatch.setattr(transport, at, do_and_be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        ranks.close()
    ranks.close()
    assert sent[2:] == [("stop", 1), ("stop", 2)]  # a second word would end a rank's next run
    assert DIED not in capfd.readouterr().err


def test_last_words_are_one_line_whatever_the_run_is_called(
    sent: list[tuple[str, int]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    transport._testament(tmp_path / r"a\new").communicate()  # as if this process had ended
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(DIED)
    assert r"a\new" in line


def test_ranks_of_another_version_are_sent_home_in_a_sentence(tmp_path: Path) -> None:
    done = mpi(3, tmp_path / "run", VERSION="2:9.9")
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "9.9" in line]
    assert "FederationError: rank 2 on " in line
    assert line.endswith(f" has ssfl 9.9, and rank 0 has {__version__}: " + SAME)
    assert DIED not in done.stderr


def test_the_way_on_is_a_command_that_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_world", lambda: SimpleNamespace(rank=0, size=3))
    assert way_on(Path("my run"), "local") == "ssfl train --resume 'my run'"
    assert way_on(Path("run"), "ray") == "ssfl train --resume run --comm ray"
    assert way_on(Path("run"), "mpi") == "mpiexec -n 3 ssfl train --resume run --comm mpi"
