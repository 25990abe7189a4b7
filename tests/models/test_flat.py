"""A model as one vector is the same model: forward, gradients, SGD, and a layout one can trust."""

import copy

import pytest
import torch
from torch import Tensor, nn

from ssfl.errors import ConfigError
from ssfl.models.backbones import BackboneOptions, build_backbone
from ssfl.models.flat import FlatModel, Kind
from ssfl.models.norm import BatchNorm, GroupNorm


class Net(nn.Module):
    """One of everything: convolution, norm, linear, a frozen copy, a queue."""

    queue: Tensor

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.backbone = build_backbone(
            BackboneOptions(backbone="small", width=width), channels=3, image_size=8
        )
        self.head = nn.Linear(self.backbone.features, 5)
        self.target = copy.deepcopy(self.head).requires_grad_(False)
        self.register_buffer("queue", torch.rand(7, 5))

    def forward(self, x: Tensor) -> Tensor:
        features = self.backbone(x)
        return self.head(features) + self.target(features) + self.queue.mean(0)


@pytest.fixture
def pair() -> tuple[FlatModel, Net]:
    """A flat model and an ordinary one that was the same before."""
    torch.manual_seed(0)
    net = Net()
    ordinary = copy.deepcopy(net)
    return FlatModel(net, home=("queue",)), ordinary


def images(step: int = 0) -> Tensor:
    return torch.randn(9, 3, 8, 8, generator=torch.Generator().manual_seed(step))


def loss(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().mean()


def test_a_flat_module_computes_what_the_ordinary_one_does(pair: tuple[FlatModel, Net]) -> None:
    flat, ordinary = pair
    for training in (True, False):
        flat.module.train(training)
        ordinary.train(training)
        x = images()
        torch.testing.assert_close(flat.module(x), ordinary(x), rtol=1e-5, atol=1e-6)
        channels_last = x.contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(flat.module(channels_last), ordinary(x), rtol=1e-5, atol=1e-5)


def test_gradients_land_in_one_array_and_are_the_ordinary_ones(
    pair: tuple[FlatModel, Net],
) -> None:
    flat, ordinary = pair
    loss(flat.module, images()).backward()
    loss(ordinary, images()).backward()
    named = flat.layout.tensors(flat.gradient)
    expected = {n: p.grad for n, p in ordinary.named_parameters() if p.requires_grad}
    assert named.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(named[name], gradient, rtol=1e-4, atol=1e-6)
    assert flat.gradient.abs().sum() > 0


def test_sgd_on_the_vector_goes_the_way_of_torch_sgd_on_the_module(
    pair: tuple[FlatModel, Net],
) -> None:
    flat, ordinary = pair
    weights = [p for p in ordinary.parameters() if p.requires_grad]
    oracle = torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=5e-4)
    momentum = torch.zeros_like(flat.gradient)
    start = flat.vector.clone()
    for step in range(6):
        oracle.zero_grad()
        loss(ordinary, images(step)).backward()
        oracle.step()
        flat.gradient.zero_()
        loss(flat.module, images(step)).backward()
        with torch.no_grad():
            momentum = 0.9 * momentum + flat.gradient + 5e-4 * flat.trainable
            flat.trainable.sub_(0.1 * momentum)
    assert not torch.allclose(start, flat.vector)
    named = flat.layout.tensors(flat.vector)
    for name, tensor in ordinary.state_dict().items():
        torch.testing.assert_close(named[name], tensor, rtol=1e-4, atol=1e-5)


def test_writing_the_vector_changes_the_module_and_the_other_way_round(
    pair: tuple[FlatModel, Net],
) -> None:
    flat, _ = pair
    net = flat.module
    assert isinstance(net, Net)
    flat.vector.fill_(0.25)
    assert all(bool((tensor == 0.25).all()) for tensor in net.state_dict().values())
    net.load_state_dict({name: torch.ones_like(t) for name, t in net.state_dict().items()})
    assert bool((flat.vector == 1).all())
    net.train()(images())  # batch norm moves its statistics in place
    assert not bool((flat.shared[flat.layout.select([Kind.STATISTIC])] == 1).any())


