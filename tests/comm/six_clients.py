"""The recipe that every transport must bring to the same end: Per-SSFL, six clients, three rounds.

Also a script, for transports whose workers are processes that run it too:
`six_clients.py TRANSPORT FOLDER [section.key=value ...]`, or `six_clients.py TRANSPORT FOLDER
--resume`. The environment brings misfortunes: `SLOW=client:seconds` delays a client's training,
`BROKEN=client` makes it raise, `KILLED=client:round` has its process killed by SIGKILL then
(and `STAMP=file` tells when). `VERSION=rank:number` gives an MPI rank that version of ssfl.
`RECORD=folder` writes there what every MPI rank sends, and lets nothing be pickled or unpickled;
or what every Ray worker hands to Ray.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch

import ssfl.comm.mpi
import ssfl.comm.ray
import ssfl.experiment
from ssfl.comm import join
from ssfl.config import Config, parse
from ssfl.data.federated import FederatedData
from ssfl.federation.client import Client
from ssfl.federation.messages import Reply, Task
from ssfl.interrupts import stoppable
from ssfl.run import Run

CLIENTS, ROUNDS = 6, 3

RECIPE = {
    "name": "six-clients",
    "seed": 5,
    "data": {"source": "digits", "test_fraction": 0.6},
    "partition": {"kind": "dirichlet", "clients": CLIENTS, "alpha": 0.5, "min_size": 30},
    "model": {"backbone": "small", "width": 4},
    "ssl": {"method": "simsiam", "projector_width": 16, "predictor_width": 8},
    "algorithm": {"name": "per-ssfl", "begin": 0.3},  # θ_k from the second round on
    "local": {"batch": 32, "lr": 0.05, "epochs": 1},
    "server": {"rounds": ROUNDS},
    "evaluation": {"every": 2},
    "device": {"device": "cpu", "workers": 1},
    "run": {"checkpoint_every": 2},
}


def recipe(**sections: dict[str, object]) -> Config:
    """The recipe, with some options changed: recipe(server={"deadline": 1.0})."""
    raw = {name: dict(v) if isinstance(v, dict) else v for name, v in RECIPE.items()}
    for name, options in sections.items():
        raw[name] = {**raw.get(name, {}), **options}
    return parse(raw)


@cache
def reference() -> Run:
    """The recipe run in one thread of one process."""
    return ssfl.experiment.train(recipe(), out=Path(mkdtemp()) / "reference")


def outcome(run: Run) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Θ and all θ_k at the end of a run."""
    checkpoint = run.checkpoint()
    assert checkpoint.rounds == run.config.server.rounds
    states = [run.store.get(client, before=checkpoint.rounds) for client in range(CLIENTS)]
    return checkpoint.tensors["theta"], [state.personal for state in states]


def assert_same_bits(run: Run, expected: Run) -> None:
    """The same Θ, the same θ_k, and the same figures on the way."""
    (theta, personal), (its_theta, its_personal) = outcome(run), outcome(expected)
    assert torch.equal(theta, its_theta)
    for mine, other in zip(personal, its_personal, strict=True):
        assert mine is not None
        assert other is not None
        assert torch.equal(mine, other)
    assert figures(run) == figures(expected)


def figures(run: Run) -> list[dict[str, object]]:
    names = ("kind", "round", "loss", "images", "accepted", "knn_global", "knn_mean")
    rows = [row for row in run.metrics if row["kind"] != "resume"]
    return [{name: row.get(name) for name in names} for row in rows]


def rows(run: Run) -> list[dict[str, object]]:
    return [row for row in run.metrics if row["kind"] == "round"]


def assert_free_of_data(sent: Iterable[bytes], data: FederatedData) -> None:
    """No image of any client, nor its labels, in any form one would send them in."""
    secrets = list(secrets_of(data))
    for message in sent:
        assert not any(secret in message for secret in secrets)
    for secret in secrets[:3]:  # the search itself would find one
        leak = b"header" + secret + b"rest"
        assert any(secret in leak for secret in secrets)


