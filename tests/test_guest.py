"""A notebook's torch is its own: what it has set or drawn neither matters to us nor is changed."""

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import ssfl
from ssfl.assemble import load_federated
from ssfl.evaluation.finetune import FinetuneOptions
from ssfl.guest import own_draws, own_torch
from ssfl.protocols.options import ProtocolOptions
from ssfl.run import Run
from ssfl.use import embed, export_encoder, fit_classifier
from tiny import outcome, same_bits, tiny

Call = Callable[[Run, Path], Any]

CALLS: dict[str, Call] = {
    "train": lambda run, folder: ssfl.train(run.config, out=folder / "again"),
    "resume": lambda run, folder: ssfl.resume(run.path),
    "global_encoder": lambda run, folder: run.global_encoder(),
    "personal_encoder": lambda run, folder: run.personal_encoder(0),
    "load_encoder": lambda run, folder: ssfl.load_encoder(
        export_encoder(run, folder / "encoder.safetensors")
    ),
    "embed": lambda run, folder: embed(run.global_encoder(), [_photo(folder)]),
    "fit_classifier": lambda run, folder: fit_classifier(FEATURES, ["a", "b"] * 10),
    "load_federated": lambda run, folder: load_federated(run.config),
    "evaluate": lambda run, folder: ssfl.evaluate(run, ["knn", "semi-finetune"], options=BRIEF),
    "write_report": lambda run, folder: ssfl.write_report(run),
}
BRIEF = ProtocolOptions(finetune=FinetuneOptions(epochs=1), fractions=(0.1,))
FEATURES = torch.linspace(0, 1, 80).view(20, 4).sin()
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


def _photo(folder: Path) -> Path:
    Image.fromarray(np.zeros((9, 9, 3), dtype=np.uint8)).save(folder / "photo.png")
    return folder / "photo.png"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = tiny(algorithm={"name": "per-ssfl"}, server={"rounds": 1})
    return ssfl.train(config, out=tmp_path_factory.mktemp("guest") / "run")


BLOCKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.fixture(params=["float64", "another device", "coarse products", *BLOCKS])
def odd_defaults(request: pytest.FixtureRequest) -> Iterator[None]:
    """Torch as a notebook may have set it; `meta` stands for a GPU, and holds no numbers."""
    if request.param in BLOCKS:
        with BLOCKS[request.param]():
            yield
        return
    if request.param == "float64":
        torch.set_default_dtype(torch.float64)
    elif request.param == "another device":
        torch.set_default_device("meta")
    else:
        torch.set_float32_matmul_precision("medium")
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_float32_matmul_precision("highest")


@every_call
def test_the_callers_random_numbers_go_on_as_if_nothing_had_been_drawn(
    run: Run, tmp_path: Path, call: Call
) -> None:
    before = _random_states()
    call(run, tmp_path)
    assert _random_states() == before


def _random_states() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 (it is the caller's)
    return random.getstate(), (name, keys.tobytes(), *rest), torch.get_rng_state().tolist()


@every_call
@pytest.mark.usefixtures("odd_defaults")
def test_torchs_defaults_are_the_callers_business(run: Run, tmp_path: Path, call: Call) -> None:
    before = _defaults()
    call(run, tmp_path)
    assert _defaults() == before


def _defaults() -> tuple[Any, ...]:
    precision = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = torch.is_autocast_enabled("cpu")
    return torch.get_default_dtype(), torch.get_default_device(), *precision, *modes, casts


@pytest.mark.usefixtures("odd_defaults")
def test_torchs_defaults_change_no_bit_of_what_is_learned(run: Run, tmp_path: Path) -> None:
    again = ssfl.train(run.config, out=tmp_path / "again")
    assert same_bits(outcome(again), outcome(run))
    weights = again.global_encoder().state_dict()
    assert {(weight.dtype, weight.device.type) for weight in weights.values()} == {
        (torch.float32, "cpu")
    }


def test_what_convolutions_round_to_is_the_callers_business_again() -> None:
    assert torch.backends.cudnn.allow_tf32
    with own_torch():
        torch.backends.cudnn.allow_tf32 = False  # as an engine for float32 on a GPU does
    assert torch.backends.cudnn.allow_tf32


def test_a_precision_said_in_newer_words_is_no_hindrance() -> None:
    """Torch refuses to tell it in the old words."""
    script = (
        "import torch; from ssfl.guest import own_torch\n"
        "if hasattr(torch.backends, 'fp32_precision'):\n"
        "    torch.backends.fp32_precision = 'ieee'\n"
        "    torch.backends.cudnn.conv.fp32_precision = 'ieee'\n"
        "    with own_torch(): pass\n"
        "    assert torch.backends.fp32_precision == 'ieee'\n"
        "    assert torch.backends.cudnn.conv.fp32_precision == 'ieee'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_two_threads_that_make_networks_draw_one_after_the_other() -> None:
    def draw(seed: int) -> list[float]:
        with own_draws(seed):
            first = float(torch.rand(()))
            time.sleep(0.05)  # for the other to come between, if it can
            return [first, float(torch.rand(()))]

    with ThreadPoolExecutor(2) as pool:
        at_once = list(pool.map(draw, (1, 2)))
    assert at_once == [draw(1), draw(2)]


@pytest.mark.timeout(60)
def test_a_network_may_be_made_while_another_is_made_and_draws_as_if_alone() -> None:
    with own_draws(1):
        alone = torch.rand(2)
    with own_draws(1):
        first = torch.rand(1)
        with own_draws(2):  # as a backbone does that takes an encoder's weights
            torch.rand(5)
        assert torch.equal(torch.cat([first, torch.rand(1)]), alone)
