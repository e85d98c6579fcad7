"""Abort, supersede, expire, evict, stop: every attempt ends once, and never under a reader."""

from collections.abc import Callable

import pytest
from core_driver import TWO_PLANES, Driver, fingerprint_of, layout_of, refused, unchanged

from snapd.core import events as e
from snapd.core import records as r
from snapd.core.events import State
from snapd.errors import Reason
from snapd.layout import fingerprint

Make = Callable[..., Driver]


def end_of(drive: Driver, handle: int) -> tuple[State, Reason]:
    return drive.state(handle), drive.reason(handle)


# --- abort


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("drained", [False, True])
def test_an_abort_before_ready_frees_only_with_drain_proof(make: Make, started: bool, drained: bool) -> None:
    drive = make(2)
    handle = drive.transferring(conn_id=7) if started else drive.reserved(conn_id=7)
    assert drive.abort(handle, drained=drained) == e.Accepted(State.ABORTED)
    assert end_of(drive, handle) == (State.ABORTED, Reason.CLIENT_ABORT)
    for rank in drive.ranks:
        assert drive.free_units(rank) == (8 if drained else 6)
        assert drive.quarantined_units(rank) == (0 if drained else 2)
    assert drive.tells == [e.EndTold(7, handle, "s", State.ABORTED, Reason.CLIENT_ABORT, not drained)]


def test_an_abort_of_a_half_committed_attempt_keeps_what_is_not_committed(make: Make) -> None:
    drive = make(2)
    handle = drive.transferring()
    drive.commit(handle, 1)
    drive.abort(handle)
    assert [drive.free_units(rank) for rank in drive.ranks] == [6, 8]


def test_an_abort_of_a_ready_snapshot_frees_it_at_once(make: Make) -> None:
    drive = make(2)
    handle = drive.ready(conn_id=7)
    assert drive.abort(handle) == e.Accepted(State.ABORTED)
    assert [drive.free_units(rank) for rank in drive.ranks] == [8, 8]
    assert drive.tells == [e.EndTold(7, handle, "s", State.ABORTED, Reason.CLIENT_ABORT, False)]


@pytest.mark.parametrize("drained", [False, True])
def test_an_abort_waits_for_the_lease_to_end(make: Make, drained: bool) -> None:
    """Drain proof says nothing about readers."""
    drive = make(2)
    handle = drive.ready()
    drive.lease(handle, 0)
    assert drive.abort(handle, drained=drained) == e.Accepted(State.READY, pending=True)
    assert drive.state(handle) is State.READY
    view = drive.machine.view(handle)
    assert view is not None and view.abort_wanted == "client-abort"
    for rank in (0, 1):
        assert refused(unchanged(drive, lambda rank=rank: drive.lease(handle, rank)), Reason.CLIENT_ABORT)
    drive.advance(9_999)
    assert drive.live_units(0) == 2
    drive.advance(1)
    assert end_of(drive, handle) == (State.ABORTED, Reason.CLIENT_ABORT)
    assert [drive.free_units(rank) for rank in drive.ranks] == [8, 8]


def test_an_abort_that_waits_happens_when_the_last_reader_is_done(make: Make) -> None:
    drive = make(3)
    handle = drive.ready()
    ids = {rank: drive.lease(handle, rank).lease_id for rank in drive.ranks}
    drive.vote(handle, 1, ids[1])
    waits = drive.cause_id
    drive.abort(handle)
    # Rank 2 still reads: the attempt stays, and both are told so.
    reason = Reason.ALLOC_FAILED_ON_FINALIZE
    decided = e.Decided(commit=False, reason=reason, state=State.READY)
    assert drive.vote_no(handle, 0, ids[0], reason, keep=True) == decided
    assert drive.answer(waits) == decided
    assert drive.state(handle) is State.READY
    # Rank 2 is done: nothing is kept any more.
    decided = e.Decided(commit=False, reason=Reason.ROUND_ABORTED, state=State.ABORTED)
    assert drive.vote(handle, 2, ids[2]) == decided
    assert end_of(drive, handle) == (State.ABORTED, Reason.CLIENT_ABORT)
    assert len(drive.logged(r.SyncOutcome)) == 1


