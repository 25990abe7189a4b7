"""A client: the one place where private images and tasks meet. The paper's Client Manager.

`Client.handle(task) -> Reply` is the only way in, whether it is called directly, in a rank loop or
at a site. A `Host` is whatever runs clients (a process, a thread, a site): it has a trainer, the
data it is allowed to see, and a store for its clients' states.
"""

import logging
from collections.abc import Callable, Sequence

import torch

from ssfl.data.federated import FederatedData
from ssfl.errors import SSFLError
from ssfl.evaluation.health import ROWS
from ssfl.evaluation.knn import knn_accuracy
from ssfl.evaluation.options import EvaluationOptions
from ssfl.evaluation.spread import thin
from ssfl.federation.admission import RUNAWAY, longest, too_long
from ssfl.federation.messages import Reason, Reply, Task, TaskKind, failed
from ssfl.federation.store import StateStore
from ssfl.federation.trainer import Result, Trainer
from ssfl.federation.wellbeing import on_record, wellbeing

log = logging.getLogger(__name__)


def in_full(error: Exception) -> str:
    """An error in its own words."""
    return str(error) if isinstance(error, SSFLError) else f"{type(error).__name__}: {error}"


class Host:
    """A trainer, the images of one or many clients, and their states."""

    def __init__(
        self,
        trainer: Trainer,
        data: FederatedData,
        store: StateStore,
        evaluation: EvaluationOptions,
    ) -> None:
        self.trainer, self.data, self.store, self.evaluation = trainer, data, store, evaluation
        self.words: Callable[[Exception], str] = in_full
        """What the server is told of an error here: not all of it, where the images are others'."""

    def clients(self) -> Sequence[int]:
        return self.data.clients()

    def handle(self, client: int, task: Task) -> Reply:
        """Hand the task to one of this host's clients."""
        return Client(client, self).handle(task)


def _objection(result: Result, task: Task) -> str | None:
    """Why a client's work should neither be kept nor sent, in words."""
    if not result.finite:
        return f"what it learned is not finite ({RUNAWAY})"
    if not task.limit:
        return None
    theta_norm = float(torch.linalg.vector_norm(task.theta))
    return too_long(result.norm, longest(task.limit, result.steps, theta_norm))


class Client:
    """One client's answer to tasks. Labels and images stay in here."""

    def __init__(self, id_: int, host: Host) -> None:
        self.id, self._host = id_, host

    def handle(self, task: Task) -> Reply:
        """Do what the task says; whatever goes wrong comes back as a typed failure."""
        if task.layout != self._host.trainer.layout.digest:
            return failed(
                self.id, task, Reason.REFUSED, "the task's model has another layout than mine"
            )
        try:
            return self._train(task) if task.kind is TaskKind.TRAIN else self._evaluate(task)
        except torch.OutOfMemoryError:
            words = "the GPU's memory is too small: lower device.workers, or set local.micro_batch"
            return failed(self.id, task, Reason.ERROR, words)
        except Exception as error:
            if not isinstance(error, SSFLError):
                log.exception("%s: client %d failed", task.when, self.id)
            return failed(self.id, task, Reason.ERROR, self._host.words(error))

    def _train(self, task: Task) -> Reply:
        host = self._host
        store = host.store  # a site's is another when a late client is done: another run has begun
        state = store.get(self.id, before=task.round)
        indices = host.data.train_indices(self.id)
        result = host.trainer.train(self.id, task, state, indices)
        if words := _objection(result, task):
            return failed(self.id, task, Reason.REFUSED, words)
        store.put(self.id, task.round + 1, result.state)
        return Reply(
            self.id,
            task.kind,
            task.round,
            layout=task.layout,
            delta=result.delta,
            samples=len(indices),
            steps=result.steps,
            metrics=result.metrics,
            control=result.control,
        )

    def _evaluate(self, task: Task) -> Reply:
        """kNN of this client's encoder on its own test images where labels are known; always its
        health, on the training images: a rank never exceeds the number of images looked at."""
        host, trainer, options = self._host, self._host.trainer, self._host.evaluation
        state = host.store.get(self.id, before=task.round)
        train, test = host.data.train_indices(self.id), host.data.test_indices(self.id)
        encoder = trainer.encoder(self.id, task, state, train)
        images, held_out = host.data.dataset.train, host.data.dataset.test
        features, samples = None, len(train)
        metrics: dict[str, float] = {}
        if held_out is not None and test is not None and len(test):
            samples = len(test)
            if images.labels is not None and held_out.labels is not None:
                features = trainer.features(encoder, images, train, options.batch)
                metrics["knn"] = knn_accuracy(
                    features,
                    images.labels[train],
                    trainer.features(encoder, held_out, test, options.batch),
                    held_out.labels[test],
                    k=options.k,
                    temperature=options.temperature,
                )
        if features is None:  # of all images they would be made for nothing
            features = trainer.features(encoder, images, thin(train, ROWS), options.batch)
        if len(features) > 1:
            metrics |= on_record(wellbeing(trainer, encoder, features, images, train))
        return Reply(self.id, task.kind, task.round, samples=samples, metrics=metrics)
