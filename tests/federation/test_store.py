"""Clients' states: in memory first, on disk past a limit, and as they were at any checkpoint."""

import os
import sys
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch

from ssfl.assemble import build_host, build_server
from ssfl.comm.local import LocalCommunicator
from ssfl.data.federated import FederatedData
from ssfl.data.images import DataSet
from ssfl.data.sources import load_dataset
from ssfl.errors import CheckpointError
from ssfl.federation.state import ClientState
from ssfl.federation.store import StateStore
from tiny import tiny

STATE_BYTES = 400


def state(value: float) -> ClientState:
    return ClientState(
        personal=torch.full((80,), float(value)), memory=torch.full((20,), -float(value))
    )


def value(store: StateStore, client: int, before: int) -> float | None:
    """The client's state after `before` rounds, as the number it was made with."""
    found = store.get(client, before)
    if found.personal is None:
        assert found.tensors() == {}
        return None
    assert found.memory is not None
    assert bool((found.memory == -found.personal[0]).all())
    return float(found.personal[0])


def held_bytes(store: StateStore) -> int:
    """Bytes of states in memory, counted anew."""
    return sum(state.bytes for held in store._memory.values() for state in held.values())


def on_disk(store: StateStore, client: int) -> list[int]:
    files = (store.folder / f"{client:06d}").glob("round-*.safetensors")
    return sorted(int(file.stem.removeprefix("round-")) for file in files)


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    return StateStore(tmp_path / "clients", limit=3 * STATE_BYTES)


def test_an_unknown_client_has_an_empty_state(store: StateStore) -> None:
    assert value(store, 5, before=10) is None


def test_states_stay_in_memory_until_the_limit_and_then_the_longest_unused_go_to_disk(
    store: StateStore,
) -> None:
    for client in range(3):
        store.put(client, 1, state(client))
    assert not store.folder.exists()
    value(store, 0, before=1)  # now client 1 is the one unused for longest
    store.put(3, 1, state(3))
    assert [on_disk(store, client) for client in range(4)] == [[], [1], [], []]
    assert [value(store, client, before=1) for client in range(4)] == [0, 1, 2, 3]
    assert store.clients() == [0, 1, 2, 3]


