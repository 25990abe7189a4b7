"""A device and the models that live on it: runs an algorithm's local steps for any client.

The models are made once; every client's vectors are written into them in place. Micro-batches,
precision and the learning rate live here; what a step does is the algorithm's business.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from threading import Event

import torch
from torch import Tensor, nn

from ssfl.algorithms.base import Algorithm, Models
from ssfl.algorithms.learner import Learner
from ssfl.algorithms.options import LocalOptions
from ssfl.data.images import Images
from ssfl.data.views import Views
from ssfl.errors import ConfigError
from ssfl.evaluation.features import extract
from ssfl.federation.drift import Drift
from ssfl.federation.engine import Engine
from ssfl.federation.messages import Task
from ssfl.federation.spares import Spares
from ssfl.federation.state import ClientState
from ssfl.models.flat import Layout
from ssfl.seeding import torch_generator
from ssfl.ssl.base import Batch, Method


@dataclass(frozen=True)
class Result:
    """What came of a client's local training."""

    delta: Tensor | None
    state: ClientState
    steps: int
    metrics: dict[str, float]
    norm: float
    """How long Δ is (0 where nothing is sent)."""
    finite: bool
    """So are Δ and all that the client would keep."""
    control: Tensor | None = None


class Trainer:
    """Resident models on one device, and the local work of any client on them."""

    def __init__(
        self,
        build: Callable[[], Method],
        algorithm: Algorithm,
        views: Views,
        images: Images,
        local: LocalOptions,
        engine: Engine,
        seed: int,
    ) -> None:
        self.algorithm, self.views, self.local = algorithm, views, local
        self.engine, self.seed = engine, seed
        self.stop = Event()
        self._images = engine.resident(images)
        self._lane = engine.lane()
        self._spares = Spares()
        self._usual: int = self._micro_batches(local.batch)[0][0].stop  # images that pass at a time
        global_ = self._resident(build)
        personal = self._resident(build) if algorithm.personal else None
        self._anchored = algorithm.anchored or local.correction != "none"
        received = global_.flat.trainable.clone() if self._anchored else torch.empty(0)
        self.models = Models(global_, personal, received)
        self._new_home = global_.flat.home.clone()
        self._norms = global_.flat.norms() if local.batch_norm == "fedbn" else None
        self._own_norms = None if self._norms is None else self._norms[: self.layout.trainable]
        self._drift = Drift(local, self.models, self._own_norms)
        self._acting, self._frozen = algorithm, False
        self._make_views = engine.compiled(views, lambda pixels, _: len(pixels) == self._usual)
        self._step = engine.step(self._one_step)

    def _resident(self, build: Callable[[], Method]) -> Learner:
        method = build().to(self.engine.device).train()
        learner = Learner(method, self.local)
        self.engine.prepare(learner, self.algorithm, self._usual)
        return learner

    @property
    def layout(self) -> Layout:
        return self.models.global_.flat.layout

    def train(self, client: int, task: Task, state: ClientState, indices: Tensor) -> Result:
        """Run the client's local steps from Θ and its state."""
        with self._lane():
            return self._train(client, task, state, indices)

    def _train(self, client: int, task: Task, state: ClientState, indices: Tensor) -> Result:
        device = self.engine.device
        state = state.to(device)
        theta = task.theta.to(device)
        plan = self._plan(client, task.round, indices)
        draws = torch_generator(self.seed, "views", task.round, client, device=device)
        uniforms = self._uniforms(plan, draws)
        self._turn(task)
        if len(plan):  # a step that is captured is captured before the models matter
            self._step.ready(plan[0], uniforms[0])
        memory = self._load(client, task, theta, state)
        metrics = self._acting.metrics
        totals = torch.zeros(len(metrics), device=device)
        for index, numbers in zip(plan, uniforms, strict=True):
            if self.stop.is_set():
                raise KeyboardInterrupt
            totals += self._step(index, numbers)
        delta = self._delta(theta) if self.algorithm.sends else None
        kept = self._drift.finish(task, self._state(memory), len(plan))
        for tensor in (delta, self._drift.change):
            self._lane.hand_over(tensor)
        norm = torch.zeros((), device=device) if delta is None else torch.linalg.vector_norm(delta)
        kept_numbers = [t.sum() for t in kept.tensors().values() if t.is_floating_point()]
        finite = torch.stack([norm, *kept_numbers]).isfinite().all()
        told = torch.cat([totals / max(len(plan), 1), torch.stack([norm, finite.to(norm)])])
        # Reading it waits for all of the above: the one time that a client's work does.
        *values, norm_, finite_ = told.tolist()
        return Result(
            delta=delta,
            state=kept,
            steps=len(plan),
            metrics=dict(zip(metrics, values, strict=True)),
            norm=norm_,
            finite=bool(finite_),
            control=self._drift.change,
        )

    def encoder(self, client: int, task: Task, state: ClientState, indices: Tensor) -> nn.Module:
        """The encoder this client is judged by, its weights in place until the next call."""
        device, models = self.engine.device, self.models
        state = state.to(device)
        kind = self.algorithm.encoder
        if kind == "personal" and state.personal is not None:
            models.own.flat.vector.copy_(state.personal)
            return models.own.method.backbone
        flat = models.global_.flat
        flat.shared.copy_(task.theta.to(device))
        self._anchor(flat.shared)
        self._put_back(state)
        if kind == "adapted" and len(indices) > 1:  # batch norm needs two images
            self._adapt(client, task, indices)
        return models.global_.method.backbone

    def global_encoder(self, theta: Tensor) -> nn.Module:
        """Θ's encoder."""
        self.models.global_.flat.shared.copy_(theta.to(self.engine.device))
        return self.models.global_.method.backbone

    def features(
        self,
        encoder: nn.Module,
        images: Images,
        rows: Tensor | None,
        batch: int,
        threads: int | None = None,
    ) -> Tensor:
        """What an encoder makes of images, or of some rows of them; on a CPU in so many threads,
        where others than its own have nothing to do."""
        engine = self.engine
        return extract(
            encoder,
            engine.resident(images).pixels,
            self.views.plain,
            device=engine.device,
            indices=rows,
            batch=batch,
            autocast=engine.autocast,
            threads=threads,
        )

    @property
    def pixels(self) -> Tensor:
        """The training images, on the device."""
        return self._images.pixels

    def _adapt(self, client: int, task: Task, indices: Tensor) -> None:
        """A few plain SGD steps on the client's own images, as the algorithm has it."""
        learner, algorithm = self.models.global_, self.algorithm
        self._turn(task)
        learner.keep_pace()
        learner.stand_at(task.progress)
        draws = torch_generator(
            self.seed, "adapt-views", task.round, client, device=self.engine.device
        )
        with learner.adapting(algorithm.adapt_rate(self.local.lr)):
            for step in range(algorithm.adapt_steps):
                learner.reset()  # plain SGD: no momentum from step to step
                order = torch_generator(self.seed, "adapt-batches", task.round, client, step)
                chosen = indices[torch.randperm(len(indices), generator=order)][: self.local.batch]
                index = chosen.to(self.engine.device).unsqueeze(0)
                uniforms = self._uniforms(index, draws)
                for (batch,) in self._in_parts(index, uniforms, self.views):
                    algorithm.adapt(self.models, batch)

    def _plan(self, client: int, round_: int, indices: Tensor) -> Tensor:
        """Which images each step sees: steps × batches × images, rows of the data set.

        Pass after pass over all of them, each in an order of its own; the last may be cut short.
        """
        size = min(self.local.batch, len(indices))
        steps = self.local.steps_of_an_epoch(len(indices))
        wanted = self.local.steps_of_a_round(len(indices))
        order = torch_generator(self.seed, "batches", round_, client)
        shuffled = [
            torch.stack(
                [
                    torch.randperm(len(indices), generator=order)[: steps * size].view(steps, size)
                    for _ in range(self.algorithm.batches)
                ],
                dim=1,
            )
            for _ in range(max(1, math.ceil(wanted / max(1, steps))))
        ]
        return indices[torch.cat(shuffled)[:wanted]].to(self.engine.device, non_blocking=True)

    def _uniforms(self, plan: Tensor, generator: torch.Generator) -> Tensor:
        """The random numbers behind the views: ... × batches × views × images × draws."""
        *steps, batches, images = plan.shape
        shape = (*steps, batches, self.models.global_.method.views, images, self.views.draws)
        return torch.rand(shape, generator=generator, device=self.engine.device)

    def _one_step(self, index: Tensor, uniforms: Tensor) -> Tensor:
        """One iteration of the algorithm, in one piece or in micro-batches."""
        algorithm = self._acting
        totals = torch.zeros(len(algorithm.metrics), device=index.device)
        for batches in self._in_parts(index, uniforms, self._make_views):
            values = algorithm.step(self.models, *batches)
            tensors = isinstance(values, tuple) and all(isinstance(v, Tensor) for v in values)
            if not tensors or len(values) != len(totals):
                raise ConfigError(
                    "an algorithm's step must return a tuple, with a tensor for each of its "
                    f"metrics ({', '.join(algorithm.metrics)})"
                )
            totals += torch.stack([value.float() for value in values]) * self.models.global_.share
        return totals

    def _in_parts(
        self, index: Tensor, uniforms: Tensor, make_views: Callable[[Tensor, Tensor], Tensor]
    ) -> Iterator[list[Batch]]:
        """A step's batches, micro-batch by micro-batch; the learners know which is at hand."""
        pixels, labels = self._images.pixels, self._images.labels
        if not self.models.global_.method.needs_labels:
            labels = None
        for part, share, last in self._micro_batches(index.shape[1]):
            for learner in self.models.learners:
                learner.share, learner.last = share, last
            yield [
                Batch(make_views(pixels[rows], drawn), None if labels is None else labels[rows])
                for rows, drawn in zip(index[:, part], uniforms[:, :, part], strict=True)
            ]

    def _micro_batches(self, images: int) -> list[tuple[slice, float, bool]]:
        """Near-equal parts of a batch: (which images, their share of it, is it the last)."""
        parts = -(-images // self.local.micro_batch) if self.local.micro_batch else 1
        parts = max(1, min(parts, images // 2))  # batch norm needs two images
        edges = [round(images * i / parts) for i in range(parts + 1)]
        return [(slice(a, b), (b - a) / images, b == images) for a, b in pairwise(edges)]

    def _turn(self, task: Task) -> None:
        """Do what this part of the experiment asks for: θ_k may have begun, and the statistics that
        Θ_k's backbone was sent may have become those it uses."""
        acting, frozen = self.algorithm.at(task.progress), self.local.frozen(task.progress)
        if (acting, frozen) == (self._acting, self._frozen):
            return
        if frozen != self._frozen:
            self.models.global_.freeze(frozen)
        self._acting, self._frozen = acting, frozen
        self._step = self.engine.step(self._one_step)  # a captured one has the old way in it

    def _load(self, client: int, task: Task, theta: Tensor, state: ClientState) -> Tensor | None:
        """Make the resident models this client's; returns what its algorithm will remember of Θ."""
        models = self.models
        self._anchor(theta)
        memory = self.algorithm.arrive(models, theta, state.mine, state.memory)
        self._put_back(state)
        models.global_.reset(state.momentum)
        models.global_.keep_pace()
        if models.personal is not None:
            models.personal.reset(state.personal_momentum)
            if state.personal is not None:
                models.personal.flat.vector.copy_(state.personal)
            else:  # θ_k starts as the Θ its client is first sent
                models.personal.flat.vector.copy_(models.global_.flat.vector)
        for learner in models.learners:
            learner.go_at(task.rate)
            learner.stand_at(task.progress)
        self._drift.begin(client, task, state)
        return memory

    def _anchor(self, theta: Tensor) -> None:
        """Keep Θ as it was sent, where something is held to it."""
        if self._anchored:
            self.models.received.copy_(theta[: self.layout.trainable])

    def _put_back(self, state: ClientState) -> None:
        """What of Θ_k never left the client: its home part and, with FedBN, its norms."""
        flat, received = self.models.global_.flat, self.models.received
        flat.home.copy_(self._new_home if state.home is None else state.home)
        if self._norms is not None and state.norms is not None:
            flat.shared[self._norms] = state.norms
            if self._anchored and self._own_norms is not None:  # nor is it held to the server's
                received.copy_(torch.where(self._own_norms, flat.trainable, received))

    def _delta(self, theta: Tensor) -> Tensor:
        delta = torch.sub(self.models.global_.flat.shared, theta, out=self._spares.take(theta))
        if self._norms is not None:
            delta[self._norms] = 0
        return delta

    def _state(self, memory: Tensor | None) -> ClientState:
        """What the client keeps: only what this experiment will ask for again."""
        models, keep = self.models, self.local.keep_momentum
        flat = models.global_.flat
        personal = models.personal if self._acting.personal else None
        return ClientState(
            personal=personal.flat.vector.clone() if personal else None,
            personal_momentum=personal.momentum.clone() if personal and keep else None,
            momentum=models.global_.momentum.clone() if keep else None,
            home=flat.home.clone() if flat.home.numel() else None,
            norms=flat.shared[self._norms] if self._norms is not None else None,
            mine=flat.shared.clone() if self.algorithm.remembers else None,
            memory=memory,
        )
