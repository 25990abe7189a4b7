"""The labelled part of a data set is balanced over its classes and follows from the seed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssfl.data.split import label_subset, labelled_images, stratified_split
from ssfl.errors import DataError
from ssfl.seeding import numpy_generator


@pytest.mark.parametrize(("fraction", "each"), [(0.01, 5), (0.1, 50)])
def test_a_balanced_set_gives_exactly_its_fraction_of_every_class(
    fraction: float, each: int
) -> None:
    labels = torch.from_numpy(np.random.default_rng(0).permutation(np.arange(5000) % 10))
    chosen = label_subset(labels, fraction, np.random.default_rng(1))
    assert torch.bincount(labels[chosen]).tolist() == [each] * 10


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(-1, 6), min_size=1, max_size=200),
    st.floats(0.001, 1.0, exclude_max=True),
    st.integers(0, 2**32),
)
def test_any_labels_give_equal_counts_but_for_classes_that_run_out(
    values: list[int], fraction: float, seed: int
) -> None:
    labels = torch.tensor(values)
    if not (labels >= 0).any():
        return
    chosen = label_subset(labels, fraction, np.random.default_rng(seed))
    assert len(set(chosen.tolist())) == len(chosen)
    taken = torch.bincount(labels[chosen], minlength=7)
    held = torch.bincount(labels[labels >= 0], minlength=7)
    assert (taken[held > 0] >= 1).all()
    full = taken.max()
    assert ((taken == full) | (taken == held)).all()


def test_all_of_the_labels_are_all_of_them_however_uneven_the_classes() -> None:
    labels = torch.tensor([0, 1, -1, 1, 1, 1, 2])
    assert label_subset(labels, 1, np.random.default_rng(0)).tolist() == [0, 1, 3, 4, 5, 6]
    assert len(label_subset(labels, 0.99, np.random.default_rng(0))) == 4


def test_the_subset_follows_its_seed_and_not_the_clock() -> None:
    labels = torch.arange(1000) % 10
    a, b, c = (label_subset(labels, 0.1, np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_unlabelled_data_and_odd_fractions_are_errors_for_people() -> None:
    with pytest.raises(DataError, match="unlabelled"):
        label_subset(torch.full((5,), -1), 0.1, np.random.default_rng(0))
    with pytest.raises(DataError, match="between 0 and 1"):
        label_subset(torch.zeros(5), 1.5, np.random.default_rng(0))


def test_one_seed_and_share_name_one_set_of_labelled_images() -> None:
    labels = torch.arange(5000) % 10
    few, again, other = (labelled_images(labels, 0.01, seed) for seed in (7, 7, 8))
    assert torch.equal(few, again)
    assert not torch.equal(few, other)
    assert torch.equal(labelled_images(labels.numpy(), 0.01, 7), few)
    assert len(labelled_images(labels, 0.1, 7)) == 500
    # Each share has a generator of its own: fewer labels are not the first of more.
    by_hand = label_subset(labels, 0.01, numpy_generator(7, "label-subset", 100))
    assert torch.equal(few, by_hand)


def test_even_the_smallest_share_has_one_image_of_each_class_and_no_more() -> None:
    labels = np.repeat(np.arange(4), [3, 50, 7, 1])
    chosen = label_subset(labels, 0.001, np.random.default_rng(0))
    assert labels[chosen].tolist() == [0, 1, 2, 3]


@given(
    st.lists(st.integers(0, 5), max_size=120),
    st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7, 1.0]),
    st.integers(0, 2**32),
)
def test_every_group_is_split_alike_and_keeps_an_image_to_train_on(
    values: list[int], fraction: float, seed: int
) -> None:
    groups = np.array(values, dtype=np.int64)
    train, test = stratified_split(groups, fraction, np.random.default_rng(seed))
    assert sorted([*train, *test]) == list(range(len(groups)))
    assert (train.tolist(), test.tolist()) == (sorted(train), sorted(test))
    for group in set(values):
        held = values.count(group)
        assert (groups[test] == group).sum() == min(round(held * fraction), held - 1)


def test_who_is_held_out_of_a_group_is_left_to_chance() -> None:
    groups = np.zeros(1000, dtype=np.int64)
    _, test = stratified_split(groups, 0.5, np.random.default_rng(0))
    assert 200 < (test < 500).sum() < 300  # 250 expected, standard deviation 8
    _, other = stratified_split(groups, 0.5, np.random.default_rng(1))
    assert not np.array_equal(test, other)
