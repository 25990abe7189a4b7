"""What was run, in a paragraph a colleague can read."""

from ssfl.algorithms import ALGORITHMS
from ssfl.report.charts import percent, plain
from ssfl.report.record import Record

_NAMES = {
    "global-ssfl": "Global-SSFL",
    "la-ssfl": "LA-SSFL",
    "maml-ssfl": "MAML-SSFL",
    "bilevel-ssfl": "BiLevel-SSFL",
    "per-ssfl": "Per-SSFL",
    "fedu": "FedU",
    "fedema": "FedEMA",
    "simsiam": "SimSiam",
    "simclr": "SimCLR",
    "byol": "BYOL",
    "swav": "SwAV",
    "moco": "MoCo",
    "barlow-twins": "Barlow Twins",
    "vicreg": "VICReg",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "gld23k": "GLD-23K",
    "resnet18": "ResNet-18",
    "resnet34": "ResNet-34",
    "resnet50": "ResNet-50",
}


def named(key: str) -> str:
    """A choice's name as it is written in prose."""
    return _NAMES.get(key, key)


def duration(seconds: float) -> str:
    """A time span in the units a person would use."""
    if seconds < 9.95:  # or it would round to 10.0
        return f"{seconds:.1f} s"
    if seconds < 59.5:  # or to 60
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def rounds(record: Record) -> str:
    """How many were played, and out of how many where that is not all."""
    done, asked = record.done, record.run.config.server.rounds
    count = f"{done:,}" if done == asked else f"{done:,} of {asked:,}"
    return f"{count} round" if asked == 1 else f"{count} rounds"


def clients(record: Record) -> str:
    """How many there are."""
    return "1 client" if record.clients == 1 else f"{record.clients:,} clients"


def summary(record: Record) -> str:
    """One paragraph: who trained what on which images, for how long, and what came of it."""
    return " ".join((_setting(record), _effort(record), _outcome(record))).strip()


def _setting(record: Record) -> str:
    config = record.run.config
    what = "one shared encoder" if record.shares else "an encoder each, alone,"
    if record.shares and _own_encoders(record):
        what = "a shared encoder and one of their own each"
    learned = "with labels" if config.ssl.method == "supervised" else "without using any label"
    return (
        f"{_who(record)} trained {what} with {named(config.algorithm.name)} and "
        f"{named(config.ssl.method)} on {_images(record)}, {learned}{_split(record)}."
    )


def _own_encoders(record: Record) -> bool:
    """Clients are judged by encoders that are not Θ itself."""
    config = record.run.config
    return ALGORITHMS[config.algorithm.name].encoder != "global" or (
        config.local.batch_norm == "fedbn"
    )


def _who(record: Record) -> str:
    here = record.run.config.here
    if here is None:
        return clients(record)
    ids = ", ".join(map(str, here.clients))
    return f"A site's client{'s' if len(here.clients) > 1 else ''} {ids}"


def _images(record: Record) -> str:
    facts, size = record.facts, record.facts["image_size"]
    if record.at_sites:
        most = max((row["images"] for row in record.rounds), default=0)
        return f"their sites' own images of {size} × {size} pixels, up to {most:,} in a round"
    count, data = f"{facts['train_images']:,}", named(facts["data"])
    return f"{count} images of {size} × {size} pixels ({data})"


def _split(record: Record) -> str:
    config = record.run.config
    options, here = config.partition, config.here
    if record.at_sites or (here is not None and here.data is not None):
        return ""
    if options.kind == "dirichlet":
        return f"; the images are dealt to clients by class, Dirichlet with α = {options.alpha:g}"
    if options.kind == "iid":
        return "; the images are dealt to clients evenly, at random"
    if options.kind == "natural":
        return "; every client holds its own images, as they were found"
    return f"; the images are dealt to clients by the rule “{options.kind}”"


def _effort(record: Record) -> str:
    config = record.run.config
    asked = config.server.clients_per_round
    each = f", {asked} clients in each," if asked and asked < record.clients else ""
    epochs, steps = config.local.epochs, config.local.steps
    count, what = (steps, "step") if steps else (epochs, "epoch")
    passes = f"one local {what}" if count == 1 else f"{count} local {what}s"
    spent = sum(row.get("seconds") or 0 for row in record.rounds)
    took = f", {duration(spent)} in all" if record.rounds else ""
    norm = " with group norm" if config.model.norm == "group" else ""
    start = config.server.start
    begun = f" It began with what {start.name} had learned." if start else ""
    return (
        f"It ran for {rounds(record)}{each} of {passes}{took}, on a "
        f"{named(config.model.backbone)} network{norm}, seed {config.seed}.{begun}"
    )


def _outcome(record: Record) -> str:
    own = _own_encoders(record)
    mean = "each client's own encoder" if own else "the shared encoder on each client's own images"
    for key, what in (("knn_mean", mean), ("knn_global", "the shared encoder on all test images")):
        after, before = record.last.get(key), record.baseline.get(f"untrained_{key}")
        if after is None:
            continue
        start = f", from {percent(before)} before training" if before is not None else ""
        return f"In the end kNN accuracy is {percent(after)} with {what}{start}."
    rank, spread = (record.health(record.last, name) for name in ("effective_rank", "std_ratio"))
    if rank is None:
        return ""
    even = f" and their spread is {plain(spread)} of the ideal" if spread is not None else ""
    mean = ", in the mean over clients" if record.health_of_clients else ""
    return (
        f"There are no labels to test with; the features use {plain(rank)} dimensions{even}{mean}."
    )
