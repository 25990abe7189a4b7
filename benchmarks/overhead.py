"""What the framework itself costs: whole rounds of clients that train nothing.

Ten clients hold one image each, too few for a step of batch norm, so what is left of a round is
what a federated library does around training: load Θ, take Δ back, check it, average, move Θ. The
model is ResNet-34 with SimSiam's heads, 22.7 million parameters, 91 MB. Stated limit: 1.3 × the
bare loop.

    python benchmarks/overhead.py [--rounds 15] [--profile] [--json overhead.json]

There are two bare loops, both weighted averages of the clients' weights. *State dicts* is what one
would write by hand, `load_state_dict` and a sum over named tensors; the limit is read against it
here, which is the kinder reading. *Flat* does the same on one vector, two operations per client:
less cannot be done.

A framework round is `Server.play_round` through the local communicator with one host, as in `ssfl
train`: sampling, states, messages, admission, folding and the server optimizer are in; evaluation,
the record of metrics and the checkpoint on disk, which come every so many rounds, are out. All
sides take turns in one process with one torch thread. --profile lists every operation on whole
vectors in one framework round: where, how often, and for how long.
"""

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import interleaved, machine, markdown, median, publish, ratio
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ssfl
from ssfl.assemble import build_host, build_method, build_server
from ssfl.comm.local import LocalCommunicator
from ssfl.config import Config, parse
from ssfl.data.federated import FederatedData
from ssfl.data.sources import load_dataset
from ssfl.data.sources.shapes import ShapesOptions
from ssfl.federation.engine import Engine
from ssfl.federation.server import Server
from ssfl.federation.store import StateStore

DICTS, FLAT, OURS = "bare loop, state dicts", "bare loop, flat vector", "ssfl, one worker"
LIMIT = 1.3


def configuration(args: argparse.Namespace) -> Config:
    return parse(
        {
            "model": {"backbone": args.backbone},
            "ssl": {"method": "simsiam", "projector_width": 768, "predictor_width": 256},
            "server": {"rounds": 10_000},
            "device": {"device": "cpu"},
        }
    )


class DictLoop:
    """Load, train nothing, average: with state dicts."""

    def __init__(self, config: Config, data: FederatedData) -> None:
        self.data = data
        self.model = build_method(config, data.dataset.channels, data.dataset.image_size)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.weights = {name: t.clone() for name, t in self.model.state_dict().items()}

    def play_round(self) -> None:
        total = sum(self.data.size(client) for client in self.data.clients())
        mean = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}
        for client in self.data.clients():
            self.model.load_state_dict(self.weights)
            share = self.data.size(client) / total
            for name, tensor in self.model.state_dict().items():
                mean[name] += share * tensor
        self.weights = mean


class FlatLoop:
    """Load, train nothing, average: with one vector."""

    def __init__(self, theta: Tensor, data: FederatedData) -> None:
        self.data, self.theta = data, theta
        self.model, self.mean = torch.empty_like(theta), torch.empty_like(theta)

    def play_round(self) -> None:
        total = sum(self.data.size(client) for client in self.data.clients())
        self.mean.zero_()
        for client in self.data.clients():
            self.model.copy_(self.theta)
            self.mean.add_(self.model, alpha=self.data.size(client) / total)
        self.theta, self.mean = self.mean, self.theta


def federation(config: Config, data: FederatedData, folder: Path) -> Server:
    """The package's own round, with one worker in this process."""
    host = build_host(config, data, StateStore(folder, 1 << 30), Engine(config.device))
    return build_server(config, host.trainer, LocalCommunicator([host]))


class WholeVectors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation that touches a tensor of (nearly) the whole model, and where."""

    def __init__(self, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.least = size * 0.9
        self.seen: dict[tuple[str, str], list[float]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        started = time.thread_time()
        result = func(*args, **(kwargs or {}))
        took = time.thread_time() - started
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        moves = not func.is_view and not str(func).startswith("aten.detach")
        if moves and any(t.numel() >= self.least for t in tensors):
            self.seen[self._caller(), str(func)].append(took)
        return result

    def _caller(self) -> str:
        root = str(Path(ssfl.__file__).parent)
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code.co_filename.startswith(root):
                file = Path(frame.f_code.co_filename).relative_to(root)
                return f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
        return "elsewhere"

    def table(self) -> str:
        rows = [
            [where, operation, len(times), f"{sum(times) * 1e3:.1f}"]
            for (where, operation), times in sorted(self.seen.items(), key=lambda x: -sum(x[1]))
        ]
        total = sum(sum(times) for times in self.seen.values())
        count = sum(len(times) for times in self.seen.values())
        rows.append(["all", "", count, f"{total * 1e3:.1f}"])
        return markdown(["where", "operation", "times", "CPU ms"], rows)


def measure(args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], str]:
    torch.set_num_threads(1)
    config = configuration(args)
    dataset = load_dataset(ShapesOptions(train=max(args.clients, 10), test=10))
    data = FederatedData(dataset, [np.array([client]) for client in range(args.clients)], None)
    server = federation(config, data, folder)
    size = server.theta.numel()
    dicts, flat = DictLoop(config, data), FlatLoop(server.theta.clone(), data)
    sides: dict[str, Callable[[], object]] = {
        DICTS: dicts.play_round,
        FLAT: flat.play_round,
        OURS: server.play_round,
    }
    before = server.theta.clone()
    took = interleaved(sides, args.rounds, warm_ups=2)
    moved = float((server.theta - before).abs().max())
    if moved > 1e-6:
        raise SystemExit(f"Θ moved by {moved:.2g} though nobody trained: not the same work")
    profile = ""
    if args.profile:
        with WholeVectors(size) as seen:
            server.play_round()
        profile = seen.table()
    rows = [
        {
            "side": name,
            "seconds": median(times),
            "cpu_seconds": median(times, "cpu"),
            "ratio": ratio(times, took[DICTS]),
            "cpu_ratio": ratio(times, took[DICTS], "cpu"),
            "cpu_ratio_to_flat": ratio(times, took[FLAT], "cpu"),
            "page_faults": median(times, "faults"),
        }
        for name, times in took.items()
    ]
    result = {
        "setting": f"{args.clients} clients that train nothing, {args.backbone} with SimSiam's "
        f"heads, {size / 1e6:.1f} M parameters, {size * 4 / 1e6:.0f} MB",
        "machine": machine(),
        "rounds": args.rounds,
        "limit": LIMIT,
        "rows": rows,
    }
    return result, profile


def table(result: dict[str, Any]) -> str:
    columns = [
        "",
        "ms",
        "ratio",
        "CPU ms",
        "CPU ratio",
        "CPU ratio to the flat loop",
        "page faults",
    ]
    rows = [
        [
            row["side"],
            f"{row['seconds'] * 1e3:.0f}",
            f"{row['ratio']:.2f}",
            f"{row['cpu_seconds'] * 1e3:.0f}",
            f"{row['cpu_ratio']:.2f}",
            f"{row['cpu_ratio_to_flat']:.2f}",
            f"{row['page_faults']:.0f}",
        ]
        for row in result["rows"]
    ]
    return (
        f"{result['setting']}; median of {result['rounds']} interleaved rounds; "
        f"{result['machine']}\n\n{markdown(columns, rows)}\n\n"
        f"Limit: {result['limit']} × the bare loop."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--backbone", default="resnet34")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("overhead.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result, profile = measure(args, Path(folder))
    publish(table(result), result, args.json)
    if profile:
        print(f"\nOperations on whole vectors in one round of ssfl:\n\n{profile}")


if __name__ == "__main__":
    main()
