"""Looks after what a pusher left under way: memory that a transport or a GPU still uses, until it does not.

One thread of the process, which sleeps unless something is left. Before the interpreter ends it rests for
good: a thread that torch or a driver lets back into an interpreter that is ending aborts the process.

Source: design, sections 7 and 12.
"""

import atexit
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Final

from snapd.kv.flights import Flights
from snapd.kv.staging import Ring
from snapd.kv.writers import Writers

_POLL_S_MIN: Final = 0.001
_POLL_S_MAX: Final = 0.1
# How long the end of the process waits for a call that the thread is in.
_REST_S_MAX: Final = 5.0

# Says whether it is over.
Settle = Callable[[], bool]


class Keeper:
    """Calls what it is given now and then, until that says that it is over."""

    def __init__(self) -> None:
        # This one may be put into by a finalizer, at any moment.
        self._queue: queue.SimpleQueue[Settle] = queue.SimpleQueue()
        self._pid = 0
        self._lock = threading.Lock()
        self._is_ending = threading.Event()
        self._rests = threading.Event()

    def ensure(self) -> None:
        """Have the thread: a finalizer cannot start one."""
        with self._lock:
            if self._pid == os.getpid():
                return
            self._pid = os.getpid()
            self._queue = queue.SimpleQueue()  # In a fork, what the parent kept is the parent's.
            self._is_ending, self._rests = threading.Event(), threading.Event()
            # A daemon thread: what never ends must not keep this process from ending.
            args = (self._queue, self._is_ending, self._rests)
            threading.Thread(target=self._run, args=args, name="snapd-keeper", daemon=True).start()

    def keep(self, settle: Settle) -> None:
        """Look after something. ``ensure`` comes first."""
        self._queue.put(settle)

    def rest(self) -> None:
        """Have the thread do nothing any more, and wait until it does, some seconds at most.

        What is kept stays where it is until the process has ended.
        """
        if self._pid != os.getpid():
            return
        self._is_ending.set()
        self._queue.put(_never_over)  # Wakes it.
        self._rests.wait(_REST_S_MAX)

    @staticmethod
    def _run(given: "queue.SimpleQueue[Settle]", is_ending: threading.Event, rests: threading.Event) -> None:
        kept: list[Settle] = []
        poll_s = _POLL_S_MIN
        while True:
            try:
                kept.append(given.get(timeout=poll_s if kept else None))
                poll_s = _POLL_S_MIN
            except queue.Empty:
                poll_s = min(2 * poll_s, _POLL_S_MAX)
            if is_ending.is_set():
                break
            kept = [settle for settle in kept if not _is_over(settle)]
        rests.set()
        # For ever: to return would let go of memory that a transport may still read.
        threading.Event().wait()


def _never_over() -> bool:
    return False


def _is_over(settle: Settle) -> bool:
    try:
        return settle()
    except Exception:  # Whatever a driver says: nobody knows, and memory in use must stay.
        return False


KEEPER: Final = Keeper()
atexit.register(KEEPER.rest)


class Remains:
    """What a pusher leaves: writes, writers and staging memory.

    Args:
        flights: its writes.
        writers: its writers.
        rings: returns its staging memory.
    """

    def __init__(self, flights: Flights, writers: Writers, rings: Callable[[], Iterable[Ring]]) -> None:
        self._flights = flights
        self._writers = writers
        self._rings = rings
        self._pid = os.getpid()
        self._has_begun = False

    def settle(self) -> bool:
        """Give memory back whose write is over; return whether none is left that was lent to one."""
        if not self._flights.settle():
            return False
        for ring in self._rings():
            ring.trim()
        return True

    def abandon(self) -> None:
        """Have everything given back: neither the pusher nor a job of it is there any more.

        A finalizer may call it.
        """
        if os.getpid() == self._pid:
            KEEPER.keep(self._settle_all)

    def _settle_all(self) -> bool:
        if not self._has_begun:
            self._has_begun = True
            self._flights.cancel()
            with contextlib.suppress(Exception):
                self._writers.close()
        if not self._flights.settle():
            return False
        # What jobs held that were never ended.
        is_over = True
        for ring in self._rings():
            is_over = ring.reclaim() and is_over
            ring.trim()
        return is_over
