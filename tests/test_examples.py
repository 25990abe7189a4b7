"""The examples run as a user would run them, with settings that make them small."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ssfl.algorithms import ALGORITHMS
from ssfl.algorithms.base import Models
from ssfl.algorithms.learner import Learner
from ssfl.assemble import build_method, load_federated
from ssfl.config import load_config
from ssfl.run import Run

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = (
    "server.rounds=2",
    "partition.clients=3",
    "server.clients_per_round=0",
    "model.width=4",
    "ssl.projector_width=16",
    "ssl.predictor_width=8",
    "device.device=cpu",
    "device.workers=1",
    "evaluation.every=0",
    "evaluation.baselines=false",
)
DIGITS = ("data.source=digits", "data.test_fraction=0.7", "partition.min_size=20", *TINY)


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """What an example registers is forgotten after it."""
    monkeypatch.setattr(ALGORITHMS, "_targets", ALGORITHMS.targets)


@pytest.fixture
def example(monkeypatch, tmp_path, capsys):
    """Runs an example in an empty folder; gives what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_every_example_is_tested_here():
    tested = {
        "train_demo.py",
        "compare_algorithms.py",
        "own_images.py",
        "own_algorithm.py",
    }
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_train_demo_trains_and_uses_its_encoder(example, tmp_path):
    printed = example("train_demo.py", *DIGITS)
    run = Run(tmp_path / "runs" / "demo")
    assert run.checkpoint().rounds == 2
    assert "with 200 labels" in printed
    assert f"features of width {run.global_encoder().features}" in printed


def test_compare_algorithms_prints_a_row_for_each(example, tmp_path):
    printed = example("compare_algorithms.py", *DIGITS, "server.rounds=1")
    rows = dict(line.split(maxsplit=1) for line in printed.splitlines()[1:])
    assert len(rows) == 5
    for name in rows:
        final = Run(tmp_path / "runs" / name).final
        shared = "–" if name == "local-only" else f"{final['knn_global']:.3f}"
        assert rows[name].split() == [shared, f"{final['knn_mean']:.3f}"]


@pytest.mark.parametrize(("subfolders", "clients"), [(0, 5), (2, 2)])
def test_own_images_takes_flat_folders_and_folders_of_clients(
    example, tmp_path, subfolders, clients
):
    folder = tmp_path / "images"
    random = np.random.default_rng(0)
    for number in range(20):
        place = folder / f"site{number % subfolders}" if subfolders else folder
        place.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (40, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number:02d}.png")
    (folder / ".DS_Store").write_text("what a file browser leaves is no image")
    printed = example("own_images.py", str(folder), *(s for s in TINY if "clients" not in s))
    run = Run(tmp_path / "runs" / "own-images")
    assert run.facts["clients"] == clients
    assert not run.facts["labelled"]
    assert (run.path / "encoder.safetensors").is_file()
    assert "00.png are " in printed


@pytest.mark.parametrize("arguments", [(), ("nowhere",)])
def test_own_images_asks_for_its_folder(example, arguments):
    with pytest.raises(SystemExit, match=r"give a folder of images: .* FOLDER"):
        example("own_images.py", *arguments)


def test_own_algorithm_runs_to_its_end(example, tmp_path):
    printed = example("own_algorithm.py", *DIGITS)
    final = json.loads((tmp_path / "runs" / "local-heads" / "final.json").read_text())
    assert f"loss {final['loss']:.3f}" in printed


def test_own_algorithm_takes_the_backbone_that_arrives_and_keeps_its_heads():
    names = runpy.run_path(str(EXAMPLES / "own_algorithm.py"), run_name="own_algorithm")
    config = load_config("demo", DIGITS)
    dataset = load_federated(config).dataset
    method = build_method(config, dataset.channels, dataset.image_size)
    global_ = Learner(method, config.local)
    models = Models(global_, None, torch.zeros(0))
    zeros = torch.zeros(global_.flat.layout.shared)
    algorithm = names["LocalHeads"](names["LocalHeadsOptions"]())

    algorithm.arrive(models, zeros, zeros + 1, None)
    for name, tensor in global_.flat.layout.tensors(global_.flat.shared).items():
        assert torch.all(tensor == (0 if name.startswith("backbone.") else 1)), name

    algorithm.arrive(models, zeros, None, None)  # a client's first round: all of Θ
    assert torch.equal(global_.flat.shared, zeros)
