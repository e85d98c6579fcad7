"""The ledger: pages are told once, and told to be gone once, however snapshots share them."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapd.errors import InvariantBroken
from snapd.kvevents.ledger import Ledger

HASHES = st.lists(st.integers(-8, 8), min_size=1, max_size=12)


@given(st.lists(st.one_of(HASHES, st.integers(0, 20)), max_size=40))
def test_whoever_applies_it_holds_exactly_the_pages_of_the_snapshots(steps):
    ledger = Ledger(pages_max=10_000)
    naive: dict[int, list[int]] = {}
    told: set[int] = set()
    for handle, step in enumerate(steps):
        if isinstance(step, list):
            new = [step[index] for part in ledger.add(handle, step) for index in part]
            assert len(new) == len(set(new)) and told.isdisjoint(new)
            told |= set(new)
            naive[handle] = step
        else:
            handle = list(naive)[step % len(naive)] if naive else step
            gone = ledger.drop(handle)
            assert len(gone) == len(set(gone)) and told.issuperset(gone)
            told -= set(gone)
            naive.pop(handle, None)
        assert told == {number for pages in naive.values() for number in pages}
        assert ledger.num_pages == sum(map(len, naive.values()))
        assert (ledger.num_snapshots, ledger.num_told) == (len(naive), len(told))
    assert Counter(ledger.clear()) == Counter(told)
    assert (ledger.num_pages, ledger.num_snapshots, ledger.num_told) == (0, 0, 0)


def test_new_pages_are_ranges_of_neighbours():
    ledger = Ledger(pages_max=100)
    assert ledger.add(1, [3, 4]) == [range(2)]
    assert ledger.add(2, [1, 2, 3, 4, 5, 6]) == [range(2), range(4, 6)]
    assert ledger.add(3, [1, 2]) == []


def test_pages_go_deepest_first():
    ledger = Ledger(pages_max=100)
    ledger.add(1, [1, 2, 3])
    assert ledger.drop(1) == [3, 2, 1]


def test_pages_are_counted_for_every_snapshot_that_has_them():
    ledger = Ledger(pages_max=4)
    ledger.add(1, [1, 2])
    assert ledger.has_room(2) and not ledger.has_room(3)
    ledger.add(2, [1, 2])
    assert not ledger.has_room(1)
    with pytest.raises(InvariantBroken):
        ledger.add(3, [1])
    ledger.drop(1)
    assert ledger.has_room(2)


def test_a_snapshot_is_held_once():
    ledger = Ledger(pages_max=4)
    ledger.add(1, [1])
    with pytest.raises(InvariantBroken):
        ledger.add(1, [2])
    assert ledger.drop(1) == [1]
    assert ledger.drop(1) == []
