"""The server on good days and bad ones, with clients that do exactly what a test tells them."""

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from scalar_model import LAYOUT
from torch import Tensor

from ssfl.algorithms.options import LocalOptions
from ssfl.errors import CheckpointError, FederationError
from ssfl.federation.messages import Reason, Reply, Task, TaskKind, failed
from ssfl.federation.options import ServerOptions
from ssfl.federation.server import Server

SIZES = [40, 30, 20, 10]
LOCAL = LocalOptions(batch=10)
"""Makes 4, 3, 2 and 1 steps of these sizes."""
SCAFFOLD = LocalOptions(batch=10, correction="scaffold")
Answer = Callable[[int, Task], Reply]


def delta(client: int, round_: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * round_ + client)
    return torch.randn(LAYOUT.shared, generator=generator) / 10


def honest(client: int, task: Task) -> Reply:
    return Reply(
        client,
        task.kind,
        task.round,
        layout=task.layout,
        delta=delta(client, task.round),
        samples=SIZES[client],
        steps=4 - client,
        metrics={"loss": float(client)},
        control=None if task.control is None else torch.full_like(task.control, client + 1.0),
    )


class Party:
    """A communicator without clients: `answers` says what each would have said."""

    def __init__(self, answers: dict[int, Answer] | None = None) -> None:
        self.answers = answers or {}
        self.asked: list[list[int]] = []
        self.tasks: list[Task] = []
        self.deadlines: list[float | None] = []
        self.late: list[Reply] = []
        self.order: Callable[[Sequence[int]], Sequence[int]] = lambda clients: clients

    def clients(self) -> Sequence[int]:
        return range(len(SIZES))

    def sizes(self) -> Sequence[int]:
        return SIZES

    def exchange(
        self, task: Task, clients: Sequence[int], deadline: float | None = None
    ) -> Iterator[Reply]:
        self.asked.append(list(clients))
        self.tasks.append(task)
        self.deadlines.append(deadline)
        yield from self.late
        self.late = []
        for client in self.order(clients):
            yield self.answers.get(client, honest)(client, task)

    def close(self) -> None: ...


THETA = torch.linspace(0.5, 1.5, LAYOUT.shared)


def serve(
    party: Party,
    local: LocalOptions | None = None,
    theta: Tensor = THETA,
    **options: object,
) -> Server:
    given = ServerOptions(**{"rounds": 10, **options})  # type: ignore[arg-type]
    return Server(theta.clone(), LAYOUT, party, given, local or LOCAL, seed=0, metrics=["loss"])


def mean(weights: dict[int, float], round_: int = 0) -> Tensor:
    """Σ w_k Δ_k / Σ w_k in double precision."""
    total = sum(weights.values())
    return sum(
        (delta(client, round_).double() * weight / total for client, weight in weights.items()),
        torch.zeros(LAYOUT.shared, dtype=torch.float64),
    ).float()


def test_theta_moves_by_the_mean_of_the_updates_weighted_by_size() -> None:
    server = serve(Party())
    report = server.play_round()
    expected = THETA + mean({0: 40, 1: 30, 2: 20, 3: 10})
    torch.testing.assert_close(server.theta, expected)
    assert report.metrics["loss"] == pytest.approx((1 * 30 + 2 * 20 + 3 * 10) / 100)
    assert (report.accepted, report.asked, report.images) == (4, 4, 100)
    assert report.update_norm == pytest.approx(float((expected - THETA).norm()), rel=1e-5)


def test_the_order_in_which_replies_come_changes_no_bit() -> None:
    outcomes, thetas = [], []
    for order in itertools.permutations(range(4)):
        party = Party()
        party.order = lambda clients, order=order: [c for c in order if c in clients]
        server = serve(party)
        server.play_round()
        report, gathered = server.gather()
        outcomes.append(gathered.finish().delta)  # of Θ, so much longer, few bits would differ
        server.advance(report, gathered)
        thetas.append(server.theta)
    assert all(torch.equal(delta, outcomes[0]) for delta in outcomes)
    assert all(torch.equal(theta, thetas[0]) for theta in thetas)


