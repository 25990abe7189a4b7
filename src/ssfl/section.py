"""The base of every group of options: frozen, nothing unknown accepted, every field described, and
what does not fit said in a sentence.

Options live beside the code they steer (an algorithm's in its own file, a data source's in its
own); `config` gathers them into one whole.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from ssfl.errors import ConfigError


class Section(BaseModel):
    """A group of options. Subclasses describe every field in a docstring below it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def validated(model: type[Any], values: dict[str, Any], prefix: str = "") -> Any:
    """An instance of `model`; what does not fit is said by key, value and what is allowed."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(_sentences(model, error, prefix))) from None


def _sentences(model: type[BaseModel], error: ValidationError, prefix: str) -> Iterable[str]:
    """Each complaint as: the key, what was given, what is allowed."""
    for problem in error.errors():
        key = prefix + ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            section = _section_at(model, problem["loc"][:-1])
            known = list(section.model_fields) if section else ["other keys"]
            homes = [
                f"{name}.{key}"
                for name in known
                if (table := _section_at(model, (name,))) and key in table.model_fields
            ]
            if homes:
                yield f"unknown key {key}: did you mean {' or '.join(homes)}?"
            else:
                yield f"unknown key {key}: known here are {', '.join(known)}"
        elif problem["type"] == "value_error":
            where = f"{key.rstrip('.')}: " if problem["loc"] else ""
            yield where + problem["msg"].removeprefix("Value error, ")
        elif problem["type"] == "missing" and isinstance(problem["loc"][-1], int):
            given = literal(problem["input"])
            yield f"{key.rpartition('.')[0]} = {given}: it has too few values"
        elif problem["type"] == "missing":
            yield f"{key} is missing"
        elif problem["type"] == "too_long":
            wanted = problem["ctx"]["max_length"]
            yield f"{key} = {literal(problem['input'])}: it has more values than {wanted}"
        elif problem["type"] == "model_type":
            yield f"{key} is a table of options, not {problem['input']!r}"
        elif problem["type"] == "tuple_type":
            given = problem["input"]
            example = f"e.g. [{_items(given)}]"
            if str(given).startswith("["):
                example = 'in which numbers begin with a digit and words are in "quotes"'
            yield f"{key} = {given!r}: it should be a list, {example}"
        elif problem["type"] in ("string_type", "path_type"):
            given = literal(problem["input"])
            yield f"{key} = {given}: it should be text, in quotes: '{key}=\"{given}\"'"
        else:
            message = problem["msg"].replace("Input should be", "it should be")
            yield f"{key} = {problem['input']!r}: {message}"


def _items(given: Any) -> str:
    """What was given in place of a list, as it would stand in one: numbers may have commas between
    them already."""
    try:
        tomllib.loads(f"list = [{given}]")
    except tomllib.TOMLDecodeError:
        return literal(given)
    return str(given)


def _section_at(model: type[BaseModel], path: tuple[Any, ...]) -> type[BaseModel] | None:
    """The table that is reached by these keys; a place in a list leads no deeper."""
    for part in path:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        kinds = [annotation, *get_args(annotation)]
        tables = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not tables:
            return None
        model = tables[0]
    return model


def literal(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(literal(item) for item in value) + "]"
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, (str, bool)):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Tables within tables as one, each value under its `section.key`."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[prefix + key] = value
    return values
