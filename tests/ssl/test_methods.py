"""What is promised of every SSL method, whichever it is."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ssfl.algorithms.base import Models
from ssfl.algorithms.learner import Learner
from ssfl.algorithms.maml_ssfl import MAMLSSFL, MAMLSSFLOptions
from ssfl.algorithms.options import LocalOptions
from ssfl.config import load_config, parse
from ssfl.errors import ConfigError
from ssfl.models.backbones import Backbone
from ssfl.models.flat import FlatModel, Kind
from ssfl.models.norm import BatchNorm
from ssfl.ssl import METHODS
from ssfl.ssl.base import Batch, Method, Outputs, negative_cosine

NAMES = sorted(METHODS)
TWO_VIEWS = [name for name in NAMES if name != "supervised"]
PER_VIEW = [name for name in NAMES if not METHODS[name].joint_statistics]


@pytest.mark.parametrize("name", TWO_VIEWS)
def test_layers_without_any_width_are_refused_by_their_names(name: str) -> None:
    widths = [field for field in METHODS[name].Options.model_fields if field.endswith("_width")]
    assert "projector_width" in widths
    for width in widths:
        with pytest.raises(ConfigError, match=f"ssl.{width} = 0: it should be greater than"):
            parse({"ssl": {"method": name, width: 0}})


class Pixels(Backbone):
    """A backbone that traces quickly."""

    def __init__(self) -> None:
        super().__init__()
        self.features = 8
        self.layers = nn.Sequential(nn.Linear(64, 8, bias=False), BatchNorm(8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1))


class NoReading(TorchDispatchMode):
    """Refuses what makes the host wait for a value, or shapes depend on one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        refused = ("_local_scalar_dense", "nonzero", "masked_select", "unique")
        assert not any(name in str(func) for name in refused), f"{func} would read a value"
        return func(*args, **(kwargs or {}))


def tensors(outputs: Outputs) -> list[Tensor]:
    """z, p, and whatever the target is made of."""
    target = outputs.target
    parts = list(target) if isinstance(target, tuple) else [] if target is None else [target]
    return [outputs.z, outputs.p, *parts]


