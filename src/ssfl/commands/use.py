"""`ssfl export`, `ssfl embed` and `ssfl classify`: using what was learned."""

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from torch import Tensor

Source = Annotated[Path, typer.Argument(help="A run directory, or an exported encoder.")]
Client = Annotated[
    int | None, typer.Option(help="This client's encoder, in place of the shared one.")
]
Files = Annotated[list[Path], typer.Argument(help="Image files, or folders of them.")]
Skip = Annotated[
    bool, typer.Option("--skip-broken", help="Leave out images that cannot be read, and say so.")
]

Window = Annotated[
    tuple[float, float] | None,
    typer.Option(
        metavar="BLACK WHITE",
        help="The values that are black and white in grey files of more than 8 bits, where they "
        "are others than in the encoder's own, e.g. 0 4095.",
    ),
]


def export(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")],
    client: Client = None,
    format: Annotated[
        str | None, typer.Option(help="torch, onnx or safetensors (else the suffix decides).")
    ] = None,
) -> None:
    """Write an encoder to one file, to be used anywhere.

    It takes N×C×S×S images in RGB or grey, floats from 0 to 1 (normalisation is inside), of the
    size that it was trained on, and gives N×d features. `ssfl.load_encoder` reads torch and
    safetensors files, onnxruntime ONNX ones.

    Example: ssfl export runs/demo --client 3 -o encoder.onnx
    """
    from ssfl.commands.console import say
    from ssfl.use import export_encoder

    path = export_encoder(run, out, client=client, format=format)  # type: ignore[arg-type]
    say(f"saved {path}")


def embed(
    run: Source,
    images: Files,
    out: Annotated[Path, typer.Option("--out", "-o", help="features.npy or features.parquet.")],
    client: Client = None,
    window: Window = None,
    skip_broken: Skip = False,
) -> None:
    """Turn images into features. Beside NAME.npy, the images' names go into NAME.files.csv.

    Example: ssfl embed runs/demo photos/ -o features.npy
    """
    from ssfl.commands.console import say
    from ssfl.errors import ConfigError
    from ssfl.files import replacing, write_bytes
    from ssfl.use import find_images

    if out.suffix not in (".npy", ".parquet"):
        raise ConfigError(f"{out}: end the name in .npy or .parquet")
    if out.suffix == ".parquet":
        _need_pyarrow()
    files = find_images(images)
    features, broken = _features(run, client, window, files, skip_broken)
    files = [file for file in files if file not in broken]
    if out.suffix == ".npy":
        import numpy as np

        with replacing(out) as target:
            np.save(target, features.numpy())
        # Not NAME.csv, which may well hold the labels of the same images.
        names = _csv([["file"], *[[str(file)] for file in files]])
        write_bytes(out.with_suffix(".files.csv"), names)
    else:
        _write_parquet(out, files, features)
    count, width = features.shape
    say(f"saved {out}: {count:,} images × {width} features")


def classify(
    run: Source,
    images: Files,
    labels: Annotated[
        Path,
        typer.Option(
            help="A CSV of file,label for a few images. Files are looked for beside the CSV, here "
            "and in IMAGES."
        ),
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write a CSV here.")] = None,
    client: Client = None,
    window: Window = None,
    skip_broken: Skip = False,
) -> None:
    """Classify images, given the labels of a few: a linear classifier on the encoder's features.

    Example: ssfl classify runs/demo --labels few.csv photos/ -o predictions.csv
    """
    from ssfl.commands.console import errors, say
    from ssfl.data.decode import printable
    from ssfl.use import find_images, fit_classifier
    from ssfl.use.classify import read_labels

    files = find_images(images)
    shown, names = read_labels(labels, [folder for folder in images if folder.is_dir()])
    features, broken = _features(run, client, window, [*shown, *files], skip_broken)
    known = [pair for pair in zip(shown, names, strict=True) if pair[0] not in broken]
    shown, names = [file for file, _ in known], [name for _, name in known]
    files = [file for file in files if file not in broken]
    classifier = fit_classifier(features[: len(shown)], names)
    chances = classifier.probabilities(features[len(shown) :])
    best, which = chances.max(1)
    header = ["file", "label", "probability", *(f"p_{name}" for name in classifier.classes)]
    rows = [
        [str(file), classifier.classes[w], f"{p:.4f}", *(f"{c:.4f}" for c in row)]
        for file, w, p, row in zip(
            files, which.tolist(), best.tolist(), chances.tolist(), strict=True
        )
    ]
    if out is None:
        for row in rows:
            typer.echo(printable(f"{row[0]}\t{row[1]}\t{row[2]}"))
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(_csv([header, *rows]))
        say(f"saved {out}: {len(rows):,} images")
    expected = classifier.expected
    guess = (
        f"cross-validated accuracy on them is {expected:.0%}"
        if expected is not None
        else "too few to say how good it is (give two or more of each class)"
    )
    errors.print(
        f"fitted to {len(shown)} labels of {len(classifier.classes)} classes; {guess}",
        highlight=False,
    )


def _features(
    source: Path,
    client: int | None,
    window: tuple[float, float] | None,
    files: list[Path],
    skip_broken: bool,
) -> tuple["Tensor", set[Path]]:
    """Features of the files, but for those that were left out because they cannot be read."""
    from rich.progress import Progress

    from ssfl.commands.console import errors
    from ssfl.data.sources.folder import FolderOptions
    from ssfl.federation.engine import pick_device
    from ssfl.section import validated
    from ssfl.use import embed as through
    from ssfl.use import load_encoder

    encoder = load_encoder(source, client).to(pick_device("auto"))
    if window is not None:
        told = validated(FolderOptions, {"window": window}, prefix="--")
        encoder.reading = replace(encoder.reading, window=told.window)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("images", total=len(files))
        broken: list[Path] | None = [] if skip_broken else None
        features = through(
            encoder, files, progress=lambda n: progress.advance(task, n), broken=broken
        )
    for file in broken or ():
        errors.print(
            f"left out, cannot be read: {file}", markup=False, highlight=False, soft_wrap=True
        )
    return features, set(broken or ())


def _need_pyarrow() -> None:
    from ssfl.errors import ConfigError

    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise ConfigError(
            "writing Parquet needs pyarrow: `pip install 'ssfl[parquet]'`, or write .npy"
        ) from None


def _write_parquet(out: Path, files: list[Path], features: "Tensor") -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from ssfl.data.decode import printable
    from ssfl.files import replacing

    flat = pa.array(features.numpy().reshape(-1))
    column = pa.FixedSizeListArray.from_arrays(flat, features.shape[1])
    table = pa.table({"file": [printable(str(file)) for file in files], "features": column})
    with replacing(out) as target:
        pq.write_table(table, target)


def _csv(rows: list[list[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    # Names of files that are no text come out as the bytes they are.
    return text.getvalue().encode("utf-8", "surrogateescape")
