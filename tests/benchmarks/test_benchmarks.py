"""Every benchmark runs as its command says, in the small, and writes table and figures."""

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ssfl.data import download
from ssfl.models.norm import BatchNorm

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch, tmp_path, capsys):
    """Run a benchmark as a script; returns what it printed and what it wrote."""
    monkeypatch.setenv("SSFL_DATA", str(tmp_path))  # no CIFAR-10: generated shapes
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    ours = {path.stem for path in BENCHMARKS.glob("*.py")} | {"peer"}

    def run(name: str, *arguments: str):
        out = tmp_path / "out.json"
        monkeypatch.setattr(sys, "argv", [name, *arguments, "--json", str(out)])
        try:
            runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
        finally:  # other tests may have a module `round` of their own
            for module in [m for m in sys.modules if m.partition(".")[0] in ours]:
                del sys.modules[module]
        return capsys.readouterr().out, json.loads(out.read_text())

    return run


def test_a_round_reaches_the_plain_loops_weights(benchmark):
    sizes = ["--clients", "2", "--images", "16", "--batch", "8", "--backbone", "small"]
    sizes += ["--width", "4", "--rounds", "1", "--workers", "1", "2", "--bf16"]
    _, result = benchmark("round", *sizes)
    assert result["largest_difference"] < 1e-5
    assert [row["side"] for row in result["rows"]] == [
        "plain loop, 1 thread",
        "ssfl, 1 worker",
        "ssfl, 2 workers",
        "ssfl, 1 worker, bf16",
        "ssfl, 2 workers, bf16",
    ]


def test_the_overhead_profile_says_where_updates_are_folded(benchmark):
    arguments = ["--backbone", "small", "--clients", "3", "--rounds", "1", "--profile"]
    printed, result = benchmark("overhead", *arguments)
    assert {row["side"] for row in result["rows"]} >= {"ssfl, one worker"}
    assert "federation/aggregate.py" in printed


@pytest.mark.processes
def test_scale_asks_no_more_clients_than_there_are(benchmark):
    sizes = ["--clients", "2", "10", "--per-round", "5", "--rounds", "1"]
    _, result = benchmark("scale", *sizes, "--algorithms", "per-ssfl")
    assert [(row["clients"], row["per_round"]) for row in result["rows"]] == [(10, 5)]


@pytest.mark.processes
def test_the_help_is_timed_against_its_limit(benchmark):
    printed, result = benchmark("startup", "--repeats", "1", "--no-train", "--breakdown")
    help_ = next(row for row in result["rows"] if row["what"] == "ssfl --help")
    assert help_["limit"] == 0.5
    assert "rich" in printed


@pytest.mark.processes
def test_memory_that_must_be_there_is_part_of_the_peak(benchmark):
    sizes = ["--clients", "2", "--images", "8", "--batch", "8", "--backbone", "small"]
    arguments = [*sizes, "--width", "4", "--rounds", "1", "--workers", "1"]
    _, result = benchmark("memory", *arguments, "--algorithms", "per-ssfl")
    row = result["rows"][-1]
    assert 0 < row["vectors_mib"] + row["states_mib"] < row["grown_mib"]


@pytest.mark.processes
def test_our_side_of_the_peers_does_the_plain_loops_work(benchmark):
    sizes = ["--clients", "2", "--images", "16", "--batch", "8", "--backbone", "small"]
    arguments = [*sizes, "--width", "4", "--rounds", "1", "--sides", "ours", "--workers", "2"]
    _, result = benchmark("peers", *arguments, "--only", "train")
    (row,) = result["rows"]
    assert row["same"]


def test_branches_start_from_one_trunk_and_end_at_rate_zero(benchmark):
    lengths = ["--trunk", "1", "--rounds", "1", "--falling", "1", "--longer", "1"]
    settings = ["partition.clients=2", "local.batch=256"]
    printed, result = benchmark("branches", "--recipe", "digits", "--set", *settings, *lengths)
    assert "| server momentum 0.7 | 2 |" in printed
    first = {s["branch"]: s for s in reversed(result["sights"])}
    # A tenth of the local rate and ten times the server's: clients move a tenth as far, Θ as far.
    fast, slow = first["server rate 10"], first["as before"]
    assert fast["client_moves"] == pytest.approx(0.1 * slow["client_moves"], rel=0.2)
    assert fast["theta_moves"] == pytest.approx(slow["theta_moves"], rel=0.2)
    last = {s["branch"]: s for s in result["sights"]}
    assert last["as before"]["rate"] == pytest.approx(0.5 * first["as before"]["rate"])


@pytest.mark.parametrize("name", ["gpu", "ablation", "agreement"])
def test_a_benchmark_of_the_gpu_says_that_it_needs_one(benchmark, monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        benchmark(name)


def test_branches_without_their_data_are_one_sentence(benchmark, monkeypatch):
    nowhere = replace(download.ARCHIVES["cifar10"], url="http://127.0.0.1:9/cifar.tar.gz")
    monkeypatch.setitem(download.ARCHIVES, "cifar10", nowhere)
    with pytest.raises(SystemExit, match="cifar10 is not in"):
        benchmark("branches")


def test_every_benchmark_is_on_the_page_about_them():
    page = (BENCHMARKS / "README.md").read_text()
    for path in BENCHMARKS.glob("*.py"):
        assert path.stem == "measuring" or f"`python benchmarks/{path.name}" in page, path.name


def test_every_choice_of_the_ablation_can_be_undone(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    ablation = runpy.run_path(str(BENCHMARKS / "ablation.py"))
    for module in ("gpu", "measuring"):
        sys.modules.pop(module, None)
    norm, other = BatchNorm(3), BatchNorm(3)
    x = torch.randn(8, 3, 2, 2)
    for name, choice in ablation["CHOICES"].items():
        with choice.made():  # names what is there to be undone, or fails
            made = BatchNorm(3)
        assert made.plain_ops is (False if name == "native-norm" else None)
    # The derived batch norm is the same function with the same gradient.
    norm.plain_ops = other.plain_ops = True
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    norm(mine).square().mul(x).sum().backward()
    monkeypatch.setattr("ssfl.models.norm._Normalise", ablation["DerivedNormalise"])
    other(theirs).square().mul(x).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)
    torch.testing.assert_close(norm.weight.grad, other.weight.grad)
