"""Image files of any size and mode into one uint8 RGB tensor, decoded by several threads.

Files that cannot be read are told apart, not fatal: the caller says how many are too many.
"""

import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import AfterValidator, FiniteFloat

from ssfl.cores import cores
from ssfl.data.bars import bar
from ssfl.data.images import moved_up
from ssfl.errors import DataError
from ssfl.section import literal

if TYPE_CHECKING:
    from PIL.Image import Image

NAMED = 10
DARK = 64
"""Deep greys without a byte as bright as this, of 255, are hardly meant to be as they are read."""
Fit = Literal["crop", "squash"]


def _rising(window: tuple[float, float]) -> tuple[float, float]:
    black, white = window
    if not black < white:
        raise ValueError(
            f"it goes from black to white, the lower value first: not [{black:g}, {white:g}]"
        )
    return window


Window = Annotated[tuple[FiniteFloat, FiniteFloat], AfterValidator(_rising)]
"""The values that become black and white."""


@dataclass(frozen=True)
class Reading:
    """How image files become bytes of one size: the same in training and wherever an encoder is
    used."""

    fit: Fit = "crop"
    """The centre square is cut out, or the whole is squashed to a square."""
    window: Window | None = None
    """Of grey files of more than 8 bits; None goes by the number of bits (`_eight_bits`)."""


AS_USUAL = Reading()


@dataclass(frozen=True, eq=False)
class Decoded:
    """The images that could be read, which ones they are, and why the others could not."""

    pixels: torch.Tensor
    readable: NDArray[np.int64]
    broken: tuple[tuple[Path, str], ...]
    brightest: int | None
    """The brightest byte of grey files of more than 8 bits; None where there are none."""


def decode(
    paths: Sequence[Path],
    size: int,
    reading: Reading = AS_USUAL,
    *,
    progress: bool = False,
    title: str = "",
) -> Decoded:
    """Read all files, each as size×size RGB."""
    pixels = np.empty((len(paths), 3, size, size), dtype=np.uint8)
    deep = np.zeros(len(paths), dtype=bool)

    def one(index: int) -> str | None:
        try:
            pixels[index], deep[index] = _read(paths[index], size, reading)
        except Exception as error:  # decoders fail in many ways; each means one unreadable file
            return str(error) or type(error).__name__
        return None

    workers = min(16, cores())
    reasons = []
    with (
        # They name no file: what cannot be read is told below, what can be read is no matter.
        warnings.catch_warnings(action="ignore"),
        bar(title, len(paths), progress) as advance,
        ThreadPoolExecutor(workers, thread_name_prefix="ssfl-decode") as pool,
    ):
        for reason in pool.map(one, range(len(paths))):
            reasons.append(reason)
            advance(1)
    readable = np.array([i for i, reason in enumerate(reasons) if reason is None], dtype=np.int64)
    broken = tuple((paths[i], reason) for i, reason in enumerate(reasons) if reason is not None)
    brightest = max((int(pixels[i].max()) for i in np.flatnonzero(deep)), default=None)
    kept = torch.from_numpy(pixels)
    kept = moved_up(kept, readable) if broken else kept
    return Decoded(kept, readable, broken, brightest)


def note_dark(
    brightest: int | None, window: Window | None, *, where: str, option: str
) -> tuple[str, ...]:
    """A note where deep greys come out nearly black, for a file of 16 bits does not say that it has
    used 12, and bytes keep few of its shades. `option` sets a window for those."""
    if brightest is None or brightest >= DARK:
        return ()
    advice = (
        f"in files of 16 bits white is 65,535: for scans of 12 bits set {option}"
        if window is None
        else f"the window {literal(window)} may be too wide"
    )
    return (
        f"no pixel of the grey files of more than 8 bits{where} is brighter than {brightest} of "
        f"255: {advice}",
    )


def report_broken(
    broken: Sequence[tuple[Path, str]],
    total: int,
    allowed: float,
    *,
    what: str,
    option: str,
    folder: Path,
) -> tuple[str, ...]:
    """A note that counts and names unreadable files, as seen from `folder`, and says what is wrong
    with the first; an error where they are too many."""
    if not broken:
        return ()
    if len(broken) > allowed * total:
        raise DataError(
            f"{len(broken):,} of {total:,} {what} could not be read, more than the share of "
            f"{allowed:g} that {option} allows; {first_broken(broken)}"
        )
    names = ", ".join(str(path.relative_to(folder)) for path, _ in broken[:NAMED])
    more = f" and {len(broken) - NAMED:,} more" if len(broken) > NAMED else ""
    why = _short(broken[0][1], broken[0][0])
    which = f"{names}{more} ({'the first: ' if len(broken) > 1 else ''}{why})"
    return (printable(f"{len(broken):,} of {total:,} {what} could not be read: {which}"),)


def printable(text: str) -> str:
    """Text with names of files in it, which may be in an encoding of long ago."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def first_broken(broken: Sequence[tuple[Path, str]]) -> str:
    """The first unreadable file and what is wrong with it."""
    path, reason = broken[0]
    return f"the first is {path} ({_short(reason, path)})"


def _short(reason: str, path: Path) -> str:
    """Decoders repeat the path in their messages; the reader has it already."""
    if not path.is_file():
        return "it is a folder" if path.is_dir() else "there is no such file"
    return "not a readable image" if path.name in reason else reason


def _read(path: Path, size: int, reading: Reading) -> tuple[NDArray[np.uint8], bool]:
    """The image, and whether it is a deep grey one."""
    from PIL import Image, ImageOps

    with Image.open(path) as opened:
        opened.draft("RGB", (size, size))  # JPEG: decode no larger than needed
        deep = opened.mode in ("I", "F") or opened.mode.startswith("I;16")
        image = ImageOps.exif_transpose(opened)
        if deep:
            image = Image.fromarray(_eight_bits(np.asarray(image), image.mode, reading.window))
        image = _rgb(image)
    if reading.fit == "crop":
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    else:
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image).transpose(2, 0, 1), deep


def _rgb(image: "Image") -> "Image":
    """Eight-bit RGB from any mode of eight bits: transparency is laid on white."""
    from PIL import Image

    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def _eight_bits(values: NDArray[Any], mode: str, window: Window | None) -> NDArray[np.uint8]:
    """Deep greys as 0 to 255, by the window or, without one, from 0 to the white of so many bits.
    Images of 32 bits do not say what that is: it is the least of 1 (in floats), 255 and 65,535 that
    fits, floats being known to go a little beyond it, and below 0."""
    darkest, brightest = float(values.min()), float(values.max())
    if window is None:
        whites = {"F": (1.0, 255.0, 65535.0), "I": (255.0, 65535.0)}.get(mode, (65535.0,))
        white = next((white for white in whites if brightest < 2 * white), None)
        if white is None or darkest < (-white / 10 if mode == "F" else 0):
            raise ValueError(
                f"its values go from {darkest:g} to {brightest:g}: set a window (data.window, "
                "--window), or save it with 8 or 16 bits"
            )
        window = (0.0, white)
    elif np.isnan(brightest):
        raise ValueError("some of its values are no numbers")
    black, white = window
    return np.rint(np.clip((values - black) / (white - black), 0, 1) * 255).astype(np.uint8)
