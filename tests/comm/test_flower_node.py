"""What a site does about a message that cannot be answered: it must not be deaf from then on."""

from contextlib import nullcontext
from signal import SIGTERM
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

pytest.importorskip("flwr")

from flwr.app import Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal as supernode

from ssfl.comm.flower import runtime
from ssfl.comm.flower.node import lost_or_logged, taken_or_ended, whole_or_dropped
from ssfl.errors import FederationError


def test_a_message_whose_coordinator_goes_while_it_is_on_the_way_is_dropped(monkeypatch):
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
    message = Message(RecordDict(), 2, "train")
    message.metadata.__dict__["_message_id"] = "the message"
    state, store = Mock(), Mock()
    store.preregister.return_value = ["an object"]

    def over(run, object_):
        raise RunNotRunningException

    monkeypatch.setattr(supernode, "pull_objects", whole_or_dropped(supernode.pull_objects))
    received = supernode._pull_and_store_message(
        state=state,
        object_store=store,
        node_config={},
        receive=lambda: (message, Mock()),
        get_run=Mock(),
        get_fab=Mock(),
        pull_object=over,
        confirm_message_received=Mock(),
        trusted_entities=None,
    )
    assert received is None
    state.delete_messages.assert_called_once_with(message_ids=["the message"])
    store.delete.assert_called_once_with("the message")
    state.finish_task.assert_called_once()


def test_an_answer_that_the_superlink_does_not_take_ends_the_supernode(monkeypatch):
    signs = []
    monkeypatch.setattr("ssfl.comm.flower.node.os.kill", lambda pid, sign: signs.append(sign))
    monkeypatch.setattr(supernode, "log", lost_or_logged(supernode.log))
    state = Mock(get_messages_legacy=Mock(return_value=[Mock()]))
    store = Mock(get_object_tree=Mock(return_value=ObjectTree(object_id="the answer")))
    for fault, ended in ((None, []), (RunNotRunningException(), []), (OSError("500"), [SIGTERM])):
        send = Mock(side_effect=fault, return_value=(set(), ""))
        supernode._push_messages(state=state, object_store=store, send=send, push_object=Mock())
        send.assert_called_once()
        assert signs == ended


def test_a_message_that_nobody_takes_ends_the_supernode(monkeypatch):
    def end(pid, sign):
        raise SystemExit(sign)

    monkeypatch.setattr("ssfl.comm.flower.node.os.kill", end)
    monkeypatch.setattr("flwr.common.constant.HEARTBEAT_DEFAULT_INTERVAL", 0)
    push = Mock()
    taken_or_ended(push)(state=Mock(get_tasks=Mock(return_value=[])), send=1)
    push.assert_called_once()
    with pytest.raises(SystemExit):
        taken_or_ended(push)(state=Mock(get_tasks=Mock(return_value=["a task"])), send=1)
    push.assert_called_once()


def test_a_message_that_cannot_be_read_ends_the_connection_so_that_a_new_one_is_made(monkeypatch):
    waiting = Mock(AcquireTask=Mock(return_value=SimpleNamespace(token="token")))

    def stumble(*_):
        raise KeyError("no such object")

    monkeypatch.setattr(runtime, "_executor", lambda *_: nullcontext(waiting))
    monkeypatch.setattr(runtime, "_answer_one", stumble)
    with pytest.raises(FederationError, match="a message could not be read: KeyError"):
        runtime.answer_messages("127.0.0.1:1", b"", Mock(), stopped=lambda: False)
