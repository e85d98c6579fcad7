"""The clock, and timers that are armed and cancelled by key.

One loop timer serves any number of keys. uvloop may fire up to about 1.5 ms early, so what is
due is decided by the clock, and the loop timer is set again for the rest.
"""

import heapq
from collections.abc import Callable, Hashable
from time import monotonic_ns
from typing import Generic, Protocol, TypeVar

from snapd.units import NS_PER_S

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

# Stale entries of the heap are swept once they outnumber the live ones by this much.
_SWEEP_MIN = 1_024


class Clock(Protocol):
    """Where the time comes from; a test has its own."""

    def now_ns(self) -> int:
        """Return monotonic nanoseconds."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now_ns(self) -> int:
        """Return monotonic nanoseconds."""
        return monotonic_ns()


class Cancellable(Protocol):
    """What ``call_later`` returns."""

    def cancel(self) -> None:
        """Forget the call."""
        ...


class Timers(Generic[K, V]):
    """Deadlines by key; what is due comes out in order of deadline.

    Arming a key again replaces its deadline. Arm and cancel cost O(log n), amortised.

    Args:
        clock: decides what is due.
        call_later: the loop's; takes a delay in seconds and a callback.
        fire: called with each value that is due.
    """

    def __init__(
        self,
        clock: Clock,
        call_later: Callable[[float, Callable[[], None]], Cancellable],
        fire: Callable[[V], None],
    ) -> None:
        self._clock = clock
        self._call_later = call_later
        self._fire = fire
        self._armed: dict[K, tuple[int, int, V]] = {}
        self._heap: list[tuple[int, int, K]] = []
        self._serial = 0
        self._wake: Cancellable | None = None
        self._wake_ns = 0

    def __len__(self) -> int:
        return len(self._armed)

    def arm(self, key: K, deadline_ns: int, value: V) -> None:
        """Let *value* fire once the clock has reached *deadline_ns*."""
        self._serial += 1
        self._armed[key] = (deadline_ns, self._serial, value)
        heapq.heappush(self._heap, (deadline_ns, self._serial, key))
        if len(self._heap) > 2 * len(self._armed) + _SWEEP_MIN:
            self._heap = [(at_ns, serial, k) for k, (at_ns, serial, _) in self._armed.items()]
            heapq.heapify(self._heap)
        self._wake_by(deadline_ns)

    def cancel(self, key: K) -> None:
        """Forget *key*, if it is armed."""
        self._armed.pop(key, None)

    def close(self) -> None:
        """Forget everything."""
        self._armed.clear()
        self._heap.clear()
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None

    def _wake_by(self, deadline_ns: int) -> None:
        """Make sure that the loop timer is not later than *deadline_ns*."""
        if self._wake is not None:
            if self._wake_ns <= deadline_ns:
                return
            self._wake.cancel()
        self._wake_ns = deadline_ns
        delay_s = max(0, deadline_ns - self._clock.now_ns()) / NS_PER_S
        self._wake = self._call_later(delay_s, self._wake_up)

    def _wake_up(self) -> None:
        self._wake = None
        now_ns = self._clock.now_ns()
        # What is armed from here on waits for the next wake-up, so that this one ends.
        last_serial = self._serial
        try:
            # One by one: what fires may cancel the next.
            while self._heap and self._heap[0][0] <= now_ns and self._heap[0][1] <= last_serial:
                _, serial, key = heapq.heappop(self._heap)
                armed = self._armed.get(key)
                if armed is not None and armed[1] == serial:
                    del self._armed[key]
                    self._fire(armed[2])
        finally:
            # A deadline that was cancelled may still lead the heap: it only wakes us once for nothing.
            if self._heap:
                self._wake_by(self._heap[0][0])
