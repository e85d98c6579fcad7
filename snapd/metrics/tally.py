"""Counts what the core's records tell, as they are written.

Plain numbers, no locks: all of it happens on the event loop. No label has more values than a closed enum
of reasons, states or ranks, and none names a session.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias

from snapd.core.fsm import TRANSITIONS
from snapd.core.records import (
    LeaseEnded,
    Record,
    SessionTransition,
    SlabQuarantined,
    SlabReleased,
    SyncOutcome,
)
from snapd.errors import Reason
from snapd.units import MS_PER_S

Outcome: TypeAlias = Literal["ok", "aborted", "refused"]

# Upper bounds of buckets, in seconds. From a copy inside a host to the longest times of the defaults.
STATE_BOUNDS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
LEASE_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
QUARANTINE_BOUNDS_S: Final = (0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    """Observations by bucket.

    Attributes:
        bounds: upper bounds, ascending; one more bucket takes what is above the last.
        counts: observations in each bucket alone, shape [len(bounds) + 1].
        total: sum of all observations.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """Count one value; a bound belongs to the bucket below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Tally:
    """What records told so far.

    Attributes:
        outcomes: attempts and refusals that ended, by how and why.
        evicted_bytes: payload of the snapshots that were evicted.
        ingested_tokens: of the snapshots that P took.
        state_times: seconds spent in a state, by that state and the next one.
        lease_times: seconds that leases lasted, by how they ended.
        quarantined: slabs that went into quarantine, by why.
        quarantine_times: seconds that slabs lay there, by what released them.
        notes: counts what a record tells, by its type; the others are not counted.
    """

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[Outcome, Reason]] = Counter()
        self.evicted_bytes = 0
        self.ingested_tokens = 0
        self.state_times: dict[tuple[str, str], Histogram] = {
            (state, successor): Histogram(STATE_BOUNDS_S)
            for state, row in TRANSITIONS.items()
            for successor in sorted({successor for cell in row.values() for successor in cell.successors})
            if successor != state
        }
        self.lease_times: dict[str, Histogram] = {}
        self.quarantined: Counter[str] = Counter()
        self.quarantine_times: dict[str, Histogram] = {}
        self.notes: dict[type[Record], Callable[[Any], None]] = {
            SyncOutcome: self._note_outcome,
            SessionTransition: self._note_transition,
            LeaseEnded: self._note_lease,
            SlabQuarantined: self._note_quarantined,
            SlabReleased: self._note_released,
        }

    def _note_outcome(self, record: SyncOutcome) -> None:
        outcome: Outcome = "ok" if record.ok else "aborted" if record.slab_handle else "refused"
        self.outcomes[outcome, record.reason] += 1
        if record.ok:
            self.ingested_tokens += record.num_tokens
        elif record.reason is Reason.EVICTED:
            self.evicted_bytes += record.bytes

    def _note_transition(self, record: SessionTransition) -> None:
        # A new attempt comes from no state.
        times = self.state_times.get((record.from_state, record.to_state))
        if times is not None:
            # As in Histogram.observe, without the call: this is done some times an attempt.
            duration_s = record.duration_ms / MS_PER_S
            times.counts[bisect_left(STATE_BOUNDS_S, duration_s)] += 1
            times.total += duration_s

    def _note_lease(self, record: LeaseEnded) -> None:
        _times_of(self.lease_times, record.reason, LEASE_BOUNDS_S).observe(record.duration_ms / MS_PER_S)

    def _note_quarantined(self, record: SlabQuarantined) -> None:
        self.quarantined[record.why] += 1

    def _note_released(self, record: SlabReleased) -> None:
        if record.was == "quarantined":
            times = _times_of(self.quarantine_times, record.why, QUARANTINE_BOUNDS_S)
            times.observe(record.duration_ms / MS_PER_S)


def _times_of(times: dict[str, Histogram], label: str, bounds: Sequence[float]) -> Histogram:
    found = times.get(label)
    if found is None:
        found = times[label] = Histogram(bounds)
    return found
