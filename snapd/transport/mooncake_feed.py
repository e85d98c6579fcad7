"""Writes what feeds give, out of a GPU, in two threads a writer.

There Mooncake copies on a stream of the thread that begins a write, and sees it done when that stream has
nothing left to do; older releases wait inside that call, with the interpreter's lock released. Either way a
thread can have one write under way, so while it waits for that the other one gets the next ready.

A thread that used CUDA must not wake, or end, while the interpreter or CUDA itself comes to its end. So it
waits for its next feed without a limit, and ends with its writer, or before the interpreter does.

Source: design, section 7.
"""

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final

from snapd.errors import TransportError
from snapd.transport.base import Progress, TicketState, Write, WriteFeed
from snapd.transport.mooncake_calls import CALLS, REST_S_MAX
from snapd.transport.mooncake_engine import MooncakeEngine, WriteState
from snapd.transport.mooncake_submitter import Current
from snapd.transport.pauses import pause_s

# More is not taken at a time, a writer.
FEEDS_MAX: Final = 1_024
_THREADS: Final = 2
# A copy between GPUs is over when its write has begun, or soon after; over RDMA it takes milliseconds. No
# yielding meanwhile, which would take Python's lock from other threads.
_LONGEST_PAUSE_S: Final = 0.000_5


class Feeding:
    """A feed that is to be written, is, or was. Any thread may look at it.

    Once it was stopped, because it was cancelled or something failed, it is final when no write is under
    way, whatever its threads still wait for: none of them begins a write then.

    Attributes:
        progress: how far it has come.
        is_peers_failure: it failed because of a write, and not because of the feed.
        in_flight_bytes: how much is being written.

    Args:
        engine: that writes.
        segment_name: of the peer.
        feed: what is written.
        check: raises ``TransportError`` for a write that must not begin.
    """

    def __init__(
        self, engine: MooncakeEngine, segment_name: str, feed: WriteFeed, check: Callable[[Write], None]
    ) -> None:
        self.progress = Progress(TicketState.RUNNING)
        self.is_peers_failure = False
        self.in_flight_bytes = 0
        self._engine = engine
        self._segment_name = segment_name
        self._feed = feed
        self._check = check
        self._failure = ""
        self._may_land = False
        self._has_more = True
        self._is_stopped = False
        self._threads = 0
        self._writing = 0
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """Begin no further write. If it is final this has no effect."""
        with self._lock:
            if self.progress.is_final:
                return
            self._is_stopped = True
        self._feed.stop()
        self._conclude()

    def enter(self) -> bool:
        """Have the calling thread write some of it, with ``serve``; return whether there is need."""
        with self._lock:
            is_wanted = self._has_more and not self._is_stopped
            self._threads += is_wanted
            return is_wanted

    def serve(self, current: Current) -> None:
        """Write what the feed gives until there is no more."""
        try:
            with current():
                while (write := self._feed.next()) is not None:
                    may_land = False
                    try:
                        self._check(write)
                        may_land = self._begin(write) and self._write(write)
                    finally:
                        self._feed.over(write, may_land=may_land)
        except BaseException as error:  # Whatever it was, whoever polls must hear of it.
            self._fail(error, of_peer=False, may_land=False)
        finally:
            with self._lock:
                self._has_more = False
                self._threads -= 1
            self._conclude()

    def _begin(self, write: Write) -> bool:
        """Take note that a write is about to begin; return whether it may."""
        with self._lock:
            if self._is_stopped:
                return False
            self._writing += 1
            self.in_flight_bytes += write.size_bytes
            return True

    def _write(self, write: Write) -> bool:
        """Begin a write, and wait until it is final; return whether it failed and may land all the same."""
        may_land = False
        try:
            with CALLS.under_way():
                may_land = True
                try:
                    batch_id = self._engine.submit(self._segment_name, write)
                except TransportError:
                    may_land = False
                    raise
            if self._last_state(batch_id) is WriteState.FAILED:
                raise TransportError(f"a write to {self._segment_name} failed")
            may_land = False
        except BaseException as error:  # Whatever it was, whoever polls must hear of it.
            self._fail(error, of_peer=True, may_land=may_land)
        finally:
            with self._lock:
                self._writing -= 1
                self.in_flight_bytes -= write.size_bytes
        return may_land

    def _last_state(self, batch_id: int) -> WriteState:
        """Wait for a write; return how it ended."""
        began_s = time.perf_counter()
        while True:
            with CALLS.under_way():
                state = self._engine.check(batch_id)
            if state is not WriteState.RUNNING:
                return state
            time.sleep(pause_s(time.perf_counter() - began_s, _LONGEST_PAUSE_S))

    def _fail(self, error: BaseException, *, of_peer: bool, may_land: bool) -> None:
        with self._lock:
            self._is_stopped = True
            self._may_land = self._may_land or may_land
            if not self._failure:
                self._failure = str(error) or type(error).__name__
                self.is_peers_failure = of_peer
        self._feed.stop()

    def _conclude(self) -> None:
        """Take note of the end, if this is it."""
        with self._lock:
            is_served = not self._has_more and self._threads == 0
            if self.progress.is_final or self._writing or not (self._is_stopped or is_served):
                return
            if self._failure:
                detail = f"{self._failure}; it may still land" if self._may_land else self._failure
                self.progress = Progress(TicketState.FAILED, not self._may_land, detail)
            else:
                state = TicketState.CANCELLED if self._is_stopped else TicketState.DONE
                self.progress = Progress(state, is_drained=True)
        self._feed.ended()


