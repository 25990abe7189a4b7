"""A process on a shared machine takes the cores that it was lent, and shares work out over them."""

import os
import platform
import subprocess
import sys
from threading import Barrier, get_ident

import pytest
import torch

from ssfl.assemble import build_hosts, load_federated
from ssfl.cores import cores, side_by_side
from ssfl.federation.store import StateStore
from tiny import tiny


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system lends no cores")
def test_there_are_no_more_workers_than_cores_that_this_process_may_use(tmp_path):
    config = tiny(device={"device": "cpu", "workers": 0})
    data, ours = load_federated(config), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(ours)})
    try:
        assert cores() == 1
        assert len(build_hosts(config, data, StateStore(tmp_path, 1 << 20))) == 1
    finally:
        os.sched_setaffinity(0, ours)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "1600000 100000\n"}, 8),
        ({"cpu.max": "20000 100000\n"}, 1),
        ({"cpu.max": "no idea\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "350000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
    ],
)
def test_a_container_has_as_many_cores_as_it_was_lent_the_time_of(
    limits, expected, tmp_path, monkeypatch
):
    for name, text in limits.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("ssfl.cores.CONTAINER", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert cores() == expected


@pytest.fixture
def three_threads(monkeypatch):
    monkeypatch.setattr("ssfl.cores.cores", lambda: 4)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_work_is_shared_out_to_threads_that_do_not_share_theirs(three_threads):
    everyone = Barrier(3)  # all three are at work at once, or this breaks

    def one(item):
        everyone.wait(timeout=60)
        return item, torch.get_num_threads()

    assert list(side_by_side(one, range(6))) == [(item, 1) for item in range(6)]
    assert torch.get_num_threads() == 3


def test_one_item_that_fails_ends_the_work_and_leaves_torch_its_threads(three_threads):
    def one(item):
        if item == 1:
            raise ValueError("no such item")
        return item

    made = side_by_side(one, range(1000))
    assert next(made) == 0
    with pytest.raises(ValueError, match="no such item"):
        list(made)
    assert torch.get_num_threads() == 3


def test_where_torch_has_one_thread_work_is_done_where_it_is_asked_for():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert set(side_by_side(lambda _: get_ident(), range(4))) == {get_ident()}
    finally:
        torch.set_num_threads(before)


FAULTS = """
import resource, threading, torch
{first}
def step():
    for _ in range(60):
        [torch.ones(2**21) for _ in range(3)]  # three blocks of 8 MB, freed together
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def in_threads():
    crew = [threading.Thread(target=step) for _ in range(2)]
    [thread.start() for thread in crew]
    [thread.join() for thread in crew]
def turn():
    before = faults()
    in_threads()
    return faults() - before
print(min(turn() for _ in range(6)))  # a turn that met a new peak counts for nothing
"""


def faults(first: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS.format(first=first)], capture_output=True, text=True
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_blocks_that_were_freed_are_there_again_without_page_faults():
    kept = faults("from ssfl.cores import keep_freed_memory; keep_freed_memory()")
    assert kept < faults("") / 4
