"""The way docs/deploying.md tells it: the commands, a coordinator without an image, and sites that
have nothing but folders. Flower's own programs are left out here; `test_flower` has them."""

import html
import json
import logging
import math
import os
import re
import shutil
import socket
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
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
from ssfl.comm.flower.host import (
    SiteKeeper,
    build_hosts,
    load_site,
    unreachable,
    why_it_ended,
)
from ssfl.comm.flower.node import FROZEN
from ssfl.comm.flower.processes import Child
from ssfl.comm.flower.recipe import shared_recipe
from ssfl.comm.flower.records import read_replies, write_replies
from ssfl.comm.flower.serve import ServeOptions, check_keys, read_settings, write_settings
from ssfl.comm.flower.site import SiteAnswers
from ssfl.comm.local import LocalCommunicator
from ssfl.commands.federation import logging_apart
from ssfl.config import load_config, to_toml
from ssfl.data.decode import Reading
from ssfl.data.here import HereOptions, load_here
from ssfl.data.partition import PartitionOptions
from ssfl.data.sources.digits import DigitsOptions
from ssfl.errors import ConfigError, SSFLError
from ssfl.experiment import Experiment, Quiet
from ssfl.federation.messages import Task, TaskKind
from ssfl.protocols.judge import evaluate
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


def refused_command(*arguments):
    """What is said of a command that cannot be done."""
    done = CliRunner().invoke(app, [str(part) for part in arguments])
    assert isinstance(done.exception, SSFLError), (done.output, done.exception)
    assert "\n" not in str(done.exception)
    return str(done.exception)


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
        run = Run.create(load_config(home / "ours.toml"), home / out)
        write_settings(run.path, ServeOptions(keys=home / "keys"))
        Experiment(run, "pretend", Quiet()).play()
        return run
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


def test_a_coordinator_is_warned_where_a_sites_encoder_has_collapsed(federation):
    def collapse(reply):
        if reply.kind is TaskKind.TRAIN:
            return reply
        return replace(reply, metrics=reply.metrics | {"std_ratio": 0.01})

    home, healthy = federation
    assert "warning" not in healthy.final
    run = play(home, "collapsed", collapse)
    assert run.final["warning"].startswith("client 0: features look collapsed: their spread is 0.0")
    ssfl_command("report", run.path)
    assert "client 0: features look collapsed" in (run.path / "report.html").read_text()


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
    ssfl_command("certs", tmp_path / "keys")
    ssfl_command(
        *("site", "init", tmp_path / "site", "--server", "192.0.2.7:9092", "--clients", "3,2"),
        *("--ca", tmp_path / "keys" / "ca.pem", "--recipe", tmp_path / "ours.toml"),
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


def test_a_site_is_told_of_images_that_could_not_be_read(federation, tmp_path, caplog):
    home, _ = federation
    scans = shutil.copytree(home / "ward", tmp_path / "ward")
    (scans / "mri" / "0.png").write_bytes(b"no image")
    _, config = load_site(home / "second", scans)
    (host,) = build_hosts(config)
    assert [host.data.size(client) for client in host.clients()] == [12, 16]
    told = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in told] == [
        f"1 of 29 images in {scans} could not be read: mri/0.png (not a readable image)"
    ]


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
    assert f"<h1>{run.config.name}</h1>" in page
    assert "A site's clients 3, 2 trained" in html.unescape(page)
    assert "It ran for 1 of 2 rounds of one local epoch, on a small network" in page
    ssfl_command("evaluate", run.path)
    ssfl_command("report", run.path)
    page = (run.path / "report.html").read_text()
    assert 'data-figure="client_rank"' in page
    assert "<td>Effective rank: dimensions in use</td>" in page


