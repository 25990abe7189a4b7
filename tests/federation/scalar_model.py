"""A model small enough to train by hand: w, with loss ½ mean (w − x)² and so gradient w − x̄."""

import torch
from torch import Tensor, nn

from ssfl.models.backbones import Backbone
from ssfl.models.flat import Entry, Kind, Layout
from ssfl.ssl.base import Batch, Method, Outputs


class Nothing(Backbone):
    features = 1

    def forward(self, x: Tensor) -> Tensor:
        return x


class Scalar(Method):
    """`w` starts at `start`; `predictor.weight` is a second such number, held against 2x."""

    predictor_prefix = "predictor."

    def __init__(self, start: float, *, predictor: bool = False) -> None:
        super().__init__(Nothing())
        self.w = nn.Parameter(torch.tensor([start]))
        self.predictor = nn.Linear(1, 1, bias=False) if predictor else None
        if self.predictor is not None:
            nn.init.constant_(self.predictor.weight, start)

    def forward(self, batch: Batch) -> Outputs:
        x = batch.views.flatten(1)
        p = self.w.expand_as(x)
        if self.predictor is not None:
            p = torch.cat([p, self.predictor.weight.flatten().expand_as(x)])
            x = torch.cat([x, 2 * x])
        return Outputs(x, p)

    def loss(self, outputs: Outputs) -> Tensor:
        rows = (outputs.p - outputs.z).square().mean(dim=1)
        return rows.sum() / 2


def numbers(*values: float) -> Batch:
    """A batch of one view of these images."""
    return Batch(torch.tensor([values]).view(1, -1, 1, 1, 1))


LAYOUT = Layout(
    (
        Entry("a", (2,), Kind.WEIGHT, 0),
        Entry("norm.weight", (1,), Kind.NORM, 2),
        Entry("target", (1,), Kind.TARGET, 3),
        Entry("norm.running_mean", (1,), Kind.STATISTIC, 4),
        Entry("norm.running_var", (1,), Kind.STATISTIC, 5),
        Entry("queue", (3,), Kind.HOME, 6),
    )
)
"""Three trainable entries, six shared ones."""
