"""A configuration from where it is written: a recipe, a file, or tables, with settings on top."""

import tomllib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from shlex import quote
from typing import Any

from ssfl.config.schema import CHOICES, VERSION, Config, chosen
from ssfl.config.settings import apply_setting, chooses
from ssfl.data.decode import printable
from ssfl.errors import ConfigError
from ssfl.files import expanded
from ssfl.recipes import recipe, recipes
from ssfl.section import Section, validated


def load_config(
    source: str | Path | Mapping[str, Any], settings: str | Iterable[str] = ()
) -> Config:
    """A recipe by name, a TOML file by path, or tables as TOML gives them, with `section.key=value`
    settings on top.

    `extends = "NAME"` starts from another recipe, or from a file beside the one that says so. The
    paper's figures are not taken over: what differs is another experiment.
    """
    raw = _extended(deepcopy(dict(source))) if isinstance(source, Mapping) else _read(source)
    settings = [settings] if isinstance(settings, str) else settings
    for setting in sorted(settings, key=lambda setting: not chooses(setting)):
        apply_setting(raw, setting)
    return parse(raw)


def parse(raw: Mapping[str, Any]) -> Config:
    """A configuration from nested dictionaries, as TOML gives them."""
    found = raw.get("version", VERSION)
    if found != VERSION:
        raise ConfigError(
            f"this configuration is of version {found}, and this program reads version {VERSION}: "
            "write it anew with `ssfl config`, or use the program it was made with"
        )
    config: Config = validated(Config, dict(raw))
    return config


def with_whole_paths(config: Config) -> Config:
    """With absolute paths of the images, where the source has one, and of what Θ begins as: a run
    is judged and gone on with from other places than it was begun in."""
    changes: dict[str, Section] = {}
    for name, section, key in (("data", config.data, "path"), ("server", config.server, "start")):
        path = getattr(section, key, None)
        if not isinstance(path, Path):
            continue
        path = expanded(path, f"{name}.{key}")
        if path.exists():
            path = path.resolve()
            changes[name] = section.model_copy(update={key: path})
        if printable(str(path)) != str(path):
            raise ConfigError(
                f"{name}.{key}: {printable(str(path))} is not in UTF-8, and a configuration is: "
                "give it another name"
            )
    return config.model_copy(update=changes)


def _read(source: str | Path, extended_by: tuple[str, ...] = ()) -> dict[str, Any]:
    path = expanded(source, "recipe")
    name = str(path.resolve()) if path.suffix == ".toml" else str(source)
    if name in extended_by:
        raise ConfigError(f"{name} extends itself: {' extends '.join([*extended_by, name])}")
    packaged = recipe(str(source))
    if path.suffix == ".toml":
        text = read_own(path)
    elif packaged is not None:
        text = packaged
    elif (path / "config.toml").is_file():
        raise ConfigError(
            f"{path} is a run directory: go on with it by `ssfl train --resume "
            f"{quote(str(path))}`, or start anew from {path / 'config.toml'}"
        )
    else:
        raise ConfigError(
            f"there is no recipe '{source}' (known: {', '.join(recipes())}); "
            "a file is given by a path that ends in .toml"
        )
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from None
    if path.suffix != ".toml":
        raw.setdefault("name", str(source))
    return _extended(raw, path.parent, (*extended_by, name))


def read_own(path: Path) -> str:
    """The text of a recipe or study of the user's own, or a sentence on what is wrong with it."""
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _extended(
    raw: dict[str, Any], folder: Path = Path(), extended_by: tuple[str, ...] = ()
) -> dict[str, Any]:
    """`raw` on top of what it extends: a recipe, or a file, its path taken from `folder`."""
    if "extends" not in raw:
        return raw
    base = str(raw.pop("extends"))
    base = str(folder / expanded(base, "extends")) if base.endswith(".toml") else base
    extended = _read(base, extended_by)
    extended.pop("paper", None)  # the paper's figures are of that experiment, not of another one
    return _merged(extended, raw)


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` on top; another choice in a section replaces the section."""
    merged = dict(base)
    for section, values in changes.items():
        if not isinstance(values, dict) or not isinstance(base.get(section), dict):
            merged[section] = values
            continue
        key = CHOICES[section][0] if section in CHOICES else None
        rechosen = key in values and values[key] != chosen(section, base[section])
        merged[section] = values if rechosen else base[section] | values
    return merged
