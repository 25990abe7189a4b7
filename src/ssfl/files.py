"""Files that are either the old ones or the new ones, whatever happens in between; and the paths
that people write.

Everything a run must find again is written to a temporary name, flushed to the disk, then renamed.
"""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ssfl.errors import CheckpointError, ConfigError


def expanded(path: str | Path, what: str) -> Path:
    """A path whose `~` or `~user` is a home; `what` says where it was given. What begins so and is
    there all the same, as an office's lock files may, is meant as it is."""
    whole = os.path.expanduser(path)
    if str(whole).startswith("~") and not os.path.lexists(whole):
        user = Path(whole).parts[0]
        raise ConfigError(
            f"{what}: {path} begins with a home, and nobody's is {user}: write out the whole path"
        )
    return Path(whole)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to; at the end it takes the place of `path`, or of what that links to, or
    leaves it untouched and says why. A device or a pipe cannot be replaced: it is written to."""
    kept = "; what was there before is intact"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not (path.is_file() or path.is_dir()):
            kept = ""
            with path.open("wb") as file:
                yield file
        else:
            with _taking_the_place_of(Path(os.path.realpath(path))) as file:
                yield file
    except FileExistsError as error:
        raise CheckpointError(f"could not write {path}: {error.filename} is no folder") from error
    except OSError as error:
        raise CheckpointError(f"could not write {path}: {error.strerror or error}{kept}") from error


@contextmanager
def _taking_the_place_of(path: Path) -> Iterator[IO[bytes]]:
    # Not the name of `path` with something added, for which a file system may have no room.
    temporary = path.with_name(f".{secrets.token_hex(4)}{_mark()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    finally:  # Ctrl-C comes here too
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _mark() -> str:
    """How the names end of what this process has begun to write."""
    return f".{os.getpid()}.tmp"


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
        if not temporary.name.endswith(_mark()):
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
