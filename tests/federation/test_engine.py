"""The passes that a GPU gets, traced and compiled here without one: the numbers of plain calls."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ssfl.algorithms.learner import Learner
from ssfl.assemble import build_algorithm, build_host, build_method, load_federated
from ssfl.data.federated import FederatedData
from ssfl.errors import ConfigError
from ssfl.federation.engine import DeviceOptions, Engine, pick_device
from ssfl.federation.messages import Task, TaskKind
from ssfl.federation.steps import PlainStep
from ssfl.federation.store import StateStore
from ssfl.models.norm import BatchNorm
from ssfl.ssl.base import Batch, Outputs
from tiny import tiny

BATCH = 16
METHODS: dict[str, dict[str, Any]] = {
    "simsiam": {"projector_width": 16, "predictor_width": 8},
    "byol": {"projector_width": 16, "projection_width": 8, "predictor_width": 16},
    "swav": {"projector_width": 16, "projection_width": 8, "prototypes": 12},
    "simclr": {"projector_width": 16, "projection_width": 8},
}


def learner(method: str, *, fast: bool, norm: str = "batch") -> Learner:
    """A learner as it is made for a GPU: both views in one pass, compiled if `fast`."""
    config = tiny(ssl={"method": method, **METHODS[method]}, model={"norm": norm})
    dataset = load_federated(config).dataset
    method_ = build_method(config, dataset.channels, dataset.image_size)
    made = Learner(method_.train(), config.local)
    made.method.see_views_in_one_pass()
    for child in made.method.modules():
        if isinstance(child, BatchNorm):
            child.plain_ops = True
    engine = Engine(DeviceOptions(device="cpu"))
    engine.compile = fast
    engine.prepare(made, build_algorithm(config), BATCH)
    return made


def batch(images: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(torch.randn(2, images, 1, 8, 8, generator=generator))


@pytest.fixture(autouse=True)
def no_code_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are traced and differentiated as on a GPU, and run without a C++ compiler's minute."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile_(f, backend="aot_eager"))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("method", "norm"), [*((m, "batch") for m in METHODS), ("simclr", "group")]
)
def test_compiled_steps_are_plain_steps(method: str, norm: str) -> None:
    ours, plain = (learner(method, fast=fast, norm=norm) for fast in (True, False))
    for step, images in enumerate((BATCH, BATCH, BATCH // 2, BATCH)):  # one odd batch among them
        for one in (ours, plain):
            one.rate.fill_(0.05)
            one.descend(one.loss(one(batch(images, step))))
        torch.testing.assert_close(ours.flat.vector, plain.flat.vector, rtol=1e-4, atol=1e-5)
        # On from the same place: a last digit apart, a ReLU may open in one and not in the other.
        with torch.no_grad():
            ours.flat.vector.copy_(plain.flat.vector)
            ours.momentum.copy_(plain.momentum)
    assert (
        plain.flat.vector - learner(method, fast=False, norm=norm).flat.vector
    ).abs().max() > 1e-3


def test_gradients_of_micro_batches_add_up() -> None:
    ours, plain = (learner("simsiam", fast=fast) for fast in (True, False))
    for one in (ours, plain):
        one.rate.fill_(0.05)
        for part in range(2):
            one.share, one.last = 0.5, part == 1
            one.descend(one.loss(one(batch(BATCH, part))))
    torch.testing.assert_close(ours.flat.vector, plain.flat.vector, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gpu", "meta", "mps", "cuda:x"])
def test_a_device_that_is_none_of_ours_is_refused_in_one_sentence(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' is not a device; use cpu, cuda or auto"):
        pick_device(name)


def test_a_gpu_beyond_the_last_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda") == torch.device("cuda")
    assert pick_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ConfigError, match="there is no GPU 2 here, the last is cuda:1"):
        pick_device("cuda:2")


def test_only_the_usual_batch_is_worth_compiled_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled: list[tuple[str, int]] = []

    def compile_(function: Any, **_: Any) -> Any:
        def run(first: Any, *others: Any) -> Any:
            name = getattr(function, "__name__", type(function).__name__)
            seen = {
                Batch: lambda: first.views.shape[1],
                Outputs: lambda: first.z.shape[1],
                torch.Tensor: lambda: len(first),
            }
            compiled.append((name, seen[type(first)]()))
            return function(first, *others)

        return run

    monkeypatch.setattr(torch, "compile", compile_)
    config = tiny(local={"batch": BATCH})
    dataset = load_federated(config).dataset
    parts = [np.arange(BATCH), np.arange(BATCH, 2 * BATCH - 3)]
    data = FederatedData(dataset, parts, [part[:3] for part in parts])
    engine = Engine(DeviceOptions(device="cpu"))
    engine.compile = True
    monkeypatch.setattr(engine, "step", PlainStep)  # there is no GPU to capture a step on
    host = build_host(config, data, StateStore(tmp_path, 1 << 20), engine)
    layout = host.trainer.layout
    theta = host.trainer.models.global_.flat.shared.clone()
    for client, images in enumerate((BATCH, BATCH - 3)):
        task = Task(TaskKind.TRAIN, 0, theta, layout.digest, rate=0.1)
        assert host.handle(client, task).failure is None
        assert compiled == [
            ("Views", BATCH),
            ("_forward", BATCH),
            ("loss", BATCH),
            ("_update", layout.trainable),  # of any batch
            *([("_update", layout.trainable)] if images != BATCH else []),
        ]
