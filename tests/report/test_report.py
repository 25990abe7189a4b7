"""The pages: drawn in a real browser, saying what the record says, with nothing fetched."""

import csv
import re
import shutil
from dataclasses import replace
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import Browser, browsing, chromium

import ssfl.protocols.bench as bench
import ssfl.report.record as record
from ssfl.errors import ConfigError, DataError
from ssfl.experiment import train
from ssfl.paper import PaperFigures
from ssfl.protocols.scores import load_evaluation
from ssfl.report import write_comparison, write_report
from ssfl.report.charts import Series, line_chart, percent, plain
from ssfl.run import Run
from tiny import tiny

needs_browser = pytest.mark.skipif(chromium() is None, reason="Chromium is not installed")

DRAWN = """
Object.fromEntries([...document.querySelectorAll("figure")].map(figure => {
  const frame = figure.getBoundingClientRect();
  const boxes = [...figure.querySelectorAll(".mark")].map(mark => mark.getBoundingClientRect());
  const inside = box => box.width + box.height > 0 && box.left >= frame.left - 1 &&
    box.right <= frame.right + 1 && box.top >= frame.top - 1 && box.bottom <= frame.bottom + 1;
  const images = [...figure.querySelectorAll("img")];
  return [figure.dataset.figure, boxes.length > 0 && boxes.every(inside) &&
    images.every(image => image.complete && image.naturalWidth > 0)];
}))
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory):
    with browsing(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def drawn(browser: Browser, page: Path, *, width: int = 1280, dark: bool = False) -> set[str]:
    """Names of the figures on a page, after making sure that all is well with it."""
    browser.open(page, width=width, dark=dark)
    figures = browser.evaluate(DRAWN)
    assert browser.complaints() == []
    assert browser.requests() == []
    assert all(figures.values()), figures
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    red, green, blue = map(
        int, re.findall(r"\d+", browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    )
    assert (red + green + blue < 200) == dark
    return set(figures)


@needs_browser
@pytest.mark.parametrize(
    ("width", "dark"), [(1280, False), (400, False), (1280, True)], ids=["desk", "phone", "dark"]
)
def test_every_figure_of_a_run_is_drawn_in_a_real_browser(
    personal: Run, browser: Browser, width: int, dark: bool
) -> None:
    figures = drawn(browser, write_report(personal), width=width, dark=dark)
    assert figures == {
        "loss",
        "knn",
        "movement",
        "effective_rank",
        "std_ratio",
        "uniformity",
        "alignment",
        "epsilon_share",
        "personal_linear",
        "personal_linear_global",
        "personal_knn",
        "client_rank",
        "sizes",
        "classes",
        "tsne_label",
        "tsne_client",
        "neighbours",
        "timing",
        "seconds",
    }


@needs_browser
def test_a_run_without_labels_shows_health_in_place_of_accuracy(
    unlabelled: Run, browser: Browser
) -> None:
    figures = drawn(browser, write_report(unlabelled), width=400)
    assert {"effective_rank", "client_rank", "tsne_client", "neighbours"} <= figures
    assert not figures & {"knn", "tsne_label", "classes", "personal_knn"}
    text = browser.evaluate("document.body.innerText")
    assert "Effective rank: dimensions in use" in text
    assert "not which of two sound encoders is the better one" in text
    assert "accuracy of" not in text


@needs_browser
def test_clients_that_have_names_are_called_by_them(wards: Run, browser: Browser) -> None:
    drawn(browser, write_report(wards), width=400)
    text = browser.evaluate("document.body.innerText")
    assert re.search(r"0 \(children's <hosp…\s*40 images", text)
    assert re.search(r"1 \(north\)\s*40 images", text)
    assert "client 0 (children's <hospital>, ward 7)" in text  # of the map's colours


def test_health_that_was_measured_once_is_a_number_and_not_a_curve(
    wards: Run, shared: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sum(row["kind"] == "evaluation" for row in wards.metrics) == 1
    rank = '<tr><td>Effective rank: dimensions in use</td><td class="n strong">{}</td></tr>'
    text = write_report(wards).read_text()
    assert 'data-figure="loss"' in text
    assert 'data-figure="effective_rank"' not in text
    assert rank.format(plain(wards.final["effective_rank"])) in text

    rows = [r for r in shared.metrics if r["kind"] != "evaluation" or r["round"] == 3]
    monkeypatch.setattr(Run, "metrics", property(lambda run: rows))
    text = write_report(shared).read_text()
    assert 'data-figure="effective_rank"' not in text
    assert rank.format(plain(shared.final["effective_rank"])) in text


def test_runs_that_were_judged_once_are_compared_by_numbers_alone(
    wards: Run, shared: Run, tmp_path: Path
) -> None:
    twin = Run(shutil.copytree(wards.path, tmp_path / "twin"))
    page, *_ = write_comparison([wards, twin], tmp_path / "both")
    assert re.findall('data-figure="(.*?)"', page.read_text()) == ["loss"]
    assert f">{plain(wards.final['effective_rank'])}</td>" in page.read_text()
    page, *_ = write_comparison([wards, shared], tmp_path / "mixed")
    assert 'data-figure="effective_rank"' in page.read_text()


def test_raw_pixels_and_the_untrained_encoder_are_told_apart_without_colours(shared: Run) -> None:
    text = write_report(shared).read_text()
    figure = text.split('data-figure="knn"')[1].split("</figure>")[0]
    dashes = re.findall(r'stroke-dasharray="(.*?)"[^>]*><title>(\w+)', figure)
    assert dashes == [("2 4", "before"), ("8 4", "raw")]
    assert re.findall(r'<li class="(\w+)"><i[^>]*></i>(\w+)', figure) == [
        ("dotted", "before"),
        ("dashed", "raw"),
    ]


def test_a_single_point_is_in_the_middle_of_its_chart() -> None:
    drawing = line_chart([Series("it", [(7, 0.3)], 0)], "it")
    x, y = re.search(r'cx="([\d.]+)" cy="([\d.]+)"', drawing).groups()
    frame = re.search(r'class="grid" d="M([\d.]+) [\d.]+H([\d.]+)"', drawing).groups()
    assert float(x) == sum(map(float, frame)) / 2
    assert 80 < float(y) < 120


def test_where_there_are_no_labels_the_page_speaks_of_no_accuracies(wards: Run) -> None:
    text = write_report(wards).read_text()
    assert "2 clients trained one shared encoder" in text
    assert "on 80 images of 16 × 16 pixels (scans), without using any label" in text
    assert "The encoder each client is judged by.</p>" in text
    assert "80 images; 40 per client." in text


@needs_browser
def test_a_coordinators_page_shows_the_health_that_its_sites_sent(
    unlabelled: Run, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = ("effective_rank", "std_ratio", "uniformity", "alignment", "epsilon_share")
    rows = [{k: v for k, v in row.items() if k not in theirs} for row in unlabelled.metrics]
    sent = [[row[name] for row in rows[-1]["clients"].values()] for name in theirs]
    monkeypatch.setattr(Run, "metrics", property(lambda run: rows))
    monkeypatch.setattr(record.Record, "at_sites", True)
    figures = drawn(browser, write_report(unlabelled))
    assert {*theirs, "client_rank"} <= figures
    text = browser.evaluate("document.body.innerText")
    rank = plain(sum(sent[0]) / len(sent[0]))
    assert f"the features use {rank} dimensions" in text
    assert "ideal, in the mean over clients." in text
    assert f"{rank}\ndimensions in use (effective rank), mean over clients" in text
    assert f"\t{rank}\nFeature spread: 1 is even" in text


@needs_browser
def test_several_runs_share_one_page(
    shared: Run, personal: Run, unlabelled: Run, browser: Browser, tmp_path: Path
) -> None:
    page, *_ = write_comparison([shared, personal, unlabelled], tmp_path)
    figures = drawn(browser, page, width=400)
    assert {"loss", "knn_mean", "effective_rank"} <= figures
    assert browser.evaluate("document.querySelectorAll('figure[data-figure=loss] g').length") == 3


@pytest.mark.parametrize("count", [3, 12])
def test_a_legend_has_the_colours_of_its_lines(shared: Run, tmp_path: Path, count: int) -> None:
    runs = [shutil.copytree(shared.path, tmp_path / f"run-{i}") for i in range(count)]
    (runs[1] / "metrics.jsonl").write_text("")  # of which there is nothing to draw
    page, *_ = write_comparison(runs, tmp_path / "out")
    header, figure = (page.read_text().split(start)[1] for start in ("<h1>", "<figure"))
    mark = r'<{} ((?:class="c|style="color)[^>]+)>'
    listed = re.findall(mark.format("i"), header.split("</header>")[0])
    lines, legend = (re.findall(mark.format(tag), figure) for tag in "gi")
    assert len(set(listed)) == count
    assert lines == legend == [colour for i, colour in enumerate(listed) if i != 1]


@needs_browser
def test_odd_names_and_many_runs_make_a_page_that_reads_and_links(
    shared: Run, browser: Browser, tmp_path: Path
) -> None:
    names = ["a|b", "50%25 #1?", *(f"a-run-with-a-rather-long-name-{i}" for i in range(8))]
    runs = [shutil.copytree(shared.path, tmp_path / name) for name in names]
    for run in runs:
        (run / "report.html").write_text("here")
    page, markdown, _ = write_comparison([*runs, runs[0], shared.path], tmp_path / "out")
    assert "| a\\|b | 50%25 #1? | a-run-with" in markdown.read_text()
    drawn(browser, page)
    links = browser.evaluate("[...document.querySelectorAll('.runs a')].map(a => a.href)")
    assert [Path(unquote(urlsplit(link).path)) for link in links] == [
        *(run / "report.html" for run in runs),
        *([shared.path / "report.html"] if (shared.path / "report.html").exists() else []),
    ]
    assert browser.evaluate("document.querySelectorAll('.runs li').length") == 11
    widths = "[...document.querySelectorAll('.scroll td:first-child')].map(d => d.clientWidth)"
    assert min(browser.evaluate(widths)) > 120


def test_runs_of_one_name_are_told_apart_by_where_they_are(shared: Run, tmp_path: Path) -> None:
    one, other = (shutil.copytree(shared.path, tmp_path / place / "run") for place in "ab")
    _, markdown, _ = write_comparison([one, other], tmp_path / "out")
    assert "|  | a/run | b/run |" in markdown.read_text()
    with pytest.raises(ConfigError, match="at least two runs"):
        write_comparison([one, one], tmp_path / "out")


def test_figures_of_another_round_are_not_shown_and_it_is_said(
    personal: Run, tmp_path: Path
) -> None:
    run = Run(shutil.copytree(personal.path, tmp_path / "run"))
    replace(load_evaluation(run.evaluation), rounds=2).save(run.evaluation)
    text = write_report(run).read_text()
    assert "<td>Linear</td>" not in text
    assert "<code>ssfl evaluate</code> found is of round 2 and not shown" in text
    assert "adds linear figures" not in text


def test_one_client_is_not_called_clients(tmp_path: Path) -> None:
    run = train(tiny(partition={"clients": 1}), out=tmp_path / "run")
    assert "1 client trained one shared encoder" in write_report(run).read_text()


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"algorithm": {"name": "fedema"}}, "one shared encoder"),
        ({"algorithm": {"name": "la-ssfl"}}, "a shared encoder and one of their own each"),
        ({"local": {"batch_norm": "fedbn"}}, "a shared encoder and one of their own each"),
    ],
    ids=["fedema", "la-ssfl", "fedbn"],
)
def test_clients_have_encoders_of_their_own_where_they_are_judged_by_them(
    tmp_path: Path, settings: dict[str, dict[str, str]], what: str
) -> None:
    text = unescape(write_report(train(tiny(**settings), out=tmp_path / "run")).read_text())
    assert f"clients trained {what} with" in text
    assert ("each client's own encoder" in text) == ("own each" in what)


@pytest.mark.parametrize(
    ("low", "high", "number", "names"),
    [
        (14.76, 15.07, plain, ["14.8", "14.9", "15"]),
        (14.78, 15.02, plain, ["14.8", "14.85", "14.9", "14.95", "15"]),
        (0.3569, 0.3591, plain, ["0.357", "0.3575", "0.358", "0.3585", "0.359"]),
        (0.561, 0.5632, percent, ["56.1 %", "56.15 %", "56.2 %", "56.25 %", "56.3 %"]),
        (0.2, 0.6, percent, ["20 %", "30 %", "40 %", "50 %", "60 %"]),
    ],
)
def test_no_two_ticks_of_an_axis_read_alike(low, high, number, names) -> None:
    drawing = line_chart([Series("it", [(1, low), (2, high)], 0)], "it", number=number)
    found = re.findall(r'x="38\.0"[^>]*>([^<]+)<', drawing)
    assert len(set(found)) == len(found)
    assert found == names


def test_a_page_needs_no_network_and_no_script(personal: Run) -> None:
    text = write_report(personal).read_text()
    outside = [a for a in re.findall(r"""(?:src|href)=["']([^"']+)""", text) if a[0] != "#"]
    assert all(address.startswith("data:") for address in outside)
    assert "@import" not in text
    assert "url(" not in text
    assert "<script" not in text


def test_names_from_outside_are_text_and_not_markup(shared: Run) -> None:
    text = write_report(shared).read_text()
    assert "shared &lt;b&gt;" in text
    assert "shared <b>" not in text


def test_a_command_on_the_page_is_set_as_code(shared: Run) -> None:
    text = write_report(shared).read_text()
    assert "<code>ssfl evaluate</code> adds linear figures" in text
    assert "`" not in text.split("<main>")[1]


@needs_browser
def test_where_a_row_of_tiles_is_not_full_there_is_paper_and_no_block(
    shared: Run, browser: Browser
) -> None:
    browser.open(write_report(shared), width=1000, dark=False)
    colours = browser.evaluate("""[...document.querySelectorAll(".tiles, figure")].map(
        part => getComputedStyle(part).backgroundColor)""")
    assert len(set(colours)) == 1


@needs_browser
@pytest.mark.parametrize("width", [1280, 768, 640, 375])
def test_letters_of_a_drawing_are_no_larger_than_those_around_it(
    personal: Run, browser: Browser, width: int
) -> None:
    """A drawing is as wide as its figure, and figures may stand alone in a row."""
    browser.open(write_report(personal), width=width)
    sizes = browser.evaluate("""[...document.querySelectorAll("figure svg text")].map(text =>
        parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a)""")
    assert sizes
    assert min(sizes) > 8
    assert max(sizes) < 16


@needs_browser
def test_on_a_phone_no_column_of_a_runs_results_is_out_of_sight(
    personal: Run, browser: Browser
) -> None:
    browser.open(write_report(personal), width=375)
    over = browser.evaluate("""[...document.querySelectorAll("#results .scroll")].map(
        frame => frame.scrollWidth - frame.clientWidth)""")
    assert over == [0, 0]


@needs_browser
def test_a_line_of_a_comparison_keeps_its_name_while_it_is_scrolled(
    shared: Run, tmp_path: Path, browser: Browser
) -> None:
    runs = [shutil.copytree(shared.path, tmp_path / f"one-of-many-runs-{i}") for i in range(6)]
    page, *_ = write_comparison(runs, tmp_path / "out")
    browser.open(page, width=375, dark=True)
    scrolled, moved, grounds = browser.evaluate("""(() => {
        const frame = document.querySelector("#results .scroll");
        frame.scrollLeft = 200;
        const cells = [...frame.querySelectorAll("tr > :first-child")];
        const left = frame.getBoundingClientRect().left;
        return [frame.scrollLeft, cells.map(cell => cell.getBoundingClientRect().left - left),
            [...cells, document.body].map(part => getComputedStyle(part).backgroundColor)];
    })()""")
    assert scrolled == 200
    assert set(moved) == {0}
    assert len(set(grounds)) == 1  # and what passes below it is not seen through it


@needs_browser
def test_on_paper_figures_are_two_abreast_and_bars_keep_their_colour(
    personal: Run, browser: Browser
) -> None:
    browser.open(write_report(personal), width=718, printed=True)  # A4 within its margins
    tops = browser.evaluate("""[...document.querySelectorAll("#partition figure")].map(
        figure => figure.getBoundingClientRect().top)""")
    assert len(tops) == 2
    assert tops[0] == tops[1]
    kept = browser.evaluate("""[...document.querySelectorAll(".track i, .shares i, .legend i")].map(
        part => getComputedStyle(part).printColorAdjust)""")  # else browsers leave backgrounds out
    assert set(kept) == {"exact"}
    assert not browser.evaluate("document.querySelector('nav').offsetHeight")  # links go nowhere
    assert browser.evaluate("document.documentElement.scrollWidth") <= 718


def test_the_page_says_what_was_run_and_what_came_of_it(shared: Run) -> None:
    text = write_report(shared).read_text()
    assert "4 clients trained one shared encoder with Global-SSFL and SimSiam" in text
    assert f"{100 * shared.final['knn_mean']:.1f} %" in text
    assert f"{100 * shared.final['untrained_knn_mean']:.1f} %" in text
    assert "Each round the server asks 4 of 4 clients" in text
    assert "<dd>12</dd><dt>replies asked for</dt></div><div><dd>12</dd><dt>counted</dt>" in text
    assert "alpha = 0.5" in text
    assert "so their accuracies are coarse" in text
    sizes = bench.Bench(shared).data.sizes()
    assert f"{sizes.sum()} images; from {sizes.min()} to {sizes.max()} per client." in text


@pytest.mark.parametrize(
    ("policy", "words"),
    [("drop", "came late, dropped"), ("discount", "came late, counted at a discount")],
)
def test_failures_are_counted_by_reason_and_late_work_by_what_became_of_it(
    policy: str, words: str, shared: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = shared.config.server.model_copy(update={"late": policy})
    monkeypatch.setattr(shared, "config", shared.config.model_copy(update={"server": server}))
    rows = shared.metrics
    rounds = [row for row in rows if row["kind"] == "round"]
    rounds[0] |= {"failures": {"refused": 2, "lost": 1}, "accepted": 1}
    rounds[1] |= {"failures": {"refused": 1}, "accepted": 3, "late": 1}
    monkeypatch.setattr(Run, "metrics", property(lambda run: rows))
    text = write_report(shared).read_text()
    tiles = re.findall(r"<dd>(\d+)</dd><dt>([^<]+)</dt>", text.split('id="replies"')[1])
    assert {words: int(count) for count, words in tiles} == {
        "replies asked for": 12,
        "counted": 8,
        "failed with an error": 0,
        "lost": 1,
        "past the deadline": 0,
        "refused": 3,
        words: 1,
    }


def test_the_papers_figures_stand_beside_ours(
    personal: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = PaperFigures(table="Table 2, Per-SSFL", personal_linear=0.831)
    monkeypatch.setattr(record.Record, "paper", figures)
    text = write_report(personal).read_text()
    assert "83.1 %" in text
    assert "Paper: Table 2, Per-SSFL." in text


def test_where_nothing_is_shared_no_figure_is_of_a_shared_encoder(
    shared: Run, tmp_path: Path
) -> None:
    everyone = {"every": 1, "clients": 4, "baselines": True}
    alone = train(tiny(algorithm={"name": "local-only"}, evaluation=everyone), out=tmp_path / "one")
    assert "knn_global" not in alone.final
    assert "effective_rank" not in alone.final
    text = write_report(alone).read_text()
    assert "shared encoder" not in text
    assert "Dimensions the features use; higher is richer. Mean over clients." in text
    _, markdown, table = write_comparison([shared, alone], tmp_path / "out")
    sent = [row["effective_rank"] for row in alone.final["clients"].values()]
    theirs, ours = shared.final["effective_rank"], sum(sent) / len(sent)
    assert f"| Effective rank | {plain(theirs)} | {plain(ours)} |" in markdown.read_text()
    assert "shared encoder; of one it is the mean over clients' own." in markdown.read_text()
    ranks = [float(line["effective_rank"]) for line in csv.DictReader(table.open())]
    assert ranks == pytest.approx([theirs, ours])


def test_clients_who_collapse_alone_are_warned_of(tmp_path: Path) -> None:
    mad = {"lr": 1e9, "steps": 1}
    config = tiny(algorithm={"name": "local-only"}, local=mad, server={"rounds": 1})
    run = train(config, out=tmp_path / "run")
    assert "features are not finite" in run.final["warning"]


def test_a_run_that_has_diverged_has_a_page_that_says_so(tmp_path: Path) -> None:
    config = tiny(
        algorithm={"name": "local-only"}, local={"lr": 1e9, "steps": 1}, server={"rounds": 1}
    )
    page = write_report(train(config, out=tmp_path / "run"))
    assert "Training has diverged" in page.read_text(encoding="utf-8")


def test_without_the_images_the_rest_of_the_page_is_there(
    personal: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(config: object) -> None:
        raise DataError("there is no folder of images")

    monkeypatch.setattr(bench, "load_federated", gone)
    text = write_report(personal).read_text()
    assert "are missing: there is no folder of images." in text
    assert 'data-figure="loss"' in text
    assert 'data-figure="tsne_client"' not in text


def test_tables_in_csv_and_markdown_hold_the_evaluations_figures(
    shared: Run, personal: Run, tmp_path: Path
) -> None:
    _, markdown, table = write_comparison([shared, personal], tmp_path)
    rows = {row["run"]: row for row in csv.DictReader(table.open())}
    assert list(rows) == ["shared <b>", "personal"]
    final = float(rows["shared <b>"]["personal_knn"])
    assert final == pytest.approx(shared.final["knn_mean"])
    found = record.Record(personal).evaluation
    assert found is not None
    linear = found["personal_linear"]
    assert float(rows["personal"]["personal_linear"]) == linear.value
    assert rows["shared <b>"]["personal_linear"] == ""
    text = markdown.read_text()
    assert f"| {100 * linear.value:.1f} % ± {100 * (linear.ci95 or 0):.1f} |" in text
    assert "| algorithm.name | global-ssfl | per-ssfl |" in text
    assert "seed" not in text


def test_a_run_that_is_not_finished_says_how_far_it_came(shared: Run, tmp_path: Path) -> None:
    half = Path(shutil.copytree(shared.path, tmp_path / "half"))
    config, rounds = half / "config.toml", shared.config.server.rounds
    config.write_text(config.read_text().replace(f"rounds = {rounds}", "rounds = 4000"))
    page, markdown, _ = write_comparison([shared, half], tmp_path / "comparison")
    assert f", {rounds} rounds in" in page.read_text()
    assert f", {rounds} of 4,000 rounds in" in page.read_text()
    assert re.search(
        rf"(?m)^- half: Global-SSFL.* {rounds} of 4,000 rounds in", markdown.read_text()
    )


def test_one_run_is_not_compared(shared: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least two runs"):
        write_comparison([shared], tmp_path)
    with pytest.raises(ConfigError, match="at least two runs"):
        write_comparison(str(shared.path), tmp_path)  # which is not a run for each letter


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (-0.18816, "−0.188"),
        (0.00234, "0.00234"),
        (0.0000476, "4.76e−5"),
        (47.248, "47.2"),
        (5.0, "5"),
        (12345.6, "12,346"),
        (100.0, "100"),
    ],
)
def test_numbers_have_the_digits_they_deserve(value: float, text: str) -> None:
    assert plain(value) == text
