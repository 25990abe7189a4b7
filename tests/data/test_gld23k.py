"""A synthetic GLD-23K in both layouts: photographers as clients, missing pictures, damage."""

import csv

import numpy as np
import pytest
from PIL import Image

from ssfl.data.sources.gld23k import Gld23k
from ssfl.errors import DataError

LAYOUTS = ["mini_gld_train_split.csv", "data_user_dict/gld23k_user_dict_train.csv"]
# (client, images); 11 sorts after 2 as a number.
CLIENTS = [("11", 20), ("2", 30), ("7", 5)]


def make(root, layout=LAYOUTS[0], clients=CLIENTS):
    folder = root / "gld23k"
    (folder / "images").mkdir(parents=True)
    path = folder / layout
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user_id", "image_id", "class"])
        for user, count in clients:
            for i in range(count):
                name = f"{user}_{i}"
                writer.writerow([user, name, 100 + i % 3])
                picture = Image.new("RGB", (30, 24), (int(user), 50, 100 * (i % 3)))
                picture.save(folder / "images" / f"{name}.jpg", quality=95)
    return folder


def load(root, seed=0, **options):
    options = {"image_size": 16, "min_client_images": 20} | options
    return Gld23k.load(Gld23k.Options(**options), root=root, seed=seed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_layouts_give_the_large_clients_split_seventy_to_thirty(tmp_path, layout):
    make(tmp_path, layout)
    data = load(tmp_path)
    assert data.owners == ("2", "11")
    assert np.bincount(data.train.owners.numpy()).tolist() == [21, 14]
    assert np.bincount(data.test.owners.numpy()).tolist() == [9, 6]
    assert data.classes == ("100", "101", "102")
    assert data.presets == "photo"
    assert data.notes == ()


def test_every_picture_keeps_its_owner_and_label_through_the_split(tmp_path):
    make(tmp_path)
    data = load(tmp_path)
    for images in (data.train, data.test):
        red = images.pixels[:, 0, 8, 8].int()
        user = [int(data.owners[owner]) for owner in images.owners]
        assert np.abs(red.numpy() - user).max() <= 4  # JPEG
        blue = images.pixels[:, 2, 8, 8].int()
        assert np.abs(blue.numpy() - 100 * images.labels.numpy()).max() <= 8


def test_two_layouts_of_the_same_pictures_give_the_same_data(tmp_path):
    make(tmp_path / "one", LAYOUTS[0])
    make(tmp_path / "two", LAYOUTS[1])
    one, two = load(tmp_path / "one"), load(tmp_path / "two")
    assert one.train.pixels.equal(two.train.pixels)
    assert one.test.owners.equal(two.test.owners)


def test_the_local_split_depends_on_the_seed(tmp_path):
    make(tmp_path)
    assert not load(tmp_path, 0).test.pixels.equal(load(tmp_path, 1).test.pixels)


def test_missing_pictures_are_counted_and_reported(tmp_path):
    folder = make(tmp_path)
    (folder / "images" / "2_3.jpg").unlink()
    (folder / "images" / "11_4.jpg").write_bytes(b"half")
    data = load(tmp_path)
    assert data.notes == (
        "2 of 50 listed images could not be read: images/11_4.jpg, images/2_3.jpg "
        "(the first: not a readable image)",
    )
    assert len(data.train) + len(data.test) == 48
    # 11 has 19 pictures left, but the list says 20: who takes part does not depend on the disk.
    assert data.owners == ("2", "11")


def test_too_many_missing_pictures_are_fatal(tmp_path):
    folder = make(tmp_path)
    for i in range(5):
        (folder / "images" / f"2_{i}.jpg").unlink()
    with pytest.raises(DataError, match=r"5 of 50 listed images.*max_missing.*2_0\.jpg"):
        load(tmp_path)


def test_what_is_wrong_with_the_list_is_said(tmp_path):
    folder = make(tmp_path)
    path = folder / LAYOUTS[0]
    path.write_text("user_id,image_id\n1,a\n")
    with pytest.raises(DataError, match="lacks the column class"):
        load(tmp_path)
    path.write_text("user_id,image_id,class\n1,a,3\n1,../../secret,3\n")
    with pytest.raises(DataError, match=r"line 3 of .* is damaged"):
        load(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=r"holds neither mini_gld_train_split\.csv nor"):
        load(tmp_path)


def test_no_client_large_enough_is_one_sentence(tmp_path):
    make(tmp_path)
    with pytest.raises(DataError, match="none of the 3 clients listed has at least 100 images"):
        load(tmp_path, min_client_images=100)
