"""Settings of a command line, `section.key=value`, into tables as TOML gives them."""

import tomllib
from datetime import date, time
from typing import Any

from ssfl.config.schema import CHOICES, chosen
from ssfl.errors import ConfigError


def chooses(setting: str) -> bool:
    """Settings that choose what a section is come first, for they decide what else fits in it."""
    section, _, key = setting.partition("=")[0].strip().partition(".")
    return section in CHOICES and key == CHOICES[section][0]


def apply_setting(raw: dict[str, Any], setting: str, *, example: str = "local.lr=0.03") -> None:
    """Write one `section.key=value` into `raw`; changing a choice drops the other's options."""
    key, equals, text = setting.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise ConfigError(f"--set {setting}: write it as section.key=value, e.g. {example}")
    value = _value(text.strip())
    table = raw
    for part in path[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {setting}: {part} is not a section")
    if chooses(setting) and chosen(path[0], table) != value:
        table.clear()
        raw.pop("paper", None)  # its figures are of the other choice
    table[path[-1]] = value


def _value(text: str) -> Any:
    """A TOML value; what is not one (a bare word), or is a date, is a string."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if isinstance(value, date | time) else value