def test_who_votes_last_is_told_the_state_that_follows(make: Make) -> None:
    drive = make(2)
    handle = drive.ready()
    ids = {rank: drive.lease(handle, rank).lease_id for rank in drive.ranks}
    drive.vote(handle, 1, ids[1])
    waits = drive.cause_id
    drive.abort(handle)
    reason = Reason.ALLOC_FAILED_ON_FINALIZE
    decided = e.Decided(commit=False, reason=reason, state=State.ABORTED)
    assert drive.vote_no(handle, 0, ids[0], reason, keep=True) == decided
    assert drive.answer(waits) == decided


def test_who_waits_at_the_deadline_is_told_the_state_that_follows(make: Make) -> None:
    drive = make(2)
    handle = drive.ready()
    drive.vote(handle, 0, drive.lease(handle, 0).lease_id)
    waits = drive.cause_id
    drive.abort(handle)
    drive.advance(10_000)
    assert drive.answer(waits) == e.Decided(commit=False, reason=Reason.LEASE_EXPIRED, state=State.ABORTED)


def test_a_missing_vote_tells_the_others_the_state_that_follows(make: Make) -> None:
    drive = make(2)
    handle = drive.ready()
    drive.lease(handle, 1)
    drive.advance(1)
    drive.vote(handle, 0, drive.lease(handle, 0).lease_id)
    waits = drive.cause_id
    drive.abort(handle)
    drive.advance(9_999)
    assert drive.answer(waits) == e.Decided(commit=False, reason=Reason.ROUND_ABORTED, state=State.ABORTED)
    assert end_of(drive, handle) == (State.ABORTED, Reason.CLIENT_ABORT)


def test_an_ingest_that_all_have_voted_for_wins_over_an_abort_that_waits(make: Make) -> None:
    """The bytes are in P's pool and match: every rank says so, and there is one decision for all."""
    drive = make(2)
    handle = drive.ready()
    ids = {rank: drive.lease(handle, rank).lease_id for rank in drive.ranks}
    drive.abort(handle)
    drive.vote(handle, 0, ids[0])
    waits = drive.cause_id
    assert drive.vote(handle, 1, ids[1]).commit and drive.answer(waits).commit
    assert end_of(drive, handle) == (State.INGESTED, Reason.OK)


def test_the_first_reason_to_end_is_the_one_that_counts(make: Make) -> None:
    drive = make(1, ready_ttl_ms=5_000)
    handle = drive.ready()
    drive.lease(handle)
    drive.abort(handle)
    drive.advance(5_000)
    drive.ready("s")
    drive.advance(5_000)
    assert end_of(drive, handle) == (State.ABORTED, Reason.CLIENT_ABORT)


# --- supersede


@pytest.mark.parametrize("started", [False, True])
def test_a_new_attempt_supersedes_one_that_is_being_written_at_once(make: Make, started: bool) -> None:
    drive = make(2)
    old = drive.transferring(conn_id=7) if started else drive.reserved(conn_id=7)
    new = drive.reserved(conn_id=8)
    assert end_of(drive, old) == (State.ABORTED, Reason.SUPERSEDED)
    assert drive.state(new) is State.RESERVED
    assert [drive.quarantined_units(rank) for rank in drive.ranks] == [2, 2], "its writer may still write"
    assert drive.tells == [e.EndTold(7, old, "s", State.ABORTED, Reason.SUPERSEDED, True)]
    (transition,) = drive.logged(r.SessionTransition, slab_handle=old, to_state="ABORTED")
    assert transition.newer_handle == new


