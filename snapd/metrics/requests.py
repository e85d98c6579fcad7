"""Times requests: from the frame that was decoded to the reply that was queued.

A service that does what its base does, and looks at the clock before and after. With metrics off the base
is used, and nothing is timed.
"""

import typing
from bisect import bisect_left
from time import perf_counter
from typing import Any, Final

from snapd import wire as w
from snapd.metrics.tally import Histogram
from snapd.service import Caller, Service

# Upper bounds of buckets, in seconds: from a lookup in a dict to a vote that waits for other ranks.
REQUEST_BOUNDS_S: Final = (
    0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.01, 0.05, 0.25, 1.0, 10.0,
)  # fmt: skip
# Cheaper to call than super().
_take: Final = Service.take


class TimedService(Service):
    """A service that times what it answers.

    Attributes:
        times: seconds from decoding to the reply, by kind of request.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.times: dict[type[w.Request], Histogram] = {
            kind: Histogram(REQUEST_BOUNDS_S) for kind in typing.get_args(w.AnyRequest)
        }

    def take(self, caller: Caller, request: w.AnyRequest) -> None:
        """Answer *request*, now or, for a vote that waits for others, later."""
        begun_s = perf_counter()
        kind = type(request)
        times = self.times[kind]
        # With one rank there is nobody to wait for.
        if kind is w.VoteReq and len(self._arenas) > 1:
            _take(self, _Voter(caller, begun_s, times), request)
            return
        _take(self, caller, request)
        # As in Histogram.observe, without the call: this is done for every request.
        duration_s = perf_counter() - begun_s
        times.counts[bisect_left(REQUEST_BOUNDS_S, duration_s)] += 1
        times.total += duration_s


class _Voter:
    """The caller of a vote, whose reply may wait: the time is taken when it is sent."""

    __slots__ = ("_begun_s", "_caller", "_times", "conn_id", "is_local", "label", "rights")

    def __init__(self, caller: Caller, begun_s: float, times: Histogram) -> None:
        self.conn_id = caller.conn_id
        self.label = caller.label
        self.rights = caller.rights
        self.is_local = caller.is_local
        self._caller = caller
        self._begun_s = begun_s
        self._times = times

    def send(self, message: w.AnyReply) -> None:
        self._caller.send(message)
        self._times.observe(perf_counter() - self._begun_s)

    def writer_id(self) -> int:
        return self._caller.writer_id()

    def watch(self, session_id: str) -> bool:
        return self._caller.watch(session_id)

    def hand_over(self, message: w.MapBufferRep, fd: int) -> bool:
        return self._caller.hand_over(message, fd)
