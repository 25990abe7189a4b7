"""A study's pictures: learning curves, figures beside the paper's, accuracy against a quantity."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from ssfl.data.pictures import INK, STYLE, picture
from ssfl.evaluation.in_words import HEALTH
from ssfl.reproduce.records import Result
from ssfl.reproduce.results import StudyResult
from ssfl.reproduce.rows import Row, common_settings, quoted
from ssfl.reproduce.study import Axis, Study, figure_title

COLOURS = (
    "#2b6ca3",
    "#d1603d",
    "#3a9d6e",
    "#8a5fb0",
    "#c79a1e",
    "#4fb0c6",
    "#b5476c",
    "#6b7a86",
    "#8c6239",
    "#a3b52b",
    "#1f3f73",
    "#e39a7b",
)
_LABEL = 46
"""Letters in a line of a label; dots need some room too."""
FAINT = "#8795a1"
GRID = STYLE | {"axes.grid.axis": "y", "grid.color": "#e3e8ec"}
PICTURES = ("figures.png", "against.png", "curves.png")
"""All that there may be, as a page shows them."""


def draw(found: StudyResult, folder: Path) -> None:
    """Whatever pictures the results are good for, in the place of those that were there."""
    for name in PICTURES:
        (folder / name).unlink(missing_ok=True)
    rows = found.rows()
    common = common_settings(rows)
    if any(len(r.curve.get("round", ())) > 1 for r in found.results):
        _curves(found, common, folder / "curves.png")
    rows = [row for row in rows if row.figure not in HEALTH]
    if rows:
        _figures(rows, found.study, common, folder / "figures.png")
    if found.study.axis is not None and rows:
        _against(found.study.axis, rows, found.study.title, folder / "against.png")


def _curves(found: StudyResult, common: Sequence[str], path: Path) -> None:
    """The indicator and the loss against rounds, a line per arm, a band over seeds."""
    groups = _groups(found, common)
    with picture(path, 11.5, 4.4, columns=2, style=GRID) as (left, right):
        for index, (label, group) in enumerate(groups.items()):
            look = _look(index)
            _band(left, group, _indicator(found, group[0]), label, look)
            _band(right, group, "loss", label, look)
        shown = {_indicator(found, group[0]) for group in groups.values()}
        whose = {"knn_mean": ", mean over clients", "knn_global": " of Θ"}
        left.set_title("kNN accuracy" + (whose[shown.pop()] if len(shown) == 1 else ""))
        right.set_title("Training loss")
        for axes in (left, right):
            axes.set_xlabel("round")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(visible=True)
        below(left.figure, *left.get_legend_handles_labels())


def below(figure: Any, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """A legend under a picture, which grows by it: in four columns, or in as many as its labels
    leave room for."""
    for columns in range(min(4, len(labels)), 0, -1):
        legend = figure.legend(
            handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=10
        )
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            figure.set_figheight(figure.get_figheight() + 0.24 * -(-len(labels) // columns))
            return
        legend.remove()


def _groups(found: StudyResult, common: Sequence[str]) -> dict[str, list[Result]]:
    """Runs that make one line, by its label; rounds are named where they are not all the same."""
    rounds = {result.rounds for result in found.results}
    groups: dict[str, list[Result]] = defaultdict(list)
    for arm in found.study.arms:
        for result in found.results:
            if result.arm == arm.name:
                more = [f"{result.rounds} rounds"] if len(rounds) > 1 else []
                more += [s for s in (*result.settings, *found.outdated(result)) if s not in common]
                more += ["synthetic"] if result.synthetic else []
                label = arm.label + (f" ({', '.join(more)})" if more else "")
                groups[label].append(result)
    return groups


def _indicator(found: StudyResult, result: Result) -> str:
    figures = found.study.figures_of(found.study.arm(result.arm))
    known = "knn_mean" in result.curve or result.theta_of  # then nobody looked at it midway
    return "knn_mean" if figures[0].startswith("personal") and known else "knn_global"


def _look(index: int) -> dict[str, Any]:
    """A colour, and with many lines a dash, of one's own."""
    dashes = ("-", "--", ":")
    turn = index // len(COLOURS) % len(dashes)
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": dashes[turn]}


def _band(
    axes: Any, group: Sequence[Result], figure: str, label: str, look: dict[str, Any]
) -> None:
    """The mean over seeds, and from the lowest to the highest, at the rounds that all of them were
    looked at: a mean over others would jump for no reason but who is in it."""
    curves = [curve for result in group if (curve := _points(result, figure))]
    xs = sorted(set(curves[0]).intersection(*curves)) if curves else []
    means = [sum(curve[x] for curve in curves) / len(curves) for x in xs]
    alone = "o" if len(xs) == 1 else ""  # a line through one point is not seen
    axes.plot(xs, means, **look, linewidth=1.8, marker=alone, label=label, solid_capstyle="round")
    if len(curves) > 1:
        low, high = ([end(curve[x] for curve in curves) for x in xs] for end in (min, max))
        axes.fill_between(xs, low, high, color=look["color"], alpha=0.15, linewidth=0)


