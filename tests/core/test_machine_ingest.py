"""Reading: leases, and a two-phase commit over all ranks: all insert, or none."""

from collections.abc import Callable
from typing import Any

import pytest
from core_driver import Driver, layout_of, refused, unchanged

from snapd.core import events as e
from snapd.core import records as r
from snapd.core.events import State
from snapd.errors import Reason
from snapd.layout import fingerprint

Make = Callable[..., Driver]
VOTE_NO = [
    Reason.ALLOC_FAILED_ON_FINALIZE,
    Reason.CHECKSUM_MISMATCH,
    Reason.TOKEN_MISMATCH,
    Reason.PREFIX_NOT_RESIDENT,
    Reason.INGEST_FAILED,
]


def leases(drive: Driver, handle: int, *, conn_id: int = 0) -> dict[int, int]:
    """Return a lease id for each rank."""
    return {
        rank: drive.lease(handle, rank, conn_id=conn_id and conn_id + rank).lease_id
        for rank in drive.session(handle).shards
    }


def state_of(drive: Driver, handle: int) -> tuple[State, Reason]:
    return drive.state(handle), drive.reason(handle)


# --- leases


def test_a_lease_is_a_right_to_read_until_a_deadline(make: Make) -> None:
    drive = make(2)
    handle = drive.ready()
    leased = drive.lease(handle, 1)
    assert leased.deadline_ns == drive.now_ns + 10_000 * 10**6
    (record,) = drive.logged(r.LeaseGranted)
    assert (record.rank, record.lease_id, record.round) == (1, leased.lease_id, 1)
    assert record.until_ns == leased.deadline_ns
    assert (record.session_id, record.slab_handle) == ("s", handle)
    assert drive.state(handle) is State.READY
    view = drive.machine.view(handle)
    assert view is not None and view.is_leased
    assert [(shard.rank, shard.lease_id) for shard in view.shards] == [(0, 0), (1, leased.lease_id)]
    assert [shard.lease_deadline_ns for shard in view.shards] == [0, leased.deadline_ns]


def test_asking_again_gives_the_same_lease_and_no_more_time(make: Make) -> None:
    drive = make(1)
    handle = drive.ready()
    first = drive.lease(handle, conn_id=3)
    drive.jump(1_000)
    second = unchanged(drive, lambda: drive.lease(handle, conn_id=3))
    assert second == first


def test_a_reader_that_asks_again_on_another_connection_is_told_there(make: Make) -> None:
    drive = make(1)
    handle = drive.ready()
    drive.lease(handle, conn_id=3)
    drive.lease(handle, conn_id=4)
    drive.lease(handle)
    drive.post(e.StopAsked)
    assert [told.conn_id for told in drive.tells] == [4]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"rank": 1}, Reason.WRONG_RANK),
        ({"rank": -1}, Reason.WRONG_RANK),
        ({"layout_fingerprint": fingerprint(layout_of(model="other"))}, Reason.LAYOUT_MISMATCH),
        ({"layout_fingerprint": ""}, Reason.LAYOUT_MISMATCH),
    ],
)
def test_a_lease_for_another_rank_or_layout_is_refused(
    make: Make, fields: dict[str, Any], reason: Reason
) -> None:
    drive = make(2)
    handle = drive.ready(ranks=(0,))
    assert refused(unchanged(drive, lambda: drive.lease(handle, **fields)), reason)


def test_lease_ids_are_never_used_again(make: Make) -> None:
    drive = make(2, units=8)
    seen: list[int] = []
    for name in ("a", "b"):
        handle = drive.ready(name)
        for _ in range(2):
            ids = leases(drive, handle)
            seen += ids.values()
            for rank, lease_id in ids.items():
                drive.vote_no(handle, rank, lease_id, Reason.INGEST_FAILED, keep=True)
    assert len(set(seen)) == 8


