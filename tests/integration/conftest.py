"""A real daemon process for tests: ``daemon``, or ``start_daemon`` for one with other settings."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon_process import DaemonProcess

from snapd import daemonlife


@pytest.fixture
def start_daemon() -> Iterator[Callable[..., DaemonProcess]]:
    """A function that starts a daemon with the given settings; at the end each must stop cleanly."""
    with contextlib.ExitStack() as stack:

        def start(**overrides: object) -> DaemonProcess:
            # A short path: a unix socket's has at most 107 bytes.
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="snapd-")))
            started = DaemonProcess(directory, overrides)
            stack.callback(finish, started)
            return started

        yield start


def finish(started: DaemonProcess) -> None:
    """Stop a daemon; it must not have shown a traceback."""
    started.stop()
    assert "Traceback" not in started.stderr, started.stderr


@pytest.fixture
def daemon(start_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    """A running daemon with one arena of 16 MiB."""
    return start_daemon()


@pytest.fixture
def no_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a daemon in this process can die."""
    monkeypatch.setattr(daemonlife, "open_pidfd", lambda sock, peer: None)
