"""A guest in the caller's process: torch as we know it while we work, as it was afterwards."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

_drawing = threading.RLock()
"""Torch's global generator is one for all threads. A network may be made while another is: a
backbone that starts from an encoder's weights loads that encoder."""


@contextmanager
def own_torch() -> Iterator[None]:
    """New tensors are float32 and on the CPU unless the code says otherwise, products of them are
    not rounded to fewer digits, and gradients are there to be taken, whatever a notebook has made
    the default and whichever block it calls from."""
    dtype = torch.get_default_dtype()
    elsewhere = torch.get_default_device().type != "cpu"
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu") if elsewhere else nullcontext(), _own_rounding(), _own_modes():
            yield
    finally:
        torch.set_default_dtype(dtype)


@contextmanager
def _own_modes() -> Iterator[None]:
    """What a thread's blocks have switched, and threads of ours would not see."""
    with torch.inference_mode(False), torch.enable_grad(), _not_cast("cpu"), _not_cast("cuda"):
        yield


def _not_cast(device: str) -> AbstractContextManager[Any]:
    casts = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if casts else nullcontext()


@contextmanager
def _own_rounding() -> Iterator[None]:
    """Matrix products of float32 in float32; convolutions as an `Engine` decides, for the while."""
    products = _told(torch.get_float32_matmul_precision)
    coarse = products not in (None, "highest")
    convolutions = _told(lambda: torch.backends.cudnn.allow_tf32)
    if coarse:
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if coarse:
            torch.set_float32_matmul_precision(products)
        if convolutions:
            torch.backends.cudnn.allow_tf32 = True


def _told(read: Callable[[], Any]) -> Any:
    """A setting, or None where it was made in torch 2.9's words, which the older cannot repeat."""
    try:
        return read()
    except RuntimeError:
        return None


@contextmanager
def own_draws(seed: int = 0) -> Iterator[None]:
    """What draws from torch's global generator, as new networks do, draws from `seed`; the
    caller's own numbers go on as if nothing had been drawn."""
    generator = torch.default_generator  # not `torch.manual_seed`: it seeds every GPU's as well
    with _drawing:
        before = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(before)
