"""Repeats, late messages and wrong names: the first answer, or a refusal, and never a change."""

from collections.abc import Callable
from typing import Any

import pytest
from core_driver import Driver, refused, unchanged

from snapd.core import events as e
from snapd.core.events import State
from snapd.core.fsm import ABSORBED, REJECTED
from snapd.core.lives import VOTES_WAITING_MAX
from snapd.errors import Reason

Make = Callable[..., Driver]

FIELDS: dict[type[e.SessionEvent], dict[str, Any]] = {
    e.TransferStarted: {},
    e.RankCommitted: {"rank": 0, "num_bytes": 512, "num_tokens": 16, "checksums": ((9, 9),) * 2},
    e.TransferFailed: {"drained": True},
    e.AbortAsked: {"drained": True},
    e.WriterDrained: {},
    e.WriterExited: {},
    e.LeaseAsked: {"rank": 0, "layout_fingerprint": "?"},
    e.VoteCast: {"rank": 0, "lease_id": 1, "ok": True},
    e.LookedUp: {},
    e.ReserveTimedOut: {"deadline_ns": 1},
    e.TransferTimedOut: {"deadline_ns": 1},
    e.ReadyExpired: {"deadline_ns": 1},
    e.LeaseTimedOut: {"rank": 0, "deadline_ns": 1},
    e.VictimChosen: {},
    e.SupersededBy: {"newer_handle": 1},
    e.DaemonStopping: {},
}

NOBODY_WAITS = {
    e.WriterExited, e.LookedUp, e.ReserveTimedOut, e.TransferTimedOut, e.ReadyExpired, e.LeaseTimedOut,
    e.VictimChosen, e.SupersededBy, e.DaemonStopping,
}  # fmt: skip


