"""FedProx and SCAFFOLD on a model of one number, worked out by hand."""

from dataclasses import replace

import pytest
import torch
from scalar_model import LAYOUT, Scalar, numbers
from torch import Tensor

from ssfl.algorithms.base import Models
from ssfl.algorithms.learner import Learner
from ssfl.algorithms.options import LocalOptions
from ssfl.federation.aggregate import Aggregator, Update
from ssfl.federation.drift import Drift, move_control
from ssfl.federation.messages import Task, TaskKind
from ssfl.federation.state import ClientState


def resident(start: float = 1.0, **options: object) -> tuple[Models, Drift]:
    local = LocalOptions(**{"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, **options})
    learner = Learner(Scalar(start), local)
    learner.rate.fill_(0.1)
    models = Models(learner, None, learner.flat.trainable.clone())
    return models, Drift(local, models)


def task(control: float | None = None, rate: float = 0.1, folded: int = 3) -> Task:
    c = None if control is None else torch.tensor([control])
    known = {0: folded, 1: 2}
    return Task(TaskKind.TRAIN, 5, torch.ones(1), LAYOUT.digest, rate=rate, control=c, folded=known)


def client_with(control: float) -> ClientState:
    """A client whose last round was the third, and made this of a c_k that was 77."""
    return ClientState(
        control=torch.tensor([control]),
        control_before=torch.tensor([77.0]),
        control_round=torch.tensor(3),
    )


def finish(drift: Drift, of: Task, steps: int) -> Tensor | None:
    """c_k⁺ after so many steps."""
    return drift.finish(of, ClientState(), steps).control


def descend(models: Models, steps: int) -> float:
    learner = models.global_
    for _ in range(steps):
        learner.descend(learner.loss(learner(numbers(0.0))))
    return learner.flat.trainable.item()


def number(value: Tensor | None) -> float:
    assert value is not None
    return value.item()


def test_without_a_correction_nothing_is_added_and_nothing_kept():
    models, drift = resident()
    drift.begin(0, task(), ClientState())
    assert descend(models, 2) == pytest.approx(0.81)
    assert finish(drift, task(), 2) is None
    assert drift.change is None


def test_fedprox_by_hand():
    models, drift = resident(correction="fedprox", proximal=0.5)
    drift.begin(0, task(), ClientState())
    # g = 1, w = 0.9; g = 0.9 + 0.5 (0.9 − 1) = 0.85, w = 0.815
    assert descend(models, 2) == pytest.approx(0.815)
    assert finish(drift, task(), 2) is None


def test_fedprox_holds_to_what_arrived_last():
    models, drift = resident(correction="fedprox", proximal=0.5)
    models.global_.reset()
    models.received.fill_(3.0)
    drift.begin(0, task(), ClientState())
    assert descend(models, 1) == pytest.approx(1 - 0.1 * (1 + 0.5 * (1 - 3)))


def test_scaffold_by_hand():
    models, drift = resident(correction="scaffold")
    models.global_.reset()
    state = client_with(0.2)
    drift.begin(0, task(0.5), state)
    # c − c_k = 0.3: w = 1 − 0.1 · 1.3 = 0.87, then 0.87 − 0.1 · 1.17 = 0.753
    assert descend(models, 2) == pytest.approx(0.753)
    # c_k⁺ = 0.2 − 0.5 + (1 − 0.753)/(2 · 0.1) = 0.935: the mean of the gradients 1 and 0.87
    assert number(finish(drift, task(0.5), 2)) == pytest.approx(0.935, abs=1e-5)
    assert number(drift.change) == pytest.approx(0.735, abs=1e-5)


def test_scaffold_with_momentum_by_hand():
    models, drift = resident(correction="scaffold", momentum=0.5)
    state = client_with(0.2)
    drift.begin(0, task(0.5), state)
    # v = 1.3, w = 0.87; v = 0.65 + 1.17 = 1.82, w = 0.688
    assert descend(models, 2) == pytest.approx(0.688)
    # two steps count as 2.5: 0.2 − 0.5 + (1 − 0.688)/0.25 = 0.948 = (1.5 · 1 + 0.87)/2.5
    assert number(finish(drift, task(0.5), 2)) == pytest.approx(0.948, abs=1e-5)


def test_scaffold_begins_from_zero_and_forgets_the_last_client():
    models, drift = resident(correction="scaffold")
    drift.begin(0, task(0.5), client_with(0.2))
    models.global_.reset()
    drift.begin(0, task(), ClientState())
    assert descend(models, 1) == pytest.approx(0.9)
    assert number(finish(drift, task(), 1)) == pytest.approx(1.0, abs=1e-5)
    assert number(drift.change) == pytest.approx(1.0, abs=1e-5)


def test_scaffold_goes_back_to_the_c_k_that_the_server_knows():
    models, drift = resident(correction="scaffold")
    drift.begin(0, task(80.0, folded=1), client_with(0.2))
    assert number(models.global_.drift) == pytest.approx(3)  # 80 − 77
    drift.begin(0, task(80.0, folded=3), client_with(0.2))  # nothing is left of the 3
    assert number(models.global_.drift) == pytest.approx(79.8)


def test_a_captured_step_would_read_the_drift_of_every_client():
    models, drift = resident(correction="scaffold")
    before = models.global_.drift
    drift.begin(0, task(0.5), client_with(0.2))
    assert models.global_.drift is before
    assert number(before) == pytest.approx(0.3)


@pytest.mark.parametrize(("steps", "rate"), [(0, 0.1), (2, 0.0)])
def test_a_client_that_did_not_move_learns_nothing_of_its_gradient(steps, rate):
    _, drift = resident(correction="scaffold")
    state = client_with(0.2)
    drift.begin(0, task(0.5, rate), state)
    assert number(finish(drift, task(0.5, rate), steps)) == pytest.approx(0.2)
    assert number(drift.change) == 0


def test_the_server_moves_its_control_by_the_share_that_took_part():
    aggregator = Aggregator(100)
    for client, (weight, change) in enumerate([(99, 0.735), (1, 0.065)]):
        aggregator.add(Update(client, torch.zeros(6), weight, 1, torch.tensor([change])))
    mean = aggregator.finish()
    # c + (99 · 0.735 + 1 · 0.065)/400
    assert number(move_control(torch.tensor([0.5]), mean, 400)) == pytest.approx(0.682075)


def test_the_servers_control_stays_where_no_change_of_it_came():
    aggregator = Aggregator(1)
    aggregator.add(Update(0, torch.zeros(6), 1))
    assert number(move_control(torch.tensor([0.5]), aggregator.finish(), 4)) == 0.5


def test_scaffold_comes_to_rest_where_fedavgs_objective_is_smallest():
    """Clients of three images and one, who want −1 and 3: (3 (w + 1)² + (w − 3)²)/8 is smallest at
    0. The plain mean of their losses would be at 1."""
    theta, control, states = torch.ones(1), torch.zeros(1), [ClientState(), ClientState()]
    models, drift = resident(correction="scaffold")
    learner = models.global_
    for round_ in range(60):
        aggregator = Aggregator(4)
        of = Task(TaskKind.TRAIN, round_, theta, "", rate=0.1, control=control)
        of = replace(of, folded=dict.fromkeys((0, 1), round_ - 1))
        for client, (images, wanted) in enumerate([(3, -1.0), (1, 3.0)]):
            learner.reset()
            learner.flat.trainable.copy_(theta)
            drift.begin(client, of, states[client])
            for _ in range(5):
                learner.descend(learner.loss(learner(numbers(wanted))))
            states[client] = drift.finish(of, ClientState(), 5)
            delta = learner.flat.trainable - theta
            aggregator.add(Update(client, delta, images, 5, drift.change))
        mean = aggregator.finish()
        theta, control = theta + mean.delta, move_control(control, mean, 4)
    assert theta.item() == pytest.approx(0, abs=1e-4)


def test_scaffold_lets_two_different_clients_stay_at_the_common_optimum():
    """Clients that want −1 and 3: with c_k known, neither leaves the mean of the two, 1."""
    for wanted in (-1.0, 3.0):
        models, drift = resident(correction="scaffold")
        drift.begin(0, task(0.0), client_with(1.0 - wanted))
        learner = models.global_
        for _ in range(5):
            learner.descend(learner.loss(learner(numbers(wanted))))
        assert learner.flat.trainable.item() == pytest.approx(1.0)
