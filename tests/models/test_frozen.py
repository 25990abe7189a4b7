"""Which weights a batch norm follows, and the pace that its statistics give them."""

import pytest
import torch
from torch import Tensor, nn

from ssfl.models.backbones import BACKBONES, BackboneOptions, build_backbone
from ssfl.models.flat import FlatModel
from ssfl.models.frozen import normalised_weights, set_paces
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


def test_paces_are_the_variances_that_norms_divide_by_and_one_elsewhere() -> None:
    network = build_backbone(BackboneOptions(backbone="small", width=2), channels=1, image_size=8)
    model = FlatModel(nn.ModuleDict({"backbone": network, "head": nn.Linear(8, 3)}))
    network.get_submodule("down1.norm").running_var.copy_(torch.tensor([0.5, 0.0, 2.0, 1e-4]))
    paces = torch.ones(model.layout.trainable)
    set_paces(paces, model)
    tensors = model.layout.tensors(paces)
    expected = torch.tensor([0.5 + 1e-5, 1e-5, 2 + 1e-5, 1.1e-4])
    torch.testing.assert_close(
        tensors["backbone.down1.conv.weight"], expected.view(4, 1, 1, 1).expand(4, 2, 3, 3)
    )
    torch.testing.assert_close(
        tensors["backbone.stem.conv.weight"], torch.full((2, 1, 3, 3), 1 + 1e-5)
    )
    for name in ("backbone.down1.norm.weight", "backbone.down1.norm.bias", "head.weight"):
        assert bool((tensors[name] == 1).all())
