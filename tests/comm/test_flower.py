"""A real federation on this machine: SuperLink, two SuperNodes, TLS, keys, and bad days.

Three federations are run, and every test looks at one of them. The quiet one must end bit for bit
where a single process ends; one whose sites sum their clients' updates ends there but for rounding.
In the third a site, the SuperLink and the coordinator are killed in turn, strangers knock, clients
send what cannot be right, a site sends what cannot be read, and it must end where a single process
ends that misses the same clients in the same rounds.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flower_party import SPOILT
from six_clients import assert_same_bits, figures, outcome, recipe, reference

from ssfl.assemble import build_host, load_federated
from ssfl.comm import COMMUNICATORS
from ssfl.comm.flower.host import SiteOptions, init_site
from ssfl.comm.flower.keys import make_authority, make_site_key
from ssfl.comm.flower.node import CONNECTED
from ssfl.comm.flower.processes import Child, free_port
from ssfl.comm.local import LocalCommunicator
from ssfl.config import to_toml
from ssfl.experiment import train
from ssfl.federation.messages import Reason, Task, TaskKind, failed
from ssfl.federation.store import StateStore
from ssfl.run import Run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
SITES = {"north": (0, 1, 2), "south": (3, 4, 5)}


@dataclass
class Federation:
    """A coordinator and its sites, each a process in a folder below `home`."""

    home: Path
    config: object
    sites: dict = field(default_factory=lambda: SITES)
    port: int = field(default_factory=free_port)
    started: list = field(default_factory=list)

    def prepare(self):
        make_authority(self.home / "keys", ["127.0.0.1"])
        (self.home / "keys" / "sites").mkdir()
        (self.home / "recipe.toml").write_text(to_toml(self.config))
        (self.home / "hooks").mkdir()
        (self.home / "hooks" / "sitecustomize.py").write_text(
            "import os, pathlib\n"
            "if {'RECORD', 'AHEAD', 'BEAT'} & {*os.environ}:\n"
            "    import flower_party\n"
            "    flower_party.everywhere(os.environ)\n"
        )
        for name, clients in self.sites.items():
            options = SiteOptions(server=f"127.0.0.1:{self.port}", clients=clients)
            ca = self.home / "keys" / "ca.pem"
            public = init_site(self.home / name, options, self.config, ca)
            shutil.copy(public, self.home / f"keys/sites/{name}.pub")
        return self

    def party(self, *arguments, log, **environment):
        paths = [str(self.home / "hooks"), str(HERE), *filter(None, sys.path)]
        (self.home / "user").mkdir(exist_ok=True)
        with (self.home / f"{log}.log").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, HERE / "flower_party.py", *map(str, arguments)],
                stdout=output,
                stderr=output,
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
                | {"HOME": str(self.home / "user")}
                | environment,
            )
        self.started.append(process)
        return process

    def serve(self, *arguments):
        return self.party(
            *("serve", self.home / "recipe.toml", "--keys", self.home / "keys"),
            *("--host", "127.0.0.1", "--port", self.port, "--out", self.home / "run"),
            *("--patience", "300", *arguments),
            log="serve",
        )

    def start_site(self, name, **environment):
        return self.party("site", "start", self.home / name, log=name, **environment)

    def log(self, name):
        return (self.home / f"{name}.log").read_text(errors="replace")

    def site_run(self, name):
        (folder,) = (self.home / name / "runs").iterdir()
        return Run(folder)

    def wait_for(self, look, server, seconds=300):
        """Wait until `look()` is true; fail with the logs otherwise, or as soon as the server is
        gone without it."""
        end = time.monotonic() + seconds
        while not look():
            gone = server.poll() is not None and not look()
            if gone or time.monotonic() > end:
                pytest.fail("\n".join(f"{p}\n{p.read_text()}" for p in self.home.glob("*.log")))
            time.sleep(0.1)

    def finish(self, server, log="serve"):
        """Wait until the server has ended, as it should."""
        self.wait_for(lambda: server.poll() is not None, server)
        assert server.returncode == 0, self.log(log)

    def close(self):
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for process in self.started:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_until(look, seconds=120):
    end = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < end
        time.sleep(0.1)


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def commands_below(folder):
    """Command lines of running processes that speak of a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in line and "flower" in line:
                found.append(line)
    return found


