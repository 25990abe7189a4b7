"""Clients in threads of one process, and what passes between server and clients on the way."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
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

import ssfl.comm.local
from ssfl.assemble import load_federated
from ssfl.comm import wire
from ssfl.comm.local import LocalCommunicator
from ssfl.experiment import train
from ssfl.federation.client import Client
from ssfl.federation.messages import Reason, Reply, Task, TaskKind


def test_two_threads_end_with_the_same_bits_as_one(tmp_path: Path) -> None:
    two = train(recipe(device={"workers": 2}), out=tmp_path / "two")
    assert_same_bits(two, reference())


def test_a_client_slower_than_the_deadline_costs_its_own_update_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client, "_train", Client._train)  # bad_days is undone after the test
    bad_days({"SLOW": "2:6"})
    options = recipe(server={"rounds": 1, "deadline": 4.0}, device={"workers": 2})
    slow = train(options, out=tmp_path / "slow")
    assert rows(slow)[0]["failures"] == {"deadline": 1}
    monkeypatch.undo()
    monkeypatch.setattr(Client, "_train", Client._train)
    bad_days({"BROKEN": "2"})
    without = train(recipe(server={"rounds": 1}), out=tmp_path / "without")
    assert rows(without)[0]["failures"] == {"error": 1}
    assert torch.equal(outcome(slow)[0], outcome(without)[0])


class Host:
    """A host whose clients wait for a word."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.asked = 0

    def handle(self, client: int, task: Task) -> Reply:
        self.asked += 1
        if task.kind is TaskKind.TRAIN:
            self.go.wait(10)
        return Reply(client, task.kind, task.round, samples=1)


def test_a_late_reply_comes_in_the_next_exchange_of_its_kind() -> None:
    hosts = [Host(), Host()]
    communicator = LocalCommunicator(hosts)  # type: ignore[arg-type]

    def ask(kind: TaskKind, round_: int, clients: list[int], deadline: float) -> list[Reply]:
        task = Task(kind, round_, torch.zeros(2), "layout")
        return list(communicator.exchange(task, clients, deadline))

    (late,) = ask(TaskKind.TRAIN, 0, [7], 0.05)
    assert late.failure is not None
    assert late.failure.reason is Reason.DEADLINE
    for host in hosts:
        host.go.set()
    wait(communicator._jobs)
    judged = ask(TaskKind.EVALUATE, 1, [7, 8], 10)
    assert sorted((r.client, r.kind) for r in judged) == [(c, TaskKind.EVALUATE) for c in (7, 8)]
    replies = ask(TaskKind.TRAIN, 1, [8], 10)
    assert sorted((r.client, r.round) for r in replies) == [(7, 0), (8, 1)]


def test_a_clients_thread_has_the_torch_threads_of_who_asks_whatever_others_set_meanwhile() -> None:
    counts: list[int] = []

    class Counting(Host):
        def handle(self, client: int, task: Task) -> Reply:
            counts.append(torch.get_num_threads())
            return Reply(client, task.kind, task.round, samples=1)

    hosts = [Counting(), Counting()]
    communicator = LocalCommunicator(hosts)  # type: ignore[arg-type]
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        other = threading.Thread(target=torch.set_num_threads, args=(1,))
        other.start()
        other.join()
        task = Task(TaskKind.TRAIN, 0, torch.zeros(2), "layout")
        list(communicator.exchange(task, [7, 8]))
    finally:
        torch.set_num_threads(before)
    assert counts == [3, 3]


def test_a_client_still_at_an_earlier_task_is_not_started_twice_at_once() -> None:
    hosts = [Host(), Host()]
    communicator = LocalCommunicator(hosts)  # type: ignore[arg-type]
    tasks = [Task(TaskKind.TRAIN, round_, torch.zeros(2), "layout") for round_ in range(3)]

    def ask(task: Task, clients: list[int], deadline: float = 0.05) -> list[tuple[int, int, bool]]:
        replies = communicator.exchange(task, clients, deadline)
        return [(r.client, r.round, r.failure is None) for r in replies]

    assert ask(tasks[0], [7]) == [(7, 0, False)]
    assert ask(tasks[1], [7]) == [(7, 1, False)]
    assert sum(host.asked for host in hosts) == 1
    assert ask(tasks[0], [7]) == [(7, 0, False)]  # asked again for what it is at
    assert sum(host.asked for host in hosts) == 1
    for host in hosts:
        host.go.set()
    wait(communicator._jobs)
    assert ask(tasks[2], [7], deadline=60) == [(7, 0, True), (7, 2, True)]


def test_a_client_held_back_begins_as_soon_as_it_is_free() -> None:
    hosts = [Host(), Host()]
    communicator = LocalCommunicator(hosts)  # type: ignore[arg-type]
    train, judge = (Task(kind, 0, torch.zeros(2), "layout") for kind in TaskKind)
    list(communicator.exchange(train, [7], 0.05))
    threading.Timer(0.2, lambda: [host.go.set() for host in hosts]).start()
    (judged,) = communicator.exchange(judge, [7], 10)
    assert (judged.kind, judged.failure) == (TaskKind.EVALUATE, None)
    (trained,) = communicator.exchange(train, [7], 10)
    assert (trained.kind, trained.failure) == (TaskKind.TRAIN, None)
    assert sum(host.asked for host in hosts) == 2


def test_a_reply_costs_the_same_however_many_clients_are_still_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[int] = []

    def watched(futures, *how):
        looked_at.append(len(futures))
        return wait(futures, *how)

    monkeypatch.setattr(ssfl.comm.local, "wait", watched)
    hosts = [Host(), Host()]
    communicator = LocalCommunicator(hosts)  # type: ignore[arg-type]
    task = Task(TaskKind.EVALUATE, 0, torch.zeros(2), "layout")
    replies = list(communicator.exchange(task, range(500)))
    assert sorted(reply.client for reply in replies) == list(range(500))
    assert max(looked_at) <= 2 * ssfl.comm.local.AHEAD * len(hosts)
    communicator._pool.shutdown()  # type: ignore[union-attr]


def on_the_way(message: wire.Message) -> bytes:
    """What a transport would send of it: the header and the vectors as they lie."""
    header, vectors = message
    return b"".join((header, *(vector.tobytes() for vector in vectors)))


def test_neither_image_nor_label_is_in_any_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []

    class Recorder(LocalCommunicator):
        def exchange(
            self, task: Task, clients: Sequence[int], deadline: float | None = None
        ) -> Iterator[Reply]:
            sent.append(on_the_way(wire.encode_task(task)))
            for reply in super().exchange(task, clients, deadline):
                sent.append(on_the_way(wire.encode_reply(reply)))
                yield reply

    monkeypatch.setattr(ssfl.comm.local, "LocalCommunicator", Recorder)
    config = recipe()
    train(config, out=tmp_path / "recorded")
    assert len(sent) == 5 * (1 + 6)  # three rounds and two evaluations
    assert_free_of_data(sent, load_federated(config))
