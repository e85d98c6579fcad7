"""Finding snapshots, by name and by the longest prefix, and what P is believed to hold."""

from collections.abc import Callable

import pytest
from core_driver import TWO_PLANES, Driver, layout_of, refused, unchanged

from snapd.core import events as e
from snapd.core.events import State
from snapd.errors import Reason
from snapd.layout import fingerprint

Make = Callable[..., Driver]
OTHER = layout_of(model="other")


# --- by name


def test_a_ready_snapshot_is_found_by_its_session(make: Make) -> None:
    drive = make(2)
    handle = drive.ready("s", 10, token_start=8, ranks=(1,))
    assert drive.look_up("s") == e.Found(
        slab_handle=handle,
        session_id="s",
        num_tokens=10,
        token_start=8,
        matched_tokens=18,
        resident_hint_tokens=0,
        ranks=(1,),
    )


@pytest.mark.parametrize("state", [State.RESERVED, State.TRANSFERRING, State.INGESTED, State.ABORTED])
def test_only_ready_is_found(make: Make, state: State) -> None:
    drive = make(1)
    if state is State.RESERVED:
        drive.reserved(page_keys=("p",))
    elif state is State.TRANSFERRING:
        drive.transferring(page_keys=("p",))
    elif state is State.INGESTED:
        drive.ingested(page_keys=("p",))
    else:
        drive.abort(drive.ready(page_keys=("p",)))
    found = unchanged(drive, lambda: drive.look_up("s"))
    assert (found.slab_handle, found.ranks) == (0, ())
    assert unchanged(drive, lambda: drive.look_up(page_keys=("p",))) == e.Found()
    assert drive.machine.statistics().page_keys == 0


def test_another_session_or_namespace_is_not_found(make: Make) -> None:
    drive = make(1, layouts=(TWO_PLANES, OTHER))
    drive.ready("s", page_keys=("p",))
    assert drive.look_up("t") == e.Found()
    assert drive.look_up("s", layout_fingerprint=fingerprint(OTHER)) == e.Found()
    assert drive.look_up(page_keys=("p",), layout_fingerprint=fingerprint(OTHER)) == e.Found()
    second = drive.ready("s", layout_fingerprint=fingerprint(OTHER), page_keys=("p",))
    assert drive.look_up("s", layout_fingerprint=fingerprint(OTHER)).slab_handle == second
    assert drive.look_up(page_keys=("p",), layout_fingerprint=fingerprint(OTHER)).slab_handle == second


@pytest.mark.parametrize("by", ["name", "prefix"])
def test_what_waits_to_be_aborted_is_not_found(make: Make, by: str) -> None:
    drive = make(1)
    handle = drive.ready(page_keys=("p",))
    drive.lease(handle)
    ask = (lambda: drive.look_up("s")) if by == "name" else (lambda: drive.look_up(page_keys=("p",)))
    assert ask().slab_handle == handle, "a reader does not hide it"
    drive.abort(handle)
    assert unchanged(drive, ask) == e.Found()


def test_the_name_goes_before_the_keys(make: Make) -> None:
    drive = make(1)
    named = drive.ready("a", page_keys=("p",))
    drive.ready("b", page_keys=("p",))
    assert drive.look_up("a", page_keys=("p",)).slab_handle == named
    assert drive.look_up("none", page_keys=("p",)).slab_handle == 0


# --- by prefix


def test_the_longest_prefix_wins(make: Make) -> None:
    drive = make(1)
    short = drive.ready("short", 8, page_keys=("1", "2"))
    long = drive.ready("long", 16, page_keys=("1", "2", "3", "4"))
    for keys, handle, matched_tokens in (
        (("1", "2", "3", "4", "5"), long, 16),
        (("1", "2", "3", "x"), long, 12),
        (("x", "y"), 0, 0),
        ((), 0, 0),
    ):
        found = drive.look_up(page_keys=keys)
        assert (found.slab_handle, found.matched_tokens) == (handle, matched_tokens)
    assert drive.look_up(page_keys=("1", "2")).slab_handle == long, "of equal matches the newest"
    drive.abort(long)
    found = drive.look_up(page_keys=("1", "2", "3", "4"))
    assert (found.slab_handle, found.matched_tokens, found.session_id) == (short, 8, "short")


