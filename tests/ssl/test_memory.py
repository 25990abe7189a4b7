"""EMA targets, queues and prototypes: what moves without gradients, and how."""

import math

import pytest
import torch
import torch.nn.functional as F

from ssfl.algorithms.learner import Learner
from ssfl.algorithms.options import LocalOptions
from ssfl.models.flat import FlatModel
from ssfl.seeding import torch_generator
from ssfl.ssl.base import Method
from ssfl.ssl.memory import push


def networks(method: Method, prefix: str) -> torch.Tensor:
    """Backbone and projector (or their target copies) as one float64 vector."""
    parts = [getattr(method, prefix + part) for part in ("backbone", "projector")]
    return torch.cat([p.detach().double().flatten() for m in parts for p in m.parameters()])


def wander(method: Method, seed: int) -> None:
    """Move the weights somewhere, as a step of SGD would."""
    generator = torch_generator(seed, "wander")
    with torch.no_grad():
        for p in method.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)


def test_byols_target_follows_by_its_closed_form(make) -> None:
    method, steps = make("byol", momentum=0.9), 6
    taus, seen, start = [], [], networks(method, "target_")
    for step in range(steps):
        wander(method, step)
        progress = step / (steps - 1)
        taus.append(1 - (1 - 0.9) * (math.cos(math.pi * progress) + 1) / 2)
        seen.append(networks(method, ""))
        method.after_step(torch.tensor(progress))
    # ξ_T = Π τ_s ξ_0 + Σ_t (1 − τ_t) Π_{s > t} τ_s θ_t
    expected = math.prod(taus) * start
    for t, theta in enumerate(seen):
        expected += (1 - taus[t]) * math.prod(taus[t + 1 :]) * theta
    torch.testing.assert_close(networks(method, "target_"), expected, rtol=1e-6, atol=1e-6)
    assert taus[0] == pytest.approx(0.9)
    assert taus[-1] == 1


def test_mocos_target_follows_at_a_constant_rate(make) -> None:
    method = make("moco", momentum=0.9)
    start = networks(method, "target_")
    wander(method, 0)
    moved = networks(method, "")
    for progress in (0.0, 0.5, 1.0):
        method.after_step(torch.tensor(progress))
    expected = 0.9**3 * start + (1 - 0.9**3) * moved
    torch.testing.assert_close(networks(method, "target_"), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["byol", "moco"])
def test_a_target_starts_as_a_copy_with_statistics_of_its_own(make, batch, name) -> None:
    method = make(name)
    assert torch.equal(networks(method, "target_"), networks(method, ""))
    wander(method, 0)
    kept = networks(method, "target_")
    method(batch())
    assert torch.equal(networks(method, "target_"), kept)
    ours, targets = method.backbone.same2.norm, method.target_backbone.same2.norm
    assert not torch.allclose(ours.running_mean, targets.running_mean)
    assert targets.running_mean.abs().max() > 0


@pytest.mark.parametrize("name", ["byol", "moco"])
def test_the_mean_of_clients_targets_is_the_target_of_their_mean(make, name) -> None:
    clients = [make(name), make(name)]
    mean = make(name)
    for client in clients:
        FlatModel(client, client.home)
    for step in range(4):
        for k, client in enumerate(clients):
            wander(client, 10 * step + k)
            client.after_step(torch.tensor(step / 4))
        with torch.no_grad():
            for p, *theirs in zip(
                mean.parameters(), *(c.parameters() for c in clients), strict=True
            ):
                if p.requires_grad:
                    p.copy_(sum(theirs) / 2)
        mean.after_step(torch.tensor(step / 4))
    averaged = sum(networks(client, "target_") for client in clients) / 2
    torch.testing.assert_close(networks(mean, "target_"), averaged, rtol=1e-5, atol=1e-6)


def test_a_queue_is_first_in_first_out_for_batches_of_any_size() -> None:
    queue = torch.zeros(7, 1)
    expected = [0.0] * 7
    count = 0.0
    for n in (3, 1, 2, 5, 7, 9):
        rows = [count + i + 1 for i in range(n)]
        push(queue, torch.tensor(rows)[:, None])
        count += n
        expected = (rows + expected)[:7]
        assert queue.flatten().tolist() == expected


