"""The paper's two pictures of a partition: samples per client, and labels per client.

With a few clients each is shown; with many, the first becomes a histogram of sizes and the
second lays the clients side by side without gaps, ordered by their most common class.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssfl.data.federated import FederatedData

FEW = 60
"""Up to this many clients are drawn one by one."""
INK = "#22313f"
BAR = "#3d7ea6"
MEAN = "#d1603d"
STYLE: Any = {
    "font.size": 11,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "figure.titlesize": 13,
    "figure.titleweight": "bold",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.parse_math": False,  # a folder's name may well hold a dollar sign or two
}


def save_partition_pictures(data: FederatedData, folder: Path) -> list[Path]:
    """Draw `partition_samples.png` and, where there are labels, `partition_labels.png`."""
    paths = [folder / "partition_samples.png"]
    _samples(data, paths[0])
    counts = data.class_counts()
    if counts is not None:
        paths.append(folder / "partition_labels.png")
        _labels(data, counts, paths[1])
    return paths


@contextmanager
def picture(
    path: Path, width: float, height: float, *, columns: int = 1, style: Any = STYLE
) -> Iterator[Any]:
    """Axes that are saved to `path`; drawn without a display, whatever the user's settings."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure.subplots(1, columns)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Of letters in a name that the font lacks, one by one: the reader sees an empty box.
        with warnings.catch_warnings(action="ignore"):
            figure.savefig(path, dpi=150)


def _samples(data: FederatedData, path: Path) -> None:
    sizes = data.sizes()
    few = len(sizes) <= FEW
    width = float(np.clip(0.32 * len(sizes), 6.0, 14.0)) if few else 8.0
    with picture(path, width, 4.0) as axes:
        if few:
            bars = axes.bar(range(len(sizes)), sizes, color=BAR, width=0.72)
            if len(sizes) <= 20:
                axes.bar_label(bars, [f"{size:,}" for size in sizes], fontsize=9, padding=2)
            _name_clients(axes, data)
            axes.set(xlabel="client", ylabel="training images", xlim=(-0.7, len(sizes) - 0.3))
            axes.axhline(sizes.mean(), color=MEAN, linewidth=1.2, linestyle="--")
            _remark(axes, f"mean {sizes.mean():,.0f}")
        else:
            axes.hist(sizes, bins=_bins(sizes), color=BAR, edgecolor="white", linewidth=0.6)
            axes.set(xlabel="training images per client", ylabel="clients")
            axes.axvline(sizes.mean(), color=MEAN, linewidth=1.2, linestyle="--")
            _remark(
                axes,
                f"mean {sizes.mean():,.0f}, smallest {sizes.min():,}, largest {sizes.max():,}",
            )
        axes.set_title(f"{data.dataset.name}: {sizes.sum():,} images over {len(sizes):,} clients")
        axes.yaxis.set_major_formatter("{x:,.0f}")


def _bins(sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Whole-numbered bins: an image is not divided."""
    step = max(1, int(np.ceil((sizes.max() - sizes.min() + 1) / 40)))
    return np.arange(sizes.min(), sizes.max() + step + 1, step) - 0.5


def _labels(data: FederatedData, counts: NDArray[np.int64], path: Path) -> None:
    """The heat map: a column per client, a row per class, deeper where there is more."""
    clients, classes = counts.shape
    few = clients <= FEW
    if not few:
        counts = counts[np.lexsort((-counts.max(axis=1), counts.argmax(axis=1)))]
    width = float(np.clip(0.42 * clients + 2.0, 6.0, 14.0)) if few else 9.0
    height = float(np.clip(0.36 * classes + 1.4, 3.2, 9.0))
    with picture(path, width, height) as axes:
        # Among very many cells one extreme must not make all others pale.
        top = counts.max() if few else max(1.0, float(np.percentile(counts, 99.5)))
        image = axes.imshow(
            counts.T, cmap="Blues", aspect="auto", interpolation="nearest", vmin=0, vmax=top
        )
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        if few:
            _name_clients(axes, data)
            axes.set_xlabel("client")
            _gaps(axes, clients, classes)
            if clients <= 12 and classes <= 12:
                _write_counts(axes, counts)
        else:
            axes.set_xticks([])  # places in this order would be taken for the clients' ids
            axes.set_xlabel(f"{clients:,} clients, ordered by their most common class")
        _name_classes(axes, data, classes)
        axes.set_title(f"{data.dataset.name}: labels per client")
        more = "max" if counts.max() > top else "neither"
        bar = axes.figure.colorbar(
            image, ax=axes, pad=0.02, fraction=0.05, extend=more, format="{x:,.0f}"
        )
        bar.outline.set_visible(False)
        bar.set_label("training images")


def _remark(axes: Any, text: str) -> None:
    """What the dashed line is, above the plot where no bar can hide it."""
    axes.text(
        1.0, 1.02, f"– – {text}", transform=axes.transAxes, color=MEAN, ha="right", fontsize=9
    )


def _gaps(axes: Any, clients: int, classes: int) -> None:
    """Thin white lines between cells."""
    axes.set_xticks(np.arange(clients + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(classes + 1) - 0.5, minor=True)
    if classes <= 40:
        axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="minor", length=0)


def _write_counts(axes: Any, counts: NDArray[np.int64]) -> None:
    for (client, label), count in np.ndenumerate(counts):
        if count:
            dark = count > 0.55 * counts.max()
            axes.text(
                client,
                label,
                f"{count:,}",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if dark else INK,
            )


def _name_clients(axes: Any, data: FederatedData) -> None:
    names = data.names or tuple(str(k) for k in data.clients())
    step = max(1, -(-len(names) // 30))
    long = max(len(name) for name in names) > 4
    axes.set_xticks(range(0, len(names), step))
    axes.set_xticklabels(
        names[::step], rotation=45 if long else 0, ha="right" if long else "center"
    )


def _name_classes(axes: Any, data: FederatedData, classes: int) -> None:
    names = data.dataset.classes
    if classes <= 25:
        axes.set_yticks(range(classes))
        axes.set_yticklabels(names or range(classes))
    else:
        axes.set_ylabel("class")
