"""Which runs are of one experiment: what decides their figures, and what does not."""

from collections.abc import Callable, Mapping
from typing import Any

from ssfl.algorithms import ALGORITHMS
from ssfl.algorithms.late import LateOptions
from ssfl.config import Config, parse, validated
from ssfl.errors import ConfigError
from ssfl.protocols.options import ProtocolOptions
from ssfl.section import Section, flat

_ASIDE = ("version", "name", "run.", "paper.", "device.workers", "device.gpus_per_worker")
"""Keys that do not change what comes out."""
_BY_RUN = (
    *("seed", "data.path", "device.device", "device.compile", "device.threads"),
    *("evaluation.every", "evaluation.batch", "evaluation.baselines"),
)
"""Keys in which runs of one experiment may differ too: the seed, where a run was made, and how
often it was looked at."""
_AMOUNT = ("fractions", "finetune_clients")
"""Options of an evaluation that make it say more or less, and not otherwise."""

Settings = dict[str, Any]
"""Values by their `section.key`."""


def differences(one: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    """Keys that matter and in which the configurations of two runs differ."""
    left, right = (_without(flat(c.model_dump(mode="json")), _ASIDE) for c in (one, other))
    keys = [*left, *(key for key in right if key not in left)]
    return {key: (left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)}


def same_theta(trained: Config, asked: Config) -> bool:
    """Whether a run that was trained as one configuration has all that the other is judged by:
    they differ in the algorithm alone, both move Θ in the same way, and clients keep no θ_k."""
    there, here = (ALGORITHMS[config.algorithm.name] for config in (trained, asked))
    if here.personal or not (there.plain_theta and here.plain_theta):
        return False
    return all(key.startswith("algorithm.") for key in differences(trained, asked))


def same_until(one: Config, other: Config) -> int:
    """How many rounds of two runs are the same: where they differ in the algorithm alone, and both
    move Θ in the same way, those before the first θ_k begins."""
    late = [c.algorithm for c in (one, other) if isinstance(c.algorithm, LateOptions)]
    plain = all(ALGORITHMS[config.algorithm.name].plain_theta for config in (one, other))
    alike = all(key.startswith("algorithm.") for key in differences(one, other))
    if len(late) < 2 or not plain or not alike or one.seed != other.seed:
        return 0
    return min(algorithm.first_round(one.server.rounds) for algorithm in late)


def training(config: Mapping[str, Any]) -> Settings:
    """What decides what comes out of a configuration, whatever the seed."""
    return _without(_read_today(config, parse), (*_ASIDE, *_BY_RUN))


def deciding(settings: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `section.key=value` that decide what comes out."""
    return tuple(s for s in settings if not s.startswith((*_ASIDE, *_BY_RUN)))


def judging(options: Mapping[str, Any]) -> Settings:
    """What decides the figures of a run that is evaluated with these options."""
    read = _read_today(options, lambda raw: validated(ProtocolOptions, dict(raw)))
    return _without(read, _AMOUNT)


def changed(then: Settings, now: Settings) -> tuple[str, ...]:
    """What was not as it is now, as `section.key=value`."""
    other = {key: value for key, value in then.items() if key not in now or value != now[key]}
    return tuple(
        f"{key}={str(value).lower() if isinstance(value, bool | None) else value}"
        for key, value in other.items()
    )


def _read_today(raw: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Section]) -> Settings:
    """Options that are newer than what was written count as their defaults; with one that is no
    longer known, all count as they were written."""
    try:
        return flat(read(raw).model_dump(mode="json"))
    except ConfigError:
        return flat(raw)


def _without(settings: Settings, aside: tuple[str, ...]) -> Settings:
    return {key: value for key, value in settings.items() if not key.startswith(aside)}
