"""What a transport costs: seconds per round where clients train nothing.

ResNet-18 (45 MB, with heads of next to nothing) goes out to 1, 10 and 100 clients and comes back
from each; what is left is loading Θ, subtracting it, folding Δ, and the transport. One command:

    python benchmarks/transports.py [--workers 2] [--rounds 5] [--only local mpi] [--clients 1 10]

prints a Markdown table and writes all figures as JSON (`--json FILE`). Every cell is a run of its
own, the median of its rounds but the first. Flower's rows are a real federation on this machine,
through TLS: a coordinator, its SuperLink, and two sites (one, where there is one client) with a
SuperNode each, the clients divided between them. In "flower summed" a site sends the mean of its
clients. Left out unless asked for by --clients: flower at 100 clients, 4.5 GB a round through
SuperLink's database.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ssfl.algorithms import ALGORITHMS
from ssfl.algorithms.base import Algorithm, AlgorithmOptions, Models
from ssfl.assemble import build_host, load_federated
from ssfl.config import Config, parse
from ssfl.experiment import Experiment, Quiet, train
from ssfl.federation.store import StateStore
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


def experiment(clients: int, workers: int, rounds: int, width: int, updates: str) -> Config:
    """A large model over next to no data."""
    return parse(
        {
            "name": "transports",
            "data": {"source": "digits", "test_fraction": 0.8},
            "partition": {"kind": "iid", "clients": clients},
            "model": {"backbone": "resnet18", "width": width},
            "ssl": {"method": "simsiam", "projector_width": 32, "predictor_width": 8},
            "algorithm": {"name": "idle"},
            "local": {"batch": 512},
            "server": {"rounds": rounds, "updates": updates},
            "evaluation": {"every": 0, "clients": 0, "bank": 1},
            "device": {"device": "cpu", "workers": workers},
            "run": {"checkpoint_every": rounds},
        }
    )


def megabytes(config: Config) -> float:
    """What travels in one direction for one client."""
    host = build_host(config, load_federated(config), StateStore(Path("nowhere"), 0))
    return 4e-6 * host.trainer.layout.shared


# One cell, in a process of its own


def play(transport: str, config: Config, out: Path, sites: int) -> None:
    """A whole run over a transport."""
    if transport.startswith("flower"):
        play_flower(config, out, sites)
    else:
        train(config, out=out, comm=transport)


def play_flower(config: Config, out: Path, sites: int) -> None:
    """The coordinator, and its sites as children."""
    from ssfl.comm import COMMUNICATORS
    from ssfl.comm.flower.keys import make_authority
    from ssfl.comm.flower.processes import free_port
    from ssfl.comm.flower.serve import ServeOptions, write_settings

    home, port = out.parent, free_port()
    make_authority(home / "keys", ["127.0.0.1"])
    (home / "keys" / "sites").mkdir()
    clients = config.partition.clients
    shares = [tuple(range(first, clients, sites)) for first in range(min(sites, clients))]
    run = Run.create(config, out)
    write_settings(run.path, ServeOptions(keys=home / "keys", host="127.0.0.1", port=port))
    COMMUNICATORS.register("flower", "ssfl.comm.flower.serve:connect")
    with contextlib.ExitStack() as stack:
        for number, share in enumerate(shares):
            stack.enter_context(site(home, number, port, share, config))
        Experiment(run, "flower", Quiet()).play()


@contextlib.contextmanager
def site(
    home: Path, number: int, port: int, clients: tuple[int, ...], config: Config
) -> Iterator[None]:
    """A site as a process, for the length of the `with` block."""
    from ssfl.comm.flower.host import SiteOptions, init_site

    folder = home / f"site-{number}"
    options = SiteOptions(server=f"127.0.0.1:{port}", clients=clients)
    public = init_site(folder, options, config, home / "keys" / "ca.pem")
    shutil.copy(public, home / "keys" / "sites" / f"{folder.name}.pub")
    process = subprocess.Popen([sys.executable, __file__, "--site", str(folder)])
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def play_site(folder: Path) -> None:
    from ssfl.comm.flower.host import load_site, run_site

    with contextlib.suppress(KeyboardInterrupt):
        run_site(folder, *load_site(folder))


# All of them

TRANSPORTS = {
    "local": CLIENTS,
    "mpi": CLIENTS,
    "ray": CLIENTS,
    "flower": (1, 10),
    "flower-summed": CLIENTS,
}
"""The rows, and the numbers of clients that each is measured with unless told otherwise."""

NEEDS = {"mpi": "mpi4py", "ray": "ray", "flower": "flwr", "flower-summed": "flwr"}


def launcher(transport: str, workers: int) -> list[str]:
    """mpi has its ranks started from outside, one more than there are workers."""
    if transport != "mpi":
        return [sys.executable]
    mpiexec = Path(sys.executable).with_name("mpiexec")
    return [str(mpiexec), "-n", str(workers + 1), sys.executable]


def measure(transport: str, clients: int, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each round but the first, which warms up, and how busy the machine was."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [*launcher(transport, options.workers), __file__]
        command += ["--cell", transport, str(clients), str(out)]
        for name in ("workers", "rounds", "width", "sites"):
            command += [f"--{name}", str(getattr(options, name))]
        threads = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
        before = os.getloadavg()[0]
        subprocess.run(command, check=True, env={**os.environ, **threads})
        rows = [row for row in Run(out).metrics if row["kind"] == "round"]
    assert all(row["accepted"] == clients for row in rows)
    seconds = [row["seconds"] for row in rows[1:]]
    print(f"{transport}, {clients} clients: {statistics.median(seconds):.2f} s", file=sys.stderr)
    return {"seconds": seconds, "load": [before, os.getloadavg()[0]]}


def table(figures: dict[str, dict[int, dict[str, Any]]], columns: list[int]) -> str:
    """Medians, as Markdown."""
    heads = [f"{n} client{'s' * (n > 1)}" for n in columns]
    lines = ["| transport | " + " | ".join(heads) + " |", "|---" * (len(columns) + 1) + "|"]
    for transport, cells in figures.items():
        medians = [
            f"{statistics.median(cells[n]['seconds']):.2f}" if n in cells else "–" for n in columns
        ]
        lines.append(f"| {transport} | " + " | ".join(medians) + " |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="threads, ranks or actors at work")
    parser.add_argument("--rounds", type=int, default=5, help="rounds a cell, the first to warm up")
    parser.add_argument("--only", choices=TRANSPORTS, nargs="+", default=list(TRANSPORTS))
    parser.add_argument("--clients", type=int, nargs="+", help="columns; also those left out")
    parser.add_argument("--sites", type=int, default=2, help="Flower: sites the clients are behind")
    parser.add_argument("--width", type=int, default=64, help="of ResNet-18: 64 is 45 MB, 8 is 1")
    parser.add_argument("--json", type=Path, default=Path("transports.json"))
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--site", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be at least 2: the first warms up and does not count")
    return options


def configured(transport: str, clients: int, options: argparse.Namespace) -> Config:
    updates = "summed" if transport == "flower-summed" else "single"
    return experiment(clients, options.workers, options.rounds, options.width, updates)


def main() -> None:
    options = arguments()
    if options.site is not None:
        play_site(options.site)
        return
    if options.cell is not None:
        transport, clients, out = options.cell
        config = configured(transport, int(clients), options)
        play(transport, config, Path(out), options.sites)
        return
    missing = [name for name in options.only if find_spec(NEEDS.get(name, "ssfl")) is None]
    for name in missing:
        print(f"{name} is left out: {NEEDS[name]} is not installed", file=sys.stderr)
    figures = {
        transport: {n: measure(transport, n, options) for n in options.clients or usual}
        for transport, usual in TRANSPORTS.items()
        if transport in options.only and transport not in missing
    }
    size = megabytes(configured("local", 1, options))
    facts = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "torch": version("torch"),
        "megabytes": size,
        **{name: getattr(options, name) for name in ("workers", "sites", "rounds")},
        "figures": figures,
    }
    options.json.write_text(json.dumps(facts, indent=2))
    loads = [load for cells in figures.values() for cell in cells.values() for load in cell["load"]]
    print(
        f"Seconds per round, {size:.0f} MB out and back for every client, {options.workers} "
        f"workers, {options.sites} Flower sites of one worker each, {os.cpu_count()} cores, "
        f"load average {min(loads):.1f} to {max(loads):.1f}:\n"
    )
    print(table(figures, list(options.clients or CLIENTS)))


if __name__ == "__main__":
    main()
