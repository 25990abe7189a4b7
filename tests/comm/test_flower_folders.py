"""The way docs/deploying.md tells it: the commands, a coordinator without an image, and sites that
have nothing but folders. Flower's own programs are left out here; `test_flower` has them."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

pytest.importorskip("flwr")

import pretend_grid
from flwr.app import Message
from pretend_grid import PretendGrid

from ssfl.cli import app
from ssfl.comm import COMMUNICATORS
from ssfl.comm.flower.host import SiteKeeper, build_hosts, load_site
from ssfl.comm.flower.recipe import shared_recipe
from ssfl.comm.flower.records import read_replies, write_replies
from ssfl.comm.flower.serve import check_keys
from ssfl.comm.flower.site import SiteAnswers
from ssfl.comm.local import LocalCommunicator
from ssfl.config import load_config, to_toml
from ssfl.errors import ConfigError
from ssfl.experiment import train
from ssfl.federation.messages import Task, TaskKind
from ssfl.run import Run
from ssfl.use import load_encoder

OURS = """
name = "ours"

[data]
source = "sites"
image_size = 16

[model]
backbone = "small"
width = 4

[ssl]
method = "simsiam"
projector_width = 16
predictor_width = 8

[algorithm]
name = "per-ssfl"

[local]
batch = 8