# The quiet federation, and beside it one whose sites sum


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """Both at once: most of their time is waiting. Where sites sum, the south's key comes late."""
    federations, servers = [], []
    try:
        for updates in ("single", "summed"):
            home = tmp_path_factory.mktemp(updates)
            federation = Federation(home, recipe(server={"updates": updates})).prepare()
            federations.append(federation)
            (home / "sent").mkdir()
            if updates == "summed":
                (home / "keys/sites/south.pub").rename(home / "south.pub")
            server = federation.serve()
            servers.append(server)
            federation.start_site("north", RECORD=str(home / "sent"))
            federation.start_site("south")
        northern = "site north joined with clients [0, 1, 2]"
        federation.wait_for(lambda: northern in federation.log("serve"), server)
        (home / "south.pub").rename(home / "keys/sites/south.pub")
        for federation, server in zip(federations, servers, strict=True):
            federation.finish(server)
    finally:
        for federation in federations:
            federation.close()
    return federations


@pytest.fixture(scope="module")
def quiet(calm):
    return calm[0]


@pytest.fixture(scope="module")
def summed(calm):
    return calm[1]


def everywhere(federation):
    """The server's run, with personal states from wherever they lie."""

    class Everywhere(Run):
        @property
        def store(self):
            return self

        def get(self, client, before):
            name = next(name for name, ids in SITES.items() if client in ids)
            return federation.site_run(name).store.get(client, before)

    return Everywhere(federation.home / "run")


def test_two_sites_end_with_the_bits_of_a_single_process(quiet):
    assert_same_bits(everywhere(quiet), reference())


def test_two_sites_that_sum_end_where_a_single_process_ends_but_for_rounding(summed):
    (theta, personal), (its_theta, its_personal) = map(outcome, (everywhere(summed), reference()))
    torch.testing.assert_close(theta, its_theta, rtol=0, atol=1e-6)
    torch.testing.assert_close(personal, its_personal, rtol=0, atol=1e-6)
    for mine, other in zip(figures(everywhere(summed)), figures(reference()), strict=True):
        for name, value in other.items():
            near = pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            assert mine[name] == near


def test_a_site_whose_key_comes_while_the_server_runs_is_let_in(summed):
    lines = summed.log("serve").splitlines()
    known = next(n for n, line in enumerate(lines) if "site south may join" in line)
    assert any("site north joined with clients [0, 1, 2]" in line for line in lines[:known])
    assert any("site south joined with clients [3, 4, 5]" in line for line in lines[known:])


def first_updates():
    """Δ of every client in round 0, as float32 bytes."""
    config = recipe()
    host = build_host(config, load_federated(config), StateStore(Path("nowhere"), 1 << 30))
    theta = host.trainer.models.global_.flat.shared.clone()
    layout = host.trainer.layout.digest
    task = Task(TaskKind.TRAIN, 0, theta, layout, rate=config.local.lr)
    before = torch.get_num_threads()
    torch.set_num_threads(config.device.threads)  # as at a site: bits depend on it
    try:
        return {client: host.handle(client, task).delta.numpy().tobytes() for client in range(6)}
    finally:
        torch.set_num_threads(before)


def test_a_site_that_sums_sends_one_vector_a_round_and_nobodys_own(quiet, summed):
    updates = first_updates()
    single, joint = (
        b"".join(file.read_bytes() for file in (federation.home / "sent").iterdir())
        for federation in (quiet, summed)
    )
    for client in SITES["north"]:
        assert updates[client] in single
        assert updates[client][:400] not in joint
        assert updates[client][-400:] not in joint
    headers = {*re.findall(rb'\{"version":1,[^{}]*\{"delta":\d+\}.*?"joint":\{.*?\}\}', joint)}
    assert sorted(json.loads(header)["round"] for header in headers) == [0, 1, 2]
    assert {tuple(json.loads(header)["joint"]["clients"]) for header in headers} <= {
        *permutations(SITES["north"])
    }


