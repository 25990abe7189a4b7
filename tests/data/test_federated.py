"""A data set over clients: local test sets, counts, names, pictures, and no copied pixels."""

import numpy as np
import pytest
import torch
from PIL import Image

from ssfl.data.federated import federate
from ssfl.data.images import DataSet, Images, channel_statistics
from ssfl.data.partition import PartitionOptions
from ssfl.data.pictures import save_partition_pictures
from ssfl.data.split import labelled_images
from ssfl.errors import ConfigError, DataError


def images(n, labels=None, owners=None):
    pixels = torch.arange(n, dtype=torch.uint8).reshape(n, 1, 1, 1).contiguous()
    return Images(
        pixels,
        None if labels is None else torch.as_tensor(labels),
        None if owners is None else torch.as_tensor(owners),
    )


def dataset(train, test=None, classes=None, owners=None):
    return DataSet("made", train, test, classes, owners, (0.5,), (0.5,), "cifar")


def labelled(n=200, test=100, classes=4):
    names = tuple("abcdefghij"[:classes])
    return dataset(
        images(n, np.arange(n) % classes), images(test, np.arange(test) % classes), names
    )


def test_clients_hold_indices_into_the_one_set_of_pixels():
    data = federate(labelled(), PartitionOptions(kind="iid", clients=4), seed=0)
    assert list(data.clients()) == [0, 1, 2, 3]
    assert [data.size(k) for k in data.clients()] == [50] * 4
    assert data.sizes().tolist() == [50] * 4
    assert data.train_indices(2).dtype == torch.int64
    every = torch.cat([data.train_indices(k) for k in data.clients()])
    assert sorted(every.tolist()) == list(range(200))
    first = data.train_indices(1)
    assert first.data_ptr() == data.train_indices(1).data_ptr()


def test_class_counts_are_those_of_the_labels():
    data = federate(labelled(), PartitionOptions(clients=3, alpha=0.5, min_size=5), seed=1)
    counts = data.class_counts()
    for k in data.clients():
        labels = (data.train_indices(k) % 4).tolist()
        assert counts[k].tolist() == [labels.count(c) for c in range(4)]


def test_local_test_sets_hold_only_classes_the_client_trains_on():
    options = PartitionOptions(kind="shards", clients=4, classes_per_client=1)
    data = federate(labelled(), options, seed=0)
    for k in data.clients():
        mine = set((data.train_indices(k) % 4).tolist())
        assert set((data.test_indices(k) % 4).tolist()) == mine


def test_without_labels_the_test_set_is_dealt_in_proportion_to_size():
    data = federate(dataset(images(200), images(40)), PartitionOptions(kind="iid", clients=4), 0)
    assert data.class_counts() is None
    local = [data.test_indices(k).tolist() for k in data.clients()]
    assert [len(part) for part in local] == [10] * 4
    assert sorted(image for part in local for image in part) == list(range(40))


def test_without_a_test_set_there_are_no_local_ones():
    data = federate(dataset(images(20)), PartitionOptions(kind="iid", clients=2), seed=0)
    assert data.test_parts is None
    assert data.test_indices(0) is None


def test_natural_clients_keep_their_names_and_their_own_test_images():
    train = images(9, owners=[0, 0, 0, 1, 2, 2, 2, 2, 2])
    test = images(4, owners=[2, 0, 1, 2])
    made = dataset(train, test, owners=("ann", "bob", "cleo"))
    data = federate(made, PartitionOptions(kind="natural", min_size=2), seed=0)
    assert data.names == ("ann", "cleo")
    assert data.dataset.notes == (
        "1 of 3 owners hold fewer than 2 training images (partition.min_size) and do not take "
        "part (bob)",
    )
    assert data.train_indices(1).tolist() == [4, 5, 6, 7, 8]
    assert [data.test_indices(k).tolist() for k in data.clients()] == [[1], [0, 3]]


def test_the_split_depends_on_the_seed_alone():
    one, again, other = (
        federate(labelled(), PartitionOptions(clients=3, alpha=1.0), seed) for seed in (5, 5, 6)
    )
    assert all(map(np.array_equal, one.train_parts, again.train_parts))
    assert all(map(np.array_equal, one.test_parts, again.test_parts))
    assert not all(map(np.array_equal, one.train_parts, other.train_parts))


def test_with_a_share_of_the_labels_clients_keep_those_images_and_all_their_test_images():
    skewed = PartitionOptions(clients=3, alpha=0.5, min_size=20)
    few = skewed.model_copy(update={"labelled": 0.2})
    whole, part = (federate(labelled(n=400), options, seed=4) for options in (skewed, few))
    chosen = set(labelled_images(np.arange(400) % 4, 0.2, seed=4).tolist())
    assert len(chosen) == 80
    for k in part.clients():
        kept = [image for image in whole.train_indices(k).tolist() if image in chosen]
        assert part.train_indices(k).tolist() == kept
        assert part.test_indices(k).tolist() == whole.test_indices(k).tolist()
    assert part.sizes().sum() == 80
    assert part.class_counts().sum(axis=0).tolist() == [20] * 4
    assert part.dataset.notes == ("clients train on 80 of 400 images (partition.labelled = 0.2)",)


