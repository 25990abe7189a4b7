"""Where Θ begins: as the seed has it, or with what was learned before.

`server.start` names a run, an encoder that `ssfl export` wrote, or a file of a network's tensors.
Of a run whose model is the same, tensor by tensor, all of Θ is taken; otherwise its backbone alone,
and heads begin anew. Only the server reads it: clients, wherever they are, take Θ from their first
task, and θ_k starts as that.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ssfl.assemble import build_method
from ssfl.config import Config
from ssfl.data.images import DataSet
from ssfl.encoder_files import read_encoder_file
from ssfl.errors import CheckpointError, ConfigError
from ssfl.files import expanded
from ssfl.models.flat import FlatModel
from ssfl.run import Run


def first_theta(config: Config, dataset: DataSet) -> Tensor | None:
    """Θ of the first round by `server.start`; None where the seed's is meant."""
    if config.server.start is None:
        return None
    path = expanded(config.server.start, "server.start")
    if path.is_dir():
        theta = _of_run(Run(path), config, dataset)
    elif path.is_file():
        theta = _around(_tensors_of(path), path, config, dataset)
    else:
        raise ConfigError(f"server.start: there is no run directory or file at {path}")
    if not theta.isfinite().all():
        raise CheckpointError(
            f"server.start: some values of {path} are not finite, for its training has diverged: "
            "choose another"
        )
    return theta


def _of_run(run: Run, config: Config, dataset: DataSet) -> Tensor:
    run.check_theta()
    checkpoint = run.checkpoint()
    if checkpoint.layout == _model(config, dataset).layout.digest:
        return checkpoint.tensors["theta"]
    return _around(run.global_encoder().state_dict(), run.path, config, dataset)


def _around(weights: Mapping[str, Tensor], path: Path, config: Config, dataset: DataSet) -> Tensor:
    """A Θ whose backbone is the one among `weights`, and whose heads are the seed's."""
    try:
        return _model(config, dataset, _backbone_among(weights)).shared.clone()
    except CheckpointError as error:
        raise CheckpointError(f"server.start: {path} does not fit: {error}") from error


def _tensors_of(path: Path) -> Mapping[str, Tensor]:
    try:
        weights, _ = read_encoder_file(path)
    except CheckpointError as error:
        raise CheckpointError(
            f"server.start: {path} cannot be read: {error}; save a network's tensors alone, as "
            "safetensors or by `torch.save(model.state_dict(), ...)`"
        ) from error
    return weights


def _model(
    config: Config, dataset: DataSet, weights: Mapping[str, Tensor] | None = None
) -> FlatModel:
    method = build_method(config, dataset.channels, dataset.image_size, weights)
    return FlatModel(method, method.home)


def _backbone_among(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The backbone's tensors: an encoder of ours has others beside it."""
    prefix = "backbone."
    inside = {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
    return inside or weights
