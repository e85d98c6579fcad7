"""The terminal of ``snapd top``: keys and signals in, frames out, and left as it was found.

Nothing here waits but ``wait``: it sleeps until a key is pressed, a signal comes, another thread calls
``wake``, or the time is over. No signal interrupts drawing: all of them only end that sleep.
"""

import contextlib
import os
import re
import select
import signal
import sys
import termios
import tty
from types import FrameType, TracebackType
from typing import Any, Final, NamedTuple, Self

from rich.console import Console, RenderableType
from rich.live import Live

# Those that end the program, and those that it reacts to.
ENDING: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
_HEARD: Final = (*sorted(ENDING), signal.SIGTSTP, signal.SIGWINCH)
# What arrow and function keys send.
_SEQUENCE: Final = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|O.|.)?", re.DOTALL)
BACK_TAB: Final = "\x1b[Z"
_KEYS_BYTES_MAX: Final = 1_024
# A line that is wider after all (terminals differ) is cut off by the terminal, and does not wrap.
_WRAP_OFF, _WRAP_ON = "\x1b[?7l", "\x1b[?7h"
_OTHER_THREAD: Final = b"\0"


class Woken(NamedTuple):
    """What ended a wait: keys that were pressed, signals that came, nobody types any more."""

    keys: list[str]
    signals: frozenset[int]
    is_hung_up: bool = False


class Screen:
    """The alternate screen of stdout, with the keys of stdin if that is a terminal.

    Args:
        has_colours: colours may be used.

    Attributes:
        has_keys: keys can be read.
    """

    def __init__(self, *, has_colours: bool) -> None:
        self.has_keys = sys.stdin.isatty()
        self._console = Console(file=sys.stdout, force_terminal=True, no_color=not has_colours)
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._live: Live | None = None
        self._stdin_settings: list[Any] = []
        self._old_handlers: dict[int, Any] = {}
        self._old_wakeup_fd = -1

    def __enter__(self) -> Self:
        self._old_wakeup_fd = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in _HEARD:
            self._old_handlers[number] = signal.signal(number, _ignore)
        try:
            self._take()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The terminal may be gone; then there is nothing to be restored.
        with contextlib.suppress(OSError, termios.error):
            self._give_back()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup_fd)

    def size(self) -> tuple[int, int]:
        """Return the width and height of the terminal, in cells."""
        try:
            columns, lines = os.get_terminal_size(sys.stdout.fileno())
        except OSError:
            return 80, 24
        return columns or 80, lines or 24

    def draw(self, renderable: RenderableType, width: int, height: int) -> None:
        """Draw over everything; *renderable* is *width* x *height* cells, the size of the terminal.

        Raises:
            OSError: the terminal is gone.
        """
        if self._live is not None:
            self._console.size = (width, height)
            self._live.update(renderable, refresh=True)

    def wake(self) -> None:
        """End the wait of ``wait``, from another thread."""
        # A full pipe wakes as well.
        with contextlib.suppress(OSError):
            os.write(self._wake_write, _OTHER_THREAD)

    def wait(self, timeout_s: float | None) -> Woken:
        """Sleep until something happens, or the time is over; None: there is no time."""
        stdin = sys.stdin.fileno() if self.has_keys else -1
        readable, _, _ = select.select(
            [self._wake_read, stdin] if self.has_keys else [self._wake_read], [], [], timeout_s
        )
        signals: frozenset[int] = frozenset()
        keys: list[str] = []
        is_hung_up = False
        if self._wake_read in readable:
            with contextlib.suppress(BlockingIOError):
                signals = frozenset(os.read(self._wake_read, _KEYS_BYTES_MAX)) - {0}
        if stdin in readable:
            try:
                raw = os.read(stdin, _KEYS_BYTES_MAX)
            except OSError:
                raw = b""
            is_hung_up = not raw
            keys = keys_of(raw)
        return Woken(keys, signals, is_hung_up)

    def suspend(self) -> None:
        """Stop as for Ctrl-Z, with the terminal as it was; returns when the process goes on."""
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()

    def _take(self) -> None:
        if self.has_keys:
            stdin = sys.stdin.fileno()
            self._stdin_settings = termios.tcgetattr(stdin)
            # Keys come one by one and unseen; Ctrl-C and Ctrl-Z go on to be signals.
            tty.setcbreak(stdin)
        self._live = Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._live.start()
        self._write(_WRAP_OFF)

    def _give_back(self) -> None:
        live, self._live = self._live, None
        settings, self._stdin_settings = self._stdin_settings, []
        try:
            if live is not None:
                self._write(_WRAP_ON)
                live.stop()
        finally:
            if settings:
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, settings)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def keys_of(raw: bytes) -> list[str]:
    """Return the keys that were pressed; arrows and the like are left out, but for the backward tab."""
    keys: list[str] = []
    text = raw.decode("utf-8", "replace")
    at = 0
    while at < len(text):
        match = _SEQUENCE.match(text, at)
        if match is None:
            keys.append(text[at])
            at += 1
        else:
            if match[0] == BACK_TAB:
                keys.append(BACK_TAB)
            at = match.end()
    return keys


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing; that the signal came is in the pipe."""
