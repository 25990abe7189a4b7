"""Where images come from. A source is a class with `Options` and `load`, in one file of its own.

Adding one is that file and a line here; `load_dataset` finds it by the name in its options.
"""

import os
from pathlib import Path
from typing import Any, Protocol

from ssfl.data.images import DataSet
from ssfl.files import expanded
from ssfl.registry import Registry
from ssfl.section import Section

SOURCES = Registry(
    "data source",
    {
        "shapes": "ssfl.data.sources.shapes:Shapes",
        "digits": "ssfl.data.sources.digits:Digits",
        "cifar10": "ssfl.data.sources.cifar:Cifar10",
        "cifar100": "ssfl.data.sources.cifar:Cifar100",
        "folder": "ssfl.data.sources.folder:Folder",
        "gld23k": "ssfl.data.sources.gld23k:Gld23k",
        "sites": "ssfl.data.sources.sites:Sites",
    },
)


class Source(Protocol):
    """What a data source is."""

    Options: type[Section]
    """Its options; the field `source` is a literal, the name it is registered under."""

    @staticmethod
    def load(options: Any, *, root: Path, seed: int, progress: bool = False) -> DataSet:
        """Read or make the images. `root` is the data folder, `seed` the experiment's."""
        ...


def data_root() -> Path:
    """The data folder: $SSFL_DATA, else ./data."""
    return expanded(os.environ.get("SSFL_DATA") or "data", "SSFL_DATA")


def load_dataset(options: Any, *, seed: int = 0, progress: bool = False) -> DataSet:
    """Load the data set that `options` (some source's Options) describes."""
    source: Source = SOURCES[options.source]
    return source.load(options, root=data_root(), seed=seed, progress=progress)
