"""The supervised twin: a classifier and cross-entropy in the place of an SSL method.

Run with it, the algorithms are the supervised ones that the paper broadens: Global-SSFL is FedAvg,
BiLevel-SSFL is Ditto, MAML-SSFL is perFedAvg, LA-SSFL is local fine-tuning.
"""

from typing import Literal

import torch.nn.functional as F
from pydantic import Field, model_validator
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
    prior: Literal["none", "batch"] = "none"
    """'batch' adds to each logit the logarithm of its class's share of the batch, so that how
    frequent a class is with a client is not the classifier's to learn."""

    @model_validator(mode="after")
    def _no_label_goes_to_a_class_without_images(self) -> "SupervisedOptions":
        if self.prior == "batch" and self.label_smoothing:
            raise ValueError(
                "ssl.prior 'batch' leaves classes out that a batch has no image of, and "
                "ssl.label_smoothing gives them a share: set one of the two"
            )
        return self


class Supervised(Method):
    """Backbone and a linear classifier: z are features, p are logits, the target is the labels."""

    Options = SupervisedOptions
    views = 1
    needs_labels = True
    wishes = ViewWishes(preset="supervised")

    def __init__(self, backbone: Backbone, options: SupervisedOptions) -> None:
        super().__init__(backbone)
        self.classifier = nn.Linear(backbone.features, options.classes)
        self.label_smoothing, self.prior = options.label_smoothing, options.prior

    def forward(self, batch: Batch) -> Outputs:
        if batch.labels is None:
            raise DataError("the method 'supervised' needs labels: choose a labelled data set")
        z = self.each(self.backbone, batch.views)
        return Outputs(z, self.each(self.classifier, z), batch.labels)

    def loss(self, outputs: Outputs) -> Tensor:
        (logits,), labels = outputs.p, outputs.target
        logits = logits.float()
        if self.prior == "batch":
            present = F.one_hot(labels, logits.shape[1]).sum(0)
            logits = logits + (present / len(labels)).log()
        return F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
