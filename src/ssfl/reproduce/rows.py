"""Lines of a study's table, and which of them are compared, come first and are quoted."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from ssfl.reproduce.study import Arm
from ssfl.section import Section


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


def with_gains(rows: Sequence[Row], baseline: str) -> list[Row]:
    """With what each gains over the arm `baseline`, seed by seed."""
    bases = [row for row in rows if row.arm.name == baseline]

    def compared(row: Row) -> Row:
        asked_alike = [base for base in bases if base.asked == row.asked]
        # Of several, the one of the same time, else the one that is as the study says.
        asked_alike.sort(key=lambda base: base.outdated != row.outdated)
        theirs = asked_alike[0].by_seed if asked_alike else {}
        gains = [value - theirs[seed] for seed, value in row.by_seed.items() if seed in theirs]
        return row.model_copy(update={"gain": statistics.fmean(gains)}) if gains else row

    return [row if row.arm.name == baseline else compared(row) for row in rows]


def best_first(rows: Sequence[Row], figure: str) -> list[Row]:
    """Most rounds first: figures of other rounds are not to be mixed; then the best arms."""
    best = {row.runs: row.mean for row in rows if row.figure == figure}

    def place(row: Row) -> tuple[float, float]:
        return -row.rounds, -best.get(row.runs, -math.inf)

    return sorted(rows, key=place)


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
