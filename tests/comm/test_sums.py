"""Sites that send the mean of their clients' updates: the same Θ, and no single update in it.

Servers are played against six clients in one place, each update by itself, and against the same
six behind two sites that sum.
"""

from dataclasses import replace

import pytest
import torch
from scalar_model import LAYOUT

pytest.importorskip("flwr")

from ssfl import __version__
from ssfl.algorithms.options import LocalOptions
from ssfl.comm.flower.recipe import shared_recipe
from ssfl.comm.flower.site import compare
from ssfl.comm.flower.sums import Sums
from ssfl.comm.wire import decode_reply, encode_reply
from ssfl.config import parse
from ssfl.errors import ConfigError, FederationError
from ssfl.federation.messages import Reason, Reply, Task, TaskKind, failed
from ssfl.federation.options import ServerOptions
from ssfl.federation.server import Server

SITES = ((0, 2, 4), (1, 3, 5))
THETA = torch.linspace(0.5, 1.5, LAYOUT.shared)
TASK = Task(TaskKind.TRAIN, 0, THETA, LAYOUT.digest)


class Clients:
    """Clients that answer from a script; `spoil` changes what one of them says."""

    def __init__(self, *ids, spoil=None, late=()):
        self.ids, self.spoil, self.late = ids or range(6), spoil or {}, list(late)

    def clients(self):
        return self.ids

    def sizes(self):
        return [10 + 7 * client for client in self.ids]

    def exchange(self, task, clients, deadline=None):
        yield from self.late
        for client in reversed(clients):
            reply = self.answer(client, task)
            yield self.spoil.get(client, lambda reply, task: reply)(reply, task)

    def answer(self, client, task):
        generator = torch.Generator().manual_seed(100 * task.round + client)
        return Reply(
            client,
            task.kind,
            task.round,
            layout=task.layout,
            delta=torch.randn(LAYOUT.shared, generator=generator) / 10,
            samples=10 + 7 * client,
            steps=(10 + 7 * client) // 9,
            metrics={"loss": float(client)},
            control=None if task.control is None else torch.full_like(task.control, client / 10),
        )

    def close(self): ...


class TwoSites:
    """Two sites that sum, with all that passes between them and the server written down."""

    def __init__(self, options, momentum, spoil=None, at_server=lambda reply: reply, late=()):
        self.sites = [
            Sums(Clients(*ids, spoil=spoil, late=late), options, LAYOUT, momentum) for ids in SITES
        ]
        self.passed, self.at_server = [], at_server

    def clients(self):
        return range(6)

    def sizes(self):
        return Clients().sizes()

    def exchange(self, task, clients, deadline=None):
        for site in self.sites:
            here = [client for client in clients if client in site.clients()]
            for reply in site.exchange(task, here, deadline) if here else ():
                self.passed.append(reply)
                yield decode_reply(*encode_reply(self.at_server(reply)))

    def close(self): ...


def serve(communicator, options, local):
    local = local.model_copy(update={"batch": 9})
    return Server(THETA.clone(), LAYOUT, communicator, options, local, seed=0, metrics=["loss"])


def lost(reply, task):
    return failed(reply.client, task, Reason.LOST, "it is gone")


def not_finite(reply, task):
    return replace(reply, delta=reply.delta * float("nan"))


def far_too_large(reply, task):
    return replace(reply, delta=reply.delta * 1e5)


def of_another_layout(reply, task):
    return replace(reply, layout="another")


def a_cheat(reply):
    """A site that sends what its own checks would have refused."""
    return replace(reply, delta=reply.delta * 1e5) if 1 in reply.clients else reply


@pytest.mark.parametrize("spoil", [{}, {3: lost}, {0: lost, 2: lost, 4: lost}])
@pytest.mark.parametrize(
    ("server", "local"),
    [
        ({}, {}),
        ({"optimizer": "fedadam"}, {}),
        ({"optimizer": "fednova"}, {"momentum": 0.9}),
        ({"aggregation": "l-dawa"}, {}),
        ({}, {"correction": "scaffold"}),
        ({"clients_per_round": 4}, {}),
    ],
)
def test_sums_lead_to_the_same_theta_as_single_updates(server, local, spoil):
    options = ServerOptions(rounds=10, min_replies=0.1, **server)
    local = LocalOptions(**local)
    single = serve(Clients(spoil=spoil), options, local)
    options = options.model_copy(update={"updates": "summed"})
    summed = serve(TwoSites(options, local.momentum, spoil), options, local)
    for _ in range(3):
        one, other = single.play_round(), summed.play_round()
        assert sorted(one.clients) == sorted(other.clients)
        assert (one.accepted, one.images, one.failures) == (
            other.accepted,
            other.images,
            other.failures,
        )
        assert one.metrics == pytest.approx(other.metrics)
    for name, tensor in single.state().items():
        if name != "yardstick":  # the median norm of means is another than that of updates
            torch.testing.assert_close(summed.state()[name], tensor, rtol=1e-5, atol=1e-6)


def test_one_vector_leaves_a_site_and_it_is_nobodys_update():
    options = ServerOptions(rounds=10, updates="summed")
    sites = TwoSites(options, 0.9)
    report = serve(sites, options, LocalOptions()).play_round()
    assert [reply.clients for reply in sites.passed] == [(4, 2, 0), (5, 3, 1)]
    assert report.received == 2 * 4 * LAYOUT.shared
    for reply in sites.passed:
        for client in reply.clients:
            assert not torch.isclose(reply.delta, Clients().answer(client, TASK).delta).any()