# --- commit


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_yes_together_is_commit_for_all(make: Make, ranks: int) -> None:
    drive = make(ranks)
    handle = drive.ready(conn_id=9)
    ids = leases(drive, handle, conn_id=20)
    causes = []
    for rank in reversed(range(ranks)):
        answer = drive.vote(handle, rank, ids[rank])
        causes.append(drive.cause_id)
        if rank:
            assert answer is None, "nobody inserts before all have voted"
            assert drive.state(handle) is State.READY
    decided = e.Decided(commit=True, reason=Reason.OK, state=State.INGESTED)
    assert [drive.answer(cause_id) for cause_id in causes] == [decided] * ranks
    assert state_of(drive, handle) == (State.INGESTED, Reason.OK)
    assert [drive.free_units(rank) for rank in drive.ranks] == [8] * ranks, "freed at once"
    ended = drive.logged(r.LeaseEnded)
    assert [(x.ok, x.reason) for x in ended] == [(True, Reason.OK)] * ranks
    told = [e.EndTold(conn, handle, "s", State.INGESTED, Reason.OK, False) for conn in (9,)]
    told += [e.EndTold(20 + r_, handle, "s", State.INGESTED, Reason.OK, False) for r_ in range(ranks)]
    assert drive.tells == told
    assert drive.machine.statistics().bytes_ingested == 512 * ranks
    (outcome,) = drive.logged(r.SyncOutcome)
    assert outcome.ok and outcome.ranks == tuple(range(ranks)) and outcome.bytes == 512 * ranks
    assert not drive.timers


def test_a_rank_that_has_no_lease_yet_is_waited_for(make: Make) -> None:
    drive = make(2)
    handle = drive.ready()
    assert drive.vote(handle, 0, drive.lease(handle, 0).lease_id) is None
    first = drive.cause_id
    assert drive.vote(handle, 1, drive.lease(handle, 1).lease_id).commit
    assert drive.answer(first).commit


def test_the_times_in_each_state_are_in_the_outcome(make: Make) -> None:
    drive = make(1)
    handle = drive.reserved()
    drive.advance(3)
    drive.start(handle)
    drive.advance(5)
    drive.commit(handle)
    drive.advance(7)
    drive.vote(handle, 0, drive.lease(handle).lease_id)
    (outcome,) = drive.logged(r.SyncOutcome)
    assert (outcome.reserved_ms, outcome.transferring_ms) == (3.000001, 5.000001)
    assert (outcome.ready_ms, outcome.duration_ms) == (7.000002, 15.000004)
    view = drive.machine.view(handle)
    assert view is not None
    assert view.spent_ms == {"RESERVED": 3.000001, "TRANSFERRING": 5.000001, "READY": 7.000002}


def test_a_repeated_yes_waits_with_the_first_and_gets_the_same_answer(make: Make) -> None:
    drive = make(2)
    handle = drive.ready()
    ids = leases(drive, handle)
    causes = []
    for _ in range(3):
        assert drive.vote(handle, 0, ids[0]) is None
        causes.append(drive.cause_id)
    drive.vote(handle, 1, ids[1])
    assert [drive.answer(cause_id).commit for cause_id in causes] == [True] * 3
    assert len(drive.logged(r.LeaseEnded)) == 2


def test_a_yes_cannot_become_a_no(make: Make) -> None:
    drive = make(2)
    handle = drive.ready()
    ids = leases(drive, handle)
    drive.vote(handle, 0, ids[0])
    result = unchanged(drive, lambda: drive.vote_no(handle, 0, ids[0], Reason.INGEST_FAILED))
    assert refused(result, Reason.WRONG_STATE)
    assert drive.vote(handle, 1, ids[1]).commit


def test_a_rank_that_has_voted_gets_no_other_lease(make: Make) -> None:
    drive = make(2)
    handle = drive.ready()
    ids = leases(drive, handle)
    drive.vote(handle, 0, ids[0])
    assert refused(unchanged(drive, lambda: drive.lease(handle, 0)), Reason.WRONG_STATE)


def test_two_attempts_are_voted_on_apart(make: Make) -> None:
    """A message about another attempt changes nothing."""
    drive = make(1)
    one, two = drive.ready("one"), drive.ready("two")
    lease_one, lease_two = drive.lease(one).lease_id, drive.lease(two).lease_id
    result = unchanged(drive, lambda: drive.vote(one, 0, lease_two))
    assert refused(result, Reason.LEASE_EXPIRED)
    assert drive.vote(two, 0, lease_two).commit
    assert drive.state(one) is State.READY
    assert drive.vote(one, 0, lease_one).commit


# --- abort


