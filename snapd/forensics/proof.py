"""The proof of a log: replays it line by line and says which rules it breaks, and where.

``Proof().feed(line, where)`` for every line in order, then ``finish()``. Memory is bounded by what is live,
by the handles that are remembered so that none is used twice, and by the violations that are kept.

Nothing is claimed where lines are missing: before a log that does not begin with the first line of an epoch,
and where an events.dropped line says so. From there on, what began earlier is not known; what begins later
is proved as ever.

Source: design, sections 3, 4, 6 and 12.
"""

from typing import Final

import msgspec

from snapd.core import records as r
from snapd.core.slab import Extent
from snapd.eventlog import AnyLine, Header, Line, TornLine
from snapd.forensics import rules
from snapd.forensics.decoding import older_reason
from snapd.forensics.epochproof import EpochProof, check_outcome, check_same
from snapd.forensics.epochstate import NS_PER_MS
from snapd.forensics.memory import Attempt
from snapd.forensics.violations import (
    KIND_HELP,
    VIOLATIONS_KEPT_PER_KIND,
    ArenaFacts,
    Findings,
    ProofReport,
    UnreadLine,
    Violation,
    ViolationKind,
    Where,
)

__all__ = [
    "KIND_HELP", "ArenaFacts", "Books", "OpenAttempt", "Proof", "ProofReport", "Violation", "ViolationKind",
    "Where",
]  # fmt: skip

OVERDUE_GRACE_MS: Final = 10_000
EPOCHS_REMEMBERED_MAX: Final = 10_000
UNREADABLE_KEPT_MAX: Final = 5
# What an older log calls a reason may be any text.
OLDER_REASONS_MAX: Final = 100
OTHER_REASONS: Final = "(others)"
_WHY_CHARS_MAX: Final = 200
K = ViolationKind


class OpenAttempt(msgspec.Struct, frozen=True):
    """An attempt without an outcome, as the log tells."""

    session_id: str
    state: str


class Books(msgspec.Struct, frozen=True):
    """What the log says of the present: a snapshot of everything that is open or held.

    Attributes:
        open: by slab_handle.
        leases: ``(slab_handle, rank)`` by lease id.
        extents: that are live or quarantined, by rank, in order.
        arenas: the sums.
        quarantined_shards: one for each attempt and rank.
        attempts, attempts_ok: of this epoch, so far.
    """

    open: dict[int, OpenAttempt]
    leases: dict[int, tuple[int, int]]
    extents: dict[int, list[Extent]]
    arenas: tuple[ArenaFacts, ...]
    quarantined_shards: int
    attempts: int
    attempts_ok: int


