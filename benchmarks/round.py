"""A round of Global-SSFL against a hand-written plain PyTorch loop that does the same work.

The plain loop is what one would write without a library: one model, `load_state_dict` for every
client, `torch.optim.SGD`, an ordinary training loop, and FedAvg over state dicts. Both sides make
their views with the package's augmentation, from the same random numbers, so that both must reach
the same weights, which is checked after the first round. Rounds are interleaved in one process,
one torch thread per worker, and medians compared: as wall-clock time, and as CPU time, which other
work on the machine disturbs less. Stated limits: one worker at most 1.05, two workers at most 0.55.

    python benchmarks/round.py [--workers 1 2] [--rounds 5] [--json round.json]

The setting is 10 clients × 500 CIFAR-10 images (generated shapes where $SSFL_DATA has none),
ResNet-18 of width 16, SimSiam, batch 128; --clients, --images, --backbone and --width make it less.
The plain loop keeps its weights channels-last, as the package does; --contiguous is what one gets
without thinking of it. --bf16 adds the package with passes in bfloat16 (device.precision=bf16),
which is not the same work: its weights are not compared.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ssfl.assemble import build_host, build_method, build_server, build_views
from ssfl.comm.local import LocalCommunicator
from ssfl.config import Config, parse
from ssfl.data.federated import FederatedData, federate
from ssfl.data.images import DataSet, Images
from ssfl.data.sources import data_root, load_dataset
from ssfl.data.sources.shapes import ShapesOptions
from ssfl.federation.engine import Engine
from ssfl.federation.server import Server
from ssfl.federation.store import StateStore
from ssfl.seeding import torch_generator
from ssfl.ssl.base import Batch

PLAIN = "plain loop, 1 thread"


def configuration(args: argparse.Namespace) -> Config:
    heads = {"method": "simsiam", "projector_width": 256, "predictor_width": 64}
    return parse(
        {
            "partition": {"kind": "iid", "clients": args.clients},
            "model": {"backbone": args.backbone, "width": args.width},
            "ssl": heads,
            "local": {"batch": args.batch, "lr": 0.03, "schedule": "constant"},
            "server": {"rounds": 1000},
            "device": {"device": "cpu"},
        }
    )


def some_images(config: Config, count: int) -> DataSet:
    """The first images of CIFAR-10, or as many shapes."""
    if (data_root() / "cifar-10-batches-bin").is_dir():
        dataset = load_dataset(parse({"data": {"source": "cifar10"}}).data)
    else:
        dataset = load_dataset(ShapesOptions(train=count, test=10))
    train = Images(dataset.train.pixels[:count].clone(), None)
    return replace(dataset, train=train, test=None)


class PlainLoop:
    """FedAvg with SimSiam as one would write it by hand."""

    def __init__(self, config: Config, data: FederatedData, order: torch.memory_format) -> None:
        self.config, self.data = config, data
        dataset = data.dataset
        self.model = build_method(config, dataset.channels, dataset.image_size).train()
        self.model.to(memory_format=order)  # type: ignore[call-overload]  # torch's types lack it
        self.views = build_views(config, data.dataset, torch.device("cpu"))
        self.weights = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.round = 0

    def play_round(self) -> None:
        total = sum(self.data.size(client) for client in self.data.clients())
        mean = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}
        for client in self.data.clients():
            self.model.load_state_dict(self.weights)
            self.train(client)
            share = self.data.size(client) / total
            for name, tensor in self.model.state_dict().items():
                mean[name] += share * tensor
        self.weights = mean
        self.round += 1

    def train(self, client: int) -> None:
        local, pixels = self.config.local, self.data.dataset.train.pixels
        optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=local.lr,
            momentum=local.momentum,
            weight_decay=local.weight_decay,
        )
        indices = self.data.train_indices(client)
        where = (self.config.seed, self.round, client)
        for rows, uniforms in draws(*where, indices, local.batch, self.views.draws):
            views = self.views(pixels[rows], uniforms)
            loss = self.model.loss(self.model(Batch(views)))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def draws(
    seed: int, round_: int, client: int, indices: Tensor, batch: int, numbers: int
) -> list[tuple[Tensor, Tensor]]:
    """The images of every step and the random numbers of their views, as the trainer has them."""
    steps = len(indices) // batch
    order = torch_generator(seed, "batches", round_, client)
    shuffled = indices[torch.randperm(len(indices), generator=order)[: steps * batch]]
    views = torch_generator(seed, "views", round_, client)
    uniforms = torch.rand((steps, 2, batch, numbers), generator=views)
    return list(zip(shuffled.view(steps, batch), uniforms, strict=True))


def federation(
    config: Config,
    data: FederatedData,
    workers: int,
    precision: Literal["fp32", "bf16"] = "fp32",
) -> Server:
    """The package's own round, with so many workers in this process."""
    store = StateStore(Path(tempfile.mkdtemp()), 1 << 30)
    engine = Engine(config.device.model_copy(update={"precision": precision}))
    hosts = [build_host(config, data, store, engine) for _ in range(workers)]
    return build_server(config, hosts[0].trainer, LocalCommunicator(hosts))


