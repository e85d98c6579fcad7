"""What is known of one life of the daemon at a line of its log, and what to do where lines are missing."""

from typing import Final, TypeAlias

from snapd.core import records as r
from snapd.forensics import rules
from snapd.forensics.memory import Attempt, EndedHandles, Lease, Overdue
from snapd.forensics.shards import Shard, ShardMap
from snapd.forensics.violations import Findings, ViolationKind, Where

NS_PER_MS: Final = 1_000_000
# Times are written as fractions of a millisecond; what differs by less than a nanosecond is rounding.
TOLERANCE_MS: Final = 4e-7
_ROUNDING: Final = 1e-12
# More blocks than this at one time are gone through for those that are settled.
_BLOCKS_MAX: Final = 4_096

K = ViolationKind
AboutAttempt: TypeAlias = (
    r.SessionTransition
    | r.SlabAllocated
    | r.SlabQuarantined
    | r.SlabReleased
    | r.LeaseGranted
    | r.LeaseEnded
    | r.SyncOutcome
)

# What it is that an attempt which has ended must not do; the rest is about nobody.
_WHEN_ENDED: Final[dict[type[r.Record], ViolationKind]] = {
    r.SessionTransition: K.ILLEGAL_TRANSITION,
    r.LeaseGranted: K.WRONG_LEASE,
}


