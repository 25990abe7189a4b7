"""What the server knows of its clients' work before they reply: none of it is theirs to choose.

|D_k| was announced before the round, and with the recipe it says how many steps a client makes. So
an update weighs what it should, and a reply that claims another number is refused.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ssfl.algorithms.learner import effective_steps
from ssfl.algorithms.options import LocalOptions
from ssfl.federation.messages import Reply


@dataclass(frozen=True)
class Known:
    """The clients of a round by their `sizes`, and how they train."""

    sizes: Mapping[int, int]
    local: LocalOptions
    normalised: bool = False
    """Means are taken of what a client does per step (FedNova)."""
    summed: bool = False
    """Sites may reply for several clients at once (`server.updates`)."""

    def objection(self, reply: Reply) -> str | None:
        """What a reply says of its work that cannot be so, in words."""
        if reply.joint is not None and not self.summed:
            return "it is a sum of updates, but single ones were agreed on (server.updates)"
        strangers = [client for client in reply.clients if client not in self.sizes]
        if strangers:
            return f"client {strangers[0]} was not announced"
        samples = sum(self.sizes[client] for client in reply.clients)
        if reply.samples != samples:
            return f"it claims {reply.samples} samples, but {samples} were announced"
        steps = sum(self._steps(client) for client in reply.clients)
        if reply.steps != steps:
            return f"it claims {reply.steps} steps, but {samples} samples make {steps}"
        if reply.joint is not None:
            claimed, expected = reply.joint.effective_steps, self._effective_steps(reply)
            if not math.isclose(claimed, expected, rel_tol=1e-6):
                return f"it claims {claimed:g} effective steps, but they are {expected:g}"
        return None

    def fewest_counted(self, reply: Reply) -> float:
        """‖a_k‖₁, of its clients with the fewest steps (at least one)."""
        return min(self._counted(client) for client in reply.clients)

    def _steps(self, client: int) -> int:
        return self.local.steps_of_a_round(self.sizes[client])

    def _counted(self, client: int) -> float:
        return effective_steps(max(self._steps(client), 1), self.local.momentum)

    def _effective_steps(self, reply: Reply) -> float:
        """FedNova's τ_eff over a reply's clients; 1 for other means."""
        if not self.normalised:
            return 1.0
        weighed = sum(self.sizes[client] * self._counted(client) for client in reply.clients)
        return weighed / reply.samples
