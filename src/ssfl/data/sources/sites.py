"""Images that stay where they are: what a coordinator knows of its sites' data, and no more.

`ssfl serve` runs with this source. It holds no image; it fixes what all sites must agree on for
their models to mean the same: channels, size, and the numbers that pixels are normalised by.
"""

from pathlib import Path
from typing import Literal

import torch
from pydantic import Field

from ssfl.data.images import DataSet, Images
from ssfl.section import Section


class SitesOptions(Section):
    """What every site's images are brought to."""

    source: Literal["sites"] = "sites"
    channels: Literal[3] = 3
    """Colour channels: folders of images are read as RGB."""
    image_size: int = Field(32, ge=8, le=1024)
    """Height and width in pixels."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Per channel, in [0, 1]: subtracted from every pixel."""
    std: tuple[float, float, float] = (0.25, 0.25, 0.25)
    """Per channel: what pixels are divided by."""
    preset: Literal["cifar", "photo"] = "cifar"
    """Augmentation preset: 'cifar' for small images, 'photo' (with blur) for large ones."""


class Sites:
    """The `sites` source."""

    Options = SitesOptions

    @staticmethod
    def load(options: SitesOptions, *, root: Path, seed: int, progress: bool = False) -> DataSet:
        """A data set of no images."""
        shape = (0, options.channels, options.image_size, options.image_size)
        return DataSet(
            name="sites",
            train=Images(torch.empty(shape, dtype=torch.uint8)),
            test=None,
            classes=None,
            owners=None,
            mean=options.mean,
            std=options.std,
            presets=options.preset,
        )