def test_mocos_queue_holds_the_keys_of_both_views_newest_first(make, batch) -> None:
    method = make("moco", queue=20)
    flat = FlatModel(method, method.home)
    before = method.queue.clone()
    first = method(batch(3, seed=1)).target
    assert torch.equal(first.queue, before)
    second = method(batch(4, seed=2)).target
    expected = torch.cat([second.views.flatten(0, 1), first.views.flatten(0, 1), before])[:20]
    assert torch.equal(method.queue, expected)
    assert torch.equal(flat.home.view(20, -1), expected)
    torch.testing.assert_close(method.queue[:14].norm(dim=-1), torch.ones(14))


def test_every_micro_batch_enters_the_queue(make, batch) -> None:
    learner = Learner(make("moco", queue=24), LocalOptions())
    assert not learner.method.queue.any()
    learner.share, learner.last = 0.5, False
    learner.descend(learner.loss(learner(batch(6, seed=1))))
    learner.last = True
    learner.descend(learner.loss(learner(batch(6, seed=2))))
    assert learner.method.queue.any(dim=-1).all()


@pytest.mark.parametrize("name", ["moco", "swav"])
def test_a_queue_rests_outside_training(make, batch, name) -> None:
    method = make(name, queue=16).eval()
    before = method.queue.clone()
    method(batch())
    assert torch.equal(method.queue, before)


def test_swavs_prototypes_have_unit_norm_at_first_and_after_steps(make, batch) -> None:
    learner = Learner(make("swav", freeze_share=0.0), LocalOptions())
    learner.rate.fill_(0.5)
    start = learner.method.prototypes.detach().clone()
    torch.testing.assert_close(start.norm(dim=-1), torch.ones(10))
    for seed in range(3):
        learner.descend(learner.loss(learner(batch(seed=seed))))
        norms = learner.method.prototypes.detach().norm(dim=-1)
        torch.testing.assert_close(norms, torch.ones(10))
    assert (learner.method.prototypes - start).norm(dim=-1).min() > 1e-3


def test_swavs_prototypes_stand_still_while_frozen_and_then_move(make, batch) -> None:
    learner = Learner(make("swav", freeze_share=0.3), LocalOptions())
    learner.rate.fill_(0.1)
    still = learner.method.prototypes.detach().clone()
    weight = learner.method.projector[0].weight
    before = weight.detach().clone()
    for progress in (0.0, 0.2):
        learner.stand_at(progress)
        learner.descend(learner.loss(learner(batch())))
        torch.testing.assert_close(learner.method.prototypes.detach(), still)
    assert not torch.allclose(weight, before)
    learner.stand_at(0.3)
    learner.descend(learner.loss(learner(batch())))
    assert (learner.method.prototypes - still).abs().max() > 1e-4


def test_swav_reads_only_the_direction_of_prototypes(make, batch) -> None:
    method = make("swav", freeze_share=0.0)
    scores, codes = method(batch()).target
    with torch.no_grad():
        method.prototypes.mul_(0.6)
    shrunk = method(batch()).target
    torch.testing.assert_close(shrunk.scores, scores)
    torch.testing.assert_close(shrunk.codes, codes)


def test_swavs_codes_ignore_the_queue_until_it_joins_and_what_is_empty(make, batch) -> None:
    alone = make("swav")
    queued = make("swav", queue=60, queue_share=0.5)
    first = queued(batch(seed=0)).target.codes
    torch.testing.assert_close(first, alone(batch(seed=0)).target.codes)
    torch.testing.assert_close(
        queued(batch(seed=1)).target.codes, alone(batch(seed=1)).target.codes
    )
    queued.begin(torch.tensor(0.6))
    joined = queued(batch(seed=2)).target.codes
    assert not torch.allclose(joined, alone(batch(seed=2)).target.codes, atol=1e-3)
    assert joined.isfinite().all()
    torch.testing.assert_close(joined.sum(dim=-1), torch.ones(2, 12))


def test_swavs_queue_holds_each_views_unit_projections(make, batch) -> None:
    method = make("swav", queue=5)
    z = method(batch(3)).z.detach()
    assert torch.equal(method.queue[:, 3:], torch.zeros(2, 2, 16))
    torch.testing.assert_close(method.queue[:, :3], F.normalize(z, dim=-1))
