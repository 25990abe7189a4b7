"""Where clients' states live between rounds: in memory first, on disk past a limit.

Each state is tagged with the number of rounds completed when it was made. A run that goes back to
an earlier checkpoint asks for states `before` that round and gets what was true then, because
older versions stay until a newer checkpoint makes them useless. Versions in between do not: a
client that trains a hundred rounds from one checkpoint to the next has three files, not a hundred.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

from ssfl.federation.state import ClientState
from ssfl.files import read_tensors, write_tensors

log = logging.getLogger(__name__)

Versions = dict[int, ClientState]


class StateStore:
    """States by client, at most `limit` bytes of them in memory, the rest in `folder`.

    A folder per client holds `round-000040.safetensors`: its state after 40 completed rounds. In
    memory a client has its newest state and, until that round is known to be complete, the one
    before: a round may be broken off.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self.durable: int | None = None
        """Rounds completed at the last checkpoint, once this process has been told."""
        self._memory: OrderedDict[int, Versions] = OrderedDict()
        self._unsaved: set[tuple[int, int]] = set()
        self._touched: set[int] = set()
        self._bytes = 0
        self._complete = 0  # rounds, as far as anybody has said
        self._crowded = limit == 0  # and that has been said, or nobody expects otherwise
        self._lock = threading.Lock()

    def get(self, client: int, before: int) -> ClientState:
        """The client's latest state made within its first `before` rounds, which are complete;
        empty if none."""
        with self._lock:
            self._outdate(before)
            held = self._memory.get(client, {})
            known = [v for v in {*held, *self._on_disk(client)} if v <= before]
            if not known:
                return ClientState()
            version = max(known)
            if version in held:
                self._memory.move_to_end(client)
                return held[version]
            tensors, _ = read_tensors(self._path(client, version))
            state = ClientState(**tensors)
            self._hold(client, version, state)
            self._spill(keep=client)
            return state

    def put(self, client: int, rounds: int, state: ClientState) -> None:
        """Remember `state`, if anything is in it, as the client's after `rounds` rounds."""
        if not state.tensors():
            return
        with self._lock:
            self._unsaved.add((client, rounds))
            self._hold(client, rounds, state)  # a late one may be outdated already: then it goes
            self._touched.add(client)
            self._spill(keep=None)

    def flush(self, rounds: int | None = None) -> None:
        """Bring what is only in memory to disk; given `rounds`, what a run resumed there needs."""
        with self._lock:
            for client, version in sorted(self._unsaved):
                held = self._memory.get(client, {})
                asked_for = [v for v in held if rounds is None or v <= rounds]
                if version in held and (rounds is None or version == max(asked_for, default=None)):
                    self._save(client, version)  # not held: Ctrl-C came in the midst of `put`

    def prune(self, durable: int) -> None:
        """Delete versions that no run resumed at or after `durable` rounds would ask for."""
        with self._lock:
            self.durable = durable
            for client in self._prunable():
                self._drop_all_but(client, [v for v in self._on_disk(client) if v > durable])
            self._touched.clear()

    def rewind(self, rounds: int) -> None:
        """Delete versions past `rounds`: a run that goes back makes its later history anew."""
        with self._lock:
            for client in self.clients():
                for version in [v for v in self._memory.get(client, {}) if v > rounds]:
                    self._drop(client, version)
                for version in self._on_disk(client):
                    if version > rounds:
                        self._path(client, version).unlink(missing_ok=True)

    def lost(self, clients: Iterable[int], rounds: int) -> list[int]:
        """Which of these have a state on disk, but none that was made within `rounds` rounds."""
        return [c for c in sorted(clients) if min(self._on_disk(c), default=rounds) > rounds]

    def clients(self) -> list[int]:
        """Clients with a state, on disk or in memory."""
        on_disk = {int(path.name) for path in self.folder.glob("*") if path.name.isdigit()}
        return sorted(on_disk | set(self._memory))

    def _prunable(self) -> Iterable[int]:
        """Clients who may have versions that a checkpoint outdates."""
        return self._touched

    def _hold(self, client: int, version: int, state: ClientState) -> None:
        versions = self._memory.setdefault(client, {})
        if version in versions:
            self._bytes -= versions[version].bytes
        versions[version] = state
        self._bytes += state.bytes
        for old in sorted(versions)[:-2]:
            self._drop(client, old)
        self._memory.move_to_end(client)

    def _outdate(self, rounds: int) -> None:
        """Forget what clients had before their last of so many rounds, now that these count."""
        if rounds > self._complete:
            self._complete = rounds
            several = [client for client, held in self._memory.items() if len(held) > 1]
            for client in several:  # few of thousands: those who have just trained
                for old in sorted(v for v in self._memory[client] if v <= rounds)[:-1]:
                    self._drop(client, old)

    def _drop(self, client: int, version: int) -> None:
        """Forget a version that memory holds."""
        self._unsaved.discard((client, version))
        self._bytes -= self._memory[client].pop(version).bytes

    def _spill(self, keep: int | None) -> None:
        """Move the longest unused states to disk until the rest fits the limit."""
        for client in list(self._memory):
            if self._bytes <= self.limit:
                return
            if client == keep:
                continue
            if not self._crowded:
                self._crowded = True
                log.warning(
                    "clients' states take more than the %d MB of run.store_mb: those unused for "
                    "longest wait on disk, which costs time",
                    self.limit >> 20,
                )
            for version, state in self._memory[client].items():
                self._save(client, version)
                self._bytes -= state.bytes
            del self._memory[client]

    def _save(self, client: int, version: int) -> None:
        if (client, version) in self._unsaved:
            tensors = self._memory[client][version].tensors()
            write_tensors(self._path(client, version), tensors, {"rounds": str(version)})
            self._unsaved.discard((client, version))
            if self.durable is not None:  # the newest two, for a round that is broken off
                self._drop_all_but(client, sorted(self._on_disk(client))[-2:])

    def _drop_all_but(self, client: int, newer: Sequence[int]) -> None:
        """Delete versions on disk but these, and what a run resumed at the checkpoint needs."""
        assert self.durable is not None
        versions = self._on_disk(client)
        resumed_from = max((v for v in versions if v <= self.durable), default=0)
        for version in versions:
            if version != resumed_from and version not in newer:
                self._path(client, version).unlink(missing_ok=True)

    def _on_disk(self, client: int) -> list[int]:
        files = (self.folder / f"{client:06d}").glob("round-*.safetensors")
        return [int(file.stem.removeprefix("round-")) for file in files]

    def _path(self, client: int, version: int) -> Path:
        return self.folder / f"{client:06d}" / f"round-{version:06d}.safetensors"
