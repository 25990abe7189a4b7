"""Runs to draw pages of: with labels, personal ones, and one without a single label."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from ssfl.evaluation.linear import LinearOptions
from ssfl.experiment import train
from ssfl.protocols.judge import evaluate
from ssfl.protocols.options import ProtocolOptions
from ssfl.report import samples
from ssfl.run import Run
from tiny import tiny

sys.path.insert(0, str(Path(__file__).parent))  # for browser.py

SKEWED = {"kind": "dirichlet", "alpha": 0.5, "clients": 4, "min_size": 20, "min_test": 5}


@pytest.fixture(autouse=True)
def _few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """A map of fewer images: it is drawn many times here."""
    monkeypatch.setattr(samples, "POINTS", 150)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="session")
def shared(folder: Path) -> Run:
    """A run that was only trained."""
    config = tiny(partition=SKEWED, evaluation={"every": 1, "clients": 4, "baselines": True})
    return train(config, out=folder / "shared <b>")


@pytest.fixture(scope="session")
def personal(folder: Path) -> Run:
    """A run that was trained and evaluated."""
    config = tiny(
        algorithm={"name": "per-ssfl"}, partition=SKEWED, evaluation={"every": 1, "clients": 4}
    )
    run = train(config, out=folder / "personal")
    options = ProtocolOptions(linear=LinearOptions(rounds=5))
    evaluate(run, ["knn", "federated-linear", "linear"], options=options)
    return run


def put_digits(folder: Path, first: int, count: int) -> None:
    folder.mkdir(parents=True)
    for i, image in enumerate(load_digits().images[first : first + count]):
        grey = np.rint(image * 255 / 16).astype(np.uint8)
        Image.fromarray(grey).resize((16, 16)).save(folder / f"{i:03d}.png")


@pytest.fixture(scope="session")
def unlabelled(folder: Path) -> Run:
    """A run on a flat folder of images."""
    photos = folder / "photos"
    put_digits(photos, 0, 120)
    data = {"source": "folder", "path": str(photos), "image_size": 16, "layout": "flat"}
    config = tiny(
        data={**data, "test_fraction": 0.0},
        partition={"kind": "iid", "clients": 3},
        evaluation={"every": 1, "clients": 3},
    )
    return train(config, out=folder / "unlabelled")


@pytest.fixture(scope="session")
def wards(folder: Path) -> Run:
    """A run on a folder for each of two wards, one of a long name, judged only once."""
    scans = folder / "scans"
    for place, ward in enumerate(("north", "children's <hospital>, ward 7")):
        put_digits(scans / ward, 40 * place, 40)
    data = {"source": "folder", "path": str(scans), "image_size": 16, "layout": "clients"}
    config = tiny(data=data, partition={"kind": "natural"}, evaluation={"every": 0, "clients": 2})
    return train(config, out=folder / "wards")
