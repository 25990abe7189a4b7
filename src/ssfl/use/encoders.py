"""Encoders that travel: out of a run into one file, and back as an ordinary `nn.Module`.

What such a file holds is in encoder_files.py.
"""

import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ssfl.algorithms import ALGORITHMS
from ssfl.data.decode import Reading
from ssfl.encoder import Encoder, blank_encoder
from ssfl.encoder_files import ABOUT, read_encoder_file
from ssfl.errors import CheckpointError, ConfigError
from ssfl.files import write_bytes, write_tensors
from ssfl.guest import own_torch
from ssfl.models.backbones import BackboneOptions
from ssfl.protocols.bench import Bench
from ssfl.run import Run

Format = Literal["torch", "onnx", "safetensors"]
SUFFIXES: dict[str, Format] = {
    ".pt": "torch",
    ".pth": "torch",
    ".onnx": "onnx",
    ".safetensors": "safetensors",
}
_VERSION = 1
_NOT_OURS = "not an encoder exported by ssfl (`ssfl export RUN -o FILE`)"


@own_torch()
def load_encoder(path: str | os.PathLike[str] | Run, client: int | None = None) -> Encoder:
    """An encoder from a run directory (Θ's, or a client's) or from a file `export` wrote. Where
    nothing is shared (local-only) there are clients' alone.

    It takes N×C×H×W images, integers from 0 to 255 or floats in [0, 1], and gives N×features.
    """
    if isinstance(path, Run):
        return _from_run(path, client)
    path = Path(path)
    if path.is_dir():
        return _from_run(Run(path), client)
    if not path.is_file():
        raise CheckpointError(f"there is no run directory or encoder file at {path}")
    if client is not None:
        raise ConfigError(f"{path} holds one encoder: a client can be chosen from a run only")
    if SUFFIXES.get(path.suffix) == "onnx":
        raise CheckpointError(
            f"{path} is an ONNX file: open it with onnxruntime, or export as safetensors to load it"
        )
    tensors, about = _read(path)
    return _rebuild(tensors, about, path)


@own_torch()
def export_encoder(
    run: Run | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    client: int | None = None,
    format: Format | None = None,
) -> Path:
    """Write a run's encoder to one file; without `format` the file's suffix decides."""
    run, out = run if isinstance(run, Run) else Run(Path(run)), Path(out)
    chosen = format or SUFFIXES.get(out.suffix)
    if chosen not in get_args(Format):
        raise ConfigError(
            f"{out}: say which format is meant by --format torch, onnx or safetensors, "
            "or end the name in .pt, .onnx or .safetensors"
        )
    encoder = _from_run(run, client).cpu()
    about = json.dumps(_about(run, encoder, client))
    tensors = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in encoder.state_dict().items()
    }
    if chosen == "safetensors":
        write_tensors(out, tensors, {ABOUT: about})
    elif chosen == "torch":
        content = BytesIO()
        torch.save({ABOUT: about, "tensors": tensors}, content)
        write_bytes(out, content.getvalue())
    else:
        write_bytes(out, _as_onnx(encoder, about))
    return out


def _from_run(run: Run, client: int | None) -> Encoder:
    config = run.config
    algorithm = ALGORITHMS[config.algorithm.name]
    if client is None:
        run.check_theta()
        return run.global_encoder()
    run.check_client(client)
    if algorithm.encoder == "personal":
        return run.personal_encoder(client)
    if algorithm.encoder == "global" and config.local.batch_norm == "shared":
        return run.global_encoder()  # every client is judged by Θ
    # Adapted at inference, or partly the client's own: made from its images, as in evaluation.
    return Bench(run).standalone(client)


def _about(run: Run, encoder: Encoder, client: int | None) -> dict[str, Any]:
    """All that is needed to build the network again, and where it is from."""
    facts = run.facts
    return {
        "version": _VERSION,
        "backbone": run.config.model.model_dump(mode="json"),
        "channels": facts["channels"],
        "image_size": facts["image_size"],
        **asdict(encoder.reading),
        "mean": facts["mean"],
        "std": facts["std"],
        "features": encoder.features,
        "name": run.config.name,
        "client": client,
        "rounds": run.checkpoint().rounds,
    }


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        tensors, about = read_encoder_file(path)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is {_NOT_OURS}: {error}") from error
    if about is None:
        raise CheckpointError(f"{path} is {_NOT_OURS}: it does not say which network it is of")
    return tensors, json.loads(about)


def _rebuild(tensors: dict[str, Tensor], about: dict[str, Any], path: Path) -> Encoder:
    if about.get("version") != _VERSION:
        raise CheckpointError(f"{path} was exported by another version of ssfl: export it again")
    window = about.get("window")
    encoder = blank_encoder(
        BackboneOptions.model_validate(about["backbone"]),
        about["mean"],
        about["std"],
        about["image_size"],
        Reading(about.get("fit", "crop"), tuple(window) if window else None),
    )
    try:
        encoder.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit the network it names: {error}") from error
    return encoder


def _as_onnx(encoder: Encoder, about: str) -> bytes:
    """Float images in [0, 1] in, features out, any number at a time; normalisation inside."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "ONNX export needs two more packages: install them with `pip install 'ssfl[onnx]'`"
        ) from error
    channels, size = encoder.mean.shape[1], encoder.image_size
    example = torch.rand(2, channels, size, size, generator=torch.Generator().manual_seed(0))
    with _quiet("torch.onnx"):
        program = torch.onnx.export(
            encoder.eval(),
            (example,),
            dynamo=True,
            input_names=["images"],
            output_names=["features"],
            dynamic_shapes={"images": {0: torch.export.Dim("n", min=1)}},
            verbose=False,
        )
    assert program is not None
    program.model.metadata_props[ABOUT] = about
    content: bytes = program.model_proto.SerializeToString()
    return content


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """The exporter warns of packages that this has no use for."""
    log = logging.getLogger(logger)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)
