"""One moment of a daemon, as numbers: what ``snapd top`` draws, and prints with ``--json``."""

import msgspec

from snapd.core.overview import ArenaMap, Order
from snapd.core.session import ArenaView


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What happens in a second.

    Attributes:
        over_s: of this many seconds; since the daemon's start as long as it was asked once only.
        is_since_start: it is since the start.
        attempts: prepares that were granted.
        refused: prepares that were refused.
    """

    over_s: float
    is_since_start: bool
    attempts: float
    ok: float
    refused: float
    evicted: float
    committed_bytes: float
    ingested_bytes: float


class Daemon(msgspec.Struct, frozen=True, kw_only=True):
    """Which daemon it is, and how it fares."""

    version: str
    epoch: str
    pid: int
    uptime_ms: int
    transport: str
    connections: int
    watchers: int
    requests_waiting: int
    open_sessions: int
    quarantined_shards: int
    is_draining: bool
    log_lines: int
    log_dropped: int
    log_write_errors: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How often attempts and refusals ended so since the start, and in a second now."""

    reason: str
    count: int
    share: float
    per_s: float


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """One arena: its books, and what the map adds up to."""

    books: ArenaView
    map: ArenaMap
    writing_bytes: int
    ready_bytes: int
    leased_bytes: int


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """The attempts in one state.

    Attributes:
        oldest_ms: for how long the first of them has been in it.
        left_ms: until the first deadline; None: there is none.
        typical_ms: the median that the latest attempts spent in it; None: none was seen leaving it.
    """

    state: str
    is_leased: bool
    count: int
    bytes: int
    oldest_ms: float
    left_ms: float | None
    typical_ms: float | None


class AttemptRow(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt, with its times as of the frame.

    Attributes:
        age_ms: since it was granted.
        in_state_ms: since the present state began.
        left_ms: until the next deadline; below 0: overdue.
    """

    slab_handle: int
    session_id: str
    state: str
    is_leased: bool
    abort_wanted: str
    peer: str
    num_tokens: int
    bytes: int
    age_ms: float
    in_state_ms: float
    left_ms: float
    num_committed: int
    num_ranks: int


class PeerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A D worker; ``peer`` is empty for all those that are not listed, together."""

    peer: str
    open_attempts: int
    open_bytes: int
    ended: int
    ok: int
    refused: int
    bytes_ok: int
    ok_per_s: float
    bytes_per_s: float
    last_problem: str
    last_ago_ms: float | None


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened.

    Attributes:
        at: unix seconds.
        event: ``session.transition``, ``sync.refused``, ``watch.lost``, or ``daemon.seen``.
        count: of lines that were lost.
    """

    at: float
    event: str
    session_id: str = ""
    slab_handle: int = 0
    from_state: str = ""
    to_state: str = ""
    reason: str = ""
    num_tokens: int = 0
    bytes: int = 0
    duration_ms: float = 0.0
    detail: str = ""
    count: int = 0


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """All that is shown at one time.

    Attributes:
        at: unix seconds.
        connected: the daemon answers; if not, only *problem* and *events* say anything.
        problem: what is wrong, in a few words, and *detail* in full.
        waiting_since: unix seconds since when that is so; None: nothing is wrong.
        watch_problem: why no events come.
        order: which attempts come first.
        surveyed_ago_ms: how old maps, groups and the choice of attempts were when the daemon answered.
        events: the latest, newest first.
    """

    at: float
    connected: bool
    problem: str = ""
    detail: str = ""
    waiting_since: float | None = None
    watch_problem: str = ""
    daemon: Daemon | None = None
    rates: Rates | None = None
    outcomes: tuple[Outcome, ...] = ()
    ranks: tuple[RankRow, ...] = ()
    groups: tuple[GroupRow, ...] = ()
    order: Order = "deadline"
    attempts: tuple[AttemptRow, ...] = ()
    peers: tuple[PeerRow, ...] = ()
    surveyed_ago_ms: float = 0.0
    events: tuple[Event, ...] = ()
