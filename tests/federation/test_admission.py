"""Who is let in: honest clients, however unlike their neighbours."""

from pathlib import Path

import numpy as np
import pytest

from ssfl.assemble import build_host, build_server
from ssfl.comm.local import LocalCommunicator
from ssfl.data.federated import FederatedData
from ssfl.data.sources import load_dataset
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
