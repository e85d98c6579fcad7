"""``snapd serve`` in a process of its own, for the fixtures ``daemon`` and ``start_daemon``."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

START_S = 30.0
STOP_S = 15.0
SMALL = {"size": "16MiB", "prefault": "false", "drain_timeout_ms": "500"}


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what configures snapd."""
    left_out = ("SNAPD_", "RUNTIME_DIRECTORY", "LOGS_DIRECTORY", "STATE_DIRECTORY", "NOTIFY_SOCKET")
    return {name: value for name, value in os.environ.items() if not name.startswith(left_out)}


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _end_with_the_tests() -> None:
    """In the child: a test run that is killed leaves no daemon behind."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class DaemonProcess:
    """``snapd serve`` in a process of its own.

    Attributes:
        socket_path: where it listens.
        log_path: its event log.
        process: the running one; the last one after ``stop``.
        stderr_path: what all its processes wrote to stderr.
        expected_status: what ``stop`` wants to see; another one only after something drastic.
    """

    # What the interpreter runs as the command line.
    PROGRAM: tuple[str, ...] = ("-m", "snapd.cli.main")

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
        command = [sys.executable, *self.PROGRAM, "serve", "--config", str(self.config_path)]
        command += ["--socket", str(self.socket_path), "--log", str(self.log_path)]
        for key, value in self.overrides.items():
            command += ["--set", f"{key}={value}"]
        self.expected_status = 0
        with self.stderr_path.open("ab") as stderr:
            process = subprocess.Popen(
                command,
                env=clean_environment(),
                stdin=subprocess.DEVNULL,
                stderr=stderr,
                preexec_fn=_end_with_the_tests,
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
        assert status == self.expected_status, f"snapd serve ended with {status}: {self.stderr}"

    def kill(self) -> None:
        """Let it crash: SIGKILL. A ``stop`` after it is satisfied."""
        self.process.kill()
        self.process.wait()
        self.expected_status = -signal.SIGKILL

    def restart(self) -> None:
        """Stop it, unless it was killed, and start another one with the same paths and settings."""
        self.stop()
        self.process = self._start()
