"""`ssfl doctor`: what is installed, what works here, and the command that mends what doesn't."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

FLOWER = "1.41.0"
"""The version whose inner doors `comm.flower.runtime` knows."""


@dataclass(frozen=True)
class Finding:
    """One thing looked at: what it is, whether it can be used, and what to do if not."""

    what: str
    fine: bool
    detail: str
    remedy: str = ""


def doctor(
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with code 1 if anything optional is missing too.")
    ] = False,
) -> None:
    """Look at this machine: packages, devices, data, and what each transport and extra can do here.

    Example: ssfl doctor --strict
    """
    findings = examine()
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        mark = typer.style("ok     ", fg="green") if finding.fine else typer.style("missing", fg=3)
        typer.echo(f"{mark}  {finding.what:<{width}}  {finding.detail}")
        if finding.remedy:
            typer.echo(f"{'':{9 + width}}  {finding.remedy}")
    required = [finding for finding in findings if finding.what in REQUIRED]
    if not all(finding.fine for finding in (findings if strict else required)):
        raise typer.Exit(1)


def examine() -> list[Finding]:
    """Every finding, the required ones first."""
    transports = {"comm mpi": _mpi, "comm ray": _ray, "comm flower": _flower}
    return [
        *(_package(name) for name in REQUIRED),
        _device(),
        _safely("data cifar10", _data),
        _local(),
        *(_safely(what, check) for what, check in transports.items()),
        *(_safely(name, partial(_extra, name)) for name in EXTRAS),
        *_plugins(),
    ]


REQUIRED = (
    "torch",
    "numpy",
    "pydantic",
    "typer",
    "rich",
    "safetensors",
    "pillow",
    "matplotlib",
    "scikit-learn",
)

EXTRAS = {
    "onnx": (("onnx", "onnxscript", "onnxruntime"), "ssfl export RUN -o encoder.onnx"),
    "parquet": (("pyarrow",), "ssfl embed RUN photos/ -o features.parquet"),
    "tensorboard": (("tensorboard",), "tensorboard --logdir runs"),
    "mlflow": (("mlflow",), "--set 'run.trackers=[\"mlflow\"]'"),
    "wandb": (("wandb",), "--set 'run.trackers=[\"wandb\"]'"),
}
"""Extras that are packages and nothing else: which, and what they allow."""


def _package(name: str) -> Finding:
    version = _version(name)
    if version is None:
        return Finding(name, False, "not installed", f"pip install {name}")
    return Finding(name, True, version)


def _device() -> Finding:
    from ssfl.cores import cores

    try:
        import torch
    except ImportError:
        return Finding("device", False, "torch is not installed", "pip install torch")
    if not torch.cuda.is_available():
        has = f"{cores()} CPU cores, no GPU that torch can use"
        hint = "large networks are faster with --set device.precision=bf16"
        return Finding("device", True, has, hint if _cpu_has_bfloat16() else "")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("device", True, f"{', '.join(names)}; {cores()} CPU cores")


def _cpu_has_bfloat16() -> bool:
    """The CPU multiplies bfloat16 itself (AVX-512 BF16 or AMX); others are slow at it."""
    import torch

    asked = (
        getattr(torch.cpu, f"_is_{what}_supported", None) for what in ("avx512_bf16", "amx_tile")
    )
    return any(answer() for answer in asked if answer is not None)


def _data() -> Finding:
    from ssfl.data.sources import data_root
    from ssfl.data.sources.cifar import CIFAR10

    root, what = data_root(), "data cifar10"
    for layout in (CIFAR10.binary, CIFAR10.python):
        if (root / layout).is_dir():
            return Finding(what, True, f"in {root / layout}")
    return Finding(what, False, f"not in {root} ($SSFL_DATA, else ./data)", "ssfl data get cifar10")


def _local() -> Finding:
    python = platform.python_version()
    return Finding("comm local", True, f"always: all clients in this process (Python {python})")


def _mpi() -> Finding:
    what, cure = "comm mpi", "pip install 'ssfl[mpi]'"
    version = _version("mpi4py")
    if version is None:
        return Finding(what, False, "mpi4py is not installed", cure)
    launcher = _program("mpiexec")
    if launcher is None:
        return Finding(what, False, f"mpi4py {version}, but no mpiexec", cure)
    test = "from mpi4py import MPI; print(MPI.Get_library_version().split()[0])"
    library = _output([sys.executable, "-c", test])
    if library is None:
        return Finding(what, False, f"mpi4py {version} finds no MPI library", cure)
    return Finding(
        what, True, f"mpi4py {version} on {library}: mpiexec -n 9 ssfl train RECIPE --comm mpi"
    )


def _ray() -> Finding:
    version = _version("ray")
    if version is None:
        return Finding("comm ray", False, "ray is not installed", "pip install 'ssfl[ray]'")
    where = os.environ.get("RAY_ADDRESS")
    cluster = f"the cluster at {where}" if where else "a cluster of this machine alone"
    return Finding("comm ray", True, f"ray {version}: {cluster}")


def _flower() -> Finding:
    what, cure = "comm flower", f"pip install 'ssfl[flower]'  (flwr=={FLOWER})"
    version = _version("flwr")
    if version is None:
        return Finding(what, False, "flwr is not installed", cure)
    if version != FLOWER:
        return Finding(what, False, f"flwr {version}: only {FLOWER} is known to fit", cure)
    if _output([sys.executable, "-c", "import ssfl.comm.flower.runtime"]) is None:
        return Finding(what, False, f"flwr {version} is installed but cannot be imported", cure)
    return Finding(what, True, f"flwr {version}: TLS and keys by `ssfl certs`, `ssfl site init`")


def _extra(name: str) -> Finding:
    packages, use = EXTRAS[name]
    versions = {package: _version(package) for package in packages}
    missing = [package for package, version in versions.items() if version is None]
    if missing:
        detail = f"{', '.join(missing)} not installed"
        return Finding(name, False, detail, f"pip install 'ssfl[{name}]'")
    return Finding(name, True, f"{packages[0]} {versions[packages[0]]}: {use}")


def _plugins() -> list[Finding]:
    """Those that are named: a run would miss a broken one only when it asks for a name of it."""
    from ssfl.registry import import_plugins

    cure = "docs/adding-an-algorithm.md says where plug-ins are looked for"
    return [
        Finding(f"plug-in {name}", not why, why or "imported", cure if why else "")
        for name, why in import_plugins().items()
    ]


def _safely(what: str, check: Callable[[], Finding]) -> Finding:
    """A broken installation is a finding, not a crash."""
    try:
        return check()
    except Exception as error:
        return Finding(what, False, f"{type(error).__name__}: {error}")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _program(name: str) -> str | None:
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def _output(command: list[str]) -> str | None:
    """What a short command prints, or None if it fails (in a child: a bad library can crash)."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
