"""Any tree of images: one subfolder per client, one per class, or all together without labels.

Sizes and modes may be mixed; all become RGB squares of one size. Files that cannot be read are
counted and named in the data set's notes, and only too many of them stop the run.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from ssfl.data.decode import (
    Decoded,
    Fit,
    Reading,
    Window,
    decode,
    note_dark,
    printable,
    report_broken,
)
from ssfl.data.images import DataSet, Images, channel_statistics, parted
from ssfl.data.split import stratified_split
from ssfl.errors import DataError
from ssfl.files import expanded
from ssfl.section import Section
from ssfl.seeding import numpy_generator

SUFFIXES = (
    ".bmp",
    ".gif",
    ".jpeg",
    ".jpg",
    ".pbm",
    ".pgm",
    ".png",
    ".ppm",
    ".tif",
    ".tiff",
    ".webp",
)
NOT_READ = (".avif", ".dcm", ".dng", ".heic", ".heif", ".jp2", ".jxl", ".nii", ".svs")
"""Images too, but not of a kind that is read here: the user is told."""
PHOTO_SIZE = 64
"""From this size on images are treated as photographs when views are made of them."""


class FolderOptions(Section):
    """A tree of image files."""

    source: Literal["folder"] = "folder"
    path: Path = Path("images")
    """The folder: absolute, or relative to where the command runs or to the data folder. Links in
    it are followed."""
    layout: Literal["auto", "clients", "classes", "flat"] = "auto"
    """clients: one subfolder per client; classes: one per class; flat: no meaning in subfolders;
    auto: classes where all images are in subfolders, else flat."""
    image_size: int = Field(64, ge=8, le=1024)
    """Height and width that every image is brought to."""
    fit: Fit = "crop"
    """crop: scale the shorter side, then cut the centre square; squash: scale both sides."""
    window: Window | None = None
    """The values that are black and white in grey files of more than 8 bits, e.g. [0, 4095] for
    scans of 12 bits (not set: 0 and 65,535 in 16 bits)."""
    test_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of each client's (or class's) images kept for testing; 0 makes no test set."""
    max_broken: float = Field(0.1, ge=0, le=1)
    """Share of files that may be unreadable before the data set is refused."""


class Folder:
    """The `folder` source."""

    Options = FolderOptions

    @staticmethod
    def load(options: FolderOptions, *, root: Path, seed: int, progress: bool = False) -> DataSet:
        """Find the images, decode them in parallel, and split them if asked to."""
        folder = locate(options.path, root)
        paths = _find(folder)
        names, groups = _groups(folder, paths, options.layout)
        found = decode(
            paths,
            options.image_size,
            Reading(options.fit, options.window),
            progress=progress,
            title=f"Reading {folder}",
        )
        notes = report_broken(
            found.broken,
            len(paths),
            options.max_broken,
            what=f"images in {folder}",
            option="data.max_broken",
            folder=folder,
        )
        if len(found.readable) == 0:
            raise DataError(f"none of the {len(paths):,} images in {folder} could be read")
        by_client = options.layout == "clients"
        groups = None if groups is None else groups[found.readable]
        train, test = _split(found.pixels, groups, by_client, options.test_fraction, seed)
        mean, std = channel_statistics(train.pixels)
        return DataSet(
            name=printable(folder.absolute().name),
            train=train,
            test=test,
            classes=None if by_client else names,
            owners=names if by_client else None,
            mean=mean,
            std=std,
            presets="photo" if options.image_size >= PHOTO_SIZE else "cifar",
            notes=(*notes, *_note_others(folder), *_note_depth(folder, found, options.window)),
        )


def locate(path: Path, root: Path) -> Path:
    """A folder that the user named, as seen from here or from the data folder."""
    given = expanded(path, "data.path")
    for folder in (given, root / given):
        if folder.is_dir():
            return folder
    places = str(given) if given.is_absolute() else f"{given} or {root / given}"
    raise DataError(f"there is no folder {places}: set data.path to the folder of images")


def _find(folder: Path) -> list[Path]:
    paths = image_files(folder)
    if not paths:
        raise DataError(
            f"{folder} holds no images, nor do its subfolders (looked for {', '.join(SUFFIXES)})"
            + "".join(f"; {note}" for note in _note_others(folder))
        )
    return paths


def image_files(folder: Path) -> list[Path]:
    """All image files below `folder`, in an order that does not depend on the file system.

    Links are followed: a client's folder may well be a link to where its images lie. One that
    leads nowhere is an image that cannot be read. What is hidden is not meant.
    """
    return sorted(_walk(folder, SUFFIXES))


def _note_others(folder: Path) -> tuple[str, ...]:
    """A note on images that were passed over for their kind, if there are any."""
    kinds = Counter(path.suffix.lower() for path in _walk(folder, NOT_READ))
    if not kinds:
        return ()
    found = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items()))
    return (f"images of these kinds are not read: {found}; convert them, e.g. to PNG",)


def _note_depth(folder: Path, found: Decoded, window: Window | None) -> tuple[str, ...]:
    """A note where deep greys are nearly black, or where a window has nothing to change."""
    if window is not None and found.brightest is None:
        return (
            f"a window is for grey files of more than 8 bits, and there are none in {folder}: "
            "what it says is not used",
        )
    option = "data.window=[0,4095] (at a site: window in its site.toml)"
    return note_dark(found.brightest, window, where=f" in {folder}", option=option)


def _walk(folder: Path, suffixes: Sequence[str], above: tuple[Path, ...] = ()) -> Iterator[Path]:
    here = folder.resolve()
    if here in above:  # a link back up: it would lead in circles
        return
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _walk(path, suffixes, (*above, here))
        elif path.suffix.lower() in suffixes and (path.is_file() or path.is_symlink()):
            yield path


def _groups(
    folder: Path, paths: list[Path], layout: str
) -> tuple[tuple[str, ...] | None, NDArray[np.int64] | None]:
    """The first-level subfolders' names, and which of them each image is in."""
    if layout == "flat":
        return None, None
    tops = [path.relative_to(folder).parts for path in paths]
    loose = [path for path, parts in zip(paths, tops, strict=True) if len(parts) == 1]
    if loose and layout == "auto":
        return None, None
    if loose:
        raise DataError(
            f"{loose[0]} is in no subfolder of {folder}, so it belongs to none of the {layout}: "
            "move it into one, or set data.layout to 'flat'"
        )
    names, groups = np.unique([parts[0] for parts in tops], return_inverse=True)
    return tuple(printable(str(name)) for name in names), groups.astype(np.int64)


def _split(
    pixels: torch.Tensor,
    groups: NDArray[np.int64] | None,
    by_client: bool,
    test_fraction: float,
    seed: int,
) -> tuple[Images, Images | None]:
    def images(chosen: torch.Tensor, rows: NDArray[np.int64] | slice) -> Images:
        marks = None if groups is None else torch.from_numpy(groups[rows])
        return Images(chosen, None if by_client else marks, marks if by_client else None)

    if test_fraction == 0:
        return images(pixels, slice(None)), None
    strata = groups if groups is not None else np.zeros(len(pixels), dtype=np.int64)
    train, test = stratified_split(strata, test_fraction, numpy_generator(seed, "folder-split"))
    if len(test) == 0:
        raise DataError(
            f"test_fraction = {test_fraction:g} of {len(pixels):,} images leaves none to test on: "
            "raise it, or set it to 0"
        )
    kept, held_out = parted(pixels, train, test)
    return images(kept, train), images(held_out, test)
