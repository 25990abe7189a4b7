"""A learner's descent against arithmetic done by hand, and one round against centralised SGD."""

import numpy as np
import pytest
import torch
from scalar_model import Nothing, Scalar, numbers
from torch import Tensor, nn

from ssfl.algorithms.learner import Learner, effective_steps
from ssfl.algorithms.options import LocalOptions
from ssfl.errors import ConfigError
from ssfl.federation.aggregate import Aggregator, Update
from ssfl.models.backbones import Backbone
from ssfl.models.norm import BatchNorm
from ssfl.ssl.base import Batch, Method, Outputs

PLAIN = LocalOptions(lr=0.1, momentum=0.0, weight_decay=0.0)


class Summed(Method):
    """A method of whatever backbone; its loss is the sum of what comes out."""

    def loss(self, outputs: Outputs) -> Tensor:
        return outputs.p.sum()


def learner_at(start: float, local: LocalOptions = PLAIN, *, predictor: bool = False) -> Learner:
    learner = Learner(Scalar(start, predictor=predictor), local)
    learner.rate.fill_(local.lr)
    return learner


def descend(learner: Learner, *values: float) -> None:
    learner.descend(learner.loss(learner(numbers(*values))))


def test_momentum_and_weight_decay_by_hand():
    learner = learner_at(1.0, LocalOptions(lr=0.1, momentum=0.5, weight_decay=0.2))
    descend(learner, 0.0)  # g = 1 + 0.2 = 1.2; v = 1.2; w = 0.88
    assert learner.flat.trainable.item() == pytest.approx(0.88)
    descend(learner, 0.0)  # g = 0.88 + 0.176 = 1.056; v = 0.6 + 1.056 = 1.656; w = 0.7144
    assert learner.flat.trainable.item() == pytest.approx(0.7144)


def test_weight_decay_may_spare_norms_and_biases_as_torchs_parameter_groups_do():
    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), BatchNorm(4), nn.Flatten(), nn.Linear(16, 5))

    local = LocalOptions(lr=0.1, momentum=0.9, weight_decay=0.3, decay_norms=False)
    method = Summed(Nothing())
    method.projector = model()
    learner, oracle = Learner(method, local), model()
    learner.rate.fill_(local.lr)
    groups = [
        {"params": [p], "weight_decay": 0.3 if p.ndim > 1 else 0.0} for p in oracle.parameters()
    ]
    sgd = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    for step in range(3):
        images = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(step))
        learner.descend(method.projector(images).square().mean())
        sgd.zero_grad()
        oracle(images).square().mean().backward()
        sgd.step()
    ours = dict(method.projector.named_parameters())
    for name, theirs in oracle.named_parameters():
        torch.testing.assert_close(ours[name], theirs, msg=name)


def test_an_anchor_and_a_drift_add_to_the_gradient_by_hand():
    learner = learner_at(1.0)
    learner.hold(torch.tensor([0.5]), 0.2)
    learner.drift = torch.tensor([0.3])
    learner.descend(learner.loss(learner(numbers(0.0))))
    # g = 1 + 0.3 + 0.2 (1 − 0.5) = 1.4
    assert learner.flat.trainable.item() == pytest.approx(0.86)


def test_a_gradient_beyond_the_limit_is_shortened_by_hand():
    for limit, after in ((2.0, 5.0 - 0.1 * (2.0 + 0.3)), (6.0, 5.0 - 0.1 * (5.0 + 0.3))):
        learner = learner_at(5.0, PLAIN.model_copy(update={"max_gradient": limit}))
        learner.drift = torch.tensor([0.3])  # SCAFFOLD's share is not the loss's, and not cut
        descend(learner, 0.0)  # the loss's own gradient is 5
        assert learner.flat.trainable.item() == pytest.approx(after)


def test_an_inner_step_keeps_to_the_limit_too():
    learner = learner_at(5.0, PLAIN.model_copy(update={"max_gradient": 2.0}))
    weights = learner.weights()
    loss = learner.loss(learner(numbers(0.0), weights))
    (adapted,) = learner.inner_step(weights, loss, second_order=False).values()
    assert adapted.item() == pytest.approx(5.0 - 0.1 * 2.0)


@pytest.mark.parametrize("inner", [False, True])
def test_under_frozen_statistics_a_step_is_one_on_the_weight_divided_by_its_deviation(inner: bool):
    class OneWeight(Backbone):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(1, 1, 1, bias=False), BatchNorm(1, affine=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x))

    learner = Learner(Summed(OneWeight()), PLAIN)
    learner.rate.fill_(0.1)
    learner.freeze(True)
    learner.flat.trainable.fill_(0.02)
    learner.method.backbone.get_submodule("norm").running_var.fill_(1e-4 - 1e-5)  # σ = 0.01 with ε
    learner.keep_pace()
    loss = learner.method.backbone(torch.full((1, 1, 1, 1), 3.0)).sum()
    # W/σ is 2, its gradient 3: after a step it is 1.7
    if inner:
        (weight,) = learner.inner_step(learner.weights(), loss, second_order=False).values()
    else:
        learner.descend(loss)
        weight = learner.flat.trainable
    assert weight.item() / 0.01 == pytest.approx(1.7)


