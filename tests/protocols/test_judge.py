"""The protocols on real, tiny runs: against scikit-learn and plain NumPy, and with an eye on what
they may not see."""

import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression

import ssfl.experiment as experiment
import ssfl.protocols.judge as protocols
from ssfl.assemble import load_federated
from ssfl.data.federated import FederatedData
from ssfl.data.split import labelled_images
from ssfl.errors import ConfigError
from ssfl.evaluation.finetune import FinetuneOptions
from ssfl.evaluation.linear import (
    ClientFeatures,
    LinearOptions,
    federated_linear,
    naive_federated_linear,
)
from ssfl.experiment import train
from ssfl.federation.checkpoint import save_checkpoint
from ssfl.federation.engine import DeviceOptions, Engine
from ssfl.protocols import bench, probes
from ssfl.protocols.judge import evaluate
from ssfl.protocols.options import PROTOCOLS, ProtocolOptions
from ssfl.protocols.scores import load_evaluation
from ssfl.run import Run
from tiny import outcome, same_bits, tiny

SKEWED = {"kind": "dirichlet", "alpha": 0.5, "clients": 4, "min_size": 20, "min_test": 5}
# Not the defaults, so that a figure tells whether they were read.
L2, K, TEMPERATURE = 20.0, 30, 0.4
QUICK = ProtocolOptions(linear=LinearOptions(rounds=5, l2=L2), finetune=FinetuneOptions(epochs=2))


def trained(folder: Path, algorithm: str, **sections: Any) -> Run:
    config = tiny(algorithm={"name": algorithm}, partition=SKEWED, **sections)
    return train(config, out=folder / algorithm)


@pytest.fixture(scope="module")
def personal(tmp_path_factory: pytest.TempPathFactory) -> Run:
    votes = {"k": K, "temperature": TEMPERATURE}
    return trained(tmp_path_factory.mktemp("runs"), "per-ssfl", evaluation=votes)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(tmp_path_factory.mktemp("runs"), "global-ssfl")


@pytest.fixture(scope="module")
def data(personal: Run) -> FederatedData:
    return load_federated(personal.config)


@pytest.fixture(scope="module")
def found(personal: Run, data: FederatedData) -> protocols.Evaluation:
    return evaluate(personal, list(PROTOCOLS), options=QUICK, data=data)


def copied(run: Run, folder: Path) -> Run:
    """To be spoilt; without figures."""
    shutil.copytree(run.path, folder, ignore=shutil.ignore_patterns("evaluation.json"))
    return Run(folder)


def spoil(run: Run, client: int, rounds: int) -> None:
    """Let the client's encoder have diverged after so many rounds."""
    store = run.store
    state = store.get(client, before=rounds)
    assert state.personal is not None
    store.put(client, rounds, replace(state, personal=state.personal * math.nan))
    store.flush()


def features(run: Run, client: int, pixels: torch.Tensor) -> np.ndarray:
    return run.personal_encoder(client)(pixels).double().numpy()


def knn_longhand(
    bank: np.ndarray, labels: np.ndarray, queries: np.ndarray, k: int, temperature: float
) -> np.ndarray:
    """Wu et al.'s weighted vote, one query at a time."""
    bank = bank / np.linalg.norm(bank, axis=1, keepdims=True)
    queries = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    guesses = []
    for query in queries:
        similarity = bank @ query
        nearest = np.argsort(-similarity)[:k]
        votes = np.zeros(10)
        np.add.at(votes, labels[nearest], np.exp(similarity[nearest] / temperature))
        guesses.append(votes.argmax())
    return np.array(guesses)


def sklearn_right(
    seen: np.ndarray, labels: np.ndarray, unseen: np.ndarray, truth: np.ndarray
) -> np.ndarray:
    """Which test images scikit-learn's classifier gets right, on features of unit length."""
    length = (seen - seen.mean(0)).std()
    peer = LogisticRegression(C=1 / L2, max_iter=5000, tol=1e-8).fit(seen / length, labels)
    return peer.predict(unseen / length) == truth


