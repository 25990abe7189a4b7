"""Flower's programs as children of ours: started, watched, and never left behind.

Each gets its own process group and log file. Children end when we end them, when we exit, and
(because they watch us) when we are killed.
"""

import atexit
import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ssfl.comm.flower import QUIET
from ssfl.comm.flower.keys import write_secret
from ssfl.errors import FederationError

log = logging.getLogger(__name__)


class Child:
    """One of Flower's programs."""

    def __init__(self, module: str, arguments: Sequence[str], folder: Path) -> None:
        self._command = [sys.executable, "-m", f"ssfl.comm.flower.{module}", *arguments]
        self._folder = folder
        self.log = folder / f"{module}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._beginning = 0

    def start(self) -> None:
        """Start it (again)."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._beginning = output.tell()
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ
                | QUIET
                | {"FLWR_HOME": str(self._folder / "home"), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        atexit.register(self.stop)

    @property
    def pid(self) -> int:
        """Its process id (and group)."""
        return self._process.pid if self._process else 0

    def ended(self) -> bool:
        """Whether it is not running."""
        return self._process is None or self._process.poll() is not None

    def stop(self, patience: float = 5.0) -> None:
        """End it and whatever it started: politely, then not."""
        atexit.unregister(self.stop)
        if self._process is None:
            return
        for sign, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, patience)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def said(self) -> str:
        """What it has said since it was started. The log goes back further: what ended an earlier
        one is not what ended this."""
        with contextlib.suppress(OSError):
            said = self.log.read_bytes()[self._beginning :].decode(errors="replace")
            return re.sub("\x1b\\[[0-9;]*m", "", said)
        return ""

    def last_words(self) -> str:
        """What it said last, or what its last error was, for a message of ours."""
        lines = [line.strip() for line in self.said().splitlines() if line.strip()]
        if unauthorised := [line for line in lines if "401 Unauthorized" in line]:
            return unauthorised[-1]
        errors = [index for index, line in enumerate(lines) if line.startswith("ERROR")]
        last = lines[errors[-1] + 1 :][:3] if errors else lines[-3:]
        return " ".join(last)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def check_port(port: int) -> None:
    """Say that somebody listens there already."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        raise FederationError(f"port {port} is taken: stop what listens there, or choose a --port")


def new_secret(path: Path) -> bytes:
    """A secret that this process shares with its child through a file."""
    secret = secrets.token_bytes(32)
    write_secret(path, secret)
    return secret


def wait_for_port(child: Child, port: int, patience: float = 60.0) -> None:
    """Wait until a child listens, or say why it doesn't."""
    end = time.monotonic() + patience
    while time.monotonic() < end and not child.ended():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise FederationError(f"it did not start ({child.log}): {child.last_words()}")


@contextlib.contextmanager
def kept_running(child: Child, port: int) -> Iterator[None]:
    """Run a child for the length of the `with` block; start it again if it dies meanwhile."""
    check_port(port)
    child.start()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            if child.ended() and not over.is_set():
                log.warning("the SuperLink died and is started again (%s)", child.log)
                child.start()
                over.wait(2.0)

    try:
        wait_for_port(child, port)
        watcher = threading.Thread(target=watch, name="ssfl-superlink", daemon=True)
        watcher.start()
        yield
        over.set()
        watcher.join()
    finally:
        over.set()
        child.stop()