def test_a_ready_snapshot_is_superseded_only_when_the_new_one_is_ready(make: Make) -> None:
    drive = make(2)
    old = drive.ready(conn_id=7)
    new = drive.transferring()
    drive.commit(new, 0)
    assert drive.state(old) is State.READY
    drive.commit(new, 1)
    assert end_of(drive, old) == (State.ABORTED, Reason.SUPERSEDED)
    assert drive.state(new) is State.READY
    assert [drive.free_units(rank) for rank in drive.ranks] == [6, 6]
    (transition,) = drive.logged(r.SessionTransition, slab_handle=old, to_state="ABORTED")
    assert transition.newer_handle == new
    assert drive.look_up("s").slab_handle == new


def test_a_new_attempt_that_fails_leaves_the_ready_one_alone(make: Make) -> None:
    drive = make(1)
    old = drive.ready()
    drive.fail(drive.transferring(), drained=True)
    assert drive.state(old) is State.READY
    assert drive.look_up("s").slab_handle == old


def test_a_refused_prepare_supersedes_nothing(make: Make) -> None:
    drive = make(1, layouts=(TWO_PLANES, layout_of(9)))
    old = drive.transferring()
    drive.prepare("s", 0)
    drive.prepare("s", layout_fingerprint=fingerprint(layout_of(9)))
    assert drive.state(old) is State.TRANSFERRING


def test_a_superseded_snapshot_under_a_lease_waits_for_its_reader(make: Make) -> None:
    drive = make(1)
    old = drive.ready()
    lease_id = drive.lease(old).lease_id
    new = drive.ready()
    assert drive.state(old) is drive.state(new) is State.READY
    assert refused(drive.lease(old), Reason.SUPERSEDED)
    assert drive.look_up("s").slab_handle == new
    drive.vote_no(old, 0, lease_id, Reason.INGEST_FAILED, keep=True)
    assert end_of(drive, old) == (State.ABORTED, Reason.SUPERSEDED)
    assert drive.look_up("s").slab_handle == new, "the end of the old one does not hide the new one"
    drive.abort(new)
    assert drive.look_up("s").slab_handle == 0


def test_a_superseded_snapshot_may_still_be_ingested_by_its_reader(make: Make) -> None:
    drive = make(1)
    old = drive.ready("s", 8)
    lease_id = drive.lease(old).lease_id
    new = drive.ready("s", 16)
    assert drive.vote(old, 0, lease_id).commit
    assert drive.hint() == 8
    drive.vote(new, 0, drive.lease(new).lease_id)
    assert drive.hint() == 16


def test_when_the_newer_one_ends_first_the_older_is_still_not_found(make: Make) -> None:
    drive = make(1)
    old = drive.ready()
    drive.lease(old)
    drive.abort(drive.ready())
    assert drive.look_up("s").slab_handle == 0
    drive.advance(10_000)
    assert end_of(drive, old) == (State.ABORTED, Reason.SUPERSEDED)


def test_three_attempts_in_a_row_leave_the_last(make: Make) -> None:
    drive = make(1, units=16)
    first = drive.ready()
    drive.lease(first)
    second = drive.ready()
    third = drive.ready()
    assert end_of(drive, second) == (State.ABORTED, Reason.SUPERSEDED)
    assert (drive.state(first), drive.state(third)) == (State.READY, State.READY)
    drive.advance(10_000)
    assert drive.state(first) is State.ABORTED and drive.state(third) is State.READY


def test_another_session_or_namespace_is_not_superseded(make: Make) -> None:
    other = layout_of(model="other")
    drive = make(1, units=16, layouts=(TWO_PLANES, other))
    first = drive.ready("a")
    second = drive.ready("b")
    third = drive.ready("a", layout_fingerprint=fingerprint(other))
    assert {drive.state(handle) for handle in (first, second, third)} == {State.READY}


# --- expire


