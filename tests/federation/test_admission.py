"""Who is let in: honest clients, however unlike their neighbours, and nobody past the limit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ssfl import train
from ssfl.assemble import build_host, build_server
from ssfl.comm.local import LocalCommunicator
from ssfl.data.federated import FederatedData
from ssfl.data.sources import load_dataset
from ssfl.federation.admission import Admission
from ssfl.federation.messages import Joint, Reply, Task, TaskKind
from ssfl.federation.store import StateStore
from tiny import tiny


@pytest.mark.parametrize("large", [1, 6], ids=["one large client", "one small client"])
def test_an_honest_client_is_let_in_though_it_makes_a_hundred_times_fewer_or_more_steps(
    large: int, tmp_path: Path
) -> None:
    """Labels and group norm: gradients point one way for long, and nothing else moves."""
    config = tiny(
        data={"source": "digits", "test_fraction": 0.1},
        model={"norm": "group"},
        ssl={"method": "supervised"},
        local={"batch": 16, "lr": 0.01},
    )
    digits = load_dataset(config.data)
    steps = [100 if client < large else 1 for client in range(7)]
    dealt = np.random.default_rng(0).permutation(len(digits.train))
    parts = [np.resize(np.roll(dealt, 200 * k), 16 * n) for k, n in enumerate(steps)]
    data = FederatedData(digits, parts, None)
    host = build_host(config, data, StateStore(tmp_path / "clients", 1 << 20))
    server = build_server(config, host.trainer, LocalCommunicator([host]))
    for _ in range(2):  # the first has no yardstick yet
        report = server.play_round()
        assert (report.accepted, report.failures) == (7, {})


TASK = Task(TaskKind.TRAIN, 3, torch.tensor([3.0, 4.0]), "layout", rate=0.1)


def update(norm: float, steps: int, joint: Joint | None = None) -> Reply:
    delta = torch.tensor([0.0, norm])
    return Reply(
        0, TaskKind.TRAIN, 3, layout="layout", delta=delta, samples=9, steps=steps, joint=joint
    )


def opened(yardstick: float) -> Admission:
    admission = Admission(max_ratio=10)
    admission.yardstick = yardstick
    admission.open_round()
    return admission


@pytest.mark.parametrize(
    ("yardstick", "steps", "joint", "limit"),
    [
        (0.0, 4, None, 50.0),  # ten times the norm of Θ
        (2.0, 4, None, 40.0),  # ten times the yardstick, times √4
        (2.0, 0, None, 20.0),
        (2.0, 8, Joint((0, 5), 1.0), 40.0),  # two clients of four steps each, on average
        (2.0, 8, Joint((0, 5), 2.5), 16.0),  # FedNova's mean is of one step, and 2.5 are made
    ],
)
def test_an_update_may_be_as_long_as_the_limit_and_no_longer(
    yardstick: float, steps: int, joint: Joint | None, limit: float
) -> None:
    admission = opened(yardstick)
    assert admission.admit(update(0.999 * limit, steps, joint), TASK).failure is None
    refused = admission.admit(update(1.001 * limit, steps, joint), TASK)
    assert refused.failure is not None
    assert f"over the limit of {limit * (joint.effective_steps if joint else 1):.3g}" in (
        refused.failure.detail
    )
    assert refused.joint == joint


def test_an_update_is_never_absurd_that_is_a_tenth_as_long_as_theta() -> None:
    """However short those of the last round were: their steps may have had no gradient."""
    admission = opened(1e-6)
    assert admission.admit(update(0.499, 1), TASK).failure is None  # Θ is 5 long
    assert admission.admit(update(0.501, 1), TASK).failure is not None


@pytest.mark.parametrize(
    "sections", [{"model": {"norm": "group"}}, {"local": {"batch_norm": "fedbn"}}]
)
def test_mocos_first_updates_without_a_gradient_are_no_yardstick_for_those_after(
    sections: dict[str, Any], tmp_path: Path
) -> None:
    local = {"batch": 256, "lr": 0.05, **sections.pop("local", {})}
    config = tiny(
        ssl={"method": "moco", "projector_width": 32, "projection_width": 16, "queue": 256},
        local=local,
        server={"rounds": 4},
        **sections,
    )
    rows = [row for row in train(config, out=tmp_path / "run").metrics if row["kind"] == "round"]
    assert [row["accepted"] for row in rows] == [4, 4, 4, 4]


def test_the_next_yardstick_is_the_median_of_norms_per_root_of_steps() -> None:
    admission = opened(2.0)
    for norm, steps in ((3.0, 1), (8.0, 4), (15.0, 9), (1000.0, 1)):  # 3, 4, 5, and one refused
        admission.admit(update(norm, steps), TASK)
    admission.close_round()
    assert admission.yardstick == pytest.approx(4)
    admission.open_round()
    admission.close_round()  # a round of which nothing was admitted says nothing
    assert admission.yardstick == pytest.approx(4)


def test_a_control_variate_of_another_shape_is_refused() -> None:
    task = replace(TASK, control=torch.zeros(2))
    for size, fits in ((2, True), (1, False), (3, False)):
        reply = replace(update(1.0, 1), control=torch.zeros(size))
        assert (opened(2.0).admit(reply, task).failure is None) == fits
