"""Every knob once: described, checked with a sentence that helps, and back from TOML unchanged."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from ssfl.algorithms import ALGORITHMS
from ssfl.config import CHOICES, Config, load_config, parse, to_toml
from ssfl.data.sources import SOURCES
from ssfl.errors import ConfigError
from ssfl.recipes import recipes
from ssfl.ssl import METHODS
from tiny import tables


def again(config: Config) -> Config:
    """What is read back of what was written."""
    return parse(tomllib.loads(to_toml(config)))


@pytest.mark.parametrize("recipe", recipes())
def test_every_recipe_comes_back_from_toml_as_it_was(recipe: str, tmp_path: Path) -> None:
    config = load_config(recipe)
    assert config.name == recipe
    assert again(config) == config
    described = tmp_path / "described.toml"
    described.write_text(to_toml(config, described=True), encoding="utf-8")
    assert load_config(described) == config


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_with_every_method_comes_back_from_toml(
    algorithm: str, method: str
) -> None:
    config = parse({"algorithm": {"name": algorithm}, "ssl": {"method": method}})
    assert config.algorithm.name == algorithm
    assert config.ssl.method == method
    assert again(config) == config
    assert type(again(config).ssl) is METHODS[method].Options


@pytest.mark.parametrize("source", SOURCES)
def test_every_data_source_comes_back_from_toml(source: str) -> None:
    config = parse({"data": {"source": source}})
    assert again(config) == config
    assert type(again(config).data) is SOURCES[source].Options


@pytest.mark.parametrize("path", ['a "b" \\ c', "münchen/Θ", "😀\x7f\t'", "~/../x=[1]#"])
def test_odd_paths_come_back_from_toml(path: str) -> None:
    config = parse({"data": {"source": "folder", "path": path}})
    assert config.data.path == Path(path)  # type: ignore[attr-defined]
    assert again(config) == config


def test_extreme_numbers_come_back_from_toml() -> None:
    for rate in (1e-300, 3.3333333333333335e-05, 1e22, 0.1 + 0.2):
        config = parse({"local": {"lr": rate}, "views": {"crop_scale": [0.1, 1], "flip": 0}})
        assert again(config) == config


def sections() -> Iterator[type[BaseModel]]:
    """Every section there can be, whatever is chosen."""
    for name, field in Config.model_fields.items():
        if name in CHOICES:
            yield from (CHOICES[name][1][choice].Options for choice in CHOICES[name][1])
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield field.annotation


def test_no_field_of_any_section_is_without_a_description() -> None:
    choosers = {key for key, _ in CHOICES.values()}  # described by listing the choices
    seen = 0
    for section in sections():
        assert section.__doc__, section
        for name, field in section.model_fields.items():
            literal_choice = name in choosers and section not in (Config,)
            assert field.description or literal_choice, f"{section.__name__}.{name}"
            seen += 1
    assert seen > 100


def test_a_described_configuration_explains_every_key_it_prints() -> None:
    for method in METHODS:
        lines = to_toml(parse({"ssl": {"method": method}}), described=True).splitlines()
        for before, line in zip(["", *lines], lines, strict=False):
            if line and not line.startswith("#"):
                assert before.startswith("# "), line
    assert "# One of simsiam, simclr, byol" in "\n".join(lines)


# Settings


@pytest.mark.parametrize(
    ("section", "table"),
    [
        ("algorithm", {"name": "per-ssfl", "weight": 0.5}),
        ("ssl", {"method": "byol"}),
        ("data", {"source": "digits"}),
    ],
)
def test_a_configuration_made_in_python_has_the_options_of_what_it_chooses(
    section: str, table: dict[str, Any]
) -> None:
    made = Config(**{section: table})
    assert made == parse({section: table})
    (chooser, registry), options = CHOICES[section], getattr(made, section)
    assert type(options) is registry[table[chooser]].Options
    with pytest.raises(ConfigError, match=f"unknown key {section}.typo"):
        Config(**{section: {**table, "typo": 1}})


def test_a_setting_is_laid_over_the_recipe() -> None:
    config = load_config("demo", ["local.lr=0.03", "seed = 7", "views.crop_scale=[0.5, 1.0]"])
    assert (config.local.lr, config.seed) == (0.03, 7)
    assert config.views.crop_scale == (0.5, 1.0)
    assert config.partition == load_config("demo").partition


def test_a_setting_that_looks_like_a_date_is_a_name() -> None:
    assert load_config("demo", ["name=2024-01-02"]).name == "2024-01-02"
    assert load_config("demo", ['name="2024"']).name == "2024"


def test_changing_a_choice_drops_the_options_of_the_other() -> None:
    config = load_config("demo", ["ssl.method=simclr", "data.source=digits"])
    assert config.ssl == METHODS["simclr"].Options()
    assert config.data == SOURCES["digits"].Options()


def test_changing_a_choice_and_its_options_works_in_either_order() -> None:
    settings = ["ssl.method=simclr", "ssl.temperature=0.5"]
    for order in (settings, settings[::-1]):
        config = load_config("demo", order)
        assert config.ssl == METHODS["simclr"].Options(temperature=0.5)


def test_choosing_what_is_chosen_already_keeps_its_options(tmp_path: Path) -> None:
    demo = load_config("demo")
    assert load_config("demo", ["ssl.method=simsiam"]).ssl == demo.ssl
    path = tmp_path / "mine.toml"
    path.write_text("[ssl]\nprojector_width = 32\n")  # simsiam, by default
    more = tmp_path / "more.toml"
    more.write_text('extends = "mine.toml"\n[ssl]\nmethod = "simsiam"\n')
    for config in (load_config(path, ["ssl.method=simsiam"]), load_config(more)):
        assert config.ssl.projector_width == 32  # type: ignore[attr-defined]


def test_a_file_may_extend_a_recipe_by_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('extends = "demo"\nname = "mine"\n[local]\nlr = 0.01\n')
    config, demo = load_config(path), load_config("demo")
    assert (config.name, config.local.lr) == ("mine", 0.01)
    assert config.local.batch == demo.local.batch
    assert config.ssl == demo.ssl


def test_the_papers_figures_are_of_the_experiment_that_it_made(tmp_path: Path) -> None:
    assert load_config("ssfl-noniid").paper.figures() == {"global_federated_linear": 0.847}
    assert load_config("ssfl-noniid", ["seed=1"]).paper == load_config("ssfl-noniid").paper
    (tmp_path / "mine.toml").write_text('extends = "ssfl-noniid"\n[local]\nlr = 0.01\n')
    for other in (
        load_config("byol"),
        load_config("ssfl-k100"),
        load_config("ssfl-noniid", ["ssl.method=byol"]),
        load_config(tmp_path / "mine.toml"),
    ):
        assert other.paper.figures() == {}
    landmarks = load_config("gld23k-per-ssfl").paper.figures()
    assert landmarks == {"personal_knn": 0.6371, "personal_linear": 0.4467}


def test_what_a_file_extends_is_looked_for_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "base.toml").write_text('extends = "demo"\n[local]\nlr = 0.01\n')
    (tmp_path / "mine" / "more.toml").write_text('extends = "../base.toml"\nseed = 5\n')
    monkeypatch.chdir(tmp_path / "mine")
    for path in ("more.toml", tmp_path / "mine" / "more.toml", "../mine/more.toml"):
        config = load_config(path)
        assert (config.seed, config.local.lr) == (5, 0.01)
    (tmp_path / "base.toml").write_text('extends = "mine/more.toml"')
    with pytest.raises(ConfigError, match="extends itself"):
        load_config("more.toml")


def test_tables_are_taken_like_a_file_and_left_as_they_are() -> None:
    tables = {"extends": "demo", "local": {"lr": 0.01}}
    config = load_config(tables, "local.lr=0.02")  # one setting needs no list
    assert config.local.lr == 0.02
    assert config.ssl == load_config("demo").ssl
    assert tables == {"extends": "demo", "local": {"lr": 0.01}}


@pytest.mark.parametrize("optimizer", ["fedadam", "fedyogi", "fedadagrad"])
def test_an_adaptive_server_takes_short_steps_unless_told_otherwise(optimizer: str) -> None:
    config = load_config("demo", [f"server.optimizer={optimizer}"])
    assert config.server.lr == 0.01
    assert again(config) == config
    assert load_config("demo", [f"server.optimizer={optimizer}", "server.lr=1"]).server.lr == 1
    assert load_config("demo").server.lr == 1


# Bad input, in the order: each names its key, what was given and what is allowed


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown key": (
        {"local": {"lrr": 1}},
        r"unknown key local\.lrr: known here are epochs, .*lr",
    ),
    "a key without its section": (
        {"lr": 0.1},
        r"unknown key lr: did you mean local\.lr or server\.lr",
    ),
    "steps and passes": (
        {"local": {"steps": 9, "epochs": 2}},
        r"local: a round of 9 steps has no number of passes: set local\.epochs = 1, or local\.s",
    ),
    "an unknown section": ({"lokal": {}}, r"unknown key lokal: known here are version, .*local"),
    "an unknown key of a choice": (
        {"ssl": {"width": 1}},
        r"unknown key ssl\.width: .*projector_wid",
    ),
    "a negative rate": ({"local": {"lr": -0.1}}, r"local\.lr = -0\.1: it should be greater than 0"),
    "a number without end": (
        {"partition": {"alpha": float("inf")}},
        r"partition\.alpha = inf: it should be a finite number",
    ),
    "a word for a number": (
        {"server": {"rounds": "many"}},
        r"server\.rounds = 'many': it should be",
    ),
    "a value not on the list": (
        {"server": {"optimizer": "sgd"}},
        r"server\.optimizer = 'sgd': it should be 'fedavg'.*",
    ),
    "more clients per round than clients": (
        {"server": {"clients_per_round": 11}},
        r"server\.clients_per_round is 11, but there are only 4 clients \(partition\.clients\)",
    ),
    "another version": ({"version": 2}, r"this configuration is of version 2, .* version 1"),
    "an unknown algorithm": (
        {"algorithm": {"name": "best"}},
        r"unknown algorithm 'best': choose one of .*per-ssfl",
    ),
    "an unknown source": ({"data": {"source": ["x"]}}, r"unknown data source .*: choose one of"),
    "a value for a section": ({"server": 3}, r"^server is a table of options, not 3$"),
    "a value for a section with a choice": ({"data": 3}, r"data is a table of options, not 3"),
    "a word for a list": (
        {"run": {"trackers": "mlflow"}},
        r"run\.trackers = 'mlflow': it should be a list, e\.g\. \[\"mlflow\"\]",
    ),
    "numbers for a list": (
        {"data": {"source": "folder", "window": "0,4095"}},
        r"data\.window = '0,4095': it should be a list, e\.g\. \[0,4095\]$",
    ),
    "too short a list": (
        {"data": {"source": "folder", "window": [0]}},
        r"data\.window = \[0\]: it has too few values",
    ),
    "too long a list": (
        {"data": {"source": "folder", "window": [0, 1, 2]}},
        r"data\.window = \[0, 1, 2\]: it has more values than 2",
    ),
    "two rules for what an update counts for": (
        {"server": {"aggregation": "l-dawa", "optimizer": "fednova"}},
        r"'l-dawa' and optimizer 'fednova' .*: choose one of them",
    ),
    "a momentum that FedAvg does not have": (
        {"server": {"momentum": 0.5}},
        r"'fedavg' has no momentum: set server\.optimizer to 'fedavgm' or .* server\.momentum out",
    ),
    "a tau that FedAvgM does not have": (
        {"server": {"optimizer": "fedavgm", "tau": 0.1}},
        r"'fedavgm' has no tau: set server\.optimizer to 'fedadam' or .*, or leave server\.tau out",
    ),
    "a pull without FedProx": (
        {"local": {"proximal": 0.1}},
        r"'none' has no proximal: set local\.correction = 'fedprox', or leave local\.proximal out",
    ),
    "a discount for what is dropped": (
        {"server": {"deadline": 9, "staleness": 1}},
        r"dropped: set server\.late = 'discount', or leave server\.staleness out",
    ),
    "spares where all are asked": (
        {"server": {"oversample": 0.5}},
        r"none is left to stand in .*: set server\.clients_per_round, or server\.oversample = 0",
    ),
    "a crop out of order": (
        {"views": {"crop_scale": [1, 0.2]}},
        r"views: crop_scale must be two pos",
    ),
    "a solarisation for each of three views": (
        {"views": {"solarize": [0.1, 0.2, 0.3]}},
        r"views\.solarize has 3 numbers: give one for all views, or one for each of the 2 that",
    ),
    "a solarisation for no view": ({"views": {"solarize": []}}, r"views\.solarize has 0 numbers"),
    "a rate for a predictor that is not there": (
        {"ssl": {"method": "simclr"}, "local": {"predictor_rate": "constant"}},
        r"ssl\.method 'simclr' has no predictor .* local\.predictor_rate = 'scheduled'",
    ),
    "statistics that are not there": (
        {"model": {"norm": "group"}, "local": {"freeze_statistics": 0.5}},
        r"group norm keeps no statistics .* local\.freeze_statistics = 1, or model\.norm = 'batch'",
    ),
    "statistics that nobody shares": (
        {"local": {"batch_norm": "fedbn", "freeze_statistics": 0.5}},
        r"set local\.freeze_statistics = 1, or local\.batch_norm = 'shared'",
    ),
    "a correction of what is not sent": (
        {"algorithm": {"name": "local-only"}, "local": {"correction": "scaffold"}},
        r"'local-only' send nothing, .* local\.correction .* leave it at 'none'",
    ),
    "a rule for what is not sent": (
        {"algorithm": {"name": "local-only"}, "server": {"optimizer": "fedadam"}},
        r"'local-only' send nothing, .* server\.optimizer .* leave it at 'fedavg'",
    ),
    "momentum of another pace": (
        {"local": {"keep_momentum": True, "freeze_statistics": 0.5}},
        r"set local\.keep_momentum = false, or local\.freeze_statistics = 1",
    ),
    "an inner step in pieces": (
        {"algorithm": {"name": "maml-ssfl"}, "local": {"batch": 32, "micro_batch": 8}},
        r"algorithm 'maml-ssfl' needs its batches whole: set local\.micro_batch = 0",
    ),
    "a name that is no name": ({"name": "../x"}, r"cannot be called '\.\./x': use letters, "),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_value_is_refused_in_one_sentence(kind: str) -> None:
    changes, sentence = BAD[kind]
    with pytest.raises(ConfigError, match=sentence) as caught:
        parse(tables(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("local.lr", r"--set local\.lr: write it as section\.key=value"),
        ("=3", r"--set =3: write it as"),
        ("seed.x=3", r"unknown|seed"),
        ("name.x=3", r"--set name\.x=3: name is not a section"),
        ("local=3", r"local is a table of options, not 3"),
        ("name=2024", r"name = 2024: it should be text, in quotes: 'name=\"2024\"'"),
        ("views.jitter=[.4,.4,.4,.1]", r"a list, in which numbers begin with a digit"),
        ("run.trackers=[mlflow]", r'a list, in which .* and words are in "quotes"$'),
    ],
)
def test_a_bad_setting_is_refused_in_one_sentence(setting: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_config("demo", [setting])
    assert "\n" not in str(caught.value)


def test_bad_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    with pytest.raises(ConfigError, match="there is no file"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"there is no recipe 'dmeo' \(known: .*demo"):
        load_config("dmeo")
    path.write_text("[local\nlr = 1")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_config(path)
    path.write_bytes(b"name = '\xff\xfe'")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(path)
    path.write_text(f'extends = "{path}"')
    with pytest.raises(ConfigError, match="extends itself"):
        load_config(path)
    path.write_text("extends = 3")
    with pytest.raises(ConfigError, match="there is no recipe '3'"):
        load_config(path)


def test_what_choices_allow_each_other_is_not_refused() -> None:
    parse({"views": {"solarize": [0.1]}})
    parse({"views": {"solarize": [0.1, 0.2]}, "local": {"predictor_rate": "constant"}})
    parse({"algorithm": {"name": "maml-ssfl"}, "local": {"batch": 32, "micro_batch": 32}})


def test_a_configuration_cannot_be_changed_once_made() -> None:
    config = load_config("demo")
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 5  # type: ignore[misc]