@pytest.mark.parametrize("reason", [Reason.ERROR, Reason.LOST, Reason.DEADLINE])
def test_a_failed_client_costs_its_own_update_only(reason: Reason) -> None:
    server = serve(Party({1: lambda client, task: failed(client, task, reason, "bad luck")}))
    report = server.play_round()
    torch.testing.assert_close(server.theta, THETA + mean({0: 40, 2: 20, 3: 10}))
    assert report.failures == {str(reason): 1}
    assert report.accepted == 3


def test_those_who_failed_are_asked_again_when_too_few_replied() -> None:
    tries = itertools.count()

    def at_second(client: int, task: Task) -> Reply:
        if next(tries) < 3:
            return failed(client, task, Reason.LOST, "not yet")
        return honest(client, task)

    party = Party(dict.fromkeys((1, 2, 3), at_second))
    server = serve(party, retries=1)
    report = server.play_round()
    assert party.asked == [[0, 1, 2, 3], [1, 2, 3]]
    torch.testing.assert_close(server.theta, THETA + mean(dict(enumerate(SIZES))))
    assert report.failures == {}
    assert report.accepted == 4


def test_work_that_was_refused_is_not_asked_for_again_and_is_counted_still() -> None:
    def refused(client: int, task: Task) -> Reply:
        return failed(client, task, Reason.REFUSED, "too long")

    tries = itertools.count()

    def at_second(client: int, task: Task) -> Reply:
        return honest(client, task) if next(tries) else failed(client, task, Reason.LOST, "gone")

    party = Party({1: refused, 2: at_second})
    report = serve(party, retries=5, min_replies=1).play_round
    with pytest.raises(FederationError, match=r"only 3 of 4 .* 1 refused, the first: too long"):
        report()
    assert party.asked == [[0, 1, 2, 3], [2]]


def test_a_task_says_how_long_updates_may_be_once_that_is_known() -> None:
    party = Party()
    server = serve(party, max_norm_ratio=7.0)
    for _ in range(2):
        server.play_round()
    norms = sorted(
        float(delta(k, 0).norm()) / math.sqrt(honest(k, party.tasks[0]).steps) for k in range(4)
    )
    assert [task.limit for task in party.tasks] == pytest.approx([0.0, 7 * norms[1]])


def test_a_round_with_too_few_replies_ends_the_run_and_moves_nothing() -> None:
    def lost(client: int, task: Task) -> Reply:
        return failed(client, task, Reason.LOST, "the line is dead")

    party = Party()
    server = serve(party, retries=2, optimizer="fedadam")
    server.play_round()
    before = {name: tensor.clone() for name, tensor in server.state().items()}
    party.answers = dict.fromkeys((0, 1, 3), lost)
    with pytest.raises(FederationError, match=r"round 2: only 1 of 4 .* the line is dead"):
        server.play_round()
    assert party.asked[1:] == [[0, 1, 2, 3], [0, 1, 3], [0, 1, 3]]
    assert server.rounds_done == 1
    after = server.state()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def not_finite(reply: Reply) -> Reply:
    assert reply.delta is not None
    return replace(reply, delta=reply.delta.index_fill(0, torch.tensor(2), float("nan")))


def infinite(reply: Reply) -> Reply:
    assert reply.delta is not None
    return replace(reply, delta=reply.delta.index_fill(0, torch.tensor(2), float("inf")))


def huge(reply: Reply) -> Reply:
    assert reply.delta is not None
    return replace(reply, delta=100 * reply.delta)


BAD = {
    "not finite": not_finite,
    "not finite ": infinite,
    "another layout": lambda reply: replace(reply, layout="0123456789abcdef"),
    "another layout ": lambda reply: replace(reply, delta=torch.zeros(LAYOUT.shared + 1)),
    "of round 8": lambda reply: replace(reply, round=7),
    "evaluate reply": lambda reply: replace(reply, kind=TaskKind.EVALUATE),
    "over the limit": huge,
    "-5 samples": lambda reply: replace(reply, samples=-5),
    "claims 1000000000000 samples, but 20 were announced": (
        lambda reply: replace(reply, samples=10**12)
    ),
    "claims 1000000000000000 steps, but 20 samples make 2": (
        lambda reply: replace(reply, steps=10**15)
    ),
    "claims 1 steps, but": lambda reply: replace(reply, steps=1),
    "control variate": lambda reply: replace(reply, control=torch.zeros(LAYOUT.trainable)),
}


