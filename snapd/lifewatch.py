"""Lets go of a daemon's memory when the daemon has ended, also in a process that does nothing meanwhile.

Memory stays taken as long as any process has it open or mapped, whoever owned it: the daemon that is started
in place of one that died would find too little, of a GPU, of hugepages, or of what its container may use.

Source: design, section 4.
"""

import os
import select
import threading
import weakref
from typing import Final, Protocol

from snapd.daemonlife import DaemonLife

# An end is seen at once. What was added meanwhile, or closed, is seen after so long.
_LOOK_MS: Final = 1_000


class Watched(Protocol):
    """What is a daemon's."""

    @property
    def life(self) -> DaemonLife:
        """The daemon's."""
        ...

    def abandon(self) -> None:
        """Let go of it: the daemon has ended. Called from a thread of this module's, maybe after a close."""
        ...


class LifeWatch:
    """One thread that waits for daemons to end, as long as there is something of theirs.

    It keeps nothing alive.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Watch nothing, as in a forked child: the thread stays in the parent, and may hold the lock."""
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, watched: Watched) -> None:
        """Have it let go of when its daemon has ended."""
        with self._lock:
            self._watched.add(watched)
            # One that was interrupted before it began, or that failed, watches nothing.
            if self._thread is not None and self._thread.is_alive():
                return
            # A daemon thread: the process must not wait for the daemon's end to come to its own.
            self._thread = threading.Thread(target=self._run, name="snapd-lives", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # The process ends, or has too many threads: whoever uses it will notice.
                self._thread = None

    def _run(self) -> None:
        while (poller := self._look()) is not None:
            poller.poll(_LOOK_MS)

    def _look(self) -> "select.poll | None":
        """Abandon what is to be, and return what to wait with; None: nothing is left."""
        poller = select.poll()
        ended = []
        with self._lock:
            for watched in list(self._watched):
                if watched.life.is_over:
                    self._watched.discard(watched)
                    ended.append(watched)
                else:
                    watched.life.register(poller)
            has_more = bool(self._watched)
            if not has_more:
                self._thread = None
        for watched in ended:
            watched.abandon()
        return poller if has_more else None


WATCH: Final = LifeWatch()
os.register_at_fork(after_in_child=WATCH.reset)
