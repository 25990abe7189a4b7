"""Keys, certificates and a site's folder: who may talk to whom, checked by Python's own TLS."""

import datetime
import os
import shutil
import ssl
import stat
import subprocess
import sys
import threading
import time
from socket import create_connection, create_server

import pytest
import torch

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.serialization import (
    load_ssh_private_key,
    load_ssh_public_key,
)

from ssfl.assemble import load_federated
from ssfl.comm.flower.host import SiteKeeper, SiteOptions, build_hosts, init_site, load_site
from ssfl.comm.flower.keys import make_authority, make_site_key, server_names
from ssfl.comm.flower.runtime import Link
from ssfl.comm.flower.serve import (
    Door,
    ServeOptions,
    check_keys,
    only_meanwhile,
    read_settings,
    write_settings,
)
from ssfl.comm.local import LocalCommunicator
from ssfl.config import parse
from ssfl.data.here import HereOptions
from ssfl.errors import ConfigError, FederationError
from ssfl.federation.messages import Task, TaskKind
from ssfl.federation.state import ClientState
from ssfl.run import Run

CONFIG = parse(
    {
        "data": {"source": "shapes", "train": 60, "test": 20, "image_size": 16},
        "partition": {"kind": "iid", "clients": 4},
        "model": {"backbone": "small", "width": 4},
        "ssl": {"method": "simsiam", "projector_width": 8, "predictor_width": 4},
        "algorithm": {"name": "per-ssfl"},
        "local": {"batch": 8},
    }
)


@pytest.fixture
def keys(tmp_path):
    make_authority(tmp_path / "keys", ["fl.example.org", "192.0.2.7"])
    return tmp_path / "keys"


def shake_hands(keys, ca, name):
    """Whether a client that believes `ca` accepts this server as `name`."""
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(keys / "server.pem", keys / "server.key")
    client_side = ssl.create_default_context(cafile=ca)
    with create_server(("127.0.0.1", 0)) as listener:

        def accept():
            connection, _ = listener.accept()
            try:
                server_side.wrap_socket(connection, server_side=True).close()
            except (ssl.SSLError, OSError):
                connection.close()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            with create_connection(listener.getsockname()) as plain:
                client_side.wrap_socket(plain, server_hostname=name).close()
            return True
        except ssl.SSLError:
            return False
        finally:
            thread.join()


@pytest.mark.parametrize("name", ["fl.example.org", "192.0.2.7", "localhost", "127.0.0.1"])
def test_the_server_is_believed_under_each_of_its_names(keys, name):
    assert shake_hands(keys, keys / "ca.pem", name)


def test_it_is_not_believed_under_another_name(keys):
    assert not shake_hands(keys, keys / "ca.pem", "evil.example.org")


def test_it_is_not_believed_by_who_trusts_another_authority(keys, tmp_path):
    make_authority(tmp_path / "other", ["fl.example.org"])
    assert not shake_hands(keys, tmp_path / "other" / "ca.pem", "fl.example.org")


def test_secrets_are_for_their_owner_alone(keys, tmp_path):
    make_site_key(tmp_path / "site")
    for path in (keys / "ca.key", keys / "server.key", tmp_path / "site" / "site.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_sites_two_keys_belong_together(tmp_path):
    public = load_ssh_public_key(make_site_key(tmp_path).read_bytes())
    private = load_ssh_private_key((tmp_path / "site.key").read_bytes(), None)
    assert private.public_key() == public


def test_keys_are_never_overwritten(keys, tmp_path):
    with pytest.raises(ConfigError, match="exists already"):
        make_authority(keys, [])
    make_site_key(tmp_path)
    with pytest.raises(ConfigError, match="lock this site out"):
        make_site_key(tmp_path)


def test_a_coordinator_is_told_what_is_missing_before_anything_starts(keys, tmp_path):
    with pytest.raises(ConfigError, match=r"no ca\.pem"):
        check_keys(tmp_path)
    with pytest.raises(ConfigError, match="nobody could join"):
        check_keys(keys)
    (keys / "sites").mkdir()
    (keys / "sites" / "north.pub").write_bytes(make_site_key(tmp_path / "north").read_bytes())
    check_keys(keys)
    assert server_names(keys / "server.pem")[:1] == ["fl.example.org"]


def test_a_coordinator_is_told_that_its_certificates_are_of_the_past(tmp_path, monkeypatch):
    make_authority(tmp_path, ["127.0.0.1"], days=1)
    site_key = make_site_key(tmp_path / "site")
    (tmp_path / "sites").mkdir()
    site_key.rename(tmp_path / "sites" / "one.pub")
    check_keys(tmp_path)

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) + datetime.timedelta(days=2)

    monkeypatch.setattr("ssfl.comm.flower.keys.datetime.datetime", Later)
    with pytest.raises(ConfigError, match=r"ca.pem has expired \(20..-..-..\): renew yours"):
        check_keys(tmp_path)


