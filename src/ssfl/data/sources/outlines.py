"""The ten shapes of the `shapes` source, each as the signed distance of a point to its outline.

A distance (or a bound on it) is negative inside; every shape fits the unit disc, and all ten stay
apart when turned or mirrored, as flips and crops will do to them.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
F = np.float32


def _box(x: Array, y: Array, width: float, height: float) -> Array:
    return np.maximum(np.abs(x) - F(width), np.abs(y) - F(height))


def _disc(x: Array, y: Array) -> Array:
    return np.hypot(x, y) - F(0.85)


def _ring(x: Array, y: Array) -> Array:
    return np.abs(np.hypot(x, y) - F(0.75)) - F(0.2)


def _triangle(x: Array, y: Array) -> Array:
    return np.maximum(-y, np.abs(x) * F(0.75**0.5) + y * F(0.5)) - F(0.5)


def _cross(x: Array, y: Array) -> Array:
    return np.minimum(_box(x, y, 0.95, 0.27), _box(x, y, 0.27, 0.95))


def _bar(x: Array, y: Array) -> Array:
    return _box(x, y, 1.0, 0.27)


def _crescent(x: Array, y: Array) -> Array:
    bite: Array = F(0.75) - np.hypot(x - F(0.45), y)
    return np.maximum(np.hypot(x, y) - F(0.95), bite)


def _star(x: Array, y: Array) -> Array:
    # Fold the plane into half of one of the five points, which one straight edge bounds: from the
    # tip (1, 0) to the notch at radius 0.42.
    sector = 2 * np.pi / 5
    radius, angle = np.hypot(x, y), np.arctan2(x, y)
    folded = np.abs((angle + F(sector / 2)) % F(sector) - F(sector / 2))
    right, up = 0.42 * np.cos(sector / 2) - 1, 0.42 * np.sin(sector / 2)
    length = np.hypot(right, up)
    along, across = radius * np.cos(folded) - F(1), radius * np.sin(folded)
    distance: Array = along * F(up / length) - across * F(right / length)
    return distance


def _stripes(x: Array, y: Array) -> Array:
    waves: Array = np.abs((np.abs(x) + F(0.3)) % F(0.6) - F(0.3)) - F(0.14)
    return np.maximum(_box(x, y, 0.85, 0.85), waves)


def _dots(x: Array, y: Array) -> Array:
    return np.hypot(np.abs(x) - F(0.5), np.abs(y) - F(0.5)) - F(0.3)


def _checker(x: Array, y: Array) -> Array:
    return np.minimum(
        _box(x - F(0.42), y - F(0.42), 0.42, 0.42), _box(x + F(0.42), y + F(0.42), 0.42, 0.42)
    )


OUTLINES: dict[str, Callable[[Array, Array], Array]] = {
    "disc": _disc,
    "ring": _ring,
    "triangle": _triangle,
    "cross": _cross,
    "bar": _bar,
    "crescent": _crescent,
    "star": _star,
    "stripes": _stripes,
    "dots": _dots,
    "checker": _checker,
}
