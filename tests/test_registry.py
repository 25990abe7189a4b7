"""What a user registers: found by its name, and said plainly where it cannot be."""

import pytest

from ssfl.algorithms import ALGORITHMS
from ssfl.config import load_config
from ssfl.errors import ConfigError
from ssfl.registry import Registry


class Something:
    """What is registered here; it has no options."""


@pytest.fixture
def registry() -> Registry:
    return Registry("algorithm", {"usual": "math:sqrt"})


def test_a_name_may_be_registered_again_as_a_notebooks_cell_is_run_again(registry):
    for _ in range(2):
        registry.register("mine", "math:cos")
    assert registry["mine"](0) == 1


def test_a_name_that_is_taken_stays_with_whose_it_is(registry):
    with pytest.raises(ConfigError, match=r"algorithm 'usual' is math:sqrt already: choose"):
        registry.register("usual", "math:cos")
    assert registry["usual"](4) == 2


@pytest.mark.parametrize("target", [Something, "math", "math:", ":cos", "math.cos"])
def test_what_is_no_place_to_find_it_at_is_refused_when_it_is_registered(registry, target):
    with pytest.raises(ConfigError, match=r'f"\{__name__\}:ItsClass", not as'):
        registry.register("mine", target)
    assert "mine" not in registry


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nowhere.at_all:Mine", r"nowhere\.at_all cannot be imported \(No module named 'nowhere'"),
        ("math:cosine", "math has no cosine"),
    ],
)
def test_what_is_not_where_it_was_said_to_be_is_a_sentence(registry, target, words):
    registry.register("mine", target)
    with pytest.raises(
        ConfigError, match=f"algorithm 'mine' is registered as {target}, but {words}"
    ):
        registry["mine"]


def test_a_plug_in_without_options_is_a_sentence(monkeypatch):
    monkeypatch.setattr(ALGORITHMS, "_targets", ALGORITHMS.targets)
    ALGORITHMS.register("mine", f"{__name__}:Something")
    with pytest.raises(ConfigError, match="algorithm 'mine' has no Options"):
        load_config("demo", ["algorithm.name=mine"])
