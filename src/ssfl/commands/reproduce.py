"""`ssfl reproduce`: the paper's experiments, one command each."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from ssfl.studies import packaged

if TYPE_CHECKING:
    from ssfl.reproduce import StudyResult
    from ssfl.reproduce.jobs import Job
    from ssfl.reproduce.watch import Plan


def reproduce(
    study: Annotated[
        str | None,
        typer.Argument(
            help="A study's name (see --list), or the path of a .toml file.",
            autocompletion=packaged,
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds of every run (default: the study's).")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="How many seeds (3), or which (0,1,2). Default: the study's.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Time to spend, e.g. 20min. Without --rounds as many rounds as fit into it; with "
            "--rounds, arms in order until it is spent."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Results go to OUT/STUDY (default: results); with --collect, the page to write "
            "(default: RESULTS.md).",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one option of every arm, e.g. --set local.lr=0.03."),
    ] = None,
    arm: Annotated[
        list[str] | None, typer.Option("--arm", help="Only this arm (may be repeated).")
    ] = None,
    small: Annotated[
        bool,
        typer.Option(
            "--small",
            help="Without a GPU: a small network and few rounds on the same images, for minutes on "
            "two cores. Results go to OUT/STUDY-small.",
        ),
    ] = False,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="GLD-23K: made-up images in its layout.")
    ] = False,
    no_timing: Annotated[
        bool, typer.Option("--no-timing", help="Begin without timing a few rounds of each arm.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be run and how long, and stop.")
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the studies.")] = False,
    collect: Annotated[
        Path | None,
        typer.Option(
            help="Gather all results below this folder into one page, and make theirs anew."
        ),
    ] = None,
) -> None:
    """Repeat an experiment of the paper: train, judge, and put our figures beside the paper's.

    Says what it will run and how long that takes here, goes on where it was stopped, and writes
    OUT/STUDY: results.json, results.csv, pictures and README.md. Exits with 1 where a run failed.

    Example: ssfl reproduce table2 --rounds 200 --seeds 3
    """
    from ssfl.commands.console import errors, say
    from ssfl.errors import ConfigError

    if (study is not None) + list_ + (collect is not None) != 1:
        raise ConfigError(
            "give one of: a study (`ssfl reproduce table1`), --list, or --collect results"
        )
    if list_:
        _list()
        return
    from ssfl.reproduce import reproduce as run_study  # not before: they take a while
    from ssfl.reproduce.estimate import parse_duration
    from ssfl.reproduce.pages import collect as gather

    if collect is not None:
        page = out or Path("RESULTS.md")
        found = gather(collect, page)
        count = "1 study" if len(found) == 1 else f"{len(found)} studies"
        say(f"{count}: {page}")
        return
    assert study is not None
    out = out or Path("results")
    terminal = Terminal()
    try:
        result = run_study(
            study,
            rounds=rounds,
            seeds=_seeds(seeds),
            budget=None if budget is None else parse_duration(budget),
            out=out,
            settings=settings or [],
            arms=arm or [],
            synthetic_data=synthetic,
            small=small,
            timing=not no_timing,
            dry_run=dry_run,
            watch=terminal,
        )
    except KeyboardInterrupt:
        errors.print("stopped; what was done is saved: the same command goes on with it")
        raise typer.Exit(130) from None
    if not dry_run:
        _show(result)
        say(f"all of it: {out / result.name}")
    if terminal.failures:
        raise typer.Exit(1)


def _seeds(text: str | None) -> int | list[int] | None:
    from ssfl.errors import ConfigError

    if text is None:
        return None
    try:
        if "," in text:
            return [int(part) for part in text.split(",") if part.strip()]
        return int(text)
    except ValueError:
        raise ConfigError(
            f"--seeds {text}: give a number of seeds (3), or the seeds themselves (0,1,2)"
        ) from None


def _list() -> None:
    from rich.table import Table

    from ssfl.commands.console import console

    table = Table(box=None, pad_edge=False)
    for head in ("study", "arms", "small", "what", "repeats"):
        table.add_column(head, justify="right" if head == "arms" else "left")
    for name, study in packaged().items():
        small = "yes" if "small" in study else ""
        arms = str(len(study["arms"]))
        table.add_row(f"[bold]{name}[/]", arms, small, study["title"], study["repeats"])
    console.print(table)
    console.print("small: with --small, it takes minutes on two cores instead of a GPU")


def _show(result: "StudyResult") -> None:
    """The study's table, as in its README.md."""
    from rich.markdown import Markdown

    from ssfl.commands.console import console
    from ssfl.reproduce.pages import table

    if rows := result.rows():
        console.print(f"[bold]{escape(result.study.title)}[/]", highlight=False)
        console.print(Markdown(table(rows, result.study)))
    for one in result.unfinished:
        text = escape(f"{one.arm}, {one.which}: {one.why}")
        console.print(f"[yellow]not done:[/] {text}", highlight=False)


