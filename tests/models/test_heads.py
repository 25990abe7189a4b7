"""Heads as lists of layers."""

import torch
from torch import nn

from ssfl.models.heads import Layer, mlp
from ssfl.models.norm import BatchNorm


def test_a_head_is_its_layers_in_order():
    head = mlp([Layer(6, 8), Layer(8, 8, norm="plain", relu=False)])
    kinds = [type(module) for module in head]
    assert kinds == [nn.Linear, BatchNorm, nn.ReLU, nn.Linear, BatchNorm]
    assert head(torch.randn(4, 6)).shape == (4, 8)


def test_a_bias_stands_only_where_no_batch_norm_follows():
    head = mlp([Layer(6, 4), Layer(4, 6, norm=None, relu=False)])
    names = {name for name, _ in head.named_parameters()}
    assert names == {"0.weight", "1.weight", "1.bias", "3.weight", "3.bias"}


def test_a_plain_norm_has_no_scale_and_shift():
    head = mlp([Layer(6, 4, norm="plain", relu=False)])
    assert {name for name, _ in head.named_parameters()} == {"0.weight"}
    z = head(torch.randn(64, 6))
    torch.testing.assert_close(z.mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(z.std(0, correction=0), torch.ones(4), atol=1e-3, rtol=0)


def test_simsiams_heads_have_the_parameters_of_the_reference():
    projector = mlp([Layer(512, 2048), Layer(2048, 2048, norm="plain", relu=False)])
    predictor = mlp([Layer(2048, 512), Layer(512, 2048, norm=None, relu=False)])
    assert count(projector) == 512 * 2048 + 2 * 2048 + 2048 * 2048
    assert count(predictor) == 2048 * 512 + 2 * 512 + 512 * 2048 + 2048


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
