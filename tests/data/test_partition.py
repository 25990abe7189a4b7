"""What a partition promises, whatever the labels: cover, disjointness, sizes, repeatability."""

import time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ssfl.data.partition import PartitionOptions, matched_test, partition
from ssfl.errors import DataError


def split(labels, seed=0, owners=None, **options):
    n = len(labels) if labels is not None else len(owners)
    rng = np.random.default_rng(seed)
    return partition(labels, owners, n, PartitionOptions(**options), rng)


def balanced_labels(n, classes=10):
    return np.arange(n, dtype=np.int64) % classes


def counts_of(labels, parts, classes):
    return np.array([[np.sum(labels[part] == c) for c in range(classes)] for part in parts])


@st.composite
def problems(draw):
    labels = np.array(draw(st.lists(st.integers(0, 5), min_size=40, max_size=300)), dtype=np.int64)
    return labels, draw(st.integers(1, 8)), draw(st.integers(0, 2**32))


@given(problems(), st.sampled_from(["iid", "dirichlet", "balanced", "shards"]))
@settings(max_examples=120, deadline=None)
def test_every_image_goes_to_exactly_one_client_and_none_is_too_small(problem, kind):
    labels, clients, seed = problem
    classes = len(np.unique(labels))
    options = {"kind": kind, "alpha": 1.0, "classes_per_client": min(2, classes)}
    if kind == "balanced":
        options |= {"kind": "dirichlet", "balanced": True}
    if kind == "shards":
        assume(clients * min(2, classes) >= classes)
    try:
        parts = split(labels, seed, clients=clients, min_size=3, **options)
    except DataError:
        assume(False)
    assert len(parts) == clients
    assert all(part.dtype == np.int64 for part in parts)
    assert all(np.array_equal(part, np.sort(part)) for part in parts)
    assert min(len(part) for part in parts) >= 3
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))


@given(problems(), st.sampled_from(["iid", "dirichlet", "shards"]))
@settings(max_examples=40, deadline=None)
def test_the_same_seed_gives_the_same_parts(problem, kind):
    labels, clients, seed = problem
    options = {"kind": kind, "clients": clients, "alpha": 1.0, "classes_per_client": 1}
    try:
        first = split(labels, seed, **options)
    except DataError:
        assume(False)
    again = split(labels, seed, **options)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "shards"])
