"""What a study comes down to: one run per arm and seed, each in a place of its own.

A run that is there is gone on with, never begun anew; its configuration must be the one asked for.
A finished run of the same configuration under the same folder is judged instead of trained a
second time (table 2's Per-SSFL is also an arm of two other studies), and so is one that differs in
its algorithm alone, where Θ is all that is judged and moves the same way (BiLevel-SSFL's run has
LA-SSFL's Θ).
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ssfl.config import Config, load_config, with_whole_paths
from ssfl.errors import CheckpointError, ConfigError
from ssfl.federation.checkpoint import latest_checkpoint
from ssfl.reproduce.alike import differences, same_theta
from ssfl.reproduce.study import Arm, Study
from ssfl.run import Run


@dataclass(frozen=True)
class Job:
    """A run to be trained and judged."""

    arm: Arm
    seed: int
    config: Config
    place: Path
    """Where it is trained: OUT/STUDY/runs/ARM-seedS."""
    synthetic: bool = False
    """On images made in the place of the real ones."""
    twin: Path | None = None
    """A finished run that has what is judged here, if there is one."""

    @property
    def name(self) -> str:
        return f"{self.arm.name}-seed{self.seed}"

    @property
    def record(self) -> Path:
        """Where its result is kept."""
        return self.place.with_name(f"{self.place.name}.json")

    @property
    def lock(self) -> Path:
        """Held by the process that is at it."""
        return self.place.with_name(f".{self.place.name}.lock")

    @property
    def home(self) -> Path:
        """The run directory that is judged."""
        return self.twin or self.place

    @property
    def theta_of(self) -> str:
        """The algorithm of the run whose Θ is judged, where it is another than the arm's."""
        if self.twin is None:
            return ""
        trained = Run(self.twin).config.algorithm.name
        return "" if trained == self.config.algorithm.name else trained

    def rounds_done(self) -> int:
        """Rounds that need not be trained any more."""
        if self.twin is not None:
            return self.config.server.rounds
        found = latest_checkpoint(self.place / "checkpoints")
        return found.rounds if found else 0

    @property
    def trained(self) -> bool:
        return finished(self.home, self.config.server.rounds)


def finished(run: Path, rounds: int) -> bool:
    """The run came to its end."""
    return (run / "final.json").is_file() and Run(run).final.get("rounds") == rounds


def plan(
    name: str,
    study: Study,
    out: Path,
    *,
    arms: Sequence[Arm],
    seeds: Sequence[int],
    rounds: int | None,
    settings: Sequence[str],
    stand_ins: Mapping[str, Sequence[str]],
) -> list[Job]:
    """All runs, the first seed of every arm first: cut short, it still says something of each.

    `stand_ins` are settings of the arms whose images are made up.
    """
    jobs, there = [], _runs_below(out)
    for seed in seeds:
        for arm in arms:
            label = f"{name}-{arm.name}-seed{seed}"
            own = (*settings, *stand_ins.get(arm.name, ()))
            config = with_whole_paths(
                study.config(arm, name=label, seed=seed, rounds=rounds, settings=own)
            )
            place = out / name / "runs" / f"{arm.name}-seed{seed}"
            job = Job(arm, seed, config, place, synthetic=arm.name in stand_ins)
            _check(job)
            jobs.append(_with_twin(job, there))
    return jobs


def trained_since(job: Job, out: Path) -> Job:
    """The job, with the run that makes its own needless if one has come to its end by now."""
    return job if job.twin is not None else _with_twin(job, _runs_below(out))


def comes_with(job: Job, others: Iterable[Job]) -> bool:
    """Whether the run of one of these will have what is judged here."""
    return not job.place.exists() and any(_has(other.config, job) for other in others)


def rounds_of_runs(folder: Path, arms: Sequence[Arm], seeds: Sequence[int]) -> int | None:
    """Rounds of the runs that are there already, for those who go on with them."""
    for arm in arms:
        for seed in seeds:
            path = folder / "runs" / f"{arm.name}-seed{seed}" / "config.toml"
            if path.is_file():
                return load_config(path).server.rounds
    return None


def _check(job: Job) -> None:
    """What is in the job's place must be the job's."""
    if not (job.place / "config.toml").is_file():
        return
    found = differences(load_config(job.place / "config.toml"), job.config)
    if not found:
        return
    key, (there, asked) = next(iter(found.items()))
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    hint = f"go on with it by --rounds {there}, or " if key == "server.rounds" else ""
    raise ConfigError(
        f"{job.place} is a run of another configuration: {key} is {there!r} there and {asked!r} "
        f"here{more}; {hint}choose another --out, or delete that run"
    )


def _with_twin(job: Job, there: dict[Path, Config]) -> Job:
    if job.place.exists():
        return job
    same = [path for path, config in there.items() if _has(config, job)]
    exact = [path for path in same if not differences(there[path], job.config)]
    return replace(job, twin=next(iter(exact or same), None))


def _has(trained: Config, job: Job) -> bool:
    """A run of this configuration has what is judged in the job."""
    if trained.seed != job.seed:
        return False
    return not differences(trained, job.config) or same_theta(trained, job.config)


def _runs_below(out: Path) -> dict[Path, Config]:
    """Finished runs of all studies; one that cannot be read (of another version, or broken) is
    not ours."""
    found = {}
    for path in sorted(out.glob("*/runs/*/config.toml")):
        with contextlib.suppress(ConfigError, CheckpointError):
            config = load_config(path)
            saved = any((path.parent / "checkpoints").glob("round-*"))
            if saved and finished(path.parent, config.server.rounds):
                found[path.parent] = config
    return found