@pytest.mark.parametrize("reason", VOTE_NO)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_one_no_ends_the_attempt_for_all(make: Make, ranks: int, reason: Reason) -> None:
    """Rank 0 says no, rank 1 has said yes, rank 2 still reads."""
    drive = make(ranks)
    handle = drive.ready(conn_id=9)
    ids = leases(drive, handle, conn_id=20)
    if ranks > 1:
        drive.vote(handle, 1, ids[1])
    waits = drive.cause_id
    decided = e.Decided(commit=False, reason=reason, state=State.ABORTED)
    assert drive.vote_no(handle, 0, ids[0], reason) == decided
    if ranks > 1:
        assert drive.answer(waits) == decided
    assert state_of(drive, handle) == (State.ABORTED, reason)
    corrupt = 2 if reason is Reason.CHECKSUM_MISMATCH else 0
    kept = [corrupt, 0, 2][:ranks]
    assert [drive.quarantined_units(rank) for rank in drive.ranks] == kept
    assert [drive.free_units(rank) for rank in drive.ranks] == [8 - units for units in kept]
    assert [told.conn_id for told in drive.tells] == [9, 21, 22][:ranks], "the voter has its answer"
    assert not any(told.drain_wanted for told in drive.tells)
    ended = {x.lease_id: (x.ok, x.reason) for x in drive.logged(r.LeaseEnded)}
    assert ended == dict.fromkeys(ids.values(), (False, reason))
    assert drive.machine.statistics().bytes_ingested == 0


def test_bytes_that_did_not_match_are_kept_for_the_whole_time(make: Make) -> None:
    drive = make(2)
    handle = drive.ready()
    ids = leases(drive, handle)
    drive.vote_no(handle, 1, ids[1], Reason.CHECKSUM_MISMATCH)
    (corrupt,) = drive.logged(r.SlabQuarantined, rank=1)
    assert corrupt.why == "corrupt" and corrupt.until_ns == drive.now_ns + 60_000 * 10**6
    (leased,) = drive.logged(r.SlabQuarantined, rank=0)
    assert leased.why == "leased" and leased.until_ns < corrupt.until_ns
    drive.advance(59_999)
    assert (drive.quarantined_units(0), drive.quarantined_units(1)) == (0, 2)
    drive.advance(1)
    assert drive.quarantined_units(1) == 0


@pytest.mark.parametrize("reason", [x for x in VOTE_NO if x is not Reason.CHECKSUM_MISMATCH])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_no_with_keep_ends_the_round_and_leaves_the_snapshot_ready(
    make: Make, ranks: int, reason: Reason
) -> None:
    drive = make(ranks)
    handle = drive.ready()
    ids = leases(drive, handle)
    if ranks > 1:
        drive.vote(handle, 1, ids[1])
    waits = drive.cause_id
    decided = e.Decided(commit=False, reason=reason, state=State.READY)
    assert drive.vote_no(handle, 0, ids[0], reason, keep=True) == decided
    if ranks > 1:
        assert drive.answer(waits) == decided, "the same answer for all"
    assert drive.state(handle) is State.READY
    assert (handle in drive.machine.books.victims) is (ranks < 3), "rank 2 still reads"
    if ranks > 2:
        late = drive.vote(handle, 2, ids[2])
        assert late == e.Decided(commit=False, reason=Reason.ROUND_ABORTED, state=State.READY)
        assert handle in drive.machine.books.victims
    assert not drive.logged(r.SyncOutcome)
    ids = leases(drive, handle)
    assert {x.round for x in drive.logged(r.LeaseGranted) if x.lease_id in ids.values()} == {2}
    for rank, lease_id in ids.items():
        last = drive.vote(handle, rank, lease_id)
    assert last.commit and drive.state(handle) is State.INGESTED


def test_bytes_that_did_not_match_are_not_kept_for_another_try(make: Make) -> None:
    drive = make(1)
    handle = drive.ready()
    lease_id = drive.lease(handle).lease_id
    decided = drive.vote_no(handle, 0, lease_id, Reason.CHECKSUM_MISMATCH, keep=True)
    assert decided == e.Decided(commit=False, reason=Reason.CHECKSUM_MISMATCH, state=State.ABORTED)


def test_a_vote_of_a_round_that_is_over_commits_nothing(make: Make) -> None:
    """A rank that still reads under the old round must vote again with the others."""
    drive = make(2)
    handle = drive.ready()
    ids = leases(drive, handle)
    drive.vote_no(handle, 0, ids[0], Reason.ALLOC_FAILED_ON_FINALIZE, keep=True)
    again = drive.lease(handle, 0).lease_id
    assert drive.vote(handle, 0, again) is None
    waits = drive.cause_id
    decided = e.Decided(commit=False, reason=Reason.ROUND_ABORTED, state=State.READY)
    assert drive.vote(handle, 1, ids[1]) == decided
    assert drive.answer(waits) is None, "the new round goes on"
    assert drive.vote(handle, 1, drive.lease(handle, 1).lease_id).commit
    assert drive.answer(waits).commit


