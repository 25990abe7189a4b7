"""Flower's inner doors, all in one place: what a pinned version (1.41) does not document.

Flower starts a new process for every message and hands it a program from the server. A site that
guards private images wants neither. So SuperLink and SuperNode run with their apps outside
(`--isolation process`), and this module does what Flower's own app processes do: acquire the task,
pull the message, push the reply. The coordinator gets a `Grid`, a site a stream of messages.
"""

import contextlib
import hashlib
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    load_ssh_private_key,
    load_ssh_public_key,
)
from flwr.app import Message
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE, SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.fleet_pb2 import DeactivateNodeRequest
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.date import now
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message

from ssfl.errors import ConfigError, FederationError

POLL = 0.2
HEARTBEAT = 10.0
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"

APP = {
    "pyproject.toml": b"""[project]
name = "ssfl-federation"
version = "1.0.0"
description = "A marker: every party runs its own installed ssfl."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "ssfl"

[tool.flwr.app.components]
serverapp = "nothing:app"
clientapp = "nothing:app"

[tool.flwr.app.config]
""",
    "nothing.py": b'raise ImportError("no program travels: start sites with `ssfl site start`")',
}
"""Flower wants an app for a run. Ours is empty: nobody executes what was sent."""


class Link:
    """A SuperLink as its coordinator sees it, over loopback."""

    def __init__(self, address: str, ca: bytes, secret: bytes) -> None:
        self._address, self._ca, self._secret = address, ca, secret

    def register(self, name: str, public_key: Path) -> None:
        """Let the site with this key in (again, if it is known already)."""
        try:
            key = public_key_to_bytes(load_ssh_public_key(public_key.read_bytes()))
        except (OSError, ValueError, UnsupportedAlgorithm):
            raise ConfigError(
                f"{public_key} is no public key of a site: ask for its site.pub again"
            ) from None
        with self._control() as control:
            try:
                control.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
            except httpx.HTTPStatusError as error:
                if "already in use" not in error.response.text:
                    raise ConfigError(
                        f"the key of site '{name}' was refused: {_reason(error)}"
                    ) from error
            except httpx.TransportError as error:
                raise FederationError(f"the SuperLink cannot be reached: {error}") from error

    @contextlib.contextmanager
    def run(self) -> Iterator[HttpGrid]:
        """A new run on this SuperLink, and its grid until the end of the `with` block."""
        content, _ = build_fab_from_files(APP)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        with self._control() as control:
            try:
                run_id = control.StartRun(StartRunRequest(fab=fab_to_proto(fab))).run_id
            except httpx.TransportError as error:  # as when server.pem is not of ca.pem's making
                raise FederationError(f"the SuperLink cannot be reached: {error}") from error
        token = self._acquire(run_id)
        grid = HttpGrid(self._address, insecure=False, root_certificates=self._ca, token=token)
        grid._retry_invoker.should_giveup = _hopeless
        client = grid._runtime_client
        started = client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id = started.task_id
        TaskIdentity.run_id = started.run.run_id
        TaskIdentity.node_id = started.context.node_id
        grid.set_run(run_from_proto(started.run))
        status, details = SubStatus.FAILED, "the coordinator stopped"
        try:
            with _heartbeat(client):
                yield grid
            status, details = SubStatus.COMPLETED, ""
        finally:
            grid._retry_invoker.max_tries = 1
            with contextlib.suppress(Exception):
                client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=details))
            grid.close()

    def _acquire(self, run_id: int) -> str:
        with _executor(self._address, self._ca, self._secret) as client:
            for _ in range(100):
                request = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
                answer = client.AcquireTask(request)
                if answer.HasField("task") and answer.token and answer.task.run_id == run_id:
                    return str(answer.token)
                if not answer.token:  # an older run's task, left by a killed coordinator, is passed
                    time.sleep(POLL)
        raise FederationError("the SuperLink did not hand over the run it had just accepted")

    def _control(self) -> ControlHttpClient:
        version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
        return ControlHttpClient.from_server_address(
            self._address, False, self._ca, interceptors=[version]
        )


