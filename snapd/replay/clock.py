"""Simulated time: what happens next, happens next."""

import heapq
from collections.abc import Callable
from typing import TypeAlias

from snapd.units import NS_PER_S

Action: TypeAlias = Callable[[], None]


class _Call:
    """A planned call; may be cancelled."""

    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def cancel(self) -> None:
        """Forget the call."""
        self.action = None


class SimClock:
    """A clock that jumps from one planned call to the next; calls of one time come in order of planning."""

    def __init__(self) -> None:
        self._now_ns = 0
        self._serial = 0
        self._heap: list[tuple[int, int, _Call]] = []

    def now_ns(self) -> int:
        """Return the simulated time."""
        return self._now_ns

    def at(self, at_ns: int, action: Action) -> _Call:
        """Plan *action* for *at_ns*, or for now if that is past."""
        call = _Call(action)
        self._serial += 1
        heapq.heappush(self._heap, (max(at_ns, self._now_ns), self._serial, call))
        return call

    def call_later(self, delay_s: float, action: Action) -> _Call:
        """Plan *action* as an event loop would; the next whole ns is never early."""
        return self.at(self._now_ns + -int(-delay_s * NS_PER_S // 1), action)

    def run(self) -> None:
        """Make every call that is planned, and those that they plan."""
        while self._heap:
            at_ns, _, call = heapq.heappop(self._heap)
            if call.action is not None:
                self._now_ns = at_ns
                call.action()
