"""What the daemon tells systemd: that it is ready, how it fares, that it stops, and that it lives.

The protocol is one datagram of ``KEY=value`` lines to the socket that ``NOTIFY_SOCKET`` names,
so there is no dependency for it. Without a service manager nothing is sent. Sending never waits:
what must arrive and did not, because the manager's queue was full, goes with the next message.

The watchdog's messages come from the event loop, so that a loop that is stuck is restarted.

Source: design, section 10; sd_notify(3), sd_watchdog_enabled(3).
"""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Final

from snapd.units import NS_PER_MS

STATUS_EVERY_S: Final = 10.0
_NS_PER_US: Final = 1_000
_US_PER_MS: Final = NS_PER_MS // _NS_PER_US
_US_PER_S: Final = 1_000_000
# systemd takes the watchdog's time from the unit; less than this is no time for a loop that has work.
_WATCHDOG_US_MIN: Final = 1_000


class Notifier:
    """Sends messages to the service manager, if there is one.

    Args:
        env: the environment, for ``NOTIFY_SOCKET``, ``WATCHDOG_USEC`` and ``WATCHDOG_PID``.

    Attributes:
        watchdog_us: the manager restarts a daemon that is silent for so long; 0: it does not look.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._address = _address(env.get("NOTIFY_SOCKET", ""))
        self.watchdog_us = _watchdog_us(env) if self._address else 0
        self._last_status = ""
        self._owed = ""
        self._sock: socket.socket | None = None

    @property
    def is_wanted(self) -> bool:
        """There is a service manager that listens."""
        return bool(self._address)

    def ready(self) -> None:
        """Tell that it serves, after the start or after a reload."""
        self._owed = "READY=1"
        self._send()

    def status(self, status: str) -> None:
        """Tell how it fares, in a line that ``systemctl status`` shows; what is told already is not sent."""
        if (status != self._last_status or self._owed) and self._send(f"STATUS={status}"):
            self._last_status = status

    def reloading(self) -> None:
        """Tell that a reload begins; ``ready`` ends it."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // _NS_PER_US}")

    def stopping(self, within_ms: int) -> None:
        """Tell that it stops, and that this may last so long, whatever the unit allows."""
        self._owed = f"STOPPING=1\nEXTEND_TIMEOUT_USEC={within_ms * _US_PER_MS}"
        self._send()

    def alive(self) -> None:
        """Tell the watchdog that the loop runs."""
        self._send("WATCHDOG=1")

    def close(self) -> None:
        """Send nothing more."""
        if self._sock is not None:
            self._sock.close()
        self._sock, self._address = None, ""

    def _send(self, *lines: str) -> bool:
        if not self._address:
            return False
        try:
            if self._sock is None:
                self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
                # A manager whose queue is full must not hold up the loop.
                self._sock.setblocking(False)
            self._sock.sendto("\n".join(filter(None, (self._owed, *lines))).encode(), self._address)
        except OSError:
            return False
        self._owed = ""
        return True


class Heartbeat:
    """Tells the service manager, from the event loop, that the loop runs and how the daemon fares.

    Args:
        notifier: sends it; nothing is begun when nobody listens.
        loop: whose health it is about.
        status: the line for ``systemctl status``.
    """

    def __init__(
        self, notifier: Notifier, loop: asyncio.AbstractEventLoop, status: Callable[[], str]
    ) -> None:
        self._notifier = notifier
        self._loop = loop
        self._status = status
        self._timers: dict[str, asyncio.TimerHandle] = {}
        if notifier.watchdog_us:
            self._beat()
        if notifier.is_wanted:
            self._tell()

    def close(self) -> None:
        """Be silent."""
        for timer in self._timers.values():
            timer.cancel()

    def _beat(self) -> None:
        self._notifier.alive()
        # At half of the time, as sd_watchdog_enabled(3) recommends.
        interval_s = self._notifier.watchdog_us / _US_PER_S / 2
        self._timers["watchdog"] = self._loop.call_later(interval_s, self._beat)

    def _tell(self) -> None:
        self._notifier.status(self._status())
        self._timers["status"] = self._loop.call_later(STATUS_EVERY_S, self._tell)


def _address(name: str) -> str:
    """Return what to send to: a path, or an abstract name, which begins with NUL; empty: nothing."""
    if name.startswith("/"):
        return name
    # Anything else, such as vsock, is for virtual machines.
    return f"\0{name[1:]}" if name.startswith("@") else ""


def _watchdog_us(env: Mapping[str, str]) -> int:
    """Return the watchdog's time, 0 if it is not for this process."""
    # A parent may have had it and passed its environment on.
    if env.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0
    text = env.get("WATCHDOG_USEC", "")
    watchdog_us = int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0
    return watchdog_us if watchdog_us >= _WATCHDOG_US_MIN else 0
