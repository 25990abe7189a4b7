"""Knobs of local training: what a client does with its images in one round."""

import math
from typing import Literal

from pydantic import Field, model_validator

from ssfl.section import Section


class LocalOptions(Section):
    """Local training: what a client does with its images in one round."""

    epochs: int = Field(1, ge=1)
    """Passes over the client's images in a round."""
    steps: int = Field(0, ge=0)
    """Steps in a round, as many for every client however many images it holds, in the place of
    passes: the *s* of the paper's listings (0: passes)."""
    batch: int = Field(256, ge=2)
    """Images in a step."""
    micro_batch: int = Field(0, ge=0)
    """Split each step into micro-batches of about this many images (0: don't); batch norm then
    sees only these."""
    lr: float = Field(0.1, gt=0)
    """Learning rate of round 0; with a warm-up, of the first round after it."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """How the rate moves over rounds; it is constant inside a round."""
    warmup: float = Field(0.0, ge=0, lt=1)
    """Share of the rounds, the first ones, over which the rate rises to `lr` in equal steps (0:
    none, as in the paper)."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """SGD momentum."""
    weight_decay: float = Field(5e-4, ge=0)
    """SGD weight decay."""
    decay_norms: bool = True
    """Weight decay pulls on norms' scales and shifts and on biases too, as in the paper."""
    max_gradient: float = Field(0.0, ge=0)
    """Longest gradient of the loss that a step follows; longer ones are shortened to it, in inner
    steps too (0: no limit)."""
    keep_momentum: bool = False
    """Keep each client's momentum from round to round instead of starting from zero."""
    predictor_rate: Literal["scheduled", "constant"] = "scheduled"
    """'constant' leaves the predictor's rate at `lr` while the rest follows the schedule."""
    correction: Literal["none", "fedprox", "scaffold"] = "none"
    """What holds a client's Θ_k near the others': nothing, FedProx, or SCAFFOLD."""
    proximal: float = Field(0.01, ge=0)
    """FedProx: weight μ of μ/2 ‖Θ_k − Θ‖²."""
    batch_norm: Literal["shared", "fedbn"] = "shared"
    """'fedbn' keeps norms' scale, shift and statistics with the client."""
    freeze_statistics: float = Field(1.0, gt=0, le=1)
    """Share of the rounds after which the backbone's batch norms normalise by the statistics that Θ
    has by then, no longer by each batch's own (1: never)."""

    @model_validator(mode="after")
    def _a_round_has_one_length(self) -> "LocalOptions":
        if self.steps and self.epochs != 1:
            raise ValueError(
                f"a round of {self.steps} steps has no number of passes: set local.epochs = 1, or "
                "local.steps = 0"
            )
        return self

    @model_validator(mode="after")
    def _a_pull_is_fedproxs(self) -> "LocalOptions":
        default = type(self).model_fields["proximal"].default
        if self.correction != "fedprox" and self.proximal != default:
            raise ValueError(
                f"correction {self.correction!r} has no proximal: set local.correction = "
                "'fedprox', or leave local.proximal out"
            )
        return self

    def rate(self, round_: int, rounds: int) -> float:
        """The learning rate of one round of so many, the same for all of its steps."""
        rising = math.floor(self.warmup * rounds + 1e-9)
        if round_ < rising:
            return self.lr * (round_ + 1) / (rising + 1)
        if self.schedule == "constant":
            return self.lr
        return self.lr * 0.5 * (1 + math.cos(math.pi * (round_ - rising) / (rounds - rising)))

    def frozen(self, progress: float) -> bool:
        """Whether the backbone's statistics are, with so much of the experiment behind it."""
        # 1 is never, and a finished run is at 1
        return self.freeze_statistics < 1 and progress >= self.freeze_statistics

    def steps_of_a_round(self, images: int) -> int:
        """Steps that a client of so many images makes in a round."""
        of_an_epoch = self.steps_of_an_epoch(images)
        return self.steps if self.steps and of_an_epoch else self.epochs * of_an_epoch

    def steps_of_an_epoch(self, images: int) -> int:
        """Full batches, or one of all images where there are fewer; batch norm needs two."""
        size = min(self.batch, images)
        return images // size if size > 1 else 0

    def images_of_a_round(self, images: int, clients: int) -> float:
        """Images that clients pass through their models in a round, who hold so many in all."""
        if not self.steps:
            return float(self.epochs * images)
        return self.steps * min(float(self.batch * clients), float(images))
