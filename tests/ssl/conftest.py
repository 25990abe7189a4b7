"""Tiny methods on tiny images, for every test of the SSL room."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ssfl.models.backbones import Backbone, BackboneOptions, build_backbone
from ssfl.seeding import derive, torch_generator
from ssfl.ssl import METHODS
from ssfl.ssl.base import Batch, Method

SMALL: dict[str, dict[str, Any]] = {
    "simsiam": {"projector_width": 32, "predictor_width": 16},
    "simclr": {"projector_width": 32, "projection_width": 16},
    "byol": {"projector_width": 32, "projection_width": 16, "predictor_width": 32},
    "swav": {"projector_width": 32, "projection_width": 16, "prototypes": 10},
    "moco": {"projector_width": 32, "projection_width": 16, "queue": 64},
    "barlow-twins": {"projector_width": 32},
    "vicreg": {"projector_width": 32},
    "supervised": {"classes": 10},
}

Make = Callable[..., Method]


@pytest.fixture
def make() -> Make:
    """make("byol", momentum=0.9): that method with narrow heads on a four-channel backbone."""

    def build(
        name: str,
        *,
        backbone: Backbone | None = None,
        width: int = 4,
        seed: int = 0,
        **options: Any,
    ) -> Method:
        torch.manual_seed(derive(seed, "model"))
        if backbone is None:
            small = BackboneOptions(backbone="small", width=width)
            backbone = build_backbone(small, channels=1, image_size=8)
        method = METHODS[name]
        built: Method = method(backbone, method.Options(**(SMALL[name] | options)))
        return built

    return build


@pytest.fixture
def batch() -> Callable[..., Batch]:
    """batch(n, views=2): random images of 8×8 pixels, and labels."""

    def draw(n: int = 12, *, views: int = 2, seed: int = 0) -> Batch:
        generator = torch_generator(seed, "batch")
        images = torch.randn(views, n, 1, 8, 8, generator=generator)
        return Batch(images, torch.randint(10, (n,), generator=generator))

    return draw
