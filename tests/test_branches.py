"""Arms whose Θ goes one way until their θ_k begin: that is trained once, and nothing shows it."""

import json
from pathlib import Path
from typing import Any

import pytest

from ssfl.config import Config, load_config
from ssfl.errors import CheckpointError
from ssfl.experiment import Quiet, train
from ssfl.locks import claimed
from ssfl.reproduce import reproduce
from ssfl.reproduce.alike import same_until
from ssfl.reproduce.branches import branch_of
from ssfl.reproduce.estimate import Timing
from ssfl.reproduce.jobs import Job
from ssfl.reproduce.watch import Plan, Unwatched
from ssfl.run import Run
from tiny import outcome, same_bits

ROUNDS = 6
COMMON = [
    "data.test_fraction=0.7",
    "partition.clients=3",
    "model.width=4",
    "ssl.projector_width=16",
    "ssl.predictor_width=8",
    "local.batch=32",
    "local.keep_momentum=true",
    "evaluation.baselines=false",
    "evaluation.every=2",
    "device.device=cpu",
    "device.workers=1",
    "run.checkpoint_every=4",
]
ARMS = {
    "per": ["algorithm.name=per-ssfl", "algorithm.begin=0.5"],  # from the fourth round on
    "bilevel": ["algorithm.name=bilevel-ssfl", "algorithm.begin=0.8", "algorithm.weight=3"],
    "early": ["algorithm.name=per-ssfl"],
    "other": ["algorithm.name=per-ssfl", "algorithm.begin=0.5", "local.lr=0.01"],
}


def write_study(folder: Path, *arms: str) -> Path:
    path = folder / "late.toml"
    lines = [f'title = "Late"\nrepeats = "nothing"\nrounds = {ROUNDS}\nseeds = 1']
    lines += [f'figures = ["personal_knn"]\nsettings = {json.dumps(COMMON)}']
    for arm in arms:
        lines += [f'[[arms]]\nname = "{arm}"\nlabel = "{arm}"\nrecipe = "digits"']
        lines += [f"settings = {json.dumps(ARMS[arm])}"]
    path.write_text("\n".join(lines))
    return path


class Counting(Unwatched):
    """Counts the rounds that every run begins, and may stop before one, as Ctrl-C would."""

    def __init__(self, stop: tuple[str, int] | None = None) -> None:
        self.rounds: dict[str, list[int]] = {}
        self.stop, self.planned, self.said = stop, list[Plan](), list[str]()

    def plan(self, plan: Plan) -> None:
        self.planned.append(plan)

    def say(self, text: str) -> None:
        self.said.append(text)

    def begin(self, job: Job, place: int, total: int) -> Any:
        begun, stop, name = self.rounds.setdefault(job.arm.name, []), self.stop, job.arm.name

        class Rounds(Quiet):
            def begin_round(self, round_: int, clients: int) -> None:
                if stop == (name, round_):
                    raise KeyboardInterrupt
                begun.append(round_)

        return Rounds()


def played(path: Path, out: Path, watch: Counting, **options: Any) -> dict[str, Run]:
    asked: dict[str, Any] = {"timing": False, "command": "it", **options}
    reproduce(path, out=out, watch=watch, **asked)
    jobs = watch.planned[-1].jobs
    return {job.arm.name: Run(job.place) for job in jobs if job.place.exists()}


def assert_as_if_alone(runs: dict[str, Run], folder: Path) -> None:
    """Every run ended where it does when it is trained by itself."""
    for name, run in runs.items():
        alone = train(run.config, out=folder / name)
        assert same_bits(outcome(run), outcome(alone)), name
        rows = [
            {
                row["round"]: {k: v for k, v in row.items() if "seconds" not in k}
                for row in one.metrics
                if row["kind"] == "evaluation"
            }
            for one in (run, alone)
        ]
        assert rows[0] == rows[1]


def test_what_is_the_same_is_trained_once_and_all_end_as_if_alone(tmp_path: Path) -> None:
    path, watch = write_study(tmp_path, "bilevel", "per", "early", "other"), Counting()
    runs = played(path, tmp_path / "out", watch)
    assert watch.rounds == {
        "bilevel": [0, 1, 2, 3, 4, 5],
        "per": [3, 4, 5],
        "early": [0, 1, 2, 3, 4, 5],  # its θ_k begin at once
        "other": [0, 1, 2, 3, 4, 5],  # by another rate
    }
    assert watch.said == ["3 rounds of bilevel-seed0 are those of per-seed0"]
    assert {name: run.config.algorithm.name for name, run in runs.items()} == {
        "bilevel": "bilevel-ssfl", "per": "per-ssfl", "early": "per-ssfl", "other": "per-ssfl"
    }  # fmt: skip
    assert_as_if_alone(runs, tmp_path / "alone")


