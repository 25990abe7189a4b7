"""Pages of runs whose record was written by hand: every number is said once, of whom it is, and
under its own name."""

import csv
import json
import re
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from ssfl.data.federated import FederatedData
from ssfl.data.images import DataSet, Images
from ssfl.federation.checkpoint import Checkpoint, save_checkpoint
from ssfl.protocols.bench import GLOBAL
from ssfl.protocols.scores import Evaluation, Score, over_clients, over_images
from ssfl.report import operations, pictures, samples, single, write_comparison, write_report
from ssfl.report.record import Record
from ssfl.report.samples import Samples, sample
from ssfl.report.words import summary
from ssfl.run import Run
from tiny import tiny

Rows = list[dict[str, Any]]

HEALTH = {"effective_rank": 3.0, "std_ratio": 0.5, "uniformity": -0.25, "alignment": 0.125}
ROWS: Rows = [
    {
        "kind": "baseline",
        "round": 0,
        "untrained_knn_mean": 0.21,
        "untrained_knn_global": 0.22,
        "pixels_knn_mean": 0.31,
        "pixels_knn_global": 0.32,
        "seconds": 1.0,
    },
    {"kind": "round", "round": 0, "loss": 4.0, "personal_loss": 5.0, "update_norm": 8.0,
     "seconds": 30.0, "images": 100, "asked": 4, "accepted": 3},
    {"kind": "evaluation", "round": 1, **HEALTH, "knn_global": 0.41, "knn_mean": 0.51,
     "clients": {}, "seconds": 2.0},
    {"kind": "round", "round": 1, "loss": 2.0, "personal_loss": 3.0, "update_norm": 6.0,
     "seconds": 10.0, "images": 60, "asked": 4, "accepted": 4},
    {"kind": "evaluation", "round": 2, **{key: 2 * value for key, value in HEALTH.items()},
     "knn_global": 0.42, "knn_mean": 0.62, "knn_weighted": 0.66, "seconds": 3.0,
     "clients": {"0": {"knn": 0.5, "effective_rank": 7.0, "std_ratio": 0.3},
                 "2": {"knn": 0.74, "effective_rank": 9.0, "std_ratio": 0.1}}},
]  # fmt: skip


