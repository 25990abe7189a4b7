"""How long until something happens: the help, the import, and the first round of the demo.

    python benchmarks/startup.py [--repeats 7] [--worst 15] [--json startup.json]

`ssfl --help` is to take under 0.5 s. Each is run several times in a process of its own, with files
in the page cache; the median of wall-clock and of CPU time is given, the latter being what it takes
on a machine that nothing else keeps busy. Where the help is over its limit, the modules whose
import takes longest are listed (`python -X importtime`), each without what it imports in turn.
"""

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import machine, markdown, publish

HELP, IMPORT, TORCH, TRAIN, BARE = (
    "ssfl --help",
    "import ssfl",
    "import torch",
    "ssfl train demo, to the end of round 1",
    "python -c pass",
)
LIMITS = {HELP: 0.5}


def command(*arguments: str) -> list[str]:
    """`ssfl`, run by this Python."""
    return [sys.executable, "-c", "from ssfl.cli import main; main()", *arguments]


def run(argv: list[str], folder: Path) -> tuple[float, float]:
    """Wall-clock and CPU seconds of a process."""
    before, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(argv, cwd=folder, capture_output=True)
    seconds, after = time.perf_counter() - wall, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)} failed:\n{done.stderr.decode()[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, cpu


def first_round(argv: list[str], folder: Path) -> tuple[float, float]:
    """Seconds until a run's record has its first round; the run is then ended."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    wall = time.perf_counter()
    process = subprocess.Popen(argv, cwd=folder, stdout=subprocess.DEVNULL)
    record = folder / "run" / "metrics.jsonl"
    while not (record.exists() and '"kind": "round"' in record.read_text()):
        if process.poll() is not None:
            raise SystemExit("the run ended before its first round")
        time.sleep(0.01)
    seconds = time.perf_counter() - wall
    stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    cpu = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
    process.kill()
    process.wait()
    return seconds, cpu


def import_times(folder: Path, worst: int) -> list[tuple[str, float, float]]:
    """(module, own milliseconds, with what it imports) of `ssfl --help`, the slowest first."""
    argv = [sys.executable, "-X", "importtime", *command("--help")[1:]]
    lines = subprocess.run(argv, cwd=folder, capture_output=True, text=True).stderr.splitlines()
    found = []
    for line in lines:
        own, _, rest = line.removeprefix("import time:").partition("|")
        both, _, name = rest.partition("|")
        if own.strip().isdigit():
            found.append((name.strip(), int(own) / 1e3, int(both) / 1e3))
    return sorted(found, key=lambda row: -row[1])[:worst]


def by_package(times: list[tuple[str, float, float]]) -> list[tuple[str, float]]:
    """Own milliseconds added up over top-level packages."""
    total: dict[str, float] = {}
    for name, own, _ in times:
        package = name.partition(".")[0]
        total[package] = total.get(package, 0) + own
    return sorted(total.items(), key=lambda row: -row[1])


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    demo = command("train", "demo", "--out", "run")
    sides: dict[str, Callable[[], tuple[float, float]]] = {
        BARE: lambda: run([sys.executable, "-c", "pass"], folder),
        HELP: lambda: run(command("--help"), folder),
        IMPORT: lambda: run([sys.executable, "-c", "import ssfl"], folder),
        TORCH: lambda: run([sys.executable, "-c", "import torch"], folder),
        TRAIN: lambda: first_round(demo, folder),
    }
    rows: list[dict[str, Any]] = []
    for name, play in sides.items():
        if name == TRAIN and args.no_train:
            continue
        if args.repeats > 1:
            play()  # files into the page cache
        took = [play() for _ in range(args.repeats if name != TRAIN else min(args.repeats, 3))]
        rows.append(
            {
                "what": name,
                "seconds": statistics.median(wall for wall, _ in took),
                "cpu_seconds": statistics.median(cpu for _, cpu in took),
                "limit": LIMITS.get(name),
            }
        )
    result: dict[str, Any] = {"machine": machine(), "repeats": args.repeats, "rows": rows}
    if any(r["limit"] and r["cpu_seconds"] > r["limit"] for r in rows) or args.breakdown:
        times = import_times(folder, 10**6)
        result["imports"] = times[: args.worst]
        result["packages"] = by_package(times)[: args.worst]
    return result


def table(result: dict[str, Any]) -> str:
    rows = [
        [
            row["what"],
            f"{row['seconds']:.2f}",
            f"{row['cpu_seconds']:.2f}",
            "" if row["limit"] is None else f"{row['limit']:.1f}",
        ]
        for row in result["rows"]
    ]
    text = f"Medians of {result['repeats']} runs; {result['machine']}\n\n"
    text += markdown(["", "s", "CPU s", "limit"], rows)
    if "imports" in result:
        packages = [[name, f"{own:.0f}"] for name, own in result["packages"]]
        modules = [[name, f"{own:.0f}", f"{both:.0f}"] for name, own, both in result["imports"]]
        text += "\n\nImports of `ssfl --help`, by package:\n\n"
        text += markdown(["package", "ms"], packages)
        text += "\n\nand by module:\n\n" + markdown(["module", "own ms", "with its own"], modules)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--worst", type=int, default=15, help="imports to list")
    parser.add_argument("--breakdown", action="store_true", help="list imports in any case")
    parser.add_argument("--no-train", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("startup.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args, Path(folder))
    publish(table(result), result, args.json)


if __name__ == "__main__":
    main()