def test_knn_of_each_client_is_a_vote_among_its_own_images(
    personal: Run, data: FederatedData, found: protocols.Evaluation
) -> None:
    train_, test = data.dataset.train, data.dataset.test
    for client in data.clients():
        own, held = data.train_indices(client), data.test_indices(client)
        guesses = knn_longhand(
            features(personal, client, train_.pixels[own]),
            train_.labels[own].numpy(),
            features(personal, client, test.pixels[held]),
            min(K, len(own)),
            TEMPERATURE,
        )
        accuracy = (guesses == test.labels[held].numpy()).mean()
        assert found["personal_knn"].clients[client] == pytest.approx(accuracy, abs=1e-12)


def test_linear_figures_agree_with_scikit_learn_on_local_and_on_all_test_images(
    personal: Run, data: FederatedData, found: protocols.Evaluation
) -> None:
    train_, test = data.dataset.train, data.dataset.test
    for client in data.clients():
        seen, unseen = (features(personal, client, part.pixels) for part in (train_, test))
        right = sklearn_right(seen, train_.labels.numpy(), unseen, test.labels.numpy())
        local = right[data.test_indices(client).numpy()].mean()
        assert found["personal_linear"].clients[client] == pytest.approx(local, abs=0.005)
        everywhere = found["personal_linear_global"].clients[client]
        assert everywhere == pytest.approx(right.mean(), abs=0.005)


def test_figures_of_theta_agree_with_longhand_and_scikit_learn(
    personal: Run, data: FederatedData, found: protocols.Evaluation
) -> None:
    train_, test = data.dataset.train, data.dataset.test
    labels, truth = train_.labels.numpy(), test.labels.numpy()
    encoder = personal.global_encoder()
    seen, unseen = (encoder(part.pixels).double().numpy() for part in (train_, test))
    knn = knn_longhand(seen, labels, unseen, K, TEMPERATURE) == truth
    assert found["global_knn"].value == pytest.approx(knn.mean(), abs=1e-12)
    linear = sklearn_right(seen, labels, unseen, truth).mean()
    assert found["global_linear"].value == pytest.approx(linear, abs=0.005)
    for share, name in ((0.01, "1pct"), (0.1, "10pct")):
        few = labelled_images(train_.labels, share, personal.config.seed).numpy()
        right = sklearn_right(seen[few], labels[few], unseen, truth)
        assert found[f"global_linear_{name}"].value == pytest.approx(right.mean(), abs=0.01)
        for client in data.clients():
            mine = [features(personal, client, part.pixels) for part in (train_, test)]
            right = sklearn_right(mine[0][few], labels[few], mine[1], truth)
            local = right[data.test_indices(client).numpy()].mean()
            figure = found[f"personal_linear_{name}"].clients[client]
            assert figure == pytest.approx(local, abs=0.021)  # an image or two of a few dozen
    for score in found.scores:
        if score.over == "images":
            half = 1.96 * math.sqrt(score.value * (1 - score.value) / len(truth))
            assert (score.n, score.ci95) == (len(truth), pytest.approx(half))


def test_where_asked_classifiers_learn_from_mirror_images_too(
    personal: Run, data: FederatedData, found: protocols.Evaluation
) -> None:
    train_, test = data.dataset.train, data.dataset.test
    mirrored = torch.from_numpy(np.ascontiguousarray(train_.pixels.numpy()[..., ::-1]))
    twice = torch.cat([train_.pixels, mirrored])
    labels = train_.labels.numpy()
    for client in data.clients():
        seen, unseen = (features(personal, client, pixels) for pixels in (twice, test.pixels))
        right = sklearn_right(seen, np.tile(labels, 2), unseen, test.labels.numpy())
        local = right[data.test_indices(client).numpy()].mean()
        assert found["personal_linear_mirrored"].clients[client] == pytest.approx(local, abs=0.005)
    encoder = personal.global_encoder()
    seen, unseen = encoder(twice), encoder(test.pixels)
    right = sklearn_right(seen.double().numpy(), np.tile(labels, 2), unseen, test.labels.numpy())
    assert found["global_linear_mirrored"].value == pytest.approx(right.mean(), abs=0.005)
    parts = [data.train_indices(client) for client in data.clients()]
    both = [torch.cat([part, part + len(labels)]) for part in parts]
    given = [seen[part] for part in both], [train_.labels[part].repeat(2) for part in parts]
    own = personal.config.seed
    result = federated_linear(*given, unseen, test.labels, 10, QUICK.linear, own)
    figure = found["global_federated_linear_mirrored"].value
    assert figure == pytest.approx(result.accuracy, abs=0.005)
    for name in ("global_linear", "global_federated_linear", "personal_linear"):
        assert found[f"{name}_mirrored"].value != found[name].value


