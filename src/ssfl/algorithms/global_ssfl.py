"""Global-SSFL: FedAvg on the self-supervised loss (the paper's algorithm 1 with θ_k = Θ)."""

from typing import ClassVar, Literal

from torch import Tensor

from ssfl.algorithms.base import Algorithm, AlgorithmOptions, Models
from ssfl.ssl.base import Batch


class GlobalSSFLOptions(AlgorithmOptions):
    """Global-SSFL has nothing to set."""

    name: Literal["global-ssfl"] = "global-ssfl"


class GlobalSSFL(Algorithm):
    """Optimise the global parameter Θ locally; there is no other."""

    Options: ClassVar[type[AlgorithmOptions]] = GlobalSSFLOptions
    plain_theta = True

    def step(self, models: Models, *batches: Batch) -> tuple[Tensor, ...]:
        (batch,) = batches
        loss = models.global_.loss(models.global_(batch))
        models.global_.descend(loss)
        return (loss.detach(),)
