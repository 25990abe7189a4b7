"""Batch norm per view: against torch's own BatchNorm, one view after another. Group norm: against
its definition in NumPy."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ssfl.models import norm as ssfl_norm
from ssfl.models.norm import BatchNorm, GroupNorm, epsilon_share, set_groups, use_group_norm

SHAPES = [(12, 5), (12, 5, 4, 3), (6, 5)]  # in three views, the last has two images each


UNUSUAL = {"eps": 0.1, "momentum": 0.3}  # what a norm takes for granted is not what it was told


def some(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * 2 + 1


def oracle(features: int, ndim: int, affine: bool) -> nn.Module:
    kind = nn.BatchNorm1d if ndim == 2 else nn.BatchNorm2d
    return kind(features, affine=affine, **UNUSUAL)


def pair(shape: tuple[int, ...], *, groups: int, affine: bool, plain: bool):
    """Ours, and torch's with the same scale and shift."""
    ours = BatchNorm(5, affine=affine, groups=groups, **UNUSUAL)
    theirs = oracle(5, len(shape), affine)
    ours.plain_ops = plain
    if affine:
        with torch.no_grad():
            for ours_, theirs_ in ((ours.weight, theirs.weight), (ours.bias, theirs.bias)):
                ours_.copy_(some((5,), 7))
                theirs_.copy_(ours_)
    return ours, theirs


def same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    """Of scale and shift, where there are any."""
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_training_is_one_pass_per_view_after_another(shape, groups, affine, plain):
    ours, theirs = pair(shape, groups=groups, affine=affine, plain=plain)
    ours_x = some(shape).requires_grad_()
    theirs_x = some(shape).requires_grad_()
    got = ours(ours_x)
    expected = torch.cat([theirs(view) for view in theirs_x.chunk(groups)])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)

    for output in (got, expected):
        (output * some(shape, 3)).sum().backward()
    torch.testing.assert_close(ours_x.grad, theirs_x.grad, rtol=1e-4, atol=1e-5)
    same_gradients(ours, theirs)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_evaluation_uses_running_statistics_whatever_the_groups(shape, affine, plain):
    ours, theirs = pair(shape, groups=3, affine=affine, plain=plain)
    for norm in (ours, theirs):
        norm.running_mean.copy_(some((5,), 1))
        norm.running_var.copy_(some((5,), 2).abs())
        norm.eval()
    ours_x, theirs_x = (some((7, *shape[1:])).requires_grad_() for _ in range(2))  # no whole views
    got, expected = ours(ours_x), theirs(theirs_x)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for output in (got, expected):
        (output * some(tuple(output.shape), 3)).sum().backward()
    torch.testing.assert_close(ours_x.grad, theirs_x.grad, rtol=1e-4, atol=1e-5)
    same_gradients(ours, theirs)
    torch.testing.assert_close(ours.running_mean, some((5,), 1))
    torch.testing.assert_close(ours.running_var, some((5,), 2).abs())


def test_statistics_that_kernels_read_from_a_copy_are_moved_all_the_same(monkeypatch):
    """As where a GPU cannot read them where they lie."""
    x, found = some((6, 5)), []
    for read in (ssfl_norm._where_kernels_can_read, torch.clone):
        monkeypatch.setattr(ssfl_norm, "_where_kernels_can_read", read)
        ours = BatchNorm(5, groups=2)
        outputs = [ours(x), ours.eval()(x)]
        found.append([*outputs, ours.running_mean, ours.running_var])
    for in_place, copied in zip(*found, strict=True):
        assert torch.equal(in_place, copied)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("compiling", [True, False])
@pytest.mark.parametrize("plain", [True, False, None])
def test_native_kernels_are_called_unless_a_compiler_is_at_work_or_someone_says_otherwise(
    plain, compiling, training, monkeypatch
):
    called, native = [], F.batch_norm
    monkeypatch.setattr(F, "batch_norm", lambda *given: called.append(given) or native(*given))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    ours = BatchNorm(5).train(training)
    ours.plain_ops = plain
    ours(some((7, 5)))
    assert len(called) == (not compiling if plain is None else not plain)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(8, 3, 4, 4), (8, 3)])
