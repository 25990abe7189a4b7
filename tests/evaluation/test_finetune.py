"""Fine-tuning learns as SGD written longhand does, and touches only its copy."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ssfl import seeding
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


@pytest.mark.parametrize(("images", "steps"), [(14, 4), (13, 3), (12, 3)])
def test_fine_tuning_is_nesterovs_descent_written_longhand(images: int, steps: int) -> None:
    """A tail of two images is trained on, a tail of one is not."""
    dice = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, 1, 2, 2), dtype=torch.uint8, generator=dice)
    labels = torch.arange(images) % 3
    torch.manual_seed(0)
    start = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh()).eval()
    options = FinetuneOptions(
        epochs=2, batch=4, lr=0.05, head_lr=0.2, momentum=0.8, weight_decay=0.1
    )
    data = (pixels, labels, pixels, labels)
    found = finetune(start, *data, normalise, None, options, 7, "cpu", classes=4)
    network = copy.deepcopy(start).double().train()
    head = nn.Linear(5, 4).double()
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    rates = dict.fromkeys(network.parameters(), 0.05) | dict.fromkeys(head.parameters(), 0.2)
    velocity = {p: torch.zeros_like(p) for p in rates}
    order = seeding.torch_generator(7, "finetune-order")
    for epoch in range(2):
        losses = []
        for step, rows in enumerate(torch.randperm(images, generator=order).split(4)[:steps]):
            loss = F.cross_entropy(head(network(normalise(pixels[rows]).double())), labels[rows])
            losses.append(loss.item())
            cosine = (1 + math.cos(math.pi * (epoch * steps + step) / (2 * steps))) / 2
            gradients = torch.autograd.grad(loss, list(rates))
            with torch.no_grad():
                for (p, rate), gradient in zip(rates.items(), gradients, strict=True):
                    pull = gradient + 0.1 * p
                    velocity[p] = 0.8 * velocity[p] + pull
                    p -= rate * cosine * (pull + 0.8 * velocity[p])
    ours = [*found.encoder.parameters(), *found.encoder.buffers(), *found.head.parameters()]
    theirs = [*network.parameters(), *network.buffers(), *head.parameters()]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.to(other.dtype), other, rtol=1e-4, atol=1e-5)
    assert found.loss == pytest.approx(sum(losses) / steps, rel=1e-5)
    right = head(network.eval()(normalise(pixels).double())).argmax(1) == labels
    assert found.accuracy == pytest.approx(right.double().mean().item())
    assert not found.encoder.training
    assert not found.head.training
