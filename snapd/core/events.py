"""What goes into the pure core and what comes out: events, results, instructions.

An event is a fact or a question, frozen, with the time at which it was taken up. An
instruction tells the shell what to do: answer, tell, arm a timer, write a record. Nothing
here knows a socket, a clock or a file.
"""

import enum
from typing import Final, TypeAlias

import msgspec

from snapd.core.extent import Extent
from snapd.core.records import Record
from snapd.errors import Reason
from snapd.layout import Layout

PlaneChecksums: TypeAlias = tuple[tuple[int, int], ...]


def pack_checksums(checksums: PlaneChecksums) -> bytes:
    """Return the sums in a form that takes little memory: as tuples those of a hundred planes have 13 KB."""
    return _checksums_encoder.encode(checksums)


def unpack_checksums(packed: bytes) -> PlaneChecksums:
    """Return the sums that were packed."""
    return _checksums_decoder.decode(packed)


_checksums_encoder: Final = msgspec.msgpack.Encoder()
_checksums_decoder: Final = msgspec.msgpack.Decoder(PlaneChecksums)


class State(enum.StrEnum):
    """Where an attempt stands. The last two are final."""

    RESERVED = "RESERVED"
    TRANSFERRING = "TRANSFERRING"
    READY = "READY"
    INGESTED = "INGESTED"
    ABORTED = "ABORTED"


