"""BiLevel-SSFL: a personal encoder held near the global one in its weights (Ditto without labels).

The paper's BiLevel-SSFL listing. Θ moves as in Global-SSFL; θ_k moves by its own loss and is
pulled to Θ^(t), the parameters the server sent this round.
"""

from typing import Literal

from pydantic import Field
from torch import Tensor

from ssfl.algorithms.base import Models
from ssfl.algorithms.late import Late, LateOptions
from ssfl.ssl.base import Batch


class BiLevelSSFLOptions(LateOptions):
    """How near the personal weights stay to the global ones."""

    name: Literal["bilevel-ssfl"] = "bilevel-ssfl"
    weight: float = Field(1.0, ge=0)
    """λ: weight of the squared distance between θ_k and Θ."""
    penalty: Literal["equation", "listing"] = "equation"
    """λ/2 ‖θ_k − Θ‖² as in the paper's equation, or λ ‖θ_k − Θ‖² as in its listing."""


class BiLevelSSFL(Late):
    """Θ and θ_k descend side by side, θ_k on a leash."""

    Options = BiLevelSSFLOptions
    personal = True
    anchored = True
    plain_theta = True
    encoder = "personal"
    metrics = ("loss", "personal_loss")

    def __init__(self, options: BiLevelSSFLOptions) -> None:
        super().__init__(options)
        self.pull = options.weight * (2 if options.penalty == "listing" else 1)

    def step(self, models: Models, *batches: Batch) -> tuple[Tensor, ...]:
        (batch,) = batches
        global_, personal = models.global_, models.own

        # Optimise the global parameter Θ locally
        global_loss = global_.loss(global_(batch))
        global_.descend(global_loss)

        # Optimise the personal parameter θ_k: loss + pull/2 ‖θ_k − Θ^(t)‖²
        loss = personal.loss(personal(batch))
        personal.hold(models.received, self.pull)
        personal.descend(loss)
        return global_loss.detach(), loss.detach()
