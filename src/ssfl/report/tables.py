"""Tables as text, for programs and for people: CSV and Markdown."""

import csv
import io
from collections.abc import Mapping, Sequence


def csv_text(lines: Sequence[Mapping[str, object]]) -> str:
    """Lines as CSV, with a column for every key that any of them has, in order of appearance."""
    columns = list(dict.fromkeys(key for line in lines for key in line))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells, the second of dashes, as Markdown; a bar inside a cell stays inside it."""
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)
