"""Every loss against its paper's equation, written out longhand in NumPy float64."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssfl.seeding import numpy_generator
from ssfl.ssl.barlow_twins import barlow_twins_loss
from ssfl.ssl.base import Outputs, negative_cosine
from ssfl.ssl.moco import Keys, info_nce
from ssfl.ssl.simclr import nt_xent
from ssfl.ssl.swav import Assignments, code_loss
from ssfl.ssl.vicreg import vicreg_loss

Array = NDArray[np.float64]
N, D = 9, 6


def draw(*shape: int, seed: int = 0) -> Array:
    return numpy_generator(seed, "tensors", *shape).normal(size=shape)


def tensor(array: Array) -> Tensor:
    return torch.from_numpy(array).float()


def unit(array: Array) -> Array:
    return array / np.sqrt((array**2).sum(axis=-1, keepdims=True))


def cosine(a: Array, b: Array) -> float:
    return float(a @ b / np.sqrt(a @ a) / np.sqrt(b @ b))


def two_views(seed: int = 0) -> tuple[Array, Array]:
    z1 = draw(N, D, seed=seed)
    return z1, 0.7 * z1 + 0.5 * draw(N, D, seed=seed + 100)


def close(ours: Tensor, theirs: float) -> None:
    assert ours.dtype is torch.float32
    assert ours.item() == pytest.approx(theirs, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_negative_cosine_is_the_papers_d(seed: int) -> None:
    p, z = two_views(seed)
    close(
        negative_cosine(tensor(p), tensor(z)),
        -np.mean([cosine(p[i], z[i]) for i in range(N)]),
    )


@pytest.mark.parametrize("seed", range(3))
def test_simsiam_is_half_of_each_direction(make, seed: int) -> None:
    z, p = np.stack(two_views(seed)), np.stack(two_views(seed + 10))
    total = sum(cosine(p[0, i], z[1, i]) + cosine(p[1, i], z[0, i]) for i in range(N))
    close(make("simsiam").loss(Outputs(tensor(z), tensor(p))), -total / N / 2)


@pytest.mark.parametrize("temperature", [0.1, 0.2, 0.5])
@pytest.mark.parametrize("seed", range(2))
def test_nt_xent_is_the_double_loop_over_all_pairs(seed: int, temperature: float) -> None:
    z1, z2 = two_views(seed)
    z = np.concatenate([z1, z2])
    losses = []
    for i in range(2 * N):
        partner = i + N if i < N else i - N
        others = 0.0
        for k in range(2 * N):
            if k != i:
                others += np.exp(cosine(z[i], z[k]) / temperature)
        losses.append(-np.log(np.exp(cosine(z[i], z[partner]) / temperature) / others))
    close(nt_xent(tensor(z1), tensor(z2), temperature), np.mean(losses))


@pytest.mark.parametrize("seed", range(3))
def test_byol_is_the_squared_distance_of_unit_vectors_both_ways(make, seed: int) -> None:
    p, target = np.stack(two_views(seed)), np.stack(two_views(seed + 10))
    distance = ((unit(p) - unit(target)[::-1]) ** 2).sum(axis=-1)
    loss = make("byol").loss(Outputs(tensor(p), tensor(p), tensor(target)))
    close(loss, distance.mean(axis=1).sum())


@pytest.mark.parametrize("seed", range(3))
def test_info_nce_is_a_softmax_over_one_key_and_the_queue(make, seed: int) -> None:
    z, keys, queue = np.stack(two_views(seed)), unit(draw(2, N, D)), unit(draw(20, D))

    def direction(queries: Array, positives: Array) -> float:
        total = 0.0
        for q, k in zip(unit(queries), positives, strict=True):
            similar = np.exp(q @ k / 0.2)
            total -= np.log(similar / (similar + sum(np.exp(q @ m / 0.2) for m in queue)))
        return total / N

    close(info_nce(tensor(z[0]), tensor(keys[1]), tensor(queue), 0.2), direction(z[0], keys[1]))
    outputs = Outputs(tensor(z), tensor(z), Keys(tensor(keys), tensor(queue)))
    both = direction(z[0], keys[1]) / 2 + direction(z[1], keys[0]) / 2
    close(make("moco", temperature=0.2).loss(outputs), both)
    part_filled = torch.cat([tensor(queue), torch.zeros(5, D)])
    close(info_nce(tensor(z[0]), tensor(keys[1]), part_filled, 0.2), direction(z[0], keys[1]))


@pytest.mark.parametrize("seed", range(3))
def test_swav_is_the_cross_entropy_of_swapped_codes(make, seed: int) -> None:
    scores = unit(draw(2, N, D, seed=seed)) @ unit(draw(7, D, seed=seed)).T
    codes = np.exp(3 * draw(2, N, 7, seed=seed))
    codes /= codes.sum(axis=-1, keepdims=True)

    def direction(s: Array, q: Array) -> float:
        total = 0.0
        for i in range(N):
            probability = np.exp(s[i] / 0.1) / np.exp(s[i] / 0.1).sum()
            total -= sum(q[i, k] * np.log(probability[k]) for k in range(7))
        return total / N

    close(code_loss(tensor(scores[0]), tensor(codes[1]), 0.1), direction(scores[0], codes[1]))
    z = torch.zeros(2, N, D)
    outputs = Outputs(z, z, Assignments(tensor(scores), tensor(codes)))
    both = direction(scores[0], codes[1]) + direction(scores[1], codes[0])
    close(make("swav", temperature=0.1).loss(outputs), both)


@pytest.mark.parametrize("redundancy", [0.0051, 0.5])
@pytest.mark.parametrize("seed", range(2))
def test_barlow_twins_pulls_the_cross_correlation_to_the_identity(
    make, seed: int, redundancy: float
) -> None:
    z1, z2 = two_views(seed)
    a, b = 3 * z1 - 1, 0.5 * z2 + 2  # correlation sees neither scale nor shift
    total = 0.0
    for i in range(D):
        for j in range(D):
            x, y = a[:, i] - a[:, i].mean(), b[:, j] - b[:, j].mean()
            c = (x * y).sum() / np.sqrt((x**2).sum()) / np.sqrt((y**2).sum())
            total += (1 - c) ** 2 if i == j else redundancy * c**2
    close(barlow_twins_loss(tensor(a), tensor(b), redundancy), total)
    z = torch.stack([tensor(a), tensor(b)])
    method = make("barlow-twins", redundancy=redundancy, scale=0.1)
    close(method.loss(Outputs(z, z)), 0.1 * total)


@pytest.mark.parametrize("scale", [0.3, 1.0, 2.0])
def test_vicreg_is_its_three_terms(make, scale: float) -> None:
    z1, z2 = (scale * z for z in two_views())
    difference = sum((z1[i, j] - z2[i, j]) ** 2 for i in range(N) for j in range(D)) / (N * D)
    still = redundant = 0.0
    for z in (z1, z2):
        still += np.mean([max(0.0, 1 - np.sqrt(z[:, j].var(ddof=1) + 1e-4)) for j in range(D)])
        covariance = np.cov(z.T)
        redundant += sum(covariance[i, j] ** 2 for i in range(D) for j in range(D) if i != j) / D
    total = 25 * difference + 20 * still + 2 * redundant
    close(vicreg_loss(tensor(z1), tensor(z2), 25, 20, 2), total)
    z = torch.stack([tensor(z1), tensor(z2)])
    method = make("vicreg", invariance=25, variance=20, covariance=2, scale=0.5)
    close(method.loss(Outputs(z, z)), 0.5 * total)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_supervised_is_cross_entropy(make, smoothing: float) -> None:
    logits, labels = draw(1, N, 10), np.arange(N) % 10
    total = 0.0
    for i in range(N):
        log_probability = logits[0, i] - np.log(np.exp(logits[0, i]).sum())
        wanted = np.full(10, smoothing / 10)
        wanted[labels[i]] += 1 - smoothing
        total -= (wanted * log_probability).sum()
    outputs = Outputs(torch.zeros(1, N, D), tensor(logits), torch.from_numpy(labels))
    close(make("supervised", label_smoothing=smoothing).loss(outputs), total / N)


def test_a_prior_weighs_every_class_by_its_share_of_the_batch(make) -> None:
    logits, labels = draw(1, N, 5), np.arange(N) % 3  # no image of the classes 3 and 4
    share = np.array([(labels == c).mean() for c in range(5)])
    total = 0.0
    for i in range(N):
        weighted = share * np.exp(logits[0, i])
        total -= np.log(weighted[labels[i]] / weighted.sum())
    given = tensor(logits).requires_grad_()
    outputs = Outputs(torch.zeros(1, N, D), given, torch.from_numpy(labels))
    loss = make("supervised", classes=5, prior="batch").loss(outputs)
    close(loss, total / N)
    loss.backward()
    assert not given.grad[..., 3:].any()  # nothing is learned about classes that are not there
    assert given.grad[..., :3].abs().min() > 0


def test_with_a_prior_labels_cannot_be_smoothed(make) -> None:
    with pytest.raises(ValueError, match="set one of the two"):
        make("supervised", prior="batch", label_smoothing=0.1)


def test_a_constant_feature_leaves_losses_and_gradients_finite() -> None:
    z1, z2 = (tensor(z) for z in two_views())
    z1[:, 0] = 0.25
    z1.requires_grad_()
    for loss in (
        barlow_twins_loss(z1, z2, 0.0051),
        vicreg_loss(z1, z2, 25, 25, 1),
        nt_xent(z1, z2, 0.2),
    ):
        (gradient,) = torch.autograd.grad(loss, z1)
        assert loss.isfinite()
        assert gradient.isfinite().all()


def test_of_two_images_with_the_same_projections_vicreg_has_finite_second_derivatives() -> None:
    """There √(Var + ε) bends most: its curvature is 1 / ((N − 1) √ε), and not that of √Var."""
    z = torch.full((2, D), 0.25, requires_grad=True)
    direction = tensor(draw(2, D))
    loss = vicreg_loss(z, torch.zeros(2, D), 0, 1, 0)
    (gradient,) = torch.autograd.grad(loss, z, create_graph=True)
    (bend,) = torch.autograd.grad((gradient * direction).sum(), z)
    centred = direction - direction.mean(dim=0)
    torch.testing.assert_close(bend, -centred / 1e-2 / D, rtol=1e-4, atol=1e-5)
