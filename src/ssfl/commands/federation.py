"""`ssfl certs`, `ssfl serve`, `ssfl site init`, `ssfl site start`: a federation between sites.

They prepare Flower's files, start Flower's own programs as children, and leave none behind.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssfl.errors import ConfigError

if TYPE_CHECKING:
    from ssfl.run import Run

Settings = Annotated[
    list[str], typer.Option("--set", help="section.key=value on top of the recipe.")
]

site = typer.Typer(no_args_is_help=True, help="Take part in a federation with your own images.")


def certs(
    folder: Annotated[Path, typer.Argument(help="Folder to make; must hold no keys yet.")],
    host: Annotated[
        list[str], typer.Option("--host", help="A name or address sites reach the server by.")
    ] = [],  # noqa: B006
    days: Annotated[int, typer.Option(help="Days until the certificates expire.")] = 365,
) -> None:
    """Make a certificate authority and a server certificate, for trying a federation out.

    Example: ssfl certs keys --host coordinator.example
    """
    need_flower()
    from ssfl.comm.flower.keys import make_authority

    make_authority(folder, host, days)
    (folder / "sites").mkdir(exist_ok=True)
    typer.echo(f"Give every site {folder / 'ca.pem'}; put its site.pub into {folder / 'sites'} as")
    command = f"ssfl serve RECIPE --keys {quote(str(folder))}"
    typer.echo(f"NAME.pub; then run `{command}`. Keep the .key files here.")


def serve(
    recipe: Annotated[
        str, typer.Argument(help="A recipe, a .toml file, or a run directory to go on with.")
    ],
    keys: Annotated[
        Path | None, typer.Option(help="Folder made by `ssfl certs` (default: keys).")
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="Clients to wait for first (default: all of the recipe's).")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="0.0.0.0: for all (the default); 127.0.0.1: for this machine alone."),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (default: 9092).")] = None,
    patience: Annotated[
        float | None, typer.Option(help="Seconds to wait for clients (default: 3600).")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Run directory of a new run (default: runs/NAME)."),
    ] = None,
    setting: Settings = [],  # noqa: B006
) -> None:
    """Coordinate a federation: wait for sites, train, keep the record.

    Example: ssfl serve mine.toml --keys keys --clients 3

    A run directory is gone on with as before, but for what is given: port, keys, ... may change.
    What is trained and where it is kept may not, so --set and --out are for new runs alone.
    """
    need_flower()
    from ssfl.comm import COMMUNICATORS
    from ssfl.commands.console import console, refuse_for_a_resumed_run
    from ssfl.commands.train import show_final
    from ssfl.display import Bars
    from ssfl.experiment import Experiment

    options = {
        "keys": keys.resolve() if keys else None,
        "host": host,
        "port": port,
        "clients": clients,
        "patience": patience,
    }
    told = {name: value for name, value in options.items() if value is not None}
    if (Path(recipe) / "config.toml").is_file():
        refuse_for_a_resumed_run({"--set": setting or None, "--out": out})
        run = _gone_on_with(recipe, told)
    else:
        run = _begun(recipe, setting, out, told)
    if run.final.get("rounds") == run.config.server.rounds:
        show_final(run.final)
        tell(f"{run.path} is finished: no site is needed any more.")
        return
    COMMUNICATORS.register("flower", "ssfl.comm.flower.serve:connect")
    tell(f"Run directory {run.path}; `{run.way_on}` goes on with it if it is stopped.")
    try:
        with logging_apart(run.path / "flower" / "serve.log"):
            Experiment(run, "flower", Bars(console)).play()
    except KeyboardInterrupt:
        tell(f"Stopped; what was done is saved: go on with `{run.way_on}`.")
        raise typer.Exit(130) from None
    show_final(run.final)
    tell(f"All of it: {run.path}")


def _begun(recipe: str, settings: list[str], out: Path | None, told: dict[str, Any]) -> "Run":
    """A new run, and how it is served."""
    from ssfl.assemble import load_federated
    from ssfl.comm.flower.processes import check_port
    from ssfl.comm.flower.serve import ServeOptions, check_keys, write_settings
    from ssfl.config import load_config, validated
    from ssfl.interrupts import uninterrupted
    from ssfl.run import Run
    from ssfl.start import first_theta

    config = load_config(recipe, settings)
    serving = validated(ServeOptions, {"keys": Path("keys").resolve()} | told, prefix="--")
    check_keys(serving.keys)
    check_port(serving.port)  # while there is no run directory that would stay behind
    if config.server.start is not None:
        first_theta(config, load_federated(config).dataset)
    with uninterrupted():  # neither is of use without the other
        run = Run.create(config, out)
        write_settings(run.path, serving)
    return run


def _gone_on_with(folder: str, told: dict[str, Any]) -> "Run":
    """A run that was stopped, served as before but for what is told now."""
    from ssfl.comm.flower.serve import ServeOptions, check_keys, read_settings, write_settings
    from ssfl.config import validated
    from ssfl.run import Run

    run = Run(folder)
    before = read_settings(run.path).model_dump()
    serving = validated(ServeOptions, before | told, prefix="--")
    check_keys(serving.keys)
    with run.held():  # not while another process serves it
        write_settings(run.path, serving)
    return run


@site.command("init")
def site_init(
    folder: Annotated[Path, typer.Argument(help="Folder to make for this site.")],
    server: Annotated[str, typer.Option(help="The coordinator's address, host:port.")],
    ca: Annotated[Path, typer.Option(help="The federation's ca.pem, from the coordinator.")],
    recipe: Annotated[str, typer.Option(help="The agreed recipe or .toml file.")],
    clients: Annotated[str, typer.Option(help="Ids of the clients here, e.g. 0 or 3,4,5.")],
    data: Annotated[Path | None, typer.Option(help="Folder of this site's images.")] = None,
    window: Annotated[
        tuple[float, float] | None,
        typer.Option(
            metavar="BLACK WHITE",
            help="The values that are black and white in its grey files of more than 8 bits, e.g. "
            "0 4095 for scans of 12 bits.",
        ),
    ] = None,
    workers: Annotated[int, typer.Option(help="Clients that train side by side.")] = 1,
    setting: Settings = [],  # noqa: B006
) -> None:
    """Prepare a site: its settings, and a key whose public half the coordinator must know.

    Example: ssfl site init here --server fl.example:9092 --ca ca.pem --recipe a.toml --clients 0
    """
    need_flower()
    from ssfl.comm.flower.host import SiteOptions, init_site
    from ssfl.config import load_config, validated
    from ssfl.data.sources.sites import SitesOptions

    try:
        ids = [int(client) for client in clients.split(",")]
    except ValueError:
        raise ConfigError(f"--clients {clients}: give the clients' ids, as in 3 or 3,4,5") from None
    told = {
        "server": server,
        "clients": ids,
        "data": data,
        "window": window,
        "workers": workers,
    }
    options = validated(SiteOptions, told, prefix="--")
    config = load_config(recipe, setting)
    public = init_site(folder, options, config, ca)
    wanting = isinstance(config.data, SitesOptions) and data is None
    typer.echo(f"Send {public} (and nothing else) to the coordinator; then run")
    typer.echo(f"`ssfl site start {quote(str(folder))}{' --data FOLDER' if wanting else ''}`.")


@site.command("start")
def site_start(
    folder: Annotated[Path, typer.Argument(help="The site's folder.")] = Path(),
    data: Annotated[Path | None, typer.Option(help="Folder of this site's images.")] = None,
) -> None:
    """Take part until stopped. Images, labels and personal encoders stay in this machine.

    Example: ssfl site start here --data scans
    """
    need_flower()
    from ssfl.comm.flower.host import load_site, run_site

    options, config = load_site(folder, data)
    try:
        with logging_apart(folder / "flower" / "site.log"):
            run_site(folder.resolve(), options, config)
    except KeyboardInterrupt:
        tell("Left the federation; what was learnt here is in " + str(folder / "runs"))


def need_flower() -> None:
    """Say how to get Flower where it is missing."""
    if find_spec("flwr") is None:
        raise ConfigError("Flower is not installed: `pip install 'ssfl[flower]'`")


def tell(text: str) -> None:
    """A line for people, apart from what a program would read."""
    typer.echo(text, err=True)


@contextlib.contextmanager
def logging_apart(file: Path) -> Iterator[None]:
    """Our own log lines on the terminal (or in systemd's journal); Flower's go to a file."""
    from flwr.common.logger import FLOWER_LOGGER

    file.parent.mkdir(parents=True, exist_ok=True)
    ours, its = logging.StreamHandler(sys.stderr), logging.FileHandler(file)
    with only_to(ours, logging.getLogger("ssfl")), only_to(its, FLOWER_LOGGER):
        yield


@contextlib.contextmanager
def only_to(handler: logging.Handler, logger: logging.Logger) -> Iterator[None]:
    """Have a logger's lines go to one place and no other."""
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = logger.handlers, logger.level, logger.propagate
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        handler.close()
        logger.handlers, level, logger.propagate = before
        logger.setLevel(level)
