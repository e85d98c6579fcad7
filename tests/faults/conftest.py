"""What tests of faults share with ``tests/integration``: its modules, and the fixtures of its conftest."""

import importlib.util
import sys
from pathlib import Path

_INTEGRATION = Path(__file__).parents[1] / "integration"
sys.path.insert(0, str(_INTEGRATION))

# Under a name of its own: this file is called conftest as well.
_spec = importlib.util.spec_from_file_location("integration_conftest", _INTEGRATION / "conftest.py")
assert _spec is not None and _spec.loader is not None
_fixtures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_fixtures)
start_daemon = _fixtures.start_daemon
