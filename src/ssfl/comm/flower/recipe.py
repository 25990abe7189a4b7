"""What server and sites must agree on: the part of a configuration that shapes the training.

Data, folders, devices and the server's policy are each party's own business.
"""

from typing import Any

from ssfl.config import Config

SHARED = {"seed", "views", "model", "ssl", "algorithm", "local"}


def shared_recipe(config: Config) -> dict[str, Any]:
    """The agreed part as plain values."""
    return config.model_dump(mode="json", include=SHARED)
