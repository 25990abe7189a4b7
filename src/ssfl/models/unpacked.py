"""A flat model's weights for one pass, unpacked and cast at once, their gradients packed at once.

Autograd treats a network's sixty tensors one by one: under autocast a kernel casts each weight,
another casts its gradient back, a third adds it to the rest. On a GPU these kernels are shorter
than the gaps between them. Here the vector is one leaf: one kernel casts all of it, and one copy
for each precision puts the gradients back into one vector.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ssfl.models.flat import TRAINABLE, Entry, FlatModel, Kind


class Unpacked:
    """The weights of a flat model, by name, as they are used in a pass.

    Those of linear and convolution layers come in `precision`, the rest in float32: what autocast
    would do with them. Gradients end in the flat model's own vector; targets have none.
    """

    def __init__(self, flat: FlatModel, precision: torch.dtype) -> None:
        entries = flat.layout.entries
        trainable = [e for e in entries if e.kind in TRAINABLE]
        targets = [e for e in entries if e.kind is Kind.TARGET]
        start = flat.layout.trainable
        stop = targets[-1].range.stop if targets else start
        # Other names for the same memory: batch-norm statistics move during a pass, beside the
        # weights in the one vector, and autograd must not take that for a change of weights.
        self._weights = flat.trainable.data.requires_grad_()
        self._gradient = _Gradient(flat.gradient)
        self._targets = flat.vector[start:stop].data
        self._trainable_cast = _Cast(flat.module, trainable, precision)
        self._target_cast = _Cast(
            flat.module, [replace(e, offset=e.offset - start) for e in targets], precision
        )

    def __call__(self, *, fresh: bool = False) -> dict[str, Tensor]:
        """The weights as they are now. Where no gradient lies yet (`fresh`), the first that comes
        is written rather than added: a loss may be of several passes."""
        cast, self._gradient.fresh = self._trainable_cast, fresh
        tensors = _Unpack.apply(self._weights, cast, self._gradient)  # type: ignore[no-untyped-call]
        named = zip((e.name for e in cast.entries), tensors, strict=True)
        targets = zip(
            (e.name for e in self._target_cast.entries),
            self._target_cast(self._targets),
            strict=True,
        )
        return dict(named) | dict(targets)


class _Cast:
    """Which tensors lie in a vector, and the precision each is used in."""

    def __init__(self, module: nn.Module, entries: list[Entry], precision: torch.dtype) -> None:
        self.entries = entries
        layers = dict(module.named_modules())
        products = (nn.Conv2d, nn.Linear)
        self._precisions = [
            precision
            if isinstance(layers[entry.name.rpartition(".")[0]], products)
            else torch.float32
            for entry in entries
        ]

    def __call__(self, vector: Tensor) -> tuple[Tensor, ...]:
        casts = {precision: vector.to(precision) for precision in {*self._precisions}}
        return tuple(
            entry.view(casts[precision])
            for entry, precision in zip(self.entries, self._precisions, strict=True)
        )


@dataclass
class _Gradient:
    """Where gradients go, and whether nothing lies there yet."""

    total: Tensor
    fresh: bool = False


class _Unpack(torch.autograd.Function):
    """One vector to many tensors, and back."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor, cast: _Cast, gradient: _Gradient) -> tuple[Tensor, ...]:
        ctx.entries, ctx.gradient = cast.entries, gradient
        return cast(vector.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        total, fresh = ctx.gradient.total, ctx.gradient.fresh
        ctx.gradient.fresh = False
        packed = total if fresh else torch.zeros_like(total)
        places: dict[torch.dtype, list[Tensor]] = {}
        pieces: dict[torch.dtype, list[Tensor]] = {}
        for entry, gradient in zip(ctx.entries, gradients, strict=True):
            if gradient is not None:
                places.setdefault(gradient.dtype, []).append(packed[entry.range])
                pieces.setdefault(gradient.dtype, []).append(entry.pack(gradient))
        for precision, several in pieces.items():
            torch._foreach_copy_(places[precision], several)
        if not fresh:
            total.add_(packed)
        return None, None, None