def test_personal_states_stay_at_their_sites(quiet):
    assert not (quiet.home / "run" / "clients").exists()
    for name, clients in SITES.items():
        assert quiet.site_run(name).store.clients() == list(clients)


def test_a_site_has_its_encoders_in_hand_when_it_is_over(quiet):
    site, expected = quiet.site_run("south"), reference()
    images = torch.randint(0, 256, (4, site.facts["channels"], 32, 32), dtype=torch.uint8)
    images = images[..., : site.facts["image_size"], : site.facts["image_size"]]
    for mine, other in [
        (site.personal_encoder(4), expected.personal_encoder(4)),
        (site.global_encoder(), expected.global_encoder()),
    ]:
        for a, b in zip(mine.state_dict().values(), other.state_dict().values(), strict=True):
            assert torch.equal(a, b)
    assert len(images)


def found_in(stream, images, labels):
    """Which forms of these images and labels a stream of bytes holds."""
    forms = {}
    for index, image in enumerate(images):
        for name, array in {
            "pixels": image,
            "pixels, channels last": image.transpose(1, 2, 0),
            "floats": image.astype(np.float32) / 255,
            "first channel": image[0],
        }.items():
            forms[f"image {index} as {name}"] = np.ascontiguousarray(array).tobytes()
    for kind in (np.int64, np.int32, np.uint8, np.float32):
        forms[f"labels as {kind.__name__}"] = labels.astype(kind).tobytes()
    forms["labels as text"] = json.dumps(labels.tolist()).encode()
    return [name for name, form in forms.items() if form in stream]


def test_what_a_site_sends_holds_neither_image_nor_label(quiet):
    files = list((quiet.home / "sent").iterdir())
    assert len(files) >= 2  # the site itself and its SuperNode, started again if it came too early
    stream = b"".join(file.read_bytes() for file in files)
    data = load_federated(quiet.config)
    theta = quiet.site_run("north").checkpoint().tensors["theta"]
    assert len(stream) > 2 * 3 * 3 * 4 * len(theta)  # each hop, client and round: a whole Δ
    for client in SITES["north"]:
        rows = data.train_indices(client)
        images = data.dataset.train.pixels[rows].numpy()
        labels = data.dataset.train.labels[rows].numpy()
        assert found_in(stream, images, labels) == []
        # and the search does find them where they are:
        planted = stream + images[0].tobytes() + labels.tobytes()
        assert found_in(planted, images[:1], labels)[:1] == ["image 0 as pixels"]
        assert "labels as int64" in found_in(planted, images[:1], labels)


def test_all_that_a_reply_says_is_counts_and_metrics(quiet):
    stream = b"".join(file.read_bytes() for file in (quiet.home / "sent").iterdir())
    headers = [json.loads(text) for text in re.findall(rb'\{"version":1,.*?"joint":null\}', stream)]
    assert len(headers) >= 2 * 3 * 3
    numbers = {"version", "client", "round", "samples", "steps"}
    for header in headers:
        assert set(header) == numbers | {
            *("kind", "layout", "vectors", "what", "metrics", "failure", "joint")
        }
        assert all(isinstance(value, (int, float)) for value in header["metrics"].values())
        assert set(header["vectors"]) <= {"delta"}
        assert len(header["metrics"]) < 10


def test_flower_tells_by_a_word_that_a_site_was_let_in(quiet):
    for name in SITES:
        assert CONNECTED in (quiet.home / name / "flower" / "node.log").read_text()