class EpochState:
    """The tables of one epoch.

    Attributes:
        name: its id.
        is_complete: every line since its start is known. If not, a line may be about what is not known here.
        is_closing: it has just started, and closes what the former epoch left open.
        is_stopped, is_stopped_in_order: its last line has been seen; and it had ended every attempt before.
        seq, at_ns: of the latest line.
        lost_seq: the first line after what is missing.
        open: attempts without an outcome.
    """

    def __init__(self, name: str, findings: Findings, grace_ns: int) -> None:
        self.name = name
        self.is_complete = False
        self.is_closing = False
        self.is_stopped = False
        self.is_stopped_in_order = False
        self.seq = 0
        self.lost_seq = 0
        self.at_ns = -1
        self.started: Where | None = None
        self.stopped: Where | None = None
        self.start: r.DaemonStarted | None = None
        self.closed_attempts = 0
        self.attempts = 0
        self.attempts_ok = 0
        self.open: dict[int, Attempt] = {}
        self.ended = EndedHandles()
        self.maps: dict[int, ShardMap] = {}
        self.leases: dict[int, Lease] = {}
        self.quarantined: dict[tuple[int, int], Shard] = {}
        self._findings = findings
        self._overdue = Overdue(grace_ns)
        self._clock: Where | None = None
        self._blocks: list[Attempt] = []  # something of them must follow at the present time
        self._refused: tuple[r.SyncRefused, Where] | None = None
        self._last_lease_id = 0
        self._lease_id_floor = 0  # a lease from here on was granted in lines that are known

    # --- what is missing -----------------------------------------------------------------------

    def begin(self, record: r.DaemonStarted, where: Where) -> None:
        """Take the first line: all arenas are empty, and everything is known."""
        self.start, self.started = record, where
        self.is_complete = self.is_closing = True
        self.maps = {arena.rank: ShardMap(arena.size_bytes, arena.alignment_bytes) for arena in record.arenas}
        if len(self.maps) != len(record.arenas):
            self._findings.report(K.RANKS_DIFFER, "two arenas have the same rank", where, epoch=self.name)

    def lose(self, next_seq: int) -> None:
        """Lines are missing before *next_seq*: what was open or held may not be so any more."""
        self.is_complete = False
        self.lost_seq = next_seq
        self._findings.unproved_attempts += len(self.open)
        self.open.clear()
        self.forget_leases()
        self.quarantined.clear()
        for arena in self.maps.values():
            arena.clear()
        self._overdue.clear()
        self._blocks.clear()
        self._refused = None
        self._lease_id_floor = 1 << 63

    def forget_leases(self) -> None:
        """Forget all leases. They and their attempts hold each other, so the circles are opened."""
        for lease in self.leases.values():
            lease.attempt.leases.clear()
        self.leases.clear()

    def arena(self, rank: int, record: r.SlabAllocated | r.SlabQuarantined, where: Where) -> ShardMap:
        """Return the map of an arena."""
        found = self.maps.get(rank)
        if found is None:
            found = self.maps[rank] = ShardMap()
            if self.start is not None:
                self.report(K.RANKS_DIFFER, record, f"there is no arena of rank {rank}", self.started, where)
        return found

    # --- what was found ------------------------------------------------------------------------

    def report(
        self, kind: ViolationKind, about: AboutAttempt | Attempt, message: str, *lines: Where | None
    ) -> None:
        """Take a violation of an attempt."""
        handle = about.handle if isinstance(about, Attempt) else about.slab_handle
        subject = f"attempt {handle} of {about.session_id}" if handle else f"a prepare of {about.session_id}"
        self._findings.report(
            kind, f"{subject}: {message}", *lines,
            session_id=about.session_id, slab_handle=handle, epoch=self.name,
        )  # fmt: skip

    def stranger(self, record: AboutAttempt, where: Where) -> bool:
        """A line names no open attempt: return whether that may be so, because lines are missing."""
        handle, event = record.slab_handle, record.__struct_config__.tag
        if handle in self.ended:
            kind = _WHEN_ENDED.get(type(record), K.UNKNOWN_ATTEMPT)
            message = f"it has ended, and {event} comes after its outcome"
            self.report(kind, record, message, self.ended.where(handle), where)
            return False
        if self.is_complete:
            self.report(K.UNKNOWN_ATTEMPT, record, f"{event} comes, and it never began", where)
            return False
        self._findings.unproved_lines += 1
        return True

    def adopt(self, record: AboutAttempt, state: str, where: Where) -> Attempt:
        """Begin in the middle: an attempt that is in *state*, and of which no more is known."""
        self._findings.unproved_attempts += 1
        attempt = Attempt(record.slab_handle, record.session_id, state, where, is_whole=False)
        self.open[record.slab_handle] = attempt
        return attempt

    def is_time(self, told_ms: float, since_ns: int, at_ns: int) -> bool:
        """Whether a duration in a record is that between two times; one that is not known is."""
        return since_ns < 0 or is_equal_ms(told_ms, (at_ns - since_ns) / NS_PER_MS)

    # --- time ----------------------------------------------------------------------------------

    def advance(self, at_ns: int, where: Where) -> None:
        """Take the time of a line that is not that of the line before."""
        if at_ns < self.at_ns:
            message = f"at_ns is {at_ns}, and was {self.at_ns} before"
            self._findings.report(K.CLOCK_BACKWARDS, message, self._clock, where, epoch=self.name)
            return
        if self._blocks:
            self._settle(where)
        self.at_ns = at_ns
        self._clock = where
        if at_ns >= self._overdue.next_ns:
            for item in self._overdue.pass_to(at_ns):
                self._tell_overdue(item, where)

    def follow(self, attempt: Attempt) -> None:
        """More lines of an attempt must follow before time goes on."""
        self._blocks.append(attempt)
        if len(self._blocks) > _BLOCKS_MAX:
            self._blocks = [other for other in self._blocks if not other.is_settled()]

    def _settle(self, where: Where) -> None:
        """Time goes on: what belongs together was written at one time, and must be whole."""
        for attempt in self._blocks:
            if attempt.is_reported or attempt.is_settled():
                continue
            attempt.is_reported = True
            if attempt.state in rules.FINAL:
                self.report(
                    K.MISSING_OUTCOME, attempt, "it has ended without outcome", attempt.entered, where
                )
            elif attempt.ok_ranks:
                message = f"ranks {list(attempt.ok_ranks)} were told to commit, and it did not end"
                self.report(K.RANKS_DIFFER, attempt, message, attempt.ok, where)
            else:
                self.report(K.RANKS_DIFFER, attempt, attempt.slabs_say(), attempt.begun, where)
        self._blocks.clear()

    def _tell_overdue(self, item: Lease | Shard, where: Where) -> None:
        if isinstance(item, Lease):
            message = f"the lease of rank {item.rank} was over at {item.until_ns} ns, and has not ended"
            self.report(K.LEASE_PAST_END, item.attempt, message, item.granted, where)
        else:
            message = (
                f"attempt {item.handle}: bytes of arena {item.rank} were to be in quarantine until "
                f"{item.until_ns} ns, and still are"
            )
            self._findings.report(
                K.QUARANTINE_PAST_END, message, item.quarantined, where,
                slab_handle=item.handle, epoch=self.name,
            )  # fmt: skip


def is_equal_ms(told_ms: float, other_ms: float) -> bool:
    """Whether two durations are equal but for rounding."""
    return told_ms == other_ms or abs(told_ms - other_ms) <= TOLERANCE_MS + _ROUNDING * abs(other_ms)
