"""SCAFFOLD's c is the mean of the c_k by their images, whatever becomes of single replies."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ssfl.assemble import build_host, build_server, load_federated
from ssfl.comm.local import LocalCommunicator
from ssfl.federation.client import Host
from ssfl.federation.drift import known_control
from ssfl.federation.messages import Reason, Reply, Task, failed
from ssfl.federation.server import Server
from ssfl.federation.store import StateStore
from tiny import tiny

CLIENTS = 6


class Unreliable(LocalCommunicator):
    """Real clients on a bad line: they train and store, but of what they send every sixth reply is
    lost, every sixth broken, and every sixth comes a round late."""

    def __init__(self, host: Host) -> None:
        super().__init__([host])
        self.sent = 0
        self.on_the_way: list[Reply] = []

    def exchange(
        self, task: Task, clients: Sequence[int], deadline: float | None = None
    ) -> Iterator[Reply]:
        late, self.on_the_way = self.on_the_way, []
        for reply in super().exchange(task, clients):
            self.sent += 1
            if self.sent % 6 == 1:
                yield failed(reply.client, task, Reason.LOST, "the line broke")
            elif self.sent % 6 == 3:
                yield replace(reply, layout="0123456789abcdef")
            elif self.sent % 6 == 5:
                self.on_the_way.append(reply)
                yield failed(reply.client, task, Reason.DEADLINE, "too slow")
            else:
                yield reply
        yield from late


def federation(
    folder: Path, communicator: type, local: dict[str, object] | None = None, **options: object
) -> tuple[Host, Server]:
    config = tiny(
        partition={"clients": CLIENTS},
        local={"correction": "scaffold", "momentum": 0.0, **(local or {})},
        server={"clients_per_round": 2, "rounds": 8, "min_replies": 0.1, **options},
    )
    host = build_host(config, load_federated(config), StateStore(folder, 1 << 30))
    made = communicator(host) if communicator is Unreliable else communicator([host])
    return host, build_server(config, host.trainer, made)


def gap(host: Host, server: Server) -> float:
    """‖c − mean c_k‖ over ‖c‖, each c_k as its client would start from it now."""
    state = server.state()
    folded = dict(state["folded"].tolist())
    own = torch.zeros_like(state["control"])
    images = [len(host.data.train_indices(client)) for client in range(CLIENTS)]
    assert len(set(images)) > 1
    for client in range(CLIENTS):
        kept = host.store.get(client, before=server.rounds_done)
        known: Tensor | None = known_control(kept, folded.get(client, -1))
        own += 0 if known is None else known * (images[client] / sum(images))
    return float(torch.dist(state["control"], own) / state["control"].norm())


@pytest.mark.parametrize(
    ("communicator", "options"),
    [
        (LocalCommunicator, {}),
        (LocalCommunicator, {"oversample": 0.5}),
        (Unreliable, {"clients_per_round": 4, "retries": 0}),
        (Unreliable, {"clients_per_round": 4, "oversample": 0.5, "late": "discount"}),
    ],
)
def test_c_stays_the_mean_of_the_control_variates(tmp_path, communicator, options) -> None:
    host, server = federation(tmp_path, communicator, **options)
    for _ in range(8):
        server.play_round()
        assert gap(host, server) < 1e-5


def test_control_variates_begin_anew_when_statistics_are_frozen(tmp_path: Path) -> None:
    """They are mean steps on W. From then on steps are made on W/σ, and as corrections of those
    they would be off by 1/σ²: a round that begins with them anew is one without a correction."""
    frozen = {"freeze_statistics": 0.5}
    host, server = federation(tmp_path / "a", LocalCommunicator, local=frozen)
    plain, _ = federation(tmp_path / "b", LocalCommunicator, local={**frozen, "correction": "none"})
    for _ in range(4):
        assert not server.rounds_done or server.state()["control"].any()
        server.play_round()
    task = server._training(range(CLIENTS))
    assert task.progress == 0.5
    for client in range(CLIENTS):
        corrected = host.handle(client, task).delta
        alone = plain.handle(client, replace(task, control=None)).delta
        assert corrected is not None
        assert alone is not None
        assert torch.equal(corrected, alone)


def test_c_is_the_mean_of_the_control_variates_after_they_began_anew_too(tmp_path: Path) -> None:
    host, server = federation(tmp_path, LocalCommunicator, local={"freeze_statistics": 0.5})
    for _ in range(8):
        server.play_round()
        if server.rounds_done != 4:
            assert gap(host, server) < 1e-5
