"""A site: its folder, its images, its clients, and the SuperNode that speaks for it.

site.toml     where the server is, which clients live here, where their images are
recipe.toml   the experiment, as agreed with the coordinator
ca.pem        whom to believe          site.key, site.pub    who we are
runs/         per run, what the clients have learnt: a run directory without the server's part
flower/       logs
"""

import logging
import re
import socket
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import Field, field_validator

from ssfl.assemble import build_host, load_federated
from ssfl.comm.flower.discretion import told_outside
from ssfl.comm.flower.keys import check_authority, make_site_key
from ssfl.comm.flower.node import CONNECTED, FROZEN
from ssfl.comm.flower.processes import Child, free_port, new_secret, wait_for_port
from ssfl.comm.flower.recipe import shared_recipe
from ssfl.comm.flower.sums import Sums
from ssfl.comm.local import LocalCommunicator
from ssfl.comm.wire import WireError
from ssfl.config import Config, load_config, to_toml, validated
from ssfl.data.here import HereOptions
from ssfl.data.sources.sites import SitesOptions
from ssfl.errors import CheckpointError, ConfigError, FederationError
from ssfl.federation.checkpoint import Checkpoint, save_checkpoint
from ssfl.federation.client import Host
from ssfl.federation.communicator import Communicator
from ssfl.federation.engine import Engine
from ssfl.federation.messages import Task, TaskKind
from ssfl.federation.store import StateStore
from ssfl.files import remove_unfinished, write_text
from ssfl.locks import claimed
from ssfl.run import Run
from ssfl.section import literal

if TYPE_CHECKING:
    from flwr.app import Message


log = logging.getLogger(__name__)

PATIENCE = 600.0
"""Seconds for which a site that the coordinator does not let in tries again."""
RETRY = 2.0
"""Seconds between two attempts to connect."""
REACH = 5.0
"""Seconds after which nobody is taken to listen."""


class SiteOptions(HereOptions):
    """What a site's engineer decides."""

    server: str
    """The coordinator's address, host:port."""
    workers: int = Field(1, ge=1)
    """Clients that train side by side."""

    @field_validator("data")
    @classmethod
    def _in_full(cls, data: Path | None) -> Path | None:
        try:  # encoders are used from elsewhere
            return data and data.expanduser().resolve()
        except RuntimeError as error:
            raise ValueError(f"{data} leads nowhere: write the folder out") from error

    @field_validator("server")
    @classmethod
    def _host_and_port(cls, server: str) -> str:
        found = re.fullmatch(r"[^\s/]+:(\d{1,5})", server)
        if found is None or not 0 < int(found[1]) < 65536:
            raise ValueError(f"{server} is no address of a coordinator: write it as host:port")
        return server


def init_site(folder: Path, options: SiteOptions, config: Config, ca: Path) -> Path:
    """Lay out a site's folder and make its key; gives the public key to send to the coordinator."""
    check_authority(ca)
    if options.data is not None and not options.data.is_dir():
        raise ConfigError(f"there is no folder {options.data}: give the images' with --data")
    known = config.partition.clients
    if options.data is None and _of_known_clients(config) and max(options.clients) >= known:
        raise ConfigError(f"the recipe has clients 0 to {known - 1}, not {max(options.clients)}")
    settings = options.model_dump(mode="json", exclude_none=True)
    content = "".join(f"{key} = {literal(value)}\n" for key, value in settings.items())
    try:
        content.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"the name of {str(options.data)!a} is not UTF-8, and site.toml cannot hold it: "
            "rename the folder"
        ) from None
    public = make_site_key(folder)
    write_text(folder / "site.toml", content)
    write_text(folder / "recipe.toml", to_toml(config))
    write_text(folder / "ca.pem", ca.read_text())
    return public


def _of_known_clients(config: Config) -> bool:
    """The recipe has images, and says itself how many clients they are shared out to."""
    return config.partition.kind != "natural" and not isinstance(config.data, SitesOptions)


def load_site(folder: Path, data: Path | None = None) -> tuple[SiteOptions, Config]:
    """A site's settings, and the recipe with who is here in it; `data` replaces the folder of
    images."""
    path = folder / "site.toml"
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ConfigError(f"{folder} is not a site: make one with `ssfl site init`") from None
    except ValueError as error:  # no TOML, or not even UTF-8
        raise ConfigError(f"{path} cannot be used: {error}") from None
    told = raw | ({"data": data} if data else {})
    options: SiteOptions = validated(SiteOptions, told, prefix=f"{path} cannot be used: ")
    here = HereOptions(clients=options.clients, data=options.data, window=options.window)
    return options, load_config(folder / "recipe.toml").model_copy(update={"here": here})


