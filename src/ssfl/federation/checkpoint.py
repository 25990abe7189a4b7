"""The server's state on disk: one safetensors file per checkpoint, all of it or none of it."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ssfl.errors import CheckpointError
from ssfl.files import read_tensors, write_tensors

VERSION = "1"


@dataclass(frozen=True)
class Checkpoint:
    """The server's tensors after `rounds` completed rounds, for models of layout `layout`."""

    rounds: int
    layout: str
    tensors: dict[str, Tensor]


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint, then forget all but the one before it. (Later ones there are at a site
    whose coordinator has gone back: that future is made anew.)"""
    path = folder / f"round-{checkpoint.rounds:06d}.safetensors"
    facts = {"version": VERSION, "rounds": str(checkpoint.rounds), "layout": checkpoint.layout}
    write_tensors(path, checkpoint.tensors, facts)
    saved = _saved(folder)
    place = saved.index(path)
    for other in saved[: max(0, place - 1)] + saved[place + 1 :]:
        other.unlink(missing_ok=True)
    return path


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest checkpoint, or None if there is none yet."""
    saved = _saved(folder)
    return load_checkpoint(saved[-1]) if saved else None


def load_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint file."""
    tensors, facts = read_tensors(path)
    if facts.get("version") != VERSION:
        raise CheckpointError(
            f"{path} was written by another version of ssfl "
            f"(format {facts.get('version', 'unknown')}, this one reads {VERSION})"
        )
    return Checkpoint(int(facts["rounds"]), facts["layout"], tensors)


def check_fit(checkpoint: Checkpoint, layout: str, where: Path) -> None:
    """Refuse a checkpoint of another model."""
    if checkpoint.layout != layout:
        raise CheckpointError(
            f"the checkpoint in {where} does not fit the configured model "
            f"(layout {checkpoint.layout}, the model's is {layout}): "
            "was model or ssl changed in its config.toml?"
        )


def _saved(folder: Path) -> list[Path]:
    return sorted(folder.glob("round-*.safetensors"))