def written(
    folder: Path, rows: Rows = ROWS, found: Evaluation | None = None, **sections: Any
) -> Run:
    """A run directory with these rows in its record, of 1,200 images that are not there."""
    data = {"source": "folder", "path": str(folder / "none"), "image_size": 8}
    run = Run.create(tiny(**{"data": data, "server": {"rounds": 2}, **sections}), folder)
    facts = {"data": "scans", "image_size": 8, "train_images": 1200, "test_images": 400}
    (folder / "facts.json").write_text(json.dumps({**facts, "clients": 4}))
    (folder / "final.json").write_text(json.dumps({"train_seconds": 50.0}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if found is not None:
        found.save(run.evaluation)
    return run


def figure(page: str, name: str) -> str:
    return page.split(f'data-figure="{name}"')[1].split("</figure>")[0]


def hovers(page: str, name: str) -> list[str]:
    """What the marks of a figure say."""
    return [unescape(text) for text in re.findall("<title>(.*?)</title>", figure(page, name))]


def tiles(page: str) -> list[tuple[str, str]]:
    return re.findall("<div><dd>(.*?)</dd><dt>(.*?)</dt></div>", page)


def tables(page: str) -> list[list[list[str]]]:
    """Cells of the page's tables of numbers, heads first."""
    found = re.findall(r'<div class="scroll">(<table>.*?</table>)', page)
    return [
        [[cell.text or "" for cell in line] for line in ElementTree.fromstring(table).iter("tr")]
        for table in found
    ]


def bars(page: str, name: str) -> list[tuple[str, str, str, str]]:
    """Name, aside, length and text of a figure's lying bars."""
    line = r'<th>([^<]*)<small>(.*?)</small></th><td>.*?width:(.*?)%.*?<td class="n">(.*?)</td>'
    return re.findall(line, figure(page, name))


def test_a_curve_is_of_the_figure_that_its_name_says(tmp_path: Path) -> None:
    run = written(tmp_path / "run", evaluation={"k": 7})
    page = write_report(run).read_text()
    assert hovers(page, "loss") == [
        "loss, round 1: 4",
        "loss, round 2: 2",
        "personal loss, round 1: 5",
        "personal loss, round 2: 3",
    ]
    assert hovers(page, "knn") == [
        "before training, mean over clients: 21.0 %",
        "raw pixels, mean over clients: 31.0 %",
        "mean over clients, round 1: 51.0 %",
        "mean over clients, round 2: 62.0 %",
        "shared encoder, round 1: 41.0 %",
        "shared encoder, round 2: 42.0 %",
    ]
    assert "nearest training images, up to 7, vote" in figure(page, "knn")
    assert hovers(page, "movement") == ["distance, round 1: 8", "distance, round 2: 6"]
    assert hovers(page, "seconds") == ["seconds, round 1: 30", "seconds, round 2: 10"]
    assert hovers(page, "effective_rank") == [
        "Effective rank, round 1: 3",
        "Effective rank, round 2: 6",
    ]
    assert hovers(page, "std_ratio") == [
        "Feature spread, round 1: 0.5",
        "Feature spread, round 2: 1",
    ]
    assert hovers(page, "uniformity")[1] == "Uniformity, round 2: −0.5"
    assert hovers(page, "alignment")[1] == "Alignment, round 2: 0.25"


def test_what_matters_most_is_on_the_tiles(tmp_path: Path) -> None:
    page = write_report(written(tmp_path / "run", local={"epochs": 3})).read_text()
    assert tiles(page)[:6] == [
        ("62.0 %", "kNN accuracy, mean over clients"),
        ("42.0 %", "kNN accuracy of the shared encoder"),
        ("6", "dimensions in use (effective rank)"),
        ("4", "clients"),
        ("2", "rounds"),
        ("12", "images trained on per second"),  # 160 images, three times, in 40 seconds
    ]
    found = Evaluation(
        2,
        [
            over_images("global_knn", 0.43, 400),
            over_images("global_federated_linear", 0.53, 400),
            over_clients("personal_linear", {0: 0.7, 1: 0.8}, [1, 1]),
        ],
        {},
    )
    page = write_report(written(tmp_path / "judged", found=found)).read_text()
    assert tiles(page)[:4] == [
        (
            "75.0 %",
            "linear accuracy, each client's encoder on its own test images".replace("'", "&#x27;"),
        ),
        ("53.0 %", "federated linear accuracy of the shared encoder"),
        ("62.0 %", "kNN accuracy, mean over clients"),
        ("4", "clients"),
    ]


def test_without_labels_the_tiles_are_of_health(tmp_path: Path) -> None:
    rows = [{k: v for k, v in row.items() if "knn" not in k} for row in ROWS]
    rows[-1]["clients"] = {}
    page = write_report(written(tmp_path / "run", rows)).read_text()
    assert tiles(page)[:2] == [
        ("6", "dimensions in use (effective rank)"),
        ("1", "feature spread, 1 being even"),
    ]
    assert "the features use 6 dimensions and their spread is 1 of the ideal." in page
    (table,) = tables(page)
    assert [line[1:] for line in table] == [
        ["first", "last"],
        ["3", "6"],
        ["0.5", "1"],
        ["−0.25", "−0.5"],
        ["0.125", "0.25"],
    ]


def test_a_table_of_results_has_every_figure_under_its_own_heading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = {0: 0.5, 2: 0.9}
    found = Evaluation(
        2,
        [
            Score("global_linear", 0.61, "images", 400, 0.012),
            Score("personal_linear", 0.7, "clients", 2, 0.023, 0.734, 0.045, clients),
        ],
        {},
        notes=["client 1 has no figures: <nothing>"],
    )
    paper = {"table": "Table 2", "personal_linear": 0.831}
    page = write_report(written(tmp_path / "run", found=found, paper=paper)).read_text()
    assert tables(page) == [
        [
            ["", "this run", "± 95 %"],
            ["Linear", "61.0 %", "1.2"],
            ["kNN", "42.0 %", ""],
        ],
        [
            ["", "this run", "± 95 %", "weighted", "std", "paper"],
            ["Linear", "70.0 %", "2.3", "73.4 %", "4.5", "83.1 %"],
            ["kNN among the client's own images", "62.0 %", "152.5", "66.0 %", "17.0", ""],
        ],
    ]  # of two clients, 0.12 to either side of their mean: 12.706 * 0.12 * sqrt(2) / sqrt(2)
    assert "Of the evaluation: client 1 has no figures: &lt;nothing&gt;." in page


def of_three(names: tuple[str, ...] | None = None) -> FederatedData:
    """Clients 0, 1 and 2 with 1, 2 and 3 images of two classes."""
    labels = torch.tensor([0, 1, 1, 0, 0, 1])
    pixels = torch.arange(6, dtype=torch.uint8).reshape(6, 1, 1, 1)
    train = Images(pixels, labels)
    dataset = DataSet("scans", train, None, ("cat", "<dog>"), None, (0.0,), (1.0,), "digits")
    return FederatedData(dataset, [np.arange(1), np.arange(1, 3), np.arange(3, 6)], None, names)


def test_clients_have_their_own_names_images_and_figures(tmp_path: Path) -> None:
    found = Evaluation(
        2,
        [
            over_clients("personal_linear", {0: 0.25, 2: 0.75}, [1, 1]),
            over_clients("personal_linear_global", {0: 0.35, 2: 0.45}, [1, 1]),
        ],
        {},
    )
    record = Record(written(tmp_path / "run", found=found))
    bench: Any = SimpleNamespace(data=of_three(("<a>", "b", "c")))
    page = single._clients(record, bench)
    assert bars(page, "personal_linear") == [
        ("0 (&lt;a&gt;)", "1 images", "25.00", "25.0 %"),
        ("2 (c)", "3 images", "75.00", "75.0 %"),
    ]
    assert "<figcaption>Linear accuracy on the client" in figure(page, "personal_linear")
    assert "left:50.00%" in figure(page, "personal_linear")
    assert "<p>Mean 50.0 %, the upright line.</p>" in figure(page, "personal_linear")
    assert [b[2:] for b in bars(page, "personal_linear_global")] == [
        ("35.00", "35.0 %"),
        ("45.00", "45.0 %"),
    ]
    assert "everybody&#x27;s test images" in figure(page, "personal_linear_global")
    assert [b[3] for b in bars(page, "personal_knn")] == ["50.0 %", "74.0 %"]
    assert [b[2:] for b in bars(page, "client_rank")] == [("77.78", "7"), ("100.00", "9")]
    assert "Mean 8, the upright line." in figure(page, "client_rank")


def test_many_clients_stand_in_the_order_of_their_figures(tmp_path: Path) -> None:
    values = {client: (client * 7 % 50) / 50 for client in range(50)}
    found = Evaluation(2, [over_clients("personal_linear", values, [1] * 50)], {})
    page = single._clients(Record(written(tmp_path / "run", found=found)), None)
    said = hovers(page, "personal_linear")
    assert said[:3] == ["0: 0.0 %", "43: 2.0 %", "36: 4.0 %"]  # 43 * 7 = 301, 36 * 7 = 252
    assert len(said) == 50
    assert "<p>Mean 49.0 %; clients from the lowest" in figure(page, "personal_linear")


def test_time_is_cut_into_its_parts(tmp_path: Path) -> None:
    spent = {"total": 50.0, "loading": 5.0, "features": 15.0, "semi-finetune": 20.0}
    found = Evaluation(2, [], {}, seconds=spent)
    page = operations.timing(Record(written(tmp_path / "run", found=found)))
    assert "<figcaption>Where 1 min 40 s went</figcaption>" in page
    assert re.findall(r'width:([\d.]+)%" title="(.*?)"', page) == [
        ("40.00", "training: 40 s"),
        ("6.00", "evaluation beside it: 6.0 s"),
        ("4.00", "checkpoints and the rest: 4.0 s"),
        ("50.00", "protocols after training: 50 s"),
    ]
    assert bars(page, "timing") == [
        ("training", "", "100.00", "40 s"),
        ("evaluation beside it", "", "15.00", "6.0 s"),
        ("checkpoints and the rest", "", "10.00", "4.0 s"),
        ("protocols: few labels, fine-tuning", "", "50.00", "20 s"),
        ("protocols: forward passes", "", "37.50", "15 s"),
        ("protocols: the rest", "", "25.00", "10 s"),
        ("protocols: loading encoders", "", "12.50", "5.0 s"),
    ]


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (
            {"clients_per_round": 2, "oversample": 0.25, "deadline": 90, "late": "discount",
             "retries": 1, "min_replies": 0.75, "max_norm_ratio": 12},
            "Each round the server asks 2 of 4 clients and 25 % spares, waits 1 min 30 s for them, "
            "and needs 75 % of the replies, asking those that failed again up to once, or stops "
            "with its state saved. Late replies are counted at a discount; an update that is not "
            "finite, or longer for its steps than 12 times the last round's median, is refused.",
        ),
        (
            {"retries": 0},
            "Each round the server asks 4 of 4 clients, waits for them, and needs 50 % of the "
            "replies or stops with its state saved. Late replies are dropped;",
        ),
        ({"retries": 3}, "asking those that failed again up to 3 times, or stops"),
    ],
)  # fmt: skip
def test_the_rules_are_those_of_the_run(server: dict[str, Any], words: str, tmp_path: Path) -> None:
    run = written(tmp_path / "run", server={"rounds": 2, **server})
    assert words in unescape(operations.replies(Record(run)))