FINAL_STATES: Final = frozenset({State.INGESTED, State.ABORTED})
# For what is done at every request: Python 3.11 takes long to look a member up in its class.
RESERVED: Final = State.RESERVED
TRANSFERRING: Final = State.TRANSFERRING
READY: Final = State.READY
INGESTED: Final = State.INGESTED
ABORTED: Final = State.ABORTED
OK: Final = Reason.OK


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all events.

    Attributes:
        at_ns: monotonic time at which the event was taken up.
        cause_id: names the request behind it; runs through instructions and log. 0: nobody asked.
    """

    at_ns: int
    cause_id: int = 0


# --- Events about one attempt: the columns of the table in fsm.py -----------------------------


class SessionEvent(Event, frozen=True, kw_only=True):
    """Base of the events that name an attempt."""

    slab_handle: int


class TransferStarted(SessionEvent, frozen=True, kw_only=True):
    """D is about to write."""

    conn_id: int = 0


class RankCommitted(SessionEvent, frozen=True, kw_only=True):
    """Every byte of one rank's shard is there.

    Attributes:
        rank: whose shard.
        num_bytes: payload bytes written, without padding.
        num_tokens: tokens written.
        checksums: one pair of sums a plane, shape [num_planes].
        drained: no write of the shard can still land; False: one that failed and was repeated may.
    """

    rank: int
    num_bytes: int
    num_tokens: int
    checksums: PlaneChecksums
    drained: bool = True
    conn_id: int = 0


class TransferFailed(SessionEvent, frozen=True, kw_only=True):
    """D says that a write failed, or that the session's KV is gone.

    Attributes:
        reason: ``transfer-failed`` or ``session-not-resident``.
        drained: no write of *rank*'s shard can still land.
        rank: whose shard failed; None: all of them.
    """

    reason: Reason = Reason.TRANSFER_FAILED
    drained: bool = False
    rank: int | None = None


class AbortAsked(SessionEvent, frozen=True, kw_only=True):
    """A client or an operator wants the attempt to end; *drained* as in ``TransferFailed``."""

    drained: bool = False


class WriterDrained(SessionEvent, frozen=True, kw_only=True):
    """Drain proof for what has ended or was committed: no write of *rank* (None: any) can still land."""

    rank: int | None = None


class WriterExited(SessionEvent, frozen=True, kw_only=True):
    """The one local process that writes this attempt is gone; drain proof, unless *drained* is False."""

    drained: bool = True


class LeaseAsked(SessionEvent, frozen=True, kw_only=True):
    """A P rank wants to read.

    Attributes:
        rank: the reader.
        layout_fingerprint: of the reader's kv_pool.
        session_id: whose snapshot the reader takes it for; empty: not checked.
    """

    rank: int
    layout_fingerprint: str
    session_id: str = ""
    conn_id: int = 0


class VoteCast(SessionEvent, frozen=True, kw_only=True):
    """A P rank has copied and verified, or could not.

    Attributes:
        rank: the voter.
        lease_id: the lease under which it read.
        ok: bytes are in the rank's kv_pool and match.
        reason: why not.
        keep: a "no" that leaves the snapshot READY for another try.
    """

    rank: int
    lease_id: int
    ok: bool
    reason: Reason = Reason.OK
    keep: bool = False


class LookedUp(SessionEvent, frozen=True, kw_only=True):
    """Somebody found the snapshot by name or by prefix: it counts as used."""


class TimerEvent(SessionEvent, frozen=True, kw_only=True):
    """Base of the timers; *deadline_ns* says which arming fired."""

    deadline_ns: int


class ReserveTimedOut(TimerEvent, frozen=True, kw_only=True):
    """RESERVED for too long."""


class TransferTimedOut(TimerEvent, frozen=True, kw_only=True):
    """TRANSFERRING for too long."""


class ReadyExpired(TimerEvent, frozen=True, kw_only=True):
    """READY for too long."""


class LeaseTimedOut(TimerEvent, frozen=True, kw_only=True):
    """A rank has not voted in time."""

    rank: int


class VictimChosen(SessionEvent, frozen=True, kw_only=True):
    """Eviction picked this snapshot."""


class SupersededBy(SessionEvent, frozen=True, kw_only=True):
    """A newer attempt of the same session takes over."""

    newer_handle: int


class DaemonStopping(SessionEvent, frozen=True, kw_only=True):
    """The daemon is about to exit."""


# --- Events that are not about one open attempt ------------------------------------------------


class LayoutDeclared(Event, frozen=True, kw_only=True):
    """A P rank says what its kv_pool looks like."""

    rank: int
    layout: Layout


class PrepareAsked(Event, frozen=True, kw_only=True):
    """D wants a slab in every rank's arena.

    Attributes:
        slab_handle: fresh and random, made by the shell; never used before.
        session_id: the caller's name for the conversation.
        layout_fingerprint: a layout that P declared.
        num_tokens: tokens to bring over, from *token_start* on.
        token_start: first token; a multiple of the page size.
        token_digest: of all tokens from 0 to the end of the snapshot.
        page_keys: one a whole page from token 0 on; may be empty.
        ranks: shards wanted; empty: every rank.
        use_resident_hint: leave out what P is believed to hold already.
        conn_id: who is told how the attempt ends.
        writer_id: the local process that makes every write, if there is just one; else 0.
        peer: what D calls itself, for the records.
        owner: who may write to the attempt and end it, for the shell to look at.
    """

    slab_handle: int
    session_id: str
    layout_fingerprint: str
    num_tokens: int
    token_start: int = 0
    token_digest: str = ""
    page_keys: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    use_resident_hint: bool = False
    conn_id: int = 0
    writer_id: int = 0
    peer: str = ""
    owner: str = ""


class LookupAsked(Event, frozen=True, kw_only=True):
    """P asks what there is: by session, or the longest prefix by page keys.

    Attributes:
        layout_fingerprint: of the asker's kv_pool.
        session_id: the session, or empty when asking by *page_keys*.
        page_keys: of the asker's prompt, one a whole page from token 0 on.
        resident_tokens: what the asker holds; a suffix that starts later is of no use to it.
    """

    layout_fingerprint: str
    session_id: str = ""
    page_keys: tuple[str, ...] = ()
    resident_tokens: int = 0


class WriterGone(Event, frozen=True, kw_only=True):
    """A local process has exited.

    Attributes:
        writer_id: of that process.
        drained: nothing of it can land any more; False: its bytes may be under way in the network.
    """

    writer_id: int
    drained: bool = True


class QuarantineTimedOut(Event, frozen=True, kw_only=True):
    """The time of a quarantine is over."""

    slab_handle: int
    rank: int
    deadline_ns: int


class DrainAsked(Event, frozen=True, kw_only=True):
    """Take no new attempts (or take them again)."""

    draining: bool = True


class StopAsked(Event, frozen=True, kw_only=True):
    """End every open attempt; the daemon exits next."""


# --- Results: the answer to the event with that cause_id ---------------------------------------


class ShardGrant(msgspec.Struct, frozen=True):
    """Where one rank's shard lies.

    Attributes:
        rank: whose arena.
        extents: one contiguous extent, or one a plane.
        plane_offsets_bytes: from the arena's first byte, shape [num_planes].
    """

    rank: int
    extents: tuple[Extent, ...]
    plane_offsets_bytes: tuple[int, ...]


class Accepted(msgspec.Struct, frozen=True):
    """Done, or already done.

    Attributes:
        state: the attempt's state after it.
        pending: an abort that waits for a lease to end.
    """

    state: State | None = None
    pending: bool = False


class Refused(msgspec.Struct, frozen=True):
    """Not done; nothing changed, or, for a commit that did not add up, the attempt has ended."""

    reason: Reason
    detail: str = ""
    retry_after_ms: int = 0


class Granted(msgspec.Struct, frozen=True):
    """A slab in every rank's arena."""

    slab_handle: int
    num_tokens: int
    token_start: int
    resident_hint_tokens: int
    layout: Layout
    shards: tuple[ShardGrant, ...]
    deadline_ns: int


