"""How many CPU cores are ours, and work shared out over them."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

CONTAINER = Path("/sys/fs/cgroup")
"""Where Linux tells a container of its limits."""


def cores() -> int:
    """Cores that this process may use: a batch system may have lent it four of a node's hundred,
    or a container the time of four (`docker run --cpus 4`, a limit of Kubernetes')."""
    ours = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        ours = len(os.sched_getaffinity(0))
    return max(1, min(ours, round(_lent_time())))


def _lent_time() -> float:
    """How many cores' time the container has, more than any machine's where it has no limit."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # new, old
        with suppress(OSError, ValueError):
            quota, period = " ".join((CONTAINER / name).read_text() for name in names).split()
            if quota not in ("max", "-1"):
                return int(quota) / int(period)
    return 1 << 20


def side_by_side(
    work: Callable[[Item], Result], items: Sequence[Item], threads: int | None = None
) -> Iterator[Result]:
    """What `work` makes of each item, in order, by a crew of so many threads."""
    with crew(len(items), threads) as in_turn:
        yield from in_turn(work, items)


@contextmanager
def crew(most: int, threads: int | None = None) -> Iterator[Callable[..., Iterator[Any]]]:
    """A `map` whose items are worked on by so many threads (default: torch's, but no more than
    there are cores), at most `most`, with one torch thread each.

    Left to torch, all cores share every operation and wait for the slowest of them at its end: long
    where other work shares the cores. Here they meet once, and how many there are makes no
    difference to a result.
    """
    import torch

    _keep_freed_memory()
    before = torch.get_num_threads()
    threads = min(threads or min(before, cores()), most)
    if threads <= 1 and before == 1:
        yield map
        return
    pool = ThreadPoolExecutor(
        max(1, threads), "ssfl-core", initializer=torch.set_num_threads, initargs=(1,)
    )
    torch.set_num_threads(1)  # or threads of torch's own would wait, busily, on the same cores
    try:
        yield pool.map
    finally:  # Ctrl-C comes here too
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)


def _keep_freed_memory() -> None:
    """Have what is freed at hand for what comes next.

    glibc hands freed blocks back to the system if they are larger than any it has seen before, up
    to 32 MiB, and gets the next ones anew, a page fault for every 4 KB. So it is shown a large one.
    """
    import torch

    torch.empty(2**25 - 2**14, dtype=torch.uint8)
