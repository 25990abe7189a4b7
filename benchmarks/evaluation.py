"""How much the evaluation of ten personal encoders costs beyond their bare forward passes.

A ratio in one run: what `ssfl evaluate` does by default (kNN, linear, federated linear of Θ,
health) to ten personal encoders and Θ, over the time of passing the same images through the same
encoders at the same batch size and precision. CIFAR-10's size (50,000 + 10,000 images of 32×32) and
ResNet-18 by default; random images, since only the time matters. Stated limit: 1.3. The protocols
on request that need no further forward pass (semi-supervised linear, naive federated linear) are
timed too, and a second ratio counts them.

    python benchmarks/evaluation.py [--device cuda] [--images 50000] [--encoders 10] [--width 64]

Bare passes and evaluation take turns `--repeats` times; figures are medians.

What to expect of an H200 (d = 512, 5 µs a launch, 3 TB/s, 45 TFLOP/s in fp32), in seconds:

    forward           660,000 passes at 110,000 to 150,000 a second                     4.4 to 6
    federated-linear  300 rounds × 20 to 30 steps × 8 launches                          0.25 to 0.4
    health            11 eigenvalue problems of 512², 22 passes of 128 images           0.1 to 0.3
    loading           ten vectors of 17 million numbers from the host                   0.1 to 0.2
    linear            40 iterations over 1 GB twice, 20 kernels over 20 MB, 90 launches 0.1
    knn               Θ: 0.5 TFLOP, 2 GB of similarities read 20 times; clients: small  0.05
    naive             as federated-linear                                               0.25 to 0.4
    semi-linear       2 × 40 iterations × 120 launches, Θ and clients apart             0.1
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch

from ssfl.assemble import build_host
from ssfl.config import parse
from ssfl.data.federated import FederatedData, federate
from ssfl.data.images import DataSet, Images
from ssfl.evaluation.features import extract
from ssfl.federation.checkpoint import Checkpoint, save_checkpoint
from ssfl.federation.state import ClientState
from ssfl.protocols.bench import GLOBAL, Bench
from ssfl.protocols.judge import judge
from ssfl.protocols.options import TABLES, ProtocolOptions
from ssfl.run import Run

EXTRAS = ("semi-linear", "naive-federated-linear")


class Seconds(NamedTuple):
    """By the clock on the wall, and of this process's cores: the latter where others share them."""

    wall: float
    cpu: float


def random_images(count: int, classes: int, seed: int) -> Images:
    """Noise around a colour, for three images in four that of its class: classifiers have something
    to find, and no perfect fit to chase."""
    dice = torch.Generator().manual_seed(seed)
    labels, others = torch.randint(classes, (2, count), generator=dice)
    colours = torch.where(torch.rand(count, generator=dice) < 0.75, labels, others)
    pixels = torch.randint(128, (count, 3, 32, 32), dtype=torch.uint8, generator=dice)
    pixels += (colours * 12).to(torch.uint8).view(-1, 1, 1, 1)
    return Images(pixels, labels)