def test_a_suffix_is_found_only_by_who_holds_what_comes_before(make: Make) -> None:
    drive = make(1)
    suffix = drive.ready("suffix", 8, token_start=8, page_keys=("1", "2", "3", "4"))
    full = drive.ready("full", 12, page_keys=("1", "2", "3"))
    keys = ("1", "2", "3", "4")
    for resident_tokens, handle in ((0, full), (7, full), (8, suffix), (15, suffix), (16, 0), (99, 0)):
        found = drive.look_up(page_keys=keys, resident_tokens=resident_tokens)
        assert found.slab_handle == handle, resident_tokens


def test_what_the_asker_holds_already_is_of_no_use(make: Make) -> None:
    drive = make(1)
    handle = drive.ready("s", 8, page_keys=("1", "2"))
    assert drive.look_up(page_keys=("1", "2"), resident_tokens=7).slab_handle == handle
    assert unchanged(drive, lambda: drive.look_up(page_keys=("1", "2"), resident_tokens=8)) == e.Found()


def test_a_prefix_is_found_in_a_snapshot_that_goes_on_otherwise(make: Make) -> None:
    drive = make(2)
    handle = drive.ready("s", 16, page_keys=("1", "2", "3", "4"))
    found = drive.look_up(page_keys=("1", "2", "x", "y"))
    assert (found.slab_handle, found.matched_tokens, found.num_tokens, found.ranks) == (handle, 8, 16, (0, 1))


def test_the_page_keys_of_every_ready_snapshot_are_counted_once(make: Make) -> None:
    drive = make(1)
    first = drive.ready("a", page_keys=("1", "2"))
    second = drive.ready("b", page_keys=("1", "3"))
    assert drive.machine.statistics().page_keys == 3
    drive.abort(first)
    assert drive.machine.statistics().page_keys == 2
    assert drive.session(first).page_keys == (), "the history does not keep them"
    drive.abort(second)
    assert drive.machine.statistics().page_keys == 0


def test_a_snapshot_may_name_a_page_twice(make: Make) -> None:
    drive = make(1)
    handle = drive.ready("a", page_keys=("1", "1"))
    assert drive.look_up(page_keys=("1", "1")).matched_tokens == 8
    drive.abort(handle)
    assert drive.machine.statistics().page_keys == 0


def test_each_snapshot_is_offered_once_with_its_longest_match(make: Make) -> None:
    drive = make(1)
    first = drive.ready("a", 12, page_keys=("1", "2", "3"))
    second = drive.ready("b", 8, page_keys=("1", "2"))
    directory = drive.machine.books.directory
    offered = list(directory.longest_prefix(fingerprint(TWO_PLANES), ("1", "2", "3", "4")))
    assert offered == [(first, 3), (second, 2)]


def test_a_lookup_with_too_many_keys_is_refused(make: Make) -> None:
    drive = make(1, page_keys_max=2)
    answer = unchanged(drive, lambda: drive.look_up(page_keys=("1", "2", "3")))
    assert refused(answer, Reason.INVALID_REQUEST) and "3 page keys" in answer.detail
    assert drive.look_up(page_keys=("1", "2")) == e.Found()


# --- the resident hint


def test_the_end_of_the_last_ingested_snapshot_is_the_hint(make: Make) -> None:
    drive = make(2)
    assert drive.hint() == 0
    drive.ingested("s", 10)
    assert drive.hint() == 10
    drive.ingested("s", 6, token_start=8)
    assert drive.hint() == 14
    drive.ingested("s", 3)
    assert drive.hint() == 3
    assert drive.hint("t") == 0
    assert drive.hint("s", OTHER) == 0
    assert drive.machine.statistics().session_history == 1


def test_what_was_not_ingested_is_no_hint(make: Make) -> None:
    drive = make(1)
    drive.abort(drive.ready("s", 10))
    assert drive.hint() == 0


def test_the_next_grant_leaves_out_what_p_holds_if_asked_to(make: Make) -> None:
    drive = make(1)
    drive.ingested("s", 10)
    granted = drive.prepare("s", 16)
    assert (granted.token_start, granted.num_tokens, granted.resident_hint_tokens) == (0, 16, 10)
    granted = drive.prepare("s", 16, use_resident_hint=True)
    assert (granted.token_start, granted.num_tokens) == (8, 8), "whole pages only"
    assert granted.resident_hint_tokens == 10
    assert drive.session(granted.slab_handle).shard_bytes == 8 * TWO_PLANES.token_bytes
    granted = drive.prepare("s", 12, token_start=4, use_resident_hint=True)
    assert (granted.token_start, granted.num_tokens) == (8, 8)


