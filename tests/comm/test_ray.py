"""Clients in Ray actors, on a Ray that is started for the run and ends with it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

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

from ssfl.assemble import load_federated
from ssfl.comm.ray import Cluster, _share
from ssfl.errors import ConfigError
from ssfl.experiment import resume, train
from ssfl.federation.client import Client
from ssfl.run import Run

pytest.importorskip("ray", exc_type=ImportError)

SCRIPT = Path(__file__).with_name("six_clients.py")

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def start(folder: Path, *settings: str, **environment: str) -> subprocess.Popen[str]:
    """A run in `folder`; its workers have what the environment brings in store for them."""
    paths = os.pathsep.join([str(SCRIPT.parent), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), "ray", str(folder), "device.workers=2", *settings],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Processes below `pid`, with what they call themselves."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in told(task).split():
            yield int(child), told(Path(f"/proc/{child}/cmdline")).replace("\0", " ").strip()
            yield from descendants(int(child))


def alive(pid: int) -> bool:
    state = told(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return bool(state) and state[0] != "Z"


def told(file: Path) -> str:
    """What the kernel tells of a process; nothing, once it is gone."""
    try:
        return file.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_two_workers_end_with_the_same_bits_as_one_process_quietly_and_leave_nothing_running(
    tmp_path: Path,
) -> None:
    (tmp_path / "sent").mkdir()
    driver = start(tmp_path / "run", RECORD=str(tmp_path / "sent"))
    seen: set[int] = set()
    while driver.poll() is None:
        seen |= {pid for pid, _ in descendants(driver.pid)}
        time.sleep(0.2)
    out, err = driver.communicate(timeout=60)
    assert driver.returncode == 0, err
    assert (out, err) == ("", "")
    assert seen
    end = time.monotonic() + 10
    while any(map(alive, seen)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not [pid for pid in seen if alive(pid)]
    assert_same_bits(Run(tmp_path / "run"), reference())
    sent = [file.read_bytes() for file in (tmp_path / "sent").iterdir()]
    assert_free_of_data(sent, load_federated(recipe()))
    theta = reference().checkpoint().tensors["theta"]
    assert 3 * 6 <= sum(map(len, sent)) / (4 * len(theta)) < 3 * 6 + 1  # 18 updates, and words


def test_a_slow_client_and_a_broken_one_cost_their_own_updates_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("server.rounds=1", "server.deadline=16")
    driver = start(tmp_path / "run", *settings, SLOW="2:20", BROKEN="4")
    _, err = driver.communicate(timeout=240)
    assert driver.returncode == 0, err
    (row,) = rows(Run(tmp_path / "run"))
    assert row["failures"] == {"deadline": 1, "error": 1}
    monkeypatch.setattr(Client, "_train", Client._train)  # what bad_days does is undone
    bad_days({"BROKEN": "4"})
    bad_days({"BROKEN": "2"})
    without = train(recipe(server={"rounds": 1}), out=tmp_path / "without")
    assert torch.equal(outcome(Run(tmp_path / "run"))[0], outcome(without)[0])


def test_sigterm_saves_what_was_done_and_the_run_can_be_gone_on_with(tmp_path: Path) -> None:
    driver = start(tmp_path / "run", "run.checkpoint_every=100", SLOW="0:2")
    record = tmp_path / "run" / "metrics.jsonl"
    while not (record.exists() and record.read_text().count("\n")):
        assert driver.poll() is None, driver.communicate()[1]
        time.sleep(0.02)
    driver.send_signal(signal.SIGTERM)
    _, err = driver.communicate(timeout=120)
    assert driver.returncode == 130, err
    assert 1 <= Run(tmp_path / "run").checkpoint().rounds < 3
    assert_same_bits(resume(tmp_path / "run"), reference())


def test_a_killed_worker_is_replaced_and_the_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    driver = start(tmp_path / "run")
    killed = 0
    while driver.poll() is None and not killed:
        for pid, title in descendants(driver.pid):
            if title.startswith("ray::Worker.handle"):  # it is at a client
                os.kill(pid, signal.SIGKILL)
                killed = pid
                break
        time.sleep(0.01)
    _, err = driver.communicate(timeout=240)
    assert killed
    assert driver.returncode == 0, err
    assert "lost its worker" in err
    run = Run(tmp_path / "run")
    assert_same_bits(run, reference())
    assert not any(row.get("failures") for row in run.metrics)


class Ray:
    """What a cluster is asked, answered for two machines of 8 cores and 1 GPU each."""

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 16.0, "GPU": 2.0}


@pytest.mark.parametrize(
    ("device", "workers", "gpus"),
    [
        ({"device": "cpu", "workers": 0}, 6, 0.0),
        ({"device": "cpu", "workers": 0, "threads": 4}, 4, 0.0),
        ({"device": "auto", "workers": 0}, 2, 1.0),
        ({"device": "auto", "workers": 1}, 1, 1.0),
        ({"device": "auto", "workers": 8}, 8, 0.25),
        ({"device": "auto", "workers": 4, "gpus_per_worker": 0.1}, 4, 0.1),
    ],
)
def test_workers_fill_the_cluster_and_share_its_gpus(
    monkeypatch: pytest.MonkeyPatch, device: dict[str, object], workers: int, gpus: float
) -> None:
    monkeypatch.setattr("ssfl.comm.ray._import_ray", Ray)
    cluster = Cluster(recipe(device=device), asked=6, theta_bytes=4)
    assert (cluster.workers, cluster.gpus) == (workers, gpus)


def test_more_than_the_cluster_has_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ssfl.comm.ray._import_ray", Ray)
    greedy = recipe(device={"device": "auto", "workers": 4, "gpus_per_worker": 1.0})
    with pytest.raises(ConfigError, match="4 Ray workers want 1 CPU and 1 GPU each"):
        Cluster(greedy, asked=6, theta_bytes=4)


def test_shares_of_a_gpu_never_sum_to_more_than_there_is() -> None:
    for workers in range(1, 40):
        assert _share(1.0, workers) * workers <= 1.0
