"""The policy that MPI and Ray share, against workers that a test plays by hand."""

import time
from collections import deque
from collections.abc import Iterator

import pytest
import torch

from ssfl.comm.pull import ATTEMPTS, PullCommunicator
from ssfl.federation.messages import Reason, Reply, Task, TaskKind

NEVER = object()


class Script:
    """Workers that finish in the order they were given work, unless told otherwise.

    `fates` says what becomes of a client: None (its worker dies) as many times as given, or NEVER.
    """

    def __init__(self) -> None:
        self.fates: dict[int, list[object]] = {}
        self.given: list[tuple[int, int]] = []
        self.announced: list[tuple[Task, list[int]]] = []
        self._at: deque[tuple[int, int, Task]] = deque()
        self.stuck: list[tuple[int, int, Task]] = []

    def announce(self, task: Task, free: list[int]) -> None:
        self.announced.append((task, list(free)))

    def give(self, worker: int, client: int) -> None:
        self.given.append((worker, client))
        job = (worker, client, self.announced[-1][0])
        if NEVER in self.fates.get(client, []):
            self.stuck.append(job)
        else:
            self._at.append(job)

    def release(self) -> None:
        """Those that were stuck finish after all."""
        self._at.extend(self.stuck)
        self.stuck.clear()

    def wait(self, seconds: float | None) -> list[tuple[int, Reply | None]]:
        if not self._at:
            assert seconds is not None, "waiting for ever"
            time.sleep(seconds)
            return []
        worker, client, task = self._at.popleft()
        if self.fates.get(client):
            self.fates[client].pop()
            return [(worker, None)]
        return [(worker, Reply(client, task.kind, task.round, samples=1))]

    def close(self) -> None: ...


class Data:
    """Five clients of known sizes."""

    def clients(self) -> range:
        return range(5)

    def size(self, client: int) -> int:
        return 10 * (client + 1)


@pytest.fixture
def script() -> Script:
    return Script()


def task(round_: int = 0, kind: TaskKind = TaskKind.TRAIN) -> Task:
    return Task(kind, round_, torch.zeros(3), "layout")


def connect(script: Script, workers: int) -> PullCommunicator:
    return PullCommunicator(script, range(workers), Data())  # type: ignore[arg-type]


def test_clients_are_started_in_the_order_given_and_each_replies_once(script: Script) -> None:
    communicator = connect(script, workers=2)
    replies = list(communicator.exchange(task(), [4, 2, 0, 1, 3]))
    assert [client for _, client in script.given] == [4, 2, 0, 1, 3]
    assert sorted(reply.client for reply in replies) == [0, 1, 2, 3, 4]
    assert communicator.sizes() == [10, 20, 30, 40, 50]


def test_a_free_worker_takes_the_next_client_while_another_is_still_busy(script: Script) -> None:
    script.fates[4] = [NEVER]
    list(connect(script, workers=2).exchange(task(), [4, 2, 0, 1, 3], deadline=0.05))
    assert [worker for worker, client in script.given if client != 4] == [1, 1, 1, 1]


def test_a_slow_client_is_failed_by_deadline_and_the_others_count(script: Script) -> None:
    script.fates[2] = [NEVER]
    replies = list(connect(script, workers=2).exchange(task(), [0, 2, 1], deadline=0.05))
    failures = {reply.client: reply.failure.reason for reply in replies if reply.failure}
    assert failures == {2: Reason.DEADLINE}
    assert len(replies) == 3


def test_a_late_reply_comes_in_the_next_exchange_of_its_kind(script: Script) -> None:
    script.fates[2] = [NEVER]
    communicator = connect(script, workers=2)
    list(communicator.exchange(task(0), [2, 1], deadline=0.05))
    script.fates.clear()
    script.release()
    judged = list(communicator.exchange(task(1, TaskKind.EVALUATE), [0, 1]))
    assert [(r.client, r.kind) for r in judged] == [(c, TaskKind.EVALUATE) for c in (0, 1)]
    replies = list(communicator.exchange(task(1), [1]))
    assert [(r.client, r.round) for r in replies] == [(2, 0), (1, 1)]


def test_a_client_still_at_an_earlier_task_is_not_started_twice_at_once(script: Script) -> None:
    script.fates[2] = [NEVER]
    communicator = connect(script, workers=3)
    list(communicator.exchange(task(0), [2], deadline=0.05))
    replies = list(communicator.exchange(task(1), [2, 1], deadline=0.05))
    assert script.given == [(0, 2), (1, 1)]
    assert [(r.client, r.failure is None) for r in replies] == [(1, True), (2, False)]
    script.fates.clear()
    script.release()
    again = list(communicator.exchange(task(2), [2]))
    assert [(r.client, r.round) for r in again] == [(2, 0), (2, 2)]


def test_asking_again_for_the_same_task_waits_for_whoever_is_at_it(script: Script) -> None:
    script.fates[2] = [NEVER]
    communicator, same = connect(script, workers=2), task(0)
    list(communicator.exchange(same, [2, 1], deadline=0.05))
    script.fates.clear()
    script.release()
    replies = list(communicator.exchange(same, [2]))
    assert [(r.client, r.failure) for r in replies] == [(2, None)]
    assert len(script.announced) == 1
    assert len(script.given) == 2


def test_a_busy_worker_is_not_among_the_free_ones_of_the_next_announcement(script: Script) -> None:
    script.fates[2] = [NEVER]
    communicator = connect(script, workers=3)
    list(communicator.exchange(task(0), [2, 1], deadline=0.05))
    list(communicator.exchange(task(1), [1], deadline=0.05))
    assert [sorted(free) for _, free in script.announced] == [[0, 1, 2], [1, 2]]


def test_a_client_whose_worker_died_is_run_again(script: Script) -> None:
    script.fates[1] = [None] * (ATTEMPTS - 1)
    replies = list(connect(script, workers=2).exchange(task(), [0, 1, 2]))
    assert sorted((r.client, r.failure) for r in replies) == [(0, None), (1, None), (2, None)]
    assert [client for _, client in script.given].count(1) == ATTEMPTS


def test_a_client_that_kills_every_worker_is_given_up_as_lost(script: Script) -> None:
    script.fates[1] = [None] * 100
    replies = {r.client: r for r in connect(script, workers=1).exchange(task(), [1, 0])}
    assert replies[0].failure is None
    assert replies[1].failure is not None
    assert replies[1].failure.reason is Reason.LOST


class Counted(list[int]):
    """A queue that counts who is looked at."""

    seen = 0

    def __iter__(self) -> Iterator[int]:
        for client in super().__iter__():
            self.seen += 1
            yield client


def test_handing_out_looks_no_further_down_the_queue_than_it_must(script: Script) -> None:
    communicator = PullCommunicator(script, [7], Data())  # type: ignore[arg-type]
    task, queue = Task(TaskKind.TRAIN, 0, torch.zeros(1), "layout"), Counted(range(1000))
    script.announce(task, [7])
    communicator._hand_out(task, queue)
    assert script.given == [(7, 0)]
    assert queue.seen == 1
