"""`python -m ssfl.comm.flower.node`: Flower's SuperNode, for a site that runs its own ssfl.

It ends when the process that started it ends, and looks for messages every half second instead of
every three.
"""

import os
import time
from types import SimpleNamespace

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
    flower_supernode()


if __name__ == "__main__":
    main()
