"""What the benchmarks share: interleaved timing, peak memory, a Markdown table and its JSON.

Times on a machine that others use too mean little alone. So the sides of a comparison take turns
in one process, what is compared is the ratio within each turn, and CPU time stands beside
wall-clock time.
"""

import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Took:
    """What one run of something cost this process, all its threads together."""

    seconds: float
    cpu: float
    faults: int
    """Pages the kernel had to find: fresh memory costs more than the copy into it."""


def timed(play: Callable[[], Any]) -> Took:
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    wall, cpu = time.perf_counter(), time.process_time()
    play()
    return Took(
        time.perf_counter() - wall,
        time.process_time() - cpu,
        resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults,
    )


def interleaved(
    sides: Mapping[str, Callable[[], Any]], turns: int, warm_ups: int = 1
) -> dict[str, list[Took]]:
    """Every side once a turn, so that whatever else the machine does hits all alike."""
    took: dict[str, list[Took]] = {name: [] for name in sides}
    for turn in range(-warm_ups, turns):
        for name, play in sides.items():
            now = timed(play)
            if turn >= 0:
                took[name].append(now)
                print(f"{turn + 1}/{turns} {name}: {now.seconds:.3f} s", file=sys.stderr)
    return took


def median(took: Sequence[Took], what: str = "seconds") -> float:
    return float(statistics.median(getattr(one, what) for one in took))


def ratio(mine: Sequence[Took], theirs: Sequence[Took], what: str = "seconds") -> float:
    """The median over turns of how much longer one side took than another in the same turn."""
    pairs = zip(mine, theirs, strict=True)
    return float(statistics.median(getattr(a, what) / getattr(b, what) for a, b in pairs))


def peak_mib() -> float:
    """The most memory this process has held so far, or since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def forget_peak() -> None:
    """Let `peak_mib` begin anew from what is held now."""
    Path("/proc/self/clear_refs").write_text("5")


def held_mib() -> float:
    """The memory this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def machine() -> str:
    from importlib.metadata import version

    return (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {version('torch')}, load {os.getloadavg()[0]:.1f}"
    )


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return "\n".join(lines + [f"| {' | '.join(map(str, row))} |" for row in rows])


def publish(text: str, result: Mapping[str, Any], path: Path) -> None:
    """The table for people, the figures for programs."""
    print(text)
    path.write_text(json.dumps(result, indent=2) + "\n")
