"""Multinomial logistic regression to its optimum, without waiting for the device at each step.

The objective is scikit-learn's (mean cross-entropy + l2/(2n)·|W|², bias free). The solver is
L-BFGS started from the inverse of Böhning's (1992) bound on the Hessian, ½·Cov + l2/n, which
takes most of the conditioning away. Logits are linear along a search direction, so the line
search is a few Newton steps on them and needs no further product with the features.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

_MEMORY = 10
_CHECK_EVERY = 10  # iterations between looks at the gradient: the only host syncs


def fit_logistic(
    features: Tensor,
    labels: Tensor,
    classes: int,
    *,
    l2: float = 1.0,
    iterations: int = 200,
    tolerance: float = 1e-5,
) -> tuple[Tensor, Tensor, float]:
    """Weight (classes, d), bias (classes,) on raw features, and the mean training cross-entropy."""
    count = len(features)
    labels = labels.to(features.device, torch.long)
    # Centring only shifts the bias, which is not penalised: the optimum stays the same.
    mean = features.mean(0)
    x = F.pad(features - mean, (0, 1), value=1.0)
    penalty = torch.full_like(x[0], l2 / count)
    penalty[-1] = 0
    bound = _inverse_bound(x, penalty)
    model = x.new_zeros(classes, x.shape[1])
    logits = x.new_zeros(count, classes)
    history: list[tuple[Tensor, Tensor, Tensor]] = []
    gradient = _gradient(x, labels, logits, model, penalty)
    for iteration in range(iterations):
        if iteration % _CHECK_EVERY == 0 and float(gradient.abs().max()) <= tolerance:
            break
        direction = _descent(gradient, history, bound)
        along = x @ direction.T
        step = _line_search(logits, along, labels, model, direction, penalty)
        model = model + step * direction
        logits = logits + step * along
        before, gradient = gradient, _gradient(x, labels, logits, model, penalty)
        history = [*history, _pair(step * direction, gradient - before)][-_MEMORY:]
    loss = F.cross_entropy(x @ model.T, labels).item()
    return model[:, :-1].clone(), model[:, -1] - model[:, :-1] @ mean, loss


def _inverse_bound(x: Tensor, penalty: Tensor) -> Tensor:
    """(½·XᵀX/n + penalty)⁻¹, a little damped: only a guide, so rounding must not make it fail."""
    gram = (x.T @ x).double() / len(x)
    damping = 1e-6 * gram.diagonal().sum()
    bound = 0.5 * gram + torch.diag(penalty.double() + damping)
    return torch.cholesky_inverse(torch.linalg.cholesky(bound)).to(x.dtype)


def _gradient(x: Tensor, labels: Tensor, logits: Tensor, model: Tensor, penalty: Tensor) -> Tensor:
    error = logits.softmax(1)
    error.scatter_add_(1, labels.unsqueeze(1), error.new_full((len(x), 1), -1.0))
    return error.T @ x / len(x) + penalty * model


def _pair(moved: Tensor, change: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A step, the gradient's change over it, and 1/⟨step, change⟩: 0 where rounding rules."""
    curvature = (moved * change).sum()
    usable = curvature > torch.finfo(moved.dtype).tiny
    return moved, change, torch.where(usable, 1 / curvature, torch.zeros_like(curvature))


def _descent(
    gradient: Tensor, history: list[tuple[Tensor, Tensor, Tensor]], bound: Tensor
) -> Tensor:
    """The two-loop recursion of L-BFGS, with the inverse bound as its first guess."""
    vector, taken = gradient, []
    for moved, change, inverse in reversed(history):
        alpha = inverse * (moved * vector).sum()
        vector = vector - alpha * change
        taken.append(alpha)
    vector = vector @ bound
    if history:
        # The bound is a bound: scale it to the curvature last seen.
        moved, change, inverse = history[-1]
        ratio = 1 / (inverse * (change * (change @ bound)).sum())
        vector = vector * torch.where(ratio.isfinite() & (ratio > 0), ratio, torch.ones_like(ratio))
    for (moved, change, inverse), alpha in zip(history, reversed(taken), strict=True):
        vector = vector + (alpha - inverse * (change * vector).sum()) * moved
    descends = (vector * gradient).sum() > 0
    return -torch.where(descends, vector, gradient @ bound)


def _line_search(
    logits: Tensor,
    along: Tensor,
    labels: Tensor,
    model: Tensor,
    direction: Tensor,
    penalty: Tensor,
    evaluations: int = 3,
) -> Tensor:
    """The step to the minimum along `direction`: Newton's method inside a bracket.

    The objective is convex along the line and falls at 0, so a slope's sign says on which side of
    the minimum a step lies, and a Newton step that leaves the bracket is replaced.
    """
    own = along.gather(1, labels.unsqueeze(1)).mean()
    linear, square = (penalty * model * direction).sum(), (penalty * direction.square()).sum()
    step = torch.ones_like(linear)
    low, high = torch.zeros_like(step), torch.full_like(step, torch.inf)
    for _ in range(evaluations):
        chance = (logits + step * along).softmax(1)
        first = (chance * along).sum(1)
        spread = (chance * along.square()).sum(1) - first.square()
        slope = first.mean() - own + linear + step * square
        curvature = spread.mean() + square
        past = slope > 0
        low, high = torch.where(past, low, step), torch.where(past, step, high)
        newton = step - slope / curvature
        inside = (newton > low) & (newton < high) & (newton < 10 * step)
        fallback = torch.where(high.isinf(), 2 * step, (low + high) / 2)
        step = torch.where(inside, newton, fallback)
    return step
