"""What would fit, were other extents freed: counted, or tried and undone."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapd.core.buffer import Buffer
from snapd.core.slab import Extent, SlabAllocator
from snapd.errors import InvariantBroken

UNIT = 256
CAPACITY = 40

pieces = st.sampled_from([0, 5, 8])
live_slabs = st.lists(st.integers(1, 5), min_size=1, max_size=20)
one_size = st.tuples(st.integers(1, 4), st.integers(1, 8)).map(lambda both: (both[0] * UNIT - 3,) * both[1])
any_sizes = st.lists(st.integers(1, 4 * UNIT), min_size=1, max_size=6).map(tuple)


def filled(piece: int, sizes: list[int]) -> tuple[SlabAllocator, list[tuple[Extent, ...]]]:
    slabs = SlabAllocator(CAPACITY * UNIT, alignment_bytes=UNIT, piece_bytes=piece * UNIT)
    taken = [slabs.allocate((size * UNIT,)) for size in sizes if size <= (piece or CAPACITY)]
    return slabs, [extents for extents in taken if extents is not None]


def snapshot(slabs: SlabAllocator) -> tuple[object, ...]:
    slabs.validate()
    return (list(slabs.holes()), list(slabs.live()))


@settings(max_examples=400, deadline=None)
@given(pieces, live_slabs, st.one_of(one_size, any_sizes), st.randoms(use_true_random=False), st.data())
def test_a_trial_says_what_freeing_indeed_would_and_changes_nothing(
    piece: int, sizes: list[int], wanted: tuple[int, ...], rng, data: st.DataObject
) -> None:
    slabs, live = filled(piece, sizes)
    twin, _ = filled(piece, sizes)
    rng.shuffle(live)
    before = snapshot(slabs)
    trial = slabs.trial(wanted)
    for extents in live[: data.draw(st.integers(0, len(live)))]:
        twin.free(extents)
        assert trial.free(extents) is twin.could_fit(wanted) is (twin.allocate(wanted) is not None)
        twin, _ = filled(piece, sizes)
        for freed in live[: live.index(extents) + 1]:
            twin.free(freed)
    trial.close()
    trial.close()
    assert snapshot(slabs) == before


@settings(max_examples=300, deadline=None)
@given(pieces, live_slabs, one_size, st.data())
def test_what_fits_beside_the_kept_is_what_fits_when_all_else_is_free(
    piece: int, sizes: list[int], wanted: tuple[int, ...], data: st.DataObject
) -> None:
    slabs, live = filled(piece, sizes)
    kept = [extents for extents in live if data.draw(st.booleans())]
    told = slabs.fits_beside([extent for extents in kept for extent in extents], wanted)
    for extents in live:
        if extents not in kept:
            slabs.free(extents)
    assert told is slabs.could_fit(wanted)


def test_whether_planes_of_several_sizes_fit_beside_the_kept_is_not_known_without_trying() -> None:
    slabs, live = filled(0, [5, 5])
    assert slabs.fits_beside([extent for extents in live for extent in extents], (99 * UNIT, UNIT))


@pytest.mark.parametrize("wanted", [(UNIT, UNIT), (UNIT, 2 * UNIT)], ids=["counted", "tried"])
def test_a_trial_refuses_what_is_not_live_or_was_freed_in_it(wanted: tuple[int, ...]) -> None:
    slabs, ((first,), (second,)) = filled(0, [20, 20])
    trial = slabs.trial(wanted)
    trial.free((first,))
    for wrong in (first, Extent(second.offset_bytes, UNIT), Extent(second.offset_bytes + UNIT, UNIT)):
        with pytest.raises(InvariantBroken):
            trial.free((wrong,))
    trial.close()
    assert list(slabs.live()) == [first, second]


def test_a_long_walk_that_cannot_help_is_given_up_early() -> None:
    """Every second slab is kept: the sums would do, and no hole will ever hold the large plane."""
    buffer = Buffer({0: SlabAllocator(2_000 * UNIT)}, UNIT)
    extents = {handle: buffer.allocate((0,), (UNIT,)) for handle in range(2_000)}
    kept = range(1, 2_000, 2)
    walked = []

    def walk() -> Iterator[int]:
        for handle in range(0, 2_000, 2):
            walked.append(handle)
            yield handle

    def plan(wanted_units: int) -> list[int] | None:
        walked.clear()
        return buffer.plan_eviction(
            (0,),
            (wanted_units * UNIT,) * 2,
            walk(),
            extents.__getitem__,
            lambda rank: 1_000 * UNIT,
            lambda: kept,
        )

    assert plan(2) is None and len(walked) < 100
    assert plan(1) == [0, 2]


def test_a_long_walk_that_does_help_goes_on() -> None:
    buffer = Buffer({0: SlabAllocator(500 * UNIT)}, UNIT)
    extents = {handle: buffer.allocate((0,), (UNIT,)) for handle in range(500)}
    plan = buffer.plan_eviction(
        (0,), (400 * UNIT,), range(500), extents.__getitem__, lambda rank: 500 * UNIT, lambda: ()
    )
    assert plan == list(range(400))


def test_what_is_in_quarantine_is_kept_too() -> None:
    from snapd.core.buffer import Quarantined

    buffer = Buffer({0: SlabAllocator(400 * UNIT)}, UNIT)
    extents = {handle: buffer.allocate((0,), (UNIT,)) for handle in range(400)}
    for handle in range(1, 400, 2):
        item = Quarantined("s", UNIT, extents[handle][0], 0, 1, "undrained")
        buffer.put_in_quarantine(handle, 0, item)
    walked = []
    victims = (walked.append(handle) or handle for handle in range(0, 400, 2))
    plan = buffer.plan_eviction(
        (0,), (2 * UNIT,), victims, extents.__getitem__, lambda rank: 200 * UNIT, lambda: ()
    )
    assert plan is None and len(walked) < 100


def test_a_trial_merges_nothing_over_the_border_of_a_piece() -> None:
    """The last unit of one piece and the first of the next are free: no hole of two units."""
    for order in ((0, 1), (1, 0)):
        slabs, live = filled(4, [3, 1, 1, 3])
        beside = [live[1], live[2]]
        assert [extents[0].offset_bytes // UNIT for extents in beside] == [3, 4]
        slabs.retake(list(slabs.holes()))
        trial = slabs.trial((2 * UNIT,))
        assert not trial.free(beside[order[0]])
        assert not trial.free(beside[order[1]])
        trial.close()


def test_a_hole_in_the_next_piece_is_not_part_of_what_a_trial_frees() -> None:
    slabs, live = filled(4, [3, 1, 1, 3])
    slabs.retake(list(slabs.holes()))
    slabs.free(live[2])
    assert not slabs.trial((2 * UNIT,)).free(live[1])


def test_sizes_in_a_list_that_was_changed_are_looked_at_anew() -> None:
    slabs, _ = filled(0, [38])
    sizes = [UNIT]
    assert slabs.could_fit(sizes)
    sizes[0] = 3 * UNIT
    assert not slabs.could_fit(sizes)
