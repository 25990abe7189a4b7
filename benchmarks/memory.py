"""The most memory a round needs on the CPU, beside what must be there.

    python benchmarks/memory.py [--workers 1 2] [--json memory.json]

Ten clients, ResNet-18 of width 16, SimSiam, batch 128, as in round.py, with one batch of images
each (the peak does not depend on how many follow). Every row is a process of its own; its baseline
is what it holds once torch, the package and the images are there. Beside the growth from there to
the peak stand the bytes that a round cannot do without: the vectors (per worker and resident model,
the weights, their gradient and momentum; once, Θ, the next Θ, Θ as received and the sum; one Δ per
worker), and for Per-SSFL the personal models of all clients, twice, since a broken-off round needs
the ones before. The rest is activations and what the allocator keeps; the plain loop has that too.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import forget_peak, held_mib, machine, markdown, peak_mib, publish
from round import PlainLoop, configuration, federation, some_images

from ssfl.config import Config
from ssfl.data.federated import federate

PLAIN = "plain loop"


@dataclass(frozen=True)
class Row:
    """One process."""

    side: str
    workers: int
    baseline_mib: float
    pixels_mib: float
    vectors_mib: float
    states_mib: float
    grown_mib: float

    @property
    def rest_mib(self) -> float:
        return self.grown_mib - self.vectors_mib - self.states_mib


def with_algorithm(config: Config, name: str) -> Config:
    from ssfl.algorithms import ALGORITHMS

    options = ALGORITHMS[name].Options()
    return config.model_copy(update={"algorithm": options})


def one_row(side: str, workers: int, args: argparse.Namespace) -> Row:
    torch.set_num_threads(1)
    config = configuration(args)
    data = federate(some_images(config, args.clients * args.images), config.partition, config.seed)
    pixels = data.dataset.train.pixels.numel() / 2**20
    forget_peak()
    baseline = held_mib()
    states = 0.0
    play: Callable[[], object]
    if side == PLAIN:
        loop = PlainLoop(config, data, torch.channels_last)
        size = sum(tensor.numel() for tensor in loop.weights.values())
        vectors = 3 + 2  # weights, gradient, momentum; Θ and the mean
        play = loop.play_round
    else:
        server = federation(with_algorithm(config, side), data, workers)
        size = server.layout.size
        models = 2 if side == "per-ssfl" else 1
        vectors = 3 * models * workers + 2 + 1 + workers + 1
        states = (models - 1) * 2 * args.clients * size * 4 / 2**20
        play = server.play_round
    for _ in range(args.rounds):
        play()
    return Row(
        side, workers, baseline, pixels, vectors * size * 4 / 2**20, states, peak_mib() - baseline
    )


def measure(args: argparse.Namespace) -> list[Row]:
    asked = [(PLAIN, 1)] + [(side, n) for side in args.algorithms for n in args.workers]
    rows = []
    for side, workers in asked:
        print(f"{side}, {workers} worker(s)", file=sys.stderr)
        command = [sys.executable, __file__, *sys.argv[1:], "--row", side, str(workers)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(Row(**json.loads(done.stdout)))
    return rows


def table(rows: list[Row]) -> str:
    columns = ["", "workers", "pixels", "grown to the peak", "vectors", "states", "rest", "ratio"]
    cells = [
        [
            row.side,
            row.workers,
            f"{row.pixels_mib:.0f}",
            f"{row.grown_mib:.0f}",
            f"{row.vectors_mib:.0f}",
            f"{row.states_mib:.0f}",
            f"{row.rest_mib:.0f}",
            f"{row.grown_mib / rows[0].grown_mib:.2f}",
        ]
        for row in rows
    ]
    return markdown(columns, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--algorithms", nargs="+", default=["global-ssfl", "per-ssfl"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--images", type=int, default=128, help="per client")
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--json", type=Path, default=Path("memory.json"))
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        side, workers = args.row
        print(json.dumps(asdict(one_row(side, int(workers), args))))
        return
    rows = measure(args)
    result: dict[str, Any] = {"machine": machine(), "rows": [asdict(row) for row in rows]}
    text = f"{args.clients} clients, {args.backbone} of width {args.width}, batch {args.batch}; "
    publish(f"{text}MiB; {result['machine']}\n\n{table(rows)}", result, args.json)


if __name__ == "__main__":
    main()
