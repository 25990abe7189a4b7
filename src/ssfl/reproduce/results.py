"""What came out of a study: every figure with all that is needed to make it again.

`results.json` is complete in itself: tables, pictures and the page of all studies are made from it
alone. Results of several machines can be put together; the same run counts once. Runs that were not
trained and judged alike are never averaged, and a row says in what it is not as its study says.
"""

import json
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from ssfl.errors import CheckpointError, ConfigError
from ssfl.files import write_text
from ssfl.protocols.scores import Score
from ssfl.report.tables import csv_text
from ssfl.reproduce.alike import changed, judging, training
from ssfl.reproduce.study import Arm, Study
from ssfl.section import Section


class Figure(Section):
    """One figure of one run."""

    value: float
    n: int = 1
    """Test images or clients behind it."""
    over: Literal["images", "clients", "features"] = "images"
    ci95: float | None = None
    std: float | None = None
    """Over clients."""
    weighted_mean: float | None = None
    """Over clients, by their test images."""
    clients: dict[int, float] = Field(default_factory=dict)
    """Every client's own."""

    @classmethod
    def of(cls, score: Score) -> "Figure":
        return cls(
            value=score.value,
            n=score.n,
            over=score.over,
            ci95=score.ci95,
            std=score.std,
            weighted_mean=score.weighted_mean,
            clients=score.clients,
        )


class Result(Section):
    """One run of one arm: what it was, what came out, and how it was made."""

    arm: str
    seed: int
    rounds: int
    settings: tuple[str, ...] = ()
    """What was asked for beyond the study's own settings."""
    synthetic: bool = False
    """On images made in the place of the real ones."""
    data: str = ""
    clients: int = 0
    train_images: int = 0
    figures: dict[str, Figure]
    health: dict[str, float | None] = Field(default_factory=dict)
    """Label-free figures of Θ."""
    curve: dict[str, list[float | None]] = Field(default_factory=dict)
    """Loss and indicators against the rounds done."""
    seconds: float = 0.0
    """In training."""
    evaluation_seconds: float = 0.0
    """Between rounds and at the end."""
    command: str = ""
    commit: str | None = None
    version: str = ""
    device: str = ""
    torch: str = ""
    finished: str = ""
    run: str = ""
    """Its run directory, as seen from where results.json is."""
    config: dict[str, Any] = Field(default_factory=dict)
    """As it was trained."""
    options: dict[str, Any] | None = None
    """As it was judged, where that was noted."""

    @property
    def key(self) -> tuple[str, int, int, tuple[str, ...], bool, str]:
        """Two results with the same key are the same run of the same experiment."""
        return self.arm, self.seed, self.rounds, self.settings, self.synthetic, self.trained_as

    @property
    def trained_as(self) -> str:
        """The same for all runs of one experiment, whatever their seeds."""
        return json.dumps(training(self.config)) if self.config else ""


class Unfinished(Section):
    """A run that was asked for and is not there."""

    arm: str
    seed: int
    rounds: int | None = None
    """None where that was not noted."""
    settings: tuple[str, ...] = ()
    why: str

    @property
    def which(self) -> str:
        """In words, but for the arm."""
        rounds = [] if self.rounds is None else [f"{self.rounds} rounds"]
        return ", ".join([f"seed {self.seed}", *rounds, *(f"`{s}`" for s in self.settings)])

    def is_of(self, other: "Result | Unfinished") -> bool:
        """The same run; one whose rounds were not noted may be of any."""
        if (self.arm, self.seed) != (other.arm, other.seed):
            return False
        return self.rounds is None or (self.rounds, self.settings) == (other.rounds, other.settings)


class Partition(Section):
    """Who holds what, where a study only shows that."""

    data: str
    synthetic: bool = False
    sizes: list[int]
    classes: list[str] = Field(default_factory=list)
    counts: list[list[int]] = Field(default_factory=list)
    """Images of each class, client by client."""
    command: str = ""
    commit: str | None = None
    version: str = ""


