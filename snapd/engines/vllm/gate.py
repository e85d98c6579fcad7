"""Whether a daemon is asked: after a failure it is left alone for a while. The log says so once a minute."""

import threading
import time
from collections.abc import Callable
from typing import Final

import structlog

from snapd.errors import SnapdError

# Between two warnings of one kind.
WARN_EVERY_S: Final = 60.0

_log: Final = structlog.get_logger("snapd.engines")


class Warner:
    """Logs the first warning of a kind, and then one a minute with how many there were. Thread safe.

    Kinds are the caller's own words, never a request's.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._next_s: dict[str, float] = {}
        self._silent: dict[str, int] = {}

    def warn(self, kind: str, **facts: object) -> bool:
        """Log, or count; return whether it was logged."""
        now_s = self._clock()
        with self._lock:
            if now_s < self._next_s.get(kind, 0.0):
                self._silent[kind] = self._silent.get(kind, 0) + 1
                return False
            self._next_s[kind] = now_s + WARN_EVERY_S
            more = self._silent.pop(kind, 0)
        _log.warning(kind, more_of_them=more, **facts)
        return True


class Gate:
    """Says whether one daemon is worth asking now. Thread safe.

    Args:
        address: the daemon's, for the log.
        retry_s: how long it is left alone after a failure.
        clock: seconds, monotonic.
    """

    def __init__(self, address: str, retry_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = address
        self._retry_s = retry_s
        self._clock = clock
        self._warner = Warner(clock)
        self._closed_until_s = 0.0
        self._failed_s = float("-inf")
        self._is_told = False

    @property
    def is_open(self) -> bool:
        """It may be asked."""
        return self._clock() >= self._closed_until_s

    def is_worth_a_try(self, answered_s: float) -> bool:
        """It may be asked, also because it has answered somebody else since it failed."""
        return self.is_open or self._failed_s < answered_s

    def failed(self, error: SnapdError) -> None:
        """Leave it alone for a while."""
        self._failed_s = self._clock()
        self._closed_until_s = self._failed_s + self._retry_s
        what = "the daemon cannot be asked; the engine goes on without it"
        if self._warner.warn(what, address=self.address, error=str(error)):
            self._is_told = True

    def passed(self) -> None:
        """It has answered."""
        if self._is_told:
            self._is_told = False
            _log.info("the daemon answers again", address=self.address)
