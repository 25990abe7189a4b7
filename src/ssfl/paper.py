"""The paper's own figures, where a recipe repeats one of its experiments: shown beside ours."""

from pydantic import Field

from ssfl.section import Section


class PaperFigures(Section):
    """What the paper reports for this experiment, by the names `ssfl evaluate` uses."""

    table: str = ""
    """Where in the paper the figures stand."""
    global_classifier: float | None = Field(default=None, ge=0, le=1)
    """Supervised FL: accuracy on the global test set."""
    global_federated_linear: float | None = Field(default=None, ge=0, le=1)
    """Θ under federated linear evaluation."""
    personal_knn: float | None = Field(default=None, ge=0, le=1)
    """The kNN indicator, mean over clients."""
    personal_linear: float | None = Field(default=None, ge=0, le=1)
    """Linear evaluation per encoder on local test sets, mean over clients."""

    def figures(self) -> dict[str, float]:
        """The figures there are, by name."""
        given = self.model_dump(exclude_none=True, exclude={"table"})
        return {name: float(value) for name, value in given.items()}
