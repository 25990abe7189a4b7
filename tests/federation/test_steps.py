"""Steps captured for a GPU, with the recording of CUDA graphs played by a stand-in."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from ssfl.federation import steps
from ssfl.federation.engine import DeviceOptions, Engine
from ssfl.federation.steps import CapturedStep

SHOWN = torch.zeros(1, 4), torch.zeros(1, 2, 4, 3)


class Graph:
    """Runs its work again where a CUDA graph would replay it."""

    def __init__(self, work: Callable[[], Tensor], totals: Tensor) -> None:
        self.work, self.totals = work, totals

    def replay(self) -> None:
        self.totals.copy_(self.work())


@pytest.fixture(autouse=True)
def no_gpu_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(work: Callable[[], Tensor], *_: Any) -> tuple[Graph, Tensor]:
        totals = work()
        return Graph(work, totals), totals

    monkeypatch.setattr(steps, "record", record)
    monkeypatch.setattr(steps, "beside", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


def fails_compiled(engine: Engine) -> Callable[[Tensor, Tensor], Tensor]:
    """A step whose compilation fails."""

    def run(index: Tensor, uniforms: Tensor) -> Tensor:
        if engine.compile:
            raise RuntimeError("no compiler")
        return index.sum()[None]

    return run


def fast_engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return Engine(DeviceOptions(device="cuda"))


def test_a_captured_step_is_replayed_on_what_it_is_called_with() -> None:
    step = CapturedStep(lambda index, _: index.sum()[None], lambda: False)
    step.ready(*SHOWN)
    assert float(step(torch.ones(1, 4), SHOWN[1])) == 4
    assert float(step(torch.full((1, 4), 2.0), SHOWN[1])) == 8


def test_where_compiling_fails_steps_are_captured_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = fast_engine(monkeypatch)
    run = fails_compiled(engine)
    for _ in range(2):  # the second as when statistics are frozen: a step made later on
        step = engine.step(run)
        step.ready(*SHOWN)
        assert isinstance(step, CapturedStep)
        assert step._captured
        assert float(step(torch.ones(1, 4), SHOWN[1])) == 4
    assert caplog.messages == ["steps are captured but not compiled: RuntimeError: no compiler"]


def test_no_other_trainer_captures_before_it_is_known_that_compiling_fails() -> None:
    held = []

    def stop_compiling() -> bool:
        held.append(steps._one_at_a_time.locked())
        return False

    def run(index: Tensor, uniforms: Tensor) -> Tensor:
        raise RuntimeError("no compiler")

    CapturedStep(run, stop_compiling).ready(*SHOWN)
    assert held == [True]


def test_where_capturing_fails_too_steps_are_simply_called(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[int] = []

    def run(index: Tensor, uniforms: Tensor) -> Tensor:
        seen.append(len(seen))
        if len(seen) < 3:
            raise RuntimeError("not on this GPU")
        return index.sum()[None]

    stops = iter([True, False])
    step = CapturedStep(run, lambda: next(stops))
    step.ready(*SHOWN)
    assert float(step(torch.ones(1, 4), SHOWN[1])) == 4
    assert caplog.messages == [
        "steps are captured but not compiled: RuntimeError: not on this GPU",
        "steps are neither captured nor compiled: RuntimeError: not on this GPU",
    ]


def test_out_of_memory_is_not_mended_by_doing_without() -> None:
    def run(index: Tensor, uniforms: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        CapturedStep(run, lambda: True).ready(*SHOWN)
