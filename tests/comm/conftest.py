"""The transports' tests share a recipe, `six_clients`, that their worker processes run as well."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
