"""What server and sites must agree on: the part of a configuration that shapes the training.

Data, folders, devices and the server's policy are each party's own business. But where sites sum
their clients' updates they must do it as the server would, and a server cannot talk a site that
agreed on sums into sending single updates.
"""

from typing import Any

from ssfl.config import Config

SHARED = {"seed", "views", "model", "ssl", "algorithm", "local"}
SUMMING = {"updates", "optimizer", "aggregation", "max_norm_ratio"}
"""What of the server's section a site must know to sum."""


def shared_recipe(config: Config) -> dict[str, Any]:
    """The agreed part as plain values."""
    summing = SUMMING if config.server.updates == "summed" else {"updates"}
    agreed = config.model_dump(mode="json", include=SHARED)
    return agreed | {"server": config.server.model_dump(mode="json", include=summing)}
