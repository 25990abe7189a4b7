"""`python -m ssfl.comm.flower.node`: Flower's SuperNode, for a site that runs its own ssfl.

It ends when the process that started it ends, looks for messages every half second instead of
every three, and drops a message whose coordinator went while it was on the way.
"""

import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

POLL = 0.5


def main() -> None:
    """Run `flower-supernode` with the arguments given."""
    from flwr.supercore.app_utils import start_parent_process_monitor
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli import flower_supernode

    start_parent_process_monitor(os.getppid())
    start_client_internal.time = SimpleNamespace(
        sleep=lambda seconds: time.sleep(min(seconds, POLL))
    )
    start_client_internal.pull_objects = whole_or_dropped(start_client_internal.pull_objects)
    flower_supernode()


def whole_or_dropped(pull: Callable[..., Any]) -> Callable[..., Any]:
    """Make of a run's end an error like any other, after which Flower drops what it has of the
    message. Flower's own is none, passes that by, and the site would wait for the rest for hours.
    """
    from flwr.supercore.run import RunNotRunningException

    def pull_objects(*args: Any, **kwargs: Any) -> Any:
        try:
            return pull(*args, **kwargs)
        except RunNotRunningException as error:
            raise ConnectionError("its run has ended") from error

    return pull_objects


if __name__ == "__main__":
    main()
