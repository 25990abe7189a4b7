"""Batch norm that knows about views, and group norm in its place.

Two views of a batch may pass through a network at once, stacked view after view along the batch
dimension. With `groups` set to the number of views, each view is normalised by its own statistics,
and the running statistics end as if the views had come one after another. There is no counter of
batches: every tensor of a model is a float, so a model can be one flat vector.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class BatchNorm(nn.Module):
    """Batch norm over all dimensions but the second, for N×C and N×C×H×W alike.

    In training the batch is `groups` equal parts, one after another, with statistics of their own.
    Statistics are at least float32 whatever the input's precision; the output has the input's.

    `plain_ops` chooses between the native kernels, part by part (False), and tensor operations
    that normalise all parts at once and that a compiler can fuse (True); None decides by whether
    `torch.compile` is at work. Only the native kernels may be differentiated twice.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        features: int,
        *,
        affine: bool = True,
        eps: float = 1e-5,
        momentum: float = 0.1,
        groups: int = 1,
    ) -> None:
        super().__init__()
        self.features = features
        self.eps = eps
        self.momentum = momentum
        self.groups = groups
        self.plain_ops: bool | None = None
        self.noted: tuple[Tensor, Tensor] | None = None  # see ledger.py
        self.weight = nn.Parameter(torch.ones(features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(features)) if affine else None
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        plain = torch.compiler.is_compiling() if self.plain_ops is None else self.plain_ops
        if not self.training:
            return self._by_running(x) if plain else self._native(x, training=False)
        if x.shape[0] % self.groups:
            raise ValueError(f"a batch of {x.shape[0]} cannot be split into {self.groups} views")
        if plain:
            return self._all_parts(x)
        if self.groups == 1:
            return self._native(x, training=True)
        return torch.cat([self._native(part, training=True) for part in x.chunk(self.groups)])

    def _native(self, x: Tensor, *, training: bool) -> Tensor:
        running = (self.running_mean, self.running_var)
        mean, variance = (_where_kernels_can_read(t) for t in running)
        affine = (self.weight, self.bias)
        weight, bias = (t if t is None else _where_kernels_can_read(t) for t in affine)
        y = F.batch_norm(x, mean, variance, weight, bias, training, self.momentum, self.eps)
        if training:
            for own, moved in zip(running, (mean, variance), strict=True):
                if own is not moved:
                    own.copy_(moved)
        return y

    def _by_running(self, x: Tensor) -> Tensor:
        shape = [-1] + [1] * (x.ndim - 2)
        scale = torch.rsqrt(self.running_var + self.eps)
        y = (x.float() - self.running_mean.view(shape)) * scale.view(shape)
        if self.weight is not None and self.bias is not None:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(x.dtype)

    def _all_parts(self, x: Tensor) -> Tensor:
        parts = x.view(self.groups, -1, *x.shape[1:])
        count = parts.numel() // (self.groups * self.features)
        if count < 2:
            raise ValueError("batch norm needs more than one value per channel in training")
        y, mean, variance = _Normalise.apply(  # type: ignore[no-untyped-call]
            parts, self.weight, self.bias, self.eps
        )
        self._remember(
            mean.view(self.groups, -1), variance.view(self.groups, -1) * (count / (count - 1))
        )
        normalised: Tensor = y.flatten(0, 1)
        return normalised

    @torch.no_grad()
    def _remember(self, means: Tensor, variances: Tensor) -> None:
        """Move the running statistics once per part, in order."""
        if self.noted is not None:
            self.noted[0].copy_(means - self.running_mean)
            self.noted[1].copy_(variances - self.running_var)
            return
        mean, variance = self.running_mean, self.running_var
        for part in range(self.groups):
            mean = mean.lerp(means[part], self.momentum)
            variance = variance.lerp(variances[part], self.momentum)
        self.running_mean.copy_(mean)
        self.running_var.copy_(variance)

    def extra_repr(self) -> str:
        return f"{self.features}, affine={self.weight is not None}, groups={self.groups}"


class _Normalise(torch.autograd.Function):
    """Normalise every part by its own mean and variance, with the backward pass written out.

    Left to derive it, a compiler differentiates mean and variance step by step and reads the
    activations five times; this is two sums and one pass, the fewest there are:
    dx = γ/σ · (dy − mean(dy) − x̂ · mean(dy·x̂)).
    """

    @staticmethod
    def forward(
        ctx: Any, parts: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        over, shape = _around_channels(parts)
        exact = parts.float()
        variance, mean = torch.var_mean(exact, dim=over, correction=0, keepdim=True)
        scale = torch.rsqrt(variance + eps)
        y = (exact - mean) * scale
        if weight is not None and bias is not None:
            y = y * weight.view(shape) + bias.view(shape)
        ctx.save_for_backward(parts, mean, scale, weight)
        ctx.mark_non_differentiable(mean, variance)
        # A cast to the type that y already has: torch 2.11 would compile it to no gradient at all.
        return y if y.dtype is parts.dtype else y.to(parts.dtype), mean, variance

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor, *_: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        parts, mean, scale, weight = ctx.saved_tensors
        over, shape = _around_channels(parts)
        count = parts.numel() // mean.numel()
        exact = grad.float()
        x = (parts.float() - mean) * scale
        total, along = (t.sum(dim=over, keepdim=True) for t in (exact, exact * x))
        centred = exact - total / count - x * (along / count)
        if weight is None:
            return (centred * scale).to(parts.dtype), None, None, None
        back = centred * (scale * weight.view(shape))
        by_weight, by_bias = torch.stack((along, total)).sum(1).flatten(1)  # one sum for both
        return back.to(parts.dtype), by_weight, by_bias, None


def _where_kernels_can_read(tensor: Tensor) -> Tensor:
    """cuDNN reads 16 bytes at a time. Where a tensor of odd length (a classifier's bias) lies
    before this one in its model's vector, only a copy starts at a multiple of that."""
    return tensor.clone() if tensor.is_cuda and tensor.data_ptr() % 16 else tensor


def _around_channels(parts: Tensor) -> tuple[list[int], list[int]]:
    """Dimensions to sum over in G×N×C×..., and the shape in which C alone is spread out."""
    over = [1, *range(3, parts.ndim)]
    return over, [-1] + [1] * (parts.ndim - 3)


class GroupNorm(nn.GroupNorm):
    """Group norm (Wu & He): an image's channels, 16 at a time, by their own mean and variance.

    Other images make no difference, so there are no statistics to keep, and none on which clients
    could disagree. The output has the input's precision; autocast alone would make it float32.
    """

    def __init__(self, features: int, eps: float = 1e-5) -> None:
        super().__init__(features // math.gcd(16, features), features, eps)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(x.dtype)


def use_group_norm(module: nn.Module) -> None:
    """Put a group norm where a batch norm is, everywhere inside `module`."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, BatchNorm):
                setattr(parent, name, GroupNorm(child.features, child.eps))


def set_groups(module: nn.Module, groups: int) -> None:
    """Tell every batch norm inside `module` how many views a training batch will hold."""
    for child in module.modules():
        if isinstance(child, BatchNorm):
            child.groups = groups


@torch.no_grad()
def epsilon_share(module: nn.Module) -> float:
    """What the worst batch norm inside `module` loses to its ε: 0 is nothing, 1 is everything.

    A channel of variance σ² and scale γ leaves with a variance of γ²·σ²/(σ² + ε) where γ² was
    meant. Weight decay can shrink weights until σ² is no larger than ε: then nothing is normalised
    any more, and every layer passes on less than it was given.
    """
    shares = []
    for norm in module.modules():
        if isinstance(norm, BatchNorm):
            share = norm.eps / (norm.running_var + norm.eps)
            meant = torch.ones_like(share) if norm.weight is None else norm.weight.square()
            shares.append((meant * share).sum() / meant.sum().clamp_min(1e-30))
    return float(torch.stack(shares).max()) if shares else 0.0
