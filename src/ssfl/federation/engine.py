"""How a step is run on a device: plainly, or compiled and captured on a GPU.

On CUDA the whole local step (views, forward, loss, backward, optimizer) is captured once per
batch shape into a CUDA graph and replayed for every client; its parts are compiled for the full
batch, and both views go through a network at once. On a CPU a step is just called.
"""

import logging
from collections.abc import Callable
from typing import Literal, ParamSpec, Protocol, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from ssfl.algorithms.base import Algorithm
from ssfl.errors import ConfigError
from ssfl.federation.learner import Forward, Learner, Weights
from ssfl.section import Section
from ssfl.ssl.base import Batch, Outputs

log = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Step = Callable[[Tensor, Tensor], Tensor]


class DeviceOptions(Section):
    """Where and how the arithmetic is done."""

    device: str = "auto"
    """'cpu', 'cuda', 'cuda:1', or 'auto': the first GPU if there is one."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of forward and backward passes; weights, losses and statistics are always fp32. 'auto' is
    bf16 on a GPU and fp32 on a CPU."""
    compile: Literal["auto", "off"] = "auto"
    """'auto' compiles and captures steps on a GPU; 'off' never does."""
    workers: int = Field(0, ge=0)
    """Clients trained side by side in this process (0: one per CPU core, or one on a GPU)."""
    threads: int = Field(1, ge=1)
    """Torch threads per worker on a CPU. Results are bit-equal only for the same number."""


class RunnableStep(Protocol):
    """A step that can be called, and shown beforehand what it will be called with."""

    def ready(self, index: Tensor, uniforms: Tensor) -> None: ...

    def __call__(self, index: Tensor, uniforms: Tensor) -> Tensor: ...


class Engine:
    """A device, a precision, and the decision whether to compile."""

    def __init__(self, options: DeviceOptions) -> None:
        self.device = pick_device(options.device)
        self.bf16 = options.precision == "bf16" or (
            options.precision == "auto" and self.device.type == "cuda"
        )
        self.compile = options.compile == "auto" and self.device.type == "cuda"

    def prepare(self, learner: Learner, algorithm: Algorithm, images: int) -> None:
        """Give a learner the passes that suit the device; `images` is the usual batch."""
        if self.device.type == "cuda":
            learner.method.see_views_in_one_pass()
        if self.bf16:
            learner.forward = _in_bf16(learner.forward, self.device.type)
        if not self.compile:
            return
        learner.update = torch.compile(learner.update, dynamic=False)
        if algorithm.differentiates_twice:
            log.warning("steps are captured but not compiled: they take gradients of gradients")
            return
        learner.forward = _for_batches_of(images, torch.compile(learner.forward), learner.forward)
        learner.loss = torch.compile(learner.loss, dynamic=False)

    def compiled(self, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        """A pure function as it should be called on this device."""
        return torch.compile(function, dynamic=False) if self.compile else function

    def step(self, run: Step) -> RunnableStep:
        """A whole step as it should be called on this device."""
        if self.compile:
            from ssfl.federation.capture import CapturedStep

            return CapturedStep(run)
        return PlainStep(run)


class PlainStep:
    """A step that is simply called."""

    def __init__(self, run: Step) -> None:
        self._run = run

    def ready(self, index: Tensor, uniforms: Tensor) -> None:
        """Nothing to prepare."""

    def __call__(self, index: Tensor, uniforms: Tensor) -> Tensor:
        return self._run(index, uniforms)


def _in_bf16(forward: Forward, device: str) -> Forward:
    def run(batch: Batch, weights: Weights | None) -> Outputs:
        with torch.autocast(device, torch.bfloat16):
            return forward(batch, weights)

    return run


def _for_batches_of(images: int, compiled: Forward, plain: Forward) -> Forward:
    """Compiled for the usual batch; a small client's odd one is not worth a compilation."""

    def run(batch: Batch, weights: Weights | None) -> Outputs:
        return (compiled if batch.views.shape[1] == images else plain)(batch, weights)

    return run


def pick_device(name: str) -> torch.device:
    """The device of that name, or the best there is for 'auto'."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"device.device: '{name}' is not a device; use cpu, cuda or auto"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device.device: no GPU can be used here; set device.device=cpu")
    return device