@pytest.mark.parametrize(
    ("state", "deadline_ms", "reason", "kept"),
    [
        (State.RESERVED, 10_000, Reason.RESERVE_TIMEOUT, 2),
        (State.TRANSFERRING, 30_001, Reason.TRANSFER_TIMEOUT, 2),
        (State.READY, 300_000, Reason.READY_EXPIRED, 0),
    ],
)
def test_every_state_has_a_deadline_that_leads_to_quarantine_and_never_to_free(
    make: Make, state: State, deadline_ms: int, reason: Reason, kept: int
) -> None:
    drive = make(2)
    handle = {"RESERVED": drive.reserved, "TRANSFERRING": drive.transferring, "READY": drive.ready}[state](
        conn_id=7
    )
    drive.advance(deadline_ms - 2)
    assert drive.state(handle) is state
    drive.advance(2)
    assert end_of(drive, handle) == (State.ABORTED, reason)
    assert [drive.quarantined_units(rank) for rank in drive.ranks] == [kept, kept]
    assert drive.tells == [e.EndTold(7, handle, "s", State.ABORTED, reason, bool(kept))]


def test_a_rank_that_has_committed_is_free_when_the_others_time_out(make: Make) -> None:
    drive = make(2)
    handle = drive.transferring()
    drive.commit(handle, 0)
    drive.advance(31_000)
    assert [drive.quarantined_units(rank) for rank in drive.ranks] == [0, 2]


@pytest.mark.parametrize("state", [State.RESERVED, State.TRANSFERRING, State.READY])
def test_a_state_timer_that_fires_early_is_armed_again(make: Make, state: State) -> None:
    drive = make(1)
    handle = {"RESERVED": drive.reserved, "TRANSFERRING": drive.transferring, "READY": drive.ready}[state]()
    key = (e.TimerKind.STATE, handle, 0)
    deadline_ns = drive.timers[key].deadline_ns
    before = fingerprint_of(drive.machine)
    drive.now_ns = deadline_ns - 1
    drive.fire(key)
    assert drive.timers[key].deadline_ns == deadline_ns
    assert fingerprint_of(drive.machine) == before
    drive.now_ns = deadline_ns
    drive.fire(key)
    assert drive.state(handle) is State.ABORTED


@pytest.mark.parametrize("state", [State.RESERVED, State.TRANSFERRING, State.READY])
def test_a_timer_of_another_arming_or_state_does_nothing(make: Make, state: State) -> None:
    drive = make(1)
    handle = {"RESERVED": drive.reserved, "TRANSFERRING": drive.transferring, "READY": drive.ready}[state]()
    deadline_ns = drive.session(handle).deadline_ns
    drive.jump(400_000)
    timers = {
        State.RESERVED: e.ReserveTimedOut,
        State.TRANSFERRING: e.TransferTimedOut,
        State.READY: e.ReadyExpired,
    }
    for of_state, kind in timers.items():
        for other_ns in (deadline_ns - 1, deadline_ns + 1, deadline_ns):
            if (of_state, other_ns) != (state, deadline_ns):
                fields = {"slab_handle": handle, "deadline_ns": other_ns}
                unchanged(drive, lambda kind=kind, fields=fields: drive.tell(kind, **fields))
    assert drive.state(handle) is state


def test_a_ready_snapshot_expires_only_when_its_reader_is_done(make: Make) -> None:
    drive = make(1, ready_ttl_ms=5_000)
    handle = drive.ready()
    drive.advance(4_000)
    lease_id = drive.lease(handle).lease_id
    drive.advance(2_000)
    assert drive.state(handle) is State.READY
    assert refused(drive.lease(handle), Reason.READY_EXPIRED)
    drive.vote_no(handle, 0, lease_id, Reason.INGEST_FAILED, keep=True)
    assert end_of(drive, handle) == (State.ABORTED, Reason.READY_EXPIRED)


def test_leases_do_not_extend_the_life_of_a_snapshot(make: Make) -> None:
    drive = make(1, ready_ttl_ms=5_000)
    handle = drive.ready()
    for _ in range(4):
        drive.advance(1_000)
        drive.vote_no(handle, 0, drive.lease(handle).lease_id, Reason.INGEST_FAILED, keep=True)
    drive.advance(1_000)
    assert end_of(drive, handle) == (State.ABORTED, Reason.READY_EXPIRED)


# --- evict


