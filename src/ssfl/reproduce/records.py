"""What is kept of a study's runs: each with its figures and all that is needed to make it again."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ssfl.protocols.scores import Score
from ssfl.reproduce.alike import deciding, training
from ssfl.section import Section

Asked = Annotated[tuple[str, ...], AfterValidator(deciding)]
"""What was asked for beyond the study's own settings, as far as it decides what comes out."""


class Figure(Section):
    """One figure of one run."""

    value: float
    n: int = 1
    """Test images or clients behind it."""
    over: Literal["images", "clients", "features"] = "images"
    ci95: float | None = None
    std: float | None = None
    """Over clients."""
    weighted_mean: float | None = None
    """Over clients, by their test images."""
    clients: dict[int, float] = Field(default_factory=dict)
    """Every client's own."""

    @classmethod
    def of(cls, score: Score) -> "Figure":
        return cls.model_validate(score, from_attributes=True)


class Result(Section):
    """One run of one arm: what it was, what came out, and how it was made."""

    arm: str
    seed: int
    rounds: int
    settings: Asked = ()
    synthetic: bool = False
    """On images made in the place of the real ones."""
    data: str = ""
    clients: int = 0
    train_images: int = 0
    figures: dict[str, Figure]
    health: dict[str, float | None] = Field(default_factory=dict)
    """Label-free figures of Θ."""
    curve: dict[str, list[float | None]] = Field(default_factory=dict)
    """Loss and indicators against the rounds done."""
    seconds: float = 0.0
    """In training."""
    evaluation_seconds: float = 0.0
    """Between rounds and at the end."""
    command: str = ""
    commit: str | None = None
    version: str = ""
    device: str = ""
    torch: str = ""
    finished: str = ""
    run: str = ""
    """Its run directory, as seen from where results.json is."""
    theta_of: str = ""
    """The algorithm that this run trained with, where another's encoders were made of its Θ."""
    config: dict[str, Any] = Field(default_factory=dict)
    """As it was trained."""
    options: dict[str, Any] | None = None
    """As it was judged, where that was noted."""

    @property
    def key(self) -> tuple[str, int, int, tuple[str, ...], bool, str]:
        """Two results with the same key are the same run of the same experiment."""
        return self.arm, self.seed, self.rounds, self.settings, self.synthetic, self.trained_as

    @property
    def trained_as(self) -> str:
        """The same for all runs of one experiment, whatever their seeds."""
        return json.dumps(training(self.config)) if self.config else ""


class Unfinished(Section):
    """A run that was asked for and is not there."""

    arm: str
    seed: int
    rounds: int | None = None
    """None where that was not noted."""
    settings: Asked = ()
    why: str

    @property
    def which(self) -> str:
        """In words, but for the arm."""
        rounds = [] if self.rounds is None else [f"{self.rounds} rounds"]
        return ", ".join([f"seed {self.seed}", *rounds, *(f"`{s}`" for s in self.settings)])

    def is_of(self, other: "Result | Unfinished") -> bool:
        """The same run; one whose rounds were not noted may be of any."""
        if (self.arm, self.seed) != (other.arm, other.seed):
            return False
        return self.rounds is None or (self.rounds, self.settings) == (other.rounds, other.settings)


class Partition(Section):
    """Who holds what, where a study only shows that."""

    data: str
    synthetic: bool = False
    sizes: list[int]
    classes: list[str] = Field(default_factory=list)
    counts: list[list[int]] = Field(default_factory=list)
    """Images of each class, client by client."""
    command: str = ""
    commit: str | None = None
    version: str = ""
