"""The page to put before colleagues: one self-contained HTML file per run, or for several."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ssfl.run import Run


def write_report(run: "Run | str | Path") -> Path:
    """Write RUN/report.html and return its path."""
    from ssfl.report.single import write_report as write

    return write(run)


def write_comparison(runs: "Sequence[Run | str | Path]", out: str | Path) -> list[Path]:
    """Write comparison.html, .md and .csv about several runs into the folder `out`."""
    from ssfl.report.comparison import write_comparison as write

    return write(runs, out)
