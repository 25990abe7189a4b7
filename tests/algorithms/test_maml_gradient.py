"""MAML-SSFL's gradient, second order and first, against finite differences in float64."""

import copy
from collections.abc import Iterator

import pytest
import torch
from paper_listings import LOCAL, RATE, build_models, plain_copy, some_views
from torch import Tensor
from torch.nn.functional import cosine_similarity
from torch.nn.utils import vector_to_parameters

from ssfl.algorithms.maml_ssfl import MAMLSSFL, MAMLSSFLOptions
from ssfl.ssl.base import Batch, Outputs

PLAIN_SGD = LOCAL.model_copy(update={"momentum": 0.0, "weight_decay": 0.0})


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def flat(module: torch.nn.Module) -> Tensor:
    """A copy of all parameters, in the module's order."""
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def loss_of(outputs: Outputs) -> Tensor:
    """SimSiam's loss without its passage through float32."""
    (z1, z2), (p1, p2) = outputs.z.detach(), outputs.p
    return -(cosine_similarity(p1, z2).mean() + cosine_similarity(p2, z1).mean()) / 2


def gradient_of_a_step(views: Tensor, *, inner_steps: int, second_order: bool) -> Tensor:
    """Read off a step of plain SGD, in the order of the module's parameters."""
    options = MAMLSSFLOptions(inner_steps=inner_steps, second_order=second_order)
    algorithm = MAMLSSFL(options)
    models = build_models(algorithm, PLAIN_SGD)
    learner = models.global_
    learner.loss = loss_of
    before = flat(learner.method)
    algorithm.step(models, *(Batch(batch) for batch in views))
    return (before - flat(learner.method)) / RATE


class Unrolled:
    """Θ ↦ L(Θ′(Θ)) with the stop-gradient's targets held at their values for the first Θ."""

    def __init__(self, plain: torch.nn.Module, views: Tensor, inner_steps: int) -> None:
        self.plain, self.views, self.inner_steps = plain, views, inner_steps
        self.targets: list[Tensor] = []
        self.recorded = False

    def __call__(self, theta: Tensor) -> float:
        model = copy.deepcopy(self.plain)
        vector_to_parameters(theta.clone(), model.parameters())
        outer, inner = self.views
        for m in range(self.inner_steps):
            loss = self._loss(model, inner, m)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, g in zip(model.parameters(), gradients, strict=True):
                    p -= RATE * g
        value = self._loss(model, outer, self.inner_steps).item()
        self.recorded = True
        return value

    def _loss(self, model: torch.nn.Module, views: Tensor, which: int) -> Tensor:
        (z1, p1), (z2, p2) = model(views[0]), model(views[1])
        if not self.recorded:
            self.targets.append(torch.stack([z1, z2]).detach())
        t1, t2 = self.targets[which]
        return -(cosine_similarity(p1, t2).mean() + cosine_similarity(p2, t1).mean()) / 2


@pytest.mark.parametrize("inner_steps", [1, 2])
def test_second_order_is_the_derivative_through_the_inner_steps_and_first_order_is_not(
    inner_steps,
):
    views = some_views(1, batches=2)[0]
    exact = gradient_of_a_step(views, inner_steps=inner_steps, second_order=True)
    short = gradient_of_a_step(views, inner_steps=inner_steps, second_order=False)

    plain = plain_copy(build_models(MAMLSSFL(MAMLSSFLOptions()), PLAIN_SGD).global_)
    unrolled = Unrolled(plain, views, inner_steps)
    theta = flat(plain)
    unrolled(theta)

    generator = torch.Generator().manual_seed(3)
    worst = 0.0
    for _ in range(12):
        direction = torch.randn(theta.shape, generator=generator)
        direction /= direction.norm()
        step = 1e-5 * direction
        measured = (unrolled(theta + step) - unrolled(theta - step)) / 2e-5
        assert measured == pytest.approx((exact @ direction).item(), rel=1e-5, abs=1e-7)
        worst = max(worst, abs(measured - (short @ direction).item()))
    assert worst > 1e-4
    assert torch.dist(exact, short) > 1e-2 * exact.norm()


def test_only_second_order_asks_for_gradients_of_gradients():
    assert MAMLSSFL(MAMLSSFLOptions(second_order=True)).differentiates_twice
    assert not MAMLSSFL(MAMLSSFLOptions()).differentiates_twice
