"""Linear evaluation: a linear classifier on a frozen encoder's features, in the paper's three ways.

`linear_probe` (one encoder, the whole training set), `federated_linear` (one encoder, a classifier
trained by FedAvg over clients: Global-SSFL's protocol) and `naive_federated_linear` (FedAvg over
clients that each use their own encoder: section 5.5 shows that it misleads, and it is kept to show
it). Test labels are read only after the classifier is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ssfl.errors import DataError
from ssfl.evaluation.fedavg import Classifier, fedavg
from ssfl.evaluation.logistic import fit_logistics
from ssfl.evaluation.options import LinearOptions


@dataclass(frozen=True)
class LinearResult:
    """A linear classifier on raw features, and what it scores."""

    accuracy: float
    """Share of test images right; with `per_client`, the plain mean of those."""
    weight: Tensor
    """(classes, d)."""
    bias: Tensor
    """(classes,)."""
    loss: float
    """Mean cross-entropy on the training features."""
    per_client: tuple[float, ...] = ()
    """Each client's own accuracy, where each was tested on features of its own."""

    def predict(self, features: Tensor) -> Tensor:
        """The class of each row of `features`."""
        return _predicted(self.weight, self.bias, features)


class ClientFeatures(NamedTuple):
    """One client's images as its own encoder sees them."""

    train_features: Tensor
    train_labels: Tensor
    test_features: Tensor
    test_labels: Tensor


def linear_probe(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    classes: int,
    options: LinearOptions,
    seed: int = 0,
) -> LinearResult:
    """Logistic regression on all training features. Only the `sgd` solver draws on `seed`."""
    train, test = [train_features], [test_features]
    return linear_probes(train, train_labels, test, test_labels, classes, options, seed)[0]


def linear_probes(
    train_features: Sequence[Tensor],
    train_labels: Tensor,
    test_features: Sequence[Tensor],
    test_labels: Tensor,
    classes: int,
    options: LinearOptions,
    seed: int = 0,
) -> list[LinearResult]:
    """A classifier for each encoder that saw the same images; on a GPU, all in one go."""
    for features in train_features:
        _check([features], [train_labels], classes)
    if options.solver == "lbfgs":
        classifiers = _optima(train_features, train_labels, classes, options)
    else:
        classifiers = _by_sgd(train_features, train_labels, classes, options, seed)
    return [
        LinearResult(_accuracy(weight, bias, features, test_labels), weight, bias, loss)
        for (weight, bias, loss), features in zip(classifiers, test_features, strict=True)
    ]


def _optima(
    features: Sequence[Tensor], labels: Tensor, classes: int, options: LinearOptions
) -> list[Classifier]:
    found = fit_logistics(
        features,
        labels,
        classes,
        l2=options.l2,
        iterations=options.iterations,
        tolerance=options.tolerance,
    )
    return list(zip(*found, strict=True))


def _by_sgd(
    features: Sequence[Tensor], labels: Tensor, classes: int, options: LinearOptions, seed: int
) -> list[Classifier]:
    """Centralised SGD is FedAvg with one client, its momentum kept from epoch to epoch."""
    epochs = {"rounds": options.rounds * options.local_epochs, "local_epochs": 1}
    whole = options.model_copy(update=epochs)
    return [fedavg([x], [labels], classes, whole, seed, keep_momentum=True) for x in features]


def federated_linear(
    client_features: Sequence[Tensor],
    client_labels: Sequence[Tensor],
    test_features: Tensor,
    test_labels: Tensor,
    classes: int,
    options: LinearOptions,
    seed: int = 0,
) -> LinearResult:
    """One encoder's classifier, trained by FedAvg over the clients, on the global test set."""
    _check(client_features, client_labels, classes)
    weight, bias, loss = fedavg(client_features, client_labels, classes, options, seed)
    return LinearResult(_accuracy(weight, bias, test_features, test_labels), weight, bias, loss)


def naive_federated_linear(
    clients: Sequence[ClientFeatures], classes: int, options: LinearOptions, seed: int = 0
) -> LinearResult:
    """One classifier by FedAvg over features of different encoders, tested client by client."""
    features = [client.train_features for client in clients]
    labels = [client.train_labels for client in clients]
    _check(features, labels, classes)
    weight, bias, loss = fedavg(features, labels, classes, options, seed)
    scores = tuple(_accuracy(weight, bias, c.test_features, c.test_labels) for c in clients)
    return LinearResult(sum(scores) / len(scores), weight, bias, loss, scores)


def _accuracy(weight: Tensor, bias: Tensor, features: Tensor, labels: Tensor) -> float:
    if len(features) == 0:
        raise DataError("a linear classifier needs at least one test image to be scored on")
    right = _predicted(weight, bias, features.to(weight)) == labels.to(weight.device)
    return float(right.double().mean())


def _predicted(weight: Tensor, bias: Tensor, features: Tensor) -> Tensor:
    return (features @ weight.T + bias).argmax(1)


def _check(features: Sequence[Tensor], labels: Sequence[Tensor], classes: int) -> None:
    for x, y in zip(features, labels, strict=True):
        if len(x) != len(y):
            raise DataError(f"{len(x)} feature rows came with {len(y)} labels; they must match")
        if len(y) and not (int(y.min()) >= 0 and int(y.max()) < classes):
            raise DataError(
                f"labels run from {int(y.min())} to {int(y.max())}, but a linear classifier of "
                f"{classes} classes needs 0 to {classes - 1}"
            )
    if sum(map(len, features)) == 0:
        raise DataError("a linear classifier needs at least one labelled training image")
