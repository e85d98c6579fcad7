"""The wire form: byte for byte what the engines' own classes make, and bounded events."""

import golden_events as golden
import msgspec
import pytest
from event_consumer import Consumer

from snapd.kvevents.changes import CHANGE_BYTES, Cleared, Removed, Stored
from snapd.kvevents.events import (
    BLOCKS_MAX,
    END_OF_REPLAY,
    TOKEN_IDS_MAX,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    encode_batch,
    sequence_frame,
)
from snapd.kvevents.hashes import pack_token_ids


def batch(salt: str | None) -> EventBatch:
    return EventBatch(
        ts=golden.TS,
        events=[
            BlockStored(**golden.STORED),
            BlockStored(**golden.STORED_BELOW, cache_salt=salt),
            BlockRemoved(**golden.REMOVED),
            AllBlocksCleared(),
        ],
        data_parallel_rank=golden.DATA_PARALLEL_RANK,
    )


def test_a_batch_has_the_bytes_that_vllm_gives_it():
    assert encode_batch(batch(salt=None)) == golden.VLLM


def test_sglangs_bytes_say_the_same():
    """SGLang leaves an unset LoRA name out, and writes the fields in another order."""
    ours = msgspec.msgpack.decode(encode_batch(batch(salt=golden.SALT)))
    first_stored = ours[1][0]
    assert first_stored.pop("lora_name", "absent") is None
    assert msgspec.msgpack.decode(golden.SGLANG) == ours


def test_a_sequence_number_is_eight_bytes_and_the_end_of_a_replay_is_no_such_number():
    assert sequence_frame(258) == b"\0\0\0\0\0\0\x01\x02"
    assert END_OF_REPLAY == b"\xff" * 8


@pytest.mark.parametrize("page_size", [1, 16, 64, TOKEN_IDS_MAX, 65_536])
@pytest.mark.parametrize("has_tokens", [True, False])
def test_a_long_snapshot_is_told_in_events_of_bounded_size_that_continue_each_other(page_size, has_tokens):
    num_pages = 2 if page_size > 1_000 else 3 * BLOCKS_MAX // min(page_size, 16) + 5
    hashes = [7 * number for number in range(1, num_pages + 1)]
    tokens = [number % 1_000 for number in range(num_pages * page_size)] if has_tokens else []
    stored = Stored(
        hashes=hashes,
        parent=3,
        token_ids=pack_token_ids(tokens),
        block_size=page_size,
        medium="CPU",
        lora_name=None,
        cache_salt=None,
        session_id="s",
    )
    events = list(stored.events())
    assert stored.num_bytes == CHANGE_BYTES + 8 * num_pages + 4 * len(tokens)
    for event in events:
        assert isinstance(event, BlockStored)
        assert len(event.block_hashes) <= BLOCKS_MAX
        assert len(event.block_hashes) * page_size <= max(TOKEN_IDS_MAX, page_size)
    consumer = Consumer()
    consumer.apply(events)
    assert list(consumer.pages) == hashes
    assert [token for page in consumer.pages.values() for token in page] == tokens
    assert list(consumer.parents.values()) == [3, *hashes[:-1]]


def test_removals_are_told_in_events_of_bounded_size():
    hashes = list(range(2 * BLOCKS_MAX + 1))
    events = list(Removed(hashes, "CPU").events())
    assert [len(event.block_hashes) for event in events] == [BLOCKS_MAX, BLOCKS_MAX, 1]
    assert [number for event in events for number in event.block_hashes] == hashes
    assert Removed(hashes, "CPU").num_bytes == CHANGE_BYTES + 8 * len(hashes)
    assert list(Cleared().events()) == [AllBlocksCleared()]
