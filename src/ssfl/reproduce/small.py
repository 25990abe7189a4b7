"""A study in small, for machines without a GPU: its arms with a network of five convolutions,
narrow heads and few rounds, on all of the real images. Two cores take minutes, not days.

What it finds is about small networks and short runs. So the paper's figures are left out: ours are
not to be compared with them.
"""

from collections.abc import Mapping

from ssfl.errors import ConfigError
from ssfl.reproduce.study import Arm, Study

SETTINGS = (
    *("model.backbone=small", "model.width=16"),
    *("local.batch=64", "local.decay_norms=false"),
    "evaluation.every=5",  # on a CPU, looking at a run costs as much as a round of it
)
"""On top of every arm's recipe; what an arm changes itself, it changes here too."""
HEADS: Mapping[str, tuple[str, ...]] = {
    "simsiam": ("ssl.projector_width=256", "ssl.predictor_width=64"),
    "simclr": ("ssl.projector_width=256", "ssl.projection_width=64"),
    "byol": ("ssl.projector_width=256", "ssl.projection_width=64", "ssl.predictor_width=256"),
    "swav": ("ssl.projector_width=256", "ssl.projection_width=64"),
    "moco": ("ssl.projector_width=256", "ssl.projection_width=64"),
    "barlow-twins": ("ssl.projector_width=256",),
    "vicreg": ("ssl.projector_width=256",),
}
"""Heads of every method that suit features 64 wide; as wide as the paper's, they would take longer
than the network."""
SEEDS = 3


def in_small(name: str, study: Study) -> Study:
    """The study as `--small` runs it."""
    small = study.small
    if small is None:
        raise ConfigError(f"{name} has no small form: its file has no table [small]")
    arms = [study.arm(arm) for arm in small.arms] if small.arms else study.arms
    tables = study.model_dump(mode="json") | {
        "title": f"{study.title}, in small",
        "repeats": f"{study.repeats}, in small",
        "note": f"{_described(small.rounds)}\n\n{small.note}".strip(),
        "tried": small.tried,
        "rounds": small.rounds,
        "seeds": SEEDS,
        "settings": (*SETTINGS, *study.settings, *small.settings),
        "arms": [_shrunk(study, arm) for arm in arms],
        "small": None,
    }
    return Study.model_validate(tables)


def _shrunk(study: Study, arm: Arm) -> Arm:
    method = study.config(arm, name="x", seed=0, rounds=None).ssl.method
    settings = (*HEADS.get(method, ()), *arm.settings)
    return arm.model_copy(update={"settings": settings, "paper": {}})


def _described(rounds: int) -> str:
    return (
        "**In small**: all of the images, but a network of five convolutions (`small`, 16 wide) "
        f"with narrow heads, {rounds} rounds, and steps of 64 images where an arm does not say "
        "otherwise. Made for two cores of a CPU. What holds here need not hold for a ResNet-18 "
        "over 800 rounds, and no figure is to be compared with the paper's."
    )