@pytest.mark.parametrize("stop", [("bilevel", 2), ("bilevel", 5), ("per", 4)])
def test_a_study_that_is_stopped_goes_on_to_the_same_end(
    stop: tuple[str, int], tmp_path: Path
) -> None:
    path, watch = write_study(tmp_path, "bilevel", "per"), Counting(stop)
    with pytest.raises(KeyboardInterrupt):
        played(path, tmp_path / "out", watch)
    again = Counting()
    runs = played(path, tmp_path / "out", again)
    begun = [*watch.rounds.get("per", []), *again.rounds["per"]]
    assert begun == [3, 4, 5]
    assert_as_if_alone(runs, tmp_path / "alone")


def test_a_copy_that_was_cut_short_is_made_anew(tmp_path: Path) -> None:
    path, watch = write_study(tmp_path, "bilevel", "per"), Counting()
    part = tmp_path / "out" / "late" / "runs" / ".per-seed0.part"
    (part / "checkpoints").mkdir(parents=True)
    (part / "checkpoints" / "round-000009.safetensors").write_bytes(b"half")
    runs = played(path, tmp_path / "out", watch)
    assert watch.rounds["per"] == [3, 4, 5]
    assert not part.exists()
    assert_as_if_alone(runs, tmp_path / "alone")


def test_a_copy_that_cannot_be_made_is_told_in_a_sentence(tmp_path: Path) -> None:
    path, watch = write_study(tmp_path, "bilevel", "per"), Counting()
    part = tmp_path / "out" / "late" / "runs" / ".per-seed0.part"
    part.parent.mkdir(parents=True)
    part.touch()
    with pytest.raises(CheckpointError, match=r"could not copy .*bilevel-seed0 to .*per-seed0: "):
        played(path, tmp_path / "out", watch)


def test_an_arm_that_another_process_is_at_gets_nothing(tmp_path: Path) -> None:
    path, watch = write_study(tmp_path, "bilevel", "per"), Counting()
    with claimed(tmp_path / "out" / "late" / "runs" / ".per-seed0.lock"):
        runs = played(path, tmp_path / "out", watch)
    assert list(runs) == list(watch.rounds) == ["bilevel"]
    assert watch.said == []


def test_an_arm_that_is_past_the_parting_gives_nothing(tmp_path: Path) -> None:
    path, watch = write_study(tmp_path, "bilevel", "per"), Counting()
    played(path, tmp_path / "out", watch, arms=["bilevel"])
    later = Counting()
    played(path, tmp_path / "out", later)
    assert later.rounds == {"per": [0, 1, 2, 3, 4, 5]}


def test_rounds_that_will_be_given_are_not_reckoned_twice(tmp_path: Path) -> None:
    path, watch = write_study(tmp_path, "bilevel", "per"), Counting()
    reproduce(path, out=tmp_path / "out", watch=watch, timing=False, dry_run=True)
    (plan,) = watch.planned
    timing = Timing(setup=0, warmup=0, round=1, judging=0, saving=0, evaluation=0, alone=0.25)
    plan.timings = {"bilevel": timing, "per": timing}
    # five rounds alone and one of two models; of the other, whose θ_k begin with the fourth, three
    assert [plan.seconds(job) for job in plan.jobs] == [5 * 0.25 + 1, 3]
    per_first = Plan(plan.name, plan.study, plan.folder, plan.jobs[::-1], plan.timings)
    assert [per_first.seconds(job) for job in per_first.jobs] == [3 * 0.25 + 3, 2 * 0.25 + 1]


def config(*settings: str) -> Config:
    return load_config("digits", [f"server.rounds={ROUNDS}", *settings])


def test_rounds_are_the_same_before_the_first_theta_k_begins() -> None:
    per, bilevel = config(*ARMS["per"]), config(*ARMS["bilevel"])
    assert same_until(per, bilevel) == same_until(bilevel, per) == 3
    assert same_until(bilevel, bilevel) == 5
    assert same_until(per, config(*ARMS["early"])) == 0
    assert same_until(per, config(*ARMS["other"])) == 0
    assert same_until(per, config(*ARMS["per"], "seed=1")) == 0
    assert same_until(per, config("algorithm.name=maml-ssfl")) == 0


def test_a_job_parts_from_itself_never(tmp_path: Path) -> None:
    path, watch = write_study(tmp_path, "bilevel"), Counting()
    reproduce(path, out=tmp_path / "out", watch=watch, timing=False, dry_run=True)
    (job,) = watch.planned[0].jobs
    assert branch_of(job, [job]) is None
