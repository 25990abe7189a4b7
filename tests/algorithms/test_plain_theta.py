"""Algorithms that say that their Θ moves as in Global-SSFL: it does, to the bit, and others' does
not. On this rests that a study trains one run where it judges several algorithms."""

import pytest
import torch

from ssfl.algorithms import ALGORITHMS
from ssfl.algorithms.global_ssfl import GlobalSSFL
from ssfl.experiment import train
from tiny import tiny

CORRECTIONS = {
    "plain": {},
    "kept momentum": {"keep_momentum": True},
    "scaffold": {"correction": "scaffold"},
    "norms at home": {"batch_norm": "fedbn"},
}
OWN = {
    "fedu": {"threshold": 0.0},  # above it, its clients take all of Θ, as others do
    "bilevel-ssfl": {"begin": 0.5},  # Θ alone at first, then beside θ_k
}


@pytest.fixture(scope="module")
def thetas(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], torch.Tensor]:
    found = {}
    for how, local in CORRECTIONS.items():
        for name in [n for n, kind in ALGORITHMS.items() if kind.sends]:
            folder = tmp_path_factory.mktemp("run") / "run"
            algorithm = {"name": name, **OWN.get(name, {})}
            config = tiny(algorithm=algorithm, local={"batch": 32, "lr": 0.05, **local})
            found[how, name] = train(config, out=folder).checkpoint().tensors["theta"]
    return found


@pytest.mark.parametrize("how", CORRECTIONS)
def test_theta_of_those_who_say_so_is_global_ssfls_to_the_bit(
    how: str, thetas: dict[tuple[str, str], torch.Tensor]
) -> None:
    own = thetas[how, "global-ssfl"]
    same = {name for (h, name), theta in thetas.items() if h == how and torch.equal(theta, own)}
    assert same == {name for name, kind in ALGORITHMS.items() if kind.plain_theta}
    assert same == {"global-ssfl", "la-ssfl", "per-ssfl", "bilevel-ssfl"}


def test_a_subclass_has_to_say_it_for_itself() -> None:
    class Mine(GlobalSSFL):
        pass

    assert GlobalSSFL.plain_theta
    assert not Mine.plain_theta
