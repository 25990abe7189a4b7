"""Views against recorded torchvision values, and the sampling of crops against its rule longhand.

golden/record.py made the recorded values.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from ssfl.data.transforms import (
    Boxes,
    adjust_brightness,
    adjust_contrast,
    adjust_hue,
    adjust_saturation,
    gaussian_blur,
    resized_crop,
    solarize,
    to_grey,
)
from ssfl.data.views import (
    PRESETS,
    ViewOptions,
    Views,
    ViewSpec,
    _fallback,
    draw_boxes,
    draw_places,
    resolve,
)
from ssfl.errors import ConfigError

GOLDEN = np.load(Path(__file__).parent / "golden" / "torchvision.npz")
RGB = {"mean": (0.5, 0.4, 0.3), "std": (0.25, 0.2, 0.3)}


def recorded(name: str) -> torch.Tensor:
    return torch.from_numpy(GOLDEN[name])


def floats(name: str) -> torch.Tensor:
    return recorded(name).float() / 255


def assert_close(ours: torch.Tensor, name: str) -> None:
    torch.testing.assert_close(ours, recorded(name), rtol=0, atol=1e-5)


def make(preset: str, *, image_size: int = 32, channels: int = 3, **options: object) -> Views:
    statistics = {"mean": (0.5,) * channels, "std": (0.25,) * channels}
    return Views(
        resolve(ViewOptions(**options), preset=preset, image_size=image_size, **statistics)
    )


def some_images(count: int, channels: int = 3, size: int = 32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (count, channels, size, size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def some_uniforms(views: Views, count: int, per_image: int = 2, seed: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(per_image, count, views.draws, generator=generator)


# --- single transforms ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "transform", "parameters"),
    [
        ("brightness", adjust_brightness, "factors"),
        ("contrast", adjust_contrast, "factors"),
        ("saturation", adjust_saturation, "factors"),
        ("hue", adjust_hue, "shifts"),
    ],
)
def test_changes_of_colour_match_torchvision(name, transform, parameters):
    assert_close(transform(floats("pixels"), recorded(parameters)), name)


def test_grey_matches_torchvision():
    assert_close(to_grey(floats("pixels")), "grey")


def test_solarize_matches_torchvision():
    assert_close(solarize(floats("pixels")), "solarize")


@pytest.mark.parametrize("kernel", [5, 23])
def test_blur_matches_torchvision(kernel):
    assert_close(gaussian_blur(floats("pixels"), recorded("sigmas"), kernel), f"blur{kernel}")


@pytest.mark.parametrize(
    ("name", "size", "flip", "padding"),
    [
        ("crop_up", 16, False, 0),
        ("crop_down", 6, False, 0),
        ("crop_flip", 16, True, 0),
        ("crop_padded", 16, False, 4),
    ],
)
def test_resized_crops_match_torchvision(name, size, flip, padding):
    boxes = Boxes(*recorded("boxes").unbind(1))
    mirrored = torch.full((4,), flip)
    ours = resized_crop(floats("crop_pixels"), boxes, size, flip=mirrored, padding=padding)
    assert_close(ours, name)


def test_a_crop_reads_nothing_outside_its_box():
    images = torch.ones(1, 1, 12, 12)
    images[:, :, 4:8, 3:9] = 0.25
    box = Boxes(*(torch.tensor([float(side)]) for side in (4, 3, 4, 6)))
    assert torch.all(resized_crop(images, box, 16) == 0.25)


def test_images_of_one_channel_keep_it_through_every_change():
    grey = floats("pixels")[:, :1]
    factor = recorded("factors")
    assert torch.equal(adjust_hue(grey, factor), grey)
    assert torch.equal(adjust_saturation(grey, factor), grey)
    assert torch.equal(to_grey(grey), grey)


# --- the whole augmentation -----------------------------------------------------------------


def test_two_views_match_torchvision_composed_one_image_at_a_time():
    options = ViewOptions(blur_kernel=5)
    spec = resolve(
        options,
        preset="photo",
        image_size=16,
        jitter=(0.4, 0.4, 0.2, 0.1),
        solarize=(0.0, 0.2),
        **RGB,
    )
    ours = Views(spec)(recorded("view_pixels"), recorded("view_uniforms"))
    # Dividing by a std of 0.2 magnifies what was 1e-5 before normalisation.
    torch.testing.assert_close(ours, recorded("view_outputs"), rtol=0, atol=5e-5)


@pytest.mark.parametrize("preset", ["cifar", "photo", "digits", "supervised", "none"])
def test_the_path_of_a_gpu_gives_what_the_cpu_gives(preset, monkeypatch):
    channels, size = (1, 8) if preset == "digits" else (3, 32)
    options = {"solarize": (0.0, 0.2)} if preset == "photo" else {}
    views = make(preset, image_size=size, channels=channels, **options)
    images = some_images(96, channels, size)
    uniforms = some_uniforms(views, 96)
    sparing = views(images, uniforms)
    monkeypatch.setattr("ssfl.data.views._on_cpu", lambda images: False)
    torch.testing.assert_close(views(images, uniforms), sparing, rtol=0, atol=1e-6)


def test_an_image_has_the_same_views_whatever_stands_beside_it():
    views = make("cifar")
    images = some_images(40)
    uniforms = some_uniforms(views, 40)
    alone = views(images[7:8], uniforms[:, 7:8])
    torch.testing.assert_close(views(images, uniforms)[:, 7:8], alone, rtol=0, atol=1e-6)


def test_the_same_numbers_give_the_same_bits_and_inputs_stay_as_they_were():
    views = make("cifar")
    images, uniforms = some_images(16), some_uniforms(views, 16)
    before = images.clone(), uniforms.clone()
    assert torch.equal(views(images, uniforms), views(images, uniforms))
    assert torch.equal(images, before[0])
    assert torch.equal(uniforms, before[1])
    other = views(images, some_uniforms(views, 16, seed=3))
    assert not torch.equal(other, views(images, uniforms))


def test_views_are_float32_also_under_autocast():
    views = make("cifar")
    images, uniforms = some_images(4), some_uniforms(views, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = views(images, uniforms)
    assert mixed.dtype == torch.float32
    assert torch.equal(mixed, views(images, uniforms))


def test_plain_images_are_only_normalised():
    views = Views(ViewSpec(image_size=16, size=16, **RGB))
    expected = GOLDEN["pixels"] / 255.0
    expected = (expected - np.array(RGB["mean"])[:, None, None]) / np.array(RGB["std"])[
        :, None, None
    ]
    np.testing.assert_allclose(views.plain(recorded("pixels")).numpy(), expected, atol=1e-5)


def test_plain_images_of_another_size_are_resized_whole():
    views = Views(ViewSpec(image_size=16, size=16, mean=(0.0,) * 3, std=(1.0,) * 3))
    assert_close(views.plain(recorded("crop_pixels")), "whole")


def test_without_augmentation_views_are_the_plain_images():
    views = make("none")
    images = some_images(3)
    assert views.draws == 0
    both = views(images, torch.empty(2, 3, 0))
    assert torch.equal(both[0], views.plain(images))
    assert torch.equal(both[1], both[0])
    for height, width in ((20, 32), (32, 20), (40, 48)):  # of another size: resized whole
        images = torch.nn.functional.pad(some_images(3), (0, width - 32, 0, height - 32))
        got = views(images, torch.empty(1, 3, 0))[0]
        torch.testing.assert_close(got, views.plain(images), rtol=0, atol=1e-5)


def test_supervised_views_are_shifted_and_flipped_but_never_rescaled():
    """Every view is one of the 9 × 9 × 2 crops of the image with four black pixels around it."""
    views = make("supervised", image_size=8)
    image = some_images(1, size=8)
    got = views(image.expand(300, -1, -1, -1), some_uniforms(views, 300, per_image=1))[0]
    padded = np.pad(image[0].numpy() / 255.0, ((0, 0), (4, 4), (4, 4)))
    possible = set()
    for top in range(9):
        for left in range(9):
            crop = (padded[:, top : top + 8, left : left + 8] - 0.5) / 0.25
            possible |= {_key(crop), _key(crop[:, :, ::-1])}
    seen = {_key(view) for view in got.numpy()}
    assert seen <= possible
    assert len(seen) > 100
    assert views.draws == 2 + 1  # a place and a flip


def test_views_of_another_size_show_the_same_crops_resized_as_torch_resizes():
    views = make("none", size=24, crop_scale=(0.2, 1.0), flip=0.5)
    images = some_images(30)
    uniforms = some_uniforms(views, 30, per_image=1)
    got = views(images, uniforms)[0]
    boxes = draw_boxes(uniforms[0], 32, 32, (0.2, 1.0), (3 / 4, 4 / 3))
    flipped = uniforms[0, :, -1] < 0.5
    for image, box, mirrored, view in zip(
        images, zip(*boxes, strict=True), flipped, got, strict=True
    ):
        top, left, height, width = (int(side) for side in box)
        cut = image[None, :, top : top + height, left : left + width].float() / 255
        expected = torch.nn.functional.interpolate(
            cut, (24, 24), mode="bilinear", antialias=True, align_corners=False
        )[0]
        expected = (expected.flip(-1) if mirrored else expected).sub(0.5).div(0.25)
        torch.testing.assert_close(view, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("preset", ["cifar", "photo", "digits", "supervised", "none"])
def test_every_preset_has_views_of_another_size(preset):
    views = make(preset, size=24)
    got = views(some_images(5), some_uniforms(views, 5))
    assert got.shape == (2, 5, 3, 24, 24)
    assert got.isfinite().all()
    assert views.plain(some_images(5)).shape == (5, 3, 32, 32)  # images are judged as they are


def test_shifted_views_of_another_size_show_as_much_of_the_image():
    small, usual = make("supervised", size=16), make("supervised")
    images, uniforms = some_images(20), some_uniforms(usual, 20)
    whole = usual(images, uniforms).flatten(0, 1)
    halved = torch.nn.functional.interpolate(whole, (16, 16), mode="bilinear", antialias=True)
    got = small(images, uniforms).flatten(0, 1)
    torch.testing.assert_close(got, halved, rtol=0, atol=1e-4)


def _key(image: np.ndarray) -> bytes:
    return np.round(image * 1000).astype(np.int64).tobytes()


def test_digits_are_not_mirrored():
    """A bright left half stays left: at least as bright as the right in every view."""
    images = torch.zeros(200, 1, 8, 8, dtype=torch.uint8)
    images[..., :4] = 255
    views = make("digits", image_size=8, channels=1)
    got = views(images, some_uniforms(views, 200))
    left, right = got[..., :4].mean(dim=(2, 3, 4)), got[..., 4:].mean(dim=(2, 3, 4))
    assert torch.all(left >= right - 1e-5)


def test_wrong_uniforms_are_refused():
    views = make("cifar")
    with pytest.raises(ValueError, match="do not fit 4 images"):
        views(some_images(4), torch.rand(2, 4, views.draws + 1))
    with pytest.raises(ValueError, match="do not fit 4 images"):
        views(some_images(4), torch.rand(2, 3, views.draws))


def test_what_is_never_to_happen_does_not_happen_at_a_draw_of_zero():
    images = some_images(3)
    views = make("none", solarize=(0.0, 1.0))
    untouched, inverted = views(images, torch.zeros(2, 3, views.draws))
    assert torch.equal(untouched, views.plain(images))
    assert not torch.equal(inverted, untouched)


def test_all_that_views_keep_is_on_their_device():
    """A captured step may not copy from the host."""
    spec = resolve(ViewOptions(), preset="photo", image_size=32, **RGB)
    kept = [value for value in vars(Views(spec, "meta")).values() if torch.is_tensor(value)]
    assert {tensor.device.type for tensor in kept} == {"meta"}
    assert len(kept) == 4


# --- how often ------------------------------------------------------------------------------


def boxes_longhand(u: np.ndarray, height: int, width: int, scale, ratio) -> np.ndarray:
    """RandomResizedCrop's rule for one image, in double precision."""
    for attempt in range(10):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * u[attempt])
        low, high = math.log(ratio[0]), math.log(ratio[1])
        aspect = math.exp(low + (high - low) * u[10 + attempt])
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return np.array([int(u[20] * (height - h + 1)), int(u[21] * (width - w + 1)), h, w])
    h, w = height, width
    if width / height < ratio[0]:
        h = round(width / ratio[0])
    elif width / height > ratio[1]:
        w = round(height * ratio[1])
    return np.array([(height - h) // 2, (width - w) // 2, h, w])


@pytest.mark.parametrize(
    ("height", "width", "scale"),
    [(32, 32, (0.2, 1.0)), (48, 24, (0.3, 1.0)), (20, 60, (0.9, 1.0)), (8, 8, (0.01, 0.1))],
)
def test_crop_boxes_follow_the_rule_written_longhand(height, width, scale):
    ratio = (3 / 4, 4 / 3)
    u = np.random.default_rng(4).random((3000, 22), dtype=np.float32)
    ours = torch.stack(draw_boxes(torch.from_numpy(u), height, width, scale, ratio), 1).numpy()
    expected = np.stack([boxes_longhand(row, height, width, scale, ratio) for row in u])
    # Float32 may round a side at exactly half a pixel the other way, once in a long while.
    agree = (ours == expected).all(axis=1).mean()
    assert agree > 0.998
    assert (ours[:, 0] + ours[:, 2] <= height).all()
    assert (ours[:, 1] + ours[:, 3] <= width).all()


def test_crop_boxes_are_distributed_as_torchvision_draws_them():
    u = torch.rand(100_000, 22, generator=torch.Generator().manual_seed(5))
    boxes = draw_boxes(u, 32, 32, (0.2, 1.0), (3 / 4, 4 / 3))
    for ours, theirs in zip(boxes, GOLDEN["box_counts"], strict=True):
        counts = torch.bincount(ours.long(), minlength=33).numpy()
        both = counts + theirs
        used = both > 20
        chi2 = ((counts - theirs)[used] ** 2 / both[used]).sum()
        degrees = used.sum() - 1
        assert chi2 < degrees + 5 * math.sqrt(2 * degrees)


def test_places_of_a_crop_are_all_equally_likely():
    """Eleven from the top and four from the left, each with its own share of [0, 1)."""
    tops, lefts = np.meshgrid(np.arange(11), np.arange(4), indexing="ij")
    u = np.stack([(tops.ravel() + 0.5) / 11, (lefts.ravel() + 0.5) / 4], axis=1)
    boxes = draw_places(torch.from_numpy(u), height=16, width=9, size=6)
    assert boxes.top.tolist() == tops.ravel().tolist()
    assert boxes.left.tolist() == lefts.ravel().tolist()
    assert {*boxes.height.tolist(), *boxes.width.tolist()} == {6}
    flat = draw_places(torch.from_numpy(u), height=4, width=9, size=6)  # there is no more height
    assert {*flat.top.tolist()} == {0}
    assert ({*flat.height.tolist()}, {*flat.width.tolist()}) == ({4}, {6})


def test_a_place_at_the_very_end_of_the_range_stays_inside():
    u = torch.full((1, 22), np.nextafter(np.float32(1), np.float32(0)).item())
    boxes = draw_boxes(u, 1 << 12, 1 << 12, (0.2, 0.3), (1.0, 1.0))
    assert boxes.top + boxes.height <= 1 << 12


def test_each_operation_happens_as_often_as_asked():
    """On an image whose pixels tell what was done to it: flip, colour, grey and solarize."""
    count = 4000
    image = torch.zeros(1, 3, 4, 4, dtype=torch.uint8)
    image[:, :, :, :2] = torch.tensor([140, 0, 0], dtype=torch.uint8).view(1, 3, 1, 1)
    spec = ViewSpec(
        image_size=4,
        size=4,
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
        flip=0.5,
        jitter=(0.0, 0.0, 0.0, 0.5),
        jitter_p=0.8,
        grey=0.2,
        solarize=(0.0, 0.3),
    )
    views = Views(spec)
    got = views(image.expand(count, -1, -1, -1), some_uniforms(views, count))
    left, right = got[..., 0, 0], got[..., 0, 3]
    flipped = left.sum(-1) < 1e-4
    grey = (left.amax(-1) - left.amin(-1)).maximum(right.amax(-1) - right.amin(-1)) < 1e-4
    for share, expected in ((flipped.float().mean(), 0.5), (grey.float().mean(), 0.2)):
        assert abs(share - expected) < 0.03
    colour = torch.where(flipped[..., None], right, left)
    unchanged = colour[0].isclose(torch.tensor([140, 0, 0]) / 255).all(-1)
    assert abs(unchanged.float().mean() - 0.2 * 0.8) < 0.03
    # Whatever the hue, grey is below the threshold; what is still above it was not solarized.
    bright = (colour.amax(-1) > 0.5).float().mean(dim=1)
    assert abs(bright[0] - 0.8) < 0.03
    assert abs(bright[1] - 0.8 * 0.7) < 0.03


def test_colour_changes_come_in_all_24_orders_equally_often(monkeypatch):
    """The four changes are replaced by x → 8x + k, which spell their order."""
    views = make("cifar", crop_scale=(1, 1), flip=0, grey=0, jitter_p=1)

    def spell(digit: int):
        return lambda images, amount: images * 8 + digit

    monkeypatch.setattr("ssfl.data.views.CHANGES", tuple(spell(k) for k in (1, 2, 3, 4)))
    u = torch.rand(24_000, 6, generator=torch.Generator().manual_seed(6))
    words = views._jitter(torch.zeros(24_000, 1, 1, 1), u, (0.4, 0.4, 0.4, 0.1)).flatten()
    values, counts = words.long().unique(return_counts=True)
    assert len(values) == 24
    assert all(sorted(f"{value:04o}") == ["1", "2", "3", "4"] for value in values.tolist())
    assert ((counts - 1000.0) ** 2 / 1000).sum() < 23 + 5 * math.sqrt(46)


# --- options --------------------------------------------------------------------------------


def test_the_users_options_go_over_the_methods_colours_over_the_preset():
    common = {"image_size": 32, **RGB}
    assert resolve(ViewOptions(), preset="cifar", **common).jitter == (0.4, 0.4, 0.4, 0.1)
    method = {"jitter": (0.8, 0.8, 0.8, 0.2), "solarize": (0.0, 0.2)}
    spec = resolve(ViewOptions(), preset="cifar", **method, **common)
    assert (spec.jitter, spec.solarize) == ((0.8, 0.8, 0.8, 0.2), (0.0, 0.2))
    own = ViewOptions(jitter=(0.1, 0.1, 0.1, 0.1), flip=0.0)
    spec = resolve(own, preset="cifar", **method, **common)
    assert (spec.jitter, spec.flip) == ((0.1, 0.1, 0.1, 0.1), 0.0)


def test_a_methods_colours_do_not_reach_a_preset_without_colour():
    method = {"jitter": (0.8, 0.8, 0.8, 0.2), "solarize": (0.0, 0.2)}
    spec = resolve(ViewOptions(), preset="digits", mean=(0.5,), std=(0.2,), image_size=8, **method)
    assert spec.jitter is None
    assert not any(spec.solarize)
    assert spec.flip == 0


def test_a_named_preset_goes_over_the_data_sets_own():
    spec = resolve(ViewOptions(preset="none"), preset="cifar", image_size=32, **RGB)
    assert spec == ViewSpec(image_size=32, size=32, blur_kernel=3, **RGB)


def test_photographs_of_224_pixels_are_blurred_with_a_kernel_of_23():
    spec = resolve(ViewOptions(), preset="photo", image_size=224, **RGB)
    assert (spec.blur, spec.blur_kernel, spec.blur_sigma) == (0.5, 23, (0.1, 2.0))


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'cifer'.*cifar, photo, digits"):
        resolve(ViewOptions(preset="cifer"), preset="cifar", image_size=32, **RGB)


def test_a_blur_wider_than_the_image_is_refused():
    with pytest.raises(ConfigError, match="too wide"):
        resolve(ViewOptions(blur=0.5, blur_kernel=17), preset="cifar", image_size=8, **RGB)
    widest = make("cifar", image_size=8, blur=1.0, blur_kernel=15)
    assert widest(some_images(2, size=8), some_uniforms(widest, 2)).isfinite().all()
    with pytest.raises(ConfigError, match="too wide for views of 8 pixels"):
        make("cifar", size=8, blur=0.5, blur_kernel=17)
    off = resolve(ViewOptions(blur_kernel=17), preset="cifar", image_size=8, **RGB)
    assert off.blur == 0


def test_presets_have_the_numbers_that_recorded_runs_had():
    colours = {"jitter": (0.4, 0.4, 0.4, 0.1), "jitter_p": 0.8, "grey": 0.2}
    simsiam = {"crop_scale": (0.2, 1.0), "flip": 0.5, **colours}
    expected = {
        "cifar": simsiam,
        "photo": {**simsiam, "blur": 0.5, "blur_sigma": (0.1, 2.0)},
        "digits": {"crop_scale": (0.4, 1.0), "padding": 1},
        "supervised": {"padding": 4, "flip": 0.5},
        "none": {},
    }
    for name, preset in PRESETS.items():
        assert preset.model_dump(exclude_none=True, exclude={"preset"}) == expected.pop(name)
    assert not expected


def test_the_smallest_kernel_has_three_pixels():
    assert resolve(ViewOptions(), preset="photo", image_size=8, **RGB).blur_kernel == 3


@pytest.mark.parametrize(
    "options",
    [
        {"crop_scale": (0.9, 0.2)},
        {"crop_scale": (0.5, 1.5)},
        {"crop_ratio": (0.0, 1.0)},
        {"flip": 1.5},
        {"jitter": (0.4, 0.4, 0.4, 0.6)},
        {"blur_kernel": 4},
        {"padding": -1},
        {"size": 4},
        {"colour": 1},
    ],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValidationError):
        ViewOptions(**options)


@pytest.mark.parametrize(
    ("image", "box"), [((10, 40), (10, 13)), ((40, 10), (13, 10)), ((10, 12), (10, 12))]
)
def test_where_no_crop_fits_the_box_is_the_largest_of_an_allowed_ratio(image, box):
    assert _fallback(*image, (3 / 4, 4 / 3)) == box
