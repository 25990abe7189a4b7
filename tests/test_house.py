"""The house has one way through it: rooms import from rooms below, never in a circle."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import ssfl

HOUSE = Path(ssfl.__file__).parent


def room(path: Path) -> str:
    """The folder or the single file of the package that a module belongs to."""
    return path.relative_to(HOUSE).parts[0].removesuffix(".py")


def imports() -> dict[str, set[str]]:
    """Which rooms each room imports from, type-checking imports and deferred ones included."""
    found: dict[str, set[str]] = {}
    for path in HOUSE.rglob("*.py"):
        if path == HOUSE / "__init__.py":  # the front door names rooms, and imports none
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ssfl."):
                found.setdefault(room(path), set()).add(node.module.split(".")[1])
    return {name: others - {name} for name, others in found.items()}


def test_rooms_never_import_each_other_in_a_circle():
    TopologicalSorter(imports()).prepare()  # raises CycleError, naming the circle


def test_lower_rooms_know_nothing_of_the_rooms_above():
    rooms = imports()
    plain = {"errors", "section", "registry", "seeding", "files", "locks", "cores", "cuda_graphs"}
    assert rooms["data"] <= plain
    assert rooms["models"] <= plain
    assert rooms["evaluation"] <= plain
    assert rooms["ssl"] <= plain | {"models"}
    assert rooms["algorithms"] <= plain | {"models", "ssl"}
    assert rooms["federation"].isdisjoint({"comm", "config", "experiment", "report", "run"})
