"""An encoder to take away: images in, features out, normalisation inside, an ordinary nn.Module."""

import torch
from torch import Tensor, nn

from ssfl.data.decode import Fit
from ssfl.models.backbones import Backbone


class Encoder(nn.Module):
    """N×C×H×W images, integers from 0 to 255 or floats in [0, 1], to N×`features`."""

    mean: Tensor
    std: Tensor
    fit: Fit
    """How image files were brought to `image_size` in training."""

    def __init__(
        self,
        backbone: Backbone,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        image_size: int,
        fit: Fit = "crop",
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.features = backbone.features
        self.image_size = image_size
        self.fit = fit
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        x = images.to(self.mean.dtype)  # NumPy's floats are of 64 bits
        if not images.is_floating_point():
            x = x / 255
        features: Tensor = self.backbone((x - self.mean) / self.std)
        return features
