"""An EfficientNet-B0-style backbone (Tan & Le): inverted residuals, SiLU, squeeze and excitation.

With the CIFAR stem the first two halvings of the resolution are left out. Stochastic depth is too:
a model draws no random numbers here, so that a step is a pure function of its inputs.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from ssfl.models.backbones import Backbone, Stem, initialise
from ssfl.models.mobilenet import InvertedResidual, Stage, blocks, scaled, unit

STAGES: Sequence[Stage] = (
    (1, 3, 16, 1, 1),
    (6, 3, 24, 2, 2),
    (6, 5, 40, 2, 2),
    (6, 3, 80, 3, 2),
    (6, 5, 112, 3, 1),
    (6, 5, 192, 4, 2),
    (6, 3, 320, 1, 1),
)


class EfficientNet(Backbone):
    """Features: four times the last stage's channels (1280)."""

    def __init__(
        self, *, channels: int = 3, image_size: int = 32, stem: Stem = "cifar", width: int = 32
    ) -> None:
        super().__init__()
        first = 1 if stem == "cifar" else 2
        layers = unit(channels, scaled(32, width), 3, first, act=nn.SiLU)
        for inputs, outputs, expansion, kernel, stride in blocks(STAGES, stem, width):
            squeeze = max(1, inputs // 4)
            block = InvertedResidual(inputs, outputs, expansion, kernel, stride, nn.SiLU, squeeze)
            layers.append(block)
        self.features = 4 * outputs
        layers += unit(outputs, self.features, 1, act=nn.SiLU)
        self.layers = nn.Sequential(*layers)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return x.mean(dim=(2, 3))
