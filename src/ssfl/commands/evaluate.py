"""`ssfl evaluate`: the paper's protocols on a finished run."""

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssfl.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress

    from ssfl.protocols.options import ProtocolOptions
    from ssfl.protocols.scores import Evaluation


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    protocol: Annotated[
        list[str] | None,
        typer.Option("--protocol", "-p", help="Only this protocol (may be repeated)."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every protocol, the slow ones too.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one option, e.g. --set finetune.epochs=20."),
    ] = None,
) -> None:
    """Judge a run's last checkpoint by the paper's protocols.

    By default those of its tables, and label-free health: knn, federated-linear (of the shared
    encoder), linear (of every encoder) and health. On request, or with --all: mirrored-linear (both
    linear ones, trained on mirror images too), naive-federated-linear, semi-linear and
    semi-finetune (1 % and 10 % of the labels). Where there are no labels, health is what remains.
    Writes RUN/evaluation.json; figures of other protocols, measured before in the same way, are
    kept, and a note names those that are not.

    Example: ssfl evaluate runs/demo -p knn -p semi-linear
    """
    from ssfl.commands.console import say
    from ssfl.protocols.judge import measure
    from ssfl.protocols.options import PROTOCOLS
    from ssfl.run import Run

    if everything and protocol:
        raise ConfigError("--all is every protocol: leave out --protocol, or --all")
    opened = Run(run)
    options = parse_options(settings or [])
    chosen = list(PROTOCOLS) if everything else protocol
    with bars() as progress:
        found = measure(opened, chosen, options=options, progress=watcher(progress))
    show(found, opened, health=chosen is not None and "health" in chosen)
    found.save(opened.evaluation)  # shown already, should this fail
    page = f"`ssfl report {quote(str(run))}` puts it on the page"
    say(f"saved {opened.evaluation}; {page}")


def parse_options(settings: list[str]) -> "ProtocolOptions":
    """Options from `section.key=value` settings, written as TOML (a bare word is a string)."""
    from ssfl.config import apply_setting, validated
    from ssfl.protocols.options import ProtocolOptions

    raw: dict[str, Any] = {}
    for setting in settings:
        apply_setting(raw, setting, example="finetune.epochs=20")
    options: ProtocolOptions = validated(ProtocolOptions, raw)
    return options


def bars() -> "Progress":
    """A display of what is going on."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from ssfl.commands.console import errors

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)


def watcher(progress: "Progress") -> Any:
    """Shows each thing it is told about as a bar of its own."""
    tasks: dict[str, Any] = {}

    def watch(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = progress.add_task(what, total=total)
        progress.update(tasks[what], completed=done, total=total)

    return watch


def show(found: "Evaluation", run: Any, *, health: bool = False) -> None:
    """Print all figures as tables, the paper's beside ours where the recipe has them; health where
    it was asked for, or is all there is."""
    from rich.table import Table

    from ssfl.commands.console import console, note
    from ssfl.protocols.scores import GROUPS

    paper = run.config.paper.figures()
    for over, heading in GROUPS.items():
        group = [score for score in found.scores if score.over == over]
        if not group:
            continue
        per_client = over == "clients"
        console.print(f"[bold]{heading}[/]")
        table = Table(box=None)
        table.add_column()
        for head in ("accuracy", "± 95 %", *(("weighted", "std") if per_client else ()), "paper"):
            if head != "paper" or paper:
                table.add_column(head, justify="right")
        for score in group:
            row = [score.title, f"{score.value:.4f}", _number(score.ci95)]
            if per_client:
                row += [_number(score.weighted_mean), _number(score.std)]
            if paper:
                row.append(_number(paper.get(score.name)))
            table.add_row(*row)
        console.print(table)
        console.print()
    if found.health and (health or not found.scores):
        _show_health(found)
    for text in found.notes:
        note(text)


def _show_health(found: "Evaluation") -> None:
    from rich.table import Table

    from ssfl.commands.console import console
    from ssfl.evaluation.in_words import HEALTH

    console.print("[bold]Health, without labels[/]")
    table = Table(box=None, pad_edge=False)
    table.add_column("encoder", no_wrap=True)
    for figure in HEALTH.values():
        table.add_column(figure.column, justify="right", overflow="fold")
    for who, figures in found.health.items():
        label = "shared" if who == "global" else f"client {who}"
        row = [_number(figures.get(name), figure.digits) for name, figure in HEALTH.items()]
        table.add_row(label, *row)
    console.print(table)


def _number(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:.{digits}f}"
