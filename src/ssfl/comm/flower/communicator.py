"""The server's side of Flower: tasks out, replies in, one message a site and exchange.

Built on `Grid` alone. A site is a SuperNode with one or many clients behind it, known by our own
client ids; which ids a site holds is asked when it appears, and from then on an id belongs to that
site's key. Deadlines are enforced three times: here, as the message's time to live, and as the time
the site itself may take, so that one slow client does not hold back its neighbours.
"""

import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
from flwr.app import DEFAULT_TTL, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from ssfl.comm.flower.records import (
    read_replies,
    read_roll,
    write_orders,
    write_roll_call,
)
from ssfl.comm.wire import WireError, printable
from ssfl.errors import FederationError
from ssfl.federation.messages import Reason, Reply, Task, failed

log = logging.getLogger(__name__)

POLL = 0.25
CENSUS = 2.0
"""Seconds between two looks at which sites are connected."""
CALL_AGAIN, LONGEST = 5.0, 60.0
"""Seconds after which a site that answered the roll call with an error is called again: at first,
and at most, for they double with every further error."""
TRAVEL = 6.0
"""Seconds of a deadline kept for the way there and back."""
RETURN = 60.0
"""Seconds that a site which is asked but gone has to come back: it must load its images anew."""
LITTLE = 100e6
"""Bytes on a disk that is as good as full: a message may be as large."""
MAX_NAME = 64
"""Characters of a site's name that are shown."""


@dataclass
class Site:
    """A connected SuperNode and who is behind it."""

    node: int
    activated: str
    """When it last connected: a later time means that it restarted and lost what it was given."""
    sizes: dict[int, int] = field(default_factory=dict)
    """|D_k| of its clients, by id."""
    asked: str = ""
    """The roll call it has not answered yet."""
    due: float = 0.0
    """When it is to be called (by the clock that only goes forward)."""
    pause: float = 0.0
    """Seconds it was last given to mend what was wrong."""


