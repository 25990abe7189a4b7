"""Image files to features: found, read as the encoder saw its own, and passed through it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ssfl.data.decode import decode, first_broken
from ssfl.data.sources.folder import SUFFIXES
from ssfl.encoder import Encoder
from ssfl.errors import DataError
from ssfl.evaluation.features import extract


def find_images(paths: Sequence[str | Path]) -> list[Path]:
    """The image files named, and all those under the folders named, in a fixed order."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
            if not inside:
                raise DataError(f"there are no images under {path}")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise DataError(f"there is no file or folder {path}")
    if not found:
        raise DataError("no images were named: give files or folders")
    return found


def read_images(paths: Sequence[Path], encoder: Encoder) -> Tensor:
    """uint8 N×C×H×W in the encoder's size and channels, cropped or squashed as those that it was
    trained on; a file that cannot be read is an error."""
    read = decode(paths, encoder.image_size, encoder.fit)
    if read.broken:
        raise DataError(
            f"{len(read.broken):,} of {len(paths):,} images could not be read: leave them out; "
            f"{first_broken(read.broken)}"
        )
    if encoder.mean.shape[1] == 1:
        grey = read.pixels.float().mul(torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1))
        return grey.sum(1, keepdim=True).round().to(torch.uint8)
    return read.pixels


def embed(
    encoder: Encoder,
    images: Tensor | Sequence[str | Path],
    *,
    batch: int = 256,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Features (N, d) on the CPU, of uint8 images or of image files, in order."""
    device = encoder.mean.device
    if isinstance(images, Tensor):
        return extract(encoder, images, _as_is, device=device, batch=batch, progress=progress).cpu()
    files = [Path(path) for path in images]
    if not files:
        raise DataError("no images were named: give files or folders")
    parts = []
    for start in range(0, len(files), batch):  # decoded in step: a folder may not fit in memory
        pixels = read_images(files[start : start + batch], encoder)
        parts.append(extract(encoder, pixels, _as_is, device=device, batch=batch).cpu())
        if progress is not None:
            progress(len(pixels))
    return torch.cat(parts)


def _as_is(images: Tensor) -> Tensor:
    """The encoder normalises by itself."""
    return images
