"""What the core remembers of an attempt, and the settings that it goes by."""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

import msgspec

from snapd.core.events import Result, State
from snapd.core.eviction import PolicyName
from snapd.core.slab import Extent
from snapd.errors import Reason
from snapd.layout import Layout, snapshot_bytes
from snapd.units import MB, NS_PER_S, align_up

RETRY_AFTER_MS_MIN: Final = 20
RETRY_AFTER_MS_MAX: Final = 5_000
assert RETRY_AFTER_MS_MIN < RETRY_AFTER_MS_MAX
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
    eviction_policy: PolicyName = "lru"


def transfer_time_ns(num_bytes: int, min_mb_per_s: int) -> int:
    """Return how long *num_bytes* take at the slowest rate that is still taken for progress."""
    return num_bytes * NS_PER_S // (min_mb_per_s * MB)


@dataclass(slots=True)
class Lease:
    """A rank's right to read, until it has voted or *deadline_ns* has passed.

    Attributes:
        round: the ingest round that it belongs to; if the attempt has moved on, it is doomed.
        waiting: cause ids of the votes that wait for the decision; empty: has not voted.
    """

    lease_id: int
    round: int
    granted_ns: int
    deadline_ns: int
    conn_id: int
    waiting: list[int] = field(default_factory=list)

    @property
    def has_voted(self) -> bool:
        """The rank reads no more and waits for the decision."""
        return bool(self.waiting)


@dataclass(slots=True)
class Shard:
    """What an attempt holds in one rank's arena.

    Attributes:
        extents: empty once they were given up.
        is_drained: committed, and no write can still land.
        packed_checksums: what was committed, as ``events.pack_checksums`` makes it; empty: nothing was.
    """

    rank: int
    extents: tuple[Extent, ...]
    is_committed: bool = False
    is_drained: bool = False
    packed_checksums: bytes = b""
    lease: Lease | None = None


@dataclass(slots=True)
class Session:
    """One attempt.

    Attributes:
        key: layout fingerprint (the namespace is in it) and session id.
        told_conn_ids: who is told how it ends: by rank, whoever committed it last, and under
            ``PREPARER`` and ``STARTER`` whoever prepared and started it.
        state_since_ns: when the present state began; its clock starts there.
        deadline_ns: when the present state's timer fires; 0: none.
        spent_ns: time spent in each state that was left.
        round: number of the ingest round; every round that ends without a commit raises it.
        abort_wanted: why it ends as soon as nobody holds a lease.
        answers: first answers by repeat key, for exact repeats.
        peer: what D calls itself.
        owner: who may write to it and end it; the core only keeps it.
        shard_bytes: payload bytes of one rank's shard.
        total_bytes: payload bytes of all shards.
    """

    handle: int
    key: tuple[str, str]
    layout: Layout
    num_tokens: int
    token_start: int
    token_digest: str
    page_keys: tuple[str, ...]
    shards: dict[int, Shard]
    told_conn_ids: dict[int, int]
    writer_id: int
    created_ns: int
    state: State
    state_since_ns: int
    deadline_ns: int = 0
    reason: Reason = Reason.OK
    spent_ns: dict[State, int] = field(default_factory=dict)
    round: int = 1
    abort_wanted: Reason | None = None
    newer_handle: int = 0
    answers: dict[tuple[object, ...], Result] = field(default_factory=dict)
    peer: str = ""
    owner: str = ""
    shard_bytes: int = field(init=False)
    total_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        # Every record says them, and the layout would have to be summed for each.
        self.shard_bytes = snapshot_bytes(self.layout, self.num_tokens)
        self.total_bytes = self.shard_bytes * len(self.shards)

    @property
    def session_id(self) -> str:
        """The caller's name for the conversation."""
        return self.key[1]

    @property
    def end_tokens(self) -> int:
        """The token after the last one of the snapshot."""
        return self.token_start + self.num_tokens

    @property
    def is_leased(self) -> bool:
        """A rank reads, or has voted and waits."""
        return any(shard.lease is not None for shard in self.shards.values())

    @property
    def is_drained(self) -> bool:
        """Every shard is committed, and no write can still land."""
        return all(shard.is_drained for shard in self.shards.values())


def shard_plane_offsets_bytes(
    layout: Layout, num_tokens: int, extents: tuple[Extent, ...], alignment_bytes: int
) -> tuple[int, ...]:
    """Return where each plane starts, in bytes from the arena's first byte, shape [num_planes].

    *extents* holds one contiguous extent, or one a plane. In a contiguous one the planes lie as
    ``layout.plane_offsets_bytes`` says; here a width that many planes have is aligned once.
    """
    if len(extents) == 1:
        strides_bytes = layout.plane_stride_bytes
        start = extents[0].offset_bytes
        if strides_bytes.count(strides_bytes[0]) == len(strides_bytes):
            size_bytes = align_up(strides_bytes[0] * num_tokens, alignment_bytes)
            return tuple(range(start, start + len(strides_bytes) * size_bytes, size_bytes))
        aligned_bytes = {
            stride: align_up(stride * num_tokens, alignment_bytes) for stride in set(strides_bytes)
        }
        sizes_bytes = map(aligned_bytes.__getitem__, strides_bytes[:-1])
        return tuple(accumulate(sizes_bytes, initial=start))
    return tuple(extent.offset_bytes for extent in extents)


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
