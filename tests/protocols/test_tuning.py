"""Fine-tuning an encoder of a run: whose encoder, on which images, seen how."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ssfl.evaluation.finetune import FinetuneOptions
from ssfl.experiment import train
from ssfl.protocols import tuning
from ssfl.protocols.bench import GLOBAL, Bench
from ssfl.run import Run
from tiny import tiny

FEW = torch.arange(5, 400, 7)
ROWS = torch.arange(3, 1200, 4)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(
        tiny(algorithm={"name": "per-ssfl"}, server={"rounds": 1}),
        out=tmp_path_factory.mktemp("runs") / "run",
    )


@pytest.fixture
def bench(run: Run) -> Bench:
    return Bench(run)


def test_one_step_of_a_new_head_on_the_encoder_asked_for_is_as_worked_out_by_hand(
    run: Run, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From zero, and with the encoder's weights at rest, a step is a product of matrices."""
    monkeypatch.setattr(tuning, "_augmentation", lambda _: None)
    rate = 0.7
    options = FinetuneOptions(epochs=1, batch=512, lr=0, head_lr=rate, momentum=0, weight_decay=0)
    train_, test = bench.data.dataset.train, bench.data.dataset.test
    pull = np.eye(10)[train_.labels[FEW].numpy()] - 0.1
    found = {}
    for who in (GLOBAL, 0, 3):
        encoder = run.global_encoder() if who == GLOBAL else run.personal_encoder(who)
        encoder.backbone.train()  # batch norm by the batch, whose statistics it takes up
        seen = encoder(train_.pixels[FEW]).double().numpy()
        encoder.backbone.eval()
        unseen = encoder(test.pixels[ROWS]).double().numpy()
        scores = unseen @ (rate * pull.T @ seen / len(FEW)).T + rate * pull.mean(0)
        by_hand = (scores.argmax(1) == test.labels[ROWS].numpy()).mean()
        found[who] = tuning.finetuned(bench, who, FEW, ROWS, options)
        assert found[who] == pytest.approx(by_hand, abs=1e-9)
    assert len(set(found.values())) == 3


Augment = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


def augmentation(bench: Bench, presets: str, monkeypatch: pytest.MonkeyPatch) -> Augment:
    """How images of such a data set are seen in fine-tuning."""
    given: list[Any] = []

    def finetune(*arguments: Any, **_: Any) -> SimpleNamespace:
        given.extend(arguments)
        return SimpleNamespace(accuracy=0.5)

    monkeypatch.setattr(tuning, "finetune", finetune)
    bench.data = replace(bench.data, dataset=replace(bench.data.dataset, presets=presets))
    tuning.finetuned(bench, GLOBAL, FEW, ROWS, FinetuneOptions())
    assert given[8] == bench.config.seed  # the dice of an experiment are its own
    augment: Augment = given[6]
    return augment


@pytest.mark.parametrize("presets", ["cifar", "photo"])
def test_photos_are_fine_tuned_on_shifted_and_mirrored_and_not_recoloured(
    bench: Bench, presets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    augment = augmentation(bench, presets, monkeypatch)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    views = augment(torch.from_numpy(pixels).repeat(300, 1, 1, 1), torch.Generator().manual_seed(0))
    (mean,), (std,) = bench.data.dataset.mean, bench.data.dataset.std
    framed = (np.pad(pixels / 255, 4) - mean) / std
    places = [framed[y : y + 8, x : x + 8] for y in range(9) for x in range(9)]
    all_ways = np.stack([way for place in places for way in (place, place[:, ::-1])])
    gaps = np.abs(views[:, 0].numpy()[:, None] - all_ways).max((2, 3))
    assert gaps.min(1).max() < 1e-4
    drawn = set(gaps.argmin(1).tolist())
    assert len(drawn) > 100  # of 162; 300 even draws meet some 137 of them
    assert 40 < len([way for way in drawn if way % 2]) < len(drawn) - 40


def test_digits_are_fine_tuned_on_zoomed_and_never_mirrored(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    augment = augmentation(bench, "digits", monkeypatch)
    pixels = torch.zeros(200, 1, 8, 8, dtype=torch.uint8)
    pixels[..., 0] = 255  # which no crop of two fifths or more brings to the right edge
    views = augment(pixels, torch.Generator().manual_seed(0))[:, 0]
    dark = views.min()
    assert (views[..., -1] == dark).all()
    wide = {int(count) for count in (views[..., 4, :] > dark).sum(1)}
    assert {0, 1, 2} <= wide  # cut off, as it was, and larger
