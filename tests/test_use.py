"""Taking encoders away: files give back the same features, and a few labels make a classifier."""

import csv
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from typer.testing import CliRunner

from ssfl.commands import use as commands
from ssfl.data.decode import Reading
from ssfl.errors import CheckpointError, ConfigError, DataError
from ssfl.experiment import train
from ssfl.protocols.bench import Bench
from ssfl.run import Run
from ssfl.use import embed, export_encoder, find_images, fit_classifier, load_encoder
from ssfl.use.classify import read_labels
from tiny import tiny

app = typer.Typer(pretty_exceptions_enable=False)
for command in (commands.export, commands.embed, commands.classify):
    app.command()(command)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tiny(algorithm={"name": "per-ssfl"}), out=tmp_path_factory.mktemp("use") / "run")


@pytest.fixture
def photos(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """Digits as image files, ten of each class or so, and their labels."""
    digits = load_digits()
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(100):
        grey = np.rint(digits.images[i] * 255 / 16).astype(np.uint8)
        Image.fromarray(grey).save(folder / f"{i:03d}.png")
    return folder, digits.target[:100]


def pixels(n: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (n, 1, 8, 8), dtype=torch.uint8, generator=generator)


def call(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("client", [None, 2])
def test_an_exported_encoder_gives_the_features_of_the_run(
    run: Run, tmp_path: Path, suffix: str, client: int | None
) -> None:
    path = export_encoder(run, tmp_path / f"encoder.{suffix}", client=client)
    expected = (run.global_encoder() if client is None else run.personal_encoder(client))(pixels())
    assert torch.allclose(load_encoder(path)(pixels()), expected, atol=1e-6)
    assert torch.allclose(load_encoder(run.path, client)(pixels()), expected, atol=1e-6)


def test_a_network_without_any_statistics_is_trained_judged_and_exported(tmp_path: Path) -> None:
    config = tiny(model={"norm": "group"}, ssl={"method": "supervised"})
    run = train(config, out=tmp_path / "run")
    assert not any("running_" in name for name in run.global_encoder().state_dict())
    assert run.final["epsilon_share"] == 0
    encoder = load_encoder(export_encoder(run, tmp_path / "encoder.safetensors"))
    assert torch.allclose(encoder(pixels()), run.global_encoder()(pixels()), atol=1e-6)


def test_a_format_that_was_asked_for_goes_over_the_name(run: Run, tmp_path: Path) -> None:
    for format_ in ("torch", "safetensors"):
        path = export_encoder(run, tmp_path / "encoder.bin", format=format_)
        expected = run.global_encoder()(pixels())
        assert torch.allclose(load_encoder(path)(pixels()), expected, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.int64, torch.float32, torch.float64])
def test_an_encoder_takes_images_of_any_kind_of_number(run: Run, kind: torch.dtype) -> None:
    images = pixels().to(kind) / 255 if kind.is_floating_point else pixels().to(kind)
    encoder = load_encoder(run)
    torch.testing.assert_close(encoder(images), encoder(pixels()))


def test_a_clients_encoder_is_not_the_shared_one(run: Run) -> None:
    assert not torch.allclose(load_encoder(run, 2)(pixels()), load_encoder(run)(pixels()))


def test_where_nothing_is_shared_an_encoder_is_a_clients(tmp_path: Path) -> None:
    run = train(tiny(algorithm={"name": "local-only"}, server={"rounds": 1}), out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"Θ is as it began: choose a client's, e\.g\. --client"):
        export_encoder(run, tmp_path / "encoder.pt")
    assert torch.equal(load_encoder(run, client=1)(pixels()), run.personal_encoder(1)(pixels()))


def test_the_shared_encoder_of_fedbn_comes_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = train(tiny(local={"batch_norm": "fedbn"}, server={"rounds": 1}), out=tmp_path / "run")
    load_encoder(run, client=1)
    assert "untrained" not in caplog.text
    load_encoder(run)
    assert "the shared encoder's batch norms are untrained" in caplog.text


def test_an_adapted_encoder_is_the_one_its_client_is_judged_by(tmp_path: Path) -> None:
    run = train(tiny(algorithm={"name": "la-ssfl"}), out=tmp_path / "run")
    loaded = load_encoder(run, 1)
    judged = Bench(run).features_of(1, pixels())
    assert torch.allclose(loaded(pixels()), judged, atol=1e-5)
    assert not torch.allclose(loaded(pixels()), run.global_encoder()(pixels()))


def test_a_client_that_was_never_drawn_has_the_encoder_it_is_judged_by(tmp_path: Path) -> None:
    config = tiny(algorithm={"name": "per-ssfl"}, server={"rounds": 1, "clients_per_round": 1})
    run = train(config, out=tmp_path / "run")
    (drawn,) = run.store.clients()
    assert not torch.allclose(load_encoder(run, drawn)(pixels()), load_encoder(run)(pixels()))
    for client in set(run.clients) - {drawn}:
        judged = Bench(run).features_of(client, pixels())
        assert torch.allclose(load_encoder(run, client)(pixels()), judged, atol=1e-5)
    with pytest.raises(ConfigError, match="there is no client 4"):
        run.personal_encoder(4)
    call("export", run.path, "--client", client, "-o", tmp_path / "encoder.pt")


def test_onnx_equals_torch_for_any_number_of_images(run: Run, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    path = export_encoder(run, tmp_path / "encoder.onnx", client=1)
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for n in (1, 2, 7):
        floats = pixels(n).float() / 255
        (theirs,) = session.run(None, {"images": floats.numpy()})
        np.testing.assert_allclose(theirs, run.personal_encoder(1)(floats), atol=1e-5)
    assert list(tmp_path.iterdir()) == [path]


class Trap:
    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("raise SystemExit('unpickled')",)


@pytest.mark.parametrize("name", ["trap.pt", "trap.safetensors"])
def test_nothing_is_unpickled(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(
        pickle.dumps({"tensors": Trap(), "ssfl_encoder": "{}"}, protocol=2)
    )
    with pytest.raises(CheckpointError):
        load_encoder(tmp_path / name)


def test_files_that_are_no_encoders_are_told_apart(run: Run, tmp_path: Path) -> None:
    torch.save({"weights": torch.zeros(2)}, tmp_path / "other.pt")
    (tmp_path / "notes.txt").write_text("no encoder")
    for other in ("other.pt", "notes.txt"):
        with pytest.raises(CheckpointError, match="not an encoder exported by ssfl"):
            load_encoder(tmp_path / other)
    with pytest.raises(CheckpointError, match="there is no run directory or encoder file"):
        load_encoder(tmp_path / "missing")
    with pytest.raises(ConfigError, match="there is no client 9: this run's are 0 to 3"):
        export_encoder(run, tmp_path / "e.pt", client=9)
    with pytest.raises(ConfigError, match="--format torch, onnx or safetensors"):
        export_encoder(run, tmp_path / "encoder.bin")


def test_embedding_files_gives_their_features_in_order(
    run: Run, photos: tuple[Path, np.ndarray], tmp_path: Path
) -> None:
    folder, _ = photos
    call("embed", run.path, folder, "-o", tmp_path / "features.npy", "--client", 3)
    features = np.load(tmp_path / "features.npy")
    names = (tmp_path / "features.files.csv").read_text().split()
    assert names == ["file", *(str(path) for path in sorted(folder.iterdir()))]
    raw = np.stack([np.asarray(Image.open(name)) for name in names[1:]])
    direct = run.personal_encoder(3)(torch.from_numpy(raw).unsqueeze(1))
    np.testing.assert_allclose(features, direct, atol=1e-5)


def test_one_path_is_as_good_as_several(run: Run, photos: tuple[Path, np.ndarray]) -> None:
    folder, _ = photos
    files = sorted(folder.iterdir())
    assert find_images(str(folder)) == find_images(folder) == find_images([folder]) == files
    encoder = load_encoder(run)
    for one in (files[3], str(files[3])):
        assert torch.equal(embed(encoder, one), embed(encoder, [files[3]]))


@pytest.mark.parametrize(
    ("name", "words"), [("", "it is a folder"), ("none.png", "there is no such file")]
)
def test_what_is_no_file_is_not_called_a_broken_image(
    run: Run, photos: tuple[Path, np.ndarray], name: str, words: str
) -> None:
    with pytest.raises(DataError, match=rf"the first is \S+ \({words}\)"):
        embed(load_encoder(run), photos[0] / name)


def test_a_file_whose_name_is_no_text_is_named_by_its_bytes(
    run: Run, photos: tuple[Path, np.ndarray], tmp_path: Path
) -> None:
    folder, labels = photos
    (folder / "000.png").rename(os.fsdecode(os.fsencode(folder) + b"/\xe9.png"))
    call("embed", run.path, folder, "-o", tmp_path / "features.npy")
    assert b"/\xe9.png\r\n" in (tmp_path / "features.files.csv").read_bytes()
    few = tmp_path / "few.csv"
    few.write_text("".join(f"{i:03d}.png,{labels[i]}\n" for i in range(1, 60)))
    assert "/\ufffd.png\t" in call("classify", run.path, folder, "--labels", few)


def test_embedding_leaves_a_file_of_labels_alone(
    run: Run, photos: tuple[Path, np.ndarray], tmp_path: Path
) -> None:
    (tmp_path / "few.csv").write_text("file,label\n")
    call("embed", run.path, photos[0], "-o", tmp_path / "few.npy")
    assert (tmp_path / "few.csv").read_text() == "file,label\n"


def test_files_are_brought_to_size_as_in_training(tmp_path: Path) -> None:
    folder = tmp_path / "wide"
    folder.mkdir()
    for number in range(8):
        wide = np.random.default_rng(number).integers(0, 256, (8, 32, 3), dtype=np.uint8)
        Image.fromarray(wide).save(folder / f"{number}.png")
    source = {"source": "folder", "path": folder, "image_size": 8, "fit": "squash"}
    run = train(tiny(data=source, server={"rounds": 1}, local={"batch": 4}), out=tmp_path / "run")
    exported = export_encoder(run, tmp_path / "encoder.safetensors")
    files = find_images([folder])
    squashed = [np.asarray(Image.open(f).resize((8, 8), Image.Resampling.BILINEAR)) for f in files]
    seen = torch.from_numpy(np.stack(squashed)).permute(0, 3, 1, 2).contiguous()
    encoders = (run.global_encoder(), load_encoder(run), load_encoder(exported))
    expected = encoders[0](seen)
    for encoder in encoders:
        assert torch.allclose(embed(encoder, files), expected, atol=1e-5)


@pytest.mark.parametrize("client", [None, 2])
def test_an_encoder_holds_its_own_tensors_and_nothing_else(run: Run, client: int | None) -> None:
    encoder = load_encoder(run, client=client)
    for tensor in (*encoder.parameters(), *encoder.buffers()):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.grad is None


def test_an_encoder_that_has_diverged_gives_no_features(
    run: Run, photos: tuple[Path, np.ndarray]
) -> None:
    encoder = load_encoder(run)
    next(encoder.parameters()).fill_(float("nan"))
    for images in (pixels(), find_images([photos[0]])):
        with pytest.raises(CheckpointError, match="not finite, for its training has diverged"):
            embed(encoder, images)


def test_embedding_in_batches_changes_nothing(run: Run, photos: tuple[Path, np.ndarray]) -> None:
    files, encoder = find_images([photos[0]]), load_encoder(run)
    assert torch.allclose(embed(encoder, files, batch=7), embed(encoder, files), atol=1e-6)


def test_parquet_holds_names_and_features_or_says_what_is_missing(
    run: Run, photos: tuple[Path, np.ndarray], tmp_path: Path
) -> None:
    out = tmp_path / "features.parquet"
    try:
        import pyarrow.parquet as pq
    except ImportError:
        with pytest.raises(ConfigError, match="needs pyarrow"):
            call("embed", run.path, photos[0], "-o", out)
        return
    call("embed", run.path, photos[0], "-o", out)
    table = pq.read_table(out).to_pydict()
    assert len(table["file"]) == 100
    np.testing.assert_allclose(
        table["features"], embed(load_encoder(run), find_images([photos[0]])), atol=1e-6
    )


def test_a_handful_of_labels_classifies_the_rest(
    run: Run, photos: tuple[Path, np.ndarray], tmp_path: Path
) -> None:
    folder, labels = photos
    few, out = tmp_path / "few.csv", tmp_path / "predictions.csv"
    lines = [f"photos/{i:03d}.png,digit {labels[i]}" for i in range(60)]
    few.write_text("\n".join(["file,label", *lines]))
    printed = call("classify", run.path, "--labels", few, folder, "-o", out)
    assert "fitted to 60 labels of 10 classes; cross-validated accuracy" in printed
    rows = list(csv.DictReader(out.open()))
    assert len(rows) == 100
    guesses = np.array([int(row["label"].removeprefix("digit ")) for row in rows])
    assert (guesses[60:] == labels[60:]).mean() > 0.3  # chance is 0.1
    chances = [float(v) for k, v in rows[0].items() if k.startswith("p_")]
    assert sum(chances) == pytest.approx(1, abs=1e-3)
    assert float(rows[0]["probability"]) == max(chances)


def test_labelled_images_may_be_named_as_they_are_in_the_folder_given(
    run: Run, photos: tuple[Path, np.ndarray], tmp_path: Path
) -> None:
    folder, labels = photos
    few = tmp_path / "labels" / "few.csv"
    few.parent.mkdir()
    few.write_text("\n".join(f"{i:03d}.png,digit {labels[i]}" for i in range(60)))
    assert "fitted to 60 labels" in call("classify", run.path, folder, "--labels", few)


def test_images_that_cannot_be_read_are_left_out_on_request(
    run: Run, photos: tuple[Path, np.ndarray], tmp_path: Path
) -> None:
    folder = photos[0]
    (folder / "003.png").write_bytes(b"no image")
    (folder / "._004.png").write_bytes(b"what a Mac leaves behind")
    command = ("embed", run.path, folder, "-o", tmp_path / "features.npy")
    refused = CliRunner().invoke(app, [str(part) for part in command])
    assert isinstance(refused.exception, DataError)
    assert str(refused.exception) == (
        "some images cannot be read: leave them out (--skip-broken); the first is "
        f"{folder / '003.png'} (not a readable image)"
    )
    said = call(*command, "--skip-broken")
    assert f"left out, cannot be read: {folder / '003.png'}" in said
    assert "99 images" in said
    names = (tmp_path / "features.files.csv").read_text().split()
    kept = [file for file in find_images([folder]) if file.name != "003.png"]
    assert names == ["file", *map(str, kept)]
    few = tmp_path / "few.csv"
    few.write_text("".join(f"{i:03d}.png,digit {photos[1][i]}\n" for i in range(60)))
    said = call("classify", run.path, folder, "--labels", few, "--skip-broken")
    assert "fitted to 59 labels" in said
    with pytest.raises(DataError, match="none of the 1 images could be read"):
        embed(load_encoder(run), [folder / "003.png"], broken=[])


def test_an_image_that_is_labelled_twice_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "few.csv"
    for name in ("a.png", "b.png"):
        (tmp_path / name).touch()
    path.write_text(f"a.png,cat\nb.png,dog\n{tmp_path / 'a.png'},cat\n")
    assert read_labels(path) == ([tmp_path / "a.png", tmp_path / "b.png"], ["cat", "dog"])
    path.write_text("a.png,cat\nb.png,dog\na.png,dog\n")
    with pytest.raises(DataError, match=r"line 3: a\.png is dog here and cat before: keep one"):
        read_labels(path)


def test_the_classifier_is_scikit_learns_on_centred_features_of_unit_scale() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=40)
    x = 5 + 0.01 * (rng.normal(size=(40, 6)) + 2 * np.eye(6)[labels])
    ours = fit_classifier(torch.from_numpy(x), [f"class {label}" for label in labels])
    scaled = (x - x.mean(0)) / np.sqrt(((x - x.mean(0)) ** 2).mean())
    peer = LogisticRegression(C=1.0, max_iter=5000, tol=1e-10).fit(scaled, labels)
    np.testing.assert_allclose(
        ours.probabilities(torch.from_numpy(x)), peer.predict_proba(scaled), atol=1e-3
    )


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (torch.arange(40) % 2, "labels are names, given as text"),
        ([0, 1] * 20, "labels are names, given as text"),
        (["a", "b"] * 10, "there are 40 features, but 20 labels"),
    ],
)
def test_labels_that_are_no_names_or_too_few_are_refused(labels: list[str], words: str) -> None:
    with pytest.raises(DataError, match=words):
        fit_classifier(torch.arange(80.0).view(40, 2), labels)


