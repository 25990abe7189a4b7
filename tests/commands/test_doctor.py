"""`ssfl doctor` says what is there, and for what is missing, the command that brings it."""

import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import typer

from ssfl import registry
from ssfl.commands import doctor as module
from ssfl.commands.doctor import REQUIRED, doctor, examine

ROOT = Path(__file__).parents[2]


def find(what):
    (finding,) = [finding for finding in examine() if finding.what == what]
    return finding


def test_it_tells_versions_as_the_packages_do():
    told = {finding.what: finding.detail for finding in examine()}
    assert {name: told[name] for name in REQUIRED} == {n: metadata.version(n) for n in REQUIRED}


@pytest.mark.parametrize(
    ("package", "what", "extra"),
    [
        ("mpi4py", "comm mpi", "ssfl[mpi]"),
        ("ray", "comm ray", "ssfl[ray]"),
        ("flwr", "comm flower", "ssfl[flower]"),
        ("onnxscript", "onnx", "ssfl[onnx]"),
        ("pyarrow", "parquet", "ssfl[parquet]"),
        ("tensorboard", "tensorboard", "ssfl[tensorboard]"),
        ("mlflow", "mlflow", "ssfl[mlflow]"),
        ("wandb", "wandb", "ssfl[wandb]"),
    ],
)
def test_a_missing_extra_comes_with_the_command_that_mends_it(monkeypatch, package, what, extra):
    version = module._version
    monkeypatch.setattr(module, "_version", lambda name: None if name == package else version(name))
    finding = find(what)
    assert not finding.fine
    assert f"pip install '{extra}'" in finding.remedy


def test_every_extra_of_the_package_is_looked_at():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(declared["optional-dependencies"]) - {"dev"}
    assert extras == {finding.what.removeprefix("comm ") for finding in examine()} & extras


def test_data_are_looked_for_where_they_would_be_read(monkeypatch, tmp_path):
    monkeypatch.setenv("SSFL_DATA", str(tmp_path))
    assert not find("data cifar10").fine
    assert find("data cifar10").remedy == "ssfl data get cifar10"
    (tmp_path / "cifar-10-batches-py").mkdir()
    assert find("data cifar10").fine


@pytest.mark.parametrize("instruction", ["avx512_bf16", "amx_tile", None])
def test_a_cpu_that_knows_bfloat16_is_told_from_one_that_does_not(monkeypatch, instruction):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for what in ("avx512_bf16", "amx_tile"):
        name = f"torch.cpu._is_{what}_supported"
        monkeypatch.setattr(name, lambda what=what: what == instruction, raising=False)
    remedy = find("device").remedy
    assert ("device.precision=bf16" in remedy) == (instruction is not None)


def test_another_version_of_flower_is_not_fine(monkeypatch):
    monkeypatch.setattr(module, "_version", lambda name: "1.42.0")
    assert not find("comm flower").fine
    assert "1.41.0" in find("comm flower").remedy


def test_a_broken_installation_is_a_finding_not_a_crash(monkeypatch):
    def broken(name):
        if name == "ray":
            raise OSError("disk on fire")
        return "1"

    monkeypatch.setattr(module, "_version", broken)
    assert "disk on fire" in find("comm ray").detail


def test_plug_ins_are_imported_and_those_that_cannot_be_are_named(monkeypatch, tmp_path):
    (tmp_path / "mine_that_works.py").write_text("")
    (tmp_path / "mine_that_fails.py").write_text("raise RuntimeError('first line\\nsecond')")
    plugins = "mine_that_works, mine_that_fails, nowhere_at_all, mine/that_works.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(registry, "_plugins", None)
    monkeypatch.setenv("SSFL_PLUGINS", plugins)
    found = {f.what: f for f in examine() if f.what.startswith("plug-in")}
    assert list(found) == [f"plug-in {name}" for name in plugins.split(", ")]
    assert [f.fine for f in found.values()] == [True, False, False, False]
    _, fails, nowhere, path = found.values()
    assert fails.detail == "RuntimeError: first line second"
    assert "No module named 'nowhere_at_all'" in nowhere.detail
    assert "names of modules" in path.detail


def test_it_fails_only_where_something_required_is_missing(monkeypatch, capsys):
    version = module._version
    monkeypatch.setattr(module, "_version", lambda name: version(name) if name != "ray" else None)
    doctor(strict=False)
    assert "pip install 'ssfl[ray]'" in capsys.readouterr().out
    with pytest.raises(typer.Exit):
        doctor(strict=True)
    monkeypatch.setattr(module, "_version", lambda name: version(name) if name != "numpy" else None)
    with pytest.raises(typer.Exit):
        doctor(strict=False)