def secrets_of(data: FederatedData) -> Iterator[bytes]:
    train_set = data.dataset.train
    assert train_set.labels is not None
    forms: list[Callable[[np.ndarray], np.ndarray]] = [
        lambda pixels: pixels,
        lambda pixels: pixels.astype("<f4"),
        lambda pixels: pixels.astype("<f4") / np.float32(255),
    ]
    mean, std = np.float32(data.dataset.mean[0]), np.float32(data.dataset.std[0])
    forms.append(lambda pixels: (pixels.astype("<f4") / np.float32(255) - mean) / std)
    for image in train_set.pixels[::7].numpy():
        for form in forms:
            yield form(image)[:, 2:5].tobytes()  # its middle: three rows say it all
    for client in data.clients():
        labels = train_set.labels[data.train_indices(client)].numpy()
        for kind in ("<i8", "<i4", "u1", "<f4"):
            yield labels[:30].astype(kind).tobytes()
        yield ", ".join(map(str, labels[:30])).encode()
        yield ",".join(map(str, labels[:30])).encode()


def bad_days(environment: dict[str, str]) -> None:
    """Give the clients of this process the misfortunes that the environment asks for."""
    slow, seconds = _pair(environment, "SLOW")
    killed, round_ = _pair(environment, "KILLED")
    broken, _ = _pair(environment, "BROKEN")
    train = Client._train

    def train_badly(self: Client, task: Task) -> Reply:
        if self.id == slow:
            time.sleep(seconds)
        if self.id == killed and task.round == round_:
            Path(environment["STAMP"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.id == broken:
            raise RuntimeError("out of luck")
        return train(self, task)

    Client._train = train_badly


class RecordedWorld:
    """MPI's world with nothing but calls on raw buffers, each of them written down."""

    def __init__(self, world: Any, folder: Path) -> None:
        self._world, self.rank, self.size = world, world.rank, world.size
        self._file = (folder / f"rank-{world.rank}").open("wb", buffering=0)
        self.Recv, self.Iprobe = world.Recv, world.Iprobe
        self.Split_type, self.Abort = world.Split_type, world.Abort

    def Send(self, content: Any, to: int, tag: int) -> None:
        self._file.write(content)
        self._world.Send(content, to, tag)

    def Bcast(self, content: Any, root: int) -> None:
        if root == self.rank:
            self._file.write(content)
        self._world.Bcast(content, root)


class Worker(ssfl.comm.ray.Worker):
    """A Ray worker with bad days, whose words are written down."""

    def open(self, folder: str, registered: ssfl.comm.ray.Registered) -> str:
        bad_days(dict(os.environ))
        complaint = super().open(folder, registered)
        self._note(complaint.encode())
        return complaint

    def handle(self, client: int, number: int, header: bytes, *vectors: Any) -> tuple[Any, ...]:
        reply = super().handle(client, number, header, *vectors)
        self._note(*reply)
        return reply

    def _note(self, *said: Any) -> None:
        if folder := os.environ.get("RECORD"):
            with (Path(folder) / f"worker-{os.getpid()}").open("ab") as file:
                file.writelines(said)


def use_our_ray_workers() -> None:
    import six_clients  # by this name, under which the workers' processes find it as well

    ssfl.comm.ray.Worker = six_clients.Worker


def record_mpi(folder: Path) -> None:
    import pickle

    recorded = RecordedWorld(ssfl.comm.mpi._world(), folder)
    ssfl.comm.mpi._world = lambda: recorded

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was pickled or unpickled")

    pickle.loads = pickle.load = pickle.dumps = pickle.dump = pickle.Unpickler = refuse


def _pair(environment: dict[str, str], name: str) -> tuple[int, float]:
    client, _, value = environment.get(name, "-1").partition(":")
    return int(client), float(value or 0)


def main(transport: str, folder: str, *settings: str) -> None:
    bad_days(dict(os.environ))
    if transport == "ray":
        use_our_ray_workers()
    elif folder_of_record := os.environ.get("RECORD"):
        record_mpi(Path(folder_of_record))
    elif "VERSION" in os.environ:
        rank, _, version = os.environ["VERSION"].partition(":")
        if ssfl.comm.mpi.rank() == int(rank):
            ssfl.comm.mpi.__version__ = version
    if join(transport) is not None:  # as `ssfl train` has it
        return
    if settings == ("--resume",):
        ssfl.experiment.resume(folder, comm=transport)
        return
    sections: dict[str, dict[str, object]] = {}
    for setting in settings:
        key, value = setting.split("=")
        section, option = key.split(".")
        sections.setdefault(section, {})[option] = float(value)
    ssfl.experiment.train(recipe(**sections), out=folder, comm=transport)


if __name__ == "__main__":
    try:
        with stoppable():  # as the command has it
            main(*sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
