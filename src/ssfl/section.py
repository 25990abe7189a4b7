"""The base of every group of options: frozen, nothing unknown accepted, every field described.

Options live beside the code they steer (an algorithm's in its own file, a data source's in its
own); `config.py` gathers them into one whole.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A group of options. Subclasses describe every field in a docstring below it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Tables within tables as one, each value under its `section.key`."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[prefix + key] = value
    return values
