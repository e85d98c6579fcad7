"""GPUs that are not there, for doctor and its children: an entry of PYTHONPATH, and facts in a variable."""

import dataclasses
import json
import os
from pathlib import Path

from cuda_fake import GIB, FakeDriver

VARIABLE = "FAKE_GPUS"
_TESTS = Path(__file__).parents[1]
_INSTALLS = f'''"""Read at the start of Python: puts a fake driver in the place of the real one."""
import sys

sys.path += [{str(_TESTS)!r}, {str(_TESTS.parent)!r}]

from tests.doctor.fake_gpus import use

use()
'''


@dataclasses.dataclass
class FaultyDriver(FakeDriver):
    """Does what ``fault`` says with bytes that go into another process's memory.

    Attributes:
        fault: ``lost``: they do not land; ``corrupt``: the last one is wrong.
    """

    fault: str = ""

    def _cuMemcpy(self, to_address, from_address, size_bytes):  # noqa: N802
        is_theirs = any(
            memory.address <= to_address < memory.address + memory.size_bytes
            for memory in self.opened.values()
        )
        if is_theirs and self.fault == "lost":
            return 0
        code = super()._cuMemcpy(to_address, from_address, size_bytes)
        if is_theirs and self.fault == "corrupt":
            last = self._find(to_address)
            last.map[to_address - last.address + size_bytes - 1] ^= 1
        return code


def make_directory(directory: Path, devices: Path) -> Path:
    """Make what PYTHONPATH is to name. *devices* stands for /dev, with a file for a GPU."""
    directory.mkdir()
    devices.mkdir()
    (devices / "nvidia0").touch()
    (directory / "sitecustomize.py").write_text(_INSTALLS)
    return directory


def facts(devices: Path, **driver: object) -> str:
    """Return the value of ``VARIABLE``: where /dev is, and the driver's arguments."""
    return json.dumps({"devices": str(devices), "driver": driver})


def use() -> None:
    """Use the fake driver in this process."""
    from cuda_fake import install

    from snapd.transport import mooncake_engine

    found = json.loads(os.environ[VARIABLE])
    mooncake_engine._DEVICES = Path(found["devices"])  # type: ignore[misc]
    arguments = found["driver"]
    num_gpus = arguments.pop("num_gpus", 1)
    uuids = tuple(bytes(range(start, start + 16)) for start in range(num_gpus))
    install(FaultyDriver(**{"uuids": uuids, "total_bytes": 16 * GIB} | arguments))
