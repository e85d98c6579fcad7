"""The slab allocator: cuts one arena into extents, best fit, with coalescing of neighbours.

A slab is one contiguous extent or, when no hole is large enough, one extent per plane, so that
external fragmentation alone does not refuse a session. Nothing is allocated in the arena itself: this
is arithmetic on offsets. Every operation is O(log n) an extent, n being the holes and live extents.

Source: design, section 4.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

from sortedcontainers import SortedList

from snapd.core.extent import Extent
from snapd.errors import InvariantBroken
from snapd.units import align_down, align_up

__all__ = ["Extent", "SlabAllocator", "Trial"]


class SlabAllocator:
    """Hands out extents of one arena and takes them back.

    Offsets and sizes are multiples of ``alignment_bytes``. With ``piece_bytes`` the arena is registered
    with the transport in pieces: no extent crosses a multiple of it, and no hole does.

    Args:
        capacity_bytes: the arena's size; what is left over after aligning it down is not used.
        alignment_bytes: a power of two.
        piece_bytes: a multiple of *alignment_bytes*, or 0 for an arena in one piece.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, capacity_bytes: int, *, alignment_bytes: int = 256, piece_bytes: int = 0) -> None:
        if alignment_bytes <= 0 or alignment_bytes & (alignment_bytes - 1):
            raise ValueError(f"alignment_bytes is {alignment_bytes}; it must be a power of two")
        if capacity_bytes < alignment_bytes:
            raise ValueError(f"capacity_bytes is {capacity_bytes}, below alignment_bytes {alignment_bytes}")
        if piece_bytes < 0 or piece_bytes % alignment_bytes:
            raise ValueError(
                f"piece_bytes is {piece_bytes}; must be 0 or a multiple of the alignment {alignment_bytes}"
            )
        self._alignment_bytes = alignment_bytes
        self._capacity_bytes = align_down(capacity_bytes, alignment_bytes)
        # An arena in one piece is a piece as large as the arena: one rule covers both.
        self._piece_bytes = piece_bytes or self._capacity_bytes
        self._free_bytes = 0
        self._live: dict[int, int] = {}  # offset -> size
        # Holes, four ways. The key by size is one int, not a tuple: with 100,000 holes comparing them is
        # what costs. Ends are sorted rather than starts because slabs are cut from the front of a hole.
        self._hole_size_by_start: dict[int, int] = {}
        self._hole_start_by_end: dict[int, int] = {}
        self._hole_keys: SortedList = SortedList()
        self._hole_ends: SortedList = SortedList()
        self._offset_bits = self._capacity_bytes.bit_length()
        # What the last slab that was asked about needs: most are asked about more than once.
        self._asked: Sequence[int] | None = None
        self._asked_needs: tuple[Mapping[int, int], int] = ({}, 0)
        for start in range(0, self._capacity_bytes, self._piece_bytes):
            self._put_back(start, min(self._piece_bytes, self._capacity_bytes - start))

    @property
    def capacity_bytes(self) -> int:
        """All bytes that can be handed out: free + live."""
        return self._capacity_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes in holes."""
        return self._free_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes in live extents, padding to the alignment included."""
        return self._capacity_bytes - self._free_bytes

    @property
    def largest_hole_bytes(self) -> int:
        """Bytes in the largest hole; 0 when there is none."""
        key: int = self._hole_keys[-1] if self._hole_keys else 0
        return key >> self._offset_bits

    @property
    def num_holes(self) -> int:
        """Number of holes."""
        return len(self._hole_size_by_start)

    @property
    def num_live_extents(self) -> int:
        """Number of live extents."""
        return len(self._live)

    def holes(self) -> Iterator[Extent]:
        """Yield every hole in address order; O(n log n), for reports and checks."""
        for start, size_bytes in sorted(self._hole_size_by_start.items()):
            yield Extent(start, size_bytes)

    def live(self) -> Iterator[Extent]:
        """Yield every live extent in address order; O(n log n), for reports and checks."""
        for offset, size_bytes in sorted(self._live.items()):
            yield Extent(offset, size_bytes)

    def allocate(self, plane_sizes_bytes: Sequence[int]) -> tuple[Extent, ...] | None:
        """Take a slab for planes of these sizes, or nothing.

        A contiguous slab comes from the smallest hole that holds it, at the lowest offset on a tie. If no
        hole does, every plane gets an extent of its own: the largest planes first, each by best fit. For
        planes of one size this finds a placement whenever there is one. For mixed sizes it is a heuristic
        (best fit, decreasing): it can miss a placement, it never invents one.

        Args:
            plane_sizes_bytes: payload bytes of each plane, shape [num_planes]; each is aligned up.

        Returns:
            One extent that holds all planes one after another, or one extent per plane in plane order, or
            ``None``, and then nothing changed.

        Raises:
            ValueError: there is no plane, or a size is not positive.
        """
        counts, need_bytes = self._needs(plane_sizes_bytes)
        if need_bytes > self._free_bytes:
            return None
        hole = self._best_hole(need_bytes)
        if hole is not None:
            start = self._cut(hole, need_bytes)
            self._live[start] = need_bytes
            return (Extent(start, need_bytes),)
        if not self._may_fit_apart(counts):
            return None
        runs = self._cut_planes(counts)
        if runs is None:
            return None
        places = [Extent(start + i * size, size) for start, size, count in runs for i in range(count)]
        # The sort is stable, so planes of one size keep their order, here as in the runs.
        aligned_bytes = [align_up(size_bytes, self._alignment_bytes) for size_bytes in plane_sizes_bytes]
        by_size = sorted(range(len(aligned_bytes)), key=aligned_bytes.__getitem__, reverse=True)
        placed = dict(zip(by_size, places, strict=True))
        self._live.update((extent.offset_bytes, extent.size_bytes) for extent in places)
        return tuple(placed[plane_index] for plane_index in range(len(placed)))

    def allocate_even(self, plane_bytes: int, num_planes: int) -> tuple[Extent, ...] | None:
        """Do what ``allocate`` does for so many planes of one size, in less time.

        Raises:
            ValueError: there is no plane, or the size is not positive.
        """
        if plane_bytes > 0 and num_planes > 0:
            need_bytes = align_up(plane_bytes, self._alignment_bytes) * num_planes
            if need_bytes > self._free_bytes:
                return None
            bits = self._offset_bits
            key = _first_from(self._hole_keys, need_bytes << bits)
            if key is not None:
                hole_bytes = key >> bits
                start = key - (hole_bytes << bits)
                if hole_bytes == need_bytes:
                    self._remove_hole(start)
                else:
                    self._move_hole_start(start, start + need_bytes)
                self._live[start] = need_bytes
                return (Extent(start, need_bytes),)
        return self.allocate((plane_bytes,) * num_planes)

    def could_fit(self, plane_sizes_bytes: Sequence[int]) -> bool:
        """Return whether ``allocate`` would find room now; nothing changes.

        Raises:
            ValueError: there is no plane, or a size is not positive.
        """
        counts, need_bytes = self._needs(plane_sizes_bytes)
        if need_bytes > self._free_bytes:
            return False
        if need_bytes <= self.largest_hole_bytes:
            return True
        if len(counts) == 1:
            return self._may_fit_apart(counts)
        runs = self._cut_planes(counts)
        if runs is None:
            return False
        self._uncut(runs)
        return True

    def trial(self, plane_sizes_bytes: Sequence[int]) -> "Trial":
        """Return what tells when the slab would fit, were other extents freed one after another.

        For planes of one aligned size it only counts. Otherwise it frees extents, and takes them again when
        it is closed: until then nothing else may be done here.

        Raises:
            ValueError: there is no plane, or a size is not positive.
        """
        counts, _ = self._needs(plane_sizes_bytes)
        if len(counts) == 1:
            ((size_bytes, count),) = counts.items()
            return _CountingTrial(self, size_bytes, count)
        return _FreeingTrial(self, plane_sizes_bytes)

    def fits_beside(self, kept: Iterable[Extent], plane_sizes_bytes: Sequence[int]) -> bool:
        """Return whether the slab would fit if nothing but *kept* were live.

        Exact for planes of one aligned size. For others it is not known without trying, and True.

        Raises:
            ValueError: there is no plane, or a size is not positive.
        """
        counts, _ = self._needs(plane_sizes_bytes)
        if len(counts) > 1:
            return True
        ((size_bytes, count),) = counts.items()
        boundaries = [Extent(at, 0) for at in range(0, self._capacity_bytes, self._piece_bytes)]
        places = start = 0
        for extent in [*sorted([*kept, *boundaries]), Extent(self._capacity_bytes, 0)]:
            places += (extent.offset_bytes - start) // size_bytes
            start = extent.end_bytes
        return places >= count

    def fits_ever(self, plane_sizes_bytes: Sequence[int]) -> bool:
        """Return whether ``allocate`` would find room if the arena were empty.

        Costs O(planes log planes), whatever the number of pieces.

        Raises:
            ValueError: there is no plane, or a size is not positive.
        """
        counts, _ = self._needs(plane_sizes_bytes)
        # Pieces not yet begun are all alike, so they are counted; only begun ones and the short last are
        # listed. A slab that fits contiguously needs no look of its own: plane by plane it fits as well.
        new_pieces, last_bytes = divmod(self._capacity_bytes, self._piece_bytes)
        begun = [last_bytes]
        for size_bytes in sorted(counts, reverse=True):
            left = counts[size_bytes]
            while left:
                at = bisect_left(begun, size_bytes)
                if at < len(begun):
                    hole_bytes = begun.pop(at)
                elif new_pieces and size_bytes <= self._piece_bytes:
                    hole_bytes = self._piece_bytes
                    new_pieces -= 1
                else:
                    return False
                count = min(left, hole_bytes // size_bytes)
                insort(begun, hole_bytes - count * size_bytes)
                left -= count
        return True

    def free(self, extents: Sequence[Extent]) -> None:
        """Give extents back for reuse.

        Raises:
            InvariantBroken: one of them is not exactly a live extent, or comes twice; nothing changed.
        """
        for extent in extents:
            if self._live.get(extent.offset_bytes) != extent.size_bytes:
                raise InvariantBroken(f"free of {extent}: no such live extent")
        if len({extent.offset_bytes for extent in extents}) != len(extents):
            raise InvariantBroken(f"free of one extent twice: {list(extents)}")
        for extent in extents:
            del self._live[extent.offset_bytes]
            self._put_back(extent.offset_bytes, extent.size_bytes)

    def retake(self, extents: Sequence[Extent]) -> None:
        """Take exactly these extents again: undoes ``free`` when a trial eviction did not help.

        Raises:
            InvariantBroken: one of them is not inside a hole, is misaligned or empty, or overlaps another;
                nothing changed.
        """
        for extent in extents:
            if extent.size_bytes <= 0 or (extent.offset_bytes | extent.size_bytes) % self._alignment_bytes:
                raise InvariantBroken(f"retake of {extent}: empty, or not aligned to {self._alignment_bytes}")
            if self._hole_around(extent) is None:
                raise InvariantBroken(f"retake of {extent}: not inside a hole")
        for before, after in pairwise(sorted(extents)):
            if after.offset_bytes < before.end_bytes:
                raise InvariantBroken(f"retake of {before} and {after}: they overlap")
        for extent in extents:
            hole = self._hole_around(extent)
            assert hole is not None, "checked above, and what was taken since does not overlap it"
            start = hole.offset_bytes
            self._cut(hole, extent.end_bytes - start)
            if start < extent.offset_bytes:
                self._add_hole(start, extent.offset_bytes - start)
            self._live[extent.offset_bytes] = extent.size_bytes

    def validate(self) -> None:
        """Cross-check everything that is kept here; O(n log n).

        Raises:
            InvariantBroken: the message says what disagrees with what.
        """
        self._validate_indexes()
        end_bytes = 0
        hole_ended = False
        spans = [(extent, True) for extent in self.holes()] + [(extent, False) for extent in self.live()]
        for extent, is_hole in sorted(spans):
            if extent.offset_bytes < end_bytes:
                raise InvariantBroken(f"{extent} overlaps what ends at {end_bytes}")
            if extent.offset_bytes > end_bytes:
                raise InvariantBroken(f"bytes {end_bytes} to {extent.offset_bytes} are neither hole nor live")
            if extent.size_bytes <= 0 or extent.size_bytes % self._alignment_bytes:
                raise InvariantBroken(f"{extent} is empty, or not aligned to {self._alignment_bytes}")
            end_bytes = extent.end_bytes
            if extent.offset_bytes // self._piece_bytes != (end_bytes - 1) // self._piece_bytes:
                raise InvariantBroken(f"{extent} crosses a piece boundary of {self._piece_bytes} bytes")
            if is_hole and hole_ended and extent.offset_bytes % self._piece_bytes:
                raise InvariantBroken(f"the hole {extent} was not merged with the one before it")
            hole_ended = is_hole
        if end_bytes != self._capacity_bytes:
            raise InvariantBroken(f"holes and live extents end at {end_bytes}, not at {self._capacity_bytes}")

    def _validate_indexes(self) -> None:
        holes = list(self.holes())
        if list(self._hole_keys) != sorted(self._key(hole.offset_bytes, hole.size_bytes) for hole in holes):
            raise InvariantBroken("the holes by size are not the holes by start")
        if self._hole_start_by_end != {hole.end_bytes: hole.offset_bytes for hole in holes}:
            raise InvariantBroken("the holes by end are not the holes by start")
        if list(self._hole_ends) != sorted(self._hole_start_by_end):
            raise InvariantBroken("the sorted ends of holes are not the ends of the holes")
        hole_bytes = sum(hole.size_bytes for hole in holes)
        if self._free_bytes != hole_bytes:
            raise InvariantBroken(f"free_bytes is {self._free_bytes}, the holes have {hole_bytes}")

    def _needs(self, plane_sizes_bytes: Sequence[int]) -> tuple[Mapping[int, int], int]:
        """Return how many planes there are of each aligned size, and the sum over all planes."""
        if plane_sizes_bytes is self._asked:
            return self._asked_needs
        num_planes = len(plane_sizes_bytes)
        counts: Mapping[int, int]
        if num_planes and plane_sizes_bytes.count(plane_sizes_bytes[0]) == num_planes:
            counts = {plane_sizes_bytes[0]: num_planes}
        else:
            counts = Counter(plane_sizes_bytes)
        if min(counts, default=0) <= 0:
            raise ValueError(f"plane sizes are {list(plane_sizes_bytes)}; at least one, all above 0")
        aligned: dict[int, int] = {}
        need_bytes = 0
        for size_bytes, count in counts.items():
            aligned_bytes = align_up(size_bytes, self._alignment_bytes)
            aligned[aligned_bytes] = aligned.get(aligned_bytes, 0) + count
            need_bytes += aligned_bytes * count
        if isinstance(plane_sizes_bytes, tuple):  # What cannot change meanwhile.
            self._asked, self._asked_needs = plane_sizes_bytes, (aligned, need_bytes)
        return aligned, need_bytes

    def _may_fit_apart(self, counts: Mapping[int, int]) -> bool:
        """Return whether every plane may find a hole: for planes of one size exactly, for others always."""
        if len(counts) > 1:
            return True
        ((size_bytes, count),) = counts.items()
        return self._num_places(size_bytes, count) >= count

    def _num_places(self, size_bytes: int, enough: int) -> int:
        """Return how many extents of *size_bytes* the holes have room for; at *enough* it stops counting."""
        places = 0
        for key in self._hole_keys.irange(size_bytes << self._offset_bits, reverse=True):
            places += (key >> self._offset_bits) // size_bytes
            if places >= enough:
                break
        return places

    def _cut_planes(self, counts: Mapping[int, int]) -> list[tuple[int, int, int]] | None:
        """Take room for every plane from holes, or nothing.

        What is left of the best hole for a size is, while it holds that size, again the best one. So each
        hole is cut once for as many planes as it holds: one step a hole, not one a plane.

        Returns:
            Runs of planes of one size side by side, as (start, size of one plane, number of planes).
        """
        runs: list[tuple[int, int, int]] = []
        for size_bytes in sorted(counts, reverse=True):
            left = counts[size_bytes]
            while left:
                hole = self._best_hole(size_bytes)
                if hole is None:
                    self._uncut(runs)
                    return None
                count = min(left, hole.size_bytes // size_bytes)
                runs.append((self._cut(hole, count * size_bytes), size_bytes, count))
                left -= count
        return runs

    def _uncut(self, runs: list[tuple[int, int, int]]) -> None:
        for start, size_bytes, count in runs:
            self._put_back(start, size_bytes * count)

    def _key(self, start: int, size_bytes: int) -> int:
        """Return what sorts holes by size, then by offset."""
        return size_bytes << self._offset_bits | start

    def _best_hole(self, size_bytes: int) -> Extent | None:
        """Return the smallest hole of *size_bytes* or more, the lowest on a tie."""
        key = _first_from(self._hole_keys, size_bytes << self._offset_bits)
        if key is None:
            return None
        hole_bytes = key >> self._offset_bits
        return Extent(key - (hole_bytes << self._offset_bits), hole_bytes)

    def _hole_around(self, extent: Extent) -> Extent | None:
        """Return the hole that holds all of *extent*."""
        end = _first_from(self._hole_ends, extent.end_bytes)
        if end is None:
            return None
        start = self._hole_start_by_end[end]
        return Extent(start, end - start) if start <= extent.offset_bytes else None

    def _cut(self, hole: Extent, size_bytes: int) -> int:
        """Take *size_bytes* from the front of *hole* and return where they start."""
        start = hole.offset_bytes
        if size_bytes == hole.size_bytes:
            self._remove_hole(start)
        else:
            self._move_hole_start(start, start + size_bytes)
        return start

    def _put_back(self, start: int, size_bytes: int) -> None:
        """Make a range a hole, merged with the holes beside it that are in the same piece."""
        end = start + size_bytes
        if start % self._piece_bytes and start in self._hole_start_by_end:
            start = self._hole_start_by_end[start]
            self._remove_hole(start)
        if end % self._piece_bytes and end in self._hole_size_by_start:
            self._move_hole_start(end, start)
        else:
            self._add_hole(start, end - start)

    def _add_hole(self, start: int, size_bytes: int) -> None:
        end = start + size_bytes
        self._hole_size_by_start[start] = size_bytes
        self._hole_start_by_end[end] = start
        self._hole_keys.add(self._key(start, size_bytes))
        self._hole_ends.add(end)
        self._free_bytes += size_bytes

    def _remove_hole(self, start: int) -> None:
        size_bytes = self._hole_size_by_start.pop(start)
        end = start + size_bytes
        del self._hole_start_by_end[end]
        self._hole_keys.remove(self._key(start, size_bytes))
        self._hole_ends.remove(end)
        self._free_bytes -= size_bytes

    def _move_hole_start(self, start: int, new_start: int) -> None:
        """Let a hole start elsewhere and end where it did."""
        size_bytes = self._hole_size_by_start.pop(start)
        new_size_bytes = size_bytes + start - new_start
        self._hole_size_by_start[new_start] = new_size_bytes
        self._hole_start_by_end[start + size_bytes] = new_start
        keys, bits = self._hole_keys, self._offset_bits
        keys.remove(size_bytes << bits | start)
        keys.add(new_size_bytes << bits | new_start)
        self._free_bytes += new_size_bytes - size_bytes


def _first_from(numbers: SortedList, least: int) -> int | None:
    """Return the smallest that is not below *least*."""
    # An iterator from there on takes several times as long to make.
    at = numbers.bisect_left(least)
    found: int | None = numbers[at] if at < len(numbers) else None
    return found


class Trial(Protocol):
    """What would fit, were some live extents freed; nothing has changed once it is closed."""

    def free(self, extents: Sequence[Extent]) -> bool:
        """Take it that these are free too, and return whether the slab fits now.

        Raises:
            InvariantBroken: one of them is not exactly a live extent, or was freed here before.
        """

    def close(self) -> None:
        """End it; may be called twice."""


class _FreeingTrial:
    """Frees indeed, and takes all of it again: for planes of several sizes."""

    def __init__(self, slabs: SlabAllocator, plane_sizes_bytes: Sequence[int]) -> None:
        self._slabs = slabs
        self._plane_sizes_bytes = plane_sizes_bytes
        self._freed: list[Sequence[Extent]] = []

    def free(self, extents: Sequence[Extent]) -> bool:
        """See :class:`Trial`."""
        self._slabs.free(extents)
        self._freed.append(extents)
        return self._slabs.could_fit(self._plane_sizes_bytes)

    def close(self) -> None:
        """See :class:`Trial`."""
        while self._freed:
            self._slabs.retake(self._freed.pop())


class _CountingTrial:
    """Counts how many planes of one size the holes would hold: O(1) an extent, and nothing is changed.

    Holes that would be merged are kept here by their outer ends, which hide what the allocator says of
    these ends. Ends inside a merged hole are asked for by nobody: what could touch them is part of it.
    """

    def __init__(self, slabs: SlabAllocator, size_bytes: int, count: int) -> None:
        self._slabs = slabs
        self._size_bytes = size_bytes
        self._wanted = count
        self._places = slabs._num_places(size_bytes, count)
        self._start_by_end: dict[int, int] = {}
        self._end_by_start: dict[int, int] = {}
        self._freed: set[int] = set()

    def free(self, extents: Sequence[Extent]) -> bool:
        """See :class:`Trial`."""
        slabs, size_bytes = self._slabs, self._size_bytes
        for extent in extents:
            start, end = extent.offset_bytes, extent.offset_bytes + extent.size_bytes
            if slabs._live.get(start) != extent.size_bytes or start in self._freed:
                raise InvariantBroken(f"trial free of {extent}: no such live extent")
            self._freed.add(start)
            if start % slabs._piece_bytes:
                before = self._start_by_end.get(start)
                if before is None:
                    before = slabs._hole_start_by_end.get(start, start)
                self._places -= (start - before) // size_bytes
                start = before
            if end % slabs._piece_bytes:
                after = self._end_by_start.get(end)
                if after is None:
                    after = end + slabs._hole_size_by_start.get(end, 0)
                self._places -= (after - end) // size_bytes
                end = after
            self._places += (end - start) // size_bytes
            self._start_by_end[end] = start
            self._end_by_start[start] = end
        return self._places >= self._wanted

    def close(self) -> None:
        """See :class:`Trial`."""