def coordinated_with(federation, folder, *settings):
    """The coordinator's run as if it had been of another configuration."""
    _, run = federation
    shutil.copytree(run.path, folder)
    config = load_config(run.path / "config.toml", settings)
    (folder / "config.toml").write_text(to_toml(config))
    return Run(folder)


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("algorithm.name=per-ssfl", "client 1's encoder is not in .*run but at its site"),
        ("algorithm.name=la-ssfl", "the images of .*run are at its sites"),
    ],
)
def test_a_coordinator_has_nobodys_own_encoder(federation, tmp_path, setting, complaint):
    run = coordinated_with(federation, tmp_path / "run", setting)
    with pytest.raises(ConfigError, match=complaint):
        load_encoder(run, 1)


@pytest.mark.parametrize("setting", ["algorithm.name=per-ssfl", "local.batch_norm=fedbn"])
def test_nor_does_it_take_theta_for_theirs_after_a_rehearsal(federation, tmp_path, setting):
    rehearsal = ("data.source=shapes", "data.train=60", "data.test=20", "data.image_size=16")
    run = coordinated_with(federation, tmp_path / "run", *rehearsal, setting)
    with pytest.raises(ConfigError, match="client 0's encoder is not in"):
        evaluate(run, ["knn"])


def test_a_coordinator_knows_its_clients_by_their_own_ids(federation, tmp_path):
    run = coordinated_with(federation, tmp_path / "run", "algorithm.name=global-ssfl")
    for row in (rows := run.metrics):
        row["took_part"] = [7, 40] if row["kind"] == "round" else []
    (run.path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    images = torch.rand(2, 3, 16, 16)
    assert torch.equal(load_encoder(run, 40)(images), run.global_encoder()(images))
    with pytest.raises(ConfigError, match="there is no client 0: this run's are 7, 40"):
        load_encoder(run, 0)


def test_a_coordinators_page_shows_what_its_sites_sent(federation):
    _, run = federation
    ssfl_command("report", run.path)
    page = (run.path / "report.html").read_text()
    assert "3 clients trained a shared encoder and one of their own each" in page
    assert "images of 16 × 16 pixels, up to 38 in a round, without using any label. It" in page
    figures = {*re.findall('data-figure="(.*?)"', page)}
    assert {"loss", "movement", "client_rank", "timing"} <= figures
    assert "<td>Effective rank: dimensions in use</td>" in page
    assert not {"sizes", "tsne_client"} & figures


def test_a_coordinator_that_is_asked_to_evaluate_says_where_the_images_and_figures_are(federation):
    _, run = federation
    refused = refused_command("evaluate", run.path)
    assert f"the images of {run.path} are at its sites" in refused
    assert f"`ssfl report {run.path}`" in refused
    assert not (run.path / "evaluation.json").exists()


def test_what_sites_train_is_not_trained_by_one_process(federation, tmp_path):
    home, run = federation
    told = refused_command("train", home / "ours.toml", "--out", tmp_path / "new")
    assert "`ssfl serve`" in told
    assert "`ssfl site start`" in told
    assert not (tmp_path / "new").exists()
    assert f"go on with `ssfl serve {run.path}`" in refused_command("train", "--resume", run.path)
    site = home / "first"
    told = refused_command("train", "--resume", site / "runs" / pretend_grid.RUN)
    assert f"go on with `ssfl site start {site}`" in told
    (run.path / "serve.json").rename(tmp_path / "serve.json")
    try:  # neither is one that never got so far as to be served
        assert "`ssfl serve`" in refused_command("train", "--resume", run.path)
    finally:
        (tmp_path / "serve.json").rename(run.path / "serve.json")


def test_info_tells_a_coordinators_run_and_a_sites_from_others(federation, tmp_path):
    home, run = federation
    said = ssfl_command("info", run.path)
    assert "a coordinator's: its clients, their images and encoders are at sites" in said
    assert "2 of 2 rounds saved" in said
    assert "not finished" not in said
    said = ssfl_command("info", home / "second" / "runs" / pretend_grid.RUN)
    assert "a site's part of a federation: clients 1, 2" in said
    assert "2 of 2 rounds saved" in said
    assert "not finished" not in said
    longer = coordinated_with(federation, tmp_path / ("long-" * 20), "server.rounds=5")
    said = ssfl_command("info", longer.path)
    assert f"not finished: go on with `ssfl serve {longer.path}`" in said  # on one line


def test_bad_options_of_serve_are_one_sentence_and_leave_nothing(federation, tmp_path):
    home, _ = federation
    for option, value, complaint in (
        ("--port", 99999, "--port = 99999: it should be less than or equal to 65535"),
        ("--clients", -1, "--clients = -1: it should be greater than or equal to 0"),
        ("--patience", -1, "--patience = -1.0: it should be greater than 0"),
        (
            *("--host", "192.0.2.7"),
            "--host: the coordinator reaches its own SuperLink by 127.0.0.1, so listen on 0.0.0.0 "
            "(all addresses) or 127.0.0.1 (this machine alone), not on 192.0.2.7",
        ),
    ):
        told = refused_command(
            *("serve", home / "ours.toml", "--keys", home / "keys", "--out", tmp_path / "new"),
            *(option, value),
        )
        assert told == complaint
        assert not (tmp_path / "new").exists()


def test_a_port_that_is_taken_is_one_sentence_and_leaves_nothing(federation, tmp_path):
    home, _ = federation
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        told = refused_command(
            *("serve", home / "ours.toml", "--keys", home / "keys", "--out", tmp_path / "new"),
            *("--port", port),
        )
    assert told == f"port {port} is taken: stop what listens there, or choose a --port"
    assert not (tmp_path / "new").exists()


@pytest.fixture
def stopped(federation, tmp_path, monkeypatch):
    """A coordinator's run to go on with; Flower's programs stay away."""
    monkeypatch.setattr(COMMUNICATORS, "_targets", dict(COMMUNICATORS._targets))
    monkeypatch.setattr(Experiment, "play", lambda self: None)
    return coordinated_with(federation, tmp_path / "run", "server.rounds=5")


def test_how_a_run_is_served_may_change_when_it_is_gone_on_with(stopped, federation, tmp_path):
    before = read_settings(stopped.path)
    ssfl_command("serve", stopped.path)
    assert read_settings(stopped.path) == before
    shutil.copytree(federation[0] / "keys", tmp_path / "moved")
    for option, value, kept in (
        ("port", 9093, 9093),
        ("host", "127.0.0.1", "127.0.0.1"),
        ("clients", 2, 2),
        ("patience", 7, 7.0),
        ("keys", tmp_path / "moved", tmp_path / "moved"),
    ):
        ssfl_command("serve", stopped.path, f"--{option}", value)
        before = before.model_copy(update={option: kept})
        assert read_settings(stopped.path) == before  # all that was said earlier holds as well


def test_a_finished_run_waits_for_no_site(federation, monkeypatch):
    """As after a reboot, when systemd starts the coordinator again."""

    def refuse(self):
        raise AssertionError("it was played again")

    monkeypatch.setattr(Experiment, "play", refuse)
    _, run = federation
    assert f"{run.path} is finished" in ssfl_command("serve", run.path).replace("\n", "")


def test_what_a_run_trains_may_not_change_when_it_is_gone_on_with(stopped, tmp_path):
    for option, value in (("--set", "local.lr=1"), ("--out", tmp_path / "elsewhere")):
        told = refused_command("serve", stopped.path, option, value)
        assert told == f"a resumed run keeps its configuration and place: leave out {option}"


def test_options_that_cannot_be_leave_a_served_run_as_it_was(stopped, tmp_path):
    before = (stopped.path / "serve.json").read_text()
    told = refused_command("serve", stopped.path, "--port", 0)
    assert told == "--port = 0: it should be greater than or equal to 1"
    assert "has no ca.pem" in refused_command("serve", stopped.path, "--keys", tmp_path)
    with stopped.held():  # as by a coordinator at work
        assert "another process" in refused_command("serve", stopped.path, "--port", 9093)
    assert (stopped.path / "serve.json").read_text() == before


def test_what_a_coordinator_lacks_is_made_by_serving_it(stopped):
    (stopped.path / "final.json").write_text("{")
    told = refused_command("info", stopped.path)
    assert f"delete it, and `ssfl serve {stopped.path}` writes it anew" in told
    shutil.rmtree(stopped.path / "checkpoints")
    told = refused_command("export", stopped.path, "-o", stopped.path / "encoder.pt")
    assert f"no checkpoint yet: train it by `ssfl serve {stopped.path}`" in told


def test_settings_that_were_spoilt_are_said_in_a_sentence(stopped):
    settings = stopped.path / "serve.json"
    settings.write_text(settings.read_text().replace("9092", '"many"'))
    assert f"{settings}: port = 'many': " in refused_command("serve", stopped.path)
    settings.write_text("{")
    assert f"{settings} cannot be read" in refused_command("serve", stopped.path)


def test_bad_options_of_certs_are_one_sentence_and_leave_nothing(tmp_path):
    for option, value, complaint in (
        ("--days", -4, "--days -4: give a number from 1 to 36500"),
        ("--days", 0, "--days 0: give a number from 1 to 36500"),
        ("--days", 10**12, "give a number from 1 to 36500"),
        ("--host", "bad host name!", "--host bad host name!: give a name like fl.example.org"),
        ("--host", "192.0.2.7:9092", "without a port"),
        ("--host", "bücher.example", "give a name like"),
    ):
        assert complaint in refused_command("certs", tmp_path / "keys", option, value)
        assert not (tmp_path / "keys").exists()


def test_bad_options_of_a_site_are_one_sentence_and_leave_nothing(federation, tmp_path):
    home, _ = federation
    well = {
        "--server": "192.0.2.7:9092",
        "--ca": home / "keys" / "ca.pem",
        "--recipe": home / "ours.toml",
        "--clients": "0",
    }
    for option, value, complaint in (
        ("--workers", 0, "--workers = 0: it should be greater than or equal to 1"),
        ("--clients", "0,0", "--clients: a client is named twice"),
        ("--clients", "0,x", "--clients 0,x: give the clients' ids, as in 3 or 3,4,5"),
        ("--clients", "0-2", "--clients 0-2: give the clients' ids"),
        ("--clients", "-1", "--clients.0 = -1: it should be greater than or equal to 0"),
        ("--server", "192.0.2.7", "--server: 192.0.2.7 is no address of a coordinator"),
        ("--server", "192.0.2.7:99999", "write it as host:port"),
        ("--ca", home / "ours.toml", "ours.toml is no certificate"),
        ("--ca", home / "nowhere.pem", "nowhere.pem is no certificate"),
        ("--data", home / "nowhere", "there is no folder"),
    ):
        options = [part for pair in (well | {option: value}).items() for part in pair]
        assert complaint in refused_command("site", "init", tmp_path / "site", *options)
        assert not (tmp_path / "site").exists()


def test_a_site_reads_its_scans_by_a_window_of_its_own(federation, tmp_path):
    home, _ = federation
    (tmp_path / "scans").mkdir()
    for name, value in (("black", 0), ("grey", 2048), ("white", 4095)):
        deep = np.full((16, 16), value, dtype=np.uint16)
        Image.fromarray(deep).save(tmp_path / "scans" / f"{name}.png")
    ssfl_command(
        *("site", "init", tmp_path / "site", "--server", "192.0.2.7:9092", "--clients", "0"),
        *("--ca", home / "keys" / "ca.pem", "--recipe", home / "ours.toml"),
        *("--data", tmp_path / "scans", "--window", "0", "4095"),
    )
    _, config = load_site(tmp_path / "site")
    (host,) = build_hosts(config)
    assert host.data.dataset.train.pixels[:, 0, 3, 3].tolist() == [0, 128, 255]
    # Encoders are used on files read the same way, and the coordinator is told nothing of it.
    assert Run.create(config, tmp_path / "run").reading == Reading("crop", (0, 4095))
    assert shared_recipe(config) == shared_recipe(load_config(home / "ours.toml"))


def test_a_window_without_images_of_the_sites_own_is_refused():
    here = HereOptions(clients=(0,), window=(0, 4095))
    with pytest.raises(ConfigError, match="give them with --data, or take window out of"):
        load_here(here, DigitsOptions(), PartitionOptions(), 0)


def test_a_rehearsal_of_a_client_whom_the_recipe_does_not_have_is_refused(federation, tmp_path):
    home, _ = federation
    told = refused_command(
        *("site", "init", tmp_path / "site", "--server", "192.0.2.7:9092", "--recipe", "demo"),
        *("--ca", home / "keys" / "ca.pem", "--clients", "3,10"),
    )
    assert told == "the recipe has clients 0 to 9, not 10"
    assert not (tmp_path / "site").exists()


def test_flowers_log_lines_go_to_a_file_and_ours_to_the_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(sys.stderr)])
    before = [logger_state(name) for name in ("ssfl", "flwr")]
    with logging_apart(tmp_path / "flower" / "serve.log"):
        logging.getLogger("ssfl.comm").info("site north joined")
        logging.getLogger("flwr").debug("connected")
        logging.getLogger("flwr").warning("connection lost")
    assert [logger_state(name) for name in ("ssfl", "flwr")] == before
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" INFO ")[2] for line in said] == ["site north joined"]
    assert "connection lost" in (tmp_path / "flower" / "serve.log").read_text()


