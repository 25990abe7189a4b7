"""How a step is run on a device: plainly, or compiled and captured on a GPU.

On CUDA the whole local step (views, forward, loss, backward, optimizer) is captured once per
batch shape into a CUDA graph and replayed for every client; forward passes are compiled, and both
views go through a network at once. On a CPU a step is just called.
"""

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from ssfl.algorithms.base import Algorithm
from ssfl.errors import ConfigError
from ssfl.federation.learner import Learner, Weights
from ssfl.section import Section
from ssfl.ssl.base import Batch, Outputs

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
    """A step that can be called, and told beforehand the shape it will be called with."""

    def ready(self, index: Tensor) -> None: ...

    def __call__(self, index: Tensor, uniforms: Tensor) -> Tensor: ...


class Engine:
    """A device, a precision, and the decision whether to compile."""

    def __init__(self, options: DeviceOptions) -> None:
        self.device = pick_device(options.device)
        self.bf16 = options.precision == "bf16" or (
            options.precision == "auto" and self.device.type == "cuda"
        )
        self.compile = options.compile == "auto" and self.device.type == "cuda"

    def prepare(self, learner: Learner, algorithm: Algorithm) -> None:
        """Give a learner the forward pass that suits the device."""
        if self.device.type == "cuda":
            learner.method.see_views_in_one_pass()
        forward = learner.forward
        if self.bf16:
            forward = _in_bf16(forward, self.device.type)
        if self.compile and not algorithm.differentiates_twice:
            forward = torch.compile(forward, dynamic=False)
            learner.loss = torch.compile(learner.loss, dynamic=False)
        learner.forward = forward

    def step(self, run: Step) -> RunnableStep:
        """`run` as it should be called on this device."""
        if self.compile:
            from ssfl.federation.capture import CapturedStep

            return CapturedStep(run)
        return PlainStep(run)


class PlainStep:
    """A step that is simply called."""

    def __init__(self, run: Step) -> None:
        self._run = run

    def ready(self, index: Tensor) -> None:
        """Nothing to prepare."""

    def __call__(self, index: Tensor, uniforms: Tensor) -> Tensor:
        return self._run(index, uniforms)


def _in_bf16(
    forward: Callable[[Batch, Weights | None], Outputs], device: str
) -> Callable[[Batch, Weights | None], Outputs]:
    def run(batch: Batch, weights: Weights | None) -> Outputs:
        with torch.autocast(device, torch.bfloat16):
            return forward(batch, weights)

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
