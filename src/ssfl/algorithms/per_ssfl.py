"""Per-SSFL: a personal encoder held near the global one in what they say, not in their weights.

The paper's algorithm 2 (PyTorch listing in its appendix B). Θ moves as in Global-SSFL; θ_k moves
by its own loss and by λ times the distance between its predictions and Θ's of the same views.
"""

from typing import Literal

from pydantic import Field
from torch import Tensor

from ssfl.algorithms.base import Models
from ssfl.algorithms.late import Late, LateOptions
from ssfl.ssl.base import Batch, negative_cosine


class PerSSFLOptions(LateOptions):
    """How near the personal representations stay to the global ones."""

    name: Literal["per-ssfl"] = "per-ssfl"
    weight: float = Field(0.1, ge=0)
    """λ: weight of the distance between personal and global predictions."""


class PerSSFL(Late):
    """Θ and θ_k descend side by side on the same views."""

    Options = PerSSFLOptions
    personal = True
    plain_theta = True
    encoder = "personal"
    metrics = ("loss", "personal_loss")

    def __init__(self, options: PerSSFLOptions) -> None:
        super().__init__(options)
        self.weight = options.weight

    def step(self, models: Models, *batches: Batch) -> tuple[Tensor, ...]:
        (batch,) = batches
        global_, personal = models.global_, models.own

        # Optimise the global parameter Θ locally
        global_outputs = global_(batch)
        global_loss = global_.loss(global_outputs)
        global_.descend(global_loss)

        # Optimise the personal parameter θ_k; Θ's predictions are those from before its update
        outputs = personal(batch)
        loss = personal.loss(outputs)
        loss = loss + self.weight * distance(outputs.p, global_outputs.p)
        personal.descend(loss)
        return global_loss.detach(), loss.detach()


def distance(p: Tensor, target: Tensor) -> Tensor:
    """Mean of D(p_i, P_j) over all pairs of views, no gradient through P.

    With two views: (D(p1, P1) + D(p1, P2) + D(p2, P1) + D(p2, P2)) / 4; with one: D(p, P).
    """
    return negative_cosine(p.unsqueeze(1), target.unsqueeze(0))
