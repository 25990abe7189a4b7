"""scikit-learn's bundled handwritten digits: 1,797 real grey images of 8×8, for quick tests.

Too easy to show learning (raw-pixel kNN gives about 0.97) but real, and always at hand.
"""

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from ssfl.data.images import DataSet, Images, channel_statistics
from ssfl.data.split import stratified_split
from ssfl.section import Section
from ssfl.seeding import numpy_generator


class DigitsOptions(Section):
    """scikit-learn's 8×8 digits."""

    source: Literal["digits"] = "digits"
    image_size: int = Field(8, ge=8, le=256)
    """Height and width in pixels; above 8 the images are enlarged (bilinear)."""
    test_fraction: float = Field(0.2, gt=0, lt=1)
    """Share of the images of each class kept for testing."""


class Digits:
    """The `digits` source."""

    Options = DigitsOptions

    @staticmethod
    def load(options: DigitsOptions, *, root: Path, seed: int, progress: bool = False) -> DataSet:
        """Read the bundled images and split them, each class alike, by the seed."""
        from sklearn.datasets import load_digits

        bundle = load_digits()
        grey: NDArray[np.float64] = bundle.images
        labels = np.asarray(bundle.target, dtype=np.int64)
        pixels = torch.from_numpy(np.rint(grey * (255 / 16)).astype(np.float32))[:, None]
        if options.image_size != 8:
            size = (options.image_size, options.image_size)
            pixels = torch.nn.functional.interpolate(pixels, size, mode="bilinear")
        images = pixels.round().to(torch.uint8).contiguous()
        rng = numpy_generator(seed, "digits-split")
        train, test = stratified_split(labels, options.test_fraction, rng)
        mean, std = channel_statistics(images[train])
        return DataSet(
            name="digits",
            train=Images(images[train], torch.from_numpy(labels[train])),
            test=Images(images[test], torch.from_numpy(labels[test])),
            classes=tuple(str(digit) for digit in range(10)),
            owners=None,
            mean=mean,
            std=std,
            presets="digits",
        )
