"""What all tests share: helpers beside them can be imported, and a slow machine is no bug."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE / room) for room in ("algorithms", "federation"))]

settings.register_profile("ssfl", deadline=None)
settings.load_profile("ssfl")

# A suite started in the background ignores Ctrl-C, and one under nohup SIGHUP; and so would every
# process it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Where COLUMNS is set as a console is made, that console keeps the width for good; tests set it.
os.environ.pop("COLUMNS", None)
import ssfl.commands.console  # noqa: E402, F401


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `ssfl` in a process of its own, which does not outlive the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "ssfl", *map(str, arguments)],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