def test_a_runs_settings_are_found_again(tmp_path):
    options = ServeOptions(keys=tmp_path, port=1234)
    write_settings(tmp_path, options)
    assert read_settings(tmp_path) == options
    with pytest.raises(ConfigError, match="not started by `ssfl serve`"):
        read_settings(tmp_path / "elsewhere")


class PretendLink:
    def __init__(self):
        self.known, self.down = [], False

    def register(self, name, key):
        if self.down:
            raise FederationError("the SuperLink cannot be reached")
        if b"ecdsa" not in key.read_bytes():
            raise ConfigError(f"{key} is no public key of a site")
        self.known.append(name)


def test_the_superlinks_database_lives_no_longer_than_its_coordinator(tmp_path):
    """A killed coordinator's would grow for ever, and still know sites that are to be shut out."""
    database, page = tmp_path / "link.sqlite", tmp_path / "link.log"
    files = [database, tmp_path / "link.sqlite-wal", tmp_path / "link.sqlite-shm"]
    for file in (*files, page):
        file.write_text("of a coordinator that was killed")
    with only_meanwhile(database):
        assert list(tmp_path.iterdir()) == [page]
        for file in files[:2]:
            file.touch()
    assert list(tmp_path.iterdir()) == [page]


def test_a_key_that_is_put_there_later_is_let_in_and_a_bad_one_is_said_once(tmp_path, caplog):
    link, sites = PretendLink(), tmp_path / "sites"
    sites.mkdir()
    door = Door(link, sites)
    shutil.copy(make_site_key(tmp_path / "north"), sites / "north.pub")
    door()
    door()
    assert link.known == ["north"]
    (sites / "bad.pub").write_text("not a key")
    shutil.copy(make_site_key(tmp_path / "south"), sites / "south.pub")
    link.down = True
    door()
    assert link.known == ["north"]  # later, when the SuperLink is back
    link.down = False
    door()  # the bad one comes first and does not hold up the other
    assert link.known == ["north", "south"]
    door()
    assert caplog.text.count("is no public key") == 1
    shutil.copy(make_site_key(tmp_path / "mended"), sites / "bad.pub")
    os.utime(sites / "bad.pub", ns=(1, 1))
    door()
    assert link.known == ["north", "south", "bad"]


def test_one_key_under_two_names_is_said_to_be_a_mistake(tmp_path, caplog):
    link, sites = PretendLink(), tmp_path / "sites"
    sites.mkdir()
    public = make_site_key(tmp_path / "north")
    for name in ("north", "south"):
        shutil.copy(public, sites / f"{name}.pub")
    Door(link, sites)()
    assert link.known == ["north"]
    assert "south.pub is the same as north.pub" in caplog.text


def test_what_is_no_key_is_said_in_a_sentence_before_it_is_sent(tmp_path):
    (tmp_path / "north.pub").write_text("ssh-rsa nonsense")
    with pytest.raises(ConfigError, match=r"north\.pub is no public key"):
        Link("127.0.0.1:1", b"", b"").register("north", tmp_path / "north.pub")


def a_site(keys, folder, **changes):
    options = SiteOptions(**({"server": "192.0.2.7:9092", "clients": (1, 3)} | changes))
    init_site(folder, options, CONFIG, keys / "ca.pem")
    return folder


