"""Record what torchvision does, for the tests to compare with where torchvision is not at hand.

    python tests/data/golden/record.py

writes torchvision.npz beside this file (recorded with torchvision 0.28). Parameters are drawn
here, one image at a time and in plain Python; every image goes through torchvision's own
functions.
"""

import math
from itertools import permutations
from pathlib import Path

import numpy as np
import torch
import torchvision
import torchvision.transforms.functional as F
from torchvision.transforms import RandomResizedCrop

SIZE = 16
MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.2, 0.3)
SCALE, RATIO = (0.2, 1.0), (3 / 4, 4 / 3)


def test_images(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random pixels, with the corners of the colour cube and greys among them."""
    images = rng.integers(0, 256, (4, 3, *shape), dtype=np.uint8)
    corners = np.array([[r, g, b] for r in (0, 255) for g in (0, 255) for b in (0, 255)], np.uint8)
    images[0, :, 0, :8] = corners.T
    images[1, :, 3, :8] = np.arange(8, dtype=np.uint8) * 30
    return images


def each(function, images: torch.Tensor, *parameters) -> np.ndarray:
    """`function(image, parameter, ...)` for every image and its own parameters."""
    values = [function(image, *(p[n] for p in parameters)) for n, image in enumerate(images)]
    return torch.stack(values).numpy()


def record_functions(rng: np.random.Generator) -> dict[str, np.ndarray]:
    pixels = test_images(rng, SIZE, SIZE)
    images = torch.from_numpy(pixels).float() / 255
    factors = [0.0, 0.37, 1.0, 1.8]
    shifts = [-0.5, -0.1, 0.03, 0.4]
    sigmas = [0.1, 0.7, 1.3, 2.0]
    return {
        "pixels": pixels,
        "factors": np.array(factors, np.float32),
        "shifts": np.array(shifts, np.float32),
        "sigmas": np.array(sigmas, np.float32),
        "brightness": each(F.adjust_brightness, images, factors),
        "contrast": each(F.adjust_contrast, images, factors),
        "saturation": each(F.adjust_saturation, images, factors),
        "hue": each(F.adjust_hue, images, shifts),
        "grey": each(lambda image: F.rgb_to_grayscale(image, 3), images),
        "solarize": each(lambda image: F.solarize(image, 0.5), images),
        "blur23": each(lambda image, sigma: F.gaussian_blur(image, 23, sigma), images, sigmas),
        "blur5": each(lambda image, sigma: F.gaussian_blur(image, 5, sigma), images, sigmas),
    }


def record_crops(rng: np.random.Generator) -> dict[str, np.ndarray]:
    pixels = test_images(rng, 20, 28)
    images = torch.from_numpy(pixels).float() / 255
    boxes = [(0, 0, 20, 28), (3, 5, 7, 9), (19, 27, 1, 1), (1, 14, 18, 14)]

    def crop(size: int):
        return lambda image, box: F.resized_crop(image, *box, [size, size], antialias=True)

    def flipped(image: torch.Tensor, box: tuple[int, ...]) -> torch.Tensor:
        return F.hflip(crop(SIZE)(image, box))

    def padded(image: torch.Tensor, box: tuple[int, ...]) -> torch.Tensor:
        return crop(SIZE)(F.pad(image, [4]), box)

    return {
        "crop_pixels": pixels,
        "boxes": np.array(boxes, np.float32),
        "crop_up": each(crop(SIZE), images, boxes),
        "crop_down": each(crop(6), images, boxes),
        "crop_flip": each(flipped, images, boxes),
        "crop_padded": each(padded, images, boxes),
        "whole": each(lambda image: F.resize(image, [SIZE, SIZE], antialias=True), images),
    }


def one_view(image: torch.Tensor, u: list[float], solarize: float) -> torch.Tensor:
    """The photo preset on one image, from its uniforms in the order that `Views` reads them."""
    _, height, width = image.shape
    box = (0, 0, height, width)  # what is left of a square image when no box fits
    for area_u, ratio_u in zip(u[:10], u[10:20], strict=True):
        area = height * width * (SCALE[0] + (SCALE[1] - SCALE[0]) * area_u)
        low, high = math.log(RATIO[0]), math.log(RATIO[1])
        ratio = math.exp(low + (high - low) * ratio_u)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            box = (int(u[20] * (height - h + 1)), int(u[21] * (width - w + 1)), h, w)
            break
    image = F.resized_crop(image, *box, [SIZE, SIZE], antialias=True)
    if u[22] < 0.5:
        image = F.hflip(image)
    if u[23] < 0.8:
        changes = (
            lambda x: F.adjust_brightness(x, 0.6 + 0.8 * u[25]),
            lambda x: F.adjust_contrast(x, 0.6 + 0.8 * u[26]),
            lambda x: F.adjust_saturation(x, 0.8 + 0.4 * u[27]),
            lambda x: F.adjust_hue(x, -0.1 + 0.2 * u[28]),
        )
        for change in list(permutations(range(4)))[int(u[24] * 24)]:
            image = changes[change](image)
    if u[29] < 0.2:
        image = F.rgb_to_grayscale(image, 3)
    if u[30] < 0.5:
        image = F.gaussian_blur(image, 5, 0.1 + 1.9 * u[31])
    if u[32] < solarize:
        image = F.solarize(image, 0.5)
    return F.normalize(image, MEAN, STD)


def record_views(rng: np.random.Generator) -> dict[str, np.ndarray]:
    pixels = test_images(rng, 24, 24)
    images = torch.from_numpy(pixels).float() / 255
    uniforms = rng.random((2, 4, 33), dtype=np.float32)
    # So that every branch is taken: colour, grey, blur and solarize on and off.
    uniforms[0, 0, 23], uniforms[0, 1, 29], uniforms[0, 2, 30] = 0.9, 0.1, 0.1
    uniforms[1, 2, 32], uniforms[1, 3, 32], uniforms[0, 3, 32] = 0.1, 0.5, 0.1
    views = [
        torch.stack([one_view(image, u.tolist(), p) for image, u in zip(images, row, strict=True)])
        for row, p in zip(uniforms, (0.0, 0.2), strict=True)
    ]
    return {
        "view_pixels": pixels,
        "view_uniforms": uniforms,
        "view_outputs": torch.stack(views).numpy(),
    }


def record_boxes() -> dict[str, np.ndarray]:
    """How often RandomResizedCrop's boxes begin and end where, on 32×32 images."""
    torch.manual_seed(0)
    image = torch.empty(3, 32, 32)
    boxes = [RandomResizedCrop.get_params(image, SCALE, RATIO) for _ in range(100_000)]
    columns = np.array(boxes).T
    return {"box_counts": np.stack([np.bincount(column, minlength=33) for column in columns])}


def fill(model: torch.nn.Module) -> None:
    """Weights and statistics by formula, so that they need not be stored."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    tensors = [(name, tensor) for name, tensor in tensors if tensor.is_floating_point()]
    for index, (name, tensor) in enumerate(tensors):
        wave = torch.sin(0.7 * torch.arange(tensor.numel(), dtype=torch.float64) + index)
        if tensor.ndim == 4:
            wave *= 0.8 / tensor[0].numel() ** 0.5
        elif name.endswith(("weight", "running_var")):
            wave = 1 + 0.2 * wave
        else:
            wave *= 0.1
        tensor.data.copy_(wave.view(tensor.shape))


def record_resnet() -> dict[str, np.ndarray]:
    model = torchvision.models.resnet18(weights=None)
    model.fc = torch.nn.Identity()
    fill(model)
    images = torch.sin(torch.arange(2 * 3 * 64 * 64, dtype=torch.float64) ** 1.1)
    images = images.float().view(2, 3, 64, 64)
    with torch.no_grad():
        trained = model.train()(images).numpy()
        evaluated = model.eval()(images).numpy()  # with the statistics of one training pass
    return {"resnet18_train": trained, "resnet18_eval": evaluated}


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    values = record_functions(rng) | record_crops(rng) | record_views(rng)
    values |= record_boxes() | record_resnet()
    np.savez_compressed(Path(__file__).parent / "torchvision.npz", **values)
