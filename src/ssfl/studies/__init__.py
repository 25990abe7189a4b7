"""The studies that come with the package, by name. Listing them needs nothing but their files."""

import tomllib
from importlib import resources
from typing import Any

_FOLDER = resources.files(__name__)
_ORDER = (
    *("table1", "table2", "methods", "batch-size", "alpha", "protocol", "table3"),
    *("partition", "backbones", "labels", "search", "rates"),
)
"""The paper's; what is not here comes last."""


def packaged() -> dict[str, dict[str, Any]]:
    """All of them, in the paper's order, as their files have them."""
    place = {name: place for place, name in enumerate(_ORDER)}
    texts = {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in _FOLDER.iterdir()
        if entry.name.endswith(".toml")
    }
    names = sorted(texts, key=lambda name: (place.get(name, len(place)), name))
    return {name: tomllib.loads(texts[name]) for name in names}
