"""The parts of the page that need the images: who holds what, and what the encoder makes of it."""

from collections.abc import Sequence

from ssfl.evaluation.spread import spread
from ssfl.protocols.bench import GLOBAL, Bench
from ssfl.report import parts
from ssfl.report.charts import columns_chart, matrix, scatter
from ssfl.report.samples import Samples, sample

MOST = 240
"""Clients that are drawn side by side, at most: more would lie on top of each other."""


def partition(bench: Bench) -> str:
    """How many images each client holds, and of which classes."""
    data = bench.data
    everyone, sizes = data.clients(), data.sizes()
    shown = spread(len(everyone), MOST).tolist()
    names = [str(everyone[place]) for place in shown]
    low, high = sizes.min(), sizes.max()
    span = f"{low:,}" if low == high else f"from {low:,} to {high:,}"
    some = len(shown) < len(everyone)
    those = f" Drawn are {len(shown)} of {len(everyone):,} clients, evenly spaced." if some else ""
    figures = [
        parts.figure(
            "sizes",
            "Training images per client",
            columns_chart(sizes[shown].tolist(), names, "Training images per client"),
            note=f"{sizes.sum():,} images; {span} per client.{those}",
        )
    ]
    counts = data.class_counts()
    if counts is not None:
        classes = data.dataset.classes or [str(c) for c in range(counts.shape[1])]
        label = "Classes held by each client"
        drawing = matrix(counts[shown].T.tolist(), list(classes), names, label)
        figures.append(
            parts.figure(
                "classes",
                label,
                drawing,
                note=f"Across: clients. Stronger colour: more images; hover for the number.{those}",
            )
        )
    return parts.section("partition", "Who holds what", parts.grid(*figures, wide=True))


def features(bench: Bench) -> str:
    """A map of the features and a few nearest neighbours."""
    found = sample(bench)
    if found is None:
        words = "<p>Training has diverged: features are not finite, and nothing can be drawn.</p>"
        return parts.section("features", "What the encoder sees", words)
    owner = "" if found.whose == GLOBAL else bench.data.title(found.whose)
    who = f"client {owner}'s encoder" if owner else "the shared encoder"
    figures = []
    if found.labels is not None:
        classes = bench.data.dataset.classes or [str(c) for c in range(max(found.labels) + 1)]
        drawing = scatter(found.place, found.labels, classes, "Features by class")
        figures.append(_map("tsne_label", "class", drawing, classes))
    place = {client: place for place, client in enumerate(bench.data.clients())}
    clients = [f"client {bench.data.title(client)}" for client in place]
    drawing = scatter(
        found.place, [place[client] for client in found.clients], clients, "Features by client"
    )
    figures.append(_map("tsne_client", "client", drawing, clients))
    return parts.section(
        "features",
        "What the encoder sees",
        parts.grid(*figures, wide=True),
        _neighbours(found, bench),
        intro=f"A t-SNE map of {len(found.place):,} training images as {who} sees them, "
        "and the nearest training images of a few others.",
    )


def _map(name: str, what: str, drawing: str, names: Sequence[str]) -> str:
    """With a legend, where its colours can still be told apart."""
    few = len(names) <= 24
    return parts.figure(
        name,
        f"Coloured by {what}",
        drawing,
        legend=[(title, i) for i, title in enumerate(names)] if few else [],
        note="" if few else f"{len(names):,} colours; hover over a point for its {what}.",
    )


def _neighbours(found: Samples, bench: Bench) -> str:
    classes = bench.data.dataset.classes

    def named(label: int) -> str:
        return classes[label] if classes else f"class {label}"

    rows = []
    for i, nearest in enumerate(found.neighbours):
        own = found.query_labels[i] if found.query_labels is not None else None
        about = "query" if own is None else f"query: {named(own)}"
        images = [parts.thumbnail(found.queries[i], about, mark="query")]
        for row in nearest:
            label = found.labels[row] if found.labels is not None else None
            about = f"held by client {bench.data.title(found.clients[row])}"
            if label is not None:
                about = f"{named(label)}, {about}"
            other = own is not None and label != own
            images.append(parts.thumbnail(found.pixels[row], about, mark="other" if other else ""))
        rows.append("<div>" + "".join(images) + "</div>")
    note = "Left, framed: the query. Then its nearest neighbours, nearest first."
    if found.query_labels is not None:
        note += " A red frame marks another class."
    return parts.figure(
        "neighbours",
        "Nearest neighbours",
        f'<div class="neighbours">{"".join(rows)}</div>',
        note=note,
    )