class Terminal:
    """Shows a study as it goes: the plan, a bar for its runs, and each run's own bars."""

    failures = 0
    """Runs that failed."""

    def timing(self, label: str, place: int, total: int) -> None:
        from ssfl.commands.console import errors

        errors.print(f"timing {place + 1} of {total}: {label}", markup=False, highlight=False)

    def plan(self, plan: "Plan") -> None:
        from rich.table import Table

        from ssfl.commands.console import console, note
        from ssfl.display import several
        from ssfl.report.words import duration

        table = Table(title=plan.study.title, title_justify="left", title_style="bold", box=None)
        for head in ("arm", "seed", "rounds", "time", ""):
            table.add_column(head, justify="left" if head in ("arm", "") else "right")
        for job in plan.jobs:
            seconds, state = plan.seconds(job), ""
            done = job.rounds_done() if job.place.exists() else 0
            if plan.is_done(job):
                state = "done"
            elif job.twin is not None:
                part = "Θ " * bool(job.theta_of)
                state = f"{part}trained as {job.twin.parent.parent.name}/{job.twin.name}"
            elif done:
                state = f"{done} rounds done"
            elif (branch := plan.given(job)) is not None:
                state = f"goes on from {branch.rounds} rounds of {branch.job.arm.name}"
            table.add_row(
                escape(job.arm.label),
                str(job.seed),
                str(job.config.server.rounds),
                "" if seconds is None else duration(seconds),
                state,
            )
        console.print(table)
        for text in plan.notes:
            note(text)
        total = plan.total()
        if total is not None and plan.unfinished():
            partial = any(timing.partial for timing in plan.timings.values())
            about = "at least" if plan.at_least else "about"
            left = several(len(plan.unfinished()), "run")
            console.print(
                f"{left}, {about} {duration(total)} on this device"
                + (" (rounds extrapolated from a few clients; evaluations not timed)" * partial),
                highlight=False,
            )

    def begin(self, job: "Job", place: int, total: int) -> Any:
        from ssfl.commands.console import console

        return _study_bars(console, job, place, total)

    @contextmanager
    def evaluation(self, job: "Job") -> Iterator[Any]:
        from ssfl.commands.evaluate import bars, watcher

        with bars() as progress:
            yield watcher(progress)

    def failed(self, job: "Job", why: str) -> None:
        self.failures += 1
        self.say(f"{job.name}: {why}")

    def say(self, text: str) -> None:
        from ssfl.commands.console import say

        say(text)


def _study_bars(console: Any, job: "Job", place: int, total: int) -> Any:
    """A run's bars with one above them for the runs of the study."""
    from ssfl.display import Bars
    from ssfl.run import Run

    class StudyBars(Bars):
        def start(self, run: Run, clients: int, rounds: int, done: int) -> None:
            super().start(run, clients, rounds, done)
            if self._progress is not None:
                label = escape(f"{job.arm.label}, seed {job.seed}")
                self._progress.add_task("runs", total=total, completed=place, figures=label)

    return StudyBars(console)
