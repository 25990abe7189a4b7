"""What an evaluation found: named figures with their per-client values, kept as JSON in the run.

A name says which encoder was judged (`global_`: Θ; `personal_`: the one each client is judged by)
and how. The report, `compare` and a recipe's table of the paper's figures all use these names.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ssfl.errors import CheckpointError
from ssfl.evaluation.summary import summarise
from ssfl.files import read_json, write_text

GROUPS = {
    "images": "The shared encoder, on all test images",
    "clients": "Mean over clients: each one's encoder, on its own test images",
}
"""Headings for figures by what they are averaged over."""

TITLES = {
    "global_classifier": "Its own classifier",
    "global_knn": "kNN",
    "global_federated_linear": "Linear, classifier trained by FedAvg",
    "global_federated_linear_mirrored": "Linear, by FedAvg, mirror images too",
    "global_linear": "Linear",
    "global_linear_mirrored": "Linear, mirror images too",
    "global_federated_linear_local": "Linear on Θ, classifier trained by FedAvg",
    "personal_knn": "kNN among the client's own images",
    "personal_linear": "Linear",
    "personal_linear_mirrored": "Linear, mirror images too",
    "personal_linear_global": "Linear, but on all test images",
    "personal_naive_federated_linear": "One FedAvg classifier for all encoders (misleads)",
    "personal_naive_federated_linear_global": "One FedAvg classifier for all, on all test images",
}
"""What each figure is, in words. Semi-supervised names end in the share of labels, `_1pct`."""


def title(name: str) -> str:
    """A figure's name in words."""
    if name in TITLES:
        return TITLES[name]
    stem, _, share = name.rpartition("_")
    how = "Fine-tuning" if "finetune" in stem else "Linear"
    return f"{how} with {share.removesuffix('pct')} % of the labels"


@dataclass(frozen=True)
class Score:
    """One accuracy: a share of test images, or the plain mean over clients of such shares."""

    name: str
    value: float
    """The figure to quote. Over clients: the plain mean, as in the paper."""
    over: Literal["images", "clients"]
    """What was averaged, and what `n`, `std` and `ci95` are about."""
    n: int
    ci95: float | None
    """Half-width of the 95 % interval: binomial over images, Student's t over clients."""
    weighted_mean: float | None = None
    """Over clients: weighted by their test images."""
    std: float | None = None
    clients: dict[int, float] = field(default_factory=dict)
    """Every client's own figure."""

    @property
    def title(self) -> str:
        return title(self.name)

    @property
    def reads(self) -> set[str]:
        """The options it depends on. (A share of the labels is part of its name.)"""
        classifier = {section for section in ("linear", "finetune") if section in self.name}
        return classifier | ({"clients"} if self.over == "clients" else set())


def over_images(name: str, accuracy: float, images: int) -> Score:
    """A figure on one test set."""
    half = 1.96 * math.sqrt(accuracy * (1 - accuracy) / images)
    return Score(name, accuracy, "images", images, half)


def over_clients(name: str, values: dict[int, float], images: Sequence[int]) -> Score:
    """A figure of every client, with the number of test images behind each."""
    s = summarise(list(values.values()), images)
    return Score(name, s.mean, "clients", s.n, s.ci95, s.weighted_mean, s.std, values)


@dataclass(frozen=True)
class Evaluation:
    """All figures of a run's last checkpoint."""

    rounds: int
    scores: list[Score]
    health: dict[str, dict[str, float | None]]
    """Label-free figures by encoder: "global", or a client's number."""
    notes: list[str] = field(default_factory=list)
    """What could not be measured, and why; what was measured before and is gone."""
    seconds: dict[str, float] = field(default_factory=dict)
    """What each part took when it was last done, and in "total" all of them and the rest."""
    options: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Score:
        """A figure by its name."""
        for score in self.scores:
            if score.name == name:
                return score
        known = ", ".join(score.name for score in self.scores) or "none"
        raise KeyError(f"{name} was not measured; there are: {known}")

    def updated(self, newer: "Evaluation") -> "Evaluation":
        """These figures with a later evaluation's in their place. What was measured of another
        checkpoint, or with other options than are read now, goes, and a note says so."""
        again = {score.name for score in newer.scores}
        others = [score for score in self.scores if score.name not in again]
        if self.rounds != newer.rounds:
            return newer._noting(others, f"at round {self.rounds}")
        read = {option for score in newer.scores for option in score.reads}
        changed = {name for name in read if self.options.get(name) != newer.options.get(name)}
        gone = [score for score in others if score.reads & changed]
        # What is measured again stays in its place.
        scores = {s.name: s for s in [*self.scores, *newer.scores] if s not in gone}
        kept = sum(s for what, s in self.seconds.items() if what not in {*newer.seconds, "total"})
        total = newer.seconds.get("total", 0.0) + kept
        both = replace(
            newer,
            scores=sorted(scores.values(), key=lambda score: score.over != "images"),
            health=self.health | newer.health,
            seconds=self.seconds | newer.seconds | {"total": total},
            options=self.options | {name: newer.options[name] for name in read},
        )
        return both._noting(gone, f"with another setting of {', '.join(sorted(changed))}")

    def _noting(self, dropped: Sequence[Score], how: str) -> "Evaluation":
        """With a note about figures that were measured before, and how."""
        if not dropped:
            return self
        names = ", ".join(score.name for score in dropped)
        return replace(self, notes=[*self.notes, f"dropped what was measured {how}: {names}"])

    def save(self, path: Path) -> None:
        """Write everything as JSON."""
        write_text(path, json.dumps({"version": 1, **asdict(self)}, indent=2, allow_nan=False))


def load_evaluation(path: Path) -> Evaluation | None:
    """What `save` wrote, or None where there is nothing yet."""
    if not path.exists():
        return None
    raw = read_json(path, "delete it, and run `ssfl evaluate` again")
    if raw.pop("version", None) != 1:
        raise CheckpointError(f"{path} is of another version: run `ssfl evaluate` again")
    scores = [
        Score(**{**score, "clients": {int(k): v for k, v in score["clients"].items()}})
        for score in raw.pop("scores")
    ]
    return Evaluation(scores=scores, **raw)
