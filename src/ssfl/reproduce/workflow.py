"""From a study's name to its results: plan, time, train, judge, write; and go on where it stopped.

Figures are those of the last round, never the best. Whatever ends it (a budget, Ctrl-C, a kill),
what was done is kept, and the same command goes on with it.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ssfl.errors import CheckpointError, ConfigError, FederationError, SSFLError
from ssfl.experiment import Display, resume, train
from ssfl.federation.engine import pick_device
from ssfl.files import write_text
from ssfl.locks import alone, claimed
from ssfl.reproduce import made, synthetic
from ssfl.reproduce.branches import branch_of
from ssfl.reproduce.estimate import LEAST_ROUNDS, MARGIN, Timing, fitting_rounds, measure_all
from ssfl.reproduce.jobs import Job, plan, rounds_of_runs, trained_since
from ssfl.reproduce.library import load_study
from ssfl.reproduce.outcome import judge, result_of
from ssfl.reproduce.pages import write_pages
from ssfl.reproduce.partitions import draw_partitions
from ssfl.reproduce.records import Unfinished
from ssfl.reproduce.results import StudyResult, load_result
from ssfl.reproduce.study import Study
from ssfl.reproduce.watch import Clock, OutOfTime, Parting, Plan, Until, Unwatched, Watch


def reproduce(
    name: str | Path,
    *,
    rounds: int | None = None,
    seeds: int | Sequence[int] | None = None,
    budget: float | None = None,
    out: str | Path = "results",
    settings: Sequence[str] = (),
    arms: Sequence[str] = (),
    synthetic_data: bool = False,
    small: bool = False,
    timing: bool = True,
    dry_run: bool = False,
    watch: Watch | None = None,
    command: str | None = None,
) -> StudyResult:
    """Run a study of the paper (or one's own, a .toml file) and write OUT/NAME.

    `rounds` and `seeds` are the study's own unless given; `budget` is in seconds and, without
    `rounds`, decides how many of them there are. `arms` restricts it to some.
    `small` takes its form for machines without a GPU, and writes OUT/NAME-small. The result holds
    whatever is known of the study, of this call and of earlier ones.
    """
    watch, clock = watch or Unwatched(), Clock(budget)
    label, study = load_study(name, small=small)
    folder = Path(out) / label
    _check_folder(folder, study)
    chosen = [study.arm(arm) for arm in dict.fromkeys(arms)] if arms else list(study.arms)
    maker, asked = made.Maker.now(command), _seeds(study, seeds)
    _check_settings(settings, asked, rounds)
    if study.pictures_only:
        if (rounds, seeds, budget) != (None, None, None):
            raise ConfigError(
                f"{label} trains nothing: leave out --rounds, --seeds and --budget, which are "
                "for training"
            )
        if dry_run:
            watch.say(f"{len(chosen)} partitions would be drawn to {folder}; nothing is trained")
            return StudyResult(name=label, study=study)
        return draw_partitions(label, study, chosen, folder, settings, synthetic_data, maker)
    stand_ins = synthetic.stand_ins(study, chosen, folder, settings, synthetic_data)

    def planned(rounds: int | None) -> Plan:
        jobs = plan(
            label,
            study,
            Path(out),
            arms=chosen,
            seeds=asked,
            rounds=rounds,
            settings=settings,
            stand_ins=stand_ins,
        )
        return Plan(label, study, folder, jobs)

    notes = []
    if stand_ins:
        notes.append(f"{'as asked' if synthetic_data else 'GLD-23K is not there'}: {_MADE_UP}")
    to_fit = budget is not None and rounds is None
    if to_fit and (found := rounds_of_runs(folder, chosen, asked)):
        rounds, to_fit = found, False
        notes.append(f"{found} rounds, as in the runs that are there already")
    today = planned(rounds)
    if study.small is not None and _on_a_cpu(today) and today.unfinished():
        watch.say(_WITHOUT_A_GPU)  # before a timing that may take minutes
    if (timing or to_fit) and today.unfinished():
        today.timings, failed = _time(today, watch)
        notes += failed
        if to_fit:
            today, note = _fitted(today, planned, clock)
            notes.append(note)
    today.notes = notes
    watch.plan(today)
    if not dry_run:
        _Playing(today, watch, clock, tuple(settings), maker).play()
    return load_result(folder / "results.json") or StudyResult(name=label, study=study)


_WITHOUT_A_GPU = (
    "there is no GPU here: --small asks the same question of a small network, in minutes"
)
_MADE_UP = (
    "a small set of made-up images stands in for GLD-23K, and its figures are not to be compared "
    "with the paper's"
)


def _check_folder(folder: Path, study: Study) -> None:
    before = load_result(folder / "results.json")
    if before is not None and not study.akin(before.study):
        raise ConfigError(
            f"{folder} holds the results of another study ({before.study.title}): choose another "
            "--out, or give your file another name"
        )


def _seeds(study: Study, asked: int | Sequence[int] | None) -> Sequence[int]:
    """Each once, or a run would count as several."""
    if asked is None:
        return range(study.seeds)
    return range(asked) if isinstance(asked, int) else tuple(dict.fromkeys(asked))


def _check_settings(settings: Sequence[str], seeds: Sequence[int], rounds: int | None) -> None:
    if not seeds or min(seeds) < 0:
        raise ConfigError("--seeds is a number of seeds (3), or the seeds themselves (0,1,2)")
    if rounds is not None and rounds < 1:
        raise ConfigError("--rounds must be at least 1")
    for setting in settings:
        key = setting.partition("=")[0].strip()
        if key in ("seed", "server.rounds", "name"):
            option = {"seed": "--seeds", "server.rounds": "--rounds"}.get(key, "--out")
            raise ConfigError(f"--set {setting}: a study has {option} for that")


def _on_a_cpu(today: Plan) -> bool:
    return pick_device(today.jobs[0].config.device.device).type == "cpu"


def _time(today: Plan, watch: Watch) -> tuple[dict[str, Timing], list[str]]:
    """Time every arm that has something left to do; what could not be timed is told."""
    device = made.device_name(pick_device(today.jobs[0].config.device.device))
    return measure_all(
        today.unfinished(),
        lambda job: today.study.protocols_of(job.arm),
        today.study.options,
        today.folder / "runs",
        device,
        watch.timing,
    )


def _fitted(today: Plan, planned: Callable[[int | None], Plan], clock: Clock) -> tuple[Plan, str]:
    """The plan with as many rounds as the budget has room for."""
    timed = [(today.timings.get(job.arm.name), job.config) for job in today.unfinished()]
    costs = [(timing, config) for timing, config in timed if timing is not None]
    most = max(job.config.server.rounds for job in today.jobs)
    if not costs:
        return today, f"nothing could be timed: {most} rounds, in order, until the budget is spent"
    found = fitting_rounds(costs, MARGIN * clock.left(), most)
    least = min(LEAST_ROUNDS, most)
    if found is None or found < least:
        rounds = least
        note = f"the budget has no room for {least} rounds of everything: {least} rounds, in order"
    else:
        rounds = found - found % 10 if 100 < found < most else found
        note = f"{rounds} rounds fit into the budget"
    fitted = planned(rounds)
    fitted.timings = today.timings
    usual = today.study.rounds
    return fitted, note if usual is None else f"{note} (the study: {usual})"


class _Playing:
    """A plan being carried out."""

    def __init__(
        self, plan: Plan, watch: Watch, clock: Clock, settings: tuple[str, ...], maker: made.Maker
    ) -> None:
        self.plan_, self.watch, self.clock = plan, watch, clock
        self.settings, self.maker = settings, maker
        self.why: dict[str, str] = {}

    def play(self) -> None:
        jobs = self.plan_.jobs
        try:
            for place, job in enumerate(jobs):
                if self.plan_.is_done(job):
                    continue
                with claimed(job.lock) as mine:
                    if mine and not self.plan_.is_done(job):
                        jobs[place] = trained_since(job, self.plan_.folder.parent)
                        self._one(jobs[place], place)
                    elif not mine:
                        self.why[job.name] = "another process is at it"
                self._write(pictures=False)
        finally:
            self._write(pictures=True)

    def _one(self, job: Job, place: int) -> None:
        timing = self.plan_.timings.get(job.arm.name)
        begin = (timing.setup + timing.warmup + timing.round) if timing else 0.0
        judging = timing.evaluation if timing else 0.0
        if not job.trained:
            if self.clock.left() < begin:
                self.why[job.name] = "the budget was spent"
                return
            try:
                branch = branch_of(job, self.plan_.jobs)
                if branch is not None:
                    with suppress(Parting):
                        self._train(job, place, branch.rounds)
                    if given := branch.part():
                        names = ", ".join(other.name for other in given)
                        self.watch.say(f"{branch.rounds} rounds of {job.name} are those of {names}")
                self._train(job, place)
            except OutOfTime:
                self.why[job.name] = "the budget was spent"
                return
            except FederationError as error:
                self._failed(job, error)
                return
            finally:
                made.release()
        if self.clock.left() < judging:
            self.why[job.name] = "the budget was spent"
            return
        with self.watch.evaluation(job) as progress:
            found = judge(self.plan_.study, job, progress)
        made.release()
        try:
            result = result_of(self.plan_, job, found, self.settings, self.maker)
        except ConfigError as error:  # its encoders have diverged, say: other runs have not
            self._failed(job, error)
            return
        write_text(job.record, result.model_dump_json())

    def _train(self, job: Job, place: int, rounds: int | None = None) -> None:
        """To the end, or up to a round where `Parting` is raised."""
        timing = self.plan_.timings.get(job.arm.name)
        display = self.watch.begin(job, place, len(self.plan_.jobs))
        reserve = timing.round if timing else 0.0
        _train(job, Until(display, self.clock, reserve, rounds))

    def _failed(self, job: Job, error: SSFLError) -> None:
        self.why[job.name] = f"failed: {error}"
        self.watch.failed(job, str(error))

    def _write(self, *, pictures: bool) -> None:
        """Everything under OUT/NAME, from what is known so far, here and in other processes."""
        with alone(self.plan_.folder / "runs" / ".pages.lock"):
            self._write_alone(pictures)

    def _write_alone(self, pictures: bool) -> None:
        plan = self.plan_
        results, left = [], []
        for job in plan.jobs:
            result = plan.recorded(job)
            if result is not None:
                results.append(result)
            else:
                why = self.why.get(job.name, "stopped before it was done")
                left.append(
                    Unfinished(
                        arm=job.arm.name,
                        seed=job.seed,
                        rounds=job.config.server.rounds,
                        settings=self.settings,
                        why=f"{why}{_so_far(job)}",
                    )
                )
        now = StudyResult(name=plan.name, study=plan.study, results=results, unfinished=left)
        before = load_result(plan.folder / "results.json")
        write_pages(now.joined(before) if before else now, plan.folder, pictures=pictures)


def _so_far(job: Job) -> str:
    if job.trained:
        return " (trained, not judged)"
    try:
        done = job.rounds_done()
    except CheckpointError:
        return ""
    return f" (saved after {done} of {job.config.server.rounds} rounds)" if done else ""


def _train(job: Job, display: Display) -> None:
    if (job.place / "config.toml").is_file():
        resume(job.place, display=display)
    else:
        train(job.config, out=job.place, display=display)
