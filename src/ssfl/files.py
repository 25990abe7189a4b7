"""Files that are either the old ones or the new ones, whatever happens in between.

Everything a run must find again is written to a temporary name, flushed to the disk, then renamed.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ssfl.errors import CheckpointError


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to; at the end it takes the place of `path`, or leaves it untouched and says
    why."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    except FileExistsError as error:
        raise CheckpointError(f"could not write {path}: {error.filename} is no folder") from error
    except OSError as error:
        raise CheckpointError(
            f"could not write {path}: {error.strerror or error}; what was there before is intact"
        ) from error
    finally:  # Ctrl-C comes here too
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by `content`, or leave it untouched and say why."""
    with replacing(path) as file:
        file.write(content)


def sync(path: Path) -> None:
    """Make durable what is cached of a file; a folder is a file of names, and cached like one."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise CheckpointError(f"could not write {path}: {error.strerror or error}") from error


def remove_unfinished(folder: Path) -> None:
    """Delete what processes that were killed had begun to write, anywhere below `folder`. No other
    process may be writing there; a late client of this one may."""
    for temporary in folder.rglob(".*.tmp"):
        if not temporary.name.endswith(f".{os.getpid()}.tmp"):
            temporary.unlink(missing_ok=True)


def write_text(path: Path, content: str) -> None:
    """Replace `path` by `content`, atomically."""
    write_bytes(path, content.encode())


def read_json(path: Path, mend: str) -> Any:
    """What a JSON file of a run holds; where it is broken, `mend` says what to do."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): {mend}") from None


def write_tensors(path: Path, tensors: dict[str, Tensor], facts: dict[str, str]) -> None:
    """Write named tensors and a few facts as one safetensors file, atomically."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_bytes(path, save(on_cpu, metadata=facts))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read what `write_tensors` wrote."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"could not read {path}: {error}") from error
