"""Θ begins with what was learned before: all of it, or a backbone under heads of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from ssfl.assemble import build_method
from ssfl.cli import app
from ssfl.comm.flower.recipe import shared_recipe
from ssfl.comm.local import LocalCommunicator
from ssfl.config import load_config, to_toml
from ssfl.errors import CheckpointError, ConfigError
from ssfl.experiment import resume, train
from ssfl.federation.messages import Task
from ssfl.models.flat import FlatModel
from ssfl.models.resnet import resnet18, resnet34
from ssfl.reproduce import reproduce
from ssfl.run import Run
from ssfl.ssl.base import Method
from ssfl.use import export_encoder
from tiny import outcome, same_bits, tables, tiny

CHANNELS, SIZE = 1, 8  # of digits


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tiny(evaluation={"every": 3}), out=tmp_path_factory.mktemp("start") / "before")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The Θ of every task that clients are given, in order."""
    seen: list[Tensor] = []
    exchange = LocalCommunicator.exchange

    def listen(self: LocalCommunicator, task: Task, *rest: Any, **more: Any) -> Any:
        seen.append(task.theta.clone())
        return exchange(self, task, *rest, **more)

    monkeypatch.setattr(LocalCommunicator, "exchange", listen)
    return seen


def model(theta: Tensor, **sections: Any) -> Method:
    """The method that a Θ is of."""
    method = build_method(tiny(**sections), CHANNELS, SIZE)
    FlatModel(method, method.home).shared.copy_(theta)
    return method


def small_weights(path: Path, **changes: Tensor | None) -> Path:
    """A file of the tiny network's tensors as another program would write it, some changed."""
    tensors = build_method(tiny(seed=8), CHANNELS, SIZE).backbone.state_dict()
    kept = {name: t.contiguous() for name, t in (tensors | changes).items() if t is not None}
    save_file(kept, path)
    return path


def test_a_run_of_the_same_model_is_begun_with_all_of_theta(
    before: Run, sent: list[Tensor], tmp_path: Path
) -> None:
    after = train(
        tiny(
            server={"rounds": 1, "start": before.path},
            evaluation={"every": 1, "baselines": True},
        ),
        out=tmp_path / "after",
    )
    assert torch.equal(sent[0], before.checkpoint().tensors["theta"])
    # Judged before training, it is what the other run ended with.
    assert after.final["untrained_knn_global"] == before.final["knn_global"]


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_an_exported_backbone_is_begun_with_under_heads_of_the_seed(
    before: Run, sent: list[Tensor], tmp_path: Path, suffix: str
) -> None:
    path = export_encoder(before, tmp_path / f"encoder.{suffix}")
    held = (
        load_file(path)
        if suffix == "safetensors"
        else torch.load(path, weights_only=True)["tensors"]
    )
    train(tiny(seed=5, server={"rounds": 1, "start": path}), out=tmp_path / "after")
    begun, fresh = model(sent[0]), build_method(tiny(seed=5), CHANNELS, SIZE)
    for name, tensor in begun.backbone.state_dict().items():
        assert torch.equal(tensor, held[f"backbone.{name}"]), name
    for head in ("projector", "predictor"):
        for name, tensor in getattr(begun, head).state_dict().items():
            assert torch.equal(tensor, getattr(fresh, head).state_dict()[name]), (head, name)


def test_of_a_run_with_other_heads_the_backbone_is_taken_and_its_slow_copy_is_the_same(
    before: Run, sent: list[Tensor], tmp_path: Path
) -> None:
    byol = {"method": "byol", "projector_width": 16, "projection_width": 8, "predictor_width": 8}
    train(tiny(ssl=byol, server={"rounds": 1, "start": before.path}), out=tmp_path / "after")
    begun = model(sent[0], ssl=byol)
    expected = before.global_encoder().backbone.state_dict()
    for network in (begun.backbone, begun.target_backbone):
        assert isinstance(network, torch.nn.Module)
        found = network.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_personal_encoders_begin_there_too(before: Run, tmp_path: Path) -> None:
    """Local-only: nothing is shared, and with hardly a rate θ_k stays where it began."""
    config = tiny(
        algorithm={"name": "local-only"},
        local={"lr": 1e-12},
        server={"rounds": 1, "start": before.path},
    )
    run = train(config, out=tmp_path / "run")
    expected = before.global_encoder().backbone
    for client in range(4):
        found = run.personal_encoder(client).backbone
        for name, weight in expected.named_parameters():
            torch.testing.assert_close(found.get_parameter(name), weight, atol=1e-9, rtol=0)