def prepared(folder: str, args: argparse.Namespace) -> tuple[Run, FederatedData]:
    """A run directory with personal encoders, untrained but different."""
    split = {"kind": "dirichlet", "alpha": 0.1, "balanced": True, "min_size": 10}
    config = parse(
        {
            "name": "bench",
            "algorithm": {"name": "per-ssfl"},
            "partition": split | {"clients": args.encoders},
            "model": {"backbone": args.backbone, "width": args.width},
            "server": {"rounds": 1},
            "evaluation": {"batch": args.batch},
            "device": {"device": args.device},
        }
    )
    train = random_images(args.images, 10, 0)
    test = random_images(args.images // 5, 10, 1)
    stats = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
    dataset = DataSet("random", train, test, None, None, *stats, "cifar")
    data = federate(dataset, config.partition, seed=0)
    run = Run.create(config, f"{folder}/run")
    run.write_facts(dataset, args.encoders)
    host = build_host(config, data, run.store)
    flat, digest = host.trainer.models.global_.flat, host.trainer.layout.digest
    state = {"theta": flat.shared.cpu(), "yardstick": torch.tensor(0.0)}
    save_checkpoint(run.checkpoints, Checkpoint(1, digest, state))
    store = run.store
    for client in range(args.encoders):
        noise = torch.randn(flat.vector.shape, generator=torch.Generator().manual_seed(client))
        personal = flat.vector.cpu() * (1 + 0.01 * noise)
        store.put(client, 1, ClientState(personal=personal))
    store.flush()
    return run, data


def clock(device: torch.device) -> Seconds:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return Seconds(time.perf_counter(), time.process_time())


def since(start: Seconds, device: torch.device) -> Seconds:
    return Seconds(*(b - a for a, b in zip(start, clock(device), strict=True)))


def forward_passes(bench: Bench, clients: int) -> Seconds:
    """The images through every encoder, and nothing else: encoders come in outside the clock."""
    assert bench.test is not None
    splits = bench.trainer.pixels, bench.test.pixels.to(bench.device)
    wall = cpu = 0.0
    for who in (GLOBAL, *range(clients)):
        encoder = bench.encoder(who)
        start = clock(bench.device)
        for pixels in splits:
            extract(
                encoder,
                pixels,
                bench.trainer.views.plain,
                device=bench.device,
                batch=bench.config.evaluation.batch,
                autocast=bench.trainer.engine.autocast,
            )
        passed = since(start, bench.device)
        wall, cpu = wall + passed.wall, cpu + passed.cpu
    return Seconds(wall, cpu)


class Turn(NamedTuple):
    """One turn of each side: the bare passes, the whole evaluation, and where its time went."""

    pure: Seconds
    whole: Seconds
    where: dict[str, float]

    @property
    def extras(self) -> float:
        return sum(self.where.get(name, 0.0) for name in EXTRAS)


def one_turn(run: Run, data: FederatedData, protocols: tuple[str, ...]) -> Turn:
    """On a bench of its own: features once made would be found again."""
    bench = Bench(run, data)
    pure = forward_passes(bench, len(data.clients()))
    start = clock(bench.device)
    where = judge(bench, protocols, ProtocolOptions()).seconds
    whole = since(start, bench.device)
    where["forward"] = where.pop("features")
    where["other"] = where.pop("total") - sum(where.values())
    return Turn(pure, whole, where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=50_000, help="training images; a fifth more")
    parser.add_argument("--encoders", type=int, default=10, help="personal ones, beside Θ")
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--width", type=int, default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tables-only", action="store_true", help="no protocols on request")
    args = parser.parse_args()
    protocols = TABLES if args.tables_only else (*TABLES, *EXTRAS)
    with tempfile.TemporaryDirectory() as folder:
        run, data = prepared(folder, args)
        device = Bench(run, data).device
        if device.type == "cuda":  # kernels are chosen and memory is taken the first time
            judge(Bench(run, data), protocols, ProtocolOptions())
        turns = [one_turn(run, data, protocols) for _ in range(args.repeats)]

    def middle(figure: Callable[[Turn], float]) -> float:
        return round(median(map(figure, turns)), 3)

    ratios = {
        "ratio": middle(lambda t: (t.whole.wall - t.extras) / t.pure.wall),
        "ratio_with_extras": middle(lambda t: t.whole.wall / t.pure.wall),
    }
    if device.type == "cpu":
        ratios["ratio_with_extras_in_cpu_time"] = middle(lambda t: t.whole.cpu / t.pure.cpu)
    where = {name: round(median(t.where[name] for t in turns), 3) for name in turns[0].where}
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                "network": f"{args.backbone}, width {args.width or 'default'}",
                "images": [args.images, args.images // 5],
                "encoders": f"{args.encoders} personal and Θ",
                "protocols": TABLES,
                "extras": [name for name in EXTRAS if name in protocols],
                "repeats": args.repeats,
                "pure_forward_s": middle(lambda t: t.pure.wall),
                "evaluation_s": middle(lambda t: t.whole.wall),
                **ratios,
                "where_s": dict(sorted(where.items(), key=lambda item: -item[1])),
            },
            indent=2,
            ensure_ascii=False,
        )
    )


if __name__ == "__main__":
    main()
