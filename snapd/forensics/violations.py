"""What a proof comes to: violations that name their lines, and what could not be proved."""

import enum
from typing import Final

import msgspec

VIOLATIONS_KEPT_PER_KIND: Final = 100


class ViolationKind(enum.StrEnum):
    """Which rule was broken."""

    SEQUENCE_GAP = "sequence-gap"
    COPIES_DIFFER = "copies-differ"
    EPOCH_ORDER = "epoch-order"
    CLOCK_BACKWARDS = "clock-backwards"
    ILLEGAL_TRANSITION = "illegal-transition"
    UNKNOWN_ATTEMPT = "unknown-attempt"
    HANDLE_REUSED = "handle-reused"
    ATTEMPT_CHANGED = "attempt-changed"
    MISSING_OUTCOME = "missing-outcome"
    SECOND_OUTCOME = "second-outcome"
    WRONG_OUTCOME = "wrong-outcome"
    OVERLAPPING_EXTENTS = "overlapping-extents"
    REUSE_BEFORE_RELEASE = "reuse-before-release"
    EXTENT_OUTSIDE_ARENA = "extent-outside-arena"
    RELEASE_WITHOUT_PROOF = "release-without-proof"
    WRONG_QUARANTINE = "wrong-quarantine"
    QUARANTINE_PAST_END = "quarantine-past-end"
    LEASE_PAST_END = "lease-past-end"
    WRONG_LEASE = "wrong-lease"
    RANKS_DIFFER = "ranks-differ"
    ACCOUNTING = "accounting"


KIND_HELP: Final[dict[ViolationKind, str]] = {
    ViolationKind.SEQUENCE_GAP: "A line is missing and nothing says so, or a line comes twice.",
    ViolationKind.COPIES_DIFFER: "Two files have a line of the same epoch and number that reads differently.",
    ViolationKind.EPOCH_ORDER: "A line lies outside the life of the daemon that wrote it.",
    ViolationKind.CLOCK_BACKWARDS: "at_ns is below that of an earlier line of the epoch.",
    ViolationKind.ILLEGAL_TRANSITION: "No rule leads from that state to this one, or not for this reason.",
    ViolationKind.UNKNOWN_ATTEMPT: "The line names an attempt that never began.",
    ViolationKind.HANDLE_REUSED: "A second attempt has the handle of an earlier one.",
    ViolationKind.ATTEMPT_CHANGED: "Session, tokens or bytes differ between lines of one attempt.",
    ViolationKind.MISSING_OUTCOME: "An attempt or a refusal is over and has no outcome.",
    ViolationKind.SECOND_OUTCOME: "An attempt has one outcome too many.",
    ViolationKind.WRONG_OUTCOME: "The outcome, or a refusal, does not say what has happened.",
    ViolationKind.OVERLAPPING_EXTENTS: "Bytes were handed out while another attempt owned them.",
    ViolationKind.REUSE_BEFORE_RELEASE: "Bytes were handed out while they were in quarantine.",
    ViolationKind.EXTENT_OUTSIDE_ARENA: "An extent is not inside its arena, or not aligned as it says.",
    ViolationKind.RELEASE_WITHOUT_PROOF: "Bytes were freed and nothing shows that no write can still land.",
    ViolationKind.WRONG_QUARANTINE: "Bytes were quarantined, for no reason or for the wrong time.",
    ViolationKind.QUARANTINE_PAST_END: "Bytes stay in quarantine although its time is over.",
    ViolationKind.LEASE_PAST_END: "A lease counted, or was kept, after its deadline.",
    ViolationKind.WRONG_LEASE: "A lease that no rule allows: of no READY attempt, a second one, unknown.",
    ViolationKind.RANKS_DIFFER: "Ranks of one attempt were not treated alike.",
    ViolationKind.ACCOUNTING: "Bytes, times or counts do not add up.",
}
assert set(KIND_HELP) == set(ViolationKind), "every kind says what it means"


class Where(msgspec.Struct, frozen=True, order=True, gc=False):
    """A line of a file, counted from 1."""

    file: str
    line_no: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line_no}"


class UnreadLine(msgspec.Struct, frozen=True):
    """A line that is torn or damaged, and how that was seen."""

    where: Where
    why: str


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that the log breaks.

    Attributes:
        kind: which one.
        message: what was seen and what should have been, in a sentence.
        lines: the lines that contradict each other, oldest first; the last one is where it was seen.
        session_id, slab_handle: the attempt, where it is about one.
        epoch: the life of the daemon.
    """

    kind: ViolationKind
    message: str
    lines: tuple[Where, ...]
    session_id: str = ""
    slab_handle: int = 0
    epoch: str = ""


class ArenaFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An arena at the end of the log: free + live + quarantined = capacity.

    Attributes:
        capacity_bytes, free_bytes: -1: not known, as lines are missing.
    """

    rank: int
    capacity_bytes: int
    free_bytes: int
    live_bytes: int
    quarantined_bytes: int


class ProofReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was proved of a log, and what was not.

    Attributes:
        violations: in the order in which they were seen; of each kind the first ones.
        counts: all violations, by kind.
        lines: that were given, of any sort.
        unknown_lines: of a kind that this version does not know.
        torn_lines: cut off or damaged.
        older: how attempts of the design before snapd ended, by reason: its lines may stand in the same
            files. They are none of ``attempts`` and ``outcomes``, and nothing is proved of them.
        epochs: lives of the daemon.
        crashed_epochs: those that ended without being stopped in order, but for the last one.
        attempts: that began in these lines.
        outcomes: of attempts and of refusals, by reason.
        refused: prepares.
        slabs_allocated, slabs_quarantined, slabs_released: one for each rank.
        leases: that were granted.
        events_dropped: records that the daemon could not write, as it said itself.
        open_attempts, open_leases: at the end of the log; they are no violation.
        arenas: of the last epoch, at the end of the log.
        is_beginning_known: the first line is the first of an epoch. If not, nothing is claimed of attempts,
            extents and leases that began before it.
        unproved_attempts: attempts of which lines are missing, before the first line or where the log says
            so; one that is open over a gap counts before and after it.
        unproved_lines: lines for which something could not be checked for want of earlier ones.
        handles_forgotten: ended attempts so long ago that a reuse of their handles would not be seen.
        uncompared_lines: left out, as an earlier file goes on beyond their numbers, and not compared with it.
        unread_lines: torn ones where an epoch or the log ends; one alone there is tolerated, and not counted.
        unreadable: the first torn lines.
        damage: files that could not be read to their end, and why.
    """

    violations: tuple[Violation, ...]
    counts: dict[ViolationKind, int]
    lines: int
    unknown_lines: int
    torn_lines: int
    epochs: int
    crashed_epochs: int
    attempts: int
    outcomes: dict[str, int]
    refused: int
    slabs_allocated: int
    slabs_quarantined: int
    slabs_released: int
    leases: int
    events_dropped: int
    open_attempts: int
    open_leases: int
    arenas: tuple[ArenaFacts, ...]
    is_beginning_known: bool
    unproved_attempts: int
    unproved_lines: int
    handles_forgotten: int
    uncompared_lines: int = 0
    unread_lines: int = 0
    unreadable: tuple[UnreadLine, ...] = ()
    damage: tuple[str, ...] = ()
    older: dict[str, int] = {}

    @property
    def num_violations(self) -> int:
        """All of them, also those that were not kept."""
        return sum(self.counts.values())

    @property
    def is_good(self) -> bool:
        """No rule was seen to be broken."""
        return not self.counts

    @property
    def is_whole(self) -> bool:
        """Nothing was left unproved for want of lines."""
        is_proved = not (self.unproved_attempts or self.unproved_lines or self.uncompared_lines)
        return self.is_beginning_known and is_proved and self.is_read

    @property
    def is_read(self) -> bool:
        """All of the files could be read, but for a last line that is cut off."""
        return not (self.damage or self.unread_lines)


class Findings:
    """Violations as they are found, and what is counted on the way. Bounded.

    Args:
        kept_per_kind: violations of one kind that are kept; all are counted.
    """

    def __init__(self, kept_per_kind: int = VIOLATIONS_KEPT_PER_KIND) -> None:
        self._kept_per_kind = kept_per_kind
        self.kept: list[Violation] = []
        self.counts: dict[ViolationKind, int] = {}
        self.unproved_attempts = 0
        self.unproved_lines = 0
        self.handles_forgotten = 0
        self.attempts = 0
        self.outcomes: dict[str, int] = {}
        self.refused = 0
        self.slabs_allocated = 0
        self.slabs_quarantined = 0
        self.slabs_released = 0
        self.leases = 0
        self.events_dropped = 0

    def report(
        self,
        kind: ViolationKind,
        message: str,
        *lines: Where | None,
        session_id: str = "",
        slab_handle: int = 0,
        epoch: str = "",
    ) -> None:
        """Take a violation. A line that is None is not known any more; one named twice is named once."""
        self.counts[kind] = count = self.counts.get(kind, 0) + 1
        if count <= self._kept_per_kind:
            named = tuple(dict.fromkeys(line for line in lines if line is not None))
            self.kept.append(
                Violation(
                    kind=kind,
                    message=message,
                    lines=named,
                    session_id=session_id,
                    slab_handle=slab_handle,
                    epoch=epoch,
                )
            )
