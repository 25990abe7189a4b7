"""A MobileNetV2-style backbone (Sandler et al.): inverted residuals with depthwise convolutions.

For clients that are phones. With the CIFAR stem the first two halvings of the resolution are left
out, so that a 32-pixel image still ends at 4×4.
"""

from torch import Tensor, nn

from ssfl.models.backbones import Backbone, Stem, conv, initialise
from ssfl.models.norm import BatchNorm

# expansion, outputs, depth, stride of each stage, at the standard width of 32
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class MobileNet(Backbone):
    """Features: 1280 (more only where `width` is above 32)."""

    def __init__(
        self, *, channels: int = 3, image_size: int = 32, stem: Stem = "cifar", width: int = 32
    ) -> None:
        super().__init__()
        cifar = stem == "cifar"
        inputs = scaled(32, width)
        layers: list[nn.Module] = unit(channels, inputs, 3, 1 if cifar else 2, act=nn.ReLU6)
        for stage, (expansion, outputs, depth, stride) in enumerate(STAGES):
            outputs = scaled(outputs, width)
            for index in range(depth):
                step = stride if index == 0 and not (cifar and stage == 1) else 1
                layers.append(InvertedResidual(inputs, outputs, expansion, 3, step, nn.ReLU6))
                inputs = outputs
        self.features = max(1280, scaled(1280, width))
        layers += unit(inputs, self.features, 1, act=nn.ReLU6)
        self.layers = nn.Sequential(*layers)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return x.mean(dim=(2, 3))


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
