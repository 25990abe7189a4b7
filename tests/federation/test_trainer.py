"""A client's local work: what it trains on, what it sends, what it keeps, how it is judged."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ssfl.algorithms import ALGORITHMS
from ssfl.assemble import build_host, build_method
from ssfl.config import Config
from ssfl.data.federated import FederatedData
from ssfl.data.images import DataSet, Images
from ssfl.data.sources import load_dataset
from ssfl.federation.client import Host
from ssfl.federation.messages import Reason, Task, TaskKind
from ssfl.federation.spares import Spares
from ssfl.federation.state import ClientState
from ssfl.federation.store import StateStore
from ssfl.federation.trainer import Result, Trainer
from ssfl.models.flat import Kind
from ssfl.models.norm import BatchNorm, GroupNorm
from ssfl.ssl.base import Batch, Method
from tiny import tiny

SIZES = {"large": 70, "small": 20, "single": 1}


@pytest.fixture(scope="module")
def digits() -> DataSet:
    return load_dataset(tiny().data)


@pytest.fixture
def build(digits: DataSet, tmp_path: Path) -> Callable[..., Host]:
    """build(local={...}): a host whose clients 0, 1, 2 hold 70, 20 and 1 images."""
    edges = np.cumsum([0, *SIZES.values()])
    parts = [np.arange(a, b) for a, b in pairwise(edges)]

    def make(images: Images | None = None, **sections: Any) -> Host:
        config: Config = tiny(**sections)
        train = images or digits.train
        data = FederatedData(
            DataSet(**{**vars(digits), "train": train}), parts, [p[:9] for p in parts]
        )
        return build_host(config, data, StateStore(tmp_path / "clients", 1 << 20))

    return make


def task(trainer: Trainer, round_: int = 0, rate: float = 0.05, **extra: Any) -> Task:
    theta = fresh(trainer)
    return Task(TaskKind.TRAIN, round_, theta, trainer.layout.digest, rate=rate, **extra)


def fresh(trainer: Trainer) -> Tensor:
    """Some Θ: the same for every trainer of one layout."""
    generator = torch.Generator().manual_seed(1)
    theta = torch.randn(trainer.layout.shared, generator=generator) / 5
    theta[trainer.layout.select([Kind.STATISTIC])] = 1.0
    return theta


def run(host: Host, client: int, state: ClientState | None = None, **extra: Any) -> Result:
    trainer = host.trainer
    indices = host.data.train_indices(client)
    return trainer.train(client, task(trainer, **extra), state or ClientState(), indices)


def record(trainer: Trainer) -> list[tuple[Tensor, Tensor]]:
    """From now on, what every step sees."""
    seen: list[tuple[Tensor, Tensor]] = []
    step = trainer._step

    class Recorder:
        def ready(self, index: Tensor, uniforms: Tensor) -> None: ...

        def __call__(self, index: Tensor, uniforms: Tensor) -> Tensor:
            seen.append((index, uniforms))
            return step(index, uniforms)

    trainer._step = Recorder()
    return seen


def plain_method(host: Host, config: Config, theta: Tensor) -> Method:
    """An ordinary module with Θ's values."""
    dataset = host.data.dataset
    method = build_method(config, dataset.channels, dataset.image_size).train()
    method.load_state_dict(host.trainer.layout.tensors(theta), strict=False)
    return method


