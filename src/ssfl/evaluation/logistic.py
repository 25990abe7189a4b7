"""Multinomial logistic regression to its optimum, for several encoders' features at once.

The objective is scikit-learn's (mean cross-entropy + l2/(2n)·|W|², bias free) on features scaled,
by one number, to a mean square of one: how long features are says nothing about an encoder, so it
must not decide how hard the penalty is.

The solver is L-BFGS started from the inverse of Böhning's (1992) bound on the Hessian,
½·Cov + l2/n, which takes most of the conditioning away. Logits are linear along a search direction,
so the line search needs no further product with the features.

Encoders are a batch dimension of every operation, and the host looks at the device only once in
ten iterations: on a GPU ten encoders cost little more than one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_MEMORY = 5
_CHECK_EVERY = 10  # iterations between looks at the gradient: the only host syncs
_PARTS = 16  # images are summed over in parts, so that a wide GPU has something to share out


class Logistic(NamedTuple):
    """A classifier per encoder, on raw features."""

    weight: Tensor
    """(encoders, classes, d)."""
    bias: Tensor
    """(encoders, classes)."""
    loss: list[float]
    """Mean cross-entropy on the training features."""


class _Problem(NamedTuple):
    """What does not change while it is solved."""

    x: Tensor
    """(encoders, n, d): centred, and scaled to a mean square of one."""
    labels: Tensor
    """(encoders, 1, n)."""
    penalty: Tensor
    """(encoders, 1, d + 1): of the weights, and 0 of the bias."""
    bound: Tensor
    """(encoders, d + 1, d + 1): the inverse of the bound on the Hessian."""


Pair = tuple[Tensor, Tensor, Tensor]
"""A step, the gradient's change over it, and 1/⟨step, change⟩."""


