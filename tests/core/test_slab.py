from collections.abc import Callable, Sequence

import msgspec
import pytest

from snapd.compiling import is_compiled
from snapd.core.slab import Extent, SlabAllocator
from snapd.errors import InvariantBroken

UNIT = 256


def units(offset: int, size: int) -> Extent:
    return Extent(offset * UNIT, size * UNIT)


def arena(capacity: int, *, piece: int = 0) -> SlabAllocator:
    return SlabAllocator(capacity * UNIT, alignment_bytes=UNIT, piece_bytes=piece * UNIT)


def arena_with_holes(*holes: int, capacity: int = 0) -> SlabAllocator:
    """Return a full arena but for holes of these sizes, each followed by one live unit."""
    slabs = arena(capacity or sum(holes) + len(holes))
    taken = [units(0, 0)]
    for size in holes:
        (hole,) = slabs.allocate([size * UNIT]) or ()
        taken.append(hole)
        assert slabs.allocate([UNIT]) is not None
    slabs.free(taken[1:])
    slabs.validate()
    return slabs


def snapshot(slabs: SlabAllocator) -> tuple[object, ...]:
    slabs.validate()
    return (list(slabs.holes()), list(slabs.live()), slabs.free_bytes, slabs.live_bytes)


# Extents.


def test_an_extent_is_ordered_by_address_and_ends_after_its_last_byte() -> None:
    assert Extent(512, 256).end_bytes == 768
    assert sorted([Extent(512, 1), Extent(0, 9), Extent(0, 3)]) == [
        Extent(0, 3),
        Extent(0, 9),
        Extent(512, 1),
    ]


def test_an_extent_is_written_as_two_numbers_and_read_back() -> None:
    assert msgspec.json.encode(Extent(512, 256)) == b"[512,256]"
    assert msgspec.json.decode(b"[512,256]", type=Extent) == Extent(512, 256)


def test_an_extent_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Extent(0, 256).size_bytes = 512  # type: ignore[misc]


# The constructor.


