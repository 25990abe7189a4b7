"""One process at a time, where several may come.

Locks are the operating system's, so that a process that is killed holds none. On a disk that knows
no locks (some network disks) nobody is kept waiting, and nobody kept out.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ssfl.errors import CheckpointError


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait for one's turn to read and rewrite what `path` stands for."""
    with _opened(path) as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Whether what `path` stands for is ours for the while, or another process's already."""
    with _opened(path) as file:
        yield _taken(file)


def _taken(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks on this disk
        pass
    return True


def _opened(path: Path) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w")
    except FileExistsError as error:
        raise CheckpointError(f"could not write {path}: {error.filename} is no folder") from error
    except OSError as error:
        raise CheckpointError(f"could not write {path}: {error.strerror or error}") from error
