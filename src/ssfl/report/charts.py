"""Small charts as inline SVG: crisp at any size, coloured by the page's own light or dark palette.

Every chart is drawn about as wide as a phone, so that its text stays readable there; the page puts
several side by side where there is room. What carries data has the class `mark`, and says on hover
what it is.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 360, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 10, 26
_MOST_POINTS = 240
_COLOURS = 10

Number = Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """A named line: its points, its place in a palette of so many, and whether it is only a
    reference."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    reference: bool = False
    of: int = _COLOURS


def plain(value: float) -> str:
    """A number with as many digits as its size deserves."""
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace("-", "−")
    text = f"{value:.3g}" if abs(value) < 1 else f"{value:.{2 if abs(value) < 10 else 1}f}"
    if "." in text and "e" not in text:
        text = text.rstrip("0").rstrip(".")
    return text.replace("e-0", "e-").replace("-", "−")


def percent(value: float) -> str:
    """A share as per cent."""
    return f"{100 * value:.1f} %"


def short(name: str, most: int = 15) -> str:
    """A name that leaves room for what it is the name of."""
    return name if len(name) <= most else name[: most - 1] + "…"


def colour(index: int, of: int = _COLOURS) -> str:
    """Attributes that set an element's colour: the palette's, or evenly spaced hues past ten."""
    if of <= _COLOURS:
        return f'class="c{index % _COLOURS}"'
    return f'style="color:hsl({360 * index / of:.0f} 60% 52%)"'


def line_chart(series: Sequence[Series], label: str, *, number: Number = plain) -> str:
    """Lines against the round; references are broken lines across the whole width, dotted and
    dashed by turns, for greys are hard to tell apart."""
    lines = [s for s in series if s.points and not s.reference]
    levels = [s for s in series if s.points and s.reference]
    xs = [x for s in lines for x, _ in s.points]
    ys = [y for s in (*lines, *levels) for _, y in s.points]
    x_ticks, y_ticks = _ticks(min(xs), max(xs), 5, whole=True), _ticks(min(ys), max(ys), 4)
    low, high = min(*ys, y_ticks[0]), max(*ys, y_ticks[-1])
    first, last = min(xs), max(xs)

    def x(value: float) -> float:
        return _LEFT + _along(value, first, last) * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - _along(value, low, high) * (HEIGHT - _TOP - _BOTTOM)

    names = _tick_names(y_ticks, number)
    body = [_level(y(tick), name) for tick, name in zip(y_ticks, names, strict=True)]
    body += [_text(x(tick), HEIGHT - 8, f"{tick:g}", "middle") for tick in x_ticks]
    body.append(_text(_LEFT - 14, HEIGHT - 8, "round", "end"))
    for one, dashes in zip(levels, itertools.cycle(("2 4", "8 4")), strict=False):
        height = y(one.points[0][1])
        body.append(
            f"<g {colour(one.colour)}>"
            f'<path class="mark" d="M{_LEFT} {height:.1f}H{WIDTH - _RIGHT}" fill="none" '
            f'stroke="currentColor" stroke-width="1.5" stroke-dasharray="{dashes}">'
            f"{_hover(f'{one.name}: {number(one.points[0][1])}')}</path></g>"
        )
    for one in lines:
        body.append(_line(one, x, y, number))
    return _svg(body, WIDTH, HEIGHT, label)


def _along(value: float, low: float, high: float) -> float:
    """How far a value is on the way from the lowest to the highest; what is alone is midway."""
    return (value - low) / (high - low) if high > low else 0.5


def _line(
    one: Series, x: Callable[[float], float], y: Callable[[float], float], number: Number
) -> str:
    points = _thinned(one.points)
    path = "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in points)
    radius = 2.4 if len(points) <= 30 else 1.2
    dots = "".join(
        f'<circle class="mark" cx="{x(a):.1f}" cy="{y(b):.1f}" r="{radius}" fill="currentColor">'
        f"{_hover(f'{one.name}, round {a:g}: {number(b)}')}</circle>"
        for a, b in points
    )
    return (
        f"<g {colour(one.colour, one.of)}>"
        f'<path d="M{path}" fill="none" stroke="currentColor" stroke-width="1.8" '
        f'stroke-linejoin="round" stroke-linecap="round"/>{dots}</g>'
    )


def scatter(
    points: Sequence[tuple[float, float]], groups: Sequence[int], names: Sequence[str], label: str
) -> str:
    """Points without axes (their directions mean nothing), coloured by group."""
    width, margin = 420, 8
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    west, north = min(xs), min(ys)
    across, down = max(xs) - west, max(ys) - north
    scale = (width - 2 * margin) / (max(across, down) or 1)
    left, height = (width - scale * across) / 2, 2 * margin + scale * down

    def at_x(value: float) -> float:
        return left + scale * (value - west)

    def at_y(value: float) -> float:
        return margin + scale * (value - north)

    dots: dict[int, str] = defaultdict(str)
    for group, (x, y) in zip(groups, points, strict=True):
        dots[group] += f'<circle class="mark" cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="3"/>'
    body = [
        f'<g {colour(group, len(names))} fill="currentColor" fill-opacity=".72">'
        f"{_hover(names[group])}{dots[group]}</g>"
        for group in sorted(dots)
    ]
    return _svg(body, width, height, label)


