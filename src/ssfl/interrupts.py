"""Ctrl-C where it must not strike: while a program starts, and between two changes that belong
together."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_COMMANDS = str(Path(__file__).parent / "commands")


@contextmanager
def ended_at_once_while_starting() -> Iterator[None]:
    """A Ctrl-C while a command imports what it needs ends the process at once, without a word.

    There is nothing to save yet, and half imported libraries make of a KeyboardInterrupt what they
    like: a traceback of pages, or nothing at all. Later it is a KeyboardInterrupt as usual.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:  # a background job, which Ctrl-C does not mean
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if _starting(frame):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _starting(frame: FrameType | None) -> bool:
    """Whether a command's own lines are importing something, and not what they called."""
    importer: FrameType | None = None
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            importer = frame.f_back
        frame = frame.f_back
    return importer is not None and importer.f_code.co_filename.startswith(_COMMANDS)


def sigterm_is_ctrl_c() -> None:
    """From now on a polite end (systemd, kill) is a Ctrl-C; also to a background job of a script,
    where Ctrl-C itself is ignored."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGTERM, interrupt)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let the block finish whole; a Ctrl-C (or SIGTERM) inside it takes effect at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    caught: list[int] = []
    try:
        with handled(lambda number, _: caught.append(number)):
            yield
    finally:
        if caught:
            signal.raise_signal(caught[0])


@contextmanager
def handled(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> Iterator[None]:
    """Let `handler` have Ctrl-C and SIGTERM inside the block."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, signal.SIG_DFL if usual is None else usual)