def test_flower_keeps_its_files_to_the_run_and_the_site(quiet):
    assert not list((quiet.home / "user").iterdir())
    for place in ("run", *SITES):
        assert (quiet.home / place / "flower" / "home").is_dir()
    for name in ("serve", *SITES):
        assert "flwr" not in quiet.log(name)


def test_no_process_is_left(calm):
    assert [commands_below(federation.home) for federation in calm] == [[], []]


# The federation that has a bad day


@dataclass
class BadDay:
    federation: Federation
    refused: dict
    killed_site: int


def knock(federation, name, **changes):
    """Start a SuperNode that should not be let in."""
    folder = federation.home / name
    make_site_key(folder)
    options = {
        "--superlink": f"127.0.0.1:{federation.port}",
        "--root-certificates": str(federation.home / "keys" / "ca.pem"),
        "--auth-supernode-private-key": str(folder / "site.key"),
        "--isolation": "process",
        "--port": str(free_port()),
        "--max-retries": "1",
    } | changes
    flat = [part for pair in options.items() if None not in pair for part in pair if part]
    stranger = Child("node", flat, folder)
    stranger.start()
    return stranger


@pytest.fixture(scope="module")
def bad_day(tmp_path_factory):
    home = tmp_path_factory.mktemp("bad-day")
    config = recipe(
        server={"rounds": 6, "deadline": 90.0, "min_replies": 0.3},
        evaluation={"every": 0},
        run={"checkpoint_every": 1},
    )
    federation = Federation(home, config).prepare()
    run, strangers = home / "run", {}
    try:
        server = federation.serve()
        federation.start_site("north", NAP="3:6", SPOIL="4", GARBLE="5")
        south = federation.start_site("south", NAP="1:30")
        federation.wait_for(lambda: "round 2: train" in federation.log("south"), server)
        (node,) = children(south.pid)
        for pid in (south.pid, node):  # while it naps: none of its clients has worked yet
            os.kill(pid, signal.SIGKILL)
        federation.start_site("south", SPOIL="4")
        make_authority(home / "other-keys", ["127.0.0.1"])
        strangers["unregistered key"] = knock(federation, "stranger")
        strangers["wrong CA"] = knock(
            federation, "misled", **{"--root-certificates": str(home / "other-keys" / "ca.pem")}
        )
        strangers["plain text"] = knock(
            federation,
            "careless",
            **{"--root-certificates": None, "--auth-supernode-private-key": None, "--insecure": ""},
        )
        federation.wait_for(lambda: "round 3: train" in federation.log("north"), server)
        (link,) = children(server.pid)
        os.kill(link, signal.SIGKILL)
        federation.wait_for(lambda: "round 4: train" in federation.log("north"), server)
        server.kill()  # while the north naps: the round cannot have ended
        server.wait()
        server = federation.party("serve", run, log="serve-again")
        federation.finish(server, "serve-again")
        wait_until(lambda: all(s.ended() for s in strangers.values()))
        refused = {name: stranger.last_words() for name, stranger in strangers.items()}
    finally:
        for stranger in strangers.values():
            stranger.stop()
        federation.close()
    assert Run(run).checkpoint().rounds == 6
    return BadDay(federation, refused, south.pid)


