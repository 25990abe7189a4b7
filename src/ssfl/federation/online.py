"""The indicator that runs beside the training: is it learning, and is it healthy?

Global: Θ's features of the whole training set as the bank, the whole test set as queries.
Personal: every client judges its own encoder on its own test images and sends the figure. Where no
labels are known, health figures alone.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ssfl.data.federated import FederatedData
from ssfl.data.images import Images
from ssfl.evaluation.health import ROWS, Health, trouble
from ssfl.evaluation.knn import knn_accuracy
from ssfl.evaluation.options import EvaluationOptions
from ssfl.evaluation.spread import spread
from ssfl.evaluation.summary import summarise
from ssfl.federation.messages import Reply
from ssfl.federation.server import Server
from ssfl.federation.trainer import Trainer
from ssfl.federation.wellbeing import on_record, wellbeing

Figures = dict[str, Any]


class OnlineEvaluation:
    """Measures Θ and the clients' encoders every so many rounds."""

    def __init__(
        self,
        options: EvaluationOptions,
        data: FederatedData,
        trainer: Trainer,
        server: Server,
        workers: int = 1,
    ) -> None:
        """`workers` train clients in this process: while Θ is judged, their cores are free."""
        self._options, self._data, self._trainer, self._server = options, data, trainer, server
        self._workers = workers

    def measure(self) -> Figures:
        """Global and per-client figures of the models as they are now."""
        there_is_theta = self._trainer.algorithm.sends  # that of local-only never learns anything
        figures = self.shared(self._server.theta) if there_is_theta else {}
        figures |= self._personal()
        # Where the images are at sites, or everybody is alone, the evidence is with the clients;
        # elsewhere they can still diverge where Θ does not, and are missing in the means.
        alone = not there_is_theta or len(self._data.dataset.train) == 0
        if alone or "warning" not in figures:
            width = self._trainer.models.global_.method.backbone.features
            figures |= _clients_trouble(figures.get("clients", {}), width, only_diverged=not alone)
        return figures

    def baselines(self) -> Figures:
        """The same kNN on raw pixels and with the untrained encoder."""
        untrained = self.measure()
        figures = {
            f"untrained_{name}": untrained[name]
            for name in ("knn_global", "knn_mean", "knn_weighted")
            if name in untrained
        }
        return figures | self._pixels()

    def shared(self, theta: Tensor) -> Figures:
        """Figures of a Θ over all images, where they are here (in a simulation)."""
        train, test = self._data.dataset.train, self._data.dataset.test
        if len(train) == 0:
            return {}
        encoder = self._trainer.global_encoder(theta)
        if test is None or train.labels is None or test.labels is None:
            looked_at = train if test is None else test
            some = spread(len(looked_at), ROWS)  # health looks at no more
            return self._health(encoder, looked_at, self._features(encoder, looked_at, some))
        queries = self._features(encoder, test)
        figures = self._health(encoder, test, queries)
        rows = spread(len(train), self._options.bank)
        bank = self._features(encoder, train, rows)
        figures["knn_global"] = self._knn(bank, train.labels[rows], queries, test.labels)
        return figures

    def _health(self, encoder: nn.Module, images: Images, features: Tensor) -> Figures:
        if len(images) < 2:
            return {}
        found = wellbeing(self._trainer, encoder, features, images, None)
        warning = trouble(found)
        return {**on_record(found), **({"warning": warning} if warning else {})}

    def _personal(self) -> Figures:
        chosen = self._judged(self._server.clients())
        return _client_row(self._server.evaluate(chosen)) if chosen else {}

    def _judged(self, clients: Sequence[int]) -> list[int]:
        """Those of the clients that are evaluated."""
        return [clients[i] for i in spread(len(clients), self._options.clients).tolist()]

    def _pixels(self) -> Figures:
        """kNN on the pixels themselves: the same clients and the same bank as encoders have."""
        data = self._data
        train, test = data.dataset.train, data.dataset.test
        if test is None or train.labels is None or test.labels is None:
            return {}
        rows = spread(len(train), self._options.bank)
        bank, queries = _as_features(train.pixels[rows]), _as_features(test.pixels)
        figures = {"pixels_knn_global": self._knn(bank, train.labels[rows], queries, test.labels)}
        values, weights = [], []
        for client in self._judged(data.clients()):
            own, held_out = data.train_indices(client), data.test_indices(client)
            if held_out is None or not len(held_out):
                continue
            bank, queries = _as_features(train.pixels[own]), _as_features(test.pixels[held_out])
            values.append(self._knn(bank, train.labels[own], queries, test.labels[held_out]))
            weights.append(len(held_out))
        if values:
            summary = summarise(values, weights)
            figures["pixels_knn_mean"] = summary.mean
            figures["pixels_knn_weighted"] = summary.weighted_mean
        return figures

    def _knn(self, bank: Tensor, labels: Tensor, queries: Tensor, truth: Tensor) -> float:
        return knn_accuracy(
            bank,
            labels,
            queries,
            truth,
            k=self._options.k,
            temperature=self._options.temperature,
        )

    def _features(self, encoder: nn.Module, images: Images, rows: Tensor | None = None) -> Tensor:
        threads = self._workers * torch.get_num_threads()
        return self._trainer.features(encoder, images, rows, self._options.batch, threads)


def _client_row(replies: list[Reply]) -> Figures:
    """Means over clients: plain (the paper's) and weighted by test images. A figure that is no
    accuracy (a site may send anything) must not spoil those of all others."""
    judged = [r for r in replies if 0 <= r.metrics.get("knn", -1) <= 1 and r.samples > 0]
    figures: Figures = {"clients": {str(r.client): r.metrics for r in replies}}
    if judged:
        summary = summarise([r.metrics["knn"] for r in judged], [r.samples for r in judged])
        figures |= {
            "knn_mean": summary.mean,
            "knn_weighted": summary.weighted_mean,
            "knn_std": summary.std,
        }
    return figures


def _clients_trouble(
    clients: Mapping[str, Mapping[str, float]], width: int, *, only_diverged: bool
) -> Figures:
    """A warning where clients' own encoders look collapsed, by what they say of them; or, with
    `only_diverged`, where what they say is no number."""
    needed = ("std_ratio", "effective_rank", "uniformity")
    told = {}
    for who, sent in clients.items():
        if all(name in sent for name in needed):
            ratio, rank, uniformity = (sent[name] for name in needed)
            share = sent.get("epsilon_share")
            found = Health(ratio, ratio, rank, uniformity, epsilon_share=share, dimensions=width)
            if (warning := trouble(found)) and (math.isnan(ratio) or not only_diverged):
                told[who] = warning
    if not told:
        return {}
    first, warning = next(iter(told.items()))
    more = f" ({len(told)} of {len(clients)} clients are in trouble)" if len(told) > 1 else ""
    return {"warning": f"client {first}: {warning}{more}"}


def _as_features(pixels: Tensor) -> Tensor:
    return pixels.flatten(1).float().div_(255)  # in place: they are many
