"""What a method remembers without gradients: slow copies of networks, and queues.

A slow copy (BYOL's target, MoCo's key network) is parameters that require no gradient, so it is
shared and averaged like the weights: averaging copies that follow at the same rate is following
the average, as long as clients take equally many steps. Queues hold what a client's own images
gave, so they stay home. Both are written in place: they are views into one flat vector.
"""

from copy import deepcopy
from typing import TypeVar

import torch
from torch import Tensor, nn

Network = TypeVar("Network", bound=nn.Module)


def frozen_copy(network: Network) -> Network:
    """A copy of `network` that no gradient moves; its batch-norm statistics are its own."""
    return deepcopy(network).requires_grad_(False)


@torch.no_grad()
def follow(target: nn.Module, network: nn.Module, rate: Tensor | float) -> None:
    """target ← target + rate · (network − target), on parameters only."""
    slow: list[Tensor] = list(target.parameters())
    fast: list[Tensor] = list(network.parameters())
    step = list(torch._foreach_sub(fast, slow))
    torch._foreach_mul_(step, rate)  # a rate that is a tensor is never read by the host
    torch._foreach_add_(slow, step)


@torch.no_grad()
def push(queue: Tensor, rows: Tensor) -> None:
    """Put `rows` (...×N×d) at the front of `queue` (...×L×d); as many fall off its end.

    Rolling needs no pointer, so any batch size will do, from step to step.
    """
    # Through `.data`: buffers that share one vector share its version counter, and autograd would
    # take this for a write to the batch-norm statistics that it keeps for the backward pass.
    queue.data.copy_(torch.cat([rows, queue], dim=-2)[..., : queue.shape[-2], :])
