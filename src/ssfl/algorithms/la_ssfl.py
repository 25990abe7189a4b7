"""LA-SSFL: Global-SSFL, then a step of SGD on the client's own images at inference.

The paper's FedAvg-LA listing. Training is Global-SSFL's; only the encoder a client is judged by
differs. The step has a rate of its own, since the schedule's ends near zero.
"""

from typing import ClassVar, Literal

from pydantic import Field

from ssfl.algorithms.base import AlgorithmOptions
from ssfl.algorithms.global_ssfl import GlobalSSFL


class AdaptationOptions(AlgorithmOptions):
    """Local adaptation at inference."""

    adapt_lr: float | None = Field(None, gt=0)
    """Learning rate of the adaptation (default: `local.lr`)."""
    adapt_steps: int = Field(1, ge=1)
    """SGD steps of the adaptation."""


class LASSFLOptions(AdaptationOptions):
    """LA-SSFL is its adaptation."""

    name: Literal["la-ssfl"] = "la-ssfl"


class LASSFL(GlobalSSFL):
    """Θ is learned as ever; a client's encoder is Θ after `adapt`."""

    Options: ClassVar[type[AlgorithmOptions]] = LASSFLOptions
    plain_theta = True
    encoder = "adapted"

    def __init__(self, options: AdaptationOptions) -> None:
        super().__init__(options)
        self.adapt_lr = options.adapt_lr
        self.adapt_steps = options.adapt_steps

    def adapt_rate(self, base: float) -> float:
        return base if self.adapt_lr is None else self.adapt_lr
