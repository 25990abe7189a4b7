"""Mistakes of someone who writes an algorithm or a method: each is said, and where it is made."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from ssfl.algorithms import ALGORITHMS
from ssfl.algorithms.base import Algorithm, Models
from ssfl.algorithms.global_ssfl import GlobalSSFL
from ssfl.config import load_config
from ssfl.errors import ConfigError, FederationError
from ssfl.experiment import train
from ssfl.ssl import METHODS
from ssfl.ssl.base import Batch, Method
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


class Lossless(Method):
    Options = SimSiam.Options


@pytest.mark.parametrize(
    ("registry", "usual", "mine", "what"),
    [
        (ALGORITHMS, "global-ssfl", "Unwritten", "step"),
        (METHODS, "simsiam", "Lossless", "loss"),
    ],
)
def test_what_is_missing_is_named_before_anything_is_trained(
    monkeypatch: pytest.MonkeyPatch, registry: Any, usual: str, mine: str, what: str
) -> None:
    monkeypatch.setattr(registry, "_targets", {**registry.targets, usual: f"{__name__}:{mine}"})
    with pytest.raises(ConfigError, match=f"'{usual}' is .* but {mine} has no {what}: write it"):
        load_config("demo")


def test_what_is_wrong_with_a_step_is_said_when_all_clients_have_failed_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    targets = {**ALGORITHMS.targets, "global-ssfl": f"{__name__}:Numbers"}
    monkeypatch.setattr(ALGORITHMS, "_targets", targets)
    with pytest.raises(FederationError, match=r"a tensor for each of its metrics \(loss\)"):
        train(tiny(server={"rounds": 1, "retries": 0}), out=tmp_path / "run")
