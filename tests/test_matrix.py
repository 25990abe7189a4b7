"""Every algorithm with every one of the paper's SSL methods, on the demo's data in miniature.

benchmarks/matrix.py does the same for longer; its table is in docs/algorithms.md. Here a cell has
seconds: enough to fail when a combination does not train, or trains to something worse than the
encoder it began with.
"""

import math
from pathlib import Path

import pytest

from ssfl.algorithms import ALGORITHMS
from ssfl.config import Config, load_config
from ssfl.experiment import train

MINIATURE = (
    *("data.train=600", "data.test=600", "data.image_size=24"),
    *("partition.clients=2", "partition.min_size=150", "server.clients_per_round=2"),
    *("model.width=8", "local.epochs=1", "local.batch=32", "server.rounds=3"),
    *("evaluation.every=0", "evaluation.baselines=false"),
    *("device.device=cpu", "device.workers=1"),
)
METHODS = {
    "simsiam": ("projector_width=64", "predictor_width=16"),
    "byol": ("projector_width=64", "projection_width=32", "predictor_width=64"),
    "simclr": ("projector_width=64", "projection_width=32"),
    "swav": ("projector_width=64", "projection_width=32", "prototypes=30"),
}
RATES = {"simclr": 0.3}  # 0.1 for the others
# Through SwAV's sharp softmax, gradients of gradients run away at this rate unless they are cut.
SECOND_ORDER = ("maml-ssfl", "algorithm.second_order=true", "local.max_gradient=2")
VARIANTS = {"maml-ssfl second-order": SECOND_ORDER}


def configuration(algorithm: str, method: str, *more: str) -> Config:
    name, *options = VARIANTS.get(algorithm, (algorithm,))
    chosen = [f"algorithm.name={name}", *options, f"ssl.method={method}"]
    chosen += [f"ssl.{setting}" for setting in METHODS[method]]
    chosen += [f"local.lr={RATES.get(method, 0.1)}", *MINIATURE, *more]
    return load_config("demo", chosen)


@pytest.fixture(scope="module")
def random_encoder(tmp_path_factory: pytest.TempPathFactory) -> float:
    """kNN of the encoder before the first round: the same for every cell."""
    more = ("evaluation.baselines=true", "server.rounds=1", "local.batch=256")
    config = configuration("global-ssfl", "simsiam", *more)
    run = train(config, out=tmp_path_factory.mktemp("random") / "run")
    return float(run.final["untrained_knn_mean"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, *VARIANTS])
def test_trains_without_error_or_collapse_and_beats_a_random_encoder(
    algorithm: str, method: str, random_encoder: float, tmp_path: Path
) -> None:
    run = train(configuration(algorithm, method), out=tmp_path / "run")
    rounds = [row for row in run.metrics if row["kind"] == "round"]
    assert all(math.isfinite(row["loss"]) for row in rounds)
    assert [row["accepted"] for row in rounds] == [2] * 3
    final = run.final
    for client in final["clients"].values():
        assert client["effective_rank"] > 3
        assert client["std_ratio"] > 0.05
    # Ten points better where this was written; 600 test images, and other CPUs round differently.
    assert final["knn_mean"] > random_encoder + 0.03
