"""Studies by their names: those of the package, and those of one's own by their paths."""

import tomllib
from pathlib import Path
from typing import Any

from ssfl.config import LETTERS, fits_a_folder, read_own, validated
from ssfl.data.decode import printable
from ssfl.errors import ConfigError
from ssfl.files import expanded
from ssfl.reproduce.small import in_small
from ssfl.reproduce.study import Study
from ssfl.studies import packaged

_SMALL = "-small"


def studies() -> dict[str, Study]:
    """The studies that come with the package, in the paper's order."""
    return {name: _study(name, tables) for name, tables in packaged().items()}


def with_small_forms() -> dict[str, Study]:
    """Those of the package, each followed by its small form where it has one."""
    found: dict[str, Study] = {}
    for name, study in studies().items():
        found[name] = study
        if study.small is not None:
            found[f"{name}{_SMALL}"] = in_small(name, study)
    return found


def load_study(source: str | Path, *, small: bool = False) -> tuple[str, Study]:
    """A study of the package by its name, or one's own by the path of its file; and the name of its
    results."""
    name, study = _load(source)
    return (f"{name}{_SMALL}", in_small(name, study)) if small else (name, study)


def _load(source: str | Path) -> tuple[str, Study]:
    path, known = expanded(source, "study"), packaged()
    if path.suffix == ".toml":
        if path.stem.removesuffix(_SMALL) in known:
            raise ConfigError(
                f"{path} has the name of a study of the package, and their results would be mixed: "
                "give the file another name"
            )
        tables = _own(path)
        if not fits_a_folder(path.stem):
            raise ConfigError(
                f"{printable(str(path))}: results and runs are called as the file is, so give it a "
                f"name of {LETTERS}"
            )
        return path.stem, _study(path.stem, tables)
    name = str(source)
    if name not in known:
        raise ConfigError(
            f"there is no study '{name}' (known: {', '.join(sorted(known))}); "
            "a file is given by a path that ends in .toml"
        )
    return name, _study(name, known[name])


def _own(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_own(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _study(name: str, tables: dict[str, Any]) -> Study:
    try:
        study: Study = validated(Study, tables)
        return study
    except ConfigError as error:
        raise ConfigError(f"study {name}: {error}") from None
