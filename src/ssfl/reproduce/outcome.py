"""From a finished run to its result: judged by the study's protocols, with all that made it."""

import contextlib
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

import ssfl
from ssfl.errors import ConfigError
from ssfl.evaluation.in_words import HEALTH
from ssfl.federation.engine import pick_device
from ssfl.protocols.bench import Bench, Progress
from ssfl.protocols.judge import evaluate
from ssfl.protocols.judge import judge as judged
from ssfl.protocols.scores import Evaluation, load_evaluation
from ssfl.report.record import Record
from ssfl.reproduce import made
from ssfl.reproduce.alike import judging
from ssfl.reproduce.jobs import Job
from ssfl.reproduce.records import Figure, Result
from ssfl.reproduce.study import Study
from ssfl.reproduce.watch import Plan
from ssfl.run import Run


def judge(study: Study, job: Job, progress: Progress) -> Evaluation:
    """The study's figures; those that were measured before, for another study, are not again."""
    run = Run(job.home)
    if job.theta_of:  # what is kept beside the run is about its own encoders
        bench = Bench(run, progress=progress, config=job.config)
        return judged(bench, study.protocols_of(job.arm), study.options)
    old = load_evaluation(run.evaluation)
    if old is not None and not _as_wanted(old, study, job):
        old = None
    if old is not None:
        there = {score.name for score in old.scores} | set(old.health.get("global", ()))
        if there >= set(study.figures_of(job.arm)):
            return old
    found = evaluate(run, study.protocols_of(job.arm), options=study.options, progress=progress)
    if old is not None:
        known = {score.name for score in found.scores}
        kept = [score for score in old.scores if score.name not in known]
        found = replace(found, scores=[*found.scores, *kept])
        found.save(run.evaluation)
    return found


def _as_wanted(old: Evaluation, study: Study, job: Job) -> bool:
    """Measured on the last round, and in the same way; more of it or less does no harm."""
    how = judging(study.options.model_dump(mode="json"))
    return old.rounds == job.config.server.rounds and judging(old.options) == how


def result_of(
    plan: Plan, job: Job, found: Evaluation, settings: tuple[str, ...], maker: made.Maker
) -> Result:
    run, record = Run(job.home), Record(Run(job.home))
    health = found.health.get("global", {})
    figures: dict[str, Figure] = {}
    for name in plan.study.figures_of(job.arm):
        if name in HEALTH:
            value = health.get(name)
            if value is not None:
                figures[name] = Figure(value=value, over="features")
        else:
            with contextlib.suppress(KeyError):  # an algorithm without Θ has none of its figures
                figures[name] = Figure.of(found[name])
    if missing := set(plan.study.figures_of(job.arm)) - set(figures):
        raise ConfigError(
            f"{', '.join(sorted(missing))} cannot be measured on this run; "
            f"{'; '.join(found.notes) or 'choose other figures in the study'}"
        )
    for name in ("global_knn", "personal_knn"):
        with contextlib.suppress(KeyError):
            figures.setdefault(name, Figure.of(found[name]))
    between = sum(row["seconds"] for row in run.metrics if row["kind"] == "evaluation")
    curve, trained = _curve(record), run.final["seconds"]
    if job.theta_of:  # which has been paid for, and whose clients were judged by other encoders
        between = trained = 0.0
        curve.pop("knn_mean", None)
    facts = run.facts
    device = pick_device(job.config.device.device)
    return Result(
        arm=job.arm.name,
        seed=job.seed,
        rounds=found.rounds,
        settings=settings,
        synthetic=job.synthetic,
        data=facts["data"],
        clients=facts["clients"],
        train_images=facts["train_images"],
        figures=figures,
        health=health,
        curve=curve,
        seconds=trained,
        evaluation_seconds=between + found.seconds.get("total", 0.0),
        command=maker.command,
        commit=maker.commit,
        version=ssfl.__version__,
        device=made.device_name(device),
        torch=torch.__version__,
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        run=_relative(job.home, plan.folder),
        theta_of=job.theta_of,
        config=job.config.model_dump(mode="json", exclude={"version", "name"}),
        options=found.options,
    )


def _relative(path: Path, folder: Path) -> str:
    """A path as seen from a study's folder, which may be its neighbour."""
    path, folder = path.resolve(), folder.resolve()
    if path.is_relative_to(folder):
        return str(path.relative_to(folder))
    return f"../{path.relative_to(folder.parent)}"


def _curve(record: Record) -> dict[str, list[float | None]]:
    """Indicators at every evaluation, and the loss of the round before it."""
    losses = dict(record.curve("round", "loss"))
    rows = record.evaluations
    curve: dict[str, list[float | None]] = {
        "round": [row["round"] for row in rows],
        "loss": [losses.get(row["round"]) for row in rows],
    }
    for figure in ("knn_global", "knn_mean"):
        curve[figure] = [row.get(figure) for row in rows]
    return {key: values for key, values in curve.items() if any(v is not None for v in values)}