class Leased(msgspec.Struct, frozen=True):
    """The right to read one shard until *deadline_ns*.

    Attributes:
        packed_checksums: what D committed, as ``pack_checksums`` makes it.
    """

    slab_handle: int
    session_id: str
    lease_id: int
    deadline_ns: int
    num_tokens: int
    token_start: int
    token_digest: str
    packed_checksums: bytes
    layout: Layout
    shard: ShardGrant

    @property
    def checksums(self) -> PlaneChecksums:
        """The same, one pair of sums a plane, shape [num_planes]."""
        return unpack_checksums(self.packed_checksums)


class Decided(msgspec.Struct, frozen=True):
    """The outcome of an ingest round, the same for all ranks.

    Attributes:
        commit: insert; otherwise nobody inserts.
        reason: why not.
        state: the attempt's state after it.
    """

    commit: bool
    reason: Reason
    state: State


class Found(msgspec.Struct, frozen=True):
    """Answer to a lookup.

    Attributes:
        slab_handle: of the READY snapshot, or 0.
        num_tokens: tokens in it.
        token_start: its first token.
        matched_tokens: how far the page keys agree (by session: its end).
        resident_hint_tokens: what P is believed to hold of the session.
        ranks: the ranks that have a shard.
    """

    slab_handle: int = 0
    session_id: str = ""
    num_tokens: int = 0
    token_start: int = 0
    matched_tokens: int = 0
    resident_hint_tokens: int = 0
    ranks: tuple[int, ...] = ()


class Declared(msgspec.Struct, frozen=True):
    """The layout is known under this fingerprint."""

    layout_fingerprint: str


Result: TypeAlias = Accepted | Refused | Granted | Leased | Decided | Found | Declared


# --- Instructions ------------------------------------------------------------------------------


class TimerKind(enum.Enum):
    """What a timer is for. One timer of a kind, attempt and rank is armed at a time."""

    STATE = "state"
    LEASE = "lease"
    QUARANTINE = "quarantine"


class Replied(msgspec.Struct, frozen=True):
    """Answer the request behind *cause_id*."""

    cause_id: int
    result: Result


class EndTold(msgspec.Struct, frozen=True):
    """Tell a connection how an attempt ended.

    Attributes:
        drain_wanted: its bytes are in quarantine until the writer proves that it has stopped.
    """

    conn_id: int
    slab_handle: int
    session_id: str
    state: State
    reason: Reason
    drain_wanted: bool


class TimerArmed(msgspec.Struct, frozen=True):
    """Post *event* once the clock has reached its ``deadline_ns``; replaces the one under *key*."""

    key: tuple[TimerKind, int, int]
    event: TimerEvent | QuarantineTimedOut


class TimerCancelled(msgspec.Struct, frozen=True):
    """Forget the timer under *key*."""

    key: tuple[TimerKind, int, int]


class RecordWritten(msgspec.Struct, frozen=True):
    """Write a line of the log."""

    record: Record


Instruction: TypeAlias = Replied | EndTold | TimerArmed | TimerCancelled | RecordWritten
