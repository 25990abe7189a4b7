"""An encoder as a file: tensors by name and, where `ssfl export` wrote it, a short JSON text that
says which network they belong to.

Nothing is unpickled: safetensors cannot, and torch files are read with `weights_only`.
"""

from pathlib import Path

import torch
from torch import Tensor

from ssfl.errors import CheckpointError
from ssfl.files import read_tensors

ABOUT = "ssfl_encoder"
"""The key of that text."""


def read_encoder_file(path: Path) -> tuple[dict[str, Tensor], str | None]:
    """A file's tensors, and what it says of itself."""
    safe = _is_safetensors(path)
    try:
        if safe:
            tensors, facts = read_tensors(path)
            return tensors, facts.get(ABOUT)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever cannot be read; torch's words advise to run its code
        raise CheckpointError("it is cut off, or holds other things than tensors") from error
    about = content.get(ABOUT) if isinstance(content, dict) else None
    found = content if about is None else content.get("tensors")
    if not isinstance(found, dict):
        raise CheckpointError("it holds other things than tensors by name")
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(f"what it holds under {name!r} is no tensor of that name")
    return found, about


def _is_safetensors(path: Path) -> bool:
    """By the brace that follows its length, whatever its name (`--format` may have decided against
    the suffix)."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"
