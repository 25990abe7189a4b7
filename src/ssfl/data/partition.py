"""Who holds which images: splitting a data set over K clients.

iid deals images at random; dirichlet draws, for each class c, p_c ~ Dir(α) over the clients and
gives client k the share p_(c,k) of that class (section 5 of the paper); shards gives every client
n classes; natural follows the owners the data came with. Labels serve only to make the split:
training never sees them.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ssfl.errors import DataError
from ssfl.section import Section

Indices = NDArray[np.int64]
Counts = NDArray[np.int64]


class PartitionOptions(Section):
    """How images are split over clients."""

    kind: Literal["iid", "dirichlet", "shards", "natural"] = "dirichlet"
    """iid: at random; dirichlet: classes skewed by alpha; shards: a few classes per client;
    natural: the owners that the data came with."""
    clients: int = Field(10, ge=1)
    """Number of clients, K (natural: ignored, the data says how many)."""
    alpha: float = Field(0.1, gt=0, allow_inf_nan=False)
    """dirichlet: concentration α; small is very skewed, large is nearly iid."""
    balanced: bool = False
    """dirichlet: a client that already holds N/K images gets no more of later classes."""
    classes_per_client: int = Field(2, ge=1)
    """shards: how many classes each client holds."""
    min_size: int = Field(2, ge=2)
    """Fewest training images a client may hold. Redrawn until met; natural clients with fewer are
    left out."""
    min_test: int = Field(10, ge=1)
    """Fewest images in a client's local test set, where the test set has them."""
    labelled: float = Field(1.0, gt=0, le=1)
    """Share of the training images, class by class, that clients may train on: supervised FL with
    few labels. Test sets stay those of all images."""
    max_redraws: int = Field(1000, ge=0)
    """How many times to draw again when a client fell below min_size."""


def partition(
    labels: NDArray[np.int64] | None,
    owners: NDArray[np.int64] | None,
    n: int,
    options: PartitionOptions,
    rng: np.random.Generator,
) -> list[Indices]:
    """The images of each client, as sorted indices into the n training images.

    The clients' images are disjoint. Together they are all n images, but for two cases: shards
    leave out classes that no client drew (only when clients × classes_per_client is below the
    number of classes), and natural leaves out owners with fewer than min_size images.
    """
    if options.kind == "natural":
        return _natural(owners, n, options)
    if options.clients * options.min_size > n:
        own = "; partition.kind = 'natural' makes each owner of images a client"
        raise DataError(
            f"partition: {options.clients:,} clients asked for at least {options.min_size:,} "
            f"images each, but there are only {n:,} images: lower partition.clients or "
            f"partition.min_size{'' if owners is None else own}"
        )
    if options.kind == "iid":
        sizes = _even(n, options.clients)
        holders = np.repeat(np.arange(options.clients), sizes)
        return _split(rng.permutation(n), holders, options.clients)
    if labels is None:
        raise DataError(
            f"partition: '{options.kind}' splits by class, but these images have no labels; "
            "use partition.kind = 'iid' or 'natural'"
        )
    _, codes = np.unique(labels, return_inverse=True)
    totals = np.bincount(codes)
    draw = _dirichlet_draw if options.kind == "dirichlet" else _shards_draw
    counts = _redraw(lambda: draw(totals, options, rng), n, options)
    return _deal(codes, counts, rng)


def matched_test(
    train_labels: NDArray[np.int64],
    parts: list[Indices],
    test_labels: NDArray[np.int64],
    options: PartitionOptions,
    rng: np.random.Generator,
) -> list[Indices]:
    """Local test sets: each client's train class proportions applied to the test set.

    Client k gets its share of the test set, |D_k|/N of it but at least `min_test` images, in the
    class proportions of its own training images, rounded at random without bias. Each class is
    dealt from a shuffled deck, client after client and round again when it runs out: no client
    holds an image twice, and clients share images only where the deck has fewer than are wanted.
    """
    held = np.concatenate(parts)
    sizes = np.array([len(part) for part in parts])
    classes = np.union1d(train_labels, test_labels)
    train_codes = np.searchsorted(classes, train_labels[held])
    who = np.repeat(np.arange(len(parts)), sizes)
    counts = np.bincount(who * len(classes) + train_codes, minlength=len(parts) * len(classes))
    counts = counts.reshape(len(parts), len(classes))

    share = len(test_labels) / len(held)
    wanted = np.maximum(options.min_test, np.rint(sizes * share).astype(np.int64))
    # Unbiased rounding to a whole total: cut the cumulated shares at one random offset per client.
    cuts = wanted[:, None] * (np.cumsum(counts, axis=1) / sizes[:, None])
    cuts = np.floor(cuts + rng.random((len(parts), 1))).astype(np.int64)
    amounts = np.diff(cuts, axis=1, prepend=0)

    images, holders = [], []
    test_codes = np.searchsorted(classes, test_labels)
    for deck, asked in zip(_decks(test_codes, len(classes), rng), amounts.T, strict=True):
        dealt = np.minimum(asked, len(deck))
        images.append(deck[np.arange(dealt.sum()) % len(deck)])
        holders.append(np.repeat(np.arange(len(parts)), dealt))
    return _split(np.concatenate(images), np.concatenate(holders), len(parts))


def natural_owners(owners: NDArray[np.int64], min_size: int) -> NDArray[np.int64]:
    """The owners that are clients of a natural partition, in order: those with enough images."""
    found, sizes = np.unique(owners, return_counts=True)
    return found[sizes >= min_size].astype(np.int64)


