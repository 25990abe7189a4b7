"""Server and sites over a grid that only pretends: what each makes of the other's messages."""

import asyncio
import errno
import itertools
import json
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch

flwr = pytest.importorskip("flwr")

import httpx  # noqa: E402
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict  # noqa: E402
from pretend_grid import PretendGrid  # noqa: E402

from ssfl.comm.flower import communicator as communicator_module  # noqa: E402
from ssfl.comm.flower.communicator import FlowerCommunicator  # noqa: E402
from ssfl.comm.flower.link import Gate  # noqa: E402
from ssfl.comm.flower.records import write_replies, write_roll_call  # noqa: E402
from ssfl.comm.flower.site import SiteAnswers, compare  # noqa: E402
from ssfl.comm.local import LocalCommunicator  # noqa: E402
from ssfl.comm.wire import WireError  # noqa: E402
from ssfl.errors import CheckpointError, FederationError  # noqa: E402
from ssfl.federation.messages import Failure, Joint, Reason, Reply, Task, TaskKind  # noqa: E402

RUN = "0123456789abcdef"


class Echo:
    """Clients that answer with Θ times their id."""

    def __init__(self, *ids):
        self.ids = ids
        self.late = []

    def clients(self):
        return self.ids

    def sizes(self):
        return [10 * client + 1 for client in self.ids]

    def exchange(self, task, clients, deadline=None):
        yield from self.late
        self.late = []
        for client in clients:
            delta = task.theta * client
            yield Reply(client, task.kind, task.round, task.layout, delta, samples=10)


class Memory:
    """A keeper that writes down what it is told."""

    def __init__(self):
        self.told = []

    def begin(self, run):
        self.told.append(("begin", run))

    def prepare(self, task):
        self.told.append(("prepare", task.round))

    def keep(self, task):
        self.told.append(("keep", task.durable))


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(communicator_module, "POLL", 0.01)
    monkeypatch.setattr(communicator_module, "CENSUS", 0.0)
    monkeypatch.setattr(communicator_module, "RETURN", 0.05)


def a_task(**changes):
    facts = {"kind": TaskKind.TRAIN, "round": 4, "theta": torch.randn(50), "layout": "x"}
    return Task(**(facts | changes))


def site(*ids, recipe=None, local=None):
    return SiteAnswers(local or Echo(*ids), recipe or {}, Memory())


def connected(grid, clients, recipe="{}"):
    communicator = FlowerCommunicator(grid, RUN, recipe, patience=5)
    communicator.gather(clients)
    return communicator


def but_for_roll_calls(answer, otherwise):
    """A node that joins honestly and then does something else."""
    return lambda message: (
        answer(message) if message.metadata.message_type == "query" else otherwise(message)
    )


def test_clients_of_all_sites_are_known_by_their_own_ids_and_sizes():
    communicator = connected(PretendGrid(n1=site(4, 2), n2=site(9)), 3)
    assert list(communicator.clients()) == [2, 4, 9]
    assert list(communicator.sizes()) == [21, 41, 91]


def test_an_exchange_is_one_message_a_site_and_one_reply_a_client():
    grid = PretendGrid(n1=site(0, 1, 2), n2=site(3, 4, 5))
    communicator = connected(grid, 6)
    before, task = len(grid.sent), a_task()
    replies = {reply.client: reply for reply in communicator.exchange(task, [5, 0, 3, 1])}
    assert len(grid.sent) - before == 2
    assert sorted(replies) == [0, 1, 3, 5]
    for client, reply in replies.items():
        assert reply.failure is None
        assert torch.equal(reply.delta, task.theta * client)


def test_the_deadline_is_the_messages_time_to_live():
    grid = PretendGrid(n1=site(0))
    list(connected(grid, 1).exchange(a_task(), [0], deadline=17.0))
    assert grid.sent[-1].metadata.ttl == 17.0


def test_a_silent_site_costs_its_own_clients_only():
    grid = PretendGrid(n1=but_for_roll_calls(site(0, 1), lambda _: None), n2=site(2))
    replies = {r.client: r for r in connected(grid, 3).exchange(a_task(), [0, 1, 2], deadline=1.0)}
    assert replies[2].failure is None
    assert {replies[0].failure.reason, replies[1].failure.reason} == {Reason.DEADLINE}


