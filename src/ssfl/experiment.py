"""The workflow: data -> server <-> clients -> evaluation -> record. The paper's SSFL workflow.

`train(config)` is all a script needs; the command line adds a progress display and nothing else.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ssfl.assemble import build_host, build_hosts, build_server, load_federated
from ssfl.comm import COMMUNICATORS, join
from ssfl.config import Config, load_config
from ssfl.data.federated import FederatedData
from ssfl.data.sources.sites import SitesOptions
from ssfl.errors import CheckpointError, ConfigError, FederationError
from ssfl.federation.checkpoint import Checkpoint, check_fit, latest_checkpoint, save_checkpoint
from ssfl.federation.client import Host
from ssfl.federation.communicator import Communicator
from ssfl.federation.engine import pick_device
from ssfl.federation.messages import Reply
from ssfl.federation.online import OnlineEvaluation
from ssfl.federation.round import RoundReport
from ssfl.federation.server import Server
from ssfl.federation.shared import SharedStore
from ssfl.federation.store import StateStore
from ssfl.files import remove_unfinished, sync, write_text
from ssfl.guest import own_torch
from ssfl.interrupts import uninterrupted
from ssfl.run import Run
from ssfl.section import flat
from ssfl.start import first_theta
from ssfl.tracking import Row, Tracker, default_trackers, log_all, need_trackers, standing

log = logging.getLogger(__name__)


class Display(Protocol):
    """What watches a run: a progress bar, or nothing."""

    def start(self, run: Run, clients: int, rounds: int, done: int) -> None: ...

    def begin_round(self, round_: int, clients: int) -> None: ...

    def reply(self, reply: Reply) -> None: ...

    def row(self, row: Row) -> None: ...

    def note(self, text: str) -> None: ...

    def stop(self) -> None: ...


class Quiet:
    """Shows nothing; warnings still go to the log."""

    def start(self, run: Run, clients: int, rounds: int, done: int) -> None: ...

    def begin_round(self, round_: int, clients: int) -> None: ...

    def reply(self, reply: Reply) -> None: ...

    def row(self, row: Row) -> None: ...

    def note(self, text: str) -> None:
        log.warning(text)

    def stop(self) -> None: ...


@own_torch()
def train(
    config: Config | str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    comm: str = "local",
    display: Display | None = None,
) -> Run:
    """Run an experiment from its start and return its run directory.

    `config` may also be a recipe's name, the path of a TOML file, or tables as TOML gives them.
    """
    if (worked_for := join(comm)) is not None:
        return Run(worked_for)
    if not isinstance(config, Config):
        config = load_config(config)
    _check_images_are_here(config)
    run: Run | None = None
    try:
        with uninterrupted():  # or there would be a folder, and nobody to take it back
            run = Run.create(config, out)
        Experiment(run, comm, display or Quiet()).play()
    except FederationError:
        raise  # clients that failed may do better when it is gone on with
    except BaseException:  # also a plug-in's own
        if run is not None:
            with uninterrupted():
                run.withdraw()  # unless something was done already
        raise
    return run


@own_torch()
def resume(run: Run | str | Path, *, comm: str = "local", display: Display | None = None) -> Run:
    """Go on with a run from its last checkpoint, to the same end as if it had never stopped."""
    if (worked_for := join(comm)) is not None:
        return Run(worked_for)
    run = run if isinstance(run, Run) else Run(run)
    if run.served or run.config.here is not None:
        raise ConfigError(f"{run.path} is part of a federation of sites: go on with `{run.way_on}`")
    _check_images_are_here(run.config)
    Experiment(run, comm, display or Quiet()).play()
    return run


def _check_images_are_here(config: Config) -> None:
    if isinstance(config.data, SitesOptions) and config.here is None:
        raise ConfigError(
            'data.source = "sites" means images that stay at sites: start the run with '
            "`ssfl serve`, and every site with `ssfl site start`"
        )


class Experiment:
    """One run of one configuration in its run directory."""

    def __init__(self, run: Run, comm: str, display: Display) -> None:
        self.run, self.config, self.display = run, run.config, display
        self.comm = comm

    def play(self) -> None:
        """From the last checkpoint (or the start) to the last round."""
        config, run = self.config, self.run
        need_trackers(config.run.trackers)
        with run.held(), _torch_threads(config):
            data = load_federated(config, progress=not isinstance(self.display, Quiet))
            hosts = self._hosts(data)
            theta = self._first_theta(data)  # what is wrong with it is said before anyone waits
            communicator: Communicator = COMMUNICATORS[self.comm](config, run.path, hosts)
            trackers: list[Tracker] = []
            try:
                run.write_facts(data.dataset, len(communicator.clients()))
                about = flat(config.model_dump(mode="json"))
                trackers += default_trackers(run.path, config.run.trackers, about)
                self._rounds(data, hosts, communicator, trackers, theta)
            finally:
                communicator.close()
                for tracker in trackers:
                    tracker.close()
                self.display.stop()

    def _hosts(self, data: FederatedData) -> list[Host]:
        """Those that train the clients; where other processes do, one to judge Θ."""
        if self.comm == "local":
            return build_hosts(self.config, data, self.run.store)
        store = SharedStore(self.run.path / "clients")
        return [build_host(self.config, data, store)]

    def _first_theta(self, data: FederatedData) -> Tensor | None:
        """What Θ begins as, unless it begins as the seed has it, or has long begun."""
        if self.config.server.start is None or latest_checkpoint(self.run.checkpoints):
            return None
        return first_theta(self.config, data.dataset)

    def _rounds(
        self,
        data: FederatedData,
        hosts: Sequence[Host],
        communicator: Communicator,
        trackers: list[Tracker],
        theta: Tensor | None,
    ) -> None:
        config, display = self.config, self.display
        trainer, store = hosts[0].trainer, hosts[0].store
        server = build_server(config, trainer, communicator, theta)
        # A client past its deadline may still be training on a worker's models: judge on others.
        judge = trainer
        if config.server.deadline:
            judge = build_host(config, data, store, trainer.engine).trainer
        evaluation = OnlineEvaluation(config.evaluation, data, judge, server, len(hosts))
        so_far = self._go_back(server, store, trackers)
        begun_at = server.rounds_done
        # The seconds of the sessions before this one, up to the last row that counts.
        spent = max((row.get("train_seconds", 0.0) for row in so_far), default=0.0)
        started = time.perf_counter() - spent

        def record(row: Row) -> None:
            row = {**row, "train_seconds": time.perf_counter() - started}
            log_all(trackers, row)
            display.row(row)

        recorded = {(row["kind"], row["round"]) for row in so_far}
        rounds = config.server.rounds
        display.start(self.run, len(server.clients()), rounds, server.rounds_done)
        for note in data.dataset.notes:
            display.note(note)
        if config.evaluation.baselines and ("baseline", 0) not in recorded:
            record({"kind": "baseline", "round": 0, **_timed(evaluation.baselines)})
        asked = config.server.clients_per_round or len(server.clients())
        try:
            if begun_at and ("evaluation", begun_at) not in recorded:
                self._judge(server, evaluation, record)  # stopped in the midst of it
            while server.rounds_done < rounds:
                display.begin_round(server.rounds_done, asked)
                gathered = server.gather(display.reply)
                with uninterrupted():
                    record(_round_row(server.advance(*gathered)))
                self._judge(server, evaluation, record)
                if server.rounds_done % config.run.checkpoint_every == 0:
                    self._save(server, store)
            self._save(server, store)
        # Of a terminal or a pipe that is gone, display makes an OSError or, through rich, an exit.
        except (KeyboardInterrupt, SystemExit, OSError, FederationError):
            try:
                communicator.close()
            finally:  # neither a broken transport nor another Ctrl-C may cost what was done
                with uninterrupted():
                    self._save(server, store)
            raise
        if server.rounds_done > begun_at or not self.run.final:
            self._conclude(time.perf_counter() - started)

    def _go_back(self, server: Server, store: StateStore, trackers: list[Tracker]) -> list[Row]:
        """Put server and states where the last checkpoint has them; returns the rows that stand."""
        found = latest_checkpoint(self.run.checkpoints)
        if found is not None:
            check_fit(found, server.layout.digest, self.run.checkpoints)
            server.load(found.tensors, found.rounds)
        rows = self.run.metrics
        if rows:
            self._check_states(store, rows, server.rounds_done)
            log_all(trackers, {"kind": "resume", "round": server.rounds_done})
        store.rewind(server.rounds_done)
        store.prune(server.durable)  # so that it knows what is outdated before the next checkpoint
        remove_unfinished(self.run.path)
        return standing(rows, server.rounds_done)

    def _check_states(self, store: StateStore, rows: Sequence[Row], rounds: int) -> None:
        """Refuse to go back further than clients can: they would start anew without a word."""
        played = (row for row in rows if row["kind"] == "round" and row["round"] < rounds)
        lost = store.lost({client for row in played for client in row["took_part"]}, rounds)
        if lost:
            more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
            raise CheckpointError(
                f"the last checkpoint in {self.run.checkpoints} is of round {rounds}, and client "
                f"{lost[0]}{more} has kept later states alone: bring the later checkpoint back, or "
                "start a new run"
            )

    def _judge(
        self, server: Server, evaluation: OnlineEvaluation, record: Callable[[Row], None]
    ) -> None:
        every, done = self.config.evaluation.every, server.rounds_done
        due = done == self.config.server.rounds or (every and done % every == 0)
        if not due:
            return
        row = _timed(evaluation.measure)
        record({"kind": "evaluation", "round": done, **row})
        if row.get("warning"):
            self.display.note(f"round {done}: {row['warning']}")

    def _save(self, server: Server, store: StateStore) -> None:
        """Record and states first, then the checkpoint that refers to them, then drop what is
        outdated."""
        if server.rounds_done == server.durable:
            return
        sync(self.run.record)  # or a power cut could take rounds from it that are never played anew
        store.flush(server.rounds_done)
        checkpoint = Checkpoint(server.rounds_done, server.layout.digest, server.state())
        save_checkpoint(self.run.checkpoints, checkpoint)
        server.durable = server.rounds_done
        store.prune(server.durable)

    def _conclude(self, seconds: float) -> None:
        """Write the last figures where a script finds them."""
        rows = self.run.metrics
        final: dict[str, Any] = {"rounds": self.config.server.rounds}
        for kind in ("baseline", "round", "evaluation"):
            last = next((row for row in reversed(rows) if row["kind"] == kind), {})
            final |= {k: v for k, v in last.items() if k not in ("kind", "round")}
        final["train_seconds"] = seconds
        final["seconds"] = sum(row["seconds"] for row in rows if row["kind"] == "round")
        write_text(self.run.path / "final.json", json.dumps(final, indent=2))


def _timed(measure: Callable[[], Row]) -> Row:
    """What was measured, and the seconds it took."""
    started = time.perf_counter()
    return {**measure(), "seconds": time.perf_counter() - started}


def _round_row(report: RoundReport) -> Row:
    return {
        **report.metrics,  # first: what an algorithm calls its figures must not replace the rest
        "kind": "round",
        "round": report.round,
        "rate": report.rate,
        "update_norm": report.update_norm,
        "asked": report.asked,
        "accepted": report.accepted,
        "took_part": report.clients,
        "received_bytes": report.received,
        "late": len(report.late),
        "failures": report.failures,
        "images": report.images,
        "seconds": report.seconds,
    }


@contextmanager
def _torch_threads(config: Config) -> Iterator[None]:
    """One torch thread per client on a CPU: the same bits with one worker or many, and no core
    waiting for another."""
    before = torch.get_num_threads()
    if pick_device(config.device.device).type == "cpu":
        torch.set_num_threads(config.device.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