def build_hosts(config: Config, workers: int = 1) -> list[Host]:
    """This site's clients, on its own images, ready to work (their stores come with the run)."""
    data = load_federated(config, progress=True)
    for note in data.dataset.notes:
        log.warning("%s", note)
    engine, nowhere = Engine(config.device), StateStore(Path("nowhere"), 0)
    hosts = [build_host(config, data, nowhere, engine) for _ in range(workers)]
    for host in hosts:
        host.words = told_outside
    return hosts


def _reached(hosts: Sequence[Host], config: Config) -> Communicator:
    """The site's clients, summed if that is what was agreed."""
    local = LocalCommunicator(hosts)
    if config.server.updates == "single":
        return local
    return Sums(local, config.server, hosts[0].trainer.layout, config.local.momentum)


class SiteKeeper:
    """Clients' states on this site's disk: written before a reply goes out, tagged with their
    round, and under the run's name, so that no run finds another's."""

    def __init__(self, folder: Path, config: Config, hosts: Sequence[Host]) -> None:
        self._folder, self._config, self._hosts = folder, config, hosts
        self._run: Run | None = None
        self._fresh = False

    def begin(self, run: str) -> None:
        """Go (back) to this run, with what is on disk."""
        folder = self._folder / "runs" / run
        remove_unfinished(folder)
        write_text(folder / "config.toml", to_toml(self._config))
        self._run = Run(folder)
        self._run.write_facts(self._hosts[0].data.dataset, len(self._hosts[0].clients()))
        store = self._run.store
        for host in self._hosts:
            host.store = store
        self._fresh = True

    def prepare(self, task: Task) -> None:
        """Forget a future that the server has gone back on."""
        if self._run is None:
            raise WireError("a task came before the roll call: it was refused")
        if self._fresh:
            store = self._hosts[0].store
            if task.round and (anew := store.lost(self._hosts[0].clients(), task.round)):
                log.warning(
                    "the coordinator went back to round %d, and clients %s have kept later states "
                    "alone: they start anew",
                    task.round,
                    _listed(anew),
                )
            store.rewind(task.round)
            self._fresh = False

    def keep(self, task: Task) -> None:
        """States to disk; Θ too when it is judged, so that the site can use it later."""
        store = self._hosts[0].store
        store.flush()
        store.prune(task.durable)
        if task.kind is TaskKind.EVALUATE and self._run is not None:
            checkpoint = Checkpoint(task.round, task.layout, {"theta": task.theta})
            save_checkpoint(self._run.checkpoints, checkpoint)


@contextmanager
def supernode(folder: Path, options: SiteOptions) -> Iterator[tuple[Child, str, bytes]]:
    """The site's SuperNode, the address it hands messages over at, and the secret for that."""
    place, port = folder / "flower", free_port()
    secret = new_secret(place / "secret")
    child = Child(
        "node",
        [
            *("--superlink", options.server, "--root-certificates", str(folder / "ca.pem")),
            *("--auth-supernode-private-key", str(folder / "site.key")),
            *("--isolation", "process", "--host", "127.0.0.1", "--port", str(port)),
            *("--superexec-auth-secret-file", str(place / "secret")),
        ],
        place,
    )
    child.start()
    try:
        wait_for_port(child, port)
        yield child, f"127.0.0.1:{port}", secret
    finally:
        child.stop()


class Contact:
    """A site's contact with its coordinator, from one SuperNode to the next.

    While the coordinator is away, a SuperNode that was connected tries on by itself, and ends only
    when there is one again. So what counts is how long no SuperNode could connect, not how long
    nothing was heard.
    """

    def __init__(self, answers: "Callable[[Message], Message]", noted: Path) -> None:
        """`answers` is who answers messages; `noted` is the file with the last SuperNode's number,
        for a site that is started again after it was killed."""
        self._answers, self._noted = answers, noted
        self.node = _number_in(noted)
        """The number of this site's last SuperNode, if there was one."""
        self.made = False
        """Whether the SuperNode of now has been let in."""
        self._refused_since: float | None = None
        self._said = ""

    def answer(self, message: "Message") -> "Message":
        """The answer to a message, which also tells the SuperNode's number."""
        self.made = True  # a full disk may have kept the SuperNode's log from saying so
        if self.node != message.metadata.dst_node_id:
            self.node = message.metadata.dst_node_id
            try:
                write_text(self._noted, str(self.node))
            except CheckpointError as error:  # its clients shall fail for it, not the site
                log.warning("%s", error)
        return self._answers(message)

    def ended(self, why: FederationError) -> None:
        """The SuperNode has ended: say why, or raise it where there is no use in another."""
        now = time.monotonic()
        if self.made:
            self._refused_since, self._said = None, ""
        elif self._refused_since is None:
            self._refused_since = now
        elif now - self._refused_since > PATIENCE:
            raise why
        self.made = False
        if str(why) != self._said:  # once, not every few seconds
            log.warning("%s (trying on)", why)
            self._said = str(why)


