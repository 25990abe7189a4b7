"""A site's side of Flower: take a message, let the clients behind it work, answer.

The process stays: images, model and compiled steps are loaded once. A site knows its own folders
and its own recipe; what it takes from the server is a round number, a rate and a vector.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode

from ssfl.comm.flower.discretion import told_outside
from ssfl.comm.flower.records import (
    Order,
    Roll,
    read_order,
    read_roll_call,
    write_replies,
    write_roll,
)
from ssfl.comm.wire import encode_task
from ssfl.errors import SSFLError
from ssfl.federation.communicator import Communicator
from ssfl.federation.messages import Reason, Reply, Task, failed

log = logging.getLogger(__name__)


class Keeper(Protocol):
    """What a site remembers between messages."""

    def begin(self, run: str) -> None:
        """A server has (re)started the run of this name."""

    def prepare(self, task: Task) -> None:
        """A task is about to be worked on; the first after `begin` tells where the run stands."""

    def keep(self, task: Task) -> None:
        """The work is done and is about to be reported: bring it to disk."""


class SiteAnswers:
    """Answers to the server's messages, from the clients that `local` reaches at this site."""

    def __init__(self, local: Communicator, recipe: Mapping[str, Any], keeper: Keeper) -> None:
        self._local, self._recipe, self._keeper = local, recipe, keeper
        self._last: Task | None = None

    def __call__(self, message: Message) -> Message:
        """The answer to a message. What is not understood is refused; whatever else goes wrong is
        reported, and the site lives on."""
        try:
            if message.metadata.message_type == "query":
                return Message(write_roll(self._roll(message)), reply_to=message)
            return Message(write_replies(self._work(message)), reply_to=message)
        except Exception as error:
            if not isinstance(error, SSFLError):
                log.exception("could not answer a message")
            return Message(Error(ErrorCode.UNKNOWN, told_outside(error)), reply_to=message)

    def _roll(self, message: Message) -> Roll:
        run, recipe = read_roll_call(message.content)
        difference = compare(self._recipe, recipe)
        if difference:
            log.warning("not taking part: %s", difference)
            return Roll((), (), difference)
        self._keeper.begin(run)
        self._last = None
        return Roll(tuple(self._local.clients()), tuple(int(n) for n in self._local.sizes()))

    def _work(self, message: Message) -> list[Reply]:
        order = self._recognised(read_order(message.content))
        ours = set(self._local.clients())
        replies = [
            failed(client, order.task, Reason.REFUSED, "this site has no such client")
            for client in order.clients
            if client not in ours
        ]
        wanted = [client for client in order.clients if client in ours]
        log.info("%s: %s for clients %s", order.task.when, order.task.kind, wanted)
        self._keeper.prepare(order.task)
        replies += self._local.exchange(order.task, wanted, order.seconds)
        self._keeper.keep(order.task)
        return replies

    def _recognised(self, order: Order) -> Order:
        """With the task that we have already, where it is asked again (`server.retries`): clients
        that are late with it go on, and do not begin anew."""
        if self._last is None or not _same(self._last, order.task):
            self._last = order.task
        return replace(order, task=self._last)


def _same(one: Task, other: Task) -> bool:
    """Whether two tasks are the same to the last bit."""
    (header, vectors), (its_header, its_vectors) = encode_task(one), encode_task(other)
    return header == its_header and all(map(np.array_equal, vectors, its_vectors))


def compare(ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> str:
    """The first few options in which two recipes differ, as a sentence; empty if none."""
    differences = []
    for key in sorted({*ours, *theirs}):
        mine, other = ours.get(key), theirs.get(key)
        if isinstance(mine, Mapping) and isinstance(other, Mapping):
            differences.append(compare(mine, other, f"{prefix}{key}."))
        elif mine != other:
            differences.append(f"{prefix}{key} is {mine!r} here and {other!r} at the server")
    return "; ".join([difference for difference in differences if difference][:5])
