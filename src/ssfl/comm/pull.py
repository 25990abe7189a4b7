"""Workers that pull clients as they finish: what MPI and Ray have in common.

The server hands out clients in its order (the largest first) to whoever is free. A client that is
late keeps its worker and nobody else's; its reply is passed on in a later exchange. A client whose
worker died is run again by another.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from ssfl.data.federated import FederatedData
from ssfl.federation.messages import Reason, Reply, Task, failed

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Workers that may die under a client in one exchange before it counts as lost."""


class Workers(Protocol):
    """Processes elsewhere, by number, each at one client at a time."""

    def announce(self, task: Task, free: Sequence[int]) -> None:
        """Bring `task` to the workers; those not `free` must not be waited for."""
        ...

    def give(self, worker: int, client: int) -> None:
        """Have a free worker handle the announced task for `client`."""
        ...

    def wait(self, seconds: float | None) -> list[tuple[int, Reply | None]]:
        """Who has finished, with its reply, or None where the worker is gone and was replaced.

        Empty if nobody has within `seconds` (None: as long as it takes).
        """
        ...

    def close(self) -> None:
        """End all workers; may be called twice."""
        ...


@dataclass(frozen=True)
class Job:
    """A client at a task."""

    client: int
    task: Task


class PullCommunicator:
    """A communicator over workers of any kind."""

    def __init__(self, workers: Workers, numbers: Sequence[int], data: FederatedData) -> None:
        self._workers, self._data = workers, data
        self._free = list(numbers)
        self._running: dict[int, Job] = {}
        self._held: list[Reply] = []
        self._announced: Task | None = None

    def clients(self) -> Sequence[int]:
        return self._data.clients()

    def sizes(self) -> Sequence[int]:
        return [self._data.size(client) for client in self._data.clients()]

    def exchange(
        self, task: Task, clients: Sequence[int], deadline: float | None = None
    ) -> Iterator[Reply]:
        """Replies as they finish; late ones of earlier exchanges of the same kind come along."""
        end = None if deadline is None else time.monotonic() + deadline
        if task is not self._announced:
            self._announced = task
            self._workers.announce(task, self._free)
        yield from self._release(task)
        awaited = dict.fromkeys(clients)
        at_it = {job.client for job in self._running.values() if job.task is task}
        queue = [client for client in clients if client not in at_it]
        deaths: Counter[int] = Counter()
        self._hand_out(task, queue)
        while awaited:
            left = None if end is None else max(0.0, end - time.monotonic())
            finished = self._workers.wait(left)
            if not finished:
                break
            for worker, reply in finished:
                job = self._running.pop(worker)
                self._free.append(worker)
                if reply is None:
                    deaths[job.client] += 1
                    reply = self._mourn(job, task, deaths[job.client], queue)
                self._hand_out(task, queue)  # before the server is busy with the reply
                if reply is None:
                    continue
                if job.task is task:
                    awaited.pop(job.client, None)
                if job.task.kind is task.kind:
                    yield reply
                else:
                    self._held.append(reply)
        for client in awaited:
            yield failed(client, task, Reason.DEADLINE, f"no reply within {deadline:g} s")

    def _hand_out(self, task: Task, queue: list[int]) -> None:
        """Give free workers the next clients, but no client that is still at an earlier task."""
        busy = {job.client for job in self._running.values()}
        ready = (client for client in queue if client not in busy)
        for client in list(islice(ready, len(self._free))):  # looking no further than is needed
            worker = self._free.pop(0)
            queue.remove(client)
            self._running[worker] = Job(client, task)
            self._workers.give(worker, client)

    def _mourn(self, job: Job, task: Task, deaths: int, queue: list[int]) -> Reply | None:
        """A worker died: its client goes back to the head of the queue, or is given up."""
        log.warning("%s: client %d lost its worker", job.task.when, job.client)
        if job.task is not task:  # it was late, and counted as such
            return None
        if deaths < ATTEMPTS:
            queue.insert(0, job.client)
            return None
        return failed(job.client, task, Reason.LOST, f"{deaths} workers died working for it")

    def _release(self, task: Task) -> Iterator[Reply]:
        """Late replies of this kind that came while another kind was being exchanged."""
        held, self._held = self._held, []
        for reply in held:
            if reply.kind is task.kind:
                yield reply
            else:
                self._held.append(reply)

    def close(self) -> None:
        self._workers.close()