def run_site(folder: Path, options: SiteOptions, config: Config) -> None:
    """Take part until interrupted, or until PATIENCE with a coordinator that does not let this
    site in is over."""
    from ssfl.comm.flower.runtime import leave
    from ssfl.comm.flower.site import SiteAnswers

    torch.set_num_threads(config.device.threads)
    hosts = build_hosts(config, options.workers)
    local = _reached(hosts, config)
    answers = SiteAnswers(local, shared_recipe(config), SiteKeeper(folder, config, hosts))
    contact = Contact(answers, folder / "flower" / "node")
    try:
        with _alone(folder):
            ids = local.clients()
            who = f"client {ids[0]} is" if len(ids) == 1 else f"clients {_listed(ids)} are"
            log.info("%s here; the coordinator is asked at %s", who, options.server)
            if trouble := unreachable(options.server):
                log.warning("%s (trying on)", trouble)
            while True:
                if contact.node is not None:
                    leave(options.server, folder / "ca.pem", folder / "site.key", contact.node)
                contact.ended(_take_part(folder, options, contact))
                time.sleep(RETRY)
    finally:
        local.close()


def _number_in(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # none yet; or a power cut has left the file empty
        return None


def _take_part(folder: Path, options: SiteOptions, contact: Contact) -> FederationError:
    """Answer messages for as long as the SuperNode lasts; returns why it ended."""
    from ssfl.comm.flower.runtime import answer_messages

    try:
        with supernode(folder, options) as (child, address, secret):
            try:
                answer_messages(address, secret, contact.answer, child.ended)
            finally:
                contact.made |= CONNECTED in child.said()
            return FederationError(why_it_ended(folder, options.server, child))
    except FederationError as error:
        return error
    except OSError as error:  # a full disk, as a rule
        return FederationError(f"the site's SuperNode cannot be started: {error}")


def unreachable(server: str) -> str:
    """What is to be said if nobody listens at `host:port`; nothing if somebody does."""
    host, _, port = server.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH).close()
    except OSError as error:
        why = error.strerror or str(error)
        return f"nobody answers at {server} ({why}): is the coordinator up, and this its address?"
    return ""


def why_it_ended(folder: Path, server: str, child: Child) -> str:
    """A SuperNode's last words, in ours where they are those of the usual mistakes."""
    from ssfl.comm.flower.runtime import clock_is_off

    words = child.last_words()
    if "certificate verify failed" in words and "mismatch" in words:
        return (
            f"the certificate at {server} is for other addresses: the coordinator makes one for "
            "this by `ssfl certs --host`"
        )
    if "certificate has expired" in words:
        return (
            f"the certificate at {server} has expired: ask the coordinator for a new one (and, if "
            f"its authority is new too, put its ca.pem in the place of {folder / 'ca.pem'}), "
            "unless it is this machine's clock that is wrong"
        )
    if "certificate is not yet valid" in words:
        return f"the certificate at {server} is of the future: is this machine's clock right?"
    if "certificate verify failed" in words:
        return (
            f"the certificate at {server} is not of the authority in {folder / 'ca.pem'}: ask the "
            "coordinator for the federation's ca.pem"
        )
    if "Failed to activate SuperNode" in words:
        return (
            f"the coordinator at {server} does not know this site's key yet: it must have "
            f"{folder / 'site.pub'} in its keys/sites (or else a copy of this site is connected)"
        )
    if ahead := clock_is_off(server, folder / "ca.pem"):  # Flower itself does not say so
        seconds = 5 * round(abs(ahead) / 5)  # to be the same at every attempt
        return (
            f"this site's clock is {seconds} s {'ahead of' if ahead > 0 else 'behind'} that of the "
            f"coordinator at {server}, which takes no message of another time: set it right"
        )
    if FROZEN in words:
        return f"this site stood still and was gone for {server}: it connects again"
    if "401 Unauthorized" in words:
        return f"the coordinator at {server} has started anew: this site connects again"
    return f"the connection to {server} ended ({child.log}): {words}"


def _listed(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time for a site: two would speak with one key."""
    with claimed(folder / "flower" / "lock") as mine:
        if not mine:
            raise ConfigError(f"the site in {folder} is running already")
        yield
