"""The demo's network: five convolutions, sized to learn something in minutes on two cores.

Resolution is given up early, where convolutions are dear, and kept where images are tiny: a
32-pixel image is seen at 16×16, 8×8 and 4×4, an 8-pixel digit at 8×8, 4×4 and 2×2.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from ssfl.models.backbones import Backbone, Stem, conv, initialise
from ssfl.models.norm import BatchNorm


class SmallNet(Backbone):
    """Features: 4 × width (128), with 280 thousand parameters at width 32."""

    def __init__(
        self, *, channels: int = 3, image_size: int = 32, stem: Stem = "cifar", width: int = 32
    ) -> None:
        super().__init__()
        first = 4 if stem == "imagenet" else 2 if image_size >= 24 else 1
        self.stem = _ConvNorm(channels, width, first)
        self.down1 = _ConvNorm(width, 2 * width, 2)
        self.same1 = _ConvNorm(2 * width, 2 * width, 1)
        self.down2 = _ConvNorm(2 * width, 4 * width, 2)
        self.same2 = _ConvNorm(4 * width, 4 * width, 1)
        self.features = 4 * width
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down1(self.stem(x))
        x = x + self.same1(x)
        x = self.down2(x)
        x = x + self.same2(x)
        return x.mean(dim=(2, 3))


class _ConvNorm(nn.Module):
    """3×3 convolution, batch norm, ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv = conv(inputs, outputs, 3, stride)
        self.norm = BatchNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)), inplace=True)
