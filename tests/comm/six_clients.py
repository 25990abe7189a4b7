"""The recipe that every transport must bring to the same end: Per-SSFL, six clients, three rounds.

Also a script, for transports whose workers are processes that run it too:
`six_clients.py TRANSPORT FOLDER [section.key=value ...]`, or `six_clients.py TRANSPORT FOLDER
--resume`. The environment brings misfortunes: `SLOW=client:seconds` delays a client's training,
`BROKEN=client` makes it raise, `KILLED=client:round` has its process killed by SIGKILL then.
"""

import os
import signal
import sys
import time
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch

import ssfl.experiment
from ssfl.config import Config, parse
from ssfl.federation.client import Client
from ssfl.federation.messages import Reply, Task
from ssfl.run import Run

CLIENTS, ROUNDS = 6, 3

RECIPE = {
    "name": "six-clients",
    "seed": 5,
    "data": {"source": "digits", "test_fraction": 0.6},
    "partition": {"kind": "dirichlet", "clients": CLIENTS, "alpha": 0.5, "min_size": 30},
    "model": {"backbone": "small", "width": 4},
    "ssl": {"method": "simsiam", "projector_width": 16, "predictor_width": 8},
    "algorithm": {"name": "per-ssfl"},
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
            os.kill(os.getpid(), signal.SIGKILL)
        if self.id == broken:
            raise RuntimeError("out of luck")
        return train(self, task)

    Client._train = train_badly


def _pair(environment: dict[str, str], name: str) -> tuple[int, float]:
    client, _, value = environment.get(name, "-1").partition(":")
    return int(client), float(value or 0)


def main(transport: str, folder: str, *settings: str) -> None:
    bad_days(dict(os.environ))
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
    main(*sys.argv[1:])
