"""What drives the core, and what runs a real daemon, are beside the tests that they were made for."""

import sys
from pathlib import Path

for name in ("core", "integration"):
    sys.path.insert(0, str(Path(__file__).parent.parent / name))
