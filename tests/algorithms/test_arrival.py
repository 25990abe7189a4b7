"""What a client takes of the Θ that arrives: FedU and FedEMA, worked out name by name."""

import pytest
import torch
from paper_listings import RATE, TinyBackbone, build_models
from torch import Tensor, nn

from ssfl.algorithms.base import Models
from ssfl.algorithms.divergence import divergence
from ssfl.algorithms.fedema import FedEMA, FedEMAOptions
from ssfl.algorithms.fedu import FedU, FedUOptions
from ssfl.algorithms.global_ssfl import GlobalSSFL, GlobalSSFLOptions
from ssfl.algorithms.learner import Learner
from ssfl.algorithms.options import LocalOptions
from ssfl.models.flat import Entry, Kind, Layout
from ssfl.ssl.base import Method, Outputs


def near_and_far(models: Models) -> tuple[Tensor, Tensor]:
    """Θ and a Θ_k whose only backbone weights lie 0.5 away from Θ's."""
    flat = models.global_.flat
    theta = flat.shared.clone()
    mine = theta + 0.01 * torch.randn(theta.shape, generator=torch.Generator().manual_seed(7))
    ours, theirs = flat.layout.tensors(mine), flat.layout.tensors(theta)
    shift = ours["backbone.conv.weight"] - theirs["backbone.conv.weight"]
    with torch.no_grad():
        ours["backbone.conv.weight"].copy_(
            theirs["backbone.conv.weight"] + 0.5 * shift / shift.norm()
        )
    return theta, mine


def by_name(models: Models, vector: Tensor) -> dict[str, Tensor]:
    return models.global_.flat.layout.tensors(vector)


def test_divergence_is_the_mean_distance_of_the_backbones_weight_tensors():
    entries = {
        "backbone.conv": Kind.WEIGHT,
        "backbone.fc": Kind.WEIGHT,
        "projector.fc": Kind.WEIGHT,
        "backbone.norm": Kind.NORM,
    }
    layout = Layout(
        tuple(Entry(name, (2,), kind, 2 * k) for k, (name, kind) in enumerate(entries.items()))
    )
    mine = torch.tensor([3.0, 4.0, 6.0, 8.0, 100.0, 100.0, 100.0, 100.0])
    assert divergence(layout, torch.zeros(8), mine).item() == pytest.approx((5 + 10) / 2)


@pytest.mark.parametrize("algorithm", [FedU(FedUOptions()), FedEMA(FedEMAOptions())])
def test_a_client_without_a_past_takes_all_of_theta(algorithm):
    models = build_models(algorithm)
    theta = torch.randn_like(models.global_.flat.shared)
    assert algorithm.arrive(models, theta, None, None) is None
    assert torch.equal(models.global_.flat.shared, theta)


def test_global_ssfl_takes_all_of_theta_whatever_it_had():
    algorithm = GlobalSSFL(GlobalSSFLOptions())
    models = build_models(algorithm)
    theta, mine = near_and_far(models)
    algorithm.arrive(models, theta, mine, None)
    assert torch.equal(models.global_.flat.shared, theta)


@pytest.mark.parametrize(("threshold", "keeps"), [(0.49, True), (0.51, False)])
def test_fedu_takes_the_encoder_always_and_the_predictor_only_from_nearby(threshold, keeps):
    algorithm = FedU(FedUOptions(threshold=threshold))
    models = build_models(algorithm)
    theta, mine = near_and_far(models)
    algorithm.arrive(models, theta, mine, None)
    got = by_name(models, models.global_.flat.shared)
    names = {name.partition(".")[0] for name in got}
    assert names == {"backbone", "projector", "predictor"}
    for name, value in got.items():
        own = keeps and name.startswith("predictor.")
        assert torch.equal(value, by_name(models, mine if own else theta)[name]), name


