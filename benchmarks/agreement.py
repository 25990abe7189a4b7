"""Does the fast path of a GPU compute the same thing? Compiled and captured against plain.

    python benchmarks/agreement.py [--algorithms per-ssfl ...] [--methods ...] [--rounds 50]

1. One step, `precision = fp32`, of every algorithm (and of every SSL method under Global-SSFL):
   from the same weights, images and random numbers, how far apart the weights end, as a share of
   the weights (‖fast − plain‖ / ‖weights‖) and of the step (… / ‖plain − start‖). Stated limit:
   1e-5 of the weights. Beside it, what rounding alone does: plain against plain with the images of
   the batch in reverse, which is the same sum in another order. Rates are the paper's for each.
2. Loss curves of 50 rounds, of every algorithm of the paper: plain fp32 against fast fp32 (what
   rounding alone does to a curve), against fast bf16 (what the precision does), and against another
   seed (what chance does).

Data are `shapes`, ten clients, ResNet-18 with SimSiam's heads. Prints Markdown, writes JSON.
"""

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssfl.algorithms import ALGORITHMS
from ssfl.assemble import build_host, build_server, load_federated
from ssfl.comm.local import LocalCommunicator
from ssfl.config import Config, load_config
from ssfl.data.federated import FederatedData
from ssfl.federation.client import Host
from ssfl.federation.server import Server
from ssfl.federation.steps import RunnableStep
from ssfl.federation.store import StateStore
from ssfl.ssl import METHODS

PLAIN = ["device.precision=fp32", "device.compile=off"]
FAST_FP32 = ["device.precision=fp32"]
FAST_BF16 = ["device.precision=bf16"]
RATES = {"per-ssfl": 0.03, "maml-ssfl": 0.03}  # appendix F; all others 0.1
CURVES = ("global-ssfl", "per-ssfl", "maml-ssfl", "bilevel-ssfl")  # LA-SSFL trains as Global-SSFL


def configuration(args: argparse.Namespace, images: int, settings: list[str]) -> Config:
    base = [
        "data.source=shapes",
        f"data.train={images}",
        "data.test=100",
        f"device.device={args.device}",
        f"model.width={args.width}",
        f"local.batch={args.batch}",
        "local.schedule=constant",
        "device.workers=1",
    ]
    return load_config("ssfl-iid", [*base, *settings])


def host_of(config: Config, data: FederatedData, folder: str) -> Host:
    gc.collect()  # an earlier host's models and captured steps
    return build_host(config, data, StateStore(Path(folder), 8 << 30))


class Reversed:
    """A step on the same images in reverse order."""

    def __init__(self, step: RunnableStep) -> None:
        self._step = step

    def ready(self, index: Tensor, uniforms: Tensor) -> None:
        self._step.ready(index, uniforms)

    def __call__(self, index: Tensor, uniforms: Tensor) -> Tensor:
        return self._step(index.flip(1), uniforms.flip(2))


