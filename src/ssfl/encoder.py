"""An encoder to take away: images in, features out, normalisation inside, an ordinary nn.Module."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ssfl.data.decode import AS_USUAL, Reading
from ssfl.guest import own_draws
from ssfl.models.backbones import Backbone, BackboneOptions, build_backbone


class Encoder(nn.Module):
    """N×C×H×W images, integers from 0 to 255 or floats in [0, 1], to N×`features`."""

    mean: Tensor
    std: Tensor
    reading: Reading
    """How image files were brought to `image_size` in training."""

    def __init__(
        self,
        backbone: Backbone,
        mean: Sequence[float],
        std: Sequence[float],
        image_size: int,
        reading: Reading = AS_USUAL,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.features = backbone.features
        self.image_size = image_size
        self.reading = reading
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        x = images.to(self.mean.dtype)  # NumPy's floats are of 64 bits
        if not images.is_floating_point():
            x = x / 255
        features: Tensor = self.backbone((x - self.mean) / self.std)
        return features


def blank_encoder(
    options: BackboneOptions,
    mean: Sequence[float],
    std: Sequence[float],
    image_size: int,
    reading: Reading,
) -> Encoder:
    """An encoder of the network that `options` name, frozen, its tensors still to be loaded."""
    with own_draws():
        backbone = build_backbone(options, channels=len(mean), image_size=image_size)
    return Encoder(backbone, mean, std, image_size, reading).eval().requires_grad_(False)
