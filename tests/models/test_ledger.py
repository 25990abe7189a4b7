"""Statistics noted in a pass and entered together, against norms that move their own."""

import copy

import torch
from torch import nn

from ssfl.models.ledger import Ledger
from ssfl.models.norm import BatchNorm


def images(step: int) -> torch.Tensor:
    return torch.randn(12, 5, generator=torch.Generator().manual_seed(step)) * 2 + 1


def test_statistics_entered_together_end_where_each_norm_would_have_taken_them():
    def passes(net: nn.Sequential, step: int) -> torch.Tensor:
        return net(images(step)).square().sum()

    torch.manual_seed(0)
    net = nn.Sequential(BatchNorm(5, groups=2), nn.Linear(5, 3), BatchNorm(3, groups=2))
    left_out = BatchNorm(3, groups=2)
    shift = torch.randn(3)
    with torch.no_grad():
        left_out.running_mean.copy_(shift)
    for child in (*net, left_out):
        child.plain_ops = True
    ledger = Ledger(nn.ModuleList([net, left_out]))
    alone = copy.deepcopy(net)
    for step in range(3):
        before = [buffer.clone() for buffer in net.buffers()]
        with ledger():
            loss = passes(net, step)
            assert all(map(torch.equal, net.buffers(), before))  # noted, and not yet entered
        loss.backward()
        passes(alone, step).backward()
    for ours, theirs in zip(net.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert torch.equal(left_out.running_mean, shift)


def test_a_norm_with_other_options_moves_its_own_and_a_model_may_have_none():
    net = nn.Sequential(BatchNorm(5, groups=2), BatchNorm(5, groups=1))
    for child in net:
        child.plain_ops = True
    alone = copy.deepcopy(net)
    with Ledger(net)():
        net(images(0))
    alone(images(0))
    for ours, theirs in zip(net.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
    with Ledger(nn.Linear(5, 3))():
        pass
