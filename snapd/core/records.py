"""The lines of d-to-p-sync.jsonl, as the core sees them.

The event log adds ``ts``, ``seq`` and ``epoch``; the tag becomes ``event``. A record holds
facts, in the past tense, and never a payload byte. Optional fields are left out when empty.

Source: design, section 6.
"""

from typing import Literal, TypeAlias

import msgspec

from snapd.core.extent import Extent
from snapd.errors import Reason

QuarantineWhy: TypeAlias = Literal["undrained", "leased", "corrupt"]
ReleasedFrom: TypeAlias = Literal["live", "quarantined"]
ReleaseWhy: TypeAlias = Literal["final", "drained", "writer-gone", "lease-ended", "time"]


class _Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event"):
    at_ns: int
    cause_id: int = 0


class ArenaInfo(msgspec.Struct, frozen=True):
    """An arena as the daemon opened it."""

    rank: int
    device: str
    size_bytes: int
    alignment_bytes: int


class DaemonStarted(_Record, frozen=True, kw_only=True, tag="daemon.started"):
    """A new epoch: every arena is empty.

    Attributes:
        eviction_policy: absent in logs of versions that had one only, which is ``lru``.
        quarantine_ms: how long bytes rest that nothing proves to be safe; absent in logs of versions that
            did not say so.
    """

    version: str
    protocol: int
    pid: int
    transport: str
    arenas: tuple[ArenaInfo, ...]
    former_epoch: str = ""
    closed_attempts: int = 0
    eviction_policy: str = ""
    quarantine_ms: int = 0


class DaemonStopped(_Record, frozen=True, kw_only=True, tag="daemon.stopped"):
    """The last line of an epoch that ended in order, or because of a bug.

    Attributes:
        reason: the signal; ``internal-error``: a bug, and what was open is closed by the next start.
        attempts, attempts_ok: of the epoch.
    """

    reason: str
    attempts: int
    attempts_ok: int


class SyncRefused(_Record, frozen=True, kw_only=True, tag="sync.refused"):
    """A prepare that was refused; no session came into being."""

    session_id: str
    reason: Reason
    num_tokens: int
    token_start: int
    bytes: int
    detail: str = ""
    retry_after_ms: int = 0


class SessionTransition(_Record, frozen=True, kw_only=True, tag="session.transition"):
    """An attempt changed its state.

    Attributes:
        from_state: empty for a new attempt.
        peer: what D calls itself, else its process; on a new attempt's first line only.
        duration_ms: time spent in *from_state*.
        newer_handle: the attempt that took over, when superseded or evicted for it.
        former_epoch: the attempt belongs to that epoch, which ended without closing it.
    """

    session_id: str
    slab_handle: int
    from_state: str
    to_state: str
    reason: Reason
    num_tokens: int
    token_start: int
    bytes: int
    duration_ms: float
    newer_handle: int = 0
    former_epoch: str = ""
    peer: str = ""


class SlabAllocated(_Record, frozen=True, kw_only=True, tag="slab.allocated"):
    """Extents of one arena are live from here on.

    Attributes:
        bytes: payload; the extents hold padding too.
        extents: ``[offset_bytes, size_bytes]`` each.
    """

    session_id: str
    slab_handle: int
    rank: int
    bytes: int
    extents: tuple[Extent, ...]


class SlabQuarantined(_Record, frozen=True, kw_only=True, tag="slab.quarantined"):
    """Nobody owns the extents, and nobody may reuse them before *until_ns* or drain proof.

    Attributes:
        why: ``undrained``: a write may still land; ``leased``: a reader may still read;
            ``corrupt``: the bytes did not match, so somebody may still write.
    """

    session_id: str
    slab_handle: int
    rank: int
    bytes: int
    extents: tuple[Extent, ...]
    until_ns: int
    why: QuarantineWhy


class SlabReleased(_Record, frozen=True, kw_only=True, tag="slab.released"):
    """The extents are free for reuse.

    Attributes:
        was: what they were until now.
        duration_ms: for how long they were that.
        why: ``final``: committed, nothing can still land, and no lease was held; ``drained``: drain proof;
            ``writer-gone``: the writing process has exited; ``lease-ended``: the reader has voted
            or its lease is over; ``time``: the quarantine's time has passed.
    """

    session_id: str
    slab_handle: int
    rank: int
    bytes: int
    extents: tuple[Extent, ...]
    was: ReleasedFrom
    why: ReleaseWhy
    duration_ms: float


class LeaseGranted(_Record, frozen=True, kw_only=True, tag="lease.granted"):
    """A rank may read until *until_ns*."""

    session_id: str
    slab_handle: int
    rank: int
    lease_id: int
    round: int
    until_ns: int


class LeaseEnded(_Record, frozen=True, kw_only=True, tag="lease.ended"):
    """A rank has stopped reading, or must take it that the bytes are gone."""

    session_id: str
    slab_handle: int
    rank: int
    lease_id: int
    ok: bool
    reason: Reason
    duration_ms: float


class SyncOutcome(_Record, frozen=True, kw_only=True, tag="sync.outcome"):
    """The end of an attempt, or a refusal. Exactly one each.

    Attributes:
        slab_handle: absent for a refusal.
        reserved_ms, transferring_ms, ready_ms: time spent in each state.
        peer: what D calls itself, else its process.
    """

    session_id: str
    ok: bool
    reason: Reason
    num_tokens: int
    token_start: int
    bytes: int
    duration_ms: float
    reserved_ms: float
    transferring_ms: float
    ready_ms: float
    slab_handle: int = 0
    ranks: tuple[int, ...] = ()
    former_epoch: str = ""
    peer: str = ""


class EventsDropped(_Record, frozen=True, kw_only=True, tag="events.dropped"):
    """So many records could not be written since the last line; *why* says what stood in the way."""

    count: int
    why: str


Record: TypeAlias = (
    DaemonStarted
    | DaemonStopped
    | SyncRefused
    | SessionTransition
    | SlabAllocated
    | SlabQuarantined
    | SlabReleased
    | LeaseGranted
    | LeaseEnded
    | SyncOutcome
    | EventsDropped
)