@pytest.mark.parametrize("complaint", BAD)
def test_an_update_that_cannot_be_right_is_refused_counted_and_named(
    complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    party = Party()
    server = serve(party)
    server.play_round()  # gives the yardstick for norms
    theta = server.theta
    party.answers[2] = lambda client, task: BAD[complaint](honest(client, task))
    with caplog.at_level(logging.WARNING):
        report = server.play_round()
    torch.testing.assert_close(server.theta, theta + mean({0: 40, 1: 30, 3: 10}, round_=1))
    assert report.failures == {"refused": 1}
    assert "client 2 refused" in caplog.text
    assert complaint.strip() in caplog.text


def test_before_there_is_a_yardstick_updates_are_measured_by_theta() -> None:
    def enormous(client: int, task: Task) -> Reply:
        return replace(honest(client, task), delta=task.theta * 31)

    report = serve(Party({3: enormous})).play_round()
    assert report.failures == {"refused": 1}


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 1e15])
def test_a_broken_control_variate_is_refused(broken: float) -> None:
    def answer(client: int, task: Task) -> Reply:
        assert task.control is not None
        return replace(honest(client, task), control=torch.full_like(task.control, broken))

    party = Party()
    server = serve(party, SCAFFOLD)
    for answers in ({0: answer}, {}, {0: answer}):  # without a yardstick, and with one
        party.answers = dict(answers)
        assert server.play_round().failures == ({"refused": 1} if answers else {})
    assert server.state()["control"].abs().max() < 10


def test_late_replies_are_dropped_or_folded_at_a_discount() -> None:
    for policy in ("drop", "discount"):
        party = Party({1: too_slow})
        server = serve(party, late=policy, staleness=0.5)
        server.play_round()
        after_one = server.theta
        task = party.tasks[0]
        party.answers = {}
        party.late = [honest(1, task)]
        report = server.play_round()
        assert report.late == [(1, 0)]
        assert report.accepted == 4
        moved = mean(dict(enumerate(SIZES)), round_=1)
        if policy == "discount":
            late = 30 / math.sqrt(2)
            moved = (moved * 100 + delta(1, 0) * late) / (100 + late)
        torch.testing.assert_close(server.theta, after_one + moved)


def too_slow(client: int, task: Task) -> Reply:
    return failed(client, task, Reason.DEADLINE, "no reply within 1 s")


def test_a_late_reply_that_cannot_be_right_does_not_cost_its_clients_new_one() -> None:
    party = Party({1: too_slow})
    server = serve(party, late="discount")
    server.play_round()
    theta = server.theta
    party.answers = {}
    party.late = [not_finite(honest(1, party.tasks[0]))]
    report = server.play_round()
    assert report.late == []
    torch.testing.assert_close(server.theta, theta + mean(dict(enumerate(SIZES)), round_=1))


def test_only_who_was_given_up_may_be_late_and_only_once() -> None:
    honestly, greedily = Party({1: too_slow}), Party({1: too_slow})
    servers = [serve(party, late="discount") for party in (honestly, greedily)]
    for party, server in zip((honestly, greedily), servers, strict=True):
        server.play_round()
        party.answers = {}
    late = honest(1, honestly.tasks[0])
    uncalled_for = honest(0, honestly.tasks[0])  # it was in time then
    honestly.late, greedily.late = [late], [late, uncalled_for] * 100
    reports = [server.play_round() for server in servers]
    assert [report.late for report in reports] == [[(1, 0)]] * 2
    greedily.late = [late] * 100  # it has had its turn
    reports = [server.play_round() for server in servers]
    assert [report.late for report in reports] == [[], []]
    for name, tensor in servers[0].state().items():
        assert torch.equal(servers[1].state()[name], tensor), name


