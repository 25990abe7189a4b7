"""Feature extraction: the same numbers as a plain forward, and an encoder left as it was."""

import pytest
import torch
from torch import Tensor, nn

from ssfl.errors import DataError
from ssfl.evaluation.features import FeatureCache, extract


class Counting(nn.Module):
    """A small encoder with batch norm that counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.body(x)
        return out


def normalise(pixels: Tensor) -> Tensor:
    return pixels.float() / 127.5 - 1


@pytest.fixture
def encoder() -> Counting:
    torch.manual_seed(0)
    made = Counting()
    made(torch.randn(8, 3, 8, 8))  # batch-norm statistics away from their defaults
    return made


@pytest.fixture
def pixels() -> Tensor:
    return torch.randint(
        256, (23, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )


def test_features_are_those_of_one_plain_forward_in_eval_mode(
    encoder: Counting, pixels: Tensor
) -> None:
    features = extract(encoder, pixels, normalise, batch=5, device="cpu")
    encoder.eval()
    torch.testing.assert_close(features, encoder(normalise(pixels)).detach())
    assert features.dtype == torch.float32
    assert not features.requires_grad


def test_indices_choose_and_order_the_rows(encoder: Counting, pixels: Tensor) -> None:
    whole = extract(encoder, pixels, normalise, device="cpu")
    some = torch.tensor([7, 2, 2, 22, 0])
    chosen = extract(encoder, pixels, normalise, batch=2, device="cpu", indices=some)
    torch.testing.assert_close(chosen, whole[some])


def test_every_submodule_gets_its_own_mode_back_and_no_statistic_moves(
    encoder: Counting, pixels: Tensor
) -> None:
    encoder.train()
    encoder.body[1].eval()  # a norm frozen on purpose stays frozen
    modes = [part.training for part in encoder.modules()]
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    extract(encoder, pixels, normalise, device="cpu")
    assert [part.training for part in encoder.modules()] == modes
    assert all(torch.equal(before[name], value) for name, value in encoder.state_dict().items())


def test_the_mode_comes_back_even_when_the_encoder_fails(encoder: Counting) -> None:
    encoder.train()
    with pytest.raises(RuntimeError):
        extract(encoder, torch.zeros(2, 4, 8, 8, dtype=torch.uint8), normalise, device="cpu")
    assert all(part.training for part in encoder.modules())


def test_features_can_be_learned_on_afterwards(encoder: Counting, pixels: Tensor) -> None:
    head = nn.Linear(5, 2)
    head(extract(encoder, pixels, normalise, device="cpu")).sum().backward()
    assert head.weight.grad is not None


def test_autocast_runs_low_and_answers_in_float32(encoder: Counting, pixels: Tensor) -> None:
    seen: list[torch.dtype] = []
    encoder.body[0].register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    low = extract(encoder, pixels, normalise, device="cpu", autocast=torch.bfloat16)
    full = extract(encoder, pixels, normalise, device="cpu")
    assert seen == [torch.bfloat16, torch.float32]
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, full, rtol=0.05, atol=0.05)


def test_progress_hears_of_every_image_once(encoder: Counting, pixels: Tensor) -> None:
    heard: list[int] = []
    extract(encoder, pixels, normalise, batch=10, device="cpu", progress=heard.append)
    assert heard == [10, 10, 3]


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_how_many_cores_there_are_makes_no_difference_to_a_feature(
    encoder: Counting, precision: torch.dtype | None
) -> None:
    pixels = torch.randint(256, (150, 3, 32, 32), dtype=torch.uint8)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(extract(encoder, pixels, normalise, device="cpu", autocast=precision))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found)
    assert not any(one.requires_grad for one in found)


def test_a_cpu_sees_few_images_at_a_time_and_fewer_the_larger_they_are(encoder: Counting) -> None:
    seen = []
    encoder.body[0].register_forward_hook(lambda _m, args, _out: seen.append(len(args[0])))
    for count, size in ((150, 32), (20, 96)):
        pixels = torch.zeros(count, 3, size, size, dtype=torch.uint8)
        extract(encoder, pixels, normalise, batch=512, device="cpu")
    assert sorted(seen) == [4, 8, 8, 22, 64, 64]


def test_an_encoders_features_are_computed_once_for_each_split(
    encoder: Counting, pixels: Tensor
) -> None:
    cache = FeatureCache()
    encoder.calls = 0

    def ask(key: str, split: str) -> Tensor:
        return cache.get(key, split, lambda: extract(encoder, pixels, normalise, device="cpu"))

    first = ask("a", "train")
    assert ask("a", "train") is first
    assert encoder.calls == 1
    ask("a", "test")
    ask("b", "train")
    assert encoder.calls == 3
    assert len(cache) == 3
    cache.forget("a")
    assert len(cache) == 1
    ask("b", "train")
    assert encoder.calls == 3
    ask("a", "train")
    assert encoder.calls == 4


def test_an_empty_split_is_an_error_for_people(encoder: Counting, pixels: Tensor) -> None:
    with pytest.raises(DataError, match="split is empty"):
        extract(encoder, pixels[:0], normalise, device="cpu")
