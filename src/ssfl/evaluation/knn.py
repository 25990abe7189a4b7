"""The kNN indicator: how often an image's neighbours in feature space share its label.

Weighted kNN of Wu et al. (2018), section 3.4: on L2-normalised features, each of the k nearest
bank images votes for its class with weight exp(similarity / temperature). No training, so it can
be read while a run goes on. A tied vote goes to the lowest class, as in scikit-learn; which of
several bank images at exactly the k-th similarity are counted is not specified.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ssfl.errors import DataError


@torch.no_grad()
def knn_votes(
    bank: Tensor,
    bank_labels: Tensor,
    queries: Tensor,
    *,
    k: int = 200,
    temperature: float = 0.1,
    chunk: int | None = None,
) -> Tensor:
    """Share of the vote for each class: (queries, classes), rows summing to one.

    Computed in the features' own precision, `chunk` queries at a time (default: what fits in
    about 128 MiB, 1 GiB on an accelerator), so the whole similarity matrix never exists.
    """
    if len(bank) == 0 or len(queries) == 0:
        raise DataError("kNN needs at least one labelled image in its bank and one to classify")
    k = min(k, len(bank))
    labels = bank_labels.to(bank.device, torch.long)
    classes = int(labels.max()) + 1
    bank, queries = F.normalize(bank, dim=1), F.normalize(queries, dim=1)
    chunk = min(chunk or _chunk(bank, k * classes), len(queries))
    similarities = bank.new_empty(chunk, len(bank))  # once: fresh memory costs a CPU page faults
    votes = bank.new_empty(len(queries), classes)
    for start in range(0, len(queries), chunk):
        some = queries[start : start + chunk]
        similarity = torch.mm(some, bank.T, out=similarities[: len(some)])
        nearest, rows = similarity.topk(k, dim=1)
        # Relative to the nearest: the same shares, and no overflow at a low temperature.
        weights = ((nearest - nearest[:, :1]) / temperature).exp_()
        weights /= weights.sum(1, keepdim=True)
        ballots = F.one_hot(labels[rows], classes).to(weights.dtype)
        # A product, not a scatter: sums in a fixed order on every device.
        votes[start : start + chunk] = torch.bmm(weights.unsqueeze(1), ballots).squeeze(1)
    return votes


def knn_predict(
    bank: Tensor,
    bank_labels: Tensor,
    queries: Tensor,
    *,
    k: int = 200,
    temperature: float = 0.1,
) -> Tensor:
    """The class with the most votes for each query (the lowest one where votes tie)."""
    votes = knn_votes(bank, bank_labels, queries, k=k, temperature=temperature)
    # torch's argmax does not say which of several maxima it returns; the first one is ours.
    return (votes == votes.amax(1, keepdim=True)).to(torch.uint8).argmax(1)


def knn_accuracy(
    bank: Tensor,
    bank_labels: Tensor,
    queries: Tensor,
    query_labels: Tensor,
    *,
    k: int = 200,
    temperature: float = 0.1,
) -> float:
    """Share of queries given their own label, between 0 and 1. NaN where features are not finite:
    they have no neighbours, and what they would be given by chance is not their merit. Labels may
    be on another device than features."""
    if not (bank.isfinite().all() and queries.isfinite().all()):
        return math.nan
    predicted = knn_predict(bank, bank_labels, queries, k=k, temperature=temperature)
    return float((predicted == query_labels.to(predicted.device)).double().mean())


def _chunk(bank: Tensor, ballot: int) -> int:
    """Queries at a time: a row of similarities and k one-hot ballots (int64, then float) each."""
    budget = 2**27 if bank.device.type == "cpu" else 2**30
    row = len(bank) * bank.element_size() + ballot * (8 + bank.element_size())
    return max(1, budget // row)
