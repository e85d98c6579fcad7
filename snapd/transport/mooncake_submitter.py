"""Begins Mooncake's writes out of a GPU in a thread of its own, in order.

There Mooncake's older releases wait inside the call that begins a write: for the copy, and so for whatever
the GPU was told on its default stream before, which may be a whole forward pass. Newer ones wait for what the
calling thread told the GPU on a stream of its own, and this thread tells it nothing.

Source: design, section 7.
"""

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from snapd.errors import TransportError
from snapd.transport.base import Write
from snapd.transport.mooncake_calls import CALLS
from snapd.transport.mooncake_engine import MooncakeEngine, WriteState

# More is not taken at a time, of all writers together.
QUEUE_MAX: Final = 1_024

# Makes what a thread needs current, such as a GPU.
Current = Callable[[], AbstractContextManager[object]]


class Submission:
    """A write that is to begin, or has. Any thread may look at it.

    Attributes:
        error: why it did not begin; empty: it has, or it may yet.
        is_withdrawn: it never will.
        may_land: it has begun, or nobody knows.
    """

    def __init__(self, engine: MooncakeEngine, segment_name: str, write: Write) -> None:
        self.error = ""
        self.is_withdrawn = False
        self.may_land = False
        self._engine = engine
        self._call = (segment_name, write)
        self._batch_id: int | None = None
        self._lock = threading.Lock()

    def begin(self, current: Current) -> None:
        """Begin it, unless it was withdrawn. Waits as long as the engine does."""
        with self._lock:
            if self.is_withdrawn:
                return
            self.may_land = True
        try:
            with CALLS.under_way(), current():
                self._batch_id = self._engine.submit(*self._call)
        except TransportError as error:
            self.may_land = False
            self.error = str(error)
        except Exception as error:  # Whatever it was, whoever polls must hear of it.
            self.error = str(error) or type(error).__name__

    def withdraw(self) -> bool:
        """Keep it from beginning; return whether it has not begun and never will."""
        with self._lock:
            self.is_withdrawn = not self.may_land and not self.error
            return self.is_withdrawn

    def check(self) -> WriteState:
        """Return how far it has come. Never ask again about one that is final."""
        if self.error:
            return WriteState.FAILED
        if self._batch_id is None:
            return WriteState.RUNNING
        return self._engine.check(self._batch_id)


class Submitter:
    """One thread that begins what it is given. It lives as long as the process.

    Args:
        current: entered around every call.
    """

    def __init__(self, current: Current) -> None:
        self._current = current
        self._queue: queue.SimpleQueue[Submission] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def has_room(self) -> bool:
        """Whether one more is taken."""
        return self._queue.qsize() < QUEUE_MAX

    def submit(self, engine: MooncakeEngine, segment_name: str, write: Write) -> Submission:
        """Have a write begun after those before it."""
        submission = Submission(engine, segment_name, write)
        with self._lock:
            self._queue.put(submission)
            if self._thread is None:
                # A daemon thread: a GPU that hangs must not keep this process from ending.
                self._thread = threading.Thread(target=self._run, name="snapd-submit", daemon=True)
                self._thread.start()
        return submission

    def _run(self) -> None:
        while True:
            self._queue.get().begin(self._current)
