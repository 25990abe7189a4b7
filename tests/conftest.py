"""What all tests share: helpers beside them can be imported, and a slow machine is no bug."""

import sys
from pathlib import Path

from hypothesis import settings

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE / room) for room in ("algorithms", "federation"))]

settings.register_profile("ssfl", deadline=None)
settings.load_profile("ssfl")
