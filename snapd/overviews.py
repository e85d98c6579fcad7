"""Runs surveys on the event loop: a few attempts a turn, a rest after each, one for all who ask.

With 100,000 attempts a survey takes some tenths of a second of the daemon's time. It is done in turns of
well under a millisecond, between which everybody else is served, and then not again before twenty times as
long has passed: whoever asks meanwhile gets the former picture. So all viewers together cost at most about a
twentieth of the daemon, and nothing while nobody looks.
"""

from collections.abc import Callable
from typing import Final

from snapd.core.books import Books
from snapd.core.overview import Order, Overview
from snapd.core.survey import PeerCounts, Survey
from snapd.timers import Cancellable, Clock

# Attempts and extents that are looked at before the others get their turn.
TURN_MAX: Final = 512
# A survey is followed by so many times its own time without one.
REST_TIMES: Final = 20


class Overviews:
    """Answers who wants to see what is open.

    Args:
        books: what is looked at.
        peers: what came of each D worker's attempts.
        clock: measures what a survey takes.
        call_later: the loop's.
    """

    def __init__(
        self,
        books: Books,
        peers: PeerCounts,
        clock: Clock,
        call_later: Callable[[float, Callable[[], None]], Cancellable],
    ) -> None:
        self._books = books
        self._peers = peers
        self._clock = clock
        self._call_later = call_later
        self._running: Survey | None = None
        self._last: Survey | None = None
        self._last_ns = 0
        self._spent_ns = 0
        self._rest_until_ns = 0
        self._next_turn: Cancellable | None = None
        self._waiting: list[tuple[Order, Callable[[Overview], None]]] = []

    def ask(self, order: Order, on_overview: Callable[[Overview], None]) -> None:
        """Call *on_overview* once, now or when the survey is done."""
        self._waiting.append((order, on_overview))
        if self._running is not None:
            return
        if self._last is None or self._clock.now_ns() >= self._rest_until_ns:
            self._running = Survey(self._books)
            self._spent_ns = 0
            self._take_turn()
        else:
            self._answer()

    def close(self) -> None:
        """Look no more; whoever waits is not answered."""
        self._waiting.clear()
        if self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn = None

    def _take_turn(self) -> None:
        survey = self._running
        assert survey is not None
        begun_ns = self._clock.now_ns()
        survey.step(TURN_MAX)
        now_ns = self._clock.now_ns()
        self._spent_ns += now_ns - begun_ns
        if not survey.is_done:
            self._next_turn = self._call_later(0.0, self._take_turn)
            return
        self._next_turn = self._running = None
        self._last, self._last_ns = survey, now_ns
        self._rest_until_ns = now_ns + REST_TIMES * self._spent_ns
        self._answer()

    def _answer(self) -> None:
        assert self._last is not None
        waiting, self._waiting = self._waiting, []
        for order, on_overview in waiting:
            on_overview(self._last.overview(order, self._peers, self._last_ns))
