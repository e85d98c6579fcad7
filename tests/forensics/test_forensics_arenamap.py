"""The arena's map, against the allocator that cut the arena and against a map of bytes."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapd.core.slab import SlabAllocator
from snapd.forensics.arenamap import ArenaMap, ArenaSeries, ArenaStart, Misfit, SlabRow, sample_arenas

UNIT = 256


@pytest.mark.parametrize("piece_units", [0, 64])
@pytest.mark.parametrize("seed", range(4))
def test_the_map_is_the_allocators(seed: int, piece_units: int) -> None:
    """Free bytes and the largest hole agree after each record, with slabs of one extent and of several."""
    rng = random.Random(seed)
    capacity = 512 * UNIT
    slabs = SlabAllocator(capacity, alignment_bytes=UNIT, piece_bytes=piece_units * UNIT)
    arena = ArenaMap(capacity)
    held: dict[int, Any] = {}
    use: dict[int, Any] = {}
    for handle in range(1, 3_000):
        chance = rng.random()
        if held and chance < 0.5:
            chosen = rng.choice(list(held))
            pairs = [(x.offset_bytes, x.size_bytes) for x in held[chosen]]
            if chance < 0.15 and use[chosen] == "live":
                use[chosen] = "quarantined"
                assert arena.quarantine(chosen, pairs) == []
            else:
                slabs.free(held.pop(chosen))
                assert arena.release(chosen, pairs, use.pop(chosen)) == []
        else:
            extents = slabs.allocate([rng.randrange(1, 8 * UNIT)] * rng.choice((1, 4)))
            if extents is None:
                continue
            held[handle], use[handle] = extents, "live"
            assert arena.allocate(handle, [(x.offset_bytes, x.size_bytes) for x in extents]) == []
        assert arena.free_bytes == slabs.free_bytes
        assert arena.num_held == slabs.num_live_extents
        if not piece_units:
            assert arena.largest_hole_bytes == slabs.largest_hole_bytes
    assert [offset for offset, _ in arena.held()] == [extent.offset_bytes for extent in slabs.live()]


class Bytes:
    """An arena of a few units, each with its owner."""

    def __init__(self, units: int) -> None:
        self.owner: list[tuple[int, int, str] | None] = [None] * units  # start, handle, use

    def allocate(self, handle: int, start: int, size: int) -> bool:
        if start < 0 or size <= 0 or start + size > len(self.owner) or any(self.owner[start : start + size]):
            return False
        self.owner[start : start + size] = [(start, handle, "live")] * size
        return True

    def is_extent(self, start: int, size: int) -> bool:
        return size > 0 and [
            index for index, owner in enumerate(self.owner) if owner and owner[0] == start
        ] == list(range(start, start + size))

    def largest_hole(self) -> int:
        text = "".join("x" if owner else "." for owner in self.owner)
        return max(map(len, text.split("x")))


_steps = st.lists(
    st.tuples(
        st.sampled_from(["allocated", "quarantined", "released"]), st.integers(-1, 9), st.integers(0, 4)
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(_steps)
def test_any_records_at_all_leave_a_map_that_holds_together(steps: list[tuple[str, int, int]]) -> None:
    """Extents anywhere: what fits is taken, what does not is a misfit, and the holes are right."""
    arena, model = ArenaMap(8), Bytes(8)
    for handle, (what, start, size) in enumerate(steps, 1):
        if what == "allocated":
            assert (arena.allocate(handle, [(start, size)]) == []) is model.allocate(handle, start, size)
        else:
            is_held = model.is_extent(start, size)
            holder = model.owner[start] if is_held else None
            if what == "quarantined":
                misfits = arena.quarantine(holder[1] if holder else handle, [(start, size)])
                assert (misfits == []) is (holder is not None and holder[2] == "live")
                if holder:
                    model.owner[start : start + size] = [(start, holder[1], "quarantined")] * size
            else:
                misfits = arena.release(holder[1] if holder else handle, [(start, size)], holder[2] if holder else "live")  # type: ignore[arg-type]  # fmt: skip  # noqa: E501
                assert (misfits == []) is (holder is not None)
                if holder:
                    model.owner[start : start + size] = [None] * size
        held = [owner for owner in model.owner if owner]
        assert arena.held_bytes == len(held)
        assert arena.quarantined_bytes == sum(owner[2] == "quarantined" for owner in held)
        assert arena.largest_hole_bytes == model.largest_hole()


def test_misfits_say_who_is_in_the_way() -> None:
    arena = ArenaMap(1_000)
    assert arena.allocate(1, [(0, 100), (200, 100)]) == []
    assert arena.allocate(2, [(50, 100)]) == [Misfit("overlap", 50, 100, 1)]
    assert arena.allocate(2, [(150, 100)]) == [Misfit("overlap", 150, 100, 1)]
    assert arena.allocate(2, [(150, 200)]) == [Misfit("overlap", 150, 200, 1)]
    assert arena.allocate(2, [(950, 51)]) == [Misfit("outside", 950, 51)]
    assert arena.release(2, [(0, 99)], "live") == [Misfit("not-held", 0, 99)]
    assert arena.release(2, [(0, 100)], "quarantined") == [
        Misfit("wrong-handle", 0, 100, 1), Misfit("wrong-use", 0, 100, 1),
    ]  # fmt: skip
    assert arena.holder(0) is None
    assert arena.holder(200) == (300, "live", 1)
    assert arena.quarantine(3, [(700, 10)]) == [Misfit("not-held", 700, 10)]
    assert arena.held_bytes == 100


def test_an_arena_of_unknown_size_learns_what_it_can() -> None:
    """The log's beginning is missing: what is released unseen is no fault, and nothing is said of holes."""
    arena = ArenaMap(None)
    assert arena.release(1, [(0, 100)], "live") == []
    assert arena.quarantine(2, [(100, 50)]) == []
    assert arena.allocate(3, [(120, 10)]) == [Misfit("overlap", 120, 10, 2)]
    assert arena.allocate(3, [(0, 100)]) == []
    assert (arena.live_bytes, arena.quarantined_bytes) == (100, 50)
    assert (arena.free_bytes, arena.largest_hole_bytes) == (None, None)


