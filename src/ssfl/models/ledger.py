"""Running statistics of all batch norms in a model, moved at once after a compiled pass.

Moving them takes two small kernels for each batch norm. Writing down how far from them a pass has
been costs nothing, since a compiler does it where the pass's statistics are made; so that is noted
there, and entered together.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ssfl.models.norm import BatchNorm


class Ledger:
    """What a pass has seen of every batch norm in `module`.

    A norm that a pass leaves out has nothing noted, and keeps what it had. One whose options differ
    from the first one's goes on moving its statistics by itself.
    """

    def __init__(self, module: nn.Module) -> None:
        norms = [child for child in module.modules() if isinstance(child, BatchNorm)]
        norms = [norm for norm in norms if _options(norm) == _options(norms[0])]
        # Under another name: they share a vector with tensors that a backward pass still needs, and
        # autograd would take a change of one for a change of all.
        self._running = [t.data for norm in norms for t in (norm.running_mean, norm.running_var)]
        self._sizes = [len(t) for t in self._running]
        self._pages: list[tuple[BatchNorm, Tensor, Tensor]] = []
        if norms:
            parts, self._momentum = _options(norms[0])
            self._seen = torch.zeros(parts, sum(self._sizes), device=self._running[0].device)
            places = self._seen.split(self._sizes, dim=1)  # type: ignore[no-untyped-call]
            self._pages = list(zip(norms, places[::2], places[1::2], strict=True))

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Passes in this block, compiled ones only, note what they see; its end enters it."""
        if not self._pages:
            yield
            return
        self._seen.zero_()
        for norm, mean, variance in self._pages:
            norm.noted = mean, variance
        try:
            yield
        finally:
            for norm, *_ in self._pages:
                norm.noted = None
        change = torch.zeros_like(self._seen[0])
        for seen in self._seen:
            change = change.lerp(seen, self._momentum)
        torch._foreach_add_(self._running, change.split(self._sizes))  # type: ignore[no-untyped-call]


def _options(norm: BatchNorm) -> tuple[int, float]:
    return norm.groups, norm.momentum
