"""A step in micro-batches: gradients add up by their share of the images, then one descent."""

import torch
from paper_listings import (
    D,
    assert_same_model,
    build_learner,
    build_models,
    plain_copy,
    sgd,
    simsiam_loss,
    some_views,
)

from ssfl.algorithms.per_ssfl import PerSSFL, PerSSFLOptions
from ssfl.ssl.base import Batch

PARTS = [slice(0, 5), slice(5, 12)]


def test_micro_batches_accumulate_as_written_by_hand():
    learner = build_learner(1)
    plain = plain_copy(learner)
    optimizer = sgd(plain)
    for (views,) in some_views(3):
        for part in PARTS:
            learner.share, learner.last = (part.stop - part.start) / 12, part.stop == 12
            learner.descend(learner.loss(learner(Batch(views[:, part]))))
        optimizer.zero_grad()
        (5 / 12 * simsiam_loss(plain, *views[:, :5])).backward()
        (7 / 12 * simsiam_loss(plain, *views[:, 5:])).backward()
        optimizer.step()
    assert_same_model(learner, plain)


def test_nothing_moves_before_the_last_micro_batch():
    learner = build_learner(1)
    before = learner.flat.trainable.clone()
    (views,) = some_views(1)[0]
    learner.share, learner.last = 5 / 12, False
    learner.descend(learner.loss(learner(Batch(views[:, :5]))))
    assert torch.equal(learner.flat.trainable, before)
    assert learner.flat.gradient.abs().max() > 0


def test_per_ssfl_in_micro_batches_aims_at_predictions_from_before_the_global_update():
    algorithm = PerSSFL(PerSSFLOptions(weight=0.6))
    models = build_models(algorithm)
    F, f = plain_copy(models.global_), plain_copy(models.own)
    opt_F, opt_f = sgd(F), sgd(f)
    for (views,) in some_views(3):
        opt_F.zero_grad()
        opt_f.zero_grad()
        for part in PARTS:
            for learner in (models.global_, models.own):
                learner.share, learner.last = (part.stop - part.start) / 12, part.stop == 12
            algorithm.step(models, Batch(views[:, part]))
            share = (part.stop - part.start) / 12
            (Z1, P1), (Z2, P2) = F(views[0, part]), F(views[1, part])
            (share * (D(P1, Z2) / 2 + D(P2, Z1) / 2)).backward()
            (z1, p1), (z2, p2) = f(views[0, part]), f(views[1, part])
            apart = (D(p1, P1) + D(p1, P2) + D(p2, P1) + D(p2, P2)) / 4
            (share * (D(p1, z2) / 2 + D(p2, z1) / 2 + 0.6 * apart)).backward()
        opt_F.step()
        opt_f.step()
    assert_same_model(models.global_, F)
    assert_same_model(models.own, f)
