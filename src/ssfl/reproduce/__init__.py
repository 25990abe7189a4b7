"""The paper's experiments, one command each: `reproduce("table2")` trains, judges and compares."""

from ssfl.reproduce.library import load_study, studies
from ssfl.reproduce.results import StudyResult
from ssfl.reproduce.study import Study
from ssfl.reproduce.workflow import reproduce

__all__ = ["Study", "StudyResult", "load_study", "reproduce", "studies"]
