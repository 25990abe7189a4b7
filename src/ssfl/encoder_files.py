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
    if not _is_zip(path):
        tensors, facts = read_tensors(path)
        return tensors, facts.get(ABOUT)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch cannot read
        raise CheckpointError(f"could not read {path}: {error}") from error
    about = content.get(ABOUT) if isinstance(content, dict) else None
    found = content if about is None else content.get("tensors")
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise CheckpointError(f"{path} holds other things than tensors by name")
    return found, about


def _is_zip(path: Path) -> bool:
    """A torch file, whatever its name (`--format` may have decided against the suffix)."""
    with path.open("rb") as file:
        return file.read(2) == b"PK"
