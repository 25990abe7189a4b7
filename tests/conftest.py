"""What all tests share: helpers beside them can be imported, and a slow machine is no bug."""

import os
import signal
import sys
from pathlib import Path

from hypothesis import settings

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE / room) for room in ("algorithms", "federation"))]

settings.register_profile("ssfl", deadline=None)
settings.load_profile("ssfl")

# A suite started in the background ignores Ctrl-C, and one under nohup SIGHUP; and so would every
# process it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Where COLUMNS is set as a console is made, that console keeps the width for good; tests set it.
os.environ.pop("COLUMNS", None)
import ssfl.commands.console  # noqa: E402, F401