@pytest.mark.parametrize(
    ("token_start", "num_tokens", "starts_at"),
    [(8, 8, 8), (12, 4, 12), (0, 8, 0), (0, 9, 8), (0, 4, 0), (4, 4, 4)],
)
def test_a_hint_is_used_only_inside_the_snapshot(
    make: Make, token_start: int, num_tokens: int, starts_at: int
) -> None:
    """A hint that covers all of it is of another history of the session."""
    drive = make(1)
    drive.ingested("s", 8)
    granted = drive.prepare("s", num_tokens, token_start=token_start, use_resident_hint=True)
    assert granted.token_start == starts_at
    assert granted.token_start + granted.num_tokens == token_start + num_tokens
    assert granted.resident_hint_tokens == 8


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prefix_that_p_has_evicted_makes_the_next_push_full(make: Make, ranks: int, keep: bool) -> None:
    drive = make(ranks)
    drive.ingested("s", 8)
    drive.ingested("t", 4)
    handle = drive.ready("s", 16, use_resident_hint=True)
    assert drive.session(handle).token_start == 8
    lease_id = drive.lease(handle, 0).lease_id
    drive.vote_no(handle, 0, lease_id, Reason.PREFIX_NOT_RESIDENT, keep=keep)
    assert drive.hint() == 0 and drive.hint("t") == 4
    assert drive.machine.statistics().session_history == 1
    granted = drive.prepare("s", 16, use_resident_hint=True)
    assert (granted.token_start, granted.num_tokens, granted.resident_hint_tokens) == (0, 16, 0)
    drive.start(granted.slab_handle)
    for rank in drive.ranks:
        drive.commit(granted.slab_handle, rank)
    for rank in drive.ranks:
        last = drive.vote(granted.slab_handle, rank, drive.lease(granted.slab_handle, rank).lease_id)
    assert last.commit and drive.hint() == 16, "until the next full snapshot"


@pytest.mark.parametrize("reason", [Reason.ALLOC_FAILED_ON_FINALIZE, Reason.CHECKSUM_MISMATCH])
def test_no_other_failure_touches_the_hint(make: Make, reason: Reason) -> None:
    drive = make(1)
    drive.ingested("s", 8)
    handle = drive.ready("s", 16)
    drive.vote_no(handle, 0, drive.lease(handle).lease_id, reason)
    assert drive.hint() == 8


def test_a_missing_prefix_is_heard_even_when_its_round_is_over(make: Make) -> None:
    drive = make(2)
    drive.ingested("s", 8)
    handle = drive.ready("s", 16, use_resident_hint=True)
    ids = {rank: drive.lease(handle, rank).lease_id for rank in drive.ranks}
    drive.vote_no(handle, 0, ids[0], Reason.ALLOC_FAILED_ON_FINALIZE, keep=True)
    assert drive.hint() == 8
    drive.vote_no(handle, 1, ids[1], Reason.PREFIX_NOT_RESIDENT, keep=True)
    assert drive.hint() == 0


def test_a_yes_never_takes_the_hint_away(make: Make) -> None:
    drive = make(2)
    drive.ingested("s", 8)
    handle = drive.ready("s", 16)
    drive.vote(handle, 0, drive.lease(handle, 0).lease_id, reason=Reason.PREFIX_NOT_RESIDENT)
    assert drive.hint() == 8


def test_beyond_the_bound_of_page_keys_an_attempt_is_found_by_session_only(make: Make) -> None:
    """A search that finds less is no reason to refuse."""
    drive = make(1, page_keys_total_max=3)
    first = drive.ready("a", page_keys=("1", "2"))
    second = drive.ready("b", page_keys=("3", "4"))
    assert drive.machine.statistics().page_keys_held == 2
    assert drive.look_up(page_keys=("3",)) == e.Found()
    assert drive.look_up("b").slab_handle == second
    third = drive.ready("c", page_keys=("5",))
    assert drive.look_up(page_keys=("5",)).slab_handle == third, "what fits is taken, to the last one"
    assert drive.machine.statistics().page_keys_held == 3
    drive.abort(first)
    assert drive.machine.statistics().page_keys_held == 1
    fourth = drive.ready("d", page_keys=("6", "7"))
    assert drive.look_up(page_keys=("6", "7")).slab_handle == fourth
