"""Mistakes of someone who writes an algorithm or a method: each is said, and where it is made."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from ssfl.algorithms import ALGORITHMS
from ssfl.algorithms.base import Algorithm, Models
from ssfl.algorithms.global_ssfl import GlobalSSFL
from ssfl.errors import ConfigError, FederationError
from ssfl.experiment import train
from ssfl.ssl import METHODS
from ssfl.ssl.base import Batch, Outputs
from ssfl.ssl.simsiam import SimSiam
from tiny import tiny


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"encoder": "own"}, "Mine: encoder is 'global', 'personal' or 'adapted', not 'own'"),
        ({"encoder": "personal"}, "Mine: encoder = 'personal' needs personal = True"),
        ({"metrics": ("loss")}, r"Mine: metrics is a tuple of names, .* not 'loss'"),
    ],
)
def test_an_algorithm_that_contradicts_itself_is_refused_as_it_is_written(
    declared: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        type("Mine", (Algorithm,), declared)
    type("Mine", (Algorithm,), {"encoder": "personal", "personal": True, "metrics": ("loss",)})


class Unwritten(Algorithm):
    Options = GlobalSSFL.Options


class Numbers(GlobalSSFL):
    def step(self, models: Models, *batches: Batch) -> tuple[Tensor, ...]:
        return tuple(float(value) for value in super().step(models, *batches))  # type: ignore[misc]


class Lossless(SimSiam):
    def loss(self, outputs: Outputs) -> Tensor:
        return super(SimSiam, self).loss(outputs)


@pytest.mark.parametrize(
    ("registry", "usual", "mine", "words"),
    [
        (ALGORITHMS, "global-ssfl", "Unwritten", "Unwritten has no step: it must be written"),
        (ALGORITHMS, "global-ssfl", "Numbers", r"a tensor for each of its metrics \(loss\)"),
        (METHODS, "simsiam", "Lossless", "Lossless has no loss: it must be written"),
    ],
)
def test_what_is_missing_is_named_when_all_clients_have_failed_for_it(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    registry: Any,
    usual: str,
    mine: str,
    words: str,
) -> None:
    monkeypatch.setattr(registry, "_targets", {**registry.targets, usual: f"{__name__}:{mine}"})
    with pytest.raises(FederationError, match=words):
        train(tiny(server={"rounds": 1, "retries": 0}), out=tmp_path / "run")
