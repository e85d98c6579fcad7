"""What the core remembers of an attempt."""

from typing import Final

from snapd.core.events import Result, State
from snapd.core.extent import Extent
from snapd.core.planes import Planes
from snapd.errors import Reason
from snapd.layout import Layout
from snapd.units import MB, NS_PER_S

_OK: Final = Reason.OK
_LEASE: Final = ("conn_id", "deadline_ns", "granted_ns", "lease_id", "round", "waiting")
_SHARD: Final = ("extents", "is_committed", "is_drained", "lease", "packed_checksums", "rank")
_SESSION: Final = (
    "abort_wanted", "answers", "created_ns", "deadline_ns", "handle", "key", "layout", "newer_handle",
    "num_tokens", "owner", "page_keys", "peer", "planes", "reason", "round", "session_id", "shard_bytes",
    "shards", "spent_ns", "state", "state_since_ns", "token_digest", "token_start", "told_conn_ids",
    "total_bytes", "writer_id",
)  # fmt: skip


def _shown(thing: object, names: tuple[str, ...]) -> str:
    """Return all that is in it, for tests and debuggers."""
    return f"{type(thing).__name__}({', '.join([f'{name}={getattr(thing, name)!r}' for name in names])})"


def transfer_time_ns(num_bytes: int, min_mb_per_s: int) -> int:
    """Return how long *num_bytes* take at the slowest rate that is still taken for progress."""
    return num_bytes * NS_PER_S // (min_mb_per_s * MB)


class Lease:
    """A rank's right to read, until it has voted or *deadline_ns* has passed.

    Attributes:
        round: the ingest round that it belongs to; if the attempt has moved on, it is doomed.
        waiting: cause ids of the votes that wait for the decision; empty: has not voted.
    """

    __slots__ = _LEASE

    def __init__(self, lease_id: int, round: int, granted_ns: int, deadline_ns: int, conn_id: int) -> None:  # noqa: A002
        self.lease_id = lease_id
        self.round = round
        self.granted_ns = granted_ns
        self.deadline_ns = deadline_ns
        self.conn_id = conn_id
        self.waiting: list[int] = []

    def __repr__(self) -> str:
        return _shown(self, _LEASE)

    @property
    def has_voted(self) -> bool:
        """The rank reads no more and waits for the decision."""
        return bool(self.waiting)


class Shard:
    """What an attempt holds in one rank's arena.

    Attributes:
        extents: empty once they were given up.
        is_drained: committed, and no write can still land.
        packed_checksums: what was committed, as ``events.pack_checksums`` makes it; empty: nothing was.
    """

    __slots__ = _SHARD

    def __init__(self, rank: int, extents: tuple[Extent, ...]) -> None:
        self.rank = rank
        self.extents = extents
        self.is_committed = False
        self.is_drained = False
        self.packed_checksums = b""
        self.lease: Lease | None = None

    def __repr__(self) -> str:
        return _shown(self, _SHARD)


class Session:
    """One attempt.

    Written out, since an attempt is made for each prepare: it takes half the time of a dataclass's.

    Attributes:
        key: layout fingerprint (the namespace is in it) and session id.
        session_id: the caller's name for the conversation.
        planes: of its layout.
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

    __slots__ = _SESSION

    def __init__(
        self,
        handle: int,
        key: tuple[str, str],
        planes: Planes,
        num_tokens: int,
        token_start: int,
        token_digest: str,
        page_keys: tuple[str, ...],
        shards: dict[int, Shard],
        told_conn_ids: dict[int, int],
        writer_id: int,
        created_ns: int,
        state: State,
        peer: str,
        owner: str,
    ) -> None:
        self.handle = handle
        self.key = key
        self.session_id = key[1]
        self.planes = planes
        self.layout = planes.layout
        self.num_tokens = num_tokens
        self.token_start = token_start
        self.token_digest = token_digest
        self.page_keys = page_keys
        self.shards = shards
        self.told_conn_ids = told_conn_ids
        self.writer_id = writer_id
        self.created_ns = created_ns
        self.state = state
        self.state_since_ns = created_ns
        self.deadline_ns = 0
        self.reason = _OK
        self.spent_ns: dict[State, int] = {}
        self.round = 1
        self.abort_wanted: Reason | None = None
        self.newer_handle = 0
        self.answers: dict[tuple[object, ...], Result] = {}
        self.peer = peer
        self.owner = owner
        # Every record says them.
        self.shard_bytes = planes.token_bytes * num_tokens
        self.total_bytes = self.shard_bytes * len(shards)

    def __repr__(self) -> str:
        return _shown(self, _SESSION)

    @property
    def end_tokens(self) -> int:
        """The token after the last one of the snapshot."""
        return self.token_start + self.num_tokens

    @property
    def is_leased(self) -> bool:
        """A rank reads, or has voted and waits."""
        # A loop, here and below: a generator takes twice as long, and this is asked at every step.
        for shard in self.shards.values():  # noqa: SIM110
            if shard.lease is not None:
                return True
        return False

    @property
    def is_drained(self) -> bool:
        """Every shard is committed, and no write can still land."""
        for shard in self.shards.values():  # noqa: SIM110
            if not shard.is_drained:
                return False
        return True


def shard_plane_offsets_bytes(
    layout: Layout, num_tokens: int, extents: tuple[Extent, ...], alignment_bytes: int
) -> tuple[int, ...]:
    """Return where each plane starts; see ``Planes.offsets_bytes``."""
    return Planes(layout).offsets_bytes(num_tokens, extents, alignment_bytes)
