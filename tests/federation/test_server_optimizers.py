"""Server optimizers against numbers worked out by hand."""

import pytest
import torch
from scalar_model import LAYOUT

from ssfl.errors import CheckpointError
from ssfl.federation.aggregate import Mean
from ssfl.federation.options import ServerOptions
from ssfl.federation.server_optimizers import OPTIMIZERS, build_server_optimizer

ALL = sorted(OPTIMIZERS)


def after(name: str, *deltas: float, steps: float = 1.0, **options: float) -> list[float]:
    """Where Θ = 1 goes round by round, in its first entry."""
    given = ServerOptions(optimizer=name, **options)
    optimizer = build_server_optimizer(given, LAYOUT)
    theta, places = torch.ones(6), []
    for delta in deltas:
        theta = optimizer.step(theta, Mean(torch.full((6,), delta), 1, 1, None, steps))
        places.append(theta[0].item())
    return places


def test_fedavg_by_hand():
    assert after("fedavg", 0.2, -0.5) == pytest.approx([1.2, 0.7])
    assert after("fedavg", 0.2, -0.5, lr=0.5) == pytest.approx([1.1, 0.85])


def test_fedavgm_by_hand():
    # v = 0.2, then 0.9 · 0.2 + 0.1 = 0.28
    assert after("fedavgm", 0.2, 0.1) == pytest.approx([1.2, 1.48])
    assert after("fedavgm", 0.2, 0.1, lr=0.5, momentum=0.5) == pytest.approx([1.1, 1.2])


def test_fedadam_by_hand():
    # τ = 0.1, so v starts at 0.01; β₁ = 0.9, β₂ = 0.99, η = 0.1
    # Δ = 0.2: m = 0.02, v = 0.0099 + 0.0004 = 0.0103, √v + τ = 0.201489, step 0.0099261
    # Δ = 0.1: m = 0.028, v = 0.010197 + 0.0001 = 0.010297, √v + τ = 0.201474, step 0.0138976
    assert after("fedadam", 0.2, 0.1, lr=0.1, tau=0.1) == pytest.approx(
        [1.0099261, 1.0238237], abs=2e-7
    )


def test_fedyogi_by_hand():
    # v = 0.01 − 0.01 · 0.04 · sign(0.01 − 0.04) = 0.0104, √v + τ = 0.2019804, m = 0.02
    # v = 0.0104 − 0.01 · 0.0025 · sign(0.0104 − 0.0025) = 0.010375, √v + τ = 0.2018577,
    # m = 0.018 + 0.005 = 0.023: steps 0.0099019 and 0.0113942
    assert after("fedyogi", 0.2, 0.05, lr=0.1, tau=0.1) == pytest.approx(
        [1.0099019, 1.0212961], abs=2e-7
    )


def test_fedadagrad_by_hand():
    # v = 0.01 + 0.04 = 0.05, √v + τ = 0.3236068; v = 0.05 + 0.01 = 0.06, √v + τ = 0.3449490:
    # steps 0.1 · 0.2 / 0.3236068 = 0.0618034 and 0.1 · 0.1 / 0.3449490 = 0.0289898
    assert after("fedadagrad", 0.2, 0.1, lr=0.1, tau=0.1) == pytest.approx(
        [1.0618034, 1.0907932], abs=2e-7
    )


def test_fednova_by_hand():
    # Δ̄ = 0.2 a step over τ_eff = 2.5 steps
    assert after("fednova", 0.2, steps=2.5) == pytest.approx([1.5])
    assert after("fednova", 0.2, steps=2.5, lr=0.5) == pytest.approx([1.25])


@pytest.mark.parametrize("name", ALL)
def test_targets_and_statistics_are_plainly_averaged_whatever_the_rule(name):
    optimizer = build_server_optimizer(ServerOptions(optimizer=name, lr=0.3), LAYOUT)
    theta = torch.tensor([1.0, 1.0, 1.0, 2.0, 3.0, 4.0])
    delta = torch.tensor([0.5, 0.5, 0.5, 0.1, -0.2, -0.3])
    for _ in range(3):
        new = optimizer.step(theta, Mean(delta, 1, 1, None, 2.0))
        torch.testing.assert_close(new[3:], theta[3:] + delta[3:])
        assert not torch.allclose(new[:3], theta[:3] + delta[:3])
        theta = new


@pytest.mark.parametrize("name", ALL)
def test_a_running_variance_never_becomes_negative_but_a_mean_may(name):
    optimizer = build_server_optimizer(ServerOptions(optimizer=name), LAYOUT)
    theta = torch.tensor([0.0, 0.0, 0.0, 0.1, 0.1, 0.1])
    new = optimizer.step(theta, Mean(torch.full((6,), -0.2), 1, 1))
    assert new[5] == 0
    assert new[4].item() == pytest.approx(-0.1)
    assert new[3].item() == pytest.approx(-0.1)


@pytest.mark.parametrize("name", ALL)
def test_a_resumed_optimizer_goes_on_as_if_never_stopped(name):
    options = ServerOptions(optimizer=name, lr=0.1)
    deltas = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    through, first = (build_server_optimizer(options, LAYOUT) for _ in range(2))
    a = b = torch.ones(6)
    for delta in deltas[:2]:
        a, b = through.step(a, Mean(delta, 1, 1)), first.step(b, Mean(delta, 1, 1))
    saved = first.state()
    first.step(b, Mean(deltas[3], 1, 1))  # what comes after saving is not in what was saved
    resumed = build_server_optimizer(options, LAYOUT)
    resumed.load(saved)
    for delta in deltas[2:]:
        a, b = through.step(a, Mean(delta, 1, 1)), resumed.step(b, Mean(delta, 1, 1))
    assert torch.equal(a, b)


def test_theta_and_the_mean_are_left_as_they_were():
    theta, delta = torch.ones(6), torch.full((6,), 0.5)
    build_server_optimizer(ServerOptions(optimizer="fedavgm"), LAYOUT).step(
        theta, Mean(delta, 1, 1)
    )
    assert torch.equal(theta, torch.ones(6))
    assert torch.equal(delta, torch.full((6,), 0.5))


@pytest.mark.parametrize("state", [{}, {"momentum": torch.zeros(2)}, {"other": torch.zeros(3)}])
def test_a_state_that_does_not_fit_is_refused(state):
    optimizer = build_server_optimizer(ServerOptions(optimizer="fedavgm"), LAYOUT)
    with pytest.raises(CheckpointError, match="does not fit fedavgm"):
        optimizer.load(state)
