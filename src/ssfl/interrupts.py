"""Ctrl-C and its like, and where they must not strike: while a program starts, and between two
changes that belong together."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_COMMANDS = str(Path(__file__).parent / "commands")


@contextmanager
def stoppable() -> Iterator[None]:
    """Ctrl-C, a polite end (SIGTERM: systemd, kill) and a terminal that is closed (SIGHUP) are
    KeyboardInterrupts to a command, which saves and tidies up. While it imports what it needs, they
    end the process at once, without a word.

    There is nothing to save yet, and half imported libraries make of a KeyboardInterrupt what they
    like: a traceback of pages, or nothing at all.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if _starting(frame):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        raise KeyboardInterrupt

    with handled(interrupt):
        yield


def _starting(frame: FrameType | None) -> bool:
    """Whether a command's own lines are importing something, and not what they called."""
    importer: FrameType | None = None
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            importer = frame.f_back
        frame = frame.f_back
    return importer is not None and importer.f_code.co_filename.startswith(_COMMANDS)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let the block finish whole; a Ctrl-C (or its like) inside it takes effect at its end."""
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
    """Let `handler` have Ctrl-C, SIGTERM and SIGHUP inside the block; but not what is ignored, as
    Ctrl-C is by a background job of a script, and SIGHUP under nohup."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    meant = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in meant}
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, signal.SIG_DFL if usual is None else usual)
