"""Weights unpacked and cast at once are the weights, and their gradients come back in place."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ssfl.models.flat import FlatModel
from ssfl.models.norm import BatchNorm
from ssfl.models.unpacked import Unpacked


class Net(nn.Module):
    """A convolution, a norm, a linear layer, a bare parameter and a frozen copy."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, bias=False)
        self.pointwise = nn.Conv2d(6, 6, 1)
        self.norm = BatchNorm(6)
        self.head = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.rand(4))
        self.unused = nn.Parameter(torch.rand(2))
        self.target = nn.Linear(6, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.pointwise(self.conv(x))).relu().mean((2, 3))
        return self.head(y) * self.scale + self.target(y)


def pass_of(net: nn.Module, weights: dict[str, Tensor] | None, autocast: bool) -> Tensor:
    x = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = net(x) if weights is None else functional_call(net, weights, (x,))
    return y.float().square().mean()


@pytest.fixture
def pair() -> tuple[FlatModel, Net]:
    torch.manual_seed(0)
    net = Net()
    return FlatModel(copy.deepcopy(net)), net


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_pass_and_its_gradients_are_those_of_the_ordinary_module(
    pair: tuple[FlatModel, Net], precision: torch.dtype
) -> None:
    flat, ordinary = pair
    half = precision is torch.bfloat16
    loss = pass_of(flat.module, Unpacked(flat, precision)(), half)
    expected = pass_of(ordinary, None, half)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    gradients = flat.layout.tensors(flat.gradient)
    for name, parameter in ordinary.named_parameters():
        if parameter.requires_grad:
            wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(gradients[name], wanted, rtol=1e-5, atol=1e-6)


def test_only_operands_of_matrix_products_lose_precision(pair: tuple[FlatModel, Net]) -> None:
    weights = Unpacked(pair[0], torch.bfloat16)()
    exact = {name for name, tensor in weights.items() if tensor.dtype is torch.float32}
    assert exact == {"norm.weight", "norm.bias", "scale", "unused"}
    assert weights["target.weight"].dtype is torch.bfloat16
    assert not weights["target.weight"].requires_grad


@pytest.mark.parametrize("fresh", [False, True])
def test_gradients_are_added_unless_none_lies_there_yet(
    pair: tuple[FlatModel, Net], fresh: bool
) -> None:
    flat, _ = pair
    unpacked = Unpacked(flat, torch.float32)
    pass_of(flat.module, unpacked(), False).backward()
    once = flat.gradient.clone()
    assert once.abs().max() > 0
    pass_of(flat.module, unpacked(fresh=fresh), False).backward()
    torch.testing.assert_close(flat.gradient, once if fresh else 2 * once)


def test_what_is_unpacked_follows_the_vector(pair: tuple[FlatModel, Net]) -> None:
    flat, _ = pair
    unpacked = Unpacked(flat, torch.float32)
    flat.vector.fill_(3)
    assert all(bool((tensor == 3).all()) for tensor in unpacked().values())


def test_statistics_may_move_between_a_pass_and_its_gradients(
    pair: tuple[FlatModel, Net],
) -> None:
    flat, _ = pair
    norm = flat.module.get_submodule("norm")
    norm.plain_ops = True  # torch's own kernels remember the very statistics
    loss = pass_of(flat.module, Unpacked(flat, torch.float32)(), False)
    norm.running_mean.add_(1)
    loss.backward()
    assert flat.gradient.abs().max() > 0


@pytest.mark.parametrize("fresh", [False, True])
def test_the_gradient_of_a_loss_of_two_passes_is_of_both(
    pair: tuple[FlatModel, Net], fresh: bool
) -> None:
    """As an algorithm may have it that shows a model two batches in a step."""
    flat, ordinary = pair
    unpacked = Unpacked(flat, torch.float32)
    for _ in range(2):  # the second step is no different
        flat.gradient.zero_()
        passes = [pass_of(flat.module, unpacked(fresh=fresh), False) for _ in range(2)]
        (passes[0] + 3 * passes[1]).backward()
        ordinary.zero_grad()
        (4 * pass_of(ordinary, None, False)).backward()
        wanted = ordinary.conv.weight.grad
        torch.testing.assert_close(flat.layout.tensors(flat.gradient)["conv.weight"], wanted)