@pytest.mark.parametrize("call", ["get_nodes", "push_messages", "pull_messages"])
def test_a_superlink_that_cannot_be_asked_any_more_is_said_in_a_sentence(call):
    grid = PretendGrid(n1=site(0))
    communicator = connected(grid, 1)

    def gone(*_):
        raise httpx.ConnectError("connection refused")

    setattr(grid, call, gone)
    with pytest.raises(FederationError, match=r"the SuperLink cannot be asked.*refused"):
        list(communicator.exchange(a_task(), communicator.clients()))


def answers_with(status):
    def refuse(*_):
        answer = httpx.Response(status, request=httpx.Request("POST", "https://127.0.0.1"))
        answer.raise_for_status()

    return refuse


def test_a_coordinator_that_stood_still_is_told_why_its_run_was_given_up():
    grid = PretendGrid(n1=site(0))
    communicator = connected(grid, 1)
    grid.get_nodes = answers_with(401)
    with pytest.raises(FederationError, match="was this machine asleep"):
        communicator.clients()


@pytest.mark.parametrize(
    ("left", "told"),
    [
        (10**9, ": {0}/link.log says why"),
        (3 * 10**6, ", and the disk of {0} has 3 MB left: make room there, and go on with it by "),
    ],
)
def test_a_superlink_that_fails_is_told_by_its_log_or_by_its_full_disk(
    left, told, tmp_path, monkeypatch
):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=left))
    grid = PretendGrid()
    communicator = FlowerCommunicator(grid, RUN, link_log=tmp_path / "link.log")
    grid.get_nodes = answers_with(500)
    with pytest.raises(FederationError) as caught:
        communicator.clients()
    assert "\n" not in str(caught.value)
    expected = "the SuperLink answered 500 Internal Server Error" + told.format(tmp_path)
    assert str(caught.value).startswith(expected)


def test_a_site_that_restarts_in_mid_round_is_lost_at_once_and_asked_again_later():
    grid = PretendGrid()
    answers = site(0)

    def crash(message):
        grid.activated[1] = "noon"
        grid.nodes[1] = answers

    grid.nodes, grid.activated = {1: but_for_roll_calls(answers, crash)}, {1: "morning"}
    communicator = connected(grid, 1)
    (reply,) = communicator.exchange(a_task(), [0])
    assert reply.failure.reason is Reason.LOST
    assert list(communicator.clients()) == [0]
    (reply,) = communicator.exchange(a_task(), [0])
    assert reply.failure is None


def test_a_site_that_goes_away_is_not_asked():
    grid = PretendGrid(n1=site(0), n2=site(1))
    communicator = connected(grid, 2)
    del grid.activated[2]
    assert list(communicator.clients()) == [0]
    (reply,) = communicator.exchange(a_task(), [1])
    assert reply.failure.reason is Reason.LOST


def test_a_site_that_has_gone_and_is_asked_again_is_waited_for(monkeypatch):
    monkeypatch.setattr(communicator_module, "RETURN", 5.0)
    grid = PretendGrid(n1=site(0), n2=site(1))
    communicator = connected(grid, 2)
    del grid.activated[2]
    assert list(communicator.clients()) == [0]
    looks, look = [], grid.get_nodes

    def started_again():
        looks.append(1)
        if len(looks) == 3:
            grid.activated[2] = "noon"
        return look()

    monkeypatch.setattr(grid, "get_nodes", started_again)
    (reply,) = communicator.exchange(a_task(), [1])
    assert reply.failure is None


def test_without_any_site_the_wait_ends_in_a_sentence():
    with pytest.raises(FederationError, match="only 0 of 3 clients joined"):
        FlowerCommunicator(PretendGrid(), RUN, patience=0.05).gather(3)


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"replies": ConfigRecord({"headers": [b"{}"], "counts": [0]})}),
        RecordDict(
            {
                "replies": ConfigRecord({"headers": [b"{}"], "counts": [1]}),
                "vectors": ArrayRecord(
                    {"0": Array("float32", (1,), "numpy.ndarray", b"\x80\x05.")}
                ),
            }
        ),
    ],
)
def test_what_is_no_reply_is_refused_and_the_others_count(content):
    spoiled = but_for_roll_calls(site(0), lambda message: Message(content, reply_to=message))
    replies = {
        r.client: r
        for r in connected(PretendGrid(n1=spoiled, n2=site(1)), 2).exchange(a_task(), [0, 1])
    }
    assert replies[0].failure.reason is Reason.REFUSED
    assert replies[1].failure is None


