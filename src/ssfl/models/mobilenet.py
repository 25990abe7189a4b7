"""A MobileNetV2-style backbone (Sandler et al.): inverted residuals with depthwise convolutions.

For clients that are phones. With the CIFAR stem the first two halvings of the resolution are left
out, so that a 32-pixel image still ends at 4×4.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from ssfl.models.backbones import Backbone, Stem, conv, initialise
from ssfl.models.norm import BatchNorm

Stage = tuple[int, int, int, int, int]
"""Expansion, kernel, outputs, depth and stride, at the standard width of 32."""

STAGES: Sequence[Stage] = (
    (1, 3, 16, 1, 1),
    (6, 3, 24, 2, 2),
    (6, 3, 32, 3, 2),
    (6, 3, 64, 4, 2),
    (6, 3, 96, 3, 1),
    (6, 3, 160, 3, 2),
    (6, 3, 320, 1, 1),
)


class MobileNet(Backbone):
    """Features: 1280 (more only where `width` is above 32)."""

    def __init__(
        self, *, channels: int = 3, image_size: int = 32, stem: Stem = "cifar", width: int = 32
    ) -> None:
        super().__init__()
        first = 1 if stem == "cifar" else 2
        layers = unit(channels, scaled(32, width), 3, first, act=nn.ReLU6)
        for inputs, outputs, expansion, kernel, stride in blocks(STAGES, stem, width):
            layers.append(InvertedResidual(inputs, outputs, expansion, kernel, stride, nn.ReLU6))
        self.features = max(1280, scaled(1280, width))
        layers += unit(outputs, self.features, 1, act=nn.ReLU6)
        self.layers = nn.Sequential(*layers)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return x.mean(dim=(2, 3))


def blocks(
    stages: Sequence[Stage], stem: Stem, width: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """Inputs, outputs, expansion, kernel and stride of each block: a stage's first has its stride
    (with the CIFAR stem, the second stage has none)."""
    inputs = scaled(32, width)
    for stage, (expansion, kernel, channels, depth, stride) in enumerate(stages):
        outputs = scaled(channels, width)
        for index in range(depth):
            halves = index == 0 and not (stem == "cifar" and stage == 1)
            yield inputs, outputs, expansion, kernel, stride if halves else 1
            inputs = outputs


class InvertedResidual(nn.Module):
    """Widen, convolve each channel by itself, weigh the channels if asked, narrow again."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        expansion: int,
        kernel: int,
        stride: int,
        act: type[nn.Module],
        squeeze: int | None = None,
    ) -> None:
        super().__init__()
        hidden = inputs * expansion
        layers = unit(inputs, hidden, 1, act=act) if expansion > 1 else []
        layers += unit(hidden, hidden, kernel, stride, groups=hidden, act=act)
        if squeeze is not None:
            layers.append(ChannelWeights(hidden, squeeze))
        layers += unit(hidden, outputs, 1, act=None)
        self.layers = nn.Sequential(*layers)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.shortcut else y


class ChannelWeights(nn.Module):
    """Squeeze and excitation: each channel times a weight that the image as a whole decides."""

    def __init__(self, channels: int, squeeze: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, squeeze, 1),
            nn.SiLU(inplace=True),
            nn.Conv2d(squeeze, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        weights: Tensor = self.layers(x.mean(dim=(2, 3), keepdim=True))
        return x * weights


def unit(
    inputs: int,
    outputs: int,
    kernel: int,
    stride: int = 1,
    groups: int = 1,
    *,
    act: type[nn.Module] | None,
) -> list[nn.Module]:
    """Convolution, batch norm and, unless None, an activation."""
    layers = [conv(inputs, outputs, kernel, stride, groups), BatchNorm(outputs)]
    return layers if act is None else [*layers, act(inplace=True)]


def scaled(channels: int, width: int) -> int:
    """`channels` of the standard network (stem of 32) at another width: a multiple of 8 that is
    at most a tenth too small."""
    wanted = channels * width / 32
    rounded = max(8, int(wanted + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * wanted else rounded
