import pytest

from snapd.core.lru import LruIndex
from snapd.errors import InvariantBroken


def index_of(*keys: str) -> LruIndex[str]:
    index: LruIndex[str] = LruIndex()
    for size_bytes, key in enumerate(keys, start=1):
        index.touch(key, {0: size_bytes})
    return index


def test_keys_come_out_in_the_order_of_their_last_touch() -> None:
    index = index_of("a", "b", "c")
    index.touch("a", {0: 1})
    assert list(index.oldest_first()) == ["b", "c", "a"]
    assert index.oldest() == "b"
    assert len(index) == 3
    index.validate()


def test_a_discarded_key_is_gone_and_the_others_keep_their_order() -> None:
    index = index_of("a", "b", "c")
    index.discard("a")
    assert "a" not in index
    assert "b" in index
    assert list(index.oldest_first()) == ["b", "c"]
    assert index.oldest() == "b"
    index.validate()


def test_discarding_an_unknown_key_changes_nothing() -> None:
    index = index_of("a")
    index.discard("b")
    assert list(index.oldest_first()) == ["a"]
    assert index.evictable_bytes(0) == 1
    index.validate()


def test_an_empty_index_has_no_oldest_key_and_no_bytes() -> None:
    index = index_of()
    assert index.oldest() is None
    assert list(index.oldest_first()) == []
    assert len(index) == 0
    assert index.evictable_bytes(0) == 0
    index.validate()


def test_bytes_are_summed_for_each_rank_alone() -> None:
    index: LruIndex[int] = LruIndex()
    index.touch(7, {0: 100, 1: 10})
    index.touch(8, {1: 5})
    assert [index.evictable_bytes(rank) for rank in range(3)] == [100, 15, 0]
    index.discard(7)
    assert [index.evictable_bytes(rank) for rank in range(3)] == [0, 5, 0]
    index.validate()


def test_touching_again_replaces_the_bytes() -> None:
    index: LruIndex[int] = LruIndex()
    index.touch(7, {0: 100, 1: 10})
    index.touch(7, {1: 1})
    assert [index.evictable_bytes(rank) for rank in range(2)] == [0, 1]
    index.validate()


def test_the_sums_do_not_follow_a_mapping_that_the_caller_changes_later() -> None:
    index: LruIndex[int] = LruIndex()
    bytes_by_rank = {0: 100}
    index.touch(7, bytes_by_rank)
    bytes_by_rank[0] = 1
    index.discard(7)
    assert index.evictable_bytes(0) == 0


def test_validate_sees_a_sum_that_is_off() -> None:
    index = index_of("a")
    index._evictable_bytes[0] += 1
    with pytest.raises(InvariantBroken, match="evictable bytes"):
        index.validate()


def test_evicting_the_oldest_again_and_again_empties_the_index_in_order() -> None:
    index: LruIndex[int] = LruIndex()
    for key in range(100):
        index.touch(key, {0: key, key % 3: 1})
    evicted = []
    while (oldest := index.oldest()) is not None:
        index.discard(oldest)
        index.validate()
        evicted.append(oldest)
    assert evicted == list(range(100))
    assert [index.evictable_bytes(rank) for rank in range(3)] == [0, 0, 0]
