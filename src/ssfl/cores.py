"""How many CPU cores are ours."""

import os


def cores() -> int:
    """Cores that this process may use: a batch system may have lent it four of a node's hundred."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
