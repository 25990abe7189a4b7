"""The documentation is held to the code: links, names, options, commands, and the blocks on
docs/adding-an-algorithm.md, which are run as they stand."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import typer

from ssfl.algorithms import ALGORITHMS
from ssfl.algorithms.base import Algorithm
from ssfl.algorithms.options import LocalOptions
from ssfl.cli import app
from ssfl.comm import COMMUNICATORS
from ssfl.config import Config, load_config
from ssfl.data.sources import SOURCES
from ssfl.errors import ConfigError, DataError
from ssfl.experiment import train
from ssfl.federation.aggregate import Aggregator
from ssfl.federation.options import ServerOptions
from ssfl.federation.server_optimizers import OPTIMIZERS
from ssfl.models.backbones import BACKBONES
from ssfl.protocols.judge import evaluate
from ssfl.recipes import recipes
from ssfl.run import Run
from ssfl.ssl import METHODS
from ssfl.ssl.base import Method, Outputs
from tiny import outcome, same_bits

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
ALGORITHMS_PAGE = ROOT / "docs" / "algorithms.md"
ADDING_PAGE = ROOT / "docs" / "adding-an-algorithm.md"
PLACES = (ROOT, ROOT / "src" / "ssfl", ROOT / "docs")

TINY = (
    "data.source=digits",
    "data.test_fraction=0.7",
    "partition.clients=3",
    "server.clients_per_round=0",
    "partition.min_size=20",
    "model.width=4",
    "ssl.projector_width=16",
    "ssl.predictor_width=8",
    "server.rounds=2",
    "device.device=cpu",
    "device.workers=1",
    "evaluation.every=0",
    "evaluation.baselines=false",
)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=page_id)


# Links and names


@cache
def anchors(page: Path) -> set[str]:
    """Anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(page.read_text()), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


@every_page
def test_internal_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", without_blocks(page.read_text()))
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {link}"


