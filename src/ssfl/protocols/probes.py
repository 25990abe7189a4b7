"""Linear probes of a run's encoders: a classifier on each, with all of the labels or a few."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ssfl.evaluation.linear import linear_probes
from ssfl.evaluation.options import LinearOptions
from ssfl.protocols.bench import GLOBAL, Bench


class Lesson(NamedTuple):
    """What a classifier learns from: all training images, unless told otherwise."""

    share: float = 1.0
    """Of the labels."""
    mirrored: bool = False
    """The images' mirror images too."""


EVERYTHING = Lesson()
MIRRORED = Lesson(mirrored=True)


class Probes:
    """Which test images the probe of each encoder gets right, after each lesson."""

    def __init__(self, bench: Bench, options: LinearOptions) -> None:
        self._bench, self._options = bench, options
        self._right: dict[tuple[int, Lesson], Tensor] = {}

    def fit(self, encoders: Sequence[int], lesson: Lesson) -> None:
        """A classifier for every encoder that has none yet after this lesson, all at once."""
        bench = self._bench
        new = {
            bench.key(who): who for who in encoders if (bench.key(who), lesson) not in self._right
        }
        if not new:
            return
        labels = bench.train_labels
        rows = bench.labelled_rows(lesson.share).to(labels.device) if lesson.share < 1 else None
        labels = (labels if rows is None else labels[rows]).repeat(1 + lesson.mirrored)
        test = [bench.test_features(who) for who in new.values()]
        results = linear_probes(
            [self._seen(who, lesson, rows) for who in new.values()],
            labels,
            test,
            bench.test_labels,
            bench.classes,
            self._options,
            bench.config.seed,
        )
        for key, result, features in zip(new, results, test, strict=True):
            self._right[key, lesson] = result.predict(features) == bench.test_labels

    def _seen(self, who: int, lesson: Lesson, rows: Tensor | None) -> Tensor:
        sights = [self._bench.train_features(who)]
        if lesson.mirrored:
            sights.append(self._bench.mirrored_features(who))
        if rows is not None:
            sights = [features[rows] for features in sights]
        return torch.cat(sights) if len(sights) > 1 else sights[0]

    def right(self, who: int, lesson: Lesson = EVERYTHING) -> Tensor:
        """Which test images this encoder's probe gets right."""
        return self._right[self._bench.key(who), lesson]

    def forget_clients(self) -> None:
        """Let go of all but Θ's, which clients to come may share."""
        self._right = {key: right for key, right in self._right.items() if key[0] == GLOBAL}
