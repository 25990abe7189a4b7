"""The map of the features: the same for the same seed, and no more threads than it is worth."""

import numpy as np
import torch
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_info, threadpool_limits

from ssfl.report.samples import _map


def test_the_map_is_drawn_in_one_thread_and_leaves_the_others_as_they_were(monkeypatch):
    threads: list[int] = []
    plain = TSNE.fit_transform

    def watched(self, features):
        threads.extend(pool["num_threads"] for pool in threadpool_info())
        return plain(self, features)

    monkeypatch.setattr(TSNE, "fit_transform", watched)
    features = torch.from_numpy(np.random.default_rng(0).normal(size=(40, 8)).astype("float32"))
    with threadpool_limits(2):
        before = [pool["num_threads"] for pool in threadpool_info()]
        place = _map(features, seed=3)
        assert [pool["num_threads"] for pool in threadpool_info()] == before
    assert threads
    assert set(threads) == {1}
    assert len(set(place)) == 40
