"""Images as they travel through the house: one uint8 tensor, and labels or owners beside it.

Clients never hold copies of pixels: a client is a list of indices into one `Images`. Labels are
optional everywhere; training never reads them, evaluation does when they are there.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Images:
    """N images, and what is known of each."""

    pixels: torch.Tensor
    """uint8, N×C×H×W, contiguous; H = W."""
    labels: torch.Tensor | None = None
    """int64, N: the class of each image, where known."""
    owners: torch.Tensor | None = None
    """int64, N: the natural client that holds each image, where there is one."""

    def __post_init__(self) -> None:
        if self.pixels.dtype != torch.uint8 or self.pixels.ndim != 4:
            raise ValueError(
                f"pixels must be uint8 of shape N×C×H×W, not {self.pixels.dtype} "
                f"of shape {tuple(self.pixels.shape)}"
            )
        if self.pixels.shape[2] != self.pixels.shape[3]:
            raise ValueError(f"images must be square, not {tuple(self.pixels.shape[2:])}")
        if not self.pixels.is_contiguous():
            raise ValueError("pixels must be contiguous")
        for name, values in (("labels", self.labels), ("owners", self.owners)):
            if values is None:
                continue
            if values.dtype != torch.int64 or values.shape != self.pixels.shape[:1]:
                raise ValueError(
                    f"{name} must be int64 of shape ({len(self.pixels)},), not {values.dtype} "
                    f"of shape {tuple(values.shape)}"
                )

    def __len__(self) -> int:
        return len(self.pixels)


@dataclass(frozen=True, eq=False)
class DataSet:
    """A named collection of train images, maybe test images, and what a model must know of them."""

    name: str
    train: Images
    test: Images | None
    classes: tuple[str, ...] | None
    """What each label means."""
    owners: tuple[str, ...] | None
    """Names of the natural clients, where the data came with any."""
    mean: tuple[float, ...]
    """Per channel, in [0, 1]: subtracted by the views before anything is learned."""
    std: tuple[float, ...]
    presets: str
    """The augmentation preset suited to these images: "cifar", "digits" or "photo"."""
    notes: tuple[str, ...] = ()
    """What a person should know, e.g. files that could not be read."""

    @property
    def channels(self) -> int:
        return self.train.pixels.shape[1]

    @property
    def image_size(self) -> int:
        """Pixels along each side of every image."""
        return self.train.pixels.shape[2]

    def __post_init__(self) -> None:
        """What a source of one's own may get wrong, and no step would notice or name."""
        shape = tuple(self.train.pixels.shape[1:])
        if shape[0] not in (1, 3) or not len(self.mean) == len(self.std) == shape[0]:
            raise ValueError(
                f"images must have 1 or 3 channels, and mean and std a number for each: there are "
                f"{shape[0]} channels, {len(self.mean)} means and {len(self.std)} deviations"
            )
        if self.test is not None and tuple(self.test.pixels.shape[1:]) != shape:
            raise ValueError(
                f"test images must be of the train images' shape {shape}, "
                f"not {tuple(self.test.pixels.shape[1:])}"
            )
        for images in filter(None, (self.train, self.test)):
            if self.classes is not None and images.labels is not None and len(images):
                low, high = int(images.labels.min()), int(images.labels.max())
                if low < 0 or high >= len(self.classes):
                    raise ValueError(
                        f"labels must be from 0 to {len(self.classes) - 1}, as there are "
                        f"{len(self.classes)} classes, not {low} to {high}"
                    )


def moved_up(pixels: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
    """`pixels[rows]`, for rows in order, in the memory of `pixels`, which are lost: for a second
    copy of all images there may be no room."""
    for start in range(0, len(rows), 64):
        some = torch.from_numpy(rows[start : start + 64])
        pixels[start : start + len(some)] = pixels[some]
    return pixels[: len(rows)]


def parted(
    pixels: torch.Tensor, many: NDArray[np.int64], few: NDArray[np.int64]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`pixels[many]` and `pixels[few]`, both in order and together all of them, likewise."""
    rest = pixels[torch.from_numpy(few)]
    kept = moved_up(pixels, many)
    pixels[len(many) :] = rest
    return kept, pixels[len(many) :]


def channel_statistics(
    pixels: torch.Tensor,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Per-channel mean and standard deviation of uint8 images, in [0, 1].

    Counted over the 256 levels in integers, so the result is exact and the same on any machine.
    """
    means, stds = [], []
    levels = torch.arange(256, dtype=torch.float64) / 255
    for channel in range(pixels.shape[1]):
        counts = torch.zeros(256, dtype=torch.int64)
        # In slices: bincount widens its input to int64, eight times the pixels' own size.
        for chunk in torch.split(pixels[:, channel], 4096):
            counts += torch.bincount(chunk.reshape(-1), minlength=256)
        share = counts.double() / max(1, int(counts.sum()))
        mean = float((share * levels).sum())
        variance = float((share * (levels - mean) ** 2).sum())
        means.append(mean)
        # A constant channel must not be divided by zero later.
        stds.append(max(variance**0.5, 1 / 255))
    return tuple(means), tuple(stds)
