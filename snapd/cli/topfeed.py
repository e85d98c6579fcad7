"""Asks the daemon for ``snapd top``, in threads of its own, so that keys are answered meanwhile.

One thread asks for numbers once an interval, the other watches transitions. Both go on when the daemon goes
away, and find it again. What they have is taken by whoever draws; what is not taken does not pile up.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from snapd.cli.topmodel import EVENTS_MAX, NO_DAEMON
from snapd.client import Client, Watch
from snapd.core.overview import Order
from snapd.errors import ConnectionProblem, RequestTimeout, SnapdError
from snapd.exchange import WatchPush
from snapd.wire import StatsRep

# How soon a daemon that is away is looked for again, at the latest.
RETRY_S: Final = 1.0
# Pushes that are read in a tenth of a second. What comes faster the daemon counts and drops, for it must not
# work harder for a viewer than for those who push and ingest.
_PUSHES_A_SLICE: Final = 100
_SLICE_S: Final = 0.1
_ANSWERS_MAX: Final = 8


class Answer(NamedTuple):
    """What the daemon said, or why it said nothing, and when (unix seconds)."""

    at_s: float
    stats: StatsRep | None
    problem: str = ""
    detail: str = ""


class Feed:
    """Two threads that ask one daemon.

    Args:
        socket_path: the daemon's.
        timeout_s: for each answer.
        interval_s: between two questions.
        order: which attempts are wanted.
        on_news: called by the threads whenever there is something to take.
    """

    def __init__(
        self,
        socket_path: str,
        *,
        timeout_s: float,
        interval_s: float,
        order: Order,
        on_news: Callable[[], None],
    ) -> None:
        self._interval_s = interval_s
        self._order: Order = order
        self._on_news = on_news
        self._client = Client(socket_path, timeout_s=timeout_s, name="snapd top")
        self._closed = threading.Event()
        self._poked = threading.Event()
        self._lock = threading.Lock()
        self._answers: deque[Answer] = deque(maxlen=_ANSWERS_MAX)
        self._pushes: deque[tuple[float, WatchPush]] = deque(maxlen=EVENTS_MAX)
        self._watch: Watch | None = None
        self._watch_problem = ""
        self._threads = [
            threading.Thread(target=target, name=f"snapd-top-{target.__name__}", daemon=True)
            for target in (self._ask_on, self._watch_on)
        ]

    def start(self) -> None:
        """Begin to ask."""
        for thread in self._threads:
            thread.start()

    def ask_now(self, order: Order) -> None:
        """Ask at once, for the attempts that come first in this order."""
        self._order = order
        self._poked.set()

    def take(self) -> tuple[list[Answer], list[tuple[float, WatchPush]], str]:
        """Return, once, the answers, the pushes with the unix time at which each came, and why none do."""
        with self._lock:
            answers, pushes = list(self._answers), list(self._pushes)
            self._answers.clear()
            self._pushes.clear()
            return answers, pushes, self._watch_problem

    def close(self) -> None:
        """Stop asking, and hang up."""
        self._closed.set()
        self._poked.set()
        self._client.close()
        with self._lock:
            watch = self._watch
        if watch is not None:
            watch.close()
        for thread in self._threads:
            # It may not have begun yet.
            if thread.is_alive():
                thread.join(RETRY_S)

    def _ask_on(self) -> None:
        while not self._closed.is_set():
            begun_s = time.monotonic()
            answer = self._ask()
            if self._closed.is_set():
                return
            with self._lock:
                self._answers.append(answer)
            self._on_news()
            pause_s = self._interval_s if answer.stats else min(self._interval_s, RETRY_S)
            self._poked.wait(max(0.0, begun_s + pause_s - time.monotonic()))
            self._poked.clear()

    def _ask(self) -> Answer:
        try:
            stats = self._client.stats(overview=self._order)
        except SnapdError as error:
            return Answer(time.time(), None, problem_of(error), str(error))
        if stats.overview is None:
            return Answer(time.time(), None, "the daemon gives no overview", str(no_overview(stats)))
        return Answer(time.time(), stats)

    def _watch_on(self) -> None:
        while not self._closed.is_set():
            try:
                watch = self._client.watch()
            except SnapdError as error:
                self._note_watch(None, "" if isinstance(error, ConnectionProblem) else str(error))
            else:
                self._note_watch(watch, "")
                with watch:
                    self._read_pushes(watch)
                self._note_watch(None, "")
            self._closed.wait(min(self._interval_s, RETRY_S))

    def _note_watch(self, watch: Watch | None, problem: str) -> None:
        with self._lock:
            self._watch, self._watch_problem = watch, problem
        if watch is not None and self._closed.is_set():
            # It was closed before it was known.
            watch.close()

    def _read_pushes(self, watch: Watch) -> None:
        slice_ends_s, room = 0.0, 0
        try:
            for push in watch:
                now_s = time.monotonic()
                with self._lock:
                    self._pushes.append((time.time(), push))
                self._on_news()
                if now_s >= slice_ends_s:
                    slice_ends_s, room = now_s + _SLICE_S, _PUSHES_A_SLICE
                room -= 1
                if room <= 0 and self._closed.wait(slice_ends_s - now_s):
                    return
        except SnapdError:
            return


def problem_of(error: SnapdError) -> str:
    """Return in a few words why there are no numbers."""
    if isinstance(error, RequestTimeout):
        return "no answer from the daemon"
    return NO_DAEMON if isinstance(error, ConnectionProblem) else "the daemon refuses"


def no_overview(stats: StatsRep) -> SnapdError:
    """Return the error for a daemon of a version that does not know overviews."""
    return SnapdError(
        f"the daemon is snapd {stats.version} and gives no overview: use 'snapd status', or update it"
    )