def _points(result: Result, figure: str) -> dict[float, float]:
    """A figure of a run by the rounds it was looked at."""
    rounds, values = result.curve.get("round", []), result.curve.get(figure, [])
    pairs = zip(rounds, values, strict=False)
    return {x: y for x, y in pairs if x is not None and y is not None}


def _figures(rows: Sequence[Row], study: Study, common: Sequence[str], path: Path) -> None:
    """Ours as dots with the spread over seeds, the paper's as open diamonds; figures of the same
    runs lie close together, under one label."""
    groups: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.runs].append(row)
    depth = 1.2 * len(groups) + 0.6 * (len(rows) - len(groups))
    with picture(path, 9.0, 1.6 + 0.42 * depth, style=GRID) as axes:
        names = list(dict.fromkeys(row.figure for row in rows))
        lengths = {row.rounds for row in rows}
        place, ticks = 0.0, {}
        for group in groups.values():
            if place:
                axes.axhline(place - 0.6, color=FAINT, linewidth=0.5, zorder=1)
            ticks[place + 0.3 * (len(group) - 1)] = _row_label(group[0], common, len(lengths) > 1)
            for row in group:
                _dot(axes, place, row, COLOURS[names.index(row.figure) % len(COLOURS)])
                place += 0.6
            place += 0.6
        axes.set_yticks(list(ticks), list(ticks.values()), fontsize=10)
        axes.set_ylim(place - 0.6, -0.6)
        axes.margins(x=0.2)  # numbers beside the outermost dots
        axes.grid(visible=True, axis="x")
        after = f" after {rows[0].rounds} rounds" if len(lengths) == 1 else ""
        axes.set_xlabel(f"accuracy{after}")
        # over the labels too: beside long ones there is little room
        axes.figure.suptitle(study.title, x=0.005, ha="left")
        _keys(axes, names, any(row.paper is not None for row in rows), study.rounds)


def _dot(axes: Any, place: float, row: Row, colour: str) -> None:
    """One figure, its number on the side that leads away from the paper's, clear of the spread."""
    axes.errorbar(
        row.mean, place, xerr=row.std, fmt="o", color=colour, markersize=8, capsize=3, zorder=3
    )
    side = -1 if row.paper is not None and row.paper > row.mean else 1
    edge = row.mean + side * (row.std or 0.0)
    axes.annotate(
        f"{row.mean:.3f}", (edge, place), xytext=(9 * side, 0), textcoords="offset points",
        ha="left" if side > 0 else "right", va="center_baseline", fontsize=9, color=colour,
    )  # fmt: skip
    if row.paper is not None:
        axes.plot(
            row.paper, place, "D", markersize=8, markerfacecolor="white", markeredgecolor=INK,
            zorder=2,
        )  # fmt: skip


def _keys(axes: Any, names: Sequence[str], paper: bool, rounds: int | None) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], marker="o", linestyle="", color=COLOURS[i % len(COLOURS)], markersize=8)
        for i in range(len(names))
    ]
    labels = [figure_title(name) for name in names]
    if paper:
        handles.append(
            Line2D([], [], marker="D", linestyle="", markerfacecolor="white", markeredgecolor=INK)
        )
        labels.append("the paper" if rounds is None else f"the paper ({rounds} rounds)")
    axes.figure.legend(
        handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9
    )


def _row_label(row: Row, common: Sequence[str], with_rounds: bool) -> str:
    more = [s for s in row.beyond if s not in common] + ["synthetic"] * row.synthetic
    if with_rounds:
        more.append(f"{row.rounds} rounds")
    lines = [row.arm.label] + ([", ".join(more)] if more else [])
    return "\n".join(part for line in lines for part in wrap(line, _LABEL))


def _against(axis: Axis, rows: Sequence[Row], title: str, path: Path) -> None:
    """Lines over the quantity that arms differ in; of each arm, the row to quote."""
    best = quoted(rows)
    with picture(path, 7.5, 4.8, style=GRID) as axes:
        ticks, lengths = set(), set()
        for index, line in enumerate(axis.lines):
            shown = [(p.x, best[p.arm, p.figure]) for p in line.points if (p.arm, p.figure) in best]
            if not shown:
                continue
            ticks |= {x for x, _ in shown}
            lengths |= {row.rounds for _, row in shown}
            axes.errorbar(
                [x for x, _ in shown],
                [row.mean for _, row in shown],
                yerr=[row.std or 0.0 for _, row in shown] if any(r.std for _, r in shown) else None,
                fmt="o-",
                color=COLOURS[index % len(COLOURS)],
                linewidth=1.8,
                markersize=7,
                capsize=3,
                label=line.label,
            )
        axes.set_xscale(axis.scale)
        axes.set_xticks(sorted(ticks), [f"{tick:g}" for tick in sorted(ticks)])
        axes.minorticks_off()
        axes.set(xlabel=axis.label, ylabel="accuracy")
        axes.grid(visible=True)
        axes.set_title(title)
        axes.text(
            1.0, 1.01, f"{', '.join(map(str, sorted(lengths)))} rounds", transform=axes.transAxes,
            ha="right", fontsize=9, color=FAINT,
        )  # fmt: skip
        axes.legend(frameon=False, fontsize=10)
