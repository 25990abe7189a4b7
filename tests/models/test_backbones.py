"""Backbones: torchvision's sizes and recorded values, and what the rest of the house relies on."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ssfl.errors import ConfigError
from ssfl.models.backbones import BACKBONES, Backbone, BackboneOptions, build_backbone
from ssfl.models.norm import BatchNorm, set_groups
from ssfl.models.resnet import resnet18, resnet34, resnet50

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "golden" / "torchvision.npz")


def build(name: str, *, channels: int = 3, image_size: int = 32, **options: object) -> Backbone:
    options = BackboneOptions(backbone=name, **options)
    return build_backbone(options, channels=channels, image_size=image_size)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("name", "with_classifier", "features"),
    [
        ("resnet18", 11_689_512, 512),
        ("resnet34", 21_797_672, 512),
        ("resnet50", 25_557_032, 2048),
        ("mobilenet", 3_504_872, 1280),
        ("efficientnet", 5_288_548, 1280),
    ],
)
def test_networks_have_torchvisions_parameters_less_its_classifier(name, with_classifier, features):
    with torch.device("meta"):
        backbone = build(name, image_size=224)
    assert backbone.features == features
    assert count(backbone) == with_classifier - (features * 1000 + 1000)


def fill(model: nn.Module) -> None:
    """Weights and statistics by formula, as in golden/record.py."""
    for index, (name, tensor) in enumerate([*model.named_parameters(), *model.named_buffers()]):
        wave = torch.sin(0.7 * torch.arange(tensor.numel(), dtype=torch.float64) + index)
        if tensor.ndim == 4:
            wave *= 0.8 / tensor[0].numel() ** 0.5
        elif name.endswith(("weight", "running_var")):
            wave = 1 + 0.2 * wave
        else:
            wave *= 0.1
        tensor.data.copy_(wave.view(tensor.shape))


@torch.no_grad()
def test_resnet18_computes_what_torchvisions_does():
    model = resnet18(stem="imagenet")
    fill(model)
    images = torch.sin(torch.arange(2 * 3 * 64 * 64, dtype=torch.float64) ** 1.1)
    images = images.float().view(2, 3, 64, 64)
    for mode, name in ((True, "resnet18_train"), (False, "resnet18_eval")):
        expected = torch.from_numpy(GOLDEN[name])
        torch.testing.assert_close(model.train(mode)(images), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "recorded"),
    [
        ("resnet18", "804c0cdcc273681a"),
        ("resnet34", "a73a85199e3729c5"),
        ("resnet50", "6f8d71cd701134f7"),
    ],
)
def test_resnets_have_the_names_and_shapes_of_torchvisions_so_its_weights_fit(name, recorded):
    """Recorded from torchvision 0.26's own state_dict, less its classifier and counters."""
    with torch.device("meta"):
        tensors = build(name, image_size=224).state_dict()
    lines = "\n".join(f"{tensor} {list(tensors[tensor].shape)}" for tensor in sorted(tensors))
    assert hashlib.sha256(lines.encode()).hexdigest()[:16] == recorded


def test_the_cifar_stem_keeps_the_resolution_and_the_imagenet_stem_quarters_it():
    image = torch.zeros(1, 3, 64, 64)
    for stem, size in (("cifar", 64), ("imagenet", 16)):
        model = resnet18(stem=stem, width=8)
        assert model.maxpool(model.conv1(image)).shape[-2:] == (size, size)
    assert resnet18(stem="cifar").conv1.weight.shape == (64, 3, 3, 3)


def test_the_stem_follows_the_image_size_unless_told():
    assert build("resnet18", image_size=32, width=8).conv1.kernel_size == (3, 3)
    assert build("resnet18", image_size=96, width=8).conv1.kernel_size == (7, 7)
    assert build("resnet18", image_size=96, width=8, stem="cifar").conv1.kernel_size == (3, 3)
    assert build("resnet18", image_size=32, width=8, stem="imagenet").conv1.kernel_size == (7, 7)


