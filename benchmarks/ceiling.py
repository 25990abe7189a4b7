"""What two workers can gain at best on this machine, and what threads cost of it.

The same small piece of work (round.py's plain loop: two clients, two steps each) is done twice over
in several ways, which take turns: by one process, one after the other; by two processes side by
side, which share nothing but the machine's memory and caches; by two threads of one process; and
by ssfl with two workers. What two processes fall short of 0.50 no program can mend; what threads
add to that is Python's lock and the allocator.

    python benchmarks/ceiling.py [--turns 10] [--foreign 0.1] [--json ceiling.json]

A measurement counts only if other programs took less than --foreign of one core meanwhile, so on a
shared machine quiet moments are awaited, at most --patience seconds.
"""

import argparse
import multiprocessing
import os
import resource
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from measuring import machine, markdown, publish
from peer.work import tree_cpu
from round import PlainLoop, configuration, federation, some_images

from ssfl.data.federated import FederatedData, federate

ALONE = "plain loop twice, one process"
PROCESSES = "two processes side by side"
THREADS = "two threads of one process"
OURS = "ssfl, 2 workers"


def clients_data(args: argparse.Namespace) -> tuple[Any, FederatedData]:
    torch.set_num_threads(1)
    config = configuration(args)
    images = some_images(config, args.clients * args.images)
    return config, federate(images, config.partition, config.seed)


def plain(args: argparse.Namespace) -> PlainLoop:
    return PlainLoop(*clients_data(args), torch.channels_last)


def serve(args: argparse.Namespace, pipe: Connection) -> None:
    """A process that plays a round whenever it is told to."""
    loop = plain(args)
    loop.play_round()
    pipe.send("ready")
    while pipe.recv():
        loop.play_round()
        pipe.send("done")


def at_once(plays: list[Callable[[], None]]) -> Callable[[], None]:
    def play() -> None:
        threads = [threading.Thread(target=one) for one in plays]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return play


def busy() -> float:
    """CPU seconds that this machine has spent on anything so far."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def one_turn(play: Callable[[], None]) -> dict[str, float]:
    me = os.getpid()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    all_before, own_before, wall = busy(), tree_cpu(me), time.perf_counter()
    play()
    seconds = time.perf_counter() - wall
    own, everything = tree_cpu(me) - own_before, busy() - all_before
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": seconds,
        "cpu": own,
        "foreign": (everything - own) / seconds,
        "system": after.ru_stime - usage.ru_stime,
        "faults": after.ru_minflt - usage.ru_minflt,
        "switches": after.ru_nvcsw - usage.ru_nvcsw,
    }


def measure(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    context = multiprocessing.get_context("spawn")
    pipes = []
    for _ in range(2):
        mine, theirs = context.Pipe()
        context.Process(target=serve, args=(args, theirs), daemon=True).start()
        pipes.append(mine)
    loops = [plain(args) for _ in range(2)]
    both = argparse.Namespace(**vars(args) | {"clients": 2 * args.clients})
    server = federation(*clients_data(both), 2)

    def processes() -> None:
        for pipe in pipes:
            pipe.send(True)
        for pipe in pipes:
            pipe.recv()

    def alone() -> None:
        for loop in loops:
            loop.play_round()

    sides: dict[str, Callable[[], Any]] = {
        ALONE: alone,
        PROCESSES: processes,
        THREADS: at_once([loop.play_round for loop in loops]),
        OURS: server.play_round,
    }
    for pipe in pipes:
        pipe.recv()
    for play in sides.values():
        play()
    took: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    end = time.monotonic() + args.patience
    while min(map(len, took.values())) < args.turns and time.monotonic() < end:
        for name, play in sides.items():
            now = one_turn(play)
            if now["foreign"] <= args.foreign:
                took[name].append(now)
    for pipe in pipes:
        pipe.send(False)
    return took


def table(took: dict[str, list[dict[str, float]]]) -> str:
    def middle(name: str, what: str) -> float:
        return statistics.median(turn[what] for turn in took[name])

    rows = []
    for name, turns in took.items():
        if not turns or not took[ALONE]:
            rows.append([name, 0, *["no quiet moment"] + [""] * 6])
            continue
        seconds, cpu = middle(name, "seconds"), middle(name, "cpu")
        rows.append(
            [
                name,
                len(turns),
                f"{seconds:.2f}",
                f"{seconds / middle(ALONE, 'seconds'):.3f}",
                f"{cpu:.2f}",
                f"{cpu / middle(ALONE, 'cpu'):.3f}",
                f"{middle(name, 'system'):.2f}",
                f"{middle(name, 'faults'):.0f}",
                f"{middle(name, 'switches'):.0f}",
            ]
        )
    columns = ["", "turns", "s", "ratio", "CPU s", "CPU ratio", "in the kernel", "faults", "waits"]
    return markdown(columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--foreign", type=float, default=0.1, help="cores others may use")
    parser.add_argument("--patience", type=float, default=600)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--images", type=int, default=256, help="per client")
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--json", type=Path, default=Path("ceiling.json"))
    args = parser.parse_args()
    took = measure(args)
    result = {"machine": machine(), "turns": took}
    publish(f"{result['machine']}\n\n{table(took)}", result, args.json)


if __name__ == "__main__":
    main()
