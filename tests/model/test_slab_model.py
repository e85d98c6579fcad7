"""The slab allocator against a naive model that keeps one list entry per unit of the arena."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from snapd.core.slab import Extent, SlabAllocator
from snapd.errors import InvariantBroken

UNIT = 16
UNITS_MAX = 40

# Sizes in bytes, not in units: most are not aligned.
plane_lists = st.one_of(
    st.builds(lambda size, count: [size] * count, st.integers(1, 4 * UNIT), st.integers(1, 12)),
    st.lists(st.integers(1, 6 * UNIT), min_size=1, max_size=6),
)


class NaiveArena:
    """One boolean a unit, scanned from the front every time."""

    def __init__(self, num_units: int, piece_units: int) -> None:
        self.taken = [False] * num_units
        self.piece_units = piece_units or num_units

    def holes(self) -> list[tuple[int, int]]:
        """Return (start, size) of every hole in address order, in units."""
        found: list[tuple[int, int]] = []
        for unit, taken in enumerate(self.taken):
            if taken:
                continue
            if found and sum(found[-1]) == unit and unit % self.piece_units:
                found[-1] = (found[-1][0], found[-1][1] + 1)
            else:
                found.append((unit, 1))
        return found

    def best_hole(self, size: int) -> int | None:
        fitting = [(hole_size, start) for start, hole_size in self.holes() if hole_size >= size]
        return min(fitting)[1] if fitting else None

    def mark(self, start: int, size: int, taken: bool) -> None:
        for unit in range(start, start + size):
            assert self.taken[unit] is not taken
            self.taken[unit] = taken

    def allocate(self, planes: Sequence[int]) -> list[tuple[int, int]] | None:
        """Place planes of these units one by one; (start, size) in plane order."""
        start = self.best_hole(sum(planes))
        if start is not None:
            self.mark(start, sum(planes), True)
            return [(start, sum(planes))]
        before = self.taken.copy()
        placed: dict[int, tuple[int, int]] = {}
        for plane_index in sorted(range(len(planes)), key=lambda index: (-planes[index], index)):
            start = self.best_hole(planes[plane_index])
            if start is None:
                self.taken = before
                return None
            self.mark(start, planes[plane_index], True)
            placed[plane_index] = (start, planes[plane_index])
        return [placed[plane_index] for plane_index in range(len(planes))]


class SlabMachine(RuleBasedStateMachine):
    """Every operation on both; what they hold must be equal after every step."""

    @initialize(
        num_units=st.integers(1, UNITS_MAX),
        piece_units=st.sampled_from([0, 0, 3, 7, 16]),
        taken=st.sets(st.integers(0, UNITS_MAX - 1), max_size=UNITS_MAX // 2),
    )
    def start(self, num_units: int, piece_units: int, taken: set[int]) -> None:
        """Start with some units taken here and there, so that holes of all sizes come up soon."""
        self.num_units, self.piece_units = num_units, piece_units
        self.naive = NaiveArena(num_units, piece_units)
        self.slabs = self.fresh()
        self.live: list[tuple[Extent, ...]] = []
        for unit in sorted(taken):
            self.retake_anything(unit, 1)

    def fresh(self) -> SlabAllocator:
        return SlabAllocator(
            self.num_units * UNIT + 5, alignment_bytes=UNIT, piece_bytes=self.piece_units * UNIT
        )

    @rule(plane_sizes_bytes=plane_lists, says_even=st.booleans())
    def allocate(self, plane_sizes_bytes: list[int], says_even: bool) -> None:
        planes = [-(-size_bytes // UNIT) for size_bytes in plane_sizes_bytes]
        holes = [size for _, size in self.naive.holes()]
        could_fit = self.slabs.could_fit(plane_sizes_bytes)
        assert self.as_units() == self.naive.holes(), "could_fit changed something"
        if says_even and len(set(plane_sizes_bytes)) == 1:
            extents = self.slabs.allocate_even(plane_sizes_bytes[0], len(plane_sizes_bytes))
        else:
            extents = self.slabs.allocate(plane_sizes_bytes)

        wanted = self.naive.allocate(planes)
        assert could_fit is (extents is not None)
        if extents is not None:
            self.live.append(extents)
        got = extents and [(extent.offset_bytes // UNIT, extent.size_bytes // UNIT) for extent in extents]
        assert got == wanted
        # What the model's own placement does not prove.
        if max(holes, default=0) >= sum(planes):
            assert extents is not None and len(extents) == 1
        elif len(set(planes)) == 1:
            room = sum(hole // planes[0] for hole in holes)
            assert (extents is not None) is (room >= len(planes))
            assert extents is None or len(extents) == len(planes)

    @rule(plane_sizes_bytes=plane_lists)
    def ask_fits_ever(self, plane_sizes_bytes: list[int]) -> None:
        fits = self.fresh().allocate(plane_sizes_bytes) is not None
        assert self.slabs.fits_ever(plane_sizes_bytes) is fits

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        extents = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.slabs.free(data.draw(st.permutations(extents)))
        for extent in extents:
            self.naive.mark(extent.offset_bytes // UNIT, extent.size_bytes // UNIT, False)
        with pytest.raises(InvariantBroken):
            self.slabs.free(extents)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free_on_trial(self, data: st.DataObject) -> None:
        """Freeing some slabs and retaking them leaves everything as it was."""
        victims = data.draw(st.lists(st.sampled_from(self.live), min_size=1, unique=True))
        extents = [extent for victim in victims for extent in victim]
        for victim in victims:
            self.slabs.free(victim)
            self.slabs.validate()
        self.slabs.retake(data.draw(st.permutations(extents)))
        with pytest.raises(InvariantBroken):
            self.slabs.retake(extents[-1:])

    @rule(start=st.integers(-1, UNITS_MAX), size=st.integers(-1, UNITS_MAX), with_live=st.booleans())
    def free_anything(self, start: int, size: int, with_live: bool) -> None:
        """Only exactly a live extent can be freed; a right one beside a wrong one is kept."""
        extent = Extent(start * UNIT, size * UNIT)
        if any(extent in extents for extents in self.live):
            return
        with pytest.raises(InvariantBroken):
            self.slabs.free([*(self.live[0] if with_live and self.live else ()), extent])

    @rule(start=st.integers(-1, UNITS_MAX), size=st.integers(-1, UNITS_MAX))
    def retake(self, start: int, size: int) -> None:
        self.retake_anything(start, size)

    def retake_anything(self, start: int, size: int) -> None:
        """Whatever lies in one hole can be taken, and nothing else."""
        extent = Extent(start * UNIT, size * UNIT)
        inside = size > 0 and any(
            hole_start <= start and start + size <= hole_start + hole_size
            for hole_start, hole_size in self.naive.holes()
        )
        if inside:
            self.slabs.retake([extent])
            self.naive.mark(start, size, True)
            self.live.append((extent,))
        else:
            with pytest.raises(InvariantBroken):
                self.slabs.retake([extent])

    def as_units(self) -> list[tuple[int, int]]:
        return [(hole.offset_bytes // UNIT, hole.size_bytes // UNIT) for hole in self.slabs.holes()]

    @invariant()
    def agree(self) -> None:
        self.slabs.validate()
        holes = self.naive.holes()
        assert self.as_units() == holes
        assert list(self.slabs.live()) == sorted(extent for extents in self.live for extent in extents)
        assert self.slabs.num_holes == len(holes)
        assert self.slabs.num_live_extents == sum(map(len, self.live))
        assert self.slabs.largest_hole_bytes == max((size for _, size in holes), default=0) * UNIT
        assert self.slabs.free_bytes == self.naive.taken.count(False) * UNIT
        assert self.slabs.live_bytes == self.naive.taken.count(True) * UNIT
        assert self.slabs.capacity_bytes == self.num_units * UNIT


TestSlabs = SlabMachine.TestCase
TestSlabs.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
