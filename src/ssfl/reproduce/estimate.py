"""How long a study takes on this device: timed on its own configurations, not guessed.

A few rounds of each arm are trained in a corner and one evaluation made of what comes out. Where
even one round takes long, what clients took so far must do. And how a budget is split: the number
of rounds with which everything fits into it.
"""

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ssfl.algorithms.late import LateOptions
from ssfl.algorithms.options import LocalOptions
from ssfl.config import Config, parse
from ssfl.errors import ConfigError, FederationError
from ssfl.experiment import Quiet, train
from ssfl.federation.messages import Reply
from ssfl.files import write_text
from ssfl.locks import alone, claimed
from ssfl.protocols.judge import evaluate
from ssfl.protocols.options import ProtocolOptions
from ssfl.reproduce.jobs import Job
from ssfl.reproduce.made import release
from ssfl.reproduce.study import evaluation_every
from ssfl.run import Run
from ssfl.tracking import Row

ROUNDS = 3
"""Rounds that are timed; the first only warms up."""
PATIENCE = 60.0
"""Seconds after which a round is not waited for any longer."""
LEAST_ROUNDS = 10
"""With fewer, a budget is spent on some arms rather than on all of them."""
MARGIN = 0.9
"""Share of the budget that is planned for: no timing is exact."""
COST_NOTHING = {
    "local": ("lr", "schedule", "warmup", "weight_decay", "decay_norms", "freeze_statistics"),
    "server": ("rounds", "lr"),
    "evaluation": ("every",),
}
"""Options by which a round, or one evaluation, takes no longer: arms that differ in nothing else
are timed once."""


@dataclass(frozen=True)
class Timing:
    """Seconds that the parts of a run take."""

    setup: float
    """Loading data and building models."""
    warmup: float
    """What the first round takes longer than others."""
    round: float
    judging: float
    """One evaluation beside the training."""
    saving: float
    """One checkpoint."""
    evaluation: float
    """The protocols after training."""
    partial: bool = False
    """A round took too long to be waited for: extrapolated, evaluations not timed."""
    alone: float = 0.0
    """A round in which Θ learns alone, where θ_k begins late."""

    def run(self, config: Config, rounds: int | None = None, *, done: int = 0) -> float:
        """Seconds of a whole run of `rounds` (the configuration's), of which some are done."""
        rounds = config.server.rounds if rounds is None else rounds
        if done >= rounds:
            return self.evaluation
        left, every = rounds - done, evaluation_every(config.evaluation.every, rounds)
        late = config.algorithm
        alone = max(0, late.first_round(rounds) - done) if isinstance(late, LateOptions) else 0
        judged = math.ceil(left / every) if every else 1
        saved = math.ceil(left / config.run.checkpoint_every)
        return (
            self.setup
            + self.warmup
            + alone * self.alone
            + (left - alone) * self.round
            + judged * self.judging
            + saved * self.saving
            + self.evaluation
        )


class TooSlow(Exception):
    """A round is not worth waiting for."""


class Stopwatch(Quiet):
    """A display that only looks at the clock."""

    def __init__(self, local: LocalOptions) -> None:
        self._passed = local.images_of_a_round
        self.begun: list[float] = []
        self.ended: list[float] = []
        self.judged = 0.0
        self.clients: list[tuple[float, float]] = []
        self.images = 0.0

    def start(self, run: Run, clients: int, rounds: int, done: int) -> None:
        asked = min(clients, run.config.server.clients_per_round or clients)
        images = run.facts["train_images"] * run.config.partition.labelled
        self.images = self._passed(round(images * asked / clients), asked)

    def note(self, text: str) -> None:
        """The run itself will say it again."""

    def begin_round(self, round_: int, clients: int) -> None:
        self.begun.append(time.perf_counter())
        self.clients = []

    def reply(self, reply: Reply) -> None:
        passed = self._passed(reply.samples, len(reply.clients))
        self.clients.append((time.perf_counter(), passed))
        waited = time.perf_counter() - self.begun[-1]
        if waited > PATIENCE and len(self.clients) > 1:
            raise TooSlow

    def row(self, row: Row) -> None:
        if row["kind"] == "round":
            self.ended.append(time.perf_counter())
        elif row["kind"] == "evaluation":
            self.judged = time.perf_counter()


def measure(
    config: Config,
    protocols: Sequence[str],
    options: ProtocolOptions,
    folder: Path,
) -> Timing:
    """Train a few rounds of a configuration in `folder`, judge them, and take the times."""
    raw = config.model_dump()
    raw["server"]["rounds"] = min(ROUNDS, config.server.rounds)
    raw["evaluation"]["every"] = 0
    raw["local"]["freeze_statistics"] = 1.0  # or one round of the few would prepare new steps
    if not isinstance(config.algorithm, LateOptions) or not config.algorithm.begin:
        return _measured(parse(raw), folder, protocols, options)
    raw["algorithm"]["begin"] = 0.0
    timing = _measured(parse(raw), folder, protocols, options)
    theta_alone = parse(raw | {"algorithm": {"name": "global-ssfl"}})
    return replace(timing, alone=_measured(theta_alone, folder).round)


