"""How many CPU cores are ours, and work shared out over them."""

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

FEW = 8
"""Threads that one heap is enough for."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""What glibc's malloc.h calls M_TRIM_THRESHOLD and so on."""
_MOST = (1 << 31) - 1

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

    keep_freed_memory()
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


def keep_freed_memory() -> None:
    """Have what is freed at hand for what comes next, for as long as the process lives.

    A step takes and frees the same large blocks again and again. glibc hands them back to the
    system and gets them anew, a page fault for every 4 KB; the heaps that it gives to threads, it
    hands back even sooner. So it is told to keep what it has, and few threads share one heap. Many
    would wait for each other there.
    """
    with suppress(AttributeError, OSError, TypeError):  # another C library
        tell = ctypes.CDLL(None).mallopt
        tell(_TRIM_THRESHOLD, _MOST)
        _ = tell(_MMAP_THRESHOLD, _MOST) or tell(_MMAP_THRESHOLD, 1 << 25)  # the most of old ones
        if cores() <= FEW:
            tell(_ARENA_MAX, 1)
