"""The page about several runs: their curves together, their figures side by side, and the settings
in which they differ; the same tables in Markdown and CSV."""

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ssfl.data.decode import printable
from ssfl.errors import ConfigError
from ssfl.evaluation.in_words import HEALTH
from ssfl.files import write_text
from ssfl.protocols.scores import GROUPS, Score, title
from ssfl.report import parts
from ssfl.report.charts import Number, Series, colour, line_chart, percent, plain
from ssfl.report.record import Record
from ssfl.report.tables import csv_text, markdown_table
from ssfl.report.words import clients, duration, named, rounds
from ssfl.run import Run
from ssfl.section import flat


def write_comparison(runs: Sequence[Run | str | Path], out: str | Path) -> list[Path]:
    """Write comparison.html, comparison.md and comparison.csv into `out`; a run counts once."""
    if isinstance(runs, str):
        runs = [runs]
    opened = [run if isinstance(run, Run) else Run(run) for run in runs]
    records = [Record(run) for run in {run.path.resolve(): run for run in opened}.values()]
    if len(records) < 2:
        raise ConfigError("a comparison needs at least two runs")
    names, folder = _distinct(records), Path(out)
    contents = {
        "comparison.html": _page(records, names, folder),
        "comparison.md": markdown(records, names),
        "comparison.csv": _csv(records, names),
    }
    for name, content in contents.items():
        write_text(folder / name, content)
    return [folder / name for name in contents]


def markdown(records: Sequence[Record], names: Sequence[str]) -> str:
    """What the runs were, figures, then settings that differ, a column for each run."""
    names = [name.replace("<", "\\<") for name in names]  # which would begin a tag
    pairs = zip(names, records, strict=True)
    blocks = ["".join(f"- {name}: {_about(record)}\n" for name, record in pairs)]
    tables = [(heading, rows) for heading, rows in _figures(records) if rows]
    tables.append(("Settings that differ", _differences(records)))
    for heading, rows in tables:
        if rows:
            lines = [["", *names], ["---", *["---:"] * len(names)], *rows]
            blocks.append(f"**{heading}**\n\n{markdown_table(lines)}\n")
    return "\n".join([*blocks, f"{_note(records, names)}\n"])


def _note(records: Sequence[Record], names: Sequence[str]) -> str:
    note = (
        "The figure, ± the half-width of its 95 % interval. Means over clients are plain, as in "
        "the paper; figures are of each run's last round."
    )
    pairs = zip(names, records, strict=True)
    means = ", ".join(name for name, record in pairs if record.health_of_clients)
    return f"{note} Health is of the shared encoder" + (
        f"; of {means} it is the mean over clients' own." if means else "."
    )


def _about(record: Record) -> str:
    """A run in a line."""
    config, spent = record.run.config, sum(row.get("seconds") or 0 for row in record.rounds)
    return (
        f"{named(config.algorithm.name)} with {named(config.ssl.method)} on "
        f"{named(record.facts['data'])}, {clients(record)}, "
        f"{rounds(record)} in {duration(spent)}"
    )


def _page(records: Sequence[Record], names: Sequence[str], folder: Path) -> str:
    tables = [
        f"<h3>{escape(heading)}</h3>" + parts.table(["", *names], rows)
        for heading, rows in _figures(records)
        if rows
    ]
    note = f'<p class="lead">{escape(_note(records, names))}</p>'
    differences = _differences(records)
    content = (
        parts.section("curves", "How they went", _curves(records, names))
        + parts.section("results", "Results", *tables, note if tables else "")
        + parts.section(
            "settings",
            "Settings that differ",
            parts.table(["", *names], differences) if differences else "",
        )
    )
    lead = _runs(records, names, folder)
    return parts.page(f"{len(records)} runs compared", lead, content)


def _runs(records: Sequence[Record], names: Sequence[str], folder: Path) -> str:
    items = []
    for i, (record, name) in enumerate(zip(records, names, strict=True)):
        page = record.run.path / "report.html"
        text = escape(name)
        if page.exists():
            text = f'<a href="{quote(os.fsencode(os.path.relpath(page, folder)))}">{text}</a>'
        mark = colour(i, len(records))
        items.append(f"<li><i {mark}></i>{text}: {escape(_about(record))}</li>")
    return f'<ul class="legend runs">{"".join(items)}</ul>'