def test_work_that_was_missed_in_many_rounds_is_not_saved_up() -> None:
    party = Party({1: too_slow})
    server = serve(party, late="discount")
    for _ in range(3):
        server.play_round()
    missed = [honest(1, task) for task in party.tasks]
    party.late = list(missed)
    assert server.play_round().late == [(1, 0)]
    assert server.state()["overdue"].tolist() == [[1, 3]]  # it is at work for this one
    party.late = list(missed)
    assert server.play_round().late == []


def test_who_comes_back_is_asked_and_owes_nothing_more() -> None:
    party = Party({1: too_slow})
    server = serve(party, late="discount")
    for _ in range(3):
        server.play_round()
    party.answers = {}
    assert server.play_round().accepted == 4
    assert "overdue" not in server.state()


def test_the_order_in_which_late_replies_come_changes_no_bit() -> None:
    outcomes = []
    for order in itertools.permutations((0, 1, 2)):
        party = Party(dict.fromkeys((0, 1, 2), too_slow))
        server = serve(party, late="discount", min_replies=0.1)
        server.play_round()
        party.answers = {}
        party.late = [honest(client, party.tasks[0]) for client in order]
        report, gathered = server.gather()
        assert sorted(report.late) == [(0, 0), (1, 0), (2, 0)]
        outcomes.append(gathered.finish().delta)  # of Θ, so much longer, few bits would differ
    assert all(torch.equal(delta, outcomes[0]) for delta in outcomes)


@pytest.mark.parametrize(("deadline", "given"), [(0.0, None), (2.5, 2.5)])
def test_clients_have_until_the_deadline_or_as_long_as_it_takes(
    deadline: float, given: float | None
) -> None:
    server = serve(party := Party(), deadline=deadline)
    server.play_round()
    server.evaluate([0, 1])
    assert party.deadlines == [given, given]


def test_a_round_takes_no_more_seconds_than_have_passed() -> None:
    server, started = serve(Party()), time.perf_counter()
    taken = server.play_round().seconds
    assert 0 < taken <= time.perf_counter() - started


def test_a_resumed_server_knows_who_may_still_be_late() -> None:
    first = Party({1: too_slow, 2: too_slow})
    through = serve(first, late="discount")
    through.play_round()
    saved = {name: tensor.clone() for name, tensor in through.state().items()}
    second = Party()
    resumed = serve(second, late="discount")
    resumed.load(saved, rounds_done=1)
    first.answers = second.answers = {2: too_slow}
    first.late = second.late = [honest(client, first.tasks[0]) for client in (1, 3)]
    assert through.play_round().late == resumed.play_round().late == [(1, 0)]
    assert torch.equal(through.theta, resumed.theta)
    assert resumed.state()["overdue"].tolist() == [[2, 0], [2, 1]]


def test_over_sampled_clients_stand_in_for_those_that_fail() -> None:
    party = Party()
    server = serve(party, clients_per_round=2, oversample=0.5)
    report = server.play_round()
    (asked,) = party.asked
    assert len(asked) == 3
    assert report.accepted == 2
    torch.testing.assert_close(server.theta, THETA + mean({c: SIZES[c] for c in asked[:2]}))

    party.answers[asked[0]] = lambda client, task: failed(client, task, Reason.LOST, "gone")
    again = serve(party, clients_per_round=2, oversample=0.5)
    again.play_round()
    torch.testing.assert_close(again.theta, THETA + mean({c: SIZES[c] for c in asked[1:]}))


def test_a_share_of_clients_is_rounded_up_but_not_for_a_floats_sake() -> None:
    class Crowd(Party):
        def clients(self) -> Sequence[int]:
            return range(200)

        def sizes(self) -> Sequence[int]:
            return [10] * 200

    def one(client: int, task: Task) -> Reply:
        return replace(honest(3, task), client=client)

    def gone(client: int, task: Task) -> Reply:
        return failed(client, task, Reason.LOST, "gone")

    for oversample, asked in ((0.1, 110), (0.101, 111)):
        server = serve(
            party := Crowd(dict.fromkeys(range(200), one)),
            clients_per_round=100,
            oversample=oversample,
        )
        server.play_round()
        assert len(party.asked[0]) == asked
    few = {
        client: one if client < 7 else gone for client in range(200)
    }  # 0.035 · 200 > 7, as floats go
    few_of_many = serve(Crowd(few), clients_per_round=0, min_replies=0.035, retries=0)
    assert 0.035 * 200 > 7
    assert few_of_many.play_round().accepted == 7