def gradients(method: Method, loss: Tensor) -> dict[str, Tensor]:
    moved = {name: p for name, p in method.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(moved.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(moved.items(), found, strict=True)
    }


@pytest.mark.parametrize("name", NAMES)
def test_options_are_described_and_round_trip(name: str) -> None:
    options = METHODS[name].Options()
    assert options.method == name
    for field, info in type(options).model_fields.items():
        assert field == "method" or info.description, field
    assert type(options)(**options.model_dump()) == options


@pytest.mark.parametrize("name", TWO_VIEWS)
@pytest.mark.parametrize("n", [2, 5])
def test_projections_and_predictions_are_views_by_images_by_width(make, batch, name, n) -> None:
    outputs = make(name)(batch(n))
    assert outputs.z.shape[:2] == outputs.p.shape[:2] == (2, n)
    assert outputs.p.shape == outputs.z.shape


def test_supervised_gives_features_logits_and_labels_of_one_view(make, batch) -> None:
    one = batch(5, views=1)
    outputs = make("supervised")(one)
    assert outputs.z.shape == (1, 5, 16)
    assert outputs.p.shape == (1, 5, 10)
    assert outputs.target is one.labels


@pytest.mark.parametrize("name", ["simclr", "swav", "moco", "barlow-twins", "vicreg"])
def test_without_a_predictor_predictions_are_projections(make, batch, name) -> None:
    outputs = make(name)(batch())
    assert outputs.p is outputs.z


@pytest.mark.parametrize("name", TWO_VIEWS)
def test_any_method_can_be_pulled_to_another_models_predictions(make, batch, name) -> None:
    personal, global_ = make(name, seed=1), make(name, seed=2)
    (p1, p2), (g1, g2) = personal(batch()).p, global_(batch()).p
    gradient = gradients(personal, negative_cosine(p1, g1) + negative_cosine(p2, g2))
    assert gradient["backbone.stem.conv.weight"].abs().max() > 0


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_reads_outputs_alone(make, batch, name) -> None:
    method = make(name)
    outputs = method(batch(views=method.views))
    before = method.loss(outputs)
    with torch.no_grad():
        for tensor in [*method.parameters(), *method.buffers()]:
            tensor.fill_(torch.nan)
    assert torch.equal(method.loss(outputs), before)
    assert before.isfinite()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_every_weight_and_no_target(make, batch, name) -> None:
    method = make(name, **({"freeze_share": 0.0} if name == "swav" else {}))
    method(batch(views=method.views))  # MoCo's queue is empty before
    outputs = method(batch(views=method.views, seed=1))
    for weight, gradient in gradients(method, method.loss(outputs)).items():
        assert gradient.abs().max() > 0, weight
    for name, parameter in method.named_parameters():
        assert parameter.requires_grad is not name.startswith("target_")
    target = outputs.target
    if isinstance(target, Tensor):
        assert not target.requires_grad


@pytest.mark.parametrize("name", ["simsiam", "byol"])
def test_no_gradient_flows_through_what_is_predicted(make, batch, name) -> None:
    method = make(name)
    z, p, target = (None if t is None else t.detach().requires_grad_() for t in method(batch()))
    held = z if target is None else target
    loss = method.loss(Outputs(z, p, target))
    to_held, to_p = torch.autograd.grad(loss, [held, p], allow_unused=True)
    assert to_held is None
    assert (to_p.abs().amax(dim=-1) > 0).all()


def test_no_gradient_flows_into_keys_queue_or_codes(make, batch) -> None:
    for name, still in [("moco", (0, 1)), ("swav", (1,))]:
        method = make(name)
        method(batch())
        z, _, target = method(batch(seed=1))
        target = type(target)(*(t.detach().requires_grad_() for t in target))
        z = z.detach().requires_grad_()
        loss = method.loss(Outputs(z, z, target))
        found = torch.autograd.grad(loss, [*target, z], allow_unused=True)
        assert all(found[i] is None for i in still)
        assert any(g is not None and (g.abs().amax(dim=-1) > 0).all() for g in found)


@pytest.mark.parametrize("name", PER_VIEW)
def test_views_in_one_pass_give_what_views_in_turn_give(make, batch, name) -> None:
    in_turn = make(name)
    at_once = copy.deepcopy(in_turn)
    at_once.see_views_in_one_pass()
    for seed in range(3):
        seen = batch(views=in_turn.views, seed=seed)
        one, other = in_turn(seen), at_once(seen)
        for a, b in zip(tensors(one), tensors(other), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        first, second = (m.loss(o) for m, o in [(in_turn, one), (at_once, other)])
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)
        slopes = zip(
            gradients(in_turn, first).values(), gradients(at_once, second).values(), strict=True
        )
        for a, b in slopes:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for (key, a), b in zip(in_turn.named_buffers(), at_once.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", ["simclr", "swav"])
def test_joint_statistics_are_those_of_both_views_together(make, batch, name) -> None:
    method, two = make(name), batch()
    features = []
    method.backbone.stem.norm.register_forward_hook(lambda _, __, out: features.append(out.clone()))
    method(two)
    (seen,) = features
    assert len(seen) == 24
    torch.testing.assert_close(seen.mean(dim=(0, 2, 3)), torch.zeros(4), atol=1e-5, rtol=0)
    means = seen.unflatten(0, (2, 12)).mean(dim=(1, 3, 4))
    assert means.abs().max() > 1e-4
    together = copy.deepcopy(method)
    together.see_views_in_one_pass()
    torch.testing.assert_close(together(two).z, method(two).z)


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_float32_under_bf16_autocast(make, batch, name) -> None:
    method = make(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = method(batch(views=method.views))
        inside = method.loss(outputs)
    assert outputs.p.dtype is torch.bfloat16
    assert inside.dtype is torch.float32
    assert torch.equal(inside, method.loss(outputs))  # no matrix product lost its digits


@pytest.mark.parametrize("name", NAMES)
def test_a_method_can_be_one_flat_vector(make, batch, name) -> None:
    options = {"queue": 16} if name == "swav" else {}
    loose, bound = make(name, **options), make(name, **options)
    flat = FlatModel(bound, bound.home)
    progress = torch.tensor(0.5)
    for seed in range(3):
        seen = batch(views=loose.views, seed=seed)
        losses = [method.loss(method(seen)) for method in (loose, bound)]
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
        loose.after_step(progress)
        bound.after_step(progress)
    state = dict(loose.named_parameters()) | dict(loose.named_buffers())
    for entry in flat.layout.entries:
        ours = entry.view(flat.vector)
        torch.testing.assert_close(ours, state[entry.name], rtol=1e-4, atol=1e-4, msg=entry.name)
    kinds = {entry.name: entry.kind for entry in flat.layout.entries}
    for key, kind in kinds.items():
        assert (kind is Kind.TARGET) == (key.startswith("target_") and "running" not in key)
        assert (kind is Kind.HOME) == (key in ("queue", "progress"))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_never_asks_the_host_for_a_value(make, batch, name) -> None:
    options = {"queue": 16} if name == "swav" else {}
    method, progress = make(name, **options), torch.zeros(())
    seen = batch(views=method.views)
    with NoReading():
        loss = method.loss(method(seen))
        method.after_step(progress)
        with pytest.raises(AssertionError, match="read"):
            float(loss.detach())


@pytest.mark.parametrize("name", ["byol", "swav"])
def test_a_step_that_moves_memory_traces_into_one_graph(make, batch, name) -> None:
    options = {} if name == "byol" else {"queue": 16}
    plain = make(name, backbone=Pixels(), **options)
    traced = copy.deepcopy(plain)

    def step(method: Method, images: Tensor, progress: Tensor) -> Tensor:
        method.begin(progress)
        loss = method.loss(method(Batch(images)))
        method.after_step(progress)
        return loss.detach()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    images = batch().views
    for share in (0.0, 0.5):
        progress = torch.tensor(share)
        ours = compiled(traced, images, progress)
        torch.testing.assert_close(ours, step(plain, images, progress), rtol=1e-4, atol=1e-5)
    for (key, a), b in zip(plain.state_dict().items(), traced.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_second_order_gradients_pass_through_an_inner_step(make, batch, name) -> None:
    learner = Learner(make(name), LocalOptions(batch=12))
    learner.rate.fill_(0.1)
    views = learner.method.views
    weights = learner.weights()
    inner = learner.loss(learner(batch(views=views), weights))
    adapted = learner.inner_step(weights, inner, second_order=True)
    outer = learner.loss(learner(batch(views=views, seed=1), adapted))
    learner.descend(outer)
    assert outer.isfinite()
    assert learner.flat.vector.isfinite().all()


@pytest.mark.parametrize("second_order", [False, True])
@pytest.mark.parametrize("limited", [True, False])
def test_only_a_limit_keeps_vicreg_finite_once_projections_are_absurdly_long(
    make, batch, second_order, limited
) -> None:
    """Its loss grows with the fourth power of z: from 10⁵ on, steps go from bad to infinite."""
    method = make("vicreg")
    learner = Learner(method, LocalOptions(batch=2, max_gradient=10 if limited else 0))
    learner.rate.fill_(0.1)
    with torch.no_grad():
        method.projector[-1].weight.mul_(1e5)
    algorithm = MAMLSSFL(MAMLSSFLOptions(second_order=second_order))
    models = Models(learner, None, learner.flat.trainable.clone())
    for step in range(6):
        algorithm.step(models, batch(2, seed=2 * step), batch(2, seed=2 * step + 1))
    assert bool(learner.flat.vector.isfinite().all()) is limited


def test_usual_gradients_of_vicreg_are_far_below_its_recipes_limit(make, batch) -> None:
    learner = Learner(make("vicreg"), LocalOptions())
    learner.loss(learner(batch(32))).backward()
    assert 0 < learner.flat.gradient.norm() < load_config("vicreg").local.max_gradient / 2