def test_a_site_cannot_answer_for_anothers_client(caplog):
    def impostor(message):
        forged = Reply(1, TaskKind.TRAIN, 4, "x", torch.zeros(50), samples=1)
        return Message(write_replies([forged]), reply_to=message)

    grid = PretendGrid(n1=but_for_roll_calls(site(0), impostor), n2=site(1))
    task = a_task()
    replies = {r.client: r for r in connected(grid, 2).exchange(task, [0, 1])}
    assert replies[0].failure.reason is Reason.LOST
    assert torch.equal(replies[1].delta, task.theta)
    assert "client 1, which is not its own" in caplog.text


def test_a_site_cannot_answer_a_message_that_another_was_sent():
    grid = PretendGrid()
    honest, another = site(0), site(1)

    def impostor(message):
        """Says in its own envelope that it answers the message before, which was site 2's."""
        answer = honest(message)
        answer.metadata.__dict__["_reply_to_message_id"] = f"message-{grid.count - 1}"
        return answer

    grid.nodes = {2: another, 1: but_for_roll_calls(honest, impostor)}
    grid.activated = {2: "morning", 1: "morning"}
    task = a_task()
    replies = {r.client: r for r in connected(grid, 2).exchange(task, [1, 0], deadline=0.5)}
    assert torch.equal(replies[1].delta, task.theta)
    assert replies[0].failure.reason is Reason.DEADLINE


def test_what_flower_cannot_read_costs_its_own_site_only(caplog):
    class Stumbling(PretendGrid):
        """Reads messages when they are asked for, as Flower does; nobody gets them twice."""

        def pull_messages(self, keys):
            found = super().pull_messages(keys)
            return [unread() if callable(unread) else unread for unread in found]

    def nonsense(message):
        return lambda: {}["no such object"]

    grid = Stumbling(n1=but_for_roll_calls(site(0), nonsense), n2=site(1), n3=nonsense)
    replies = {r.client: r for r in connected(grid, 2).exchange(a_task(), [0, 1])}
    assert replies[0].failure.reason is Reason.ERROR
    assert "cannot be read" in replies[0].failure.detail
    assert replies[1].failure is None
    assert "site 3: its message cannot be read" in caplog.text


class SlowLine(PretendGrid):
    """Of node 1's answers to tasks, the rest is still on its way until `through` is set."""

    def __init__(self, **nodes):
        super().__init__(**nodes)
        self.through = threading.Event()

    def pull_messages(self, keys):
        messages = super().pull_messages(keys)
        if any(m.metadata.src_node_id == 1 and "replies" in m.content for m in messages):
            assert self.through.wait(30)
        return messages


def test_an_answer_that_is_still_coming_in_holds_up_neither_the_others_nor_the_deadline():
    grid = SlowLine(n1=site(0), n2=site(1))
    communicator, began = connected(grid, 2), time.monotonic()
    replies = list(communicator.exchange(a_task(), [0, 1], deadline=1.0))
    assert time.monotonic() - began < 10
    assert [reply.client for reply in replies] == [1, 0]
    assert replies[0].failure is None
    assert replies[1].failure.reason is Reason.DEADLINE
    grid.through.set()
    assert all(r.failure is None for r in communicator.exchange(a_task(round=5), [0, 1]))


def test_an_answer_that_takes_long_to_come_in_counts_all_the_same():
    grid = SlowLine(n1=site(0), n2=site(1))
    replies = connected(grid, 2).exchange(a_task(), [0, 1])
    assert next(replies).client == 1
    grid.through.set()
    assert [(reply.client, reply.failure) for reply in replies] == [(0, None)]


