"""The paper's listings in plain PyTorch, and our models beside them: what the tests compare.

Nothing here but the builders at the end uses the package: modules are `nn.BatchNorm*`, descent is
`torch.optim.SGD`, and each listing is written line by line as the paper has it.
"""

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import normalize

from ssfl.algorithms.base import Algorithm, Models
from ssfl.algorithms.learner import Learner
from ssfl.algorithms.options import LocalOptions
from ssfl.models.backbones import Backbone
from ssfl.models.norm import BatchNorm
from ssfl.ssl.base import Batch
from ssfl.ssl.simsiam import SimSiam, SimSiamOptions

RATE = 0.05
LOCAL = LocalOptions(lr=RATE, momentum=0.9, weight_decay=5e-4)


class PlainBackbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x))).mean(dim=(2, 3))


class PlainSimSiam(nn.Module):
    """f is projector ∘ backbone, h the predictor."""

    def __init__(self):
        super().__init__()
        self.backbone = PlainBackbone()
        self.projector = nn.Sequential(
            nn.Linear(6, 16, bias=False),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Linear(16, 16, bias=False),
            nn.BatchNorm1d(16, affine=False),
        )
        self.predictor = nn.Sequential(
            nn.Linear(16, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 16)
        )

    def forward(self, x):
        z = self.projector(self.backbone(x))
        return z, self.predictor(z)


def D(p, z):
    z = z.detach()
    p = normalize(p, dim=1)
    z = normalize(z, dim=1)
    return -(p * z).sum(dim=1).mean()


def simsiam_loss(model, x1, x2):
    (z1, p1), (z2, p2) = model(x1), model(x2)
    return D(p1, z2) / 2 + D(p2, z1) / 2


def sgd(model, momentum=LOCAL.momentum, weight_decay=LOCAL.weight_decay):
    return torch.optim.SGD(
        model.parameters(), lr=RATE, momentum=momentum, weight_decay=weight_decay
    )


class GlobalListing:
    def __init__(self, F):
        self.F, self.opt = F, sgd(F)

    def step(self, x1, x2):
        L = simsiam_loss(self.F, x1, x2)
        self.opt.zero_grad()
        L.backward()
        self.opt.step()
        return (L.item(),)


class PerListing:
    def __init__(self, F, f, lam):
        self.F, self.f, self.lam = F, f, lam
        self.opt_F, self.opt_f = sgd(F), sgd(f)

    def step(self, x1, x2):
        (Z1, P1), (Z2, P2) = self.F(x1), self.F(x2)
        L = D(P1, Z2) / 2 + D(P2, Z1) / 2
        self.opt_F.zero_grad()
        L.backward()
        self.opt_F.step()

        (z1, p1), (z2, p2) = self.f(x1), self.f(x2)
        loss = D(p1, z2) / 2 + D(p2, z1) / 2
        loss = loss + self.lam * (D(p1, P1) + D(p1, P2) + D(p2, P1) + D(p2, P2)) / 4
        self.opt_f.zero_grad()
        loss.backward()
        self.opt_f.step()
        return L.item(), loss.item()


class BiLevelListing:
    """`factor` is 1/2 in the paper's equation and 1 in its listing."""

    def __init__(self, F, f, lam, factor):
        self.F, self.f, self.weight = F, f, lam * factor
        self.opt_F, self.opt_f = sgd(F), sgd(f)
        self.received = [p.detach().clone() for p in F.parameters()]

    def step(self, x1, x2):
        L = simsiam_loss(self.F, x1, x2)
        self.opt_F.zero_grad()
        L.backward()
        self.opt_F.step()

        own = simsiam_loss(self.f, x1, x2)
        pairs = zip(self.f.parameters(), self.received, strict=True)
        apart = sum(((theta - Theta) ** 2).sum() for theta, Theta in pairs)
        self.opt_f.zero_grad()
        (own + self.weight * apart).backward()
        self.opt_f.step()
        return L.item(), own.item()


class FirstOrderMAMLListing:
    """Θ′ is a copy that descends on B′; its gradient on B is given to Θ."""

    def __init__(self, F, inner_steps):
        self.F, self.inner_steps, self.opt = F, inner_steps, sgd(F)

    def step(self, x1, x2, inner1, inner2):
        copied = copy.deepcopy(self.F)
        inner = sgd(copied, momentum=0, weight_decay=0)
        for _ in range(self.inner_steps):
            inner.zero_grad()
            simsiam_loss(copied, inner1, inner2).backward()
            inner.step()
        copied.zero_grad()
        L = simsiam_loss(copied, x1, x2)
        L.backward()
        for p, q in zip(self.F.parameters(), copied.parameters(), strict=True):
            p.grad = q.grad.clone()
        self.opt.step()
        for b, c in zip(self.F.buffers(), copied.buffers(), strict=True):
            b.copy_(c)
        return (L.item(),)


class SecondOrderMAMLListing:
    """Θ′ is a function of Θ, and the gradient goes through it."""

    def __init__(self, F, inner_steps):
        self.F, self.inner_steps, self.opt = F, inner_steps, sgd(F)

    def step(self, x1, x2, inner1, inner2):
        def run(weights):
            return lambda x: functional_call(self.F, weights, (x,))

        weights = dict(self.F.named_parameters())
        for _ in range(self.inner_steps):
            loss = simsiam_loss(run(weights), inner1, inner2)
            grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {
                name: w - RATE * g for (name, w), g in zip(weights.items(), grads, strict=True)
            }
        L = simsiam_loss(run(weights), x1, x2)
        self.opt.zero_grad()
        L.backward()
        self.opt.step()
        return (L.item(),)


# What of the package the listings are held against


class TinyBackbone(Backbone):
    """PlainBackbone with our batch norm."""

    features = 6

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = BatchNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x))).mean(dim=(2, 3))


def build_learner(seed: int, local: LocalOptions = LOCAL) -> Learner:
    torch.manual_seed(seed)
    options = SimSiamOptions(projector_width=16, predictor_width=8)
    learner = Learner(SimSiam(TinyBackbone(), options).train(), local)
    learner.rate.fill_(RATE)
    return learner


def build_models(algorithm: Algorithm, local: LocalOptions = LOCAL) -> Models:
    """Θ and, where the algorithm has one, a θ_k that differs from it."""
    global_ = build_learner(1, local)
    personal = build_learner(2, local) if algorithm.personal else None
    return Models(global_, personal, global_.flat.trainable.clone())


def plain_copy(learner: Learner) -> PlainSimSiam:
    plain = PlainSimSiam().train()
    missing, unexpected = plain.load_state_dict(learner.method.state_dict(), strict=False)
    assert not unexpected
    assert all(name.endswith("num_batches_tracked") for name in missing)
    return plain


def assert_same_model(learner: Learner, plain: PlainSimSiam, tolerance: float = 1e-6) -> None:
    """Weights and batch-norm statistics alike."""
    ours = learner.method.state_dict()
    for name, value in plain.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(ours[name], value, rtol=0, atol=tolerance, msg=name)


def some_views(steps: int, batches: int = 1, images: int = 12, seed: int = 0) -> Tensor:
    """steps × batches × views × images × channels × height × width."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(steps, batches, 2, images, 3, 5, 5, generator=generator)


def train(algorithm: Algorithm, models: Models, views: Tensor) -> list[tuple[float, ...]]:
    """Run a step for each of `views`."""
    return [
        tuple(v.item() for v in algorithm.step(models, *(Batch(batch) for batch in step)))
        for step in views
    ]