def test_the_heap_of_holes_does_not_grow_with_the_log() -> None:
    """Entries that no longer count are thrown away."""
    arena = ArenaMap(1 << 20)
    for handle in range(1, 20_000):
        arena.allocate(handle, [(0, 10)])
        arena.allocate(-handle, [(10, 10)])
        arena.release(handle, [(0, 10)], "live")
        arena.release(-handle, [(10, 10)], "live")
    assert arena.largest_hole_bytes == 1 << 20
    assert len(arena._hole_heap) < 1_000


# --- samples -----------------------------------------------------------------------------------


def row(
    ts: float, event: str, handle: int, *extents: tuple[int, int], rank: int = 0, was: str = ""
) -> SlabRow:
    return SlabRow("e", rank, ts, f"slab.{event}", handle, was, extents)


def sampled(*rows: SlabRow, points_max: int = 10, begin: float = 0.0, end: float = 10.0) -> list[ArenaSeries]:
    starts = {("e", rank): ArenaStart("cpu", 1_000, True) for rank in range(2)}
    return sample_arenas(rows, starts, begin, end, points_max)


def test_a_slice_keeps_its_extremes_and_its_end() -> None:
    """A peak that is over before the slice ends is still seen."""
    (series,) = sampled(
        row(1.1, "allocated", 1, (0, 900)),
        row(1.2, "quarantined", 1, (0, 900)),
        row(1.3, "released", 1, (0, 900), was="quarantined"),
        row(1.4, "allocated", 2, (500, 100)),
        row(5.5, "released", 2, (500, 100), was="live"),
    )
    first, last = series.points
    assert (first.live_bytes, first.quarantined_bytes, first.free_bytes) == (100, 0, 900)
    assert (first.held_bytes_max, first.quarantined_bytes_max) == (900, 900)
    assert (first.largest_hole_bytes, first.largest_hole_bytes_min) == (500, 100)
    assert (last.held_bytes_max, last.free_bytes, last.largest_hole_bytes) == (100, 1_000, 1_000)
    assert (round(first.ts), round(last.ts), series.misfits) == (2, 6, 0)


def test_there_are_never_more_points_than_wanted() -> None:
    """However many records there are, and whatever the clock does."""
    rows = []
    for handle in range(1, 500):
        ts = (handle * 37 % 200) / 10 - 5
        rows += [row(ts, "allocated", handle, (0, 10)), row(ts, "released", handle, (0, 10), was="live")]
    (series,) = sampled(*rows, points_max=10)
    assert 1 < len(series.points) <= 11
    assert [point.ts for point in series.points] == sorted(point.ts for point in series.points)


def test_what_is_after_the_time_belongs_to_the_last_slice() -> None:
    (series,) = sampled(*(row(ts, "allocated", ts, (ts * 10, 10)) for ts in range(1, 31)), points_max=10)
    assert len(series.points) == 10
    assert (series.points[-1].ts, series.points[-1].live_bytes) == (pytest.approx(10.0), 300)


def test_what_was_before_the_time_makes_one_point_at_its_beginning() -> None:
    (series,) = sampled(row(1.0, "allocated", 1, (0, 10)), row(8.0, "allocated", 2, (10, 10)), begin=5.0)
    assert (series.points[0].ts, series.points[0].held_bytes_max) == (5.0, 10)
    assert series.points[-1].live_bytes == 20


def test_ranks_have_arenas_of_their_own_and_misfits_are_counted() -> None:
    series = sampled(
        row(1, "allocated", 1, (0, 10)),
        row(1, "allocated", 1, (0, 10), rank=1),
        row(1, "allocated", 2, (5, 10)),
    )
    assert [(arena.rank, arena.misfits, arena.points[0].live_bytes) for arena in series] == [
        (0, 1, 10),
        (1, 0, 10),
    ]
