"""A site whose clients' updates leave as one: their weighted mean, never a single update.

It stands between a site's clients and its messages, and does for them what the server would do
with single updates: lets each of them in or not, then folds. So the server learns of a client who
took part and who failed, but of their updates only the mean.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ssfl.federation.admission import Admission
from ssfl.federation.aggregate import Aggregator, build_aggregator, fold, in_order, join
from ssfl.federation.communicator import Communicator
from ssfl.federation.messages import Reply, Task, TaskKind
from ssfl.federation.options import ServerOptions
from ssfl.models.flat import Layout

log = logging.getLogger(__name__)


class Sums:
    """A communicator over another's clients. `momentum` is that of their SGD.

    Its yardstick for absurd updates is this site's own, and begins anew with the site's process.
    """

    def __init__(
        self, local: Communicator, options: ServerOptions, layout: Layout, momentum: float
    ) -> None:
        self._local, self._options = local, options
        self._layout, self._momentum = layout, momentum
        self._admission = Admission(options.max_norm_ratio)

    def clients(self) -> Sequence[int]:
        return self._local.clients()

    def sizes(self) -> Sequence[int]:
        return self._local.sizes()

    def exchange(
        self, task: Task, clients: Sequence[int], deadline: float | None = None
    ) -> Iterator[Reply]:
        """Failures one by one, then one reply for all others; evaluations stay single."""
        task = replace(task, limit=self._admission.limit)
        replies = self._local.exchange(task, clients, deadline)
        if task.kind is not TaskKind.TRAIN or not clients:
            yield from replies
            return
        aggregator, took_part = self._aggregator(task, clients), []
        self._admission.open_round()
        for reply in in_order(self._admitted(replies, task), clients):
            if reply.failure is not None:
                yield reply
            else:
                fold(aggregator, reply, reply.samples)
                took_part.append(replace(reply, delta=None, control=None))
        self._admission.close_round()
        if took_part:
            yield join(took_part, aggregator)

    def _admitted(self, replies: Iterator[Reply], task: Task) -> Iterator[Reply]:
        """What came in time, and whether it may count. A late update would leave alone: dropped."""
        for reply in replies:
            if reply.round == task.round:
                yield self._admission.admit(reply, task)
            else:
                log.info("client %d: its late update is dropped", reply.client)

    def _aggregator(self, task: Task, clients: Sequence[int]) -> Aggregator:
        size_of = dict(zip(self._local.clients(), self._local.sizes(), strict=True))
        return build_aggregator(
            self._options,
            self._layout,
            task.theta,
            sum(size_of[client] for client in clients),
            momentum=self._momentum,
        )

    def close(self) -> None:
        self._local.close()