def test_a_site_reads_back_what_it_was_told(keys, tmp_path):
    options, config = load_site(a_site(keys, tmp_path / "site"))
    assert options == SiteOptions(server="192.0.2.7:9092", clients=(1, 3))
    assert config == CONFIG.model_copy(update={"here": HereOptions(clients=(1, 3))})
    assert (tmp_path / "site" / "ca.pem").read_bytes() == (keys / "ca.pem").read_bytes()


@pytest.mark.parametrize("clients", ["[1, 1]", "[-1]", "[]"])
def test_clients_must_be_different_numbers(keys, tmp_path, clients):
    site = a_site(keys, tmp_path / "site")
    (site / "site.toml").write_text(f'server = "192.0.2.7:9092"\nclients = {clients}\n')
    with pytest.raises(ConfigError, match=r"site\.toml cannot be used"):
        load_site(site)


def test_what_is_no_site_is_said_in_a_sentence(keys, tmp_path):
    with pytest.raises(ConfigError, match="is not a site"):
        load_site(tmp_path)
    (a_site(keys, tmp_path / "site") / "site.toml").write_text("server = 5")
    with pytest.raises(ConfigError, match=r"site\.toml cannot be used"):
        load_site(tmp_path / "site")


def test_clients_at_a_site_have_the_images_they_have_in_the_whole_federation(keys, tmp_path):
    _, config = load_site(a_site(keys, tmp_path / "site"))
    (host,) = build_hosts(config)
    whole = load_federated(CONFIG)
    assert list(host.clients()) == [1, 3]
    for client in (1, 3):
        assert torch.equal(host.data.train_indices(client), whole.train_indices(client))
        assert torch.equal(host.data.test_indices(client), whole.test_indices(client))


def images(folder, count):
    from PIL import Image

    folder.mkdir(parents=True)
    for index in range(count):
        Image.new("RGB", (20, 24), (index, 0, 0)).save(folder / f"{index}.png")


def test_a_sites_own_subfolders_become_its_clients(keys, tmp_path):
    images(tmp_path / "scans" / "ct", 5)
    images(tmp_path / "scans" / "mri", 9)
    site = a_site(keys, tmp_path / "site")
    _, config = load_site(site, tmp_path / "scans")
    (host,) = build_hosts(config)
    assert [host.data.size(client) for client in host.clients()] == [5, 9]
    assert host.data.dataset.train.pixels.shape[-1] == 16  # the recipe's size


def test_one_client_has_all_images_of_its_folder(keys, tmp_path):
    images(tmp_path / "scans" / "deep" / "down", 6)
    site = a_site(keys, tmp_path / "site", clients=(7,), data=tmp_path / "scans")
    (host,) = build_hosts(load_site(site)[1])
    assert list(host.clients()) == [7]
    assert host.data.size(7) == 6


def test_folders_that_do_not_fit_the_clients_are_said_in_a_sentence(keys, tmp_path):
    images(tmp_path / "scans" / "ct", 5)
    _, config = load_site(a_site(keys, tmp_path / "site"), tmp_path / "scans")
    with pytest.raises(ConfigError, match="images of 1 clients"):
        build_hosts(config)
    with pytest.raises(ConfigError, match="there is no folder"):
        build_hosts(load_site(tmp_path / "site", tmp_path / "nowhere")[1])


def test_no_run_finds_anothers_states_and_a_server_that_went_back_finds_the_past(
    keys, tmp_path, caplog
):
    _, config = load_site(a_site(keys, tmp_path / "site"))
    hosts = build_hosts(config)
    keeper = SiteKeeper(tmp_path / "site", config, hosts)

    def value(before):
        state = hosts[0].store.get(1, before=before).personal
        return None if state is None else float(state[0])

    def task(round_):
        checkpoint = 2 if round_ >= 2 else 0
        return Task(TaskKind.TRAIN, round_, torch.zeros(1), "x", durable=checkpoint)

    keeper.begin("a" * 16)
    for round_ in range(4):
        keeper.prepare(task(round_))
        hosts[0].store.put(1, round_ + 1, ClientState(personal=torch.full((3,), float(round_))))
        keeper.keep(task(round_))
    assert value(4) == 3.0
    keeper.begin("b" * 16)
    assert value(4) is None
    keeper.begin("a" * 16)  # the server was killed, and goes on from its checkpoint of round 2
    keeper.prepare(task(2))
    assert value(2) == 1.0
    assert value(4) == 1.0  # what had come after is forgotten
    assert "start anew" not in caplog.text
    keeper.begin("a" * 16)  # the checkpoint of round 2 was lost, and an older one is gone on with
    keeper.prepare(task(1))
    assert value(4) is None
    assert "went back to round 1, and clients 1 have kept later states alone" in caplog.text


