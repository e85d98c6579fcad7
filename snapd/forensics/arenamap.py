"""An arena's map, rebuilt from the log: what was live, in quarantine and free after each record.

``ArenaMap`` is one arena; O(log n) an extent, n being the holes. ``sample_arenas`` follows all arenas of a
log and returns at most so many points each, for reports and drawings.

Source: design, sections 4 and 6.
"""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import floor
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec
from sortedcontainers import SortedList

Use: TypeAlias = Literal["live", "quarantined"]
ExtentPair: TypeAlias = tuple[int, int]  # offset_bytes, size_bytes
_Entry: TypeAlias = tuple[int, Use, int]  # as in Held
POINTS_MAX: Final = 500
# How many entries that no longer count the heap of holes may hold beside those that do.
_STALE_MAX: Final = 256


class Held(NamedTuple):
    """Who holds an extent of the arena."""

    end_bytes: int
    use: Use
    slab_handle: int


class Misfit(NamedTuple):
    """A record that the map does not agree with.

    Attributes:
        kind: ``overlap``: the extent is held, all or in part; ``outside``: it is not in the arena;
            ``not-held``: nobody held exactly this extent; ``wrong-use``: live instead of quarantined, or the
            other way round; ``wrong-handle``: another attempt held it.
        offset_bytes, size_bytes: the extent in the record.
        other_handle: who held it; 0: nobody.
    """

    kind: Literal["overlap", "outside", "not-held", "wrong-use", "wrong-handle"]
    offset_bytes: int
    size_bytes: int
    other_handle: int = 0


