"""What the event log says about a run, and whether the log holds together: see ``forensics.proof``."""

import math
from collections import Counter, defaultdict
from pathlib import Path

import msgspec

from snapd.core import records as r
from snapd.core.events import State
from snapd.errors import Reason
from snapd.eventlog import Line, decode_line
from snapd.forensics.proof import Proof, Violation, Where


class AttemptFacts(msgspec.Struct):
    """One attempt, as far as the log tells.

    Attributes:
        session_id: whose.
        last_state: the state from which it ended.
        outcome: the record of its end; None: there is none.
        quarantined_bytes, released_bytes: of all ranks.
        released_why: the proofs by which its bytes were given back.
    """

    session_id: str
    last_state: str = ""
    outcome: r.SyncOutcome | None = None
    quarantined_bytes: int = 0
    released_bytes: int = 0
    released_why: set[str] = msgspec.field(default_factory=set)


class Percentiles(msgspec.Struct, frozen=True):
    """Of the time that attempts spent in one state."""

    count: int
    p50_ms: float
    p99_ms: float


class LogFacts:
    """Reads a whole log of one epoch.

    Attributes:
        attempts: by slab_handle.
        transport: how bytes came to the daemon.
        outcomes: every outcome, of attempts and of refusals.
        leases_expired: leases that ended because their rank did not vote in time.
        faults: what is wrong with the log, or with what it tells; each a sentence.
    """

    def __init__(self, path: Path) -> None:
        self.attempts: dict[int, AttemptFacts] = {}
        self.transport = ""
        self.outcomes: list[r.SyncOutcome] = []
        self.leases_expired = 0
        self.faults: list[str] = []
        self._refused = 0
        self._held_bytes: Counter[tuple[int, int]] = Counter()
        self._spent_ms: defaultdict[str, list[float]] = defaultdict(list)
        proof = Proof()
        for number, raw in enumerate(path.read_bytes().splitlines(), 1):
            line = decode_line(raw)
            proof.feed(line, Where(path.name, number))
            if isinstance(line, Line):
                self._take(line.record)
            else:
                self.faults.append(f"line {number} of the log is not understood")
        report = proof.finish()
        self.faults += map(_sentence, report.violations)
        if not report.is_beginning_known:
            self.faults.append("the log does not begin with the start of the daemon")
        self._check()

    @property
    def reasons(self) -> dict[str, int]:
        """How often each reason ended an attempt or a prepare, the most frequent first."""
        return {
            reason.value: count for reason, count in Counter(o.reason for o in self.outcomes).most_common()
        }

    @property
    def ingested(self) -> list[r.SyncOutcome]:
        """Outcomes of attempts that P has."""
        return [outcome for outcome in self.outcomes if outcome.ok]

    @property
    def refused(self) -> int:
        """Prepares that were refused."""
        return self._refused

    @property
    def aborted(self) -> int:
        """Attempts that ended otherwise."""
        return len(self.outcomes) - len(self.ingested) - self._refused

    @property
    def quarantined_bytes(self) -> int:
        """Bytes that were in quarantine at some time, of all ranks."""
        return sum(attempt.quarantined_bytes for attempt in self.attempts.values())

    @property
    def ok_rate(self) -> float:
        """Share of outcomes that are ok; 0 without any."""
        return len(self.ingested) / len(self.outcomes) if self.outcomes else 0.0

    def time_in_states(self) -> dict[str, Percentiles]:
        """Return how long attempts stayed in each state."""
        found: dict[str, Percentiles] = {}
        for state in (State.RESERVED, State.TRANSFERRING, State.READY):
            spent_ms = sorted(self._spent_ms[state])
            if spent_ms:
                found[state] = Percentiles(
                    len(spent_ms), _percentile(spent_ms, 0.50), _percentile(spent_ms, 0.99)
                )
        return found

    def _take(self, record: r.Record) -> None:
        match record:
            case r.DaemonStarted():
                self.transport = record.transport
            case r.SessionTransition(from_state=""):
                self.attempts[record.slab_handle] = AttemptFacts(record.session_id)
            case r.SessionTransition():
                self._spent_ms[record.from_state].append(record.duration_ms)
                self._attempt(record).last_state = record.from_state
            case r.SyncOutcome():
                self._take_outcome(record)
            case r.SyncRefused():
                self._refused += 1
            case r.SlabAllocated():
                self._held_bytes[record.slab_handle, record.rank] += _extent_bytes(record)
            case r.SlabQuarantined():
                self._attempt(record).quarantined_bytes += _extent_bytes(record)
            case r.SlabReleased():
                attempt = self._attempt(record)
                attempt.released_bytes += _extent_bytes(record)
                attempt.released_why.add(record.why)
                self._held_bytes[record.slab_handle, record.rank] -= _extent_bytes(record)
            case r.LeaseEnded(reason=Reason.LEASE_EXPIRED):
                self.leases_expired += 1
            case r.EventsDropped():
                self.faults.append(f"{record.count} events are missing in the log ({record.why})")
            case _:
                pass

    def _attempt(self, record: r.SessionTransition | r.SlabQuarantined | r.SlabReleased) -> AttemptFacts:
        """Return the attempt, also when its first line is missing: the proof says so then."""
        return self.attempts.setdefault(record.slab_handle, AttemptFacts(record.session_id))

    def _take_outcome(self, record: r.SyncOutcome) -> None:
        self.outcomes.append(record)
        if not record.slab_handle:
            return
        attempt = self.attempts.get(record.slab_handle)
        if attempt is not None and attempt.outcome is None:
            attempt.outcome = record

    def _check(self) -> None:
        """Nothing is left at the end, which is more than the proof of a log that goes on can say."""
        for handle, attempt in self.attempts.items():
            if attempt.outcome is None:
                self.faults.append(f"attempt {handle} of {attempt.session_id} has no outcome")
        for (handle, rank), held_bytes in self._held_bytes.items():
            if held_bytes:
                self.faults.append(f"attempt {handle} still holds {held_bytes} bytes of arena {rank}")


def _sentence(violation: Violation) -> str:
    lines = ", ".join(str(line.line_no) for line in violation.lines)
    return f"{violation.message} ({violation.kind}, lines {lines})"


def _extent_bytes(record: r.SlabAllocated | r.SlabQuarantined | r.SlabReleased) -> int:
    return sum(extent.size_bytes for extent in record.extents)


def _percentile(ordered: list[float], share: float) -> float:
    """Return the nearest-rank percentile of a list that is in order."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
