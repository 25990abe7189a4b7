"""MAML-SSFL: learn a Θ that one step of SGD on a client's images turns into a good encoder.

The paper's MAML-SSFL listing. M inner steps on B′ lead from Θ to Θ′; the loss of Θ′ on B moves Θ.
First-order takes ∇_Θ L(Θ′) for ∇_Θ′ L(Θ′); second-order differentiates through the inner steps,
where what a method's loss detaches (SimSiam's z) stays constant. Batch-norm statistics see both.
"""

from typing import Literal

from pydantic import Field
from torch import Tensor

from ssfl.algorithms.base import Models
from ssfl.algorithms.la_ssfl import LASSFL, AdaptationOptions
from ssfl.ssl.base import Batch


class MAMLSSFLOptions(AdaptationOptions):
    """The inner loop of training, and the adaptation at inference."""

    name: Literal["maml-ssfl"] = "maml-ssfl"
    inner_steps: int = Field(1, ge=1)
    """M: plain SGD steps of the inner loop, at the local learning rate."""
    second_order: bool = False
    """Differentiate through the inner steps (exact, slower) rather than around them."""


class MAMLSSFL(LASSFL):
    """Two batches a step: B′ for the inner loop, B for the outer; adapted as in LA-SSFL."""

    Options = MAMLSSFLOptions
    batches = 2
    whole_batches = True  # Θ′ is one step on all of B′, known before any of B is seen

    def __init__(self, options: MAMLSSFLOptions) -> None:
        super().__init__(options)
        self.inner_steps = options.inner_steps
        self.second_order = options.second_order
        self.differentiates_twice = options.second_order

    def step(self, models: Models, *batches: Batch) -> tuple[Tensor, ...]:
        batch, inner_batch = batches
        model = models.global_

        # Inner loop update
        weights = model.weights()
        for _ in range(self.inner_steps):
            inner_loss = model.loss(model(inner_batch, weights))
            weights = model.inner_step(weights, inner_loss, second_order=self.second_order)

        # Outer loop update
        loss = model.loss(model(batch, weights))
        model.descend(loss)
        return (loss.detach(),)
