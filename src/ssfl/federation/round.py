"""A round under way: who was asked, whose work counts, and what it comes to."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ssfl.errors import FederationError
from ssfl.federation.aggregate import Aggregator, fold
from ssfl.federation.messages import Failure, Reason, Reply, Task


@dataclass
class RoundReport:
    """What a round came to."""

    round: int
    rate: float
    asked: int
    all_images: int
    """Those of every client that could have been asked: SCAFFOLD's |D|."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Means over clients, weighted by their samples."""
    clients: list[int] = field(default_factory=list)
    """Those whose work counted, in the order it was folded."""
    late: list[tuple[int, int]] = field(default_factory=list)
    """Whose work of an earlier round came now, and of which."""
    overdue: list[int] = field(default_factory=list)
    """Clients that missed the deadline: their work may come late."""
    failures: dict[str, int] = field(default_factory=dict)
    """How many clients did not count, by reason."""
    images: int = 0
    received: int = 0
    """Bytes of the vectors that came back."""
    update_norm: float = 0.0
    """How far Θ moved."""
    seconds: float = 0.0

    @property
    def accepted(self) -> int:
        """How many clients' work counted."""
        return len(self.clients)


@dataclass
class Round:
    """Replies to one task, folded as they are taken."""

    task: Task
    wanted: int
    """How many of those asked are to count; the others stand in for them."""
    needed: int
    """With how few the round is one."""
    aggregator: Aggregator
    report: RoundReport
    metrics: Sequence[str]
    """The figures that clients report of their training."""
    staleness: float
    """How fast work that comes late loses its weight."""
    late: list[Reply] = field(default_factory=list)
    """Admitted replies to earlier tasks."""
    failures: dict[int, Failure] = field(default_factory=dict)
    """Why clients did not reply when they were last asked."""
    _totals: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def enough(self) -> bool:
        return self.report.accepted >= self.needed

    def may_yet_come(self, client: int) -> bool:
        """Its work failed, and might not if it were asked again."""
        failure = self.failures.get(client)
        return failure is not None and failure.reason is not Reason.REFUSED

    def take(self, reply: Reply) -> None:
        """Count a reply to this round's task, unless it is of a spare that nobody needs."""
        if reply.failure is not None:
            self.failures |= dict.fromkeys(reply.clients, reply.failure)
        elif self.report.accepted < self.wanted:
            self.report.clients += reply.clients
            self._fold(reply)

    def take_late(self) -> None:
        """Count what came late, at a discount."""
        for reply in sorted(self.late, key=lambda reply: (reply.round, reply.client)):
            # Its client may have gone on from the c_k before it: that one stays the true one.
            self._fold(replace(reply, control=None))

    def _fold(self, reply: Reply) -> None:
        lateness = self.task.round - reply.round
        fold(self.aggregator, reply, reply.samples * (1 + lateness) ** -self.staleness)
        self.report.images += reply.samples
        for name in self.metrics:
            self._totals[name] += reply.metrics.get(name, math.nan) * reply.samples

    def close(self) -> None:
        """Put in the report what came of it; too few replies end the run."""
        report, failures = self.report, self.failures
        report.overdue = [
            client for client, why in failures.items() if why.reason is Reason.DEADLINE
        ]
        report.failures = dict(Counter(str(failure.reason) for failure in failures.values()))
        report.metrics = {name: total / report.images for name, total in self._totals.items()}
        if not self.enough:
            reasons = ", ".join(f"{n} {reason}" for reason, n in report.failures.items())
            detail = next(iter(failures.values())).detail if failures else "no reason given"
            raise FederationError(
                f"{self.task.when}: only {report.accepted} of {report.asked} clients replied and "
                f"{self.needed} are needed (server.min_replies); {reasons}, the first: {detail}"
            )
