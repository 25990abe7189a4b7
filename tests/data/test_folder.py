"""Trees of image files as people have them: mixed, broken, badly laid out."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ssfl.data.sources.folder import Folder
from ssfl.errors import ConfigError, DataError
from ssfl.section import validated


def save(path, size=(40, 30), colour=(200, 100, 50), mode="RGB", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).convert(mode).save(path, **options)


def load(path, seed=0, **options):
    return Folder.load(Folder.Options(path=path, **options), root=path, seed=seed)


@pytest.fixture
def tree(tmp_path):
    for name in ("ann", "bob", "cleo"):
        for i in range(10):
            save(tmp_path / name / f"{i}.png", colour=(i, 0, 200))
    return tmp_path


def test_one_subfolder_per_client_gives_owners_and_no_labels(tree):
    data = load(tree, layout="clients")
    assert data.owners == ("ann", "bob", "cleo")
    assert data.train.owners.tolist() == [0] * 10 + [1] * 10 + [2] * 10
    assert data.train.labels is None
    assert data.classes is None
    assert data.test is None


@pytest.mark.parametrize("layout", ["classes", "auto"])
def test_one_subfolder_per_class_gives_labels_and_no_owners(tree, layout):
    data = load(tree, layout=layout)
    assert data.classes == ("ann", "bob", "cleo")
    assert data.train.labels.tolist() == [0] * 10 + [1] * 10 + [2] * 10
    assert data.train.owners is None


def test_a_flat_tree_has_neither(tree):
    data = load(tree, layout="flat")
    assert len(data.train) == 30
    assert data.train.labels is data.train.owners is data.classes is data.owners is None


def test_auto_takes_loose_images_as_flat(tree):
    save(tree / "loose.png")
    assert load(tree).train.labels is None


def test_a_loose_image_among_clients_is_an_error_that_names_it(tree):
    save(tree / "loose.png")
    with pytest.raises(DataError, match=r"loose\.png is in no subfolder"):
        load(tree, layout="clients")


def test_hidden_files_and_other_files_are_passed_over(tree):
    save(tree / ".thumbs" / "x.png")
    (tree / "ann" / "notes.txt").write_text("not an image")
    assert len(load(tree).train) == 30


def test_links_are_followed_but_not_in_circles(tree, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for i in range(10):
        save(elsewhere / f"{i}.png")
    (tree / "dora").symlink_to(elsewhere)
    (tree / "ann" / "up").symlink_to(tree)
    (elsewhere / "across").symlink_to(tree / "ann")
    data = load(tree, layout="clients")
    assert data.owners == ("ann", "bob", "cleo", "dora")
    assert data.train.owners.bincount().tolist() == [10, 10, 10, 20]


def test_a_name_that_is_no_text_can_be_printed(tree):
    (tree / "ann").rename(os.fsdecode(os.fsencode(tree) + b"/ann\xe9"))
    Path(os.fsdecode(os.fsencode(tree) + b"/bob/\xe9.png")).write_bytes(b"")
    data = load(tree, layout="clients")
    assert data.owners == ("ann\ufffd", "bob", "cleo")
    assert "could not be read: bob/\ufffd.png" in data.notes[0]


def test_the_folder_we_stand_in_has_a_name(tree, monkeypatch):
    monkeypatch.chdir(tree / "bob")
    assert load(Path()).name == "bob"


def test_a_link_that_leads_nowhere_is_a_broken_file(tree):
    (tree / "ann" / "gone.png").symlink_to(tree / "unmounted" / "gone.png")
    assert "1 of 31 images" in load(tree).notes[0]
    assert "ann/gone.png" in load(tree).notes[0]


def test_images_of_a_kind_that_is_not_read_are_told(tree, tmp_path_factory):
    for name in ("a.HEIC", "b.heic", "scan.dcm", "notes.txt"):
        (tree / "ann" / name).touch()
    told = "images of these kinds are not read: 1 .dcm, 2 .heic; convert them, e.g. to PNG"
    assert load(tree).notes == (told,)
    scans = tmp_path_factory.mktemp("scans")
    (scans / "scan.dcm").touch()
    with pytest.raises(DataError, match=r"holds no images.*; images of these kinds are not read: "):
        load(scans)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("a.png", "RGB"),
        ("a.png", "RGBA"),
        ("a.png", "P"),
        ("a.gif", "P"),
        ("a.bmp", "RGB"),
        ("a.webp", "RGB"),
        ("a.jpg", "CMYK"),
        ("a.tiff", "RGB"),
    ],
)
def test_colour_images_of_any_mode_become_rgb_of_one_size(tmp_path, name, mode):
    save(tmp_path / name, size=(57, 23), mode=mode)
    data = load(tmp_path, image_size=16)
    assert tuple(data.train.pixels.shape) == (1, 3, 16, 16)
    centre = data.train.pixels[0, :, 8, 8].int().numpy()
    assert np.abs(centre - [200, 100, 50]).max() <= 30  # palettes and JPEG are not exact


def test_grey_and_sixteen_bit_images_keep_their_brightness(tmp_path):
    Image.new("L", (20, 20), 128).save(tmp_path / "a_grey.png")
    Image.fromarray(np.full((20, 20), 32768, dtype=np.uint16)).save(tmp_path / "b_deep.png")
    Image.fromarray(np.full((20, 20), 200.0, dtype=np.float32)).save(tmp_path / "c_float.tiff")
    Image.new("1", (20, 20), 1).save(tmp_path / "d_bit.png")
    pixels = load(tmp_path, image_size=16).train.pixels
    assert pixels[:, :, 3, 3].tolist() == [[128] * 3, [128] * 3, [200] * 3, [255] * 3]


def test_scans_of_twelve_bits_in_sixteen_are_dark_and_a_note_says_so(tmp_path):
    scan = np.linspace(0, 4095, 400).reshape(20, 20).astype(np.uint16)
    Image.fromarray(scan).save(tmp_path / "scan.png")
    data = load(tmp_path, image_size=20)
    assert data.train.pixels.max() == 16
    (note,) = data.notes
    assert "no pixel" in note
    assert "brighter than 16 of 255" in note
    data = load(tmp_path, image_size=20, window=(0, 4095))  # what the note advises
    assert data.train.pixels.max() == 255
    assert data.notes == ()


@pytest.mark.parametrize(
    ("kind", "suffix", "black", "white"),
    [("uint16", "png", 0, 4095), ("int32", "tif", -160, 240), ("float32", "tif", -1.5, 2.5)],
)
def test_a_window_says_what_is_black_and_white_in_deep_greys(tmp_path, kind, suffix, black, white):
    wide = white - black
    values = np.linspace(black - wide / 8, white + wide / 8, 256).reshape(16, 16)
    values = np.maximum(values, 0).astype(kind) if kind == "uint16" else values.astype(kind)
    Image.fromarray(values).save(tmp_path / f"scan.{suffix}")
    found = load(tmp_path, image_size=16, window=(black, white))
    expected = [
        [0 if v <= black else 255 if v >= white else round(255 * (v - black) / wide) for v in row]
        for row in values.tolist()
    ]
    assert found.train.pixels[0].tolist() == [expected] * 3
    assert found.notes == ()


def test_a_window_changes_nothing_of_eight_bits_and_says_so(tree):
    plain, windowed = load(tree), load(tree, window=(0, 100))
    assert windowed.train.pixels.equal(plain.train.pixels)
    (note,) = windowed.notes
    assert "a window is for grey files of more than 8 bits, and there are none" in note


def test_a_window_that_is_too_wide_is_told(tmp_path):
    Image.fromarray(np.full((16, 16), 4095, dtype=np.uint16)).save(tmp_path / "scan.png")
    (note,) = load(tmp_path, window=(0, 60000)).notes
    assert note.endswith("the window [0.0, 60000.0] may be too wide")


def test_values_that_are_no_numbers_are_in_no_window(tmp_path):
    Image.fromarray(np.full((16, 16), np.nan, dtype="float32")).save(tmp_path / "a.tif")
    with pytest.raises(DataError, match="some of its values are no numbers"):
        load(tmp_path, window=(0, 1))


def test_dark_scans_are_told_though_other_images_beside_them_are_bright(tmp_path):
    Image.fromarray(np.full((16, 16), 4095, dtype=np.uint16)).save(tmp_path / "scan.png")
    Image.new("L", (16, 16), 255).save(tmp_path / "photo.png")
    (note,) = load(tmp_path).notes
    assert "brighter than 16 of 255" in note
    assert load(tmp_path, window=(0, 4095)).notes == ()


def test_a_dark_folder_of_eight_bits_has_nothing_to_do_with_windows(tmp_path):
    Image.new("L", (16, 16), 9).save(tmp_path / "night.png")
    assert load(tmp_path).notes == ()


@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [("int32", -1000, 400), ("int32", -1000, 3000), ("float32", -1000, 400), ("float32", -2, 1.9)],
)
def test_values_below_zero_are_not_taken_for_black_without_a_window(tmp_path, kind, least, most):
    values = np.linspace(least, most, 256).reshape(16, 16).astype(kind)
    Image.fromarray(values).save(tmp_path / "a.tif")
    with pytest.raises(DataError, match=rf"its values go from {least} to {most}: set a window"):
        load(tmp_path)
    assert load(tmp_path, window=(least, most)).notes == ()


def test_floats_may_go_a_little_below_zero(tmp_path):
    values = np.linspace(-0.05, 1.05, 256).reshape(16, 16).astype("float32")
    Image.fromarray(values).save(tmp_path / "a.tif")
    assert load(tmp_path, image_size=16).train.pixels[0, 0, 0, 0] == 0


def test_a_window_without_end_is_refused():
    with pytest.raises(ConfigError, match=r"data\.window\.1 = inf: it should be a finite number"):
        validated(Folder.Options, {"window": (0, float("inf"))}, prefix="data.")


@pytest.mark.parametrize("window", [(5, 2), (3, 3)])
def test_a_window_whose_black_is_not_below_its_white_is_refused(window):
    with pytest.raises(ConfigError, match=r"data\.window: it goes from black to white, the lower"):
        validated(Folder.Options, {"window": window}, prefix="data.")


@pytest.mark.parametrize(
    ("kind", "white"),
    [("float32", 1), ("float32", 255), ("float32", 65535), ("int32", 255), ("int32", 65535)],
)
def test_images_of_thirty_two_bits_keep_their_brightness_whatever_their_white(
    tmp_path, kind, white
):
    values = np.array([[0.0, 0.2], [0.6, 1.0]]).repeat(8, 0).repeat(8, 1) * white
    Image.fromarray(values.astype(kind)).save(tmp_path / "a.tif")
    found = load(tmp_path, image_size=16).train.pixels[0, :, ::8, ::8]
    assert found.tolist() == [[[0, 51], [153, 255]]] * 3


@pytest.mark.parametrize("value", [1e6, float("nan")])
def test_images_whose_white_nobody_knows_are_broken_files_not_white_ones(tmp_path, value):
    Image.fromarray(np.full((16, 16), value, dtype="float32")).save(tmp_path / "a.tif")
    with pytest.raises(
        DataError, match=r"its values go from .* to .*: set a window .*, or save it with 8 "
    ):
        load(tmp_path)


def test_of_a_file_with_several_pages_the_first_is_read(tmp_path):
    first, *others = [Image.new("L", (16, 16), grey) for grey in (50, 100, 150)]
    first.save(tmp_path / "stack.tif", save_all=True, append_images=others)
    assert load(tmp_path, image_size=16).train.pixels.unique().tolist() == [50]


def test_what_is_transparent_becomes_white(tmp_path):
    Image.new("RGBA", (20, 20), (10, 20, 30, 0)).save(tmp_path / "clear.png")
    Image.new("RGBA", (20, 20), (0, 0, 0, 128)).save(tmp_path / "half.png")
    pixels = load(tmp_path, image_size=16).train.pixels
    assert pixels[0, :, 5, 5].tolist() == [255, 255, 255]
    assert pixels[1, :, 5, 5].int().numpy() == pytest.approx(np.full(3, 127), abs=1)


def test_crop_keeps_the_centre_and_squash_keeps_everything(tmp_path):
    wide = np.zeros((20, 60, 3), dtype=np.uint8)
    wide[:, :20] = (255, 0, 0)
    wide[:, 40:] = (0, 0, 255)
    Image.fromarray(wide).save(tmp_path / "wide.png")
    cropped = load(tmp_path, image_size=20).train.pixels[0]
    assert cropped.max() == 0
    squashed = load(tmp_path, image_size=20, fit="squash").train.pixels[0]
    assert squashed[0, :, 0].min() == 255
    assert squashed[2, :, -1].min() == 255


def test_a_photograph_on_its_side_is_turned_upright(tmp_path):
    picture = np.zeros((20, 20, 3), dtype=np.uint8)
    picture[:10] = 255
    turned = Image.Exif()
    turned[0x0112] = 3  # upside down
    Image.fromarray(picture).save(tmp_path / "a.png", exif=turned)
    pixels = load(tmp_path, image_size=20).train.pixels[0]
    assert pixels[:, 15:].min() == 255
    assert pixels[:, :5].max() == 0


def test_a_readable_image_with_odd_remarks_beside_it_is_no_cause_for_a_warning(tmp_path, recwarn):
    save(tmp_path / "a.jpg", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff\x12\x01")
    assert len(load(tmp_path).train) == 1
    assert not recwarn.list


def test_broken_files_are_counted_and_named(tree):
    (tree / "ann" / "empty.png").write_bytes(b"")
    whole = (tree / "bob" / "1.png").read_bytes()
    (tree / "bob" / "half.png").write_bytes(whole[: len(whole) // 2])
    data = load(tree, layout="clients")
    assert data.notes == (
        f"2 of 32 images in {tree} could not be read: ann/empty.png, bob/half.png "
        "(the first: not a readable image)",
    )
    assert len(data.train) == 30
    assert data.train.owners.tolist() == [0] * 10 + [1] * 10 + [2] * 10
    assert data.train.pixels[10:20, 0, 0, 0].tolist() == list(range(10))


def test_too_many_broken_files_are_an_error_that_names_the_first(tree):
    (tree / "ann" / "bad.jpg").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"1 of 31 images.*max_broken.*bad\.jpg"):
        load(tree, max_broken=0.01)


def test_an_empty_or_absent_folder_is_one_sentence(tmp_path):
    with pytest.raises(DataError, match="holds no images"):
        load(tmp_path)
    with pytest.raises(DataError, match="there is no folder"):
        load(tmp_path / "nowhere")


def test_a_relative_path_is_looked_for_in_the_data_folder(tree):
    options = Folder.Options(path="ann")
    assert len(Folder.load(options, root=tree, seed=0).train) == 10


def test_the_test_split_takes_its_share_of_every_client(tree):
    data = load(tree, layout="clients", test_fraction=0.3)
    assert np.bincount(data.train.owners.numpy()).tolist() == [7, 7, 7]
    assert np.bincount(data.test.owners.numpy()).tolist() == [3, 3, 3]
    for owner in range(3):
        kept = data.train.pixels[data.train.owners == owner][:, 0, 0, 0]
        held_out = data.test.pixels[data.test.owners == owner][:, 0, 0, 0]
        assert sorted(kept.tolist() + held_out.tolist()) == list(range(10))


def test_the_split_depends_on_the_seed_alone(tree):
    first, again, other = (
        load(tree, layout="clients", test_fraction=0.3, seed=seed).test.pixels for seed in (1, 1, 2)
    )
    assert first.equal(again)
    assert not first.equal(other)


def test_channel_statistics_are_those_of_the_training_images(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(6):
        noise = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / f"{i}.png")
    data = load(tmp_path, image_size=16)
    pixels = data.train.pixels.numpy() / 255
    assert data.mean == pytest.approx(pixels.mean(axis=(0, 2, 3)))
    assert data.std == pytest.approx(pixels.std(axis=(0, 2, 3)))
