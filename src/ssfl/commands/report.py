"""`ssfl report` and `ssfl compare`: pages to look at."""

from pathlib import Path
from typing import Annotated

import typer


def report(run: Annotated[Path, typer.Argument(help="A run directory.")]) -> None:
    """Write RUN/report.html: one page with everything worth looking at, for any browser.

    Example: ssfl report runs/demo
    """
    from ssfl.commands.console import console, say
    from ssfl.report import write_report

    with console.status("drawing"):
        path = write_report(run)
    say(f"saved {path}")


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two or more run directories.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the pages go.")] = Path(
        "comparison"
    ),
) -> None:
    """Put several runs side by side: comparison.html, with tables in Markdown and CSV.

    Example: ssfl compare runs/global runs/per-ssfl -o comparison
    """
    from ssfl.commands.console import say
    from ssfl.report import write_comparison

    paths = write_comparison(list(runs), out)
    markdown = next(path for path in paths if path.suffix == ".md")
    typer.echo(markdown.read_text(encoding="utf-8"))
    for path in paths:
        say(f"saved {path}")
