"""What Flower's messages hold: our wire form (`comm.wire`) in its records, and nothing else.

Θ and Δ travel as raw float32 arrays beside their JSON headers. Flower's own array formats, some of
which can be pickles, are refused unread.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from ssfl.comm.wire import (
    MAX_CLIENTS,
    MAX_COUNT,
    Vector,
    WireError,
    decode_reply,
    decode_task,
    encode_reply,
    encode_task,
    printable,
)
from ssfl.federation.messages import Reply, Task

RAW = "ssfl.float32"
"""How the bytes of our arrays are to be read."""


@dataclass(frozen=True)
class Order:
    """What a site is asked: a task, for which of its clients, and how long it may take."""

    task: Task
    clients: tuple[int, ...]
    seconds: float | None


@dataclass(frozen=True)
class Roll:
    """A site's answer to "who is there?": its clients, how many images each has, and whether it
    runs the same recipe (if not, what differs)."""

    clients: tuple[int, ...]
    sizes: tuple[int, ...]
    objection: str = ""


def write_orders(
    task: Task, groups: Iterable[Sequence[int]], seconds: float | None
) -> list[RecordDict]:
    """The same task for several sites, each with its own clients; Θ is encoded once."""
    header, vectors = encode_task(task)
    arrays = _arrays(vectors)
    return [
        RecordDict(
            {
                "order": ConfigRecord(
                    {"header": header, "clients": list(clients), "seconds": seconds or 0.0}
                ),
                "vectors": arrays,
            }
        )
        for clients in groups
    ]


def read_order(content: RecordDict) -> Order:
    """What `write_orders` wrote, or a `WireError`."""
    facts = _facts(content, "order", header=bytes, clients=list, seconds=float)
    seconds = facts["seconds"]
    if not 0 <= seconds < math.inf:  # NaN fails this too
        raise WireError("an order came with an impossible deadline: it was refused")
    task = decode_task(facts["header"], _vectors(content))
    return Order(task, _clients(facts["clients"]), seconds or None)


def write_replies(replies: Sequence[Reply]) -> RecordDict:
    """The replies of a site's clients in one message."""
    encoded = [encode_reply(reply) for reply in replies]
    return RecordDict(
        {
            "replies": ConfigRecord(
                {
                    "headers": [header for header, _ in encoded],
                    "counts": [len(vectors) for _, vectors in encoded],
                }
            ),
            "vectors": _arrays([vector for _, vectors in encoded for vector in vectors]),
        }
    )


def read_replies(content: RecordDict) -> list[Reply]:
    """What `write_replies` wrote, or a `WireError`."""
    facts = _facts(content, "replies", headers=list, counts=list)
    headers, counts, vectors = facts["headers"], _numbers(facts["counts"]), _vectors(content)
    if len(headers) != len(counts) or len(vectors) != sum(counts):
        raise WireError("a site's message has not as many replies as it says: it was refused")
    if not all(isinstance(header, bytes) for header in headers):
        raise WireError("a site's message has replies that are no bytes: it was refused")
    rest = iter(vectors)
    return [
        decode_reply(header, list(islice(rest, count)))
        for header, count in zip(headers, counts, strict=True)
    ]


def write_roll_call(run: str, recipe: str) -> RecordDict:
    """The question who is there, for which run, and with which recipe (JSON)."""
    return RecordDict({"call": ConfigRecord({"run": run, "recipe": recipe})})


def read_roll_call(content: RecordDict) -> tuple[str, dict[str, Any]]:
    """The run's name and the server's recipe, or a `WireError`."""
    facts = _facts(content, "call", run=str, recipe=str)
    if re.fullmatch("[0-9a-f]{8,64}", facts["run"]) is None:
        raise WireError("a roll call came for a run of an impossible name: it was refused")
    try:
        recipe = json.loads(facts["recipe"])
    except (ValueError, RecursionError):
        recipe = None
    if not isinstance(recipe, dict):
        raise WireError("a roll call came without a readable recipe: it was refused")
    return facts["run"], recipe


def write_roll(roll: Roll) -> RecordDict:
    """A site's clients and their sizes: all it says about its data."""
    facts = {
        "clients": list(roll.clients),
        "sizes": list(roll.sizes),
        "objection": roll.objection,
    }
    return RecordDict({"roll": ConfigRecord(facts)})


def read_roll(content: RecordDict) -> Roll:
    """What `write_roll` wrote, or a `WireError`."""
    facts = _facts(content, "roll", clients=list, sizes=list, objection=str)
    clients, sizes = _clients(facts["clients"]), _numbers(facts["sizes"])
    if len(clients) != len(sizes) or 0 in sizes:
        raise WireError("a site's list of clients does not fit their sizes: it was refused")
    return Roll(clients, sizes, printable(facts["objection"]))


def _arrays(vectors: Sequence[Vector]) -> ArrayRecord:
    return ArrayRecord(
        {
            str(index): Array("float32", (len(vector),), RAW, vector.tobytes())
            for index, vector in enumerate(vectors)
        }
    )


def _vectors(content: RecordDict) -> list[bytes]:
    record = content.array_records.get("vectors")
    if record is None or list(record) != [str(index) for index in range(len(record))]:
        raise WireError("a message came without its vectors: it was refused")
    if any(array.stype != RAW or array.dtype != "float32" for array in record.values()):
        raise WireError("a message came with arrays of a foreign form: it was refused unread")
    return [array.data for array in record.values()]


def _facts(content: RecordDict, name: str, **kinds: type) -> dict[str, Any]:
    record = content.config_records.get(name)
    if record is None or set(record) != set(kinds):
        raise WireError(f"a message came without its '{name}' record: it was refused")
    facts = dict(record)
    if not all(isinstance(facts[key], kind) for key, kind in kinds.items()):
        raise WireError(f"a message came with a malformed '{name}' record: it was refused")
    return facts


def _clients(values: list[Any]) -> tuple[int, ...]:
    clients = _numbers(values)
    if len(clients) > MAX_CLIENTS or len(set(clients)) < len(clients):
        raise WireError("a message came with too many clients, or one twice: it was refused")
    return clients


def _numbers(values: list[Any]) -> tuple[int, ...]:
    if not all(type(value) is int and 0 <= value < MAX_COUNT for value in values):
        raise WireError("a message came with numbers that are no client ids or counts")
    return tuple(values)