def logger_state(name):
    logger = logging.getLogger(name)
    return logger.handlers, logger.level, logger.propagate


def test_a_site_without_images_is_told_how_to_give_them(federation):
    home, _ = federation
    (home / "second" / "site.toml").rename(home / "kept.toml")
    try:
        (home / "second" / "site.toml").write_text('server = "192.0.2.7:9092"\nclients = [1]\n')
        told = refused_command("site", "start", home / "second")
    finally:
        (home / "kept.toml").rename(home / "second" / "site.toml")
    assert told == "the recipe's images are at sites: give this site's with --data"


@pytest.mark.parametrize(("recipe", "still"), [("ours.toml", " --data FOLDER"), ("digits", "")])
def test_init_asks_for_images_only_where_the_recipe_has_none(federation, tmp_path, recipe, still):
    home, _ = federation
    said = ssfl_command(
        *("site", "init", tmp_path / "site", "--server", "192.0.2.7:9092", "--clients", "0"),
        *("--ca", home / "keys" / "ca.pem"),
        *("--recipe", home / recipe if recipe.endswith("toml") else recipe),
    )
    assert f"`ssfl site start {tmp_path / 'site'}{still}`" in said


def test_a_command_to_type_is_quoted_where_a_path_has_spaces(federation, tmp_path):
    home, _ = federation
    said = ssfl_command(
        *("site", "init", tmp_path / "Site Süd", "--server", "192.0.2.7:9092", "--clients", "0"),
        *("--ca", home / "keys" / "ca.pem", "--recipe", "digits"),
    )
    assert f"`ssfl site start '{tmp_path / 'Site Süd'}'`" in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("certificate verify failed: unable to get local issuer", "is not of the authority in"),
        ("certificate verify failed: certificate has expired", "has expired: ask the coordinator"),
        ("certificate verify failed: certificate is not yet valid", "this machine's clock"),
        ("certificate verify failed: IP address mismatch", "`ssfl certs --host`"),
        ("[code: 2004] Failed to activate SuperNode.", "site.pub in its keys/sites"),
        ("HTTPStatusError: Client error '401 Unauthorized'\nINFO: bye", "has started anew"),
        (f"{FROZEN}\nINFO: bye", "stood still"),
        ("the cable is cut", "the cable is cut"),
    ],
)
def test_why_a_site_cannot_connect_is_said_in_our_words(tmp_path, words, told):
    child = Child("node", [], tmp_path)
    child.log.write_text(f"INFO: hello\nERROR: no connection\n{words}\n")
    said = why_it_ended(tmp_path, "192.0.2.7:9092", child)
    assert "192.0.2.7:9092" in said
    assert told in said