def matrix(
    values: Sequence[Sequence[int]], rows: Sequence[str], columns: Sequence[str], label: str
) -> str:
    """A grid of cells, darker for more: rows downwards, columns across. Where there is nothing
    there is the ground: of many classes, a client holds few."""
    named = len(rows) <= 24
    left = 8 + min(90, 6 * max((len(r) for r in rows), default=0)) if named else 8
    width = (WIDTH - left - 4) / len(columns)
    least = 12.0 if named else 8.0  # lower rows' names would lie on top of each other
    height = min(max(width, least), 18.0) if len(rows) <= 40 else 240 / len(rows)
    top, gap = 4.0, 1 if min(width, height) > 4 else 0  # narrow cells would be nothing but gaps
    most = max((v for row in values for v in row), default=1) or 1
    end = top + len(rows) * height
    body = [
        f'<path class="cell" d="M{left} {top}H{WIDTH - 4}V{end:.1f}H{left}Z" style="--shade:0"/>'
    ]
    for i, row in enumerate(values):
        if named:
            body.append(_text(left - 6, top + (i + 0.5) * height + 3.5, short(rows[i]), "end"))
        for j, value in enumerate(row):
            if value:
                body.append(
                    f'<rect class="mark cell" x="{left + j * width + gap / 2:.1f}" '
                    f'y="{top + i * height + gap / 2:.1f}" width="{width - gap:.1f}" '
                    f'height="{height - gap:.1f}" rx="{1.5 * gap}" '
                    f'style="--shade:{math.sqrt(value / most):.2f}">'
                    f"{_hover(f'client {columns[j]}, {rows[i]}: {value:,} images')}</rect>"
                )
    step = max(1, math.ceil(len(columns) / 12))
    body += [
        _text(left + (j + 0.5) * width, end + 14, columns[j], "middle")
        for j in range(0, len(columns), step)
    ]
    return _svg(body, WIDTH, end + 20, label)


def columns_chart(
    values: Sequence[float], names: Sequence[str], label: str, *, number: Number = plain
) -> str:
    """Upright bars from zero."""
    ticks = _ticks(0, max([*values, 1e-9]), 4)
    high = max(ticks[-1], *values, 1e-9)
    width = (WIDTH - _LEFT - _RIGHT) / len(values)

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - value / high * (HEIGHT - _TOP - _BOTTOM)

    marks = zip(ticks, _tick_names(ticks, number), strict=True)
    body = [_level(y(tick), name) for tick, name in marks]
    gap = 2 if width > 6 else 0.4
    step = max(1, math.ceil(len(values) / 10))
    for i, (value, name) in enumerate(zip(values, names, strict=True)):
        left = _LEFT + i * width
        body.append(
            f'<g class="c0"><rect class="mark" x="{left + gap / 2:.1f}" y="{y(value):.1f}" '
            f'width="{max(width - gap, 0.5):.1f}" height="{max(y(0) - y(value), 0.5):.1f}" '
            f'rx="1.5" fill="currentColor">{_hover(f"{name}: {number(value)}")}</rect></g>'
        )
        if i % step == 0:
            body.append(_text(left + width / 2, HEIGHT - 8, name, "middle"))
    return _svg(body, WIDTH, HEIGHT, label)


def _svg(body: Sequence[str], width: float, height: float, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">'
        + "".join(body)
        + "</svg>"
    )


def _level(height: float, text: str) -> str:
    """A horizontal grid line with its number."""
    return f'<path class="grid" d="M{_LEFT} {height:.1f}H{WIDTH - _RIGHT}"/>' + _text(
        _LEFT - 6, height + 3.5, text, "end"
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _hover(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most so many points, evenly spaced, the last one always among them."""
    n = len(points)
    if n <= _MOST_POINTS:
        return list(points)
    return [points[i * (n - 1) // (_MOST_POINTS - 1)] for i in range(_MOST_POINTS)]


def _tick_names(ticks: Sequence[float], number: Number) -> list[str]:
    """As figures are written, but in full where two of so narrow a range would read alike."""
    names = [number(tick).replace(".0 %", " %") for tick in ticks]
    if len(set(names)) < len(names):
        shares = number is percent
        full = [f"{100 * tick:.9g} %" if shares else f"{tick:.9g}" for tick in ticks]
        names = [name.replace("-", "−") for name in full]
    return names


def _ticks(low: float, high: float, about: int, *, whole: bool = False) -> list[float]:
    """Round numbers that cover most of [low, high], in steps of 1, 2 or 5 times a power of ten."""
    if high - low < 1e-12:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / about))
    steps = [m * power for m in (0.5, 1, 2, 5, 10)]
    step = next(s for s in steps if (high - low) / s <= about + 1)
    if whole:
        step = max(1.0, step)
    start, stop = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(start, stop + 1)] or [low]
