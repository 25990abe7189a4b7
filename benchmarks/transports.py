"""What a transport costs: seconds per round where clients train nothing.

ResNet-18 with SimSiam's heads (45 MB) goes out to 1, 10 and 100 clients and comes back from each;
what is left is loading Θ, subtracting it, folding Δ, and the transport. One command:

    python benchmarks/transports.py [--workers 2] [--rounds 5] [--json transports.json]

prints a Markdown table and writes the figures as JSON. Every cell is a run of its own.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ssfl.algorithms import ALGORITHMS
from ssfl.algorithms.base import Algorithm, AlgorithmOptions, Models
from ssfl.config import Config, parse
from ssfl.experiment import train
from ssfl.run import Run
from ssfl.ssl.base import Batch

CLIENTS = (1, 10, 100)


class IdleOptions(AlgorithmOptions):
    """Idle has nothing to set."""

    name: Literal["idle"] = "idle"


class Idle(Algorithm):
    """Clients that take Θ and give it back."""

    Options: ClassVar[type[AlgorithmOptions]] = IdleOptions

    def step(self, models: Models, *batches: Batch) -> tuple[Tensor, ...]:
        return (torch.zeros(()),)


ALGORITHMS.register("idle", "transports:Idle")


def experiment(clients: int, workers: int, rounds: int) -> Config:
    """A 45 MB model over next to no data."""
    return parse(
        {
            "name": "transports",
            "data": {"source": "digits", "test_fraction": 0.8},
            "partition": {"kind": "iid", "clients": clients},
            "model": {"backbone": "resnet18"},
            "ssl": {"method": "simsiam"},
            "algorithm": {"name": "idle"},
            "local": {"batch": 512},
            "server": {"rounds": rounds},
            "evaluation": {"every": 0, "clients": 0, "bank": 1},
            "device": {"device": "cpu", "workers": workers},
            "run": {"checkpoint_every": rounds},
        }
    )


def in_this_command(workers: int) -> list[str]:
    """local and ray: the program starts its own workers."""
    return [sys.executable]


def under_mpiexec(workers: int) -> list[str]:
    """mpi: one rank more than there are workers."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    return [str(mpiexec), "-n", str(workers + 1), sys.executable]


TRANSPORTS: dict[str, Callable[[int], list[str]]] = {
    "local": in_this_command,
    "mpi": under_mpiexec,
    "ray": in_this_command,
}
"""How a run over each transport is started."""


def measure(transport: str, clients: int, workers: int, rounds: int) -> list[float]:
    """Seconds of each round but the first, which warms up."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "run")
        one = ["--one", transport, str(clients), out]
        command = [*TRANSPORTS[transport](workers), __file__, *one]
        command += ["--workers", str(workers), "--rounds", str(rounds)]
        threads = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
        subprocess.run(command, check=True, env={**os.environ, **threads})
        rows = [row for row in Run(out).metrics if row["kind"] == "round"]
    assert all(row["accepted"] == clients for row in rows)
    return [row["seconds"] for row in rows[1:]]


def table(figures: dict[str, dict[int, list[float]]]) -> str:
    """Medians, as Markdown."""
    head = "| transport | " + " | ".join(f"{n} client{'s' * (n > 1)}" for n in CLIENTS) + " |"
    lines = [head, "|---" * (len(CLIENTS) + 1) + "|"]
    for transport, cells in figures.items():
        medians = [f"{statistics.median(cells[n]):.2f}" for n in CLIENTS]
        lines.append(f"| {transport} | " + " | ".join(medians) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("transports.json"))
    parser.add_argument("--only", choices=TRANSPORTS, nargs="+", default=list(TRANSPORTS))
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        transport, clients, out = options.one
        config = experiment(int(clients), options.workers, options.rounds)
        train(config, out=out, comm=transport)
        return
    figures = {
        transport: {n: measure(transport, n, options.workers, options.rounds) for n in CLIENTS}
        for transport in options.only
    }
    facts = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "workers": options.workers,
        "torch": version("torch"),
        "seconds": figures,
    }
    options.json.write_text(json.dumps(facts, indent=2))
    print(f"Seconds per round, {options.workers} workers, {os.cpu_count()} cores:\n")
    print(table(figures))


if __name__ == "__main__":
    main()