def test_bad_label_files_are_told_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "few.csv"
    path.write_text("file,label\nmissing.png,cat\n")
    with pytest.raises(DataError, match=r"no image missing\.png \(looked beside it, here\)"):
        read_labels(path)
    path.write_text("file,label\na.png,cat\nb.png,\n")
    (tmp_path / "a.png").touch()
    with pytest.raises(DataError, match=r"line 3: b\.png has no label: leave the line out"):
        read_labels(path)
    path.write_text("file\n")
    with pytest.raises(DataError, match="line 1: write it as file,label"):
        read_labels(path)
    path.write_bytes("Übung.png,Übung".encode("latin-1"))
    with pytest.raises(DataError, match="not a CSV file in UTF-8"):
        read_labels(path)
    with pytest.raises(DataError, match="at least two classes"):
        fit_classifier(torch.zeros(3, 2), ["a", "a", "a"])


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits of 12 bits in grey files of 16."""
    folder = tmp_path_factory.mktemp("scans") / "scans"
    folder.mkdir()
    for i, digit in enumerate(load_digits().images[:60]):
        deep = np.rint(digit * 4095 / 16).astype(np.uint16)
        Image.fromarray(deep).save(folder / f"{i:02d}.png")
    return folder


def test_deep_greys_are_read_by_the_window_they_were_trained_with(
    scans: Path, tmp_path: Path
) -> None:
    data = {"source": "folder", "path": scans, "image_size": 8, "window": (0, 4095)}
    run = train(tiny(data=data), out=tmp_path / "run")
    exported = [
        export_encoder(run, tmp_path / f"encoder.{suffix}") for suffix in ("pt", "safetensors")
    ]
    files = find_images(scans)
    grey = np.rint(np.stack([np.asarray(Image.open(file)) for file in files]) / 4095 * 255)
    seen = torch.from_numpy(grey.astype(np.uint8)).unsqueeze(1).expand(-1, 3, -1, -1)
    expected = run.global_encoder()(seen)
    for source in (run.path, *exported):
        assert torch.allclose(embed(load_encoder(source), files), expected, atol=1e-5)


def test_a_window_may_be_given_for_other_images_than_the_encoders_own(
    scans: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = {"source": "folder", "path": scans, "image_size": 8}
    run = train(tiny(data=data), out=tmp_path / "run")
    caplog.clear()
    for name, options in (("dark", ()), ("right", ("--window", 0, 4095))):
        call("embed", run.path, scans, "-o", tmp_path / f"{name}.npy", *options)
    (told,) = caplog.messages  # of the first alone
    assert "brighter than 16 of 255: in files of 16 bits white is 65,535" in told
    assert told.endswith("set --window 0 4095")
    dark, right = (np.load(tmp_path / f"{name}.npy") for name in ("dark", "right"))
    encoder = load_encoder(run)
    encoder.reading = Reading(window=(0, 4095))
    assert right == pytest.approx(embed(encoder, find_images(scans)).numpy(), abs=1e-5)
    assert not np.allclose(dark, right, atol=0.01)
    (labels := tmp_path / "few.csv").write_text("file,label\n00.png,zero\n01.png,one\n")
    call("classify", run.path, scans, "--labels", labels, "--window", 0, 4095)
    with pytest.raises(ConfigError, match="--window: it goes from black to white"):
        call("embed", run.path, scans, "-o", tmp_path / "no.npy", "--window", 5, 2)
