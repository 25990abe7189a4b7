"""A resident model: an SSL method in one flat vector, and the SGD that moves it.

Algorithms speak to a `Learner` in the words of the paper's listings: run it on a batch, take its
loss, descend. Where the model lies (which device, which precision), how many micro-batches make a
step and which client it belongs to just now is the trainer's business.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call

from ssfl.algorithms.options import LocalOptions
from ssfl.errors import ConfigError
from ssfl.models.flat import TRAINABLE, FlatModel, Kind
from ssfl.models.frozen import freeze_statistics, set_paces
from ssfl.ssl.base import Batch, Method, Outputs

Weights = dict[str, Tensor]
Forward = Callable[[Batch, Weights | None], Outputs]


@dataclass(frozen=True)
class Passes:
    """What a step is made of, in the form an engine has given it."""

    forward: Forward
    loss: Callable[[Outputs], Tensor]
    update: Callable[[Tensor], None]


class Learner:
    """A model and its SGD with momentum, both flat.

    `rate` and `progress` are one-element tensors so that a captured step reads their present
    value. `drift` is a gradient added to every step (SCAFFOLD's c − c_k).
    """

    def __init__(self, method: Method, options: LocalOptions) -> None:
        self.method = method
        self.flat = FlatModel(method, method.home)
        device = self.flat.vector.device
        self.momentum = torch.zeros_like(self.flat.gradient)
        self.rate = torch.zeros((), device=device)
        self.progress = torch.zeros((), device=device)
        self.share = 1.0  # of the step's images that the micro-batch at hand holds
        self.last = True  # the micro-batch at hand completes the step
        self.drift: Tensor | None = None
        self._paces: Tensor | None = None
        self._anchor: Tensor | None = None
        self._pull = 0.0
        self._options = options
        self._names = [e.name for e in self.flat.layout.entries if e.kind in TRAINABLE]
        self._decay = None if options.decay_norms else self._decay_of_each()
        self._steady = self._predictor() if options.predictor_rate == "constant" else None
        # The rate of every number, where they are not all one.
        self._rates = self.rate if self._steady is None else torch.zeros_like(self.flat.gradient)
        self.plain = self.passes = Passes(self._forward, method.loss, self._update)

    def __call__(self, batch: Batch, weights: Weights | None = None) -> Outputs:
        """Projections and predictions, with weights other than the model's own if given."""
        return self.passes.forward(batch, weights)

    def loss(self, outputs: Outputs) -> Tensor:
        """The method's loss."""
        return self.passes.loss(outputs)

    def _forward(self, batch: Batch, weights: Weights | None) -> Outputs:
        if weights is None:
            outputs: Outputs = self.method(batch)
            return outputs
        return functional_call(self.method, weights, (batch,))  # type: ignore[no-any-return]

    def go_at(self, rate: float) -> None:
        """Descend at this rate from now on; a predictor whose rate is constant, at its own."""
        self.rate.fill_(rate)
        self._rates.fill_(rate)
        if self._steady is not None:
            self._rates[self._steady] = self._options.lr

    def stand_at(self, progress: float) -> None:
        """How much of the experiment, 0 to 1, lies behind the steps to come. The method is told
        too: what it remembered with this client's vectors is from the client's last round."""
        self.progress.fill_(progress)
        self.method.begin(self.progress)

    def freeze(self, frozen: bool) -> None:
        """Let backbones normalise by the statistics they have, at the steps' pace that suits it
        (see models/frozen.py), or no longer."""
        freeze_statistics(self.method, frozen)
        self._paces = torch.ones_like(self.flat.gradient) if frozen else None

    def keep_pace(self) -> None:
        """Go by the statistics that have just been loaded."""
        if self._paces is not None:
            set_paces(self._paces, self.flat)

    def hold(self, anchor: Tensor, pull: float) -> None:
        """From now on, descend on loss + pull/2 ‖θ − anchor‖² (FedProx, BiLevel-SSFL)."""
        self._anchor, self._pull = anchor, pull

    def descend(self, loss: Tensor) -> None:
        """θ ← θ − β ∇ loss, once all micro-batches of the step are in."""
        (loss * self.share).backward()  # type: ignore[no-untyped-call]
        if not self.last:
            return
        with torch.no_grad():
            gradient = self.flat.gradient
            if self._options.max_gradient:
                gradient.mul_(self._shortening([gradient]))
            if self._paces is not None:
                gradient.mul_(self._paces)
            if self.drift is not None:
                gradient.add_(self.drift)
            if self._anchor is not None:
                gradient.add_(self.flat.trainable - self._anchor, alpha=self._pull)
            self.passes.update(gradient)
            self.method.after_step(self.progress)

    def _update(self, gradient: Tensor) -> None:
        """PyTorch's SGD, then a clean slate: g += wd·θ; v = μ·v + g; θ −= β·v; g = 0."""
        theta, options = self.flat.trainable, self._options
        if self._decay is not None:
            gradient.addcmul_(theta, self._decay)
        elif options.weight_decay:
            gradient.add_(theta, alpha=options.weight_decay)
        self.momentum.mul_(options.momentum).add_(gradient)
        theta.addcmul_(self.momentum, self._rates, value=-1)
        gradient.zero_()

    def weights(self) -> Weights:
        """The trainable tensors by name, for an inner loop to start from."""
        parameters = dict(self.method.named_parameters())
        return {name: parameters[name] for name in self._names}

    def inner_step(self, weights: Weights, loss: Tensor, *, second_order: bool) -> Weights:
        """θ' ← θ' − β ∇_θ' loss, differentiable through ∇ only if `second_order`."""
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=second_order)
        rate = self._rates
        if self._options.max_gradient:
            rate = rate * self._shortening(gradients)
        if self._paces is not None:
            rate = rate * self._paces
        rates = dict.fromkeys(weights, rate) if rate.ndim == 0 else self.flat.layout.tensors(rate)
        moves = dict(zip(weights, gradients, strict=True))
        return {name: weight - rates[name] * moves[name] for name, weight in weights.items()}

    def _shortening(self, gradients: Sequence[Tensor]) -> Tensor:
        """What brings a gradient, in parts, down to the longest allowed; 1 if it is shorter."""
        # In float64: the squares of a gradient that needs this may overflow.
        norm = torch.linalg.vector_norm
        parts = [norm(part.detach(), dtype=torch.float64) for part in gradients]
        share: Tensor = self._options.max_gradient / norm(torch.stack(parts))
        return share.clamp(max=1).float()

    def mean_gradient(self, start: Tensor, steps: int) -> Tensor:
        """The gradient that, met at every one of `steps` steps from `start`, would lead here."""
        steps_in_all = effective_steps(steps, self._options.momentum)
        return (start - self.flat.trainable) / steps_in_all / self._rates

    def reset(self, momentum: Tensor | None = None) -> None:
        """Forget the last client: no gradient, no drift, momentum zero or as given."""
        self.flat.gradient.zero_()
        if momentum is None:
            self.momentum.zero_()
        else:
            self.momentum.copy_(momentum)
        if self.drift is not None:
            self.drift.zero_()  # in place: a captured step goes on reading it

    @contextmanager
    def adapting(self, rate: float) -> Iterator[None]:
        """Descend as at inference: all of it at this rate, held to nothing, in plain passes (a few
        steps are not worth compiling, and compiling could fail where nobody expects it)."""
        passes, anchor, rates = self.passes, self._anchor, self._rates.clone()
        self.passes, self._anchor = self.plain, None
        self._rates.fill_(rate)
        try:
            yield
        finally:
            self.passes, self._anchor = passes, anchor
            self._rates.copy_(rates)

    def _decay_of_each(self) -> Tensor:
        """Weight decay number by number: none of what has one dimension, scales, shifts, biases."""
        decay = torch.zeros_like(self.flat.gradient)
        for entry in self.flat.layout.entries:
            if entry.kind is Kind.WEIGHT and len(entry.shape) > 1:
                decay[entry.range] = self._options.weight_decay
        return decay

    def _predictor(self) -> slice | None:
        prefix = self.method.predictor_prefix
        if prefix is None:
            return None
        ranges = [
            e.range
            for e in self.flat.layout.entries
            if e.name.startswith(prefix) and e.kind in TRAINABLE
        ]
        if not ranges:
            raise ConfigError(
                f"{type(self.method).__name__} has no tensor whose name begins with {prefix!r}, "
                "its predictor_prefix"
            )
        return slice(ranges[0].start, ranges[-1].stop)


def effective_steps(steps: int, momentum: float) -> float:
    """‖a‖₁ of FedNova: how often a gradient counts in all, when SGD makes `steps` steps.

    With momentum ρ from zero, the gradient of step s moves the model in every later one too:
    β(1 + ρ + ... + ρ^(steps−1−s)) times in all. Without momentum it is `steps`.
    """
    rest = momentum * (1 - momentum**steps) / (1 - momentum)
    return (steps - rest) / (1 - momentum)