def test_a_site_killed_in_mid_round_costs_its_own_clients_and_comes_back(bad_day):
    rows = [row for row in Run(bad_day.federation.home / "run").metrics if row["kind"] == "round"]
    assert [row["round"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert rows[0]["accepted"] == 6
    assert rows[1]["accepted"] == 3
    assert sum(rows[1]["failures"].values()) == 3
    assert set(rows[1]["failures"]) <= {"lost", "deadline"}
    assert re.search(r"round 2: client 3 \w+: site south: ", bad_day.federation.log("serve"))
    assert rows[4]["asked"] == 6


def test_what_cannot_be_right_is_refused_with_its_clients_id_and_the_round_goes_on(bad_day):
    rows = [row for row in Run(bad_day.federation.home / "run").metrics if row["kind"] == "round"]
    assert (rows[4]["accepted"], rows[4]["failures"]) == (2, {"refused": 4})
    log = bad_day.federation.log("serve-again")
    for client, complaint in {
        0: "over the limit",
        1: "another layout",
        2: "a train reply of round 12",
        3: "not finite",
    }.items():
        assert re.search(f"round 5: client {client} refused: .*{complaint}", log)


def test_a_message_that_flower_cannot_read_costs_its_own_site_and_the_run_goes_on(bad_day):
    rows = [row for row in Run(bad_day.federation.home / "run").metrics if row["kind"] == "round"]
    assert (sorted(rows[5]["took_part"]), rows[5]["failures"]) == ([3, 4, 5], {"error": 3})
    log = bad_day.federation.log("serve-again")
    assert "round 6: client 0 error: site north: its message cannot be read" in log


def test_the_superlink_is_started_again_and_the_run_goes_on(bad_day):
    log = bad_day.federation.log("serve")
    assert log.count("the SuperLink died and is started again") == 1


def test_a_killed_coordinator_goes_on_from_its_checkpoint(bad_day):
    rows = Run(bad_day.federation.home / "run").metrics
    assert [row["round"] for row in rows if row["kind"] == "resume"] == [3]


def test_nothing_is_lost_on_a_bad_day(bad_day, monkeypatch, tmp_path):
    """The same Θ and θ_k as in one process where the same clients were missing."""
    federation = bad_day.federation
    rows = [row for row in Run(federation.home / "run").metrics if row["kind"] == "round"]

    class Missing(LocalCommunicator):
        round = 0

        def _row(self):
            return rows[self.round]

        def clients(self):
            return range(6) if self._row()["asked"] == 6 else SITES["north"]

        def sizes(self):
            return [self._hosts[0].data.size(client) for client in self.clients()]

        def exchange(self, task, clients, deadline=None):
            gone = SITES["south"] if {"lost", "deadline"} & set(self._row()["failures"]) else ()
            refused = {4: SPOILT, 5: SITES["north"]} if task.kind is TaskKind.TRAIN else {}
            for client in clients:
                if client in gone:
                    yield failed(client, task, Reason.LOST, "as it was")
                    continue
                reply = self._hosts[0].handle(client, task)
                failure = failed(client, task, Reason.REFUSED, "as it was")
                yield failure if client in refused.get(task.round, ()) else reply
            if task.kind is TaskKind.TRAIN:
                self.round = min(self.round + 1, len(rows) - 1)

    monkeypatch.setitem(COMMUNICATORS._targets, "missing", "six_clients:missing")
    import six_clients

    monkeypatch.setattr(
        six_clients, "missing", lambda config, path, hosts: Missing(hosts), raising=False
    )
    same = train(federation.config, out=tmp_path / "same", comm="missing")
    assert torch.equal(
        same.checkpoint().tensors["theta"],
        Run(federation.home / "run").checkpoint().tensors["theta"],
    )
    for name, clients in SITES.items():
        store = federation.site_run(name).store
        for client in clients:
            assert torch.equal(store.get(client, 6).personal, same.store.get(client, 6).personal)


@pytest.mark.parametrize("who", ["unregistered key", "wrong CA", "plain text"])
def test_strangers_are_refused(bad_day, who):
    assert "Failed to initialize the connection" in bad_day.refused[who] or (
        "Giving up" in bad_day.refused[who]
    ), bad_day.refused[who]


def test_strangers_never_joined(bad_day):
    joined = re.findall(r"site (.*) joined with clients (.*)", bad_day.federation.log("serve"))
    assert set(joined) == {("north", "[0, 1, 2]"), ("south", "[3, 4, 5]")}
    for log in (bad_day.federation.home / name / "node.log" for name in ("stranger", "misled")):
        assert CONNECTED not in log.read_text()


def test_nothing_is_left_after_a_bad_day(bad_day):
    assert commands_below(bad_day.federation.home) == []
    assert not list((bad_day.federation.home / "run" / "flower").glob("link.sqlite*"))
