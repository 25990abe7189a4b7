"""A study is data: a result of the paper, and the arms that repeat it.

An arm is a recipe with settings on top, the figures that count (by the names of `ssfl evaluate`),
and what the paper reports for them. The studies are the TOML files in `ssfl/studies`; a file of
one's own is given by its path.
"""

import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from ssfl.config import Config, load_config
from ssfl.errors import ConfigError
from ssfl.protocols.judge import ProtocolOptions
from ssfl.protocols.scores import TITLES
from ssfl.protocols.scores import title as score_title
from ssfl.section import Section

HEALTH = {
    "effective_rank": "Effective rank of Θ's features",
    "std_ratio": "Spread of Θ's features (1 is ideal)",
    "uniformity": "Uniformity of Θ's features (lower is better)",
    "alignment": "Distance of two views in Θ's features",
    "epsilon_share": "Share that Θ's worst batch norm loses to its ε",
}
"""Label-free figures of Θ that may count beside accuracies."""

_PROTOCOLS = {
    "global_classifier": "knn",  # it comes with whatever is asked of Θ
    "global_knn": "knn",
    "personal_knn": "knn",
    "global_federated_linear": "federated-linear",
    "global_federated_linear_local": "federated-linear",
    "global_linear": "linear",
    "personal_linear": "linear",
    "personal_linear_global": "linear",
    "personal_naive_federated_linear": "naive-federated-linear",
}
_SEMI = re.compile(r"(global|personal)_(linear|finetune)_([\d.]+)pct")
_WHO = {"global": "Θ", "personal": "personal"}
_CURVE_POINTS = 10


def protocol_of(figure: str, options: ProtocolOptions) -> str | None:
    """The protocol that measures a figure under these options; None for an unknown one."""
    if figure in HEALTH:
        return "health"
    if figure in TITLES:
        return _PROTOCOLS.get(figure)
    found = _SEMI.fullmatch(figure)
    if found is None or found[3] not in {f"{100 * share:g}" for share in options.fractions}:
        return None
    if found[1] == "personal" and found[2] == "finetune" and not options.finetune_clients:
        return None
    return f"semi-{found[2]}"


def figure_title(figure: str) -> str:
    """A figure in words, with whose it is."""
    if figure in HEALTH:
        return HEALTH[figure]
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


class Study(Section):
    """A result of the paper and what repeats it."""

    title: str
    repeats: str
    """Where in the paper the result stands."""
    finding: str = ""
    """What the paper says, where it gives no figures."""
    note: str = ""
    """What a reader should know of how it is repeated."""
    rounds: int = Field(800, ge=1)
    """Rounds in the paper."""
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
    arms: tuple[Arm, ...] = Field(min_length=1)
    axis: Axis | None = None

    @model_validator(mode="after")
    def _holds_together(self) -> "Study":
        names = [arm.name for arm in self.arms]
        if len(set(names)) < len(names):
            raise ValueError("two arms have the same name")
        for arm in self.arms:
            figures = self.figures_of(arm)
            if not figures and not self.pictures_only:
                raise ValueError(f"arm {arm.name} has no figures")
            for figure in figures:
                if protocol_of(figure, self.options) is None:
                    raise ValueError(f"arm {arm.name}: unknown figure '{figure}'")
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

    def figures_of(self, arm: Arm) -> tuple[str, ...]:
        return arm.figures or self.figures

    def protocols_of(self, arm: Arm) -> tuple[str, ...]:
        """What must be measured; kNN and health always, for they cost little."""
        wanted = {protocol_of(figure, self.options) for figure in self.figures_of(arm)}
        return tuple(sorted({"knn", "health", *(p for p in wanted if p)}))

    def config(
        self, arm: Arm, *, name: str, seed: int, rounds: int | None, settings: tuple[str, ...] = ()
    ) -> Config:
        """An arm's configuration; with few rounds it is looked at more often, for the curves."""
        given = [*self.settings, *arm.settings, *settings, f"seed={seed}", f'name="{name}"']
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


def studies() -> dict[str, Study]:
    """The studies that come with the package, in the paper's order."""
    folder = resources.files("ssfl") / "studies"
    names = [e.name.removesuffix(".toml") for e in folder.iterdir() if e.name.endswith(".toml")]
    order = [
        *("table1", "table2", "methods", "batch-size", "alpha", "protocol", "table3"),
        *("partition", "backbones", "labels", "search", "rates"),
    ]
    names.sort(key=lambda name: (order.index(name) if name in order else len(order), name))
    return {name: load_study(name)[1] for name in names}


def load_study(source: str | Path) -> tuple[str, Study]:
    """A study of the package by its name, or one's own by the path of its file; and its name."""
    path = Path(source)
    if path.suffix == ".toml":
        if not path.is_file():
            raise ConfigError(f"there is no file {path}")
        name, text = path.stem, path.read_text(encoding="utf-8")
    else:
        folder = resources.files("ssfl") / "studies"
        packaged = folder / f"{source}.toml"
        if not packaged.is_file():
            known = sorted(e.name[:-5] for e in folder.iterdir() if e.name.endswith(".toml"))
            raise ConfigError(
                f"there is no study '{source}' (known: {', '.join(known)}); "
                "a file is given by a path that ends in .toml"
            )
        name, text = str(source), packaged.read_text(encoding="utf-8")
    try:
        raw: dict[str, Any] = tomllib.loads(text)
        return name, Study.model_validate(raw)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"study {name}: {where + ': ' if where else ''}{what}") from None
