"""Clients in MPI ranks: `mpiexec -n 9 ssfl train RECIPE --comm mpi`.

All ranks run the same command: rank 0 serves, the others work. Θ goes out by one broadcast per
task, Δ comes back as the raw buffer it is in memory; what surrounds them is JSON, nothing is
pickled. A dead rank ends an MPI job, so rank 0 leaves a word for that case: what happened and how
to go on.
"""

import atexit
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

from ssfl import __version__
from ssfl.comm import way_on, wire
from ssfl.comm.pull import PullCommunicator
from ssfl.comm.worker import open_host, work
from ssfl.config import Config
from ssfl.errors import ConfigError, FederationError, SSFLError
from ssfl.federation.client import Host
from ssfl.federation.messages import Reply, Task
from ssfl.interrupts import handled, uninterrupted

log = logging.getLogger(__name__)

ORDER, STOP, ANSWER, VECTOR = 1, 2, 3, 4
"""Tags: orders to a rank, the last order of a run (which a busy rank looks out for), answers, and
the vectors that follow an order or an answer."""

GRACE = 30.0
"""Seconds a rank has to finish the step it is at when a run is over."""

Fields = dict[str, Any]


@cache
def _world() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ConfigError(
            f"the transport mpi needs mpi4py and an MPI ({error}): pip install 'ssfl[mpi]'"
        ) from None
    return MPI.COMM_WORLD


def rank() -> int:
    """This process's rank: 0 serves, the others work."""
    number: int = _world().rank
    return number


def ranks() -> int:
    """How many ranks there are, the one that serves included."""
    number: int = _world().size
    return number


def join() -> Path | None:
    """At rank 0, nothing: it goes on to serve. At any other, work for the next run to its end.

    Returns that run's folder, in which all ranks then find the same results.
    """
    if rank() == 0:
        _say_farewell_at_exit()
        return None
    return Rank().serve()


@cache
def _say_farewell_at_exit() -> None:
    """Ranks that wait for a run must not wait for ever when rank 0 ends without one."""

    def farewell() -> None:
        for to in range(1, ranks()):
            _send({"do": "leave"}, to, STOP)

    atexit.register(farewell)


def connect(config: Config, folder: Path, hosts: Sequence[Host]) -> PullCommunicator:
    """The transport `mpi`: clients in the other ranks of this MPI job."""
    if ranks() < 2:
        raise ConfigError(
            "the transport mpi has no ranks to work with: start it by "
            "`mpiexec -n N ssfl train ... --comm mpi`, one rank to serve and N - 1 to train"
        )
    _say_farewell_at_exit()
    workers = Ranks(folder.absolute())
    return PullCommunicator(workers, workers.numbers, hosts[0].data)


class Ranks:
    """The working ranks, as rank 0 sees them."""

    def __init__(self, folder: Path) -> None:
        self.numbers = range(1, ranks())
        self._untold, self._staying = list(self.numbers), set(self.numbers)
        self._testament: subprocess.Popen[bytes] | None = _testament(folder)
        self._message: wire.Message = (b"", [])
        self._knows: set[int] = set()
        try:
            self._open(folder)
        except BaseException:  # Ctrl-C too: no rank has died
            self.close()
            raise

    def _open(self, folder: Path) -> None:
        """Have every rank assemble its host."""
        with uninterrupted():  # one that is told to open waits until all, we too, count ranks
            for to in self.numbers:
                _send({"do": "open", "run": str(folder)}, to, ORDER)
            _local_rank()
        answers = {at: _receive(at, ANSWER) for at in self.numbers}
        for at, answer in answers.items():
            version = answer.get("version", "of an earlier version")
            if version != __version__:  # it would train otherwise, or end oddly
                raise FederationError(
                    f"rank {at} on {answer['machine']} has ssfl {version}, and rank 0 has "
                    f"{__version__}: install the same version on all machines"
                )
            if "error" in answer:
                raise FederationError(f"rank {at} on {answer['machine']}: {answer['error']}")

    def announce(self, task: Task, free: Sequence[int]) -> None:
        """One broadcast; but if a rank is busy, each of the others is told when it is needed."""
        self._message = wire.encode_task(task)
        self._knows = set(self.numbers) if len(free) == len(self.numbers) else set()
        if not self._knows:
            return
        for to in self.numbers:
            self._order_task(to, broadcast=True)
        for vector in self._message[1]:
            _world().Bcast(vector, root=0)

    def _order_task(self, to: int, *, broadcast: bool) -> None:
        header = self._message[0].decode()
        _send({"do": "task", "header": header, "broadcast": broadcast}, to, ORDER)

    def give(self, worker: int, client: int) -> None:
        if worker not in self._knows:
            self._order_task(worker, broadcast=False)
            for vector in self._message[1]:
                _world().Send(vector, worker, VECTOR)
            self._knows.add(worker)
        _send({"do": "client", "client": client}, worker, ORDER)

    def wait(self, seconds: float | None) -> list[tuple[int, Reply | None]]:
        found = _probe(None, ANSWER, seconds)
        if found is None:
            return []
        at = found.source
        header = _receive_bytes(found)
        vectors = [np.empty(length, wire.FLOAT) for length in wire.lengths(header)]
        for vector in vectors:
            _world().Recv(vector, at, VECTOR)
        return [(at, wire.decode_reply(header, vectors))]

    def close(self) -> None:
        """End the work of all ranks. Called again after a Ctrl-C, it goes on from where it was."""
        if self._testament is not None:
            self._tell()
            self._drain()
            self._end(self._testament)

    def _tell(self) -> None:
        """Tell all ranks to stop, each of them once: a second word would end its next run."""
        while self._untold:
            with uninterrupted():
                _send({"do": "stop"}, self._untold.pop(0), STOP)

    def _drain(self) -> None:
        """Take what ranks still have to say until they stop, and let it go."""
        end = time.monotonic() + GRACE
        while self._staying and (found := _probe(None, None, max(0.0, end - time.monotonic()))):
            with uninterrupted():
                _receive_bytes(found)
                if found.tag == STOP:
                    self._staying.remove(found.source)

    def _end(self, testament: subprocess.Popen[bytes]) -> None:
        with uninterrupted():
            if self._staying:
                staying = sorted(self._staying)
                log.warning("ranks %s do not stop; they are ended with this process", staying)
                atexit.register(_world().Abort, 1)
            testament.communicate(b"all is well\n")
            self._testament = None


