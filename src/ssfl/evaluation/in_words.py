"""The figures of health in words, once for all who show them: pages, terminals, studies."""

from typing import NamedTuple


class HealthFigure(NamedTuple):
    """A label-free figure in words."""

    title: str
    column: str
    """Its title where there is little room."""
    digits: int
    """Behind the point, in a terminal."""
    below_curve: str
    in_table: str
    of_theta: str
    """Its title in a study, where it is Θ's and stands among accuracies."""


HEALTH = {
    "effective_rank": HealthFigure(
        "Effective rank",
        "rank",
        1,
        "Dimensions the features use; higher is richer.",
        "dimensions in use",
        "Effective rank of Θ's features",
    ),
    "std_ratio": HealthFigure(
        "Feature spread",
        "spread",
        3,
        "1: directions fill the sphere; 0: collapse.",
        "1 is even, 0 is collapse",
        "Spread of Θ's features (1 is ideal)",
    ),
    "uniformity": HealthFigure(
        "Uniformity",
        "uniformity",
        3,
        "Lower is more even; 0 when all features are one.",
        "lower is more even",
        "Uniformity of Θ's features (lower is better)",
    ),
    "alignment": HealthFigure(
        "Alignment",
        "alignment",
        3,
        "Distance of an image's two views; lower is closer.",
        "how far an image's two views are apart",
        "Distance of two views in Θ's features",
    ),
    "epsilon_share": HealthFigure(
        "Lost to ε",
        "lost to ε",
        4,
        "What the worst batch norm loses to its ε; 0 is nothing.",
        "what the worst batch norm fails to normalise, 0 to 1",
        "Share that Θ's worst batch norm loses to its ε",
    ),
}
"""Those that are shown, by their names in the record and in `evaluation.json`."""