class ArenaMap:
    """One arena. A record that does not fit is applied as far as it can be, and returned as misfits.

    Args:
        capacity_bytes: its size; None: not known, as the log's beginning is missing. Then nothing is known
            of holes either, and what is released without having been seen is no misfit.

    Attributes:
        live_bytes, quarantined_bytes: held now, padding included.
    """

    def __init__(self, capacity_bytes: int | None) -> None:
        self.capacity_bytes = capacity_bytes
        self.live_bytes = 0
        self.quarantined_bytes = 0
        self._held: dict[int, _Entry] = {}  # by offset
        # The offsets in order. Made when it is needed first: a hole is nearly always cut from its front,
        # and whoever does that finds it by its start.
        self._offsets: SortedList | None = None
        # Holes by start, and by end; a heap of (-size, start), in which old entries stay for a while.
        self._hole_end: dict[int, int] = {}
        self._hole_start: dict[int, int] = {}
        self._hole_heap: list[tuple[int, int]] = []
        if capacity_bytes:
            self._add_hole(0, capacity_bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes that nobody else can get: live and in quarantine."""
        return self.live_bytes + self.quarantined_bytes

    @property
    def free_bytes(self) -> int | None:
        """Bytes in holes; None: the arena's size is not known."""
        return None if self.capacity_bytes is None else self.capacity_bytes - self.held_bytes

    @property
    def largest_hole_bytes(self) -> int | None:
        """Bytes of the largest hole; None: the arena's size is not known."""
        if self.capacity_bytes is None:
            return None
        heap = self._hole_heap
        while heap:
            negative_size, start = heap[0]
            if self._hole_end.get(start) == start - negative_size:
                return -negative_size
            heappop(heap)
        return 0

    @property
    def num_held(self) -> int:
        """Extents that are held."""
        return len(self._held)

    def holder(self, offset_bytes: int) -> Held | None:
        """Return who holds the extent that starts there."""
        entry = self._held.get(offset_bytes)
        return None if entry is None else Held(*entry)

    def held(self) -> Iterator[tuple[int, Held]]:
        """Yield every held extent as ``(offset_bytes, holder)``, in address order; O(n log n)."""
        return ((offset, Held(*entry)) for offset, entry in sorted(self._held.items()))

    # --- records -------------------------------------------------------------------------------

    def allocate(self, slab_handle: int, extents: Iterable[ExtentPair], use: Use = "live") -> list[Misfit]:
        """Take extents, as ``slab.allocated`` says."""
        misfits: list[Misfit] = []
        taken_bytes = 0
        hole_end = self._hole_end
        for offset, size_bytes in extents:
            end = offset + size_bytes
            hole = hole_end.get(offset, -1)
            if size_bytes > 0 and end <= hole:
                # It is cut from the front of a hole.
                del hole_end[offset]
                if end < hole:
                    self._add_hole(end, hole)
                else:
                    del self._hole_start[hole]
            else:
                misfit = self._why_not(offset, size_bytes)
                if misfit is not None:
                    misfits.append(misfit)
                    continue
                self._cut(offset, end)
            self._held[offset] = (end, use, slab_handle)
            taken_bytes += size_bytes
            if self._offsets is not None:
                self._offsets.add(offset)
        self._count(use, taken_bytes)
        return misfits

    def quarantine(self, slab_handle: int, extents: Iterable[ExtentPair]) -> list[Misfit]:
        """Move live extents into quarantine, as ``slab.quarantined`` says."""
        misfits: list[Misfit] = []
        for offset, size_bytes in extents:
            entry = self._held.get(offset)
            if entry is None or entry[0] != offset + size_bytes:
                misfits += self._unseen(slab_handle, offset, size_bytes)
                continue
            misfits += _disagreement(entry, slab_handle, "live", offset, size_bytes)
            self._count(entry[1], -size_bytes)
            self._count("quarantined", size_bytes)
            self._held[offset] = (entry[0], "quarantined", entry[2])
        return misfits

    def release(self, slab_handle: int, extents: Iterable[ExtentPair], was: Use) -> list[Misfit]:
        """Give extents back, as ``slab.released`` says."""
        misfits: list[Misfit] = []
        held, hole_end, hole_start = self._held, self._hole_end, self._hole_start
        has_holes = self.capacity_bytes is not None
        live_bytes = quarantined_bytes = 0
        for offset, size_bytes in extents:
            end = offset + size_bytes
            entry = held.get(offset)
            if entry is None or entry[0] != end:
                if has_holes:
                    misfits.append(Misfit("not-held", offset, size_bytes))
                continue
            if entry[1] != was or entry[2] != slab_handle:
                misfits += _disagreement(entry, slab_handle, was, offset, size_bytes)
            del held[offset]
            if entry[1] == "live":
                live_bytes += size_bytes
            else:
                quarantined_bytes += size_bytes
            if self._offsets is not None:
                self._offsets.remove(offset)
            if has_holes:
                # One hole of what is free again, and of the holes beside it.
                start = hole_start.pop(offset, offset)
                self._add_hole(start, hole_end.pop(end, end))
        self.live_bytes -= live_bytes
        self.quarantined_bytes -= quarantined_bytes
        return misfits

    def _unseen(self, slab_handle: int, offset: int, size_bytes: int) -> list[Misfit]:
        """An extent goes into quarantine that was taken before the log begins, or never."""
        if self.capacity_bytes is not None:
            return [Misfit("not-held", offset, size_bytes)]
        return self.allocate(slab_handle, [(offset, size_bytes)], "quarantined")

    # --- holes ---------------------------------------------------------------------------------

    def _ordered(self) -> SortedList:
        if self._offsets is None:
            self._offsets = SortedList(self._held)
        return self._offsets

    def _why_not(self, offset: int, size_bytes: int) -> Misfit | None:
        """Return why nobody can get this extent."""
        end = offset + size_bytes
        outside = self.capacity_bytes is not None and end > self.capacity_bytes
        if offset < 0 or size_bytes <= 0 or outside:
            return Misfit("outside", offset, size_bytes)
        offsets = self._ordered()
        index = offsets.bisect_left(end)
        if index == 0:
            return None
        held_end, _, handle = self._held[offsets[index - 1]]
        return Misfit("overlap", offset, size_bytes, handle) if held_end > offset else None

    def _cut(self, offset: int, end: int) -> None:
        """Cut an extent out of the middle of a hole."""
        if self.capacity_bytes is None:
            return
        # Between the extent before and this one there is nothing but this hole.
        offsets = self._ordered()
        index = offsets.bisect_left(offset)
        start = self._held[offsets[index - 1]][0] if index else 0
        hole = self._hole_end.pop(start)
        del self._hole_start[hole]
        if start < offset:
            self._add_hole(start, offset)
        if end < hole:
            self._add_hole(end, hole)

    def _add_hole(self, start: int, end: int) -> None:
        self._hole_end[start] = end
        self._hole_start[end] = start
        heappush(self._hole_heap, (start - end, start))
        if len(self._hole_heap) > 2 * len(self._hole_end) + _STALE_MAX:
            self._hole_heap = [(start - end, start) for start, end in self._hole_end.items()]
            heapify(self._hole_heap)

    def _count(self, use: Use, size_bytes: int) -> None:
        if use == "live":
            self.live_bytes += size_bytes
        else:
            self.quarantined_bytes += size_bytes


def _disagreement(entry: _Entry, slab_handle: int, use: Use, offset: int, size_bytes: int) -> list[Misfit]:
    _, held_use, handle = entry
    misfits: list[Misfit] = []
    if handle != slab_handle:
        misfits.append(Misfit("wrong-handle", offset, size_bytes, handle))
    if held_use != use:
        misfits.append(Misfit("wrong-use", offset, size_bytes, handle))
    return misfits


# --- samples -----------------------------------------------------------------------------------


class ArenaPoint(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An arena during one slice of the time. The bytes are those at the slice's end.

    Attributes:
        ts: unix time at which the slice ends, seconds.
        live_bytes, quarantined_bytes: held, padding included.
        free_bytes: in holes; None: the arena's size is not known.
        largest_hole_bytes: None: the arena's size is not known.
        held_bytes_max: most bytes live and in quarantine at any time in the slice.
        quarantined_bytes_max: most bytes in quarantine.
        largest_hole_bytes_min: the least that the largest hole had.
    """

    ts: float
    live_bytes: int
    quarantined_bytes: int
    free_bytes: int | None
    largest_hole_bytes: int | None
    held_bytes_max: int
    quarantined_bytes_max: int
    largest_hole_bytes_min: int | None


class ArenaSeries(msgspec.Struct, frozen=True, kw_only=True):
    """One arena in one epoch, over the time.

    Attributes:
        epoch: the life of the daemon.
        rank: whose arena.
        device: where its memory is; empty: not known.
        capacity_bytes: its size; None: not known, as the log's beginning is missing.
        is_complete: the log has the epoch's beginning, and no gap. If not, the bytes are a lower bound.
        points: in order of time; slices in which nothing happened have none.
        misfits: records that the map does not agree with; the prover names them.
    """

    epoch: str
    rank: int
    device: str
    capacity_bytes: int | None
    is_complete: bool
    points: tuple[ArenaPoint, ...]
    misfits: int


class SlabRow(NamedTuple):
    """A slab record, as ``sample_arenas`` takes it; *extents* as in the record."""

    epoch: str
    rank: int
    ts: float
    event: str
    slab_handle: int
    was: str
    extents: Sequence[ExtentPair]


class _Sampler:
    """One arena's map and its points, a slice at a time."""

    def __init__(self, arena: ArenaMap, begin_ts: float, slice_s: float, slices: int) -> None:
        self.arena = arena
        self._slices = slices
        self._is_touched = False
        self.points: list[ArenaPoint] = []
        self.misfits = 0
        self._begin_ts = begin_ts
        self._slice_s = slice_s
        self._slice = -1
        self._begin_slice()

    def _begin_slice(self) -> None:
        arena = self.arena
        self._held_max = arena.held_bytes
        self._quarantined_max = arena.quarantined_bytes
        self._hole_min = arena.largest_hole_bytes

    def apply(self, row: SlabRow) -> None:
        arena = self.arena
        # The wall clock may be set back: a slice that has ended does not come again.
        index = min(max(floor((row.ts - self._begin_ts) / self._slice_s), self._slice), self._slices - 1)
        if index != self._slice:
            self.end_slice()
            self._slice = index
            self._begin_slice()
        self._is_touched = True
        if row.event == "slab.allocated":
            misfits = arena.allocate(row.slab_handle, row.extents)
            hole = arena.largest_hole_bytes
            if hole is not None and self._hole_min is not None:
                self._hole_min = min(self._hole_min, hole)
            self._held_max = max(self._held_max, arena.held_bytes)
        elif row.event == "slab.quarantined":
            misfits = arena.quarantine(row.slab_handle, row.extents)
            self._quarantined_max = max(self._quarantined_max, arena.quarantined_bytes)
            self._held_max = max(self._held_max, arena.held_bytes)
        else:
            misfits = arena.release(
                row.slab_handle, row.extents, "quarantined" if row.was == "quarantined" else "live"
            )
        self.misfits += len(misfits)

    def end_slice(self) -> None:
        if not self._is_touched:
            return
        arena = self.arena
        self.points.append(
            ArenaPoint(
                ts=self._begin_ts + (self._slice + 1) * self._slice_s,
                live_bytes=arena.live_bytes,
                quarantined_bytes=arena.quarantined_bytes,
                free_bytes=arena.free_bytes,
                largest_hole_bytes=arena.largest_hole_bytes,
                held_bytes_max=self._held_max,
                quarantined_bytes_max=self._quarantined_max,
                largest_hole_bytes_min=self._hole_min,
            )
        )


class ArenaStart(NamedTuple):
    """What the log says of an arena at its epoch's beginning.

    Attributes:
        device: where its memory is.
        capacity_bytes: its size, as far as it is handed out.
        is_complete: there is no gap in the epoch.
    """

    device: str
    capacity_bytes: int
    is_complete: bool


def sample_arenas(
    rows: Iterable[SlabRow],
    starts: dict[tuple[str, int], ArenaStart],
    begin_ts: float,
    end_ts: float,
    points_max: int = POINTS_MAX,
) -> list[ArenaSeries]:
    """Follow the arenas and return about *points_max* points each, at most one more.

    Args:
        rows: the slab records, in the log's order.
        starts: by epoch and rank; arenas that are not in it began before the log does.
        begin_ts: where the time begins that is cut into slices, unix seconds; what is earlier makes one
            point there.
        end_ts: where it ends; what is later belongs to the last slice.
        points_max: slices of the time, at least 1.
    """
    # A little more than the time, so that the last record is in the last slice.
    slice_s = max((end_ts - begin_ts) / points_max * (1 + 1e-9), 1e-6)
    samplers: dict[tuple[str, int], _Sampler] = {}
    for row in rows:
        key = (row.epoch, row.rank)
        sampler = samplers.get(key)
        if sampler is None:
            start = starts.get(key)
            arena = ArenaMap(start.capacity_bytes if start else None)
            sampler = samplers[key] = _Sampler(arena, begin_ts, slice_s, points_max)
        sampler.apply(row)
    found: list[ArenaSeries] = []
    for (epoch, rank), sampler in samplers.items():
        sampler.end_slice()
        start = starts.get((epoch, rank))
        found.append(
            ArenaSeries(
                epoch=epoch,
                rank=rank,
                device=start.device if start else "",
                capacity_bytes=start.capacity_bytes if start else None,
                is_complete=start is not None and start.is_complete,
                points=tuple(sampler.points),
                misfits=sampler.misfits,
            )
        )
    return found
