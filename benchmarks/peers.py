"""The same SimSiam work in ssfl, in Flower's simulation and in pfl-research, side by side.

Ten clients × 500 CIFAR-10 images (generated shapes where $SSFL_DATA has none), ResNet-18 of width
16, batch 128; and clients that train nothing with a 22.7 M-parameter model, where only the
framework's own cost is left. All sides run the package's model, views and batches, one torch thread
per worker, and must end their first round with the weights of round.py's plain loop, which takes
turns with them in the same process: ratios are medians over rounds, the first round left out.

    python benchmarks/peers.py [--rounds 3] [--only train] [--sides ours flower] [--json peers.json]

Every peer gets a virtual environment of its own under --cache, made at the first run with pip;
torch is pinned to the version this environment has. CPU time and memory are those of all
processes of a side; memory adds up the peaks of each and contains the plain loop's model.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from time import time
from typing import Any

from measuring import machine, markdown, publish
from peer.work import Setting

HERE = Path(__file__).resolve().parent
TORCH = f"torch=={version('torch').partition('+')[0]}"
OURS = ["numpy", "pydantic", "typer", "rich", "safetensors", "pillow"]
"""What the package needs to be imported by a peer: its model, views and batches."""
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Side:
    """One row: an adapter in `peer/`, how many workers, and what to install for it."""

    title: str
    adapter: str
    workers: int
    installs: str | None = None

    @property
    def launcher(self) -> list[str]:
        if self.adapter == "apple" and self.workers > 1:
            options = ["--standalone", "--nproc-per-node", str(self.workers)]
            return ["-m", "torch.distributed.run", *options]
        return []


SIDES = [
    Side("ssfl, 1 worker", "ours", 1),
    Side("ssfl, 2 workers", "ours", 2),
    Side("Flower, 1 actor", "flower", 1, "flwr[simulation]==1.41.0"),
    Side("Flower, 2 actors", "flower", 2, "flwr[simulation]==1.41.0"),
    Side("pfl-research, 1 process", "apple", 1, "pfl[pytorch]==0.6.0"),
    Side("pfl-research, 2 processes", "apple", 2, "pfl[pytorch]==0.6.0"),
]


def environment(side: Side, cache: Path) -> str:
    """The Python of a side: this one, or a virtual environment made for it alone."""
    if side.installs is None:
        return sys.executable
    folder = cache / side.adapter
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    wanted = "\n".join([TORCH, side.installs, *OURS])
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"making {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, TORCH], check=True)  # first, so that nothing else chooses another
        subprocess.run([*pip, TORCH, side.installs, *OURS], check=True)
        stamp.write_text(wanted)
    return str(python)


def run(side: Side, setting: Setting, cache: Path) -> dict[str, Any]:
    """Play the rounds of one side in a process of its own, and read its clock."""
    paths = [str(HERE), str(HERE.parent / "src")]
    quiet = {"RAY_DEDUP_LOGS": "1", "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    inherited = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "clock.json"
        command = [environment(side, cache), *side.launcher, "-m", "peer.run"]
        command += [side.adapter, json.dumps(asdict(setting)), str(out)]
        started = time()
        done = subprocess.run(
            command, env=inherited | quiet, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        if done.returncode:
            sys.stderr.write(done.stderr.decode()[-4000:])
            raise subprocess.CalledProcessError(done.returncode, command[0])
        result: dict[str, Any] = json.loads(out.read_text())
    result["first_round_after"] = result["rounds"][0]["ended"] - started
    return result


def row(side: Side, setting: Setting, cache: Path) -> dict[str, Any]:
    facts = {"side": side.title, "idle": setting.idle}
    try:
        result = run(side, setting, cache)
    except (subprocess.CalledProcessError, OSError) as error:
        return facts | {"error": str(error)}
    rounds = result["rounds"][1:]

    def middle(one: str, over: str | None = None) -> float:
        return float(statistics.median(r[one] / (r[over] if over else 1) for r in rounds))

    return facts | {
        "seconds": middle("seconds"),
        "ratio": middle("seconds", "plain_seconds"),
        "cpu_seconds": middle("cpu"),
        "cpu_ratio": middle("cpu", "plain_cpu"),
        "plain_seconds": middle("plain_seconds"),
        "peak_mib": result["peak_mib"],
        "first_round_after": result["first_round_after"],
        "difference": result["difference"],
        "same": result["difference"] <= TOLERANCE,
    }


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for idle in (False, True):
        if args.only and (args.only == "idle") != idle:
            continue
        for side in SIDES:
            if side.adapter not in args.sides or side.workers not in args.workers:
                continue
            setting = Setting(
                idle=idle,
                clients=args.clients,
                images=args.images,
                backbone=args.idle_backbone if idle else args.backbone,
                width=args.width,
                batch=args.batch,
                workers=side.workers,
                rounds=1 + args.rounds * (5 if idle else 1),
            )
            print(f"{side.title}{', idle' if idle else ''}", file=sys.stderr)
            rows.append(row(side, setting, args.cache))
            print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    columns = [
        "",
        "s per round",
        "to the plain loop",
        "CPU s",
        "CPU to the plain loop",
        "peak MiB",
        "s to the end of round 1",
        "largest difference",
    ]
    cells = []
    for r in rows:
        if "error" in r:
            cells.append([r["side"], f"failed: {r['error']}", *[""] * 6])
            continue
        cells.append(
            [
                r["side"],
                f"{r['seconds']:.2f}",
                f"{r['ratio']:.2f}",
                f"{r['cpu_seconds']:.2f}",
                f"{r['cpu_ratio']:.2f}",
                f"{r['peak_mib']:.0f}",
                f"{r['first_round_after']:.1f}",
                f"{r['difference']:.1e}{'' if r['same'] else ' (not the same work!)'}",
            ]
        )
    return markdown(columns, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="after the first (idle: 5 × as many)")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--images", type=int, default=500, help="per client")
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--idle-backbone", default="resnet34")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--only", choices=["train", "idle"])
    adapters = sorted({side.adapter for side in SIDES})
    parser.add_argument("--sides", nargs="+", choices=adapters, default=adapters)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "ssfl-benchmarks"
    parser.add_argument("--cache", type=Path, default=cache, help="where the environments are")
    parser.add_argument("--json", type=Path, default=Path("peers.json"))
    args = parser.parse_args()
    rows = measure(args)
    result = {
        "machine": machine(),
        "setting": f"{args.clients} clients × {args.images} images, {args.backbone} of width "
        f"{args.width}, SimSiam, batch {args.batch}; idle: {args.idle_backbone}, nothing trained",
        "rounds": args.rounds,
        "rows": rows,
    }
    parts = [f"{result['setting']}; {result['machine']}"]
    for idle, title in ((False, "Training"), (True, "Clients that train nothing")):
        if some := [r for r in rows if r["idle"] == idle]:
            parts.append(f"{title}:\n\n{table(some)}")
    publish("\n\n".join(parts), result, args.json)
    if any("error" in r or not r["same"] for r in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