def test_the_written_out_backward_pass_gives_the_native_gradients(shape, affine):
    x, seen = some(shape), some(shape).cos()
    gradients = []
    for plain in (True, False):
        norm = BatchNorm(3, groups=2, affine=affine)
        norm.plain_ops = plain
        if norm.weight is not None:
            norm.weight.data.copy_(torch.tensor([0.5, -1.0, 2.0]))
        given = x.clone().requires_grad_()
        (norm(given) * seen).sum().backward()
        gradients.append([given.grad, *(p.grad for p in norm.parameters())])
    for ours, native in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, native, rtol=1e-4, atol=1e-5)


def test_gradients_of_the_native_kernels_may_be_differentiated_again():
    norm = BatchNorm(3, groups=2).double()
    norm.plain_ops = False
    x = some((8, 3, 2, 2)).double().requires_grad_()

    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        parameters = {"weight": weight, "bias": bias}
        return torch.func.functional_call(norm, parameters, (x,))

    weight = torch.linspace(0.5, 1.5, 3).double().requires_grad_()
    bias = torch.zeros(3).double().requires_grad_()
    assert torch.autograd.gradgradcheck(forward, (x, weight, bias), fast_mode=True)


@pytest.mark.parametrize("plain", [False, True])
def test_half_precision_in_gives_half_out_with_float32_statistics(plain):
    norm = BatchNorm(5, groups=2)
    norm.plain_ops = plain
    x = some((64, 5, 4, 4)) + 100  # far from zero: bfloat16 sums would be useless here
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = norm(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert norm.running_mean.dtype == torch.float32
    parts = x.bfloat16().double().chunk(2)
    mean = torch.zeros(5).double()
    for part in parts:
        mean = 0.9 * mean + 0.1 * part.mean(dim=(0, 2, 3))
    torch.testing.assert_close(norm.running_mean.double(), mean, rtol=1e-5, atol=1e-5)
    expected = torch.cat(
        [
            (p - p.mean((0, 2, 3), keepdim=True)) / p.std((0, 2, 3), correction=0, keepdim=True)
            for p in parts
        ]
    )
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-2)

    norm.running_mean.fill_(100.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = norm.eval()(x.bfloat16())
    assert y.dtype == torch.bfloat16
    scale = (norm.running_var.double() + 1e-5).rsqrt().view(5, 1, 1)
    torch.testing.assert_close(
        y.double(), (x.bfloat16().double() - 100) * scale, rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize("plain", [False, True])
def test_channels_last_stays_channels_last(plain):
    norm = BatchNorm(5, groups=2)
    norm.plain_ops = plain
    x = some((8, 5, 4, 4)).to(memory_format=torch.channels_last)
    y = norm(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    other = BatchNorm(5, groups=2)
    torch.testing.assert_close(y, other(x.contiguous()))


@pytest.mark.parametrize("affine", [False, True])
def test_there_are_no_tensors_but_floats(affine):
    names = set(BatchNorm(4, affine=affine).state_dict())
    statistics = {"running_mean", "running_var"}
    assert names == statistics | ({"weight", "bias"} if affine else set())
    assert all(t.dtype == torch.float32 for t in BatchNorm(4).state_dict().values())


def test_set_groups_reaches_every_norm_inside():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), BatchNorm(4), nn.Sequential(BatchNorm(4)))
    set_groups(model, 2)
    assert [m.groups for m in model.modules() if isinstance(m, BatchNorm)] == [2, 2]
    assert model[0].groups == 1  # a convolution's are others


def test_a_batch_that_is_not_whole_views_is_refused():
    with pytest.raises(ValueError, match="batch of 5 cannot be split into 2 views"):
        BatchNorm(3, groups=2)(torch.randn(5, 3))


@pytest.mark.parametrize("plain", [False, True])
def test_a_view_of_one_value_is_refused(plain):
    norm = BatchNorm(3, groups=2)
    norm.plain_ops = plain
    with pytest.raises(ValueError, match=r"more than (one|1) value per channel"):
        norm(torch.randn(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_gradients_are_those_of_plain_calls(dtype):
    norm = BatchNorm(5, groups=2)
    norm.plain_ops = True
    compiled = torch.compile(norm, backend="aot_eager")
    gradients = []
    for call in (norm, compiled):
        x = some((12, 5)).to(dtype).requires_grad_()
        norm.zero_grad()
        call(x).float().pow(3).sum().backward()
        gradients.append([x.grad, norm.weight.grad, norm.bias.grad])
    for plain, ours in zip(*gradients, strict=True):
        assert plain.abs().max() > 0
        torch.testing.assert_close(ours, plain)


def test_what_is_lost_to_epsilon_is_that_of_the_worst_norm_by_hand():
    fine, bad = BatchNorm(2), BatchNorm(3)
    with torch.no_grad():
        bad.running_var.copy_(torch.tensor([1e-5, 3e-5, 0.0]))
        bad.weight.copy_(torch.tensor([1.0, 2.0, 0.0]))  # the dead channel has no part in it
    assert epsilon_share(nn.Sequential(fine)) == pytest.approx(1e-5, rel=1e-3)
    # (1²·½ + 2²·¼) / (1² + 2²)
    assert epsilon_share(nn.Sequential(fine, bad)) == pytest.approx(0.3)
    assert epsilon_share(nn.Linear(2, 2)) == 0
    plain = BatchNorm(2, affine=False)
    plain.running_var.copy_(torch.tensor([1e-5, 3e-5]))
    assert epsilon_share(plain) == pytest.approx((1 / 2 + 1 / 4) / 2)
    nn.init.zeros_(bad.weight)
    assert epsilon_share(bad) == 0  # it passes nothing on that could be lost


def test_what_is_lost_to_epsilon_is_lost_by_the_output():
    norm, images = BatchNorm(4), some((64, 4, 5, 5)) * 4e-3
    norm.momentum = 1.0
    lost = 1 - norm(images).var(dim=(0, 2, 3), correction=0).mean()
    assert epsilon_share(norm) == pytest.approx(lost.item(), rel=1e-2)
    assert 0.05 < lost < 0.5


@pytest.mark.parametrize(("features", "each"), [(32, 16), (24, 8), (4, 4)])
def test_group_norm_looks_at_sixteen_channels_of_one_image_at_most(features, each):
    norm, images = GroupNorm(features), some((3, features, 5, 2))
    with torch.no_grad():
        norm.weight.copy_(some((features,), 1))
        norm.bias.copy_(some((features,), 2))
    got = norm(images).detach().numpy()
    for image, out in zip(images.numpy(), got, strict=True):
        for first in range(0, features, each):
            some_of = slice(first, first + each)
            part = image[some_of]
            weight, bias = (
                t.detach().numpy()[some_of, None, None] for t in (norm.weight, norm.bias)
            )
            expected = (part - part.mean()) / np.sqrt(part.var() + 1e-5) * weight + bias
            np.testing.assert_allclose(out[some_of], expected, rtol=1e-4, atol=1e-5)


def test_group_norm_returns_the_precision_it_was_given():
    norm = GroupNorm(16)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(some((2, 16, 3, 3)).bfloat16()).dtype is torch.bfloat16
    assert norm(some((2, 16, 3, 3))).dtype is torch.float32


def test_group_norm_takes_the_place_of_every_batch_norm_and_keeps_its_name():
    model = nn.Sequential(nn.Linear(3, 4), BatchNorm(4), nn.Sequential(BatchNorm(4, eps=0.1)))
    use_group_norm(model)
    assert [type(m) for m in (model[0], model[1], model[2][0])] == [nn.Linear, GroupNorm, GroupNorm]
    assert [model[1].eps, model[2][0].eps] == [1e-5, 0.1]
    assert set(model.state_dict()) == {
        f"{i}.{n}" for i in ("0", "1", "2.0") for n in ("weight", "bias")
    }
