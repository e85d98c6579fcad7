"""What is told of a snapshot, and what of what D said is kept."""

import pytest
from events_driver import PAGE, EventsDriver

from snapd import wire as w
from snapd.core import events as e
from snapd.kvevents.changes import CHANGE_BYTES, Cleared, Removed, Stored
from snapd.kvevents.hashes import pack_token_ids, sglang_block_hashes, unpack_token_ids
from snapd.layout import Layout, Namespace, page_keys

TOKENS = tuple(range(1_000, 1_040))


def test_without_token_ids_pages_are_named_and_their_tokens_are_not_told():
    driver = EventsDriver()
    driver.make_ready(driver.offer("s", TOKENS[:10]))
    (stored,) = driver.outlet.changes
    assert isinstance(stored, Stored)
    assert (len(stored.hashes), stored.token_ids, stored.parent) == (2, b"", None)
    assert (stored.block_size, stored.medium, stored.session_id) == (PAGE, "CPU_PINNED", "s")
    assert (stored.lora_name, stored.cache_salt) == (None, None)
    driver.check()


def test_with_token_ids_every_whole_page_has_its_own():
    driver = EventsDriver()
    driver.make_ready(driver.offer("s", TOKENS[:10], send_token_ids=True))
    (stored,) = driver.outlet.changes
    assert tuple(unpack_token_ids(stored.token_ids)) == TOKENS[:8]
    assert all(driver.outlet.consumer.pages.values())
    driver.check()


def test_a_suffix_hangs_below_the_page_before_it_and_holds_its_own_pages_only():
    driver = EventsDriver()
    driver.make_ready(driver.offer("s", TOKENS[:16], token_start=8, send_token_ids=True, send_hashes=True))
    (stored,) = driver.outlet.changes
    names = sglang_block_hashes("s", TOKENS[:16], PAGE)
    assert (stored.parent, stored.hashes) == (names[1], names[2:])
    assert tuple(unpack_token_ids(stored.token_ids)) == TOKENS[8:16]


def test_a_suffix_that_the_daemon_chose_has_the_tokens_of_its_own_pages():
    driver = EventsDriver()
    first = driver.make_ready(driver.offer("s", TOKENS[:8]))
    driver.vote(first, 0, driver.lease(first).lease_id)
    driver.outlet.changes.clear()
    handle = driver.offer("s", TOKENS[:20], send_token_ids=True, use_resident_hint=True)
    assert driver.session(handle).token_start == 8
    driver.make_ready(handle)
    (stored,) = driver.outlet.changes
    assert tuple(unpack_token_ids(stored.token_ids)) == TOKENS[8:20]
    driver.check()


def test_pages_beyond_the_token_ids_that_came_are_told_without_any():
    driver = EventsDriver()
    result = driver.prepare("s", 16, page_keys=page_keys(TOKENS[:16], PAGE))
    request = _request(16, token_ids=pack_token_ids(TOKENS[:7]))
    driver.kv_events.on_grant(request, result)
    driver.make_ready(result.slab_handle)
    with_tokens, without = driver.outlet.changes
    assert (len(with_tokens.hashes), len(without.hashes)) == (1, 3)
    assert tuple(unpack_token_ids(with_tokens.token_ids)) == TOKENS[:4] and without.token_ids == b""
    assert without.parent == with_tokens.hashes[-1]


def test_a_snapshot_without_names_is_counted_and_not_told():
    driver = EventsDriver()
    driver.make_ready(driver.offer("s", TOKENS[:16], send_keys=False))
    driver.make_ready(driver.offer("t", TOKENS[: PAGE - 1]))
    assert driver.outlet.changes == []
    assert driver.kv_events.unpublished == {"no-hashes": 2}


def test_the_adapter_and_the_salt_of_the_namespace_are_told():
    layout = Layout((16, 16), page_size_tokens=PAGE, namespace=Namespace(lora="adapter", cache_salt="salt"))
    driver = EventsDriver(layouts=[layout])
    driver.make_ready(driver.offer("s", TOKENS[:16]))
    (stored,) = driver.outlet.changes
    assert (stored.lora_name, stored.cache_salt) == ("adapter", "salt")


@pytest.mark.parametrize("medium", ["CPU_PINNED", "CPU", "EXTERNAL"])
def test_pages_are_stored_in_and_removed_from_the_configured_medium(medium):
    driver = EventsDriver(config={"kv_events_medium": medium})
    driver.abort(driver.make_ready(driver.offer("s", TOKENS[:16])))
    stored, removed = driver.outlet.changes
    assert isinstance(removed, Removed)
    assert stored.medium == removed.medium == medium


