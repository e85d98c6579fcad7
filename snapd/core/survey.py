"""Looks at everything that is open, a few attempts at a time, for an ``Overview``.

The survey only reads. Between two of its steps attempts come, go and change: those that have gone are
passed over, those that have come since it began are not seen. One step costs what it is allowed to, and the
whole costs O(cells + extents).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from heapq import heappush, heapreplace
from itertools import chain
from typing import Final

from snapd.core.books import Books
from snapd.core.events import State
from snapd.core.overview import (
    ATTEMPTS_MAX,
    CELLS_MAX,
    CELLS_TOTAL_MAX,
    PEERS_MAX,
    ArenaMap,
    AttemptGroup,
    AttemptLine,
    Order,
    Overview,
    PeerLine,
)
from snapd.core.records import SyncOutcome
from snapd.core.session import Session
from snapd.core.slab import Extent
from snapd.units import ceil_div

_WRITING, _READY, _LEASED, _QUARANTINED = range(4)
# D workers that are counted one by one; what a client calls itself is its own affair, so there may be many.
PEERS_COUNTED_MAX: Final = 256
# More candidates than lines: some will have ended by the time they are shown.
_CANDIDATES: Final = 2 * ATTEMPTS_MAX


class Painter:
    """The map of one arena in the making.

    Args:
        rank: whose arena.
        capacity_bytes: of the arena.
        cells_max: the map has at most so many cells.
    """

    def __init__(self, rank: int, capacity_bytes: int, cells_max: int) -> None:
        self._rank = rank
        self._cell_bytes = ceil_div(capacity_bytes, cells_max)
        num_cells = ceil_div(capacity_bytes, self._cell_bytes)
        self._kinds = [[0] * num_cells for _ in range(4)]
        self._num_shards = [0] * 4

    def paint(self, kind: int, extents: Iterable[Extent]) -> int:
        """Add a shard's extents to the cells that they lie in, and return how many there were."""
        cells, cell_bytes = self._kinds[kind], self._cell_bytes
        self._num_shards[kind] += 1
        count = 0
        for extent in extents:
            count += 1
            start, size_bytes = extent.offset_bytes, extent.size_bytes
            index = start // cell_bytes
            room_bytes = (index + 1) * cell_bytes - start
            while size_bytes > room_bytes:
                cells[index] += room_bytes
                size_bytes -= room_bytes
                room_bytes = cell_bytes
                index += 1
            cells[index] += size_bytes
        return count

    def result(self) -> ArenaMap:
        """Return the map."""
        writing, ready, leased, quarantined = self._num_shards
        return ArenaMap(
            rank=self._rank,
            cell_bytes=self._cell_bytes,
            writing_bytes=tuple(self._kinds[_WRITING]),
            ready_bytes=tuple(self._kinds[_READY]),
            leased_bytes=tuple(self._kinds[_LEASED]),
            quarantined_bytes=tuple(self._kinds[_QUARANTINED]),
            num_shards=(writing, ready, leased, quarantined),
        )


