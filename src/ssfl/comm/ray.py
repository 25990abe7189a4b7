"""Clients in Ray actors: `ssfl train RECIPE --comm ray`, on a laptop or on a running cluster.

An actor holds a host and handles one client at a time. Θ is put once into Ray's object store,
where all actors of a machine read the same memory; Δ comes back as the array it is. An actor that
dies is replaced, and its client run again. Inside its cluster Ray wraps these arrays in its own
envelope (pickle), so it is for machines that trust each other.
"""

import logging
import math
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ssfl.comm import wire
from ssfl.comm.pull import PullCommunicator
from ssfl.comm.worker import open_host, work
from ssfl.config import CHOICES, Config
from ssfl.cores import cores
from ssfl.errors import ConfigError, FederationError, SSFLError
from ssfl.federation.client import Host
from ssfl.federation.messages import Reason, Reply, Task, failed

log = logging.getLogger(__name__)

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
}
"""Ray neither phones home nor talks over the run's own display."""

Registered = dict[str, dict[str, str]]


def connect(config: Config, folder: Path, hosts: Sequence[Host]) -> PullCommunicator:
    """The transport `ray`: clients in actors of a Ray cluster, joined or started."""
    host = hosts[0]
    asked = config.server.clients_per_round or len(host.clients())
    cluster = Cluster(config, asked, theta_bytes=4 * host.trainer.layout.size)
    try:
        actors = Actors(cluster, folder.absolute())
    except BaseException:
        cluster.close()
        raise
    return PullCommunicator(actors, range(cluster.workers), host.data)


class Cluster:
    """Ray itself: joined or started, and how many workers of what size it is to run."""

    def __init__(self, config: Config, asked: int, theta_bytes: int) -> None:
        self.ray = _import_ray()
        self.mine = not self.ray.is_initialized()
        wanted = config.device.workers
        if self.mine:
            self._start(wanted, theta_bytes)
        there = self.ray.cluster_resources()
        gpus = there.get("GPU", 0.0) if config.device.device != "cpu" else 0.0
        cpus = there.get("CPU", 1.0) / config.device.threads
        self.workers = wanted or min(asked, max(1, int(gpus or cpus)))
        self.gpus = config.device.gpus_per_worker or _share(gpus, self.workers)
        self.threads = config.device.threads
        if self.workers > cpus or self.gpus * self.workers > gpus + 1e-9:
            self.close()
            raise ConfigError(
                f"{self.workers} Ray workers want {self.threads} CPU and {self.gpus:g} GPU each, "
                f"but Ray has {there.get('CPU', 0):g} CPU and {gpus:g} GPU: "
                "use fewer --workers or less --gpus-per-worker"
            )

    def _start(self, wanted: int, theta_bytes: int) -> None:
        """Join the cluster that RAY_ADDRESS names; without it, start one that ends with us."""
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        cpus = max(cores(), wanted)
        alone: dict[str, Any] = {
            "address": "local",
            "num_cpus": cpus,
            "object_store_memory": (256 << 20) + (2 * cpus + 4) * theta_bytes,
            "include_dashboard": False,
        }
        joined = {"address": "auto"}
        with _sigterm_stays_ours():
            self.ray.init(**(joined if os.environ.get("RAY_ADDRESS") else alone), **quiet)

    def close(self) -> None:
        if self.mine:
            self.ray.shutdown()


class Actors:
    """One actor per worker, replaced when it dies."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self._ray, self._folder = cluster, cluster.ray, folder
        self._new = self._ray.remote(
            num_cpus=cluster.threads, num_gpus=cluster.gpus, max_restarts=0
        )(Worker)
        self._task: tuple[int, bytes, list[Any]] = (0, b"", [])
        self._running: dict[Any, tuple[int, int, Task]] = {}
        self._announced: Task | None = None
        self._open = True
        numbers = range(cluster.workers)
        started = [self._start() for _ in numbers]
        self._actors = {number: actor for number, (actor, _) in zip(numbers, started, strict=True)}
        for complaint in self._ray.get([answer for _, answer in started]):
            if complaint:
                raise FederationError(f"a Ray worker could not start: {complaint}")

    def _start(self) -> tuple[Any, Any]:
        """An actor, and the promise of its complaint (empty if it is well)."""
        actor = self._new.remote()
        return actor, actor.open.remote(str(self._folder), _registered())

    def announce(self, task: Task, free: Sequence[int]) -> None:
        header, vectors = wire.encode_task(task)
        self._announced = task
        self._task = (self._task[0] + 1, header, [self._ray.put(vector) for vector in vectors])

    def give(self, worker: int, client: int) -> None:
        number, header, vectors = self._task
        assert self._announced is not None
        answer = self._actors[worker].handle.remote(client, number, header, *vectors)
        self._running[answer] = (worker, client, self._announced)

    def wait(self, seconds: float | None) -> list[tuple[int, Reply | None]]:
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds)
        return [self._finish(answer) for answer in ready]

    def _finish(self, answer: Any) -> tuple[int, Reply | None]:
        worker, client, task = self._running.pop(answer)
        errors = self._ray.exceptions
        try:
            header, *vectors = self._ray.get(answer)
            return worker, wire.decode_reply(header, vectors)
        except errors.RayTaskError as error:
            return worker, failed(client, task, Reason.ERROR, str(error.cause))
        except errors.RayError as error:
            log.warning("a Ray worker is gone and is replaced: %s", type(error).__name__)
            self._ray.kill(self._actors[worker])
            self._actors[worker], _ = self._start()
            return worker, None

    def close(self) -> None:
        if self._open:
            self._open = False
            for actor in self._actors.values():
                self._ray.kill(actor)
            self._cluster.close()


class Worker:
    """What runs in an actor."""

    def __init__(self) -> None:
        self._host: Host | None = None
        self._task: tuple[int, Task] | None = None

    def open(self, folder: str, registered: Registered) -> str:
        """Assemble the host; returns what is wrong, or nothing."""
        for section, targets in registered.items():
            for name, target in targets.items():
                CHOICES[section][1].register(name, target)
        try:
            self._host = open_host(Path(folder))
        except SSFLError as error:
            return str(error)
        return ""

    def handle(self, client: int, number: int, header: bytes, *vectors: Any) -> tuple[Any, ...]:
        """Let a client handle the task of that number; its reply as header and arrays."""
        if self._host is None:
            raise FederationError("its worker could not start")
        if self._task is None or self._task[0] != number:
            self._task = number, wire.decode_task(header, vectors)
        head, arrays = wire.encode_reply(work(self._host, client, self._task[1]))
        return head, *arrays


def _import_ray() -> Any:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"the transport ray needs Ray ({error}): pip install 'ssfl[ray]'"
        ) from None
    return ray


@contextmanager
def _sigterm_stays_ours() -> Iterator[None]:
    """Ray would have a SIGTERM end the process at once; whoever handles it has a run to save."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _registered() -> Registered:
    """Algorithms, methods and data sources by name, those of the user's script included."""
    return {section: registry.targets for section, (_, registry) in CHOICES.items()}


def _share(gpus: float, workers: int) -> float:
    """An even share of the GPUs, at most one, in the ten-thousandths that Ray counts in."""
    return min(1.0, math.floor(gpus / workers * 1e4) / 1e4)
