"""Image transforms with parameters of its own for every image of a batch.

The pieces of the augmentation, free of randomness: float images N×C×H×W in [0, 1] and parameters
of shape N go in, float images come out. Semantics are torchvision's. Cropping, resizing, flipping
and blurring are linear and separable, so each is two small matrices per image: rows · image ·
columnsᵀ, which is quick on any device and reads every pixel from the right place by construction.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Boxes(NamedTuple):
    """Crop boxes, one per image, in whole pixels (held as floats) of the image with its padding."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor


def resized_crop(
    images: Tensor, boxes: Boxes, size: int, *, flip: Tensor | None = None, padding: int = 0
) -> Tensor:
    """Cut each image's box out, resize it to size × size, and mirror it where `flip` says so.

    Bilinear with pixel centres at halves (align_corners=False), and antialiased as torchvision
    does it: where the box is larger than `size`, the triangle that weighs the source pixels
    widens in proportion. Nothing outside the box is ever read. `padding` black pixels surround
    the image.
    """
    height, width = images.shape[-2:]
    rows = _resizing(boxes.top, boxes.height, height, size, padding)
    columns = _resizing(boxes.left, boxes.width, width, size, padding, flip)
    return _separable(images, rows, columns)


def _resizing(
    start: Tensor, length: Tensor, source: int, size: int, padding: int, flip: Tensor | None = None
) -> Tensor:
    """N×size×source weights: how much of each source pixel each output pixel takes."""
    output = torch.arange(size, device=start.device) + 0.5
    output = output.expand(len(start), size)
    if flip is not None:
        output = torch.where(flip[:, None], size - output, output)
    scale = (length / size)[:, None]
    pixel = torch.arange(source + 2 * padding, device=start.device) + 0.5 - start[:, None]
    inside = (pixel > 0) & (pixel < length[:, None])
    distance = (pixel[:, None, :] - (output * scale)[:, :, None]).abs_()
    weights = (1 - distance.div_(scale.clamp(min=1)[:, :, None])).clamp_(min=0)
    weights = weights.mul_(inside[:, None, :])
    weights = weights.div_(weights.sum(dim=2, keepdim=True))
    return weights[:, :, padding : padding + source]


def gaussian_blur(images: Tensor, sigma: Tensor, kernel: int) -> Tensor:
    """Blur with a Gaussian cut off at `kernel` pixels across; the border is mirrored."""
    rows, columns = (_blurring(sigma, length, kernel // 2) for length in images.shape[-2:])
    return _separable(images, rows, columns)


def _blurring(sigma: Tensor, length: int, reach: int) -> Tensor:
    """N×length×length weights; a pixel mirrored at an end gives its weight to its image."""
    pixel = torch.arange(length, device=sigma.device)
    along, across = pixel[None, :], pixel[:, None]
    last = length - 1

    def bell(distance: Tensor) -> Tensor:
        value = torch.exp(-0.5 * (distance / sigma[:, None, None]) ** 2)
        return value * (distance.abs() <= reach)

    weights = bell(along - across)
    weights = weights + bell(along + across) * (along > 0)
    weights = weights + bell(2 * last - along - across) * (along < last)
    return weights / weights.sum(dim=2, keepdim=True)


def _separable(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """rows · image · columnsᵀ for every channel of every image."""
    count, channels, height, width = images.shape
    wide = images.reshape(count, channels * height, width) @ columns.transpose(1, 2)
    return rows[:, None] @ wide.view(count, channels, height, -1)


def to_grey(images: Tensor) -> Tensor:
    """Luma in every channel; images of one channel stay as they are."""
    return _luma(images).expand_as(images)


def adjust_brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with black: 0 is black, 1 the image, 2 twice as bright."""
    return (images * _each(factor)).clamp_(0, 1)


def adjust_contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image's mean luma: 0 is flat grey, 1 the image."""
    mean = _luma(images).flatten(1).mean(dim=1)
    return _blend(_each(mean), images, factor)


def adjust_saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image's luma: 0 is black and white, 1 the image."""
    if images.shape[1] == 1:
        return images
    return _blend(_luma(images), images, factor)


def adjust_hue(images: Tensor, shift: Tensor) -> Tensor:
    """Turn the colours by `shift` of a full circle (−½ to ½), keeping saturation and value.

    The closed form of RGB → HSV → RGB. With c = max − min, the hue in sixths of a turn is
    ±(1 + (g + b − r − min)/c), its sign that of g − b. Back from a hue of h turns, a channel is
    min + c·share, where red's share is 6·|h − ½| − 1 kept within [0, 1], and green's and blue's
    are the same, a third of a turn away on either side.
    """
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    high = torch.maximum(torch.maximum(red, green), blue)
    low = torch.minimum(torch.minimum(red, green), blue)
    chroma = high.sub_(low)
    sixths = (green + blue).sub_(red).sub_(low).div_(chroma.clamp(min=1e-12)).add_(1)
    sixths = torch.copysign(sixths, green - blue)
    turned = sixths.div_(6).add_((shift + 1)[:, None, None])  # + 1: frac wants no negatives
    thirds = torch.arange(3, device=images.device) * (2 / 3)
    share = (turned[:, None] + thirds[:, None, None]).frac_().sub_(0.5).abs_().mul_(6).sub_(1)
    return share.clamp_(0, 1).mul_(chroma[:, None]).add_(low[:, None])


def solarize(images: Tensor, threshold: float = 0.5) -> Tensor:
    """Invert the pixels at or above the threshold."""
    return torch.where(images >= threshold, 1 - images, images)


def _luma(images: Tensor) -> Tensor:
    """N×1×H×W: the weights are torchvision's (0.2989, not 0.299)."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    luma = (red * 0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114)
    return luma[:, None]


def _blend(reference: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(reference, images, _each(factor)).clamp_(0, 1)


def _each(values: Tensor) -> Tensor:
    """One value per image, shaped to meet N×C×H×W."""
    return values.view(-1, 1, 1, 1)
