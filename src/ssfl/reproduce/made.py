"""How a figure was made: the commit, the version, the device, the command."""

import os
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import ssfl
from ssfl.data.decode import printable


@dataclass(frozen=True)
class Maker:
    """What makes figures: what was typed, and the program as it was then. Its files may change
    while it works for hours."""

    command: str
    commit: str | None

    @classmethod
    def now(cls, command: str | None = None) -> "Maker":
        """This program, called as it was or as it is told."""
        return cls(command or command_line(), commit())


def commit() -> str | None:
    """The commit this program is at, '+' if files were changed since; None where not known.

    SSFL_COMMIT says it where the program was copied without its repository.
    """
    if given := os.environ.get("SSFL_COMMIT"):
        return given
    package = Path(ssfl.__file__).parent
    # A package installed into an environment inside some other repository is not of that one.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = _git(package, "rev-parse", "--short=12", "HEAD")
    changed = _git(package, "status", "--porcelain", "--untracked-files=no", ".")
    return head and head + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def device_name(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def command_line() -> str:
    """What was typed; `python -m ssfl` is the same as `ssfl`."""
    program, *arguments = sys.argv
    name = Path(program).name
    return printable(shlex.join(["ssfl" if name == "__main__.py" else name, *arguments]))


def release() -> None:
    """Let go of what the last run held, on a GPU too; compiled code has a limit per process."""
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch._dynamo.reset()
        torch.cuda.empty_cache()
