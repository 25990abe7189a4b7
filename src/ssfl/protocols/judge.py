"""The paper's evaluation protocols (section 4.3) on the last checkpoint of a run.

kNN; federated linear evaluation of Θ; a linear classifier per encoder, trained on the whole
training set and tested on each client's own test images (and on all); the naive federated linear
evaluation, which misleads, tested in the same two ways; and semi-supervised with 1 % and 10 % of
the labels. Classifiers may also learn from mirror images: SimSiam's own evaluation crops and flips
at random, and flips are what features that are made once can have of that. Per-client figures are
kept. Labels are read here, after training; without any, label-free health is what remains.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ssfl.data.federated import FederatedData
from ssfl.errors import ConfigError
from ssfl.evaluation.knn import knn_accuracy
from ssfl.evaluation.linear import ClientFeatures, federated_linear, naive_federated_linear
from ssfl.evaluation.spread import spread
from ssfl.guest import own_torch
from ssfl.protocols.bench import GLOBAL, Bench, Progress, silent
from ssfl.protocols.options import PROTOCOLS, TABLES, ProtocolOptions
from ssfl.protocols.probes import EVERYTHING, MIRRORED, Lesson, Probes
from ssfl.protocols.scores import Evaluation, Score, load_evaluation, over_clients, over_images
from ssfl.protocols.tuning import finetuned
from ssfl.protocols.unlabelled import Figures, Wellbeing
from ssfl.run import Run
from ssfl.ssl.supervised import Supervised


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
    clients, size = judge_.clients, bench.at_once(mirrored="mirrored-linear" in protocols)
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
        self._probes = Probes(bench, options.linear)
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
        self._note_uneven_shares()
        # A client without test images of its own has no local figure.
        self.clients = [c for c in self.clients if len(bench.test_rows(c))]

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
                right = method.classifier(test).argmax(1) == bench.test_labels
            self._keep_global("global_classifier", right)
        if "knn" in self.asked:
            with self._timing("knn"):
                value = self._knn(train, bench.train_labels, test, bench.test_labels)
            self._global.append(over_images("global_knn", value, len(test)))
        if "federated-linear" in self.asked:
            with self._timing("federated-linear"):
                right = self._federated([train], test)
            self._keep_global("global_federated_linear", right)
            for client in self.clients:
                value = _mean(right[bench.test_rows(client)])
                self._personal["global_federated_linear_local"][client] = value
        if "mirrored-linear" in self.asked:
            with self._timing("mirrored-linear"):
                right = self._federated([train, bench.mirrored_features(GLOBAL)], test)
            self._keep_global("global_federated_linear_mirrored", right)
        self._fit([GLOBAL])
        if "linear" in self.asked:
            self._keep_global("global_linear", self._probes.right(GLOBAL))
        if "mirrored-linear" in self.asked:
            self._keep_global("global_linear_mirrored", self._probes.right(GLOBAL, MIRRORED))
        for share in self._shares("semi-linear"):
            right = self._probes.right(GLOBAL, Lesson(share))
            self._keep_global(f"global_linear_{_percent(share)}", right)
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
        self._probes.forget_clients()
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
                if "mirrored-linear" in self.asked:
                    bench.mirrored_features(who)
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
        bench, rows = self.bench, self.bench.test_rows(client)
        mine = bench.data.train_indices(client).to(bench.device)
        train, test = bench.train_features(client), bench.test_features(client)
        own = ClientFeatures(
            train[mine], bench.train_labels[mine], test[rows], bench.test_labels[rows]
        )
        if "knn" in self.asked:
            with self._timing("knn"):
                self._personal["personal_knn"][client] = self._knn(*own)
        if "naive-federated-linear" in self.asked:
            self._own[client] = own

    def _judge_classifiers(self, client: int) -> None:
        """On the client's own test images and, with all labels, on everybody's."""
        keep, rows = self._personal, self.bench.test_rows(client)
        if "linear" in self.asked:
            right = self._probes.right(client)
            keep["personal_linear"][client] = _mean(right[rows])
            keep["personal_linear_global"][client] = _mean(right)
        if "mirrored-linear" in self.asked:
            right = self._probes.right(client, MIRRORED)
            keep["personal_linear_mirrored"][client] = _mean(right[rows])
        for share in self._shares("semi-linear"):
            right = self._probes.right(client, Lesson(share))
            keep[f"personal_linear_{_percent(share)}"][client] = _mean(right[rows])
        if self.options.finetune_clients:
            for share in self._shares("semi-finetune"):
                value = self._finetune(client, share, rows.cpu())
                keep[f"personal_finetune_{_percent(share)}"][client] = value

    def together(self) -> None:
        """What needs all clients' features at once."""
        if not self._own:
            return
        bench, clients = self.bench, [*self._own.values()]
        with self._timing("naive-federated-linear"):
            result = naive_federated_linear(
                clients, bench.classes, self.options.linear, bench.config.seed
            )
        name = "personal_naive_federated_linear"
        self._personal[name] = dict(zip(self._own, result.per_client, strict=True))
        for client in self._own:
            # Made a second time: everybody's features of all test images might not fit.
            with self._timing("features"):
                features = bench.test_features(client)
            right = result.predict(features) == bench.test_labels
            self._personal[f"{name}_global"][client] = _mean(right)
            bench.forget(client)

    def scores(self) -> list[Score]:
        """All figures, Θ's first."""
        return self._global + [
            over_clients(name, values, [len(self.bench.test_rows(c)) for c in values])
            for name, values in self._personal.items()
        ]

    def _federated(self, sights: Sequence[Tensor], test: Tensor) -> Tensor:
        """Which test images a classifier gets right that FedAvg has trained on what Θ makes of all
        training images, seen once or more often."""
        bench, data = self.bench, self.bench.data
        parts = [data.train_indices(c).to(test.device) for c in data.clients()]
        result = federated_linear(
            [torch.cat([features[part] for features in sights]) for part in parts],
            [bench.train_labels[part].repeat(len(sights)) for part in parts],
            test,
            bench.test_labels,
            bench.classes,
            self.options.linear,
            bench.config.seed,
        )
        return result.predict(test) == bench.test_labels

    def _fit(self, encoders: Sequence[int]) -> None:
        """All linear probes that are asked for, on these encoders at once."""
        few = [("semi-linear", Lesson(share)) for share in self._shares("semi-linear")]
        for protocol, lesson in (("linear", EVERYTHING), ("mirrored-linear", MIRRORED), *few):
            if protocol in self.asked:
                with self._timing(protocol):
                    self._probes.fit(encoders, lesson)

    def _finetune(self, who: int, share: float, test_rows: Tensor) -> float:
        with self._timing("semi-finetune"):
            rows = self.bench.labelled_rows(share)
            return finetuned(self.bench, who, rows, test_rows, self.options.finetune)

    def _note_uneven_shares(self) -> None:
        """Where few images or many classes make a share of the labels another than its name."""
        few = {*self._shares("semi-linear"), *self._shares("semi-finetune")}
        for share in sorted(few):
            count, whole = len(self.bench.labelled_rows(share)), len(self.bench.train_labels)
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


def _percent(share: float) -> str:
    return f"{100 * share:g}pct"


def _mean(right: Tensor) -> float:
    return float(right.double().mean())
