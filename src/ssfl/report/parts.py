"""The pieces a page is made of: sections, figures, tables, bars, tiles, thumbnails. HTML in, HTML
out; all text from outside is escaped here."""

import base64
import io
import itertools
import re
import time
from collections.abc import Sequence
from html import escape
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from string import Template

import numpy as np
from torch import Tensor

from ssfl.data.decode import printable
from ssfl.report.charts import colour


def page(title: str, lead: str, content: str) -> str:
    """The whole document, style inside, nothing fetched from anywhere: a header with the title and
    what leads into the content, the content, and a footer."""
    folder = resources.files("ssfl") / "report"
    template = Template((folder / "page.html").read_text(encoding="utf-8"))
    style = (folder / "page.css").read_text(encoding="utf-8")
    header = (
        '<header><p class="eyebrow">ssfl · federated self-supervised learning</p>'
        f"<h1>{escape(title)}</h1>{lead}</header>"
    )
    body = header + content + _footer()
    return printable(template.substitute(title=escape(title), style=style, body=body))


def _footer() -> str:
    try:
        number = version("ssfl")
    except PackageNotFoundError:
        number = ""
    return f"<footer>Made by ssfl {number}, {time.strftime('%-d %B %Y')}.</footer>"


def links(content: str) -> str:
    """A link to each `section` of the content."""
    found = re.findall(r'<section id="(.*?)"><h2>(.*?)</h2>', content)
    anchors = "".join(f'<a href="#{id_}">{title}</a>' for id_, title in found)
    return f"<nav>{anchors}</nav>"


def prose(text: str) -> str:
    """Text as HTML: what stands between backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def section(id_: str, title: str, *content: str, intro: str = "") -> str:
    """A part of the page under its own heading; nothing at all where there is no content."""
    inside = "".join(part for part in content if part)
    if not inside:
        return ""
    lead = f'<p class="lead">{escape(intro)}</p>' if intro else ""
    return f'<section id="{id_}"><h2>{escape(title)}</h2>{lead}{inside}</section>'


def figure(
    name: str,
    title: str,
    drawing: str,
    *,
    legend: Sequence[tuple[str, int]] = (),
    levels: Sequence[tuple[str, int]] = (),
    note: str = "",
    of: int | None = None,
) -> str:
    """A drawing with its title above and its legend (of dots, and of broken lines) and note
    below. The legend's colours are of a palette of so many; of its own length, if not said."""
    of = len(legend) if of is None else of
    keys = "".join(f"<li><i {colour(index, of)}></i>{escape(text)}</li>" for text, index in legend)
    keys += "".join(
        f'<li class="{line}"><i class="c{index % 10}"></i>{escape(text)}</li>'
        for (text, index), line in zip(levels, itertools.cycle(("dotted", "dashed")), strict=False)
    )
    below = (f'<ul class="legend">{keys}</ul>' if keys else "") + (
        f"<p>{escape(note)}</p>" if note else ""
    )
    foot = f'<div class="below">{below}</div>' if below else ""
    return (
        f'<figure data-figure="{escape(name)}"><figcaption>{escape(title)}</figcaption>'
        f"{drawing}{foot}</figure>"
    )


def grid(*figures: str, wide: bool = False) -> str:
    """Figures side by side where there is room."""
    inside = "".join(figures)
    return f'<div class="grid{" wide" if wide else ""}">{inside}</div>' if inside else ""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, strong: int = -1) -> str:
    """A table: the first column is words, the others are numbers; one column may stand out."""

    def cell(tag: str, column: int, text: str) -> str:
        classes = ("n" if column else "") + (" strong" if column == strong else "")
        mark = f' class="{classes.strip()}"' if classes.strip() else ""
        return f"<{tag}{mark}>{escape(text)}</{tag}>"

    head = "".join(cell("th", i, text) for i, text in enumerate(heads))
    body = "".join(
        "<tr>" + "".join(cell("td", i, text) for i, text in enumerate(row)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def bars(
    rows: Sequence[tuple[str, str, float, str]], *, most: float, mean: float | None = None
) -> str:
    """Lying bars: (name, aside, value, text) each, on a scale from 0 to `most`."""
    line = "" if mean is None else f'<b class="mean" style="left:{100 * mean / most:.2f}%"></b>'
    body = "".join(
        f"<tr><th>{escape(name)}<small>{escape(aside)}</small></th>"
        f'<td><div class="track"><i class="mark" style="width:{100 * value / most:.2f}%"></i>{line}'
        f'</div></td><td class="n">{escape(text)}</td></tr>'
        for name, aside, value, text in rows
    )
    return f'<table class="bars"><tbody>{body}</tbody></table>'


def shares(parts: Sequence[tuple[str, float, str]]) -> str:
    """One bar cut into (name, size, text) parts."""
    total = sum(size for _, size, _ in parts) or 1
    cut = "".join(
        f'<i class="mark c{i % 10}" style="width:{100 * size / total:.2f}%" '
        f'title="{escape(f"{name}: {text}")}"></i>'
        for i, (name, size, text) in enumerate(parts)
        if size > 0
    )
    return f'<div class="shares">{cut}</div>'


def tiles(items: Sequence[tuple[str, str]]) -> str:
    """A few figures that matter, each with what it is."""
    inside = "".join(
        f"<div><dd>{escape(value)}</dd><dt>{escape(what)}</dt></div>" for value, what in items
    )
    return f'<dl class="tiles">{inside}</dl>'


def thumbnail(pixels: Tensor, alt: str, *, mark: str = "") -> str:
    """An image as an <img> with its bytes inside."""
    from PIL import Image

    array = pixels.cpu().numpy().transpose(1, 2, 0).astype(np.uint8)
    image = Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array[:, :, :3])
    if max(image.size) > 96:
        image.thumbnail((96, 96))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    data = base64.b64encode(buffer.getvalue()).decode()
    classes = f"mark {mark}".strip()
    return (
        f'<img class="{classes}" alt="{escape(alt)}" title="{escape(alt)}" '
        f'src="data:image/png;base64,{data}">'
    )