@pytest.mark.parametrize("clients", [(0, 2), (0, 1), (0, 7)])
def test_a_sum_speaks_only_for_its_sites_own_clients_that_were_asked(clients):
    """Client 1 is here but was not asked, client 2 is another site's, nobody knows client 7."""

    def forge(message):
        joint = Joint(clients)
        forged = Reply(0, TaskKind.TRAIN, 4, "x", torch.ones(50), samples=1, joint=joint)
        return Message(write_replies([forged]), reply_to=message)

    grid = PretendGrid(n1=but_for_roll_calls(site(0, 1), forge), n2=site(2))
    replies = {r.client: r for r in connected(grid, 3).exchange(a_task(), [0, 2])}
    assert replies[0].failure.reason is Reason.LOST
    assert replies[2].failure is None
    assert replies[2].clients == (2,)


def test_a_task_before_the_roll_call_is_refused_and_the_site_stays_up():
    class Forgetful(Memory):
        def prepare(self, task):
            raise WireError("a task came before the roll call")

    grid = PretendGrid(n1=site(0))
    communicator = connected(grid, 1)
    grid.nodes[1] = SiteAnswers(Echo(0), {}, Forgetful())
    (reply,) = communicator.exchange(a_task(), [0])
    assert (reply.failure.reason, reply.failure.detail) == (
        Reason.ERROR,
        "site 1: a task came before the roll call",
    )


def test_an_unforeseen_error_is_answered_and_the_site_stays_up(caplog):
    class Clumsy(Echo):
        def exchange(self, task, clients, deadline=None):
            raise KeyError(task.round)

    answers = site(local=Clumsy(0))
    communicator = connected(PretendGrid(n1=answers, n2=site(1)), 2)
    replies = {r.client: r for r in communicator.exchange(a_task(), [0, 1])}
    assert replies[0].failure == Failure(Reason.ERROR, "site 1: KeyError: its log says more")
    assert replies[1].failure is None
    assert "KeyError" in caplog.text  # with its traceback, at the site


def full_disk(path):
    try:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    except OSError as error:
        raise CheckpointError(f"could not write {path}: {error.strerror}") from error


def bad_image(path):
    raise ValueError(f"{path} is no image")


@pytest.mark.parametrize(
    ("fail", "told"),
    [
        (full_disk, "CheckpointError (No space left on device): its log says more"),
        (bad_image, "ValueError: its log says more"),
    ],
)
def test_an_error_leaves_a_site_without_its_words_which_may_name_images(fail, told, caplog):
    path = "/data/mary-smith.png"

    class Unlucky(Echo):
        def exchange(self, task, clients, deadline=None):
            fail(path)

    grid = PretendGrid(n1=site(local=Unlucky(0)))
    (reply,) = connected(grid, 1).exchange(a_task(), [0])
    assert reply.failure == Failure(Reason.ERROR, f"site 1: {told}")
    assert path in caplog.text  # at the site


def test_a_message_that_is_no_order_is_answered_and_the_site_stays_up():
    grid = PretendGrid(n1=site(0))
    for content in (RecordDict(), write_roll_call("no such name", "{}")):
        for kind in ("train", "query"):
            grid.push_messages([Message(content, 1, kind)])
    assert [reply.has_error() for reply in grid.replies.values()] == [True] * 4


def test_a_site_that_lists_a_client_twice_does_not_join_and_the_others_do(caplog):
    facts = {"clients": [1, 1, 2], "sizes": [5, 6], "objection": ""}
    spoilt = RecordDict({"roll": ConfigRecord(facts)})
    grid = PretendGrid(n1=lambda message: Message(spoilt, reply_to=message), n2=site(7))
    assert list(connected(grid, 1).clients()) == [7]
    assert "it was refused" in caplog.text


def test_a_site_that_was_in_trouble_at_the_roll_call_joins_when_it_is_mended(monkeypatch):
    monkeypatch.setattr(communicator_module, "CALL_AGAIN", 0.02)
    answers, calls = site(0), []

    def mended_in_the_end(message):
        calls.append(time.monotonic())
        if len(calls) < 4:
            return Message(Error(0, "CheckpointError: its log says more"), reply_to=message)
        return answers(message)

    communicator = connected(PretendGrid(n1=mended_in_the_end), 1)
    assert list(communicator.clients()) == [0]
    pauses = [later - earlier for earlier, later in itertools.pairwise(calls)]
    assert [pause >= 0.02 * 2**n for n, pause in enumerate(pauses)] == [True] * 3
    list(communicator.exchange(a_task(), [0]))
    assert len(calls) == 5  # the task was the next: who has joined is not called again


