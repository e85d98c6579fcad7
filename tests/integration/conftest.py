"""A real daemon process for tests: ``daemon``, or ``start_daemon`` for one with other settings."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

START_S = 30.0
STOP_S = 15.0
SMALL = {"size": "16MiB", "prefault": "false"}


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what configures snapd."""
    left_out = ("SNAPD_", "RUNTIME_DIRECTORY", "LOGS_DIRECTORY", "STATE_DIRECTORY", "NOTIFY_SOCKET")
    return {name: value for name, value in os.environ.items() if not name.startswith(left_out)}


class DaemonProcess:
    """``snapd serve`` in a process of its own.

    Attributes:
        socket_path: where it listens.
        log_path: its event log.
        process: the running one; the last one after ``stop``.
        stderr_path: what all its processes wrote to stderr.
    """

    def __init__(self, directory: Path, overrides: dict[str, object]) -> None:
        self.directory = directory
        self.socket_path = directory / "snapd.sock"
        self.log_path = directory / "d-to-p-sync.jsonl"
        self.config_path = directory / "snapd.toml"
        self.stderr_path = directory / "stderr.txt"
        self.config_path.touch()
        self.overrides = SMALL | {key: str(value) for key, value in overrides.items()}
        self.process = self._start()

    @property
    def stderr(self) -> str:
        """What the daemon wrote to stderr so far."""
        return self.stderr_path.read_text()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "snapd.cli.main", "serve", "--config", str(self.config_path)]
        command += ["--socket", str(self.socket_path), "--log", str(self.log_path)]
        for key, value in self.overrides.items():
            command += ["--set", f"{key}={value}"]
        with self.stderr_path.open("ab") as stderr:
            process = subprocess.Popen(
                command, env=clean_environment(), stdin=subprocess.DEVNULL, stderr=stderr
            )
        deadline_s = time.monotonic() + START_S
        while not self._accepts():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.01)
                raise AssertionError(f"snapd serve ended with {process.returncode}: {self.stderr}")
            if time.monotonic() > deadline_s:
                process.kill()
                process.wait()
                raise AssertionError(f"snapd serve does not listen after {START_S} s: {self.stderr}")
        return process

    def _accepts(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            return sock.connect_ex(str(self.socket_path)) == 0

    def stop(self) -> None:
        """Send SIGTERM and wait; it must drain and exit with 0."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            status = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"snapd serve did not stop within {STOP_S} s: {self.stderr}") from None
        if status != -signal.SIGKILL:
            assert status == 0, f"snapd serve ended with {status}: {self.stderr}"

    def kill(self) -> None:
        """Let it crash: SIGKILL. A ``stop`` after it is satisfied."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Stop it, unless it was killed, and start another one with the same paths and settings."""
        self.stop()
        self.process = self._start()


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