@every_page
def test_named_files_exist(page):
    for name in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|toml|md|txt))`", page.read_text()):
        own = name.startswith(("runs/", "data/", "keys/", "/"))
        assert own or any((place / name).exists() for place in PLACES), name


# Commands


def command_lines(page: Path) -> list[str]:
    """Every `ssfl ...` of a page, in a block or between backticks."""
    text = page.read_text()
    inline = re.findall(r"`(ssfl [^`\n]+)`", without_blocks(text))
    lines = text.replace("\\\n", " ").splitlines()
    blocks = [line.strip().removeprefix("$ ") for line in lines]
    starts = r"(?:mpiexec \S+ \S+ |\.venv/bin/|[A-Z_]+=\S+ )*ssfl "
    return inline + [line for line in blocks if re.match(starts, line)]


def words(line: str) -> list[str]:
    """The arguments of `ssfl`, up to a pipe, a redirection or a comment."""
    line = line[re.search(r"\bssfl ", line).end() :]
    found: list[str] = []
    for word in shlex.split(line, comments=True):
        if word in ("|", ">", ">>", "&&", "&", ";", "<"):
            break
        found.append(word)
    before = ["", *found]  # dots are left out, unless they stand for an option's value
    return [
        word for word, last in zip(found, before, strict=False) if word != "..." or last[:2] == "--"
    ]


LINES = [(page, line) for page in PAGES for line in dict.fromkeys(command_lines(page))]


@pytest.mark.parametrize(("page", "line"), LINES, ids=[f"{p.name}: {x}" for p, x in LINES])
def test_command_lines_parse(page, line, request):
    if page == ADDING_PAGE:
        request.getfixturevalue("adding")
        for module in ("mutual_ssfl", "align_uniform", "arrays"):
            import_module(module)
    parse(line)


def parse(line: str) -> None:
    """Read a command line as `ssfl` would, its settings too."""
    rest = words(line)
    command: Any = typer.main.get_command(app)
    context, name = None, "ssfl"
    while hasattr(command, "resolve_command"):
        if not rest or rest[0].startswith("-"):
            return  # `ssfl --help`, or a group by its name: `ssfl data`
        context = command.context_class(command, info_name=name, parent=context)
        name, command, rest = command.resolve_command(context, rest)
    if not rest and any(parameter.required for parameter in command.params):
        return  # a command by its name
    context = command.make_context(name, list(rest), parent=context)
    recipe, settings = context.params.get("recipe"), context.params.get("settings")
    if recipe is not None and not recipe.endswith(".toml"):
        placeholder = recipe.isupper() or "/" in recipe
        assert placeholder or recipe in recipes(), f"there is no recipe {recipe}"
        load_config("demo" if placeholder else recipe, settings or [])


@pytest.mark.parametrize("name", ["own-images.md", "deploying.md"])
def test_the_recipes_of_a_page_are_recipes(name):
    text = (ROOT / "docs" / name).read_text()
    (recipe,) = re.findall(r"^    name = .*\n(?:(?:    .*)?\n)+", text, re.MULTILINE)
    load_config(tomllib.loads(recipe))
    with pytest.raises(ConfigError, match="rouns"):
        load_config(tomllib.loads(recipe.replace("rounds", "rouns")))


def test_command_lines_are_found_and_a_wrong_one_is_seen():
    assert len(LINES) > 30
    with pytest.raises(Exception, match="No such"):
        parse("ssfl train demo --no-such-option")
    with pytest.raises(Exception, match="no_such_key"):
        parse("ssfl train demo --set local.no_such_key=1")


# Options


def sections(page: Path) -> dict[str, str]:
    """A page's text by its headings, backticks taken away."""
    parts = re.split(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {name.strip("`"): text for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def documented(text: str) -> dict[str, str]:
    """Options in a text's tables, with their defaults as written."""
    rows = re.findall(r"^\| `(\w+\.\w+)` \| (.+?) \|", text, re.MULTILINE)
    return {name: default.strip("`") for name, default in rows}


def written(default: Any) -> str:
    """A default as the page writes it."""
    if default is None:
        return "not set"
    return str(default).lower() if isinstance(default, bool) else str(default)


def fields_of(options: Any, prefix: str, but: str = "") -> dict[str, str]:
    return {
        f"{prefix}.{name}": written(field.default)
        for name, field in options.model_fields.items()
        if name != but
    }


CHOSEN = [
    *((name, "algorithm", "name", ALGORITHMS) for name in ALGORITHMS),
    *((name, "ssl", "method", METHODS) for name in METHODS),
]


@pytest.mark.parametrize(
    ("name", "section", "key", "registry"), CHOSEN, ids=[name for name, *_ in CHOSEN]
)
def test_every_algorithm_and_method_has_an_entry_with_its_options(name, section, key, registry):
    text = sections(ALGORITHMS_PAGE).get(name)
    assert text is not None, f"{name} has no section"
    assert documented(text) == fields_of(registry[name].Options, section, but=key)
    assert "$$" in text, "there is no equation"
    module = registry.targets[name].partition(":")[0].replace(".", "/")
    assert f"(../src/{module}.py)" in text, "its file is not named"
    assert f"--set {section}.{key}={name}" in text, "how to choose it is not said"


def test_options_of_server_and_local_training_are_as_documented():
    local, server = fields_of(LocalOptions, "local"), fields_of(ServerOptions, "server")
    found = documented(ALGORITHMS_PAGE.read_text())
    told = {name: value for name, value in found.items() if name.split(".")[0] in "local server"}
    assert told.items() <= (local | server).items()
    assert told.keys() >= local.keys()


@pytest.mark.parametrize(
    "option", ["server.optimizer", "server.aggregation", "server.sampler", "local.correction"]
)
def test_every_choice_of_the_server_is_named(option):
    section, _, key = option.partition(".")
    text = ALGORITHMS_PAGE.read_text()
    choices = get_args(Config.model_fields[section].annotation.model_fields[key].annotation)
    row = next(line for line in text.splitlines() if f"| `{option}` | `{choices[0]}`, " in line)
    assert re.findall(r"`([\w-]+)`", row.rpartition(f"`{option}`")[2]) == list(choices)


def test_server_optimizers_are_those_of_the_code():
    text = sections(ALGORITHMS_PAGE)["Server optimizers"]
    assert set(re.findall(r"^\| `(fed\w+)`", text, re.MULTILINE)) == set(OPTIMIZERS)


@every_page
def test_options_named_anywhere_exist(page):
    known = {name for name, field in Config.model_fields.items() if name != "name"}
    given = {"algorithm": ALGORITHMS, "ssl": METHODS}
    for section, key in re.findall(r"`(\w+)\.(\w+)(?:=[^`]*)?`", page.read_text()):
        if section not in known or section in ("data", "evaluation") or key in ("pem", "key"):
            continue  # a Python name, a source's own option, or a file
        if section in given:
            options = [registry.Options for registry in given[section].values()]
        else:
            options = [type(getattr(Config(), section))]
        assert any(key in each.model_fields for each in options), f"{section}.{key}"


# Adding an algorithm


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", ADDING_PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def adding(tmp_path, monkeypatch):
    """The page's files, where Python finds them; what they register is forgotten afterwards."""
    algorithm, script, test, method, source, backbone, transport = blocks()
    (tmp_path / "mutual_ssfl.py").write_text(algorithm)
    (tmp_path / "script.py").write_text(script.replace('"server.rounds=2"', f"*{TINY!r}"))
    (tmp_path / "test_mutual_ssfl.py").write_text(test)
    (tmp_path / "align_uniform.py").write_text(method)
    (tmp_path / "arrays.py").write_text(source)
    (tmp_path / "patches.py").write_text(backbone)
    (tmp_path / "processes.py").write_text(transport)
    for registry in (ALGORITHMS, METHODS, SOURCES, BACKBONES, COMMUNICATORS):
        monkeypatch.setattr(registry, "_targets", registry.targets)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("mutual_ssfl", "align_uniform", "arrays", "patches", "processes"):
        sys.modules.pop(name, None)


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_new_algorithm_is_under_40_lines():
    assert len(blocks()[0].splitlines()) < 40


def test_the_new_algorithm_trains_from_python(adding):
    found = load(adding / "script.py")
    assert found.run.checkpoint().rounds == 2
    assert found.config.algorithm.weight == 0.5
    assert found.encoder.features == found.run.global_encoder().features


def test_the_new_algorithm_trains_from_the_command_line(adding):
    settings = [word for setting in TINY for word in ("--set", setting)]
    chosen = ["--set", "algorithm.name=mutual-ssfl", "--out", "here"]
    done = typed("train", "demo", *settings, *chosen, plugins="mutual_ssfl, align_uniform")
    assert done.returncode == 0, done.stderr
    assert (adding / "here" / "final.json").is_file()


def test_an_installed_package_needs_no_more_than_its_entry_point(adding):
    text = sections(ADDING_PAGE)["Registering it"]
    toml = re.search(r"^    (\[project\.entry-points.*)\n    (.*)$", text, re.MULTILINE)
    (group,) = tomllib.loads("\n".join(toml.groups()))["project"]["entry-points"].items()
    about = adding / "installed" / "mutual-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mutual\nVersion: 1.0\n")
    lines = [f"{name} = {module}" for name, module in group[1].items()]
    (about / "entry_points.txt").write_text("\n".join([f"[{group[0]}]", *lines]))
    (adding / "mutual_ssfl.py").rename(adding / "installed" / "mutual_ssfl.py")
    done = typed("config", "demo", "--set", "algorithm.name=mutual-ssfl", path=about.parent)
    assert done.returncode == 0, done.stderr
    assert 'name = "mutual-ssfl"' in done.stdout


def test_a_plug_in_that_cannot_be_imported_is_named_beside_the_name_nobody_knows(adding):
    (adding / "clumsy.py").write_text("1 / 0")
    (adding / "script.py").write_text("raise SystemExit('give a folder')")
    plugins = "clumsy,script,nowhere"
    done = typed("config", "demo", "--set", "algorithm.name=mutual", plugins=plugins)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    for words in (
        "unknown algorithm 'mutual'",
        "clumsy could not be imported (ZeroDivisionError",
        "script could not be imported (SystemExit: give a folder",
        "nowhere could not be imported (ModuleNotFoundError",
    ):
        assert words in done.stderr
    done = typed("config", "demo", plugins="clumsy")  # nothing is imported that nobody asks for
    assert done.returncode == 0, done.stderr


def typed(*words: str, plugins: str = "", path: Path | None = None) -> Any:
    """What `ssfl` answers, as installed: its path is without the working directory."""
    places = [] if path is None else [str(path)]
    source = os.environ.get("PYTHONPATH")
    home = os.environ | {
        "SSFL_PLUGINS": plugins,
        "PYTHONPATH": os.pathsep.join([*places, *([source] if source else [])]),
        "PYTHONSAFEPATH": "1",
    }
    command = [sys.executable, "-m", "ssfl", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=home)


@pytest.mark.parametrize(
    "name", ["test_with_weight_0_the_models_do_not_hear_each_other", "test_with_a_weight_both_do"]
)
def test_the_pages_own_tests_pass(adding, tmp_path, name):
    getattr(load(adding / "test_mutual_ssfl.py"), name)(tmp_path)


def test_what_an_algorithm_may_say_is_what_its_base_class_has():
    text = sections(ADDING_PAGE)["What an algorithm may say"]
    told = dict(re.findall(r"^\| `(\w+)(?:\(.*?\))?` \| (.+?) \|", text, re.MULTILINE))
    has = {name for name in {*vars(Algorithm), *Algorithm.__annotations__} if name[0] != "_"}
    assert told.keys() == has
    for name, default in told.items():
        value = getattr(Algorithm, name, None)
        if value is not None and not callable(value):
            assert eval(default.strip("`")) == value, name


def test_the_new_method_trains_with_another_algorithm_and_its_loss_is_its_equation(adding):
    import_module("align_uniform")
    heads = [setting for setting in TINY if "predictor" not in setting]
    chosen = ["ssl.method=align-uniform", "ssl.weight=0.5", "algorithm.name=per-ssfl"]
    run = train(load_config("demo", [*heads, *chosen]), out=adding / "run")
    assert run.checkpoint().rounds == 2
    method = METHODS["align-uniform"](run.global_encoder().backbone, run.config.ssl)
    z = np.random.default_rng(0).normal(size=(2, 5, 3))
    found = method.loss(Outputs(torch.from_numpy(z), torch.from_numpy(z)))
    z /= np.linalg.norm(z, axis=-1, keepdims=True)
    pairs = [(n, m) for n in range(5) for m in range(n + 1, 5)]
    spread = [
        np.log(np.mean([np.exp(-2 * np.sum((one[n] - one[m]) ** 2)) for n, m in pairs]))
        for one in z
    ]
    together = np.mean(np.sum((z[0] - z[1]) ** 2, axis=-1))
    assert float(found) == pytest.approx(together + 0.5 * np.mean(spread), rel=1e-5)


def test_the_new_source_is_trained_on_and_found_again_from_another_folder(adding, monkeypatch):
    import_module("arrays")
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (200, 8, 8, 3), dtype=np.uint8)
    np.savez(adding / "scans.npz", pixels=pixels, labels=np.arange(200) % 4)
    settings = [setting for setting in TINY if not setting.startswith("data.")]
    config = load_config("demo", [*settings, "data.source=arrays", "data.path=scans.npz"])
    run = train(config, out=adding / "run")
    assert (run.facts["train_images"], run.facts["test_images"]) == (160, 40)
    assert run.facts["classes"] == ["0", "1", "2", "3"]
    assert "knn_mean" in run.final
    (adding / "elsewhere").mkdir()
    monkeypatch.chdir(adding / "elsewhere")
    assert evaluate(Run(run.path), ["knn"])["global_knn"].value == pytest.approx(
        run.final["knn_global"]
    )


def test_the_new_source_says_what_is_missing_and_leaves_no_run(adding):
    import_module("arrays")
    settings = [setting for setting in TINY if not setting.startswith("data.")]
    config = load_config("demo", [*settings, "data.source=arrays", "data.path=none.npz"])
    with pytest.raises(DataError, match=r"there is no file none\.npz"):
        train(config, out=adding / "run")
    assert not (adding / "run").exists()


def test_the_new_backbone_learns_and_is_found_again_in_its_run(adding):
    import_module("patches")
    chosen = ["model.backbone=patches", "model.width=16"]
    run = train(load_config("demo", [*TINY, *chosen]), out=adding / "run")
    encoder = run.global_encoder()
    assert encoder.features == 16
    assert encoder.backbone.patches.weight.shape == (16, 1, 4, 4)
    assert run.final["effective_rank"] > 1


def test_the_new_transport_gives_what_local_gives_bit_for_bit(adding):
    import_module("processes")
    config = load_config("demo", [*TINY, "algorithm.name=per-ssfl"])
    one, other = (train(config, out=adding / comm, comm=comm) for comm in ("processes", "local"))
    assert same_bits(outcome(one), outcome(other))


def test_what_a_method_may_say_is_what_its_base_class_has():
    text = sections(ADDING_PAGE)["An SSL method"]
    told = dict(re.findall(r"^\| `(\w+)(?:\(.*?\))?` \| (.+?) \|", text, re.MULTILINE))
    has = {name for name in {*vars(Method), *Method.__annotations__} if name[0] != "_"}
    assert told.keys() == has - {"each", "project", "see_views_in_one_pass"}
    for name, default in told.items():
        value = getattr(Method, name, None)
        if value is not None and not callable(value):
            assert default.strip("`") == ("ViewWishes()" if name == "wishes" else str(value)), name


def test_the_pages_name_no_class_that_is_gone():
    import ssfl.federation.client
    import ssfl.federation.server
    import ssfl.federation.trainer

    text = (ROOT / "docs" / "architecture.md").read_text()
    for module, name in (
        (ssfl.federation.server, "Server"),
        (ssfl.federation.client, "Client"),
        (ssfl.federation.trainer, "Trainer"),
    ):
        assert hasattr(module, name)
        assert f"`{name}`" in text
    assert f"`{Aggregator.__name__}`" in text