def test_that_states_wait_on_disk_is_said_once_and_only_where_memory_was_meant_to_hold_some(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for limit in (0, 1 << 20):
        store = StateStore(tmp_path / str(limit), limit)
        for client in range(4):
            store.put(client, 1, ClientState(personal=torch.zeros(100_000)))  # 400 KB
    assert [record.getMessage() for record in caplog.records] == [
        "clients' states take more than the 1 MB of run.store_mb: those unused for longest wait on "
        "disk, which costs time"
    ]


def test_memory_never_holds_more_than_the_limit_and_one_state(store: StateStore) -> None:
    rng = np.random.default_rng(0)
    for rounds in range(1, 60):
        client = int(rng.integers(12))
        before = value(store, client, before=rounds - 1)
        assert before is None or before < rounds
        assert held_bytes(store) <= 4 * STATE_BYTES
        store.put(client, rounds, state(rounds))
        assert held_bytes(store) <= 3 * STATE_BYTES


def test_a_state_is_asked_for_by_the_round_it_precedes(store: StateStore) -> None:
    for rounds in (2, 5):
        store.put(0, rounds, state(rounds))
    assert [value(store, 0, before=b) for b in (1, 2, 4, 5, 9)] == [None, 2, 2, 5, 5]


def test_old_versions_on_disk_are_found_while_newer_ones_are_in_memory(store: StateStore) -> None:
    for rounds in (1, 2, 3, 4):
        store.put(0, rounds, state(rounds))
        if rounds == 1:
            store.flush()
    assert value(store, 0, before=1) == 1
    assert value(store, 0, before=4) == 4


def test_a_round_that_is_broken_off_and_made_again_starts_from_what_was_before(
    store: StateStore,
) -> None:
    store.put(0, 4, state(4))
    store.put(0, 5, state(50))  # round 4 was played by this client, then broken off
    assert value(store, 0, before=4) == 4
    store.put(0, 5, state(5))
    assert value(store, 0, before=5) == 5
    store.flush()
    assert value(StateStore(store.folder, 0), 0, before=5) == 5


def test_once_a_round_is_complete_memory_is_rid_of_what_was_before_it(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "clients", limit=10 * STATE_BYTES)
    for rounds in (1, 2):
        for client in (0, 1):
            store.put(client, rounds, state(10 * client + rounds))
    store.put(2, 3, state(23))  # of the round that has begun
    assert value(store, 2, before=2) is None  # whoever is asked for, two rounds are complete
    assert held_bytes(store) == store._bytes == 3 * STATE_BYTES
    store.flush()
    assert [on_disk(store, client) for client in range(3)] == [[2], [2], [3]]
    assert [value(store, client, before=2) for client in (0, 1)] == [2, 12]


@pytest.mark.parametrize("limit", [0, 2 * STATE_BYTES, 10 * STATE_BYTES])
def test_a_state_that_comes_too_late_leaves_the_newer_ones_as_they_are(
    tmp_path: Path, limit: int
) -> None:
    store = StateStore(tmp_path / "clients", limit)
    for rounds in (1, 3, 4, 2):
        store.put(0, rounds, state(rounds))
    store.put(1, 4, state(4))  # which sends the other's to disk where there is room for two
    store.flush(rounds=4)
    store.flush()
    assert value(StateStore(store.folder, 0), 0, before=3) == 3
    assert value(StateStore(store.folder, 0), 0, before=9) == 4


def test_what_is_flushed_is_there_for_another_process_to_read(store: StateStore) -> None:
    store.put(0, 1, state(1))
    store.put(1, 2, state(2))
    store.flush()
    other = StateStore(store.folder, limit=0)
    assert [value(other, client, before=2) for client in (0, 1)] == [1, 2]
    assert other.clients() == [0, 1]


def test_a_checkpoint_writes_only_the_states_that_a_run_resumed_there_needs(
    store: StateStore,
) -> None:
    for rounds in (3, 4, 5):
        store.put(0, rounds, state(rounds))
    store.put(1, 2, state(2))
    store.flush(rounds=4)  # round 4, which made version 5, was broken off
    assert [on_disk(store, client) for client in (0, 1)] == [[4], [2]]
    assert value(store, 0, before=5) == 5
    store.flush()
    assert on_disk(store, 0) == [4, 5]


def test_pruning_leaves_what_a_run_resumed_at_the_checkpoint_needs(store: StateStore) -> None:
    for rounds in (1, 3, 6):
        store.put(0, rounds, state(rounds))
        store.flush()
    store.put(1, 1, state(1))
    store.flush()
    store.prune(durable=5)
    assert on_disk(store, 0) == [3, 6]
    assert on_disk(store, 1) == [1]
    assert value(StateStore(store.folder, 0), 0, before=5) == 3


def test_between_checkpoints_three_versions_of_a_client_are_on_disk(store: StateStore) -> None:
    for rounds in range(1, 41):
        store.put(0, rounds, state(rounds))
        store.flush()
        if rounds == 4:
            store.prune(durable=4)
    assert on_disk(store, 0) == [4, 39, 40]
    again = StateStore(store.folder, 0)  # a process that does not know of the checkpoint
    for rounds in (41, 42, 43):
        again.put(0, rounds, state(rounds))
    assert value(again, 0, before=4) == 4


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("where", ["_hold", "_spill"])
def test_ctrl_c_in_the_midst_of_a_put_costs_no_state_before_it(
    store: StateStore, known: bool, where: str
) -> None:
    if known:
        store.put(0, 2, state(2))

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == where:
            raise KeyboardInterrupt  # at a call, where Python looks for signals

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            store.put(0, 3, state(3))
    finally:
        sys.settrace(before)
    store.flush(2)
    assert value(StateStore(store.folder, 0), 0, before=2) == (2 if known else None)


def test_rewinding_forgets_all_later_history_in_memory_and_on_disk(store: StateStore) -> None:
    for rounds in (2, 4, 6, 7):
        store.put(0, rounds, state(rounds))
        if rounds < 7:
            store.flush()
    store.put(1, 7, state(7))
    store.rewind(4)
    assert on_disk(store, 0) == [2, 4]
    assert value(store, 0, before=100) == 4
    assert value(store, 1, before=100) is None
    assert held_bytes(store) <= STATE_BYTES
    store.put(0, 5, state(5))  # and history goes on from there
    store.put(1, 5, state(55))
    store.flush()
    fresh = StateStore(store.folder, limit=0)
    assert [value(fresh, client, before=100) for client in (0, 1)] == [5, 55]


def test_a_damaged_state_is_named_in_one_sentence(store: StateStore) -> None:
    store.put(0, 1, state(1))
    store.flush()
    path = store.folder / "000000" / "round-000001.safetensors"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(CheckpointError, match=r"could not read .*000000/round-000001"):
        StateStore(store.folder, limit=0).get(0, before=1)


def resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_with_ten_thousand_clients_memory_stays_within_the_stores_limit(tmp_path: Path) -> None:
    """10 of 10,000 clients a round, each with a personal model of one megabyte."""
    clients, rounds, limit = 10_000, 12, 8 << 20
    config = tiny(
        algorithm={"name": "per-ssfl"},
        ssl={"projector_width": 300, "predictor_width": 300},
        partition={"clients": clients},
        server={"clients_per_round": 10, "rounds": rounds},
    )
    digits: DataSet = load_dataset(config.data)
    everyone = [np.array([k % 500, (k + 7) % 500]) for k in range(clients)]
    store = StateStore(tmp_path / "clients", limit)
    host = build_host(config, FederatedData(digits, everyone, None), store)
    server = build_server(config, host.trainer, LocalCommunicator([host]))
    personal = host.trainer.models.own.flat.vector.nbytes
    assert personal > 1_000_000
    resident = []
    for _ in range(rounds):
        server.play_round()
        assert held_bytes(store) <= limit
        resident.append(resident_megabytes())
    trained = store.clients()
    assert len(trained) > 115  # hardly anyone twice
    unbounded = len(trained) * personal / 2**20
    assert unbounded > 115
    growth = resident[-1] - resident[rounds // 4]  # once the store is full and torch warm
    assert growth < 0.15 * unbounded
    assert all(store.get(client, before=rounds).personal is not None for client in trained)


def test_a_state_put_again_is_counted_once_and_is_the_last_to_leave(store: StateStore) -> None:
    for client in (0, 1, 2, 0, 0, 0):
        store.put(client, 1, state(client))
    assert [on_disk(store, client) for client in range(3)] == [[], [], []]  # all three fit
    store.put(3, 1, state(3))
    assert [on_disk(store, client) for client in range(4)] == [[], [1], [], []]


def test_a_client_is_lost_whose_states_were_all_made_later(store: StateStore) -> None:
    for client, rounds in ((0, 5), (1, 2), (1, 5)):
        store.put(client, rounds, state(client))
    store.flush()
    assert store.lost([7, 1, 0], rounds=3) == [0]
    assert store.lost([7, 1, 0], rounds=1) == [0, 1]
    assert store.lost([7, 1, 0], rounds=5) == []
