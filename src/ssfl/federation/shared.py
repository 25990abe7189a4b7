"""Clients' states where several processes look after the same clients.

Any worker may serve any client in the next round, so a state is on disk, written atomically,
before its reply leaves the worker; and a worker looks there before it starts.
"""

from collections.abc import Iterable
from pathlib import Path

from ssfl.federation.store import StateStore


class SharedStore(StateStore):
    """A store that keeps nothing to itself: every state goes through to the shared folder, and is
    pruned there whoever wrote it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, limit=0)  # with no room in memory, a state is written at once
        self.durable = 0

    def _prunable(self) -> Iterable[int]:
        return self.clients()