def test_why_a_connection_ended_is_not_taken_from_an_earlier_ones_log(tmp_path):
    child = Child("node", ["--help"], tmp_path)
    child.log.write_text("ERROR: Exit Code: 305\n[code: 2004] Failed to activate SuperNode.\n")
    child.start()
    child.stop()
    assert "key" not in why_it_ended(tmp_path, "192.0.2.7:9092", child)


def test_a_site_says_that_nobody_answers_and_nothing_where_somebody_does():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = f"127.0.0.1:{listener.getsockname()[1]}"
        assert unreachable(server).startswith(f"nobody answers at {server} (Connection refused)")
        listener.listen()
        assert unreachable(server) == ""


@pytest.mark.parametrize("name", ["data 𠮷野", "größe", 'the "good" ones', "a\\b", "end\x7f"])
def test_a_site_finds_its_images_whatever_their_folder_is_called(federation, tmp_path, name):
    home, _ = federation
    paint(tmp_path / name, 2, torch.Generator())
    ssfl_command(
        *("site", "init", tmp_path / "site", "--server", "192.0.2.7:9092", "--clients", "0"),
        *("--ca", home / "keys" / "ca.pem", "--recipe", home / "ours.toml"),
        *("--data", tmp_path / name),
    )
    options, config = load_site(tmp_path / "site")
    assert options.data == config.here.data == tmp_path / name