def agree(plain: PlainLoop, server: Server) -> float:
    """Largest difference between the two sides' weights; they must be the same but for rounding."""
    named = server.layout.tensors(server.theta)
    assert named.keys() == plain.weights.keys()
    return max(float((named[k] - plain.weights[k]).abs().max()) for k in named)


def timed(play: Callable[[], Any]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    play()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    config = configuration(args)
    data = federate(some_images(config, args.clients * args.images), config.partition, config.seed)
    order = torch.contiguous_format if args.contiguous else torch.channels_last
    plain = PlainLoop(config, data, order)
    servers = {n: federation(config, data, n) for n in args.workers}
    sides: dict[str, Callable[[], Any]] = {PLAIN: plain.play_round}
    for n, server in servers.items():
        sides[_ssfl(n)] = server.play_round
    for n in args.workers if args.bf16 else ():
        sides[f"{_ssfl(n)}, bf16"] = federation(config, data, n, "bf16").play_round
    difference = 0.0
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for round_ in range(1 + args.rounds):
        for name, play in sides.items():
            took = timed(play)
            if round_:  # the first warms up
                times[name].append(took)
                print(f"round {round_} {name}: {took[0]:.2f} s", file=sys.stderr)
        if round_ == 0:  # later, rounding has grown: training is chaotic
            difference = max(agree(plain, server) for server in servers.values())
            if difference > 1e-3:
                raise SystemExit(f"the weights differ by {difference:.2g}: not the same work")
    rows = []
    for name, taken in times.items():
        ratios = [
            [mine[kind] / theirs[kind] for mine, theirs in zip(taken, times[PLAIN], strict=True)]
            for kind in (0, 1)
        ]
        rows.append(
            {
                "side": name,
                "seconds": statistics.median(wall for wall, _ in taken),
                "cpu_seconds": statistics.median(cpu for _, cpu in taken),
                "ratio": statistics.median(ratios[0]),
                "cpu_ratio": statistics.median(ratios[1]),
            }
        )
    return {
        "setting": f"{args.clients} clients × {args.images} images of {data.dataset.name}, "
        f"{args.backbone} of width {args.width}, SimSiam, batch {args.batch}",
        "parameters": sum(p.numel() for p in plain.model.parameters()),
        "rounds": args.rounds,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "load": os.getloadavg()[0],
        "largest_difference": difference,
        "rows": rows,
    }


def _ssfl(workers: int) -> str:
    return f"ssfl, {workers} worker{'s' if workers > 1 else ''}"


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['setting']}; {result['parameters']:,} parameters; median of {result['rounds']} "
        f"interleaved rounds; {result['machine']}, load {result['load']:.1f}",
        "",
        "| | s per round | ratio | CPU s per round | CPU ratio |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['side']} | {r['seconds']:.2f} | {r['ratio']:.3f} | {r['cpu_seconds']:.2f} "
        f"| {r['cpu_ratio']:.3f} |"
        for r in result["rows"]
    ]
    lines += [
        "",
        f"Weights of both sides after the first round differ by at most "
        f"{result['largest_difference']:.1e}.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--images", type=int, default=500, help="per client")
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--contiguous", action="store_true", help="the plain loop's weights")
    parser.add_argument("--bf16", action="store_true", help="also with passes in bfloat16")
    parser.add_argument("--json", type=Path, default=Path("round.json"))
    args = parser.parse_args()
    result = measure(args)
    print(table(result))
    args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
