"""A process on a shared machine takes the cores that it was lent."""

import os

import pytest

from ssfl.assemble import build_hosts, load_federated
from ssfl.cores import cores
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
