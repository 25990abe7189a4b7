"""The pages: a study's README.md, and RESULTS.md over all of them. Paper, ours, difference.

A figure is never put beside another of other rounds without saying so: rounds have a column.
"""

import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ssfl.errors import DataError
from ssfl.evaluation.in_words import HEALTH
from ssfl.files import write_text
from ssfl.report.tables import markdown_table
from ssfl.report.words import duration
from ssfl.reproduce.library import studies, with_small_forms
from ssfl.reproduce.pictures import PICTURES, draw
from ssfl.reproduce.records import Partition, Result
from ssfl.reproduce.results import StudyResult, load_result
from ssfl.reproduce.rows import Row, common_settings
from ssfl.reproduce.study import Arm, Study, figure_title

_NONE = "–"
_MAP = ["study", "name", "repeats", "arms with figures"]
_NEAREST = ["study", "", "figure", "paper", "ours", "difference", "rounds", "seeds", "run as"]
_RULE = ["---", "---", "---", "---:", "---:", "---:", "---:", "---:", "---"]


def write_pages(found: StudyResult, folder: Path, *, pictures: bool = True) -> None:
    """results.json, results.csv, README.md and the pictures of a study."""
    found.save(folder)
    _write_page(found, folder, pictures=pictures)


def _write_page(found: StudyResult, folder: Path, *, pictures: bool = True) -> None:
    if pictures:
        draw(found, folder)
    write_text(folder / "README.md", readme(found, folder))


def readme(found: StudyResult, folder: Path) -> str:
    """A study's page."""
    parts = [f"# {found.study.title}", *_body(found, folder, "")]
    return "\n\n".join(parts) + "\n"


def _body(found: StudyResult, folder: Path, prefix: str) -> list[str]:
    study = found.study
    parts = [f"Repeats {study.repeats}."]
    if study.finding:
        parts.append(f"The paper: {study.finding}")
    if study.note:
        parts.append(study.note)
    if any(r.synthetic for r in found.results) or any(
        p.synthetic for p in found.partitions.values()
    ):
        parts.append(
            "**Synthetic images.** Rows marked *synthetic* were made on a small set of generated "
            "images in GLD-23K's layout, not on GLD-23K: they show that the experiment runs, and "
            "are not to be compared with the paper's figures."
        )
    rows = found.rows()
    if rows:
        common = common_settings(rows)
        if common:
            parts.append(f"**Changed in every run:** {', '.join(f'`{s}`' for s in common)}.")
        parts.append(table(rows, found.study, common))
        brackets = any(set(row.beyond) - set(common) for row in rows)
        bands = any(len(row.seeds) > 1 for row in rows)
        spread = any(row.client_std is not None for row in rows)
        parts.append(
            "Figures of the last round, never the best."
            + " ± is the standard deviation over seeds; bands around curves span them." * bands
            + " *Over clients* is the standard deviation between the clients of a run." * spread
            + " Settings in brackets were in the place of the study's." * brackets
        )
    for arm, part in found.partitions.items():
        sizes = part.sizes
        where = f" of {part.data}" + (" (*synthetic*)" if part.synthetic else "")
        parts.append(
            f"**{study.arm(arm).label}**: {sum(sizes):,} training images{where} over "
            f"{len(sizes)} clients, from {min(sizes):,} to {max(sizes):,} each."
        )
        names = [*["partition_labels.png"] * bool(part.counts), "partition_samples.png"]
        parts += _pictures(folder / arm, names, f"{prefix}{arm}/")
    parts += _pictures(folder, PICTURES, prefix)
    parts += _left(found)
    if study.tried:
        parts.append(f"What was tried:\n\n{study.tried.strip()}")
    if found.results or found.partitions:
        parts.append(_making(found, f"{prefix}results.json"))
    return parts


def _pictures(folder: Path, names: Sequence[str], prefix: str) -> list[str]:
    paths = [folder / name for name in names if (folder / name).is_file()]
    return [f"![{path.stem.replace('_', ' ')}]({prefix}{path.name})" for path in paths]


