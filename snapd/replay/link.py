"""A link that serves one transfer after the other."""

from snapd.replay.clock import Action, SimClock


class Link:
    """First come, first served; the whole bandwidth for each.

    Attributes:
        busy_ns: time that it was in use.
    """

    def __init__(self, clock: SimClock) -> None:
        self._clock = clock
        self._free_ns = 0
        self.busy_ns = 0

    def send(self, duration_ns: int, then: Action) -> None:
        """Use the link for *duration_ns* as soon as it is free, then call *then*."""
        self._free_ns = max(self._free_ns, self._clock.now_ns()) + duration_ns
        self.busy_ns += duration_ns
        self._clock.at(self._free_ns, then)