class Row(Section):
    """A line of a table: one figure of one arm, over its seeds."""

    arm: Arm
    figure: str
    rounds: int
    settings: tuple[str, ...]
    """What was asked for beyond the study's own settings."""
    outdated: tuple[str, ...]
    """What the study, its recipe or its evaluation said otherwise then."""
    synthetic: bool
    values: tuple[float, ...]
    seeds: tuple[int, ...]
    paper: float | None
    client_std: float | None
    """Spread over clients, the mean over seeds."""
    gain: float | None = None
    """Beyond the study's baseline, of the same rounds, settings and seeds."""

    @property
    def beyond(self) -> tuple[str, ...]:
        """All that is not as the study says now."""
        return *self.settings, *self.outdated

    @property
    def asked(self) -> tuple[Any, ...]:
        """What two rows must share to be compared."""
        return self.figure, self.rounds, self.settings, self.synthetic

    @property
    def runs(self) -> tuple[Any, ...]:
        """What rows of the same runs share."""
        return self.arm.name, self.rounds, self.beyond, self.synthetic

    @property
    def by_seed(self) -> dict[int, float]:
        return dict(zip(self.seeds, self.values, strict=True))

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        """Over seeds."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours less the paper's; on other images than the paper's there is nothing to compare."""
        other = self.synthetic or any(s.startswith("data.source") for s in self.beyond)
        return None if self.paper is None or other else self.mean - self.paper


