"""Runs that are one until their θ_k begin: that part is trained once.

Per-SSFL and BiLevel-SSFL with `algorithm.begin` are Global-SSFL until then. The first of such runs
is stopped between two rounds, its run directory copied for each of the others, and all go on by
themselves: to the same end as if each had come all the way alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ssfl.locks import claimed
from ssfl.reproduce.alike import same_until
from ssfl.reproduce.jobs import Job
from ssfl.run import Run


@dataclass(frozen=True)
class Branch:
    """Where a run parts into several."""

    rounds: int
    """How many are the same."""
    job: Job
    others: tuple[Job, ...]
    """Jobs that have not begun, and go on from there."""

    def part(self) -> list[Job]:
        """Give each of the others what the job's run has learned so far; returns those who took
        it, but for any that another process has begun meanwhile."""
        given = []
        for other in self.others:
            with claimed(other.lock) as ours:
                if ours and not other.place.exists():
                    Run(self.job.place).copy(other.config, other.place)
                    given.append(other)
        return given


def branch_of(job: Job, jobs: Sequence[Job]) -> Branch | None:
    """Where the job's run and others that have not begun will part, if that is still to come."""
    shared = {
        other.name: same_until(job.config, other.config)
        for other in jobs
        if other.name != job.name and other.twin is None and not other.place.exists()
    }
    done = job.rounds_done()
    others = tuple(other for other in jobs if shared.get(other.name, 0) >= max(1, done))
    if job.twin is not None or not others:
        return None
    return Branch(min(shared[other.name] for other in others), job, others)


def given_by(job: Job, earlier: Sequence[Job]) -> Branch | None:
    """The run of an earlier job that this one will go on from."""
    branches = [branch_of(other, [job]) for other in earlier]
    found = [branch for branch in branches if branch is not None]
    return max(found, key=lambda branch: branch.rounds, default=None)
