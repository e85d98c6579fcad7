"""The staging ring: bounded, page-aligned, the warmest buffer first; nothing is unmapped under a write."""

import gc
import itertools
import os
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapd.errors import InvalidRequest
from snapd.kv import staging as staging_module
from snapd.kv.staging import PAGE_BYTES, StagingBuffer, StagingRing

# Of no other test, as closed rings leave their memory to the next of the same size.
PIECE_BYTES = 3 * PAGE_BYTES - 5
BUFFER_BYTES = 3 * PAGE_BYTES


@pytest.fixture(autouse=True)
def _nothing_spare() -> Iterator[None]:
    staging_module._spare.pop((os.getpid(), BUFFER_BYTES), None)
    yield


def test_buffers_are_whole_pages_and_apart() -> None:
    ring = StagingRing(4 * BUFFER_BYTES, PIECE_BYTES)
    buffers = [ring.take() for _ in range(4)]
    assert ring.take() is None and ring.lent == 4
    spans = sorted((buffer.address, buffer.address + buffer.size_bytes) for buffer in buffers if buffer)
    assert all(start % PAGE_BYTES == 0 and end - start == BUFFER_BYTES for start, end in spans)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert buffers[0] is not None and buffers[0].memory.data_ptr() == buffers[0].address


def test_memory_is_allocated_when_it_is_first_needed() -> None:
    ring = StagingRing(4 * BUFFER_BYTES, PIECE_BYTES)
    assert ring.allocated_bytes == 0
    for _ in range(10):
        buffer = ring.take()
        assert buffer is not None
        ring.give_back(buffer)
    assert ring.allocated_bytes == BUFFER_BYTES


def test_the_last_one_given_back_is_taken_first() -> None:
    ring = StagingRing(4 * BUFFER_BYTES, PIECE_BYTES)
    first, second = ring.take(), ring.take()
    assert first is not None and second is not None
    ring.give_back(second)
    ring.give_back(first)
    assert ring.take() is first and ring.take() is second


def test_a_buffer_is_given_back_once() -> None:
    ring = StagingRing(BUFFER_BYTES, PIECE_BYTES)
    buffer = ring.take()
    assert buffer is not None
    ring.give_back(buffer)
    with pytest.raises(InvalidRequest, match="not lent"):
        ring.give_back(buffer)
    assert ring.take() is buffer and ring.take() is None


@pytest.mark.parametrize(("ring_bytes", "piece_bytes"), [(BUFFER_BYTES - 1, PIECE_BYTES), (1 << 20, 0)])
def test_a_ring_without_room_for_a_piece_is_refused(ring_bytes: int, piece_bytes: int) -> None:
    with pytest.raises(InvalidRequest, match="no room"):
        StagingRing(ring_bytes, piece_bytes)


def spare() -> list[int]:
    return [memory.data_ptr() for memory in staging_module._spare.get((os.getpid(), BUFFER_BYTES), [])]


def test_memory_that_a_ring_lets_go_of_is_left_to_the_next() -> None:
    """It may be registered with a transport for some time yet, so it is not mapped elsewhere."""
    ring = StagingRing(2 * BUFFER_BYTES, PIECE_BYTES)
    free, lent = ring.take(), ring.take()
    assert free is not None and lent is not None
    ring.give_back(free)
    ring.trim()
    assert spare() == [free.address] and ring.allocated_bytes == BUFFER_BYTES
    following = StagingRing(2 * BUFFER_BYTES, PIECE_BYTES)
    taken = [following.take(), following.take()]
    assert taken[0] is not None and taken[0].address == free.address
    assert lent.address not in [buffer.address for buffer in taken if buffer], "somebody may read it"
    ring.give_back(lent)
    assert ring.take() is lent and ring.take() is not None, "it lends on"


def test_a_ring_that_is_forgotten_unmaps_nothing() -> None:
    ring = StagingRing(2 * BUFFER_BYTES, PIECE_BYTES)
    free, lent = ring.take(), ring.take()
    assert free is not None and lent is not None
    lent.memory.fill_(7)
    ring.give_back(free)
    addresses = free.address, lent.address
    del ring, free, lent
    gc.collect()
    assert staging_module._lent.pop((os.getpid(), addresses[1])).memory[0] == 7
    assert spare() == [addresses[0]]


def in_a_fork(check: Callable[[], bool]) -> bool:
    """Return what *check* does in a child of this process."""
    # Memory of other tests that the child finds to be garbage would be unmapped under what it has there.
    gc.collect()
    child = os.fork()
    if child == 0:
        is_right = False
        try:
            is_right = check()
        finally:
            os._exit(0 if is_right else 1)
    return os.waitpid(child, 0)[1] == 0


def test_a_fork_takes_no_memory_that_its_parent_has_mapped() -> None:
    ring = StagingRing(2 * BUFFER_BYTES, PIECE_BYTES)
    lent, buffer = ring.take(), ring.take()
    assert lent is not None and buffer is not None
    ring.give_back(buffer)

    def is_refused_and_makes_its_own() -> bool:
        with pytest.raises(RuntimeError, match="make a Pusher in each process"):
            ring.take()
        ring.trim()
        following = StagingRing(8 * BUFFER_BYTES, PIECE_BYTES)
        for _ in range(8):
            # Some lie where the parent's are, which are not unmapped because of it.
            own = following.take()
            assert own is not None
            own.memory.fill_(1)
        return True

    assert in_a_fork(is_refused_and_makes_its_own)
    assert ring.take() is buffer


@given(st.lists(st.integers(0, 5), max_size=60))
@settings(max_examples=30, deadline=None)
def test_no_buffer_is_lent_twice_and_no_more_than_there_are(choices: list[int]) -> None:
    ring = StagingRing(3 * BUFFER_BYTES, PIECE_BYTES)
    lent: list[StagingBuffer] = []
    most = 0
    for choice in choices:
        if choice < 3:
            buffer = ring.take()
            assert (buffer is None) == (len(lent) == 3)
            if buffer is not None:
                assert buffer.address not in [other.address for other in lent]
                lent.append(buffer)
        elif lent:
            ring.give_back(lent.pop(choice % len(lent)))
        most = max(most, len(lent))
        assert (ring.lent, ring.allocated_bytes) == (len(lent), most * BUFFER_BYTES)
    while lent:
        ring.give_back(lent.pop())
