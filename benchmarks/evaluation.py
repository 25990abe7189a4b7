"""How much the evaluation of ten personal encoders costs beyond their bare forward passes.

A ratio in one run: kNN, linear (local and global accuracy of every encoder) and the naive federated
linear evaluation of ten personal encoders and Θ, over the time of passing the same images through
the same encoders at the same batch size and precision. CIFAR-10's size (50,000 + 10,000 images of
32×32) and ResNet-18 by default; random images, since only the time matters. Stated limit: 1.3.

    python benchmarks/evaluation.py [--images 50000] [--backbone resnet18] [--device cuda]
"""

import argparse
import json
import tempfile
import time

import torch

from ssfl.assemble import build_host
from ssfl.config import parse
from ssfl.data.federated import FederatedData, federate
from ssfl.data.images import DataSet, Images
from ssfl.evaluation.features import extract
from ssfl.federation.checkpoint import Checkpoint, save_checkpoint
from ssfl.federation.state import ClientState
from ssfl.protocols.bench import GLOBAL, Bench
from ssfl.protocols.judge import ProtocolOptions, judge
from ssfl.run import Run

PROTOCOLS = ("knn", "linear", "naive-federated-linear")
CLIENTS = 10


def random_images(count: int, classes: int, seed: int) -> Images:
    """Noise around a colour of its class, so that classifiers have something to find."""
    dice = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=dice)
    pixels = torch.randint(128, (count, 3, 32, 32), dtype=torch.uint8, generator=dice)
    pixels += (labels * 12).to(torch.uint8).view(-1, 1, 1, 1)
    return Images(pixels, labels)


def prepared(folder: str, args: argparse.Namespace) -> tuple[Run, FederatedData]:
    """A run directory with ten personal encoders, untrained but different."""
    config = parse(
        {
            "name": "bench",
            "algorithm": {"name": "per-ssfl"},
            "partition": {"kind": "dirichlet", "clients": CLIENTS, "alpha": 0.1, "min_size": 10},
            "model": {"backbone": args.backbone},
            "server": {"rounds": 1},
            "evaluation": {"batch": args.batch},
            "device": {"device": args.device, "compile": "off"},
        }
    )
    train = random_images(args.images, 10, 0)
    test = random_images(args.images // 5, 10, 1)
    stats = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
    dataset = DataSet("random", train, test, None, None, *stats, "cifar")
    data = federate(dataset, config.partition, seed=0)
    run = Run.create(config, f"{folder}/run")
    run.write_facts(dataset, CLIENTS)
    host = build_host(config, data, run.store)
    flat, digest = host.trainer.models.global_.flat, host.trainer.layout.digest
    state = {"theta": flat.shared.cpu(), "yardstick": torch.tensor(0.0)}
    save_checkpoint(run.checkpoints, Checkpoint(1, digest, state))
    store = run.store
    for client in range(CLIENTS):
        noise = torch.randn(flat.vector.shape, generator=torch.Generator().manual_seed(client))
        personal = flat.vector.cpu() * (1 + 0.01 * noise)
        store.put(client, 1, ClientState(personal=personal))
    store.flush()
    return run, data


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def forward_passes(bench: Bench) -> None:
    """The images through every encoder, and nothing else."""
    test = bench.test
    assert test is not None
    for who in (GLOBAL, *range(CLIENTS)):
        encoder = bench.encoder(who)
        for pixels in (bench.trainer.pixels, test.pixels.to(bench.device)):
            extract(
                encoder,
                pixels,
                bench.trainer.views.plain,
                device=bench.device,
                batch=bench.config.evaluation.batch,
                autocast=torch.bfloat16 if bench.trainer.engine.bf16 else None,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=512)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run, data = prepared(folder, args)
        bench = Bench(run, data)
        if bench.device.type == "cuda":  # kernels are chosen and memory is taken the first time
            forward_passes(bench)
            judge(Bench(run, data), PROTOCOLS, ProtocolOptions())
        start = clock(bench.device)
        forward_passes(bench)
        pure = clock(bench.device) - start
        start = clock(bench.device)
        judged = judge(bench, PROTOCOLS, ProtocolOptions()).seconds
        whole = clock(bench.device) - start
    print(
        json.dumps(
            {
                "device": str(bench.device),
                "images": args.images,
                "backbone": args.backbone,
                "forward_s": round(pure, 3),
                "evaluation_s": round(whole, 3),
                "ratio": round(whole / pure, 3),
                "where": {k: round(v, 3) for k, v in judged.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
