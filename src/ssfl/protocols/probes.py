"""Linear probes of a run's encoders: a classifier on each, with all of the labels or a few."""

from collections.abc import Sequence

from torch import Tensor

from ssfl.evaluation.linear import linear_probes
from ssfl.evaluation.options import LinearOptions
from ssfl.protocols.bench import GLOBAL, Bench


class Probes:
    """Which test images the probe of each encoder gets right, with each share of the labels."""

    def __init__(self, bench: Bench, options: LinearOptions) -> None:
        self._bench, self._options = bench, options
        self._right: dict[tuple[int, float], Tensor] = {}

    def fit(self, encoders: Sequence[int], share: float) -> None:
        """A classifier with a share of the labels for every encoder that has none yet, all at
        once."""
        bench = self._bench
        new = {
            bench.key(who): who for who in encoders if (bench.key(who), share) not in self._right
        }
        if not new:
            return
        train = [bench.train_features(who) for who in new.values()]
        test = [bench.test_features(who) for who in new.values()]
        labels = bench.train_labels
        if share < 1:
            rows = bench.labelled_rows(share).to(labels.device)
            train, labels = [features[rows] for features in train], labels[rows]
        results = linear_probes(
            train,
            labels,
            test,
            bench.test_labels,
            bench.classes,
            self._options,
            bench.config.seed,
        )
        for key, result, features in zip(new, results, test, strict=True):
            self._right[key, share] = result.predict(features) == bench.test_labels

    def right(self, who: int, share: float = 1.0) -> Tensor:
        """Which test images this encoder's probe gets right."""
        return self._right[self._bench.key(who), share]

    def forget_clients(self) -> None:
        """Let go of all but Θ's, which clients to come may share."""
        self._right = {key: right for key, right in self._right.items() if key[0] == GLOBAL}
