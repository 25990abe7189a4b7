"""Every benchmark runs as its command says, in the small, and writes table and figures."""

import json
import runpy
import sys
from pathlib import Path

import pytest

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
    _, result = benchmark("round", *sizes, "--width", "4", "--rounds", "1", "--workers", "1", "2")
    assert result["largest_difference"] < 1e-5
    assert [row["side"] for row in result["rows"]] == [
        "plain loop, 1 thread",
        "ssfl, 1 worker",
        "ssfl, 2 workers",
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