def test_a_client_that_has_done_a_round_and_is_asked_again_answers_the_same(keys, tmp_path):
    _, config = load_site(a_site(keys, tmp_path / "site"))
    hosts = build_hosts(config)
    keeper, layout = SiteKeeper(tmp_path / "site", config, hosts), hosts[0].trainer.layout
    theta = hosts[0].trainer.models.global_.flat.shared.clone()
    keeper.begin("a" * 16)
    for round_ in range(3):
        task = Task(TaskKind.TRAIN, round_, theta, layout.digest, rate=0.1, durable=round_)
        answers = []
        for _ in range(2):  # the first answer is lost on its way
            keeper.prepare(task)
            answers.append(hosts[0].handle(1, task).delta)
            keeper.keep(task)
            answers.append(hosts[0].store.get(1, before=round_ + 1).personal)
        assert torch.equal(answers[0], answers[2])
        assert torch.equal(answers[1], answers[3])


def test_a_client_that_is_late_leaves_nothing_in_the_run_that_has_begun_meanwhile(keys, tmp_path):
    _, config = load_site(a_site(keys, tmp_path / "site"))
    hosts = build_hosts(config)
    keeper, local = SiteKeeper(tmp_path / "site", config, hosts), LocalCommunicator(hosts)
    go_on = threading.Event()

    class Patient(threading.Event):
        """Asked at every step whether to stop, it takes its time."""

        def is_set(self):
            go_on.wait()
            return False

    hosts[0].trainer.stop = Patient()
    layout = hosts[0].trainer.layout
    task = Task(TaskKind.TRAIN, 5, torch.zeros(layout.shared), layout.digest, rate=0.1)
    keeper.begin("a" * 16)
    keeper.prepare(task)
    (reply,) = local.exchange(task, [1], 0.0)
    assert reply.failure is not None
    old = hosts[0].store
    keeper.begin("b" * 16)
    go_on.set()
    local.close()  # waits for it
    assert old.get(1, before=6).personal is not None
    assert hosts[0].store.clients() == []


def test_a_site_has_the_encoder_of_a_server_that_went_back_not_of_the_future_it_had_seen(
    keys, tmp_path
):
    _, config = load_site(a_site(keys, tmp_path / "site"))
    hosts = build_hosts(config)
    keeper, layout = SiteKeeper(tmp_path / "site", config, hosts), hosts[0].trainer.layout

    def judged(round_, value):
        theta = torch.full((layout.shared,), value)
        keeper.prepare(task := Task(TaskKind.EVALUATE, round_, theta, layout.digest))
        keeper.keep(task)
        encoder = Run(tmp_path / "site" / "runs" / ("a" * 16)).global_encoder()
        assert all(weight.eq(value).all() for weight in encoder.backbone.parameters())

    for rounds in ((10, 20, 30), (15, 20)):
        keeper.begin("a" * 16)
        for round_ in rounds:
            judged(round_, float(round_ + len(rounds)))
    saved = sorted(path.name for path in (tmp_path / "site" / "runs").rglob("checkpoints/*"))
    assert saved == ["round-000015.safetensors", "round-000020.safetensors"]


def test_a_site_starts_though_its_note_of_the_last_time_is_empty(keys, tmp_path):
    site = a_site(keys, tmp_path / "site")
    (site / "flower").mkdir()
    (site / "flower" / "node").touch()
    process = subprocess.Popen(
        [sys.executable, "-m", "ssfl", "site", "start", str(site)],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while process.poll() is None and not (site / "flower" / "secret").exists():
            time.sleep(0.1)  # the secret is what its SuperNode is started with
        assert process.poll() is None, process.communicate()[1]
    finally:
        process.terminate()
        process.communicate(timeout=30)
