"""CIFAR-10 and CIFAR-100, from the official binary or python layout in the data folder.

Where neither is there, the official archive is downloaded (`ssfl.data.download`).
Binary: records of 1 label byte (CIFAR-100: coarse, then fine) and 3,072 bytes of R, G, B planes.
Python: the same as pickled arrays, read without letting a pickle run anything (`pickles.py`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ssfl.data.images import DataSet, Images
from ssfl.data.sources.pickles import load_plain
from ssfl.errors import DataError
from ssfl.section import Section

PIXELS = 3 * 32 * 32
Raw = tuple[NDArray[np.uint8], NDArray[np.int64]]


@dataclass(frozen=True)
class Layout:
    """Where one of the two data sets keeps what, and how much of it there must be."""

    name: str
    binary: str
    python: str
    train: tuple[str, ...]
    test: str
    records: dict[str, int]
    label_bytes: int
    label_key: str
    class_count: int
    meta: str
    class_file: str
    class_key: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
CIFAR10 = Layout(
    name="cifar10",
    binary="cifar-10-batches-bin",
    python="cifar-10-batches-py",
    train=BATCHES,
    test="test_batch",
    records=dict.fromkeys((*BATCHES, "test_batch"), 10_000),
    label_bytes=1,
    label_key="labels",
    class_count=10,
    meta="batches.meta",
    class_file="batches.meta.txt",
    class_key="label_names",
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
)
CIFAR100 = Layout(
    name="cifar100",
    binary="cifar-100-binary",
    python="cifar-100-python",
    train=("train",),
    test="test",
    records={"train": 50_000, "test": 10_000},
    label_bytes=2,
    label_key="fine_labels",
    class_count=100,
    meta="meta",
    class_file="fine_label_names.txt",
    class_key="fine_label_names",
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
)


class Cifar10Options(Section):
    """CIFAR-10: 50,000 + 10,000 colour images of 32×32 in ten classes."""

    source: Literal["cifar10"] = "cifar10"


class Cifar100Options(Section):
    """CIFAR-100: 50,000 + 10,000 colour images of 32×32 in a hundred classes."""

    source: Literal["cifar100"] = "cifar100"


class Cifar10:
    """The `cifar10` source."""

    Options = Cifar10Options

    @staticmethod
    def load(options: Cifar10Options, *, root: Path, seed: int, progress: bool = False) -> DataSet:
        """Read CIFAR-10 from under `root`, where it is put first if it is nowhere."""
        return _read_or_fetch(CIFAR10, root, progress)


class Cifar100:
    """The `cifar100` source."""

    Options = Cifar100Options

    @staticmethod
    def load(options: Cifar100Options, *, root: Path, seed: int, progress: bool = False) -> DataSet:
        """Read CIFAR-100, with its fine labels, from under `root`; put there first if need be."""
        return _read_or_fetch(CIFAR100, root, progress)


def _read_or_fetch(layout: Layout, root: Path, progress: bool) -> DataSet:
    if not present(layout, root):
        from ssfl.data.download import get_cifar

        try:
            get_cifar(layout.name, root, progress=progress)
        except DataError as error:
            raise DataError(
                f"{layout.name} is not in {root} (SSFL_DATA says which folder holds "
                f"{layout.binary} or {layout.python}), and {error}"
            ) from error
    return read(layout, root)


def present(layout: Layout, root: Path) -> Path | None:
    """The data set's folder, the binary one first, if there is one."""
    folders = (root / layout.binary, root / layout.python)
    return next((folder for folder in folders if folder.is_dir()), None)


def read(layout: Layout, root: Path) -> DataSet:
    """Read whichever layout is there, the binary one first."""
    folder = present(layout, root)
    if folder is None:
        raise DataError(f"{layout.name} is not in {root}: run `ssfl data get {layout.name}`")
    if folder.name == layout.binary:
        one, classes = _read_binary, _binary_classes(layout, folder)
    else:
        one, classes = _read_python, _python_classes(layout, folder)
    parts = [one(layout, folder, name) for name in layout.train]
    return DataSet(
        name=layout.name,
        train=_images(
            np.concatenate([pixels for pixels, _ in parts]),
            np.concatenate([labels for _, labels in parts]),
        ),
        test=_images(*one(layout, folder, layout.test)),
        classes=classes,
        owners=None,
        mean=layout.mean,
        std=layout.std,
        presets="cifar",
    )


def _images(pixels: NDArray[np.uint8], labels: NDArray[np.int64]) -> Images:
    shaped = np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32))
    return Images(torch.from_numpy(shaped), torch.from_numpy(labels))


def _again(layout: Layout) -> str:
    return f"remove its folder and run `ssfl data get {layout.name}`"


def _missing(layout: Layout, path: Path) -> DataError:
    return DataError(f"{layout.name} is incomplete, {path} is missing: {_again(layout)}")


def _checked(
    layout: Layout, path: Path, pixels: NDArray[np.uint8], labels: NDArray[np.int64]
) -> Raw:
    if labels.size and (labels.min() < 0 or labels.max() >= layout.class_count):
        raise DataError(
            f"{path} is damaged, it has a label that {layout.name} does not have: {_again(layout)}"
        )
    return pixels, labels


def _read_binary(layout: Layout, folder: Path, name: str) -> Raw:
    path = folder / f"{name}.bin"
    if not path.is_file():
        raise _missing(layout, path)
    record = layout.label_bytes + PIXELS
    expected, size = layout.records[name] * record, path.stat().st_size
    if size != expected:
        raise DataError(
            f"{path} is damaged, it has {size:,} bytes instead of {expected:,}: {_again(layout)}"
        )
    rows = np.fromfile(path, dtype=np.uint8).reshape(-1, record)
    labels = rows[:, layout.label_bytes - 1].astype(np.int64)
    return _checked(layout, path, rows[:, layout.label_bytes :], labels)


def _read_python(layout: Layout, folder: Path, name: str) -> Raw:
    path = folder / name
    if not path.is_file():
        raise _missing(layout, path)
    batch = load_plain(path)
    pixels = batch.get("data") if isinstance(batch, dict) else None
    labels = batch.get(layout.label_key) if isinstance(batch, dict) else None
    shape = (layout.records[name], PIXELS)
    if (
        not isinstance(pixels, np.ndarray)
        or pixels.shape != shape
        or pixels.dtype != np.uint8
        or not isinstance(labels, list)
        or len(labels) != len(pixels)
    ):
        raise DataError(
            f"{path} is damaged, it does not hold {shape[0]:,} labelled images: {_again(layout)}"
        )
    return _checked(layout, path, pixels, np.array(labels, dtype=np.int64))


def _binary_classes(layout: Layout, folder: Path) -> tuple[str, ...] | None:
    path = folder / layout.class_file
    names = path.read_text(encoding="utf-8").split() if path.is_file() else []
    return tuple(names) if len(names) == layout.class_count else None


def _python_classes(layout: Layout, folder: Path) -> tuple[str, ...] | None:
    path = folder / layout.meta
    meta = load_plain(path) if path.is_file() else None
    names = meta.get(layout.class_key) if isinstance(meta, dict) else None
    if not isinstance(names, list) or len(names) != layout.class_count:
        return None
    return tuple(str(name) for name in names)