@pytest.mark.parametrize("alignment_bytes", [0, -256, 3, 384])
def test_an_alignment_that_is_no_power_of_two_is_refused(alignment_bytes: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        SlabAllocator(4096, alignment_bytes=alignment_bytes)


@pytest.mark.parametrize("capacity_bytes", [255, 0, -4096])
def test_an_arena_below_one_alignment_is_refused(capacity_bytes: int) -> None:
    with pytest.raises(ValueError, match="capacity_bytes"):
        SlabAllocator(capacity_bytes, alignment_bytes=256)


@pytest.mark.parametrize("piece_bytes", [-256, 1, 255, 300])
def test_a_piece_that_is_no_multiple_of_the_alignment_is_refused(piece_bytes: int) -> None:
    with pytest.raises(ValueError, match="piece_bytes"):
        SlabAllocator(4096, alignment_bytes=256, piece_bytes=piece_bytes)


def test_an_arena_of_one_alignment_holds_one_extent() -> None:
    assert SlabAllocator(256, alignment_bytes=256, piece_bytes=256).allocate([256]) == (Extent(0, 256),)


def test_the_alignment_is_256_bytes_unless_given() -> None:
    assert SlabAllocator(4096).allocate([1]) == (Extent(0, 256),)


def test_the_capacity_is_aligned_down_and_all_of_it_is_free_at_first() -> None:
    slabs = SlabAllocator(4 * UNIT + 255)
    assert slabs.capacity_bytes == slabs.free_bytes == slabs.largest_hole_bytes == 4 * UNIT
    assert slabs.live_bytes == slabs.num_live_extents == 0
    assert list(slabs.holes()) == [units(0, 4)]
    assert list(slabs.live()) == []
    slabs.validate()


def test_an_arena_in_pieces_starts_with_one_hole_a_piece() -> None:
    slabs = arena(10, piece=4)
    assert list(slabs.holes()) == [units(0, 4), units(4, 4), units(8, 2)]
    assert slabs.num_holes == 3
    slabs.validate()


# Sizes.


@pytest.mark.parametrize("plane_sizes_bytes", [(), (0,), (-1,), (256, 0), (256, -256)])
def test_no_plane_and_planes_without_bytes_are_refused(plane_sizes_bytes: Sequence[int]) -> None:
    slabs = arena(8)
    asks: list[Callable[[Sequence[int]], object]] = [slabs.allocate, slabs.could_fit, slabs.fits_ever]
    for ask in asks:
        with pytest.raises(ValueError, match="plane sizes"):
            ask(plane_sizes_bytes)
    assert slabs.free_bytes == 8 * UNIT


def test_every_plane_is_aligned_up_alone() -> None:
    slabs = arena(8)
    assert slabs.allocate([1, 257, 256]) == (units(0, 4),)
    assert slabs.live_bytes == 4 * UNIT


# Contiguous slabs.


def test_a_contiguous_slab_takes_the_smallest_hole_that_holds_it() -> None:
    slabs = arena_with_holes(5, 3, 4)
    assert slabs.allocate([3 * UNIT]) == (units(6, 3),)
    assert slabs.allocate([3 * UNIT]) == (units(10, 3),)
    assert slabs.allocate([3 * UNIT]) == (units(0, 3),)


def test_of_equal_holes_the_lowest_is_taken() -> None:
    slabs = arena_with_holes(3, 3, 3)
    assert slabs.allocate([2 * UNIT]) == (units(0, 2),)
    assert slabs.allocate([2 * UNIT]) == (units(4, 2),)


def test_planes_are_kept_together_when_a_hole_is_large_enough() -> None:
    """Holes of exactly one plane would fit each plane better; one extent is still the better grant."""
    slabs = arena_with_holes(1, 1, 3)
    assert slabs.allocate([UNIT] * 3) == (units(4, 3),)


def test_a_hole_that_is_filled_exactly_is_gone() -> None:
    slabs = arena(4)
    assert slabs.allocate([4 * UNIT]) == (units(0, 4),)
    assert slabs.num_holes == slabs.largest_hole_bytes == slabs.free_bytes == 0
    assert slabs.allocate([1]) is None
    assert not slabs.could_fit([1])
    slabs.validate()


# One extent per plane.


def test_when_only_the_sum_of_the_holes_is_enough_every_plane_gets_an_extent() -> None:
    slabs = arena_with_holes(1, 2, 1)
    assert slabs.could_fit([UNIT] * 4)
    assert slabs.allocate([UNIT] * 4) == (units(0, 1), units(5, 1), units(2, 1), units(3, 1))
    assert slabs.free_bytes == 0
    slabs.validate()


def test_mixed_planes_are_placed_largest_first_and_returned_in_plane_order() -> None:
    slabs = arena_with_holes(3, 4, 1)
    planes = [UNIT, 4 * UNIT, UNIT, UNIT - 5, UNIT]
    assert slabs.allocate(planes) == (units(9, 1), units(4, 4), units(0, 1), units(1, 1), units(2, 1))
    slabs.validate()


def test_largest_first_finds_room_that_plane_order_would_waste() -> None:
    """Placed in plane order, the first plane would take the hole that only the second fits."""
    slabs = arena_with_holes(3, 2)
    assert slabs.allocate([2 * UNIT, 3 * UNIT]) == (units(4, 2), units(0, 3))


def test_a_plane_that_fits_nowhere_undoes_the_ones_placed_before_it() -> None:
    slabs = arena_with_holes(3, 2, 2)
    before = snapshot(slabs)
    assert slabs.allocate([3 * UNIT, 2 * UNIT, UNIT, UNIT]) is not None
    slabs.free([extent for extent in slabs.live() if extent.end_bytes not in (4 * UNIT, 7 * UNIT, 10 * UNIT)])
    assert snapshot(slabs) == before
    assert slabs.allocate([2 * UNIT] * 3 + [UNIT // 2, 3]) is None
    assert snapshot(slabs) == before


def test_a_one_plane_slab_is_never_split() -> None:
    slabs = arena_with_holes(2, 2)
    before = snapshot(slabs)
    assert slabs.allocate([3 * UNIT]) is None
    assert not slabs.could_fit([3 * UNIT])
    assert snapshot(slabs) == before


@pytest.mark.skipif(is_compiled(), reason="what is compiled cannot be replaced")
def test_more_than_all_free_bytes_is_refused_without_a_look_at_any_hole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slabs = arena_with_holes(2, 2)
    monkeypatch.delattr(SlabAllocator, "_best_hole")
    assert slabs.allocate([UNIT] * 5) is None
    assert not slabs.could_fit([UNIT] * 5)
    with pytest.raises(AttributeError):
        slabs.allocate([UNIT] * 4)


@pytest.mark.skipif(is_compiled(), reason="what is compiled cannot be replaced")
def test_could_fit_knows_from_the_largest_hole_alone_that_a_contiguous_slab_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slabs = arena_with_holes(2, 3)
    monkeypatch.delattr(SlabAllocator, "_best_hole")
    assert slabs.could_fit([UNIT] * 3)
    with pytest.raises(AttributeError):
        slabs.could_fit([UNIT, UNIT, 2 * UNIT])


def test_could_fit_changes_nothing_whatever_it_answers() -> None:
    slabs = arena_with_holes(2, 1, 3)
    before = snapshot(slabs)
    assert slabs.could_fit([UNIT] * 2)
    assert slabs.could_fit([UNIT] * 6)
    assert slabs.could_fit([2 * UNIT, 3 * UNIT, UNIT])
    assert not slabs.could_fit([2 * UNIT] * 3)
    assert snapshot(slabs) == before


# Pieces.


def test_no_extent_crosses_a_piece_boundary() -> None:
    slabs = arena(8, piece=4)
    assert slabs.allocate([5 * UNIT]) is None
    assert slabs.allocate([3 * UNIT]) == (units(0, 3),)
    assert slabs.allocate([2 * UNIT]) == (units(4, 2),)
    assert slabs.allocate([UNIT] * 3) == (units(3, 1), units(6, 1), units(7, 1))
    slabs.validate()


def test_holes_on_both_sides_of_a_piece_boundary_stay_two() -> None:
    slabs = arena(8, piece=4)
    first, second = slabs.allocate([4 * UNIT]), slabs.allocate([4 * UNIT])
    assert first is not None and second is not None
    slabs.free(second)
    slabs.free(first)
    assert list(slabs.holes()) == [units(0, 4), units(4, 4)]
    slabs.validate()
    slabs.retake(first)
    slabs.retake(second)
    slabs.free(first)
    slabs.free(second)
    assert list(slabs.holes()) == [units(0, 4), units(4, 4)]


def test_a_piece_larger_than_the_arena_is_as_no_pieces() -> None:
    slabs = arena(6, piece=8)
    assert slabs.fits_ever([6 * UNIT])
    assert not slabs.fits_ever([7 * UNIT])
    assert slabs.allocate([6 * UNIT]) == (units(0, 6),)
    slabs.free([units(0, 6)])
    slabs.validate()


# Would it fit at all.


@pytest.mark.parametrize(
    ("capacity", "piece", "planes", "answer"),
    [
        (8, 0, [8], True),
        (8, 0, [9], False),
        (8, 0, [1] * 8, True),
        (8, 0, [1] * 9, False),
        (8, 4, [5], False),
        (8, 4, [4, 4], True),
        (8, 4, [2, 2, 2, 2], True),
        (8, 4, [3, 3, 1, 1], True),
        (8, 4, [3, 3, 2], False),
        (8, 4, [3, 3, 3], False),
        (10, 4, [4, 4, 2], True),
        (10, 4, [4, 2, 4], True),
        (10, 4, [2] * 5, True),
        (10, 4, [3, 3, 2, 1, 1], True),
        (10, 4, [3, 3, 3], False),
        (3, 4, [3], True),
        (3, 4, [4], False),
    ],
)
def test_fits_ever_is_what_an_empty_arena_answers(
    capacity: int, piece: int, planes: list[int], answer: bool
) -> None:
    plane_sizes_bytes = [size * UNIT - 1 for size in planes]
    slabs = arena(capacity, piece=piece)
    assert slabs.fits_ever(plane_sizes_bytes) is answer
    assert (arena(capacity, piece=piece).allocate(plane_sizes_bytes) is not None) is answer
    while slabs.allocate([UNIT]) is not None:
        pass
    assert slabs.fits_ever(plane_sizes_bytes) is answer


@pytest.mark.skipif(is_compiled(), reason="what is compiled cannot be replaced")
def test_a_plane_larger_than_a_piece_is_refused_without_a_look_at_the_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slabs = arena(8, piece=2)
    monkeypatch.delattr("snapd.core.slab.insort")
    assert not slabs.fits_ever([3 * UNIT, UNIT])
    with pytest.raises(NameError):
        slabs.fits_ever([2 * UNIT, UNIT])


# Free.


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_neighbours_merge_in_whatever_order_they_are_freed(order: tuple[int, ...]) -> None:
    slabs = arena(6)
    extents = [units(0, 2), units(2, 2), units(4, 2)]
    for extent in extents:
        assert slabs.allocate([2 * UNIT]) == (extent,)
    for index in order:
        slabs.free([extents[index]])
        slabs.validate()
    assert list(slabs.holes()) == [units(0, 6)]
    assert slabs.live_bytes == slabs.num_live_extents == 0


@pytest.mark.parametrize(
    "wrong",
    [
        [units(6, 1)],  # never given out
        [units(0, 1)],  # a part of a live extent
        [units(0, 3)],  # more than a live extent
        [units(1, 1)],  # from its middle
        [units(0, 2), units(0, 2)],  # twice in one call
        [units(2, 2), units(0, 2), units(2, 2)],
        [units(0, 2), units(6, 1)],  # one right, one wrong
        [units(0, 4)],  # two live extents as one
    ],
)
def test_freeing_what_is_not_exactly_live_changes_nothing(wrong: list[Extent]) -> None:
    slabs = arena(8)
    assert slabs.allocate([2 * UNIT]) == (units(0, 2),)
    assert slabs.allocate([2 * UNIT]) == (units(2, 2),)
    before = snapshot(slabs)
    with pytest.raises(InvariantBroken, match="free of"):
        slabs.free(wrong)
    assert snapshot(slabs) == before


def test_a_second_free_is_a_broken_invariant() -> None:
    slabs = arena(8)
    extents = slabs.allocate([2 * UNIT])
    assert extents is not None
    slabs.free(extents)
    with pytest.raises(InvariantBroken, match="no such live extent"):
        slabs.free(extents)
    slabs.validate()


def test_a_scattered_slab_is_freed_in_one_call() -> None:
    slabs = arena_with_holes(1, 2, 1)
    before = snapshot(slabs)
    extents = slabs.allocate([UNIT] * 4)
    assert extents is not None and len(extents) == 4
    slabs.free(extents)
    assert snapshot(slabs) == before


# Retake.


def test_retaking_what_was_freed_restores_the_arena_exactly() -> None:
    slabs = arena(12)
    extents = [units(2 * index, 2) for index in range(6)]
    for extent in extents:
        assert slabs.allocate([2 * UNIT]) == (extent,)
    slabs.free([extents[5]])
    before = snapshot(slabs)
    victims = [extents[3], extents[0], extents[1], extents[4]]
    slabs.free(victims)
    slabs.retake(victims)
    assert snapshot(slabs) == before


@pytest.mark.parametrize(
    ("extent", "holes"),
    [
        (units(0, 2), [units(2, 6)]),  # the front of a hole
        (units(3, 2), [units(0, 3), units(5, 3)]),  # its middle
        (units(6, 2), [units(0, 6)]),  # its end
        (units(0, 8), []),  # all of it
    ],
)
def test_an_extent_is_retaken_from_anywhere_in_a_hole(extent: Extent, holes: list[Extent]) -> None:
    slabs = arena(8)
    slabs.retake([extent])
    assert list(slabs.holes()) == holes
    assert list(slabs.live()) == [extent]
    slabs.validate()


@pytest.mark.parametrize(
    "wrong",
    [
        [units(0, 1)],  # live
        [units(1, 2)],  # starts live
        [units(5, 3)],  # ends in the next live extent
        [units(1, 6)],  # around a hole
        [units(7, 2)],  # crosses a piece
        [units(10, 2)],  # ends outside
        [units(12, 1)],  # is outside
        [Extent(-UNIT, UNIT)],
        [Extent(3 * UNIT, 0)],  # empty
        [Extent(4 * UNIT, -UNIT)],
        [Extent(3 * UNIT, 100)],  # misaligned size
        [Extent(3 * UNIT + 100, UNIT)],  # misaligned offset
        [units(3, 1), units(3, 1)],  # twice
        [units(4, 2), units(3, 2)],  # overlapping
        [units(3, 1), units(0, 1)],  # one right, one wrong
    ],
)
def test_retaking_what_is_not_wholly_free_changes_nothing(wrong: list[Extent]) -> None:
    """Live: 0 to 2 and 6 to 7 of 11 units in pieces of 8."""
    slabs = arena(11, piece=8)
    slabs.retake([units(0, 2), units(6, 1)])
    before = snapshot(slabs)
    with pytest.raises(InvariantBroken, match="retake of"):
        slabs.retake(wrong)
    assert snapshot(slabs) == before


# Validate sees each kind of damage.


def add_hole(slabs: SlabAllocator, extent: Extent) -> None:
    slabs._add_hole(extent.offset_bytes, extent.size_bytes)


def add_live(slabs: SlabAllocator, extent: Extent) -> None:
    slabs._live[extent.offset_bytes] = extent.size_bytes


def make_last_hole_two(slabs: SlabAllocator) -> None:
    slabs._remove_hole(4 * UNIT)
    add_hole(slabs, units(4, 1))
    add_hole(slabs, units(5, 3))


def make_live_extent_cross_pieces(slabs: SlabAllocator) -> None:
    slabs._remove_hole(4 * UNIT)
    add_live(slabs, units(2, 6))


def misalign_live_extent(slabs: SlabAllocator) -> None:
    slabs._move_hole_start(4 * UNIT, 4 * UNIT + 100)
    slabs._live[2 * UNIT] = 2 * UNIT + 100


def swap_hole_ends(slabs: SlabAllocator) -> None:
    slabs._hole_start_by_end = {2 * UNIT: 4 * UNIT, 8 * UNIT: 0}


def drift_sorted_ends(slabs: SlabAllocator) -> None:
    slabs._hole_ends.remove(2 * UNIT)
    slabs._hole_ends.add(3 * UNIT)


def drift_sorted_keys(slabs: SlabAllocator) -> None:
    slabs._hole_keys.remove(slabs._key(0, 2 * UNIT))
    slabs._hole_keys.add(slabs._key(0, 3 * UNIT))


def drift_free_bytes(slabs: SlabAllocator) -> None:
    slabs._free_bytes += UNIT


def cut_off_the_end(slabs: SlabAllocator) -> None:
    slabs._remove_hole(4 * UNIT)


def forget_live_extent(slabs: SlabAllocator) -> None:
    slabs._live.clear()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda slabs: add_live(slabs, units(5, 1)), "overlaps what ends at"),
        (lambda slabs: add_live(slabs, units(0, 1)), "overlaps what ends at"),
        (lambda slabs: add_hole(slabs, units(3, 1)), "overlaps what ends at"),
        (forget_live_extent, "neither hole nor live"),
        (lambda slabs: add_live(slabs, units(8, 1)), "not at"),
        (cut_off_the_end, "not at"),
        (lambda slabs: add_live(slabs, units(0, 0)), "is empty"),
        (lambda slabs: add_live(slabs, units(8, -1)), "is empty"),
        (misalign_live_extent, "not aligned"),
        (make_live_extent_cross_pieces, "crosses a piece"),
        (make_last_hole_two, "not merged"),
        (drift_sorted_keys, "by size"),
        (swap_hole_ends, "by end"),
        (drift_sorted_ends, "sorted ends"),
        (drift_free_bytes, "free_bytes"),
    ],
)
def test_validate_sees_damage(damage: Callable[[SlabAllocator], None], message: str) -> None:
    """Undamaged: a hole 0 to 2, live 2 to 4, a hole 4 to 8, in pieces of 4."""
    slabs = arena(8, piece=4)
    slabs.retake([units(2, 2)])
    slabs.validate()
    damage(slabs)
    with pytest.raises(InvariantBroken, match=message):
        slabs.validate()


def test_validate_accepts_two_holes_that_meet_at_a_piece_boundary() -> None:
    slabs = arena(8, piece=4)
    slabs.retake([units(0, 2)])
    assert list(slabs.holes()) == [units(2, 2), units(4, 4)]
    slabs.validate()


@pytest.mark.parametrize(("plane_bytes", "num_planes"), [(0, 3), (-1, 3), (UNIT, 0), (UNIT, -1)])
def test_planes_of_one_size_must_be_there_and_have_one(plane_bytes: int, num_planes: int) -> None:
    slabs = arena_with_holes(5)
    with pytest.raises(ValueError, match="at least one, all above 0"):
        slabs.allocate_even(plane_bytes, num_planes)
    assert slabs.free_bytes == 5 * UNIT


@pytest.mark.skipif(is_compiled(), reason="what is compiled cannot be replaced")
def test_planes_of_one_size_that_do_not_fit_are_refused_before_a_hole_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slabs = arena_with_holes(3, 3)
    monkeypatch.delattr(SlabAllocator, "_cut_planes")
    assert slabs.free_bytes == 6 * UNIT
    assert slabs.allocate([2 * UNIT] * 3) is None
    with pytest.raises(AttributeError):
        slabs.allocate([2 * UNIT] * 2)