def test_another_seed_gives_other_parts(kind):
    labels = balanced_labels(1000)
    one, two = split(labels, 1, kind=kind), split(labels, 2, kind=kind)
    assert any(not np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def test_iid_parts_are_even_and_keep_the_class_proportions():
    labels = balanced_labels(10_003)
    parts = split(labels, kind="iid", clients=10)
    assert sorted(len(part) for part in parts) == [1000] * 7 + [1001] * 3
    shares = counts_of(labels, parts, 10) / 1000
    # Five standard deviations of a share of 0.1 among 1,000.
    assert np.abs(shares - 0.1).max() < 5 * np.sqrt(0.1 * 0.9 / 1000)


def test_dirichlet_approaches_an_even_split_as_alpha_grows():
    labels = balanced_labels(10_000)
    spread = [
        np.abs(counts_of(labels, split(labels, kind="dirichlet", alpha=a), 10) - 100).mean()
        for a in (0.1, 1.0, 10.0, 1e6)
    ]
    assert spread[0] > spread[1] > spread[2] > spread[3]
    assert spread[3] < 1


def test_dirichlet_shares_have_the_moments_of_the_dirichlet_distribution():
    # p_c ~ Dir(α): mean 1/K, variance (K-1) / (K²(Kα + 1)); many classes make many draws.
    k, alpha, classes = 5, 0.7, 4000
    labels = balanced_labels(classes * 200, classes)
    parts = split(labels, kind="dirichlet", alpha=alpha, clients=k)
    shares = np.stack([np.bincount(labels[p], minlength=classes) for p in parts]) / 200
    assert shares.mean(axis=1) == pytest.approx(np.full(k, 1 / k), abs=0.02)
    variance = (k - 1) / (k**2 * (k * alpha + 1))
    assert shares.var(axis=1) == pytest.approx(np.full(k, variance), rel=0.1)


@given(st.integers(0, 2**32), st.sampled_from([0.01, 0.1, 1.0]), st.integers(2, 20))
@settings(max_examples=60, deadline=None)
def test_balanced_gives_no_more_to_a_client_that_already_holds_its_share(seed, alpha, clients):
    labels = balanced_labels(1000)
    options = {"alpha": alpha, "balanced": True, "clients": clients, "max_redraws": 50}
    try:
        parts = split(labels, seed, kind="dirichlet", **options)
    except DataError:
        assume(False)
    for row in counts_of(labels, parts, 10):
        held_before = np.cumsum(row) - row
        assert np.all(held_before[row > 0] < 1000 / clients)


def fedml_longhand(totals, clients, alpha, balanced, seed):
    """FedML's partition_class_samples_with_dirichlet_distribution, class after class: the share
    p_(c,k) of class c, cut where its cumulated sum is rounded down. What rounding leaves of a
    class is, other than there, never one's who has no share of it."""
    rng = np.random.default_rng(seed)
    held, found = [0] * clients, []
    for total in totals:
        p = rng.dirichlet(np.repeat(alpha, clients))
        if balanced:
            p = np.array(
                [p_k * (h < sum(totals) / clients) for p_k, h in zip(p, held, strict=True)]
            )
            p = p / p.sum()
        places = (np.cumsum(p) * total).astype(int)[:-1]
        places[max(k for k in range(clients) if p[k] > 0) :] = total
        found.append([len(part) for part in np.split(np.arange(total), places)])
        held = [h + n for h, n in zip(held, found[-1], strict=True)]
    return np.array(found).T


@pytest.mark.parametrize(
    ("totals", "clients", "alpha", "balanced"),
    [
        ([400, 150, 900, 33, 600], 10, 0.5, True),
        ([400, 150, 900, 33, 600], 7, 1.0, False),
        ([7, 5, 6, 9, 3], 3, 3.0, True),  # so few that one image more or less decides who is full
    ],
)
def test_dirichlet_counts_are_fedmls_written_longhand(totals, clients, alpha, balanced):
    labels = np.repeat(np.arange(5), totals)
    options = {"kind": "dirichlet", "alpha": alpha, "clients": clients, "balanced": balanced}
    compared = 0
    for seed in range(20):
        expected = fedml_longhand(totals, clients, alpha, balanced, seed)
        if expected.sum(axis=1).min() >= 2:  # or it is drawn again
            assert np.array_equal(counts_of(labels, split(labels, seed, **options), 5), expected)
            compared += 1
    assert compared > 5


def test_balanced_sizes_are_closer_to_each_other_than_plain_ones():
    labels = balanced_labels(10_000)
    plain = [len(p) for p in split(labels, kind="dirichlet", alpha=0.1)]
    even = [len(p) for p in split(labels, kind="dirichlet", alpha=0.1, balanced=True)]
    assert np.std(even) < np.std(plain)


@given(st.integers(1, 40), st.integers(1, 10), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_shards_give_every_client_exactly_its_number_of_classes(clients, per_client, seed):
    labels = balanced_labels(2000)
    parts = split(labels, seed, kind="shards", clients=clients, classes_per_client=per_client)
    held = counts_of(labels, parts, 10)
    assert np.all((held > 0).sum(axis=1) == per_client)
    holders = (held > 0).sum(axis=0)
    assert holders.max() - holders.min() <= 1
    for c in range(10):
        mine = held[:, c][held[:, c] > 0]
        assert mine.sum() == (200 if len(mine) else 0)
        assert len(mine) == 0 or mine.max() - mine.min() <= 1


def test_who_gets_which_class_and_who_the_image_left_over_is_drawn():
    labels = balanced_labels(100)
    first, larger = set(), set()
    for seed in range(60):
        first |= {*labels[split(labels, seed, kind="shards", clients=2, classes_per_client=1)[0]]}
        parts = split(labels[:10] * 0, seed, kind="shards", clients=3, classes_per_client=1)
        larger.add(int(np.argmax([len(part) for part in parts])))
    assert first == set(range(10))
    assert larger == {0, 1, 2}


def test_natural_follows_owners_and_leaves_out_small_ones():
    owners = np.array([7, 3, 7, 3, 9, 7, 3], dtype=np.int64)
    parts = split(None, owners=owners, kind="natural", min_size=2)
    assert [part.tolist() for part in parts] == [[1, 3, 6], [0, 2, 5]]


def test_impossible_sizes_are_refused_in_one_sentence_before_any_draw():
    labels = balanced_labels(5000)
    with pytest.raises(DataError) as caught:
        split(labels, kind="dirichlet", clients=40, min_size=200)
    assert str(caught.value) == (
        "partition: 40 clients asked for at least 200 images each, but there are only 5,000 "
        "images: lower partition.clients or partition.min_size"
    )
    with pytest.raises(DataError, match=r"partition\.kind = 'natural' makes each owner"):
        split(None, owners=labels, kind="iid", clients=40, min_size=200)


def test_it_is_drawn_again_as_often_as_allowed_until_the_smallest_client_has_enough():
    labels = np.repeat(np.arange(10), 100)
    rng = np.random.default_rng(0)
    draws = [fedml_longhand([100] * 10, 10, 5.0, False, rng) for _ in range(8)]
    smallest = [int(draw.sum(axis=1).min()) for draw in draws]
    place = int(np.argmax(smallest))
    assert 0 < place < 7
    options = {"kind": "dirichlet", "alpha": 5.0, "min_size": smallest[place]}
    found = split(labels, max_redraws=place, **options)
    assert np.array_equal(counts_of(labels, found, 10), draws[place])
    says = (
        rf"in {place} draws of 1,000 images over 10 clients .* more than {max(smallest[:place])}, "
    )
    with pytest.raises(DataError, match=says):
        split(labels, max_redraws=place - 1, **options)


def test_sizes_that_no_draw_meets_are_refused_with_advice():
    with pytest.raises(DataError, match=r"never held more than 0, .* a larger alpha, balanced"):
        split(balanced_labels(1000), 1, kind="dirichlet", alpha=0.001, min_size=90, max_redraws=5)
    labels = np.repeat([0, 1], [1, 99])
    with pytest.raises(DataError, match=r"never held more than 1, .* larger classes_per_client"):
        split(labels, kind="shards", clients=2, classes_per_client=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "dirichlet"}, "no labels; use partition.kind = 'iid' or 'natural'"),
        ({"kind": "shards"}, "no labels"),
        ({"kind": "natural"}, "these images have none; use partition.kind"),
    ],
)
def test_a_partition_that_needs_what_the_data_lacks_says_so(options, message):
    with pytest.raises(DataError, match=message):
        partition(None, None, 100, PartitionOptions(**options), np.random.default_rng(0))


