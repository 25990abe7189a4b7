"""What each choice of the GPU path is worth: rounds with one of them undone, or one more made.

    python benchmarks/ablation.py [--choices native-norm ...] [--batch 256] [--workers 1]

The rounds are those of gpu.py (ten IID clients, 50,000 images, ResNet-18, SimSiam, Global-SSFL),
one client in flight unless asked otherwise. Beside each choice stands what was predicted of it
before it was measured. `stacked` is not a round: two clients' convolutions as one of two groups,
against one client's after the other's. Prints a Markdown table and writes JSON.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu import BASE, measure
from torch import Tensor, nn

from ssfl.algorithms.learner import Forward, Learner
from ssfl.assemble import load_federated
from ssfl.config import load_config
from ssfl.federation.engine import Engine
from ssfl.federation.steps import PlainStep
from ssfl.models import norm
from ssfl.models.norm import BatchNorm
from ssfl.ssl.base import Method


@dataclass(frozen=True)
class Choice:
    """Something done otherwise."""

    what: str
    predicted: str
    """Of the rate, at batch 256 with one client in flight."""
    made: Callable[[], AbstractContextManager[Any]]
    settings: tuple[str, ...] = ()


@contextmanager
def algorithms_tried_out() -> Iterator[None]:
    """cuDNN times its algorithms at every new shape, and keeps the fastest."""
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = False


@contextmanager
def native_norms() -> Iterator[None]:
    """Batch norm by cuDNN's kernels, view by view, with nothing fused to it."""
    before = BatchNorm.__init__

    def plain(self: BatchNorm, *args: Any, **options: Any) -> None:
        before(self, *args, **options)
        self.plain_ops = False

    with patch.object(BatchNorm, "__init__", plain):
        yield


class DerivedNormalise:
    """Batch norm whose backward pass is left to the compiler."""

    @staticmethod
    def apply(
        parts: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        over, shape = norm._around_channels(parts)
        exact = parts.float()
        variance, mean = torch.var_mean(exact, dim=over, correction=0, keepdim=True)
        y = (exact - mean) * torch.rsqrt(variance + eps)
        if weight is not None and bias is not None:
            y = y * weight.view(shape) + bias.view(shape)
        return y.to(parts.dtype), mean.detach(), variance.detach()


def tensor_by_tensor(self: Engine, learner: Learner, images: int) -> Forward:
    """In place of `Engine._fast`: autocast treats each weight and each gradient alone."""
    return self.compiled(learner.plain.forward)


CHOICES: dict[str, Choice] = {
    "as-it-is": Choice("as it is", "", nullcontext),
    "two-passes": Choice(
        "views one after another",
        "−8 %: kernels of half the size",
        partial(patch.object, Method, "see_views_in_one_pass", lambda self: None),
    ),
    "native-norm": Choice(
        "batch norm, ReLU and sums not fused (cuDNN's batch norm)",
        "−20 %: activations read and written twice as often",
        native_norms,
    ),
    "derived-norm": Choice(
        "batch norm's backward pass derived by the compiler",
        "−8 %: five readings of activations for three",
        partial(patch.object, norm, "_Normalise", DerivedNormalise),
    ),
    "tried-out": Choice(
        "cuDNN's algorithms tried out", "+3 %: its guesses are good", algorithms_tried_out
    ),
    "one-by-one": Choice(
        "weights cast, gradients and statistics entered one by one",
        "−3 %: 180 kernels of 1 µs",
        partial(patch.object, Engine, "_fast", tensor_by_tensor),
    ),
    "not-captured": Choice(
        "compiled, not captured into a CUDA graph",
        "−10 %: launches outrun the shorter kernels",
        partial(patch.object, Engine, "step", lambda self, run: PlainStep(run)),
    ),
    "eager": Choice("neither compiled nor captured", "−65 %", nullcontext, ("device.compile=off",)),
}
STACKED = "two clients' convolutions as one of two groups"
STACKED_PREDICTION = "three times as long: grouped kernels leave tensor cores idle"


def forward_and_backward(module: nn.Module, x: Tensor, upstream: Tensor) -> None:
    module(x).backward(upstream)


def replayed(work: Callable[[], None], repeats: int) -> float:
    """Milliseconds of work as a CUDA graph, so that the GPU is timed and not the host."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        work()
    graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / repeats


def stacked_convolutions(batch: int, repeats: int = 20) -> dict[str, float]:
    """Milliseconds, forward and backward, of two clients' convolutions at a ResNet-18's four
    widths: apart, and stacked into one of two groups."""
    took = {"apart": 0.0, "stacked": 0.0}
    for width, size in ((64, 32), (128, 16), (256, 8), (512, 4)):
        for side, groups in (("apart", 1), ("stacked", 2)):
            conv = nn.Conv2d(groups * width, groups * width, 3, padding=1, groups=groups)
            conv.to("cuda", torch.bfloat16)
            conv.weight.data = conv.weight.data.to(memory_format=torch.channels_last)
            images = torch.randn(2 * batch, groups * width, size, size, device="cuda")
            x = images.to(torch.bfloat16, memory_format=torch.channels_last).requires_grad_()
            upstream = torch.randn_like(conv(x))
            work = partial(forward_and_backward, conv, x, upstream)
            took[side] += replayed(work, repeats) * 2 / groups
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*CHOICES, "stacked"]
    parser.add_argument("--choices", nargs="+", choices=names, default=names)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("ablation.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    torch.set_num_threads(1)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print("|  | predicted | found | images/s |\n|---|---|---|---|", flush=True)
    data = None
    for name in args.choices:
        if name == "stacked":
            took = result[name] = stacked_convolutions(args.batch)
            times = f"{took['stacked'] / took['apart']:.2f} × the time"
            cells = [STACKED, STACKED_PREDICTION, times, ""]
        else:
            choice = CHOICES[name]
            data = data or load_federated(load_config("ssfl-iid", BASE))
            settings = [f"local.batch={args.batch}", f"device.workers={args.workers}"]
            with choice.made():
                found = measure([*settings, *choice.settings], data, args.rounds, profile=False)
            result[name] = found
            rate = found["images_per_second"]
            usual = result.get("as-it-is", found)["images_per_second"]
            cells = [choice.what, choice.predicted, f"{rate / usual - 1:+.1%}", f"{rate:,.0f}"]
        # At once: a choice may take minutes to compile.
        print(f"| {' | '.join(cells)} |", flush=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
