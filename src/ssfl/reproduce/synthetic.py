"""A small set of made-up photographs in GLD-23K's layout, for where the real one is not at hand.

It shows that the experiment runs, not what it finds: pictures of shapes in the place of landmarks,
each photographer with a taste for some of them, a few with too few pictures to take part.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ssfl.data.sources import data_root
from ssfl.data.sources.folder import locate
from ssfl.data.sources.gld23k import Gld23kOptions
from ssfl.data.sources.shapes import Shapes, ShapesOptions
from ssfl.errors import ConfigError, DataError
from ssfl.files import write_text
from ssfl.report.tables import csv_text
from ssfl.reproduce.study import Arm, Study
from ssfl.seeding import numpy_generator

LIST = "mini_gld_train_split.csv"
SIZES = (100, 110, 120, 130, 140, 150, 160, 170, 180, 240, 40, 25)
"""Pictures of each photographer; the last two have too few."""
IMAGE_SIZE = 64
CLASSES = 10
SEED = 23


def stand_ins(
    study: Study, arms: Sequence[Arm], folder: Path, settings: Sequence[str], asked: bool
) -> dict[str, list[str]]:
    """The arms in which made-up images take GLD-23K's place, with the settings that make it so."""
    configs = {
        arm.name: study.config(arm, name="x", seed=0, rounds=None, settings=tuple(settings))
        for arm in arms
    }
    of_gld = {
        name: config.data
        for name, config in configs.items()
        if isinstance(config.data, Gld23kOptions)
    }
    if asked and not of_gld:
        raise ConfigError("--synthetic is for studies of GLD-23K")
    wanted = [name for name, data in of_gld.items() if asked or _missing(data)]
    if not wanted:
        return {}
    return dict.fromkeys(wanted, make_gld23k(folder / "runs" / "synthetic-gld23k"))


def _missing(data: Gld23kOptions) -> bool:
    try:
        locate(data.path, data_root())
    except DataError:
        return True
    return False


def make_gld23k(folder: Path) -> list[str]:
    """Write the set to `folder` unless it is there; returns the settings that use it."""
    if not (folder / LIST).exists():
        _write(folder)
    return [f"data.path={folder.resolve()}", f"data.image_size={IMAGE_SIZE}"]


def _write(folder: Path) -> None:
    from PIL import Image

    (folder / "images").mkdir(parents=True, exist_ok=True)
    rng = numpy_generator(SEED, "synthetic-gld23k")
    wanted = [rng.choice(CLASSES, size, p=rng.dirichlet(np.full(CLASSES, 0.5))) for size in SIZES]
    most = int(np.bincount(np.concatenate(wanted)).max())
    options = ShapesOptions(train=CLASSES * most, test=CLASSES, image_size=IMAGE_SIZE)
    images = Shapes.load(options, root=folder, seed=SEED).train
    assert images.labels is not None
    labels = images.labels.numpy()
    decks = [iter(np.flatnonzero(labels == label)) for label in range(CLASSES)]
    lines = []
    for user, own in enumerate(wanted):
        for label in own:
            index = next(decks[label])
            pixels = images.pixels[index].permute(1, 2, 0).numpy()
            Image.fromarray(pixels).save(folder / "images" / f"{index:06d}.jpg", quality=92)
            lines.append({"user_id": user, "image_id": f"{index:06d}", "class": label})
    write_text(folder / LIST, csv_text(lines))  # last: with it, the set is whole
