"""Heads as lists of widths."""

import torch
from torch import nn

from ssfl.models.heads import mlp
from ssfl.models.norm import BatchNorm


def test_a_head_is_its_layers_in_order():
    head = mlp(6, 8, 8, last="plain")
    kinds = [type(module) for module in head]
    assert kinds == [nn.Linear, BatchNorm, nn.ReLU, nn.Linear, BatchNorm]
    assert head(torch.randn(4, 6)).shape == (4, 8)


def test_a_bias_stands_only_where_no_batch_norm_follows():
    head = mlp(6, 4, 6)
    names = {name for name, _ in head.named_parameters()}
    assert names == {"0.weight", "1.weight", "1.bias", "3.weight", "3.bias"}


def test_without_batch_norm_every_layer_has_a_bias():
    head = mlp(6, 4, 6, norm=False)
    assert [type(module) for module in head] == [nn.Linear, nn.ReLU, nn.Linear]
    assert {name for name, _ in head.named_parameters()} == {
        *("0.weight", "0.bias", "2.weight", "2.bias")
    }


def test_a_plain_norm_has_no_scale_and_shift():
    head = mlp(6, 4, last="plain")
    assert {name for name, _ in head.named_parameters()} == {"0.weight"}
    z = head(torch.randn(64, 6))
    torch.testing.assert_close(z.mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(z.std(0, correction=0), torch.ones(4), atol=1e-3, rtol=0)


def test_simsiams_heads_have_the_parameters_of_the_reference():
    projector = mlp(512, 2048, 2048, last="plain")
    predictor = mlp(2048, 512, 2048)
    assert count(projector) == 512 * 2048 + 2 * 2048 + 2048 * 2048
    assert count(predictor) == 2048 * 512 + 2 * 512 + 512 * 2048 + 2048


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
