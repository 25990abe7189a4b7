"""Semi-supervised evaluation: an encoder and a new head trained with a few labels.

As in SimCLR (section 4.2 and appendix B.5): a class-balanced 1 % or 10 % of the labels, encoder
and linear head trained together. It works on a copy: the encoder given is not touched.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init

from ssfl import seeding
from ssfl.errors import DataError
from ssfl.evaluation.features import extract
from ssfl.section import Section


class FinetuneOptions(Section):
    """How encoder and head are fine-tuned on the labelled part."""

    epochs: int = Field(60, ge=1)
    """Passes over the labelled images."""
    batch: int = Field(128, ge=2)
    """Labelled images per step."""
    lr: float = Field(0.01, ge=0)
    """Learning rate of the encoder, cosine to 0 over all steps."""
    head_lr: float = Field(0.1, gt=0)
    """Learning rate of the new linear head, cosine to 0 over all steps."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Nesterov momentum of SGD."""
    weight_decay: float = Field(5e-4, ge=0)
    """L2 penalty on encoder and head."""


@dataclass(frozen=True)
class FinetuneResult:
    """A fine-tuned copy and what it scores on the test images."""

    accuracy: float
    loss: float
    """Mean training loss over the last epoch."""
    images: int
    """Labelled images trained on."""
    encoder: nn.Module
    head: nn.Linear


def finetune(
    encoder: nn.Module,
    train_pixels: Tensor,
    train_labels: Tensor,
    test_pixels: Tensor,
    test_labels: Tensor,
    normalise: Callable[[Tensor], Tensor],
    augment: Callable[[Tensor, torch.Generator], Tensor] | None,
    options: FinetuneOptions,
    seed: int,
    device: torch.device | str,
    *,
    classes: int | None = None,
) -> FinetuneResult:
    """Train a copy of `encoder` and a linear head on the labelled subset given, then test them.

    `augment(pixels_u8, generator)` gives a training batch ready for the encoder, normalised;
    without it the batch is `normalise(pixels_u8)`, as the test images are.
    """
    device = torch.device(device)
    pixels, labels = train_pixels.to(device), train_labels.to(device, torch.long)
    if len(pixels) < 2 or len(test_pixels) == 0:
        raise DataError("fine-tuning needs at least two labelled images and one test image")
    classes = int(labels.max()) + 1 if classes is None else classes
    tuned = copy.deepcopy(encoder).to(device).requires_grad_(True)
    width = extract(tuned, pixels[:2], normalise, device=device).shape[1]
    # From zero: no random start to average over, and the first steps spare the encoder.
    head: nn.Linear = skip_init(nn.Linear, width, classes, device=device)  # type: ignore[no-untyped-call]
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)

    loss = _train(tuned, head, pixels, labels, augment or _plain(normalise), options, seed)
    with torch.no_grad():
        features = extract(tuned, test_pixels, normalise, device=device)
        right = head(features).argmax(1) == test_labels.to(device)
    return FinetuneResult(
        float(right.double().mean()), loss, len(pixels), tuned.eval(), head.eval()
    )


def _plain(
    normalise: Callable[[Tensor], Tensor],
) -> Callable[[Tensor, torch.Generator], Tensor]:
    return lambda pixels, _: normalise(pixels)


def _train(
    encoder: nn.Module,
    head: nn.Linear,
    pixels: Tensor,
    labels: Tensor,
    inputs: Callable[[Tensor, torch.Generator], Tensor],
    options: FinetuneOptions,
    seed: int,
) -> float:
    """SGD on both, in place; returns the last epoch's mean loss. No host sync inside."""
    device = pixels.device
    groups = [
        {"params": list(encoder.parameters()), "lr": options.lr},
        {"params": list(head.parameters()), "lr": options.head_lr},
    ]
    optimizer = torch.optim.SGD(
        groups,
        momentum=options.momentum,
        nesterov=options.momentum > 0,
        weight_decay=options.weight_decay,
    )
    order = seeding.torch_generator(seed, "finetune-order")
    dice = seeding.torch_generator(seed, "finetune-augment", device=device)
    size = min(options.batch, len(pixels))
    # A tail of one image has no batch statistics: it waits for another epoch's shuffle.
    steps = len(pixels) // size + (len(pixels) % size > 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / (options.epochs * steps)))
    )
    encoder.train()
    total = torch.zeros((), device=device)
    for _ in range(options.epochs):
        total.zero_()
        shuffled = torch.randperm(len(pixels), generator=order).to(device, non_blocking=True)
        for rows in torch.split(shuffled, size)[:steps]:
            features = encoder(inputs(pixels[rows], dice)).flatten(1)
            loss = F.cross_entropy(head(features.float()), labels[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            total += loss.detach()
    return float(total) / steps