def _curves(records: Sequence[Record], names: Sequence[str]) -> str:
    wanted: list[tuple[str, str, Number]] = [
        ("loss", "Training loss", plain),
        ("knn_mean", "kNN accuracy, mean over clients", percent),
        ("knn_global", "kNN accuracy, shared encoder", percent),
    ]
    wanted += [(key, figure.title, plain) for key, figure in HEALTH.items()]
    figures = []
    for key, text, number in wanted:
        series = [
            Series(name, _curve(record, key), i, of=len(records))
            for i, (record, name) in enumerate(zip(records, names, strict=True))
        ]
        series = [one for one in series if one.points]
        if any(len(one.points) > 1 for one in series):  # else there are only the results
            legend = [(one.name, one.colour) for one in series]
            drawing = line_chart(series, text, number=number)
            figures.append(parts.figure(key, text, drawing, legend=legend, of=len(records)))
    return parts.grid(*figures)


def _curve(record: Record, key: str) -> list[tuple[float, float]]:
    if key in HEALTH:
        return record.health_curve(key)
    return record.curve("round" if key == "loss" else "evaluation", key)


def _figures(records: Sequence[Record]) -> list[tuple[str, list[list[str]]]]:
    """Tables of figures: a heading, and rows of a title and a cell for each run."""
    by_run = [{score.name: score for score in record.scores} for record in records]
    order: dict[str, Score] = {}
    for scores in by_run:
        order |= {name: score for name, score in scores.items() if name not in order}
    tables = []
    for over, heading in GROUPS.items():
        rows = [
            [title(name), *(_cell(scores.get(name)) for scores in by_run)]
            for name, score in order.items()
            if score.over == over
        ]
        tables.append((heading, rows))
    health = [
        [figure.title, *(_plain(record.health(record.last, key)) for record in records)]
        for key, figure in HEALTH.items()
    ]
    tables.append(("Health, without labels", [row for row in health if any(row[1:])]))
    return tables


def _cell(score: Score | None) -> str:
    if score is None:
        return ""
    return percent(score.value) + ("" if score.ci95 is None else f" ± {100 * score.ci95:.1f}")


def _plain(value: float | None) -> str:
    return "" if value is None else plain(value)


def _differences(records: Sequence[Record]) -> list[list[str]]:
    """Settings that are not the same in all runs (the paper's own figures are none)."""
    dumps = [record.run.config.model_dump(mode="json", exclude={"paper"}) for record in records]
    runs = [flat(dump) for dump in dumps]
    keys = dict.fromkeys(key for settings in runs for key in settings)
    rows = []
    for key in keys:
        values = [settings.get(key) for settings in runs]
        if any(value != values[0] for value in values):
            rows.append([key, *("" if value is None else str(value) for value in values)])
    return rows


def _csv(records: Sequence[Record], names: Sequence[str]) -> str:
    """A line for each run: what it was, every figure with its interval, health, seconds."""
    lines = []
    for record, name in zip(records, names, strict=True):
        config = record.run.config
        line: dict[str, Any] = {
            "run": name,
            "path": printable(str(record.run.path)),
            "algorithm": config.algorithm.name,
            "method": config.ssl.method,
            "data": record.facts["data"],
            "clients": record.clients,
            "rounds": record.done,
            "seed": config.seed,
        }
        for score in record.scores:
            line |= {score.name: score.value, f"{score.name}_ci95": score.ci95}
        health = {key: record.health(record.last, key) for key in HEALTH}
        line |= {key: value for key, value in health.items() if value is not None}
        line["train_seconds"] = sum(row.get("seconds") or 0 for row in record.rounds)
        lines.append(line)
    return csv_text(lines)


def _distinct(records: Sequence[Record]) -> list[str]:
    """The run directories' names, with as much of the path as tells them apart."""
    paths = [record.run.path.resolve() for record in records]
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return [printable(str(Path(*path.parts[-depth:]))) for path in paths]
