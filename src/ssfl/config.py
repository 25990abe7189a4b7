"""Every knob, once: gathered from the rooms that use them, validated, with TOML in and out.

A configuration starts from a recipe or a TOML file, takes `section.key=value` settings on top, and
is written in full beside the results it led to.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from datetime import date, time
from pathlib import Path
from shlex import quote
from typing import Any, Literal, get_args

from pydantic import (
    BaseModel,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ssfl.algorithms import ALGORITHMS
from ssfl.algorithms.base import AlgorithmOptions
from ssfl.algorithms.global_ssfl import GlobalSSFLOptions
from ssfl.algorithms.options import LocalOptions
from ssfl.data.here import HereOptions
from ssfl.data.partition import PartitionOptions
from ssfl.data.sources import SOURCES
from ssfl.data.sources.shapes import ShapesOptions
from ssfl.data.views import ViewOptions
from ssfl.errors import ConfigError
from ssfl.evaluation.options import EvaluationOptions
from ssfl.federation.engine import DeviceOptions
from ssfl.federation.options import ServerOptions
from ssfl.models.backbones import BackboneOptions
from ssfl.paper import PaperFigures
from ssfl.recipes import recipe, recipes
from ssfl.registry import Registry
from ssfl.section import Section
from ssfl.ssl import METHODS
from ssfl.ssl.base import MethodOptions
from ssfl.ssl.simsiam import SimSiamOptions

VERSION: Literal[1] = 1


class RunOptions(Section):
    """What a run leaves behind, and how often."""

    checkpoint_every: int = Field(10, ge=1)
    """Rounds between checkpoints; one is also written on Ctrl-C and at the end."""
    store_mb: int = Field(4096, ge=0)
    """Memory for clients' states before they spill to disk."""
    trackers: tuple[Literal["mlflow", "wandb"], ...] = ()
    """Listeners beside metrics.jsonl and TensorBoard: mlflow (where MLFLOW_TRACKING_URI says, else
    in a file of the working directory), wandb."""


