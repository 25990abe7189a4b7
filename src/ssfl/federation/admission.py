"""Which updates the server lets in: finite, of the right layout, round and weight, of a sane size.

One broken or hostile client must not spoil Θ; what is refused is counted and logged with its
client's id, and the round goes on. Where a site sends the mean of its clients' updates, the site
lets each of them in, and the server their mean.

An honest client asks the same of its own work before anything is sent or kept (`too_long`). What
would be refused, it does not keep either: momentum, a queue or a personal model that an accident
has spoilt would spoil all of its later rounds.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from ssfl.federation.known import Known
from ssfl.federation.messages import Failure, Reason, Reply, Task, failed, when

RUNAWAY = "if all are so, lower local.lr or server.lr"
FLOOR = 0.1
"""An update this much shorter than Θ is never absurd, however short those before it were: a first
step may have no gradient (MoCo's queue is empty then) and be weight decay alone."""


def too_long(norm: float, limit: float) -> str | None:
    """What is wrong with an update of this length, in words."""
    if not norm < math.inf:  # NaN fails this too
        return f"its update is not finite ({RUNAWAY})"
    if norm > limit:
        return f"its update's norm is {norm:.3g}, over the limit of {limit:.3g} ({RUNAWAY})"
    return None


def longest(limit: float, steps: float, theta_norm: float) -> float:
    """How long an update of so many steps may be, given the limit for each √step."""
    return max(limit * math.sqrt(max(1.0, steps)), FLOOR * theta_norm)


class Admission:
    """Checks replies to training tasks; remembers how large honest updates have been.

    The yardstick is the median, over the updates let in during the last round, of norm/√steps: a
    client of a hundred steps goes further than one of a single step, about as a random walk does.
    Before there is one, an update is measured by the norm of Θ itself. It is part of a checkpoint.
    SCAFFOLD's Δc_k = −Δ_k/(a_k β) − c has the same one, since an update says how long it can be.
    """

    def __init__(self, max_ratio: float) -> None:
        self.max_ratio = max_ratio
        self.yardstick = 0.0
        self._known: Known | None = None
        self._norms: list[float] = []
        self._theta_norm: float | None = None

    @property
    def limit(self) -> float:
        """The longest update for each √step, once there is a yardstick."""
        return self.max_ratio * self.yardstick

    def admit(self, reply: Reply, task: Task) -> Reply:
        """The reply itself, or the same client's refusal with the reason in words."""
        if reply.failure is not None:
            return reply
        objection = self._objection(reply, task)
        if objection is None:
            return reply
        failure = Failure(Reason.REFUSED, objection)
        if reply.kind is task.kind and reply.round < task.round:  # late, and refused as such
            return replace(reply, delta=None, control=None, failure=failure)
        return replace(
            failed(reply.client, task, failure.reason, failure.detail), joint=reply.joint
        )

    def open_round(self, known: Known | None = None) -> None:
        """Forget what was admitted to a round that was broken off. A site, which counts its own
        clients' work, needs no second word on it; a server holds replies against what is `known`.
        """
        self._known, self._norms, self._theta_norm = known, [], None

    def close_round(self) -> None:
        """Take this round's median as the next yardstick."""
        if self._norms:
            self.yardstick = float(torch.tensor(self._norms).median())

    def _objection(self, reply: Reply, task: Task) -> str | None:
        if reply.kind is not task.kind or reply.round > task.round:
            return f"a {reply.kind} reply of {when(reply.kind, reply.round)} to a {task.kind} task"
        if reply.samples <= 0:
            return f"it claims {reply.samples} samples"
        if self._known is not None and (objection := self._known.objection(reply)):
            return objection
        if objection := self._objection_to_control(reply, task):
            return objection
        if reply.delta is None:
            return None
        if reply.layout != task.layout or reply.delta.shape != task.theta.shape:
            return "its update has another layout than the model"
        norm = float(torch.linalg.vector_norm(reply.delta))
        norm *= reply.joint.effective_steps if reply.joint else 1  # FedNova's mean is per step
        if words := too_long(norm, self._limit(reply, task.theta)):
            return words
        self._norms.append(norm / math.sqrt(_steps(reply)))
        return None

    def _objection_to_control(self, reply: Reply, task: Task) -> str | None:
        """A client sends the change of its control variate where it was sent the server's."""
        change, control = reply.control, task.control
        if change is None and control is None:
            return None
        if change is None or control is None or change.shape != control.shape:
            return "its control variate does not fit the server's"
        norm = float(torch.linalg.vector_norm(change))
        if not norm < float("inf"):
            return "its control variate is not finite"
        if self._known is None:
            return None
        longest_step = self._limit(reply, task.theta) / self._known.fewest_counted(reply)
        limit = longest_step / task.rate + float(torch.linalg.vector_norm(control))
        if norm > limit:
            return f"its control variate moved by {norm:.3g}, over the limit of {limit:.3g}"
        return None

    def _limit(self, reply: Reply, theta: Tensor) -> float:
        """How long an update may be; the norm of Θ is taken once a round."""
        if self._theta_norm is None:
            self._theta_norm = float(torch.linalg.vector_norm(theta))
        if not self.yardstick:
            return self.max_ratio * self._theta_norm
        return longest(self.limit, _steps(reply), self._theta_norm)


def _steps(reply: Reply) -> float:
    """Those of the reply's client, or of its clients on average."""
    return max(1.0, reply.steps / len(reply.clients))
