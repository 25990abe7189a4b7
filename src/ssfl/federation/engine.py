"""How a step is run on a device: plainly, or compiled and captured on a GPU.

On CUDA the whole local step (views, forward, loss, backward, optimizer) is captured once per
batch shape into a CUDA graph and replayed for every client; its parts are compiled for the full
batch, and both views go through a network at once. On a CPU a step is just called.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from pydantic import Field

from ssfl.algorithms.base import Algorithm
from ssfl.algorithms.learner import Forward, Learner, Weights
from ssfl.cores import keep_freed_memory
from ssfl.data.images import Images
from ssfl.errors import ConfigError
from ssfl.federation.lane import Lane, StreamLane
from ssfl.federation.steps import CapturedStep, PlainStep, RunnableStep, Step
from ssfl.models.ledger import Ledger
from ssfl.models.unpacked import Unpacked
from ssfl.section import Section
from ssfl.ssl.base import Batch, Outputs

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


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
    """Clients trained side by side in this process (0: one per CPU core; on a GPU as many as keep
    it busy)."""
    gpus_per_worker: float = Field(0.0, ge=0)
    """Ray: share of a GPU that each worker takes (0: the GPUs there are, shared evenly)."""
    threads: int = Field(1, ge=1)
    """Torch threads per worker on a CPU. Results are bit-equal only for the same number."""


class Engine:
    """A device, a precision, and the decision whether to compile."""

    def __init__(self, options: DeviceOptions) -> None:
        self.device = pick_device(options.device)
        bf16 = options.precision == "bf16" or (
            options.precision == "auto" and self.device.type == "cuda"
        )
        self.autocast = torch.bfloat16 if bf16 else None  # of passes, where it is not float32
        self.compile = options.compile == "auto" and self.device.type == "cuda"
        self._captures = self.compile  # and goes on to, where compiling fails
        if self.device.type == "cuda" and self.autocast is None:
            torch.backends.cudnn.allow_tf32 = False  # fp32 means fp32
        if self.device.type == "cpu":
            keep_freed_memory()
        self._resident: dict[int, tuple[Images, Images]] = {}

    def resident(self, images: Images) -> Images:
        """The images on the device, there once however many trainers ask."""
        if id(images) not in self._resident:
            labels = images.labels
            moved = Images(
                images.pixels.to(self.device), None if labels is None else labels.to(self.device)
            )
            self._resident[id(images)] = (images, moved)  # both, so that the id stays taken
        return self._resident[id(images)][1]

    def lane(self) -> Lane:
        """An order of its own for one trainer's work."""
        return StreamLane(self.device) if self.device.type == "cuda" else Lane()

    def prepare(self, learner: Learner, algorithm: Algorithm, images: int) -> None:
        """Give a learner the passes that suit the device; `images` is the usual batch."""
        if self.device.type == "cuda":
            learner.method.see_views_in_one_pass()
        if self.autocast is not None:
            cast = _cast(learner.plain.forward, self.device.type, self.autocast)
            learner.plain = replace(learner.plain, forward=cast)
        plain = learner.plain
        learner.passes = replace(plain, update=self.compiled(plain.update))
        if algorithm.differentiates_twice:
            return  # compiled code cannot be differentiated twice; it is captured all the same
        if self.compile:
            loss = self.compiled(plain.loss, lambda outputs: outputs.z.shape[1] == images)
            learner.passes = replace(learner.passes, forward=self._fast(learner, images), loss=loss)

    def _fast(self, learner: Learner, images: int) -> Forward:
        own = Unpacked(learner.flat, self.autocast or torch.float32)
        fast, plain = self.compiled(learner.plain.forward), learner.plain.forward
        statistics = Ledger(learner.method)

        def forward(batch: Batch, weights: Weights | None) -> Outputs:
            """Compiled for the usual batch; a small client's odd one is not worth the wait."""
            if weights is None:  # of a step in one piece, no gradient lies there yet
                weights = own(fresh=learner.share == 1)
            if batch.views.shape[1] != images or not self.compile:
                return plain(batch, weights)
            with statistics():
                return fast(batch, weights)

        return forward

    def compiled(
        self,
        function: Callable[Arguments, Result],
        usual: Callable[..., bool] | None = None,
    ) -> Callable[Arguments, Result]:
        """A function as it should be called on this device, for as long as `compile` is set. What
        is not `usual` is called plainly: every new shape would be compiled for itself."""
        if not self.compile:
            return function
        fast = torch.compile(function, dynamic=False, options=_compiler_options())

        def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            worth_it = self.compile and (usual is None or usual(*args, **kwargs))
            return (fast if worth_it else function)(*args, **kwargs)

        return run

    def step(self, run: Step) -> RunnableStep:
        """A whole step as it should be called on this device."""
        return CapturedStep(run, self._stop_compiling) if self._captures else PlainStep(run)

    def _stop_compiling(self) -> bool:
        """Call functions plainly from now on; returns whether that is new."""
        before, self.compile = self.compile, False
        return before


def _cast(forward: Forward, device: str, precision: torch.dtype) -> Forward:
    def run(batch: Batch, weights: Weights | None) -> Outputs:
        # Casts are kept for all threads in one place, and any of them empties it. Whether two views
        # share one, and add their gradients in lower precision, would depend on who comes when.
        with torch.autocast(device, precision, cache_enabled=False):
            return forward(batch, weights)

    return run


def _compiler_options() -> dict[str, Any]:
    """Inductor 2.11's mixed-order fusion fails an assertion on batch norm with views as groups.

    Given with each compilation, since global settings hold for the thread that makes them only.
    """
    from torch._inductor import config

    known = hasattr(config.triton, "mix_order_reduction")
    return {"triton.mix_order_reduction": False} if known else {}


def pick_device(name: str) -> torch.device:
    """The device of that name, or the best there is for 'auto'."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device.device: '{name}' is not a device; use cpu, cuda or auto")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device.device: no GPU can be used here; set device.device=cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ConfigError(
            f"device.device: there is no GPU {device.index} here, the last is cuda:{last}"
        )
    return device
