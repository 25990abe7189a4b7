"""Which weights a batch norm follows, and the pace that its statistics give them."""

import copy

import pytest
import torch
from torch import Tensor, nn

from ssfl.models.backbones import BACKBONES, Backbone, BackboneOptions, build_backbone
from ssfl.models.flat import FlatModel
from ssfl.models.frozen import freeze_statistics, normalised_weights, set_paces
from ssfl.models.norm import BatchNorm


@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
@pytest.mark.parametrize("name", BACKBONES)
def test_every_batch_norm_is_found_with_the_very_weights_whose_outputs_it_is_given(
    name: str, stem: str
) -> None:
    options = BackboneOptions(backbone=name, width=8, stem=stem)
    network = build_backbone(options, channels=3, image_size=32).eval()
    outputs: dict[int, str] = {}
    inputs: dict[BatchNorm, int] = {}
    kept: list[Tensor] = []  # so that no place in memory is used twice

    def see(part_name: str, part: nn.Module) -> None:
        def hook(module: nn.Module, given: tuple[Tensor], output: Tensor) -> None:
            kept.extend((*given, output))
            if isinstance(module, BatchNorm):
                inputs[module] = id(given[0])
            else:
                outputs[id(output)] = f"{part_name}.weight"

        part.register_forward_hook(hook)

    for part_name, part in network.named_modules():
        if isinstance(part, nn.Conv2d | nn.Linear | BatchNorm):
            see(part_name, part)
    network(torch.rand(2, 3, 32, 32))
    seen = {outputs[given]: norm for norm, given in inputs.items()}
    assert dict(normalised_weights(network)) == seen
    assert len(seen) == sum(isinstance(part, BatchNorm) for part in network.modules())


class Guest(Backbone):
    """Linear layers in the place of convolutions, and norms that follow no weight of theirs."""

    features = 4

    def __init__(self) -> None:
        super().__init__()
        self.first = BatchNorm(3)
        self.inside = nn.Linear(3, 4)
        self.norm = BatchNorm(4)
        self.again = BatchNorm(4)
        self.wide = nn.Conv2d(4, 8, 1)
        self.half = BatchNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_norm_that_no_weight_comes_straight_before_has_none() -> None:
    network = Guest()
    assert dict(normalised_weights(network)) == {"inside.weight": network.norm}


def test_only_batch_norms_inside_backbones_are_frozen() -> None:
    model = nn.ModuleDict(
        {"backbone": Guest(), "head": nn.Sequential(nn.Linear(4, 4), BatchNorm(4))}
    )
    freeze_statistics(model, True)
    resting = {name for name, part in model.named_modules() if not part.training}
    assert resting == {f"backbone.{name}" for name in ("first", "norm", "again", "half")}
    freeze_statistics(model, False)
    assert all(part.training for part in model.modules())


def test_paces_are_the_variances_that_norms_divide_by_and_one_elsewhere() -> None:
    network = build_backbone(BackboneOptions(backbone="small", width=2), channels=1, image_size=8)
    ema = copy.deepcopy(network).requires_grad_(False)
    parts = {"backbone": network, "head": nn.Linear(8, 3), "target": ema}
    model = FlatModel(nn.ModuleDict(parts))
    network.get_submodule("down1.norm").running_var.copy_(torch.tensor([0.5, 0.0, 2.0, 1e-4]))
    paces = torch.ones(model.layout.trainable)
    set_paces(paces, model)
    tensors = model.layout.tensors(paces)
    expected = torch.tensor([0.5 + 1e-5, 1e-5, 2 + 1e-5, 1.1e-4])
    by_name = {
        "backbone.down1.conv.weight": expected.view(4, 1, 1, 1).expand(4, 2, 3, 3),
        "backbone.stem.conv.weight": torch.full((2, 1, 3, 3), 1 + 1e-5),
    }
    for name, paces in by_name.items():
        torch.testing.assert_close(tensors[name], paces, rtol=1e-6, atol=0)
    for name in ("backbone.down1.norm.weight", "backbone.down1.norm.bias", "head.weight"):
        assert bool((tensors[name] == 1).all())