def test_a_site_that_objects_is_not_asked_again():
    grid = PretendGrid(n1=site(0, recipe={"seed": 1}), n2=site(1, recipe={"seed": 2}))
    communicator = connected(grid, 1, '{"seed": 2}')
    for _ in range(3):
        communicator.clients()
    assert [message.metadata.dst_node_id for message in grid.sent] == [1, 2]


def test_a_sites_long_story_is_cut():
    def chatter(message):
        return Message(Error(0, "x" * 10**6), reply_to=message)

    grid = PretendGrid(n1=but_for_roll_calls(site(0), chatter))
    (reply,) = connected(grid, 1).exchange(a_task(), [0])
    assert reply.failure.detail == "site 1: " + "x" * 2000


def test_a_client_id_belongs_to_the_site_that_claimed_it_first(caplog):
    grid = PretendGrid(n1=site(0, 1))
    communicator = connected(grid, 2)
    grid.nodes[2], grid.activated[2] = site(1, 2), "noon"
    communicator.gather(3)
    assert list(communicator.clients()) == [0, 1, 2]
    assert "claims client 1" in caplog.text
    before = len(grid.sent)
    list(communicator.exchange(a_task(), [1]))
    assert [message.metadata.dst_node_id for message in grid.sent[before:]] == [1]


def test_a_site_is_called_by_the_name_of_its_key_where_it_has_one(caplog):
    caplog.set_level("INFO")
    grid = PretendGrid(n1=site(0), n2=site(1))
    grid.names = {1: "north"}
    communicator = connected(grid, 2)
    assert "site north joined with clients [0]" in caplog.text
    assert "site 2 joined with clients [1]" in caplog.text
    grid.activated.clear()
    communicator._census()
    assert "site north is gone" in caplog.text
    replies = {r.client: r for r in communicator.exchange(a_task(), [0, 1])}
    assert replies[0].failure == Failure(Reason.LOST, "site north: it is not connected")
    assert replies[1].failure == Failure(Reason.LOST, "site 2: it is not connected")


def test_two_sites_of_one_name_are_told_apart_even_when_one_is_gone(caplog):
    grid = PretendGrid(n1=site(0))
    grid.names = {1: "north", 2: "north"}
    communicator = connected(grid, 1)
    grid.nodes, grid.activated = {2: site(0, 1)}, {2: "noon"}  # its key was made anew
    assert list(communicator.clients()) == [1]
    assert "site north (2) claims client 0, which belongs to site north (1)" in caplog.text


def test_a_name_cannot_spoil_the_log(caplog):
    caplog.set_level("INFO")
    grid = PretendGrid(n1=site(0))
    grid.names = {1: "north\n\x1b[2Jsite south" + "x" * 1000}
    connected(grid, 1)
    (line,) = [record.message for record in caplog.records if "joined" in record.message]
    assert line.startswith("site north ?[2Jsite southxxx")
    assert len(line) < 100


def test_a_site_with_another_recipe_does_not_take_part_and_says_why(caplog):
    ours, theirs = {"local": {"lr": 0.1}, "seed": 0}, {"local": {"lr": 0.03}, "seed": 0}
    grid = PretendGrid(n1=site(0, recipe=ours), n2=site(1, recipe=theirs))
    communicator = connected(grid, 1, json.dumps(theirs))
    assert list(communicator.clients()) == [1]
    assert "local.lr is 0.1 here and 0.03 at the server" in caplog.text


def test_recipes_that_agree_have_no_difference():
    assert compare({"a": {"b": 1}, "c": [1, 2]}, {"c": [1, 2], "a": {"b": 1}}) == ""


def test_an_error_in_the_sites_program_is_its_clients_error():
    def broken(message):
        return Message(Error(2, "it raised"), reply_to=message)

    (reply,) = connected(PretendGrid(n1=but_for_roll_calls(site(0), broken)), 1).exchange(
        a_task(), [0]
    )
    assert reply.failure == Failure(Reason.ERROR, "site 1: it raised")


