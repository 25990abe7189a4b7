"""Several views of every image: augmentation as one batched, pure function of its random numbers.

`Views` turns N uint8 images and V×N×draws uniform numbers into V×N normalised images; the same
numbers give the same views, whoever calls. Semantics are torchvision's: RandomResizedCrop, flip,
ColorJitter, grey, blur, solarize, in this order, in float arithmetic without rounding to levels.

On a GPU nothing depends on the values of the data, so that a step that begins here can be captured
whole; on a CPU each operation is spared the images it would leave alone, with the same result.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import Annotated, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from ssfl.data.transforms import (
    Boxes,
    adjust_brightness,
    adjust_contrast,
    adjust_hue,
    adjust_saturation,
    gaussian_blur,
    resized_crop,
    solarize,
    to_grey,
)
from ssfl.errors import ConfigError
from ssfl.section import Section

Pair = tuple[float, float]
Probability = Annotated[float, Field(ge=0, le=1)]
Strength = Annotated[float, Field(ge=0)]
Jitter = tuple[Strength, Strength, Strength, Annotated[float, Field(ge=0, le=0.5)]]

TRIES = 10
"""Crop boxes that RandomResizedCrop draws before it gives up and takes the centre."""


CHANGES = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)
"""What ColorJitter does, in the order of its strengths."""

ORDERS = tuple(permutations(range(len(CHANGES))))
"""In what orders it does them, all equally likely."""


class ViewOptions(Section):
    """Augmentation. What is left out is decided by the preset (and the SSL method's colours)."""

    preset: str = "auto"
    """cifar, digits, photo, supervised or none; 'auto' takes the data set's own."""
    size: int | None = Field(default=None, ge=8, le=1024)
    """Pixels across a view in training; None for as many as the images have. Fewer are faster;
    encoders are judged and used on images of their own size all the same."""
    crop_scale: Pair | None = None
    """Share of the image's area that a crop covers, from and to."""
    crop_ratio: Pair | None = None
    """Width over height of a crop, from and to (drawn log-uniformly)."""
    padding: int | None = Field(default=None, ge=0)
    """Black pixels put around the image before it is cropped."""
    flip: Probability | None = None
    """Probability of a horizontal flip."""
    jitter: Jitter | None = None
    """Strengths of the changes in brightness, contrast, saturation and hue."""
    jitter_p: Probability | None = None
    """Probability that colours are changed at all."""
    grey: Probability | None = None
    """Probability that colours are taken away."""
    blur: Probability | None = None
    """Probability of a Gaussian blur."""
    blur_kernel: int | None = Field(default=None, ge=3)
    """Pixels across the blur's kernel, an odd number; None for a tenth of the view."""
    blur_sigma: Pair | None = None
    """Standard deviation of the blur in pixels, from and to."""
    solarize: tuple[Probability, ...] | None = None
    """Probability of inverting bright pixels, one number or one per view."""

    @model_validator(mode="after")
    def _ranges_are_ranges(self) -> Self:
        for name in ("crop_scale", "crop_ratio", "blur_sigma"):
            pair = getattr(self, name)
            if pair is not None and not 0 < pair[0] <= pair[1]:
                raise ValueError(f"{name} must be two positive numbers in order, not {pair}")
        if self.crop_scale is not None and self.crop_scale[1] > 1:
            raise ValueError(f"crop_scale must not exceed 1, the whole image: {self.crop_scale}")
        if self.blur_kernel is not None and self.blur_kernel % 2 == 0:
            raise ValueError(f"blur_kernel must be odd, not {self.blur_kernel}")
        return self


_CIFAR = ViewOptions(
    crop_scale=(0.2, 1.0), flip=0.5, jitter=(0.4, 0.4, 0.4, 0.1), jitter_p=0.8, grey=0.2
)
PRESETS = {
    "cifar": _CIFAR,
    "photo": _CIFAR.model_copy(update={"blur": 0.5, "blur_sigma": (0.1, 2.0)}),
    # Mirrored digits are no digits; one black pixel around them lets a crop move and zoom either
    # way.
    "digits": ViewOptions(crop_scale=(0.4, 1.0), padding=1),
    "supervised": ViewOptions(padding=4, flip=0.5),
    "none": ViewOptions(),
}
"""What each preset sets; the rest is off."""


@dataclass(frozen=True)
class ViewSpec:
    """The augmentation in final numbers; the fields are those of `ViewOptions`."""

    image_size: int
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_scale: Pair | None = None
    crop_ratio: Pair = (3 / 4, 4 / 3)
    padding: int = 0
    flip: float = 0.0
    jitter: tuple[float, float, float, float] | None = None
    jitter_p: float = 0.8
    grey: float = 0.0
    blur: float = 0.0
    blur_kernel: int = 23
    blur_sigma: Pair = (0.1, 2.0)
    solarize: tuple[float, ...] = (0.0,)


def resolve(
    options: ViewOptions,
    *,
    preset: str,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    image_size: int,
    jitter: tuple[float, float, float, float] | None = None,
    solarize: tuple[float, ...] | None = None,
) -> ViewSpec:
    """The user's options over the SSL method's colours over the preset.

    `preset` is the data set's; `jitter` and `solarize` are the method's, and count only where the
    preset changes colours at all.
    """
    name = preset if options.preset == "auto" else options.preset
    if name not in PRESETS:
        raise ConfigError(f"unknown views preset '{name}': choose one of {', '.join(PRESETS)}")
    chosen = PRESETS[name].model_dump(exclude_none=True, exclude={"preset"})
    if "jitter" in chosen:
        chosen |= {} if jitter is None else {"jitter": jitter}
        chosen |= {} if solarize is None else {"solarize": solarize}
    chosen |= options.model_dump(exclude_none=True, exclude={"preset"})
    size = chosen.setdefault("size", image_size)
    chosen.setdefault("blur_kernel", max(3, size // 10 // 2 * 2 + 1))
    spec = ViewSpec(image_size=image_size, mean=mean, std=std, **chosen)
    if spec.blur and spec.blur_kernel // 2 >= size:
        raise ConfigError(
            f"views.blur_kernel {spec.blur_kernel} is too wide for views of {size} pixels"
        )
    return spec


class Views:
    """The augmentation of a `ViewSpec` on a device.

    `draws` is how many uniform numbers in [0, 1) each view of each image takes.
    """

    def __init__(self, spec: ViewSpec, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self._columns: dict[str, slice] = {}
        self.draws = 0
        for name, count in _draws(spec).items():
            self._columns[name] = slice(self.draws, self.draws + count)
            self.draws += count
        # Made here and not at each call: a captured step may not copy from the host.
        self._mean = torch.tensor(spec.mean, device=device).view(-1, 1, 1)
        self._std = torch.tensor(spec.std, device=device).view(-1, 1, 1)
        self._solarize = torch.tensor(spec.solarize, device=device).view(-1, 1)
        self._orders = torch.tensor(ORDERS, device=device)

    @torch.no_grad()
    def __call__(self, images: Tensor, uniforms: Tensor) -> Tensor:
        """uint8 N×C×H×W and uniforms V×N×draws to float32 V×N×C×S×S (S is `size`), normalised."""
        views, count, draws = uniforms.shape
        if count != images.shape[0] or draws != self.draws:
            raise ValueError(
                f"uniforms of shape {tuple(uniforms.shape)} do not fit {images.shape[0]} images "
                f"at {self.draws} numbers each"
            )
        spec, numbers = self.spec, uniforms.flatten(0, 1)

        def draw(name: str) -> Tensor:
            return numbers[:, self._columns[name]]

        with torch.autocast(images.device.type, enabled=False):
            x = self._crop(images.repeat(views, 1, 1, 1), draw)
            if spec.jitter is not None:
                x = self._jitter(x, draw("jitter"), spec.jitter)
            if spec.grey:
                x = _where(draw("grey")[:, 0] < spec.grey, x, to_grey)
            if spec.blur:
                chance, place = draw("blur").unbind(1)
                sigma = _between(place, *spec.blur_sigma)
                x = _where(chance < spec.blur, x, self._blur, sigma)
            if any(spec.solarize):
                chance = draw("solarize").view(views, count)
                x = _where((chance < self._solarize).flatten(), x, solarize)
            x = x.sub_(self._mean).div_(self._std)
        return x.view(views, count, *x.shape[1:])

    @torch.no_grad()
    def plain(self, images: Tensor) -> Tensor:
        """The images as they are, resized whole if their size is another, and normalised."""
        size = self.spec.image_size
        x = images.float().div_(255)
        if images.shape[-2:] != (size, size):
            x = F.interpolate(x, (size, size), mode="bilinear", antialias=True)
        return x.sub_(self._mean).div_(self._std)

    def _crop(self, images: Tensor, draw: Callable[[str], Tensor]) -> Tensor:
        spec = self.spec
        pad, size = spec.padding, spec.size
        height, width = images.shape[-2] + 2 * pad, images.shape[-1] + 2 * pad
        if spec.crop_scale is not None:
            boxes = draw_boxes(draw("crop"), height, width, spec.crop_scale, spec.crop_ratio)
        elif pad:
            boxes = draw_places(draw("crop"), height, width, spec.image_size)
        elif spec.flip or (height, width) != (size, size):
            boxes = whole(len(images), height, width, images.device)
        else:
            return images.float().div_(255)
        flip = draw("flip")[:, 0] < spec.flip if spec.flip else torch.zeros_like(boxes.top) > 0

        def crop(images: Tensor, flip: Tensor, *box: Tensor) -> Tensor:
            x = images.float().div_(255)
            return resized_crop(x, Boxes(*box), size, flip=flip, padding=pad)

        return _in_slices(crop, images, flip, *boxes)

    def _jitter(self, x: Tensor, u: Tensor, strengths: tuple[float, ...]) -> Tensor:
        """ColorJitter: four changes of colour, each image's in one of the 24 orders."""
        wanted = u[:, 0] < self.spec.jitter_p
        order = self._orders[_whole_below(u[:, 1], len(ORDERS)).long()]
        for step in range(4):
            for change, strength in enumerate(strengths):
                if strength > 0:
                    amount = _between(u[:, 2 + change], *_range(change, strength))
                    mask = wanted & (order[:, step] == change)
                    x = _where(mask, x, CHANGES[change], amount)
        return x

    def _blur(self, images: Tensor, sigma: Tensor) -> Tensor:
        return gaussian_blur(images, sigma, self.spec.blur_kernel)


def _draws(spec: ViewSpec) -> dict[str, int]:
    """How many uniform numbers each operation takes per image and view."""
    wanted = {
        "crop": 2 * TRIES + 2 if spec.crop_scale is not None else 2 if spec.padding else 0,
        "flip": int(spec.flip > 0),
        "jitter": 6 if spec.jitter is not None else 0,
        "grey": int(spec.grey > 0),
        "blur": 2 if spec.blur > 0 else 0,
        "solarize": int(any(spec.solarize)),
    }
    return {name: count for name, count in wanted.items() if count}


def _where(
    mask: Tensor, images: Tensor, function: Callable[..., Tensor], *parameters: Tensor
) -> Tensor:
    """`function(images, *parameters)` where `mask` says so; `images` may be overwritten.

    The CPU computes only those; a GPU, or a compiler, everything, for the sake of fixed shapes.
    """
    if _on_cpu(images):
        index = mask.nonzero()[:, 0]
        if not len(index):
            return images
        chosen = function(images[index], *(parameter[index] for parameter in parameters))
        return images.index_copy_(0, index, chosen)
    return torch.where(mask.view(-1, 1, 1, 1), function(images, *parameters), images)


def _range(change: int, strength: float) -> Pair:
    """From and to of a change's amount: hues turn either way from 0, factors surround 1."""
    if CHANGES[change] is adjust_hue:
        return -strength, strength
    return max(0.0, 1 - strength), 1 + strength


def draw_boxes(u: Tensor, height: int, width: int, scale: Pair, ratio: Pair) -> Boxes:
    """RandomResizedCrop's boxes from N×22 uniforms: ten areas, ten ratios, and a place.

    A box has an area uniform in `scale` (of the image's), a log-uniform aspect ratio, and sides
    rounded to pixels. The first of ten that fits is taken; if none does, the largest centred box
    whose ratio is allowed.
    """
    area = _between(u[:, :TRIES], *scale) * (height * width)
    aspect = torch.exp(_between(u[:, TRIES : 2 * TRIES], math.log(ratio[0]), math.log(ratio[1])))
    heights, widths = torch.round(torch.sqrt(area / aspect)), torch.round(torch.sqrt(area * aspect))
    fits = (heights > 0) & (heights <= height) & (widths > 0) & (widths <= width)

    h0, w0 = _fallback(height, width, ratio)
    h, w = torch.full_like(u[:, 0], h0), torch.full_like(u[:, 0], w0)
    for attempt in reversed(range(TRIES)):  # so that the first that fits is written last
        h = torch.where(fits[:, attempt], heights[:, attempt], h)
        w = torch.where(fits[:, attempt], widths[:, attempt], w)
    any_fits = fits.any(dim=1)
    top = _whole_below(u[:, 2 * TRIES], height - h + 1)
    left = _whole_below(u[:, 2 * TRIES + 1], width - w + 1)
    return Boxes(
        torch.where(any_fits, top, float((height - h0) // 2)),
        torch.where(any_fits, left, float((width - w0) // 2)),
        h,
        w,
    )


def _fallback(height: int, width: int, ratio: Pair) -> tuple[int, int]:
    """Height and width of the largest centred box whose ratio is allowed."""
    if width / height < ratio[0]:
        return round(width / ratio[0]), width
    if width / height > ratio[1]:
        return height, round(height * ratio[1])
    return height, width


def draw_places(u: Tensor, height: int, width: int, size: int) -> Boxes:
    """RandomCrop's boxes from N×2 uniforms: size × size (or what there is), anywhere inside."""
    h, w = min(size, height), min(size, width)
    return Boxes(
        _whole_below(u[:, 0], height - h + 1),
        _whole_below(u[:, 1], width - w + 1),
        torch.full_like(u[:, 0], h),
        torch.full_like(u[:, 0], w),
    )


def whole(count: int, height: int, width: int, device: torch.device) -> Boxes:
    """Boxes that hold the image entire."""
    zero = torch.zeros(count, device=device)
    return Boxes(zero, zero, zero + height, zero + width)


def _in_slices(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`function(*tensors)`, which works image by image; on a CPU in slices of the batch, small
    enough for its caches and for the allocator to reuse their memory."""
    if not _on_cpu(tensors[0]):
        return function(*tensors)
    slices = zip(*(tensor.split(64) for tensor in tensors), strict=True)  # type: ignore[no-untyped-call]
    return torch.cat([function(*part) for part in slices])


def _on_cpu(images: Tensor) -> bool:
    """Run by a CPU as it stands: shapes may depend on values. Compiled code is not."""
    return images.is_cpu and not torch.compiler.is_compiling()


def _between(uniform: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * uniform


def _whole_below(uniform: Tensor, count: Tensor | int) -> Tensor:
    """A whole number from 0 to count − 1 (rounding may lift u · count to count itself)."""
    number = torch.floor(uniform * count)
    return torch.clamp(number, max=count - 1)