class StudyResult(Section):
    """All that is known of a study."""

    version: Literal[1] = 1
    name: str
    study: Study
    results: list[Result] = Field(default_factory=list)
    former: list[Result] = Field(default_factory=list)
    """Of arms that have left the study: kept, for they may come back, and not shown."""
    partitions: dict[str, Partition] = Field(default_factory=dict)
    unfinished: list[Unfinished] = Field(default_factory=list)

    def rows(self) -> list[Row]:
        """A row for each arm, number of rounds and way of training, and for each of its figures."""
        found: list[Row] = []
        for arm in self.study.arms:
            groups: dict[tuple[Any, ...], list[Result]] = {}
            for result in self.results:
                if result.arm == arm.name:
                    asked = -result.rounds, result.settings, result.synthetic
                    key = *asked, self.outdated(result), result.trained_as
                    groups.setdefault(key, []).append(result)
            for _, group in sorted(groups.items()):
                found += self._rows_of(arm, sorted(group, key=lambda r: r.seed))
        found = self._compared(found)
        return self._best_first(found) if self.study.sort else found

    def _compared(self, rows: list[Row]) -> list[Row]:
        """With what each gains over the baseline, seed by seed."""
        bases = [row for row in rows if row.arm.name == self.study.baseline]

        def compared(row: Row) -> Row:
            asked_alike = [base for base in bases if base.asked == row.asked]
            # Of several, the one of the same time, else the one that is as the study says.
            asked_alike.sort(key=lambda base: base.outdated != row.outdated)
            theirs = asked_alike[0].by_seed if asked_alike else {}
            gains = [value - theirs[seed] for seed, value in row.by_seed.items() if seed in theirs]
            return row.model_copy(update={"gain": statistics.fmean(gains)}) if gains else row

        return [row if row.arm.name == self.study.baseline else compared(row) for row in rows]

    def _best_first(self, rows: list[Row]) -> list[Row]:
        """Most rounds first: figures of other rounds are not to be mixed; then the best arms."""
        key = self.study.sort
        best = {row.runs: row.mean for row in rows if row.figure == key}

        def place(row: Row) -> tuple[float, float]:
            return -row.rounds, -best.get(row.runs, -math.inf)

        return sorted(rows, key=place)

    def _rows_of(self, arm: Arm, group: Sequence[Result]) -> Iterable[Row]:
        for figure in self.study.figures_of(arm):
            there = [r for r in group if figure in r.figures]
            if not there:
                continue
            spread = [s for r in there if (s := r.figures[figure].std) is not None]
            yield Row(
                arm=arm,
                figure=figure,
                rounds=there[0].rounds,
                settings=there[0].settings,
                outdated=self.outdated(there[0]),
                synthetic=there[0].synthetic,
                values=tuple(r.figures[figure].value for r in there),
                seeds=tuple(r.seed for r in there),
                paper=arm.paper.get(figure),
                client_std=statistics.fmean(spread) if spread else None,
            )

    def outdated(self, result: Result) -> tuple[str, ...]:
        """What the study, its recipe or its evaluation said otherwise when a run was made."""
        now = self.study.options.model_dump(mode="json")
        judged = changed(judging(result.options or now), judging(now))
        return *self._trained_otherwise(result), *(f"options.{setting}" for setting in judged)

    def _trained_otherwise(self, result: Result) -> tuple[str, ...]:
        if not result.config:
            return ()
        arm = self.study.arm(result.arm)
        try:
            config = self.study.config(
                arm, name=arm.name, seed=0, rounds=result.rounds, settings=result.settings
            )
        except ConfigError:  # its recipe is elsewhere, or its settings are no longer known
            return ()
        found = changed(training(result.config), training(config.model_dump(mode="json")))
        made_up = ("data.",) if result.synthetic else ()
        return tuple(setting for setting in found if not setting.startswith(made_up))

    def not_run(self) -> list[Arm]:
        """Arms of which nothing is known."""
        there = {result.arm for result in self.results} | set(self.partitions)
        return [arm for arm in self.study.arms if arm.name not in there]

    def value(self, arm: str, figure: str) -> float:
        """A figure's mean over seeds, in the row to quote."""
        found = quoted(self.rows()).get((arm, figure))
        if found is None:
            raise KeyError(f"{figure} of {arm} was not measured")
        return found.mean

    def joined(self, other: "StudyResult") -> "StudyResult":
        """With what another machine found, or this one before; what both have is taken from here.

        No run is lost, whatever became of its arm; a partition is drawn again at once.
        """
        arms = {arm.name for arm in self.study.arms}
        known: dict[Any, Result] = {}
        for result in (*self.results, *self.former, *other.results, *other.former):
            known.setdefault(result.key, result)
        results = sorted((r for r in known.values() if r.arm in arms), key=self._order)
        parts = {name: p for name, p in other.partitions.items() if name in arms}
        there = [r for r in results if not self.outdated(r)]
        theirs = [u for u in other.unfinished if u.arm in arms]
        theirs = [u for u in theirs if not any(u.is_of(ours) for ours in self.unfinished)]
        left = [u for u in (*theirs, *self.unfinished) if not any(map(u.is_of, there))]
        return self.model_copy(
            update={
                "results": results,
                "former": [r for r in known.values() if r.arm not in arms],
                "partitions": parts | self.partitions,
                "unfinished": left,
            }
        )

    def _order(self, result: Result) -> tuple[Any, ...]:
        names = [arm.name for arm in self.study.arms]
        return names.index(result.arm), -result.rounds, result.settings, result.seed

    def save(self, folder: Path) -> None:
        """Write results.json and results.csv."""
        text = json.dumps(self.model_dump(mode="json"), indent=1, allow_nan=False)
        write_text(folder / "results.json", _short_lists(text) + "\n")
        write_text(folder / "results.csv", self.csv())

    def csv(self) -> str:
        """One line per figure of each run; of a partition, one per client."""
        lines: list[dict[str, Any]] = []
        for result in self.results:
            arm = self.study.arm(result.arm)
            settings = " ".join((*result.settings, *self.outdated(result)))
            for name, figure in result.figures.items():
                lines.append(
                    {
                        "study": self.name,
                        "arm": arm.name,
                        "label": arm.label,
                        "settings": settings,
                        "synthetic": result.synthetic,
                        "seed": result.seed,
                        "rounds": result.rounds,
                        "figure": name,
                        "value": figure.value,
                        "std_over_clients": figure.std,
                        "weighted_mean": figure.weighted_mean,
                        "paper": arm.paper.get(name),
                        "study_rounds": self.study.rounds,
                        "seconds": round(result.seconds, 1),
                        "device": result.device,
                        "commit": result.commit,
                    }
                )
        for name, part in self.partitions.items():
            for client, size in enumerate(part.sizes):
                classes = part.counts[client] if part.counts else []
                counts = dict(zip(part.classes, classes, strict=True))
                lines.append({"study": self.name, "arm": name, "client": client, "images": size})
                lines[-1] |= counts
        return csv_text(lines)


def quoted(rows: Iterable[Row]) -> dict[tuple[str, str], Row]:
    """The row that speaks for each arm and figure: one that is as the study says now, on real
    images, before all others; then the one of most rounds."""
    found: dict[tuple[str, str], Row] = {}
    for row in sorted(rows, key=lambda row: (bool(row.beyond), row.synthetic, -row.rounds)):
        found.setdefault((row.arm.name, row.figure), row)
    return found


def common_settings(rows: Sequence[Row]) -> tuple[str, ...]:
    """What every row has in place of what the study says: to be said once, not in each."""
    first = rows[0].beyond if rows else ()
    return tuple(setting for setting in first if all(setting in row.beyond for row in rows))


def _short_lists(text: str) -> str:
    """Lists of numbers on one line: a curve is not worth a page."""
    numbers = re.compile(r"\[\s+([-+\d.,eE\s]|null)+\]")
    return numbers.sub(lambda found: re.sub(r"\s+", " ", found[0]), text)


def load_result(path: Path) -> StudyResult | None:
    """What `save` wrote, or None where there is nothing yet."""
    if not path.exists():
        return None
    try:
        return StudyResult.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{path} cannot be read ({where}: {first['msg']}): move it away, and run again"
        ) from None
