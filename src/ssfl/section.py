"""The base of every group of options: frozen, nothing unknown accepted, every field described.

Options live beside the code they steer (an algorithm's in its own file, a data source's in its
own); `config.py` gathers them into one whole.
"""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A group of options. Subclasses describe every field in a docstring below it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
