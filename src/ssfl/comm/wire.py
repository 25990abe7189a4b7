"""Tasks and replies as bytes: a small JSON header and raw little-endian float32 vectors.

Every transport that leaves the process uses this form, so nothing is ever pickled or unpickled.
`encode_*` gives the header and arrays that share the tensors' memory (MPI sends them as they lie);
`lengths` tells a receiver what to make room for. Whatever does not fit the form exactly is refused
with a `WireError`.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from ssfl.errors import FederationError
from ssfl.federation.messages import Failure, Joint, Reason, Reply, Task, TaskKind
from ssfl.section import Section

Vector = NDArray[np.float32]
Message = tuple[bytes, list[Vector]]
Buffer = bytes | bytearray | memoryview | NDArray[Any]

FLOAT = np.dtype("<f4")
MAX_HEADER = 1 << 20
"""Bytes of JSON that are looked at: counts and metrics fit many times over, data would not."""

MAX_COUNT = 1 << 62
MAX_TEXT = 2000
MAX_CLIENTS = 100_000
"""Clients that one message may speak of."""

Count = Annotated[int, Field(ge=0, lt=MAX_COUNT)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


Facts = TypeVar("Facts", bound=BaseModel)


class WireError(FederationError):
    """A message that is not one of ours: wrong form, sizes or types."""


def printable(text: str, limit: int = MAX_TEXT) -> str:
    """What somebody else wrote, as one line that does nothing to a terminal or a log."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else "?" for c in line)[:limit]


class _Header(Section):
    model_config = ConfigDict(strict=True, ser_json_inf_nan="constants")

    version: Literal[1] = 1
    kind: TaskKind
    round: Count
    layout: Text
    vectors: dict[Literal["theta", "delta", "control"], Count]
    """Length of each vector, in the order in which they follow."""


