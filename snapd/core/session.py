"""The settings that the core goes by, what is in quarantine, and how the core is shown."""

from typing import Final

import msgspec

from snapd.core.attempt import Lease, Session, Shard, shard_plane_offsets_bytes, transfer_time_ns
from snapd.core.events import State
from snapd.core.eviction import PolicyName
from snapd.core.extent import Extent
from snapd.core.records import QuarantineWhy, ReleaseWhy
from snapd.errors import Reason

__all__ = [
    "DIGEST_CHARS_MAX", "PREPARER", "RETRY_AFTER_MS_MIN", "STARTER", "ArenaView", "Lease", "Quarantined",
    "Session", "SessionView", "Settings", "Shard", "ShardView", "Statistics", "shard_plane_offsets_bytes",
    "transfer_time_ns",
]  # fmt: skip

RETRY_AFTER_MS_MIN: Final = 20
# Fingerprints, digests and page keys: 32 hex digits as this package makes them, with room for others'.
DIGEST_CHARS_MAX: Final = 64
# Beside the ranks in ``Session.told_conn_ids``.
PREPARER: Final = -1
STARTER: Final = -2


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds, times and the policy of the core. The units are in the names; the meanings in ``config.py``."""

    reserve_timeout_ms: int = 10_000
    transfer_timeout_ms: int = 30_000
    transfer_min_mb_per_s: int = 100
    ready_ttl_ms: int = 300_000
    lease_ms: int = 10_000
    quarantine_ms: int = 60_000
    sessions_max: int = 100_000
    ended_history_max: int = 10_000
    session_history_max: int = 100_000
    layouts_max: int = 256
    page_keys_max: int = 16_384
    page_keys_total_max: int = 500_000
    session_id_bytes_max: int = 512
    num_tokens_max: int = 16_777_216
    retry_after_ms_max: int = 5_000
    eviction_policy: PolicyName = "lru"


class Quarantined(msgspec.Struct, frozen=True):
    """One rank's extents, kept back until *until_ns* or until a proof comes.

    Attributes:
        bytes: payload.
        since_ns: when that began.
        why: what may still touch them; see ``records.SlabQuarantined``.
        lease_id: the lease under which they may still be read; 0: nobody reads.
        writer_id: the process whose exit is drain proof; 0: there is no such process.
        proof: of drain, if it came while somebody read still.
        state: in which the attempt ended.
    """

    session_id: str
    bytes: int
    extents: tuple[Extent, ...]
    since_ns: int
    until_ns: int
    why: QuarantineWhy
    lease_id: int = 0
    writer_id: int = 0
    proof: ReleaseWhy | None = None
    state: State = State.ABORTED


class ShardView(msgspec.Struct, frozen=True):
    """One shard, as shown to an operator."""

    rank: int
    is_committed: bool
    extents: tuple[Extent, ...]
    lease_id: int
    lease_deadline_ns: int


class SessionView(msgspec.Struct, frozen=True):
    """One attempt, as shown to an operator. Immutable."""

    slab_handle: int
    session_id: str
    layout_fingerprint: str
    state: State
    reason: Reason
    num_tokens: int
    token_start: int
    bytes: int
    created_ns: int
    state_since_ns: int
    deadline_ns: int
    is_leased: bool
    abort_wanted: str
    spent_ms: dict[str, float]
    shards: tuple[ShardView, ...]


class ArenaView(msgspec.Struct, frozen=True):
    """The books of one arena: ``free + live + quarantined = capacity``, always."""

    rank: int
    capacity_bytes: int
    free_bytes: int
    live_bytes: int
    quarantined_bytes: int
    evictable_bytes: int
    largest_hole_bytes: int
    num_holes: int


class Statistics(msgspec.Struct, frozen=True):
    """A snapshot of the core's counters. Immutable."""

    sessions_by_state: dict[str, int]
    outcomes_by_reason: dict[str, int]
    attempts: int
    attempts_ok: int
    open_sessions: int
    quarantined_shards: int
    ended_history: int
    session_history: int
    layouts: int
    page_keys: int
    page_keys_held: int
    messages_absorbed: int
    requests_refused: int
    bytes_committed: int
    bytes_ingested: int
    is_draining: bool
    arenas: tuple[ArenaView, ...]
