"""Branches from one trunk: what a client's rate and the server's step do to a run midway.

    python benchmarks/branches.py [--recipe ssfl-iid] [--set local.batch=64 ...] [--json FILE]

A trunk of some rounds at one rate, then from its Θ one branch after another with another local
rate, server rate or server momentum, each ended by a few rounds in which the local rate falls to
zero: noise hides what was learnt, so branches are compared after that. The last branch goes on from
the end of the best, before its rate fell. Three further figures tell signal from noise: how far a
client and how far Θ move in a round (‖Δ‖/‖Θ‖, mean over convolutions), and the kNN of one client's
Θ_k beside the average's. Prints a Markdown table and writes JSON.

Rounds are numbered on from branch to branch: each sees views and orders of its own.
"""

import argparse
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from measuring import markdown, publish
from torch import Tensor

from ssfl.assemble import build_hosts, load_federated
from ssfl.comm.local import LocalCommunicator
from ssfl.config import load_config
from ssfl.errors import SSFLError
from ssfl.federation.messages import Reply
from ssfl.federation.online import OnlineEvaluation
from ssfl.federation.server import Server
from ssfl.federation.server_optimizers import build_server_optimizer
from ssfl.federation.store import StateStore
from ssfl.models.flat import Kind


@dataclass(frozen=True)
class Branch:
    """What is set, and for how many rounds."""

    name: str
    rate: float
    rounds: int
    falling: int = 0
    """Rounds, after the others, in which the local rate falls to zero."""
    server_rate: float = 1.0
    server_momentum: float = 0.0


@dataclass(frozen=True)
class Sight:
    """A look at a run after a round."""

    branch: str
    round: int
    rate: float
    loss: float
    knn: float
    effective_rank: float
    client_moves: float
    theta_moves: float
    client_knn: float


class Grower:
    """A server whose rate and optimizer are changed as it goes."""

    def __init__(self, recipe: str, settings: list[str], folder: Path) -> None:
        config = load_config(recipe, settings)
        data = load_federated(config)
        hosts = build_hosts(config, data, StateStore(folder, 1 << 30))
        trainer = hosts[0].trainer
        self.transport = LocalCommunicator(hosts)
        self.server = _Steered(
            trainer.models.global_.flat.shared.clone(),
            trainer.layout,
            self.transport,
            config.server,
            config.local,
            config.seed,
            trainer.algorithm.metrics,
        )
        self.evaluation = OnlineEvaluation(config.evaluation, data, trainer, self.server)
        self.convolutions = [
            entry.range
            for entry in trainer.layout.entries
            if entry.kind is Kind.WEIGHT and len(entry.shape) == 4
        ]

    def grow(self, branch: Branch, theta: Tensor, every: int) -> tuple[list[Sight], Tensor]:
        """What was seen, and Θ before its rate fell."""
        server = self.server
        server.theta = before_fall = theta
        server.steer(branch)
        sights = []
        for number in range(1, branch.rounds + branch.falling + 1):
            fallen = max(0.0, (number - branch.rounds - 0.5) / max(1, branch.falling))
            server.local_rate = branch.rate * (1 - fallen)
            due = number % every == 0 or number in (branch.rounds, branch.rounds + branch.falling)
            if due:
                sights.append(self._look(branch.name, number))
                print(sights[-1], file=sys.stderr)
            else:
                server.play_round()
            if number == branch.rounds:
                before_fall = server.theta.clone()
        return sights, before_fall

    def _look(self, name: str, number: int) -> Sight:
        """Play a round, watching."""
        before = self.server.theta
        moves: list[float] = []
        theirs: dict[int, Tensor] = {}

        def watch(reply: Reply) -> None:
            assert reply.delta is not None
            moves.append(self._moved(reply.delta, before))
            theirs[reply.client] = before + reply.delta

        report = self.server.play_round(watch)
        after = self.server.theta
        found = self.evaluation.shared(after)
        return Sight(
            branch=name,
            round=number,
            rate=self.server.local_rate,
            loss=report.metrics["loss"],
            knn=found["knn_global"],
            effective_rank=found["effective_rank"],
            client_moves=sum(moves) / len(moves),
            theta_moves=self._moved(after - before, before),
            client_knn=self.evaluation.shared(theirs[min(theirs)])["knn_global"],
        )

    def _moved(self, delta: Tensor, theta: Tensor) -> float:
        shares = [delta[part].norm() / theta[part].norm() for part in self.convolutions]
        return float(torch.stack(shares).mean())