def test_interruptions_are_counted(tmp_path: Path) -> None:
    rows = [*ROWS[:2], {"kind": "resume", "round": 1}, *ROWS[2:], {"kind": "resume", "round": 2}]
    page = operations.replies(Record(written(tmp_path / "run", rows)))
    assert tiles(page)[:2] == [("8", "replies asked for"), ("7", "counted")]
    assert tiles(page)[-1] == ("2", "times stopped and resumed")


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"seed": 17, "local": {"epochs": 3}, "server": {"rounds": 5, "clients_per_round": 3},
             "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 4}},
            "4 clients trained one shared encoder with Global-SSFL and SimSiam on 1,200 images of "
            "8 × 8 pixels (scans), without using any label; the images are dealt to clients by "
            "class, Dirichlet with α = 0.5. It ran for 2 of 5 rounds, 3 clients in each, of 3 "
            "local epochs, 40 s in all, on a small network, seed 17. In the end kNN accuracy is "
            "62.0 % with the shared encoder on each client's own images, from 21.0 % before "
            "training.",
        ),
        (
            {"algorithm": {"name": "per-ssfl"}, "model": {"norm": "group"}},
            "any label; the images are dealt to clients evenly, at random. It ran for 2 rounds of "
            "one local epoch, 40 s in all, on a small network with group norm, seed 3. In the end "
            "kNN accuracy is 62.0 % with each client's own encoder, from 21.0 % before training.",
        ),
        ({"ssl": {"method": "supervised"}}, "Global-SSFL and supervised on 1,200 images of 8 × 8 "
         "pixels (scans), with labels; the images are"),
        ({"partition": {"kind": "natural"}}, "; every client holds its own images, as they were"),
        ({"local": {"steps": 39}}, "It ran for 2 rounds of 39 local steps, 40 s in all, on a"),
    ],
)  # fmt: skip
def test_a_run_in_a_paragraph(sections: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in summary(Record(written(tmp_path / "run", **sections)))


def test_where_clients_are_not_judged_the_paragraph_ends_with_the_shared_encoder(
    tmp_path: Path,
) -> None:
    rows = [{k: v for k, v in row.items() if k != "knn_mean"} for row in ROWS]
    assert summary(Record(written(tmp_path / "run", rows))).endswith(
        "In the end kNN accuracy is 42.0 % with the shared encoder on all test images, from 22.0 % "
        "before training."
    )


def test_a_run_that_began_with_another_names_it(tmp_path: Path) -> None:
    run = written(tmp_path / "run", server={"rounds": 2, "start": str(tmp_path / "a" / "<first>")})
    page = write_report(run).read_text()
    assert "seed 3. It began with what &lt;first&gt; had learned. In the end" in page
    assert "<first>" not in page  # nor where the configuration is


def test_of_sites_images_is_said_how_many_there_were_in_a_round(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    run.facts["train_images"] = 0
    assert "their sites' own images of 8 × 8 pixels, up to 100 in a round, without" in summary(
        Record(run)
    )


def test_what_is_noted_of_the_images_is_text(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    run.facts["notes"] = ["2 files of <here> are broken: see `ssfl look`"]
    page = write_report(run).read_text()
    assert (
        '<p class="warning">2 files of &lt;here&gt; are broken: see <code>ssfl look</code></p>'
        in page
    )


def test_two_runs_side_by_side_are_not_mixed_up(tmp_path: Path) -> None:
    """One run of two rounds, and one that has made one of seven."""
    fewer: Rows = [
        {"kind": "round", "round": 0, "loss": 9.0, "seconds": 5.0},
        {"kind": "evaluation", "round": 1, "knn_global": 0.11, "effective_rank": 1.5,
         "seconds": 100.0},
    ]  # fmt: skip
    found = Evaluation(2, [Score("personal_linear", 0.7, "clients", 2, 0.023, 0.734, 0.045)], {})
    one = written(tmp_path / "one", found=found, algorithm={"name": "per-ssfl"}, seed=5)
    other = written(tmp_path / "o<th>er", fewer, server={"rounds": 7}, ssl={"method": "byol"})
    (other.path / "report.html").touch()
    html, markdown, table = write_comparison([one, other], tmp_path / "out")
    page = html.read_text()
    assert hovers(page, "loss") == ["one, round 1: 4", "one, round 2: 2", "o<th>er, round 1: 9"]
    assert hovers(page, "knn_global") == [
        "one, round 1: 41.0 %",
        "one, round 2: 42.0 %",
        "o<th>er, round 1: 11.0 %",
    ]
    assert hovers(page, "knn_mean") == ["one, round 1: 51.0 %", "one, round 2: 62.0 %"]
    assert hovers(page, "effective_rank")[-1] == "o<th>er, round 1: 1.5"
    assert "<th>" not in re.sub("<tr>.*?</tr>", "", page)
    shared, clients, health, settings = tables(page)
    assert shared == [["", "one", "o<th>er"], ["kNN", "42.0 %", "11.0 %"]]
    assert clients[1:] == [
        ["Linear", "70.0 % ± 2.3", ""],
        ["kNN among the client's own images", "62.0 % ± 152.5", ""],
    ]
    assert health[1:3] == [["Effective rank", "6", "1.5"], ["Feature spread", "1", ""]]
    assert ["seed", "5", "3"] in settings
    assert ["server.rounds", "2", "7"] in settings
    assert ["ssl.method", "simsiam", "byol"] in settings
    told = "o\\<th>er: Global-SSFL with BYOL on scans, 4 clients, 1 of 7 rounds in 5.0 s"
    assert f"- one: Per-SSFL with SimSiam on scans, 4 clients, 2 rounds in 40 s\n- {told}\n" in (
        markdown.read_text()
    )
    assert "|  | one | o\\<th>er |" in markdown.read_text()

    first, second = csv.DictReader(table.open())
    assert first.items() >= {
        "run": "one", "path": str(one.path), "algorithm": "per-ssfl", "method": "simsiam",
        "data": "scans", "clients": "4", "rounds": "2", "seed": "5", "personal_linear": "0.7",
        "personal_linear_ci95": "0.023", "global_knn": "0.42", "global_knn_ci95": "",
        "personal_knn": "0.62", "effective_rank": "6.0", "train_seconds": "40.0",
    }.items()  # fmt: skip
    assert second.items() >= {
        "run": "o<th>er", "path": str(other.path), "algorithm": "global-ssfl", "method": "byol",
        "rounds": "1", "seed": "3", "personal_linear": "", "global_knn": "0.11",
        "personal_knn": "", "effective_rank": "1.5", "std_ratio": "", "train_seconds": "5.0",
    }.items()  # fmt: skip


def test_a_sites_rounds_are_those_of_what_it_holds(tmp_path: Path) -> None:
    """It has no rows of rounds: these are the coordinator's."""
    runs = []
    for name, rounds in (("one", 1), ("other", 2)):
        run = written(tmp_path / name, ROWS[-1:], here={"clients": [0, 2]})
        save_checkpoint(run.checkpoints, Checkpoint(rounds, "it", {"theta": torch.zeros(1)}))
        runs.append(run)
    _, markdown, table = write_comparison(runs, tmp_path / "out")
    assert [line["rounds"] for line in csv.DictReader(table.open())] == ["1", "2"]
    assert "- one: Global-SSFL with SimSiam on scans, 4 clients, 1 of 2 rounds in" in (
        markdown.read_text()
    )


def test_the_partition_is_drawn_client_by_client() -> None:
    page = pictures.partition(SimpleNamespace(data=of_three()))  # type: ignore[arg-type]
    assert hovers(page, "sizes") == ["0: 1", "1: 2", "2: 3"]
    assert hovers(page, "classes") == [
        "client 0, cat: 1 images",
        "client 2, cat: 2 images",
        "client 1, <dog>: 2 images",
        "client 2, <dog>: 1 images",
    ]


FEATURES = torch.tensor(
    [[1.0, 0.0], [0.98, 0.2], [0.9, 0.44], [0.0, 1.0], [-0.2, 0.98], [-1.0, 0.0]]
)
"""Of the six images of three clients, whose pixels are their numbers."""


class Looked:
    """A bench whose encoder is a table of features, by an image's one pixel."""

    def __init__(self, test: Images | None, *, shares: bool = True) -> None:
        train = of_three().dataset.train
        dataset = DataSet("x", train, test, ("cat", "dog"), None, (0.0,), (1.0,), "digits")
        parts = [np.array([2]), np.array([0, 5]), np.array([1, 3, 4])]
        self.data = FederatedData(dataset, parts, None)
        self.config, self.shares = tiny(), shares
        self.asked: list[int] = []

    def features_of(self, who: int, pixels: torch.Tensor) -> torch.Tensor:
        self.asked.append(who)
        return 5 * FEATURES[pixels.flatten().long()]


@pytest.mark.parametrize("apart", [True, False], ids=["test images", "no test images"])
def test_neighbours_are_the_nearest_others(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against cosines in NumPy, whichever images are asked about."""
    monkeypatch.setattr(samples, "NEIGHBOURS", 3)
    pixels, labels = [5, 3, 2, 0, 1, 4], [1, 0, 0, 1, 0, 1]
    test = Images(torch.tensor(pixels, dtype=torch.uint8).reshape(6, 1, 1, 1), torch.tensor(labels))
    bench = Looked(test if apart else None)
    found = sample(bench)  # type: ignore[arg-type]
    assert found is not None
    assert bench.asked == [GLOBAL] * (2 if apart else 1)
    there = found.pixels.flatten().tolist()
    assert there == [2, 0, 5, 1, 3, 4]
    assert found.labels == [1, 0, 1, 1, 0, 0]
    assert found.clients == [0, 1, 1, 2, 2, 2]
    asked = found.queries.flatten().tolist()
    assert sorted(asked) == [0, 1, 2, 3, 4, 5]  # none of them twice
    features = FEATURES.numpy()
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    for query, nearest in zip(asked, found.neighbours, strict=True):
        order = np.argsort(-(unit @ unit[query])).tolist()
        assert [there[row] for row in nearest] == [i for i in order if apart or i != query][:3]
    truth = dict(zip(pixels, labels, strict=True) if apart else enumerate([0, 1, 1, 0, 0, 1]))
    assert found.query_labels == [truth[query] for query in asked]


def test_where_nothing_is_shared_the_largest_clients_encoder_is_looked_at() -> None:
    bench = Looked(None, shares=False)
    found = sample(bench)  # type: ignore[arg-type]
    assert found is not None
    assert (found.whose, bench.asked) == (2, [2])


def drawn(place: Sequence[tuple[float, float]], labels: list[int] | None) -> str:
    """The features' page, of the six images with their neighbours as given."""
    data = of_three(("a", "b", "c"))
    found = Samples(
        list(place), [0, 1, 1, 2, 2, 2], labels, data.dataset.train.pixels,
        data.dataset.train.pixels[:2], None if labels is None else [1, 0], [[3, 2], [0, 5]], GLOBAL,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "sample", lambda bench: found)
        return pictures.features(SimpleNamespace(data=data))  # type: ignore[arg-type]


def test_a_neighbour_of_another_class_is_marked_and_its_client_named() -> None:
    page = drawn([(float(i), 0.0) for i in range(6)], [0, 1, 1, 0, 0, 1])
    images = re.findall(r'<img class="(.*?)" alt="(.*?)" title="(.*?)"', page)
    assert [(kind, unescape(alt)) for kind, alt, _ in images] == [
        ("mark query", "query: <dog>"),
        ("mark other", "cat, held by client 2 (c)"),
        ("mark", "<dog>, held by client 1 (b)"),
        ("mark query", "query: cat"),
        ("mark", "cat, held by client 0 (a)"),
        ("mark other", "<dog>, held by client 2 (c)"),
    ]
    assert all("<" not in alt for _, alt, _ in images)
    assert all(alt == title for _, alt, title in images)
    bare = drawn([(float(i), 0.0) for i in range(6)], None)
    assert "mark other" not in bare
    assert "red frame" not in bare


def test_points_of_the_map_are_coloured_by_their_own_class_and_client() -> None:
    page = drawn([(float(i), 0.0) for i in range(6)], [0, 1, 1, 0, 0, 1])

    def groups(name: str) -> dict[str, list[float]]:
        """Places by group: six points from 8 to 412, 80.8 apart."""
        drawing = re.search("<svg.*</svg>", figure(page, name))
        assert drawing is not None
        return {
            group.findtext("title", ""): [
                round((float(dot.get("cx", "")) - 8) / 80.8) for dot in group.iter("circle")
            ]
            for group in ElementTree.fromstring(drawing[0]).iter("g")
        }

    assert groups("tsne_label") == {"cat": [0, 3, 4], "<dog>": [1, 2, 5]}
    assert groups("tsne_client") == {
        "client 0 (a)": [0],
        "client 1 (b)": [1, 2],
        "client 2 (c)": [3, 4, 5],
    }
    legend = re.findall('<i class="(.*?)"></i>(.*?)</li>', figure(page, "tsne_label"))
    assert legend == [("c0", "cat"), ("c1", "&lt;dog&gt;")]


def test_a_map_of_more_groups_than_a_legend_holds_says_how_to_tell_them_apart() -> None:
    few, many = (
        pictures._map("tsne_client", "client", "", [str(k) for k in range(count)])
        for count in (24, 1025)
    )
    assert few.count("<li>") == 24
    assert "hover" not in few
    assert "<li>" not in many
    assert "<p>1,025 colours; hover over a point for its client.</p>" in many
