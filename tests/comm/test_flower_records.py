"""What comes over the network is one of our messages or is refused, and never worse."""

import contextlib
import json
import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from ssfl.comm.flower.records import (
    RAW,
    Roll,
    read_order,
    read_replies,
    read_roll,
    read_roll_call,
    write_orders,
    write_replies,
    write_roll,
    write_roll_call,
)
from ssfl.comm.wire import WireError
from ssfl.federation.messages import Joint, Reply, Task, TaskKind

TASK = Task(TaskKind.TRAIN, 4, torch.ones(3), "x", control=torch.ones(2))
REPLIES = [
    Reply(0, TaskKind.TRAIN, 4, "x", torch.ones(3), samples=5, joint=Joint((0, 1))),
    Reply(2, TaskKind.TRAIN, 4),
]
MESSAGES = {
    read_order: write_orders(TASK, [[0, 1]], 2.0)[0],
    read_replies: write_replies(REPLIES),
    read_roll: write_roll(Roll((0, 1), (5, 6))),
    read_roll_call: write_roll_call("0123456789abcdef", "{}"),
}

scalars = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([0, 1, 2, 10**12]),
    st.floats(),
    st.booleans(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from(["[" * 100_000, "[]", "null"]),
)
lists = st.one_of(
    *(st.lists(kind, max_size=4) for kind in (st.integers(-2, 3), st.binary(), st.booleans())),
    st.lists(st.sampled_from([0, 1, 10**12, 2**62]), max_size=4),
    st.lists(st.floats(), max_size=2),
)
arrays = st.builds(
    Array,
    st.sampled_from(["float32", "float64", "object"]),
    st.tuples(st.integers(-1, 10**12)),
    st.sampled_from([RAW, "numpy.ndarray"]),
    st.binary(max_size=13),
)


@st.composite
def spoilt(draw, message):
    """A message with one thing wrong with it."""
    configs = {name: dict(record) for name, record in message.config_records.items()}
    vectors = {name: dict(record) for name, record in message.array_records.items()}
    tables = [*configs.values(), *vectors.values()]
    table = draw(st.sampled_from(tables))
    holds_arrays = any(table is record for record in vectors.values())
    what = draw(st.sampled_from(["change", "add", "drop", "lose", "header"]))
    if what == "lose":
        found = configs if draw(st.booleans()) or not vectors else vectors
        found.pop(next(iter(found)))
    elif what == "header":
        for facts in configs.values():
            for name in facts.keys() & {"header", "headers", "recipe"}:
                facts[name] = draw(headers(facts[name]))
    elif what == "add" or not table:
        key = draw(st.sampled_from(["0", "1", "7", "clients", "x"]))
        table[key] = draw(arrays if holds_arrays else scalars | lists)
    else:
        key = draw(st.sampled_from(sorted(table)))
        if what == "drop":
            del table[key]
        else:
            table[key] = draw(arrays if holds_arrays else scalars | lists)
    made = {name: ConfigRecord(facts) for name, facts in configs.items()}
    return RecordDict(made | {name: ArrayRecord(found) for name, found in vectors.items()})


@st.composite
def headers(draw, header):
    """JSON with one entry changed, or no JSON at all."""
    if isinstance(header, list):
        return [draw(headers(one)) for one in header]
    text = isinstance(header, str)
    try:
        facts = json.loads(header)
        key = draw(st.sampled_from([*facts, "new"]))
        odd = [None, -1, 2**80, math.nan, "x", [], {}, {"delta": 10**12}, {"clients": [1, 1]}]
        facts[key] = draw(st.sampled_from(odd))
        changed = json.dumps(facts)
    except ValueError:
        changed = "not JSON"
    return changed if text else changed.encode()


@pytest.mark.parametrize("read", MESSAGES, ids=lambda read: read.__name__)
def test_what_was_written_is_read(read):
    assert read(MESSAGES[read])


@pytest.mark.parametrize("read", MESSAGES, ids=lambda read: read.__name__)
@given(data=st.data())
def test_a_spoilt_message_is_refused_if_it_cannot_be_read(read, data):
    message = data.draw(spoilt(MESSAGES[read]))
    with contextlib.suppress(WireError):
        read(message)


def order(vectors=None, **changes):
    good = MESSAGES[read_order]
    facts = ConfigRecord({**good.config_records["order"], **changes})
    return RecordDict({"order": facts, **(vectors or {"vectors": good.array_records["vectors"]})})


def roll(clients, sizes):
    facts = {"clients": clients, "sizes": sizes, "objection": ""}
    return RecordDict({"roll": ConfigRecord(facts)})


def replies(counts):
    good = MESSAGES[read_replies]
    facts = ConfigRecord({**good.config_records["replies"], "counts": counts})
    return RecordDict({"replies": facts, "vectors": good.array_records["vectors"]})


@pytest.mark.parametrize(
    "read",
    [
        partial(read_order, order(vectors={"other": ArrayRecord({})})),
        *(partial(read_order, order(seconds=s)) for s in (math.nan, math.inf, -1.0)),
        partial(read_order, order(clients=[0, 0])),
        partial(read_replies, replies([1, 10**12])),
        partial(read_replies, replies([0, 0])),
        partial(read_roll, roll([1, 1, 2], [5, 6])),
        partial(read_roll, roll([1, 1], [5, 6])),
        partial(read_roll, roll([1, 2], [5, 0])),
        partial(read_roll, roll([1, 2], [5, 2**62])),
        partial(read_roll, roll([True, False], [5, 6])),
        partial(read_roll, roll(list(range(100_001)), [1] * 100_001)),
        partial(read_roll_call, write_roll_call("0123456789abcdef", "[" * 100_000)),
    ],
)
def test_a_hostile_message_is_refused(read):
    with pytest.raises(WireError):
        read()
