"""The wire form: what goes in comes out, bit for bit, and nothing else gets in."""

import json
import math
import os
import pickle
from dataclasses import fields

import numpy as np
import pytest
import torch

from ssfl.comm.wire import (
    WireError,
    decode_reply,
    decode_task,
    encode_reply,
    encode_task,
    lengths,
    printable,
)
from ssfl.federation.messages import Failure, Joint, Reason, Reply, Task, TaskKind


def a_task(**changes):
    facts = {
        "kind": TaskKind.TRAIN,
        "round": 7,
        "theta": torch.tensor([1.5, -0.0, math.pi, 1e-42, math.inf]),
        "layout": "0123456789abcdef",
        "rate": 0.1,
        "progress": 1 / 3,
        "durable": 5,
        "control": torch.tensor([0.25]),
        "folded": {3: 6, 100_000: 0},
    }
    return Task(**(facts | changes))


def a_reply(**changes):
    facts = {
        "client": 3,
        "kind": TaskKind.EVALUATE,
        "round": 2,
        "layout": "0123456789abcdef",
        "delta": torch.tensor([math.nan, -2.5]),
        "samples": 600,
        "steps": 12,
        "metrics": {"loss": -0.1 + 0.3, "knn": math.nan},
        "control": torch.tensor([4.0, 5.0, 6.0]),
        "failure": Failure(Reason.DEADLINE, "after 3 s"),
    }
    return Reply(**(facts | changes))


def same(one, other):
    for field in fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, torch.Tensor):
            assert a.numpy().tobytes() == b.numpy().tobytes(), field.name
        else:
            assert repr(a) == repr(b), field.name  # repr: NaN is not equal to itself
    return True


def changed(header, **changes):
    return json.dumps(json.loads(header) | changes).encode()


@pytest.mark.parametrize("task", [a_task(), a_task(control=None), a_task(theta=torch.empty(0))])
def test_a_task_comes_back_bit_for_bit(task):
    assert same(task, decode_task(*encode_task(task)))


@pytest.mark.parametrize(
    "reply",
    [
        a_reply(),
        a_reply(failure=None),
        a_reply(delta=None, control=None, metrics={}),
        a_reply(joint=Joint((3, 0, 9), 4.75)),
    ],
)
def test_a_reply_comes_back_bit_for_bit(reply):
    assert same(reply, decode_reply(*encode_reply(reply)))


def test_vectors_are_sent_from_and_received_into_place_without_a_copy():
    theta = torch.randn(1000)
    header, (sent,) = encode_task(a_task(theta=theta, control=None))
    assert sent.ctypes.data == theta.data_ptr()
    (room,) = (np.empty(n, np.float32) for n in lengths(header))
    room[:] = sent
    assert decode_task(header, [room]).theta.data_ptr() == room.ctypes.data


def test_the_vectors_are_little_endian_float32_as_they_lie():
    _, vectors = encode_task(a_task(theta=torch.tensor([1.0, 2.0]), control=None))
    assert bytes(vectors[0]) == bytes.fromhex("0000803f00000040")


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"what": "reply"},
        {"kind": "erase"},
        {"round": -1},
        {"round": "7"},
        {"round": True},
        {"rate": None},
        {"rate": math.inf},
        {"layout": 5},
        {"vectors": {"theta": 4, "control": 1}},
        {"vectors": {"theta": 5}},
        {"vectors": {"theta": 5, "delta": 1}},
        {"vectors": {"theta": 5, "images": 1}},
        {"vectors": {"theta": -5, "control": 1}},
        {"path": "/etc/passwd"},
    ],
)
def test_a_task_with_a_wrong_field_is_refused(changes):
    header, vectors = encode_task(a_task())
    with pytest.raises(WireError):
        decode_task(changed(header, **changes), vectors)


