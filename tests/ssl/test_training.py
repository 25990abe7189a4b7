"""Each method learns: on scikit-learn's digits its loss falls and its features do not collapse."""

import pytest
import torch
from torch import Tensor

from ssfl.algorithms.learner import Learner
from ssfl.algorithms.options import LocalOptions
from ssfl.seeding import torch_generator
from ssfl.ssl import METHODS
from ssfl.ssl.base import Batch

STEPS, BATCH = 100, 64
SLOW = {"swav": 200}  # codes are vague until projections spread
OWN = {
    "barlow-twins": {"redundancy": 0.05},  # the default is for projections of width 2048
    "swav": {"prototypes": 30, "freeze_share": 0.2},
}


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 8 - 1
    return pixels, torch.from_numpy(labels)


def views(images: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Contrast, noise, and a shift by up to a pixel, each image's own: enough to make views."""
    shifts = [images.roll((down, right), (2, 3)) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    places, n = torch.stack(shifts), len(images)
    seen = []
    for _ in range(count):
        place = torch.randint(9, (n,), generator=generator)
        contrast = 0.6 + 0.8 * torch.rand(n, 1, 1, 1, generator=generator)
        noise = 0.3 * torch.randn(images.shape, generator=generator)
        seen.append(places[place, torch.arange(n)] * contrast + noise)
    return torch.stack(seen)


def effective_rank(features: Tensor) -> float:
    """exp of the entropy of the covariance's spectrum: 1 where all features say one thing."""
    share = torch.linalg.eigvalsh(features.T.cov()).clamp_min(1e-12)
    share = share / share.sum()
    return float(torch.exp(-(share * share.log()).sum()))


def spread(projections: Tensor) -> float:
    """Standard deviation of unit projections times √d: near 1 for a sphere, 0 for a point."""
    unit = torch.nn.functional.normalize(projections, dim=-1)
    return float(unit.std(dim=0).mean()) * unit.shape[1] ** 0.5


@pytest.mark.parametrize("name", sorted(METHODS))
def test_training_lowers_the_loss_without_collapse(make, digits, name: str) -> None:
    images, labels = digits
    steps = SLOW.get(name, STEPS)
    learner = Learner(make(name, width=8, **OWN.get(name, {})), LocalOptions(batch=BATCH))
    learner.rate.fill_(0.03)
    generator = torch_generator(0, "training")
    losses = []
    for step in range(steps):
        learner.stand_at(step / steps)
        chosen = torch.randint(len(images), (BATCH,), generator=generator)
        seen = views(images[chosen], learner.method.views, generator)
        loss = learner.loss(learner(Batch(seen, labels[chosen])))
        learner.descend(loss)
        losses.append(loss.item())
    first = sum(losses[1:6]) / 5  # in the very first step MoCo's queue is empty
    last = sum(losses[-10:]) / 10
    assert last < first - 0.05 * abs(first)
    with torch.no_grad():
        seen = views(images, learner.method.views, generator)
        projections = learner.method.eval()(Batch(seen, labels)).z[0]
        features = learner.method.backbone(images)
    assert spread(projections) > 0.2
    assert effective_rank(features) > 2
