"""A few images through the encoder: a map of the features, and each one's nearest neighbours."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ssfl.evaluation.spread import thin
from ssfl.protocols.bench import GLOBAL, Bench
from ssfl.seeding import derive, numpy_generator

POINTS = 1000
QUERIES, NEIGHBOURS = 8, 7


@dataclass(frozen=True)
class Samples:
    """Some training images with their place on the map, and a few queries' neighbours."""

    place: list[tuple[float, float]]
    clients: list[int]
    labels: list[int] | None
    pixels: Tensor
    queries: Tensor
    query_labels: list[int] | None
    neighbours: list[list[int]]
    """Rows of `pixels`, nearest first, for each query."""
    whose: int
    """The client whose encoder it was, or GLOBAL."""


def sample(bench: Bench) -> Samples | None:
    """Spread over clients in proportion to their size; the same ones every time. None where
    training has diverged and features are not finite: they have no place on a map."""
    data = bench.data
    train, test = data.dataset.train, data.dataset.test
    whose = GLOBAL if bench.shares else data.clients()[int(data.sizes().argmax())]
    rows, clients = _chosen(bench)
    pixels = train.pixels[rows]
    features = F.normalize(bench.features_of(whose, pixels).cpu(), dim=1)
    if test is not None:
        dice = numpy_generator(bench.config.seed, "report-queries")
        picked = torch.from_numpy(dice.permutation(len(test))[:QUERIES])
        queries, labels = test.pixels[picked], test.labels
        seen = F.normalize(bench.features_of(whose, queries).cpu(), dim=1)
        similar = seen @ features.T
    else:
        count = min(QUERIES, len(rows))
        picked = torch.arange(count) * len(rows) // count
        queries, labels = pixels[picked], None if train.labels is None else train.labels[rows]
        similar = features[picked] @ features.T
        similar[torch.arange(len(picked)), picked] = -2  # an image is not its own neighbour
    if not similar.isfinite().all():
        return None
    nearest = similar.topk(min(NEIGHBOURS, len(rows) - 1), dim=1).indices
    return Samples(
        _map(features, derive(bench.config.seed, "tsne") % 2**31),
        clients,
        None if train.labels is None else train.labels[rows].tolist(),
        pixels,
        queries,
        None if labels is None or train.labels is None else labels[picked].tolist(),
        nearest.tolist(),
        whose,
    )


def _chosen(bench: Bench) -> tuple[Tensor, list[int]]:
    """Rows of training images and the client that holds each."""
    data = bench.data
    rows = torch.cat([data.train_indices(client) for client in data.clients()])
    holders = torch.tensor(data.clients()).repeat_interleave(torch.from_numpy(data.sizes()))
    return thin(rows, POINTS), thin(holders, POINTS).tolist()


def _map(features: Tensor, seed: int) -> list[tuple[float, float]]:
    """t-SNE in the plane, after PCA to 30 dimensions.

    In one thread: steps are so short that, where other work shares the cores, several threads
    spend most of their time waiting for each other. The map is the same.
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    n, d = features.shape
    if n < 8:
        return [(float(i), 0.0) for i in range(n)]
    with threadpool_limits(1):
        reduced = PCA(min(30, n - 1, d), random_state=seed).fit_transform(features.numpy())
        flat = TSNE(
            init="pca", perplexity=min(30.0, (n - 1) / 4), max_iter=500, random_state=seed
        ).fit_transform(reduced)
    return [(float(x), float(y)) for x, y in flat]