@pytest.mark.parametrize(
    "changes",
    [
        {"client": -1},
        {"client": 2**70},
        {"samples": 1.5},
        {"metrics": {"loss": "low"}},
        {"metrics": {"images": [1, 2]}},
        {"failure": {"reason": "bored", "detail": ""}},
        {"vectors": {"theta": 2, "control": 3}},
        {"joint": {"clients": [], "effective_steps": 1.0}},
        {"joint": {"clients": [0, 3], "effective_steps": 1.0}},
        {"joint": {"clients": [3, 0, 3], "effective_steps": 1.0}},
        {"joint": {"clients": [3], "effective_steps": math.inf}},
    ],
)
def test_a_reply_with_a_wrong_field_is_refused(changes):
    header, vectors = encode_reply(a_reply())
    with pytest.raises(WireError):
        decode_reply(changed(header, **changes), vectors)


@pytest.mark.parametrize("header", [b"", b"{}", b"[]", b"\xff\xfe", b"{" * 100, b"x" * 2_000_000])
def test_a_header_that_is_no_header_is_refused(header):
    with pytest.raises(WireError):
        decode_task(header, [])
    with pytest.raises(WireError):
        decode_reply(header, [])


def test_a_missing_field_is_refused():
    header, vectors = encode_task(a_task())
    for name in json.loads(header).keys() - {"version", "what"}:
        facts = json.loads(header)
        del facts[name]
        with pytest.raises(WireError):
            decode_task(json.dumps(facts).encode(), vectors)


def test_vectors_of_other_numbers_are_refused():
    header, (theta, control) = encode_task(a_task())
    for other in (theta.astype(np.float64), theta.view(np.int32), theta[:3], theta[::2]):
        with pytest.raises(WireError):
            decode_task(header, [other, control])


def test_what_is_not_a_float32_vector_is_not_sent():
    for theta in (torch.zeros(2, dtype=torch.float64), torch.zeros(2, 2), torch.zeros(2).half()):
        with pytest.raises(WireError, match="only float32 vectors"):
            encode_task(a_task(theta=theta))


def test_a_message_cut_anywhere_is_refused():
    header, vectors = encode_task(a_task())
    for end in range(len(header)):
        with pytest.raises(WireError):
            decode_task(header[:end], vectors)
    theta, control = (vector.tobytes() for vector in vectors)
    for cut in (*(theta[:end] for end in range(len(theta))), theta + b"\0"):
        with pytest.raises(WireError):
            decode_task(header, [cut, control])
    for too_few_or_many in ([], [theta], [theta, control, control]):
        with pytest.raises(WireError):
            decode_task(header, too_few_or_many)


def test_a_pickle_is_refused_and_never_run():
    class Trap:
        def __reduce__(self):
            return exec, ("raise SystemExit('boom')",)

    trap = pickle.dumps(Trap())
    with pytest.raises(WireError):
        decode_task(trap, [trap])
    with pytest.raises(WireError):
        decode_reply(trap, [trap])


def test_an_overlong_failure_is_cut_rather_than_lost():
    reply = decode_reply(*encode_reply(a_reply(failure=Failure(Reason.ERROR, "x" * 10_000))))
    assert reply.failure.reason is Reason.ERROR
    assert reply.failure.detail == "x" * 2000


def test_a_failure_may_name_a_file_whose_name_is_no_text():
    name = os.fsdecode(b"/data/caf\xe9")
    reply = decode_reply(*encode_reply(a_reply(failure=Failure(Reason.ERROR, f"no {name}"))))
    assert reply.failure.detail == "no /data/caf?"


def test_what_others_write_is_one_line_that_moves_no_cursor():
    assert printable("disk full:\r\n  /data\x1b[2J\x07 \u202eé") == "disk full: /data?[2J? ?é"
    assert printable("a" * 5000) == "a" * 2000
    reply = decode_reply(*encode_reply(a_reply(failure=Failure(Reason.ERROR, "no\x1b[1A\nyes"))))
    assert reply.failure.detail == "no?[1A yes"