def test_a_late_reply_comes_with_the_next_exchange():
    local = Echo(0, 1)
    communicator = connected(PretendGrid(n1=site(local=local)), 2)
    local.late = [Reply(1, TaskKind.TRAIN, 3, "x", torch.ones(50), samples=10)]
    replies = list(communicator.exchange(a_task(round=4), [0, 1]))
    assert [(r.client, r.round) for r in replies] == [(1, 3), (0, 4), (1, 4)]


class Slow:
    """A host whose client waits for a word."""

    data = SimpleNamespace(clients=lambda: [0], size=lambda client: 1)

    def __init__(self):
        self.go, self.asked = threading.Event(), []

    def clients(self):
        return [0]

    def handle(self, client, task):
        self.asked.append(task.round)
        self.go.wait(10)
        return Reply(client, task.kind, task.round, task.layout, task.theta, samples=1)


def test_a_late_client_that_is_asked_again_goes_on_and_does_not_begin_anew():
    host, task = Slow(), a_task()
    communicator = connected(PretendGrid(n1=site(local=LocalCommunicator([host]))), 1)
    (late,) = communicator.exchange(task, [0], 0.1)
    assert late.failure.reason is Reason.DEADLINE
    host.go.set()
    (reply,) = communicator.exchange(task, [0], 10)
    assert torch.equal(reply.delta, task.theta)
    assert host.asked == [4]


def test_a_server_that_went_back_is_not_told_of_the_future_it_had_seen():
    host, before, after = Slow(), a_task(), a_task()
    grid = PretendGrid(n1=site(local=LocalCommunicator([host])))
    (late,) = connected(grid, 1).exchange(before, [0], 0.1)
    assert late.failure.reason is Reason.DEADLINE
    communicator = connected(grid, 1)
    host.go.set()
    (reply,) = communicator.exchange(after, [0], 10)
    assert torch.equal(reply.delta, after.theta)


def test_a_site_refuses_clients_that_it_does_not_have():
    grid = PretendGrid(n1=site(0, 1))
    communicator = connected(grid, 2)
    grid.nodes[1] = site(0)  # it forgot one, and has not been asked again
    replies = {r.client: r for r in communicator.exchange(a_task(), [0, 1])}
    assert replies[0].failure is None
    assert replies[1].failure == Failure(Reason.REFUSED, "site 1: this site has no such client")


def test_a_site_remembers_before_it_answers():
    answers = site(0)
    list(connected(PretendGrid(n1=answers), 1).exchange(a_task(durable=3), [0]))
    assert answers._keeper.told == [("begin", RUN), ("prepare", 4), ("keep", 3)]


@pytest.mark.parametrize("run", ["", "../../etc", "0123", "x" * 16])
def test_a_run_cannot_be_named_like_a_path(run):
    answers = site(0)
    grid = PretendGrid(n1=answers)
    with pytest.raises(FederationError, match="0 of 1"):
        FlowerCommunicator(grid, run, patience=0.05).gather(1)
    assert answers._keeper.told == []


def ask_gate(path, client):
    passed, sent = [], []

    async def app(scope, receive, send):
        passed.append(scope["path"])

    async def send(event):
        sent.append(event)

    scope = {"type": "http", "path": path, "client": (client, 1234)}
    asyncio.run(Gate(app)(scope, None, send))
    return bool(passed), sent


@pytest.mark.parametrize("path", ["/v1/control/register-node", "/v1/runtime/acquire-task", "/docs"])
@pytest.mark.parametrize("client", ["10.0.0.7", "2001:db8::1", "::ffff:10.0.0.7"])
def test_from_elsewhere_nobody_registers_keys_or_starts_runs(path, client):
    passed, sent = ask_gate(path, client)
    assert not passed
    assert sent[0]["status"] == 403


@pytest.mark.parametrize("client", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_the_coordinators_own_machine_may_do_both(client):
    assert ask_gate("/v1/control/start-run", client)[0]


def test_sites_reach_the_fleets_interface_from_anywhere():
    assert ask_gate("/v1/fleet/pull-messages", "10.0.0.7")[0]