class Config(Section):
    """An experiment, whole."""

    version: Literal[1] = VERSION
    """Version of this format."""
    name: str = "experiment"
    """What the run directory is called."""
    seed: int = Field(0, ge=0)
    """Every random number comes from this one."""
    data: SerializeAsAny[Section] = ShapesOptions()
    """The images: `source` and its own options."""
    partition: PartitionOptions = PartitionOptions()
    here: HereOptions | None = None
    """Which clients are here, and where their images are: what a site adds to the recipe."""
    views: ViewOptions = ViewOptions()
    model: BackboneOptions = BackboneOptions()
    ssl: SerializeAsAny[MethodOptions] = SimSiamOptions()
    """What a client learns from two views: `method` and its own options."""
    algorithm: SerializeAsAny[AlgorithmOptions] = GlobalSSFLOptions()
    """How Θ and θ_k move: `name` and its own options."""
    local: LocalOptions = LocalOptions()
    server: ServerOptions = ServerOptions()
    evaluation: EvaluationOptions = EvaluationOptions()
    device: DeviceOptions = DeviceOptions()
    run: RunOptions = RunOptions()
    paper: PaperFigures = PaperFigures()

    @field_validator("data", "ssl", "algorithm", mode="before")
    @classmethod
    def _options_are_those_of_the_choice(cls, given: Any, info: ValidationInfo) -> Any:
        section = str(info.field_name)
        if isinstance(given, BaseModel):
            return given
        if not isinstance(given, Mapping):
            raise ConfigError(f"{section} is a table of options, not {given!r}")
        name, registry = str(_chosen(section, given)), CHOICES[section][1]
        options = getattr(registry[name], "Options", None)
        if options is None:  # a plug-in's
            raise ConfigError(f"{registry.kind} '{name}' has no Options: give its class some")
        return validated(options, dict(given), prefix=f"{section}.")

    @field_validator("name")
    @classmethod
    def _name_fits_a_folder(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
            raise ValueError(
                f"a run directory cannot be called {name!r}: use letters, digits, '.', '_' and '-'"
            )
        return name

    @model_validator(mode="after")
    def _round_fits_the_clients(self) -> "Config":
        asked, there = self.server.clients_per_round, self.partition.clients
        if self.partition.kind != "natural" and asked > there:
            raise ValueError(
                f"server.clients_per_round is {asked}, but there are only {there} clients "
                "(partition.clients)"
            )
        return self

    @model_validator(mode="after")
    def _choices_fit_each_other(self) -> "Config":
        """Options of one section that another's choice can make nothing of."""
        algorithm, method = ALGORITHMS[self.algorithm.name], METHODS[self.ssl.method]
        if algorithm.whole_batches and 0 < self.local.micro_batch < self.local.batch:
            raise ValueError(
                f"algorithm {self.algorithm.name!r} needs its batches whole: "
                "set local.micro_batch = 0, and a smaller local.batch if memory is short"
            )
        if self.local.predictor_rate == "constant" and method.predictor_prefix is None:
            raise ValueError(
                f"ssl.method {self.ssl.method!r} has no predictor whose rate could be constant: "
                "set local.predictor_rate = 'scheduled'"
            )
        if self.local.freeze_statistics < 1 and self.model.norm == "group":
            raise ValueError(
                "group norm keeps no statistics that could be frozen: "
                "set local.freeze_statistics = 1, or model.norm = 'batch'"
            )
        if self.local.freeze_statistics < 1 and self.local.keep_momentum:
            raise ValueError(
                "momentum from before statistics are frozen would be far too long after: "
                "set local.keep_momentum = false, or local.freeze_statistics = 1"
            )
        solarize = self.views.solarize
        if solarize is not None and len(solarize) not in (1, method.views):
            raise ValueError(
                f"views.solarize has {len(solarize)} numbers: give one for all views, or one for "
                f"each of the {method.views} that ssl.method {self.ssl.method!r} takes"
            )
        return self


CHOICES: dict[str, tuple[str, Registry]] = {
    "data": ("source", SOURCES),
    "ssl": ("method", METHODS),
    "algorithm": ("name", ALGORITHMS),
}
"""Sections whose options depend on a choice: the key that chooses, and among what."""


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
        elif problem["type"] == "missing":
            yield f"{key} is missing"
        elif problem["type"] == "model_type":
            yield f"{key} is a table of options, not {problem['input']!r}"
        elif problem["type"] == "tuple_type":
            given = problem["input"]
            example = f"e.g. [{_literal(given)}]"
            if str(given).startswith("["):
                example = 'in which numbers begin with a digit and words are in "quotes"'
            yield f"{key} = {given!r}: it should be a list, {example}"
        elif problem["type"] in ("string_type", "path_type"):
            given = _literal(problem["input"])
            yield f"{key} = {given}: it should be text, in quotes: '{key}=\"{given}\"'"
        else:
            message = problem["msg"].replace("Input should be", "it should be")
            yield f"{key} = {problem['input']!r}: {message}"


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
    for setting in sorted(settings, key=lambda setting: not _chooses(setting)):
        apply_setting(raw, setting)
    return parse(raw)


def _read(source: str | Path, extended_by: tuple[str, ...] = ()) -> dict[str, Any]:
    path = Path(source)
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
    base = str(folder / base) if base.endswith(".toml") else base
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
        rechosen = key in values and values[key] != _chosen(section, base[section])
        merged[section] = values if rechosen else base[section] | values
    return merged


def _chosen(section: str, table: Mapping[str, Any]) -> Any:
    """What a section is, by its own word or by default."""
    key = CHOICES[section][0]
    return table.get(key, getattr(Config.model_fields[section].default, key))


def _chooses(setting: str) -> bool:
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
    if _chooses(setting) and _chosen(path[0], table) != value:
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
    return [*lines, f"{name} = {_literal(value)}"]


def _literal(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, (str, bool)):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