def table(rows: Sequence[Row], study: Study, common: Sequence[str] = ()) -> str:
    """Paper, ours, difference, as far as there are any; the rounds in every row."""
    paper = any(row.paper is not None for row in rows)
    spread = any(row.client_std is not None for row in rows)
    heads = ["", "figure", *["paper"] * paper, "ours", *["difference"] * paper]
    if study.baseline:
        heads.append(f"against {study.arm(study.baseline).label}")
    heads += ["rounds", "seeds", *["over clients"] * spread]
    lines = [heads, ["---", "---", *["---:"] * (len(heads) - 2)]]
    last = None
    for row in rows:
        label = _label(row, common)
        line = ["" if label == last else label, figure_title(row.figure)]
        line += [_number(row.paper, row.figure)] * paper
        line += [_ours(row), *[_signed(row.difference, row.figure)] * paper]
        line += [_signed(row.gain, row.figure)] * bool(study.baseline)
        line += [_rounds(row, study.rounds), str(len(row.seeds))]
        line += ["" if row.client_std is None else f"± {row.client_std:.4f}"] * spread
        lines.append(line)
        last = label
    return markdown_table(lines)


def _label(row: Row, common: Sequence[str]) -> str:
    more = [f"`{setting}`" for setting in row.beyond if setting not in common]
    more += ["*synthetic*"] if row.synthetic else []
    return row.arm.label + (f" ({', '.join(more)})" if more else "")


def _ours(row: Row) -> str:
    text = _number(row.mean, row.figure)
    return text if row.std is None else f"{text} ± {_number(row.std, row.figure)}"


def _rounds(row: Row, wanted: int | None) -> str:
    """Plain where they are the study's; else against the paper's, where there is a figure of it."""
    if wanted in (None, row.rounds):
        return f"{row.rounds}"
    return f"**{row.rounds}**, not {wanted}" if row.paper is not None else f"**{row.rounds}**"


def _number(value: float | None, figure: str) -> str:
    """Accuracies to four places; label-free figures, of any size, to three digits."""
    if value is None:
        return _NONE
    if figure not in HEALTH:
        return f"{value:.4f}"
    whole = abs(value) >= 99.95  # which three digits round to 100
    return f"{value:.0f}" if whole else f"{value:#.3g}"


def _signed(value: float | None, figure: str) -> str:
    if value is None:
        return _NONE
    return ("−" if value < 0 else "+") + _number(abs(value), figure)


def _left(found: StudyResult) -> list[str]:
    """What was not run, plainly."""
    never = {arm.name for arm in found.not_run()}
    told = [
        one
        for one in found.unfinished
        if one.arm not in never or "(" in one.why or one.why.startswith("failed")
    ]
    explained = {one.arm for one in told}
    lines = [f"- {arm.label}: not run" for arm in found.not_run() if arm.name not in explained]
    lines += [f"- {found.study.arm(one.arm).label}, {one.which}: {one.why}" for one in told]
    return ["Not run:\n\n" + "\n".join(lines)] if lines else []


def _making(found: StudyResult, where: str) -> str:
    """How figures and pictures were made, each way once."""
    ways: dict[tuple[str, ...], list[Result]] = {}
    for result in found.results:
        ways.setdefault((result.command, _program(result), result.device), []).append(result)
    lines = []
    for (command, program, device), group in ways.items():
        seconds = sum(r.seconds + r.evaluation_seconds for r in group)
        runs = "1 run" if len(group) == 1 else f"{len(group)} runs"
        lines.append(f"- `{command}`: {runs}, {duration(seconds)} on {device}; {program}")
        of = {r.arm: r.theta_of for r in group if r.theta_of}
        lines[-1] += "".join(f"; {arm} by the Θ of {theirs}'s run" for arm, theirs in of.items())
    drawn = {(part.command, _program(part)) for part in found.partitions.values()}
    lines += [f"- `{command}`; {program}" for command, program in sorted(drawn)]
    figures = "every figure, with seed, seconds and per-client values"
    what = figures if found.results else "the same in numbers"
    lines.append(f"- {what}: [{where}]({where})")
    if gone := ", ".join(dict.fromkeys(result.arm for result in found.former)):
        lines.append(f"- there too, of arms that have left the study: {gone}")
    return "Made by:\n\n" + "\n".join(lines)


def _program(made: Result | Partition) -> str:
    commit = (made.commit or "unknown").replace("+", " with changes")
    return f"ssfl {made.version}, commit {commit}"


