"""θ_k that begins late: until then a run is Global-SSFL's, from then on the listing's own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ssfl.algorithms.per_ssfl import PerSSFLOptions
from ssfl.assemble import build_hosts, load_federated
from ssfl.config import Config
from ssfl.errors import ConfigError
from ssfl.experiment import Quiet, resume, train
from ssfl.federation.messages import Task, TaskKind
from ssfl.federation.store import StateStore
from ssfl.run import Run
from tiny import outcome, same_bits, tiny

PER = {"name": "per-ssfl", "weight": 0.5}
BILEVEL = {"name": "bilevel-ssfl", "penalty": "listing"}
ROUNDS = 5


def late(algorithm: dict[str, Any], begin: float, **sections: Any) -> Config:
    sections = {"run": {"checkpoint_every": 1}, "server": {"rounds": ROUNDS}, **sections}
    return tiny(algorithm={**algorithm, "begin": begin}, **sections)


class Stopping(Quiet):
    """Stops before a round, as Ctrl-C would."""

    def __init__(self, before: int) -> None:
        self.before = before

    def begin_round(self, round_: int, clients: int) -> None:
        if round_ == self.before:
            raise KeyboardInterrupt


def stopped(config: Config, folder: Path, before: int) -> Run:
    with pytest.raises(KeyboardInterrupt):
        train(config, out=folder, display=Stopping(before))
    return Run(folder)


@pytest.mark.parametrize("algorithm", [PER, BILEVEL])
def test_theta_k_is_what_the_listing_makes_of_the_theta_it_begins_with(
    algorithm: dict[str, Any], tmp_path: Path
) -> None:
    run = stopped(late(algorithm, 0.6), tmp_path / "run", before=3)
    thetas = {3: run.checkpoint().tensors["theta"]}
    with pytest.raises(KeyboardInterrupt):
        resume(run, display=Stopping(before=4))
    thetas[4] = run.checkpoint().tensors["theta"]
    resume(run)

    # By hand: an algorithm that begins at once, given the last two rounds alone.
    at_once = late(algorithm, 0.0)
    data, store = load_federated(at_once), StateStore(tmp_path / "by-hand", 1 << 20)
    (host,) = build_hosts(at_once, data, store)
    rates = {row["round"]: row["rate"] for row in run.metrics if row["kind"] == "round"}
    for round_, theta in thetas.items():
        layout = host.trainer.layout.digest
        task = Task(TaskKind.TRAIN, round_, theta, layout, rates[round_], round_ / ROUNDS)
        for client in data.clients():
            assert host.handle(client, task).failure is None
    for client in data.clients():
        expected = store.get(client, before=ROUNDS).personal
        learned = run.store.get(client, before=ROUNDS).personal
        assert expected is not None
        assert learned is not None
        assert torch.equal(learned, expected)


@pytest.mark.parametrize("algorithm", [PER, BILEVEL])
def test_theta_does_not_depend_on_when_theta_k_begins(
    algorithm: dict[str, Any], tmp_path: Path
) -> None:
    thetas = [
        train(late(algorithm, begin), out=tmp_path / str(begin)).checkpoint().tensors["theta"]
        for begin in (0.0, 0.5, 0.99)
    ]
    assert torch.equal(thetas[0], thetas[1])
    assert torch.equal(thetas[0], thetas[2])


def test_before_it_begins_clients_keep_nothing_and_are_judged_by_theta(tmp_path: Path) -> None:
    config = late(PER, 0.6, evaluation={"every": 1, "clients": 4})
    run = stopped(config, tmp_path / "run", before=3)
    assert run.store.clients() == []
    images = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(run.personal_encoder(1)(images), run.global_encoder()(images))
    resume(run)
    assert run.store.clients() == [0, 1, 2, 3]
    assert not torch.equal(run.personal_encoder(1)(images), run.global_encoder()(images))

    rows = [row for row in run.metrics if row["kind"] == "round"]
    assert [row["personal_loss"] is not None for row in rows] == [False, False, False, True, True]
    assert all(row["loss"] is not None for row in rows)


@pytest.mark.parametrize("stop", [2, 4])
def test_a_run_that_was_stopped_before_or_after_it_begins_ends_the_same(
    stop: int, tmp_path: Path
) -> None:
    config = late(PER, 0.6, local={"keep_momentum": True}, run={"checkpoint_every": 3})
    whole = train(config, out=tmp_path / "whole")
    run = resume(stopped(config, tmp_path / "run", before=stop))
    assert same_bits(outcome(run), outcome(whole))


def test_it_begins_before_the_end() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.begin"):
        late(PER, 1.0)


def test_in_a_short_run_it_begins_with_the_last_round(tmp_path: Path) -> None:
    run = train(late(PER, 0.95), out=tmp_path / "run")
    rows = [row for row in run.metrics if row["kind"] == "round"]
    assert [row["personal_loss"] is not None for row in rows] == [False] * 4 + [True]
    assert run.store.clients() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("begin", "rounds", "first"),
    [(0, 5, 0), (0.5, 4, 2), (0.5, 5, 3), (0.6, 5, 3), (0.94, 800, 752), (0.94, 3, 2), (0.9, 1, 0)],
)
def test_the_first_round_in_which_it_moves(begin: float, rounds: int, first: int) -> None:
    assert PerSSFLOptions(begin=begin).first_round(rounds) == first