def test_a_new_lease_ends_the_one_of_the_round_before(make: Make) -> None:
    drive = make(2)
    handle = drive.ready()
    ids = leases(drive, handle)
    drive.vote_no(handle, 0, ids[0], Reason.ALLOC_FAILED_ON_FINALIZE, keep=True)
    again = drive.lease(handle, 1).lease_id
    assert again != ids[1]
    (ended,) = drive.logged(r.LeaseEnded, lease_id=ids[1])
    assert (ended.ok, ended.reason) == (False, Reason.ROUND_ABORTED)
    assert refused(unchanged(drive, lambda: drive.vote(handle, 1, ids[1])), Reason.LEASE_EXPIRED)
    assert drive.vote(handle, 1, again) is None


@pytest.mark.parametrize("keep", [False, True])
def test_a_mismatch_ends_the_attempt_even_in_a_round_that_is_over(make: Make, keep: bool) -> None:
    """Bytes that did not match for one rank are of no use to any, whatever the others said before."""
    drive = make(2)
    handle = drive.ready()
    ids = leases(drive, handle)
    drive.vote_no(handle, 0, ids[0], Reason.ALLOC_FAILED_ON_FINALIZE, keep=True)
    drive.vote(handle, 0, drive.lease(handle, 0).lease_id)
    waits = drive.cause_id
    decided = e.Decided(commit=False, reason=Reason.CHECKSUM_MISMATCH, state=State.ABORTED)
    assert drive.vote_no(handle, 1, ids[1], Reason.CHECKSUM_MISMATCH, keep=keep) == decided
    assert drive.answer(waits) == decided
    assert (drive.quarantined_units(0), drive.quarantined_units(1)) == (0, 2)


@pytest.mark.parametrize("reason", [Reason.TOKEN_MISMATCH, Reason.PREFIX_NOT_RESIDENT])
def test_a_late_no_ends_the_attempt_unless_it_keeps_it(make: Make, reason: Reason) -> None:
    drive = make(3)
    handle = drive.ready()
    ids = leases(drive, handle)
    drive.vote_no(handle, 0, ids[0], Reason.ALLOC_FAILED_ON_FINALIZE, keep=True)
    kept = drive.vote_no(handle, 1, ids[1], reason, keep=True)
    assert kept == e.Decided(commit=False, reason=Reason.ROUND_ABORTED, state=State.READY)
    assert drive.session(handle).round == 2, "the new round is not disturbed"
    ended = drive.vote_no(handle, 2, ids[2], reason)
    assert ended == e.Decided(commit=False, reason=reason, state=State.ABORTED)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"rank": 2}, Reason.WRONG_RANK),
        ({"rank": 1}, Reason.WRONG_RANK),
        ({"lease_id": 99}, Reason.LEASE_EXPIRED),
        ({"ok": False}, Reason.INVALID_REQUEST),
        ({"ok": False, "reason": Reason.CLIENT_ABORT}, Reason.INVALID_REQUEST),
        ({"ok": False, "reason": Reason.LEASE_EXPIRED, "keep": True}, Reason.INVALID_REQUEST),
    ],
)
def test_a_vote_that_makes_no_sense_changes_nothing(
    make: Make, fields: dict[str, Any], reason: Reason
) -> None:
    drive = make(3)
    handle = drive.ready(ranks=(0, 1))
    lease_id = drive.lease(handle, 0).lease_id
    drive.lease(handle, 1)
    vote = {"handle": handle, "rank": 0, "lease_id": lease_id, **fields}
    assert refused(unchanged(drive, lambda: drive.vote(**vote)), reason)
    assert drive.state(handle) is State.READY


def test_a_lease_for_another_session_s_snapshot_is_refused_and_disturbs_nobody(make: Make) -> None:
    """A finalize that names the wrong session must not end the round of the right one."""
    drive = make(2)
    handle = drive.ready("s")
    lease_id = drive.lease(handle, 0, session_id="s").lease_id
    drive.vote(handle, 0, lease_id)
    assert refused(unchanged(drive, lambda: drive.lease(handle, 1, session_id="t")), Reason.STALE_HANDLE)
    other_id = drive.lease(handle, 1, session_id="s").lease_id
    assert drive.vote(handle, 1, other_id).commit


