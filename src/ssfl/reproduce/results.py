"""What came out of a study: every figure with all that is needed to make it again.

`results.json` is complete in itself: tables, pictures and the page of all studies are made from it
alone. Results of several machines can be put together; the same run counts once. Runs that were not
trained and judged alike are never averaged, and a row says in what it is not as its study says.
"""

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from ssfl.errors import CheckpointError, ConfigError
from ssfl.files import write_text
from ssfl.report.tables import csv_text
from ssfl.reproduce.alike import changed, judging, training
from ssfl.reproduce.records import Partition, Result, Unfinished
from ssfl.reproduce.rows import Row, best_first, quoted, with_gains
from ssfl.reproduce.study import Arm, Study
from ssfl.section import Section


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
        found = with_gains(found, self.study.baseline)
        return best_first(found, self.study.sort) if self.study.sort else found

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