def test_the_file_is_not_needed_to_go_on_and_the_end_is_the_same(
    before: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = export_encoder(before, tmp_path / "encoder.safetensors")
    config = tiny(server={"rounds": 4, "start": path})
    whole = train(config, out=tmp_path / "whole")

    def stop_after_two(self: LocalCommunicator, task: Task, *rest: Any, **more: Any) -> Any:
        if task.round == 2:
            raise KeyboardInterrupt
        return exchange(self, task, *rest, **more)

    exchange = LocalCommunicator.exchange
    with monkeypatch.context() as patched:
        patched.setattr(LocalCommunicator, "exchange", stop_after_two)
        with pytest.raises(KeyboardInterrupt):
            train(config, out=tmp_path / "stopped")
    path.unlink()
    assert same_bits(outcome(resume(tmp_path / "stopped")), outcome(whole))


def test_a_path_from_here_is_found_from_anywhere(
    before: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(before.path.parent)
    run = train(tiny(server={"rounds": 1, "start": "before"}), out=tmp_path / "run")
    assert run.config.server.start == before.path


def test_a_study_with_a_path_from_here_is_gone_on_with(
    before: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(before.path.parent)
    (tmp_path / "tiny.toml").write_text(to_toml(load_config(tables(server={"rounds": 1}))))
    study = tmp_path / "warm.toml"
    study.write_text(
        'title = "Warm"\nrepeats = "nothing"\nfigures = ["global_knn"]\n'
        f'[[arms]]\nname = "one"\nlabel = "one"\nrecipe = "{tmp_path / "tiny.toml"}"\n'
    )
    asked = {"seeds": 1, "settings": ["server.start=before"], "out": tmp_path / "results"}
    first = reproduce(study, **asked).value("one", "global_knn")
    assert reproduce(study, **asked).value("one", "global_knn") == first


def test_a_classifier_and_counters_in_a_file_of_torchvisions_names_are_left_out(
    tmp_path: Path, sent: list[Tensor]
) -> None:
    network = resnet18(channels=1, width=4)
    tensors = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
    others = {
        "fc.weight": torch.ones(10, 32),
        "fc.bias": torch.ones(10),
        "bn1.num_batches_tracked": torch.tensor(7),
        "layer4.1.bn2.num_batches_tracked": torch.tensor(7),
    }
    torch.save(tensors | others, tmp_path / "resnet18.pth")
    sections: dict[str, Any] = {"model": {"backbone": "resnet18", "width": 4}}
    server = {"rounds": 1, "start": tmp_path / "resnet18.pth"}
    train(tiny(**sections, server=server), out=tmp_path / "run")
    found = model(sent[0], **sections).backbone.state_dict()
    assert all(torch.equal(found[name], tensors[name]) for name in found)


def test_half_precision_is_read(tmp_path: Path, sent: list[Tensor]) -> None:
    tensors = build_method(tiny(seed=8), CHANNELS, SIZE).backbone.state_dict()
    halves = {name: tensor.half().contiguous() for name, tensor in tensors.items()}
    save_file(halves, tmp_path / "half.safetensors")
    train(tiny(server={"rounds": 1, "start": tmp_path / "half.safetensors"}), out=tmp_path / "run")
    found = model(sent[0]).backbone.state_dict()
    assert all(torch.equal(found[name], halves[name].float()) for name in found)


def test_a_torch_file_of_before_they_were_zips_is_read(tmp_path: Path, sent: list[Tensor]) -> None:
    tensors = build_method(tiny(seed=8), CHANNELS, SIZE).backbone.state_dict()
    old = tmp_path / "old.pth"
    torch.save(tensors, old, _use_new_zipfile_serialization=False)
    train(tiny(server={"rounds": 1, "start": old}), out=tmp_path / "run")
    found = model(sent[0]).backbone.state_dict()
    assert all(torch.equal(found[name], tensors[name]) for name in found)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"stem.conv.weight": None}, r"it has no stem\.conv\.weight; choose the network"),
        (
            {"stem.conv.weight": torch.zeros(4, 3, 3, 3)},
            r"its stem\.conv\.weight is 4×3×3×3 where 4×1×3×3 is needed; choose the network",
        ),
        (
            {"stem.more.weight": torch.zeros(1)},
            r"its stem\.more\.weight has no place here; choose the network",
        ),
    ],
)
def test_a_network_that_differs_in_one_tensor_is_refused_by_that_tensors_name(
    tmp_path: Path, changes: dict[str, Tensor | None], sentence: str
) -> None:
    path = small_weights(tmp_path / "other.safetensors", **changes)
    with pytest.raises(
        CheckpointError, match=rf"server\.start: .*other\.safetensors does not fit: {sentence}"
    ):
        train(tiny(server={"start": path}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_deeper_network_is_not_taken_for_a_shallow_one(tmp_path: Path) -> None:
    """All of resnet18's tensors are in resnet34, in the same shapes."""
    deep = resnet34(channels=1, width=4).state_dict()
    assert {n: t.shape for n, t in resnet18(channels=1, width=4).state_dict().items()}.items() <= {
        n: t.shape for n, t in deep.items()
    }.items()
    torch.save(deep, tmp_path / "deep.pt")
    config = tiny(
        model={"backbone": "resnet18", "width": 4}, server={"start": tmp_path / "deep.pt"}
    )
    with pytest.raises(CheckpointError, match=r"its layer1\.2\.conv1\.weight has no place here"):
        train(config, out=tmp_path / "run")


def test_what_cannot_be_begun_with_is_said_in_a_sentence_and_leaves_no_run(
    before: Run, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("no tensors")
    (tmp_path / "empty.pt").touch()
    tensors = build_method(tiny(), CHANNELS, SIZE).backbone.state_dict()
    for name, content in {
        "list": [torch.ones(3)],
        "numbers": {0: torch.ones(3)},
        "wrapped": {"state_dict": tensors, "epoch": 3},
        "parallel": {f"module.{name}": tensor for name, tensor in tensors.items()},
        "network": torch.nn.Linear(2, 2),
        "diverged": tensors | {"stem.conv.weight": tensors["stem.conv.weight"] * torch.nan},
    }.items():
        torch.save(content, tmp_path / f"{name}.pt")
    save = r"; save a network's tensors alone, as safetensors or by `torch\.save\(model\.state_dict"
    alone = train(
        tiny(algorithm={"name": "local-only"}, server={"rounds": 1}), out=tmp_path / "alone"
    )
    for start, error, sentence in (
        (tmp_path / "gone", ConfigError, "there is no run directory or file at"),
        (tmp_path, ConfigError, "is not a run directory: it has no config.toml"),
        *(
            (tmp_path / file, CheckpointError, f"{file} cannot be read: {sentence}{save}")
            for file, sentence in {
                "notes.txt": "it is cut off, or holds other things than tensors",
                "empty.pt": "it is cut off, or holds other things than tensors",
                "network.pt": "it is cut off, or holds other things than tensors",
                "list.pt": "it holds other things than tensors by name",
                "numbers.pt": "what it holds under 0 is no tensor of that name",
                "wrapped.pt": "what it holds under 'state_dict' is no tensor of that name",
            }.items()
        ),
        (
            tmp_path / "parallel.pt",
            CheckpointError,
            r"it has module\.stem\.conv\.weight for stem\.conv\.weight: save its tensors by names "
            r"without 'module\.'",
        ),
        (tmp_path / "diverged.pt", CheckpointError, r"values of .*diverged\.pt are not finite"),
        (alone.path, ConfigError, "local-only trains no encoder for all"),
    ):
        with pytest.raises(error, match=sentence):
            train(tiny(server={"start": start}), out=tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_coordinator_says_what_does_not_fit_before_there_is_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    assert runner.invoke(app, ["certs", "keys", "--host", "127.0.0.1"]).exit_code == 0
    joins = "site init one --server 127.0.0.1:9092 --ca keys/ca.pem --recipe digits --clients 0"
    assert runner.invoke(app, joins.split()).exit_code == 0
    (tmp_path / "keys" / "sites" / "one.pub").write_bytes((tmp_path / "one/site.pub").read_bytes())
    small_weights(tmp_path / "other.safetensors")
    setting = "server.start=other.safetensors"
    result = runner.invoke(app, ["serve", "digits", "--keys", "keys", "--set", setting])
    assert isinstance(result.exception, CheckpointError)
    assert "other.safetensors does not fit" in str(result.exception)
    assert not (tmp_path / "runs").exists()


def test_sites_are_told_nothing_of_it(before: Run) -> None:
    """Neither a path on the coordinator's machine, nor a recipe that differs from theirs."""
    assert shared_recipe(tiny(server={"start": before.path})) == shared_recipe(tiny())
