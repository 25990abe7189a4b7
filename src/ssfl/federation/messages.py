"""What passes between server and clients: small frozen values, nothing else.

A `Task` says what to do and carries Θ; a `Reply` carries Δ, counts and metrics, or a typed
failure. No image and no label has a place in either.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor


class TaskKind(StrEnum):
    """What a client is asked to do."""

    TRAIN = "train"
    EVALUATE = "evaluate"


class Reason(StrEnum):
    """Why a client's work did not count."""

    ERROR = "error"  # its code raised
    LOST = "lost"  # its process or connection is gone
    DEADLINE = "deadline"  # it was too slow
    REFUSED = "refused"  # the server (or the client) would not accept what it was sent


@dataclass(frozen=True)
class Failure:
    """A client's work that did not count, and why, in words for the log."""

    reason: Reason
    detail: str


@dataclass(frozen=True)
class Task:
    """Work for a client. `theta` is the shared part of Θ^(round), float32, of layout `layout`."""

    kind: TaskKind
    round: int
    theta: Tensor
    layout: str
    rate: float = 0.0
    """Local learning rate β of this round."""
    progress: float = 0.0
    """Share of the experiment that is done, 0 to 1."""
    durable: int = 0
    """Rounds completed at the last checkpoint: older personal states will not be asked for."""
    limit: float = 0.0
    """The longest update for each √step that the server lets in (0: it does not know yet)."""
    control: Tensor | None = None
    """SCAFFOLD's server control variate c."""
    folded: dict[int, int] = field(default_factory=dict)
    """SCAFFOLD: of the clients asked, the last round of each whose Δc_k is in c."""

    @property
    def when(self) -> str:
        """Its place in the run, for people."""
        return when(self.kind, self.round)


def when(kind: TaskKind, round_: int) -> str:
    """A task's place in the run for people, who count rounds from one: Θ^(0) is trained in round 1,
    and judged after round 0."""
    return f"round {round_ + 1}" if kind is TaskKind.TRAIN else f"after round {round_}"


@dataclass(frozen=True)
class Joint:
    """Whom a reply speaks for when a site sends the mean of its clients' updates and no single
    one: the reply's Δ and Δc are then means over them, and its counts are sums."""

    clients: tuple[int, ...]
    """In the order they were asked."""
    effective_steps: float = 1.0
    """FedNova's τ_eff over them; 1 for other means."""


@dataclass(frozen=True)
class Reply:
    """A client's answer to a task of the same kind and round (or several clients': `joint`)."""

    client: int
    kind: TaskKind
    round: int
    layout: str = ""
    delta: Tensor | None = None
    """Δ_k = Θ_k − Θ, or nothing where the algorithm sends nothing."""
    samples: int = 0
    """|D_k|: what the update weighs."""
    steps: int = 0
    """Local iterations made."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Means over the local steps, or evaluation figures, by name."""
    control: Tensor | None = None
    """SCAFFOLD's change of the client's control variate."""
    failure: Failure | None = None
    joint: Joint | None = None

    @property
    def clients(self) -> tuple[int, ...]:
        """All clients that this reply speaks for."""
        return (self.client,) if self.joint is None else self.joint.clients

    @property
    def bytes(self) -> int:
        """Of its vectors; the rest is small."""
        return sum(4 * v.numel() for v in (self.delta, self.control) if v is not None)


def failed(client: int, task: Task, reason: Reason, detail: str) -> Reply:
    """The reply of a client whose work did not count."""
    return Reply(client, task.kind, task.round, failure=Failure(reason, detail))
