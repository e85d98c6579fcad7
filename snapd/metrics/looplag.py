"""How late the event loop is: a timer that measures its own lateness.

While the loop is late nobody is served, and deadlines are noticed late.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol

from snapd.metrics.tally import Histogram
from snapd.timers import Cancellable

PERIOD_S: Final = 0.05
# The maximum is that of the present window and the one before.
WINDOW_S: Final = 60.0
LAG_BOUNDS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class _Loop(Protocol):
    def call_later(self, delay: float, callback: Callable[[], None]) -> Cancellable: ...


class LoopLag:
    """Looks at the clock every ``PERIOD_S`` and notes by how much it was late.

    Attributes:
        times: lateness in seconds, one observation a look.

    Args:
        loop: the running loop.
        now_s: monotonic seconds; the loop's own time stands still during a callback.
    """

    def __init__(
        self, loop: _Loop | asyncio.AbstractEventLoop, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.times = Histogram(LAG_BOUNDS_S)
        self._loop = loop
        self._now_s = now_s
        self._window_began_s = now_s()
        self._max_s = self._former_max_s = 0.0
        self._arm()

    @property
    def max_s(self) -> float:
        """The greatest lateness of the last one to two minutes."""
        return max(self._max_s, self._former_max_s)

    def close(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _arm(self) -> None:
        self._due_s = self._now_s() + PERIOD_S
        self._timer: Cancellable = self._loop.call_later(PERIOD_S, self._look)

    def _look(self) -> None:
        now_s = self._now_s()
        # A timer of uvloop may be a little early.
        lag_s = max(0.0, now_s - self._due_s)
        self.times.observe(lag_s)
        if now_s - self._window_began_s >= WINDOW_S:
            self._window_began_s = now_s
            self._former_max_s, self._max_s = self._max_s, 0.0
        self._max_s = max(self._max_s, lag_s)
        self._arm()
