"""What an encoder makes of images: one frozen forward pass, done once for each encoder and split.

Every protocol of the evaluation reads the same features, so they are computed in one sweep that
leaves the encoder as it was found (mode and batch-norm statistics) and are kept in a cache.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from ssfl.cores import side_by_side
from ssfl.errors import DataError

PIXELS = 64 * 32 * 32
"""Pixels of a batch on a CPU, at most, however large a batch was asked for."""
FEWEST = 8
"""Images of such a batch at the least, however large they are."""


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode inside the block; afterwards every submodule has the mode it had before."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def extract(
    encoder: nn.Module,
    pixels_u8: Tensor,
    normalise: Callable[[Tensor], Tensor],
    *,
    batch: int = 512,
    device: torch.device | str,
    indices: Tensor | None = None,
    autocast: torch.dtype | None = None,
    progress: Callable[[int], None] | None = None,
    threads: int | None = None,
) -> Tensor:
    """Features (N, d), float32, on `device`, of `pixels_u8` or of its rows `indices`, in order.

    The encoder must already be on `device`. `normalise` turns a uint8 batch into the encoder's
    input; `progress` is told the number of images of each batch as it is issued. On a CPU a batch
    may be smaller, and so many threads (default: torch's) take one each.
    """
    device = torch.device(device)
    count = len(pixels_u8) if indices is None else len(indices)
    if count == 0:
        raise DataError("there are no images to extract features from: the split is empty")
    if indices is not None:
        indices = indices.to(pixels_u8.device)

    def one(span: tuple[int, int]) -> Tensor:
        rows = slice(*span) if indices is None else indices[slice(*span)]
        # These modes are each thread's own. no_grad rather than inference_mode: a classifier's
        # autograd may use these features later.
        with torch.no_grad(), _autocast(device, autocast):
            return encoder(normalise(_upload(pixels_u8[rows], device))).flatten(1)  # type: ignore[no-any-return]

    spans = _batches(count, batch, device, pixels_u8.shape[-2:].numel())
    in_turn = map(one, spans) if device.type == "cuda" else side_by_side(one, spans, threads)
    out: Tensor | None = None
    done = 0
    with evaluating(encoder), _autocast(device, autocast):  # here too: weights stay cast
        for (start, stop), features in zip(spans, in_turn, strict=True):
            if out is None:
                out = torch.empty(count, features.shape[1], dtype=torch.float32, device=device)
            out[start:stop].copy_(features)
            if progress is not None:
                progress(stop - done)
            done = stop
    assert out is not None
    return out


def _batches(count: int, batch: int, device: torch.device, area: int) -> list[tuple[int, int]]:
    """Where each batch of images of so many pixels starts and stops.

    On a GPU the last one reaches back to be full: kernels are chosen for each new shape, which
    takes longer than a few images seen twice. A CPU is given few images at a time, whose
    activations fit its caches and are made in memory that the allocator has at hand: memory of
    tens of megabytes it asks of the system anew, page by page.
    """
    if device.type != "cuda":
        batch = min(batch, max(FEWEST, PIXELS // area))
    spans = [(start, min(start + batch, count)) for start in range(0, count, batch)]
    if device.type == "cuda":
        spans[-1] = (max(0, count - batch), count)
    return spans


def _autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def _upload(raw: Tensor, device: torch.device) -> Tensor:
    """To the device; from pinned memory where that lets the copy run beside the computing."""
    if raw.device.type == "cpu" and device.type == "cuda":
        raw = raw.pin_memory()
    return raw.to(device, non_blocking=True)


class FeatureCache:
    """Features by (encoder, split): the first to ask computes them, the others get the same tensor.

    `encoder` is any key that changes when the encoder does (a digest of its vector, say).
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Hashable, str], Tensor] = {}

    def get(self, encoder: Hashable, split: str, compute: Callable[[], Tensor]) -> Tensor:
        """The features of `split` under `encoder`, from `compute()` if they are not here yet."""
        key = (encoder, split)
        if key not in self._kept:
            self._kept[key] = compute()
        return self._kept[key]

    def forget(self, encoder: Hashable) -> None:
        """Drop every split of one encoder, once all of its protocols have run."""
        for key in [key for key in self._kept if key[0] == encoder]:
            del self._kept[key]

    def __len__(self) -> int:
        return len(self._kept)
