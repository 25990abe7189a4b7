"""The `ssfl` command: subcommands by name, each imported only when it is used.

What goes wrong for a reason the user can mend (a disk that is full, a file that may not be written)
ends in one sentence and exit code 2.
"""

import logging
import sys
from importlib import import_module
from io import TextIOWrapper
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import TyperPath

COMMANDS = {
    "train": ("ssfl.commands.train:train", "Train encoders, or go on with a run."),
    "recipes": ("ssfl.commands.look:recipes", "List the recipes that come with the package."),
    "config": ("ssfl.commands.look:config", "Print a configuration, with what every key means."),
    "partition": ("ssfl.commands.look:partition", "Show who holds what, with pictures."),
    "data": ("ssfl.commands.data:app", "Get data sets."),
    "info": ("ssfl.commands.look:info", "Show what a run was and how far it came."),
    "evaluate": ("ssfl.commands.evaluate:evaluate", "Judge a run by the paper's protocols."),
    "report": ("ssfl.commands.report:report", "Write a run's page, report.html."),
    "compare": ("ssfl.commands.report:compare", "Put several runs side by side."),
    "export": ("ssfl.commands.use:export", "Take an encoder away as a file."),
    "embed": ("ssfl.commands.use:embed", "Turn images into features."),
    "classify": ("ssfl.commands.use:classify", "Classify images, given labels for a few."),
    "reproduce": (
        "ssfl.commands.reproduce:reproduce",
        "Repeat the paper's experiments, ours beside theirs.",
    ),
    "serve": ("ssfl.commands.federation:serve", "Coordinate a federation of sites."),
    "site": ("ssfl.commands.federation:site", "Take part in a federation with your own images."),
    "certs": ("ssfl.commands.federation:certs", "Make keys and certificates to try it out."),
    "doctor": ("ssfl.commands.doctor:doctor", "Say what works here, and how to mend the rest."),
}
"""Name: where it is, and the line in `ssfl --help`."""


class _Lazy(TyperGroup):
    """A group of stand-ins that have a name and a help line; one is imported when it is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.suggest_commands = False  # click suggests too, and once is enough
        self.commands = {name: TyperCommand(name, help=COMMANDS[name][1]) for name in COMMANDS}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is called: now it is worth importing."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, name and _load(name), rest


class _FromHome(TyperPath):
    """A path that may begin with `~`, which shells leave as it is in --out=~/run."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if str(value).startswith("~"):
            from ssfl.files import expanded  # not before: it takes a while

            value = expanded(value, param.opts[0])
        return super().convert(value, param, ctx)


def _load(name: str) -> Any:
    module, _, attribute = COMMANDS[name][0].partition(":")
    found = getattr(import_module(module), attribute)
    if isinstance(found, typer.Typer):
        group = typer.main.get_group(found)
        group.name, group.suggest_commands = name, False
        for command in group.commands.values():
            _know_homes(command)
        return group
    single = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
    )
    single.command(name)(found)
    return _know_homes(typer.main.get_command(single))


def _know_homes(command: Any) -> Any:
    for parameter in command.params:
        if isinstance(parameter.type, TyperPath):
            parameter.type = _FromHome()
    return command


app = typer.Typer(
    cls=_Lazy,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Federated self-supervised learning with personalised encoders: no labels, no shared "
    "images. Start with `ssfl train demo`.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from ssfl import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,  # or a command would be missed first
        help="Print the version and stop.",
    ),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Log more."),
) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s: %(message)s"
    )


def main() -> None:
    """Entry point: errors meant for people are one sentence on stderr and exit code 2."""
    from ssfl.errors import SSFLError
    from ssfl.interrupts import stoppable

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")  # a name that is no text ends nothing

    try:
        with stoppable():
            app()
    except KeyboardInterrupt:  # before a command had it in hand
        sys.exit(130)
    except SSFLError as error:
        _refuse(str(error))
    except OSError as error:  # the machine's own refusals: no room, no permission, no such folder
        logging.getLogger(__name__).info("where it happened", exc_info=True)
        place = f"{error.filename} cannot be used: " if error.filename else ""
        a_file = isinstance(error, FileExistsError)  # in the place of a folder
        _refuse(f"{place}{'it is no folder' if a_file else error.strerror or error}")


def _refuse(sentence: str) -> NoReturn:
    typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
    typer.echo(sentence, err=True)
    sys.exit(2)