class FlowerCommunicator:
    """Clients at Flower sites."""

    def __init__(
        self,
        grid: Grid,
        run: str,
        recipe: str = "{}",
        patience: float = 600.0,
        close: Callable[[], None] = lambda: None,
        door: Callable[[], None] = lambda: None,
        link_log: Path = Path("link.log"),
    ) -> None:
        """`run` is the name (hexadecimal) under which sites keep their states; `recipe` is what
        they compare theirs with (JSON); `patience` is how many seconds to wait for sites when
        none is there; `close` ends whatever the grid hangs on; `door` lets newly known sites in and
        is called before every look at who is there; `link_log` is the SuperLink's log, beside which
        it keeps its messages."""
        self._grid, self._patience, self._close, self._door = grid, patience, close, door
        self._link_log = link_log
        self._roll_call = write_roll_call(run, recipe)
        self._sites: dict[int, Site] = {}
        self._names: dict[int, str] = {}  # kept when a site goes: its clients stay its own
        self._owner: dict[int, int] = {}
        self._arriving: dict[str, Future[list[Message]]] = {}
        self._looked = 0.0

    def gather(self, clients: int) -> None:
        """Wait until at least so many clients have joined."""
        end = time.monotonic() + self._patience
        while len(self._present()) < clients:
            if time.monotonic() > end:
                raise FederationError(
                    f"only {len(self._present())} of {clients} clients joined within "
                    f"{self._patience:g} s: look at the sites' logs, or wait for fewer (--clients)"
                )
            self._census()
            self._hear_rolls()
            time.sleep(POLL)

    def clients(self) -> Sequence[int]:
        """Ids of the clients whose sites are connected now; waits when there are none."""
        self._census()
        self._hear_rolls()
        if not self._present():
            self.gather(1)
        return sorted(self._present())

    def sizes(self) -> Sequence[int]:
        present = self._present()
        return [present[client] for client in sorted(present)]

    def exchange(
        self, task: Task, clients: Sequence[int], deadline: float | None = None
    ) -> Iterator[Reply]:
        """Replies as sites finish. Replies to earlier rounds that came late are yielded too."""
        self._await_return(clients)
        end = None if deadline is None else time.monotonic() + deadline
        groups = self._group(clients)
        for client in set(clients).difference(*groups.values()):
            node = self._owner[client]
            yield from self._all_failed(node, [client], task, Reason.LOST, "it is not connected")
        waiting = self._send(task, groups, deadline)
        for node in groups.keys() - waiting.values():
            yield from self._all_failed(node, groups[node], task, Reason.LOST, "it took no message")
        since = {node: self._sites[node].activated for node in waiting.values()}
        while waiting and (end is None or time.monotonic() < end):
            for key, answer in self._answers(list(waiting)):
                node = waiting.pop(key)
                yield from self._unpack(answer, task, groups[node], node)
            if self._census():
                for key, node in list(waiting.items()):
                    site = self._sites.get(node)
                    if site is None or site.activated != since[node]:
                        del waiting[key]
                        self._arriving.pop(key, None)
                        what = "it is gone" if site is None else "it restarted"
                        yield from self._all_failed(node, groups[node], task, Reason.LOST, what)
            if waiting:
                time.sleep(POLL)
        for key, node in waiting.items():
            self._arriving.pop(key, None)
            what = f"no reply within {deadline:g} s"
            yield from self._all_failed(node, groups[node], task, Reason.DEADLINE, what)

    def close(self) -> None:
        """End the grid's run and what serves it."""
        self._close()

    # Who is there

    def _present(self) -> dict[int, int]:
        return {
            client: size for site in self._sites.values() for client, size in site.sizes.items()
        }

    def _census(self) -> bool:
        """Look at which sites are connected, at most every two seconds; call new ones, and those
        that were in trouble when they were called."""
        if time.monotonic() - self._looked < CENSUS:
            return False
        self._door()
        with self._reached():
            connected = {node.node_id: node for node in self._grid.get_nodes()}
        for node in self._sites.keys() - connected.keys():
            log.warning("site %s is gone", self._name(node))
            del self._sites[node]
        for node, info in connected.items():
            self._names[node] = printable(info.name, MAX_NAME)
            site = self._sites.get(node)
            if site is None or site.activated != info.last_activated_at:
                known = site.sizes if site else {}
                self._sites[node] = Site(node, info.last_activated_at, known)
        for site in self._sites.values():
            if time.monotonic() >= site.due:
                self._call(site)
        self._looked = time.monotonic()
        return True

    def _name(self, node: int) -> str:
        """A site as people know it: by the name its key was registered under, which the coordinator
        gave it. Flower's number is there where two have one name, as when a site's key is changed,
        and alone where there is none."""
        number, name = f"{node:x}"[:8], self._names[node]
        if not name:
            return number
        shared = list(self._names.values()).count(name) > 1
        return f"{name} ({number})" if shared else name

    def _call(self, site: Site) -> None:
        message = Message(self._roll_call, site.node, "query", ttl=DEFAULT_TTL)
        with self._reached():
            (site.asked,) = self._grid.push_messages([message]) or [""]
        site.due = math.inf

    def _hear_rolls(self) -> None:
        called = {site.asked: site for site in self._sites.values() if site.asked}
        for key, answer in self._answers(list(called)):
            site = called[key]
            site.asked = ""
            if isinstance(answer, Error):
                log.warning("site %s: %s", self._name(site.node), _why(answer)[1])
                site.pause = min(2 * site.pause, LONGEST) or CALL_AGAIN
                site.due = time.monotonic() + site.pause
                continue
            self._admit(site, answer)

    def _admit(self, site: Site, content: RecordDict) -> None:
        try:
            roll = read_roll(content)
        except WireError as error:
            log.warning("site %s: %s", self._name(site.node), error)
            return
        site.sizes = {}
        if roll.objection:
            log.warning("site %s does not take part: %s", self._name(site.node), roll.objection)
            return
        for client, size in zip(roll.clients, roll.sizes, strict=True):
            if self._owner.setdefault(client, site.node) != site.node:
                log.warning(
                    "site %s claims client %d, which belongs to site %s: refused",
                    self._name(site.node),
                    client,
                    self._name(self._owner[client]),
                )
            else:
                site.sizes[client] = size
        log.info("site %s joined with clients %s", self._name(site.node), sorted(site.sizes))

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """A SuperLink that cannot be asked any more ends a run in a sentence, its state saved."""
        try:
            yield
        except httpx.HTTPStatusError as error:
            raise FederationError(self._refusal(error.response)) from error
        except httpx.HTTPError as error:
            raise FederationError(f"the SuperLink cannot be asked any more: {error}") from error

    def _refusal(self, answer: httpx.Response) -> str:
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            return (
                "the SuperLink has given this run up, as it does where a coordinator stands still "
                "for a minute (was this machine asleep?): go on with it by `ssfl serve`"
            )
        said = f"the SuperLink answered {answer.status_code} {answer.reason_phrase}"
        left = _left_on_disk(self._link_log.parent)
        if left < LITTLE:
            return (
                f"{said}, and the disk of {self._link_log.parent} has {left / 1e6:.0f} MB left: "
                "make room there, and go on with it by `ssfl serve`"
            )
        return f"{said}: {self._link_log} says why"

    # One exchange

    def _await_return(self, clients: Sequence[int]) -> None:
        """Wait a while for those who were there when the round began. Asked again at once, they
        would be lost again, and a round's retries be over before a site has started anew."""
        end = time.monotonic() + RETURN
        while not self._present().keys() >= set(clients) and time.monotonic() < end:
            self._census()
            self._hear_rolls()
            time.sleep(POLL)

    def _group(self, clients: Sequence[int]) -> dict[int, list[int]]:
        """The clients by the node they are behind, in the order given."""
        groups: dict[int, list[int]] = {}
        for client in clients:
            node = self._owner.get(client)
            if node in self._sites and client in self._sites[node].sizes:
                groups.setdefault(node, []).append(client)
        return groups

    def _send(
        self, task: Task, groups: dict[int, list[int]], deadline: float | None
    ) -> dict[str, int]:
        """Message ids with the nodes they were for."""
        seconds = None if deadline is None else deadline - min(TRAVEL, deadline / 2)
        orders = write_orders(task, groups.values(), seconds)
        messages = [
            Message(
                order, node, task.kind.value, ttl=deadline or DEFAULT_TTL, group_id=str(task.round)
            )
            for node, order in zip(groups, orders, strict=True)
        ]
        with self._reached():
            keys = list(self._grid.push_messages(messages))
        return {key: node for key, node in zip(keys, groups, strict=False) if key}

    def _answers(self, keys: Sequence[str]) -> Iterator[tuple[str, RecordDict | Error]]:
        """What has come in answer to messages of ours, by their ids.

        Each is asked for alone: of several, Flower loses all if one cannot be read, and what an
        answer itself says it answers is only its site's word.
        """
        for key in keys:
            try:
                with self._reached():
                    messages = self._pull(key)
            except FederationError:  # the SuperLink's fault
                raise
            except Exception as error:  # whatever Flower stumbles over in what a site wrote
                yield key, Error(ErrorCode.UNKNOWN, f"its message cannot be read: {error!r}")
                continue
            fitting = [m for m in messages if m.metadata.reply_to_message_id == key]
            for message in fitting[:1]:
                yield key, message.error if message.has_error() else message.content

    def _pull(self, key: str) -> list[Message]:
        """What has come in answer to a message; nothing while it is still coming in.

        Flower hands an answer over once, and then waits for the rest of it however long that takes.
        So it does in a thread of its own: a site on a slow line holds up neither the others nor a
        deadline.
        """
        if key not in self._arriving:
            self._arriving[key] = _apart(lambda: list(self._grid.pull_messages([key])))
        pull = self._arriving[key]
        if pull not in wait([pull], POLL).done:
            return []
        del self._arriving[key]
        return pull.result()

    def _unpack(
        self, answer: RecordDict | Error, task: Task, clients: Sequence[int], node: int
    ) -> Iterator[Reply]:
        """A word on every client asked, and only one, whatever the site sent."""
        if isinstance(answer, Error):
            yield from self._all_failed(node, clients, task, *_why(answer))
            return
        try:
            replies = read_replies(answer)
        except WireError as error:
            yield from self._all_failed(node, clients, task, Reason.REFUSED, str(error))
            return
        missing = dict.fromkeys(clients)
        for reply in replies:
            strange = [client for client in reply.clients if self._owner.get(client) != node]
            if strange:
                log.warning(
                    "site %s answered for client %d, which is not its own: refused",
                    self._name(node),
                    strange[0],
                )
            elif reply.round < task.round:
                yield reply  # late
            elif missing.keys() >= set(reply.clients):
                for client in reply.clients:
                    del missing[client]
                yield self._named(node, reply)
        what = "it did not answer for this client"
        yield from self._all_failed(node, list(missing), task, Reason.LOST, what)

    def _named(self, node: int, reply: Reply) -> Reply:
        """A failure with its site's name: that is where its log is."""
        if reply.failure is None:
            return reply
        detail = f"site {self._name(node)}: {reply.failure.detail}"
        return replace(reply, failure=replace(reply.failure, detail=detail))

    def _all_failed(
        self, node: int, clients: Sequence[int], task: Task, reason: Reason, detail: str
    ) -> Iterator[Reply]:
        for client in clients:
            yield failed(client, task, reason, f"site {self._name(node)}: {detail}")


def _left_on_disk(folder: Path) -> float:
    try:
        return shutil.disk_usage(folder).free
    except OSError:  # it is gone
        return math.inf


def _apart(call: Callable[[], list[Message]]) -> Future[list[Message]]:
    """A call in a thread that keeps no process from ending."""
    outcome: Future[list[Message]] = Future()

    def work() -> None:
        try:
            outcome.set_result(call())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name="ssfl-answer", daemon=True).start()
    return outcome


def _why(error: Error) -> tuple[Reason, str]:
    """Flower's error codes in our words, or as much of the site's as we read."""
    if error.code == ErrorCode.NODE_UNAVAILABLE:
        return Reason.LOST, "it is gone"
    if error.code == ErrorCode.CLIENT_APP_CRASHED:  # said by its SuperNode, which lives on
        return Reason.LOST, "its process does not respond"
    if error.code in (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE):
        return Reason.DEADLINE, "the message or its reply outlived its time"
    return Reason.ERROR, printable(error.reason or "it gave no reason")