def test_more_classes_per_client_than_classes_is_refused():
    with pytest.raises(DataError, match="only 10 classes"):
        split(balanced_labels(1000), kind="shards", classes_per_client=11)


def test_natural_owners_that_are_all_too_small_are_refused():
    with pytest.raises(DataError, match="none of the 50 owners"):
        split(None, owners=np.arange(50), kind="natural")


def test_a_minimum_below_two_is_refused():
    with pytest.raises(ValidationError, match="min_size"):
        PartitionOptions(min_size=1)


def test_matched_test_sets_have_the_train_proportions_and_no_image_twice():
    train, test = balanced_labels(10_000), balanced_labels(2000)
    options = PartitionOptions(kind="dirichlet", alpha=0.3, min_test=10)
    rng = np.random.default_rng(0)
    parts = partition(train, None, len(train), options, rng)
    local = matched_test(train, parts, test, options, rng)
    for mine, theirs in zip(parts, local, strict=True):
        assert len(np.unique(theirs)) == len(theirs)
        wanted = np.bincount(train[mine], minlength=10) / len(mine) * len(theirs)
        assert np.abs(np.bincount(test[theirs], minlength=10) - wanted).max() <= 1
        assert len(theirs) == round(len(mine) * 2000 / 10_000)


def test_matched_test_sets_hardly_overlap():
    train, test = balanced_labels(10_000), balanced_labels(2000)
    options = PartitionOptions(kind="dirichlet", alpha=0.3, min_test=1)
    rng = np.random.default_rng(0)
    parts = partition(train, None, len(train), options, rng)
    every = np.concatenate(matched_test(train, parts, test, options, rng))
    assert abs(len(every) - 2000) <= 10
    assert len(np.unique(every)) > 1900


