"""Fine-tuning learns and touches only its copy."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ssfl.errors import DataError
from ssfl.evaluation.finetune import FinetuneOptions, FinetuneResult, finetune
from ssfl.evaluation.linear import LinearOptions, linear_probe

FAST = FinetuneOptions(epochs=15, batch=16, lr=0.05)


def normalise(pixels: Tensor) -> Tensor:
    return pixels.float() / 127.5 - 1


def stripes(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Horizontal or vertical stripes at a random place, strength and with noise."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(2, size=n)
    phase = rng.uniform(0, 2 * np.pi, (n, 1, 1))
    y, x = np.mgrid[:8, :8]
    wave = np.sin(np.where(labels[:, None, None] == 0, x, y) * 2.0 + phase)
    image = 127 + 60 * wave + 25 * rng.normal(size=(n, 8, 8))
    return torch.from_numpy(image.clip(0, 255).astype(np.uint8)[:, None]), torch.from_numpy(labels)


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def tune(
    network: nn.Module, options: FinetuneOptions = FAST, seed: int = 0, shuffle: bool = False
) -> FinetuneResult:
    x, y = stripes(65, seed=0)
    test_x, test_y = stripes(200, seed=1)
    test_y = test_y.flip(0) if shuffle else test_y
    return finetune(network, x, y, test_x, test_y, normalise, None, options, seed, "cpu")


def test_fine_tuning_leaves_the_given_encoder_untouched() -> None:
    network = encoder().requires_grad_(False)
    before = copy.deepcopy(network.state_dict())
    result = tune(network)
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert network.training
    assert not any(p.requires_grad for p in network.parameters())
    assert not torch.equal(result.encoder[0].weight, network[0].weight)  # type: ignore[index]


def test_fine_tuning_learns_what_a_frozen_poor_encoder_does_not_show() -> None:
    network = encoder()
    nn.init.constant_(network[0].weight, 0.1)  # type: ignore[index]
    network[0].weight.data[1:3] += 0.02 * torch.randn(2, 1, 3, 3)  # type: ignore[index]
    x, y = (stripes(65, 0), stripes(200, 1))
    with torch.no_grad():
        network.eval()
        frozen = linear_probe(
            network(normalise(x[0])), x[1], network(normalise(y[0])), y[1], 2, LinearOptions()
        )
    network.train()
    tuned = tune(network)
    assert tuned.accuracy > max(0.9, frozen.accuracy + 0.05)
    assert tuned.images == 65


def test_the_same_seed_gives_the_same_bits_and_test_labels_change_none() -> None:
    a, b, other = tune(encoder()), tune(encoder(), shuffle=True), tune(encoder(), seed=1)
    assert torch.equal(a.head.weight, b.head.weight)
    assert all(
        torch.equal(p, q)
        for p, q in zip(a.encoder.parameters(), b.encoder.parameters(), strict=True)
    )
    assert a.accuracy != b.accuracy
    assert not torch.equal(a.head.weight, other.head.weight)


def test_augmentation_sees_raw_pixels_of_training_images_and_a_seeded_generator() -> None:
    x, y = stripes(20, seed=0)
    draws: list[float] = []

    def augment(pixels: Tensor, dice: torch.Generator) -> Tensor:
        assert pixels.dtype == torch.uint8
        draws.append(torch.rand(1, generator=dice).item())
        return normalise(pixels)

    options = FinetuneOptions(epochs=2, batch=8)
    for _ in range(2):
        finetune(encoder(), x, y, x, y, normalise, augment, options, 4, "cpu")
    steps = 2 * 3  # 8 + 8 + 4 images, two epochs
    assert draws[:steps] == draws[steps:]
    assert len(set(draws)) == steps


def test_a_tail_of_one_image_is_dropped_rather_than_breaking_batch_norm() -> None:
    result = tune(encoder(), FinetuneOptions(epochs=1, batch=64))
    assert np.isfinite(result.loss)


def test_fewer_than_two_labelled_images_is_an_error_for_people() -> None:
    x, y = stripes(1, seed=0)
    with pytest.raises(DataError, match="at least two labelled images"):
        finetune(encoder(), x, y, x, y, normalise, None, FAST, 0, "cpu")
