"""What is made of the figures that clients send of their own encoders."""

import math

import pytest

from ssfl.federation.messages import Reply, TaskKind
from ssfl.federation.online import _client_row


@pytest.mark.parametrize("claim", [math.nan, math.inf, -0.1, 50.0])
def test_an_accuracy_that_is_none_does_not_spoil_the_mean_of_the_others(claim: float) -> None:
    said = {0: (0.5, 10), 1: (claim, 1 << 61), 2: (0.8, 20), 3: (1.0, 0)}
    replies = [
        Reply(client, TaskKind.EVALUATE, 4, samples=samples, metrics={"knn": knn})
        for client, (knn, samples) in said.items()
    ]
    row = _client_row(replies)
    assert row["knn_mean"] == pytest.approx(0.65)
    assert row["knn_weighted"] == pytest.approx(0.7)
    assert set(row["clients"]) == {"0", "1", "2", "3"}  # what was said stays on record
