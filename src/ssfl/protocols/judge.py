"""The paper's evaluation protocols (section 4.3) on the last checkpoint of a run.

kNN; federated linear evaluation of Θ; a linear classifier per encoder, trained on the whole
training set and tested on each client's own test images (and on all); the naive federated linear
evaluation, which misleads; and semi-supervised with 1 % and 10 % of the labels. Per-client figures
are kept. Labels are read here, after training; without any, label-free health is what remains.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from ssfl.data.federated import FederatedData
from ssfl.data.split import labelled_images
from ssfl.data.views import ViewOptions, Views, resolve
from ssfl.errors import ConfigError
from ssfl.evaluation.finetune import FinetuneOptions, finetune
from ssfl.evaluation.health import ROWS, alignment, health
from ssfl.evaluation.knn import knn_accuracy
from ssfl.evaluation.linear import (
    ClientFeatures,
    LinearOptions,
    LinearResult,
    federated_linear,
    linear_probe,
    naive_federated_linear,
)
from ssfl.protocols.bench import GLOBAL, Bench, Progress, silent
from ssfl.protocols.scores import (
    Evaluation,
    Score,
    load_evaluation,
    over_clients,
    over_images,
)
from ssfl.run import Run
from ssfl.section import Section
from ssfl.seeding import torch_generator
from ssfl.ssl.supervised import Supervised

PROTOCOLS = {
    "knn": "kNN of Θ and of each client's encoder",
    "federated-linear": "Θ frozen, a linear classifier trained by FedAvg",
    "linear": "a linear classifier per encoder, trained on the whole training set",
    "naive-federated-linear": "one FedAvg classifier over the clients' different encoders",
    "semi-linear": "a linear classifier with a few of the labels",
    "semi-finetune": "encoder and classifier trained with a few of the labels",
    "health": "label-free figures of every encoder",
}
"""What can be measured, by name."""

_ALIGNED = 256  # images whose two views are compared


class ProtocolOptions(Section):
    """How a run is evaluated after training."""

    linear: LinearOptions = LinearOptions()
    finetune: FinetuneOptions = FinetuneOptions()
    fractions: tuple[float, ...] = (0.01, 0.1)
    """Shares of the labels, class-balanced, of the semi-supervised protocols."""
    finetune_clients: bool = False
    """Fine-tune every client's encoder too, not only Θ's (takes long)."""
    clients: int = Field(100, ge=1)
    """Clients whose encoders are judged, spread over all of them."""


def evaluate(
    run: Run | str | Path,
    protocols: Sequence[str] | None = None,
    *,
    options: ProtocolOptions | None = None,
    data: FederatedData | None = None,
    progress: Progress = silent,
) -> Evaluation:
    """Judge the last checkpoint by `protocols` (all if not given); writes RUN/evaluation.json.

    Where only some are asked for, figures of the others measured before are kept.
    """
    run = run if isinstance(run, Run) else Run(run)
    chosen = tuple(PROTOCOLS) if protocols is None else tuple(protocols)
    for name in chosen:
        if name not in PROTOCOLS:
            raise ConfigError(f"unknown protocol '{name}': choose among {', '.join(PROTOCOLS)}")
    bench = Bench(run, data, progress)
    found, path = judge(bench, chosen, options or ProtocolOptions()), run.path / "evaluation.json"
    before = load_evaluation(path) if protocols is not None else None
    if before is not None and (before.rounds, before.options) == (found.rounds, found.options):
        found = before.updated(found)
    found.save(path)
    return found


def judge(bench: Bench, protocols: Sequence[str], options: ProtocolOptions) -> Evaluation:
    """All figures of the encoders on a bench."""
    judge_ = _Judge(bench, frozenset(protocols), options)
    started = time.perf_counter()
    if bench.shares:
        judge_.theta()
    clients = judge_.clients
    for place, client in enumerate(clients):
        bench.progress("encoders judged", place, len(clients))
        judge_.client(client)
    bench.progress("encoders judged", len(clients), len(clients))
    judge_.together()
    judge_.seconds["total"] = time.perf_counter() - started
    return Evaluation(
        bench.task.round,
        judge_.scores(),
        judge_.health,
        judge_.notes,
        dict(judge_.seconds),
        options.model_dump(mode="json"),
    )


class _Judge:
    """One evaluation under way: what was asked for, and the figures so far."""

    def __init__(self, bench: Bench, asked: frozenset[str], options: ProtocolOptions) -> None:
        self.bench, self.options, self.asked = bench, options, asked
        self.notes: list[str] = []
        self.health: dict[str, dict[str, float | None]] = {}
        self.seconds: dict[str, float] = defaultdict(float)
        self._global: list[Score] = []
        self._personal: dict[str, dict[int, float]] = defaultdict(dict)
        self._probes: dict[tuple[int, float], Tensor] = {}
        self._own: list[ClientFeatures] = []
        everyone = bench.data.clients()
        count = min(len(everyone), options.clients)
        self.clients = [everyone[i * len(everyone) // count] for i in range(count)]
        if not bench.labelled:
            self.asked &= {"health"}
            what = "the images have no labels" if bench.test else "there are no test images"
            self.notes.append(f"{what}: health in place of accuracy")
            return
        dataset, device = bench.data.dataset, bench.device
        assert dataset.train.labels is not None
        assert dataset.test is not None
        assert dataset.test.labels is not None
        self.train_labels = dataset.train.labels.to(device)
        self.test_labels = dataset.test.labels.to(device)
        known = [self.train_labels.max(), self.test_labels.max()]
        self.classes = max(len(dataset.classes or ()), int(max(known)) + 1)
        # A client without test images of its own has no local figure.
        self.clients = [c for c in self.clients if len(self._test_rows(c))]

    def theta(self) -> None:
        """Everything that is asked of Θ."""
        bench = self.bench
        if "health" in self.asked:
            self._measure_health(GLOBAL)
        if self.asked <= {"health"}:
            return
        with self._timing("features"):
            train, test = bench.train_features(GLOBAL), bench.test_features(GLOBAL)
        method = bench.trainer.models.global_.method
        if isinstance(method, Supervised):
            bench.encoder(GLOBAL)  # puts Θ in place
            with torch.no_grad():
                right = method.classifier(test).argmax(1) == self.test_labels
            self._keep_global("global_classifier", right)
        if "knn" in self.asked:
            with self._timing("knn"):
                value = self._knn(train, self.train_labels, test, self.test_labels)
            self._global.append(over_images("global_knn", value, len(test)))
        if "federated-linear" in self.asked:
            with self._timing("federated-linear"):
                self._federated(train, test)
        if "linear" in self.asked:
            self._keep_global("global_linear", self._right(GLOBAL))
        for share in self._shares("semi-linear"):
            self._keep_global(f"global_linear_{_percent(share)}", self._right(GLOBAL, share))
        for share in self._shares("semi-finetune"):
            with self._timing("semi-finetune"):
                value = self._finetune(GLOBAL, share, torch.arange(len(test)))
            name = f"global_finetune_{_percent(share)}"
            self._global.append(over_images(name, value, len(test)))

    def client(self, client: int) -> None:
        """Everything that is asked of one client's encoder."""
        bench, keep = self.bench, self._personal
        if "health" in self.asked:
            self._measure_health(client)
        if self.asked <= {"health"}:
            return
        with self._timing("features"):
            train, test = bench.train_features(client), bench.test_features(client)
        train_rows = bench.data.train_indices(client).to(bench.device)
        rows = self._test_rows(client)
        own = ClientFeatures(
            train[train_rows], self.train_labels[train_rows], test[rows], self.test_labels[rows]
        )
        if "knn" in self.asked:
            with self._timing("knn"):
                keep["personal_knn"][client] = self._knn(*own)
        if "linear" in self.asked:
            right = self._right(client)
            keep["personal_linear"][client] = _mean(right[rows])
            keep["personal_linear_global"][client] = _mean(right)
        for share in self._shares("semi-linear"):
            right = self._right(client, share)
            keep[f"personal_linear_{_percent(share)}"][client] = _mean(right[rows])
        if self.options.finetune_clients:
            for share in self._shares("semi-finetune"):
                with self._timing("semi-finetune"):
                    value = self._finetune(client, share, rows.cpu())
                keep[f"personal_finetune_{_percent(share)}"][client] = value
        if "naive-federated-linear" in self.asked:
            self._own.append(own)
        self._probes = {key: right for key, right in self._probes.items() if key[0] == GLOBAL}
        bench.forget(client)

    def together(self) -> None:
        """What needs all clients' features at once."""
        if self._own:
            with self._timing("naive-federated-linear"):
                result = naive_federated_linear(
                    self._own, self.classes, self.options.linear, self.bench.config.seed
                )
            scores = dict(zip(self.clients, result.per_client, strict=True))
            self._personal["personal_naive_federated_linear"] = scores

    def scores(self) -> list[Score]:
        """All figures, Θ's first."""
        return self._global + [
            over_clients(name, values, [len(self._test_rows(c)) for c in values])
            for name, values in self._personal.items()
        ]

    def _federated(self, train: Tensor, test: Tensor) -> None:
        data = self.bench.data
        parts = [data.train_indices(c).to(train.device) for c in data.clients()]
        result = federated_linear(
            [train[part] for part in parts],
            [self.train_labels[part] for part in parts],
            test,
            self.test_labels,
            self.classes,
            self.options.linear,
            self.bench.config.seed,
        )
        right = result.predict(test) == self.test_labels
        self._keep_global("global_federated_linear", right)
        for client in self.clients:
            value = _mean(right[self._test_rows(client)])
            self._personal["global_federated_linear_local"][client] = value

    def _right(self, who: int, share: float = 1.0) -> Tensor:
        """Which test images a linear probe on this encoder gets right; fitted once an encoder."""
        key = (self.bench.key(who), share)
        if key not in self._probes:
            train, test = self.bench.train_features(who), self.bench.test_features(who)
            with self._timing("linear" if share == 1 else "semi-linear"):
                self._probes[key] = self._probe(train, test, share)
        return self._probes[key]

    def _probe(self, train: Tensor, test: Tensor, share: float) -> Tensor:
        labels = self.train_labels
        if share < 1:
            rows = self._labelled(share).to(train.device)
            train, labels = train[rows], labels[rows]
        result: LinearResult = linear_probe(
            train,
            labels,
            test,
            self.test_labels,
            self.classes,
            self.options.linear,
            self.bench.config.seed,
        )
        return result.predict(test) == self.test_labels

    def _finetune(self, who: int, share: float, test_rows: Tensor) -> float:
        bench, rows = self.bench, self._labelled(share)
        train, test = bench.data.dataset.train, bench.test
        assert test is not None
        bench.progress(f"fine-tuning with {share:.0%} of the labels", 0, 1)
        result = finetune(
            bench.standalone(who).backbone,
            train.pixels[rows],
            self.train_labels.cpu()[rows],
            test.pixels[test_rows],
            self.test_labels.cpu()[test_rows],
            bench.trainer.views.plain,
            _augmentation(bench),
            self.options.finetune,
            bench.config.seed,
            bench.device,
            classes=self.classes,
        )
        bench.progress(f"fine-tuning with {share:.0%} of the labels", 1, 1)
        return result.accuracy

    def _labelled(self, share: float) -> Tensor:
        """The same few labelled images for every encoder of the run."""
        return labelled_images(self.train_labels, share, self.bench.config.seed)

    def _knn(self, bank: Tensor, labels: Tensor, queries: Tensor, truth: Tensor) -> float:
        options = self.bench.config.evaluation
        return knn_accuracy(
            bank, labels, queries, truth, k=options.k, temperature=options.temperature
        )

    def _measure_health(self, who: int) -> None:
        """Of an encoder on the images it is meant for: a client's own, or for Θ all of them."""
        bench, data = self.bench, self.bench.data
        rows = torch.arange(len(data.dataset.train)) if who == GLOBAL else data.train_indices(who)
        if len(rows) < 2:
            return
        seen = _thin(rows, ROWS).to(bench.device)
        with self._timing("features"):
            if self.asked == {"health"}:
                features = bench.features_of(who, bench.trainer.pixels[seen])
            else:
                features = bench.train_features(who)[seen]
        with self._timing("health"):
            found = asdict(health(features)) | {"alignment": self._alignment(who, rows)}
        self.health["global" if who == GLOBAL else str(who)] = {
            name: value if value is None or math.isfinite(value) else None
            for name, value in found.items()
        }

    def _alignment(self, who: int, rows: Tensor) -> float:
        """How close two views of the same few images come."""
        bench, views = self.bench, self.bench.trainer.views
        pixels = bench.trainer.pixels[_thin(rows, _ALIGNED).to(bench.device)]
        dice = torch_generator(bench.config.seed, "health-views", device=bench.device)
        uniforms = torch.rand(2, len(pixels), views.draws, generator=dice, device=bench.device)
        first, second = (
            bench.features_of(who, view, lambda ready: ready) for view in views(pixels, uniforms)
        )
        return alignment(first, second)

    def _shares(self, protocol: str) -> tuple[float, ...]:
        return self.options.fractions if protocol in self.asked else ()

    def _keep_global(self, name: str, right: Tensor) -> None:
        self._global.append(over_images(name, _mean(right), len(right)))

    @contextmanager
    def _timing(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - started

    def _test_rows(self, client: int) -> Tensor:
        rows = self.bench.data.test_indices(client)
        return (torch.empty(0, dtype=torch.long) if rows is None else rows).to(self.bench.device)


def _augmentation(bench: Bench) -> Callable[[Tensor, torch.Generator], Tensor]:
    """Fine-tuning's mild views: shifts and flips, or the digits' own (a mirrored 2 is no 2)."""
    dataset = bench.data.dataset
    spec = resolve(
        ViewOptions(preset="digits" if dataset.presets == "digits" else "supervised"),
        preset=dataset.presets,
        mean=dataset.mean,
        std=dataset.std,
        image_size=dataset.train.pixels.shape[-1],
    )
    views = Views(spec, bench.device)

    def augment(pixels: Tensor, dice: torch.Generator) -> Tensor:
        uniforms = torch.rand(1, len(pixels), views.draws, generator=dice, device=pixels.device)
        return views(pixels, uniforms)[0]

    return augment


def _percent(share: float) -> str:
    return f"{100 * share:g}pct"


def _mean(right: Tensor) -> float:
    return float(right.double().mean())


def _thin(rows: Tensor, limit: int) -> Tensor:
    """At most `limit` of the rows, evenly spaced."""
    count = min(len(rows), limit)
    return rows[torch.arange(count) * len(rows) // count]
