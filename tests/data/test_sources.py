"""The sources that need no files, and the registry that names them all."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from ssfl.data.sources import SOURCES, data_root, load_dataset
from ssfl.data.sources.digits import Digits
from ssfl.data.sources.shapes import Shapes
from ssfl.errors import ConfigError


def flat(images):
    return images.pixels.reshape(len(images), -1).numpy().astype(np.float32)


def knn(data, k=5):
    model = KNeighborsClassifier(k).fit(flat(data.train), data.train.labels.numpy())
    return model.score(flat(data.test), data.test.labels.numpy())


@pytest.fixture(scope="module")
def shapes():
    return load_dataset(Shapes.Options(train=3000, test=500), seed=0)


@pytest.mark.parametrize("name", list(SOURCES))
def test_every_source_knows_its_own_name(name):
    source = SOURCES[name]
    assert source.Options().source == name
    described = source.Options.model_fields.items()
    assert all(field.description for key, field in described if key != "source")


def test_an_unknown_source_lists_the_known_ones():
    with pytest.raises(ConfigError, match="unknown data source 'mnist': choose one of cifar10"):
        SOURCES["mnist"]


def test_the_data_folder_is_taken_from_the_environment(monkeypatch):
    monkeypatch.delenv("SSFL_DATA", raising=False)
    assert data_root() == Path("data")
    monkeypatch.setenv("SSFL_DATA", "/elsewhere")
    assert data_root() == Path("/elsewhere")
    monkeypatch.setenv("SSFL_DATA", "~/images")  # a service's environment is read by no shell
    assert data_root() == Path.home() / "images"


def test_shapes_are_ten_even_classes_of_small_colour_images(shapes):
    assert tuple(shapes.train.pixels.shape) == (3000, 3, 32, 32)
    assert np.bincount(shapes.train.labels.numpy()).tolist() == [300] * 10
    assert np.bincount(shapes.test.labels.numpy()).tolist() == [50] * 10
    assert len(shapes.classes) == 10
    assert shapes.presets == "cifar"


def test_shapes_are_the_same_for_the_same_seed_and_others_for_another():
    def drawn(seed):
        return load_dataset(Shapes.Options(train=600, test=10), seed=seed).train.pixels

    assert drawn(3).equal(drawn(3))
    assert not drawn(3).equal(drawn(4))


def test_shapes_test_images_are_not_training_images(shapes):
    def digests(images):
        return {hashlib.sha256(image.numpy().tobytes()).digest() for image in images.pixels}

    assert len(digests(shapes.train)) == 3000
    assert not digests(shapes.train) & digests(shapes.test)


def test_raw_pixels_say_little_of_a_shape(shapes):
    assert knn(shapes) < 0.3


def test_colour_says_nothing_of_a_shape(shapes):
    means = [
        images.pixels.float().mean(dim=(2, 3)).numpy() for images in (shapes.train, shapes.test)
    ]
    model = KNeighborsClassifier(25).fit(means[0], shapes.train.labels.numpy())
    assert model.score(means[1], shapes.test.labels.numpy()) < 0.2


def test_shapes_can_be_drawn_larger():
    data = load_dataset(Shapes.Options(train=20, test=10, image_size=48))
    assert tuple(data.train.pixels.shape) == (20, 3, 48, 48)


def test_digits_are_scikit_learns_split_without_loss():
    data = load_dataset(Digits.Options(), seed=0)
    assert tuple(data.train.pixels.shape[1:]) == (1, 8, 8)
    assert len(data.train) + len(data.test) == 1797
    bundle = load_digits()
    ours = sorted(
        (int(label), image.tobytes())
        for part in (data.train, data.test)
        for label, image in zip(part.labels, part.pixels.numpy(), strict=True)
    )
    scaled = np.rint(bundle.images * 255 / 16).astype(np.uint8)
    theirs = sorted(
        (int(label), image.tobytes()) for label, image in zip(bundle.target, scaled, strict=True)
    )
    assert ours == theirs
    assert data.presets == "digits"


def test_digits_are_split_alike_in_every_class():
    data = load_dataset(Digits.Options(test_fraction=0.25), seed=0)
    train = np.bincount(data.train.labels.numpy())
    test = np.bincount(data.test.labels.numpy())
    assert np.abs(test - (train + test) * 0.25).max() <= 0.5


def test_digits_are_as_easy_as_they_are_known_to_be():
    assert knn(load_dataset(Digits.Options(), seed=0)) > 0.96


def test_digits_can_be_enlarged():
    data = load_dataset(Digits.Options(image_size=16), seed=0)
    assert tuple(data.train.pixels.shape[1:]) == (1, 16, 16)
    assert knn(data) > 0.96
