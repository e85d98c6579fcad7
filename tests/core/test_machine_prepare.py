"""Prepare: a slab in every rank's arena or in none, and a refusal that changes nothing."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from core_driver import TWO_PLANES, UNIT, Driver, fingerprint_of, layout_of, refused, unchanged

from snapd.core import events as e
from snapd.core import records as r
from snapd.core.events import State
from snapd.core.slab import Extent
from snapd.errors import Reason
from snapd.layout import Layout, fingerprint

Make = Callable[..., Driver]


# --- granted


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_prepare_that_fits_takes_a_slab_in_every_arena(make: Make, ranks: int) -> None:
    drive = make(ranks)
    granted = drive.prepare("s", 10, token_start=8, conn_id=5)
    assert isinstance(granted, e.Granted)
    assert (granted.num_tokens, granted.token_start, granted.resident_hint_tokens) == (10, 8, 0)
    assert granted.layout == TWO_PLANES
    assert [shard.rank for shard in granted.shards] == list(range(ranks))
    for shard in granted.shards:
        assert shard.extents == (Extent(0, 2 * UNIT),)
        assert shard.plane_offsets_bytes == (0, UNIT)
        assert drive.live_units(shard.rank) == 2
    assert drive.state(granted.slab_handle) is State.RESERVED
    assert granted.deadline_ns == drive.now_ns + 10_000_000_000
    (timer,) = drive.timers.values()
    assert isinstance(timer, e.ReserveTimedOut) and timer.deadline_ns == granted.deadline_ns


def test_the_log_of_a_grant_is_one_transition_and_one_slab_a_rank(make: Make) -> None:
    drive = make(2)
    handle = drive.reserved("s", 10, token_start=4)
    (transition,) = drive.logged(r.SessionTransition)
    assert (transition.from_state, transition.to_state, transition.reason) == ("", "RESERVED", "ok")
    assert (transition.num_tokens, transition.token_start) == (10, 4)
    assert (transition.bytes, transition.cause_id) == (2 * 2 * 16 * 10, drive.cause_id)
    slabs = drive.logged(r.SlabAllocated, slab_handle=handle, session_id="s")
    assert [(slab.rank, slab.bytes) for slab in slabs] == [(0, 320), (1, 320)]
    assert all(slab.extents == (Extent(0, 2 * UNIT),) for slab in slabs)


def test_ranks_may_be_a_subset_in_any_order(make: Make) -> None:
    drive = make(3)
    granted = drive.prepare(ranks=(2, 0))
    assert [shard.rank for shard in granted.shards] == [0, 2]
    assert [drive.live_units(rank) for rank in drive.ranks] == [2, 0, 2]


def test_planes_of_a_contiguous_slab_are_aligned_one_after_another(make: Make) -> None:
    wide = Layout((100, 10), (100, 10))
    drive = make(1, units=32, layouts=(wide,))
    drive.prepare("other", 1)
    granted = drive.prepare("s", 10)
    (shard,) = granted.shards
    assert shard.extents == (Extent(4 * UNIT, 10 * UNIT),)
    assert shard.plane_offsets_bytes == tuple(UNIT * unit for unit in (4, 8, 9, 13))


def test_holes_that_hold_the_slab_only_together_give_one_extent_a_plane(make: Make) -> None:
    drive = make(1, units=6)
    first = [drive.reserved(name) for name in ("a", "b", "c")]
    drive.abort(first[0], drained=True)
    drive.abort(first[2], drained=True)
    four = layout_of(4)
    drive.post(e.LayoutDeclared, rank=0, layout=four)
    granted = drive.prepare("d", layout_fingerprint=fingerprint(four))
    (shard,) = granted.shards
    assert len(shard.extents) == 4 and drive.free_units() == 0
    assert shard.plane_offsets_bytes == tuple(extent.offset_bytes for extent in shard.extents)
    assert sorted(shard.plane_offsets_bytes) == [0, UNIT, 4 * UNIT, 5 * UNIT]


def test_equal_ids_in_two_namespaces_are_two_sessions(make: Make) -> None:
    other = layout_of(model="other")
    drive = make(1, layouts=(TWO_PLANES, other))
    first = drive.reserved("s")
    second = drive.reserved("s", layout_fingerprint=fingerprint(other))
    assert drive.state(first) is drive.state(second) is State.RESERVED


# --- refused


def test_a_refusal_is_a_record_an_outcome_and_nothing_else(make: Make) -> None:
    drive = make(2)
    before = fingerprint_of(drive.machine)
    assert refused(drive.prepare("s", 0, token_start=4), Reason.INVALID_REQUEST)
    after = fingerprint_of(drive.machine)
    assert [x for x, y in zip(before, after, strict=True) if x != y] == [repr([])], "only outcomes"
    record, outcome = (x.record for x in drive.last[:2] if isinstance(x, e.RecordWritten))
    assert isinstance(record, r.SyncRefused) and isinstance(outcome, r.SyncOutcome)
    assert (record.session_id, record.num_tokens, record.token_start) == ("s", 0, 4)
    assert record.detail == "num_tokens is 0; it must be at least 1"
    assert (outcome.ok, outcome.slab_handle, outcome.duration_ms) == (False, 0, 0)
    assert len(drive.last) == 3 and not drive.timers
    statistics = drive.machine.statistics()
    assert (statistics.attempts, statistics.requests_refused) == (0, 1)
    assert statistics.outcomes_by_reason == {"invalid-request": 1}


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"session_id": ""}, "session_id"),
        ({"session_id": "x" * 9}, "session_id"),
        ({"session_id": "ü" * 5}, "session_id"),
        ({"num_tokens": 0}, "num_tokens is 0"),
        ({"num_tokens": -3}, "num_tokens is -3"),
        ({"token_start": -4}, "token_start is -4"),
        ({"token_start": 60, "num_tokens": 5}, "ends at token 65"),
        ({"num_tokens": 2**62}, "ends at token"),
        ({"page_keys": ("k",) * 4}, "4 page keys; page_keys_max"),
        ({"page_keys": ("k" * 65,)}, "a page key is longer than 64"),
        ({"token_digest": "d" * 65}, "token_digest or a page key is longer than 64"),
        ({"ranks": (0, 0)}, "ranks [0, 0]"),
        ({"ranks": (0, 2)}, "ranks [0, 2]"),
        ({"ranks": (-1,)}, "ranks [-1]"),
        ({"token_start": 2}, "not a multiple of the page size 4"),
        ({"num_tokens": 11, "page_keys": ("k",) * 3}, "3 page keys for 11 tokens"),
    ],
)
def test_what_is_out_of_range_is_refused_in_words(make: Make, fields: dict[str, Any], word: str) -> None:
    drive = make(2, session_id_bytes_max=8, num_tokens_max=64, page_keys_max=3)
    asked = {"session_id": "s", "num_tokens": 16, **fields}
    result = drive.prepare(**asked)
    assert refused(result, Reason.INVALID_REQUEST)
    assert word in result.detail
    assert drive.machine.statistics().attempts == 0
    (record,) = drive.logged(r.SyncRefused)
    assert len(record.session_id) <= 8 and record.bytes >= 0
    ranks = asked.get("ranks", (0, 1))
    assert record.bytes == len(ranks) * 2 * 16 * max(asked["num_tokens"], 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"session_id": "x" * 8},
        {"num_tokens": 1},
        {"token_start": 48, "num_tokens": 16},
        {"page_keys": ("a", "b", "c")},
        {"page_keys": ("k" * 64,), "token_digest": "d" * 64},
        {"num_tokens": 12, "page_keys": ("a", "b", "c")},
        {"token_start": 4, "num_tokens": 8, "page_keys": ("a", "b", "c")},
        {"ranks": (1,)},
    ],
)
def test_what_is_just_in_range_is_granted(make: Make, fields: dict[str, Any]) -> None:
    drive = make(2, session_id_bytes_max=8, num_tokens_max=64, page_keys_max=3)
    assert isinstance(drive.prepare(**{"num_tokens": 16, **fields}), e.Granted)


def test_a_handle_is_never_used_twice(make: Make) -> None:
    drive = make(1, ended_history_max=1)
    handle = drive.reserved("a")
    assert refused(drive.prepare("b", slab_handle=handle), Reason.INVALID_REQUEST)
    drive.abort(handle)
    assert refused(drive.prepare("b", slab_handle=handle), Reason.INVALID_REQUEST)
    drive.abort(drive.reserved("c"), drained=True)
    assert drive.machine.view(handle) is None, "forgotten, but its bytes are in quarantine"
    result = drive.prepare("b", slab_handle=handle)
    assert refused(result, Reason.INVALID_REQUEST) and str(handle) in result.detail


def test_no_slab_before_every_rank_has_declared_the_layout(make: Make) -> None:
    drive = make(2, layouts=())
    result = drive.prepare()
    assert refused(result, Reason.LAYOUT_MISMATCH)
    assert "rank 0" in result.detail and "declared none yet" in result.detail
    assert result.retry_after_ms == 5_000, "a rank that has said nothing yet may still do so"
    drive.post(e.LayoutDeclared, rank=0, layout=TWO_PLANES)
    result = drive.prepare()
    assert refused(result, Reason.LAYOUT_MISMATCH) and "rank 1" in result.detail
    assert isinstance(drive.prepare(ranks=(0,)), e.Granted)
    drive.post(e.LayoutDeclared, rank=1, layout=TWO_PLANES)
    assert isinstance(drive.prepare(), e.Granted)


def test_a_layout_that_a_rank_does_not_have_is_not_worth_another_try(make: Make) -> None:
    drive = make(2)
    result = drive.prepare(layout_fingerprint="nonsense")
    assert refused(result, Reason.LAYOUT_MISMATCH) and result.retry_after_ms == 0
    assert f"it declared {fingerprint(TWO_PLANES)}" in result.detail
    (record,) = drive.logged(r.SyncRefused)
    assert record.bytes == 0, "nobody knows how many bytes that would be"


def test_an_unknown_layout_names_four_that_are_known(make: Make) -> None:
    drive = make(1, layouts=tuple(layout_of(model=str(i)) for i in range(6)))
    detail = drive.prepare(layout_fingerprint="nonsense").detail
    assert detail.count(", ") == 3


@pytest.mark.parametrize("field", ["model", "lora", "cache_salt", "weight_version", "tenant"])
def test_kv_of_another_namespace_is_refused(make: Make, field: str) -> None:
    """New weights, another LoRA, another salt: the fingerprint differs."""
    other = msgspec.structs.replace(
        TWO_PLANES, namespace=msgspec.structs.replace(TWO_PLANES.namespace, **{field: "other"})
    )
    drive = make(1)
    assert refused(drive.prepare(layout_fingerprint=fingerprint(other)), Reason.LAYOUT_MISMATCH)


def test_a_declaration_is_checked(make: Make) -> None:
    drive = make(2)
    result = unchanged(drive, lambda: drive.post(e.LayoutDeclared, rank=2, layout=TWO_PLANES))
    assert refused(result, Reason.WRONG_RANK)
    bad = Layout(k_stride_bytes=())
    result = unchanged(drive, lambda: drive.post(e.LayoutDeclared, rank=0, layout=bad))
    assert refused(result, Reason.INVALID_REQUEST) and "layers" in result.detail
    other = layout_of(3)
    assert drive.post(e.LayoutDeclared, rank=1, layout=other) == e.Declared(fingerprint(other))


def test_draining_takes_no_new_attempts_and_serves_the_old_ones(make: Make) -> None:
    drive = make(1)
    handle = drive.transferring()
    assert drive.post(e.DrainAsked) == e.Accepted()
    assert drive.machine.statistics().is_draining
    assert refused(drive.prepare("b"), Reason.DRAINING)
    assert drive.commit(handle) == e.Accepted(State.READY)
    drive.vote(handle, 0, drive.lease(handle).lease_id)
    assert drive.state(handle) is State.INGESTED
    assert drive.post(e.DrainAsked, draining=False) == e.Accepted()
    assert isinstance(drive.prepare("b"), e.Granted)


def test_a_wrong_number_is_reported_as_such_even_while_draining(make: Make) -> None:
    drive = make(1)
    drive.post(e.DrainAsked)
    assert refused(drive.prepare("b", 0), Reason.INVALID_REQUEST)
    assert refused(drive.prepare(layout_fingerprint="x"), Reason.LAYOUT_MISMATCH)


def test_attempts_open_or_in_quarantine_are_limited(make: Make) -> None:
    drive = make(1, units=16, sessions_max=3)
    first = drive.reserved("a")
    drive.reserved("b")
    drive.reserved("c")
    assert refused(drive.prepare("d"), Reason.LIMIT_REACHED)
    drive.abort(first)
    result = drive.prepare("d")
    assert refused(result, Reason.LIMIT_REACHED), "its bytes are in quarantine still"
    assert result.retry_after_ms == 5_000
    drive.drained(first)
    assert isinstance(drive.prepare("d"), e.Granted)


# --- no room


@pytest.mark.parametrize("rank", [0, 1])
def test_a_slab_that_one_arena_cannot_take_is_taken_in_none(make: Make, rank: int) -> None:
    drive = make(2)
    for name in "abcd":
        drive.reserved(name, ranks=(rank,))
    before = [drive.free_units(r_) for r_ in drive.ranks]
    assert refused(drive.prepare("z"), Reason.SNAPSHOT_BUF_FULL)
    assert [drive.free_units(r_) for r_ in drive.ranks] == before
    assert isinstance(drive.prepare("z", ranks=(1 - rank,)), e.Granted)


def test_a_full_buffer_says_how_full_and_when_to_try_again(make: Make) -> None:
    drive = make(1)
    handles = [drive.reserved(name) for name in "abcd"]
    result = drive.prepare("z")
    assert refused(result, Reason.SNAPSHOT_BUF_FULL)
    assert result.retry_after_ms == 100, "nothing is in quarantine, so nobody knows"
    assert "arena 0: 0 bytes free, 0 evictable, 0 in quarantine of 2048" in result.detail
    drive.abort(handles[0])
    drive.jump(57_000)
    assert drive.prepare("z").retry_after_ms == 2_999, "60,000 ms of quarantine less what has passed"
    drive.jump(2_990)
    assert drive.prepare("z").retry_after_ms == 20, "not below the least"
    drive.jump(60_000)
    assert drive.prepare("z").retry_after_ms == 20, "not negative when a timer is late"


def test_the_wait_is_bounded_from_above(make: Make) -> None:
    drive = make(1)
    handles = [drive.reserved(name) for name in "abcd"]
    drive.abort(handles[0])
    assert drive.prepare("z").retry_after_ms == 5_000


@pytest.mark.parametrize(("planes", "fits"), [(8, True), (9, False)])
def test_what_an_empty_arena_could_not_take_is_too_large(make: Make, planes: int, fits: bool) -> None:
    wide = layout_of(planes)
    drive = make(2, layouts=(TWO_PLANES, wide))
    drive.reserved("a")
    result = drive.prepare("s", layout_fingerprint=fingerprint(wide))
    assert refused(result, Reason.SNAPSHOT_BUF_FULL if fits else Reason.TOO_LARGE)
    if not fits:
        assert result.retry_after_ms == 0, "trying again is of no use"


def test_a_plane_above_a_piece_is_too_large(make: Make) -> None:
    drive = make(1, units=8, piece_units=2, layouts=(Layout((16,)),))
    assert isinstance(drive.prepare("s", 32), e.Granted)
    assert refused(drive.prepare("s", 33), Reason.TOO_LARGE)


def test_no_ready_snapshot_is_evicted_for_what_is_too_large(make: Make) -> None:
    wide = layout_of(9)
    drive = make(1, layouts=(TWO_PLANES, wide))
    handle = drive.ready("a")
    assert refused(drive.prepare("s", layout_fingerprint=fingerprint(wide)), Reason.TOO_LARGE)
    assert drive.state(handle) is State.READY


def test_the_log_says_who_asked_where_an_attempt_begins_and_ends_and_in_a_refusal(make: Make) -> None:
    drive = make(1)
    drive.prepare("s", peer="d3")
    drive.post(e.AbortAsked, slab_handle=drive.handle, drained=True)
    drive.prepare("s", num_tokens=0, peer="d4")
    said = [
        (type(record), record.peer)
        for record in drive.records
        if isinstance(record, r.SessionTransition | r.SyncOutcome)
    ]
    assert said == [
        (r.SessionTransition, "d3"), (r.SessionTransition, ""), (r.SyncOutcome, "d3"), (r.SyncOutcome, "d4"),
    ]  # fmt: skip


def test_a_prepare_without_a_cause_still_works(make: Make) -> None:
    """Nobody waits for an answer, so none is given, and no refusal is counted."""
    drive = make(1)
    event = e.PrepareAsked(
        at_ns=drive.now_ns, slab_handle=1, session_id="s", layout_fingerprint="x", num_tokens=1
    )
    assert not [x for x in drive.handle_event(event) if isinstance(x, e.Replied)]
    assert drive.machine.statistics().requests_refused == 0