def test_the_least_recently_used_goes_first_and_no_more_than_needed(make: Make) -> None:
    drive = make(2)
    handles = [drive.ready(name, conn_id=7) for name in "abcd"]
    new = drive.reserved("z")
    assert end_of(drive, handles[0]) == (State.ABORTED, Reason.EVICTED)
    assert [drive.state(handle) for handle in handles[1:]] == [State.READY] * 3
    assert drive.tells == [e.EndTold(7, handles[0], "a", State.ABORTED, Reason.EVICTED, False)]
    (transition,) = drive.logged(r.SessionTransition, slab_handle=handles[0], to_state="ABORTED")
    assert transition.newer_handle == new
    four = layout_of(4)
    for rank in drive.ranks:
        drive.post(e.LayoutDeclared, rank=rank, layout=four)
    drive.reserved("y", layout_fingerprint=fingerprint(four))
    assert [drive.state(handle) for handle in handles] == [State.ABORTED] * 3 + [State.READY]


@pytest.mark.parametrize("use", ["lookup", "prefix", "lease", "commit"])
def test_what_was_used_is_kept(make: Make, use: str) -> None:
    drive = make(1)
    first = drive.transferring("a", page_keys=("p",))
    if use != "commit":
        drive.commit(first)
    second = drive.ready("b")
    match use:
        case "commit":
            drive.commit(first)
        case "lookup":
            assert drive.look_up("a").slab_handle == first
        case "prefix":
            assert drive.look_up(page_keys=("p",)).slab_handle == first
        case "lease":
            drive.vote_no(first, 0, drive.lease(first).lease_id, Reason.INGEST_FAILED, keep=True)
    assert list(drive.machine.books.victims.victims()) == [second, first]
    for name in ("x", "y"):
        drive.reserved(name)
    drive.reserved("z")
    assert (drive.state(first), drive.state(second)) == (State.READY, State.ABORTED)


def test_a_lookup_does_not_make_a_leased_snapshot_evictable(make: Make) -> None:
    drive = make(1)
    handle = drive.ready()
    drive.lease(handle)
    assert unchanged(drive, lambda: drive.look_up("s")).slab_handle == handle
    assert handle not in drive.machine.books.victims


def test_only_ready_and_unleased_snapshots_are_victims(make: Make) -> None:
    drive = make(2)
    reserved, transferring = drive.reserved("a"), drive.transferring("b")
    half = drive.transferring("c")
    drive.commit(half, 0)
    leased = drive.ready("d")
    drive.lease(leased, 1)
    before = fingerprint_of(drive.machine)[0]
    result = drive.prepare("z")
    assert refused(result, Reason.SNAPSHOT_BUF_FULL) and "0 evictable" in result.detail
    assert fingerprint_of(drive.machine)[0] == before
    assert {drive.state(handle) for handle in (reserved, transferring, half, leased)} == {
        State.RESERVED,
        State.TRANSFERRING,
        State.READY,
    }


def test_nothing_is_evicted_when_evicting_everything_would_not_help(make: Make) -> None:
    wide = layout_of(6)
    drive = make(1, layouts=(TWO_PLANES, wide))
    drive.reserved("a")
    drive.reserved("b")
    ready = [drive.ready("c"), drive.ready("d")]
    result = drive.prepare("z", layout_fingerprint=fingerprint(wide))
    assert refused(result, Reason.SNAPSHOT_BUF_FULL) and "1024 evictable" in result.detail
    assert [drive.state(handle) for handle in ready] == [State.READY] * 2


def test_nothing_is_evicted_in_one_arena_when_another_has_no_room(make: Make) -> None:
    drive = make(2)
    ready = [drive.ready(name, ranks=(0,)) for name in "abcd"]
    for name in "efgh":
        drive.reserved(name, ranks=(1,))
    assert refused(drive.prepare("z"), Reason.SNAPSHOT_BUF_FULL)
    assert [drive.state(handle) for handle in ready] == [State.READY] * 4
    assert drive.machine.statistics().arenas[0].evictable_bytes == 2048


