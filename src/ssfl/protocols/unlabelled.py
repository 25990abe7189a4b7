"""The health of a run's encoders, each on the images it is meant for. Needs no label.

A client's encoder is looked at on the client's own images, Θ on all of them; what an encoder makes
of two views of a few images tells how little it minds augmentation.
"""

import math
from dataclasses import asdict

import torch
from torch import Tensor

from ssfl.evaluation.health import ROWS, healths
from ssfl.evaluation.spread import thin
from ssfl.federation.wellbeing import BeyondFeatures, beyond_features
from ssfl.protocols.bench import GLOBAL, Bench

Figures = dict[str, dict[str, float | None]]
"""Label-free figures by encoder: "global", or a client's number."""


class Wellbeing:
    """Sees encoders one by one, while each is in place, and measures several together."""

    def __init__(self, bench: Bench, *, features_known: bool) -> None:
        self._bench, self._features_known = bench, features_known
        self._seen: dict[int, tuple[Tensor, BeyondFeatures]] = {}

    def see(self, who: int) -> None:
        """Keep what this encoder makes of a sample of its images."""
        bench, data = self._bench, self._bench.data
        rows = torch.arange(len(data.dataset.train)) if who == GLOBAL else data.train_indices(who)
        if len(rows) < 2:
            return
        sample = thin(rows, ROWS).to(bench.device)
        if self._features_known:
            features = bench.train_features(who)[sample]
        else:
            features = bench.features_of(who, bench.trainer.pixels[sample])
        trainer = bench.trainer
        self._seen[who] = (
            features,
            beyond_features(trainer, bench.encoder(who), trainer.pixels, rows),
        )

    def figures(self) -> Figures:
        """Of all encoders seen since the last time."""
        seen, self._seen = self._seen, {}
        found = healths([features for features, _ in seen.values()])
        return {
            "global" if who == GLOBAL else str(who): {
                name: value if value is None or math.isfinite(value) else None
                for name, value in (asdict(figures) | more._asdict()).items()
            }
            for (who, (_, more)), figures in zip(seen.items(), found, strict=True)
        }
