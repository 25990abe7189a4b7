"""States that several processes share: what one writes the others find, and no more than needed."""

from pathlib import Path

import pytest
import torch

from ssfl.federation.shared import SharedStore
from ssfl.federation.state import ClientState
from ssfl.federation.store import StateStore


def state(value: float) -> ClientState:
    return ClientState(personal=torch.full((4,), float(value)))


def versions(folder: Path, client: int) -> list[int]:
    files = (folder / f"{client:06d}").glob("*")
    return sorted(int(file.stem.removeprefix("round-")) for file in files)


def personal(store: StateStore, client: int, before: int) -> float | None:
    tensor = store.get(client, before).personal
    return None if tensor is None else float(tensor[0])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "clients"


def test_a_state_is_found_by_every_other_worker_as_soon_as_it_is_put(folder: Path) -> None:
    first, second = SharedStore(folder), SharedStore(folder)
    first.put(3, 1, state(1))
    assert personal(second, 3, before=1) == 1
    second.put(3, 2, state(2))
    assert personal(first, 3, before=2) == 2
    assert personal(first, 3, before=1) == 1
    assert len(first._memory[3]) <= 2  # what was read last, and no more


def test_a_worker_leaves_what_a_resumed_run_and_a_broken_round_would_ask_for(folder: Path) -> None:
    store = SharedStore(folder)
    store.durable = 2
    for rounds in range(1, 8):
        store.put(0, rounds, state(rounds))
    assert versions(folder, 0) == [2, 6, 7]


def test_pruning_deletes_outdated_versions_whoever_wrote_them(folder: Path) -> None:
    worker, server = SharedStore(folder), SharedStore(folder)
    for rounds in range(1, 6):
        worker.put(0, rounds, state(rounds))
        worker.put(1, rounds, state(-rounds))
    server.prune(4)
    assert versions(folder, 0) == versions(folder, 1) == [4, 5]
    server.prune(5)
    assert versions(folder, 0) == [5]
    assert personal(SharedStore(folder), 1, before=5) == -5


def test_a_client_without_anything_to_remember_costs_no_file(folder: Path) -> None:
    store = SharedStore(folder)
    store.put(0, 1, ClientState())
    assert personal(store, 0, before=1) is None
    assert not list(folder.rglob("*.safetensors"))


def test_going_back_forgets_what_came_after(folder: Path) -> None:
    store = SharedStore(folder)
    store.durable = 2
    for rounds in range(1, 5):
        store.put(0, rounds, state(rounds))
    SharedStore(folder).rewind(2)
    assert personal(SharedStore(folder), 0, before=4) == 2
