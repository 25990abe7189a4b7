"""The console all commands print to, and how they end when asked to stop."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape

from ssfl.errors import ConfigError, SSFLError

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
def stop_gracefully(display: "Bars", comm: str, resumed: Path | None) -> Iterator[None]:
    """On Ctrl-C say that the run is saved and how to go on, or that nothing was left behind; exit
    code 130 as shells expect. An error in the midst of a run says how to go on, too."""
    from ssfl.comm import way_on

    try:
        yield
    except KeyboardInterrupt:
        words = "stopped before anything was done: nothing is left behind"
        if (folder := display.folder or resumed) is not None and _is_run(folder):
            words = f"stopped; what was done is saved: go on with `{way_on(folder, comm)}`"
        errors.print(words, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None
    except SSFLError as error:
        if display.folder is None or not _is_run(display.folder):
            raise
        go_on = way_on(display.folder, comm)
        raise SSFLError(f"{error}; when that is mended, go on with `{go_on}`") from error


def _is_run(folder: Path) -> bool:
    return (folder / "config.toml").exists()


def refuse_for_a_resumed_run(options: Mapping[str, object]) -> None:
    """Say which of these were given: they would make it another experiment, or another run."""
    given = [option for option, value in options.items() if value is not None]
    if given:
        raise ConfigError(
            f"a resumed run keeps its configuration and place: leave out {', '.join(given)}"
        )
