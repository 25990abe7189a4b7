"""Backbones by name: networks that turn images into one vector of features each.

Initialisation draws from torch's global generator; the caller seeds it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field
from torch import Tensor, nn

from ssfl.errors import CheckpointError
from ssfl.models.norm import BatchNorm, use_group_norm
from ssfl.registry import Registry
from ssfl.section import Section

Stem = Literal["cifar", "imagenet"]

IMAGENET_STEM_FROM = 96
"""Image size in pixels from which the "auto" stem is the ImageNet one."""


class BackboneOptions(Section):
    """The network that is trained: the encoder without its SSL heads."""

    backbone: str = "resnet18"
    """Network: resnet18, resnet34, resnet50, small, mobilenet or efficientnet."""
    width: int | None = Field(default=None, ge=1)
    """Channels after the stem; None for the network's own (64 in ResNets, 32 in the others)."""
    stem: Literal["auto", "cifar", "imagenet"] = "auto"
    """First layers: 'cifar' keeps the resolution, 'imagenet' quarters it; 'auto' takes the latter
    for images of 96 pixels and more."""
    norm: Literal["batch", "group"] = "batch"
    """Normalisation: 'batch' as in the paper, or 'group', which looks at one image at a time and
    keeps no statistics. Heads have batch norm in any case."""


class Backbone(nn.Module, ABC):
    """N×C×H×W images to N×`features`."""

    features: int

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...


BACKBONES = Registry(
    "backbone",
    {
        "resnet18": "ssfl.models.resnet:resnet18",
        "resnet34": "ssfl.models.resnet:resnet34",
        "resnet50": "ssfl.models.resnet:resnet50",
        "small": "ssfl.models.small:SmallNet",
        "mobilenet": "ssfl.models.mobilenet:MobileNet",
        "efficientnet": "ssfl.models.efficientnet:EfficientNet",
    },
)
"""Each is called with `channels`, `image_size`, `stem` and, if given, `width`."""


def build_backbone(options: BackboneOptions, *, channels: int, image_size: int) -> Backbone:
    """The backbone that `options` name, for images of `channels` × `image_size` × `image_size`."""
    stem = options.stem
    if stem == "auto":
        stem = "imagenet" if image_size >= IMAGENET_STEM_FROM else "cifar"
    arguments: dict[str, Any] = {} if options.width is None else {"width": options.width}
    make = BACKBONES[options.backbone]
    backbone: Backbone = make(channels=channels, image_size=image_size, stem=stem, **arguments)
    if options.norm == "group":
        use_group_norm(backbone)
    return backbone


_CHOOSE = "choose the network it is of by model.backbone, model.width, model.stem and model.norm"


def load_weights(backbone: Backbone, weights: Mapping[str, Tensor]) -> None:
    """Give a backbone the tensors of another of its kind. What lies outside it (a classifier) and
    counters of batches are left out."""
    own = backbone.state_dict()
    parts = {name.partition(".")[0] for name in own}
    for name, tensor in own.items():
        if name not in weights:
            raise CheckpointError(
                _missing(name, [n for n in weights if n.split(".")[0] not in parts])
            )
        if weights[name].shape != tensor.shape:
            there, here = ("×".join(map(str, t.shape)) for t in (weights[name], tensor))
            raise CheckpointError(f"its {name} is {there} where {here} is needed; {_CHOOSE}")
    for name in weights:
        counts = name.endswith("num_batches_tracked")
        if name not in own and name.partition(".")[0] in parts and not counts:
            raise CheckpointError(f"its {name} has no place here; {_CHOOSE}")
    backbone.load_state_dict({name: weights[name] for name in own})


def _missing(name: str, others: Sequence[str]) -> str:
    """Why there is no such tensor: maybe all names have something before them."""
    for other in others:
        if other.endswith(f".{name}"):
            prefix = other.removesuffix(name)
            return f"it has {other} for {name}: save its tensors by names without {prefix!r}"
    return f"it has no {name}; {_CHOOSE}"


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """A convolution without bias (batch norm follows) that keeps the size up to its stride."""
    return nn.Conv2d(
        inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False
    )


def initialise(module: nn.Module) -> None:
    """The usual start of image networks: He-normal over a convolution's outputs, no biases, and
    batch norms that pass their input on."""
    for child in module.modules():
        if isinstance(child, nn.Conv2d):
            nn.init.kaiming_normal_(child.weight, mode="fan_out", nonlinearity="relu")
            if child.bias is not None:
                nn.init.zeros_(child.bias)
        elif isinstance(child, BatchNorm) and child.weight is not None:
            nn.init.ones_(child.weight)
            nn.init.zeros_(child.bias)  # type: ignore[arg-type]