[server]
rounds = 2
"""


def ssfl_command(*arguments):
    done = CliRunner().invoke(app, [str(part) for part in arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def paint(folder, count, generator):
    folder.mkdir(parents=True)
    for index in range(count):
        pixels = torch.randint(0, 256, (20, 24, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{index}.png")


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """A coordinator's finished run and its two sites' folders."""
    home, generator = tmp_path_factory.mktemp("folders"), torch.Generator().manual_seed(1)
    (home / "ours.toml").write_text(OURS)
    keys = home / "keys"
    ssfl_command("certs", keys, "--host", "192.0.2.7")
    paint(home / "scans", 9, generator)
    paint(home / "ward" / "ct", 12, generator)
    paint(home / "ward" / "mri", 17, generator)
    for name, clients, data in (("first", "0", "scans"), ("second", "1,2", "ward")):
        said = ssfl_command(
            *("site", "init", home / name, "--server", "192.0.2.7:9092", "--ca", keys / "ca.pem"),
            *("--recipe", home / "ours.toml", "--clients", clients, "--data", home / data),
        )
        assert str(home / name / "site.pub") in said.replace("\n", "")
        shutil.copy(home / name / "site.pub", keys / "sites" / f"{name}.pub")
    check_keys(keys)
    return home, play(home)


def play(home, out="run", spoil=lambda reply: reply):
    """Train over both sites; the first sends what `spoil` makes of its replies."""
    nodes = {}
    for number, name in enumerate(("first", "second"), start=1):
        _, config = load_site(home / name)
        hosts = build_hosts(config)
        keeper = SiteKeeper(home / name, config, hosts)
        nodes[f"n{number}"] = SiteAnswers(LocalCommunicator(hosts), shared_recipe(config), keeper)
    honest = nodes["n1"]

    def first(message):
        answer = honest(message)
        if message.metadata.message_type == "query":
            return answer
        spoilt = [spoil(reply) for reply in read_replies(answer.content)]
        return Message(write_replies(spoilt), reply_to=message)

    pretend_grid.grids.append(PretendGrid(**nodes | {"n1": first}))
    COMMUNICATORS.register("pretend", "pretend_grid:connect")
    try:
        return train(load_config(home / "ours.toml"), out=home / out, comm="pretend")
    finally:
        del COMMUNICATORS._targets["pretend"]


def test_a_coordinator_without_an_image_trains_what_its_sites_have(federation):
    _, run = federation
    rounds = [row for row in run.metrics if row["kind"] == "round"]
    assert [(row["accepted"], row["images"]) for row in rounds] == [(3, 9 + 12 + 17)] * 2
    assert run.facts["train_images"] == 0
    assert all(row["update_norm"] > 0 for row in rounds)
    assert not (run.path / "clients").exists()


def test_a_site_cannot_break_the_record_by_what_it_calls_its_figures(federation):
    """Nor by claiming that it judged its encoder on no image."""

    def lie(reply):
        figures = {"round": math.nan, "kind": 1.0, "seconds": math.inf, "knn": 0.5}
        lies = reply.samples if reply.kind is TaskKind.TRAIN else 0
        return replace(reply, metrics=reply.metrics | figures, samples=lies)

    home, _ = federation
    run = play(home, "lied-to", lie)
    rounds = [row for row in run.metrics if row["kind"] == "round"]
    assert [row["round"] for row in rounds] == [0, 1]
    assert [row["accepted"] for row in rounds] == [3, 3]
    assert math.isfinite(run.final["seconds"])
    assert "knn_mean" not in run.final


def test_sites_judge_their_encoders_at_home_and_send_the_figures(federation):
    _, run = federation
    (row,) = [row for row in run.metrics if row["kind"] == "evaluation"]
    assert set(row["clients"]) == {"0", "1", "2"}
    assert all(figures["effective_rank"] > 0 for figures in row["clients"].values())


def test_afterwards_a_site_has_theta_and_its_own_encoders(federation):
    home, run = federation
    theirs = Run(home / "second" / "runs" / pretend_grid.RUN)
    theta = run.checkpoint().tensors["theta"]
    assert torch.equal(theirs.checkpoint().tensors["theta"], theta)
    images = torch.rand(2, 3, 16, 16)
    features = [theirs.personal_encoder(client)(images) for client in (1, 2)]
    assert not torch.equal(*features)
    assert not torch.equal(theirs.global_encoder()(images), features[0])


@pytest.fixture(params=["per-ssfl", "la-ssfl", "fedbn"])
def ward(request, tmp_path):
    """A site with clients 3 and 2 after a round and an evaluation: its run, and the encoder that
    each client was judged by."""
    paint(tmp_path / "ward" / "ct", 12, torch.Generator().manual_seed(1))
    paint(tmp_path / "ward" / "mri", 17, torch.Generator().manual_seed(2))
    settings = {
        "per-ssfl": ["algorithm.name=per-ssfl"],
        "la-ssfl": ["algorithm.name=la-ssfl"],
        "fedbn": ["algorithm.name=global-ssfl", "local.batch_norm=fedbn"],
    }[request.param]
    (tmp_path / "ours.toml").write_text(OURS)
    (tmp_path / "ca.pem").touch()
    ssfl_command(
        *("site", "init", tmp_path / "site", "--server", "192.0.2.7:9092", "--clients", "3,2"),
        *("--ca", tmp_path / "ca.pem", "--recipe", tmp_path / "ours.toml"),
        *("--data", tmp_path / "ward"),
        *(word for setting in settings for word in ("--set", setting)),
    )
    _, config = load_site(tmp_path / "site")
    (host,) = hosts = build_hosts(config)
    keeper = SiteKeeper(tmp_path / "site", config, hosts)
    keeper.begin(pretend_grid.RUN)
    theta = host.trainer.models.global_.flat.shared.clone()
    for round_, kind in enumerate((TaskKind.TRAIN, TaskKind.EVALUATE)):
        task = Task(kind, round_, theta, host.trainer.layout.digest, rate=0.1, progress=round_ / 2)
        keeper.prepare(task)
        replies = LocalCommunicator(hosts).exchange(task, host.clients())
        assert [reply.failure for reply in replies] == [None, None]
        keeper.keep(task)
    judged_by = {}
    for client in host.clients():
        state = host.store.get(client, before=task.round)
        mine = host.trainer.encoder(client, task, state, host.data.train_indices(client))
        judged_by[client] = {name: value.clone() for name, value in mine.state_dict().items()}
    return Run(tmp_path / "site" / "runs" / pretend_grid.RUN), judged_by


def test_a_site_can_use_the_encoders_that_its_own_clients_were_judged_by(ward, tmp_path):
    run, judged_by = ward
    assert list(judged_by) == [3, 2]
    for client, expected in judged_by.items():
        ssfl_command("export", run.path, "--client", client, "--out", tmp_path / "one.safetensors")
        for encoder in (load_encoder(run, client), load_encoder(tmp_path / "one.safetensors")):
            assert encoder.mean.flatten().tolist() == [0.5] * 3  # the recipe's, not the folder's
            found = encoder.cpu().backbone.state_dict()
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in found)
    assert any(not torch.equal(judged_by[2][name], judged_by[3][name]) for name in judged_by[2])
    with pytest.raises(ConfigError, match="there is no client 0: this run's are 3, 2"):
        load_encoder(run, 0)


def test_a_site_can_judge_its_own_encoders_again(ward):
    run, _ = ward
    ssfl_command("evaluate", run.path)
    health = json.loads((run.path / "evaluation.json").read_text())["health"]
    assert set(health) == {"global", "3", "2"}


@pytest.mark.parametrize("ward", ["per-ssfl"], indirect=True)
def test_a_sites_page_shows_its_own_clients_images(ward):
    run, _ = ward
    ssfl_command("report", run.path)
    page = (run.path / "report.html").read_text()
    map_ = page.partition("Features by client")[2].partition("</svg>")[0]
    assert map_.count("<circle") == 12 + 17


def test_a_coordinator_has_no_encoder_that_is_made_from_images(federation):
    home, run = federation
    config = load_config(run.path / "config.toml", ["algorithm.name=la-ssfl"])
    shutil.copytree(run.path, home / "adapted")
    (home / "adapted" / "config.toml").write_text(to_toml(config))
    with pytest.raises(ConfigError, match="client 1's images are not here"):
        load_encoder(home / "adapted", 1)


def test_a_second_init_does_not_overwrite_a_sites_key(federation):
    home, _ = federation
    done = CliRunner().invoke(
        app,
        [
            *("site", "init", str(home / "first"), "--server", "192.0.2.7:9092", "--clients", "0"),
            *("--ca", str(home / "keys" / "ca.pem"), "--recipe", str(home / "ours.toml")),
        ],
    )
    assert isinstance(done.exception, ConfigError)
    assert "exists already" in str(done.exception)
