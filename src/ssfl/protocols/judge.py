"""The paper's evaluation protocols (section 4.3) on the last checkpoint of a run.

kNN; federated linear evaluation of Θ; a linear classifier per encoder, trained on the whole
training set and tested on each client's own test images (and on all); the naive federated linear
evaluation, which misleads; and semi-supervised with 1 % and 10 % of the labels. Per-client figures
are kept. Labels are read here, after training; without any, label-free health is what remains.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from ssfl.data.federated import FederatedData
from ssfl.data.split import labelled_images
from ssfl.errors import ConfigError
from ssfl.evaluation.finetune import FinetuneOptions
from ssfl.evaluation.knn import knn_accuracy
from ssfl.evaluation.linear import (
    ClientFeatures,
    federated_linear,
    linear_probes,
    naive_federated_linear,
)
from ssfl.evaluation.options import LinearOptions
from ssfl.evaluation.spread import spread
from ssfl.guest import own_torch
from ssfl.protocols.bench import GLOBAL, Bench, Progress, silent
from ssfl.protocols.scores import (
    Evaluation,
    Score,
    load_evaluation,
    over_clients,
    over_images,
)
from ssfl.protocols.tuning import finetuned
from ssfl.protocols.unlabelled import Figures, Wellbeing
from ssfl.run import Run
from ssfl.section import Section
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

TABLES = ("knn", "federated-linear", "linear", "health")
"""What is measured unless asked otherwise: the paper's tables 1 and 2, and health."""


class ProtocolOptions(Section):
    """How a run is evaluated after training."""

    linear: LinearOptions = LinearOptions()
    finetune: FinetuneOptions = FinetuneOptions()
    fractions: tuple[Annotated[float, Field(gt=0, le=1)], ...] = (0.01, 0.1)
    """Shares of the labels, class-balanced, of the semi-supervised protocols."""
    finetune_clients: bool = False
    """Fine-tune every client's encoder too, not only Θ's (takes long)."""
    clients: int = Field(100, ge=1)
    """Clients whose encoders are judged, spread over all of them."""


@own_torch()
def evaluate(
    run: Run | str | Path,
    protocols: str | Sequence[str] | None = None,
    *,
    options: ProtocolOptions | None = None,
    data: FederatedData | None = None,
    progress: Progress = silent,
) -> Evaluation:
    """Judge the last checkpoint by `protocols` (`TABLES` if not given); writes
    RUN/evaluation.json. Figures of other protocols measured before, in the same way, are kept;
    a note names those that are not."""
    run = run if isinstance(run, Run) else Run(run)
    found = measure(run, protocols, options=options, data=data, progress=progress)
    found.save(run.evaluation)
    return found


def measure(
    run: Run,
    protocols: str | Sequence[str] | None = None,
    *,
    options: ProtocolOptions | None = None,
    data: FederatedData | None = None,
    progress: Progress = silent,
) -> Evaluation:
    """What `evaluate` finds and would write."""
    if isinstance(protocols, str):
        protocols = [protocols]
    chosen = TABLES if protocols is None else tuple(protocols)
    for name in chosen:
        if name not in PROTOCOLS:
            raise ConfigError(f"unknown protocol '{name}': choose among {', '.join(PROTOCOLS)}")
    bench = Bench(run, data, progress)
    found = judge(bench, chosen, options or ProtocolOptions())
    before = load_evaluation(run.evaluation) if bench.labelled else None
    return found if before is None else before.updated(found)


