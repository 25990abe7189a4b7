"""The page about one run: what it was, how it went, what came of it, and what it was made from."""

import logging
from html import escape
from pathlib import Path

from ssfl.config import to_toml
from ssfl.data.decode import printable
from ssfl.errors import SSFLError
from ssfl.evaluation.in_words import HEALTH
from ssfl.files import write_text
from ssfl.guest import own_torch
from ssfl.protocols.bench import Bench
from ssfl.protocols.scores import GROUPS, Score
from ssfl.report import operations, parts, pictures
from ssfl.report.charts import (
    Series,
    columns_chart,
    line_chart,
    percent,
    plain,
    short,
)
from ssfl.report.record import Record
from ssfl.report.words import summary
from ssfl.run import Run

log = logging.getLogger(__name__)

_MANY = 40  # clients: beyond this, a distribution in place of a bar each


@own_torch()
def write_report(run: Run | str | Path) -> Path:
    """Write RUN/report.html and return its path."""
    run = run if isinstance(run, Run) else Run(run)
    path = run.path / "report.html"
    write_text(path, render(run))
    return path


def render(run: Run) -> str:
    """The page as HTML. Where the images are not at hand, what needs them is left out."""
    record = Record(run)
    configuration = _configuration(record)  # where that cannot be read, there is nothing to show
    bench, missing = None, ""
    if record.at_sites:
        missing = "The images are at the sites: a page made there, of a site's own run, shows them."
    else:
        try:
            bench = Bench(run)
        except SSFLError as error:
            why = printable(str(error))
            missing = f"Figures that need the images or a checkpoint are missing: {why}."
            log.warning("report: %s", missing)
    sections = [
        _curves(record),
        _results(record),
        _clients(record, bench),
        pictures.partition(bench) if bench else "",
        pictures.features(bench) if bench else "",
        operations.timing(record),
        operations.replies(record),
        configuration,
    ]
    content = "".join(sections)
    return parts.page(record.name, _lead(record, missing) + parts.links(content), content)


def _lead(record: Record, missing: str) -> str:
    notes = [*record.facts.get("notes", ()), record.last.get("warning"), missing]
    warnings = "".join(f'<p class="warning">{parts.prose(note)}</p>' for note in notes if note)
    return f'<p class="summary">{escape(summary(record))}</p>{warnings}{_tiles(record)}'


def _tiles(record: Record) -> str:
    items: list[tuple[str, str]] = []
    by_name = {score.name: score for score in record.scores}
    wanted = (
        ("personal_linear", "linear accuracy, each client's encoder on its own test images"),
        ("global_federated_linear", "federated linear accuracy of the shared encoder"),
        ("personal_knn", "kNN accuracy, mean over clients"),
        ("global_knn", "kNN accuracy of the shared encoder"),
    )
    items += [(percent(by_name[n].value), what) for n, what in wanted if n in by_name][:3]
    rank, spread = (record.health(record.last, name) for name in ("effective_rank", "std_ratio"))
    mean = ", mean over clients" if record.health_of_clients else ""
    if rank is not None and len(items) < 3:
        items.append((plain(rank), f"dimensions in use (effective rank){mean}"))
    if not by_name and spread is not None:
        items.append((plain(spread), f"feature spread, 1 being even{mean}"))
    items.append((f"{record.clients:,}", "client" if record.clients == 1 else "clients"))
    items.append((f"{record.done:,}", "round" if record.done == 1 else "rounds"))
    rate = record.images_per_second
    if rate:
        items.append((f"{rate:,.0f}", "images trained on per second"))
    return parts.tiles(items)


def _curves(record: Record) -> str:
    figures = [_training(record), _accuracy(record), _movement(record)]
    for name, figure in HEALTH.items():
        points, title = record.health_curve(name), figure.title
        if len(points) > 1:  # else it is a number, among the results
            drawing = line_chart([Series(title, points, 2)], title)
            mean = " Mean over clients." if record.health_of_clients else ""
            figures.append(parts.figure(name, title, drawing, note=figure.below_curve + mean))
    return parts.section("curves", "How it went", parts.grid(*figures))


def _training(record: Record) -> str:
    first = ("loss", "personal_loss", "global_loss")
    told = {name for row in record.rounds for name in row if "loss" in name}
    names = [*(name for name in first if name in told), *sorted(told.difference(first))]
    curves = [(name.replace("_", " "), record.curve("round", name)) for name in names]
    curves = [(name, points) for name, points in curves if points]
    series = [Series(name, points, i) for i, (name, points) in enumerate(curves)]
    if not series:
        return ""
    legend = [(s.name, s.colour) for s in series] if len(series) > 1 else []
    note = "Mean over clients, weighted by their images."
    return parts.figure(
        "loss", "Training loss", line_chart(series, "Training loss"), legend=legend, note=note
    )


def _movement(record: Record) -> str:
    points = [(x, y) for x, y in record.curve("round", "update_norm") if y > 0]
    if not points:
        return ""
    drawing = line_chart([Series("distance", points, 4)], "How far Θ moved")
    note = "Length of each round's mean update."
    return parts.figure("movement", "How far Θ moved", drawing, note=note)


def _accuracy(record: Record) -> str:
    base = record.baseline
    series = [
        Series("mean over clients", record.curve("evaluation", "knn_mean"), 0),
        Series("shared encoder", record.curve("evaluation", "knn_global"), 1),
    ]
    series = [s for s in series if s.points]
    if not series:
        return ""
    for key, name, colour in (
        ("untrained_knn_mean", "before training, mean over clients", 7),
        ("pixels_knn_mean", "raw pixels, mean over clients", 5),
    ):
        if base.get(key) is not None:
            series.append(Series(name, [(0, base[key])], colour, reference=True))
    drawing = line_chart(series, "kNN accuracy", number=percent)
    k = record.run.config.evaluation.k
    return parts.figure(
        "knn",
        "kNN accuracy",
        drawing,
        legend=[(s.name, s.colour) for s in series if not s.reference],
        levels=[(s.name, s.colour) for s in series if s.reference],
        note=f"Test images whose nearest training images, up to {k}, vote for their class.",
    )


