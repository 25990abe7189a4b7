"""The supervised twin: a classifier and cross-entropy in the place of an SSL method.

Run with it, the algorithms are the supervised ones that the paper broadens: Global-SSFL is FedAvg,
BiLevel-SSFL is Ditto, MAML-SSFL is perFedAvg, LA-SSFL is local fine-tuning.
"""

from typing import Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ssfl.errors import DataError
from ssfl.models.backbones import Backbone
from ssfl.ssl.base import Batch, Method, MethodOptions, Outputs, ViewWishes


class SupervisedOptions(MethodOptions):
    """The classifier's size and loss."""

    method: Literal["supervised"] = "supervised"
    classes: int = Field(10, ge=2)
    """Number of classes."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of each label that is spread over all classes."""


class Supervised(Method):
    """Backbone and a linear classifier: z are features, p are logits, the target is the labels."""

    Options = SupervisedOptions
    views = 1
    needs_labels = True
    wishes = ViewWishes(preset="supervised")

    def __init__(self, backbone: Backbone, options: SupervisedOptions) -> None:
        super().__init__(backbone)
        self.classifier = nn.Linear(backbone.features, options.classes)
        self.label_smoothing = options.label_smoothing

    def forward(self, batch: Batch) -> Outputs:
        if batch.labels is None:
            raise DataError("the method 'supervised' needs labels: choose a labelled data set")
        z = self.each(self.backbone, batch.views)
        return Outputs(z, self.each(self.classifier, z), batch.labels)

    def loss(self, outputs: Outputs) -> Tensor:
        (logits,) = outputs.p
        return F.cross_entropy(logits.float(), outputs.target, label_smoothing=self.label_smoothing)
