"""Linear evaluation against scikit-learn, torch.optim.SGD, and FedAvg written longhand."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torch.nn import functional as F

from ssfl import seeding
from ssfl.errors import DataError
from ssfl.evaluation.linear import (
    ClientFeatures,
    LinearOptions,
    LinearResult,
    federated_linear,
    linear_probe,
    linear_probes,
    naive_federated_linear,
)
from ssfl.evaluation.logistic import _in_parts

PLAIN = LinearOptions(rounds=4, batch=16, lr=0.2, momentum=0.0, standardise=False)


def features(n: int = 900, d: int = 40, classes: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Overlapping, rectified, badly scaled features, as a backbone's are."""
    rng = np.random.default_rng(seed)
    shared = np.random.default_rng(7)
    centres, mix = shared.normal(size=(classes, d)), shared.normal(size=(d, d)) / d**0.5
    labels = rng.integers(classes, size=n)
    x = (centres[labels] + 2.0 * rng.normal(size=(n, d))) @ mix * np.logspace(0, -2, d) + 0.3
    return torch.from_numpy(np.maximum(x, 0)).float(), torch.from_numpy(labels)


def digits() -> tuple[Tensor, Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return torch.from_numpy(pixels[order] / 16).float(), torch.from_numpy(labels[order])


def split(x: Tensor, y: Tensor, at: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x[:at], y[:at], x[at:], y[at:]


def unit(x: Tensor) -> float:
    """What features are divided by to have, around their mean, a mean square of one."""
    return float((x - x.mean(0)).square().mean().sqrt())


def same_classifier(a: LinearResult, b: LinearResult) -> bool:
    return torch.equal(a.weight, b.weight) and torch.equal(a.bias, b.bias) and a.loss == b.loss


@pytest.mark.parametrize("l2", [1.0, 0.01, 30.0])
@pytest.mark.parametrize(
    ("data", "train", "classes"),
    [(digits(), 1200, 10), (features(), 600, 6), (features(n=400, d=120), 60, 6)],
    ids=["digits", "synthetic", "fewer images than dimensions"],
)
def test_the_probe_agrees_with_scikit_learn_to_half_a_point(
    data: tuple[Tensor, Tensor], train: int, classes: int, l2: float
) -> None:
    x, y, test_x, test_y = split(*data, train)
    scale = unit(x)
    peer = LogisticRegression(C=1 / l2, max_iter=5000, tol=1e-8)
    peer.fit(x.double().numpy() / scale, y.numpy())
    ours = linear_probe(x, y, test_x, test_y, classes, LinearOptions(l2=l2))
    theirs = peer.score(test_x.double().numpy() / scale, test_y.numpy())
    assert abs(ours.accuracy - theirs) <= 0.005
    assert ours.weight.shape == (classes, x.shape[1])


def test_in_float64_the_probe_finds_scikit_learns_very_weights() -> None:
    x, y, test_x, test_y = split(*features(), 600)
    x, test_x = x.double(), test_x.double()
    scale = unit(x)
    peer = LogisticRegression(max_iter=10000, tol=1e-10).fit(x.numpy() / scale, y.numpy())
    # Forty steps leave an error of 1e-5: a solver that needs more has lost something.
    ours = linear_probe(x, y, test_x, test_y, 6, LinearOptions(tolerance=1e-9, iterations=40))
    np.testing.assert_allclose(ours.weight.numpy() * scale, peer.coef_, atol=1e-4)
    np.testing.assert_allclose(
        (ours.bias - ours.bias.mean()).numpy(),
        peer.intercept_ - peer.intercept_.mean(),
        atol=1e-4,
    )
    logits = test_x.numpy() / scale @ peer.coef_.T + peer.intercept_
    assert torch.equal(ours.predict(test_x), torch.from_numpy(logits.argmax(1)))


@pytest.mark.parametrize("shrunk", [200.0, 1 / 200])
def test_the_length_of_features_does_not_matter(shrunk: float) -> None:
    x, y, test_x, test_y = split(*digits(), 1200)
    parts, labels = x.split(120), y.split(120)
    ways = [
        lambda s: linear_probe(s * x, y, s * test_x, test_y, 10, LinearOptions()),
        lambda s: federated_linear(
            [s * part for part in parts], labels, s * test_x, test_y, 10, LinearOptions(rounds=30)
        ),
    ]
    for judge in ways:
        as_they_are, scaled = judge(1.0), judge(shrunk)
        assert scaled.accuracy == pytest.approx(as_they_are.accuracy, abs=0.002)
        assert scaled.loss == pytest.approx(as_they_are.loss, rel=1e-3)


def test_classifiers_made_together_are_those_made_one_by_one() -> None:
    """Encoders of different scale, which are done after different numbers of iterations."""
    x, y, test_x, test_y = split(*features(), 600)
    x, test_x = x.double(), test_x.double()
    turn = torch.linalg.qr(torch.randn(40, 40, generator=torch.Generator().manual_seed(0)).double())
    seen = [(a, 30 * a, a @ turn.Q + 5) for a in (x, test_x)]
    options = LinearOptions(tolerance=1e-7)
    together = linear_probes(seen[0], y, seen[1], test_y, 6, options)
    for one, train, test in zip(together, *seen, strict=True):
        alone = linear_probe(train, y, test, test_y, 6, options)
        torch.testing.assert_close(one.weight, alone.weight, rtol=1e-3, atol=1e-5)
        assert one.loss == pytest.approx(alone.loss, abs=1e-6)
        assert one.accuracy == pytest.approx(alone.accuracy, abs=0.004)


def test_a_product_over_images_in_parts_is_the_whole_one() -> None:
    left, x = torch.randn(3, 5, 24).double(), torch.randn(3, 24, 7).double()
    torch.testing.assert_close(_in_parts(left, x, 4), left @ x)


def test_the_reported_loss_is_the_classifiers_cross_entropy_on_raw_features() -> None:
    x, y = features()
    for options in (LinearOptions(), LinearOptions(solver="sgd", rounds=3)):
        probe = linear_probe(x, y, x, y, 6, options)
        longhand = F.cross_entropy(x @ probe.weight.T + probe.bias, y).item()
        assert probe.loss == pytest.approx(longhand, abs=1e-5)
        assert probe.accuracy == ((x @ probe.weight.T + probe.bias).argmax(1) == y).double().mean()


def test_features_that_never_move_and_classes_never_seen_do_no_harm() -> None:
    x, y = features()
    x[:, 3], seen = 5.0, y != 2
    for options in (LinearOptions(), LinearOptions(solver="sgd", rounds=20)):
        probe = linear_probe(x[seen], y[seen], x, y, 6, options)
        assert probe.weight.isfinite().all()
        assert not (probe.predict(x) == 2).any()


def test_permuting_the_test_labels_leaves_every_classifier_bit_for_bit_the_same() -> None:
    x, y, test_x, test_y = split(*features(), 600)
    wrong = test_y.flip(0)
    fast = LinearOptions(rounds=3)
    parts, labels = x.split(200), y.split(200)

    def naive(test_labels: Tensor) -> LinearResult:
        clients = [
            ClientFeatures(a, b, test_x, test_labels) for a, b in zip(parts, labels, strict=True)
        ]
        return naive_federated_linear(clients, 6, fast)

    pairs = [
        (linear_probe(x, y, test_x, t, 6, LinearOptions()) for t in (test_y, wrong)),
        (linear_probe(x, y, test_x, t, 6, LinearOptions(solver="sgd")) for t in (test_y, wrong)),
        (federated_linear(parts, labels, test_x, t, 6, fast) for t in (test_y, wrong)),
        (naive(t) for t in (test_y, wrong)),
    ]
    for honest, permuted in pairs:
        assert same_classifier(honest, permuted)
        assert honest.accuracy != permuted.accuracy


def longhand_fedavg(
    clients: list[tuple[Tensor, Tensor]], classes: int, options: LinearOptions, seed: int
) -> tuple[Tensor, Tensor]:
    """FedAvg of a linear layer with torch.optim.SGD, one client and one batch at a time."""
    layer = torch.nn.Linear(clients[0][0].shape[1], classes).double()
    state = {name: torch.zeros_like(value) for name, value in layer.state_dict().items()}
    total = sum(len(x) for x, _ in clients)
    for number in range(options.rounds):
        rate = options.lr * (1 + np.cos(np.pi * number / options.rounds)) / 2
        mean = {name: torch.zeros_like(value) for name, value in state.items()}
        dice = seeding.torch_generator(seed, "linear", number)
        numbers = torch.rand(options.local_epochs, total, generator=dice, dtype=torch.float64)
        for client, (x, y) in enumerate(clients):
            layer.load_state_dict(state)
            sgd = torch.optim.SGD(
                [
                    {"params": [layer.weight], "weight_decay": options.weight_decay},
                    {"params": [layer.bias]},
                ],
                lr=rate,
                momentum=options.momentum,
            )
            first = sum(len(features) for features, _ in clients[:client])
            for epoch in range(options.local_epochs):
                order = numbers[epoch, first : first + len(x)].argsort()
                for rows in order.split(options.batch):
                    sgd.zero_grad()
                    F.cross_entropy(layer(x[rows]), y[rows]).backward()
                    sgd.step()
            for name, value in layer.state_dict().items():
                mean[name] += len(x) / total * value
        state = mean
    return state["weight"], state["bias"]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_federated_training_is_fedavg_of_plain_sgd_on_clients_of_any_size(momentum: float) -> None:
    x, y = features(n=300)
    x, sizes = x.double(), [7, 150, 16, 1, 33, 93]
    clients = list(zip(x.split(sizes), y.split(sizes), strict=True))
    options = LinearOptions(
        rounds=3,
        local_epochs=3,
        batch=16,
        lr=0.1,
        momentum=momentum,
        weight_decay=0.01,
        standardise=False,
    )
    ours = federated_linear([c[0] for c in clients], [c[1] for c in clients], x, y, 6, options, 3)
    weight, bias = longhand_fedavg(clients, 6, options, seed=3)
    torch.testing.assert_close(ours.weight, weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.bias, bias, rtol=1e-5, atol=1e-6)


def test_taking_the_clients_in_groups_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = features(n=300)
    sizes = [10, 120, 50, 40, 80]
    for name, groups in (("_GROUPS", 1), ("_GROUPS", 2), ("_BLOCK", 1)):
        whole = federated_linear(x.split(sizes), y.split(sizes), x, y, 6, PLAIN)
        monkeypatch.setattr(f"ssfl.evaluation.fedavg.{name}", groups)
        grouped = federated_linear(x.split(sizes), y.split(sizes), x, y, 6, PLAIN)
        torch.testing.assert_close(grouped.weight, whole.weight)


def test_how_many_cores_there_are_makes_no_difference_to_fedavg() -> None:
    x, y = features(n=300)
    sizes = [10, 20, 50, 40, 80, *[5] * 20]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(federated_linear(x.split(sizes), y.split(sizes), x, y, 6, PLAIN))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one.weight, found[0].weight) for one in found)