def test_a_resnet_begins_as_torchvisions_does():
    torch.manual_seed(0)
    model = resnet18()
    weight = model.layer3[0].conv2.weight
    assert weight.std().item() == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.01)
    assert all(torch.all(m.weight == 1) for m in model.modules() if isinstance(m, BatchNorm))


@pytest.mark.parametrize(("make", "features"), [(resnet18, 128), (resnet34, 128), (resnet50, 512)])
def test_width_scales_a_resnet(make, features):
    with torch.device("meta"):
        assert make(width=16).features == features


@pytest.mark.parametrize("name", list(BACKBONES))
@pytest.mark.parametrize(("channels", "image_size"), [(3, 32), (1, 8)])
def test_backbones_turn_images_into_vectors_and_learn(name, channels, image_size):
    torch.manual_seed(0)
    backbone = build(name, channels=channels, image_size=image_size, width=8)
    images = torch.randn(4, channels, image_size, image_size)
    features = backbone(images)
    assert features.shape == (4, backbone.features)
    features.square().sum().backward()
    for parameter in backbone.parameters():
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()


@pytest.mark.parametrize("name", list(BACKBONES))
def test_backbones_hold_nothing_but_floats_of_their_own(name):
    """One flat vector must be able to hold them: no counters, no shared or missing tensors."""
    backbone = build(name, width=8)
    tensors = [*backbone.parameters(), *backbone.buffers()]
    assert all(tensor.dtype == torch.float32 for tensor in tensors)
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    before = {name for name, _ in backbone.named_parameters()}
    backbone(torch.randn(2, 3, 32, 32))
    assert {name for name, _ in backbone.named_parameters()} == before


@pytest.mark.parametrize("name", list(BACKBONES))
def test_two_views_in_one_pass_are_two_passes(name):
    torch.manual_seed(0)
    one, two = build(name, width=8), build(name, width=8)
    two.load_state_dict(one.state_dict())
    set_groups(one, 2)
    views = torch.randn(8, 3, 32, 32)
    together = one(views)
    apart = torch.cat([two(view) for view in views.chunk(2)])
    torch.testing.assert_close(together, apart, rtol=1e-3, atol=1e-4)
    for ours, theirs in zip(one.buffers(), two.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", list(BACKBONES))
def test_channels_last_changes_nothing_but_speed(name):
    torch.manual_seed(0)
    backbone = build(name, width=8).eval()
    images = torch.randn(4, 3, 32, 32)
    expected = backbone(images)
    last = backbone.to(memory_format=torch.channels_last)
    ours = last(images.to(memory_format=torch.channels_last))
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4)


def test_the_small_net_is_small_and_keeps_tiny_images_from_vanishing():
    backbone = build("small")
    assert 100_000 < count(backbone) < 300_000
    assert 128 <= backbone.features <= 256
    digits = build("small", channels=1, image_size=8)
    shapes = []
    digits.same2.register_forward_hook(lambda module, x, y: shapes.append(y.shape[-2:]))
    digits(torch.randn(2, 1, 8, 8))
    assert shapes == [(2, 2)]


def test_the_same_seed_gives_the_same_network():
    def seeded(seed: int) -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return torch.cat([p.flatten() for p in build("small").parameters()])

    assert torch.equal(seeded(1), seeded(1))
    assert not torch.equal(seeded(1), seeded(2))


def test_an_unknown_backbone_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown backbone 'resnet19'.*resnet18"):
        build("resnet19")


@pytest.mark.parametrize("name", list(BACKBONES))
def test_with_group_norm_an_images_features_do_not_depend_on_the_others(name):
    torch.manual_seed(0)
    grouped = build(name, width=16, norm="group")
    assert not list(grouped.buffers())
    images = torch.randn(4, 3, 32, 32)
    torch.testing.assert_close(grouped(images)[1:2], grouped(images[1:2]), rtol=1e-4, atol=1e-5)
    torch.manual_seed(0)
    assert set(dict(build(name, width=16).named_parameters())) == set(grouped.state_dict())
    features = grouped(images)
    features.square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in grouped.parameters())
