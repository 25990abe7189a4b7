"""What a client learns from two views of each image.

A method is an `nn.Module` made of a backbone and heads. `forward` gives projections and
predictions per view; `loss` turns them into a number and reads nothing else. They are apart so
that any personalisation can regularise any method's representations.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ssfl.models.backbones import Backbone
from ssfl.models.norm import set_groups
from ssfl.section import Section


class Batch(NamedTuple):
    """What one step sees: V views of N images (V×N×C×H×W), and labels for supervised twins."""

    views: Tensor
    labels: Tensor | None = None


class Outputs(NamedTuple):
    """Per view: projections z and predictions p (V×N×d; p is z where there is no predictor).

    `target` is what p is held against where that is not z (an EMA network's projections, codes,
    logits' labels, a queue): the method that made it knows how to read it.
    """

    z: Tensor
    p: Tensor
    target: Any = None


class MethodOptions(Section):
    """Options of an SSL method; `method` names it."""

    method: str


class ViewWishes(NamedTuple):
    """What a method asks of the augmentation where it differs from the data set's preset."""

    jitter: tuple[float, float, float, float] | None = None
    solarize: tuple[float, float] | None = None
    preset: str | None = None


class Method(nn.Module, ABC):
    """Base of SSL methods: how networks see the views, and what travels."""

    Options: ClassVar[type[MethodOptions]]
    views: ClassVar[int] = 2
    needs_labels: ClassVar[bool] = False
    joint_statistics: ClassVar[bool] = False
    """Batch-norm statistics over both views at once (SimCLR, SwAV) rather than per view."""
    home: ClassVar[tuple[str, ...]] = ()
    """Prefixes of tensors that never leave the client."""
    predictor_prefix: ClassVar[str | None] = None
    """Prefix of the predictor's tensors, for FedU and for a rate of its own."""
    wishes: ClassVar[ViewWishes] = ViewWishes()
    projector: nn.Module
    """Made by the method, between the backbone and the loss."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone
        self.one_pass = False

    def see_views_in_one_pass(self) -> None:
        """Run each network once over all views, statistics still per view (faster on a GPU)."""
        self.one_pass = True
        if not self.joint_statistics:
            set_groups(self, self.views)

    def each(self, network: Callable[[Tensor], Tensor], views: Tensor) -> Tensor:
        """Apply `network` to every view: V×N×... to V×N×d."""
        if self.joint_statistics or self.one_pass:
            stacked = network(views.flatten(0, 1))
            return stacked.view(*views.shape[:2], *stacked.shape[1:])
        return torch.stack([network(view) for view in views])

    def project(self, x: Tensor) -> Tensor:
        """The encoder of the SSL papers: backbone, then projector."""
        z: Tensor = self.projector(self.backbone(x))
        return z

    def forward(self, batch: Batch) -> Outputs:
        """Projections alone; methods with a predictor or a target say more."""
        z = self.each(self.project, batch.views)
        return Outputs(z, z)

    @abstractmethod
    def loss(self, outputs: Outputs) -> Tensor:
        """What training makes small."""

    def begin(self, progress: Tensor) -> None:
        """Steps are about to be made, `progress` (0 to 1) of the experiment behind them."""

    def after_step(self, progress: Tensor) -> None:
        """Move what moves without gradients; `progress` runs from 0 to 1 over the experiment."""


def negative_cosine(p: Tensor, z: Tensor) -> Tensor:
    """D(p, z) of the paper's listing: negative cosine similarity, no gradient through z."""
    p = nn.functional.normalize(p.float(), dim=-1)
    z = nn.functional.normalize(z.detach().float(), dim=-1)
    return -(p * z).sum(dim=-1).mean()