class Feeder:
    """Two threads that write one feed after the other, both of them the same one; until ``close``.

    No executor's: the interpreter would wait for those at its end, without a limit, and a GPU may hang.

    Args:
        current: entered around all that a thread does for a feed.
    """

    def __init__(self, current: Current) -> None:
        self._current = current
        self._waiting: deque[Feeding] = deque()
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._is_closed = False
        self._pid = os.getpid()

    @property
    def has_room(self) -> bool:
        """Whether one more is taken."""
        return len(self._waiting) < FEEDS_MAX

    def submit(self, feeding: Feeding) -> None:
        """Have a feed written after those before it.

        Raises:
            TransportError: this is a fork of the process that made the writer, or there can be no thread.
        """
        if os.getpid() != self._pid:
            raise TransportError("a writer is not for forks: its threads are in the process that made it")
        with self._changed:
            if self._is_closed:
                raise TransportError("the threads that write have ended")
            self._waiting.append(feeding)
            _feeders.add(self)
            try:
                while len(self._threads) < _THREADS:
                    # A daemon thread: a GPU that hangs must not keep this process from ending.
                    thread = threading.Thread(target=self._run, name="snapd-feed", daemon=True)
                    thread.start()
                    self._threads.append(thread)
            except RuntimeError as error:
                if not self._threads:
                    self._waiting.remove(feeding)
                    raise TransportError(f"there is no thread to write in: {error}") from None
            except BaseException:
                self._waiting.remove(feeding)  # Interrupted; no thread has it yet.
                raise
            self._changed.notify_all()

    def cancel(self, feeding: Feeding) -> None:
        """Begin no further write of a feed, and let go of it if it waits."""
        feeding.cancel()
        with self._changed:
            # Those before it may take long, and it may hold much.
            if feeding in self._waiting:
                self._waiting.remove(feeding)

    def close(self) -> None:
        """Have the threads end when no feed waits any more. Twice is fine."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def join(self, until_s: float) -> None:
        """Wait for the threads to end, until then at most; *until_s* is of ``time.monotonic``."""
        for thread in list(self._threads):
            thread.join(max(0.0, until_s - time.monotonic()))

    def _run(self) -> None:
        while (feeding := self._next()) is not None:
            feeding.serve(self._current)

    def _next(self) -> Feeding | None:
        """Enter the first feed that needs it, and wait for it; None: there will be none."""
        with self._changed:
            while True:
                while self._waiting:
                    if self._waiting[0].enter():
                        return self._waiting[0]
                    self._waiting.popleft()
                if self._is_closed:
                    return None
                self._changed.wait()


_feeders: Final[weakref.WeakSet[Feeder]] = weakref.WeakSet()


def _rest() -> None:
    """End all threads before the interpreter ends, those that are in no call that hangs."""
    CALLS.rest()
    feeders = list(_feeders)
    for feeder in feeders:
        feeder.close()
    until_s = time.monotonic() + REST_S_MAX
    for feeder in feeders:
        feeder.join(until_s)


atexit.register(_rest)
# The threads are the parent's.
os.register_at_fork(after_in_child=_feeders.clear)