def test_convolution_weights_lie_channels_last_in_the_vector(pair: tuple[FlatModel, Net]) -> None:
    flat, ordinary = pair
    entry = next(e for e in flat.layout.entries if e.name == "backbone.down1.conv.weight")
    weight = ordinary.get_parameter(entry.name)
    torch.testing.assert_close(
        flat.vector[entry.range], weight.detach().permute(0, 2, 3, 1).flatten(), rtol=0, atol=0
    )
    view = flat.module.get_parameter(entry.name)
    assert view.is_contiguous(memory_format=torch.channels_last)
    assert view.data_ptr() == flat.vector[entry.range].data_ptr()


def test_what_gradients_move_comes_first_and_what_stays_home_last(
    pair: tuple[FlatModel, Net],
) -> None:
    flat, ordinary = pair
    layout = flat.layout
    trained = sum(p.numel() for p in ordinary.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in ordinary.parameters() if not p.requires_grad)
    assert layout.trainable == len(flat.trainable) == trained
    assert layout.size == len(flat.vector)
    assert len(flat.home) == ordinary.queue.numel() == layout.size - layout.shared
    kinds = [entry.kind for entry in layout.entries]
    moved = {Kind.WEIGHT, Kind.NORM}
    assert [k in moved for k in kinds] == sorted((k in moved for k in kinds), reverse=True)
    assert kinds[-1] is Kind.HOME
    assert int(layout.select([Kind.TARGET]).sum()) == frozen
    norms = [m for m in ordinary.modules() if isinstance(m, BatchNorm)]
    assert int(layout.select([Kind.STATISTIC]).sum()) == sum(2 * m.features for m in norms)
    assert int(layout.select([Kind.NORM]).sum()) == sum(2 * m.features for m in norms)
    ends = [entry.range.stop for entry in layout.entries]
    assert [e.offset for e in layout.entries] == [0, *ends[:-1]]  # no gap, no overlap


def test_the_digest_changes_with_names_shapes_and_kinds_and_with_nothing_else() -> None:
    def digest(net: nn.Module, home: tuple[str, ...] = ("queue",)) -> str:
        return FlatModel(net, home).layout.digest

    torch.manual_seed(0)
    original = digest(Net())
    assert digest(Net()) == original  # other values
    assert digest(Net(width=5)) != original
    renamed = Net()
    renamed.header = renamed.head
    del renamed.head
    assert digest(renamed) != original
    trainable_target = Net()
    trainable_target.target.requires_grad_(True)
    assert digest(trainable_target) != original
    longer_queue = Net()
    longer_queue.queue = torch.rand(9, 5)
    assert digest(longer_queue) == original  # it never travels
    assert digest(Net(), home=()) != original  # now it does


def test_integer_buffers_are_refused_by_name() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3))
    with pytest.raises(ConfigError, match=r"0\.num_batches_tracked is torch\.int64.*BatchNorm of"):
        FlatModel(net)


@pytest.mark.parametrize("home", [("queu_e",), ("queue", "head.queue"), tuple("queue")])
def test_what_stays_at_home_must_be_there_or_it_would_travel(home: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="Net has no tensor whose name begins with"):
        FlatModel(Net(), home)
    unused = Net()
    unused.queue = None  # declared, and not made for want of use
    assert FlatModel(unused, ("queue",)).home.numel() == 0


def test_weights_are_kept_with_a_client_by_an_algorithm_not_by_home() -> None:
    with pytest.raises(ConfigError, match=r"head\.weight is moved by gradients, and home is for"):
        FlatModel(Net(), ("head.",))


def test_scale_and_shift_of_a_group_norm_are_a_norms() -> None:
    layout = FlatModel(nn.Sequential(nn.Conv2d(3, 16, 3), GroupNorm(16))).layout
    kinds = {entry.name: entry.kind for entry in layout.entries}
    assert kinds["1.weight"] is kinds["1.bias"] is Kind.NORM
    assert kinds["0.weight"] is kinds["0.bias"] is Kind.WEIGHT


def test_norms_are_those_of_an_ema_copy_too_and_nothing_else_of_it():
    module = nn.Module()
    module.fc, module.norm = nn.Linear(2, 2), BatchNorm(2)
    module.target = nn.Sequential(nn.Linear(2, 2), BatchNorm(2)).requires_grad_(False)
    flat = FlatModel(module, ())
    mask = flat.norms()
    within = {e.name: mask[e.range].unique().tolist() for e in flat.layout.entries}
    parts = ("weight", "bias", "running_mean", "running_var")
    norms = {f"{norm}.{part}" for norm in ("norm", "target.1") for part in parts}
    assert within == {name: [name in norms] for name in within}
    assert norms < within.keys()