def test_reset_forgets_the_last_client_in_place():
    learner = learner_at(1.0, LocalOptions(lr=0.1, momentum=0.5, weight_decay=0.0))
    drift = learner.drift = torch.tensor([0.3])
    descend(learner, 0.0)
    learner.reset()
    assert learner.drift is drift
    assert drift.item() == 0
    assert learner.momentum.item() == 0
    learner.reset(torch.tensor([0.7]))
    assert learner.momentum.item() == pytest.approx(0.7)


def test_adaptation_has_its_rate_for_every_number_and_no_pull_and_only_for_as_long_as_it_lasts():
    local = PLAIN.model_copy(update={"predictor_rate": "constant"})
    learner = learner_at(1.0, local, predictor=True)
    learner.go_at(0.01)
    learner.hold(torch.zeros(2), 100.0)
    with learner.adapting(0.5):
        descend(learner, 0.0)  # both gradients are 1
    torch.testing.assert_close(learner.flat.trainable, torch.tensor([0.5, 0.5]))
    learner.hold(torch.zeros(2), 0.0)
    descend(learner, 0.0)  # both are 0.5
    torch.testing.assert_close(learner.flat.trainable, torch.tensor([0.495, 0.45]))


def test_a_constant_rate_for_the_predictor_leaves_the_schedule_to_the_rest():
    local = LocalOptions(lr=0.1, momentum=0.0, weight_decay=0.0, predictor_rate="constant")
    learner = learner_at(1.0, local, predictor=True)
    learner.go_at(0.01)
    weights = learner.weights()
    loss = learner.loss(learner(numbers(0.0), weights))
    inner = learner.inner_step(weights, loss, second_order=False)
    descend(learner, 0.0)
    for named in (inner, learner.flat.layout.tensors(learner.flat.vector)):
        assert named["w"].item() == pytest.approx(0.99)
        assert named["predictor.weight"].item() == pytest.approx(0.9)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_effective_steps_count_how_far_sgd_goes_under_a_constant_gradient(momentum, steps):
    velocity = travelled = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1
        travelled += velocity
    assert effective_steps(steps, momentum) == pytest.approx(travelled)


def test_a_predictor_that_is_not_where_its_method_says_has_no_rate_of_its_own():
    class Misnamed(Scalar):
        predictor_prefix = "head."

    with pytest.raises(ConfigError, match=r"Misnamed has no tensor .* 'head\.', its predictor_"):
        Learner(Misnamed(1.0), LocalOptions(predictor_rate="constant"))


@pytest.mark.parametrize("predictor_rate", ["scheduled", "constant"])
def test_the_mean_gradient_is_read_back_from_the_way_gone(predictor_rate):
    local = LocalOptions(lr=0.1, momentum=0.5, weight_decay=0.0, predictor_rate=predictor_rate)
    learner = learner_at(1.0, local, predictor=True)
    learner.go_at(0.01)
    start = learner.flat.trainable.clone()
    learner.drift = torch.tensor([2.0, -3.0])  # the only gradient
    for _ in range(3):
        learner.descend(0 * learner.loss(learner(numbers(0.0))))
    torch.testing.assert_close(
        learner.mean_gradient(start, 3), torch.tensor([2.0, -3.0]), rtol=1e-4, atol=0
    )


class Regression(Method):
    """½ mean (Wx − Ax)² for a fixed A: linear, no batch norm, so gradients average exactly."""

    def __init__(self) -> None:
        super().__init__(Nothing())
        self.linear = nn.Linear(4, 3, bias=False)
        nn.init.constant_(self.linear.weight, 0.5)

    def forward(self, batch: Batch) -> Outputs:
        x = batch.views[0].flatten(1)
        return Outputs(x @ truth().T, self.linear(x))

    def loss(self, outputs: Outputs) -> Tensor:
        return (outputs.p - outputs.z).square().sum(dim=1).mean() / 2


def truth() -> Tensor:
    return torch.arange(12.0).view(3, 4) / 12


@pytest.mark.parametrize("sizes", [[8, 8, 8], [3, 14, 7]])
def test_a_round_of_one_full_batch_step_is_one_step_of_centralised_sgd(sizes):
    images = torch.randn(1, 24, 4, 1, 1, generator=torch.Generator().manual_seed(0))
    aggregator = Aggregator(24)
    for client, part in enumerate(images.split(sizes, dim=1)):
        learner = Learner(Regression(), PLAIN)
        learner.rate.fill_(0.1)
        theta = learner.flat.shared.clone()
        learner.descend(learner.loss(learner(Batch(part))))
        aggregator.add(Update(client, learner.flat.shared - theta, sizes[client], 1))
    federated = (theta + aggregator.finish().delta).view(3, 4).numpy()

    x = images[0].flatten(1).numpy().astype(np.float64)
    start = np.full((3, 4), 0.5)
    gradient = (x @ (start - truth().numpy()).T).T @ x / 24
    np.testing.assert_allclose(federated, start - 0.1 * gradient, rtol=0, atol=1e-6)
