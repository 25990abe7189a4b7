"""What can be configured: the sections of the rooms that use them, and what must fit together."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import (
    BaseModel,
    Field,
    SerializeAsAny,
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
from ssfl.registry import Registry
from ssfl.section import Section, validated
from ssfl.ssl import METHODS
from ssfl.ssl.base import MethodOptions
from ssfl.ssl.simsiam import SimSiamOptions

VERSION: Literal[1] = 1
LETTERS = "letters, digits, '.', '_' and '-'"
"""What a name may be made of that a folder has, on whatever disk."""


def fits_a_folder(name: str) -> bool:
    """The name is made of LETTERS."""
    return re.fullmatch(r"[A-Za-z0-9._-]+", name) is not None


class RunOptions(Section):
    """What a run leaves behind, and how often."""

    checkpoint_every: int = Field(10, ge=1)
    """Rounds between checkpoints; one is also written on Ctrl-C and at the end."""
    store_mb: int = Field(4096, ge=0)
    """Memory for clients' states, twice over for those in a round, before they spill to disk."""
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
        name, registry = str(chosen(section, given)), CHOICES[section][1]
        options = getattr(registry[name], "Options", None)
        if options is None:  # a plug-in's
            raise ConfigError(f"{registry.kind} '{name}' has no Options: give its class some")
        return validated(options, dict(given), prefix=f"{section}.")

    @field_validator("name")
    @classmethod
    def _name_fits_a_folder(cls, name: str) -> str:
        if not fits_a_folder(name):
            raise ValueError(f"a run directory cannot be called {name!r}: use {LETTERS}")
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
        if self.local.freeze_statistics < 1 and self.local.batch_norm == "fedbn":
            raise ValueError(
                "with fedbn a client has statistics of its own, and none before its first round: "
                "set local.freeze_statistics = 1, or local.batch_norm = 'shared'"
            )
        if self.local.freeze_statistics < 1 and self.local.keep_momentum:
            raise ValueError(
                "momentum from before statistics are frozen would be far too long after: "
                "set local.keep_momentum = false, or local.freeze_statistics = 1"
            )
        if not algorithm.sends:
            self._refuse_what_is_for_updates()
        solarize = self.views.solarize
        if solarize is not None and len(solarize) not in (1, method.views):
            raise ValueError(
                f"views.solarize has {len(solarize)} numbers: give one for all views, or one for "
                f"each of the {method.views} that ssl.method {self.ssl.method!r} takes"
            )
        return self

    def _refuse_what_is_for_updates(self) -> None:
        """Where clients send nothing, nothing that is about a Θ of them all does anything."""
        sections: tuple[tuple[str, Section, tuple[str, ...]], ...] = (
            ("local", self.local, ("correction", "batch_norm", "freeze_statistics")),
            ("server", self.server, ("optimizer", "aggregation", "updates", "late")),
        )
        for section, options, names in sections:
            for name in names:
                default = type(options).model_fields[name].default
                if getattr(options, name) != default:
                    raise ValueError(
                        f"clients of algorithm {self.algorithm.name!r} send nothing, which "
                        f"{section}.{name} could be about: leave it at {default!r}"
                    )


CHOICES: dict[str, tuple[str, Registry]] = {
    "data": ("source", SOURCES),
    "ssl": ("method", METHODS),
    "algorithm": ("name", ALGORITHMS),
}
"""Sections whose options depend on a choice: the key that chooses, and among what."""


def chosen(section: str, table: Mapping[str, Any]) -> Any:
    """What a section is, by its own word or by default."""
    key = CHOICES[section][0]
    return table.get(key, getattr(Config.model_fields[section].default, key))