def test_a_linear_classifier_is_trained_on_all_images_however_uneven_their_classes(
    shared: Run, data: FederatedData
) -> None:
    parts = {
        name: replace(part, labels=(part.labels - 6).clamp_min(0))  # 0 to 6 are one class of four
        for name, part in (("train", data.dataset.train), ("test", data.dataset.test))
    }
    uneven = replace(data, dataset=replace(data.dataset, classes=None, **parts))
    found = protocols.judge(bench.Bench(shared, uneven), ["linear"], QUICK)
    encoder = shared.global_encoder()
    seen, unseen = (encoder(part.pixels).double().numpy() for part in parts.values())
    labels, truth = (part.labels.numpy() for part in parts.values())
    right = sklearn_right(seen, labels, unseen, truth).mean()
    assert found["global_linear"].value == pytest.approx(right, abs=0.005)


def test_federated_classifiers_are_trained_by_all_clients_and_tested_where_they_should(
    personal: Run, data: FederatedData, found: protocols.Evaluation
) -> None:
    train_, test = data.dataset.train, data.dataset.test
    parts = [data.train_indices(client) for client in data.clients()]
    held = [data.test_indices(client) for client in data.clients()]
    encoder = personal.global_encoder()
    seen, unseen = encoder(train_.pixels), encoder(test.pixels)
    seed = personal.config.seed
    given = ([seen[part] for part in parts], [train_.labels[part] for part in parts])
    result = federated_linear(*given, unseen, test.labels, 10, QUICK.linear, seed)
    assert found["global_federated_linear"].value == pytest.approx(result.accuracy, abs=0.005)
    right = (result.predict(unseen) == test.labels).double()
    local = {client: right[rows].mean().item() for client, rows in enumerate(held)}
    assert found["global_federated_linear_local"].clients == pytest.approx(local, abs=0.02)
    encoders = [personal.personal_encoder(client) for client in data.clients()]
    clients = []
    for mine, part, rows in zip(encoders, parts, held, strict=True):
        own = (mine(train_.pixels[part]), train_.labels[part])
        clients.append(ClientFeatures(*own, mine(test.pixels[rows]), test.labels[rows]))
    naive = naive_federated_linear(clients, 10, QUICK.linear, seed)
    figures = found["personal_naive_federated_linear"].clients
    assert list(figures.values()) == pytest.approx(naive.per_client, abs=0.02)
    figures = found["personal_naive_federated_linear_global"].clients
    everywhere = [
        (naive.predict(mine(test.pixels)) == test.labels).double().mean().item()
        for mine in encoders
    ]
    assert list(figures.values()) == pytest.approx(everywhere, abs=0.005)


def test_a_supervised_run_is_also_judged_by_its_own_classifier(tmp_path: Path) -> None:
    run = trained(tmp_path, "global-ssfl", ssl={"method": "supervised"}, server={"rounds": 1})
    data = load_federated(run.config)
    found = evaluate(run, "knn", options=QUICK, data=data)
    layer = bench.Bench(run, data).trainer.models.global_.method.classifier
    test = data.dataset.test
    logits = run.global_encoder()(test.pixels) @ layer.weight.T + layer.bias
    right = (logits.argmax(1) == test.labels).double().mean().item()
    assert found["global_classifier"].value == pytest.approx(right)


