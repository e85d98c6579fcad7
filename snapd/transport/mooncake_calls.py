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
from collections.abc import Iterator
from typing import Final

from snapd.errors import TransportError

# A peer that is stopped keeps a call for a minute; it must not keep the process from ending for so long.
REST_S_MAX: Final = 2.0


class Calls:
    """The calls that threads of our own are in. Any thread may ask.

    Attributes:
        count: how many there are.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Know of no call, as in a forked child: the threads stay in the parent, and may hold the lock."""
        self.count = 0
        self._is_ending = False
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Be in a call inside the block.

        Raises:
            TransportError: the process is ending, so none begins any more.
        """
        with self._changed:
            if self._is_ending:
                raise TransportError("this process is ending")
            self.count += 1
        try:
            yield
        finally:
            with self._changed:
                self.count -= 1
                self._changed.notify_all()

    def rest(self, limit_s: float = REST_S_MAX) -> bool:
        """Let no call begin any more, and wait for those under way; return whether none is left."""
        with self._changed:
            self._is_ending = True
            return self._changed.wait_for(lambda: self.count == 0, limit_s)


CALLS: Final = Calls()
os.register_at_fork(after_in_child=CALLS.reset)
atexit.register(CALLS.rest)
