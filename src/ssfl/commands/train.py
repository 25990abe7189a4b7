"""`ssfl train`: run an experiment, or go on with one."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ssfl.commands.look import RECIPE


def train(
    recipe: Annotated[str | None, RECIPE] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one option, e.g. --set local.lr=0.03. Repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Run directory (default: runs/NAME).")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with this run from its last checkpoint.")
    ] = None,
    comm: Annotated[str, typer.Option(help="Transport: local, mpi, ray or a plug-in's.")] = "local",
    workers: Annotated[
        int | None, typer.Option(help="Clients side by side (the same as --set device.workers=N).")
    ] = None,
    gpus_per_worker: Annotated[
        float | None, typer.Option(help="Ray: share of a GPU for each worker, e.g. 0.25.")
    ] = None,
    no_report: Annotated[
        bool, typer.Option("--no-report", help="Leave out the page report.html at the end.")
    ] = False,
) -> None:
    """Train one global encoder, and personal ones where the algorithm has them.

    Example: ssfl train demo --set algorithm.name=per-ssfl --set server.rounds=20
    """
    from ssfl import experiment
    from ssfl.comm import join
    from ssfl.commands.console import console, refuse_for_a_resumed_run, say, stop_gracefully
    from ssfl.config import load_config
    from ssfl.display import Bars
    from ssfl.errors import ConfigError
    from ssfl.report import write_report

    if comm == "flower":
        raise ConfigError(
            "Flower is for sites, each with a process of its own: start with `ssfl certs` and "
            "`ssfl serve` (docs/deploying.md)"
        )
    if join(comm) is not None:  # an MPI rank other than the first: its work is done
        return
    if (recipe is None) == (resume is None):
        raise ConfigError(
            "give either a recipe (see `ssfl recipes`) or --resume RUN, e.g. `ssfl train demo`"
        )
    if resume is not None:
        refuse_for_a_resumed_run(
            {
                "--set": settings or None,
                "--out": out,
                "--workers": workers,
                "--gpus-per-worker": gpus_per_worker,
            }
        )
    settings = [*(settings or [])]
    if workers is not None:
        settings.append(f"device.workers={workers}")
    if gpus_per_worker is not None:
        if comm != "ray":
            raise ConfigError("--gpus-per-worker is for --comm ray: leave it out")
        settings.append(f"device.gpus_per_worker={gpus_per_worker}")
    display = Bars(console)
    with stop_gracefully(display, comm, resume):
        if resume is not None:
            run = experiment.resume(resume, comm=comm, display=display)
        else:
            assert recipe is not None
            config = load_config(recipe, settings)
            run = experiment.train(config, out=out, comm=comm, display=display)
        show_final(run.final)
        if not no_report:
            with console.status("drawing the report"):
                page = write_report(run)
            say(f"to look at: {page}")
    say(f"all of it: {run.path}")


FIGURES = {
    "knn_mean": ("kNN, mean over clients", "pixels_knn_mean", "untrained_knn_mean"),
    "knn_weighted": ("kNN, weighted by images", "pixels_knn_weighted", "untrained_knn_weighted"),
    "knn_global": ("kNN of Θ, all images", "pixels_knn_global", "untrained_knn_global"),
}


def show_final(final: dict[str, Any]) -> None:
    """The last figures as a table, with the baselines where they were measured; a coordinator,
    who has no images, has the mean of what its sites measured."""
    from rich.table import Table

    from ssfl.commands.console import console
    from ssfl.display import several
    from ssfl.evaluation.in_words import HEALTH
    from ssfl.tracking import client_mean

    after = f"after {several(final['rounds'], 'round')}, {final.get('seconds', 0):.0f} s"
    table = Table(title=after)
    table.add_column("accuracy", justify="left")
    for column in ("raw pixels", "before training", "trained"):
        table.add_column(column, justify="right")
    for key, (label, pixels, untrained) in FIGURES.items():
        if key in final:
            values = (final.get(pixels), final.get(untrained), final[key])
            table.add_row(label, *("" if v is None else f"{v:.3f}" for v in values))
    if table.row_count:
        console.print(table)
    else:
        console.print(after, highlight=False)
    figures = [] if final.get("loss") is None else [f"loss {final['loss']:.4f}"]
    mean = ""
    for key in ("std_ratio", "effective_rank"):
        value, figure = final.get(key), HEALTH[key]
        if value is None and (value := client_mean(final, key)) is not None:
            mean = " (mean over clients)"
        if value is not None:
            figures.append(f"{figure.title.lower()} {value:.{figure.digits}f}")
    console.print("  ".join(figures) + mean, highlight=False)
