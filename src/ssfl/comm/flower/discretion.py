"""What a site says of its own errors: their kind, and none of their words.

An error's text may name folders and images, and with them patients. It stays in the site's log; the
coordinator learns what kind of error it is, what the system calls it, and where to ask.
"""

import logging
import os

from ssfl.comm.wire import WireError, printable
from ssfl.errors import SSFLError

log = logging.getLogger(__name__)


def told_outside(error: Exception) -> str:
    """What of an error may leave the site. (Of an unforeseen one, a traceback has been logged.)"""
    if isinstance(error, SSFLError):
        log.warning("%s", error)
    if isinstance(error, WireError):  # of the coordinator's own message
        return printable(str(error))
    return f"{type(error).__name__}{_systems_word(error)}: its log says more"


def _systems_word(error: BaseException | None) -> str:
    """As "No space left on device", where that is behind the error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return f" ({os.strerror(error.errno)})"
        error = error.__cause__
    return ""