def test_fedavg_with_one_client_equals_centralised_sgd() -> None:
    x, y, test_x, test_y = split(*features(), 600)
    central = linear_probe(
        x, y, test_x, test_y, 6, PLAIN.model_copy(update={"solver": "sgd"}), seed=5
    )
    federated = federated_linear([x], [y], test_x, test_y, 6, PLAIN, seed=5)
    assert same_classifier(central, federated)
    assert central.accuracy == federated.accuracy


def test_centralised_sgd_keeps_its_momentum_from_epoch_to_epoch() -> None:
    x, y = features(n=100)
    x, options = x.double(), PLAIN.model_copy(update={"solver": "sgd", "momentum": 0.9})
    ours = linear_probe(x, y, x, y, 6, options.model_copy(update={"local_epochs": 2}), seed=2)
    layer = torch.nn.Linear(40, 6).double()
    torch.nn.init.zeros_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    sgd = torch.optim.SGD(layer.parameters(), lr=options.lr, momentum=0.9)
    for epoch in range(8):  # four rounds of two
        sgd.param_groups[0]["lr"] = options.lr * (1 + np.cos(np.pi * epoch / 8)) / 2
        dice = seeding.torch_generator(2, "linear", epoch)
        order = torch.rand(1, 100, generator=dice, dtype=torch.float64)[0].argsort()
        for rows in order.split(options.batch):
            sgd.zero_grad()
            F.cross_entropy(layer(x[rows]), y[rows]).backward()
            sgd.step()
    torch.testing.assert_close(ours.weight, layer.weight.detach(), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(ours.bias, layer.bias.detach(), rtol=1e-6, atol=1e-8)


def test_one_round_of_full_batches_over_equal_clients_is_one_centralised_step() -> None:
    x, y = features(n=240)
    x = x.double()
    options = LinearOptions(rounds=1, batch=1000, lr=0.5, momentum=0.0, standardise=False)
    ours = federated_linear(x.split(60), y.split(60), x, y, 6, options)
    error = (torch.full((240, 6), 1 / 6, dtype=torch.float64) - F.one_hot(y, 6)) / 240
    torch.testing.assert_close(ours.weight, -0.5 * error.T @ x, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours.bias, -0.5 * error.sum(0), rtol=1e-6, atol=1e-7)


def test_pooled_statistics_turn_features_and_the_classifier_is_turned_back() -> None:
    """Longhand: whiten by half the covariance and the penalty, descend there on the probe's
    objective, undo it."""
    x, y = features()
    x, count = x.double(), len(x)
    values, vectors = np.linalg.eigh(np.cov(x.numpy().T, bias=True))
    penalty = 30 / count * values.mean()
    turn = torch.from_numpy(vectors / np.sqrt(values / 2 + penalty))
    z = (x - x.mean(0)) @ turn
    weight, bias = (torch.zeros(shape).double().requires_grad_() for shape in ((6, 40), (6,)))
    for rate in (0.5, 0.375, 0.125):
        loss = F.cross_entropy(z @ weight.T + bias, y)
        loss = loss + penalty / 2 * (weight @ turn.T).square().sum()
        steps = torch.autograd.grad(loss, (weight, bias))
        with torch.no_grad():
            weight, bias = (
                (old - rate * step).requires_grad_()
                for old, step in zip((weight, bias), steps, strict=True)
            )
    options = LinearOptions(rounds=3, batch=count, lr=0.5, l2=30)
    ours = federated_linear([x], [y], x, y, 6, options)
    torch.testing.assert_close(ours.weight, (weight @ turn.T).detach(), rtol=1e-6, atol=1e-8)
    found = x @ ours.weight.T + ours.bias
    torch.testing.assert_close(found, (z @ weight.T + bias).detach(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("scale", [0.3, 3.0])
@pytest.mark.parametrize("data", [digits(), features(n=1800)], ids=["digits", "synthetic"])
def test_by_default_the_federated_classifier_nears_scikit_learns(
    data: tuple[Tensor, Tensor], scale: float
) -> None:
    """Ten even clients, features of any scale: the loss of the same objective, a point of accuracy
    on 600 test images."""
    x, y, test_x, test_y = split(scale * data[0], data[1], 1200)
    length = unit(x)
    peer = LogisticRegression(max_iter=3000, tol=1e-6).fit(x.double().numpy() / length, y.numpy())
    ours = federated_linear(
        x.split(120), y.split(120), test_x, test_y, int(y.max()) + 1, LinearOptions()
    )

    def objective(weight: Tensor, bias: Tensor) -> float:
        loss = F.cross_entropy(x @ weight.T + bias, y)
        return (loss + (length * weight).square().sum() / 2 / len(x)).item()

    found = (peer.coef_ / length, peer.intercept_)
    theirs = objective(*(torch.from_numpy(a).float() for a in found))
    assert objective(ours.weight, ours.bias) <= theirs + 0.025
    score = peer.score(test_x.double().numpy() / length, test_y.numpy())
    assert abs(ours.accuracy - score) <= 0.0101


def test_the_naive_protocol_on_one_shared_encoder_is_the_federated_one() -> None:
    x, y, test_x, test_y = split(*features(), 600)
    parts, labels = x.split(150), y.split(150)
    tests, truths = test_x.split(75), test_y.split(75)
    clients = [ClientFeatures(*four) for four in zip(parts, labels, tests, truths, strict=True)]
    naive = naive_federated_linear(clients, 6, PLAIN, seed=1)
    federated = federated_linear(parts, labels, test_x, test_y, 6, PLAIN, seed=1)
    assert same_classifier(naive, federated)
    assert naive.accuracy == pytest.approx(federated.accuracy)
    assert naive.per_client == tuple(
        (federated.predict(a) == b).double().mean().item()
        for a, b in zip(tests, truths, strict=True)
    )


def test_the_naive_protocol_underrates_encoders_that_differ_only_by_a_rotation() -> None:
    """Turned features are as good as plain ones; only a classifier shared by all is not."""
    x, y = digits()

    def naive(turned: bool) -> LinearResult:
        clients = []
        for client, (part, labels) in enumerate(zip(x.split(300), y.split(300), strict=True)):
            noise = torch.randn(64, 64, generator=torch.Generator().manual_seed(client))
            seen = part @ torch.linalg.qr(noise).Q if turned else part
            clients.append(ClientFeatures(seen[:200], labels[:200], seen[200:], labels[200:]))
        return naive_federated_linear(clients, 10, LinearOptions(batch=64))

    plain, turned = naive(False), naive(True)
    assert turned.accuracy < plain.accuracy - 0.1
    assert turned.accuracy == pytest.approx(np.mean(turned.per_client))


def test_another_seed_shuffles_otherwise_and_the_same_seed_does_not() -> None:
    x, y = features()
    a, b, c = (federated_linear([x], [y], x, y, 6, PLAIN, seed=s) for s in (1, 1, 2))
    assert same_classifier(a, b)
    assert not torch.equal(a.weight, c.weight)


def test_a_client_without_images_is_passed_over() -> None:
    x, y = features()
    with_empty = federated_linear([x[:0], x], [y[:0], y], x, y, 6, PLAIN)
    assert with_empty.weight.isfinite().all()
    assert with_empty.accuracy > 0.4


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (torch.tensor([0] * 9 + [6]), "labels run from 0 to 6, .* 6 classes needs 0 to 5"),
        (torch.tensor([0] * 9 + [-1]), "labels run from -1 to 0, .* needs 0 to 5"),
        (torch.zeros(9, dtype=torch.long), "10 feature rows came with 9 labels"),
    ],
)
def test_labels_that_do_not_fit_are_refused_in_one_sentence(labels: Tensor, says: str) -> None:
    x = torch.zeros(10, 4)
    with pytest.raises(DataError, match=says):
        linear_probe(x, labels, x, labels, 6, LinearOptions())
    with pytest.raises(DataError, match=says):
        federated_linear([x], [labels], x, labels, 6, LinearOptions())


def test_nothing_to_train_on_or_to_test_with_is_refused() -> None:
    x, y = torch.rand(10, 4), torch.arange(10) % 2
    for n, tests, says in ((0, 10, "one labelled training image"), (10, 0, "one test image")):
        given = (x[:tests], y[:tests], 2, PLAIN)
        with pytest.raises(DataError, match=says):
            linear_probe(x[:n], y[:n], *given)
        with pytest.raises(DataError, match=says):
            federated_linear([x[:n]], [y[:n]], *given)
