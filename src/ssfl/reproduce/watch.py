"""A plan, whoever watches it being carried out, and the clock that may end it."""

import logging
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from ssfl.config import parse
from ssfl.errors import ConfigError
from ssfl.experiment import Display, Quiet
from ssfl.federation.messages import Reply
from ssfl.protocols.bench import Progress, silent
from ssfl.reproduce.alike import differences, judging
from ssfl.reproduce.branches import Branch, given_by
from ssfl.reproduce.estimate import Timing
from ssfl.reproduce.jobs import Job, comes_with
from ssfl.reproduce.records import Result
from ssfl.reproduce.study import Study
from ssfl.run import Run
from ssfl.tracking import Row

log = logging.getLogger(__name__)


@dataclass
class Plan:
    """What is about to be run, and how long it takes."""

    name: str
    study: Study
    folder: Path
    jobs: list[Job]
    timings: dict[str, Timing] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What the user should know before it starts."""

    def seconds(self, job: Job) -> float | None:
        """What is left of a job; None where nothing was timed."""
        if self.is_done(job):
            return 0.0
        timing = self.timings.get(job.arm.name)
        done = job.rounds_done()
        if comes_with(job, self._before(job)):
            done = job.config.server.rounds
        elif (branch := self.given(job)) is not None:
            done = branch.rounds
        return timing.run(job.config, done=done) if timing else None

    def given(self, job: Job) -> Branch | None:
        """The run of an earlier job that this one, which has not begun, will go on from."""
        begun = job.place.exists() or job.twin is not None
        return None if begun else given_by(job, self._before(job))

    def _before(self, job: Job) -> list[Job]:
        return self.jobs[: self.jobs.index(job)]

    def total(self) -> float | None:
        """What is left of all that was timed; None where nothing was."""
        parts = [self.seconds(job) for job in self.jobs]
        return None if None in parts and not self.timings else sum(part or 0.0 for part in parts)

    @property
    def at_least(self) -> bool:
        """`total` is too little: a round was not waited for, or an arm could not be timed."""
        timed = [self.timings.get(job.arm.name) for job in self.unfinished()]
        return any(timing is None or timing.partial for timing in timed)

    def recorded(self, job: Job) -> Result | None:
        """A job's result, if it was trained, judged as the study says and written down."""
        if not (job.record.exists() and job.trained):
            return None
        try:
            result = Result.model_validate_json(job.record.read_bytes())
            same = not differences(parse(result.config), job.config)
        except (ValidationError, ConfigError):  # broken, or another version's: it is judged again
            return None
        there = result.figures.keys() >= set(self.study.figures_of(job.arm))
        options = self.study.options.model_dump(mode="json")
        alike = result.options is None or judging(result.options) == judging(options)
        return result if there and same and alike else None

    def is_done(self, job: Job) -> bool:
        return self.recorded(job) is not None

    def unfinished(self) -> list[Job]:
        return [job for job in self.jobs if not self.is_done(job)]


class Watch(Protocol):
    """What watches a study: a terminal, or nothing."""

    def timing(self, label: str, place: int, total: int) -> None: ...

    def plan(self, plan: Plan) -> None: ...

    def begin(self, job: Job, place: int, total: int) -> Display: ...

    def evaluation(self, job: Job) -> AbstractContextManager[Progress]: ...

    def failed(self, job: Job, why: str) -> None: ...

    def say(self, text: str) -> None: ...


class Unwatched:
    """Shows nothing; what matters goes to the log."""

    def timing(self, label: str, place: int, total: int) -> None: ...

    def plan(self, plan: Plan) -> None: ...

    def begin(self, job: Job, place: int, total: int) -> Display:
        return Quiet()

    def evaluation(self, job: Job) -> AbstractContextManager[Progress]:
        return nullcontext(silent)

    def failed(self, job: Job, why: str) -> None:
        log.warning("%s: %s", job.name, why)

    def say(self, text: str) -> None:
        log.info(text)


class OutOfTime(KeyboardInterrupt):
    """The budget is spent in the midst of a run, which saves itself as on Ctrl-C."""


class Parting(KeyboardInterrupt):
    """A run has come to where others go on from it, and saves itself as on Ctrl-C."""


class Clock:
    """How much of the budget is left."""

    def __init__(self, budget: float | None) -> None:
        self._end = None if budget is None else time.perf_counter() + budget

    def left(self) -> float:
        return float("inf") if self._end is None else self._end - time.perf_counter()


class Until:
    """A display that ends a run between two rounds when time is up, or after so many rounds."""

    def __init__(
        self, display: Display, clock: Clock, reserve: float, rounds: int | None = None
    ) -> None:
        self._display, self._clock, self._reserve = display, clock, reserve
        self._rounds = rounds

    def start(self, run: Run, clients: int, rounds: int, done: int) -> None:
        self._display.start(run, clients, rounds, done)

    def begin_round(self, round_: int, clients: int) -> None:
        if self._clock.left() < self._reserve:
            raise OutOfTime
        if round_ == self._rounds:
            raise Parting
        self._display.begin_round(round_, clients)

    def reply(self, reply: Reply) -> None:
        self._display.reply(reply)

    def row(self, row: Row) -> None:
        self._display.row(row)

    def note(self, text: str) -> None:
        self._display.note(text)

    def stop(self) -> None:
        self._display.stop()
