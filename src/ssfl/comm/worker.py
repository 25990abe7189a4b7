"""A worker process: a host assembled from the run directory, and what it does with a task.

MPI ranks and Ray actors are the same here. The run directory must be one that all of them see (on
several machines, a shared file system), for that is where clients' states live between rounds.
"""

from pathlib import Path

import torch

from ssfl.assemble import build_host, load_federated
from ssfl.federation.client import Host
from ssfl.federation.engine import Engine
from ssfl.federation.messages import Reason, Reply, Task, failed
from ssfl.federation.shared import SharedStore
from ssfl.run import Run


def open_host(folder: Path, gpu: int = 0) -> Host:
    """A host for any client of the run in `folder`, on the GPU of that number if GPUs are used."""
    config = Run(folder).config
    engine = Engine(config.device)
    if engine.device == torch.device("cuda"):  # any GPU: ranks on a machine take them in turn
        engine.device = torch.device("cuda", gpu % torch.cuda.device_count())
    if engine.device.type == "cuda":
        torch.cuda.set_device(engine.device)
    else:
        torch.set_num_threads(config.device.threads)
    return build_host(config, load_federated(config), SharedStore(folder / "clients"), engine)


def work(host: Host, client: int, task: Task) -> Reply:
    """Handle a task in a process of its own; whatever happens, there is a reply to send."""
    if isinstance(host.store, SharedStore):
        host.store.durable = task.durable
    try:
        return host.handle(client, task)
    except KeyboardInterrupt:
        return failed(client, task, Reason.LOST, "its worker was told to stop")
