"""A run directory: all that a run was and made, and the way back into it.

config.toml            as resolved            facts.json      what the data looked like
metrics.jsonl          every figure           final.json      the last ones
serve.json             a coordinator's: how its sites reach it
checkpoints/           the server's state     clients/        personal states
tensorboard/           events                 report.html     the page to look at
"""

import json
import logging
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ssfl.algorithms import ALGORITHMS
from ssfl.assemble import build_method
from ssfl.config import Config, load_config, to_toml, with_whole_paths
from ssfl.data.decode import Reading, printable
from ssfl.data.images import DataSet
from ssfl.encoder import Encoder
from ssfl.errors import CheckpointError, ConfigError, FederationError
from ssfl.federation.checkpoint import Checkpoint, check_fit, latest_checkpoint
from ssfl.federation.store import StateStore
from ssfl.files import read_json, write_text
from ssfl.guest import own_torch
from ssfl.locks import claimed
from ssfl.models.flat import FlatModel
from ssfl.ssl.base import Method
from ssfl.tracking import Row, read_rows

log = logging.getLogger(__name__)

SERVED = "serve.json"
"""How sites reach the coordinator of a run: no other run has this file."""


class Run:
    """What `ssfl.train` returns, and what a path to a run directory opens as."""

    def __init__(self, path: str | Path) -> None:
        self._given, self._whole = Path(path), Path(path).absolute()
        if not (self.path / "config.toml").is_file():
            raise ConfigError(f"{self.path} is not a run directory: {_what_it_is(self.path)}")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def path(self) -> Path:
        """The run directory: as it was given, or whole where that leads elsewhere by now, since the
        working directory is another."""
        return self._given if self._given.absolute() == self._whole else self._whole

    @classmethod
    def create(cls, config: Config, path: str | Path | None = None) -> "Run":
        """A new run directory; without a path, `runs/NAME`, `runs/NAME-2`, ..."""
        content = to_toml(with_whole_paths(config))  # before anything is made for it
        if (name := str(path or "")) != printable(name):
            raise ConfigError(
                f"{printable(name)} is not in UTF-8, and no checkpoint could be read there: choose "
                "another --out"
            )
        folder = Path(path) if path is not None else _new_folder(Path("runs") / config.name)
        with claimed(folder / ".lock") as mine:
            if (folder / "config.toml").exists():
                raise ConfigError(
                    f"{folder} holds a run already: go on with it by `{cls(folder).way_on}`, "
                    "or choose another --out"
                )
            if not mine:
                raise ConfigError(f"{folder} holds a run already, just begun: choose another --out")
            try:
                write_text(folder / "config.toml", content)
            except CheckpointError:
                _clear(folder)
                raise
        return cls(folder)

    def copy(self, config: Config, path: Path) -> "Run":
        """A new run directory with all that was learned here so far, to go on by a configuration
        whose rounds until now would have been the same."""
        unfinished = path.with_name(f".{path.name}.part")
        shutil.rmtree(unfinished, ignore_errors=True)
        ignored = shutil.ignore_patterns(".lock", "tensorboard", "report.html")
        try:
            shutil.copytree(self.path, unfinished, ignore=ignored)
            write_text(unfinished / "config.toml", to_toml(with_whole_paths(config)))
            unfinished.rename(path)
        except OSError as error:  # of several files, it has a list and no reason
            why = error.strerror or "the disk may be full"
            raise CheckpointError(f"could not copy {self.path} to {path}: {why}") from error
        return Run(path)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Ours alone for the while: two processes would train every round twice."""
        with claimed(self.path / ".lock") as mine:
            if not mine:
                raise FederationError(
                    f"another process is at work in {self.path}: wait for it to end, or end it"
                )
            yield

    def withdraw(self) -> None:
        """Take back a run that could not begin, so that its place is free for another try."""
        if not self.metrics and latest_checkpoint(self.checkpoints) is None:
            _clear(self.path)

    @cached_property
    def config(self) -> Config:
        """The configuration, as resolved when the run was made."""
        return load_config(self.path / "config.toml")

    @property
    def served(self) -> bool:
        """Whether it is a coordinator's: its clients and what they have learned are at sites."""
        return (self.path / SERVED).is_file()

    @property
    def way_on(self) -> str:
        """The command that goes on with this run."""
        if self.config.here is not None:  # SITE/runs/ID
            return shlex.join(["ssfl", "site", "start", str(self.path.resolve().parents[1])])
        command = ["serve"] if self.served else ["train", "--resume"]
        return shlex.join(["ssfl", *command, str(self.path)])

    @property
    def record(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def metrics(self) -> list[Row]:
        """Every row of the record, in order."""
        return read_rows(self.record)

    @property
    def final(self) -> dict[str, Any]:
        """The figures at the end, or so far."""
        path = self.path / "final.json"
        return read_json(path, self._mend) if path.exists() else {}

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What an encoder must know of the data: channels, size, mean, std, class names."""
        path = self.path / "facts.json"
        if not path.exists():
            raise ConfigError(f"{self.path} has not been trained yet: it has no facts.json")
        return read_json(path, self._mend)  # type: ignore[no-any-return]

    @property
    def reading(self) -> Reading:
        """How image files are read, where the images are files; at a site by its own window."""
        data, here = self.config.data, self.config.here
        own = here.window if here is not None else None
        return Reading(getattr(data, "fit", "crop"), own or getattr(data, "window", None))

    @property
    def _mend(self) -> str:
        return f"delete it, and `{self.way_on}` writes it anew"

    @property
    def clients(self) -> Sequence[int]:
        """Ids of the clients of this run; at a site, of its own; at a coordinator, of those who
        have taken part."""
        if self.config.here is not None:
            return self.config.here.clients
        if self.served:
            return sorted({client for row in self.metrics for client in row.get("took_part", ())})
        return range(self.facts["clients"])

    def check_client(self, client: int) -> None:
        """Say who there is, if this one is not among them."""
        there = self.clients
        if client not in there:
            ids = (
                f"0 to {len(there) - 1}" if isinstance(there, range) else ", ".join(map(str, there))
            )
            raise ConfigError(f"there is no client {client}: this run's are {ids}")

    def write_facts(self, dataset: DataSet, clients: int) -> None:
        facts = {
            "data": dataset.name,
            "channels": dataset.channels,
            "image_size": dataset.image_size,
            "mean": dataset.mean,
            "std": dataset.std,
            "classes": dataset.classes,
            "labelled": dataset.train.labels is not None,
            "train_images": len(dataset.train),
            "test_images": len(dataset.test) if dataset.test is not None else 0,
            "clients": clients,
            "notes": dataset.notes,
        }
        write_text(self.path / "facts.json", json.dumps(facts, indent=2))

    @property
    def evaluation(self) -> Path:
        """Where the figures of `ssfl evaluate` are."""
        return self.path / "evaluation.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def store(self) -> StateStore:
        """The clients' states of this run."""
        return StateStore(self.path / "clients", self.config.run.store_mb << 20)

    def check_has_state(self, client: int) -> None:
        """What a coordinator's clients have learned is at their sites."""
        if self.served:
            raise ConfigError(
                f"client {client}'s encoder is not in {self.path} but at its site: ask for it there"
            )

    def checkpoint(self) -> Checkpoint:
        """The last checkpoint, which must exist."""
        found = latest_checkpoint(self.checkpoints)
        if found is None:
            raise CheckpointError(f"{self.path} has no checkpoint yet: train it by `{self.way_on}`")
        return found

    def check_theta(self) -> None:
        """Say so where Θ is no encoder that was trained, or none that is whole."""
        name = self.config.algorithm.name
        if not ALGORITHMS[name].sends:
            raise ConfigError(
                f"{name} trains no encoder for all, and Θ is as it began: choose a client's, "
                "e.g. --client 0 (`ssfl export` makes a file of it)"
            )
        if self.config.local.batch_norm == "fedbn":
            log.warning("with FedBN the shared encoder's batch norms are untrained: use a client's")

    @own_torch()
    def global_encoder(self) -> Encoder:
        """Θ's encoder, as of the last checkpoint."""
        checkpoint = self.checkpoint()
        model = self._model()
        check_fit(checkpoint, model.layout.digest, self.checkpoints)
        with torch.no_grad():
            model.shared.copy_(checkpoint.tensors["theta"])
        return self._encoder(model)

    @own_torch()
    def personal_encoder(self, client: int) -> Encoder:
        """θ_k's encoder for algorithms that have one, as of the last checkpoint. A client that has
        not trained yet has Θ's: that is where θ_k starts."""
        algorithm = self.config.algorithm.name
        if not ALGORITHMS[algorithm].personal:
            raise CheckpointError(
                f"client {client} has no personal model in {self.path} (algorithm {algorithm})"
            )
        self.check_client(client)
        self.check_has_state(client)
        state = self.store.get(client, before=self.checkpoint().rounds)
        if state.personal is None:
            return self.global_encoder()
        model = self._model()
        if state.personal.shape != model.vector.shape:
            raise CheckpointError(
                f"client {client}'s personal model in {self.path} does not fit the configured model"
            )
        with torch.no_grad():
            model.vector.copy_(state.personal)
        return self._encoder(model)

    def _model(self) -> FlatModel:
        facts, config = self.facts, self.config
        method = build_method(config, facts["channels"], facts["image_size"])
        return FlatModel(method, method.home)

    def _encoder(self, model: FlatModel) -> Encoder:
        """The encoder within, by itself: of the heads and gradients beside it, nothing is kept."""
        assert isinstance(model.module, Method)
        facts = self.facts
        encoder = Encoder(
            model.module.backbone, facts["mean"], facts["std"], facts["image_size"], self.reading
        )
        own = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
        encoder.load_state_dict(own, assign=True)
        return encoder.eval().requires_grad_(False)


def _clear(folder: Path) -> None:
    """Remove what there is of a run that has not begun."""
    for name in ("config.toml", "facts.json", "metrics.jsonl", ".lock"):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # what else is in there is not ours
        folder.rmdir()


def _what_it_is(path: Path) -> str:
    """Why a path is no run directory; the folder of all runs is easily taken for one."""
    if not path.is_dir():
        return "it is a file" if path.exists() else "there is no such folder"
    inside = sorted(path.glob("*/config.toml"))
    return "it has no config.toml" + "".join(f", but {one.parent} has" for one in inside[:1])


def _new_folder(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, ... that is not taken, and now is."""
    number, candidate = 1, path
    while True:
        try:
            candidate.mkdir(parents=True)
            return candidate
        except FileExistsError:
            number += 1
            candidate = path.with_name(f"{path.name}-{number}")
        except OSError as error:
            raise CheckpointError(f"could not make {candidate}: {error.strerror}") from error
