"""A data set and who holds what of it: what a federation trains and tests on.

Pixels stay in one place. A client is two lists of indices, one into the train images and one into
the test images, so ten thousand clients cost no more memory than one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from ssfl.data.images import DataSet
from ssfl.data.partition import (
    Indices,
    PartitionOptions,
    by_owner,
    matched_test,
    natural_owners,
    partition,
)
from ssfl.data.split import labelled_images
from ssfl.errors import ConfigError, DataError
from ssfl.seeding import numpy_generator


@dataclass(frozen=True, eq=False)
class FederatedData:
    """A data set split over clients."""

    dataset: DataSet
    train_parts: list[Indices]
    test_parts: list[Indices] | None
    names: tuple[str, ...] | None = None
    """The clients' own names, where the partition is natural and the data names its owners; or
    their numbers in the partition, where some do not take part."""
    ids: tuple[int, ...] | None = None
    """The clients' ids, where they are a part of a larger federation. Else they count from 0."""

    def __len__(self) -> int:
        return len(self.train_parts)

    def clients(self) -> Sequence[int]:
        """The clients' ids, in the order of the parts."""
        return range(len(self.train_parts)) if self.ids is None else self.ids

    def title(self, k: int) -> str:
        """What client k is called: its id and, where it has one, its own name."""
        return str(k) if self.names is None else f"{k} ({self.names[self._place(k)]})"

    def size(self, k: int) -> int:
        """|D_k|: how many training images client k holds."""
        return len(self.train_parts[self._place(k)])

    def sizes(self) -> NDArray[np.int64]:
        """|D_k| for all clients."""
        return np.array([len(part) for part in self.train_parts], dtype=np.int64)

    def train_indices(self, k: int) -> torch.Tensor:
        """Where client k's images are in `dataset.train` (int64, sorted)."""
        return torch.from_numpy(self.train_parts[self._place(k)])

    def test_indices(self, k: int) -> torch.Tensor | None:
        """Where client k's local test images are in `dataset.test`, if there is a test set."""
        if self.test_parts is None:
            return None
        return torch.from_numpy(self.test_parts[self._place(k)])

    def class_counts(self) -> NDArray[np.int64] | None:
        """How many training images of each class each client holds (K × classes)."""
        if self.dataset.train.labels is None:
            return None
        labels, classes = self.dataset.train.labels.numpy(), self.dataset.classes
        width = len(classes) if classes is not None else int(labels.max()) + 1
        counts = [np.bincount(labels[part], minlength=width) for part in self.train_parts]
        return np.stack(counts).astype(np.int64)

    def _place(self, k: int) -> int:
        return k if self.ids is None else self.ids.index(k)


def federate(dataset: DataSet, options: PartitionOptions, seed: int) -> FederatedData:
    """Split a data set over clients. The same seed gives the same split."""
    train = dataset.train
    if len(train) == 0:  # the images are elsewhere: so is who holds them
        return FederatedData(dataset, [], None)
    labels, owners = _array(train.labels), _array(train.owners)
    parts = partition(labels, owners, len(train), options, numpy_generator(seed, "partition"))
    names = None
    clients = np.arange(len(parts))
    if options.kind == "natural" and owners is not None:
        clients = natural_owners(owners, options.min_size)
        if dataset.owners is not None:
            names = tuple(dataset.owners[owner] for owner in clients)
            left_out = _left_out(dataset.owners, names, options.min_size)
            dataset = replace(dataset, notes=(*dataset.notes, *left_out))
    data = FederatedData(dataset, parts, _test_parts(dataset, parts, clients, options, seed), names)
    return data if options.labelled == 1 else _labelled_part(data, options.labelled, seed)


def _left_out(owners: tuple[str, ...], clients: tuple[str, ...], least: int) -> tuple[str, ...]:
    """A note on the owners that are no clients, if there are any."""
    taking_part = set(clients)
    gone = [owner for owner in owners if owner not in taking_part]
    if not gone:
        return ()
    return (
        f"{len(gone):,} of {len(owners):,} owners hold fewer than {least:,} training images "
        f"(partition.min_size) and do not take part ({_first(gone)})",
    )


def _labelled_part(data: FederatedData, share: float, seed: int) -> FederatedData:
    """The same clients with their labelled images alone; test sets are those they had before.

    A client left with fewer than two images could not make a step: it does not take part, and a
    note says so.
    """
    dataset = data.dataset
    if dataset.train.labels is None:
        raise ConfigError(
            f"partition.labelled = {share:g} is a share of the labels, and the {dataset.name} "
            "images have none: leave it at 1"
        )
    chosen = np.zeros(len(dataset.train), dtype=bool)
    chosen[labelled_images(dataset.train.labels, share, seed).numpy()] = True
    parts = [part[chosen[part]] for part in data.train_parts]
    able = [k for k, part in enumerate(parts) if len(part) >= 2]
    if not able:
        raise DataError(
            f"partition.labelled = {share:g} leaves {chosen.sum():,} images, and no client with "
            "two of them: ask for a larger share or fewer clients"
        )
    held = sum(len(parts[k]) for k in able)
    note = f"clients train on {held:,} of {len(chosen):,} images (partition.labelled = {share:g})"
    names = data.names
    if len(able) < len(parts):
        known = names or tuple(map(str, data.clients()))
        gone = [name for name, part in zip(known, parts, strict=True) if len(part) < 2]
        note += (
            f"; {len(gone):,} of {len(parts):,} clients have fewer than two of them and do not "
            f"take part ({_first(gone)})"
        )
        names = tuple(known[k] for k in able)
    return FederatedData(
        replace(dataset, notes=(*dataset.notes, note)),
        [parts[k] for k in able],
        None if data.test_parts is None else [data.test_parts[k] for k in able],
        names,
    )


def _first(names: list[str]) -> str:
    """The first few of them."""
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")


def _test_parts(
    dataset: DataSet,
    parts: list[Indices],
    clients: NDArray[np.int64],
    options: PartitionOptions,
    seed: int,
) -> list[Indices] | None:
    """Local test sets: the owners' own, else matched by class, else an even deal."""
    test = dataset.test
    if test is None:
        return None
    if len(test) == 0:
        raise DataError(f"the test set of '{dataset.name}' is empty")
    owners = _array(test.owners)
    if options.kind == "natural" and owners is not None:
        return by_owner(owners, clients)
    train_labels, test_labels = _array(dataset.train.labels), _array(test.labels)
    rng = numpy_generator(seed, "partition-test")
    if train_labels is None or test_labels is None:
        # With one class for all, "matched by class" is a deal in proportion to size.
        train_labels = np.zeros(len(dataset.train), dtype=np.int64)
        test_labels = np.zeros(len(test), dtype=np.int64)
    return matched_test(train_labels, parts, test_labels, options, rng)


def _array(values: torch.Tensor | None) -> NDArray[np.int64] | None:
    return None if values is None else values.numpy()
