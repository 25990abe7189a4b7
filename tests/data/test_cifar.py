"""CIFAR in both official layouts, what is missing or half, and pickles that must not run."""

import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ssfl.data.sources import cifar
from ssfl.data.sources.cifar import CIFAR10, CIFAR100, Cifar10, read
from ssfl.data.sources.pickles import load_plain
from ssfl.errors import DataError

RECORDS = 20


def small(layout):
    """The same layout with few records, so that tests write little."""
    return replace(layout, records=dict.fromkeys(layout.records, RECORDS))


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(cifar, "CIFAR10", small(CIFAR10))
    return small(CIFAR10)


def batches(layout, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: (
            rng.integers(0, 256, (RECORDS, 3072), dtype=np.uint8),
            rng.integers(0, layout.class_count, RECORDS),
        )
        for name in (*layout.train, layout.test)
    }


def write_binary(layout, root, made):
    folder = root / layout.binary
    folder.mkdir(parents=True)
    for name, (pixels, labels) in made.items():
        with (folder / f"{name}.bin").open("wb") as file:
            for row, label in zip(pixels, labels, strict=True):
                coarse = b"\x07" if layout.label_bytes == 2 else b""
                file.write(coarse + bytes([int(label)]) + row.tobytes())
    names = [f"class{c}" for c in range(layout.class_count)]
    (folder / layout.class_file).write_text("\n".join(names) + "\n\n")


def write_python(layout, root, made, keys=str, protocol=2):
    folder = root / layout.python
    folder.mkdir(parents=True)
    for name, (pixels, labels) in made.items():
        batch = {keys("data"): pixels, keys(layout.label_key): labels.tolist()}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=protocol))
    names = [f"class{c}" for c in range(layout.class_count)]
    (folder / layout.meta).write_bytes(pickle.dumps({layout.class_key: names}, protocol=protocol))


def as_bytes(text):
    return text.encode()


@pytest.mark.parametrize("layout", [small(CIFAR10), small(CIFAR100)], ids=lambda v: v.name)
@pytest.mark.parametrize(
    "write",
    [
        write_binary,
        write_python,
        lambda *given: write_python(*given, keys=as_bytes),
        lambda *given: write_python(*given, protocol=4),
    ],
    ids=["binary", "python", "python-bytes-keys", "python-protocol-4"],
)
def test_both_layouts_give_the_pixels_and_labels_that_were_written(layout, write, tmp_path):
    made = batches(layout)
    write(layout, tmp_path, made)
    data = read(layout, tmp_path)
    pixels = np.concatenate([made[name][0] for name in layout.train])
    labels = np.concatenate([made[name][1] for name in layout.train])
    assert np.array_equal(data.train.pixels.numpy(), pixels.reshape(-1, 3, 32, 32))
    assert np.array_equal(data.train.labels.numpy(), labels)
    assert np.array_equal(data.test.labels.numpy(), made[layout.test][1])
    assert data.classes == tuple(f"class{c}" for c in range(layout.class_count))
    assert data.presets == "cifar"


def test_an_absent_data_set_says_how_to_get_it(tmp_path):
    with pytest.raises(DataError, match="run `ssfl data get cifar10`"):
        read(CIFAR10, tmp_path)


def test_a_half_file_is_one_clear_sentence(few, tmp_path):
    write_binary(few, tmp_path, batches(few))
    path = tmp_path / few.binary / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:30_000])
    with pytest.raises(DataError) as caught:
        Cifar10.load(Cifar10.Options(), root=tmp_path, seed=0)
    assert str(caught.value) == (
        f"{path} is damaged, it has 30,000 bytes instead of {RECORDS * 3073:,}: "
        "remove its folder and run `ssfl data get cifar10`"
    )


def test_a_missing_batch_is_named(few, tmp_path):
    write_binary(few, tmp_path, batches(few))
    (tmp_path / few.binary / "test_batch.bin").unlink()
    with pytest.raises(DataError, match=r"incomplete.*test_batch\.bin is missing"):
        Cifar10.load(Cifar10.Options(), root=tmp_path, seed=0)


def test_a_label_out_of_range_is_damage(few, tmp_path):
    made = batches(few)
    made["data_batch_1"][1][4] = 10
    write_binary(few, tmp_path, made)
    with pytest.raises(DataError, match="a label that cifar10 does not have"):
        Cifar10.load(Cifar10.Options(), root=tmp_path, seed=0)


def test_a_half_pickle_is_one_clear_sentence(few, tmp_path):
    write_python(few, tmp_path, batches(few))
    path = tmp_path / few.python / "data_batch_2"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match="damaged or not a pickle"):
        Cifar10.load(Cifar10.Options(), root=tmp_path, seed=0)


def test_a_pickle_with_too_few_images_is_refused(few, tmp_path):
    made = batches(few)
    made["data_batch_2"] = (made["data_batch_2"][0][:5], made["data_batch_2"][1][:5])
    write_python(few, tmp_path, made)
    with pytest.raises(DataError, match="does not hold 20 labelled images"):
        Cifar10.load(Cifar10.Options(), root=tmp_path, seed=0)


class Runs:
    """An object whose pickle calls a function of its own choice when it is read."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_would_run_a_command_is_refused_and_does_not_run(tmp_path, protocol):
    mark, path = tmp_path / "ran", tmp_path / "evil"
    evil = {"data": Runs(os.system, f"touch {mark}"), "labels": []}
    path.write_bytes(pickle.dumps(evil, protocol=protocol))
    with pytest.raises(DataError, match="only plain arrays are allowed"):
        load_plain(path)
    assert not mark.exists()
    pickle.loads(path.read_bytes())
    assert mark.exists()  # it would have run


@pytest.mark.parametrize(
    "evil",
    [
        Runs(eval, "1"),
        Runs(getattr, "", "upper"),
        Runs(np.load, "x"),
        Runs(np.dtype, "O"),
        Runs(Path, "x"),
        np.array([Runs(eval, "1")], dtype=object),
    ],
    ids=["eval", "getattr", "numpy.load", "object-dtype", "path", "object-array"],
)
def test_nothing_but_plain_arrays_is_admitted(tmp_path, evil):
    path = tmp_path / "evil"
    path.write_bytes(pickle.dumps({"data": evil}, protocol=2))
    with pytest.raises(DataError, match="only plain arrays are allowed"):
        load_plain(path)


def test_plain_arrays_come_back_as_they_went_in(tmp_path):
    path = tmp_path / "plain"
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    path.write_bytes(pickle.dumps({b"data": array, b"names": [b"x", "y"], b"n": 3}, protocol=2))
    back = load_plain(path)
    assert np.array_equal(back["data"], array)
    assert (back["names"], back["n"]) == ([b"x", "y"], 3)


@pytest.mark.cifar
def test_the_real_cifar10_has_its_known_class_counts_and_channel_means():
    root = Path(os.environ.get("SSFL_DATA") or "data")
    if not (root / CIFAR10.binary).is_dir() and not (root / CIFAR10.python).is_dir():
        pytest.skip("CIFAR-10 is not in the data folder")
    data = read(CIFAR10, root)
    assert np.bincount(data.train.labels.numpy()).tolist() == [5000] * 10
    assert np.bincount(data.test.labels.numpy()).tolist() == [1000] * 10
    means = data.train.pixels.numpy().mean(axis=(0, 2, 3), dtype=np.float64) / 255
    assert means == pytest.approx(data.mean, abs=1e-4)