def _measured(
    config: Config,
    folder: Path,
    protocols: Sequence[str] = (),
    options: ProtocolOptions | None = None,
) -> Timing:
    shutil.rmtree(folder, ignore_errors=True)
    watch = Stopwatch(config.local)
    began = time.perf_counter()
    try:
        run = train(config, out=folder, display=watch)
        trained = time.perf_counter()
        if protocols:
            evaluate(run, protocols, options=options or ProtocolOptions())
        evaluated = time.perf_counter()
    except TooSlow:
        return _extrapolated(watch, began)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    first, *rest = [end - start for start, end in zip(watch.begun, watch.ended, strict=True)]
    usual = sum(rest) / len(rest) if rest else first
    return Timing(
        setup=watch.begun[0] - began,
        warmup=max(0.0, first - usual),
        round=usual,
        judging=watch.judged - watch.ended[-1],
        saving=trained - watch.judged,
        evaluation=evaluated - trained,
    )


def _extrapolated(watch: Stopwatch, began: float) -> Timing:
    """From the images that clients went through until patience ended."""
    spent = watch.clients[-1][0] - watch.begun[-1]
    seen = sum(images for _, images in watch.clients)
    per_round = spent * watch.images / max(1, seen)
    return Timing(watch.begun[0] - began, 0.0, per_round, 0.0, 0.0, 0.0, partial=True)


def measure_all(
    jobs: Sequence[Job],
    protocols: Callable[[Job], tuple[str, ...]],
    options: ProtocolOptions,
    folder: Path,
    device: str,
    tell: Callable[[str, int, int], None],
) -> tuple[dict[str, Timing], list[str]]:
    """The timing of every arm with something left to do, kept for the next call; and a sentence on
    each that could not be timed, for its clients fail: that is no reason not to run the others."""
    cache = folder / "timing.json"
    arms = {job.arm.name: job for job in reversed(jobs)}
    in_order = sorted(arms.items(), key=lambda item: jobs.index(item[1]))
    keys: dict[str, str] = {}
    failed: list[str] = []
    with _corner(folder / ".timing") as own:
        for place, (name, job) in enumerate(in_order):
            tell(job.arm.label, place, len(arms))
            wanted = protocols(job)
            key = keys[name] = _key(job.config, wanted, options, device)
            if key in _known(cache):
                continue
            try:
                taken = asdict(measure(job.config, wanted, options, own / name))
            except FederationError as error:
                failed.append(f"{job.arm.label} failed while it was timed: {error}")
                continue
            finally:
                release()
            with alone(folder / ".timing" / ".lock"):
                write_text(cache, json.dumps(_known(cache) | {key: taken}, indent=2))
    known = _known(cache)  # what failed may cost the same as another arm, which did not
    return {name: Timing(**known[key]) for name, key in keys.items() if key in known}, failed


@contextmanager
def _corner(folder: Path) -> Iterator[Path]:
    """A place below `folder` to time in, beside those of other processes that are at it just now.
    What processes that were killed have left there is removed."""
    with ExitStack() as ours:
        with alone(folder / ".lock"):  # so that no place is there without being claimed
            for place in filter(Path.is_dir, folder.iterdir()):
                with claimed(place / ".lock") as left:
                    if left:
                        shutil.rmtree(place, ignore_errors=True)
            own = Path(ours.enter_context(TemporaryDirectory(dir=folder)))
            ours.enter_context(claimed(own / ".lock"))
        yield own


def _known(cache: Path) -> dict[str, Any]:
    return json.loads(cache.read_text()) if cache.exists() else {}


def _key(config: Config, protocols: Sequence[str], options: ProtocolOptions, device: str) -> str:
    """Configurations that differ only in what takes no time share a timing."""
    raw = config.model_dump(mode="json")
    for key in ("name", "seed", "paper"):
        raw.pop(key, None)
    for section, names in COST_NOTHING.items():
        for name in names:
            raw[section].pop(name)
    about = [raw, sorted(protocols), options.model_dump(mode="json"), device]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def fitting_rounds(costs: Sequence[tuple[Timing, Config]], seconds: float, most: int) -> int | None:
    """The most rounds with which all runs fit into `seconds`; None where not even one does."""

    def total(rounds: int) -> float:
        return sum(timing.run(config, rounds) for timing, config in costs)

    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if total(middle) <= seconds else (low, middle - 1)
    return low or None


def parse_duration(text: str) -> float:
    """Seconds from '90s', '20min', '1h30min'."""
    units = {"h": 3600.0, "min": 60.0, "m": 60.0, "s": 1.0}
    total, rest = 0.0, text.strip().replace(" ", "")
    while rest:
        number = rest[: len(rest) - len(rest.lstrip("0123456789."))]
        rest = rest[len(number) :]
        unit = rest[: len(rest) - len(rest.lstrip("hmins"))]
        rest = rest[len(unit) :]
        try:
            total += float(number) * units[unit]
        except (KeyError, ValueError):
            raise ConfigError(f"--budget {text}: write it as 90s, 20min or 1h30min") from None
    if total <= 0:
        raise ConfigError(f"--budget {text}: write it as 90s, 20min or 1h30min")
    return total
