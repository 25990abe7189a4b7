"""Local-only: every client for itself, the end of the scale where nothing is shared.

θ_k starts as the Θ its client is first sent; Θ never moves and no update leaves the client.
"""

from typing import Literal

from torch import Tensor

from ssfl.algorithms.base import Algorithm, AlgorithmOptions, Models
from ssfl.ssl.base import Batch


class LocalOnlyOptions(AlgorithmOptions):
    """Local-only has nothing to set."""

    name: Literal["local-only"] = "local-only"


class LocalOnly(Algorithm):
    """Optimise the personal parameter θ_k; there is no other."""

    Options = LocalOnlyOptions
    personal = True
    sends = False
    encoder = "personal"

    def step(self, models: Models, *batches: Batch) -> tuple[Tensor, ...]:
        (batch,) = batches
        loss = models.own.loss(models.own(batch))
        models.own.descend(loss)
        return (loss.detach(),)
