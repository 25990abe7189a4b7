"""How tasks reach clients, and replies come back. The paper's ComManager.

A communicator knows nothing of learning: it hands a `Task` to `Client.handle` somewhere (in this
process, in another rank, at another site) and streams `Reply`s as they finish. A client that
fails is a reply with a typed reason, never an exception.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from ssfl.federation.messages import Reply, Task


class Communicator(Protocol):
    """What the server knows of a transport."""

    def clients(self) -> Sequence[int]:
        """Ids of the clients that can be asked."""
        ...

    def sizes(self) -> Sequence[int]:
        """|D_k| of these clients, in the same order."""
        ...

    def exchange(
        self, task: Task, clients: Sequence[int], deadline: float | None = None
    ) -> Iterator[Reply]:
        """Give `task` to `clients`; yield each reply as it comes, exactly one per client.

        Clients are started in the order given. After `deadline` seconds whoever is not done is
        yielded as failed by deadline.
        """
        ...

    def close(self) -> None:
        """End what was started; nothing is left running."""
        ...