def collect(folder: str | Path, out: str | Path) -> list[StudyResult]:
    """One page of all results.json below `folder`; what was not run is listed as not run.

    The package's studies are as they are now, others as in the first of their files. The pages
    and pictures beside each results.json are made anew as well, where they may be written.
    """
    folder, out = Path(folder), Path(out)
    there = [(path, found) for path in _below(folder) if (found := load_result(path))]
    if not there:
        raise DataError(f"there is no results.json below {folder}: run `ssfl reproduce NAME` first")
    chapters = [
        _Chapter(StudyResult(name=name, study=study)) for name, study in with_small_forms().items()
    ]
    for path, found in there:
        chapter = next((chapter for chapter in chapters if chapter.is_of(found)), None)
        if chapter is None:
            chapter = _Chapter(StudyResult(name=found.name, study=found.study))
            chapters.append(chapter)
        chapter.whole = chapter.whole.joined(found)
        chapter.paths.append(path)
        if os.access(path.parent, os.W_OK):  # but not results.json: a study may be adding to it
            _write_page(found.model_copy(update={"study": chapter.whole.study}), path.parent)
    whole = studies()  # a small form that was not run is not missed
    listed = [chapter for chapter in chapters if chapter.paths or chapter.whole.name in whole]
    parts = [
        "# Results",
        "What `ssfl reproduce` found, beside the paper's figures. Every figure comes from a "
        "results.json that says by which command, commit, seed, device and in how many rounds and "
        "seconds it was made. Figures are of the last round; a row whose rounds are not the "
        "paper's says so.",
        markdown_table([_MAP, ["---"] * len(_MAP), *(chapter.line() for chapter in listed)]),
        *_nearest([chapter.whole for chapter in chapters if chapter.paths]),
    ]
    for chapter in chapters:
        if chapter.paths:
            parts += chapter.parts(out.parent)
    write_text(out, "\n\n".join(parts) + "\n")
    return [chapter.whole for chapter in chapters if chapter.paths]


def _nearest(studies: Sequence[StudyResult]) -> list[str]:
    """The paper's figures, each with ours of the run that came nearest to it or went beyond. A run
    that repeats several is as good as the worst of them, so that these are of one run."""
    lines = []
    for found in studies:
        rows = found.rows()
        worst: dict[tuple[Any, ...], float] = {}
        for row in rows:
            if row.difference is not None:
                worst[row.runs] = min(row.difference, worst.get(row.runs, math.inf))
        for (recipe, figure, paper), arm in _claims(found.study).items():
            same = [
                row
                for row in rows
                if row.difference is not None
                and (row.arm.recipe, row.figure, row.paper) == (recipe, figure, paper)
            ]
            line = [f"`{found.name}`", arm.label, figure_title(figure), _number(paper, figure)]
            if same:
                best = max(same, key=lambda row: worst[row.runs])
                how = _label(best, ())
                line += [_ours(best), _signed(best.difference, figure)]
                line += [_rounds(best, found.study.rounds), str(len(best.seeds))]
                line += ["" if how == arm.label else how]
            else:
                line += ["**not run**", "", "", "", ""]
            lines.append(line)
    if not lines:
        return []
    return [
        "**The paper's figures, and the nearest to them here.** Where several settings repeat one "
        "figure, this is the one that came highest; where they repeat two, the one whose worse "
        "figure did, beside the paper's. The studies below have all of them.",
        markdown_table([_NEAREST, _RULE, *lines]),
    ]


def _claims(study: Study) -> dict[tuple[str, str, float], Arm]:
    """The paper's figures, and the first arm that repeats each: others of its recipe are the same
    experiment with something changed."""
    claims: dict[tuple[str, str, float], Arm] = {}
    for arm in study.arms:
        for figure, value in arm.paper.items():
            claims.setdefault((arm.recipe, figure, value), arm)
    return claims


@dataclass
class _Chapter:
    """A study on the page of all of them, and where its results lie."""

    whole: StudyResult
    paths: list[Path] = field(default_factory=list)

    def is_of(self, found: StudyResult) -> bool:
        return self.whole.name == found.name and self.whole.study.akin(found.study)

    def line(self) -> list[str]:
        """Its line on the page's map."""
        study = self.whole.study
        if not self.paths:
            return [study.title, f"`{self.whole.name}`", study.repeats, "**not run**"]
        anchor = re.sub(r"[^\w\- ]", "", study.title.lower()).replace(" ", "-")  # as GitHub's
        there = f"{len(study.arms) - len(self.whole.not_run())} of {len(study.arms)}"
        return [f"[{study.title}](#{anchor})", f"`{self.whole.name}`", study.repeats, there]

    def parts(self, start: Path) -> list[str]:
        head = f"## {self.whole.study.title}"
        first, *others = (path.parent for path in self.paths)
        links = [_link(folder, start) for folder in others]
        also = [f"Also from [{link}results.json]({link}results.json)." for link in links]
        return [head, *_body(self.whole, first, _link(first, start)), *also]


def _below(folder: Path) -> Iterable[Path]:
    found = folder.rglob("results.json")
    return sorted(found, key=lambda path: (len(path.parts), path))


def _link(target: Path, start: Path) -> str:
    relative = os.path.relpath(target, start)
    return "" if relative == "." else f"{Path(relative).as_posix()}/"
