"""What server and sites must agree on: what shapes the training, of the configuration and of ssfl.

Data, folders, devices and the server's policy are each party's own business. But where sites sum
their clients' updates they must do it as the server would, and a server cannot talk a site that
agreed on sums into sending single updates.
"""

from typing import Any

from ssfl import __version__
from ssfl.config import Config

SHARED = {"seed", "views", "model", "ssl", "algorithm", "local"}
SUMMING = {"updates", "optimizer", "aggregation", "max_norm_ratio"}
"""What of the server's section a site must know to sum."""


def shared_recipe(config: Config) -> dict[str, Any]:
    """The agreed part as plain values, and the version that makes of them what it does."""
    summing = SUMMING if config.server.updates == "summed" else {"updates"}
    agreed = config.model_dump(mode="json", include=SHARED)
    server = config.server.model_dump(mode="json", include=summing)
    return agreed | {"server": server, "version of ssfl": __version__}
