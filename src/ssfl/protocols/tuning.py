"""Fine-tuning an encoder of a run with a few of the labels (the semi-supervised protocol)."""

from collections.abc import Callable

import torch
from torch import Tensor

from ssfl.data.views import ViewOptions, Views, resolve
from ssfl.evaluation.finetune import FinetuneOptions, finetune
from ssfl.protocols.bench import Bench


def finetuned(
    bench: Bench,
    who: int,
    labelled: Tensor,
    test_rows: Tensor,
    options: FinetuneOptions,
) -> float:
    """Accuracy on `test_rows` of a copy trained with the training images `labelled`."""
    train, test = bench.data.dataset.train, bench.test
    assert test is not None
    assert train.labels is not None
    assert test.labels is not None
    what = f"fine-tuning with {len(labelled):,} labels"
    bench.progress(what, 0, 1)
    result = finetune(
        bench.standalone(who).backbone,
        train.pixels[labelled],
        train.labels[labelled],
        test.pixels[test_rows],
        test.labels[test_rows],
        bench.trainer.views.plain,
        _augmentation(bench),
        options,
        bench.config.seed,
        bench.device,
        classes=bench.classes,
    )
    bench.progress(what, 1, 1)
    return result.accuracy


def _augmentation(bench: Bench) -> Callable[[Tensor, torch.Generator], Tensor]:
    """Fine-tuning's mild views: shifts and flips, or the digits' own (a mirrored 2 is no 2)."""
    dataset = bench.data.dataset
    spec = resolve(
        ViewOptions(preset="digits" if dataset.presets == "digits" else "supervised"),
        preset=dataset.presets,
        mean=dataset.mean,
        std=dataset.std,
        image_size=dataset.image_size,
    )
    views = Views(spec, bench.device)

    def augment(pixels: Tensor, dice: torch.Generator) -> Tensor:
        uniforms = torch.rand(1, len(pixels), views.draws, generator=dice, device=pixels.device)
        return views(pixels, uniforms)[0]

    return augment