def test_a_vote_without_a_lease_is_refused(make: Make) -> None:
    drive = make(1)
    handle = drive.ready()
    assert refused(unchanged(drive, lambda: drive.vote(handle, 0, 1)), Reason.LEASE_EXPIRED)


# --- a deadline that passes


def test_a_lease_that_is_over_is_revoked_and_its_vote_refused(make: Make) -> None:
    drive = make(1)
    handle = drive.ready()
    lease_id = drive.lease(handle).lease_id
    drive.advance(9_999)
    assert drive.session(handle).is_leased
    drive.advance(1)
    assert drive.state(handle) is State.READY and not drive.session(handle).is_leased
    (ended,) = drive.logged(r.LeaseEnded)
    assert (ended.ok, ended.reason, ended.duration_ms) == (False, Reason.LEASE_EXPIRED, 10_000)
    assert refused(unchanged(drive, lambda: drive.vote(handle, 0, lease_id)), Reason.LEASE_EXPIRED)
    assert handle in drive.machine.books.victims, "it can be evicted again"
    again = drive.lease(handle).lease_id
    assert drive.session(handle).round == 2
    assert drive.vote(handle, 0, again).commit


def test_a_vote_missing_at_the_deadline_is_abort_for_all(make: Make) -> None:
    drive = make(3)
    handle = drive.ready()
    lease_two = drive.lease(handle, 2).lease_id
    drive.advance(1_000)
    ids = {rank: drive.lease(handle, rank).lease_id for rank in (0, 1)}
    causes = []
    for rank in (0, 1):
        drive.vote(handle, rank, ids[rank])
        causes.append(drive.cause_id)
    drive.advance(9_000)
    decided = e.Decided(commit=False, reason=Reason.ROUND_ABORTED, state=State.READY)
    assert [drive.answer(cause_id) for cause_id in causes] == [decided] * 2
    assert drive.state(handle) is State.READY and not drive.session(handle).is_leased
    assert refused(drive.vote(handle, 2, lease_two), Reason.LEASE_EXPIRED)
    for rank in (0, 1):
        assert drive.vote(handle, rank, ids[rank]) == decided, "asked again, the same answer"
    assert not [timer for timer in drive.timers.values() if isinstance(timer, e.LeaseTimedOut)]


def test_who_has_voted_and_waits_too_long_hears_abort(make: Make) -> None:
    """Rank 1 never comes: rank 0's own deadline ends the round."""
    drive = make(2)
    handle = drive.ready()
    drive.vote(handle, 0, drive.lease(handle, 0).lease_id)
    waits = drive.cause_id
    drive.advance(10_000)
    assert drive.answer(waits) == e.Decided(commit=False, reason=Reason.LEASE_EXPIRED, state=State.READY)
    assert drive.session(handle).round == 2


def test_a_doomed_lease_that_runs_out_does_not_disturb_the_new_round(make: Make) -> None:
    drive = make(2)
    handle = drive.ready()
    ids = leases(drive, handle)
    drive.advance(4_000)
    drive.vote_no(handle, 0, ids[0], Reason.INGEST_FAILED, keep=True)
    drive.vote(handle, 0, drive.lease(handle, 0).lease_id)
    waits = drive.cause_id
    drive.advance(6_000)
    assert drive.session(handle).shards[1].lease is None, "the old lease is over"
    assert drive.session(handle).round == 2 and drive.answer(waits) is None
    assert drive.vote(handle, 1, drive.lease(handle, 1).lease_id).commit


def test_a_lease_timer_that_fires_early_is_armed_again(make: Make) -> None:
    drive = make(1)
    handle = drive.ready()
    leased = drive.lease(handle)
    key = (e.TimerKind.LEASE, handle, 0)
    drive.jump(9_999)
    drive.fire(key)
    assert drive.timers[key].deadline_ns == leased.deadline_ns
    assert drive.session(handle).is_leased
    assert drive.vote(handle, 0, leased.lease_id).commit