def test_images_in_ones_home_may_be_named_by_a_tilde(federation, tmp_path, monkeypatch):
    home, _ = federation
    monkeypatch.setenv("HOME", str(tmp_path))
    paint(tmp_path / "scans", 2, torch.Generator())
    ssfl_command(
        *("site", "init", tmp_path / "site", "--server", "192.0.2.7:9092", "--clients", "0"),
        *("--ca", home / "keys" / "ca.pem", "--recipe", home / "ours.toml", "--data=~/scans"),
    )
    settings = tmp_path / "site" / "site.toml"
    written = settings.read_text()
    settings.write_text(written.replace(str(tmp_path), "~"))
    for text, data in ((written, None), (settings.read_text(), None), (written, Path("~/scans"))):
        settings.write_text(text)
        _, config = load_site(tmp_path / "site", data)
        assert config.here.data == tmp_path / "scans"
    settings.write_text(written.replace(str(tmp_path), "~nosuchuser"))
    told = refused_command("site", "start", tmp_path / "site")
    assert told == (
        f"{settings} cannot be used: data: ~nosuchuser/scans leads nowhere: write the folder out"
    )


def test_a_folder_that_site_toml_cannot_name_is_refused_and_leaves_nothing(federation, tmp_path):
    home, _ = federation
    odd = tmp_path / os.fsdecode(b"gr\xf6\xdfe")
    odd.mkdir()
    told = refused_command(
        *("site", "init", tmp_path / "site", "--server", "192.0.2.7:9092", "--clients", "0"),
        *("--ca", home / "keys" / "ca.pem", "--recipe", home / "ours.toml", "--data", odd),
    )
    assert told.endswith("is not UTF-8, and site.toml cannot hold it: rename the folder")
    assert not (tmp_path / "site").exists()


def test_a_site_toml_that_was_saved_in_another_encoding_is_one_sentence(federation, tmp_path):
    shutil.copytree(federation[0] / "first", tmp_path / "site")
    (tmp_path / "site" / "site.toml").write_bytes(b'data = "gr\xf6\xdfe"\n')
    told = refused_command("site", "start", tmp_path / "site")
    assert "site.toml cannot be used: 'utf-8' codec can't decode" in told


def test_a_second_init_does_not_overwrite_a_sites_key(federation):
    home, _ = federation
    told = refused_command(
        *("site", "init", home / "first", "--server", "192.0.2.7:9092", "--clients", "0"),
        *("--ca", home / "keys" / "ca.pem", "--recipe", home / "ours.toml"),
    )
    assert "exists already" in told
    assert f"{home / 'first' / 'site.toml'}" in told
    assert f"`ssfl site start {home / 'first'} --data FOLDER`" in told
