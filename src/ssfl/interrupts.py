"""Ctrl-C where it must not strike: between two changes that belong together."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let the block finish whole; a Ctrl-C (or SIGTERM) inside it takes effect at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    caught: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: caught.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if caught:
            signal.raise_signal(caught[0])