class _Most:
    """Keeps the handles with the greatest keys, a bounded number of them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._heap: list[tuple[int, int]] = []

    def offer(self, key: int, handle: int) -> None:
        heap = self._heap
        if len(heap) < self._size:
            heappush(heap, (key, handle))
        elif key > heap[0][0]:
            heapreplace(heap, (key, handle))

    def handles(self) -> list[int]:
        return [handle for _, handle in sorted(self._heap, reverse=True)]


class PeerCounts:
    """What came of each D worker's attempts, from the records of how they ended.

    At most so many workers are counted one by one; those that were heard of longest ago are added up.
    """

    def __init__(self, peers_max: int = PEERS_COUNTED_MAX) -> None:
        self._peers_max = peers_max
        self._lines: OrderedDict[str, _Counts] = OrderedDict()
        self._others = _Counts()

    def note(self, record: SyncOutcome) -> None:
        """Count one outcome."""
        counts = self._lines.get(record.peer)
        if counts is None:
            counts = self._lines[record.peer] = _Counts()
            if len(self._lines) > self._peers_max:
                self._others.add(self._lines.popitem(last=False)[1])
        else:
            self._lines.move_to_end(record.peer)
        counts.last_ns = record.at_ns
        if not record.slab_handle:
            counts.refused += 1
        else:
            counts.ended += 1
        if record.ok:
            counts.ok += 1
            counts.bytes_ok += record.bytes
        else:
            counts.last_problem = record.reason

    def lines(self, open_by_peer: dict[str, tuple[int, int]], others_open: tuple[int, int]) -> list[PeerLine]:
        """Return a bounded number of lines, the most active first, and then one for all others, if any.

        Args:
            open_by_peer: number of open attempts and their payload bytes, by worker.
            others_open: the same of workers that are not in it.
        """
        names = sorted(
            self._lines.keys() | open_by_peer.keys(),
            key=lambda peer: (-open_by_peer.get(peer, (0, 0))[0], -self._last_ns(peer), peer),
        )
        lines = [
            self._lines.get(peer, _Counts()).line(peer, open_by_peer.get(peer, (0, 0)))
            for peer in names[:PEERS_MAX]
        ]
        others = _Counts()
        others.add(self._others)
        others_attempts, others_bytes = others_open
        for peer in names[PEERS_MAX:]:
            others.add(self._lines.get(peer, _Counts()))
            attempts, num_bytes = open_by_peer.get(peer, (0, 0))
            others_attempts += attempts
            others_bytes += num_bytes
        if others.last_ns or others_attempts:
            lines.append(others.line("", (others_attempts, others_bytes)))
        return lines

    def _last_ns(self, peer: str) -> int:
        counts = self._lines.get(peer)
        return 0 if counts is None else counts.last_ns


class _Counts:
    __slots__ = ("bytes_ok", "ended", "last_ns", "last_problem", "ok", "refused")

    def __init__(self) -> None:
        self.ended = self.ok = self.refused = self.bytes_ok = self.last_ns = 0
        self.last_problem = ""

    def add(self, other: "_Counts") -> None:
        self.ended += other.ended
        self.ok += other.ok
        self.refused += other.refused
        self.bytes_ok += other.bytes_ok
        if other.last_problem and other.last_ns >= self.last_ns:
            self.last_problem = other.last_problem
        self.last_ns = max(self.last_ns, other.last_ns)

    def line(self, peer: str, open_now: tuple[int, int]) -> PeerLine:
        return PeerLine(
            peer=peer,
            open_attempts=open_now[0],
            open_bytes=open_now[1],
            ended=self.ended,
            ok=self.ok,
            refused=self.refused,
            bytes_ok=self.bytes_ok,
            last_problem=self.last_problem,
            last_ns=self.last_ns,
        )


class _Group:
    __slots__ = ("count", "next_deadline_ns", "num_bytes", "oldest_since_ns")

    def __init__(self) -> None:
        self.count = self.num_bytes = self.oldest_since_ns = self.next_deadline_ns = 0


class Survey:
    """One look at everything, in steps.

    Args:
        books: what is looked at.
    """

    def __init__(self, books: Books) -> None:
        self._books = books
        arenas = books.buffer.arenas
        cells = max(1, min(CELLS_MAX, CELLS_TOTAL_MAX // len(arenas)))
        self._painters = {rank: Painter(rank, arena.capacity_bytes, cells) for rank, arena in arenas.items()}
        self._groups = {key: _Group() for key in _GROUPS}
        self._peers: dict[str, list[int]] = {}
        self._others_open = [0, 0]
        self._oldest = list(books.open)
        kept = list(books.buffer.quarantine)
        # What each attempt took to look at, as it is looked at.
        self._todo = chain(map(self._see_open, iter(self._oldest)), map(self._see_kept, kept))
        self._soonest = _Most(_CANDIDATES)
        self._largest = _Most(_CANDIDATES)
        self.is_done = False

    def step(self, budget: int) -> None:
        """Look at the next attempts, until about *budget* of them and their extents were seen."""
        for cost in self._todo:
            budget -= cost
            if budget <= 0:
                return
        self.is_done = True
        # Nothing reads the rest of it any more.
        del self._oldest[_CANDIDATES:]

    def overview(self, order: Order, peers: PeerCounts, surveyed_ns: int) -> Overview:
        """Return the picture, with the attempts that come first in *order*, as they are now."""
        handles = {
            "deadline": self._soonest.handles, "bytes": self._largest.handles, "age": self._oldest.copy,
        }[order]()  # fmt: skip
        sessions = [session for handle in handles if (session := self._books.open.get(handle)) is not None]
        sessions.sort(key=_SORT_KEYS[order])
        return Overview(
            surveyed_ns=surveyed_ns,
            maps=tuple(painter.result() for painter in self._painters.values()),
            groups=tuple(
                AttemptGroup(
                    state=state,
                    is_leased=is_leased,
                    count=group.count,
                    bytes=group.num_bytes,
                    oldest_since_ns=group.oldest_since_ns,
                    next_deadline_ns=group.next_deadline_ns,
                )
                for (state, is_leased), group in self._groups.items()
            ),
            attempts=tuple(line_of(session) for session in sessions[:ATTEMPTS_MAX]),
            peers=tuple(
                peers.lines(
                    {peer: (count, num_bytes) for peer, (count, num_bytes) in self._peers.items()},
                    (self._others_open[0], self._others_open[1]),
                )
            ),
        )

    def _see_open(self, handle: int) -> int:
        session = self._books.open.get(handle)
        if session is None:
            return 1
        cost = 1
        is_leased = False
        kind = _READY if session.state is State.READY else _WRITING
        for rank, shard in session.shards.items():
            if shard.lease is not None:
                is_leased = True
                cost += self._painters[rank].paint(_LEASED, shard.extents)
            else:
                cost += self._painters[rank].paint(kind, shard.extents)
        deadline_ns = next_deadline_ns(session) if is_leased else session.deadline_ns
        group = self._groups[session.state, is_leased]
        group.count += 1
        group.num_bytes += session.total_bytes
        if not group.oldest_since_ns or session.state_since_ns < group.oldest_since_ns:
            group.oldest_since_ns = session.state_since_ns
        if not group.next_deadline_ns or deadline_ns < group.next_deadline_ns:
            group.next_deadline_ns = deadline_ns
        self._soonest.offer(-deadline_ns, handle)
        self._largest.offer(session.total_bytes, handle)
        peer = self._peers.get(session.peer)
        if peer is None:
            if len(self._peers) < PEERS_COUNTED_MAX:
                peer = self._peers[session.peer] = [0, 0]
            else:
                peer = self._others_open
        peer[0] += 1
        peer[1] += session.total_bytes
        return cost

    def _see_kept(self, handle: int) -> int:
        by_rank = self._books.buffer.quarantine.get(handle, {})
        return 1 + sum(
            self._painters[rank].paint(_QUARANTINED, item.extents) for rank, item in by_rank.items()
        )


_GROUPS: Final = (
    (State.RESERVED, False), (State.TRANSFERRING, False), (State.READY, False), (State.READY, True),
)  # fmt: skip
_SORT_KEYS: Final[dict[Order, Callable[[Session], tuple[int, int]]]] = {
    "deadline": lambda session: (next_deadline_ns(session), session.created_ns),
    "age": lambda session: (session.created_ns, session.handle),
    "bytes": lambda session: (-session.total_bytes, session.created_ns),
}


def next_deadline_ns(session: Session) -> int:
    """Return when something ends next: the first lease of a READY attempt that is read, else its state."""
    leases = [shard.lease.deadline_ns for shard in session.shards.values() if shard.lease is not None]
    return min(leases, default=session.deadline_ns)


def line_of(session: Session) -> AttemptLine:
    """Return an open attempt in short."""
    return AttemptLine(
        slab_handle=session.handle,
        session_id=session.session_id,
        state=session.state,
        is_leased=session.is_leased,
        abort_wanted=session.abort_wanted or "",
        peer=session.peer,
        num_tokens=session.num_tokens,
        token_start=session.token_start,
        bytes=session.total_bytes,
        created_ns=session.created_ns,
        state_since_ns=session.state_since_ns,
        deadline_ns=next_deadline_ns(session),
        num_committed=sum(shard.is_committed for shard in session.shards.values()),
        num_ranks=len(session.shards),
    )
