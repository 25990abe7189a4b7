"""Transports by name: one file and one line each.

Each is called with the configuration, the run directory and the hosts of this process.
"""

from ssfl.registry import Registry

COMMUNICATORS = Registry(
    "transport",
    {
        "local": "ssfl.comm.local:connect",
        "mpi": "ssfl.comm.mpi:connect",
        "ray": "ssfl.comm.ray:connect",
    },
)
