"""Many clients: what a round costs with a hundred, a thousand and ten thousand of them.

A round should cost what its participants cost, however many clients stand by. So the model and the
images are tiny (ten images of 8×8 each, one step of a small network), and what is left is what the
framework does per client there is and per client that takes part.

    python benchmarks/scale.py [--clients 100 1000 10000] [--rounds 10] [--json scale.json]

Every cell is a process of its own, so that its peak memory is its own. Global-SSFL, and Per-SSFL
with room for 1 MB of personal states in memory and one of every client's on disk already, as late
in a run. The ratio is to the fewest clients with as many per round: flat is 1. A checkpoint is
timed apart, since it comes every so many rounds. Ratios are of CPU time, which other work on the
machine disturbs less.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import Took, held_mib, machine, markdown, median, peak_mib, publish, timed
from safetensors.torch import save_file

from ssfl.assemble import build_host, build_server
from ssfl.comm.local import LocalCommunicator
from ssfl.config import Config, parse
from ssfl.data.federated import FederatedData
from ssfl.data.images import DataSet, Images
from ssfl.federation.checkpoint import Checkpoint, save_checkpoint
from ssfl.federation.engine import Engine
from ssfl.federation.server import Server
from ssfl.federation.store import StateStore
from ssfl.seeding import torch_generator

IMAGES = 10
"""Per client: one step of ten images."""
ALGORITHMS = ("global-ssfl", "per-ssfl")


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    algorithm: str
    clients: int
    per_round: int
    start_seconds: float
    first_round_seconds: float
    seconds: float
    cpu_seconds: float
    checkpoint_seconds: float
    peak_mib: float
    data_mib: float
    """What was held before the first round: Python, torch, images and parts."""


def configuration(algorithm: str, clients: int, per_round: int, rounds: int) -> Config:
    return parse(
        {
            "partition": {"clients": clients},
            "model": {"backbone": "small", "width": 4},
            "ssl": {"method": "simsiam", "projector_width": 16, "predictor_width": 8},
            "algorithm": {"name": algorithm},
            "local": {"batch": IMAGES},
            "server": {"rounds": 1 + rounds, "clients_per_round": per_round},
            "device": {"device": "cpu"},
        }
    )


def tiny_data(clients: int) -> FederatedData:
    """Noise, ten images to each client: nothing here depends on what they show."""
    shape = (clients * IMAGES, 3, 8, 8)
    pixels = torch.randint(256, shape, dtype=torch.uint8, generator=torch_generator(0, "noise"))
    half = (0.5, 0.5, 0.5)
    dataset = DataSet("noise", Images(pixels), None, None, None, half, half, "cifar")
    return FederatedData(dataset, np.split(np.arange(clients * IMAGES), clients), None)


def earlier_states(folder: Path, clients: int, size: int) -> None:
    """A personal model of every client, as the store would have written it in earlier rounds."""
    state = {"personal": torch.zeros(size)}
    for client in range(clients):
        path = folder / f"{client:06d}" / "round-000000.safetensors"
        path.parent.mkdir(parents=True)
        save_file(state, path)


def one_cell(algorithm: str, clients: int, per_round: int, rounds: int, folder: Path) -> Cell:
    """Whole rounds as `ssfl train` plays them with one worker, then a checkpoint."""
    torch.set_num_threads(1)
    config = configuration(algorithm, clients, per_round, rounds)
    made: list[Server] = []
    store = StateStore(folder / "clients", limit=1 << 20)

    def start() -> None:
        data = tiny_data(clients)
        host = build_host(config, data, store, Engine(config.device))
        made.append(build_server(config, host.trainer, LocalCommunicator([host])))

    started = timed(start)
    (server,) = made
    if algorithm == "per-ssfl":
        earlier_states(store.folder, clients, server.layout.size)
    held = held_mib()
    first = timed(server.play_round)
    took: list[Took] = [timed(server.play_round) for _ in range(rounds)]

    def save() -> None:
        store.flush(server.rounds_done)
        tensors = server.state()
        save_checkpoint(folder, Checkpoint(server.rounds_done, server.layout.digest, tensors))
        store.prune(server.rounds_done)

    return Cell(
        algorithm,
        clients,
        per_round,
        started.seconds,
        first.seconds,
        median(took),
        median(took, "cpu"),
        timed(save).seconds,
        peak_mib(),
        held,
    )


def in_its_own_process(algorithm: str, clients: int, per_round: int, rounds: int) -> Cell:
    arguments = [algorithm, str(clients), str(per_round), str(rounds)]
    command = [sys.executable, __file__, "--cell", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Cell(**json.loads(done.stdout))


def measure(args: argparse.Namespace) -> list[Cell]:
    cells = []
    for algorithm in args.algorithms:
        for per_round in args.per_round:
            for clients in args.clients:
                if per_round > clients:
                    continue
                print(f"{algorithm}, {clients} clients, {per_round} a round", file=sys.stderr)
                rounds = args.rounds if per_round <= 100 else min(args.rounds, 3)
                cells.append(in_its_own_process(algorithm, clients, per_round, rounds))
    return cells


def table(cells: list[Cell]) -> str:
    fewest: dict[tuple[str, int], Cell] = {}
    rows = []
    for cell in cells:
        base = fewest.setdefault((cell.algorithm, cell.per_round), cell)
        rows.append(
            [
                cell.algorithm,
                f"{cell.per_round:,}",
                f"{cell.clients:,}",
                f"{cell.seconds * 1e3:.0f}",
                f"{cell.cpu_seconds * 1e3:.0f}",
                f"{cell.cpu_seconds / base.cpu_seconds:.2f}",
                f"{cell.cpu_seconds / cell.per_round * 1e3:.1f}",
                f"{cell.start_seconds:.2f}",
                f"{cell.checkpoint_seconds * 1e3:.0f}",
                f"{cell.peak_mib:.0f}",
                f"{cell.peak_mib - cell.data_mib:.0f}",
            ]
        )
    columns = [
        "algorithm",
        "per round",
        "K",
        "ms per round",
        "CPU ms",
        "CPU ratio to the smallest K",
        "CPU ms per client asked",
        "start, s",
        "checkpoint, ms",
        "peak MiB",
        "of it in rounds",
    ]
    return markdown(columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--per-round", type=int, nargs="+", default=[10, 100, 1_000])
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, default=Path("scale.json"))
    parser.add_argument("--cell", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        algorithm, *numbers = args.cell
        clients, per_round, rounds = map(int, numbers)
        with tempfile.TemporaryDirectory() as folder:
            cell = one_cell(algorithm, clients, per_round, rounds, Path(folder))
        print(json.dumps(asdict(cell)))
        return
    cells = measure(args)
    result: dict[str, Any] = {
        "machine": machine(),
        "rounds": args.rounds,
        "rows": [asdict(cell) for cell in cells],
    }
    text = f"{IMAGES} images of 8×8 per client, one step each; {result['machine']}\n\n"
    publish(text + table(cells), result, args.json)


if __name__ == "__main__":
    main()
