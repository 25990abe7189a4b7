"""A run's record as a page needs it: curves, last figures, failures, seconds."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ssfl.algorithms import ALGORITHMS
from ssfl.federation.checkpoint import latest_checkpoint
from ssfl.paper import PaperFigures
from ssfl.protocols.scores import Evaluation, Score, load_evaluation, over_clients
from ssfl.run import Run
from ssfl.tracking import Row, client_mean

ONLINE = {"knn_global": "global_knn", "knn_mean": "personal_knn"}
"""Figures measured beside the training, by the names of the evaluation after it."""


_JUDGING = {
    "loading": "loading encoders",
    "features": "forward passes",
    "knn": "kNN",
    "linear": "linear classifiers",
    "federated-linear": "FedAvg's classifier",
    "mirrored-linear": "with mirror images",
    "naive-federated-linear": "naive FedAvg",
    "semi-linear": "few labels, linear",
    "semi-finetune": "few labels, fine-tuning",
}
"""What an evaluation's parts are called on the page."""


@dataclass(frozen=True)
class Record:
    """What a run directory says, read once."""

    run: Run

    @cached_property
    def rows(self) -> list[Row]:
        return self.run.metrics

    @cached_property
    def rounds(self) -> list[Row]:
        return [row for row in self.rows if row["kind"] == "round"]

    @cached_property
    def evaluations(self) -> list[Row]:
        return [row for row in self.rows if row["kind"] == "evaluation"]

    @cached_property
    def baseline(self) -> Row:
        return next((row for row in self.rows if row["kind"] == "baseline"), {})

    @cached_property
    def done(self) -> int:
        """Rounds behind it; of those a site has no rows, but Θ as it was when last judged."""
        if self.run.config.here is None:
            return len(self.rounds)
        saved = latest_checkpoint(self.run.checkpoints)
        return saved.rounds if saved else 0

    @cached_property
    def clients(self) -> int:
        """How many there are; a coordinator's may have become more since it began."""
        return max(int(self.facts["clients"]), len(self.run.clients))

    @property
    def at_sites(self) -> bool:
        """The images are not where this run was coordinated."""
        return not self.facts["train_images"]

    @property
    def last(self) -> Row:
        """The last evaluation beside the training; where there was none, as at a site, and there
        are no labels, the health that `ssfl evaluate` found."""
        found = self.evaluation
        if self.evaluations or found is None or found.scores:
            return self.evaluations[-1] if self.evaluations else {}
        clients = {who: figures for who, figures in found.health.items() if who != "global"}
        return {**found.health.get("global", {}), "clients": clients}

    @cached_property
    def saved_evaluation(self) -> Evaluation | None:
        """What `ssfl evaluate` found, at whatever round."""
        return load_evaluation(self.run.evaluation)

    @property
    def evaluation(self) -> Evaluation | None:
        """What `ssfl evaluate` found, if it was run on this very checkpoint."""
        found = self.saved_evaluation
        return found if found and found.rounds == self.done else None

    @property
    def paper(self) -> PaperFigures:
        return self.run.config.paper

    @property
    def name(self) -> str:
        """The run directory's; of a site's run that is a long number, so what was agreed on."""
        if self.run.config.here is not None:
            return self.run.config.name
        return self.run.path.resolve().name or self.run.config.name

    @cached_property
    def facts(self) -> dict[str, Any]:
        return self.run.facts

    def curve(self, kind: str, figure: str) -> list[tuple[float, float]]:
        """A figure against the number of rounds done."""
        rows, shift = (self.rounds, 1) if kind == "round" else (self.evaluations, 0)
        found = [(row["round"] + shift, row.get(figure)) for row in rows]
        return [(x, float(y)) for x, y in found if y is not None]

    @property
    def health_of_clients(self) -> bool:
        """Health is the mean over clients' own encoders: the images are at sites, or there is no
        Θ to be well."""
        return self.at_sites or not self.shares

    def health(self, row: Row, figure: str) -> float | None:
        """A health figure of Θ, or the mean of what clients sent."""
        found = client_mean(row, figure) if self.health_of_clients else row.get(figure)
        return None if found is None else float(found)

    def health_curve(self, figure: str) -> list[tuple[float, float]]:
        """A health figure against the number of rounds done."""
        found = [(row["round"], self.health(row, figure)) for row in self.evaluations]
        return [(x, y) for x, y in found if y is not None]

    @cached_property
    def scores(self) -> list[Score]:
        """The final figures: the evaluation's, and the indicators' where it did not run."""
        scores = list(self.evaluation.scores) if self.evaluation else []
        there = {score.name for score in scores}
        clients = self.per_client("knn")
        for online, name in ONLINE.items():
            value = self.last.get(online)
            if value is None or name in there:
                continue
            if name == "personal_knn" and clients:
                found = over_clients(name, clients, [1] * len(clients))
                weighted = self.last.get("knn_weighted")
                scores.append(
                    Score(name, value, "clients", found.n, found.ci95, weighted, found.std, clients)
                )
            else:
                scores.append(Score(name, value, "images", self.facts["test_images"], None))
        return scores

    def per_client(self, figure: str) -> dict[int, float]:
        """A figure of every client at the last evaluation beside the training."""
        clients = self.last.get("clients") or {}
        return {
            int(client): float(values[figure])
            for client, values in clients.items()
            if values.get(figure) is not None
        }

    @cached_property
    def failures(self) -> Counter[str]:
        """Clients' work that did not come or was refused, by reason, over all rounds."""
        total: Counter[str] = Counter()
        for row in self.rounds:
            total.update(row.get("failures") or {})
        return total

    @property
    def late(self) -> int:
        """Clients' work that came after its round, whether it counted then or not."""
        return sum(row.get("late") or 0 for row in self.rounds)

    @cached_property
    def seconds(self) -> list[tuple[str, float]]:
        """Where the time went."""
        final = self.run.final
        training = sum(row.get("seconds") or 0.0 for row in self.rounds)
        judging = sum(row.get("seconds") or 0.0 for row in (*self.evaluations, self.baseline))
        rest = (final.get("train_seconds") or 0.0) - training - judging
        name = "checkpoints and the rest" if judging else "evaluation, checkpoints and the rest"
        parts = [("training", training), ("evaluation beside it", judging), (name, max(0.0, rest))]
        if self.evaluation:
            parts.append(("protocols after training", self.evaluation.seconds.get("total", 0.0)))
        return [(what, spent) for what, spent in parts if spent > 0]

    @property
    def judging(self) -> list[tuple[str, float]]:
        """What the protocols after training spent their time on, the longest first."""
        spent = dict(self.evaluation.seconds) if self.evaluation else {}
        total = spent.pop("total", 0.0)
        named = [(_JUDGING.get(key, key.replace("-", " ")), value) for key, value in spent.items()]
        named.append(("the rest", max(0.0, total - sum(spent.values()))))
        return sorted(named, key=lambda part: -part[1])

    @property
    def images_per_second(self) -> float | None:
        """Training images passed through a client's model per second of training."""
        seconds = sum(row.get("seconds") or 0.0 for row in self.rounds)
        passed = self.run.config.local.images_of_a_round
        held = [(row.get("images") or 0, row.get("accepted") or 0) for row in self.rounds]
        return sum(passed(*pair) for pair in held) / seconds if seconds else None

    @property
    def shares(self) -> bool:
        """The clients train a Θ together."""
        return bool(ALGORITHMS[self.run.config.algorithm.name].sends)