class _Steered(Server):
    """Takes its rate from outside, and a new server optimizer whenever it is told."""

    local_rate = 0.0

    def rate(self, round_: int) -> float:
        return self.local_rate

    def steer(self, branch: Branch) -> None:
        changes = {
            "lr": branch.server_rate,
            "optimizer": "fedavgm" if branch.server_momentum else "fedavg",
            "momentum": branch.server_momentum,
        }
        options = self._options.model_copy(update=changes)
        self._optimizer = build_server_optimizer(options, self.layout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="ssfl-iid")
    parser.add_argument("--set", nargs="*", default=["local.batch=64", "local.decay_norms=false"])
    parser.add_argument("--rate", type=float, default=0.1, help="of the trunk")
    parser.add_argument("--trunk", type=int, default=60, help="its rounds")
    parser.add_argument("--rounds", type=int, default=60, help="of a branch")
    parser.add_argument("--falling", type=int, default=20, help="rounds, after those, to rate 0")
    parser.add_argument("--longer", type=int, default=100, help="rounds the best goes on for")
    parser.add_argument("--every", type=int, default=20, help="rounds between two looks")
    parser.add_argument("--json", type=Path, default=Path("branches.json"))
    args = parser.parse_args()
    trunk = Branch("trunk", args.rate, args.trunk)
    third = 0.3 * args.rate
    same = Branch("as before", args.rate, args.rounds, args.falling)
    branches = [
        same,
        replace(same, name="server rate 3.33", rate=third, server_rate=3.33),
        replace(same, name="rate 0.3 of it", rate=third),
        replace(same, name="server rate 10", rate=0.1 * args.rate, server_rate=10.0),
        replace(same, name="server momentum 0.7", rate=third, server_momentum=0.7),
    ]
    with tempfile.TemporaryDirectory() as folder:
        grower = Grower(args.recipe, args.set, Path(folder))
        sights, start = grower.grow(trunk, grower.server.theta, args.every)
        ends: list[tuple[float, Branch, Tensor]] = []
        for branch in branches:
            seen, before_fall = grower.grow(branch, start.clone(), args.every)
            ends.append((seen[-1].knn, branch, before_fall))
            sights += seen
        _, best, at = max(ends, key=lambda end: end[0])
        longer = replace(
            best, name=f"{best.name}, longer", rounds=args.longer, falling=2 * args.falling
        )
        sights += grower.grow(longer, at.clone(), args.every)[0]
        grower.transport.close()
    rows = [
        [
            sight.branch,
            sight.round,
            f"{sight.rate:.4g}",
            f"{sight.loss:.3f}",
            f"{sight.knn:.4f}",
            f"{sight.effective_rank:.0f}",
            f"{sight.client_moves:.3f}",
            f"{sight.theta_moves:.3f}",
            f"{sight.client_knn:.4f}",
        ]
        for sight in sights
    ]
    columns = "branch, round, rate, loss, kNN, rank, client moves, Θ moves, a client's kNN"
    result = {
        "recipe": args.recipe,
        "settings": args.set,
        "branches": [asdict(branch) for branch in (trunk, *branches, longer)],
        "sights": [asdict(sight) for sight in sights],
    }
    publish(markdown(columns.split(", "), rows), result, args.json)


if __name__ == "__main__":
    try:
        main()
    except SSFLError as error:  # most likely there is no CIFAR-10
        raise SystemExit(str(error)) from None
