"""A classifier from a handful of labels: logistic regression on frozen features.

The penalty is the usual one (scikit-learn's C = 1) on features of unit scale, so it means the same
for every encoder.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ssfl.errors import DataError
from ssfl.evaluation.logistic import fit_logistic
from ssfl.guest import own_torch

FOLDS = 5


@dataclass(frozen=True)
class Classifier:
    """A linear classifier on an encoder's features."""

    classes: tuple[str, ...]
    weight: Tensor
    """(classes, d)."""
    bias: Tensor
    expected: float | None
    """Accuracy on labels it was not fitted to, by cross-validation; None if there are too few."""

    def probabilities(self, features: Tensor) -> Tensor:
        """(N, classes), rows summing to one."""
        return (features @ self.weight.T + self.bias).softmax(1)


@own_torch()
def fit_classifier(features: Tensor, labels: Sequence[str]) -> Classifier:
    """Fit to labelled features, and estimate how good it is from the same few labels."""
    if len(labels) != len(features):
        raise DataError(f"there are {len(features):,} features, but {len(labels):,} labels")
    if not all(isinstance(label, str) for label in labels):  # a tensor's numbers are all distinct
        raise DataError(
            "labels are names, given as text: [str(label) for label in labels.tolist()]"
        )
    classes = tuple(sorted(set(labels)))
    if len(classes) < 2:
        raise DataError("a classifier needs labels of at least two classes")
    targets = torch.tensor([classes.index(label) for label in labels])
    weight, bias = fit_logistic(features, targets, len(classes))
    return Classifier(classes, weight, bias, _cross_validate(features, targets, len(classes)))


def _cross_validate(features: Tensor, targets: Tensor, classes: int) -> float | None:
    """Every label is guessed once by a classifier that has not seen it; folds keep classes even."""
    counts = torch.bincount(targets, minlength=classes)
    folds = min(FOLDS, int(counts.min()))
    if folds < 2:
        return None
    fold = torch.empty_like(targets)
    for label in range(classes):
        members = (targets == label).nonzero()[:, 0]
        fold[members] = torch.arange(len(members)) % folds
    right = 0
    for held_out in range(folds):
        seen, unseen = fold != held_out, fold == held_out
        weight, bias = fit_logistic(features[seen], targets[seen], classes)
        guesses = (features[unseen] @ weight.T + bias).argmax(1)
        right += int((guesses == targets[unseen]).sum())
    return right / len(targets)


def read_labels(path: Path, folders: Sequence[Path] = ()) -> tuple[list[Path], list[str]]:
    """Image files and their labels from a CSV of `file,label` (a header line is optional).

    Files are looked for beside the CSV first, then from the working directory, then in `folders`.
    One that is named twice counts once: in both halves of a cross-validation it would flatter.
    """
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            rows = list(csv.reader(lines))
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a CSV file in UTF-8: {error}") from error
    labelled: dict[Path, tuple[Path, str]] = {}  # by where it is, however it was named
    for number, row in enumerate(rows, 1):
        if not row or not any(cell.strip() for cell in row):
            continue
        if len(row) < 2:
            raise DataError(f"{path}, line {number}: write it as file,label")
        name, label = row[0].strip(), row[1].strip()
        if number == 1 and label.lower() in ("label", "class"):
            continue
        if not label:
            raise DataError(f"{path}, line {number}: {name} has no label: leave the line out")
        places = [path.parent / name, Path(name), *(folder / name for folder in folders)]
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            among = ", ".join(["beside it", "here", *map(str, folders)])
            raise DataError(f"{path}, line {number}: there is no image {name} (looked {among})")
        _, before = labelled.setdefault(found.resolve(), (found, label))
        if before != label:
            raise DataError(
                f"{path}, line {number}: {name} is {label} here and {before} before: keep one"
            )
    if not labelled:
        raise DataError(f"{path} has no labels: write lines of file,label")
    return [file for file, _ in labelled.values()], [label for _, label in labelled.values()]
