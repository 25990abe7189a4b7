"""Commands that only look: recipes, config, partition, info."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ssfl.recipes import recipes as all_recipes

RECIPE = typer.Argument(
    help="A recipe's name, or the path of a .toml file.", autocompletion=all_recipes
)
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Change one option, e.g. --set local.lr=0.03.")
]


def recipes() -> None:
    """List the recipes that come with the package.

    Example: ssfl recipes
    """
    from rich.table import Table

    from ssfl.commands.console import console

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, about in all_recipes().items():
        table.add_row(f"[bold]{name}[/]", about)
    console.print(table)


def config(
    recipe: Annotated[str, RECIPE],
    settings: Settings = None,
    bare: Annotated[bool, typer.Option("--bare", help="Leave out the descriptions.")] = False,
) -> None:
    """Print a configuration in full, as resolved, with what every key means.

    Example: ssfl config demo --set algorithm.name=per-ssfl > mine.toml
    """
    from ssfl.config import load_config, to_toml

    typer.echo(to_toml(load_config(recipe, settings or []), described=not bare), nl=False)


def partition(
    recipe: Annotated[str, RECIPE],
    settings: Settings = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the pictures go.")] = Path(
        "partition"
    ),
) -> None:
    """Show who holds what: sizes and class counts, and the paper's two pictures.

    Example: ssfl partition demo --set partition.alpha=0.1
    """
    from rich.table import Table

    from ssfl.assemble import load_federated
    from ssfl.commands.console import console, note, say
    from ssfl.config import load_config
    from ssfl.data.pictures import save_partition_pictures
    from ssfl.errors import DataError

    data = load_federated(load_config(recipe, settings or []), progress=console.is_terminal)
    if len(data) == 0:
        raise DataError("these images are at sites: who holds what is known there alone")
    counts = data.class_counts()
    table = Table(title=f"{escape(data.dataset.name)}: {len(data.dataset.train):,} images")
    table.add_column("client", justify="right")
    if data.names is not None:
        table.add_column("name", overflow="fold")
    table.add_column("train", justify="right")
    table.add_column("test", justify="right")
    if counts is not None:
        table.add_column("images of each class", overflow="fold")
        digits = [len(str(most)) for most in counts.max(0)]
    shown = list(data.clients())[:50]
    for place, client in enumerate(shown):
        test = data.test_indices(client)
        row = [str(client), f"{data.size(client):,}", "" if test is None else f"{len(test):,}"]
        if data.names is not None:
            row.insert(1, escape(data.names[place]))
        if counts is not None:
            row.append(" ".join(f"{n:>{d}}" for n, d in zip(counts[place], digits, strict=True)))
        table.add_row(*row)
    console.print(table)
    if len(shown) < len(data.clients()):
        console.print(f"... and {len(data.clients()) - len(shown):,} more clients")
    classes = data.dataset.classes
    if counts is not None and classes is not None and len(classes) <= 20:
        console.print(f"classes: {escape(', '.join(classes))}", highlight=False)
    for text in data.dataset.notes:
        note(text)
    for path in save_partition_pictures(data, out):
        say(f"saved {path}")


def info(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Every final figure, as JSON.")] = False,
) -> None:
    """Show what a run was and how far it came.

    Example: ssfl info runs/demo --json
    """
    from ssfl.commands.console import console, say
    from ssfl.commands.train import show_final
    from ssfl.federation.checkpoint import latest_checkpoint
    from ssfl.run import Run

    opened = Run(run)
    final = opened.final
    if as_json:
        typer.echo(json.dumps(final, indent=2))
        return
    config, saved = opened.config, latest_checkpoint(opened.checkpoints)
    console.print(
        f"[bold]{config.name}[/]: {config.algorithm.name} with {config.ssl.method} on "
        f"{config.data.source}, seed {config.seed}",  # type: ignore[attr-defined]
        highlight=False,
    )
    if config.here is not None:
        clients = ", ".join(map(str, config.here.clients))
        console.print(f"a site's part of a federation: clients {clients}", highlight=False)
    elif opened.served:
        console.print("a coordinator's: its clients, their images and encoders are at sites")
    done, rounds = saved.rounds if saved else 0, config.server.rounds
    console.print(f"{done} of {rounds} rounds saved", highlight=False)
    if final:
        show_final(final)
    if done < rounds or not (final or config.here):  # a site has no figures of the whole
        say(f"not finished: go on with `{opened.way_on}`")
