"""The way docs/deploying.md tells it: the commands, a coordinator without an image, and sites that
have nothing but folders. Flower's own programs are left out here; `test_flower` has them."""

import shutil

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

pytest.importorskip("flwr")

import pretend_grid
from pretend_grid import PretendGrid

from ssfl.cli import app
from ssfl.comm import COMMUNICATORS
from ssfl.comm.flower.host import SiteKeeper, build_hosts, load_site
from ssfl.comm.flower.recipe import shared_recipe
from ssfl.comm.flower.serve import check_keys
from ssfl.comm.flower.site import SiteAnswers
from ssfl.comm.local import LocalCommunicator
from ssfl.config import load_config
from ssfl.errors import ConfigError
from ssfl.experiment import train
from ssfl.run import Run

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


def play(home):
    nodes = {}
    for number, name in enumerate(("first", "second"), start=1):
        options, config = load_site(home / name)
        hosts = build_hosts(options, config)
        keeper = SiteKeeper(home / name, config, hosts)
        nodes[f"n{number}"] = SiteAnswers(LocalCommunicator(hosts), shared_recipe(config), keeper)
    pretend_grid.grids.append(PretendGrid(**nodes))
    COMMUNICATORS.register("pretend", "pretend_grid:connect")
    try:
        return train(load_config(home / "ours.toml"), out=home / "run", comm="pretend")
    finally:
        del COMMUNICATORS._targets["pretend"]


def test_a_coordinator_without_an_image_trains_what_its_sites_have(federation):
    _, run = federation
    rounds = [row for row in run.metrics if row["kind"] == "round"]
    assert [(row["accepted"], row["images"]) for row in rounds] == [(3, 9 + 12 + 17)] * 2
    assert run.facts["train_images"] == 0
    assert all(row["update_norm"] > 0 for row in rounds)
    assert not (run.path / "clients").exists()


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