@pytest.mark.parametrize("spoiled", [not_finite, far_too_large, of_another_layout])
def test_a_site_leaves_out_the_client_whose_update_cannot_be_right(spoiled, caplog):
    options = ServerOptions(rounds=10, updates="summed")
    server = serve(TwoSites(options, 0.9, {2: spoiled}), options, LocalOptions())
    without = serve(Clients(spoil={2: lost}), options, LocalOptions())
    report = server.play_round()
    without.play_round()
    torch.testing.assert_close(server.theta, without.theta, rtol=1e-5, atol=1e-6)
    assert report.failures == {"refused": 1}
    assert sorted(report.clients) == [0, 1, 3, 4, 5]
    assert "client 2 refused" in caplog.text


def test_a_sum_that_cannot_be_right_costs_all_who_are_in_it(caplog):
    options = ServerOptions(rounds=10, updates="summed", retries=0)
    server = serve(TwoSites(options, 0.9, at_server=a_cheat), options, LocalOptions())
    without = serve(Clients(spoil={1: lost, 3: lost, 5: lost}), options, LocalOptions())
    report = server.play_round()
    without.play_round()
    torch.testing.assert_close(server.theta, without.theta, rtol=1e-5, atol=1e-6)
    assert report.failures == {"refused": 3}
    assert "client 5, 3, 1 refused" in caplog.text


def test_a_sum_where_single_updates_were_agreed_on_is_refused(caplog):
    """It would pass L-DAWA by, of which its site was told nothing, and count spares."""
    agreed = ServerOptions(rounds=10, aggregation="l-dawa", clients_per_round=3, oversample=1.0)
    sites = TwoSites(ServerOptions(rounds=10, updates="summed"), 0.9)
    server = serve(sites, agreed, LocalOptions())
    with pytest.raises(FederationError, match="6 refused"):
        server.play_round()
    assert torch.equal(server.theta, THETA)
    assert "single ones were agreed on (server.updates)" in caplog.text


@pytest.mark.parametrize("optimizer", ["fedavg", "fednova"])
@pytest.mark.parametrize("steps", [0.0, -3.0, 1.5, 1e30])
def test_a_sum_of_an_impossible_number_of_steps_is_refused(steps, optimizer):
    def boast(reply):
        joint = replace(reply.joint, effective_steps=steps)
        return replace(reply, joint=joint, delta=torch.zeros_like(reply.delta))

    options = ServerOptions(
        rounds=10, updates="summed", min_replies=0.1, retries=0, optimizer=optimizer
    )
    sites = TwoSites(options, 0.9, at_server=lambda r: boast(r) if 1 in r.clients else r)
    assert serve(sites, options, LocalOptions()).play_round().failures == {"refused": 3}


def test_those_missing_from_a_sum_are_asked_again_when_too_few_took_part():
    options = ServerOptions(rounds=10, updates="summed", min_replies=1.0)
    calls = []

    def at_second(reply, task):
        calls.append(reply.client)
        return lost(reply, task) if len(calls) == 1 else reply

    server = serve(TwoSites(options, 0.9, {4: at_second}), options, LocalOptions())
    single = serve(Clients(), options, LocalOptions())
    report = server.play_round()
    single.play_round()
    assert sorted(report.clients) == [0, 1, 2, 3, 4, 5]
    assert len(calls) == 2
    torch.testing.assert_close(server.theta, single.theta, rtol=1e-5, atol=1e-6)


def test_a_late_update_never_leaves_its_site():
    options = ServerOptions(rounds=10, updates="summed")
    sites = TwoSites(options, 0.9, late=[Clients().answer(2, TASK)])
    server = serve(sites, options, LocalOptions())
    server.play_round()
    sites.passed.clear()
    report = server.play_round()
    assert {reply.round for reply in sites.passed} == {1}
    assert report.late == []


def test_evaluations_stay_single():
    options = ServerOptions(rounds=10, updates="summed")
    replies = serve(TwoSites(options, 0.9), options, LocalOptions()).evaluate([3, 0, 1])
    assert [(reply.client, reply.joint) for reply in replies] == [(3, None), (0, None), (1, None)]


def test_an_algorithm_that_sends_nothing_has_nothing_to_sum():
    options = ServerOptions(rounds=10, updates="summed")
    silent = dict.fromkeys(range(6), lambda reply, task: replace(reply, delta=None))
    server = serve(TwoSites(options, 0.9, silent), options, LocalOptions())
    assert server.play_round().accepted == 6
    assert torch.equal(server.theta, THETA)


@pytest.mark.parametrize("policy", [{"oversample": 0.5}, {"late": "discount"}])
def test_what_needs_single_updates_is_refused_in_a_sentence(policy):
    with pytest.raises(ConfigError, match="leaves the server no single update"):
        parse({"server": {"updates": "summed", **policy}})


def test_server_and_sites_must_agree_on_how_updates_are_summed():
    def shared(**server):
        return shared_recipe(parse({"server": server}))

    assert compare(shared(rounds=3), shared(rounds=5, optimizer="fedadam")) == ""
    assert "server.updates is 'summed' here" in compare(shared(updates="summed"), shared())
    summed = shared(updates="summed", optimizer="fednova")
    assert "server.optimizer is 'fedavg' here" in compare(shared(updates="summed"), summed)


def test_server_and_sites_must_have_one_version_of_ssfl(monkeypatch):
    ours = shared_recipe(parse({}))
    monkeypatch.setattr("ssfl.comm.flower.recipe.__version__", "9.9")
    told = compare(ours, shared_recipe(parse({})))
    assert told == f"version of ssfl is '{__version__}' here and '9.9' at the server"