def _results(record: Record) -> str:
    scores, paper = record.scores, record.paper.figures()
    health = _health_table(record)
    if not scores:
        whose = " Figures are means over clients." if record.health_of_clients else ""
        return parts.section(
            "results",
            "Results",
            health,
            intro="There are no labels to measure accuracy with. These figures tell whether the "
            "encoder has collapsed, not which of two sound encoders is the better one." + whose,
        )
    tables = []
    for over, heading in GROUPS.items():
        group = [score for score in scores if score.over == over]
        beside = any(score.name in paper for score in group)
        heads = ["", "this run", "± 95 %", *(["weighted", "std"] if over == "clients" else [])]
        rows = [_result(score, paper, beside) for score in group]
        if rows:
            heads = [*heads, "paper"] if beside else heads
            tables.append(f"<h3>{heading}</h3>" + parts.table(heads, rows, strong=1))
    if health and len(record.evaluations) < 2:  # of which no curve could be drawn
        mean = ", mean over clients" if record.health_of_clients else ""
        tables.append(f"<h3>Health, without labels{mean}</h3>" + health)
    note = (
        "Means over clients are plain, as in the paper; “weighted” counts clients by their test "
        "images; “std” is over clients, in points. Figures are of the last round, never the best."
    )
    if paper and record.paper.table:
        note += f" Paper: {record.paper.table}."
    if record.saved_evaluation is None:
        note += " `ssfl evaluate` adds linear figures, `--all` the semi-supervised ones."
    elif record.evaluation is None:
        note += (
            f" What `ssfl evaluate` found is of round {record.saved_evaluation.rounds} and not "
            "shown: run it again, once the run is at its end."
        )
    elif record.evaluation.notes:  # whose figures are missing, which are not what they are called
        note += f" Of the evaluation: {'; '.join(record.evaluation.notes)}."
    lead = f'<p class="lead">{parts.prose(note)}</p>'
    return parts.section("results", "Results", *tables, lead)


def _result(score: Score, paper: dict[str, float], beside: bool) -> list[str]:
    row = [
        score.title,
        percent(score.value),
        "" if score.ci95 is None else f"{100 * score.ci95:.1f}",
    ]
    if score.over == "clients":
        row.append("" if score.weighted_mean is None else percent(score.weighted_mean))
        row.append("" if score.std is None else f"{100 * score.std:.1f}")
    if beside:
        row.append(percent(paper[score.name]) if score.name in paper else "")
    return row


def _health_table(record: Record) -> str:
    """At the first evaluation and at the last, where these are two."""
    last = record.last
    first = record.evaluations[0] if record.evaluations else last
    rows = []
    for name, figure in HEALTH.items():
        then, now = record.health(first, name), record.health(last, name)
        if then is not None and now is not None:
            rows.append([f"{figure.title}: {figure.in_table}", plain(then), plain(now)])
    if not rows:
        return ""
    if len(record.evaluations) < 2:
        return parts.table(["", "this run"], [[title, now] for title, _, now in rows], strong=1)
    return parts.table(["", "first", "last"], rows, strong=2)


def _clients(record: Record, bench: Bench | None) -> str:
    figures = []
    data = bench.data if bench else None
    known = {k: (data.title(k), data.size(k)) for k in data.clients()} if data else {}
    for name, title in (
        ("personal_linear", "Linear accuracy on the client's own test images"),
        ("personal_linear_global", "The same classifier on everybody's test images"),
        ("personal_knn", "kNN accuracy among the client's own images"),
    ):
        score = next((s for s in record.scores if s.name == name and s.clients), None)
        if score is not None:
            figures.append(_client_figure(name, title, score.clients, known, share=True))
    intro = "The encoder each client is judged by."
    if figures:
        intro += " Small clients have few test images, so their accuracies are coarse."
    ranks = record.per_client("effective_rank")
    if ranks:
        title = "Effective rank of the encoder on the client's images"
        figures.append(_client_figure("client_rank", title, ranks, known, share=False))
    return parts.section(
        "clients",
        "Client by client",
        parts.grid(*figures, wide=True),
        intro=intro,
    )


def _client_figure(
    name: str,
    title: str,
    values: dict[int, float],
    known: dict[int, tuple[str, int]],
    *,
    share: bool,
) -> str:
    """A bar for each client, with what is known of it: what it is called, and its images."""
    number = percent if share else plain
    mean = sum(values.values()) / len(values)
    note = f"Mean {number(mean)}"
    if len(values) > _MANY:
        ordered = sorted(values.items(), key=lambda item: item[1])
        drawing = columns_chart(
            [v for _, v in ordered], [str(c) for c, _ in ordered], title, number=number
        )
        note += "; clients from the lowest to the highest."
    else:
        rows = [
            (
                short(known[client][0], 20) if client in known else str(client),
                f"{known[client][1]:,} images" if client in known else "",
                value,
                number(value),
            )
            for client, value in values.items()
        ]
        most = 1.0 if share else max(values.values()) or 1.0
        drawing = parts.bars(rows, most=most, mean=mean)
        note += ", the upright line."
    return parts.figure(name, title, drawing, note=note)


def _configuration(record: Record) -> str:
    text = escape(to_toml(record.run.config))
    return parts.section(
        "config",
        "Configuration",
        f"<details><summary>config.toml, as resolved</summary><pre>{text}</pre></details>",
    )
