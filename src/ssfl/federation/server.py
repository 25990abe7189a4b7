"""The server: samples clients, sends Θ, folds their updates, moves Θ. The paper's Server Manager.

It knows no transport and no learning: a `Communicator` brings replies, an `Aggregator` folds them
in the order the clients were asked (so the sum has the same bits whatever order they finish in),
and a server optimizer turns the mean into the next Θ.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ssfl.algorithms.options import LocalOptions
from ssfl.errors import CheckpointError
from ssfl.federation.admission import Admission
from ssfl.federation.aggregate import Aggregator, build_aggregator, in_order
from ssfl.federation.communicator import Communicator
from ssfl.federation.drift import move_control
from ssfl.federation.known import Known
from ssfl.federation.messages import Reply, Task, TaskKind, when
from ssfl.federation.options import ServerOptions
from ssfl.federation.round import Round, RoundReport
from ssfl.federation.samplers import build_sampler
from ssfl.federation.server_optimizers import build_server_optimizer
from ssfl.federation.spares import Spares
from ssfl.models.flat import Layout
from ssfl.seeding import numpy_generator

log = logging.getLogger(__name__)


class Server:
    """Θ and all that moves it. `metrics` are the figures that clients report of their training."""

    def __init__(
        self,
        theta: Tensor,
        layout: Layout,
        communicator: Communicator,
        options: ServerOptions,
        local: LocalOptions,
        seed: int,
        metrics: Sequence[str],
    ) -> None:
        self.theta, self.layout = theta, layout
        self.rounds_done = 0
        self.durable = 0
        self._communicator, self._options, self._local = communicator, options, local
        self._seed, self._metrics = seed, metrics
        self._sampler = build_sampler(options)
        self._optimizer = build_server_optimizer(options, layout)
        self._admission = Admission(options.max_norm_ratio)
        self._spares = Spares()
        self._control = (
            torch.zeros(layout.trainable, device=theta.device)
            if local.correction == "scaffold"
            else None
        )
        self._folded: dict[int, int] = {}  # by client, its last round whose Δc_k is in c
        self._overdue: set[tuple[int, int]] = set()  # who owes the work of which round

    def play_round(self, on_reply: Callable[[Reply], None] = lambda reply: None) -> RoundReport:
        """One communication round: Θ^(t) to Θ^(t+1)."""
        return self.advance(*self.gather(on_reply))

    def gather(
        self, on_reply: Callable[[Reply], None] = lambda reply: None
    ) -> tuple[RoundReport, Aggregator]:
        """A round's updates, folded. Broken off, it leaves Θ and all that moves it as it was."""
        started = time.perf_counter()
        options = self._options
        clients, sizes = self._communicator.clients(), self._communicator.sizes()
        wanted = min(options.clients_per_round or len(clients), len(clients))
        asking = min(len(clients), wanted + _share(options.oversample, wanted))
        drawn = self._sampler.draw(self.rounds_done, asking, clients, sizes, self._seed)
        asked = self._spares_last(drawn, asking - wanted)
        task = self._training(asked)
        size_of = dict(zip(clients, sizes, strict=True))
        aggregator = build_aggregator(
            options,
            self.layout,
            self.theta,
            sum(size_of[client] for client in asked),
            momentum=self._local.momentum,
            spares=self._spares,
        )
        round_ = Round(
            task,
            wanted,
            needed=max(1, _share(options.min_replies, wanted)),
            aggregator=aggregator,
            report=RoundReport(task.round, task.rate, len(asked), sum(sizes)),
            metrics=self._metrics,
            staleness=options.staleness,
        )
        normalised, summed = options.optimizer == "fednova", options.updates == "summed"
        self._admission.open_round(Known(size_of, self._local, normalised, summed))
        self._collect(round_, asked, on_reply)
        round_.report.seconds = time.perf_counter() - started
        return round_.report, aggregator

    def advance(self, report: RoundReport, gathered: Aggregator) -> RoundReport:
        """Move Θ by what was gathered. Not to be interrupted: all of it counts, or none."""
        started = time.perf_counter()
        if gathered.count:
            mean = gathered.finish()
            before, self.theta = self.theta, self._optimizer.step(self.theta, mean)
            report.update_norm = float(torch.dist(self.theta, before))
            if self._control is not None:
                self._control = move_control(self._control, mean, report.all_images)
                self._folded |= dict.fromkeys(report.clients, report.round)
        # Who was heard of owes no earlier round: a client does one task at a time.
        heard = {*report.clients, *(client for client, _ in report.late)}
        self._overdue = {work for work in self._overdue if work[0] not in heard}
        self._overdue.update((client, report.round) for client in report.overdue)
        self._admission.close_round()
        self.rounds_done += 1
        if self._control is not None and self._statistics_freeze_now():
            # c and the c_k are of steps on W, the coming ones are made on W/σ (models/frozen.py).
            self._control, self._folded = torch.zeros_like(self._control), {}
        report.seconds += time.perf_counter() - started
        return report

    def _spares_last(self, drawn: list[int], spares: int) -> list[int]:
        """Put those who only stand in for others at the end. Chance decides who they are: by size,
        the smallest clients would never be heard."""
        shuffled = numpy_generator(self._seed, "spares", self.rounds_done).permutation(drawn)
        standing_in = {int(client) for client in shuffled[:spares]}
        return sorted(drawn, key=standing_in.__contains__)  # stable: the largest first within

    def _collect(
        self, round_: Round, asked: Sequence[int], on_reply: Callable[[Reply], None]
    ) -> None:
        """Fold replies in the order asked; where too few count, ask those that failed again. What
        was refused would come to the same."""
        waiting = list(asked)
        for _ in range(1 + self._options.retries):
            for client in waiting:
                round_.failures.pop(client, None)
            for reply in in_order(self._replies(round_, waiting, on_reply), waiting):
                round_.take(reply)
            waiting = [client for client in waiting if round_.may_yet_come(client)]
            if round_.enough or not waiting:
                break
        if self._options.late == "discount":
            round_.take_late()
        round_.close()

    def _replies(
        self, round_: Round, clients: Sequence[int], on_reply: Callable[[Reply], None]
    ) -> Iterator[Reply]:
        """Admitted replies to this round's task as they come; those to an earlier one, whose
        deadline was missed, are put aside, one for each client."""
        task, report = round_.task, round_.report
        for reply in self._communicator.exchange(task, clients, self._options.deadline or None):
            report.received += reply.bytes
            work = {(client, reply.round) for client in reply.clients}
            served = {client for client, _ in report.late}.intersection(reply.clients)
            if reply.round < task.round and (served or not work <= self._overdue):
                log.warning(
                    "%s: client %d sent work of %s that nobody waits for: dropped",
                    task.when,
                    reply.client,
                    when(reply.kind, reply.round),
                )
                continue
            admitted = self._admission.admit(reply, task)
            on_reply(admitted)
            if admitted.failure is not None:
                log.warning(
                    "%s: client %s %s: %s",
                    task.when,
                    ", ".join(map(str, admitted.clients)),
                    admitted.failure.reason,
                    admitted.failure.detail,
                )
            if admitted.round == task.round:
                yield admitted
            elif admitted.failure is None:
                round_.late.append(admitted)
                report.late += work

    def clients(self) -> Sequence[int]:
        """Ids of the clients there are."""
        return self._communicator.clients()

    def evaluate(self, clients: Sequence[int]) -> list[Reply]:
        """Ask clients to judge their encoders; replies in the order asked, failures left out.

        A client that hangs is waited for no longer than in a round.
        """
        task = self._task(TaskKind.EVALUATE)
        replies = self._communicator.exchange(task, clients, self._options.deadline or None)
        fresh = (reply for reply in replies if reply.round == task.round)
        judged, failures = [], []
        for reply in in_order(fresh, clients):
            if reply.failure is None:
                judged.append(reply)
            else:
                failures.append((reply.client, reply.failure))
        if failures:  # or a mean over some would pass for one over all
            client, why = failures[0]
            log.warning(
                "%s: figures are of %d of %d clients; client %d %s: %s",
                task.when,
                len(judged),
                len(clients),
                client,
                why.reason,
                why.detail,
            )
        return judged

    def _training(self, clients: Sequence[int]) -> Task:
        """The task of a round, with SCAFFOLD's c and what of these clients is in it."""
        folded = {client: self._folded[client] for client in clients if client in self._folded}
        task = self._task(TaskKind.TRAIN)
        limit = self._admission.limit
        return replace(task, control=self._control, folded=folded, limit=limit)

    def _task(self, kind: TaskKind) -> Task:
        return Task(
            kind,
            self.rounds_done,
            self.theta,
            self.layout.digest,
            rate=self.rate(self.rounds_done),
            progress=self.rounds_done / self._options.rounds,
            durable=self.durable,
        )

    def _statistics_freeze_now(self) -> bool:
        """They are frozen in the round to come, and were not in the one before."""
        done, rounds = self.rounds_done, self._options.rounds
        return self._local.frozen(done / rounds) and not self._local.frozen((done - 1) / rounds)

    def rate(self, round_: int) -> float:
        """The local learning rate of a round."""
        return self._local.rate(round_, self._options.rounds)

    def state(self) -> dict[str, Tensor]:
        """Everything a checkpoint must hold for the run to go on as if never stopped."""
        tensors = {"theta": self.theta, "yardstick": torch.tensor(self._admission.yardstick)}
        tensors |= {f"optimizer.{k}": v for k, v in self._optimizer.state().items()}
        if self._overdue:
            tensors["overdue"] = _pairs(self._overdue)
        if self._control is not None:
            tensors |= {"control": self._control, "folded": _pairs(self._folded.items())}
        return tensors

    def load(self, tensors: dict[str, Tensor], rounds_done: int) -> None:
        """Go on from a checkpoint."""
        device = self.theta.device
        self.theta = tensors["theta"].to(device)
        self._admission.yardstick = float(tensors["yardstick"])
        self._optimizer.load(
            {
                name.removeprefix("optimizer."): tensor.to(device)
                for name, tensor in tensors.items()
                if name.startswith("optimizer.")
            }
        )
        if ("folded" in tensors) != (self._control is not None):
            raise CheckpointError(
                "the checkpoint does not fit local.correction: "
                "resume with the options the run was started with"
            )
        if self._control is not None:
            self._control = tensors["control"].to(device)
            self._folded = dict(tensors["folded"].tolist())
        self._overdue = {
            (client, round_) for client, round_ in tensors.get("overdue", _pairs(())).tolist()
        }
        self.rounds_done = self.durable = rounds_done


def _share(share: float, count: int) -> int:
    """A share of `count`, rounded up; 7 % of 100 are 7, though a float says a hair more."""
    return math.ceil(share * count - 1e-9)


def _pairs(numbers: Iterable[tuple[int, int]]) -> Tensor:
    """Pairs of numbers as a checkpoint holds them."""
    return torch.tensor(sorted(numbers), dtype=torch.int64).view(-1, 2)
