"""`python -m ssfl.comm.flower.node`: Flower's SuperNode, for a site that runs its own ssfl.

It ends when the process that started it ends or does not respond, and when it loses a message,
which nobody else would notice; and it looks for messages every half second instead of every three.
"""

import os
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

POLL = 0.5
CONNECTED = "SuperNode ID: "
"""What Flower's SuperNode says once the coordinator has let it in."""
FROZEN = "nobody took a message"
"""Last words of a SuperNode whose site does not respond."""


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
    start_client_internal.log = lost_or_logged(start_client_internal.log)
    start_client_internal._push_messages = taken_or_ended(start_client_internal._push_messages)
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


def taken_or_ended(push: Callable[..., None]) -> Callable[..., None]:
    """End where a message waits for a site's process that is frozen: the coordinator then knows
    that nobody is here, and the process, once it goes on, starts another of us. Flower itself looks
    after messages that were taken, and would have the coordinator wait for this one for hours.
    """
    from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, HEARTBEAT_PATIENCE, Status

    patience = HEARTBEAT_PATIENCE * HEARTBEAT_DEFAULT_INTERVAL

    def push_messages(*, state: Any, **rest: Any) -> None:
        end = time.monotonic() + patience
        while state.get_tasks(statuses=[Status.PENDING]):
            if time.monotonic() > end:
                _end(FROZEN)
            time.sleep(POLL)
        push(state=state, **rest)

    return push_messages


def lost_or_logged(log: Callable[..., None]) -> Callable[..., None]:
    """End where Flower notes that it has lost a message, or an answer, and goes on: the coordinator
    asks those again who connect anew, and would wait for that answer for hours."""

    def log_or_end(level: int, text: object, *details: object) -> None:
        log(level, text, *details)
        if str(text).startswith(("Failed to receive message", "Failed to send message")):
            _end("a message was lost on its way")

    return log_or_end


def _end(words: str) -> None:
    """End by Flower's own way out, which tells the coordinator."""
    print(f"ERROR\n{words}", flush=True)  # as Flower, too, says why it ends
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