def leave(address: str, ca: Path, private_key: Path, node: int) -> None:
    """Say goodbye for a SuperNode that was killed: its key may not connect again before that, or
    before its last heartbeat is a minute old."""
    key = load_ssh_private_key(private_key.read_bytes(), None)
    version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
    signed = NodeAuthHttpInterceptor(key, key.public_key())
    with (
        contextlib.suppress(httpx.HTTPError),
        FleetHttpClient.from_server_address(address, False, str(ca), [version, signed]) as client,
    ):
        client.DeactivateNode(DeactivateNodeRequest(node_id=node))


def clock_is_off(address: str, ca: Path) -> float:
    """Seconds by which our clock is ahead of the coordinator's, if that is more than it takes our
    signatures for; else, or if it cannot be asked, 0."""
    with contextlib.suppress(httpx.HTTPError, OSError, KeyError, ValueError):
        trusted = ssl.create_default_context(cafile=ca)
        answer = httpx.get(f"https://{address}/", verify=trusted)
        ahead = (now() - parsedate_to_datetime(answer.headers["date"])).total_seconds()
        return ahead if not -TIMESTAMP_TOLERANCE < ahead < SYSTEM_TIME_TOLERANCE else 0.0
    return 0.0


def answer_messages(
    address: str,
    secret: bytes,
    answer: Callable[[Message], Message],
    stopped: Callable[[], bool],
) -> None:
    """Answer what this site's SuperNode receives, one message after another, until `stopped`.

    A SuperNode waits for the answer to one message before it takes another, so one that cannot be
    answered is the end of it: a `FederationError`.
    """
    with _executor(address, None, secret) as client:
        while not stopped():
            request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
            try:
                task = client.AcquireTask(request)
            except httpx.TransportError:
                time.sleep(POLL)  # the SuperNode is going down or coming up
                continue
            if task.token:
                try:
                    _answer_one(address, task.token, answer)
                except httpx.HTTPError:
                    pass  # the run was stopped meanwhile
                except Exception as error:  # whatever Flower stumbles over in what was sent
                    raise FederationError(f"a message could not be read: {error!r}") from error
            else:
                time.sleep(POLL)


def _answer_one(address: str, token: str, answer: Callable[[Message], Message]) -> None:
    token_ = RuntimeTokenHttpInterceptor(token)
    version = RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")
    with RuntimeHttpClient.from_server_address(address, True, None, [version, token_]) as client:
        with _heartbeat(client):
            message, context, *_ = pull_task_input(client)
            push_message(client, answer(message), context)
        client.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.COMPLETED, details=""))


def _executor(address: str, ca: bytes | None, secret: bytes) -> RuntimeHttpClient:
    """Who may acquire tasks; without a `ca` the way is not encrypted (loopback only)."""
    return RuntimeHttpClient.from_server_address(
        address,
        ca is None,
        ca,
        [
            RuntimeVersionHttpInterceptor(component_name="SuperExec"),
            SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={ACQUIRE}),
        ],
    )


@contextlib.contextmanager
def _heartbeat(client: Any) -> Iterator[None]:
    """Tell Flower now and then that its task is still being worked on."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(HEARTBEAT):
            with contextlib.suppress(Exception):
                client.SendTaskHeartbeat(SendTaskHeartbeatRequest())

    thread = threading.Thread(target=beat, name="ssfl-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


def _hopeless(error: Exception) -> bool:
    """Whether a call to the SuperLink is not worth repeating. (Flower's own rule would interrupt
    the process.)"""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code not in (502, 503, 504)
    return any(word in str(error).lower() for word in ("certificate", "ssl", "tls"))


def _reason(error: httpx.HTTPStatusError) -> str:
    return str(error.response.text[:300])
