"""Batch norms that keep to their running statistics, and steps that suit the weights before them.

Under each batch's own statistics the length of a convolution's weights makes no difference, since
batch norm divides by it again, and weight decay shrinks them. Under fixed statistics it does: a
norm with a standard deviation σ makes a change of the weights 1/σ as large on the way out, and
gradients 1/σ as large on the way back, so a step on weights that decay has shrunk overshoots by
1/σ².

Descent on W/σ, the weights as the norm lets them out, does not see how short W is. It is descent
on W with every gradient times σ²: the *pace* of a weight.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ssfl.models.backbones import Backbone
from ssfl.models.flat import FlatModel
from ssfl.models.norm import BatchNorm


def freeze_statistics(module: nn.Module, frozen: bool) -> None:
    """Let the batch norms of every backbone inside normalise by their running statistics and leave
    these as they are, or no longer. Heads go on with each batch's own: without them, a method that
    has no negatives may map all images to one point."""
    for _, part in _in_backbones(module):
        if isinstance(part, BatchNorm):
            part.train(not frozen)


def normalised_weights(module: nn.Module) -> Iterator[tuple[str, BatchNorm]]:
    """The names of weights in backbones whose outputs go straight into a batch norm, and the norm.

    Networks list their parts in the order of use: a norm's is the last weight before it.
    """
    last: tuple[str, nn.Conv2d | nn.Linear] | None = None
    for name, part in _in_backbones(module):
        if isinstance(part, nn.Conv2d | nn.Linear):
            last = name, part
        elif isinstance(part, BatchNorm):
            if last is not None and len(last[1].weight) == part.features:
                yield f"{last[0]}.weight", part
            last = None


@torch.no_grad()
def set_paces(paces: Tensor, model: FlatModel) -> None:
    """Write σ² over the numbers of weights that a batch norm follows; other numbers are left.

    σ² is with the norm's ε, as the norm divides by it.
    """
    own = model.layout.tensors(paces)
    for name, norm in normalised_weights(model.module):
        if name in own:  # an EMA copy has no gradients
            weight = own[name]
            weight.copy_((norm.running_var + norm.eps).view(-1, *[1] * (weight.ndim - 1)))


def _in_backbones(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, network in module.named_modules():
        if isinstance(network, Backbone):
            yield from network.named_modules(prefix=prefix)
