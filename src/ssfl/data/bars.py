"""A progress bar for long reads, or nothing at all when nobody watches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]


@contextmanager
def bar(
    title: str, total: int | None, shown: bool, *, done: int = 0, unit: str = ""
) -> Iterator[Advance]:
    """Yields a function that moves the bar on; `unit` "bytes" shows sizes and speed."""
    if not shown:
        yield lambda _: None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts: list[ProgressColumn] = (
        [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn()]
    )
    columns = [TextColumn("{task.description}"), BarColumn(), *counts, TimeRemainingColumn()]
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task(title, total=total, completed=done)
        yield lambda amount: progress.advance(task, amount)
