"""Real sites in trouble: a disk that fails, a process that stands still, a clock that is wrong.

One federation over TLS. The coordinator must go on with whoever is well, in bounded time, and learn
of the others whom to ask and nothing that is private to them.
"""

import os
import signal

import pytest

pytest.importorskip("flwr")

from six_clients import recipe
from test_flower import Federation, commands_below

from ssfl.comm.flower.serve import read_settings
from ssfl.run import Run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

SITES = {"north": (0, 1, 2), "mary-smith": (3,), "frozen": (4,), "hasty": (5,)}


@pytest.fixture(scope="module")
def troubled(tmp_path_factory):
    home = tmp_path_factory.mktemp("troubled")
    config = recipe(
        server={"rounds": 1000, "min_replies": 0.3},
        evaluation={"every": 0},
        algorithm={"begin": 0.0},
    )
    federation = Federation(home, config, SITES).prepare()
    try:
        server = federation.serve("--clients", "5")
        frozen = federation.start_site("frozen", BEAT="10")
        federation.start_site("hasty", AHEAD="60")
        federation.wait_for((home / "run" / "serve.json").is_file, server)
        states = home / "mary-smith" / "runs" / read_settings(home / "run").run / "clients"
        states.parent.mkdir(parents=True)
        states.touch()  # where its clients' states belong, there is no folder
        federation.start_site("mary-smith")
        joined = "site frozen joined with clients [4]"
        federation.wait_for(lambda: joined in federation.log("serve"), server)
        os.kill(frozen.pid, signal.SIGSTOP)  # no task of its own is on the way: nobody notices yet
        federation.start_site("north")
        federation.wait_for(lambda: "site frozen is gone" in federation.log("serve"), server)
        os.kill(frozen.pid, signal.SIGCONT)
        federation.wait_for(lambda: federation.log("serve").count(joined) == 2, server)
        federation.wait_for(lambda: ": train for clients [4]" in federation.log("frozen"), server)
        federation.wait_for(lambda: "clock" in federation.log("hasty"), server)
        server.send_signal(signal.SIGINT)
        server.wait(60)
    finally:
        federation.close()
    assert server.returncode == 130, federation.log("serve")
    return federation


def rounds(federation):
    return [row for row in Run(federation.home / "run").metrics if row["kind"] == "round"]


def test_a_sites_error_tells_the_coordinator_its_kind_and_no_name_of_a_file(troubled):
    told = "client 3 error: site mary-smith: CheckpointError (Not a directory): its log says more"
    assert told in troubled.log("serve")
    assert "runs" not in told
    assert "could not write" not in troubled.log("serve")
    assert "round-000001.safetensors" not in troubled.log("serve")
    assert "round-000001.safetensors" in troubled.log("mary-smith")
    assert all(3 not in row["took_part"] for row in rounds(troubled))


def test_a_site_that_stands_still_is_gone_after_a_while_and_takes_part_when_it_goes_on(troubled):
    first, *others = rounds(troubled)
    assert set(first["took_part"]) == {0, 1, 2}
    assert first["failures"] == {"error": 1, "lost": 1}
    assert "this site stood still" in troubled.log("frozen")
    assert len(others) > 0


def test_a_site_whose_clock_is_wrong_is_told_so_once(troubled):
    log = troubled.log("hasty")
    assert log.count("this site's clock is 60 s ahead of that of the coordinator") == 1
    assert "site hasty joined" not in troubled.log("serve")


def test_nothing_is_left_after_trouble(troubled):
    assert commands_below(troubled.home) == []
