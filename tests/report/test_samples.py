"""The map of the features: the same for the same seed, and no more threads than it is worth.
Whose images are on it."""

from types import SimpleNamespace

import numpy as np
import torch
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_info, threadpool_limits

from ssfl.data.federated import FederatedData
from ssfl.data.images import DataSet, Images
from ssfl.report import pictures, samples
from ssfl.report.samples import _chosen, _map


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


def test_a_sample_is_in_proportion_to_clients_sizes_however_small_they_are():
    """Of many clients none may hold enough images for a point of its own."""
    points = samples.POINTS
    sizes = [2 * points, *[1] * (2 * points)]
    ends = np.cumsum(sizes)
    parts = [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    data = FederatedData(SimpleNamespace(), parts, None, ids=tuple(range(7, 7 + len(parts))))
    rows, clients = _chosen(SimpleNamespace(data=data))
    assert len(rows) == len(clients) == points
    assert clients.count(7) == points // 2
    assert all(row in parts[client - 7] for row, client in zip(rows.tolist(), clients, strict=True))


def test_of_very_many_clients_and_classes_a_page_draws_what_can_be_told_apart():
    clients, classes = 3 * pictures.MOST, 50
    labels = torch.arange(10 * clients) % classes  # ten classes each: most cells are empty
    pixels = torch.zeros(len(labels), 1, 2, 2, dtype=torch.uint8)
    kinds = tuple(map(str, range(classes)))
    dataset = DataSet("x", Images(pixels, labels), None, kinds, None, (0.0,), (1.0,), "digits")
    parts = [np.arange(10 * k, 10 * k + 10) for k in range(clients)]
    data = FederatedData(dataset, parts, None)
    page = pictures.partition(SimpleNamespace(data=data))
    assert page.count("<rect") == pictures.MOST * (1 + 10)
    assert page.count(f"Drawn are {pictures.MOST} of {clients} clients, evenly spaced.") == 2
    assert f"client {clients - 3}, 20: 1 images" in page
