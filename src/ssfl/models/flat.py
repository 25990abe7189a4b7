"""A model as one vector.

All parameters and floating buffers of a network live in one contiguous float32 tensor, and the
module's own tensors are views into it. Loading a client's model is one copy, Δ is one subtraction,
and the optimizer, aggregation and the wire each handle one array. Gradients are flat the same way.

The order is canonical: what gradients move, then what moves without them but is shared (EMA
targets, batch-norm statistics), then what stays at home (queues). So the trainable part and the
shared part are both prefixes. Convolution weights are stored channels-last.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import torch
from torch import Tensor, nn

from ssfl.errors import ConfigError
from ssfl.models.norm import BatchNorm, GroupNorm


class Kind(StrEnum):
    """What an entry is, which decides who moves it and whether it travels."""

    WEIGHT = "weight"  # moved by gradients
    NORM = "norm"  # scale and shift of a norm: moved by gradients, kept home by FedBN
    TARGET = "target"  # a copy that follows the weights without gradients (BYOL, MoCo)
    STATISTIC = "statistic"  # running mean and variance: averaged with the weights
    HOME = "home"  # never leaves the client (queues)


TRAINABLE = (Kind.WEIGHT, Kind.NORM)
"""Kinds that gradients move."""
ORDER = {Kind.WEIGHT: 0, Kind.NORM: 0, Kind.TARGET: 1, Kind.STATISTIC: 2, Kind.HOME: 3}


@dataclass(frozen=True)
class Entry:
    """One tensor of the model: its name, shape and kind, and where it starts in the vector."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    offset: int

    @property
    def size(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def range(self) -> slice:
        return slice(self.offset, self.offset + self.size)

    def view(self, vector: Tensor) -> Tensor:
        """This entry's tensor as a view into `vector`."""
        flat = vector[self.range]
        if len(self.shape) != 4:
            return flat.view(self.shape)
        out, into, height, width = self.shape
        return flat.view(out, height, width, into).permute(0, 3, 1, 2)

    def pack(self, tensor: Tensor) -> Tensor:
        """`tensor` in the vector's order: the inverse of `view`, without a copy if it can be."""
        return (tensor.permute(0, 2, 3, 1) if len(self.shape) == 4 else tensor).reshape(-1)


@dataclass(frozen=True)
class Layout:
    """The names, shapes and kinds of a vector, in order."""

    entries: tuple[Entry, ...]

    @cached_property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries)

    @cached_property
    def trainable(self) -> int:
        """Length of the prefix that gradients move."""
        return self._length(TRAINABLE)

    @cached_property
    def shared(self) -> int:
        """Length of the prefix that is shared with the server."""
        return self.size - self._length((Kind.HOME,))

    @cached_property
    def digest(self) -> str:
        """A fingerprint of the shared part: two vectors may be averaged only if theirs agree."""
        facts = [(e.name, e.shape, e.kind) for e in self.entries if e.kind is not Kind.HOME]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def _length(self, kinds: tuple[Kind, ...]) -> int:
        return sum(entry.size for entry in self.entries if entry.kind in kinds)

    def tensors(self, vector: Tensor) -> dict[str, Tensor]:
        """`vector` as named tensors (views); entries past its end are left out."""
        return {e.name: e.view(vector) for e in self.entries if e.range.stop <= vector.numel()}

    def select(self, kinds: Iterable[Kind], device: torch.device | str = "cpu") -> Tensor:
        """A boolean mask over the shared part: True where an entry is of one of `kinds`."""
        wanted = set(kinds)
        mask = torch.zeros(self.shared, dtype=torch.bool, device=device)
        for entry in self.entries:
            if entry.kind in wanted and entry.kind is not Kind.HOME:
                mask[entry.range] = True
        return mask