def shared_part(host: Host, method: Method) -> Tensor:
    """An ordinary module's tensors in the order of the vector."""
    tensors = method.state_dict()
    out = torch.empty(host.trainer.layout.shared)
    for name, view in host.trainer.layout.tensors(out).items():
        view.copy_(tensors[name])
    return out


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_local_training_is_what_a_plain_pytorch_loop_does(
    build: Callable[..., Host], norm: str
) -> None:
    host = build(local={"epochs": 2}, model={"norm": norm})
    seen = record(host.trainer)
    result = run(host, 0)
    theta = fresh(host.trainer)
    method = plain_method(host, tiny(model={"norm": norm}), theta)
    optimizer = torch.optim.SGD(method.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    losses = []
    for (rows,), (uniforms,) in seen:
        views = host.trainer.views(host.data.dataset.train.pixels[rows], uniforms)
        loss = method.loss(method(Batch(views)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert result.delta is not None
    torch.testing.assert_close(
        theta + result.delta, shared_part(host, method), rtol=1e-4, atol=1e-5
    )
    assert result.metrics["loss"] == pytest.approx(np.mean(losses), abs=1e-5)


def test_every_epoch_sees_each_image_at_most_once_and_drops_the_tail(
    build: Callable[..., Host],
) -> None:
    host = build(local={"epochs": 3})
    seen = record(host.trainer)
    result = run(host, 0)
    assert result.steps == len(seen) == 3 * 2  # 70 images: two batches of 32, and six left over
    own = set(host.data.train_indices(0).tolist())
    for epoch in range(3):
        rows = torch.cat([index.flatten() for index, _ in seen[2 * epoch : 2 * epoch + 2]])
        assert len(rows) == len(set(rows.tolist())) == 64
        assert set(rows.tolist()) <= own


def test_with_a_number_of_steps_every_client_makes_as_many_in_passes_over_all_it_has(
    build: Callable[..., Host],
) -> None:
    host = build(local={"steps": 5})
    for client, full, size in ((0, 2, 32), (1, 1, None)):  # 70 images, and less than a batch
        seen = record(host.trainer)
        own = host.data.train_indices(client).tolist()
        assert run(host, client).steps == len(seen) == 5
        batches = [index.flatten().tolist() for index, _ in seen]
        assert {len(batch) for batch in batches} == {size or len(own)}
        for start in range(0, 5, full):
            rows = [row for batch in batches[start : start + full] for row in batch]
            assert len(rows) == len(set(rows))
            assert set(rows) <= set(own)
    first, third = (sorted(batch) for batch in (batches[0], batches[2]))
    assert first == third == sorted(own)


def test_a_client_smaller_than_the_batch_trains_on_all_it_has(build: Callable[..., Host]) -> None:
    host = build()
    seen = record(host.trainer)
    result = run(host, 1)
    assert result.steps == 1
    ((index, _),) = seen
    assert sorted(index.flatten().tolist()) == host.data.train_indices(1).tolist()
    assert result.delta is not None
    assert result.delta.abs().sum() > 0


@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize("algorithm", ["global-ssfl", "per-ssfl", "la-ssfl", "maml-ssfl"])
def test_a_single_image_makes_no_step(
    build: Callable[..., Host], algorithm: str, steps: int
) -> None:
    host = build(algorithm={"name": algorithm}, local={"steps": steps})
    result = run(host, 2)
    assert result.steps == 0
    assert result.delta is not None
    assert not result.delta.any()
    trainer = host.trainer
    encoder = trainer.encoder(2, task(trainer), result.state, host.data.train_indices(2))
    assert bool(encoder(torch.zeros(2, 1, 8, 8)).isfinite().all())


def test_micro_batches_cover_a_batch_in_near_equal_parts_of_two_or_more(
    build: Callable[..., Host],
) -> None:
    for micro in (1, 2, 3, 7, 16, 40):
        trainer = build(local={"micro_batch": micro}).trainer
        for images in range(2, 33):
            parts = trainer._micro_batches(images)
            sizes = [part.stop - part.start for part, _, _ in parts]
            assert sum(sizes) == images == parts[-1][0].stop
            assert max(sizes) - min(sizes) <= 1
            assert min(sizes) >= 2  # batch norm needs two
            assert max(sizes) <= max(micro, 3)
            assert sum(share for _, share, _ in parts) == pytest.approx(1)
            assert [last for _, _, last in parts] == [False] * (len(parts) - 1) + [True]


def test_a_step_of_micro_batches_is_one_step_along_their_mean_gradient(
    build: Callable[..., Host],
) -> None:
    host = build(local={"micro_batch": 10})
    seen = record(host.trainer)
    result = run(host, 1)
    assert result.steps == 1
    theta = fresh(host.trainer)
    method = plain_method(host, tiny(), theta)
    optimizer = torch.optim.SGD(method.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    (((rows,), (uniforms,)),) = seen
    for part in (slice(0, 10), slice(10, 20)):
        views = host.trainer.views(host.data.dataset.train.pixels[rows[part]], uniforms[:, part])
        (method.loss(method(Batch(views))) / 2).backward()
    optimizer.step()
    assert result.delta is not None
    torch.testing.assert_close(
        theta + result.delta, shared_part(host, method), rtol=1e-4, atol=1e-5
    )


def weights(module: torch.nn.Module) -> Tensor:
    return torch.cat([t.detach().flatten() for t in module.state_dict().values()])


def test_the_global_encoder_is_thetas(build: Callable[..., Host]) -> None:
    host = build()
    trainer = host.trainer
    run(host, 0)
    theta = fresh(trainer)
    expected = weights(plain_method(host, tiny(), theta).backbone)
    indices = host.data.train_indices(0)
    assert torch.equal(weights(trainer.global_encoder(theta)), expected)
    judged_by = trainer.encoder(0, task(trainer), ClientState(), indices)
    assert torch.equal(weights(judged_by), expected)


def test_the_personal_encoder_is_the_clients_own_and_thetas_before_its_first_round(
    build: Callable[..., Host],
) -> None:
    config = {"name": "per-ssfl"}
    host = build(algorithm=config)
    trainer, indices = host.trainer, host.data.train_indices(0)
    theta = fresh(trainer)
    before = weights(trainer.encoder(0, task(trainer), ClientState(), indices))
    assert torch.equal(before, weights(plain_method(host, tiny(), theta).backbone))
    result = run(host, 0)
    run(host, 1)  # somebody else's model comes and goes
    assert result.state.personal is not None
    after = weights(trainer.encoder(0, task(trainer, round_=1), result.state, indices))
    own = plain_method(host, tiny(algorithm=config), result.state.personal)
    assert torch.equal(after, weights(own.backbone))
    assert not torch.allclose(after, before)


def test_the_adapted_encoder_is_one_sgd_step_from_theta_at_the_base_rate(
    build: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = build(algorithm={"name": "la-ssfl"}, local={"lr": 0.05})
    trainer = host.trainer
    batches: list[Batch] = []
    make = trainer._in_parts

    def keep(*args: Any) -> Iterator[list[Batch]]:
        for made in make(*args):
            batches.extend(made)
            yield made

    monkeypatch.setattr(trainer, "_in_parts", keep)
    last_round = task(trainer, round_=9, rate=0.0, progress=1.0)  # the schedule is at its end
    encoder = trainer.encoder(0, last_round, ClientState(), host.data.train_indices(0))
    method = plain_method(host, tiny(), last_round.theta)
    optimizer = torch.optim.SGD(method.parameters(), lr=0.05, weight_decay=5e-4)
    (batch,) = batches
    method.loss(method(batch)).backward()
    optimizer.step()
    torch.testing.assert_close(weights(encoder), weights(method.backbone), rtol=1e-4, atol=1e-5)
    again = trainer.encoder(0, last_round, ClientState(), host.data.train_indices(0))
    assert torch.equal(weights(again), weights(encoder))


def test_fedbn_keeps_batch_norm_with_the_client(build: Callable[..., Host]) -> None:
    host = build(local={"batch_norm": "fedbn"})
    trainer = host.trainer
    norms = trainer.layout.select([Kind.NORM, Kind.STATISTIC])
    result = run(host, 0)
    assert result.delta is not None
    assert not result.delta[norms].any()
    assert bool((result.delta[~norms] != 0).any())
    assert result.state.norms is not None
    assert not torch.equal(result.state.norms, fresh(trainer)[norms])
    judged = trainer.encoder(0, task(trainer), result.state, host.data.train_indices(0))
    expected = fresh(trainer)
    expected[norms] = result.state.norms
    assert torch.equal(weights(judged), weights(plain_method(host, tiny(), expected).backbone))
    # The next round starts from them: without a step, nothing about them changes.
    kept = run(host, 2, result.state).state.norms
    assert kept is not None
    assert torch.equal(kept, result.state.norms)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_fedbn_keeps_the_norms_of_an_ema_copy_too(build: Callable[..., Host], norm: str) -> None:
    widths = {"projector_width": 16, "projection_width": 8, "predictor_width": 8}
    host = build(
        ssl={"method": "byol", "momentum": 0.5, **widths},
        local={"batch_norm": "fedbn"},
        model={"norm": norm},
    )
    flat = host.trainer.models.global_.flat
    parts = dict(flat.module.named_modules())
    moved = run(host, 0).delta
    assert moved is not None
    for entry in flat.layout.entries:
        is_norm = isinstance(parts[entry.name.rpartition(".")[0]], BatchNorm | GroupNorm)
        assert bool(moved[entry.range].any()) != is_norm, entry.name


def test_scaffold_corrects_nothing_that_fedbn_keeps_with_the_client(
    build: Callable[..., Host],
) -> None:
    host = build(local={"batch_norm": "fedbn", "correction": "scaffold"})
    norms = host.trainer.layout.select([Kind.NORM])[: host.trainer.layout.trainable]
    state = ClientState()
    for round_ in range(2):
        control = torch.zeros(len(norms))
        result = run(host, 0, state, round_=round_, control=control, folded={0: round_ - 1})
        state = result.state
        assert result.control is not None
        assert state.control is not None
        for variate in (result.control, state.control):
            assert not variate[norms].any()
            assert bool((variate[~norms] != 0).any())


def test_fedprox_does_not_hold_what_fedbn_keeps_with_the_client_to_the_servers(
    build: Callable[..., Host],
) -> None:
    """In a single step from the place that it is held to, nothing is held back."""
    first = run(build(local={"batch_norm": "fedbn"}), 0).state

    def second(**correction: Any) -> Tensor:
        result = run(build(local={"batch_norm": "fedbn", **correction}), 1, first, round_=1)
        assert result.steps == 1
        assert result.state.norms is not None
        return result.state.norms

    held = second(correction="fedprox", proximal=5.0)
    assert torch.equal(held, second())


def test_scaffolds_control_variate_is_the_mean_gradient_though_a_client_starts_beside_theta(
    build: Callable[..., Host],
) -> None:
    """FedEMA: of its own model, a client that meets another Θ for the first time keeps τ."""
    host = build(
        local={"correction": "scaffold", "momentum": 0.0, "weight_decay": 0.0},
        algorithm={"name": "fedema", "tau": 0.7},
    )
    trainer = host.trainer
    theta, trainable = fresh(trainer), trainer.layout.trainable
    mine = theta * 1.5
    result = run(host, 1, ClientState(mine=mine), rate=0.05)
    assert result.steps == 1
    assert result.delta is not None
    start, end = theta + 0.7 * (mine - theta), theta + result.delta
    gradient = (start - end)[:trainable] / 0.05
    torch.testing.assert_close(result.state.control, gradient, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("algorithm", ["global-ssfl", "per-ssfl"])
def test_a_client_that_comes_late_or_again_is_at_the_experiments_progress_from_its_first_step(
    build: Callable[..., Host], algorithm: str
) -> None:
    """SwAV's prototypes are frozen for the first tenth: this client makes one step in a round."""
    host = build(
        ssl={"method": "swav", "projector_width": 16, "prototypes": 8, "freeze_share": 0.1},
        algorithm={"name": algorithm},
    )
    known = run(host, 1, progress=0.0).state
    for state in (ClientState(), known):
        for progress, moves in ((0.05, False), (0.5, True)):
            result = run(host, 1, state, progress=progress)
            assert result.steps == 1
            models = [host.trainer.models.global_, host.trainer.models.personal]
            for model in filter(None, models):
                gradient = model.momentum  # of the one step, and of weight decay
                frozen = model.flat.layout.tensors(gradient)["prototypes"]
                pull = 5e-4 * frozen.numel() ** 0.5
                assert (float(frozen.norm()) > 10 * pull) == moves


def test_frozen_statistics_are_a_plain_loop_on_weights_as_the_norms_let_them_out(
    build: Callable[..., Host],
) -> None:
    """The oracle has each σ divided out of its convolution, for good, and norms that divide by 1:
    an ordinary network without normalisation, and ordinary SGD."""
    host = build(local={"freeze_statistics": 0.5})
    trainer = host.trainer
    theta = fresh(trainer)
    generator = torch.Generator().manual_seed(2)
    for name, statistic in trainer.layout.tensors(theta).items():
        if name.startswith("backbone.") and name.endswith("running_var"):
            statistic.copy_(10 ** (1 - 4 * torch.rand(len(statistic), generator=generator)))
    run(host, 1, progress=0.5)  # from here on
    seen = record(trainer)
    frozen = replace(task(trainer, progress=0.7), theta=theta.clone())
    result = trainer.train(0, frozen, ClientState(), host.data.train_indices(0))

    method = plain_method(host, tiny(), theta)
    deviations = {}
    for name in ("stem", "down1", "same1", "down2", "same2"):
        layer = method.backbone.get_submodule(name)
        deviations[name] = torch.sqrt(layer.norm.running_var + 1e-5)
        layer.conv.weight.data /= deviations[name].view(-1, 1, 1, 1)
        layer.norm.running_mean /= deviations[name]
        layer.norm.running_var.fill_(1 - 1e-5)
        layer.norm.eval()
    optimizer = torch.optim.SGD(method.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for (rows,), (uniforms,) in seen:
        views = trainer.views(host.data.dataset.train.pixels[rows], uniforms)
        optimizer.zero_grad()
        method.loss(method(Batch(views))).backward()
        optimizer.step()
    for name, deviation in deviations.items():
        method.backbone.get_submodule(name).conv.weight.data *= deviation.view(-1, 1, 1, 1)
    assert result.delta is not None
    steps = trainer.layout.trainable
    torch.testing.assert_close(
        (theta + result.delta)[:steps], shared_part(host, method)[:steps], rtol=1e-4, atol=1e-5
    )
    still = trainer.layout.tensors(result.delta)
    assert all(not still[n].any() for n in still if n.startswith("backbone.") and "running_" in n)


def test_statistics_are_frozen_in_the_backbone_of_theta_alone_and_only_after_their_time(
    build: Callable[..., Host],
) -> None:
    host = build(local={"freeze_statistics": 0.5}, algorithm={"name": "per-ssfl"})
    layout = host.trainer.layout

    def moved(vector: Tensor) -> tuple[bool, bool]:
        """Did any statistic of the backbone, and any of the heads, leave the 1 it began as?"""
        tensors = {n: t for n, t in layout.tensors(vector).items() if "running_" in n}
        of = {name: bool((tensor != 1).any()) for name, tensor in tensors.items()}
        backbone = [of[name] for name in of if name.startswith("backbone.")]
        heads = [of[name] for name in of if not name.startswith("backbone.")]
        return any(backbone), any(heads)

    for progress, expected in ((0.49, True), (0.5, False), (0.0, True)):
        result = run(host, 0, progress=progress)
        assert result.delta is not None
        assert result.state.personal is not None
        assert moved(result.delta + fresh(host.trainer)) == (expected, True)
        assert moved(result.state.personal) == (True, True)


def test_adapting_at_inference_is_with_frozen_statistics_where_training_was(
    build: Callable[..., Host],
) -> None:
    host = build(local={"freeze_statistics": 0.5}, algorithm={"name": "la-ssfl"})
    trainer, rows = host.trainer, host.data.train_indices(0)
    early, late = (
        trainer.encoder(0, task(trainer, progress=progress), ClientState(), rows).state_dict()
        for progress in (0.1, 1.0)
    )
    assert early.keys() == late.keys()
    assert all(bool((late[name] == 1).all()) for name in late if "running_" in name)


@pytest.mark.parametrize("algorithm", ["global-ssfl", "per-ssfl", "la-ssfl", "maml-ssfl"])
def test_clients_learn_from_views_of_the_size_asked_for_and_are_judged_on_whole_images(
    build: Callable[..., Host], algorithm: str
) -> None:
    host = build(views={"size": 12}, algorithm={"name": algorithm})
    trainer, seen = host.trainer, set[int]()
    for learner in trainer.models.learners:
        learner.method.backbone.register_forward_pre_hook(
            lambda _, inputs: seen.add(inputs[0].shape[-1])
        )
    run(host, 0)
    assert seen == {12}
    encoder = trainer.encoder(0, task(trainer), ClientState(), host.data.train_indices(0))
    assert seen == {12}  # also where it adapts before it is judged
    seen.clear()
    trainer.features(encoder, host.data.dataset.test, torch.arange(9), 4)
    assert seen == {8}


def test_kept_momentum_carries_the_last_round_into_the_next(build: Callable[..., Host]) -> None:
    host = build(local={"keep_momentum": True})
    first = run(host, 1)
    momentum = first.state.momentum
    assert momentum is not None
    assert momentum.abs().sum() > 0
    with_it = run(host, 1, first.state, round_=1)
    without = run(host, 1, ClientState(), round_=1)
    assert with_it.delta is not None
    assert without.delta is not None
    difference = (with_it.delta - without.delta)[: host.trainer.layout.trainable]
    torch.testing.assert_close(difference, -0.05 * 0.9 * momentum, rtol=1e-3, atol=1e-6)
    assert (
        build()
        .trainer.train(  # by default none is kept
            1, task(host.trainer), ClientState(), host.data.train_indices(1)
        )
        .state.momentum
        is None
    )


def test_local_only_sends_nothing_and_keeps_what_it_learned(build: Callable[..., Host]) -> None:
    host = build(algorithm={"name": "local-only"})
    result = run(host, 0)
    assert result.delta is None
    assert result.steps == 2
    personal = result.state.personal
    assert personal is not None
    assert not torch.equal(personal[: host.trainer.layout.shared], fresh(host.trainer))


def test_training_never_reads_labels(build: Callable[..., Host], digits: DataSet) -> None:
    labels = digits.train.labels
    assert labels is not None
    shuffled = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]
    for section, reads in (
        ({}, False),
        ({"algorithm": {"name": "per-ssfl"}}, False),
        ({"ssl": {"method": "byol", "projector_width": 16, "projection_width": 8}}, False),
        ({"ssl": {"method": "supervised"}}, True),  # or this test could not fail
    ):
        deltas = [
            run(build(Images(digits.train.pixels, given), **section), 0).delta
            for given in (labels, shuffled)
        ]
        assert deltas[0] is not None
        assert deltas[1] is not None
        assert torch.equal(deltas[0], deltas[1]) is not reads


def test_what_stays_at_home_neither_travels_nor_reaches_another_client(
    build: Callable[..., Host],
) -> None:
    host = build(ssl={"method": "moco", "queue": 200})
    trainer = host.trainer
    assert trainer.models.global_.flat.home.numel() > 0
    alone = run(host, 1)
    first = run(host, 0)
    second = run(host, 1)  # after another client has filled its queue
    for result in (first, second):
        assert result.delta is not None
        assert len(result.delta) == trainer.layout.shared == len(fresh(trainer))
    assert alone.state.home is not None
    assert alone.state.home.any()
    assert first.state.home is not None
    assert not torch.equal(first.state.home, alone.state.home)
    assert same(alone, second)


def same(one: Result, other: Result) -> bool:
    """The same bits in everything a client sends and keeps."""
    mine, yours = one.state.tensors(), other.state.tensors()
    tensors = [(mine[name], yours[name]) for name in mine]
    if one.delta is not None and other.delta is not None:
        tensors.append((one.delta, other.delta))
    return mine.keys() == yours.keys() and all(torch.equal(a, b) for a, b in tensors)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("method", ["simsiam", "byol"])
def test_a_client_learns_the_same_whoever_was_served_before(
    build: Callable[..., Host], algorithm: str, method: str
) -> None:
    heads = {"projector_width": 16, "predictor_width": 8}
    correction = "scaffold" if ALGORITHMS[algorithm].sends else "none"
    sections = {
        "algorithm": {"name": algorithm},
        "ssl": {"method": method, **heads},
        "local": {"correction": correction, "keep_momentum": True},
    }
    control = torch.full((build(**sections).trainer.layout.trainable,), 1e-3)
    alone = run(build(**sections), 0, control=control)
    host = build(**sections)
    neighbour = run(host, 1, control=control)
    host.trainer.encoder(
        1, task(host.trainer, round_=1), neighbour.state, host.data.train_indices(1)
    )
    run(host, 1, neighbour.state, round_=1, control=control)
    assert same(run(host, 0, control=control), alone)


def test_the_state_a_client_was_given_is_left_as_it_was(build: Callable[..., Host]) -> None:
    host = build(algorithm={"name": "per-ssfl"}, local={"keep_momentum": True})
    first = run(host, 0).state
    before = copy.deepcopy(first)
    second = run(host, 0, first, round_=1).state
    run(host, 1, round_=1)
    for name, tensor in before.tensors().items():
        assert torch.equal(first.tensors()[name], tensor)
        assert not torch.equal(second.tensors()[name], tensor)


def test_a_client_answers_a_model_of_another_layout_by_refusing_it(
    build: Callable[..., Host],
) -> None:
    host = build()
    reply = host.handle(0, Task(TaskKind.TRAIN, 0, fresh(host.trainer), "0123456789abcdef"))
    assert reply.failure is not None
    assert reply.failure.reason is Reason.REFUSED


def test_whatever_goes_wrong_at_a_client_is_a_typed_failure_and_keeps_its_old_state(
    build: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = build(algorithm={"name": "per-ssfl"})
    good = host.handle(0, task(host.trainer))
    assert good.failure is None
    assert good.samples == 70
    kept = host.store.get(0, before=1)

    def broken(*_: Any) -> None:
        raise RuntimeError("the disk burns")

    monkeypatch.setattr(host.trainer, "_one_step", broken)
    monkeypatch.setattr(host.trainer._step, "_run", broken)
    bad = host.handle(0, task(host.trainer, round_=1))
    assert bad.failure is not None
    assert bad.failure.reason is Reason.ERROR
    assert "the disk burns" in bad.failure.detail
    assert host.store.get(0, before=2) is kept


SPOILS = {
    "not finite": (float("nan"), 0.0, "what it learned is not finite"),
    "far too long": (1e6, 1e-3, "over the limit"),
}
KEEPERS: list[dict[str, Any]] = [
    {"algorithm": {"name": "per-ssfl"}},
    {"algorithm": {"name": "fedema"}},
    {"local": {"keep_momentum": True}},
    {"local": {"batch_norm": "fedbn"}},
    {"local": {"correction": "scaffold"}},
    {"ssl": {"method": "moco", "queue": 64}},
]


@pytest.mark.parametrize("sections", KEEPERS, ids=str)
@pytest.mark.parametrize("accident", SPOILS)
def test_a_client_keeps_nothing_of_work_that_an_accident_has_spoilt(
    build: Callable[..., Host],
    monkeypatch: pytest.MonkeyPatch,
    accident: str,
    sections: dict[str, Any],
) -> None:
    factor, limit, words = SPOILS[accident]
    host = build(**sections)
    control = torch.zeros(host.trainer.layout.trainable)
    assert host.handle(0, task(host.trainer, control=control)).failure is None
    kept = host.store.get(0, before=1)
    assert kept.tensors()
    for learner in host.trainer.models.learners:
        loss = learner.passes.loss
        hurt = replace(learner.passes, loss=lambda outputs, loss=loss: loss(outputs) * factor)
        monkeypatch.setattr(learner, "passes", hurt)
    reply = host.handle(0, task(host.trainer, round_=1, limit=limit, control=control))
    assert reply.failure is not None
    assert reply.failure.reason is Reason.REFUSED
    assert words in reply.failure.detail
    assert host.store.get(0, before=2) is kept


def test_a_gpu_too_small_is_a_failure_that_says_what_to_do(
    build: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = build()

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB")

    monkeypatch.setattr(host.trainer._step, "_run", full)
    reply = host.handle(0, task(host.trainer))
    assert reply.failure is not None
    assert "lower device.workers, or set local.micro_batch" in reply.failure.detail


@pytest.mark.parametrize("returned", [torch.ones(()), (torch.ones(()),) * 2, ()])
def test_a_step_that_returns_other_figures_than_it_names_is_an_error(
    build: Callable[..., Host], monkeypatch: pytest.MonkeyPatch, returned: Any
) -> None:
    host = build()
    monkeypatch.setattr(host.trainer.algorithm, "step", lambda *_: returned)
    failure = host.handle(0, task(host.trainer)).failure
    assert failure is not None
    assert "a tensor for each of its metrics (loss)" in failure.detail


def test_a_personal_model_that_was_not_asked_for_is_said_to_be_missing(
    build: Callable[..., Host],
) -> None:
    with pytest.raises(AssertionError, match="`personal = True`"):
        _ = build().trainer.models.own


def test_memory_for_updates_is_used_again_only_once_nobody_reads_it() -> None:
    spares, like = Spares(), torch.zeros(8)
    first = spares.take(like)
    second = spares.take(like)
    assert first.data_ptr() != second.data_ptr()
    where, part = first.data_ptr(), first[2:4]
    del first
    assert spares.take(like).data_ptr() != where  # a part of it is still read
    array = part.numpy()
    del part
    assert spares.take(like).data_ptr() != where  # and now by numpy
    del array
    assert spares.take(like).data_ptr() == where
    many = [spares.take(like) for _ in range(10)]
    assert len({vector.data_ptr() for vector in many}) == 10
