"""Batch norm that knows about views.

Two views of a batch may pass through a network at once, stacked view after view along the batch
dimension. With `groups` set to the number of views, each view is normalised by its own statistics,
and the running statistics end as if the views had come one after another. There is no counter of
batches: every tensor of a model is a float, so a model can be one flat vector.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BatchNorm(nn.Module):
    """Batch norm over all dimensions but the second, for N×C and N×C×H×W alike.

    In training the batch is `groups` equal parts, one after another, with statistics of their own.
    Statistics are at least float32 whatever the input's precision; the output has the input's.

    `plain_ops` chooses between the native kernels, part by part (False), and tensor operations
    that normalise all parts at once and that a compiler can fuse (True); None decides by whether
    `torch.compile` is at work. Both may be differentiated twice.
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
        self.weight = nn.Parameter(torch.ones(features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(features)) if affine else None
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self._native(x, training=False)
        if x.shape[0] % self.groups:
            raise ValueError(f"a batch of {x.shape[0]} cannot be split into {self.groups} views")
        plain = torch.compiler.is_compiling() if self.plain_ops is None else self.plain_ops
        if plain:
            return self._all_parts(x)
        if self.groups == 1:
            return self._native(x, training=True)
        return torch.cat([self._native(part, training=True) for part in x.chunk(self.groups)])

    def _native(self, x: Tensor, *, training: bool) -> Tensor:
        return F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            training,
            self.momentum,
            self.eps,
        )

    def _all_parts(self, x: Tensor) -> Tensor:
        parts = x.view(self.groups, -1, *x.shape[1:])
        over = [1, *range(3, parts.ndim)]
        count = parts.numel() // (self.groups * self.features)
        if count < 2:
            raise ValueError("batch norm needs more than one value per channel in training")
        exact = parts.to(torch.promote_types(x.dtype, torch.float32))
        variance, mean = torch.var_mean(exact, dim=over, correction=0, keepdim=True)
        self._remember(
            mean.detach().view(self.groups, -1),
            variance.detach().view(self.groups, -1) * (count / (count - 1)),
        )
        shape = [-1] + [1] * (parts.ndim - 3)
        y = (exact - mean) * torch.rsqrt(variance + self.eps)
        if self.weight is not None and self.bias is not None:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(x.dtype).flatten(0, 1)

    @torch.no_grad()
    def _remember(self, means: Tensor, variances: Tensor) -> None:
        """Move the running statistics once per part, in order."""
        mean, variance = self.running_mean, self.running_var
        for part in range(self.groups):
            mean = mean.lerp(means[part], self.momentum)
            variance = variance.lerp(variances[part], self.momentum)
        self.running_mean.copy_(mean)
        self.running_var.copy_(variance)

    def extra_repr(self) -> str:
        return f"{self.features}, affine={self.weight is not None}, groups={self.groups}"


def set_groups(module: nn.Module, groups: int) -> None:
    """Tell every batch norm inside `module` how many views a training batch will hold."""
    for child in module.modules():
        if isinstance(child, BatchNorm):
            child.groups = groups