def by_owner(owners: NDArray[np.int64], clients: NDArray[np.int64]) -> list[Indices]:
    """The images of each of `clients` (sorted owner numbers); other owners' images are left out."""
    kept = np.flatnonzero(np.isin(owners, clients))
    return _split(kept, np.searchsorted(clients, owners[kept]), len(clients))


def _natural(owners: NDArray[np.int64] | None, n: int, options: PartitionOptions) -> list[Indices]:
    if owners is None:
        raise DataError(
            "partition: 'natural' follows the owners of the images, but these images have none; "
            "use partition.kind = 'iid' or 'dirichlet', or data.layout = 'clients' with a folder "
            "per client"
        )
    clients = natural_owners(owners, options.min_size)
    if len(clients) == 0:
        raise DataError(
            f"partition: none of the {len(np.unique(owners)):,} owners of these {n:,} images holds "
            f"at least {options.min_size:,} of them: lower partition.min_size"
        )
    return by_owner(owners, clients)


def _dirichlet_draw(totals: Counts, options: PartitionOptions, rng: np.random.Generator) -> Counts:
    """How many images of each class each client gets (classes × clients)."""
    k = options.clients
    full = totals.sum() / k
    held = np.zeros(k, dtype=np.int64)
    counts = np.empty((len(totals), k), dtype=np.int64)
    for c, total in enumerate(totals):
        shares = rng.dirichlet(np.full(k, options.alpha))
        if options.balanced:
            # FedML's rule; someone is always below N/K while images remain.
            shares = shares * (held < full)
            if shares.sum() == 0:
                shares = (held < full).astype(np.float64)
            shares = shares / shares.sum()
        counts[c] = _proportional(shares, int(total))
        held += counts[c]
    return counts


def _shards_draw(totals: Counts, options: PartitionOptions, rng: np.random.Generator) -> Counts:
    """Every client takes the classes least taken so far, ties at random; a class is split evenly
    among those who took it."""
    k, per_client = options.clients, options.classes_per_client
    if per_client > len(totals):
        raise DataError(
            f"partition.classes_per_client is {per_client}, but these images have only "
            f"{len(totals)} classes"
        )
    taken = np.zeros(len(totals))
    holds = np.zeros((len(totals), k), dtype=bool)
    for client, ties in enumerate(rng.random((k, len(totals)))):
        chosen = np.argsort(taken + ties)[:per_client]
        taken[chosen] += 1
        holds[chosen, client] = True
    counts = np.zeros((len(totals), k), dtype=np.int64)
    for c, total in enumerate(totals):
        holders = np.flatnonzero(holds[c])
        if len(holders):
            counts[c, rng.permutation(holders)] = _even(int(total), len(holders))
    return counts


def _redraw(draw: Callable[[], Counts], n: int, options: PartitionOptions) -> Counts:
    """Draw with the one generator until every client has min_size images."""
    best = -1
    for _ in range(options.max_redraws + 1):
        counts = draw()
        smallest = int(counts.sum(axis=0).min())
        if smallest >= options.min_size:
            return counts
        best = max(best, smallest)
    dirichlet = options.kind == "dirichlet"
    hint = "larger alpha, balanced = true" if dirichlet else "larger classes_per_client"
    raise DataError(
        f"partition: in {options.max_redraws + 1:,} draws of {n:,} images over "
        f"{options.clients:,} clients the smallest client never held more than {best:,}, and "
        f"partition.min_size is {options.min_size:,}; try fewer clients, a {hint} or a lower "
        "min_size (all in [partition])"
    )


def _deal(codes: NDArray[np.int64], counts: Counts, rng: np.random.Generator) -> list[Indices]:
    """Deal shuffled images of each class as `counts` (classes × clients) says."""
    images, holders = [], []
    for deck, amounts in zip(_decks(codes, len(counts), rng), counts, strict=True):
        images.append(deck[: amounts.sum()])
        holders.append(np.repeat(np.arange(len(amounts)), amounts))
    return _split(np.concatenate(images), np.concatenate(holders), counts.shape[1])


def _decks(
    codes: NDArray[np.int64], classes: int, rng: np.random.Generator
) -> list[NDArray[np.int64]]:
    """The images of each class, shuffled."""
    order = rng.permutation(len(codes))
    order = order[np.argsort(codes[order], kind="stable")]
    return np.split(order, np.cumsum(np.bincount(codes, minlength=classes))[:-1])


def _split(images: NDArray[np.int64], holders: NDArray[np.int64], clients: int) -> list[Indices]:
    """Sorted indices per client: views into one array, so that many clients cost little."""
    order = np.lexsort((images, holders))
    ends = np.cumsum(np.bincount(holders, minlength=clients))[:-1]
    return list(np.split(images[order].astype(np.int64), ends))


def _even(n: int, k: int) -> Counts:
    """n in k whole parts that differ by at most one, the larger first."""
    return np.full(k, n // k, dtype=np.int64) + (np.arange(k) < n % k)


def _proportional(shares: NDArray[np.float64], total: int) -> Counts:
    """`total` in whole parts proportional to `shares`, which sum to one; each is off by < 1."""
    cuts = np.floor(np.cumsum(shares) * total).astype(np.int64)
    # Rounding may leave a remainder: it is the last one's who has a share, not of one with none.
    cuts[np.flatnonzero(shares)[-1] :] = total
    return np.diff(cuts, prepend=0)
