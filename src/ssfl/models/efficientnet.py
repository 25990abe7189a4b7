"""An EfficientNet-B0-style backbone (Tan & Le): inverted residuals, SiLU, squeeze and excitation.

With the CIFAR stem the first two halvings of the resolution are left out. Stochastic depth is too:
a model draws no random numbers here, so that a step is a pure function of its inputs.
"""

from torch import Tensor, nn

from ssfl.models.backbones import Backbone, Stem, initialise
from ssfl.models.mobilenet import InvertedResidual, scaled, unit

# expansion, kernel, outputs, depth, stride of each stage, at the standard width of 32
STAGES = (
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
        cifar = stem == "cifar"
        inputs = scaled(32, width)
        layers: list[nn.Module] = unit(channels, inputs, 3, 1 if cifar else 2, act=nn.SiLU)
        for stage, (expansion, kernel, outputs, depth, stride) in enumerate(STAGES):
            outputs = scaled(outputs, width)
            for index in range(depth):
                step = stride if index == 0 and not (cifar and stage == 1) else 1
                squeeze = max(1, inputs // 4)
                block = InvertedResidual(inputs, outputs, expansion, kernel, step, nn.SiLU, squeeze)
                layers.append(block)
                inputs = outputs
        self.features = 4 * inputs
        layers += unit(inputs, self.features, 1, act=nn.SiLU)
        self.layers = nn.Sequential(*layers)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return x.mean(dim=(2, 3))
