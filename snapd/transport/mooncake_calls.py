"""Threads that wait inside Mooncake, and how they stop before the interpreter ends.

A thread that comes back from the engine takes the interpreter's lock. When the interpreter is ending, Python
before 3.14 ends the thread instead, from inside pybind11, and that aborts the whole process. So before it
ends no thread begins a call any more, and those that are in one are waited for, ``REST_S_MAX`` at most. Only
one that is left then, and comes back in the few hundred milliseconds that the end takes, is still an abort.

Source: design, section 7.
"""

import atexit
import contextlib
import os
import threading
from typing import Final

from snapd.errors import TransportError

# A peer that is stopped keeps a call for a minute; it must not keep the process from ending for so long.
REST_S_MAX: Final = 2.0


class _UnderWay(contextlib.AbstractContextManager[None]):
    """What ``Calls.under_way`` returns, one for all: it is entered some times for each piece of a push."""

    def __init__(self, calls: "Calls") -> None:
        self._calls = calls

    def __enter__(self) -> None:
        self._calls.begin()

    def __exit__(self, *_: object) -> None:
        self._calls.end()


class Calls:
    """The calls that threads of our own are in. Any thread may ask.

    Attributes:
        count: how many there are.
    """

    def __init__(self) -> None:
        self._under_way = _UnderWay(self)
        self.reset()

    def reset(self) -> None:
        """Know of no call, as in a forked child: the threads stay in the parent, and may hold the lock."""
        self.count = 0
        self._is_ending = False
        self._changed = threading.Condition()

    def under_way(self) -> contextlib.AbstractContextManager[None]:
        """Be in a call inside the block.

        Raises:
            TransportError: when it is entered: the process is ending, so none begins any more.
        """
        return self._under_way

    def begin(self) -> None:
        """Be in a call until ``end``; errors as ``under_way``."""
        with self._changed:
            if self._is_ending:
                raise TransportError("this process is ending")
            self.count += 1

    def end(self) -> None:
        """Be in it no more."""
        with self._changed:
            self.count -= 1
            if self._is_ending:
                self._changed.notify_all()

    def rest(self, limit_s: float = REST_S_MAX) -> bool:
        """Let no call begin any more, and wait for those under way; return whether none is left."""
        with self._changed:
            self._is_ending = True
            return self._changed.wait_for(lambda: self.count == 0, limit_s)


CALLS: Final = Calls()
os.register_at_fork(after_in_child=CALLS.reset)
atexit.register(CALLS.rest)