def test_clients_left_with_fewer_than_two_images_do_not_take_part_and_it_is_said():
    options = PartitionOptions(kind="iid", clients=10, labelled=0.1)
    whole = federate(labelled(), options.model_copy(update={"labelled": 1.0}), seed=0)
    chosen = labelled_images(np.arange(200) % 4, 0.1, seed=0).tolist()
    able = [
        k for k in whole.clients() if len(set(whole.train_indices(k).tolist()) & set(chosen)) >= 2
    ]
    assert 0 < len(able) < 10  # else this shows nothing
    part = federate(labelled(), options, seed=0)
    assert part.names == tuple(map(str, able))
    assert part.sizes().min() >= 2
    for k, before in enumerate(able):
        assert part.test_indices(k).tolist() == whole.test_indices(before).tolist()
    gone = ", ".join(str(k) for k in range(10) if k not in able)
    assert f"{10 - len(able)} of 10 clients have fewer than two" in part.dataset.notes[0]
    assert part.dataset.notes[0].endswith(f"do not take part ({gone})")


def test_a_share_of_labels_that_are_not_there_is_refused():
    options = PartitionOptions(kind="iid", clients=2, labelled=0.5)
    with pytest.raises(
        ConfigError, match=r"partition\.labelled = 0\.5 .* the made images have none"
    ):
        federate(dataset(images(20)), options, seed=0)


def test_a_share_that_leaves_no_client_two_images_is_refused():
    options = PartitionOptions(kind="iid", clients=100, labelled=0.02)
    with pytest.raises(DataError, match="no client with two of them"):
        federate(labelled(), options, seed=0)


def test_an_empty_test_set_is_refused():
    with pytest.raises(DataError, match="test set of 'made' is empty"):
        federate(dataset(images(20), images(0)), PartitionOptions(kind="iid", clients=2), 0)


def test_channel_statistics_agree_with_numpy():
    pixels = np.random.default_rng(0).integers(0, 256, (5000, 2, 3, 3), dtype=np.uint8)
    mean, std = channel_statistics(torch.from_numpy(pixels))
    assert mean == pytest.approx((pixels / 255).mean(axis=(0, 2, 3)), rel=1e-12)
    assert std == pytest.approx((pixels / 255).std(axis=(0, 2, 3)), rel=1e-9)


@pytest.mark.parametrize(
    ("pixels", "labels"),
    [
        (torch.zeros(2, 1, 1, 1), None),
        (torch.zeros(2, 1, 1, dtype=torch.uint8), None),
        (torch.zeros(2, 1, 4, 5, dtype=torch.uint8), None),
        (torch.zeros(2, 1, 1, 1, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(2, 1, 1, 1, dtype=torch.uint8), torch.zeros(2)),
        (torch.zeros(2, 2, 2, 3, dtype=torch.uint8).transpose(1, 3), None),
    ],
)
def test_images_of_another_shape_or_type_are_refused(pixels, labels):
    with pytest.raises(ValueError, match=r"must be"):
        Images(pixels, labels)


@pytest.mark.parametrize("clients", [5, 100])
def test_pictures_are_drawn_for_few_clients_and_for_many(tmp_path, clients):
    labels = torch.arange(5000) % 4
    made = dataset(
        Images(torch.zeros(5000, 1, 1, 1, dtype=torch.uint8), labels), None, tuple("abcd")
    )
    data = federate(made, PartitionOptions(clients=clients, alpha=1.0), seed=0)
    paths = save_partition_pictures(data, tmp_path / "new")
    assert [path.name for path in paths] == ["partition_samples.png", "partition_labels.png"]
    for path in paths:
        picture = np.asarray(Image.open(path).convert("RGB"))
        assert picture.shape[0] > 300
        assert picture.shape[1] > 600
        # Something blue was drawn on the white.
        assert np.mean(picture[..., 2].astype(int) - picture[..., 0] > 40) > 0.02


def test_without_labels_only_the_sizes_are_drawn(tmp_path):
    data = federate(dataset(images(20)), PartitionOptions(kind="iid", clients=2), seed=0)
    assert [p.name for p in save_partition_pictures(data, tmp_path)] == ["partition_samples.png"]


def test_no_name_of_a_client_is_too_odd_for_a_picture(tmp_path, recwarn):
    names = (r"$\frac{", "a$b$c_{x", "日本語")
    made = dataset(images(6, owners=[0, 0, 1, 1, 2, 2]), owners=names)
    data = federate(made, PartitionOptions(kind="natural"), seed=0)
    assert save_partition_pictures(data, tmp_path)[0].is_file()
    assert not recwarn.list
