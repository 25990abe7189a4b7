"""One local step after another of each algorithm is its listing in plain PyTorch."""

import pytest
import torch
from paper_listings import (
    LOCAL,
    RATE,
    BiLevelListing,
    FirstOrderMAMLListing,
    GlobalListing,
    PerListing,
    SecondOrderMAMLListing,
    assert_same_model,
    build_models,
    plain_copy,
    some_views,
    train,
)

from ssfl.algorithms import ALGORITHMS
from ssfl.algorithms.base import Algorithm
from ssfl.algorithms.per_ssfl import distance
from ssfl.ssl.base import Batch, Outputs

STEPS = 5


@pytest.fixture(autouse=True)
def _double_precision():
    """Steps through second derivatives magnify the last digits, and those are the CPU's own."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make(name: str, **options: object) -> Algorithm:
    kind = ALGORITHMS[name]
    algorithm: Algorithm = kind(kind.Options(**options))
    return algorithm


@pytest.mark.parametrize("name", ["global-ssfl", "la-ssfl", "fedu", "fedema"])
def test_the_global_algorithms_step_as_simsiam_under_sgd(name):
    algorithm = make(name)
    models = build_models(algorithm)
    listing = GlobalListing(plain_copy(models.global_))
    views = some_views(STEPS)
    losses = train(algorithm, models, views)
    expected = [listing.step(*step[0]) for step in views]
    assert losses == [pytest.approx(e, abs=1e-6) for e in expected]
    assert_same_model(models.global_, listing.F)


def test_per_ssfl_steps_as_its_listing():
    algorithm = make("per-ssfl", weight=0.7)
    models = build_models(algorithm)
    listing = PerListing(plain_copy(models.global_), plain_copy(models.own), lam=0.7)
    views = some_views(STEPS)
    losses = train(algorithm, models, views)
    expected = [listing.step(*step[0]) for step in views]
    assert losses == [pytest.approx(e, abs=1e-6) for e in expected]
    assert_same_model(models.global_, listing.F)
    assert_same_model(models.own, listing.f)


@pytest.mark.parametrize(("penalty", "factor"), [("equation", 0.5), ("listing", 1.0)])
def test_bilevel_ssfl_steps_as_its_equation_or_its_listing(penalty, factor):
    algorithm = make("bilevel-ssfl", weight=0.8, penalty=penalty)
    models = build_models(algorithm)
    listing = BiLevelListing(plain_copy(models.global_), plain_copy(models.own), 0.8, factor)
    views = some_views(STEPS)
    losses = train(algorithm, models, views)
    expected = [listing.step(*step[0]) for step in views]
    assert losses == [pytest.approx(e, abs=1e-6) for e in expected]
    assert_same_model(models.global_, listing.F)
    assert_same_model(models.own, listing.f)


@pytest.mark.parametrize("inner_steps", [1, 3])
@pytest.mark.parametrize("second_order", [False, True])
def test_maml_ssfl_steps_as_its_listing(inner_steps, second_order):
    algorithm = make("maml-ssfl", inner_steps=inner_steps, second_order=second_order)
    models = build_models(algorithm)
    reference = SecondOrderMAMLListing if second_order else FirstOrderMAMLListing
    listing = reference(plain_copy(models.global_), inner_steps)
    views = some_views(STEPS, batches=2)
    losses = train(algorithm, models, views)
    expected = [listing.step(*outer, *inner) for outer, inner in views]
    assert losses == [pytest.approx(e, abs=1e-6) for e in expected]
    assert_same_model(models.global_, listing.F)


def test_local_only_moves_the_personal_model_as_simsiam_and_leaves_the_global_one():
    algorithm = make("local-only")
    models = build_models(algorithm)
    before = models.global_.flat.vector.clone()
    listing = GlobalListing(plain_copy(models.own))
    views = some_views(STEPS)
    train(algorithm, models, views)
    for step in views:
        listing.step(*step[0])
    assert_same_model(models.own, listing.F)
    assert torch.equal(models.global_.flat.vector, before)
    assert not algorithm.sends


@pytest.mark.parametrize("name", ["per-ssfl", "bilevel-ssfl"])
def test_without_weight_the_personal_model_is_a_local_simsiam(name):
    algorithm = make(name, weight=0.0)
    models = build_models(algorithm)
    alone = build_models(make("local-only"))
    views = some_views(STEPS)
    train(algorithm, models, views)
    train(make("local-only"), alone, views)
    assert torch.equal(models.own.flat.vector, alone.own.flat.vector)


@pytest.mark.parametrize("name", ["per-ssfl", "bilevel-ssfl"])
def test_with_weight_the_personal_model_is_something_else(name):
    algorithm = make(name, weight=0.5)
    models = build_models(algorithm)
    alone = build_models(make("local-only"))
    views = some_views(1)
    train(algorithm, models, views)
    train(make("local-only"), alone, views)
    assert (models.own.flat.trainable - alone.own.flat.trainable).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["per-ssfl", "bilevel-ssfl", "la-ssfl"])
def test_theta_goes_the_same_way_as_in_global_ssfl(name):
    models, reference = build_models(make(name)), build_models(make("global-ssfl"))
    for step in some_views(STEPS):
        train(make(name), models, step[None])
        train(make("global-ssfl"), reference, step[None])
        assert torch.equal(models.global_.flat.vector, reference.global_.flat.vector)


def test_a_large_weight_in_bilevel_ssfl_pulls_the_personal_model_to_theta():
    local = LOCAL.model_copy(update={"momentum": 0.0})
    apart = {}
    for weight in (0.0, 0.9 / RATE):
        algorithm = make("bilevel-ssfl", weight=weight)
        models = build_models(algorithm, local)
        start = torch.dist(models.own.flat.trainable, models.received)
        train(algorithm, models, some_views(10))
        apart[weight] = torch.dist(models.own.flat.trainable, models.received) / start
    assert apart[0.0] > 0.9
    assert apart[0.9 / RATE] < 0.05


def test_bilevel_ssfl_is_held_by_what_the_server_sent_not_by_the_moving_copy():
    algorithm = make("bilevel-ssfl")
    models = build_models(algorithm)
    received = models.received.clone()
    train(algorithm, models, some_views(2))
    assert torch.equal(models.received, received)
    assert not torch.equal(models.global_.flat.trainable, received)


def test_no_gradient_reaches_the_global_predictions_that_per_ssfl_aims_at():
    p = torch.randn(2, 5, 4, requires_grad=True)
    target = torch.randn(2, 5, 4, requires_grad=True)
    distance(p, target).backward()
    assert target.grad is None
    assert p.grad is not None
    assert p.grad.abs().min() > 0


def test_no_gradient_reaches_the_projections_of_simsiam_but_through_the_predictor():
    learner = build_models(make("global-ssfl")).global_
    z = torch.randn(2, 5, 4, requires_grad=True)
    p = torch.randn(2, 5, 4, requires_grad=True)
    learner.loss(Outputs(z, p)).backward()
    assert z.grad is None
    assert p.grad is not None
    assert p.grad.abs().min() > 0


def test_per_ssfl_leaves_no_gradient_in_the_global_model():
    models = build_models(make("per-ssfl"))
    train(make("per-ssfl", weight=10.0), models, some_views(1))
    assert models.global_.flat.gradient.abs().max() == 0


@pytest.mark.parametrize("views", [1, 2, 3])
def test_the_distance_is_the_mean_over_all_pairs_of_views(views):
    p, target = torch.randn(2, views, 5, 4, dtype=torch.float32)
    cosine = torch.nn.functional.cosine_similarity
    pairs = [-cosine(p[i], target[j]).mean() for i in range(views) for j in range(views)]
    torch.testing.assert_close(distance(p, target), torch.stack(pairs).mean())


def test_adaptation_is_one_step_of_sgd_at_its_own_rate():
    algorithm = make("la-ssfl", adapt_lr=0.3, adapt_steps=2)
    assert algorithm.adapt_steps == 2
    assert algorithm.adapt_rate(0.1) == 0.3
    assert make("la-ssfl").adapt_rate(0.1) == 0.1
    assert make("maml-ssfl").adapt_rate(0.1) == 0.1
    models = build_models(algorithm)
    plain = plain_copy(models.global_)
    (view,) = some_views(1)[0]
    with models.global_.adapting(algorithm.adapt_rate(0.1)):
        algorithm.adapt(models, Batch(view))
    listing = GlobalListing(plain)
    listing.opt.param_groups[0]["lr"] = 0.3
    listing.step(*view)
    assert_same_model(models.global_, plain)


def test_every_algorithm_has_its_registered_name_and_returns_the_metrics_it_declares():
    for name in ALGORITHMS:
        algorithm = make(name)
        assert algorithm.options.name == name
        models = build_models(algorithm)
        batches = [Batch(views) for views in some_views(1, batches=algorithm.batches)[0]]
        values = algorithm.step(models, *batches)
        assert len(values) == len(algorithm.metrics)
        assert not any(value.requires_grad for value in values)
        assert algorithm.personal == (algorithm.encoder == "personal")
