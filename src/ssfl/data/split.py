"""A seeded split of images into train and test, group by group (each class, each owner)."""

import numpy as np
from numpy.typing import NDArray


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
