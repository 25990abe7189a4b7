"""The work that every side does, and the clock that times it.

All sides are given the package's model, views and batches, and the plain loop of round.py takes
turns with them round for round, in the same process: it is both what their time is measured
against and what their weights must agree with.
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import overhead
import round as plain
import torch
from torch import Tensor

from ssfl.config import Config
from ssfl.data.federated import FederatedData, federate
from ssfl.data.sources import load_dataset
from ssfl.data.sources.shapes import ShapesOptions

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """What is to be done, the same for every side."""

    idle: bool
    """Clients train nothing: what is left is what the framework costs."""
    clients: int
    images: int
    backbone: str
    width: int
    batch: int
    workers: int
    rounds: int


def work(setting: Setting) -> tuple[Config, FederatedData, plain.PlainLoop]:
    """The configuration, the clients' images, and the loop that one would write by hand."""
    torch.set_num_threads(1)
    args = argparse.Namespace(**asdict(setting))
    if setting.idle:  # one image each: too few for a step of batch norm
        config = overhead.configuration(args)
        dataset = load_dataset(ShapesOptions(train=max(setting.clients, 10), test=10))
        parts = [np.array([client]) for client in range(setting.clients)]
        data = FederatedData(dataset, parts, None)
    else:
        config = plain.configuration(args)
        images = plain.some_images(config, setting.clients * setting.images)
        data = federate(images, config.partition, config.seed)
    return config, data, plain.PlainLoop(config, data, torch.channels_last)


class Clock:
    """Times rounds of one side, and a round of the plain loop after each of them."""

    def __init__(self, loop: plain.PlainLoop, root: int | None = None) -> None:
        self.loop, self.root = loop, root or os.getpid()
        self.rows: list[dict[str, float]] = []
        self.difference = 0.0
        self.peak_mib = 0.0
        self._wall = self._cpu = 0.0

    def begin(self) -> None:
        self._cpu, self._wall = tree_cpu(self.root), time.perf_counter()

    def end(self, weights: Callable[[], Weights]) -> None:
        """The side has finished a round and its Θ is what `weights` gives."""
        seconds, cpu = time.perf_counter() - self._wall, tree_cpu(self.root) - self._cpu
        wall, own = time.perf_counter(), time.process_time()
        ended = time.time()
        self.loop.play_round()
        self.rows.append(
            {
                "seconds": seconds,
                "cpu": cpu,
                "plain_seconds": time.perf_counter() - wall,
                "plain_cpu": time.process_time() - own,
                "ended": ended,
            }
        )
        if len(self.rows) == 1:  # later, rounding has grown: training is chaotic
            theirs = weights()
            self.difference = max(
                float((self.loop.weights[name] - tensor).abs().max())
                for name, tensor in theirs.items()
            )

    def note_peak(self) -> None:
        """Look up the memory of all processes while they live."""
        self.peak_mib = max(self.peak_mib, tree_peak_mib(self.root))

    def result(self) -> dict[str, object]:
        self.note_peak()
        return {"difference": self.difference, "peak_mib": self.peak_mib, "rounds": self.rows}


def family(root: int) -> list[int]:
    """A process and all that descend from it."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        parents[int(path.parent.name)] = int(after_name[1])
    found = [root]
    for pid in found:  # grows as it goes
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def tree_cpu(root: int) -> float:
    """CPU seconds spent so far by a process and its living descendants."""
    ticks = 0
    for pid in family(root):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def tree_peak_mib(root: int) -> float:
    """The peaks of a process and its living descendants, added up."""
    total = 0
    for pid in family(root):
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return total / 1024
