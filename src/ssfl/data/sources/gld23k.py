"""Google Landmarks, the federated 23k subset: photographs that come with their photographers.

Two folder layouts are in use, with the same columns (user_id, image_id, class) in the train list.
As in the paper's appendix, clients with fewer than 100 images are left out and 30% of each
client's own images are its local test set.
"""

import csv
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from ssfl.data.decode import decode, report_broken
from ssfl.data.images import DataSet, Images, channel_statistics, parted
from ssfl.data.sources.folder import locate
from ssfl.data.split import stratified_split
from ssfl.errors import DataError
from ssfl.section import Section
from ssfl.seeding import numpy_generator

LISTS = ("mini_gld_train_split.csv", "data_user_dict/gld23k_user_dict_train.csv")


class Row(NamedTuple):
    """One line of the train list."""

    user: str
    image: str
    label: str


class Gld23kOptions(Section):
    """Google Landmarks 23k, split by photographer."""

    source: Literal["gld23k"] = "gld23k"
    path: Path = Path("gld23k")
    """The folder: absolute, or relative to where the command runs or to the data folder."""
    image_size: int = Field(224, ge=16, le=1024)
    """Height and width that every image is brought to."""
    min_client_images: int = Field(100, ge=2)
    """Clients with fewer images in the list are left out."""
    test_fraction: float = Field(0.3, gt=0, lt=1)
    """Share of each client's images that is its local test set."""
    max_missing: float = Field(0.05, ge=0, le=1)
    """Share of listed images that may be missing or unreadable before the set is refused."""


class Gld23k:
    """The `gld23k` source."""

    Options = Gld23kOptions

    @staticmethod
    def load(options: Gld23kOptions, *, root: Path, seed: int, progress: bool = False) -> DataSet:
        """Read the list, keep the large clients, decode their images, and split each client."""
        folder = locate(options.path, root)
        rows = _large_clients(_read_list(folder), options.min_client_images)
        paths = [folder / "images" / f"{row.image}.jpg" for row in rows]
        found = decode(paths, options.image_size, progress=progress, title="Reading gld23k")
        notes = report_broken(
            found.broken,
            len(paths),
            options.max_missing,
            what="listed images",
            option="data.max_missing",
            folder=folder,
        )
        rows = [rows[index] for index in found.readable]
        owners, owner_of = _numbered([row.user for row in rows])
        classes, label_of = _numbered([row.label for row in rows])
        rng = numpy_generator(seed, "gld23k-split")
        train, test = stratified_split(owner_of, options.test_fraction, rng)

        def images(pixels: torch.Tensor, rows: NDArray[np.int64]) -> Images:
            return Images(
                pixels, torch.from_numpy(label_of[rows]), torch.from_numpy(owner_of[rows])
            )

        kept, held_out = parted(found.pixels, train, test)
        mean, std = channel_statistics(kept)
        return DataSet(
            name="gld23k",
            train=images(kept, train),
            test=images(held_out, test),
            classes=classes,
            owners=owners,
            mean=mean,
            std=std,
            presets="photo",
            notes=notes,
        )


def _read_list(folder: Path) -> list[Row]:
    path = next((folder / name for name in LISTS if (folder / name).is_file()), None)
    if path is None:
        raise DataError(f"{folder} holds neither {LISTS[0]} nor {LISTS[1]}, the list of gld23k")
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = {"user_id", "image_id", "class"} - set(reader.fieldnames or ())
            if missing:
                raise DataError(f"{path} lacks the column {', '.join(sorted(missing))}")
            rows = [Row(line["user_id"], line["image_id"], line["class"]) for line in reader]
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a readable CSV file: {error}") from error
    for number, row in enumerate(rows, start=2):
        if not all(row) or Path(row.image).name != row.image:
            raise DataError(f"line {number} of {path} is damaged")
    return rows


def _large_clients(rows: list[Row], least: int) -> list[Row]:
    """Counted in the list, not on the disk: a missing file must not change who takes part."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.user] = counts.get(row.user, 0) + 1
    kept = [row for row in rows if counts[row.user] >= least]
    if not kept:
        raise DataError(
            f"gld23k: none of the {len(counts):,} clients listed has at least {least:,} images"
        )
    return kept


def _numbered(names: list[str]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """The distinct names, numbers in numeric order, and the position of each given one."""
    distinct = sorted(set(names), key=lambda name: (len(name) if name.isdigit() else 99, name))
    position = {name: index for index, name in enumerate(distinct)}
    return tuple(distinct), np.array([position[name] for name in names], dtype=np.int64)