class _Lengths(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    vectors: dict[str, Count]


class _TaskHeader(_Header):
    what: Literal["task"] = "task"
    rate: Finite
    progress: Finite
    durable: Count
    limit: Finite
    folded: Annotated[dict[Count, Count], Field(max_length=MAX_CLIENTS)]


class _FailureHeader(Section):
    model_config = ConfigDict(strict=True)

    reason: Reason
    detail: Text


class _JointHeader(Section):
    model_config = ConfigDict(strict=True)

    clients: Annotated[list[Count], Field(min_length=1, max_length=MAX_CLIENTS)]
    effective_steps: Finite


class _ReplyHeader(_Header):
    what: Literal["reply"] = "reply"
    client: Count
    samples: Count
    steps: Count
    metrics: Annotated[dict[Text, float], Field(max_length=10_000)]
    failure: _FailureHeader | None
    joint: _JointHeader | None = None


def encode_task(task: Task) -> Message:
    """Header and vectors of a task; the vectors share memory with its tensors where they can."""
    names, vectors = _collect(theta=task.theta, control=task.control)
    header = _TaskHeader(
        kind=task.kind,
        round=task.round,
        layout=task.layout,
        rate=task.rate,
        progress=task.progress,
        durable=task.durable,
        limit=task.limit,
        folded=task.folded,
        vectors=names,
    )
    return header.model_dump_json().encode(), vectors


def decode_task(header: Buffer, vectors: Sequence[Buffer]) -> Task:
    """The task that was encoded; its tensors share memory with `vectors` that may be written."""
    facts = _read(_TaskHeader, header)
    tensors = _tensors(facts, vectors, allowed={"theta", "control"})
    if "theta" not in tensors:
        raise WireError("a task came without Θ: it was refused")
    return Task(
        kind=facts.kind,
        round=facts.round,
        theta=tensors["theta"],
        layout=facts.layout,
        rate=facts.rate,
        progress=facts.progress,
        durable=facts.durable,
        limit=facts.limit,
        folded=facts.folded,
        control=tensors.get("control"),
    )


def encode_reply(reply: Reply) -> Message:
    """Header and vectors of a reply; the vectors share memory with its tensors where they can."""
    names, vectors = _collect(delta=reply.delta, control=reply.control)
    failure = None
    if reply.failure is not None:
        # Printable here already: JSON cannot hold what a path that is no UTF-8 brings along.
        detail = printable(reply.failure.detail)
        failure = _FailureHeader(reason=reply.failure.reason, detail=detail)
    header = _ReplyHeader(
        client=reply.client,
        kind=reply.kind,
        round=reply.round,
        layout=reply.layout,
        samples=reply.samples,
        steps=reply.steps,
        metrics={name: float(value) for name, value in reply.metrics.items()},
        failure=failure,
        joint=_joint_header(reply.joint),
        vectors=names,
    )
    return header.model_dump_json().encode(), vectors


def decode_reply(header: Buffer, vectors: Sequence[Buffer]) -> Reply:
    """The reply that was encoded; its tensors share memory with `vectors` that may be written."""
    facts = _read(_ReplyHeader, header)
    tensors = _tensors(facts, vectors, allowed={"delta", "control"})
    failure = None
    if facts.failure is not None:
        failure = Failure(facts.failure.reason, printable(facts.failure.detail))
    return Reply(
        client=facts.client,
        kind=facts.kind,
        round=facts.round,
        layout=facts.layout,
        delta=tensors.get("delta"),
        samples=facts.samples,
        steps=facts.steps,
        metrics=facts.metrics,
        control=tensors.get("control"),
        failure=failure,
        joint=_joint(facts),
    )


def lengths(header: Buffer) -> list[int]:
    """How many float32 each vector of this message holds, for whoever receives into buffers."""
    return list(_read(_Lengths, header).vectors.values())


def _joint_header(joint: Joint | None) -> _JointHeader | None:
    if joint is None:
        return None
    return _JointHeader(clients=list(joint.clients), effective_steps=joint.effective_steps)


def _joint(facts: _ReplyHeader) -> Joint | None:
    if facts.joint is None:
        return None
    clients = facts.joint.clients
    if clients[0] != facts.client or len(set(clients)) != len(clients):
        raise WireError("a reply for several clients names them wrongly: it was refused")
    return Joint(tuple(clients), facts.joint.effective_steps)


def _collect(**tensors: Tensor | None) -> tuple[dict[Any, int], list[Vector]]:
    there = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    vectors = [_array(tensor) for tensor in there.values()]
    return {name: tensor.numel() for name, tensor in there.items()}, vectors


def _array(tensor: Tensor) -> Vector:
    if tensor.dtype != torch.float32 or tensor.dim() != 1:
        raise WireError(f"only float32 vectors travel, not {tensor.dtype} of {tensor.dim()} axes")
    return tensor.detach().cpu().contiguous().numpy().astype(FLOAT, copy=False)


def _read(kind: type[Facts], header: Buffer) -> Facts:
    raw = bytes(header)
    if len(raw) > MAX_HEADER:
        raise WireError(f"a message header of {len(raw)} bytes was refused")
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "header"
        raise WireError(f"a malformed message was refused: {place}: {first['msg']}") from None


def _tensors(facts: _Header, vectors: Sequence[Buffer], allowed: set[str]) -> dict[str, Tensor]:
    if not set(facts.vectors) <= allowed:
        raise WireError(f"a message with vectors {', '.join(facts.vectors)} was refused")
    if len(vectors) != len(facts.vectors):
        raise WireError(f"a message of {len(facts.vectors)} vectors came with {len(vectors)}")
    pairs = zip(facts.vectors.items(), vectors, strict=True)
    return {name: _tensor(name, length, vector) for (name, length), vector in pairs}


def _tensor(name: str, length: int, vector: Buffer) -> Tensor:
    if isinstance(vector, np.ndarray) and vector.dtype not in (FLOAT, np.uint8):
        raise WireError(f"vector '{name}' is {vector.dtype}, not float32: it was refused")
    view = _view(vector)
    if not view.c_contiguous or view.nbytes != 4 * length:
        raise WireError(f"vector '{name}' has {view.nbytes} bytes, not {4 * length}")
    if length == 0:
        return torch.empty(0)
    array = np.frombuffer(view, FLOAT).astype(np.float32, copy=False)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _view(buffer: Buffer) -> memoryview:
    return buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)