def test_over_sampling_hears_small_clients_as_often_as_large_ones() -> None:
    party = Party()
    server = serve(party, clients_per_round=2, oversample=1.0, rounds=200)
    heard = [0] * 4
    for _ in range(200):
        server.play_round()
        for client in party.asked[-1][:2]:
            heard[client] += 1
    assert min(heard) > 75  # 100 each expected, standard deviation 7


def test_scaffolds_task_says_which_rounds_of_its_clients_were_folded() -> None:
    party = Party({1: lambda client, task: failed(client, task, Reason.LOST, "gone")})
    server = serve(party, SCAFFOLD, clients_per_round=3, oversample=0.3, sampler="round-robin")
    folded: dict[int, int] = {}
    for round_ in range(4):
        report = server.play_round()
        assert party.tasks[-1].folded == {
            client: folded[client] for client in party.asked[-1] if client in folded
        }
        folded |= dict.fromkeys(report.clients, round_)
    assert 1 not in folded
    assert dict(server.state()["folded"].tolist()) == folded


def test_scaffolds_control_variate_moves_by_the_changes_times_their_shares_of_all_images() -> None:
    server = serve(Party(), SCAFFOLD, clients_per_round=2)
    party = server._communicator
    assert isinstance(party, Party)
    expected = 0.0
    for _ in range(3):
        server.play_round()
        told = party.tasks[-1].control
        assert told is not None
        torch.testing.assert_close(told, torch.full((LAYOUT.trainable,), expected))
        changes = [SIZES[client] * (client + 1) for client in party.asked[-1]]
        expected += sum(changes) / sum(SIZES)
    control = server.state()["control"]
    torch.testing.assert_close(control, torch.full((LAYOUT.trainable,), expected))


def test_a_round_that_was_gathered_counts_though_all_clients_have_gone_since() -> None:
    class Gone(Party):
        def clients(self) -> Sequence[int]:
            if self.asked:
                raise FederationError("only 0 of 1 clients joined within 1 s")
            return super().clients()

    server = serve(Gone(), SCAFFOLD)
    server.advance(*server.gather())
    assert server.rounds_done == 1
    torch.testing.assert_close(server.theta, THETA + mean(dict(enumerate(SIZES))))
    control = sum(size * (client + 1) for client, size in enumerate(SIZES)) / sum(SIZES)
    torch.testing.assert_close(server.state()["control"], torch.full((LAYOUT.trainable,), control))


def test_the_rate_follows_a_cosine_over_rounds_from_lr_towards_zero() -> None:
    party = Party()
    server = serve(party, LocalOptions(batch=10, lr=0.2), rounds=4)
    for _ in range(4):
        server.play_round()
    root = math.sqrt(0.5)
    expected = [0.2, 0.1 * (1 + root), 0.1, 0.1 * (1 - root)]
    assert [task.rate for task in party.tasks] == pytest.approx(expected)
    assert [task.progress for task in party.tasks] == [0, 0.25, 0.5, 0.75]
    assert [task.durable for task in party.tasks] == [0] * 4  # nothing has been saved
    constant = serve(Party(), LocalOptions(lr=0.2, schedule="constant"), rounds=4)
    assert [constant.rate(round_) for round_ in range(4)] == [0.2] * 4


