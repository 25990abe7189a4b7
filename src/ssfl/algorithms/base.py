"""How Θ and θ_k move: the paper's ClientSSLOpt.

An algorithm says which models are resident, what one local step does with a batch, and which
encoder a client is judged by. It holds no device, loop, logging or message code; it reads like
the paper's listing.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from torch import Tensor

from ssfl.algorithms.learner import Learner
from ssfl.errors import ConfigError
from ssfl.section import Section
from ssfl.ssl.base import Batch


class AlgorithmOptions(Section):
    """Options of an algorithm; `name` names it."""

    name: str

    def within(self, rounds: int) -> Self:
        """What they come to in an experiment of so many rounds."""
        return self


@dataclass(frozen=True)
class Models:
    """What is resident while a client trains.

    `global_` is Θ_k, the client's copy of the global model; `personal` is θ_k where the algorithm
    has one; `received` is Θ^(t) as the server sent it (trainable part; with FedBN, norms are the
    client's own), which does not move, for algorithms that declare themselves `anchored` (empty
    for others).
    """

    global_: Learner
    personal: Learner | None
    received: Tensor

    @property
    def own(self) -> Learner:
        """θ_k, for algorithms that declare it."""
        assert self.personal is not None, "models.own is there with `personal = True` alone"
        return self.personal

    @property
    def learners(self) -> tuple[Learner, ...]:
        """Θ_k, and θ_k where there is one."""
        return (self.global_,) if self.personal is None else (self.global_, self.personal)


class Algorithm(ABC):
    """Base of algorithms."""

    Options: ClassVar[type[AlgorithmOptions]]
    personal: ClassVar[bool] = False
    """θ_k is resident beside Θ and kept by the client between rounds."""
    sends: ClassVar[bool] = True
    """The client sends Δ = Θ_k − Θ; otherwise nothing leaves it."""
    remembers: ClassVar[bool] = False
    """The client keeps its own Θ_k between rounds and `arrive` sees it."""
    anchored: ClassVar[bool] = False
    """A step reads `Models.received`."""
    batches: ClassVar[int] = 1
    """Independent mini-batches that one step takes."""
    whole_batches: ClassVar[bool] = False
    """A step needs each of its batches in one piece: `local.micro_batch` is refused."""
    plain_theta: ClassVar[bool] = False
    """Θ moves as in Global-SSFL, bit for bit on a CPU: who has a run of one such algorithm has the
    Θ of all. Not inherited: a subclass may move it otherwise."""
    encoder: ClassVar[Literal["global", "personal", "adapted"]] = "global"
    """What a client is judged by: Θ, θ_k, or Θ after `adapt` on its own data."""
    metrics: ClassVar[tuple[str, ...]] = ("loss",)
    """Names of the numbers that `step` returns."""
    differentiates_twice: bool = False
    """A step takes gradients of gradients, which compiled kernels cannot."""
    adapt_steps: int = 1
    """Calls of `adapt`, each with a batch of its own, that make an adapted encoder."""

    def __init_subclass__(cls) -> None:
        """Declarations that contradict each other would be trained with, and judged wrongly."""
        super().__init_subclass__()
        cls.plain_theta = cls.__dict__.get("plain_theta", False)
        if cls.encoder not in ("global", "personal", "adapted"):
            raise ConfigError(
                f"{cls.__name__}: encoder is 'global', 'personal' or 'adapted', not {cls.encoder!r}"
            )
        if cls.encoder == "personal" and not cls.personal:
            raise ConfigError(
                f"{cls.__name__}: encoder = 'personal' needs personal = True, for a θ_k to judge"
            )
        if not isinstance(cls.metrics, tuple):
            raise ConfigError(
                f"{cls.__name__}: metrics is a tuple of names, e.g. ('loss',), not {cls.metrics!r}"
            )

    def __init__(self, options: AlgorithmOptions) -> None:
        self.options = options

    def arrive(
        self, models: Models, theta: Tensor, mine: Tensor | None, memory: Tensor | None
    ) -> Tensor | None:
        """Θ arrives at the client: put it (shared part) into the resident global model.

        `mine` is the Θ_k this client ended its last round with, where `remembers` is set, and
        `memory` what the last call returned for this client: both None at its first round.
        Returns the few numbers to remember until the next.
        """
        models.global_.flat.shared.copy_(theta)
        return None

    def at(self, progress: float) -> "Algorithm":
        """Whose steps are made with so much of the experiment (0 to 1) behind them."""
        return self

    @abstractmethod
    def step(self, models: Models, *batches: Batch) -> tuple[Tensor, ...]:
        """One local iteration; returns the detached numbers named in `metrics`."""

    def adapt_rate(self, base: float) -> float:
        """The learning rate of `adapt`, given `local.lr` (a schedule may end at 0)."""
        return base

    def adapt(self, models: Models, batch: Batch) -> None:
        """One step on local data that turns Θ into the client's own encoder at inference."""
        model = models.global_
        model.descend(model.loss(model(batch)))
