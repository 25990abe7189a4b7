"""A run as it goes, for people: bars for rounds and clients, loss, kNN, time left."""

import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from ssfl.federation.messages import Reply
from ssfl.run import Run
from ssfl.tracking import Row, client_mean

LINES = 20
"""Lines that a run prints where there is no terminal to draw bars on."""
NARROW = 64
"""Columns below which figures are worth more than the bars themselves."""


def several(count: int, what: str) -> str:
    """1 round, 2 rounds."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


class Bars:
    """Progress bars on a terminal; a line every so often elsewhere."""

    def __init__(self, console: Console) -> None:
        self.folder: Path | None = None  # of the run, once it has begun
        self._console = console
        self._progress: Progress | None = None
        self._rounds = self._clients = TaskID(0)
        self._figures: dict[str, float] = {}
        self._total = self._done = self._told = 0  # rounds there are, were played, had their line
        self._judged: int | None = None  # rounds played at the last evaluation

    def start(self, run: Run, clients: int, rounds: int, done: int) -> None:
        config, facts, self.folder = run.config, run.facts, run.path
        self._total, self._done, self._told = rounds, done, done
        images = f"{facts['train_images']:,} images of " if facts["train_images"] else "images at "
        self._console.print(
            f"[bold]{config.name}[/]: {config.algorithm.name} with {config.ssl.method} on "
            f"{images}{escape(facts['data'])}, {several(clients, 'client')}, "
            f"{several(rounds, 'round')}" + (f" ({done} done)" if done else "")
        )
        self._console.print(
            f"run directory [cyan]{escape(str(run.path))}[/]", highlight=False, soft_wrap=True
        )
        if not self._console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("{task.description}", justify="right"),
            *([BarColumn(bar_width=None)] if self._console.width >= NARROW else []),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            expand=True,
        )
        self._rounds = self._progress.add_task("rounds", total=rounds, completed=done, figures="")
        self._clients = self._progress.add_task("clients", total=None, figures="")
        self._progress.start()

    def begin_round(self, round_: int, clients: int) -> None:
        self._tell()
        if self._progress is not None:
            self._progress.reset(self._clients, total=clients)

    def reply(self, reply: Reply) -> None:
        if self._progress is None:
            return
        self._progress.advance(self._clients, len(reply.clients))
        if "loss" in reply.metrics:
            figures = f"client {reply.client} loss {reply.metrics['loss']:.3f}"
            self._progress.update(self._clients, figures=figures)

    def row(self, row: Row) -> None:
        if row["kind"] == "evaluation":  # a figure that it lacks is not the last one's
            self._figures = {k: v for k, v in self._figures.items() if k == "loss"}
        for name in ("loss", "knn_global", "knn_mean", "effective_rank"):
            if row.get(name) is not None:
                self._figures[name] = row[name]
        if row["kind"] == "round":
            self._done = row["round"] + 1
        elif row["kind"] == "evaluation":
            self._judged = row["round"]
            rank = client_mean(row, "effective_rank")
            if row.get("effective_rank") is None and rank is not None:  # the images are at sites
                self._figures["effective_rank"] = rank
        if self._progress is not None:
            self._progress.update(self._rounds, completed=self._done, figures=self._summary())

    def _tell(self) -> None:
        """Where there are no bars, a line about a round that is over: by now it has been judged."""
        done, total = self._done, self._total
        if self._progress is not None or done == self._told:
            return
        self._told = done
        if done % max(1, total // LINES) == 0 or done == total:
            clock, judged = time.strftime("%H:%M:%S"), self._judged
            earlier = f" (round {judged})" if self._indicator() and judged != done else ""
            self._console.print(f"{clock} round {done}/{total} {self._summary()}{earlier}")

    def _summary(self) -> str:
        loss = f"loss {self._figures['loss']:.3f}" if "loss" in self._figures else ""
        return " ".join(part for part in (loss, self._indicator()) if part)

    def _indicator(self) -> str:
        """What the last evaluation says, if there was one: kNN, or the rank without labels."""
        knn = self._figures.get("knn_mean", self._figures.get("knn_global"))
        if knn is not None:
            return f"kNN {knn:.3f}"
        rank = self._figures.get("effective_rank")
        return "" if rank is None else f"rank {rank:.0f}"

    def note(self, text: str) -> None:
        self._console.print(f"[yellow]note:[/] {escape(text)}", highlight=False)

    def stop(self) -> None:
        self._tell()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