def after_one_step(
    args: argparse.Namespace, settings: list[str], *, backwards: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The trainable part of Θ, and of client 0's Θ_k and θ_k (empty where it has none) after a
    single step."""
    config = configuration(args, 10 * args.batch, settings)
    data = load_federated(config)
    with tempfile.TemporaryDirectory() as folder:
        host = host_of(config, data, folder)
        server = server_of(config, host)
        task = server._training([0])
        state = host.store.get(0, before=0)
        if backwards:
            host.trainer._step = Reversed(host.trainer._step)
        result = host.trainer.train(0, task, state, data.train_indices(0))
        if result.steps != 1:
            raise SystemExit(f"{result.steps} steps were made, not one: mend this benchmark")
        sent = task.theta if result.delta is None else task.theta + result.delta
        own = sent[:0] if result.state.personal is None else result.state.personal

        def trainable(vector: Tensor) -> Tensor:
            return vector[: host.trainer.layout.trainable].double().cpu()

        return trainable(task.theta), trainable(sent), trainable(own)


def server_of(config: Config, host: Host) -> Server:
    return build_server(config, host.trainer, LocalCommunicator([host]))


def one_step(args: argparse.Namespace, settings: list[str]) -> dict[str, float]:
    """How far the fast step ends from the plain one, and the plain one from its own reverse."""
    start, *plain = after_one_step(args, [*settings, *PLAIN])
    _, *other = after_one_step(args, [*settings, *PLAIN], backwards=True)
    _, *fast = after_one_step(args, [*settings, *FAST_FP32])

    def apart(some: list[Tensor], others: list[Tensor], whole: Tensor | None = None) -> float:
        return max(
            float((a - b).norm() / (whole if whole is not None else a - start).norm())
            for a, b in zip(some, others, strict=True)
            if len(a) and not torch.equal(a, start)  # one that stays where it is agrees
        )

    return {
        "of_weights": apart(plain, fast, start),
        "of_step": apart(plain, fast),
        "rounding_of_weights": apart(plain, other, start),
        "rounding_of_step": apart(plain, other),
    }


def curve(args: argparse.Namespace, settings: list[str]) -> tuple[list[float], float]:
    """The loss of every round, and the seconds it all took."""
    config = configuration(args, args.images, [f"server.rounds={args.rounds}", *settings])
    data = load_federated(config)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        server = server_of(config, host_of(config, data, folder))
        losses = [server.play_round().metrics["loss"] for _ in range(args.rounds)]
    return losses, time.perf_counter() - started


def distance(a: list[float], b: list[float]) -> tuple[float, float]:
    """Mean and largest distance of two curves."""
    gaps = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return sum(gaps) / len(gaps), max(gaps)


def curves(args: argparse.Namespace, algorithm: str) -> dict[str, Any]:
    runs = {
        "plain fp32": [*PLAIN],
        "fast fp32": [*FAST_FP32],
        "fast bf16": [*FAST_BF16],
        "fast bf16, another seed": [*FAST_BF16, "seed=1"],
    }
    base = _settings(algorithm)
    found = {label: curve(args, [*base, *settings]) for label, settings in runs.items()}
    reference = found["plain fp32"][0]
    return {
        label: {"losses": losses, "seconds": seconds, "distance": distance(losses, reference)}
        for label, (losses, seconds) in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithms", nargs="*", default=[*ALGORITHMS, "maml-ssfl second-order"])
    parser.add_argument("--methods", nargs="*", default=[m for m in METHODS if m != "simsiam"])
    parser.add_argument("--curves", nargs="*", default=list(CURVES))
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--images", type=int, default=5000, help="of the curves, over ten clients")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, default=Path("agreement.json"))
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    arms = {name: _settings(name) for name in args.algorithms}
    arms |= {f"global-ssfl, {name}": [f"ssl.method={name}"] for name in args.methods}
    results: dict[str, Any] = {"torch": torch.__version__, "one_step": {}, "curves": {}}
    print("| one step in fp32 | apart, of weights | of step | rounding, of weights | of step |")
    print("|---|---|---|---|---|")
    for label, settings in arms.items():
        if "ssl.method" in settings[0]:
            torch._dynamo.reset()  # algorithms share compiled code, methods do not
        try:
            found = one_step(args, settings)
        except Exception as error:
            results["one_step"][label] = {"error": f"{type(error).__name__}: {error}"}
            reason = f"{type(error).__name__}: {str(error)[:80]}"
            print(f"| {label} | failed: {reason} | | | |", flush=True)
            continue
        results["one_step"][label] = found
        print(f"| {label} | {' | '.join(f'{v:.1e}' for v in found.values())} |", flush=True)
        args.json.write_text(json.dumps(results, indent=2))
    print("\n| curve | first loss | last loss | mean distance | largest distance | s |")
    print("|---|---|---|---|---|---|")
    for algorithm in args.curves:
        runs = results["curves"][algorithm] = curves(args, algorithm)
        for label, run in runs.items():
            mean, largest = run["distance"]
            print(
                f"| {algorithm}, {label} | {run['losses'][0]:.4f} | {run['losses'][-1]:.4f} "
                f"| {mean:.4f} | {largest:.4f} | {run['seconds']:.0f} |",
                flush=True,
            )
        args.json.write_text(json.dumps(results, indent=2))


def _settings(algorithm: str) -> list[str]:
    name, _, second = algorithm.partition(" ")
    order = ["algorithm.second_order=true"] if second else []
    return [f"algorithm.name={name}", f"local.lr={RATES.get(name, 0.1)}", *order]


if __name__ == "__main__":
    main()
