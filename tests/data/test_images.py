"""What a source of one's own may get wrong is said as it hands its images over. Images are chosen
among without a second copy of all."""

from typing import Any

import numpy as np
import pytest
import torch

from ssfl.data.images import DataSet, Images, parted


def images(channels: int = 3, size: int = 8, first_label: int = 0) -> Images:
    pixels = torch.zeros(6, channels, size, size, dtype=torch.uint8)
    return Images(pixels, torch.arange(6) % 3 + first_label)


def made(**changed: Any) -> DataSet:
    usual = {
        "name": "made",
        "train": images(),
        "test": images(),
        "classes": ("a", "b", "c"),
        "owners": None,
        "mean": (0.5, 0.5, 0.5),
        "std": (0.2, 0.2, 0.2),
        "presets": "cifar",
    }
    return DataSet(**{**usual, **changed})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"train": images(channels=2)}, "1 or 3 channels, .* there are 2 channels, 3 means"),
        ({"mean": (0.5,)}, "a number for each: there are 3 channels, 1 means and 3 deviations"),
        ({"test": images(size=4)}, r"of the train images' shape \(3, 8, 8\), not \(3, 4, 4\)"),
        ({"train": images(first_label=1)}, "labels must be from 0 to 2, .* not 1 to 3"),
        ({"test": images(first_label=-1)}, "labels must be from 0 to 2, .* not -1 to 1"),
    ],
)
def test_images_that_do_not_fit_each_other_are_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        made(**changed)


def test_what_is_not_known_is_not_held_against_anything() -> None:
    unlabelled = Images(images().pixels)
    assert made(train=unlabelled, test=None, classes=None).classes is None
    assert made(classes=None, test=images(first_label=7)).test is not None


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
def test_images_are_parted_in_the_memory_that_they_are_in(share: float) -> None:
    pixels = torch.arange(1000).view(-1, 1, 1, 1).expand(-1, 1, 2, 2).contiguous()
    chosen = np.random.default_rng(0).random(1000) < share
    many, few = np.flatnonzero(~chosen), np.flatnonzero(chosen)
    at = pixels.data_ptr()
    kept, rest = parted(pixels, many, few)
    assert kept[:, 0, 1, 1].tolist() == many.tolist()
    assert rest[:, 0, 1, 1].tolist() == few.tolist()
    assert kept.is_contiguous()
    assert rest.is_contiguous()
    assert (kept.data_ptr(), rest.data_ptr()) == (at, at + kept.nbytes)
