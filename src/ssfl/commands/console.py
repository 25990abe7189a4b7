"""The console all commands print to, and how they end when asked to stop."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from shlex import quote
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape

from ssfl.errors import ConfigError

if TYPE_CHECKING:
    from ssfl.display import Bars

console = Console()
errors = Console(stderr=True)


def say(text: str) -> None:
    """A line as it is: not broken where it is long, and its brackets (of a path, say) no markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """Something to know beside the figures."""
    console.print(f"[yellow]note:[/] {escape(text)}", highlight=False)


@contextmanager
def stop_gracefully(display: "Bars") -> Iterator[None]:
    """On Ctrl-C say that the run is saved and how to go on, or that nothing was left behind; exit
    code 130 as shells expect."""
    try:
        yield
    except KeyboardInterrupt:
        words = "stopped before anything was done: nothing is left behind"
        if display.folder is not None and (display.folder / "config.toml").exists():
            go_on = f"`ssfl train --resume {quote(str(display.folder))}`"
            words = f"stopped; what was done is saved: go on with {go_on}"
        errors.print(words, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None


def refuse_for_a_resumed_run(options: Mapping[str, object]) -> None:
    """Say which of these were given: they would make it another experiment, or another run."""
    given = [option for option, value in options.items() if value is not None]
    if given:
        raise ConfigError(
            f"a resumed run keeps its configuration and place: leave out {', '.join(given)}"
        )