def test_fedema_first_keeps_tau_of_its_own_and_remembers_the_scale():
    algorithm = FedEMA(FedEMAOptions(tau=0.7))
    models = build_models(algorithm)
    theta, mine = near_and_far(models)
    memory = algorithm.arrive(models, theta, mine, None)
    assert memory is not None
    assert memory.item() == pytest.approx(0.7 / 0.5, rel=1e-5)
    torch.testing.assert_close(models.global_.flat.shared, 0.7 * mine + 0.3 * theta)


@pytest.mark.parametrize(("scale", "keep"), [(0.5, 0.25), (1.9, 0.95), (7.0, 1.0)])
def test_fedema_later_keeps_in_proportion_to_divergence_and_at_most_all(scale, keep):
    algorithm = FedEMA(FedEMAOptions(tau=0.7))
    models = build_models(algorithm)
    theta, mine = near_and_far(models)
    memory = algorithm.arrive(models, theta, mine, torch.tensor(scale))
    assert memory is not None
    assert memory.item() == pytest.approx(scale)
    torch.testing.assert_close(models.global_.flat.shared, keep * mine + (1 - keep) * theta)


def test_fedema_with_a_client_that_never_left_gives_theta():
    algorithm = FedEMA(FedEMAOptions())
    models = build_models(algorithm)
    theta = models.global_.flat.shared.clone()
    algorithm.arrive(models, theta, theta.clone(), None)
    assert torch.equal(models.global_.flat.shared, theta)


def test_fedemas_scale_waits_until_client_and_theta_are_apart_by_more_than_rounding():
    """A client that alone took part meets its own model again: Θ + (Θ_k − Θ), rounded."""
    algorithm = FedEMA(FedEMAOptions(tau=0.7))
    models = build_models(algorithm)
    theta, mine = near_and_far(models)
    own_again = theta + (mine - theta)
    memory = algorithm.arrive(models, own_again, torch.nextafter(own_again, mine + 1), None)
    torch.testing.assert_close(models.global_.flat.shared, own_again)
    memory = algorithm.arrive(models, theta, mine, memory)
    assert memory is not None
    assert memory.item() == pytest.approx(0.7 / 0.5, rel=1e-5)
    torch.testing.assert_close(models.global_.flat.shared, 0.7 * mine + 0.3 * theta)


@pytest.mark.parametrize("length", [1e-4, 1.0, 1e4])
def test_what_is_rounding_to_fedema_is_measured_by_the_length_of_theta(length):
    algorithm = FedEMA(FedEMAOptions(tau=0.7))
    models = build_models(algorithm)
    theta = models.global_.flat.shared * length
    for apart, share in ((1e-7, 0.0), (1e-3, 0.7)):
        memory = algorithm.arrive(models, theta, theta * (1 + apart), None)
        assert memory is not None
        conv, more = (
            by_name(models, vector)["backbone.conv.weight"] for vector in (theta, theta * apart)
        )
        assert memory.item() == pytest.approx(share / more.norm().item(), rel=1e-3)
        got = by_name(models, models.global_.flat.shared)["backbone.conv.weight"]
        torch.testing.assert_close(got, conv + share * more)


class WithTarget(Method):
    """A backbone, a predictor, and a target that follows without gradients."""

    predictor_prefix = "predictor."

    def __init__(self) -> None:
        super().__init__(TinyBackbone())
        self.predictor = nn.Linear(6, 6)
        self.target = nn.Linear(6, 6).requires_grad_(False)

    def loss(self, outputs: Outputs) -> Tensor:
        return outputs.p.sum()


@pytest.mark.parametrize("algorithm", [FedU(FedUOptions()), FedEMA(FedEMAOptions())])
def test_ema_targets_stay_the_clients_own(algorithm):
    learner = Learner(WithTarget(), LocalOptions(lr=RATE))
    models = Models(learner, None, learner.flat.trainable.clone())
    theta = torch.rand_like(learner.flat.shared)
    mine = theta + torch.rand_like(theta)
    algorithm.arrive(models, theta, mine, None)
    got, own = by_name(models, learner.flat.shared), by_name(models, mine)
    assert torch.equal(got["target.weight"], own["target.weight"])
    assert not torch.equal(got["backbone.conv.weight"], own["backbone.conv.weight"])
