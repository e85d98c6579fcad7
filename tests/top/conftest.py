"""A core that is driven by hand, and real daemons, for the tests of ``snapd top`` and of what it asks for."""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

for _name in ("core", "integration"):
    sys.path.insert(0, str(Path(__file__).parents[1] / _name))

from core_driver import Driver  # noqa: E402
from daemon_process import DaemonProcess  # noqa: E402
from top_cases import Workers  # noqa: E402


@pytest.fixture
def make() -> Iterator[Callable[..., Driver]]:
    """Make drivers of a core; each is stopped, and its log proved, when the test ends."""
    drivers: list[Driver] = []

    def make_driver(*args: Any, **kwargs: Any) -> Driver:
        drivers.append(Driver(*args, **kwargs))
        return drivers[-1]

    yield make_driver
    for driver in drivers:
        driver.close()


@contextlib.contextmanager
def _running() -> Iterator[DaemonProcess]:
    with tempfile.TemporaryDirectory(prefix="snapd-") as directory:
        names = ("reserve_timeout_ms", "transfer_timeout_ms", "lease_ms", "quarantine_ms")
        far = dict.fromkeys(names, 600_000) | {"ready_ttl_ms": 700_000}
        started = DaemonProcess(Path(directory), {"ranks": 2} | far)
        try:
            yield started
        finally:
            started.stop()
            assert "Traceback" not in started.stderr, started.stderr


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    """A running daemon with two arenas of 16 MiB, in which deadlines are far away."""
    with _running() as started:
        yield started


@pytest.fixture
def workers(daemon: DaemonProcess) -> Iterator[Workers]:
    """D and P of that daemon."""
    made = Workers(str(daemon.socket_path))
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[DaemonProcess]:
    """Such a daemon for all tests of a module, with an attempt in every state; it is not to be ended."""
    with _running() as started:
        made = Workers(str(started.socket_path))
        made.one_of_each()
        made.close()
        yield started
