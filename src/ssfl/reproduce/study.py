"""A study is data: a result of the paper, and the arms that repeat it.

An arm is a recipe with settings on top, the figures that count (by the names of `ssfl evaluate`),
and what the paper reports for them.
"""

from typing import Literal

from pydantic import Field, model_validator

from ssfl.config import Config, load_config
from ssfl.errors import ConfigError
from ssfl.evaluation.in_words import HEALTH
from ssfl.protocols.options import ProtocolOptions
from ssfl.protocols.scores import title as score_title
from ssfl.section import Section

_PROTOCOLS = {
    "global_classifier": "knn",  # it comes with whatever is asked of Θ
    "global_knn": "knn",
    "personal_knn": "knn",
    "global_federated_linear": "federated-linear",
    "global_federated_linear_local": "federated-linear",
    "global_federated_linear_mirrored": "mirrored-linear",
    "global_linear": "linear",
    "global_linear_mirrored": "mirrored-linear",
    "personal_linear": "linear",
    "personal_linear_mirrored": "mirrored-linear",
    "personal_linear_global": "linear",
    "personal_naive_federated_linear": "naive-federated-linear",
    "personal_naive_federated_linear_global": "naive-federated-linear",
}
_WHO = {"global": "Θ", "personal": "personal"}
_CURVE_POINTS = 10


def protocols(options: ProtocolOptions) -> dict[str, str]:
    """All figures that may count under these options, each with the protocol that measures it."""
    semi = {
        f"{who}_{how}_{100 * share:g}pct": f"semi-{how}"
        for who in _WHO
        for how in ("linear", "finetune")
        for share in options.fractions
        if options.finetune_clients or (who, how) != ("personal", "finetune")
    }
    return {**_PROTOCOLS, **semi, **dict.fromkeys(HEALTH, "health")}


def figure_title(figure: str) -> str:
    """A figure in words, with whose it is."""
    if figure in HEALTH:
        return HEALTH[figure].of_theta
    who = _WHO[figure.split("_")[0]]
    return f"{score_title(figure)} ({who})"


class Arm(Section):
    """One configuration of a study."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$")
    """What its runs are called."""
    label: str
    """What it is called in tables and pictures."""
    recipe: str
    """The recipe it starts from."""
    settings: tuple[str, ...] = ()
    """`section.key=value` on top of the recipe."""
    figures: tuple[str, ...] = ()
    """The figures that count, where they are not those of the whole study."""
    paper: dict[str, float] = Field(default_factory=dict)
    """The paper's values, by figure."""


class Point(Section):
    """A point of a picture: a figure of an arm at a place on the axis."""

    x: float
    arm: str
    figure: str


class Line(Section):
    """A line of a picture."""

    label: str
    points: tuple[Point, ...]


class Axis(Section):
    """A picture of accuracy against a quantity that arms differ in."""

    label: str
    scale: Literal["linear", "log"] = "log"
    lines: tuple[Line, ...]


class Small(Section):
    """What is different in small (small.py), beyond what is so in all studies."""

    arms: tuple[str, ...] = ()
    """The arms that are run; all if not given."""
    settings: tuple[str, ...] = ()
    """`section.key=value` on top of every arm's recipe."""
    rounds: int = Field(20, ge=1)
    note: str = ""
    """What a reader should know of it."""
    tried: str = ""
    """What came of it, in Markdown."""


