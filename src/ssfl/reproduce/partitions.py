"""A study of pictures: who holds what in every arm, drawn. Nothing is trained."""

from collections.abc import Sequence
from pathlib import Path

import ssfl
from ssfl.assemble import load_federated
from ssfl.data.pictures import save_partition_pictures
from ssfl.reproduce import made, synthetic
from ssfl.reproduce.pages import write_pages
from ssfl.reproduce.records import Partition
from ssfl.reproduce.results import StudyResult, load_result
from ssfl.reproduce.study import Arm, Study


def draw_partitions(
    name: str,
    study: Study,
    arms: Sequence[Arm],
    folder: Path,
    settings: Sequence[str],
    synthetic_data: bool,
    maker: made.Maker,
) -> StudyResult:
    """The pictures and the page of a study, from what its arms make of the data."""
    stand_ins = synthetic.stand_ins(study, arms, folder, settings, synthetic_data)
    parts = {}
    for arm in arms:
        own = (*settings, *stand_ins.get(arm.name, ()))
        data = load_federated(study.config(arm, name=arm.name, seed=0, rounds=None, settings=own))
        save_partition_pictures(data, folder / arm.name)
        counts = data.class_counts()
        parts[arm.name] = Partition(
            data=data.dataset.name,
            synthetic=arm.name in stand_ins,
            sizes=data.sizes().tolist(),
            classes=list(data.dataset.classes or ()) if counts is not None else [],
            counts=counts.tolist() if counts is not None else [],
            command=maker.command,
            commit=maker.commit,
            version=ssfl.__version__,
        )
    now = StudyResult(name=name, study=study, partitions=parts)
    before = load_result(folder / "results.json")
    now = now.joined(before) if before else now
    write_pages(now, folder, pictures=False)
    return now
