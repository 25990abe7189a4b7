"""Label-free figures of one encoder on one holder's images: what a site without labels goes by.

Spread, effective rank and uniformity are of its features; alignment is how close it brings two
views of the same few images, and the share of ε what its batch norms lose. The views are drawn
alike every time, so rounds can be compared.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ssfl.data.images import Images
from ssfl.evaluation.features import extract
from ssfl.evaluation.health import Health, alignment, health
from ssfl.evaluation.spread import thin
from ssfl.federation.trainer import Trainer
from ssfl.models.norm import epsilon_share
from ssfl.seeding import torch_generator

ALIGNED = 128
"""Images, at most, whose two views are compared."""


def wellbeing(
    trainer: Trainer, encoder: nn.Module, features: Tensor, images: Images, rows: Tensor | None
) -> Health:
    """All figures of an encoder whose `features` of `images` (or of some rows) are known."""
    found = health(features)
    if math.isnan(found.std):  # nothing to compare in features that are not finite
        return found
    pixels = trainer.engine.resident(images).pixels
    rows = torch.arange(len(images)) if rows is None else rows
    return replace(found, **beyond_features(trainer, encoder, pixels, rows)._asdict())


class BeyondFeatures(NamedTuple):
    """Fields of `Health` that features alone don't tell."""

    alignment: float
    epsilon_share: float


def beyond_features(
    trainer: Trainer, encoder: nn.Module, pixels: Tensor, rows: Tensor
) -> BeyondFeatures:
    """What there is to say of an encoder besides its features of some rows of `pixels`."""
    few = pixels[thin(rows, ALIGNED).to(pixels.device)]
    return BeyondFeatures(_two_views(trainer, encoder, few), epsilon_share(encoder))


def _two_views(trainer: Trainer, encoder: nn.Module, pixels: Tensor) -> float:
    """How close an encoder brings two views of the same images: 0 for one and the same."""
    engine, views = trainer.engine, trainer.views
    pixels = pixels.to(engine.device)
    dice = torch_generator(trainer.seed, "health-views", device=engine.device)
    uniforms = torch.rand(2, len(pixels), views.draws, generator=dice, device=engine.device)
    both = extract(
        encoder,
        torch.cat([*views(pixels, uniforms)]),
        lambda ready: ready,
        device=engine.device,
        autocast=engine.autocast,
    )
    first, second = both.chunk(2)
    return alignment(first, second)


def on_record(found: Health) -> dict[str, float]:
    """What of it goes on record."""
    row = {
        "std_ratio": found.std_ratio,
        "effective_rank": found.effective_rank,
        "uniformity": found.uniformity,
    }
    more = {"alignment": found.alignment, "epsilon_share": found.epsilon_share}
    return row | {name: value for name, value in more.items() if value is not None}
