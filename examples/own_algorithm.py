"""An algorithm of one's own in a script: clients share the backbone and keep their heads.

Every client learns against its own projector and predictor, as FedPer does with classifiers
(Arivazhagan et al. 2019). docs/adding-an-algorithm.md explains the interface.

python examples/own_algorithm.py [section.key=value ...]
"""

import sys
from typing import Literal

from torch import Tensor

import ssfl
from ssfl.algorithms import ALGORITHMS
from ssfl.algorithms.base import AlgorithmOptions, Models
from ssfl.algorithms.global_ssfl import GlobalSSFL
from ssfl.models.flat import Kind


class LocalHeadsOptions(AlgorithmOptions):
    """Local heads have nothing to set."""

    name: Literal["local-heads"] = "local-heads"


class LocalHeads(GlobalSSFL):
    """Training is Global-SSFL's; of the Θ that arrives a client takes the backbone only."""

    Options = LocalHeadsOptions
    remembers = True

    def arrive(
        self, models: Models, theta: Tensor, mine: Tensor | None, memory: Tensor | None
    ) -> Tensor | None:
        flat = models.global_.flat
        flat.shared.copy_(theta)
        if mine is None:  # the client's first round
            return None
        for entry in flat.layout.entries:
            if not entry.name.startswith("backbone.") and entry.kind is not Kind.HOME:
                flat.vector[entry.range] = mine[entry.range]
        return None


ALGORITHMS.register("local-heads", f"{__name__}:LocalHeads")

if __name__ == "__main__":
    settings = ["name=local-heads", "algorithm.name=local-heads", *sys.argv[1:]]
    run = ssfl.train(ssfl.load_config("demo", settings))
    print(f"loss {run.final['loss']:.3f}, kNN, mean over clients {run.final['knn_mean']:.3f}")
