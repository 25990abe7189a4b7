"""Clients' states where several processes look after the same clients.

Any worker may serve any client in the next round, so a state is on disk, written atomically,
before its reply leaves the worker; and a worker looks there before it starts.
"""

from pathlib import Path

from ssfl.federation.state import ClientState
from ssfl.federation.store import StateStore


class SharedStore(StateStore):
    """A store that keeps nothing to itself: every state goes through to the shared folder.

    Of a client's versions it leaves those that may still be asked for: what a run resumed at
    `durable` rounds needs, and the newest two, for a round that is broken off.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, limit=0)
        self.durable = 0
        """Rounds completed at the last checkpoint, as far as this process has been told."""

    def put(self, client: int, rounds: int, state: ClientState) -> None:
        """Write the client's state after `rounds` completed rounds, and drop what it outdates."""
        super().put(client, rounds, state)  # with no room in memory, that writes it
        self._drop_all_but(client, sorted(self._on_disk(client))[-2:])

    def prune(self, durable: int) -> None:
        """Delete versions, whoever wrote them, that no run resumed at `durable` would ask for."""
        self.durable = durable
        for client in self.clients():
            self._drop_all_but(client, [v for v in self._on_disk(client) if v > durable])

    def _drop_all_but(self, client: int, newest: list[int]) -> None:
        versions = self._on_disk(client)
        resumed_from = max((v for v in versions if v <= self.durable), default=0)
        for version in versions:
            if version != resumed_from and version not in newest:
                self._path(client, version).unlink(missing_ok=True)
