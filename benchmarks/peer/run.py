"""One side at work in a process (or several) of its own: python -m peer.run SIDE SETTING OUT."""

import importlib
import json
import os
import sys
from pathlib import Path

from peer.work import Setting


def main() -> None:
    side, setting, out = sys.argv[1:]
    clock = importlib.import_module(f"peer.{side}").play(Setting(**json.loads(setting)))
    if int(os.environ.get("RANK", 0)) == 0:
        Path(out).write_text(json.dumps(clock.result()))


if __name__ == "__main__":
    main()