def test_matched_test_sets_respect_the_minimum_and_what_the_test_set_holds():
    train = np.array([0] * 50 + [1] * 50, dtype=np.int64)
    test = np.array([0] * 5 + [1] * 500, dtype=np.int64)
    parts = [np.arange(50), np.arange(50, 100)]
    options = PartitionOptions(min_test=20)
    only_zeros, only_ones = matched_test(train, parts, test, options, np.random.default_rng(0))
    assert only_zeros.tolist() == [0, 1, 2, 3, 4]
    assert len(only_ones) >= 20
    assert np.all(test[only_ones] == 1)


@pytest.mark.filterwarnings("error")
def test_classes_that_train_or_test_images_lack_are_passed_over():
    train = np.repeat([5, 11, 7, 11], [30, 30, 40, 20])
    test = np.repeat([1, 5, 7, 9], [20, 20, 20, 40])
    parts = [np.arange(60), np.arange(60, 100), np.arange(100, 120)]
    local = matched_test(train, parts, test, PartitionOptions(), np.random.default_rng(0))
    assert [part.tolist() for part in local] == [list(range(20, 40)), list(range(40, 60)), []]


def test_rounding_of_tiny_test_sets_is_not_biased_to_the_largest_class():
    # Each client holds 6 of class 0 and 4 of class 1, and gets one test image.
    train = np.tile(np.array([0] * 6 + [1] * 4, dtype=np.int64), 2000)
    test = balanced_labels(2000, 2)
    parts = list(np.arange(20_000).reshape(2000, 10))
    local = matched_test(train, parts, test, PartitionOptions(min_test=1), np.random.default_rng(0))
    assert {len(part) for part in local} == {1}
    assert np.mean(test[np.concatenate(local)] == 1) == pytest.approx(0.4, abs=0.05)


def test_ten_thousand_clients_take_a_moment():
    train, test = balanced_labels(100_000), balanced_labels(10_000)
    options = PartitionOptions(kind="dirichlet", clients=10_000, alpha=10.0)
    began = time.perf_counter()
    rng = np.random.default_rng(0)
    parts = partition(train, None, len(train), options, rng)
    local = matched_test(train, parts, test, options, rng)
    assert time.perf_counter() - began < 5
    assert len(parts) == len(local) == 10_000
    assert len(np.unique(np.concatenate(parts))) == 100_000


def test_clients_that_hold_just_as_many_images_as_asked_for_are_clients():
    parts = split(None, owners=np.repeat([3, 5, 9], [4, 5, 6]), kind="natural", min_size=5)
    assert [len(part) for part in parts] == [5, 6]
    parts = split(balanced_labels(40), kind="iid", clients=8, min_size=5)
    assert [len(part) for part in parts] == [5] * 8


def test_a_client_of_one_image_is_tested_on_its_class_alone():
    labels = balanced_labels(100)
    parts = [np.arange(0, 99), np.array([99])]
    options = PartitionOptions(min_test=7)
    for seed in range(5):
        _, mine = matched_test(labels, parts, labels, options, np.random.default_rng(seed))
        assert labels[mine].tolist() == [labels[99]] * 7
