"""Seeded choices among images: train and test, group by group; and the few that are labelled.

Which few are labelled is said once, here: supervised clients that train on 1 % of the labels and
a classifier that is fitted with 1 % of them, in runs of the same seed, see the very same images.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssfl.errors import DataError
from ssfl.seeding import numpy_generator


def stratified_split(
    groups: NDArray[np.int64], test_fraction: float, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sorted (train, test) indices, `test_fraction` of every group in test.

    Each group's test share is rounded to the nearest whole, and every group keeps at least one
    image to train on.
    """
    train, test = [], []
    for group in np.unique(groups):
        mine = rng.permutation(np.flatnonzero(groups == group))
        cut = min(int(np.rint(len(mine) * test_fraction)), len(mine) - 1)
        test.append(mine[:cut])
        train.append(mine[cut:])
    if not train:
        empty = np.empty(0, dtype=np.int64)
        return empty, empty
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))


def labelled_images(labels: Tensor | NDArray[np.int64], share: float, seed: int) -> Tensor:
    """The images, as sorted indices, that count as labelled in an experiment of this seed."""
    return label_subset(labels, share, numpy_generator(seed, "label-subset", round(share * 10_000)))


def label_subset(
    labels: Tensor | NDArray[np.int64], fraction: float, rng: np.random.Generator
) -> Tensor:
    """Indices, sorted, of a class-balanced `fraction` of `labels`: the same number of each class.
    The whole is all of them, balanced or not.

    At least one of each class present; a class with fewer gives all it has, and the others do not
    make up for it. Negative labels mean unlabelled and are left out.
    """
    if not 0 < fraction <= 1:
        raise DataError(f"a fraction of the labels lies between 0 and 1, {fraction} does not")
    values = np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)
    present = np.unique(values[values >= 0])
    if len(present) == 0:
        raise DataError("no labels to take a subset of: this data set is unlabelled")
    if fraction == 1:
        return torch.from_numpy(np.flatnonzero(values >= 0))
    share = max(1, round(fraction * int((values >= 0).sum()) / len(present)))
    chosen = [
        rng.permutation(members)[:share]
        for members in (np.flatnonzero(values == label) for label in present)
    ]
    return torch.from_numpy(np.sort(np.concatenate(chosen)).astype(np.int64))
