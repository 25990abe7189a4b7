"""Who takes part: reproducible, fair in the way asked for, largest first."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssfl.federation.options import ServerOptions
from ssfl.federation.samplers import SAMPLERS, build_sampler

NAMES = sorted(SAMPLERS)
federation = st.dictionaries(st.integers(0, 200), st.integers(0, 500), min_size=1, max_size=20)


def draws(name: str, rounds: int, count: int, sizes: dict[int, int], seed: int = 0):
    sampler = build_sampler(ServerOptions(sampler=name))
    return [sampler.draw(t, count, list(sizes), list(sizes.values()), seed) for t in range(rounds)]


@pytest.mark.parametrize("name", NAMES)
@given(sizes=federation, count=st.integers(0, 25), round_=st.integers(0, 99))
def test_as_many_as_asked_take_part_each_once_largest_first(name, sizes, count, round_):
    drawn = SAMPLERS[name].draw(round_, count, list(sizes), list(sizes.values()), 3)
    assert len(drawn) == (min(count, len(sizes)) or len(sizes))
    assert len(set(drawn)) == len(drawn)
    assert set(drawn) <= set(sizes)
    assert drawn == sorted(drawn, key=lambda k: (-sizes[k], k))


@pytest.mark.parametrize("name", NAMES)
@given(sizes=federation, random=st.randoms(use_true_random=False))
def test_a_draw_depends_on_seed_and_round_and_not_on_how_clients_are_listed(name, sizes, random):
    clients = random.sample(list(sizes), len(sizes))
    shuffled = {client: sizes[client] for client in clients}
    assert draws(name, 3, 4, sizes) == draws(name, 3, 4, shuffled)


@pytest.mark.parametrize("name", ["uniform", "weighted"])
def test_rounds_and_seeds_draw_differently(name):
    sizes = dict.fromkeys(range(50), 10)
    first = draws(name, 4, 10, sizes)
    assert len({tuple(drawn) for drawn in first}) == 4
    assert draws(name, 4, 10, sizes, seed=1) != first


def test_uniform_draws_everyone_equally_often():
    sizes = {0: 1, 1: 1000, 2: 10, 3: 50}
    counts = Counter(k for drawn in draws("uniform", 4000, 1, sizes) for k in drawn)
    for client in sizes:
        assert counts[client] / 4000 == pytest.approx(0.25, abs=0.03)


def test_weighted_draws_in_proportion_to_size():
    sizes = {0: 10, 1: 20, 2: 70}
    counts = Counter(k for drawn in draws("weighted", 4000, 1, sizes) for k in drawn)
    for client, share in {0: 0.1, 1: 0.2, 2: 0.7}.items():
        assert counts[client] / 4000 == pytest.approx(share, abs=0.03)


def test_weighted_draws_pairs_as_one_after_another_without_replacement():
    sizes = {0: 1, 1: 2, 2: 7}
    counts = Counter(frozenset(drawn) for drawn in draws("weighted", 4000, 2, sizes))
    # first one, then the other, in either order
    both = 0.1 * (2 / 9) + 0.2 * (1 / 8)
    assert counts[frozenset({0, 1})] / 4000 == pytest.approx(both, abs=0.02)


def test_weighted_draws_clients_without_images_last():
    drawn = draws("weighted", 50, 2, {0: 0, 1: 5, 2: 5, 3: 0})
    assert all(set(clients) == {1, 2} for clients in drawn)


def test_round_robin_asks_everyone_before_anyone_again():
    sizes = dict.fromkeys(range(10), 1)
    drawn = draws("round-robin", 10, 3, sizes)
    assert [sorted(clients) for clients in drawn[:4]] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [0, 1, 9],
    ]
    assert set(Counter(k for clients in drawn for k in clients).values()) == {3}
