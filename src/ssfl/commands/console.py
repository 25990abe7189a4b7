"""The console all commands print to, and how they end when asked to stop."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

console = Console()
errors = Console(stderr=True)


@contextmanager
def stop_gracefully() -> Iterator[None]:
    """On Ctrl-C say that the run is saved and how to go on; exit code 130 as shells expect."""
    try:
        yield
    except KeyboardInterrupt:
        errors.print("stopped; what was done is saved: go on with `ssfl train --resume RUN`")
        raise typer.Exit(130) from None
