"""Every algorithm with every SSL method on the demo's data: does each beat a random encoder?

A cell trains the demo recipe, shrunk to seconds, and reports what the demo does: kNN accuracy,
the mean over clients, each client's own encoder on its own test images. Two rows below stand for
not learning: the encoder as initialised, and the same after seeing the images at a rate of
nothing, when batch norm knows its statistics but no weight has moved. Settings are one set for
all algorithms; a method brings its learning rate and the size of its heads, nothing else.

    python benchmarks/matrix.py [--methods all] [--algorithms per-ssfl fedu] [--json matrix.json]

A cell fails when a loss is not finite, when features collapse, or when it is not better than the
encoder as initialised by --margin standard errors and than the other at all; the command then
ends with 1.
"""

import argparse
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ssfl.algorithms import ALGORITHMS
from ssfl.config import Config, load_config
from ssfl.experiment import train

ROWS: dict[str, tuple[str, ...]] = {
    name: (f"algorithm.name={name}",) for name in ALGORITHMS if name != "maml-ssfl"
} | {
    "maml-ssfl": ("algorithm.name=maml-ssfl",),
    "maml-ssfl, second-order": (
        *("algorithm.name=maml-ssfl", "algorithm.second_order=true"),
        "local.max_gradient=2",  # through SwAV's sharp softmax it would run away
    ),
}
SHRUNK = (
    "data.train=2000",
    "data.test=2000",
    "partition.clients=4",
    "partition.min_size=100",
    "model.width=8",
    "local.epochs=1",
    "local.batch=32",
    "server.clients_per_round=4",
    "server.rounds=8",
    "evaluation.every=0",
    "evaluation.baselines=false",
    "device.device=cpu",
    "device.workers=1",
)
TEST_IMAGES = 2000
STILL = ("local.lr=1e-9", "server.rounds=3")
FIRST = ("simsiam", "byol", "simclr", "swav")
COLUMNS: dict[str, tuple[str, ...]] = {
    "simsiam": ("projector_width=128", "predictor_width=32"),
    "byol": ("projector_width=128", "projection_width=64", "predictor_width=128"),
    "simclr": ("projector_width=128", "projection_width=64"),
    "swav": ("projector_width=128", "projection_width=64", "prototypes=60"),
    "moco": ("projector_width=128", "projection_width=64", "queue=512"),
    "barlow-twins": ("projector_width=128",),
    "vicreg": ("projector_width=128",),
}
RATES = {"simclr": 0.3, "moco": 0.3}  # 0.1 for the others


@dataclass(frozen=True)
class Cell:
    """One combination, trained and judged."""

    algorithm: str
    method: str
    knn: float
    loss: float
    std_ratio: float
    effective_rank: float
    cpu_seconds: float

    def trouble(self, random: float, still: float, margin: float) -> str:
        """Why this cell fails, if it does."""
        error = math.sqrt(self.knn * (1 - self.knn) / TEST_IMAGES)
        if not math.isfinite(self.loss):
            return "a loss is not finite"
        if self.std_ratio < 0.02 or self.effective_rank < 2:
            return "features collapsed"
        if self.knn < max(random + margin * error, still):
            return "not better than a random encoder"
        return ""


def configuration(algorithm: str, method: str, more: Sequence[str] = ()) -> Config:
    heads = [f"ssl.{setting}" for setting in COLUMNS[method]]
    rate = f"local.lr={RATES.get(method, 0.1)}"
    chosen = [f"ssl.method={method}", *ROWS[algorithm], *SHRUNK, *heads, rate, *more]
    return load_config("demo", chosen)


def play(algorithm: str, method: str, more: Sequence[str]) -> Cell:
    """Train one cell in a folder that is gone afterwards."""
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        run = train(configuration(algorithm, method, more), out=Path(folder) / "run")
        final, losses = run.final, [r["loss"] for r in run.metrics if r["kind"] == "round"]
    clients = final["clients"].values()
    return Cell(
        algorithm,
        method,
        knn=final["knn_mean"],
        loss=losses[-1] if all(map(math.isfinite, losses)) else math.nan,
        std_ratio=min(client["std_ratio"] for client in clients),
        effective_rank=min(client["effective_rank"] for client in clients),
        cpu_seconds=time.process_time() - started,
    )


def as_initialised(more: Sequence[str]) -> float:
    """The figure of the encoder before the first round, the same for all cells."""
    settings = [*more, *STILL, "server.rounds=1", "evaluation.baselines=true"]
    with tempfile.TemporaryDirectory() as folder:
        config = configuration("global-ssfl", "simsiam", settings)
        run = train(config, out=Path(folder) / "run")
        return float(run.final["untrained_knn_mean"])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    cells: list[Cell] = []
    wanted = [(row, method) for method in args.methods for row in args.algorithms]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        random = pool.submit(as_initialised, args.set)
        still = {
            method: pool.submit(play, "global-ssfl", method, [*args.set, *STILL])
            for method in args.methods
        }
        for cell in pool.map(play, *zip(*wanted, strict=True), [args.set] * len(wanted)):
            cells.append(cell)
            print(f"{cell.algorithm}, {cell.method}: kNN {cell.knn:.3f}", file=sys.stderr)
        return {
            "settings": [*SHRUNK, *args.set],
            "machine": f"{platform.machine()}, torch {torch.__version__}",
            "as_initialised": random.result(),
            "statistics_only": {method: cell.result().knn for method, cell in still.items()},
            "cells": [asdict(cell) for cell in cells],
        }


def table(result: dict[str, Any], margin: float) -> tuple[str, list[str]]:
    """The Markdown table, and what is wrong with any cell."""
    random, still = result["as_initialised"], result["statistics_only"]
    cells = {(c["algorithm"], c["method"]): Cell(**c) for c in result["cells"]}
    troubles = [
        f"{row}, {method}: {why}"
        for (row, method), cell in cells.items()
        if (why := cell.trouble(random, still[method], margin))
    ]
    lines = [["kNN, mean over clients", *still], ["---", *["---:"] * len(still)]]
    lines += [
        [f"`{row}`", *(f"{cells[row, method].knn:.3f}" for method in still)]
        for row in dict.fromkeys(row for row, _ in cells)
    ]
    lines.append(["*as initialised*", *[f"{random:.3f}"] * len(still)])
    lines.append(["*batch-norm statistics only*", *(f"{knn:.3f}" for knn in still.values())])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines), troubles


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--algorithms", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--methods", nargs="+", choices=[*COLUMNS, "all"], default=list(FIRST))
    parser.add_argument("--set", action="append", default=[], help="section.key=value, for all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--margin", type=float, default=3.0, help="standard errors")
    parser.add_argument("--json", type=Path, default=Path("matrix.json"))
    args = parser.parse_args()
    if "all" in args.methods:
        args.methods = list(COLUMNS)
    result = measure(args)
    args.json.write_text(json.dumps(result, indent=2))
    text, troubles = table(result, args.margin)
    print(text)
    for trouble in troubles:
        print(f"FAILED {trouble}")
    sys.exit(1 if troubles else 0)


if __name__ == "__main__":
    main()
