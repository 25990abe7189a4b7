"""A run's encoders on the bench: Θ and the one each client is judged by, their features made once.

Opens a run directory at its last checkpoint, with the data it was trained on. Two clients whose
encoders are the same tensors (Global-SSFL: all of them) share one forward pass.
"""

from collections.abc import Callable
from functools import cached_property
from shlex import quote

import torch
from torch import Tensor, nn

from ssfl.assemble import build_host, load_federated
from ssfl.config import Config
from ssfl.data.federated import FederatedData
from ssfl.data.images import Images
from ssfl.data.split import labelled_images
from ssfl.encoder import Encoder, blank_encoder
from ssfl.errors import ConfigError
from ssfl.evaluation.features import FeatureCache, extract
from ssfl.federation.checkpoint import check_fit
from ssfl.federation.engine import Engine
from ssfl.federation.messages import Task, TaskKind
from ssfl.run import Run

GLOBAL = -1
"""Θ, where a client's number is asked for."""

Progress = Callable[[str, int, int], None]
"""Told what is going on, how much of it is done, and out of how much."""


def silent(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


class Bench:
    """The encoders of a run by client number (or `GLOBAL`), and what they make of the images."""

    def __init__(
        self,
        run: Run,
        data: FederatedData | None = None,
        progress: Progress = silent,
        config: Config | None = None,
    ) -> None:
        """`config` is the run's own unless given: another algorithm may make encoders of its Θ."""
        self.run, self.config, self.progress = run, config or run.config, progress
        self.data = data or load_federated(self.config)
        if not len(self.data):
            raise ConfigError(
                f"the images of {run.path} are at its sites: ask there, of the run in a site's "
                "folder; what the sites have measured is on the page that "
                f"`ssfl report {quote(str(run.path))}` writes"
            )
        # A few steps of adaptation are done long before a step is compiled.
        engine = Engine(self.config.device.model_copy(update={"compile": "off"}))
        self._host = build_host(self.config, self.data, run.store, engine)
        self.trainer = self._host.trainer
        self.device = self.trainer.engine.device
        checkpoint = run.checkpoint()
        layout = self.trainer.layout.digest
        check_fit(checkpoint, layout, run.checkpoints)
        rounds = checkpoint.rounds
        theta = checkpoint.tensors["theta"].to(self.device)
        share = rounds / self.config.server.rounds
        self.task = Task(TaskKind.EVALUATE, rounds, theta, layout, progress=share)
        self._cache = FeatureCache()
        self._theta = [t.clone() for t in _tensors(self.trainer.global_encoder(theta))]
        self._keys: dict[int, int] = {GLOBAL: GLOBAL}
        self._test_pixels: Tensor | None = None
        self._in_place: tuple[int, nn.Module] | None = None

    def at_once(self, *, mirrored: bool) -> int:
        """How many encoders' features may be kept side by side: on a GPU, where many classifiers
        train as fast as one, as many as a third of its free memory holds with a copy of each."""
        if self.device.type == "cpu":
            return 1
        free, _ = torch.cuda.mem_get_info(self.device)
        images = (1 + mirrored) * len(self.data.dataset.train)
        images += len(self.test.pixels if self.test else ())
        width = self.trainer.models.global_.method.backbone.features
        return max(1, free // 3 // (2 * 4 * images * width))

    @property
    def shares(self) -> bool:
        """The clients train a Θ together (all algorithms but `local-only`)."""
        return self.trainer.algorithm.sends

    @property
    def test(self) -> Images | None:
        return self.data.dataset.test

    @property
    def labelled(self) -> bool:
        """Accuracy can be measured: train and test images have labels."""
        train, test = self.data.dataset.train, self.test
        return train.labels is not None and test is not None and test.labels is not None

    @cached_property
    def train_labels(self) -> Tensor:
        """On the device. This and what follows is there where `labelled` is true."""
        labels = self.data.dataset.train.labels
        assert labels is not None
        return labels.to(self.device)

    @cached_property
    def test_labels(self) -> Tensor:
        assert self.test is not None
        assert self.test.labels is not None
        return self.test.labels.to(self.device)

    @cached_property
    def classes(self) -> int:
        """How many there are, as far as names or labels tell."""
        known = max(int(self.train_labels.max()), int(self.test_labels.max())) + 1
        return max(len(self.data.dataset.classes or ()), known)

    def labelled_rows(self, share: float) -> Tensor:
        """The same few training images that count as labelled, whoever's encoder is judged."""
        return labelled_images(self.train_labels, share, self.config.seed)

    def test_rows(self, client: int) -> Tensor:
        """Test images of the client's own; maybe none."""
        rows = self.data.test_indices(client)
        return (torch.empty(0, dtype=torch.long) if rows is None else rows).to(self.device)

    def encoder(self, who: int) -> nn.Module:
        """The backbone of Θ or of a client; in place until another is asked for."""
        if self._in_place is None or self._in_place[0] != who:
            self._in_place = who, self._put_in_place(who)
        return self._in_place[1]

    def _put_in_place(self, who: int) -> nn.Module:
        if who == GLOBAL:
            return self.trainer.global_encoder(self.task.theta)
        if self.trainer.algorithm.personal or self.config.local.batch_norm == "fedbn":
            self.run.check_has_state(who)
        state = self._host.store.get(who, before=self.task.round)
        encoder = self.trainer.encoder(who, self.task, state, self.data.train_indices(who))
        same = all(map(torch.equal, self._theta, _tensors(encoder)))
        self._keys[who] = GLOBAL if same else who
        return encoder

    def standalone(self, who: int) -> Encoder:
        """A copy of the encoder that stands by itself."""
        dataset = self.data.dataset
        copy = blank_encoder(
            self.config.model, dataset.mean, dataset.std, dataset.image_size, self.run.reading
        )
        copy.backbone.load_state_dict(self.encoder(who).state_dict())
        return copy.to(self.device)

    def key(self, who: int) -> int:
        """Whose features are this one's: `GLOBAL` where a client is judged by Θ itself."""
        if who not in self._keys:
            self.encoder(who)
        return self._keys[who]

    def train_features(self, who: int) -> Tensor:
        """Features of all training images."""
        return self._features(who, "train", self.trainer.pixels)

    def mirrored_features(self, who: int) -> Tensor:
        """Features of all training images' mirror images."""
        return self._features(who, "mirrored", self.trainer.pixels, mirrored=True)

    def test_features(self, who: int) -> Tensor:
        """Features of all test images."""
        if self._test_pixels is None:
            assert self.test is not None
            self._test_pixels = self.test.pixels.to(self.device)
        return self._features(who, "test", self._test_pixels)

    def forget(self, who: int) -> None:
        """Let go of a client's features (not of Θ's, which others may share)."""
        if self.key(who) != GLOBAL:
            self._cache.forget(who)

    def features_of(self, who: int, pixels: Tensor, *, mirrored: bool = False) -> Tensor:
        """Features of any images or of their mirror images, not kept."""
        plain = self.trainer.views.plain
        done = 0

        def advance(images: int) -> None:
            nonlocal done
            done += images
            self.progress("images seen", done, len(pixels))

        return extract(
            self.encoder(who),
            pixels,
            (lambda raw: plain(raw.flip(-1))) if mirrored else plain,
            device=self.device,
            batch=self.config.evaluation.batch,
            autocast=self.trainer.engine.autocast,
            progress=advance,
        )

    def _features(self, who: int, split: str, pixels: Tensor, *, mirrored: bool = False) -> Tensor:
        def compute() -> Tensor:
            return self.features_of(who, pixels, mirrored=mirrored)

        return self._cache.get(self.key(who), split, compute)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
