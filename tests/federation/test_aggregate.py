"""The mean of updates: its weights, its order, its partial sums, FedNova and L-DAWA by hand."""

import itertools
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scalar_model import LAYOUT
from torch import Tensor

from ssfl.errors import FederationError
from ssfl.federation.aggregate import Aggregator, Mean, Update, build_aggregator, in_order
from ssfl.federation.messages import Reply, TaskKind
from ssfl.federation.options import ServerOptions
from ssfl.models.flat import Entry, Kind, Layout

THETA = torch.tensor([3.0, 4.0, 0.0, 1.0, 1.0, 1.0])


def updates(weights: list[float], size: int = 6, seed: int = 0) -> list[Update]:
    deltas = torch.randn(len(weights), size, generator=torch.Generator().manual_seed(seed))
    return [Update(k, d, w, 1) for k, (d, w) in enumerate(zip(deltas, weights, strict=True))]


def mean_of(given_: list[Update], expected: float | None = None) -> Mean:
    aggregator = Aggregator(sum(u.weight for u in given_) if expected is None else expected)
    for update in given_:
        aggregator.add(update)
    return aggregator.finish()


sizes = st.lists(st.integers(1, 5000), min_size=1, max_size=12)


@given(sizes)
def test_the_mean_is_weighted_by_the_number_of_images(weights):
    several = updates(weights)
    deltas = np.stack([u.delta.numpy().astype(np.float64) for u in several])
    expected = (deltas * np.array(weights)[:, None]).sum(axis=0) / sum(weights)
    mean = mean_of(several)
    np.testing.assert_allclose(mean.delta, expected, rtol=0, atol=1e-5)
    assert (mean.weight, mean.count) == (sum(weights), len(weights))


@given(sizes, st.integers(0, 3))
def test_weights_sum_to_one_over_those_who_took_part(weights, absent):
    ones = [Update(k, torch.ones(6), w) for k, w in enumerate(weights)]
    present = ones[absent % len(ones) :]
    mean = mean_of(present, expected=sum(weights))
    torch.testing.assert_close(mean.delta, torch.ones(6))
    assert mean.effective_steps == pytest.approx(1)


def test_when_all_take_part_the_sum_is_not_rescaled():
    aggregator = Aggregator(17)
    for update in updates([3, 5, 9]):
        aggregator.add(update)
    assert torch.equal(aggregator.partial().delta, aggregator.finish().delta)


@given(sizes, st.randoms(use_true_random=False))
def test_the_order_of_folding_does_not_matter_beyond_rounding(weights, random):
    several = updates(weights)
    shuffled = random.sample(several, len(several))
    torch.testing.assert_close(mean_of(several).delta, mean_of(shuffled).delta, rtol=0, atol=1e-5)


def replies_to(order: list[int]) -> dict[int, Reply]:
    generator = torch.Generator().manual_seed(1)
    return {
        k: Reply(k, TaskKind.TRAIN, 0, delta=torch.randn(6, generator=generator), samples=k + 1)
        for k in order
    }


def folded(replies: Iterator[Reply], expected: float) -> Tensor:
    aggregator = Aggregator(expected)
    for reply in replies:
        assert reply.delta is not None
        aggregator.add(Update(reply.client, reply.delta, reply.samples))
    return aggregator.finish().delta


@given(st.permutations(range(7)), st.permutations(range(7)))
def test_whatever_order_replies_arrive_in_the_mean_has_the_same_bits(order, arrival):
    replies = replies_to(list(range(7)))
    asked = folded((replies[k] for k in order), 28)
    arrived = folded(in_order([replies[k] for k in arrival], order), 28)
    assert torch.equal(asked, arrived)


def test_without_order_the_bits_would_differ():
    replies = replies_to(list(range(7)))
    results = {
        tuple(folded((replies[k] for k in order), 28).tolist())
        for order in itertools.permutations(range(7), 7)
        if order[0] == 0
    }
    assert len(results) > 1


def test_replies_are_passed_on_as_soon_as_their_turn_comes():
    replies = replies_to([5, 2, 9])
    came: list[int] = []

    def arriving() -> Iterator[Reply]:
        for client in (2, 5, 9):
            came.append(client)
            yield replies[client]

    seen = [(reply.client, len(came)) for reply in in_order(arriving(), [5, 2, 9])]
    assert seen == [(5, 2), (2, 2), (9, 3)]


