"""ResNets (He et al.) with two stems: one for 32-pixel images, one for photographs.

The stem decides what is lost before the first block: the ImageNet stem quarters the resolution,
which leaves little of a CIFAR image; the CIFAR stem is one 3×3 convolution of stride 1. Tensors
are named and initialised as in torchvision.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from ssfl.models.backbones import Backbone, Stem, conv, initialise
from ssfl.models.norm import BatchNorm


class BasicBlock(nn.Module):
    """Two 3×3 convolutions around a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(inputs, width, 3, stride)
        self.bn1 = BatchNorm(width)
        self.conv2 = conv(width, width, 3)
        self.bn2 = BatchNorm(width)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.downsample(x), inplace=True)


class Bottleneck(nn.Module):
    """A 3×3 convolution between two 1×1, the last four times as wide; the stride is on the 3×3."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = conv(inputs, width, 1)
        self.bn1 = BatchNorm(width)
        self.conv2 = conv(width, width, 3, stride)
        self.bn2 = BatchNorm(width)
        self.conv3 = conv(width, outputs, 1)
        self.bn3 = BatchNorm(outputs)
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.downsample(x), inplace=True)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(conv(inputs, outputs, 1, stride), BatchNorm(outputs))


def _stage(
    block: type[BasicBlock] | type[Bottleneck], depth: int, inputs: int, width: int, stride: int = 2
) -> nn.Sequential:
    blocks = [block(inputs, width, stride)]
    blocks += [block(width * block.expansion, width, 1) for _ in range(depth - 1)]
    return nn.Sequential(*blocks)


class ResNet(Backbone):
    """Four stages of blocks, each after the first halving the resolution and doubling `width`."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        *,
        channels: int = 3,
        stem: Stem = "cifar",
        width: int = 64,
    ) -> None:
        super().__init__()
        imagenet = stem == "imagenet"
        self.conv1 = conv(channels, width, 7, 2) if imagenet else conv(channels, width, 3)
        self.bn1 = BatchNorm(width)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1) if imagenet else nn.Identity()
        self.layer1 = _stage(block, depths[0], width, width, stride=1)
        self.layer2 = _stage(block, depths[1], width * block.expansion, width * 2)
        self.layer3 = _stage(block, depths[2], width * 2 * block.expansion, width * 4)
        self.layer4 = _stage(block, depths[3], width * 4 * block.expansion, width * 8)
        self.features = width * 8 * block.expansion
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x)), inplace=True))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return x.mean(dim=(2, 3))


def resnet18(
    *, channels: int = 3, image_size: int = 32, stem: Stem = "cifar", width: int = 64
) -> ResNet:
    """Features: 8 × width (512)."""
    return ResNet(BasicBlock, (2, 2, 2, 2), channels=channels, stem=stem, width=width)


def resnet34(
    *, channels: int = 3, image_size: int = 32, stem: Stem = "cifar", width: int = 64
) -> ResNet:
    """Features: 8 × width (512)."""
    return ResNet(BasicBlock, (3, 4, 6, 3), channels=channels, stem=stem, width=width)


def resnet50(
    *, channels: int = 3, image_size: int = 32, stem: Stem = "cifar", width: int = 64
) -> ResNet:
    """Features: 32 × width (2048)."""
    return ResNet(Bottleneck, (3, 4, 6, 3), channels=channels, stem=stem, width=width)
