"""Ten classes of small colour images, drawn in the package from a seed: the demo's data.

Each image holds four copies of one shape, at any place, each with its own size, turn and colour,
two lighter and two darker than what lies behind them; the background has its own tint, texture
and light, and there is noise on top. So raw pixels say little of the class, while the one thing
that two crops of an image surely share is the shape: what self-supervision is there to find.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from ssfl.data.images import DataSet, Images, channel_statistics
from ssfl.data.sources.outlines import OUTLINES
from ssfl.section import Section
from ssfl.seeding import numpy_generator

Array = NDArray[np.float32]

# Two directions in RGB that change colour but not brightness (those of the YIQ colour space).
CHROMA = np.array([[0.956, -0.272, -1.106], [0.621, -0.647, 1.703]], dtype=np.float32)
CHUNK = 512
QUARTERS = ((-0.5, -0.5), (0.5, -0.5), (-0.5, 0.5), (0.5, 0.5))


class ShapesOptions(Section):
    """Generated images of ten shapes."""

    source: Literal["shapes"] = "shapes"
    train: int = Field(5000, ge=10)
    """How many training images to draw."""
    test: int = Field(1000, ge=10)
    """How many test images to draw."""
    image_size: int = Field(32, ge=16, le=256)
    """Height and width in pixels."""
    noise: float = Field(0.02, ge=0, le=0.5)
    """Standard deviation of the pixel noise, on the [0, 1] scale."""


class Shapes:
    """The `shapes` source."""

    Options = ShapesOptions

    @staticmethod
    def load(options: ShapesOptions, *, root: Path, seed: int, progress: bool = False) -> DataSet:
        """Draw the images; nothing is read, and the same seed gives the same pixels."""
        train = _images(options.train, options, seed, "train")
        mean, std = channel_statistics(train.pixels)
        return DataSet(
            name="shapes",
            train=train,
            test=_images(options.test, options, seed, "test"),
            classes=tuple(OUTLINES),
            owners=None,
            mean=mean,
            std=std,
            presets="cifar",
        )


def _images(count: int, options: ShapesOptions, seed: int, split: str) -> Images:
    """`count` images, as even over the classes as can be, in random order."""
    rng = numpy_generator(seed, f"shapes-{split}")
    labels = rng.permutation(np.arange(count, dtype=np.int64) % len(OUTLINES))
    pixels = np.empty((count, 3, options.image_size, options.image_size), dtype=np.uint8)
    for start in range(0, count, CHUNK):
        rows = slice(start, min(start + CHUNK, count))
        pixels[rows] = _draw(labels[rows], options.image_size, options.noise, rng)
    return Images(torch.from_numpy(pixels), torch.from_numpy(labels))


def _draw(
    labels: NDArray[np.int64], size: int, noise: float, rng: np.random.Generator
) -> NDArray[np.uint8]:
    """Draw one image per label (n×3×S×S). The canvas spans [-1, 1] in x and y."""
    n = len(labels)
    axis = ((np.arange(size) + 0.5) / size * 2 - 1).astype(np.float32)
    x, y = axis[None, :], axis[:, None]
    level = _uniform(rng, 0.42, 0.58, n)
    canvas = _background(rng, level, x, y)

    # A copy in each quarter, so that any crop has something of a shape in it; then all are moved
    # together, and what leaves on one side comes in on the other.
    shift = _uniform(rng, -1, 1, n, 2)
    palette = _palette(rng, level)
    for quarter, colour in zip(QUARTERS, palette, strict=True):
        place = shift + np.array(quarter, dtype=np.float32) + _uniform(rng, -0.1, 0.1, n, 2)
        radius = _uniform(rng, 0.38, 0.52, n)
        turn = _uniform(rng, 0, 2 * np.pi, n)
        for index, outline in enumerate(OUTLINES.values()):
            mine = np.flatnonzero(labels == index)
            cover = _cover(outline, x, y, place[mine], radius[mine], turn[mine])[:, None]
            canvas[mine] += cover * (colour[mine] - canvas[mine])

    canvas *= (1 - _uniform(rng, 0, 0.3, n, 1, 1) * _ramp(rng, n, x, y))[:, None]
    canvas += np.float32(noise) * rng.standard_normal(canvas.shape, dtype=np.float32)
    return np.rint(np.clip(canvas, 0, 1) * 255).astype(np.uint8)


def _uniform(rng: np.random.Generator, low: float, high: float, *shape: int) -> Array:
    return rng.uniform(low, high, shape).astype(np.float32)


def _colours(luminance: Array, hue: Array, vividness: float) -> Array:
    """Colours (n×3×1×1) of the given luminance and hue (n)."""
    direction = np.stack([np.cos(hue), np.sin(hue)], axis=1) @ CHROMA
    colours: Array = luminance[:, None] + np.float32(vividness) * direction
    return np.clip(colours, 0, 1)[:, :, None, None]


def _palette(rng: np.random.Generator, level: Array) -> list[Array]:
    """The colours of the four copies: hues a quarter turn apart, two light and two dark, shuffled.

    So all images have much the same colours on the whole. Were each copy's colour free, an image
    would be known by its colours, and an encoder would learn those first.
    """
    n = len(level)
    first = _uniform(rng, 0, 2 * np.pi, n)
    hues, sides = (np.argsort(rng.random((n, len(QUARTERS))), axis=1) for _ in range(2))
    palette = []
    for copy in range(len(QUARTERS)):
        contrast = _uniform(rng, 0.35, 0.5, n) * np.where(sides[:, copy] < 2, -1, 1)
        hue = first + hues[:, copy] * (np.pi / 2)
        palette.append(_colours((level + contrast).astype(np.float32), hue.astype(np.float32), 0.2))
    return palette


def _background(rng: np.random.Generator, level: Array, x: Array, y: Array) -> Array:
    """Two faint tints that run into each other, and a soft texture (n×3×S×S).

    Faint, because a vivid background is the same in both crops of an image: an easier thing to
    learn than its shapes.
    """
    n = len(level)
    one, other = (_colours(level, _uniform(rng, 0, 2 * np.pi, n), 0.02) for _ in range(2))
    ramp = _ramp(rng, n, x, y)[:, None]
    texture = _uniform(rng, 0, 0.03, n, 1, 1, 1) * _waves(rng, n, x, y)[:, None]
    canvas: Array = one * (1 - ramp) + other * ramp + texture
    return canvas


def _ramp(rng: np.random.Generator, n: int, x: Array, y: Array) -> Array:
    """A slope from 0 to 1 across each image, in a random direction (n×S×S)."""
    angle = _uniform(rng, 0, 2 * np.pi, n, 1, 1)
    cos: Any = np.cos(angle)
    slope: Array = (cos * x + np.sin(angle) * y) * np.float32(0.125**0.5)
    return slope + np.float32(0.5)


def _waves(rng: np.random.Generator, n: int, x: Array, y: Array) -> Array:
    """A soft random texture per image (n×S×S): three plane waves of random direction and length."""
    total = np.zeros((n, y.size, x.size), dtype=np.float32)
    for _ in range(3):
        angle, phase = (_uniform(rng, 0, 2 * np.pi, n, 1, 1) for _ in range(2))
        rate = _uniform(rng, 2, 9, n, 1, 1)
        total += np.sin(rate * (np.cos(angle) * x + np.sin(angle) * y) + phase)
    total /= 3
    return total


def _around(offset: Array) -> Array:
    """An offset on a canvas whose opposite edges meet: the short way round."""
    return (offset + np.float32(1)) % np.float32(2) - np.float32(1)


def _cover(
    outline: Callable[[Array, Array], Array],
    x: Array,
    y: Array,
    place: Array,
    radius: Array,
    turn: Array,
) -> Array:
    """How much of each pixel one copy per image covers, 0 to 1, with soft edges (n×S×S)."""
    dx, dy = _around(x - place[:, 0, None, None]), _around(y - place[:, 1, None, None])
    scale = radius[:, None, None]
    cos: Any = np.cos(turn)[:, None, None] / scale
    sin: Any = np.sin(turn)[:, None, None] / scale
    distance = outline(cos * dx + sin * dy, cos * dy - sin * dx)
    pixels = scale * np.float32(x.size / 2)
    cover: Array = np.float32(0.5) - distance * pixels
    return np.clip(cover, 0, 1)
