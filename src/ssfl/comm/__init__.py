"""Transports by name: one file and one line each.

Each is called with the configuration, the run directory and the hosts of this process.
"""

import shlex
from pathlib import Path

from ssfl.registry import Registry

COMMUNICATORS = Registry(
    "transport",
    {
        "local": "ssfl.comm.local:connect",
        "mpi": "ssfl.comm.mpi:connect",
        "ray": "ssfl.comm.ray:connect",
    },
)

_JOINED = Registry("transport", {"mpi": "ssfl.comm.mpi:join"})
"""Transports whose workers are started by the same command as the server."""


def join(transport: str) -> Path | None:
    """Enter a transport before a run: None for the process that serves the run.

    A worker started by the same command (an MPI rank) works here until a run is over, and gets
    that run's folder.
    """
    if transport not in _JOINED:
        return None
    folder: Path | None = _JOINED[transport]()
    return folder


def way_on(folder: Path, transport: str) -> str:
    """The command that goes on with a run in the way it was played."""
    command = ["ssfl", "train", "--resume", str(folder)]
    if transport != "local":
        command += ["--comm", transport]
    if transport == "mpi":
        from ssfl.comm.mpi import ranks

        command = ["mpiexec", "-n", str(ranks()), *command]
    return shlex.join(command)
