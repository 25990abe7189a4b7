"""What a client keeps between rounds, beside its images: its personal model and its memory."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class ClientState:
    """Flat tensors that belong to one client; those an experiment has no use for are None."""

    personal: Tensor | None = None
    """θ_k: the whole vector of the personal model."""
    personal_momentum: Tensor | None = None
    """θ_k's SGD momentum, where momentum is kept between rounds."""
    momentum: Tensor | None = None
    """Θ_k's SGD momentum, likewise."""
    home: Tensor | None = None
    """The part of Θ_k that is not shared (queues)."""
    norms: Tensor | None = None
    """FedBN: the client's own batch-norm entries of Θ_k."""
    mine: Tensor | None = None
    """Θ_k as it was when the last round ended (FedU, FedEMA)."""
    control: Tensor | None = None
    """SCAFFOLD's control variate c_k, as the last round left it."""
    control_before: Tensor | None = None
    """c_k as that round found it: still the true one if the server did not fold that round."""
    control_round: Tensor | None = None
    """Which round that was."""
    memory: Tensor | None = None
    """A few numbers an algorithm remembers (FedEMA's λ_k)."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by field name."""
        named = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: tensor for name, tensor in named if tensor is not None}

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def to(self, device: torch.device | str) -> "ClientState":
        """The same state on `device`."""
        moved = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)
