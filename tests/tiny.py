"""An experiment that takes a second: digits, a narrow network, a handful of clients."""

from typing import Any

import torch

from ssfl.config import Config, parse
from ssfl.run import Run

TINY: dict[str, Any] = {
    "name": "tiny",
    "seed": 3,
    "data": {"source": "digits", "test_fraction": 0.7},
    "partition": {"kind": "iid", "clients": 4, "min_test": 5},
    "model": {"backbone": "small", "width": 4},
    "ssl": {"method": "simsiam", "projector_width": 16, "predictor_width": 8},
    "algorithm": {"name": "global-ssfl"},
    "local": {"batch": 32, "lr": 0.05},
    "server": {"rounds": 3},
    "evaluation": {"every": 0, "clients": 2},
    "device": {"device": "cpu", "workers": 1},
    "run": {"checkpoint_every": 2},
}

CHOSEN = {"data": "source", "ssl": "method", "algorithm": "name"}
"""Sections of which another is meant, with other keys, when this one is given."""


def tables(**sections: Any) -> dict[str, Any]:
    """The recipe as TOML would give it, with some keys changed: tables(local={"lr": 1})."""
    raw = {name: dict(v) if isinstance(v, dict) else v for name, v in TINY.items()}
    for name, given in sections.items():
        if not isinstance(given, dict) or CHOSEN.get(name, "") in given:
            raw[name] = given
        else:
            raw[name] = {**raw.get(name, {}), **given}
    return raw


def tiny(**sections: Any) -> Config:
    return parse(tables(**sections))


def outcome(run: Run) -> dict[str, torch.Tensor]:
    """All that a finished run has learned: Θ and what moves it, and every client's state."""
    checkpoint = run.checkpoint()
    assert checkpoint.rounds == run.config.server.rounds
    learned = dict(checkpoint.tensors)
    for client in range(run.facts["clients"]):
        for name, tensor in run.store.get(client, before=checkpoint.rounds).tensors().items():
            learned[f"{client}.{name}"] = tensor
    return learned


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