def test_a_victim_must_hold_something_where_room_is_lacking(make: Make) -> None:
    """The oldest is passed over when it lies in another arena."""
    drive = make(2)
    other = drive.ready("other", ranks=(0,))
    victim = drive.ready("victim", ranks=(1,))
    for name in "abc":
        drive.reserved(name, ranks=(1,))
    drive.reserved("z")
    assert (drive.state(other), drive.state(victim)) == (State.READY, State.ABORTED)


def test_victims_are_taken_until_every_arena_has_room(make: Make) -> None:
    drive = make(2)
    for name in "abc":
        drive.reserved(name, ranks=(0,))
        drive.reserved(name + "2", ranks=(1,))
    one = drive.ready("one", ranks=(0,))
    two = drive.ready("two", ranks=(1,))
    drive.reserved("z")
    assert drive.state(one) is drive.state(two) is State.ABORTED


def test_holes_apart_are_room_enough_after_eviction(make: Make) -> None:
    """Evicting every other slab leaves no hole for a contiguous one; each plane gets its own."""
    drive = make(1)
    handles = [drive.ready(name) for name in "abcd"]
    drive.look_up("b")
    drive.look_up("d")
    four = layout_of(4)
    drive.post(e.LayoutDeclared, rank=0, layout=four)
    granted = drive.prepare("z", layout_fingerprint=fingerprint(four))
    assert len(granted.shards[0].extents) == 4
    assert [drive.state(handle) for handle in handles] == [
        State.ABORTED,
        State.READY,
        State.ABORTED,
        State.READY,
    ]


def test_a_snapshot_that_is_large_enough_alone_is_the_only_victim(make: Make) -> None:
    big = layout_of(6)
    drive = make(1, layouts=(TWO_PLANES, big))
    first = drive.ready("big", layout_fingerprint=fingerprint(big))
    second = drive.ready("small")
    drive.reserved("z", layout_fingerprint=fingerprint(layout_of(6)))
    assert (drive.state(first), drive.state(second)) == (State.ABORTED, State.READY)


def test_a_snapshot_may_be_evicted_for_a_newer_one_of_its_own_session(make: Make) -> None:
    big = layout_of(8)
    drive = make(1, layouts=(big,))
    old = drive.ready("s")
    new = drive.reserved("s")
    assert end_of(drive, old) == (State.ABORTED, Reason.EVICTED)
    assert drive.state(new) is State.RESERVED


# --- stop


def test_a_stop_ends_every_open_attempt_and_no_lease_holds_it_up(make: Make) -> None:
    drive = make(2, units=16)
    handles = [
        drive.reserved("a", conn_id=1),
        drive.transferring("b", conn_id=2),
        drive.ready("c", conn_id=3),
    ]
    leased = drive.ready("d", conn_id=4)
    drive.lease(leased, 0, conn_id=5)
    drive.vote(leased, 1, drive.lease(leased, 1, conn_id=6).lease_id)
    waits = drive.cause_id
    ended = drive.ingested("e", conn_id=9)
    drive.tells.clear()
    assert drive.post(e.StopAsked) == e.Accepted()
    for handle in [*handles, leased]:
        assert end_of(drive, handle) == (State.ABORTED, Reason.DAEMON_STOPPED)
    assert end_of(drive, ended) == (State.INGESTED, Reason.OK)
    decided = e.Decided(commit=False, reason=Reason.DAEMON_STOPPED, state=State.ABORTED)
    assert drive.answer(waits) == decided
    assert [told.conn_id for told in drive.tells] == [1, 2, 3, 4, 5, 6]
    assert [drive.quarantined_units(rank) for rank in drive.ranks] == [6, 4], "written, and still read"
    assert refused(drive.prepare("z"), Reason.DRAINING)
    assert drive.machine.statistics().is_draining


def test_a_connection_with_two_parts_in_an_attempt_is_told_once(make: Make) -> None:
    drive = make(2)
    handle = drive.ready(conn_id=1)
    for rank in drive.ranks:
        drive.lease(handle, rank, conn_id=1)
    drive.post(e.StopAsked)
    assert [told.conn_id for told in drive.tells] == [1]
