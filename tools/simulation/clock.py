"""Simulated time: what happens next, and the processes to which it happens."""

import asyncio
import heapq
from collections.abc import Callable
from typing import Any, Final, TypeAlias, cast

from snapd.units import NS_PER_MS, NS_PER_S
from tools.simulation.dice import Dice
from tools.simulation.failure import Broken

Action: TypeAlias = Callable[[], None]

# A run that comes to no rest is a fault of its own.
EVENTS_MAX: Final = 400_000
# After a process was stopped, what waited for it comes in any order within this time.
_RESUME_NS: Final = 200_000
# uvloop may call early by as much.
_EARLY_NS_MAX: Final = 1_500_000


class Planned:
    """A planned call; may be cancelled."""

    __slots__ = ("action", "node")

    def __init__(self, action: Action, node: "Node | None") -> None:
        self.action: Action | None = action
        self.node = node

    def cancel(self) -> None:
        """Forget the call."""
        self.action = None


class Timeline:
    """One clock for all, which jumps from one planned call to the next.

    Attributes:
        now_ns: the present.
        events: calls that were made.
    """

    def __init__(self, dice: Dice) -> None:
        self.now_ns = 0
        self.events = 0
        self._dice = dice
        self._serial = 0
        self._heap: list[tuple[int, int, Planned]] = []

    def at(self, at_ns: int, action: Action, node: "Node | None" = None) -> Planned:
        """Plan a call; of a *node*, it waits while that is stopped, and is never made once that is dead."""
        planned = Planned(action, node)
        self._push(max(at_ns, self.now_ns), planned)
        return planned

    def after(self, delay_ns: int, action: Action, node: "Node | None" = None) -> Planned:
        """Plan a call for so much later."""
        planned = Planned(action, node)
        self._push(self.now_ns + delay_ns, planned)
        return planned

    def run(self) -> None:
        """Make every call that is planned, and those that they plan, until there is none.

        Raises:
            Broken: there is no end of them.
        """
        heap = self._heap
        while heap:
            at_ns, _, planned = heapq.heappop(heap)
            action, node = planned.action, planned.node
            if action is None:
                continue
            if node is not None:
                if not node.is_alive:
                    continue
                if node.stopped_until_ns > at_ns:
                    self._push(node.stopped_until_ns + self._dice.below(_RESUME_NS), planned)
                    continue
            self.now_ns = at_ns
            planned.action = None
            self.events += 1
            if self.events > EVENTS_MAX:
                raise Broken("no-rest", f"more than {EVENTS_MAX} events and no end")
            try:
                action()
            except Exception as error:
                if node is None or node.on_error is None or not node.on_error(error):
                    raise

    def _push(self, at_ns: int, planned: Planned) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (at_ns, self._serial, planned))


class Node:
    """A process: it runs, is stopped for a while, or is dead.

    Attributes:
        offset_ns: its clock against the timeline's.
        stopped_until_ns: nothing of it runs before that time of the timeline.
        on_error: told of what was raised and nobody caught, as a loop's handler is; False: it is not for it.
    """

    __slots__ = ("is_alive", "offset_ns", "on_error", "stopped_until_ns", "timeline")

    def __init__(self, timeline: Timeline, offset_ns: int = 0) -> None:
        self.timeline = timeline
        self.offset_ns = offset_ns
        self.is_alive = True
        self.stopped_until_ns = 0
        self.on_error: Callable[[Exception], bool] | None = None

    def now_ns(self) -> int:
        """Return the process's monotonic time."""
        return self.timeline.now_ns + self.offset_ns

    def after(self, delay_ns: int, action: Action) -> Planned:
        """Plan a call in this process."""
        return self.timeline.after(delay_ns, action, self)

    def stop_for(self, duration_ns: int) -> None:
        """Let it stand still (SIGSTOP, or a host that is too busy)."""
        self.stopped_until_ns = max(self.stopped_until_ns, self.timeline.now_ns + duration_ns)

    def kill(self) -> None:
        """End it (SIGKILL)."""
        self.is_alive = False


class LoopTimer:
    """What ``Loop.call_later`` returns."""

    __slots__ = ("_loop", "action", "deadline_ns", "planned")

    def __init__(self, loop: "Loop", action: Action, deadline_ns: int) -> None:
        self._loop = loop
        self.action = action
        self.deadline_ns = deadline_ns
        self.planned: Planned | None = None

    def cancel(self) -> None:
        """Forget the call."""
        self._loop.forget(self)


class Loop:
    """As much of an event loop as the daemon asks of one. Calls come early at times.

    Args:
        node: the process.
        dice: says how early.
    """

    def __init__(self, node: Node, dice: Dice) -> None:
        self._node = node
        self._dice = dice
        self._timers: dict[LoopTimer, None] = {}

    def as_asyncio(self) -> asyncio.AbstractEventLoop:
        """Return itself, for those who ask no more of a loop than it has."""
        return cast("asyncio.AbstractEventLoop", self)

    def time(self) -> float:
        """Return the process's time in seconds."""
        return self._node.now_ns() / NS_PER_S

    def call_soon(self, callback: Callable[..., object], *args: Any) -> Planned:
        """Call in the loop's next turn."""
        return self._node.after(0, lambda: _call(callback, args))

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> LoopTimer:
        """Call after *delay* seconds of the process's clock."""
        delay_ns = max(0, -int(-delay * NS_PER_S // 1))
        timer = LoopTimer(self, lambda: _call(callback, args), self._node.now_ns() + delay_ns)
        self._timers[timer] = None
        if delay_ns > 2 * _EARLY_NS_MAX and self._dice.chance(20):
            delay_ns -= self._dice.below(_EARLY_NS_MAX)
        self._plan(timer, delay_ns)
        return timer

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Tell the process of an error; what is not for it is raised."""
        error = context["exception"]
        if self._node.on_error is None or not self._node.on_error(error):
            raise error

    def forget(self, timer: LoopTimer) -> None:
        """Make no call for this timer."""
        if timer.planned is not None:
            timer.planned.cancel()
        self._timers.pop(timer, None)

    def jump(self, by_ms: int) -> None:
        """Let the process's clock jump ahead: what is due by then comes at once."""
        self._node.offset_ns += by_ms * NS_PER_MS
        for timer in list(self._timers):
            if timer.planned is not None:
                timer.planned.cancel()
            self._plan(timer, max(0, timer.deadline_ns - self._node.now_ns()))

    def _plan(self, timer: LoopTimer, delay_ns: int) -> None:
        def fire() -> None:
            if self._timers.pop(timer, timer) is None:
                timer.action()

        timer.planned = self._node.after(delay_ns, fire)


def _call(callback: Callable[..., object], args: tuple[Any, ...]) -> None:
    callback(*args)
