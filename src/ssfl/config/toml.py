"""A configuration as TOML, to be read by people and by `load_config`."""

from typing import Any

from pydantic import BaseModel

from ssfl.config.schema import CHOICES, Config
from ssfl.section import literal


def to_toml(config: Config, *, described: bool = False) -> str:
    """The whole configuration as TOML, each key with its description if wanted."""
    plain, sections = [], []
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            about = (type(value).__doc__ or "").strip().partition("\n")[0]
            head = [f"# {about}"] if described and about else []
            sections.append("\n".join([*head, f"[{name}]", *_lines(name, value, described)]))
        else:
            plain += _line(name, value, field.description, described)
    return "\n".join(plain) + "\n\n" + "\n\n".join(sections) + "\n"


def _lines(title: str, section: BaseModel, described: bool) -> list[str]:
    chooser, registry = CHOICES.get(title, (None, {}))
    descriptions = {
        name: f"One of {', '.join(registry)}." if name == chooser else field.description
        for name, field in type(section).model_fields.items()
    }
    return [
        line
        for name, description in descriptions.items()
        for line in _line(name, getattr(section, name), description, described)
    ]


def _line(name: str, value: Any, description: str | None, described: bool) -> list[str]:
    about = " ".join((description or "").split())
    if value is None:  # TOML has no null: a key that is not set is shown, but as a comment
        return [f"# {name} is not set. {about}"] if described else []
    lines = [f"# {about}"] if described and about else []
    return [*lines, f"{name} = {literal(value)}"]