class Proof:
    """Takes lines and collects violations; never raises because of what a log says.

    Args:
        kept_per_kind: violations of one kind that the report holds; all are counted.
        overdue_grace_ms: how long a daemon may leave a deadline alone before that is a violation; one that
            runs, as its lines show, for a tenth of it.
    """

    def __init__(
        self, *, kept_per_kind: int = VIOLATIONS_KEPT_PER_KIND, overdue_grace_ms: int = OVERDUE_GRACE_MS
    ) -> None:
        self._findings = Findings(kept_per_kind)
        self._grace_ns = overdue_grace_ms * NS_PER_MS
        self._epoch = EpochProof(
            "", self._findings, self._grace_ns, self._close_former
        )  # before the first line
        self._seen: dict[str, bool] = {}  # former epochs, and whether every line of them is known
        self._gone_on: set[str] = set()  # those of which it was told that they go on
        self._former: dict[str, dict[int, Attempt]] = {}  # what they left open
        self._last_where: Where | None = None
        self._is_beginning_known = False
        self._is_story_known = False  # no epoch came before the first one of this log
        self._lines = 0
        self._unknown_lines = 0
        self._torn_lines = 0
        self._torn_run = 0  # torn lines that follow each other, the last of them as line _torn_at
        self._torn_at = 0
        self._older: dict[str, int] = {}
        self._unread_lines = 0
        self._unreadable: list[UnreadLine] = []
        self._damage: list[str] = []
        self._uncompared_lines = 0
        self._epochs = 0
        self._crashed_epochs = 0

    @property
    def violations(self) -> list[Violation]:
        """What was found so far, and kept."""
        return self._findings.kept

    @property
    def num_violations(self) -> int:
        """All that was found so far."""
        return sum(self._findings.counts.values())

    def feed(self, line: AnyLine, where: Where) -> None:
        """Take the next line of the log.

        Args:
            line: what ``eventlog.decode_line`` made of it.
            where: its file and number, for violations that name it.
        """
        self._lines += 1
        epoch = self._epoch
        if type(line) is Line:
            header, record = line.header, line.record
            handler = epoch.handlers.get(type(record))
            is_next = header.seq == epoch.seq + 1 and header.epoch == epoch.name
            if is_next and handler is not None and not (epoch.is_closing or epoch.is_stopped):
                # Nearly every line.
                epoch.seq = header.seq
                self._last_where = where
                epoch.feed(handler, record, where)
                return
        self._feed_rare(line, where)

    def _feed_rare(self, line: AnyLine, where: Where) -> None:
        """Take a line that is not just the next one of an epoch."""
        if isinstance(line, TornLine):
            # At the end of an epoch it is no fault. Elsewhere the next line's seq shows whether one is lost.
            self._take_torn(line, where)
            return
        header = line.header
        record = line.record if isinstance(line, Line) else None
        if header.epoch != self._epoch.name:
            if not self._switch(header, record, where):
                return
        elif header.seq != self._epoch.seq + 1 and not self._jump(header, where):
            return
        epoch = self._epoch
        epoch.seq = header.seq
        self._last_where = where
        if record is None:
            self._unknown_lines += 1
        elif epoch.is_stopped:
            self._report(K.EPOCH_ORDER, "a line after daemon.stopped", epoch.stopped, where)
        elif isinstance(record, r.DaemonStarted):
            if epoch.started is not where:
                self._report(K.EPOCH_ORDER, "daemon.started inside an epoch", epoch.started, where)
        elif isinstance(record, r.SyncOutcome | r.SessionTransition) and record.former_epoch:
            self._close_former(record, where)
        elif isinstance(record, r.EventsDropped):
            self._findings.events_dropped += record.count
            if epoch.is_closing:
                self._forget_former()
            # The daemon says so itself: no fault, but whatever it was is not known.
            epoch.lose(epoch.seq + 1)
            epoch.advance(record.at_ns, where)
        else:
            if epoch.is_closing:
                self._end_closing(where)
            epoch.feed(epoch.handlers[type(record)], record, where)

    def take_damage(self, path: str, why: str) -> None:
        """A file cannot be read beyond the lines so far."""
        self._damage.append(f"{path}: {why}")

    def take_copy(self, header: Header, earlier: Where | None, where: Where, *, is_same: bool) -> None:
        """A line is left out, as an earlier file goes on beyond its number.

        Args:
            header: of the line.
            earlier: the line of that number in the earlier file; None: not known.
            where: the line.
            is_same: both read alike.
        """
        if earlier is None:
            self._uncompared_lines += 1
        elif not is_same:
            message = f"the line of seq {header.seq} reads otherwise than that of an earlier file"
            self._findings.report(K.COPIES_DIFFER, message, earlier, where, epoch=header.epoch)

    def finish(self) -> ProofReport:
        """Return the report of all lines so far. What is open then is no violation."""
        findings, epoch = self._findings, self._epoch
        books = self.books()
        return ProofReport(
            violations=tuple(findings.kept),
            counts=dict(sorted(findings.counts.items())),
            lines=self._lines,
            unknown_lines=self._unknown_lines,
            torn_lines=self._torn_lines,
            epochs=self._epochs,
            crashed_epochs=self._crashed_epochs,
            attempts=findings.attempts,
            outcomes=dict(sorted((str(reason), count) for reason, count in findings.outcomes.items())),
            refused=findings.refused,
            slabs_allocated=findings.slabs_allocated,
            slabs_quarantined=findings.slabs_quarantined,
            slabs_released=findings.slabs_released,
            leases=findings.leases,
            events_dropped=findings.events_dropped,
            open_attempts=len(epoch.open) + sum(map(len, self._former.values())),
            open_leases=len(epoch.leases),
            arenas=books.arenas,
            is_beginning_known=self._is_beginning_known,
            unproved_attempts=findings.unproved_attempts,
            unproved_lines=findings.unproved_lines,
            handles_forgotten=findings.handles_forgotten + epoch.ended.forgotten,
            uncompared_lines=self._uncompared_lines,
            unread_lines=self._unread_lines + self._torn_before(self._lines + 1),
            unreadable=tuple(self._unreadable),
            damage=tuple(self._damage),
            older=dict(sorted(self._older.items())),
        )

    def books(self) -> Books:
        """Return what is open and held now. Costs O(all of it)."""
        epoch = self._epoch
        arenas: list[ArenaFacts] = []
        for rank, arena in sorted(epoch.maps.items()):
            is_known = epoch.is_complete and arena.capacity_bytes is not None
            capacity_bytes = -1 if arena.capacity_bytes is None else arena.capacity_bytes
            arenas.append(
                ArenaFacts(
                    rank=rank,
                    capacity_bytes=capacity_bytes,
                    free_bytes=capacity_bytes - arena.live_bytes - arena.quarantined_bytes
                    if is_known
                    else -1,
                    live_bytes=arena.live_bytes,
                    quarantined_bytes=arena.quarantined_bytes,
                )
            )
        return Books(
            open={handle: OpenAttempt(one.session_id, str(one.state)) for handle, one in epoch.open.items()},
            leases={lease_id: (lease.handle, lease.rank) for lease_id, lease in epoch.leases.items()},
            extents={rank: arena.extents() for rank, arena in sorted(epoch.maps.items())},
            arenas=tuple(arenas),
            quarantined_shards=len(epoch.quarantined),
            attempts=epoch.attempts,
            attempts_ok=epoch.attempts_ok,
        )

    # --- what cannot be read -------------------------------------------------------------------

    def _take_torn(self, line: TornLine, where: Where) -> None:
        if older := older_reason(line.raw):
            # The file was that of the design before: its lines are whole, and tell of nothing that is proved.
            if older not in self._older and len(self._older) >= OLDER_REASONS_MAX:
                older = OTHER_REASONS
            self._older[older] = self._older.get(older, 0) + 1
            return
        self._torn_lines += 1
        self._torn_run = self._torn_run + 1 if self._torn_at == self._lines - 1 else 1
        self._torn_at = self._lines
        if len(self._unreadable) < UNREADABLE_KEPT_MAX:
            self._unreadable.append(UnreadLine(where, line.why[:_WHY_CHARS_MAX]))

    def _torn_before(self, line: int) -> int:
        """Return how many torn lines end just before the line that is the n-th; 0 for a single one.

        A daemon that dies leaves one line that is cut off. Of more of them nobody knows what they were.
        """
        return self._torn_run if self._torn_at == line - 1 and self._torn_run > 1 else 0

    # --- epochs and numbers --------------------------------------------------------------------

    def _report(self, kind: ViolationKind, message: str, *lines: Where | None) -> None:
        self._findings.report(kind, message, *lines, epoch=self._epoch.name)

    def _jump(self, header: Header, where: Where) -> bool:
        """The line's number is not the next one; return whether the line is new all the same."""
        epoch = self._epoch
        message = f"a line has seq {header.seq} after {epoch.seq}"
        self._report(K.SEQUENCE_GAP, message, self._last_where, where)
        if header.seq <= epoch.seq:
            return False
        self._lose(header.seq)
        return True

    def _lose(self, next_seq: int) -> None:
        """Lines are missing in the present epoch."""
        epoch = self._epoch
        if epoch.is_closing:
            self._forget_former()
        epoch.lose(next_seq)

    def _switch(self, header: Header, record: r.Record | None, where: Where) -> bool:
        """A line of another epoch: return whether it begins one."""
        old = self._epoch
        if header.epoch in self._seen:
            self._findings.unproved_lines += 1
            if header.epoch not in self._gone_on:
                # Once: it is one fault, and as many lines as the epoch has left.
                self._gone_on.add(header.epoch)
                message = f"a line of epoch {header.epoch}, which was over before epoch {old.name} began"
                self._findings.report(K.EPOCH_ORDER, message, old.started, where, epoch=header.epoch)
            return False
        self._unread_lines += self._torn_before(self._lines)
        is_first = not self._epochs
        if not is_first:
            self._retire(old)
        self._epochs += 1
        epoch = self._epoch = EpochProof(header.epoch, self._findings, self._grace_ns, self._close_former)
        epoch.advance(header.at_ns, where)
        is_start = type(record) is r.DaemonStarted
        if is_start and header.seq == 1:
            assert isinstance(record, r.DaemonStarted)
            epoch.begin(record, where)
            self._check_former(is_first, old, record, where)
        else:
            epoch.lose(header.seq)
            self._forget_former()
            if not is_first and header.seq != 1:
                message = f"an epoch begins with a line of seq {header.seq}"
                self._report(K.SEQUENCE_GAP, message, self._last_where, where)
            elif header.seq == 1 and record is not None and type(record) is not r.EventsDropped:
                self._report(K.EPOCH_ORDER, "an epoch does not begin with daemon.started", where)
        if is_first:
            self._is_beginning_known = epoch.is_complete
        return True

    def _retire(self, epoch: EpochProof) -> None:
        """An epoch is over: what it left open waits for the next one to close it."""
        self._seen[epoch.name] = epoch.is_complete
        if len(self._seen) > EPOCHS_REMEMBERED_MAX:
            oldest = next(iter(self._seen))
            del self._seen[oldest]
            self._gone_on.discard(oldest)
            self._is_story_known = False
        self._findings.handles_forgotten += epoch.ended.forgotten
        self._crashed_epochs += not epoch.is_stopped_in_order
        epoch.retire()
        if epoch.open:
            self._former[epoch.name] = epoch.open

    def _check_former(self, is_first: bool, old: EpochProof, record: r.DaemonStarted, where: Where) -> None:
        """The start names the epoch before it, unless that was stopped in order."""
        if is_first:
            self._is_story_known = not record.former_epoch
            return
        wanted = "" if old.is_stopped_in_order else old.name
        if record.former_epoch != wanted:
            message = (
                f"daemon.started says that epoch {record.former_epoch or '(none)'} was not stopped in order, "
                f"and the log that {wanted or '(none)'} was not"
            )
            self._report(K.EPOCH_ORDER, message, self._last_where, where)

    # --- attempts of former epochs -------------------------------------------------------------

    def _close_former(self, record: r.SessionTransition | r.SyncOutcome, where: Where) -> None:
        """A daemon that has just started ends what another one left open."""
        epoch = self._epoch
        if epoch.is_complete and not epoch.is_closing:
            message = f"an attempt of epoch {record.former_epoch} is closed after the start is over"
            epoch.report(K.EPOCH_ORDER, record, message, epoch.started, where)
            return
        if record.at_ns != epoch.at_ns:
            epoch.advance(record.at_ns, where)
        attempts = self._former.get(record.former_epoch, {})
        attempt = attempts.get(record.slab_handle)
        if type(record) is r.SyncOutcome:
            epoch.closed_attempts += 1
            self._findings.outcomes[record.reason] = self._findings.outcomes.get(record.reason, 0) + 1
        if attempt is None:
            is_known = self._seen.get(record.former_epoch, self._is_story_known)
            if is_known and epoch.is_complete:
                message = f"epoch {record.former_epoch} did not leave it open"
                epoch.report(K.UNKNOWN_ATTEMPT, record, message, epoch.started, where)
            else:
                self._findings.unproved_lines += 1
                self._findings.unproved_attempts += type(record) is r.SyncOutcome
        elif type(record) is r.SyncOutcome:
            del attempts[record.slab_handle]
            if attempt.state not in rules.FINAL:
                message = f"it has an outcome and is {attempt.state}"
                epoch.report(K.WRONG_OUTCOME, record, message, attempt.entered, where)
            else:
                check_outcome(epoch, attempt, record, where)
        else:
            self._abort_former(attempt, record, where)

    def _abort_former(self, attempt: Attempt, record: r.Record, where: Where) -> None:
        assert isinstance(record, r.SessionTransition)
        epoch = self._epoch
        step = (record.from_state, record.to_state, record.reason)
        if step != (attempt.state, rules.ABORTED, rules.RESTARTED) or attempt.state in rules.FINAL:
            message = (
                f"it goes from {record.from_state} to {record.to_state}, {record.reason}; it was left "
                f"{attempt.state}, and only {rules.RESTARTED} ends it"
            )
            epoch.report(K.ILLEGAL_TRANSITION, record, message, attempt.entered, where)
        check_same(epoch, attempt, record, where)
        attempt.state, attempt.reason, attempt.entered = record.to_state, record.reason, where

    def _end_closing(self, where: Where) -> None:
        """The first line of the epoch's own: by now everything that was open is closed."""
        epoch = self._epoch
        epoch.is_closing = False
        for name, attempts in self._former.items():
            for attempt in attempts.values():
                message = (
                    f"epoch {name} left it {attempt.state}, and the start of {epoch.name} did not close it"
                )
                epoch.report(K.MISSING_OUTCOME, attempt, message, attempt.entered, epoch.started, where)
        self._former.clear()
        if epoch.is_complete and epoch.start and epoch.start.closed_attempts != epoch.closed_attempts:
            message = (
                f"daemon.started says that {epoch.start.closed_attempts} attempts are closed, and "
                f"{epoch.closed_attempts} are"
            )
            self._report(K.ACCOUNTING, message, epoch.started, where)

    def _forget_former(self) -> None:
        """Closing lines may be missing: nothing is claimed of what was open."""
        self._findings.unproved_attempts += sum(map(len, self._former.values()))
        self._former.clear()
