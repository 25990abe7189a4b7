"""The coordinator: a SuperLink for the length of a run, and a communicator over it.

`connect` is what an experiment with `--comm flower` calls; `ssfl serve` writes its settings into
the run directory first, so that a resumed run finds them again.
"""

import contextlib
import json
import logging
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import Field, field_validator

from ssfl.comm.flower.communicator import FlowerCommunicator
from ssfl.comm.flower.keys import check_dates, server_names
from ssfl.comm.flower.processes import Child, kept_running, new_secret
from ssfl.comm.flower.recipe import shared_recipe
from ssfl.comm.flower.runtime import Link
from ssfl.config import Config, validated
from ssfl.errors import ConfigError, FederationError
from ssfl.federation.client import Host
from ssfl.files import read_json, write_text
from ssfl.run import SERVED
from ssfl.section import Section

log = logging.getLogger(__name__)

DATABASE = "link.sqlite"
"""Where the SuperLink keeps messages and whom it knows."""


class ServeOptions(Section):
    """How a coordinator can be reached, and by whom."""

    keys: Path
    """Folder with ca.pem, server.pem, server.key and the public keys of sites, sites/*.pub."""
    host: str = "0.0.0.0"
    """0.0.0.0 to listen to everybody, 127.0.0.1 to this machine alone."""
    port: int = Field(9092, ge=1, le=65535)
    """Port to listen on."""
    clients: int = Field(0, ge=0)
    """Clients to wait for before the first round (0: as many as the recipe's partition has)."""
    patience: float = Field(3600.0, gt=0)
    """Seconds to wait for them."""
    run: str = Field(default_factory=lambda: secrets.token_hex(16))
    """The name under which sites keep their clients' states of this run."""

    @field_validator("host")
    @classmethod
    def _heard_from_here(cls, host: str) -> str:
        if host not in ("0.0.0.0", "127.0.0.1"):
            raise ValueError(
                "the coordinator reaches its own SuperLink by 127.0.0.1, so listen on 0.0.0.0 "
                f"(all addresses) or 127.0.0.1 (this machine alone), not on {host}"
            )
        return host


def write_settings(folder: Path, options: ServeOptions) -> None:
    """Keep the settings with the run."""
    write_text(folder / SERVED, options.model_dump_json(indent=2))


def read_settings(folder: Path) -> ServeOptions:
    """The settings a run was served with."""
    path = folder / SERVED
    if not path.is_file():
        raise ConfigError(f"{folder} was not started by `ssfl serve`: it has no {SERVED}")
    told = read_json(path, "bring back what `ssfl serve` wrote, or start a new run")
    options: ServeOptions = validated(ServeOptions, told, prefix=f"{path}: ")
    return options


def connect(config: Config, folder: Path, hosts: Sequence[Host]) -> FlowerCommunicator:
    """Start the SuperLink, let the known sites in, and wait for their clients."""
    options = read_settings(folder)
    check_keys(options.keys)
    place = folder / "flower"
    secret = new_secret(place / "secret")
    child = Child("link", _arguments(options, place), place)
    stack = contextlib.ExitStack()
    try:
        stack.enter_context(only_meanwhile(place / DATABASE))
        stack.enter_context(kept_running(child, options.port))
        ca = (options.keys / "ca.pem").read_bytes()
        link = Link(f"127.0.0.1:{options.port}", ca, secret)
        door = Door(link, options.keys / "sites")
        door()
        grid = stack.enter_context(link.run())
        recipe = json.dumps(shared_recipe(config))
        communicator = FlowerCommunicator(
            grid,
            options.run,
            recipe,
            options.patience,
            close=stack.close,
            door=door,
            link_log=child.log,
        )
        communicator.gather(options.clients or config.partition.clients)
    except BaseException:
        stack.close()
        raise
    return communicator


@contextlib.contextmanager
def only_meanwhile(database: Path) -> Iterator[None]:
    """No database of an earlier SuperLink, nor this one's afterwards. It is for a SuperLink that
    dies under its coordinator: another coordinator asks anew whatever was on the way, and Flower
    would keep the vectors of every one that was killed."""

    def forget() -> None:
        for end in ("", "-wal", "-shm"):
            database.with_name(database.name + end).unlink(missing_ok=True)

    forget()
    try:
        yield
    finally:
        forget()


class Door:
    """Lets in the sites whose public keys (NAME.pub) lie in a folder. Called again, it looks for
    keys that were put there meanwhile; one that is no good is said once and costs nothing else."""

    def __init__(self, link: Link, folder: Path) -> None:
        self._link, self._folder = link, folder
        self._seen: set[tuple[Path, int]] = set()

    def __call__(self) -> None:
        for key in sorted(self._folder.glob("*.pub")):
            try:
                self._let_in(key)
            except ConfigError as error:
                log.warning("%s", error)
            except (FederationError, OSError):
                return  # the SuperLink is being started again, or a file was just taken away: later

    def _let_in(self, key: Path) -> None:
        version = (key, key.stat().st_mtime_ns)  # a file that changes is read again
        if version in self._seen:
            return
        self._seen.add(version)
        same = [other for other in self._folder.glob("*.pub") if _same_text(other, key)]
        if (first := min(same)) != key:
            raise ConfigError(f"{key} is the same as {first.name}: every site has a key of its own")
        try:
            self._link.register(key.stem, key)
        except FederationError:
            self._seen.remove(version)
            raise
        log.info("site %s may join: its key is known", key.stem)


def _same_text(one: Path, other: Path) -> bool:
    return one.read_bytes().strip() == other.read_bytes().strip()


def check_keys(folder: Path) -> None:
    """Say what is missing before anything is started."""
    for name in ("ca.pem", "server.pem", "server.key"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} has no {name}: make one with `ssfl certs`, or copy yours")
    for name in ("ca.pem", "server.pem"):
        check_dates(folder / name)
    if "127.0.0.1" not in server_names(folder / "server.pem"):
        raise ConfigError(
            f"{folder / 'server.pem'} must also be for 127.0.0.1 (as a subject alternative name): "
            "the coordinator talks to its own SuperLink by that address"
        )
    if not any((folder / "sites").glob("*.pub")):
        raise ConfigError(
            f"{folder / 'sites'} holds no public key (NAME.pub) of any site: nobody could join"
        )


def _arguments(options: ServeOptions, place: Path) -> list[str]:
    keys = options.keys.resolve()
    return [
        *("--host", options.host, "--port", str(options.port)),
        *("--isolation", "process", "--superexec-auth-secret-file", str(place / "secret")),
        *("--ssl-ca-certfile", str(keys / "ca.pem")),
        *("--ssl-certfile", str(keys / "server.pem"), "--ssl-keyfile", str(keys / "server.key")),
        *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
        *("--database", str((place / DATABASE).resolve())),
    ]
