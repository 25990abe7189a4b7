"""Image files to features: found, read as the encoder saw its own, and passed through it."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ssfl.data.decode import Decoded, decode, first_broken, note_dark
from ssfl.data.sources.folder import image_files
from ssfl.encoder import Encoder
from ssfl.errors import CheckpointError, DataError
from ssfl.evaluation.features import extract
from ssfl.guest import own_torch

log = logging.getLogger(__name__)


def find_images(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """The image files named, and all that the folder source would find in the folders named, in a
    fixed order."""
    found: list[Path] = []
    for path in _several(paths):
        if path.is_dir():
            inside = image_files(path)
            if not inside:
                raise DataError(f"there are no images under {path}")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise DataError(f"there is no file or folder {path}")
    return found


@own_torch()
def read_images(
    paths: Sequence[Path], encoder: Encoder, broken: list[Path] | None = None
) -> Tensor:
    """uint8 N×C×H×W in the encoder's size and channels, read as those that it was trained
    on. A file that cannot be read is an error; or, given a list, is left out and put
    there."""
    return _channels(_decode(paths, encoder, broken).pixels, encoder)


def _decode(paths: Sequence[Path], encoder: Encoder, broken: list[Path] | None) -> Decoded:
    read = decode(paths, encoder.image_size, encoder.reading)
    if read.broken and broken is None:
        # How many there are is not known: a folder is read part by part, and this is one.
        raise DataError(
            "some images cannot be read: leave them out (--skip-broken); "
            f"{first_broken(read.broken)}"
        )
    if broken is not None:
        broken += [path for path, _ in read.broken]
    return read


def _channels(rgb: Tensor, encoder: Encoder) -> Tensor:
    if encoder.mean.shape[1] != 1:
        return rgb
    grey = rgb.float().mul(torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1))
    return grey.sum(1, keepdim=True).round().to(torch.uint8)


@own_torch()
def embed(
    encoder: Encoder,
    images: Tensor | str | Path | Sequence[str | Path],
    *,
    batch: int = 256,
    progress: Callable[[int], None] | None = None,
    broken: list[Path] | None = None,
) -> Tensor:
    """Features (N, d) on the CPU, of uint8 images or of image files, in order. Files that cannot
    be read are an error; or, given a list, are left out and put there."""
    device = encoder.mean.device
    if isinstance(images, Tensor):
        return _finite(
            extract(encoder, images, _as_is, device=device, batch=batch, progress=progress).cpu()
        )
    files = _several(images)
    out: Tensor | None = None
    done = 0
    brightest: int | None = None
    for start in range(0, len(files), batch):  # decoded in step: a folder may not fit in memory
        some = files[start : start + batch]
        read = _decode(some, encoder, broken)
        if read.brightest is not None:
            brightest = max(brightest or 0, read.brightest)
        pixels = _channels(read.pixels, encoder)
        if len(pixels):
            features = _finite(extract(encoder, pixels, _as_is, device=device, batch=batch).cpu())
            if out is None:  # all at once: put together at the end, they would be there twice
                out = torch.empty(len(files), features.shape[1])
            out[done : done + len(features)] = features
            done += len(features)
        if progress is not None:
            progress(len(some))
    if out is None:
        raise DataError(f"none of the {len(files):,} images could be read")
    for note in note_dark(brightest, encoder.reading.window, where="", option="--window 0 4095"):
        log.warning("%s", note)
    return out[:done]


def _several(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """Paths, of which one alone may be given: a text is not a sequence of letters here."""
    several = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    if not several:
        raise DataError("no images were named: give files or folders")
    return several


def _finite(features: Tensor) -> Tensor:
    if not features.isfinite().all():
        raise CheckpointError(
            "the encoder's features are not finite, for its training has diverged: train it anew "
            "with a lower rate (local.lr)"
        )
    return features


def _as_is(images: Tensor) -> Tensor:
    """The encoder normalises by itself."""
    return images