def test_with_a_warm_up_the_rate_rises_in_equal_steps_and_the_cosine_has_the_other_rounds() -> None:
    root = math.sqrt(0.5)
    rise, fall = [0.05, 0.1, 0.15], [0.2, 0.1 * (1 + root), 0.1, 0.1 * (1 - root)]
    options = {"lr": 0.2, "warmup": 3 / 7}
    cosine = serve(Party(), LocalOptions(**options), rounds=7)
    assert [cosine.rate(round_) for round_ in range(7)] == pytest.approx(rise + fall)
    constant = serve(Party(), LocalOptions(**options, schedule="constant"), rounds=7)
    assert [constant.rate(round_) for round_ in range(7)] == pytest.approx(rise + [0.2] * 4)


@pytest.mark.parametrize(("share", "rounds"), [(0.0, 5), (0.19, 5), (0.99, 1)])
def test_a_warm_up_of_less_than_a_round_is_none(share: float, rounds: int) -> None:
    options = LocalOptions(lr=0.2, warmup=share)
    assert options.rate(0, rounds) == 0.2


@pytest.mark.parametrize(
    "optimizer", ["fedavg", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "fednova"]
)
def test_a_server_loaded_from_its_state_goes_on_identically(optimizer: str) -> None:
    local = SCAFFOLD
    options = {"optimizer": optimizer, "clients_per_round": 2, "lr": 0.3}
    through = serve(Party(), local, **options)
    for _ in range(6):
        through.play_round()
    first = serve(Party(), local, **options)
    for _ in range(3):
        first.play_round()
    saved = {name: tensor.clone() for name, tensor in first.state().items()}
    first.play_round()  # what comes after the checkpoint must not reach into it
    party = Party()
    second = serve(party, local, theta=torch.zeros_like(THETA), **options)
    second.load(saved, rounds_done=3)
    for _ in range(3):
        second.play_round()
    assert second.rounds_done == 6
    assert [task.durable for task in party.tasks] == [3, 3, 3]
    for name, tensor in through.state().items():
        assert torch.equal(second.state()[name], tensor), name


def test_a_state_of_other_options_is_refused() -> None:
    plain = serve(Party())
    plain.play_round()
    with pytest.raises(CheckpointError, match="fedadam"):
        serve(Party(), optimizer="fedadam").load(plain.state(), 1)
    with pytest.raises(CheckpointError, match=r"local\.correction"):
        serve(Party(), SCAFFOLD).load(plain.state(), 1)


def test_an_algorithm_that_sends_nothing_moves_nothing() -> None:
    def silent(client: int, task: Task) -> Reply:
        return replace(honest(client, task), delta=None, layout="")

    server = serve(Party(dict.fromkeys(range(4), silent)))
    report = server.play_round()
    assert torch.equal(server.theta, THETA)
    assert (report.accepted, report.update_norm, server.rounds_done) == (4, 0.0, 1)
    assert report.metrics["loss"] == pytest.approx(1.0)


def test_of_what_clients_report_only_the_algorithms_figures_are_kept() -> None:
    def talkative(client: int, task: Task) -> Reply:
        return replace(honest(client, task), metrics={"loss": 1.0, "round": 7.0, "accepted": 9.0})

    report = serve(Party(dict.fromkeys(range(4), talkative))).play_round()
    assert report.metrics == pytest.approx({"loss": 1.0})


@pytest.mark.parametrize("optimizer", ["fedavg", "fedadam", "fednova"])
def test_a_round_reports_how_far_theta_moved_whatever_moved_it(optimizer: str) -> None:
    server = serve(Party(), optimizer=optimizer, lr=0.3)
    for _ in range(2):
        before = server.theta
        report = server.play_round()
        assert report.update_norm == pytest.approx(float((server.theta - before).norm()), rel=1e-5)


def test_evaluation_asks_in_order_and_leaves_failures_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    party = Party({2: lambda client, task: failed(client, task, Reason.ERROR, "no")})
    party.order = lambda clients: list(reversed(clients))
    server = serve(party, SCAFFOLD)
    replies = server.evaluate([0, 2, 3])
    assert [reply.client for reply in replies] == [0, 3]
    assert "after round 0: figures are of 2 of 3 clients; client 2 error: no" in caplog.text
    assert party.tasks[0].kind is TaskKind.EVALUATE
    assert party.tasks[0].control is None
    assert server.rounds_done == 0
