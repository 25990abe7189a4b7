"""Whole federated rounds on a GPU: images/s, share of the matmul ceiling, seconds per round.

    python benchmarks/gpu.py [--arms global-256 per-ssfl-256 ...] [--workers 1 2 4] [--profile]

Ten IID clients hold 50,000 images of 32×32 (the `shapes` source: speed does not depend on what they
show); ResNet-18 with SimSiam's heads, statistics per view, all clients in every round. The first
round, which compiles and captures, is timed apart. --workers tries several numbers of clients in
flight, 0 being what `ssfl train` does. Prints a Markdown table and writes JSON.
"""

import argparse
import gc
import itertools
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ssfl.assemble import build_hosts, build_server, load_federated
from ssfl.comm.local import LocalCommunicator
from ssfl.config import load_config
from ssfl.data.federated import FederatedData
from ssfl.federation.server import Server
from ssfl.federation.store import StateStore

BASE = [
    "data.source=shapes",
    "data.train=50000",
    "data.test=100",
    "server.rounds=800",
]
ALGORITHMS: dict[str, list[str]] = {
    "global": [],
    "per-ssfl": ["algorithm.name=per-ssfl"],
    "bilevel": ["algorithm.name=bilevel-ssfl"],
    "maml-first": ["algorithm.name=maml-ssfl"],
    "maml-second": ["algorithm.name=maml-ssfl", "algorithm.second_order=true"],
    "supervised": ["ssl.method=supervised", "local.lr=0.01"],  # 0.1 with a batch of 32 diverges
}
ARMS: dict[str, list[str]] = {
    f"{name}-{batch}": [*settings, f"local.batch={batch}"]
    for batch in (256, 32)
    for name, settings in ALGORITHMS.items()
} | {
    "global-128": ["local.batch=128"],
    "global-64": ["local.batch=64"],
    "global-32x8": ["local.micro_batch=32"],
    "global-256-eager": ["device.compile=off"],
    "global-256-fp32": ["device.precision=fp32"],
}

VIEW_FLOPS = 0.56e9 * 2 * 3
"""ResNet-18 at 32 px is 0.56 GMAC a view; a pass is a forward and twice that backward."""
PASSES = {"supervised": 1, "global": 2}
"""Passes of a view that an image takes in a step; 4 in all others, which train two models or, in
MAML, one model twice (what second order takes beyond that is not counted)."""


def matmul_ceiling(size: int = 8192, repeats: int = 20) -> float:
    """TFLOP/s of a large bf16 matrix product on random data: what this GPU really gives."""
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        a @ b
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(repeats):
        a @ b
    end.record()
    torch.cuda.synchronize()
    seconds: float = start.elapsed_time(end) / 1e3
    return 2 * size**3 * repeats / seconds / 1e12


def measure(settings: list[str], data: FederatedData, rounds: int, profile: bool) -> dict[str, Any]:
    """Time whole rounds of one configuration."""
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    torch.cuda.reset_peak_memory_stats()
    config = load_config("ssfl-iid", [*BASE, *settings])
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        hosts = build_hosts(config, data, StateStore(Path(folder), 32 << 30))
        transport = LocalCommunicator(hosts)
        server = build_server(config, hosts[0].trainer, transport)
        server.play_round()
        torch.cuda.synchronize()
        first = time.perf_counter() - started
        started = time.perf_counter()
        reports = [server.play_round() for _ in range(rounds)]
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - started) / rounds
        if profile:
            show_kernels(server)
        transport.close()
    images = config.local.images_of_a_round(reports[-1].images, len(reports[-1].clients))
    return {
        "workers": len(hosts),
        "images_per_second": images / seconds,
        "seconds_per_round": seconds,
        "first_round_seconds": first,
        "minutes_for_800_rounds": seconds * 800 / 60,
        "loss": reports[-1].metrics["loss"],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def show_kernels(server: Server, rows: int = 40) -> None:
    """Where the time of a round goes on the device."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as seen:
        server.play_round()
        torch.cuda.synchronize()
    kernels = sorted(seen.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
    print(f"device time of a round: {sum(k.self_device_time_total for k in kernels) / 1e3:.1f} ms")
    for kernel in kernels[:rows]:
        milliseconds = kernel.self_device_time_total / 1e3
        print(f"{milliseconds:9.2f} ms  {kernel.count:6d} calls  {kernel.key[:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--workers", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    torch.set_num_threads(1)
    ceiling = matmul_ceiling()
    data = load_federated(load_config("ssfl-iid", BASE))
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "matmul_tflops": ceiling,
        "arms": {},
    }
    print(f"{results['device']}, torch {results['torch']}, bf16 matmul {ceiling:.0f} TFLOP/s\n")
    print("| arm | in flight | images/s | share of matmul | s/round | 800 rounds | first | GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for arm, workers in itertools.product(arguments.arms, arguments.workers):
        name = f"{arm}/{workers}" if workers else arm
        settings = [*ARMS[arm], f"device.workers={workers}"]
        try:
            found = measure(settings, data, arguments.rounds, arguments.profile)
        except Exception as error:
            results["arms"][name] = {"error": f"{type(error).__name__}: {error}"}
            print(f"| {arm} | {workers} | failed: {type(error).__name__} | | | | | |", flush=True)
            continue
        work = VIEW_FLOPS * PASSES.get(arm.partition("-")[0], 4)
        share = found["images_per_second"] * work / (ceiling * 1e12)
        results["arms"][name] = found | {"matmul_share": share}
        print(
            f"| {arm} | {found['workers']} | {found['images_per_second']:,.0f} | {share:.0%} "
            f"| {found['seconds_per_round']:.3f} | {found['minutes_for_800_rounds']:.1f} min "
            f"| {math.ceil(found['first_round_seconds'])} s | {found['peak_gib']:.1f} |",
            flush=True,
        )
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
