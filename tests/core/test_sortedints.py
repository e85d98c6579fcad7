"""Integers in order: as a sorted list has them, whatever was done."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapd.core.sortedints import SortedInts


def check(kept: SortedInts, values: set[int]) -> None:
    """Hold what is kept against the plain set, and look that no block is empty, too long or out of place."""
    wanted = sorted(values)
    assert list(kept) == wanted
    assert len(kept) == len(wanted)
    assert kept.last() == max(values, default=None)
    assert kept._lasts == [block[-1] for block in kept._blocks]
    assert all(0 < len(block) <= kept._block_max for block in kept._blocks)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(-5, 80) | st.integers(0, 1 << 80)), max_size=150),
    st.integers(2, 9),
    st.integers(0, 90),
)
def test_they_are_as_in_a_sorted_list(steps: list[tuple[bool, int]], block_max: int, least: int) -> None:
    kept, values = SortedInts(block_max), set[int]()
    for is_added, value in steps:
        if is_added and value not in values:
            kept.add(value)
            values.add(value)
        elif not is_added and value in values:
            kept.remove(value)
            values.remove(value)
        elif not is_added:
            with pytest.raises(ValueError, match="not there"):
                kept.remove(value)
        check(kept, values)
    assert kept.first_from(least) == min((value for value in values if value >= least), default=None)
    assert list(kept.down_to(least)) == sorted((v for v in values if v >= least), reverse=True)


@pytest.mark.parametrize("step", [1, -1])
def test_blocks_that_have_emptied_are_put_together(step: int) -> None:
    """Else very many holes, few of them left, would leave very many blocks, whichever end they go from."""
    kept = SortedInts()
    for value in range(20_000):
        kept.add(value)
    full = len(kept._blocks)
    assert full > 20_000 // kept._block_max
    for value in range(20_000)[::step]:
        if value % 100:
            kept.remove(value)
    assert list(kept) == list(range(0, 20_000, 100))
    check(kept, set(range(0, 20_000, 100)))
    assert len(kept._blocks) <= 3


def test_a_block_that_is_full_is_not_put_to_another() -> None:
    kept = SortedInts(8)
    for value in range(12):
        kept.add(value)
    assert [len(block) for block in kept._blocks] == [4, 8]
    for value in range(3):
        kept.remove(value)
    check(kept, set(range(3, 12)))


def test_of_none_there_is_no_first_and_no_last() -> None:
    kept = SortedInts()
    assert (len(kept), list(kept), kept.first_from(0), kept.last(), list(kept.down_to(0))) == (
        0,
        [],
        None,
        None,
        [],
    )
    with pytest.raises(ValueError, match="7 is not there"):
        kept.remove(7)