def judge(bench: Bench, protocols: Sequence[str], options: ProtocolOptions) -> Evaluation:
    """All figures of the encoders on a bench."""
    judge_ = _Judge(bench, frozenset(protocols), options)
    started = time.perf_counter()
    if bench.shares:
        judge_.theta()
    clients, size = judge_.clients, bench.at_once
    for first in range(0, len(clients), size):
        bench.progress("encoders judged", first, len(clients))
        judge_.group(clients[first : first + size])
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
        self.health: Figures = {}
        self.seconds: dict[str, float] = defaultdict(float)
        self._global: list[Score] = []
        self._personal: dict[str, dict[int, float]] = defaultdict(dict)
        self._probes: dict[tuple[int, float], Tensor] = {}
        self._own: dict[int, ClientFeatures] = {}
        everyone = bench.data.clients()
        self.clients = [everyone[i] for i in spread(len(everyone), options.clients).tolist()]
        if not bench.labelled:
            self.asked = frozenset({"health"})
            what = "the images have no labels" if bench.test else "there are no test images"
            self.notes.append(f"{what}: health in place of accuracy")
        self._wellbeing = Wellbeing(bench, features_known=self._more_than_health)
        if not bench.labelled:
            return
        dataset, device = bench.data.dataset, bench.device
        assert dataset.train.labels is not None
        assert dataset.test is not None
        assert dataset.test.labels is not None
        self.train_labels = dataset.train.labels.to(device)
        self.test_labels = dataset.test.labels.to(device)
        known = [self.train_labels.max(), self.test_labels.max()]
        self.classes = max(len(dataset.classes or ()), int(max(known)) + 1)
        self._note_uneven_shares()
        # A client without test images of its own has no local figure.
        self.clients = [c for c in self.clients if len(self._test_rows(c))]

    @property
    def _more_than_health(self) -> bool:
        """Something is asked for that reads features of all images."""
        return not self.asked <= {"health"}

    def theta(self) -> None:
        """Everything that is asked of Θ."""
        self._see(GLOBAL)
        self._measure_health()
        if not (self._more_than_health and self._finite(GLOBAL)):
            return
        bench = self.bench
        train, test = bench.train_features(GLOBAL), bench.test_features(GLOBAL)
        method = bench.trainer.models.global_.method
        if isinstance(method, Supervised):
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
        self._fit([GLOBAL])
        if "linear" in self.asked:
            self._keep_global("global_linear", self._right(GLOBAL))
        for share in self._shares("semi-linear"):
            self._keep_global(f"global_linear_{_percent(share)}", self._right(GLOBAL, share))
        for share in self._shares("semi-finetune"):
            value = self._finetune(GLOBAL, share, torch.arange(len(test)))
            name = f"global_finetune_{_percent(share)}"
            self._global.append(over_images(name, value, len(test)))

    def group(self, clients: Sequence[int]) -> None:
        """Everything that is asked of some clients' encoders, their classifiers made together."""
        sound = []
        for client in clients:
            self._see(client)
            if self._more_than_health and self._finite(client):
                sound.append(client)
                self._among_its_own(client)
        self._measure_health()
        if not self._more_than_health:
            return
        self._fit(sound)
        for client in sound:
            self._judge_classifiers(client)
        self._probes = {key: right for key, right in self._probes.items() if key[0] == GLOBAL}
        for client in clients:
            self.bench.forget(client)

    def _see(self, who: int) -> None:
        """While this encoder is in place: its features, and a look at its health."""
        bench = self.bench
        with self._timing("loading"):
            bench.encoder(who)
        if self._more_than_health:
            with self._timing("features"):
                bench.train_features(who)
                bench.test_features(who)
        if "health" in self.asked:
            with self._timing("health"):
                self._wellbeing.see(who)

    def _finite(self, who: int) -> bool:
        """Whether there is anything to judge; if not, a note says so."""
        parts = self.bench.train_features(who), self.bench.test_features(who)
        if all(bool(part.isfinite().all()) for part in parts):
            return True
        whose = "Θ" if who == GLOBAL else f"client {who}"
        self.notes.append(f"training has diverged, {whose} has no figures: features are not finite")
        return False

    def _among_its_own(self, client: int) -> None:
        """What needs the client's own images alone."""
        bench, rows = self.bench, self._test_rows(client)
        mine = bench.data.train_indices(client).to(bench.device)
        train, test = bench.train_features(client), bench.test_features(client)
        own = ClientFeatures(
            train[mine], self.train_labels[mine], test[rows], self.test_labels[rows]
        )
        if "knn" in self.asked:
            with self._timing("knn"):
                self._personal["personal_knn"][client] = self._knn(*own)
        if "naive-federated-linear" in self.asked:
            self._own[client] = own

    def _judge_classifiers(self, client: int) -> None:
        """On the client's own test images and, with all labels, on everybody's."""
        keep, rows = self._personal, self._test_rows(client)
        if "linear" in self.asked:
            right = self._right(client)
            keep["personal_linear"][client] = _mean(right[rows])
            keep["personal_linear_global"][client] = _mean(right)
        for share in self._shares("semi-linear"):
            right = self._right(client, share)
            keep[f"personal_linear_{_percent(share)}"][client] = _mean(right[rows])
        if self.options.finetune_clients:
            for share in self._shares("semi-finetune"):
                value = self._finetune(client, share, rows.cpu())
                keep[f"personal_finetune_{_percent(share)}"][client] = value

    def together(self) -> None:
        """What needs all clients' features at once."""
        if self._own:
            with self._timing("naive-federated-linear"):
                result = naive_federated_linear(
                    [*self._own.values()], self.classes, self.options.linear, self.bench.config.seed
                )
            scores = dict(zip(self._own, result.per_client, strict=True))
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

    def _fit(self, encoders: Sequence[int]) -> None:
        """All linear probes that are asked for, on these encoders at once."""
        if "linear" in self.asked:
            with self._timing("linear"):
                self._fit_share(encoders, 1.0)
        for share in self._shares("semi-linear"):
            with self._timing("semi-linear"):
                self._fit_share(encoders, share)

    def _fit_share(self, encoders: Sequence[int], share: float) -> None:
        """A classifier with a share of the labels for every encoder that has none yet."""
        bench = self.bench
        new = {
            bench.key(who): who for who in encoders if (bench.key(who), share) not in self._probes
        }
        if not new:
            return
        train = [bench.train_features(who) for who in new.values()]
        test = [bench.test_features(who) for who in new.values()]
        labels = self.train_labels
        if share < 1:
            rows = self._labelled(share).to(labels.device)
            train, labels = [features[rows] for features in train], labels[rows]
        results = linear_probes(
            train,
            labels,
            test,
            self.test_labels,
            self.classes,
            self.options.linear,
            bench.config.seed,
        )
        for key, result, features in zip(new, results, test, strict=True):
            self._probes[key, share] = result.predict(features) == self.test_labels

    def _right(self, who: int, share: float = 1.0) -> Tensor:
        """Which test images this encoder's linear probe gets right."""
        return self._probes[self.bench.key(who), share]

    def _finetune(self, who: int, share: float, test_rows: Tensor) -> float:
        with self._timing("semi-finetune"):
            return finetuned(
                self.bench,
                who,
                self._labelled(share),
                test_rows,
                self.classes,
                self.options.finetune,
            )

    def _labelled(self, share: float) -> Tensor:
        """The same few labelled images for every encoder of the run."""
        return labelled_images(self.train_labels, share, self.bench.config.seed)

    def _note_uneven_shares(self) -> None:
        """Where few images or many classes make a share of the labels another than its name."""
        few = {*self._shares("semi-linear"), *self._shares("semi-finetune")}
        for share in sorted(few):
            count, whole = len(self._labelled(share)), len(self.train_labels)
            if abs(count - share * whole) > 0.1 * share * whole:
                self.notes.append(
                    f"{100 * share:g} % of the labels came to {count:,} of {whole:,} images "
                    f"({count / whole:.2%}): as many of every class, and at least one"
                )

    def _knn(self, bank: Tensor, labels: Tensor, queries: Tensor, truth: Tensor) -> float:
        options = self.bench.config.evaluation
        return knn_accuracy(
            bank, labels, queries, truth, k=options.k, temperature=options.temperature
        )

    def _measure_health(self) -> None:
        if "health" in self.asked:
            with self._timing("health"):
                self.health |= self._wellbeing.figures()

    def _shares(self, protocol: str) -> tuple[float, ...]:
        return self.options.fractions if protocol in self.asked else ()

    def _keep_global(self, name: str, right: Tensor) -> None:
        self._global.append(over_images(name, _mean(right), len(right)))

    @contextmanager
    def _timing(self, what: str) -> Iterator[None]:
        started = self._now()
        yield
        self.seconds[what] += self._now() - started

    def _now(self) -> float:
        """What was asked of a GPU is done before the clock is read."""
        if self.bench.device.type == "cuda":
            torch.cuda.synchronize(self.bench.device)
        return time.perf_counter()

    def _test_rows(self, client: int) -> Tensor:
        rows = self.bench.data.test_indices(client)
        return (torch.empty(0, dtype=torch.long) if rows is None else rows).to(self.bench.device)


def _percent(share: float) -> str:
    return f"{100 * share:g}pct"


def _mean(right: Tensor) -> float:
    return float(right.double().mean())