def test_a_client_that_never_replies_is_passed_over():
    replies = replies_to([1, 2, 3])
    assert [r.client for r in in_order([replies[3], replies[2]], [1, 2, 3])] == [2, 3]


def test_second_replies_and_replies_of_strangers_are_dropped():
    replies = replies_to([1, 2, 8])
    came = [replies[2], replies[8], replies[2], replies[1], replies[1]]
    assert [r.client for r in in_order(came, [1, 2])] == [1, 2]


def test_no_update_is_held_once_it_is_folded():
    aggregator = Aggregator(2)
    delta = torch.ones(6)
    held = weakref.ref(delta)
    aggregator.add(Update(0, delta, 1))
    del delta
    assert held() is None


@pytest.mark.parametrize("site_expected", [12.0, 5.0, 100.0])
def test_a_site_may_send_one_sum_for_its_clients(site_expected):
    control = torch.tensor([1.0, 2.0, 3.0])
    several = [
        Update(u.client, u.delta, u.weight, 2, control * u.client) for u in updates([2, 3, 7, 4, 1])
    ]
    at_once = mean_of(several)
    site = Aggregator(site_expected)
    server = Aggregator(17)
    for update in several[:3]:
        site.add(update)
    for update in several[3:]:
        server.add(update)
    server.merge(site.partial())
    merged = server.finish()
    torch.testing.assert_close(merged.delta, at_once.delta)
    torch.testing.assert_close(merged.control, at_once.control)
    assert (merged.weight, merged.count) == (17, 5)


def test_control_changes_are_weighed_as_updates_are():
    several = [
        Update(k, torch.zeros(6), weight, 1, torch.tensor([value]))
        for k, (weight, value) in enumerate([(1, 3.0), (99, 5.0)])
    ]
    control = mean_of(several).control
    assert control is not None
    assert control.item() == pytest.approx(4.98)


def test_a_round_without_updates_has_no_mean():
    with pytest.raises(FederationError, match="no client"):
        Aggregator(5).finish()
    with pytest.raises(FederationError, match="no images"):
        Aggregator(0)
    with pytest.raises(FederationError, match="weigh nothing"):
        mean_of([Update(0, torch.ones(6), 0)], expected=5)


def test_fednova_by_hand():
    options = ServerOptions(optimizer="fednova")
    aggregator = build_aggregator(options, LAYOUT, THETA, 4, momentum=0.5)
    # a = (1.5, 1) for two steps with momentum ½, (1,) for one: ‖a‖₁ = 2.5 and 1
    aggregator.add(Update(0, torch.full((6,), 5.0), 1, steps=2))
    aggregator.add(Update(1, torch.full((6,), 4.0), 3, steps=1))
    mean = aggregator.finish()
    # trainable: ¼ · 5/2.5 + ¾ · 4/1 = 3.5; the rest plainly: ¼ · 5 + ¾ · 4 = 4.25
    assert mean.delta.tolist() == pytest.approx([3.5] * 3 + [4.25] * 3)
    # τ_eff = ¼ · 2.5 + ¾ · 1
    assert mean.effective_steps == pytest.approx(1.375)


def test_fednova_over_equal_clients_is_fedavg():
    options = ServerOptions(optimizer="fednova")
    aggregator = build_aggregator(options, LAYOUT, THETA, 12, momentum=0.9)
    several = [Update(u.client, u.delta, u.weight, 5) for u in updates([5, 3, 4])]
    for update in several:
        aggregator.add(update)
    mean = aggregator.finish()
    torch.testing.assert_close(mean.delta[:3] * mean.effective_steps, mean_of(several).delta[:3])


def test_fednova_rescales_its_steps_when_a_client_is_missing():
    options = ServerOptions(optimizer="fednova")
    aggregator = build_aggregator(options, LAYOUT, THETA, 100)
    aggregator.add(Update(0, torch.ones(6), 40, steps=8))
    assert aggregator.finish().effective_steps == pytest.approx(8)