def in_state(drive: Driver, state: State) -> int:
    match state:
        case State.RESERVED:
            return drive.reserved()
        case State.TRANSFERRING:
            return drive.transferring()
        case State.READY:
            return drive.ready()
        case State.INGESTED:
            return drive.ingested()
    handle = drive.reserved()
    drive.abort(handle, drained=True)
    return handle


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("kind", FIELDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_the_table_absorbs_or_rejects_changes_nothing(
    make: Make, ranks: int, kind: type[e.SessionEvent], state: State
) -> None:
    if kind not in ABSORBED[state] and kind not in REJECTED[state]:
        return
    drive = make(ranks)
    handle = in_state(drive, state)
    before = drive.machine.statistics()
    answer = unchanged(drive, lambda: drive.post(kind, slab_handle=handle, **FIELDS[kind]))
    after = drive.machine.statistics()
    if kind in REJECTED[state]:
        assert refused(answer, REJECTED[state][kind]) and state in answer.detail
        assert after.requests_refused == before.requests_refused + 1
        assert after.messages_absorbed == before.messages_absorbed
    else:
        assert after.messages_absorbed == before.messages_absorbed + 1
        if kind in NOBODY_WAITS:
            assert answer is None and after.requests_refused == before.requests_refused
        else:
            assert answer is not None


@pytest.mark.parametrize("kind", FIELDS)
@pytest.mark.parametrize("others", [False, True])
def test_an_unknown_handle_is_an_answer_and_never_a_crash(
    make: Make, kind: type[e.SessionEvent], others: bool
) -> None:
    """Never used, or of another epoch."""
    drive = make(2)
    if others:
        drive.ready("a")
        drive.abort(drive.transferring("b"))
    answer = unchanged(drive, lambda: drive.post(kind, slab_handle=77, **FIELDS[kind]))
    assert refused(answer, Reason.STALE_HANDLE) and "77" in answer.detail
    assert drive.machine.statistics().requests_refused == 1
    assert drive.tell(kind, slab_handle=77, **FIELDS[kind]) == []
    assert drive.machine.statistics().requests_refused == 1, "nobody asked"


# --- the first answer


@pytest.mark.parametrize("state", [State.TRANSFERRING, State.READY])
def test_a_repeated_start_is_accepted_while_the_attempt_is_open(make: Make, state: State) -> None:
    drive = make(1)
    handle = in_state(drive, state)
    assert unchanged(drive, lambda: drive.start(handle, conn_id=9)) == e.Accepted(state)


@pytest.mark.parametrize("state", [State.INGESTED, State.ABORTED])
def test_a_repeated_start_after_the_end_is_no_leave_to_write(make: Make, state: State) -> None:
    drive = make(1)
    handle = in_state(drive, state)
    assert refused(unchanged(drive, lambda: drive.start(handle)), Reason.STALE_HANDLE)


@pytest.mark.parametrize("state", [State.TRANSFERRING, State.READY])
def test_a_start_after_a_commit_is_accepted_as_it_stands(make: Make, state: State) -> None:
    drive = make(2)
    handle = drive.reserved()
    drive.commit(handle, 0)
    if state is State.READY:
        drive.commit(handle, 1)
    assert unchanged(drive, lambda: drive.start(handle)) == e.Accepted(state)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_commit_can_be_repeated_on_a_new_connection_for_as_long_as_it_is_remembered(
    make: Make, ranks: int
) -> None:
    """The acknowledgement was lost: the same answer, before READY, after it, and after the end."""
    drive = make(ranks)
    handle = drive.transferring()
    answers = {}
    for rank in drive.ranks:
        answers[rank] = drive.commit(handle, rank, conn_id=1)
        assert unchanged(drive, lambda rank=rank: drive.commit(handle, rank, conn_id=1)) == answers[rank]
    for rank in drive.ranks:
        assert drive.commit(handle, rank, conn_id=2) == answers[rank]
    ids = {rank: drive.lease(handle, rank).lease_id for rank in drive.ranks}
    for rank in drive.ranks:
        assert unchanged(drive, lambda rank=rank: drive.commit(handle, rank, conn_id=2)) == answers[rank]
        drive.vote(handle, rank, ids[rank])
    for rank in drive.ranks:
        assert unchanged(drive, lambda rank=rank: drive.commit(handle, rank)) == answers[rank]
        other = unchanged(drive, lambda rank=rank: drive.commit(handle, rank, num_bytes=3))
        assert refused(other, Reason.STALE_HANDLE)
    assert drive.machine.statistics().bytes_committed == 512 * ranks


def test_a_commit_that_did_not_add_up_is_told_so_again(make: Make) -> None:
    drive = make(1)
    handle = drive.transferring()
    first = drive.commit(handle, num_tokens=3)
    assert refused(first, Reason.PARTIAL_TRANSFER)
    assert unchanged(drive, lambda: drive.commit(handle, num_tokens=3)) == first
    assert refused(unchanged(drive, lambda: drive.commit(handle)), Reason.STALE_HANDLE)


def test_a_repeated_failure_gets_the_first_answer(make: Make) -> None:
    drive = make(2)
    handle = drive.transferring()
    first = drive.fail(handle, rank=0)
    assert unchanged(drive, lambda: drive.fail(handle, rank=0)) == first == e.Accepted(State.ABORTED)
    assert refused(unchanged(drive, lambda: drive.fail(handle, rank=1)), Reason.STALE_HANDLE)
    other = unchanged(drive, lambda: drive.fail(handle, rank=0, reason=Reason.SESSION_NOT_RESIDENT))
    assert refused(other, Reason.STALE_HANDLE)


def test_a_repeated_abort_gets_the_first_answer(make: Make) -> None:
    drive = make(1)
    handle = drive.transferring()
    assert drive.abort(handle) == unchanged(drive, lambda: drive.abort(handle)) == e.Accepted(State.ABORTED)
    ready = drive.ready()
    drive.lease(ready)
    first = drive.abort(ready)
    assert first == unchanged(drive, lambda: drive.abort(ready)) == e.Accepted(State.READY, pending=True)


def test_an_abort_of_what_has_ended_otherwise_is_stale(make: Make) -> None:
    drive = make(1)
    handle = drive.ingested()
    answer = unchanged(drive, lambda: drive.abort(handle))
    assert refused(answer, Reason.STALE_HANDLE) and "INGESTED" in answer.detail


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_repeated_vote_hears_commit_again(make: Make, ranks: int) -> None:
    """The reply was lost: all ranks insert, so this one must hear it."""
    drive = make(ranks)
    handle = drive.ready()
    ids = {rank: drive.lease(handle, rank).lease_id for rank in drive.ranks}
    for rank in drive.ranks:
        drive.vote(handle, rank, ids[rank])
    decided = e.Decided(commit=True, reason=Reason.OK, state=State.INGESTED)
    for rank in drive.ranks:
        assert unchanged(drive, lambda rank=rank: drive.vote(handle, rank, ids[rank])) == decided


@pytest.mark.parametrize("extra", [{"keep": True}, {"reason": Reason.INGEST_FAILED}])
def test_what_means_nothing_with_a_yes_does_not_make_it_another_vote(
    make: Make, extra: dict[str, Any]
) -> None:
    drive = make(1)
    handle = drive.ready()
    lease_id = drive.lease(handle).lease_id
    assert drive.vote(handle, 0, lease_id, **extra).commit
    assert unchanged(drive, lambda: drive.vote(handle, 0, lease_id, **extra)).commit


def test_of_equal_votes_that_wait_the_newest_are_kept_and_the_oldest_are_refused(make: Make) -> None:
    """Somebody who votes over ever new connections takes no memory, and the last one hears the decision."""
    drive = make(2)
    handle = drive.ready()
    lease_id = drive.lease(handle, 0).lease_id
    causes = []
    for _ in range(VOTES_WAITING_MAX + 3):
        drive.vote(handle, 0, lease_id)
        causes.append(drive.cause_id)
    assert [refused(drive.answer(cause), Reason.LIMIT_REACHED) for cause in causes[:3]] == [True] * 3
    assert [drive.answer(cause) for cause in causes[3:]] == [None] * VOTES_WAITING_MAX
    assert drive.vote(handle, 1, drive.lease(handle, 1).lease_id).commit
    assert all(drive.answer(cause).commit for cause in causes[3:])


@pytest.mark.parametrize("keep", [False, True])
def test_a_repeated_no_hears_the_decision_again(make: Make, keep: bool) -> None:
    drive = make(2)
    handle = drive.ready()
    ids = {rank: drive.lease(handle, rank).lease_id for rank in drive.ranks}
    drive.vote(handle, 1, ids[1])
    first = drive.vote_no(handle, 0, ids[0], Reason.INGEST_FAILED, keep=keep)
    again = unchanged(drive, lambda: drive.vote_no(handle, 0, ids[0], Reason.INGEST_FAILED, keep=keep))
    assert again == first
    assert unchanged(drive, lambda: drive.vote(handle, 1, ids[1])) == first, "and so does the other rank"
    other = unchanged(drive, lambda: drive.vote_no(handle, 0, ids[0], Reason.INGEST_FAILED, keep=not keep))
    assert refused(other, Reason.LEASE_EXPIRED if keep else Reason.STALE_HANDLE)


def test_a_vote_of_a_round_that_was_over_hears_that_again(make: Make) -> None:
    drive = make(2)
    handle = drive.ready()
    ids = {rank: drive.lease(handle, rank).lease_id for rank in drive.ranks}
    drive.vote_no(handle, 0, ids[0], Reason.INGEST_FAILED, keep=True)
    first = drive.vote(handle, 1, ids[1])
    assert first.reason is Reason.ROUND_ABORTED
    assert unchanged(drive, lambda: drive.vote(handle, 1, ids[1])) == first


def test_a_late_vote_after_the_end_does_not_hear_commit(make: Make) -> None:
    drive = make(1)
    handle = drive.ready()
    lease_id = drive.lease(handle).lease_id
    drive.advance(10_000)
    drive.abort(handle)
    assert refused(unchanged(drive, lambda: drive.vote(handle, 0, lease_id)), Reason.STALE_HANDLE)


def test_a_lease_is_never_given_again_after_the_end(make: Make) -> None:
    drive = make(1)
    for handle in (drive.ingested("a"), in_state(drive, State.ABORTED)):
        assert refused(unchanged(drive, lambda handle=handle: drive.lease(handle)), Reason.STALE_HANDLE)


def test_what_is_no_longer_remembered_is_stale(make: Make) -> None:
    drive = make(1, ended_history_max=1)
    handle = drive.ingested("a")
    drive.ingested("b")
    assert drive.machine.view(handle) is None
    assert refused(unchanged(drive, lambda: drive.start(handle)), Reason.STALE_HANDLE)


# --- messages of another attempt


def test_an_old_writers_messages_do_not_touch_the_newer_attempt(make: Make) -> None:
    """An old client's commit must not complete a newer attempt of the same session."""
    drive = make(1)
    old = drive.transferring()
    new = drive.transferring()
    for act in (drive.commit, drive.fail, drive.abort):
        assert refused(unchanged(drive, lambda act=act: act(old)), Reason.STALE_HANDLE)
    assert refused(unchanged(drive, lambda: drive.commit(old, num_tokens=1)), Reason.STALE_HANDLE)
    assert drive.state(new) is State.TRANSFERRING
    assert drive.commit(new) == e.Accepted(State.READY)


def test_a_completion_and_an_abort_end_the_attempt_once_in_either_order(make: Make) -> None:
    drive = make(1)
    first = drive.transferring("a")
    drive.abort(first, drained=True)
    assert refused(drive.commit(first), Reason.STALE_HANDLE)
    second = drive.transferring("b")
    drive.commit(second)
    drive.abort(second, drained=True)
    assert (drive.state(first), drive.state(second)) == (State.ABORTED, State.ABORTED)
    assert drive.free_units() == 8


def test_a_session_whose_transfer_failed_is_tried_again(make: Make) -> None:
    """One transient error is no reason to refuse the next attempt."""
    drive = make(1)
    for _ in range(5):
        drive.fail(drive.transferring(conn_id=1, writer_id=3), drained=True)
    assert drive.state(drive.ingested(conn_id=1, writer_id=3)) is State.INGESTED
