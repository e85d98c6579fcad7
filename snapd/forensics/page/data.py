"""What the page shows: columns of attempts and their events, what each arena held, exact sums.

Everything is bounded before it gets here. Columns are numpy arrays; times are seconds from the page's begin.
The page's JavaScript takes the columns up by the names used here.

Source: design, sections 2 and 6.
"""

from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    U8: TypeAlias = NDArray[np.uint8]
    U16: TypeAlias = NDArray[np.uint16]
    U32: TypeAlias = NDArray[np.uint32]
    F32: TypeAlias = NDArray[np.float32]
    F64: TypeAlias = NDArray[np.float64]
else:
    # msgspec looks at the types of a Struct's fields; numpy is loaded only by what makes such columns.
    U8 = U16 = U32 = F32 = F64 = Any

# What an attempt had reached when it ended: it was refused, or was in one of these.
REFUSED: Final = 0
RESERVED: Final = 1
TRANSFERRING: Final = 2
READY: Final = 3
# A line of an older log, which knows no states.
OLDER: Final = 4
NO_EPOCH: Final = 65_535


class AttemptColumns(msgspec.Struct, frozen=True, kw_only=True):
    """One row an attempt or a refusal, in the order in which they began. Each of shape [attempts].

    Attributes:
        start_s: when it began.
        reserved_ms, transferring_ms, ready_ms: time in each state, until now for one that is open.
        session: index in ``PageData.sessions``.
        handle: its slab_handle, 0 for a refusal; exact, as handles have 53 bits.
        bytes: of the payload.
        tokens, token_start: which tokens.
        reason: index in ``PageData.reasons``.
        epoch: index in ``PageData.epochs``; ``NO_EPOCH``: none, or one beyond what can be numbered.
        ranks: how many ranks it has a shard for; 0: not known.
        last_state: ``REFUSED``, ``OLDER``, or the last state before its end.
        event_count: rows of ``EventColumns`` that are its.
    """

    start_s: F64
    reserved_ms: F32
    transferring_ms: F32
    ready_ms: F32
    session: U32
    handle: F64
    bytes: F64
    tokens: U32
    token_start: U32
    reason: U8
    epoch: U16
    ranks: U16
    last_state: U8
    event_count: U16


class EventColumns(msgspec.Struct, frozen=True, kw_only=True):
    """Slabs and leases of the attempts, attempt by attempt. Each of shape [events].

    Attributes:
        kind: index in ``PageData.event_kinds``.
        rank: of which rank.
        at_ms: since the attempt began.
        why: index in ``PageData.event_whys``.
        bytes: that its extents take, padding included; 0 for a lease.
        offset: of the first extent, in bytes from the arena's first.
        extents: how many; 0 for a lease.
    """

    kind: U8
    rank: U16
    at_ms: F32
    why: U8
    bytes: F64
    offset: F64
    extents: U16


class BoxColumns(msgspec.Struct, frozen=True, kw_only=True):
    """Who held which bytes of an arena, and when. Each of shape [boxes].

    Attributes:
        t0, t1: from when to when.
        low, high: from where to where, as shares of the arena.
        kind: 0 live, 1 quarantined.
        row: index of the attempt in ``AttemptColumns``; its length: none of them.
    """

    t0: F64
    t1: F64
    low: F32
    high: F32
    kind: U8
    row: U32


class Arena(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's arena over the whole log.

    Attributes:
        rank: whose.
        device: ``cpu`` or ``cuda:N``; of the last epoch.
        size_bytes: the largest that it had.
        live, quarantined: shares of each cell's bytes and time that were held, 0 to 255, shape
            [rows, columns]; row 0 holds the lowest addresses, column 0 the earliest times.
        at_s: times of the samples, shape [samples].
        live_share, quarantined_share, hole_share: of the arena, at each sample; ``hole`` is the largest.
        boxes: the same as rectangles; None: there are too many for a page.
    """

    rank: int
    device: str
    size_bytes: int
    live: U8
    quarantined: U8
    at_s: F64
    live_share: F32
    quarantined_share: F32
    hole_share: F32
    boxes: BoxColumns | None


class Epoch(msgspec.Struct, frozen=True):
    """One life of the daemon.

    Attributes:
        id: as in the log.
        start_s: its first line.
    """

    id: str
    start_s: float


class Counter(msgspec.Struct, frozen=True):
    """A figure beside the OK rate; *unit* says how it is written."""

    name: str
    value: float
    unit: Literal["", "bytes", "ms", "gbs", "share"] = ""


class Notice(msgspec.Struct, frozen=True):
    """Something that a reader must know before trusting a figure.

    Attributes:
        text: a sentence or two.
        level: ``info`` is said at the page's end, the others at its top.
        details: shown when asked for.
    """

    text: str
    level: Literal["info", "note", "bad"] = "note"
    details: list[str] = []


class PageData(msgspec.Struct, frozen=True, kw_only=True):
    """Everything on the page.

    Attributes:
        title: of the page and of its heading.
        about: short facts for the line below the title.
        begin_unix_s, end_s: the first line's time; the last line's, from there.
        lines: of the log.
        epochs: oldest first.
        sessions: session ids, each once. Written by others: they may hold anything.
        reasons: names, each once; ``open`` stands for attempts that have not ended.
        reason_counts: exact, also where the rows are a sample; shape [reasons].
        attempts, attempts_ok, attempts_open: exact.
        weight_ok, weight_other: how many attempts a row with the reason ``ok``, or another, stands for.
        counters, notices: see there.
        rows, events: see there; events hold all, or those of some attempts, never a part of one's.
        event_kinds, event_whys: names.
        bins: outcomes by reason in slices of equal length over the whole time, exact; shape
            [reasons, slices].
        arenas: by rank.
    """

    title: str
    about: list[str]
    begin_unix_s: float
    end_s: float
    lines: int
    epochs: list[Epoch]
    sessions: list[str]
    reasons: list[str]
    reason_counts: list[int]
    attempts: int
    attempts_ok: int
    attempts_open: int
    weight_ok: float = 1.0
    weight_other: float = 1.0
    counters: list[Counter] = []
    notices: list[Notice] = []
    rows: AttemptColumns
    events: EventColumns
    event_kinds: list[str]
    event_whys: list[str]
    bins: U32
    arenas: list[Arena] = []


def strip_label(page: PageData) -> str:
    """Return what the attempts that are drawn without a bar are called; empty: there are none."""
    state = page.rows.last_state
    if (state == OLDER).any():
        return "no time"
    return "refused" if (state == REFUSED).any() else ""