class Study(Section):
    """A result of the paper and what repeats it."""

    title: str
    repeats: str
    """Where in the paper the result stands."""
    finding: str = ""
    """What the paper says, where it gives no figures."""
    note: str = ""
    """What a reader should know of how it is repeated."""
    tried: str = ""
    """What was tried beside it and what came of it, in Markdown."""
    rounds: int | None = Field(None, ge=1)
    """Rounds of its runs, the paper's where it repeats one; the recipes' where not given."""
    seeds: int = Field(1, ge=1)
    """Seeds that are run unless told otherwise."""
    figures: tuple[str, ...] = ()
    """The figures that count, for arms that name none."""
    settings: tuple[str, ...] = ()
    """`section.key=value` on top of every arm's recipe, before the arm's own."""
    sort: str = ""
    """The figure by which tables are sorted, best first; the order of the arms if not given."""
    baseline: str = ""
    """The arm that all others are compared with, in a column of its own."""
    options: ProtocolOptions = ProtocolOptions()
    """How runs are evaluated."""
    pictures_only: bool = False
    """Nothing is trained: the partitions are drawn."""
    small: Small | None = None
    """Its form for machines without a GPU, where it has one."""
    arms: tuple[Arm, ...] = Field(min_length=1)
    axis: Axis | None = None

    @model_validator(mode="after")
    def _holds_together(self) -> "Study":
        names, known = [arm.name for arm in self.arms], protocols(self.options)
        if len(set(names)) < len(names):
            raise ValueError("two arms have the same name")
        for arm in self.arms:
            figures = self.figures_of(arm)
            if not figures and not self.pictures_only:
                raise ValueError(f"arm {arm.name} has no figures")
            for figure in figures:
                if figure not in known:
                    raise ValueError(
                        f"arm {arm.name}: unknown figure '{figure}' (known: {', '.join(known)})"
                    )
            if foreign := set(arm.paper) - set(figures):
                raise ValueError(f"arm {arm.name} has a paper value of no figure: {foreign.pop()}")
            if self.sort and self.sort not in figures:
                raise ValueError(f"arm {arm.name} has no {self.sort} to be sorted by")
        if self.baseline and self.baseline not in names:
            raise ValueError(f"the baseline is an arm, and there is no '{self.baseline}'")
        for line in self.axis.lines if self.axis else ():
            for point in line.points:
                if point.arm not in names or point.figure not in self.figures_of(
                    self.arm(point.arm)
                ):
                    raise ValueError(f"the picture asks for {point.figure} of {point.arm}")
        return self

    def arm(self, name: str) -> Arm:
        for arm in self.arms:
            if arm.name == name:
                return arm
        known = ", ".join(arm.name for arm in self.arms)
        raise ConfigError(f"there is no arm '{name}' in this study: choose among {known}")

    def akin(self, other: "Study") -> bool:
        """The same study as it is now and was before: its title or some of its arms remain."""
        arms = {arm.name for arm in self.arms}
        return self.title == other.title or any(arm.name in arms for arm in other.arms)

    def figures_of(self, arm: Arm) -> tuple[str, ...]:
        return arm.figures or self.figures

    def protocols_of(self, arm: Arm) -> tuple[str, ...]:
        """What must be measured; kNN and health always, for they cost little."""
        known = protocols(self.options)
        return tuple(sorted({"knn", "health", *(known[name] for name in self.figures_of(arm))}))

    def config(
        self, arm: Arm, *, name: str, seed: int, rounds: int | None, settings: tuple[str, ...] = ()
    ) -> Config:
        """An arm's configuration; with few rounds it is looked at more often, for the curves."""
        usual = [] if self.rounds is None else [f"server.rounds={self.rounds}"]
        given = [*usual, *self.settings, *arm.settings, *settings]
        given += [f"seed={seed}", f'name="{name}"']
        if rounds is not None:
            given.append(f"server.rounds={rounds}")
        config = load_config(arm.recipe, given)
        every = config.evaluation.every
        if every and not any(s.partition("=")[0].strip() == "evaluation.every" for s in given):
            often = evaluation_every(every, config.server.rounds)
            config = load_config(arm.recipe, [*given, f"evaluation.every={often}"])
        return config


def evaluation_every(every: int, rounds: int) -> int:
    """Rounds between evaluations that give a curve of at least some points."""
    return min(every, max(1, rounds // _CURVE_POINTS))
