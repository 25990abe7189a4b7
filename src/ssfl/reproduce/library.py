"""Studies by their names: the files in `ssfl/studies`, and those of one's own by their paths."""

import tomllib
from importlib import resources
from pathlib import Path

from ssfl.config import read_own, validated
from ssfl.errors import ConfigError
from ssfl.reproduce.study import Study

_FOLDER = resources.files("ssfl") / "studies"
_ORDER = (
    *("table1", "table2", "methods", "batch-size", "alpha", "protocol", "table3"),
    *("partition", "backbones", "labels", "search", "rates"),
)
"""The paper's; what is not here comes last."""


def studies() -> dict[str, Study]:
    """The studies that come with the package, in the paper's order."""
    place = {name: place for place, name in enumerate(_ORDER)}
    names = sorted(_names(), key=lambda name: place.get(name, len(place)))
    return {name: load_study(name)[1] for name in names}


def load_study(source: str | Path) -> tuple[str, Study]:
    """A study of the package by its name, or one's own by the path of its file; and its name."""
    path = Path(source)
    if path.suffix == ".toml":
        name, text = path.stem, _own(path)
    else:
        name, text = str(source), _packaged(str(source))
    try:
        return name, validated(Study, tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"study {name}: {error}") from None


def _names() -> list[str]:
    entries = (entry.name for entry in _FOLDER.iterdir())
    return sorted(name.removesuffix(".toml") for name in entries if name.endswith(".toml"))


def _packaged(name: str) -> str:
    if name not in _names():
        raise ConfigError(
            f"there is no study '{name}' (known: {', '.join(_names())}); "
            "a file is given by a path that ends in .toml"
        )
    return (_FOLDER / f"{name}.toml").read_text(encoding="utf-8")


def _own(path: Path) -> str:
    if path.stem in _names():
        raise ConfigError(
            f"{path} has the name of a study of the package, and their results would be mixed: "
            "give the file another name"
        )
    return read_own(path)