def test_the_beginning_and_the_end_are_told_if_that_is_wanted():
    driver = EventsDriver(config={"kv_events_clear_all": True})
    assert driver.outlet.changes == [Cleared()]
    driver.make_ready(driver.offer("s", TOKENS[:16]))
    driver.kv_events.stop()
    assert [type(change) for change in driver.outlet.changes] == [Cleared, Stored, Removed, Cleared]


def test_at_the_end_all_that_was_told_is_taken_back_even_if_attempts_are_open():
    driver = EventsDriver()
    driver.make_ready(driver.offer("s", TOKENS[:16], send_token_ids=True))
    driver.offer("t", TOKENS[:16], send_token_ids=True)
    driver.kv_events.stop()
    assert driver.outlet.consumer.pages == {}
    assert driver.outlet.consumer.clears == 0
    assert driver.kv_events._facts_bytes == 0


# --- what D said ------------------------------------------------------------------------------


def _request(num_tokens: int, **fields: bytes) -> w.SnapshotPrepareReceiveReqInput:
    return w.SnapshotPrepareReceiveReqInput(
        id=1, session_id="s", num_tokens=num_tokens, layout_fingerprint="not read", **fields
    )


def _granted(driver: EventsDriver, session_id: str = "s") -> e.Granted:
    result = driver.prepare(session_id, 16)
    assert isinstance(result, e.Granted)
    return result


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": b"\0" * 7},
        {"token_ids": b"\0" * 4 * 17},
        {"block_hashes": b"\0" * 9},
        {"block_hashes": b"\0" * 8 * 5},
        {"block_hashes": b"\0" * 8, "token_ids": b"\0" * 7},
    ],
    ids=["no whole token", "too many tokens", "no whole hash", "too many hashes", "one of both"],
)
def test_what_is_unsound_is_left_out_and_counted_and_the_attempt_goes_on(fields):
    driver = EventsDriver(config={"kv_events_token_ids_max": 16, "page_keys_max": 4})
    granted = _granted(driver)
    driver.kv_events.on_grant(_request(16, **fields), granted)
    assert driver.kv_events.facts_dropped == 1 and not driver.kv_events._facts
    driver.make_ready(granted.slab_handle)


def test_as_much_as_is_allowed_is_kept():
    driver = EventsDriver(config={"kv_events_token_ids_max": 16, "page_keys_max": 4})
    request = _request(16, token_ids=b"\0" * 4 * 16, block_hashes=b"\0" * 8 * 4)
    driver.kv_events.on_grant(request, _granted(driver))
    assert driver.kv_events.facts_dropped == 0
    assert driver.kv_events._facts_bytes == CHANGE_BYTES + 4 * 16 + 8 * 4


def test_beyond_the_bound_token_ids_go_first_and_then_everything():
    bound = 64 << 10
    driver = EventsDriver(units=30, config={"kv_events_queue_bytes_max": bound})
    kv_events = driver.kv_events
    request = _request(16, token_ids=b"\0" * 4_000, block_hashes=b"\0" * 32)
    driver.outlet.queued_bytes = bound - CHANGE_BYTES - 4_032
    first, second = _granted(driver), _granted(driver, "t")
    kv_events.on_grant(request, first)
    assert kv_events.facts_dropped == 0 and kv_events._facts[first.slab_handle].token_ids
    driver.outlet.queued_bytes -= CHANGE_BYTES + 32
    kv_events.on_grant(request, second)
    assert kv_events.facts_dropped == 1
    assert kv_events._facts[second.slab_handle].token_ids == b""
    kv_events.on_grant(request, _granted(driver, "u"))
    assert kv_events.facts_dropped == 2 and len(kv_events._facts) == 2


def test_an_attempt_that_ends_before_it_is_ready_leaves_nothing_behind():
    driver = EventsDriver()
    handle = driver.offer("s", TOKENS[:16], send_token_ids=True, send_hashes=True)
    assert driver.kv_events._facts_bytes
    driver.abort(handle, drained=True)
    assert not driver.kv_events._facts and not driver.kv_events._facts_bytes
    assert driver.outlet.changes == []


def test_a_snapshot_for_which_there_is_no_room_is_counted_by_why():
    driver = EventsDriver(units=30, config={"kv_events_pages_max": 4, "kv_events_queue_bytes_max": 64 << 10})
    driver.make_ready(driver.offer("s", TOKENS[:16]))
    driver.make_ready(driver.offer("t", TOKENS[20:24]))
    driver.abort(next(iter(driver.machine.books.open)))
    driver.outlet.queued_bytes = 64 << 10
    driver.make_ready(driver.offer("u", TOKENS[:16]))
    assert driver.kv_events.unpublished == {"pages-max": 1, "queue-full": 1}
    assert [type(change) for change in driver.outlet.changes] == [Stored, Removed]