def test_where_asked_every_clients_encoder_is_fine_tuned_and_tested_on_its_own_images(
    personal: Run, data: FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[tuple[int, int], torch.Tensor] = {}

    def finetuned(_: Any, who: int, few: torch.Tensor, rows: torch.Tensor, *rest: Any) -> float:
        assert rest == (options.finetune,)
        seen[who, len(few)] = rows
        return (who + 1) / 10 + len(few) / 10_000

    monkeypatch.setattr(protocols, "finetuned", finetuned)
    options = QUICK.model_copy(update={"finetune_clients": True})
    found = protocols.judge(bench.Bench(personal, data), ["semi-finetune"], options)
    labels, seed = data.dataset.train.labels, personal.config.seed
    less, more = (len(labelled_images(labels, share, seed)) for share in (0.01, 0.1))
    assert set(seen) == {(who, size) for who in range(-1, 4) for size in (less, more)}
    for (who, _), rows in seen.items():
        everyones = torch.arange(len(data.dataset.test))
        assert torch.equal(rows, everyones if who == -1 else data.test_indices(who))
    assert found["global_finetune_1pct"].value == less / 10_000
    for name, size in (("personal_finetune_1pct", less), ("personal_finetune_10pct", more)):
        assert found[name].clients == {who: (who + 1) / 10 + size / 10_000 for who in range(4)}


def test_judging_several_encoders_at_once_changes_no_figure(
    personal: Run,
    data: FederatedData,
    found: protocols.Evaluation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As on a GPU: groups of three and one.
    monkeypatch.setattr(bench.Bench, "at_once", lambda self, mirrored: 3)
    asked = ["knn", "linear", "mirrored-linear", "semi-linear", "health"]
    at_once = protocols.judge(bench.Bench(personal, data), asked, QUICK)
    for score in at_once.scores:
        # Sums in another order may turn a test image or two.
        assert score.clients == pytest.approx(found[score.name].clients, abs=0.01)
        assert score.value == pytest.approx(found[score.name].value, abs=0.005)
    for who, figures in found.health.items():
        assert at_once.health[who] == pytest.approx(figures, rel=1e-9)


def test_clients_that_are_not_judged_change_no_figure_of_those_that_are(
    shared: Run, data: FederatedData
) -> None:
    """Be it that a few are chosen, by their place and not their id, or have nothing to test on.
    FedAvg's classifier is trained by all, whoever is judged."""
    asked = ["knn", "federated-linear", "linear"]
    theirs = replace(data, ids=(7, 5, 9, 4))  # as at a site

    def judged(data: FederatedData, options: ProtocolOptions) -> protocols.Evaluation:
        return protocols.judge(bench.Bench(shared, data), asked, options)

    everyone = judged(theirs, QUICK)
    assert data.test_parts is not None
    emptied = [part[:0] if place == 2 else part for place, part in enumerate(data.test_parts)]
    for found, clients in (
        (judged(theirs, QUICK.model_copy(update={"clients": 2})), [7, 9]),
        (judged(replace(theirs, test_parts=emptied), QUICK), [7, 5, 4]),
    ):
        assert [score.name for score in found.scores] == [score.name for score in everyone.scores]
        for score in found.scores:
            whole = everyone[score.name]
            assert score.clients == {c: whole.clients[c] for c in clients if whole.clients}
            if score.over == "images":
                assert score == whole
            else:
                assert score.value == pytest.approx(np.mean([whole.clients[c] for c in clients]))


def test_the_features_of_a_client_are_let_go_before_the_next_is_judged(
    personal: Run, data: FederatedData, tmp_path: Path
) -> None:
    """Those of a hundred clients would fill any memory; Θ's stay, as others may share them."""
    run = copied(personal, tmp_path / "run")
    spoil(run, 1, rounds=3)  # one that has no figures is let go of too
    told: list[tuple[int, int, int]] = []

    def watch(what: str, done: int, total: int) -> None:
        if what == "encoders judged":
            told.append((done, total, len(on_bench._cache)))

    on_bench = bench.Bench(run, data, watch)
    protocols.judge(on_bench, ["knn", "linear"], QUICK)
    assert told == [(done, 4, 2) for done in range(5)]


def test_by_default_the_figures_of_the_papers_tables_are_measured(
    shared: Run, data: FederatedData
) -> None:
    found = evaluate(shared, options=QUICK, data=data)
    assert {score.name for score in found.scores} == {
        "global_knn",
        "global_federated_linear",
        "global_federated_linear_local",
        "global_linear",
        "personal_knn",
        "personal_linear",
        "personal_linear_global",
    }


def test_means_over_clients_are_plain_and_the_weighted_one_counts_test_images(
    data: FederatedData, found: protocols.Evaluation
) -> None:
    sizes = np.array([len(data.test_indices(client)) for client in data.clients()])
    assert len(set(sizes)) > 1
    for score in found.scores:
        if score.over == "clients":
            values = np.array([score.clients[client] for client in data.clients()])
            assert score.value == pytest.approx(values.mean())
            assert score.weighted_mean == pytest.approx((values * sizes).sum() / sizes.sum())
            assert score.std == pytest.approx(values.std(ddof=1))
            half = 3.182446 * values.std(ddof=1) / 2  # Student's t, three degrees of freedom
            assert (score.n, score.ci95) == (4, pytest.approx(half))


def test_every_protocol_leaves_its_figure(found: protocols.Evaluation) -> None:
    assert {score.name for score in found.scores} == {
        "global_knn",
        "global_federated_linear",
        "global_federated_linear_local",
        "global_federated_linear_mirrored",
        "global_linear",
        "global_linear_mirrored",
        "global_linear_1pct",
        "global_linear_10pct",
        "global_finetune_1pct",
        "global_finetune_10pct",
        "personal_knn",
        "personal_linear",
        "personal_linear_mirrored",
        "personal_linear_global",
        "personal_linear_1pct",
        "personal_linear_10pct",
        "personal_naive_federated_linear",
        "personal_naive_federated_linear_global",
    }
    assert set(found.health) == {"global", "0", "1", "2", "3"}
    assert all(0 <= score.value <= 1 for score in found.scores)


def test_every_protocol_has_its_time_and_together_they_are_nearly_all_of_it(
    found: protocols.Evaluation,
) -> None:
    spent = dict(found.seconds)
    total = spent.pop("total")
    assert set(spent) == {*protocols.PROTOCOLS, "loading", "features"}
    assert all(seconds > 0 for seconds in spent.values())
    assert sum(spent.values()) <= total < sum(spent.values()) + 60


def test_what_is_written_is_what_was_found(personal: Run, found: protocols.Evaluation) -> None:
    assert load_evaluation(personal.path / "evaluation.json") == found


def test_asking_for_one_protocol_keeps_what_the_others_found(shared: Run) -> None:
    evaluate(shared, ["linear"], options=QUICK)
    both = evaluate(shared, "knn", options=QUICK)  # one alone need not be in a list
    assert {"global_knn", "global_linear"} <= {score.name for score in both.scores}
    assert both.notes == []


def test_figures_that_are_measured_again_stay_in_their_places(shared: Run) -> None:
    before = evaluate(shared, ["knn", "linear"], options=QUICK)
    again = evaluate(shared, "knn", options=QUICK)
    assert [score.name for score in again.scores] == [score.name for score in before.scores]


def test_figures_go_only_where_an_option_they_depend_on_has_changed(shared: Run) -> None:
    (shared.path / "evaluation.json").unlink(missing_ok=True)

    def names(found: protocols.Evaluation) -> set[str]:
        return {score.name for score in found.scores}

    before = evaluate(shared, ["linear", "semi-linear", "semi-finetune"], options=QUICK)
    longer = QUICK.model_copy(update={"finetune": FinetuneOptions(epochs=3)})
    after = evaluate(shared, ["knn"], options=longer)  # which kNN does not read
    assert names(after) == names(before) | {"global_knn", "personal_knn"}
    assert after.options == before.options  # as those figures were measured
    assert after.notes == []

    fewer = QUICK.model_copy(update={"clients": 2})
    after = evaluate(shared, ["knn"], options=fewer)
    assert names(after) == {n for n in names(before) if n.startswith("global")} | {
        "global_knn",
        "personal_knn",
    }
    (note,) = after.notes
    assert note.startswith("dropped what was measured with another setting of clients: personal_")

    after = evaluate(shared, ["semi-finetune"], options=longer.model_copy(update={"clients": 2}))
    assert names(after) >= {"global_linear", "global_knn", "personal_knn"}
    assert after.options["finetune"]["epochs"] == 3
    assert not any("dropped" in note for note in after.notes)


def test_figures_of_an_earlier_checkpoint_are_dropped_with_a_note(shared: Run) -> None:
    found = evaluate(shared, ["knn"], options=QUICK)
    replace(found, rounds=1, scores=[replace(found.scores[0], name="global_linear")]).save(
        shared.path / "evaluation.json"
    )
    found = evaluate(shared, ["knn"], options=QUICK)
    assert found.notes == ["dropped what was measured at round 1: global_linear"]


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts images of whole splits that pass through an encoder."""
    seen: Counter[str] = Counter()
    real = bench.extract

    def extract(encoder: Any, pixels: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        seen["images"] += len(pixels) if len(pixels) > 300 else 0
        return real(encoder, pixels, *rest, **more)

    monkeypatch.setattr(bench, "extract", extract)
    return seen


ALL_BUT_TUNING = sorted({*PROTOCOLS} - {"semi-finetune", "health"})


def test_features_and_classifiers_of_an_encoder_are_computed_once(
    personal: Run, shared: Run, data: FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, fit = counted(monkeypatch), probes.linear_probes

    def linear_probes(train: list[torch.Tensor], *rest: Any) -> Any:
        seen["classifiers"] += len(train)
        return fit(train, *rest)

    monkeypatch.setattr(probes, "linear_probes", linear_probes)
    tests = len(data.dataset.test)
    images = 2 * len(data.dataset.train) + tests  # those to learn from, also mirrored
    evaluate(personal, ALL_BUT_TUNING, options=QUICK, data=data)
    # Θ and four personal encoders, whose test images the naive classifier sees once more.
    assert seen == {"images": 5 * images + 4 * tests, "classifiers": 5 * 4}
    seen.clear()
    evaluate(shared, ALL_BUT_TUNING, options=QUICK, data=data)
    assert seen == {"images": images, "classifiers": 4}  # Θ alone, by which all are judged


def with_permuted_test_labels(data: FederatedData) -> FederatedData:
    test = data.dataset.test
    order = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))
    shuffled = replace(test, labels=test.labels[order])
    assert not torch.equal(shuffled.labels, test.labels)
    return replace(data, dataset=replace(data.dataset, test=shuffled))


def test_permuted_test_labels_leave_training_unchanged_to_the_bit(
    personal: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = experiment.load_federated
    monkeypatch.setattr(
        experiment,
        "load_federated",
        lambda *a, **k: with_permuted_test_labels(real(*a, **k)),
    )
    again = trained(tmp_path, "per-ssfl", evaluation={"k": K, "temperature": TEMPERATURE})
    assert again.final["knn_mean"] != personal.final["knn_mean"]
    assert same_bits(outcome(again), outcome(personal))


def test_permuted_test_labels_leave_every_classifier_unchanged(
    personal: Run, data: FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.Tensor] = []
    places = {
        "linear_probes": probes,
        "federated_linear": protocols,
        "naive_federated_linear": protocols,
    }
    for name, place in places.items():
        real = getattr(place, name)

        def spy(*given: Any, real: Any = real) -> Any:
            result = real(*given)
            made.extend(one.weight for one in (result if isinstance(result, list) else [result]))
            return result

        monkeypatch.setattr(place, name, spy)
    before = evaluate(personal, ALL_BUT_TUNING, options=QUICK, data=data)
    half = len(made)
    after = evaluate(personal, ALL_BUT_TUNING, options=QUICK, data=with_permuted_test_labels(data))
    assert half == 2 + 1 + 5 * 4
    assert all(torch.equal(a, b) for a, b in zip(made[:half], made[half:], strict=True))
    assert before["personal_linear"].value != after["personal_linear"].value


def test_a_few_labels_are_balanced_over_classes_and_the_same_for_every_encoder(
    personal: Run, data: FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[torch.Tensor] = []
    real = bench.labelled_images

    def spy(*given: Any) -> torch.Tensor:
        drawn.append(real(*given))
        return drawn[-1]

    monkeypatch.setattr(bench, "labelled_images", spy)
    evaluate(personal, ["semi-linear"], options=ProtocolOptions(fractions=(0.1,)), data=data)
    assert len(drawn) >= 5
    assert all(torch.equal(rows, drawn[0]) for rows in drawn)
    counts = torch.bincount(data.dataset.train.labels[drawn[0]], minlength=10)
    assert len(set(counts.tolist())) == 1
    assert counts.sum() == pytest.approx(0.1 * len(data.dataset.train), rel=0.1)


@pytest.mark.parametrize("protocol", ["semi-linear", "semi-finetune"])
def test_a_share_of_the_labels_that_is_another_is_noted(
    shared: Run, data: FederatedData, protocol: str
) -> None:
    whole = len(data.dataset.train)
    options = QUICK.model_copy(update={"fractions": (0.0001, 0.05, 0.1)})
    shared.evaluation.unlink(missing_ok=True)
    found = evaluate(shared, [protocol], options=options, data=data)
    stem = protocol.replace("semi-", "global_")
    assert {f"{stem}_{share}pct" for share in ("0.01", "5", "10")} <= {s.name for s in found.scores}
    # 50 where 10 % are 54 is near enough, 30 where 5 % are 27 is not.
    assert [note for note in found.notes if "labels" in note] == [
        f"{share:g} % of the labels came to {count} of {whole:,} images ({count / whole:.2%}): as "
        "many of every class, and at least one"
        for share, count in ((0.01, 10), (5, 30))
    ]
    assert not evaluate(shared, ["knn"], options=options, data=data).notes


def test_a_run_that_stands_halfway_is_judged_as_it_stands(
    personal: Run, data: FederatedData, found: protocols.Evaluation, tmp_path: Path
) -> None:
    halfway = copied(personal, tmp_path / "run")
    recipe = halfway.path / "config.toml"
    recipe.write_text(recipe.read_text().replace("rounds = 3", "rounds = 6"))
    # It was killed as a further round was saved: clients have got to where the server has not.
    spoil(halfway, 2, rounds=4)
    judged = evaluate(halfway, "knn", options=QUICK, data=data)
    assert judged.rounds == 3
    assert judged["personal_knn"] == found["personal_knn"]
    assert halfway.config.server.rounds == 6
    task = bench.Bench(halfway, data).task
    assert (task.round, task.progress) == (3, 0.5)  # what adapts an encoder goes by these


def test_clients_that_share_nothing_have_no_global_figures(tmp_path: Path) -> None:
    run = trained(tmp_path, "local-only")
    found = evaluate(run, ["knn", "linear", "health"], options=QUICK)
    assert [score.over for score in found.scores] == ["clients"] * len(found.scores)
    assert "global" not in found.health


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"name": "per-ssfl"}},
        {"algorithm": {"name": "per-ssfl"}, "model": {"norm": "group"}},  # it has no buffers
        {"algorithm": {"name": "la-ssfl"}, "local": {"freeze_statistics": 0.5}},
        {"local": {"batch_norm": "fedbn"}},  # all but the norms is Θ's
    ],
    ids=["per-ssfl", "per-ssfl-group", "la-ssfl-frozen", "fedbn"],
)
def test_a_clients_figures_are_the_same_beside_the_training_and_after_it(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    everyone = {"clients": 4, "k": K, "temperature": TEMPERATURE}
    config = tiny(partition=SKEWED, evaluation=everyone, **sections)
    run = train(config, out=tmp_path / "run")
    alone, after = evaluate(run, ["health"]), evaluate(run, ["knn", "health"])
    names = ("effective_rank", "std_ratio", "uniformity", "alignment", "epsilon_share")
    assert set(run.final["clients"]) == {"0", "1", "2", "3"}
    for client, sent in run.final["clients"].items():
        assert sent["knn"] == pytest.approx(after["personal_knn"].clients[int(client)], abs=1e-9)
        for found in (alone.health[client], after.health[client]):
            same = {name: pytest.approx(found[name], rel=1e-4) for name in names}
            assert {name: sent.get(name) for name in names} == same


def test_a_client_whose_encoder_has_diverged_costs_its_own_figures_only(
    personal: Run, data: FederatedData, found: protocols.Evaluation, tmp_path: Path
) -> None:
    spoilt = copied(personal, tmp_path / "run")
    spoil(spoilt, 2, rounds=3)
    again = evaluate(spoilt, list(PROTOCOLS), options=QUICK, data=data)
    assert any("client 2" in note for note in again.notes)
    assert again.health["2"]["std"] is None
    for name in ("personal_knn", "personal_linear", "personal_linear_10pct"):
        wanted = {k: v for k, v in found[name].clients.items() if k != 2}
        assert again[name].clients == wanted
    for name in ("personal_naive_federated_linear", "personal_naive_federated_linear_global"):
        assert again[name].clients.keys() == {0, 1, 3}
    assert again["global_linear"].value == found["global_linear"].value


def test_where_theta_has_diverged_the_clients_own_encoders_are_judged_all_the_same(
    personal: Run, data: FederatedData, found: protocols.Evaluation, tmp_path: Path
) -> None:
    spoilt = copied(personal, tmp_path / "run")
    last = spoilt.checkpoint()
    lost = last.tensors | {"theta": last.tensors["theta"] * math.nan}
    save_checkpoint(spoilt.checkpoints, replace(last, tensors=lost))
    again = evaluate(spoilt, ALL_BUT_TUNING, options=QUICK, data=data)
    assert again.notes[-1] == "training has diverged, Θ has no figures: features are not finite"
    assert {score.name for score in again.scores} == {
        score.name for score in found.scores if score.name.startswith("personal")
    }
    assert again["personal_linear"] == found["personal_linear"]


def test_where_all_have_diverged_an_evaluation_says_so_and_has_no_figures(tmp_path: Path) -> None:
    run = trained(tmp_path, "local-only", local={"lr": 1e9, "steps": 1}, server={"rounds": 1})
    judged = evaluate(run, list(PROTOCOLS), options=QUICK)
    assert judged.scores == []
    assert len([note for note in judged.notes if "diverged" in note]) == 4


def test_adapted_encoders_are_judged_each_by_itself(tmp_path: Path) -> None:
    run = trained(tmp_path, "la-ssfl")
    figures = evaluate(run, ["linear"], options=QUICK)["personal_linear_global"].clients
    assert len(set(figures.values())) > 1


def test_nothing_is_compiled_for_the_few_steps_of_an_evaluation(
    shared: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU it would take longer than they do, and fail where there is no compiler."""
    asked, make = [], Engine.__init__

    def noted(engine: Engine, options: DeviceOptions) -> None:
        asked.append(options.compile)
        make(engine, options)

    monkeypatch.setattr(Engine, "__init__", noted)
    bench.Bench(shared)
    assert asked == ["off"]


@pytest.mark.parametrize(
    ("asked", "bare"),
    [
        (None, ["train", "test"]),
        (["knn"], ["train"]),
        (["knn"], ["test"]),
        (["linear", "semi-finetune"], ["train", "test"]),
    ],
)
def test_without_labels_health_is_measured_whatever_was_asked_for(
    shared: Run, data: FederatedData, asked: list[str] | None, bare: list[str]
) -> None:
    without = {part: replace(getattr(data.dataset, part), labels=None) for part in bare}
    unlabelled = replace(data, dataset=replace(data.dataset, **without))
    found = evaluate(shared, asked, options=QUICK, data=unlabelled)
    assert found.scores == []
    assert found.health["global"]["effective_rank"] > 1
    assert set(found.health) == {"global", "0", "1", "2", "3"}
    assert found.notes == ["the images have no labels: health in place of accuracy"]


def test_a_client_with_a_single_image_has_no_health_and_one_with_two_has(
    shared: Run, data: FederatedData
) -> None:
    few = {1: 1, 2: 2}
    parts = [part[: few.get(k, len(part))] for k, part in enumerate(data.train_parts)]
    on_bench = bench.Bench(shared, replace(data, train_parts=parts))
    assert set(protocols.judge(on_bench, ["health"], QUICK).health) == {"global", "0", "2", "3"}


def test_without_test_images_health_is_measured_too(shared: Run, data: FederatedData) -> None:
    bare = replace(data, dataset=replace(data.dataset, test=None), test_parts=None)
    found = evaluate(shared, ["knn"], options=QUICK, data=bare)
    assert (found.scores, set(found.health)) == ([], {"global", "0", "1", "2", "3"})
    assert found.notes == ["there are no test images: health in place of accuracy"]


def test_every_evaluation_of_a_run_without_labels_has_all_health_figures_of_every_client(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(40):
        pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02}.png")
    source = {"source": "folder", "path": folder, "image_size": 8, "layout": "flat"}
    run = train(
        tiny(data=source, evaluation={"every": 1, "clients": 4}, server={"rounds": 2}),
        out=tmp_path / "run",
    )
    rows = [row for row in run.metrics if row["kind"] == "evaluation"]
    assert len(rows) == 2
    for row in rows:
        assert set(row["clients"]) == {"0", "1", "2", "3"}
        for figures in (row, *row["clients"].values()):
            assert figures["std_ratio"] > 0
            assert figures["effective_rank"] > 1
            assert figures["uniformity"] < 0
            assert 0 < figures["alignment"] < 4
            assert 0 < figures["epsilon_share"] < 0.01
    # What the last round said is what the protocol finds on the same images.
    health = evaluate(run).health
    for who, figures in {"global": rows[-1], **rows[-1]["clients"]}.items():
        assert figures["alignment"] == pytest.approx(health[who]["alignment"], rel=1e-4)
        assert figures["uniformity"] == pytest.approx(health[who]["uniformity"], rel=1e-4)
        assert figures["epsilon_share"] == pytest.approx(health[who]["epsilon_share"])


def test_an_unknown_protocol_is_named_with_those_that_exist(shared: Run) -> None:
    with pytest.raises(ConfigError, match="unknown protocol 'svm': choose among knn"):
        evaluate(shared, ["svm"])
