"""A whole site, from `run_site` down, with SuperNodes that only pretend: how long it seeks its
coordinator, and what it makes of trouble of its own. `test_flower` has Flower's own programs."""

import errno
import json
import os
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity
from pretend_grid import RUN
from six_clients import recipe

from ssfl.comm.flower import host, runtime
from ssfl.comm.flower.host import PATIENCE, SiteOptions, run_site
from ssfl.comm.flower.processes import Child
from ssfl.comm.flower.recipe import shared_recipe
from ssfl.comm.flower.records import read_roll, write_roll_call
from ssfl.data.here import HereOptions
from ssfl.errors import FederationError

LET_IN = "INFO: SuperNode ID: 7\n"
ANEW = "HTTPStatusError: Client error '401 Unauthorized'\n"
REFUSED = "ERROR\n[code: 2004] Failed to activate SuperNode.\n"


@dataclass
class Node:
    """A SuperNode: how many seconds it lasts, what is in its log at the end, and for which messages
    it was sent (functions that make them)."""

    lasts: float
    says: str
    messages: Sequence = ()


CONFIG = recipe().model_copy(update={"here": HereOptions(clients=(0,))})
hosts = cache(lambda: host.build_hosts(CONFIG))


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Runs a site for as long as there are SuperNodes for it, and then interrupts it, unless it
    ends by itself. `site.answers` are what it answered, `site.left` whom it said goodbye for."""
    clock, real = SimpleNamespace(now=0.0), hosts()
    clock.monotonic = lambda: clock.now

    def pass_by(seconds):
        clock.now += seconds

    clock.sleep = pass_by
    monkeypatch.setattr(host, "time", clock)
    monkeypatch.setattr(host, "build_hosts", lambda config, workers: real)
    monkeypatch.setattr(host, "unreachable", lambda server: "")
    monkeypatch.setattr(runtime, "clock_is_off", lambda server, ca: 0.0)

    def run(*nodes):
        coming = iter(nodes)

        @contextmanager
        def supernode(folder, options):
            clock.node = next(coming, None)
            if clock.node is None:
                raise KeyboardInterrupt
            if isinstance(clock.node, OSError):
                raise clock.node
            child = Child("node", [], tmp_path)
            child.log.write_text(clock.node.says)
            yield child, "127.0.0.1:1", b"secret"

        def answer_messages(address, secret, answer, stopped):
            run.answers += [answer(message()) for message in clock.node.messages]
            pass_by(clock.node.lasts)

        monkeypatch.setattr(host, "supernode", supernode)
        monkeypatch.setattr(runtime, "answer_messages", answer_messages)
        monkeypatch.setattr(runtime, "leave", lambda *told: run.left.append(told[-1]))
        run_site(tmp_path, SiteOptions(server="192.0.2.7:9092", clients=(0,)), CONFIG)

    run.answers, run.left = [], []
    return run


def roll_call():
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
    content = write_roll_call(RUN, json.dumps(shared_recipe(CONFIG)))
    message = Message(content, 7, "query")
    message.metadata.__dict__["_message_id"] = "the roll call"
    return message


def test_a_site_outlasts_a_coordinator_that_is_away_for_longer_than_its_patience(site):
    """Its SuperNode tries on meanwhile, and ends only when there is a coordinator again."""
    with pytest.raises(KeyboardInterrupt):
        site(Node(2 * PATIENCE, LET_IN + ANEW), Node(5, REFUSED), Node(5, LET_IN))


def test_a_site_outlasts_a_supernode_that_is_killed_in_a_long_round(site):
    with pytest.raises(KeyboardInterrupt):
        site(Node(2 * PATIENCE, LET_IN), Node(5, LET_IN))


def test_a_site_that_was_let_in_once_has_all_its_patience_again(site, caplog):
    refusals = [Node(PATIENCE / 3, REFUSED)] * 3
    with pytest.raises(KeyboardInterrupt):
        site(*refusals, Node(5, LET_IN + ANEW), *refusals)
    said = [record.getMessage() for record in caplog.records]
    assert ["key" in line for line in said] == [True, False, True]  # once, not every few seconds


def test_a_site_that_is_not_let_in_gives_up_when_its_patience_is_over(site):
    with pytest.raises(FederationError, match="does not know this site's key yet"):
        site(*[Node(PATIENCE / 3, REFUSED)] * 5)


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_fails_a_sites_answers_and_does_not_take_it_off_the_federation(site):
    def mended():
        disk.undo()
        return roll_call()

    with pytest.MonkeyPatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(KeyboardInterrupt):
            site(Node(2 * PATIENCE, "", [roll_call, roll_call, mended]))
    *failed, joined = site.answers
    told = "CheckpointError (No space left on device): its log says more"
    assert [answer.error.reason for answer in failed] == [told] * 2
    assert read_roll(joined.content).clients == (0,)


def test_a_site_that_cannot_start_a_supernode_tries_again(site, caplog):
    with pytest.raises(KeyboardInterrupt):
        site(OSError(errno.ENOSPC, "No space left on device"), Node(5, LET_IN, [roll_call]))
    assert "cannot be started: [Errno 28] No space left on device" in caplog.text
    assert len(site.answers) == 1


def test_a_site_says_goodbye_for_its_last_supernode_even_when_it_was_killed_itself(site):
    with pytest.raises(KeyboardInterrupt):
        site(Node(5, LET_IN, [roll_call]))
    with pytest.raises(KeyboardInterrupt):
        site()
    assert site.left == [7, 7]
