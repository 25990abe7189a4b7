"""The work in pfl-research: FedAvg in its simulated backend, with one process or several.

pfl averages what has gradients and leaves batch norm's running statistics alone, so only the
former are compared.
"""

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from round import PlainLoop, draws
from torch import Tensor, nn

from peer.work import Clock, Setting, Weights, work
from ssfl.ssl.base import Batch, Method


class Learnt(nn.Module):
    """Our method as pfl wants a model: its loss a function of the data."""

    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method = method

    def loss(self, views: Tensor) -> Tensor:
        return self.method.loss(self.method(Batch(views)))

    def metrics(self, views: Tensor) -> dict[str, float]:
        return {}


class Unjudged(PyTorchModel):  # type: ignore[misc]
    """No local evaluation, which pfl has in its first round at least."""

    def evaluate(self, *args: Any, **kwargs: Any) -> Metrics:
        return Metrics()


class OwnBatches(Dataset):  # type: ignore[misc]
    """A client's images, which come as the views of our batches."""

    def __init__(self, loop: PlainLoop, client: int, round_: int) -> None:
        super().__init__(raw_data=[], user_id=str(client))
        self.loop, self.client, self.round = loop, client, round_

    def __len__(self) -> int:
        return self.loop.data.size(self.client)

    def iter(self, batch_size: int | None) -> Iterator[list[Tensor]]:
        loop = self.loop
        indices = loop.data.train_indices(self.client)
        where = (loop.config.seed, self.round, self.client)
        for rows, uniforms in draws(*where, indices, loop.config.local.batch, loop.views.draws):
            yield [loop.views(loop.data.dataset.train.pixels[rows], uniforms)]


class BetweenRounds(TrainingProcessCallback):  # type: ignore[misc]
    """Our clock, in the first process; the others wait for it."""

    def __init__(self, clock: Clock, model: Learnt) -> None:
        self.clock, self.model, self.rounds = clock, model, 0

    def on_train_begin(self, *, model: Any) -> Metrics:
        self._wait()
        self.clock.begin()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.rounds += 1
        if int(os.environ.get("RANK", 0)) == 0:
            self.clock.end(self._weights)
        self._wait()
        self.clock.begin()
        return False, Metrics()

    def _weights(self) -> Weights:
        named = self.model.method.named_parameters()
        return {name: parameter.detach().clone() for name, parameter in named}

    def _wait(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.barrier()


def play(setting: Setting) -> Clock:
    np.random.seed(0)  # noqa: NPY002 -- pfl's own sampler draws from it, alike in all processes
    config, data, loop = work(setting)
    _, _, mine = work(setting)  # the plain loop keeps the other
    model = Learnt(mine.model)
    local = config.local
    spread = int(os.environ.get("WORLD_SIZE", 1)) > 1
    clock = Clock(loop, os.getppid() if spread else None)
    between = BetweenRounds(clock, model)
    users = list(data.clients())
    dataset = FederatedDataset(
        lambda user: OwnBatches(mine, int(user), between.rounds),
        get_user_sampler("minimize_reuse", users),
    )
    optimizer = partial(torch.optim.SGD, momentum=local.momentum, weight_decay=local.weight_decay)
    FederatedAveraging().run(
        backend=SimulatedBackend(dataset, dataset, [WeightByDatapoints()]),
        model=Unjudged(model, optimizer, torch.optim.SGD(model.parameters(), lr=1.0)),
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=setting.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=len(users),
            val_cohort_size=0,
        ),
        model_train_params=NNTrainHyperParams(
            local_batch_size=local.batch, local_num_epochs=1, local_learning_rate=local.lr
        ),
        callbacks=[between],
    )
    return clock
