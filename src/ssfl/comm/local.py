"""Clients in this process: one after another, or side by side in threads of one host each.

The default on one machine. Nothing is copied or encoded; torch runs outside Python's lock, so
threads keep all cores busy with one torch thread each.
"""

import queue
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cached_property
from itertools import islice
from pathlib import Path

import torch

from ssfl.comm.pull import Job
from ssfl.config import Config
from ssfl.federation.client import Host
from ssfl.federation.messages import Reason, Reply, Task, failed

AHEAD = 2
"""Clients handed out per host: one at work, and one to go on with while the server folds a reply.
Not all at once, since every reply looks through what is handed out."""


class LocalCommunicator:
    """Tasks go straight to `Host.handle`; a host is used by one thread at a time."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = hosts
        self._idle: queue.SimpleQueue[Host] = queue.SimpleQueue()
        for host in hosts:
            self._idle.put(host)
        self._pool: ThreadPoolExecutor | None = None
        self._jobs: dict[Future[Reply], Job] = {}
        """What threads are at, and late replies that nobody has taken yet."""

    def clients(self) -> Sequence[int]:
        return self._hosts[0].clients()

    def sizes(self) -> Sequence[int]:
        return self._sizes

    @cached_property
    def _sizes(self) -> list[int]:
        """Counted once: a round may ask ten clients out of ten thousand."""
        data = self._hosts[0].data
        return [data.size(client) for client in data.clients()]

    def exchange(
        self, task: Task, clients: Sequence[int], deadline: float | None = None
    ) -> Iterator[Reply]:
        """Replies as they finish; with one host and no deadline, simply one after another."""
        if len(self._hosts) == 1 and deadline is None and self._pool is None:
            for client in clients:
                yield self._hosts[0].handle(client, task)
            return
        yield from self._exchange_in_threads(task, clients, deadline)

    def _exchange_in_threads(
        self, task: Task, clients: Sequence[int], deadline: float | None
    ) -> Iterator[Reply]:
        """Late replies of earlier exchanges of the same kind come along."""
        end = None if deadline is None else time.monotonic() + deadline
        awaited = dict.fromkeys(clients)
        at_it = {job.client for job in self._jobs.values() if job.task is task}
        waiting = [client for client in clients if client not in at_it]
        while awaited:
            running = [future for future in self._jobs if not future.done()]
            busy = {self._jobs[future].client for future in running}
            room = max(0, AHEAD * len(self._hosts) - len(running))
            free = (client for client in waiting if client not in busy)  # one task at a time
            for client in list(islice(free, room)):
                self._start(task, client)
                waiting.remove(client)
            kindred = [future for future, job in self._jobs.items() if job.task.kind is task.kind]
            left = None if end is None else max(0.0, end - time.monotonic())
            done, _ = wait({*running, *kindred}, left, FIRST_COMPLETED)
            if not done:
                break
            for future in done.intersection(kindred):
                job = self._jobs.pop(future)
                if job.task is task:
                    awaited.pop(job.client, None)
                elif job.task.round >= task.round:
                    continue  # of a future that a site's server has gone back on
                yield future.result()
        for future in [future for future, job in self._jobs.items() if job.task is task]:
            if future.cancel():  # what has begun cannot be stopped: its reply comes late
                del self._jobs[future]
        for client in awaited:
            yield failed(client, task, Reason.DEADLINE, f"no reply within {deadline:g} s")

    def _start(self, task: Task, client: int) -> None:
        if self._pool is None:
            # Or a thread would have as many torch threads as another has just set for itself.
            self._pool = ThreadPoolExecutor(
                len(self._hosts),
                "ssfl-client",
                initializer=torch.set_num_threads,
                initargs=(torch.get_num_threads(),),
            )
        self._jobs[self._pool.submit(self._handle, client, task)] = Job(client, task)

    def _handle(self, client: int, task: Task) -> Reply:
        host = self._idle.get()
        try:
            return host.handle(client, task)
        finally:
            self._idle.put(host)

    def close(self) -> None:
        """Stop whatever is training at its next step and wait for its thread to end."""
        for host in self._hosts:
            host.trainer.stop.set()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def connect(config: Config, folder: Path, hosts: Sequence[Host]) -> LocalCommunicator:
    """The transport `local`: this process's own hosts."""
    return LocalCommunicator(hosts)