class FlatModel:
    """A module whose parameters and floating buffers are views into `vector`.

    `gradient` covers the trainable prefix, and every parameter's `.grad` is a view into it, so
    `backward()` adds into one array.
    """

    def __init__(self, module: nn.Module, home: Iterable[str] = ()) -> None:
        self.module = module
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        kinds = _kinds(module, tuple(home))
        names = sorted(kinds, key=lambda name: ORDER[kinds[name]])  # stable: module order within
        entries, offset = [], 0
        for name in names:
            entry = Entry(name, tuple(tensors[name].shape), kinds[name], offset)
            entries.append(entry)
            offset += entry.size
        self.layout = Layout(tuple(entries))
        device = next(iter(tensors.values())).device
        self.vector = torch.empty(self.layout.size, device=device)
        self.gradient = torch.zeros(self.layout.trainable, device=device)
        for entry in entries:
            self._adopt(entry, tensors[entry.name])

    def _adopt(self, entry: Entry, tensor: Tensor) -> None:
        view = entry.view(self.vector)
        with torch.no_grad():
            view.copy_(tensor)
        if isinstance(tensor, nn.Parameter):
            tensor.data = view
            if tensor.requires_grad:
                tensor.grad = entry.view(self.gradient)
        else:
            path, _, leaf = entry.name.rpartition(".")
            self.module.get_submodule(path)._buffers[leaf] = view

    @property
    def trainable(self) -> Tensor:
        """The part of the vector that gradients move."""
        return self.vector[: self.layout.trainable]

    @property
    def shared(self) -> Tensor:
        """The part of the vector that travels."""
        return self.vector[: self.layout.shared]

    @property
    def home(self) -> Tensor:
        """The part of the vector that stays with the client."""
        return self.vector[self.layout.shared :]

    def norms(self) -> Tensor:
        """A boolean mask over the shared part: True where norms have their scale, shift and
        statistics, also those of EMA copies."""
        mask = self.layout.select([Kind.NORM, Kind.STATISTIC], self.vector.device)
        norms = _norms(self.module)
        for entry in self.layout.entries:
            if entry.kind is Kind.TARGET and entry.name.rpartition(".")[0] in norms:
                mask[entry.range] = True
        return mask


def _kinds(module: nn.Module, home: tuple[str, ...]) -> dict[str, Kind]:
    """The kind of every tensor of `module`, in module order."""
    norms = _norms(module)
    kinds: dict[str, Kind] = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            kinds[name] = Kind.TARGET
        elif name.rpartition(".")[0] in norms:
            kinds[name] = Kind.NORM
        else:
            kinds[name] = Kind.WEIGHT
    for name, buffer in module.named_buffers():
        if not buffer.is_floating_point():
            raise ConfigError(
                f"the model's buffer {name} is {buffer.dtype}, and a model is a vector of floats: "
                "take BatchNorm of ssfl.models.norm in place of torch's, which counts batches"
            )
        kinds[name] = Kind.STATISTIC
    for prefix in home:
        _check_there(module, prefix)
    for name in kinds:
        if name.startswith(home) and home:
            if kinds[name] in TRAINABLE:
                raise ConfigError(
                    f"{name} is moved by gradients, and home is for what is not, a queue: an "
                    "algorithm's arrive keeps weights with a client (examples/own_algorithm.py)"
                )
            kinds[name] = Kind.HOME
    return kinds


def _check_there(module: nn.Module, prefix: str) -> None:
    """A slip in the name of what stays at home would send it away without a word."""
    parts = module.named_modules()
    buffers = {f"{path}.{name}".lstrip(".") for path, part in parts for name in part._buffers}
    names = {*dict(module.named_parameters()), *buffers}  # buffers that are None are declared too
    if not any(name.startswith(prefix) for name in names):
        raise ConfigError(
            f"{type(module).__name__} has no tensor whose name begins with {prefix!r}, which its "
            "home, a tuple of such beginnings, keeps from travelling"
        )


def _norms(module: nn.Module) -> set[str]:
    """The names of the norms inside `module`."""
    modules = module.named_modules()
    return {name for name, child in modules if isinstance(child, BatchNorm | GroupNorm)}
