"""Where the numbers of a run go while it runs: one small interface, several listeners.

`metrics.jsonl` is the record; it is only ever appended to. TensorBoard, MLflow and Weights & Biases
listen in where they are installed and asked for.
"""

import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from ssfl.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

Row = dict[str, Any]
"""One line of the record: `kind` (round, evaluation, resume, ...), `round`, and its figures."""


def client_mean(row: Row, figure: str) -> float | None:
    """The plain mean of a figure over the clients that sent it with an evaluation, if any did."""
    sent = [each[figure] for each in (row.get("clients") or {}).values() if figure in each]
    known = [value for value in sent if value is not None]
    return sum(known) / len(known) if known else None


class Tracker(Protocol):
    """Something that wants to know every row."""

    def log(self, row: Row) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """Append rows to `metrics.jsonl`, one line each, visible at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        cut_short = path.exists() and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        if cut_short:  # by a kill in the midst of a line: what comes is a line of its own
            self._file.write("\n")

    def log(self, row: Row) -> None:
        try:
            self._file.write(json.dumps(_finite(row)) + "\n")
            self._file.flush()
        except OSError as error:
            raise CheckpointError(
                f"could not write {self._path}: {error.strerror or error}; checkpoints are intact"
            ) from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written has been said
            self._file.close()


class Listener:
    """A tracker beside the record, whose trouble (a server that is away, a full disk) is not the
    run's: it is said once, and the tracker hears no more.

    It is opened for its first row: a run that records nothing leaves nothing behind with it.
    """

    def __init__(self, name: str, open_: Callable[[], Tracker]) -> None:
        self._name, self._open = name, open_
        self._tracker: Tracker | None = None
        self._well = True

    def log(self, row: Row) -> None:
        def tell() -> None:
            self._tracker = self._tracker or self._open()
            self._tracker.log(row)

        self._unless_in_trouble(tell)

    def close(self) -> None:
        if self._tracker is not None:
            self._unless_in_trouble(self._tracker.close)

    def _unless_in_trouble(self, tell: Callable[[], None]) -> None:
        try:
            if self._well:
                tell()
        except Exception as error:  # whatever a stranger's library raises
            self._well = False
            what = f"{type(error).__name__}: {error}"
            log.warning("%s hears no more of this run (%s); the record goes on", self._name, what)


class TensorBoard:
    """The same rows as TensorBoard scalars, against the round."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def log(self, row: Row) -> None:
        for name, value in scalars(row):
            self._writer.add_scalar(name, value, row["round"])

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """The same rows as an MLflow run: where MLFLOW_TRACKING_URI says, else where MLflow itself puts
    runs, in the working directory, so that one place has them all."""

    def __init__(self, folder: Path, about: Row) -> None:
        import mlflow

        mlflow.set_experiment("ssfl")
        self._mlflow = mlflow
        mlflow.start_run(run_name=folder.name)
        mlflow.log_params({key: str(value)[:500] for key, value in about.items()})

    def log(self, row: Row) -> None:
        self._mlflow.log_metrics(dict(scalars(row)), step=row["round"])

    def close(self) -> None:
        self._mlflow.end_run()


class WandB:
    """The same rows as a Weights & Biases run; WANDB_MODE=offline keeps them on this machine."""

    def __init__(self, folder: Path, about: Row) -> None:
        import wandb

        self._run = wandb.init(
            project="ssfl", name=folder.name, dir=str(folder), config=about, resume="allow"
        )

    def log(self, row: Row) -> None:
        # Their step may only grow, and a resumed run goes back: the round is a figure like others.
        self._run.log({**dict(scalars(row)), "round": row["round"]})

    def close(self) -> None:
        self._run.finish()


EXTRAS: dict[str, Any] = {"mlflow": MLflow, "wandb": WandB}
"""Trackers that are there when they are asked for, by the name of their extra."""


def scalars(row: Row) -> Iterator[tuple[str, float]]:
    """The plain numbers of a row, each as `kind/figure`."""
    for name, value in row.items():
        if name != "round" and isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{row['kind']}/{name}", float(value)


def read_rows(path: Path) -> list[Row]:
    """The rows of a record as they count: what a resumed run did again replaces what it undid.

    A last line cut short by a kill is left out.
    """
    rows: list[Row] = []
    if not path.exists():
        return rows
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if row["kind"] == "resume":
            rows = standing(rows, row["round"])
        rows.append(row)
    return rows


def standing(rows: Iterable[Row], resumed_at: int) -> list[Row]:
    """Rows of rounds that were completed before the checkpoint that a run was resumed from."""
    judging = ("evaluation", "baseline", "resume")  # after that many rounds, not in the next
    return [row for row in rows if row["round"] < resumed_at + (row["kind"] in judging)]


def need_trackers(asked: Iterable[str]) -> None:
    """Refuse a run that asks for a tracker which is not installed, before it has begun."""
    for name in asked:
        if find_spec(name) is None:
            raise ConfigError(
                f"run.trackers asks for {name}, which is not installed: "
                f"`pip install 'ssfl[{name}]'`, or leave it out"
            )


def default_trackers(
    folder: Path, asked: Iterable[str] = (), about: Row | None = None
) -> list[Tracker]:
    """The record, TensorBoard where it is installed, and those asked for.

    `about` is the configuration, flat, for trackers that show one.
    """
    trackers: list[Tracker] = [JsonLines(folder / "metrics.jsonl")]
    if find_spec("tensorboard") is not None:
        opened = partial(TensorBoard, folder / "tensorboard")
        trackers.append(Listener("TensorBoard", opened))
    return trackers + [Listener(name, partial(EXTRAS[name], folder, about or {})) for name in asked]


def log_all(trackers: Iterable[Tracker], row: Row) -> None:
    for tracker in trackers:
        tracker.log(row)


def _finite(value: Any) -> Any:
    """JSON has no NaN: what is not a number is null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
