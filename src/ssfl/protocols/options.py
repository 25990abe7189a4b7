"""What can be measured of a run after training, and how."""

from typing import Annotated

from pydantic import Field

from ssfl.evaluation.finetune import FinetuneOptions
from ssfl.evaluation.options import LinearOptions
from ssfl.section import Section

PROTOCOLS = {
    "knn": "kNN of Θ and of each client's encoder",
    "federated-linear": "Θ frozen, a linear classifier trained by FedAvg",
    "linear": "a linear classifier per encoder, trained on the whole training set",
    "mirrored-linear": "both of these, trained on the images' mirror images too",
    "naive-federated-linear": "one FedAvg classifier over the clients' different encoders",
    "semi-linear": "a linear classifier with a few of the labels",
    "semi-finetune": "encoder and classifier trained with a few of the labels",
    "health": "label-free figures of every encoder",
}
"""What can be measured, by name."""

TABLES = ("knn", "federated-linear", "linear", "health")
"""What is measured unless asked otherwise: the paper's tables 1 and 2, and health."""


class ProtocolOptions(Section):
    """How a run is evaluated after training."""

    linear: LinearOptions = LinearOptions()
    finetune: FinetuneOptions = FinetuneOptions()
    fractions: tuple[Annotated[float, Field(gt=0, le=1)], ...] = (0.01, 0.1)
    """Shares of the labels, class-balanced, of the semi-supervised protocols."""
    finetune_clients: bool = False
    """Fine-tune every client's encoder too, not only Θ's (takes long)."""
    clients: int = Field(100, ge=1)
    """Clients whose encoders are judged, spread over all of them."""