@pytest.mark.parametrize("site_expected", [12.0, 5.0, 100.0])
def test_fednova_may_be_summed_in_parts(site_expected):
    options = ServerOptions(optimizer="fednova")
    several = [
        Update(u.client, u.delta, u.weight, steps)
        for u, steps in zip(updates([2, 3, 7, 4]), (1, 6, 2, 9), strict=True)
    ]
    at_once, server = (build_aggregator(options, LAYOUT, THETA, 16, momentum=0.5) for _ in range(2))
    site = build_aggregator(options, LAYOUT, THETA, site_expected, momentum=0.5)
    for update in several:
        at_once.add(update)
    for update in several[:3]:
        site.add(update)
    server.merge(site.partial())
    server.add(several[3])
    merged, whole = server.finish(), at_once.finish()
    torch.testing.assert_close(merged.delta, whole.delta)
    # ‖a‖₁ of n steps with momentum ½ is 2n − 2 + 2/2ⁿ: 1, 10 + 1/32, 2.5 and 16 + 1/256
    by_hand = (2 * 1 + 3 * (10 + 1 / 32) + 7 * 2.5 + 4 * (16 + 1 / 256)) / 16
    assert merged.effective_steps == pytest.approx(by_hand)
    assert whole.effective_steps == pytest.approx(by_hand)


def test_l_dawa_by_hand():
    options = ServerOptions(aggregation="l-dawa")
    aggregator = build_aggregator(options, LAYOUT, THETA, 2)
    # layer a turns from (3, 4) to (4, 3): cos = 24/25; norm.weight was 0: plainly averaged
    aggregator.add(Update(0, torch.tensor([1.0, -1.0, 0.6, 0.2, 0.2, 0.2]), 1))
    # and only grows to (6, 8): cos = 1
    aggregator.add(Update(1, torch.tensor([3.0, 4.0, 0.0, 0.0, 0.0, 0.4]), 1))
    after = THETA + aggregator.finish().delta
    # ½ · 0.96 · (4, 3) + ½ · (6, 8)
    assert after.tolist() == pytest.approx([4.92, 5.44, 0.3, 1.1, 1.1, 1.3])


@pytest.mark.parametrize("length", [1.0, 1e-3])
def test_l_dawa_weighs_every_layer_that_gradients_move_and_no_other(length):
    kinds = {"weight": Kind.WEIGHT, "scale": Kind.NORM, "running_mean": Kind.STATISTIC}
    layout = Layout(
        tuple(Entry(name, (2,), kind, 2 * k) for k, (name, kind) in enumerate(kinds.items()))
    )
    theta, delta = length * torch.tensor([[3.0, 4.0] * 3, [1.0, -1.0] * 3])
    aggregator = build_aggregator(ServerOptions(aggregation="l-dawa"), layout, theta, 1)
    aggregator.add(Update(0, delta, 1))
    after = (theta + aggregator.finish().delta) / length
    # (3, 4) turns to (4, 3) in all three: 24/25 · (4, 3), but for the statistics
    assert after.tolist() == pytest.approx([3.84, 2.88, 3.84, 2.88, 4.0, 3.0])


def test_l_dawa_has_the_same_bits_wherever_theta_lies_in_memory():
    # A checkpoint's tensors begin anywhere; those that torch makes, at multiples of 64 bytes.
    layout = Layout((Entry("weight", (999,), Kind.WEIGHT, 0),))
    theta, delta = torch.randn(2, 999, generator=torch.Generator().manual_seed(0))
    means = []
    for start in (0, 1, 3, 9):
        elsewhere = torch.empty(999 + start)[start:].copy_(theta)
        aggregator = build_aggregator(ServerOptions(aggregation="l-dawa"), layout, elsewhere, 1)
        aggregator.add(Update(0, delta, 1))
        means.append(aggregator.finish().delta)
    assert all(torch.equal(mean, means[0]) for mean in means)


def test_updates_are_left_as_they_came():
    for options in (ServerOptions(optimizer="fednova"), ServerOptions(aggregation="l-dawa")):
        delta = torch.ones(6)
        build_aggregator(options, LAYOUT, THETA, 1).add(Update(0, delta, 1, 3))
        assert torch.equal(delta, torch.ones(6))