def test_a_timer_of_a_lease_that_is_gone_does_nothing(make: Make) -> None:
    drive = make(1)
    handle = drive.ready()
    old = drive.lease(handle)
    drive.vote_no(handle, 0, old.lease_id, Reason.INGEST_FAILED, keep=True)
    late = {"slab_handle": handle, "rank": 0, "deadline_ns": old.deadline_ns}
    drive.jump(11_000)
    unchanged(drive, lambda: drive.tell(e.LeaseTimedOut, **late))
    drive.lease(handle)
    unchanged(drive, lambda: drive.tell(e.LeaseTimedOut, **late))


def test_a_vote_after_the_deadline_is_refused_although_no_timer_has_come(make: Make) -> None:
    """The daemon may have stood still; what waits in its socket may be taken before what is due."""
    drive = make(1)
    handle = drive.ready()
    leased = drive.lease(handle)
    drive.jump(10_000)
    assert refused(drive.vote(handle, 0, leased.lease_id), Reason.LEASE_EXPIRED)
    assert state_of(drive, handle) == (State.READY, Reason.OK)
    assert drive.vote(handle, 0, drive.lease(handle).lease_id).commit


def test_a_vote_in_time_commits_nothing_once_the_lease_of_another_vote_is_over(make: Make) -> None:
    """The rank that waited for too long has given up: the last vote must not make the others insert."""
    drive = make(2)
    handle = drive.ready()
    drive.vote(handle, 0, drive.lease(handle, 0).lease_id)
    waits = drive.cause_id
    drive.jump(5_000)
    second = drive.lease(handle, 1)
    drive.jump(6_000)
    decided = drive.vote(handle, 1, second.lease_id)
    assert (decided.commit, decided.reason) == (False, Reason.ROUND_ABORTED)
    assert (drive.answer(waits).commit, drive.answer(waits).reason) == (False, Reason.LEASE_EXPIRED)
    assert state_of(drive, handle) == (State.READY, Reason.OK)


def test_a_late_vote_ends_what_was_to_end_with_the_lease(make: Make) -> None:
    drive = make(1)
    handle = drive.ready()
    leased = drive.lease(handle)
    assert drive.abort(handle).pending
    drive.jump(10_000)
    assert refused(drive.vote(handle, 0, leased.lease_id), Reason.LEASE_EXPIRED)
    assert state_of(drive, handle) == (State.ABORTED, Reason.CLIENT_ABORT)


def test_whoever_asks_after_the_deadline_gets_a_lease_with_all_of_its_time(make: Make) -> None:
    drive = make(1)
    handle = drive.ready()
    first = drive.lease(handle)
    drive.jump(10_000)
    again = drive.lease(handle)
    assert again.lease_id != first.lease_id
    assert again.deadline_ns == drive.now_ns + 10_000 * 10**6


def test_a_dead_reader_blocks_nobody_for_longer_than_its_lease(make: Make) -> None:
    drive = make(1)
    dead = drive.ready("dead")
    drive.lease(dead)
    for name in "abc":
        drive.reserved(name)
    assert refused(drive.prepare("z"), Reason.SNAPSHOT_BUF_FULL)
    drive.advance(9_000)
    assert refused(drive.prepare("z"), Reason.SNAPSHOT_BUF_FULL)
    drive.advance(1_000)
    assert state_of(drive, dead) == (State.READY, Reason.OK)
    drive.prepare("z")
    assert state_of(drive, dead) == (State.ABORTED, Reason.EVICTED)


# --- all or none, whatever the order


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_kept_no_can_be_repeated_for_ever_without_growing(make: Make, ranks: int) -> None:
    drive = make(ranks, ready_ttl_ms=10**9)
    handle = drive.transferring()
    for rank in drive.ranks:
        drive.commit(handle, rank)
    for _ in range(40 * ranks):
        lease_id = drive.lease(handle, 0).lease_id
        drive.vote_no(handle, 0, lease_id, Reason.ALLOC_FAILED_ON_FINALIZE, keep=True)
    assert len(drive.session(handle).answers) == 32 * ranks
    decided = e.Decided(commit=False, reason=Reason.ALLOC_FAILED_ON_FINALIZE, state=State.READY)
    again = drive.vote_no(handle, 0, lease_id, Reason.ALLOC_FAILED_ON_FINALIZE, keep=True)
    assert again == decided, "the latest are remembered"
    assert drive.commit(handle, 0) == e.Accepted(State.TRANSFERRING), "and so is what is no vote"
    assert drive.start(handle) == e.Accepted(State.READY)
