"""Quarantine: bytes that nobody owns are reused after a proof or the time, and after nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
from core_driver import Driver, fingerprint_of, refused, unchanged

from snapd.core import events as e
from snapd.core import records as r
from snapd.core.events import State
from snapd.errors import Reason

Make = Callable[..., Driver]


def aborted(drive: Driver, **fields: Any) -> int:
    """Return the handle of an attempt whose shards are all in quarantine."""
    handle = drive.transferring(**fields)
    drive.abort(handle)
    return handle


def kept(drive: Driver) -> list[int]:
    return [drive.quarantined_units(rank) for rank in drive.ranks]


def test_the_time_of_the_quarantine_releases_it(make: Make) -> None:
    drive = make(2, quarantine_ms=500)
    handle = aborted(drive)
    drive.advance(499)
    assert kept(drive) == [2, 2]
    drive.advance(1)
    assert kept(drive) == [0, 0]
    released = drive.logged(r.SlabReleased, slab_handle=handle)
    assert [(x.rank, x.was, x.why, x.session_id) for x in released] == [
        (0, "quarantined", "time", "s"),
        (1, "quarantined", "time", "s"),
    ]
    assert drive.machine.statistics().quarantined_shards == 0


def test_quarantined_bytes_are_not_handed_out(make: Make) -> None:
    drive = make(1)
    for name in "abcd":
        aborted(drive, session_id=name)
    assert refused(drive.prepare("z"), Reason.SNAPSHOT_BUF_FULL)
    drive.advance(60_000)
    drive.reserved("z")


def test_a_quarantine_timer_that_fires_early_is_armed_again(make: Make) -> None:
    drive = make(1)
    handle = aborted(drive)
    key = (e.TimerKind.QUARANTINE, handle, 0)
    deadline_ns = drive.timers[key].deadline_ns
    drive.now_ns = deadline_ns - 1
    drive.fire(key)
    assert drive.timers[key].deadline_ns == deadline_ns and kept(drive) == [2]
    drive.now_ns = deadline_ns
    drive.fire(key)
    assert kept(drive) == [0]


def test_a_quarantine_timer_of_something_else_does_nothing(make: Make) -> None:
    drive = make(2)
    handle = aborted(drive, ranks=(0,))
    deadline_ns = drive.timers[(e.TimerKind.QUARANTINE, handle, 0)].deadline_ns
    drive.jump(100_000)
    for slab_handle, rank, other_ns in (
        (handle, 0, deadline_ns - 1),
        (handle, 0, deadline_ns + 1),
        (handle, 1, deadline_ns),
        (handle + 1, 0, deadline_ns),
    ):
        fields = {"slab_handle": slab_handle, "rank": rank, "deadline_ns": other_ns}
        unchanged(drive, lambda fields=fields: drive.tell(e.QuarantineTimedOut, **fields))
    assert kept(drive) == [2, 0]


@pytest.mark.parametrize("only_rank", [None, 0, 1])
@pytest.mark.parametrize("message", [e.WriterDrained, e.TransferFailed, e.AbortAsked])
def test_drain_proof_releases_before_the_time(
    make: Make, message: type[e.Event], only_rank: int | None
) -> None:
    drive = make(2)
    handle = aborted(drive)
    fields: dict[str, Any] = {} if message is e.WriterDrained else {"drained": True}
    if message is not e.AbortAsked:
        fields["rank"] = only_rank
    before = drive.session(handle).reason
    result = drive.post(message, slab_handle=handle, **fields)
    assert result == e.Accepted(State.ABORTED)
    released = [0, 1] if message is e.AbortAsked or only_rank is None else [only_rank]
    assert kept(drive) == [0 if rank in released else 2 for rank in drive.ranks]
    assert [x.rank for x in drive.logged(r.SlabReleased, why="drained")] == released
    assert drive.reason(handle) is before, "how it ended stays as it was"
    assert len(drive.logged(r.SyncOutcome)) == 1


@pytest.mark.parametrize("message", [e.TransferFailed, e.AbortAsked])
def test_a_message_without_proof_releases_nothing(make: Make, message: type[e.Event]) -> None:
    drive = make(2)
    handle = drive.transferring()
    drive.fail(handle, reason=Reason.SESSION_NOT_RESIDENT)
    result = unchanged(drive, lambda: drive.post(message, slab_handle=handle))
    assert refused(result, Reason.STALE_HANDLE)
    assert kept(drive) == [2, 2]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (e.TransferStarted, {}),
        (e.RankCommitted, {"rank": 0, "num_bytes": 512, "num_tokens": 16, "checksums": ((1, 0),) * 2}),
        (e.LeaseAsked, {"rank": 0, "layout_fingerprint": ""}),
        (e.VoteCast, {"rank": 0, "lease_id": 0, "ok": True}),
        (e.VoteCast, {"rank": 0, "lease_id": 1, "ok": True}),
        (e.VoteCast, {"rank": 7, "lease_id": 0, "ok": True}),
        (e.TransferFailed, {"rank": 7, "drained": True}),
    ],
)
def test_nothing_but_proof_releases_what_may_still_be_written(
    make: Make, kind: type[e.Event], fields: dict[str, Any]
) -> None:
    drive = make(1)
    handle = drive.reserved()
    drive.abort(handle)
    result = unchanged(drive, lambda: drive.post(kind, slab_handle=handle, **fields))
    assert refused(result, Reason.STALE_HANDLE) and "client-abort" in result.detail
    assert kept(drive) == [2]


@pytest.mark.parametrize("commit", [False, True])
def test_an_expired_reservation_never_becomes_readable(make: Make, commit: bool) -> None:
    drive = make(1)
    handle = drive.transferring() if commit else drive.reserved()
    drive.advance(40_000)
    assert drive.state(handle) is State.ABORTED
    assert refused(drive.commit(handle), Reason.STALE_HANDLE)
    assert refused(drive.lease(handle), Reason.STALE_HANDLE)
    assert drive.look_up("s").slab_handle == 0


def test_drain_proof_for_a_rank_that_is_not_kept_changes_nothing(make: Make) -> None:
    drive = make(2)
    handle = drive.transferring()
    drive.commit(handle, 0)
    drive.abort(handle)
    assert unchanged(drive, lambda: drive.drained(handle, rank=0)) == e.Accepted(State.ABORTED)
    assert kept(drive) == [0, 2]


def test_drain_proof_is_idempotent(make: Make) -> None:
    drive = make(1)
    handle = aborted(drive)
    for _ in range(3):
        assert drive.drained(handle) == e.Accepted(State.ABORTED)
    assert len(drive.logged(r.SlabReleased)) == 1
    done = drive.ingested()
    assert drive.drained(done) == e.Accepted(State.INGESTED)


# --- a writing process that is gone


@pytest.mark.parametrize("started", [False, True])
def test_the_exit_of_the_writer_ends_its_attempt_and_frees_it(make: Make, started: bool) -> None:
    drive = make(2)
    make_one = drive.transferring if started else drive.reserved
    mine = make_one("mine", writer_id=5, conn_id=7)
    other = make_one("other", writer_id=6)
    nobody = make_one("nobody")
    drive.tell(e.WriterGone, writer_id=5)
    assert (drive.state(mine), drive.reason(mine)) == (State.ABORTED, Reason.WRITER_GONE)
    assert drive.state(other) is drive.state(nobody)
    assert [drive.free_units(rank) for rank in drive.ranks] == [4, 4]
    assert drive.tells == [e.EndTold(7, mine, "mine", State.ABORTED, Reason.WRITER_GONE, False)]
    unchanged(drive, lambda: drive.tell(e.WriterGone, writer_id=5))
    unchanged(drive, lambda: drive.tell(e.WriterGone, writer_id=0))
    assert not drive.machine.books.handles_of_writer.get(5)


def test_the_exit_of_the_writer_leaves_a_ready_snapshot_alone(make: Make) -> None:
    drive = make(1)
    handle = drive.ready(writer_id=5)
    drive.tell(e.WriterGone, writer_id=5)
    assert drive.state(handle) is State.READY
    assert drive.vote(handle, 0, drive.lease(handle).lease_id).commit


def test_the_exit_of_the_writer_is_drain_proof_for_what_is_kept(make: Make) -> None:
    drive = make(2, units=16)
    handles = [aborted(drive, session_id=name, writer_id=5) for name in "ab"]
    other = aborted(drive, session_id="c", writer_id=6)
    drive.tell(e.WriterGone, writer_id=5)
    assert kept(drive) == [2, 2]
    for handle in handles:
        released = drive.logged(r.SlabReleased, slab_handle=handle)
        assert [(x.rank, x.why) for x in released] == [(0, "writer-gone"), (1, "writer-gone")]
        assert drive.reason(handle) is Reason.CLIENT_ABORT
    assert drive.machine.books.handles_of_writer == {6: {other}}


def test_a_writer_is_remembered_as_long_as_its_bytes_are_kept(make: Make) -> None:
    drive = make(2)
    handle = aborted(drive, writer_id=5)
    drive.drained(handle, rank=0)
    assert drive.machine.books.handles_of_writer == {5: {handle}}
    drive.drained(handle, rank=1)
    assert drive.machine.books.handles_of_writer == {}


def test_a_writer_with_two_attempts_is_remembered_for_the_other(make: Make) -> None:
    drive = make(1)
    first, second = drive.reserved("a", writer_id=5), drive.reserved("b", writer_id=5)
    drive.abort(first, drained=True)
    assert drive.machine.books.handles_of_writer == {5: {second}}
    drive.tell(e.WriterGone, writer_id=5)
    assert drive.reason(second) is Reason.WRITER_GONE


def test_a_writer_is_forgotten_when_its_snapshot_is_done(make: Make) -> None:
    drive = make(1)
    drive.ingested(writer_id=5)
    assert drive.machine.books.handles_of_writer == {}


def test_the_exit_of_one_attempts_writer_can_be_told_for_that_attempt(make: Make) -> None:
    drive = make(1)
    handle = drive.transferring(writer_id=5)
    drive.tell(e.WriterExited, slab_handle=handle)
    assert drive.reason(handle) is Reason.WRITER_GONE
    ready = drive.ready()
    unchanged(drive, lambda: drive.tell(e.WriterExited, slab_handle=ready))


# --- what is still read


def still_read(drive: Driver, *, conn_id: int = 0, writer_id: int = 0) -> tuple[int, dict[int, int]]:
    """End a READY attempt while rank 1 reads it; return its handle and the lease ids."""
    handle = drive.ready(conn_id=conn_id, writer_id=writer_id)
    ids = {rank: drive.lease(handle, rank).lease_id for rank in drive.ranks}
    drive.vote_no(handle, 0, ids[0], Reason.TOKEN_MISMATCH)
    assert kept(drive) == [0, 2]
    return handle, ids


def test_what_is_still_read_is_kept_until_the_lease_is_over(make: Make) -> None:
    drive = make(2)
    handle, _ = still_read(drive)
    (held,) = drive.logged(r.SlabQuarantined)
    (granted,) = drive.logged(r.LeaseGranted, rank=1)
    assert (held.why, held.until_ns) == ("leased", granted.until_ns)
    drive.advance(9_999)
    assert kept(drive) == [0, 2]
    drive.advance(1)
    (released,) = drive.logged(r.SlabReleased, rank=1)
    assert (released.why, released.slab_handle) == ("lease-ended", handle)
    assert kept(drive) == [0, 0]


@pytest.mark.parametrize("ok", [False, True])
def test_a_vote_says_that_the_reader_is_done_and_is_told_the_decision(make: Make, ok: bool) -> None:
    drive = make(2)
    handle, ids = still_read(drive)
    reason = Reason.OK if ok else Reason.INGEST_FAILED
    result = drive.vote(handle, 1, ids[1], ok, reason=reason)
    assert result == e.Decided(commit=False, reason=Reason.TOKEN_MISMATCH, state=State.ABORTED)
    (released,) = drive.logged(r.SlabReleased, rank=1)
    assert released.why == "lease-ended" and kept(drive) == [0, 0]
    assert drive.machine.books.buffer.quarantine == {}


def test_a_vote_under_another_lease_releases_nothing(make: Make) -> None:
    drive = make(2)
    handle, ids = still_read(drive)
    for rank, lease_id in ((1, ids[0]), (0, ids[1]), (1, ids[1] + 1), (1, 0), (2, ids[1])):
        result = unchanged(drive, lambda rank=rank, lease_id=lease_id: drive.vote(handle, rank, lease_id))
        assert refused(result, Reason.STALE_HANDLE)
    assert kept(drive) == [0, 2]


def test_drain_proof_says_nothing_about_readers(make: Make) -> None:
    drive = make(2)
    handle, _ = still_read(drive, writer_id=5)
    unchanged(drive, lambda: drive.drained(handle))
    unchanged(drive, lambda: drive.drained(handle, rank=1))
    unchanged(drive, lambda: drive.abort(handle, drained=True))
    unchanged(drive, lambda: drive.fail(handle, rank=1, drained=True))
    unchanged(drive, lambda: drive.tell(e.WriterGone, writer_id=5))
    assert kept(drive) == [0, 2]


@pytest.mark.parametrize("proof", ["drained", "gone"])
def test_bytes_that_did_not_match_are_released_by_time_only(make: Make, proof: str) -> None:
    """Their writer had said that it was done, and somebody wrote there."""
    drive = make(1)
    handle = drive.ready(writer_id=5)
    lease_id = drive.lease(handle).lease_id
    drive.vote_no(handle, 0, lease_id, Reason.CHECKSUM_MISMATCH)
    unchanged(drive, lambda: drive.vote_no(handle, 0, lease_id, Reason.CHECKSUM_MISMATCH))
    assert kept(drive) == [2], "the vote that found it is no proof"
    if proof == "drained":
        unchanged(drive, lambda: drive.drained(handle))
        unchanged(drive, lambda: drive.abort(handle, drained=True))
    else:
        unchanged(drive, lambda: drive.tell(e.WriterGone, writer_id=5))
    assert kept(drive) == [2]
    drive.advance(drive.machine.books.settings.quarantine_ms)
    assert kept(drive) == [0]


# --- an attempt that is remembered only by the quarantine


def test_a_forgotten_attempt_still_hears_drain_proof(make: Make) -> None:
    drive = make(2, units=16, ended_history_max=1)
    handle = aborted(drive, session_id="a")
    aborted(drive, session_id="b")
    assert drive.machine.view(handle) is None
    assert drive.drained(handle, rank=1) == e.Accepted(State.ABORTED)
    assert kept(drive) == [4, 2]
    released = drive.logged(r.SlabReleased, slab_handle=handle)
    assert [(x.rank, x.why, x.session_id) for x in released] == [(1, "drained", "a")]
    assert drive.drained(handle) == e.Accepted(State.ABORTED)
    assert refused(drive.drained(handle), Reason.STALE_HANDLE), "nothing is left to hear it"


def test_a_forgotten_attempt_still_hears_that_its_writer_is_gone(make: Make) -> None:
    drive = make(1, ended_history_max=1)
    aborted(drive, session_id="a", writer_id=5)
    aborted(drive, session_id="b")
    drive.tell(e.WriterGone, writer_id=5)
    assert kept(drive) == [2] and drive.machine.books.handles_of_writer == {}
    assert drive.machine.statistics().requests_refused == 0, "nobody asked"


@pytest.mark.parametrize("message", [e.AbortAsked, e.TransferFailed])
def test_a_forgotten_attempt_hears_proof_in_any_message_and_calls_it_stale(
    make: Make, message: type[e.Event]
) -> None:
    drive = make(1, ended_history_max=1)
    handle = aborted(drive, session_id="a")
    aborted(drive, session_id="b")
    assert refused(drive.post(message, slab_handle=handle), Reason.STALE_HANDLE)
    assert kept(drive) == [4]
    assert refused(drive.post(message, slab_handle=handle, drained=True), Reason.STALE_HANDLE)
    assert kept(drive) == [2]


def test_a_forgotten_attempt_hears_the_end_of_a_read_and_its_time(make: Make) -> None:
    drive = make(2, units=16, ended_history_max=1)
    handle, ids = still_read(drive)
    drive.ingested("b")
    assert drive.machine.view(handle) is None
    assert refused(drive.vote(handle, 1, ids[0]), Reason.STALE_HANDLE)
    assert kept(drive) == [0, 2]
    assert refused(drive.vote(handle, 1, ids[1]), Reason.STALE_HANDLE)
    assert kept(drive) == [0, 0]
    other = aborted(drive, session_id="c")
    drive.ingested("d")
    assert drive.machine.view(other) is None
    drive.advance(60_000)
    assert kept(drive) == [0, 0]


def test_what_is_free_live_and_quarantined_is_the_capacity_at_every_step(make: Make) -> None:
    drive = make(2)
    before = fingerprint_of(drive.machine)[2]
    aborted(drive)
    drive.ready("b", ranks=(1,))
    for view in drive.machine.statistics().arenas:
        assert view.free_bytes + view.live_bytes + view.quarantined_bytes == view.capacity_bytes
        assert view.evictable_bytes == (512 if view.rank else 0)
    assert fingerprint_of(drive.machine)[2] != before
