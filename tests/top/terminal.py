"""``snapd top`` on a terminal: a pseudo-terminal of one's own, or tmux, which draws what it is sent."""

import contextlib
import fcntl
import os
import pty
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

from daemon_process import clean_environment

# Far more than anything takes; only a test that fails waits for it.
PATIENCE_S = 60.0
PAUSE_S = 0.05
CLI = (sys.executable, "-m", "snapd.cli.main")
_ROOT = str(Path(__file__).parents[2])


def wait_for(condition: Callable[[], object], what: Callable[[], str] | str) -> None:
    """Wait until *condition* holds; otherwise fail and say what is there."""
    pause = threading.Event()
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(what() if callable(what) else f"never: {what}")
        pause.wait(PAUSE_S)


class Pty:
    """A process with a pseudo-terminal as its stdin and stdout.

    Attributes:
        output: what it has written so far.
    """

    def __init__(
        self, *arguments: str, stdin: int | None = None, size: tuple[int, int] = (80, 24), **env: str
    ) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(*size)
        self.before = termios.tcgetattr(self.slave)
        self.output = b""
        environ = clean_environment() | {"TERM": "xterm-256color", "LANG": "C.UTF-8"} | env
        for name in ("LC_ALL", "LC_CTYPE", "NO_COLOR", "COLUMNS", "LINES"):
            if name not in env:
                environ.pop(name, None)
        self.process = subprocess.Popen(
            [*CLI, *arguments],
            stdin=self.slave if stdin is None else stdin,
            stdout=self.slave,
            stderr=subprocess.PIPE,
            env=environ,
            cwd=_ROOT,
        )

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def settings(self) -> list[object]:
        """Return how the terminal is set now."""
        return termios.tcgetattr(self.slave)

    def read(self) -> None:
        """Take in what has been written."""
        while select.select([self.master], [], [], 0)[0]:
            try:
                data = os.read(self.master, 65_536)
            except OSError:
                return
            self.output += data

    def until(self, wanted: str) -> None:
        """Read until *wanted* was written, since the last call."""

        def is_there() -> bool:
            self.read()
            assert self.process.poll() is None or wanted.encode() in self.output, self.process.stderr.read()
            return wanted.encode() in self.output

        wait_for(is_there, lambda: f"{wanted!r} is not in {self.output[-4_000:]!r}")
        self.output = self.output.rpartition(wanted.encode())[2]

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def end(self) -> tuple[int, str]:
        """Wait for the end, and return the exit status and stderr."""

        def has_ended() -> bool:
            # What is not read would keep it from ending.
            self.read()
            return self.process.poll() is not None

        wait_for(has_ended, "it ends")
        self.read()
        assert self.process.stderr is not None
        return self.process.returncode, self.process.stderr.read().decode()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stderr.close()
        for fd in (self.master, self.slave):
            with contextlib.suppress(OSError):
                os.close(fd)


class Tmux:
    """A tmux server of one's own with one window, in which a shell script runs.

    Args:
        directory: for its socket.
        columns: width of the window.
        lines: its height.
    """

    def __init__(self, directory: Path, columns: int, lines: int) -> None:
        self._environ = {**clean_environment(), "TMUX_TMPDIR": str(directory), "LANG": "C.UTF-8"}
        for name in ("TMUX", "LC_ALL", "LC_CTYPE", "NO_COLOR", "COLUMNS", "LINES"):
            self._environ.pop(name, None)
        self._size = ["-x", str(columns), "-y", str(lines)]

    def run(self, *arguments: str) -> str:
        """Run a tmux command and return what it says."""
        command = ["tmux", "-u", "-L", "snapd-top", "-f", "/dev/null", *arguments]
        done = subprocess.run(
            command, env=self._environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"
        return done.stdout

    def start(self, script: str) -> None:
        """Begin a window in which *script* runs."""
        self.run("new-session", "-d", "-s", "top", *self._size, "-c", _ROOT, f"sh -c {shlex.quote(script)}")

    def press(self, *keys: str) -> None:
        self.run("send-keys", "-t", "top", *keys)

    def resize(self, columns: int, lines: int) -> None:
        self.run("resize-window", "-t", "top", "-x", str(columns), "-y", str(lines))

    def screen(self) -> list[str]:
        """Return the lines of the screen, without the blanks at their ends."""
        return self.run("capture-pane", "-p", "-t", "top").splitlines()

    def flag(self, name: str) -> str:
        """Return a property of the terminal, such as ``alternate_on``."""
        return self.run("display-message", "-p", "-t", "top", f"#{{{name}}}").strip()

    def until(self, *wanted: str) -> list[str]:
        """Wait until all of *wanted* is on the screen, and return the screen."""
        seen: list[str] = []

        def is_there() -> bool:
            seen[:] = self.screen()
            text = "\n".join(seen)
            return all(part in text for part in wanted)

        wait_for(is_there, lambda: f"never all of {wanted}:\n" + "\n".join(seen))
        return seen

    def close(self) -> None:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("kill-server")


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Send what Ctrl-C sends."""
    process.send_signal(signal.SIGINT)