class Rank:
    """A working rank: carries out orders from rank 0, one at a time."""

    def __init__(self) -> None:
        self._folder = Path()
        self._host: Host | None = None
        self._task: Task | None = None

    def serve(self) -> Path:
        """Work for one run; returns its folder when it is over."""
        # Ctrl-C, and the SIGTERM of a job that is cancelled or out of time, come to all ranks. Rank
        # 0 saves what was done; were another to die of it, MPI would end rank 0 before it has.
        with handled(signal.SIG_IGN):
            try:
                return self._work()
            except Exception:
                log.exception("rank %d cannot go on", rank())
                _world().Abort(1)
                raise

    def _work(self) -> Path:
        while True:
            order = _receive(0, None)
            if order["do"] == "leave":
                raise SystemExit(0)
            if order["do"] == "stop":
                _send({}, 0, STOP)
                return self._folder
            self._carry_out(order)

    def _carry_out(self, order: Fields) -> None:
        if order["do"] == "open":
            self._open(Path(order["run"]))
        elif order["do"] == "task":
            self._task = _receive_task(order["header"].encode(), broadcast=order["broadcast"])
        elif self._host is not None and self._task is not None:
            _send_reply(work(self._host, order["client"], self._task))

    def _open(self, folder: Path) -> None:
        self._folder = folder
        answer = {"machine": os.uname().nodename, "version": __version__}
        gpu = _local_rank()
        try:
            self._host = open_host(folder, gpu)
            self._host.trainer.stop = _Told()
        except SSFLError as error:
            answer["error"] = str(error)
        except Exception as error:
            log.exception("rank %d cannot start", rank())
            answer["error"] = f"{type(error).__name__}: {error}"
        _send(answer, 0, ANSWER)


class _Told(Event):
    """Set as soon as rank 0 has ordered a stop, though its order has not been read yet."""

    def is_set(self) -> bool:
        return super().is_set() or bool(_world().Iprobe(0, STOP))


def _receive_task(header: bytes, *, broadcast: bool) -> Task:
    vectors = [np.empty(length, wire.FLOAT) for length in wire.lengths(header)]
    for vector in vectors:
        if broadcast:
            _world().Bcast(vector, root=0)
        else:
            _world().Recv(vector, 0, VECTOR)
    return wire.decode_task(header, vectors)


def _send_reply(reply: Reply) -> None:
    header, vectors = wire.encode_reply(reply)
    _world().Send(header, 0, ANSWER)
    for vector in vectors:
        _world().Send(vector, 0, VECTOR)


def _send(fields: Fields, to: int, tag: int) -> None:
    _world().Send(json.dumps(fields).encode(), to, tag)


def _receive(source: int, tag: int | None) -> Fields:
    fields: Fields = json.loads(_receive_bytes(_probe(source, tag, None)))
    return fields


def _receive_bytes(found: Any) -> bytes:
    content = bytearray(found.count)
    _world().Recv(content, found.source, found.tag)
    return bytes(content)


def _probe(source: int | None, tag: int | None, seconds: float | None) -> Any:
    """Wait for a message without receiving it; None if there is none within `seconds`.

    MPI's own blocking calls keep a core busy, which the clients need.
    """
    from mpi4py import MPI

    found, pause = MPI.Status(), 1e-5
    end = None if seconds is None else time.monotonic() + seconds
    source = MPI.ANY_SOURCE if source is None else source
    tag = MPI.ANY_TAG if tag is None else tag
    while not _world().Iprobe(source, tag, found):
        if end is not None and time.monotonic() >= end:
            return None
        time.sleep(pause)
        pause = min(2 * pause, 2e-3)
    return found


@cache
def _local_rank() -> int:
    """This rank's number among those on its machine: ranks share the GPUs in turn."""
    from mpi4py import MPI

    number: int = _world().Split_type(MPI.COMM_TYPE_SHARED).rank  # all ranks must call this
    return number


def _testament(folder: Path) -> subprocess.Popen[bytes]:
    """What is said should this process be ended before it has closed: MPI gives no notice.

    A shell in a session of its own waits at the other end of a pipe.
    """
    words = (
        "ssfl: a rank of the MPI job died, and MPI has ended the job with it. The run is safe up "
        f"to its last checkpoint; go on with: {way_on(folder, 'mpi')}"
    )
    return subprocess.Popen(
        ["sh", "-c", 'read -r _ || printf "%s\\n" "$1" >&2', "ssfl", words],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