def fit_logistic(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Weight (classes, d) and bias (classes,) on raw features, with the usual penalty."""
    found = fit_logistics([features], labels, classes)
    return found.weight[0], found.bias[0]


def fit_logistics(
    features: Sequence[Tensor],
    labels: Tensor,
    classes: int,
    *,
    l2: float = 1.0,
    iterations: int = 200,
    tolerance: float = 3e-4,
) -> Logistic:
    """A classifier for each encoder's features (n, d) of the same n labelled images.

    Each is done when no component of its gradient (of features scaled to a mean square of one)
    exceeds `tolerance` times its loss: a small loss has small gradients long before its optimum.
    """
    # Centring only shifts the bias, which is not penalised: the optimum stays the same.
    x = torch.stack([*features])
    mean = x.mean(1, keepdim=True)
    x -= mean
    scale = x.square().mean((1, 2), keepdim=True).sqrt().clamp_min(torch.finfo(x.dtype).tiny)
    x /= scale
    problem = _problem(x, labels, l2)
    model = _minimise(problem, classes, iterations, tolerance)
    weight = model[..., :-1] / scale
    bias = model[..., -1] - (weight @ mean.mT)[..., 0]
    loss = _cross_entropy(_logits(model, x), problem.labels)
    return Logistic(weight, bias, loss.flatten().tolist())


def _problem(x: Tensor, labels: Tensor, l2: float) -> _Problem:
    encoders, count, width = x.shape
    penalty = F.pad(x.new_full((encoders, 1, width), l2 / count), (0, 1))
    gram = _over_images(x.mT, x).double() / count
    # A little damped: the bound is only a guide, so rounding must not make it fail.
    damping = 1e-6 * gram.diagonal(dim1=1, dim2=2).sum(1)
    ridge = penalty[:, 0, :-1].double() + damping[:, None]
    factor = torch.linalg.cholesky(0.5 * gram + torch.diag_embed(ridge))
    # Of centred features, the bias is apart: its bound is ½.
    bound = F.pad(torch.cholesky_inverse(factor).to(x.dtype), (0, 1, 0, 1))
    bound[:, -1, -1] = 2
    own = labels.to(x.device, torch.long).expand(encoders, 1, -1)
    return _Problem(x, own, penalty, bound)


def _minimise(problem: _Problem, classes: int, iterations: int, tolerance: float) -> Tensor:
    """Models (encoders, classes, d + 1), the bias last."""
    x, labels = problem.x, problem.labels
    model = x.new_zeros(len(x), classes, x.shape[2] + 1)
    logits = x.new_zeros(len(x), classes, x.shape[1])
    chance = logits.softmax(1)
    gradient = _gradient(problem, chance, model)
    history: list[Pair] = []
    active = torch.ones_like(gradient[:, :1, :1])
    for iteration in range(iterations):
        if iteration % _CHECK_EVERY == 0:
            steepest = gradient.abs().amax((1, 2), keepdim=True)
            active = (steepest > tolerance * _cross_entropy(logits, labels)).to(x.dtype)
            if not bool(active.any()):
                break
        # What is done already stays where it is.
        direction = _descent(gradient, history, problem.bound) * active
        along = _logits(direction, x)
        step = _line_search(problem, logits, along, chance, gradient, direction)
        moved = step * direction
        model = model + moved
        logits = torch.addcmul(logits, along, step)
        chance = logits.softmax(1)
        before, gradient = gradient, _gradient(problem, chance, model)
        history = [*history, _pair(moved, gradient - before)][-_MEMORY:]
    return model


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """⟨a, b⟩ of each encoder, (encoders, 1, 1)."""
    return (a * b).sum((1, 2), keepdim=True)


def _logits(model: Tensor, x: Tensor) -> Tensor:
    """(encoders, classes, n): classes before images, since softmax over a short last dimension is
    slow on a CPU."""
    return torch.baddbmm(model[..., -1:], model[..., :-1].contiguous(), x.mT)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over images, (encoders, 1, 1)."""
    own = logits.gather(1, labels)[:, 0]
    return (logits.logsumexp(1) - own).mean(1)[:, None, None]


def _gradient(problem: _Problem, chance: Tensor, model: Tensor) -> Tensor:
    x, labels, penalty, _ = problem
    error = chance.scatter_add(1, labels, chance.new_full(labels.shape, -1.0)).div_(x.shape[1])
    slope = torch.cat([_over_images(error, x), error.sum(2, keepdim=True)], dim=2)
    return torch.addcmul(slope, penalty, model)


def _over_images(left: Tensor, x: Tensor) -> Tensor:
    """`left @ x`, a sum over all images. On a GPU in parts that are added up afterwards: otherwise
    the few rows and columns of the result keep few of its processors busy."""
    count = left.shape[2]
    if x.device.type == "cpu":
        return torch.bmm(left, x)
    return _in_parts(left, x, next(n for n in range(_PARTS, 0, -1) if count % n == 0))


def _in_parts(left: Tensor, x: Tensor, parts: int) -> Tensor:
    encoders, rows, _ = left.shape
    split = left.reshape(encoders, rows, parts, -1).transpose(1, 2).flatten(0, 1)
    products = torch.bmm(split, x.reshape(encoders * parts, -1, x.shape[2]))
    return products.view(encoders, parts, rows, -1).sum(1)


def _pair(moved: Tensor, change: Tensor) -> Pair:
    """A step and what it did to the gradient; not used (0) where rounding rules."""
    curvature = _dot(moved, change)
    usable = curvature > torch.finfo(moved.dtype).tiny
    return moved, change, torch.where(usable, 1 / curvature, torch.zeros_like(curvature))


def _descent(gradient: Tensor, history: list[Pair], bound: Tensor) -> Tensor:
    """The two-loop recursion of L-BFGS, with the inverse bound as its first guess."""
    vector, taken = gradient, []
    for moved, change, inverse in reversed(history):
        alpha = inverse * _dot(moved, vector)
        vector = torch.addcmul(vector, alpha, change, value=-1)
        taken.append(alpha)
    vector = vector @ bound
    if history:
        # The bound is a bound: scale it to the curvature last seen.
        moved, change, inverse = history[-1]
        ratio = 1 / (inverse * _dot(change, change @ bound))
        vector = vector * torch.where(ratio.isfinite() & (ratio > 0), ratio, torch.ones_like(ratio))
    for (moved, change, inverse), alpha in zip(history, reversed(taken), strict=True):
        vector = torch.addcmul(vector, alpha - inverse * _dot(change, vector), moved)
    descends = _dot(vector, gradient) > 0
    return -torch.where(descends, vector, gradient @ bound)


def _line_search(
    problem: _Problem,
    logits: Tensor,
    along: Tensor,
    chance: Tensor,
    gradient: Tensor,
    direction: Tensor,
) -> Tensor:
    """The step to the minimum along `direction`: two of Newton's steps, the second in a bracket.

    The objective is convex along the line and falls at 0, so a slope's sign says on which side of
    the minimum a step lies, and a Newton step that leaves the bracket is replaced.
    """
    penalised = problem.penalty * direction
    square = _dot(penalised, direction)
    start = _dot(gradient, direction)
    tiny = torch.finfo(along.dtype).tiny

    def bend(chance: Tensor) -> tuple[Tensor, Tensor]:
        """First and second derivative of the mean log-sum-exp."""
        weighted = chance * along
        first = weighted.sum(1)
        spread = (weighted * along).sum(1) - first.square()
        return first.mean(1)[:, None, None], spread.mean(1)[:, None, None]

    flat, curvature = bend(chance)
    step = -start / (curvature + square).clamp_min(tiny)
    slope, curvature = bend(torch.addcmul(logits, along, step).softmax(1))
    # What does not bend is what the slope at 0 has beyond log-sum-exp's.
    slope = slope - flat + start + step * square
    newton = step - slope / (curvature + square).clamp_min(tiny)
    past = slope > 0
    inside = torch.where(
        past, (newton > 0) & (newton < step), (newton > step) & (newton < 10 * step)
    )
    return torch.where(inside, newton, torch.where(past, step / 2, 2 * step))
