"""From a configuration to the parts that run it: data, model, trainer, host, server.

Every process of an experiment (this one, an MPI rank, a Ray worker, a site) assembles its parts
here from the same configuration, so they are the same everywhere.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ssfl.algorithms import ALGORITHMS
from ssfl.algorithms.base import Algorithm
from ssfl.config import Config
from ssfl.cores import cores
from ssfl.data.federated import FederatedData, federate
from ssfl.data.here import load_here
from ssfl.data.images import DataSet
from ssfl.data.sources import load_dataset
from ssfl.data.views import Views, resolve
from ssfl.errors import ConfigError
from ssfl.federation.client import Host
from ssfl.federation.communicator import Communicator
from ssfl.federation.engine import Engine
from ssfl.federation.server import Server
from ssfl.federation.store import StateStore
from ssfl.federation.trainer import Trainer
from ssfl.guest import own_draws, own_torch
from ssfl.models.backbones import build_backbone, load_weights
from ssfl.seeding import derive
from ssfl.ssl import METHODS
from ssfl.ssl.base import Method
from ssfl.ssl.supervised import SupervisedOptions

IMAGES_IN_FLIGHT = 512
"""Images, of all workers' batches together, that keep a GPU busy: an H200 does little more with
twice as many (docs/performance.md)."""


@own_torch()
def load_federated(config: Config, *, progress: bool = False) -> FederatedData:
    """The images, and who holds which; at a site, those of its own clients."""
    if config.here is not None:
        return load_here(config.here, config.data, config.partition, config.seed, progress=progress)
    dataset = load_dataset(config.data, seed=config.seed, progress=progress)
    return federate(dataset, config.partition, config.seed)


def build_method(
    config: Config,
    channels: int,
    image_size: int,
    weights: Mapping[str, Tensor] | None = None,
) -> Method:
    """The SSL method on its backbone, for images of `channels` × `image_size` × `image_size`,
    initialised from the experiment's seed, the backbone with `weights` if there are any."""
    with own_draws(derive(config.seed, "init")):
        backbone = build_backbone(config.model, channels=channels, image_size=image_size)
        if weights is not None:
            load_weights(backbone, weights)  # before the method makes slow copies of it
        method: Method = METHODS[config.ssl.method](backbone, config.ssl)
    return method


def build_algorithm(config: Config) -> Algorithm:
    """The algorithm the configuration names."""
    options = config.algorithm.within(config.server.rounds)
    algorithm: Algorithm = ALGORITHMS[config.algorithm.name](options)
    return algorithm


def build_views(config: Config, dataset: DataSet, device: torch.device) -> Views:
    """The augmentation: the data set's preset, bent to the method's wishes and the user's."""
    wishes = METHODS[config.ssl.method].wishes
    spec = resolve(
        config.views,
        # Digits may not be mirrored, whatever the method would like.
        preset=dataset.presets if dataset.presets == "digits" else wishes.preset or dataset.presets,
        mean=dataset.mean,
        std=dataset.std,
        image_size=dataset.image_size,
        jitter=wishes.jitter,
        solarize=wishes.solarize,
    )
    return Views(spec, device)


def build_host(
    config: Config, data: FederatedData, store: StateStore, engine: Engine | None = None
) -> Host:
    """A trainer with the data and states of its clients around it."""
    engine = engine or Engine(config.device)
    dataset = data.dataset
    method = METHODS[config.ssl.method]
    if method.needs_labels and dataset.train.labels is None:
        raise ConfigError(
            f"ssl.method = {config.ssl.method!r} learns from labels, "
            f"and the {dataset.name} images have none"
        )
    if isinstance(config.ssl, SupervisedOptions) and dataset.train.labels is not None:
        there = int(dataset.train.labels.max()) + 1
        if there > config.ssl.classes:
            raise ConfigError(
                f"ssl.classes is {config.ssl.classes}, but the {dataset.name} images are of "
                f"{there} classes: set ssl.classes = {there}"
            )
    trainer = Trainer(
        build=lambda: build_method(config, dataset.channels, dataset.image_size),
        algorithm=build_algorithm(config),
        views=build_views(config, dataset, engine.device),
        images=dataset.train,
        local=config.local,
        engine=engine,
        seed=config.seed,
    )
    return Host(trainer, data, store, config.evaluation)


def build_hosts(config: Config, data: FederatedData, store: StateStore) -> list[Host]:
    """One host per worker of this process, all sharing the images, the compiled code and a store.

    On a CPU there is a worker per core. On a GPU, as many as it takes to keep it busy: the kernels
    of a small batch leave most of it idle.
    """
    engine = Engine(config.device)
    asked = config.server.clients_per_round or len(data.clients())
    if engine.device.type == "cpu":
        useful = cores()
    else:
        useful = -(-IMAGES_IN_FLIGHT // config.local.batch)
        turns = -(-asked // useful)
        useful = -(-asked // turns)  # so that the last turn, too, finds them all at work
    workers = config.device.workers or min(useful, asked)
    return [build_host(config, data, store, engine) for _ in range(workers)]


def build_server(
    config: Config, trainer: Trainer, communicator: Communicator, theta: Tensor | None = None
) -> Server:
    """The server of an experiment. Θ begins as `theta`, or as a copy of `trainer`'s model."""
    seeded = trainer.models.global_.flat.shared
    return Server(
        seeded.clone() if theta is None else theta.to(seeded.device),
        trainer.layout,
        communicator,
        config.server,
        config.local,
        config.seed,
        trainer.algorithm.metrics,
    )
