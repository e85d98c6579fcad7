"""A shard that is whole and may be written all the same, and a writer whose exit proves nothing."""

from collections.abc import Callable
from typing import Any

import pytest
from core_driver import Driver, refused, unchanged

from snapd.core import events as e
from snapd.core import records as r
from snapd.core.events import State
from snapd.errors import Reason

Make = Callable[..., Driver]
QUARANTINE_MS = 60_000


def ready(drive: Driver, *undrained: int, session_id: str = "s", **fields: Any) -> int:
    """Return the handle of a READY attempt; the commits of the ranks *undrained* said so."""
    handle = drive.transferring(session_id, **fields)
    for rank in drive.session(handle).shards:
        assert isinstance(drive.commit(handle, rank, drained=rank not in undrained), e.Accepted)
    assert drive.state(handle) is State.READY
    return handle


def half_written(drive: Driver, *, drained: bool = False, **fields: Any) -> int:
    """Return the handle of an attempt of which rank 0 is committed, and no other."""
    handle = drive.transferring(**fields)
    drive.commit(handle, 0, drained=drained)
    return handle


def ingest(drive: Driver, handle: int) -> None:
    ids = {rank: drive.lease(handle, rank).lease_id for rank in drive.session(handle).shards}
    for rank, lease_id in ids.items():
        drive.vote(handle, rank, lease_id)
    assert drive.state(handle) is State.INGESTED


def kept(drive: Driver) -> list[int]:
    return [drive.quarantined_units(rank) for rank in drive.ranks]


def freed(drive: Driver, handle: int) -> list[tuple[int, str, str]]:
    return [(x.rank, x.was, x.why) for x in drive.logged(r.SlabReleased, slab_handle=handle)]


def evictable(drive: Driver) -> list[int]:
    return [view.evictable_bytes // 256 for view in drive.machine.statistics().arenas]


# --- the end


@pytest.mark.parametrize("undrained", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_it_is_ingested_as_usual_and_its_bytes_are_kept_afterwards(
    make: Make, undrained: tuple[int, ...]
) -> None:
    drive = make(3)
    handle = ready(drive, *undrained, conn_id=7)
    ingest(drive, handle)
    assert kept(drive) == [2 if rank in undrained else 0 for rank in drive.ranks]
    held = drive.logged(r.SlabQuarantined, slab_handle=handle)
    assert [(x.rank, x.why) for x in held] == [(rank, "undrained") for rank in undrained]
    assert {x.until_ns for x in held} == {drive.now_ns + QUARANTINE_MS * 10**6}
    assert freed(drive, handle) == [(rank, "live", "final") for rank in drive.ranks if rank not in undrained]
    assert drive.tells == [e.EndTold(7, handle, "s", State.INGESTED, Reason.OK, True)]
    assert drive.hint() == 16
    drive.advance(QUARANTINE_MS)
    assert kept(drive) == [0, 0, 0]
    assert freed(drive, handle)[-len(undrained) :] == [(rank, "quarantined", "time") for rank in undrained]


def _vote_no(drive: Driver, handle: int) -> None:
    drive.vote_no(handle, 0, drive.lease(handle, 0).lease_id, Reason.TOKEN_MISMATCH)


ENDS_OF_READY: dict[str, Callable[[Driver, int], object]] = {
    "client-abort": lambda drive, handle: drive.abort(handle),
    "ready-expired": lambda drive, handle: drive.advance(300_000),
    "superseded": lambda drive, handle: drive.ready(ranks=(2,)),
    "evicted": lambda drive, handle: (
        drive.session(handle).__setattr__("newer_handle", 1) or drive.tell(e.VictimChosen, slab_handle=handle)
    ),
    "token-mismatch": _vote_no,
    "daemon-stopped": lambda drive, handle: drive.post(e.StopAsked),
}


@pytest.mark.parametrize("end", ENDS_OF_READY)
def test_however_a_ready_one_ends_what_is_undrained_is_kept(make: Make, end: str) -> None:
    drive = make(3)
    handle = ready(drive, 1, ranks=(0, 1), conn_id=7)
    ENDS_OF_READY[end](drive, handle)
    assert (drive.state(handle), drive.reason(handle)) == (State.ABORTED, Reason(end))
    assert kept(drive) == [0, 2, 0]
    assert freed(drive, handle) == [(0, "live", "final")]
    assert [told.drain_wanted for told in drive.tells] == [True]


ENDS_OF_WRITING: dict[str, Callable[[Driver, int], object]] = {
    "client-abort": lambda drive, handle: drive.abort(handle),
    "transfer-failed": lambda drive, handle: drive.fail(handle, rank=1),
    "transfer-timeout": lambda drive, handle: drive.advance(31_000),
    "superseded": lambda drive, handle: drive.reserved(ranks=(2,)),
    "partial-transfer": lambda drive, handle: drive.commit(handle, 1, num_bytes=1),
    "daemon-stopped": lambda drive, handle: drive.post(e.StopAsked),
}


@pytest.mark.parametrize("drained", [False, True])
@pytest.mark.parametrize("end", ENDS_OF_WRITING)
def test_however_writing_ends_only_a_drained_commit_is_freed(make: Make, end: str, drained: bool) -> None:
    drive = make(3)
    handle = half_written(drive, drained=drained, ranks=(0, 1), conn_id=7)
    ENDS_OF_WRITING[end](drive, handle)
    assert drive.reason(handle) == Reason(end)
    assert kept(drive) == [0 if drained else 2, 2, 0]
    assert drive.tells[0].drain_wanted


@pytest.mark.parametrize(
    ("message", "fields", "left"),
    [
        (e.AbortAsked, {"drained": True}, [0, 0]),
        (e.TransferFailed, {"drained": True}, [0, 0]),
        (e.TransferFailed, {"drained": True, "rank": 0}, [0, 2]),
        (e.TransferFailed, {"drained": True, "rank": 1}, [2, 0]),
    ],
)
def test_proof_that_comes_with_the_end_counts_for_what_was_committed_too(
    make: Make, message: type[e.Event], fields: dict[str, Any], left: list[int]
) -> None:
    drive = make(2)
    handle = half_written(drive, conn_id=7)
    drive.post(message, slab_handle=handle, **fields)
    assert kept(drive) == left
    assert {why for _, _, why in freed(drive, handle)} == {"drained"}
    assert drive.tells[0].drain_wanted is any(left)


def test_an_abort_with_proof_frees_a_ready_one_at_once(make: Make) -> None:
    drive = make(2)
    handle = ready(drive, 1, conn_id=7)
    drive.abort(handle, drained=True)
    assert freed(drive, handle) == [(0, "live", "final"), (1, "live", "drained")]
    assert not drive.tells[0].drain_wanted


# --- proof after the end


PROOFS: dict[str, tuple[type[e.Event], dict[str, Any]]] = {
    "drained": (e.WriterDrained, {}),
    "drained rank": (e.WriterDrained, {"rank": 1}),
    "abort": (e.AbortAsked, {"drained": True}),
    "failed": (e.TransferFailed, {"drained": True, "rank": 1}),
}


@pytest.mark.parametrize("forgotten", [False, True])
@pytest.mark.parametrize("proof", PROOFS)
@pytest.mark.parametrize("state", [State.INGESTED, State.ABORTED])
def test_proof_after_the_end_releases_it(make: Make, state: State, proof: str, forgotten: bool) -> None:
    drive = make(2, units=16, ended_history_max=1)
    handle = ready(drive, 1)
    if state is State.INGESTED:
        ingest(drive, handle)
    else:
        drive.abort(handle)
    if forgotten:
        drive.ingested("other")
        assert drive.machine.view(handle) is None
    kind, fields = PROOFS[proof]
    answer = drive.post(kind, slab_handle=handle, **fields)
    if forgotten and kind is not e.WriterDrained:
        assert refused(answer, Reason.STALE_HANDLE)
    else:
        assert answer == e.Accepted(state)
    assert kept(drive) == [0, 0]
    assert freed(drive, handle)[-1] == (1, "quarantined", "drained")


def test_proof_for_another_rank_releases_nothing(make: Make) -> None:
    drive = make(2)
    handle = ready(drive, 1)
    ingest(drive, handle)
    unchanged(drive, lambda: drive.drained(handle, rank=0))
    unchanged(drive, lambda: drive.fail(handle, rank=0, drained=True))
    assert refused(unchanged(drive, lambda: drive.abort(handle)), Reason.STALE_HANDLE)
    assert kept(drive) == [0, 2]


def test_the_writers_exit_releases_what_was_ingested(make: Make) -> None:
    drive = make(2)
    handle = ready(drive, 0, 1, writer_id=5)
    ingest(drive, handle)
    assert drive.machine.books.handles_of_writer == {5: {handle}}
    drive.tell(e.WriterGone, writer_id=5)
    assert freed(drive, handle) == [(rank, "quarantined", "writer-gone") for rank in drive.ranks]
    assert drive.machine.books.handles_of_writer == {}


# --- proof before the end


@pytest.mark.parametrize("rank", [None, 0])
def test_proof_while_others_write_is_remembered(make: Make, rank: int | None) -> None:
    drive = make(2)
    handle = half_written(drive, conn_id=7)
    assert drive.drained(handle, rank=rank) == e.Accepted(State.TRANSFERRING)
    assert unchanged(drive, lambda: drive.drained(handle, rank=rank)) == e.Accepted(State.TRANSFERRING)
    drive.abort(handle)
    assert freed(drive, handle) == [(0, "live", "final")]
    assert kept(drive) == [0, 2], "what is not committed may be written after the proof"
    assert drive.tells[0].drain_wanted


@pytest.mark.parametrize("leased", [False, True])
@pytest.mark.parametrize("how", ["rank", "all", "exit"])
def test_proof_while_ready_is_remembered(make: Make, how: str, leased: bool) -> None:
    drive = make(2)
    handle = ready(drive, 0, 1, writer_id=5, conn_id=7)
    if leased:
        drive.lease(handle)
    match how:
        case "exit":
            drive.tell(e.WriterGone, writer_id=5)
        case "all":
            assert drive.drained(handle) == e.Accepted(State.READY)
        case _:
            assert drive.drained(handle, rank=0) == drive.drained(handle, rank=1) == e.Accepted(State.READY)
    assert (handle in drive.machine.books.victims) is not leased
    ingest(drive, handle)
    assert freed(drive, handle) == [(0, "live", "final"), (1, "live", "final")]
    assert not drive.tells[0].drain_wanted


def test_proof_for_one_rank_leaves_the_other_undrained(make: Make) -> None:
    drive = make(2)
    handle = ready(drive, 0, 1)
    drive.drained(handle, rank=1)
    assert evictable(drive) == [0, 0]
    ingest(drive, handle)
    assert kept(drive) == [2, 0]


def test_proof_for_what_is_not_committed_or_not_there_is_refused(make: Make) -> None:
    drive = make(3)
    handle = half_written(drive, ranks=(0, 1))
    result = unchanged(drive, lambda: drive.drained(handle, rank=1))
    assert refused(result, Reason.WRONG_STATE) and "TRANSFERRING" in result.detail
    assert refused(unchanged(drive, lambda: drive.drained(handle, rank=2)), Reason.WRONG_RANK)
    drive.commit(handle, 1)
    assert refused(unchanged(drive, lambda: drive.drained(handle, rank=2)), Reason.WRONG_RANK)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_proof_in_an_abort_that_waits_is_remembered(make: Make, first: bool, second: bool) -> None:
    drive = make(1)
    handle = ready(drive, 0)
    lease_id = drive.lease(handle).lease_id
    for drained in (first, second):
        assert drive.abort(handle, drained=drained) == e.Accepted(State.READY, pending=True)
    drive.vote_no(handle, 0, lease_id, Reason.INGEST_FAILED, keep=True)
    assert drive.reason(handle) is Reason.CLIENT_ABORT
    assert kept(drive) == [0 if first or second else 2]


# --- the same commit again


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("state", [State.TRANSFERRING, State.READY, State.INGESTED])
def test_a_repeated_commit_gets_the_first_answer_and_proves_nothing(
    make: Make, state: State, first: bool, second: bool
) -> None:
    drive = make(2)
    handle = drive.transferring()
    answer = drive.commit(handle, 0, drained=first)
    if state is not State.TRANSFERRING:
        drive.commit(handle, 1)
    if state is State.INGESTED:
        ingest(drive, handle)
    assert unchanged(drive, lambda: drive.commit(handle, 0, drained=second)) == answer
    if state is not State.INGESTED:
        drive.abort(handle)
    assert drive.quarantined_units(0) == (0 if first else 2)


def test_a_late_repeat_does_not_take_proof_back(make: Make) -> None:
    drive = make(2)
    handle = half_written(drive)
    drive.drained(handle, rank=0)
    unchanged(drive, lambda: drive.commit(handle, 0, drained=False))
    drive.fail(handle, rank=1, drained=True)
    assert kept(drive) == [0, 0]


# --- eviction


@pytest.mark.parametrize("undrained", [(0,), (1,), (0, 1)])
def test_an_undrained_snapshot_is_no_victim(make: Make, undrained: tuple[int, ...]) -> None:
    """Evicting it would make no room, so nothing is evicted for nothing."""
    drive = make(2)
    handles = [ready(drive, *undrained, session_id=name) for name in "abcd"]
    assert evictable(drive) == [0, 0]
    assert drive.machine.num_leased == 0
    answer = drive.prepare("z")
    assert refused(answer, Reason.SNAPSHOT_BUF_FULL) and "0 evictable" in answer.detail
    assert [drive.state(handle) for handle in handles] == [State.READY] * 4


def test_the_oldest_drained_snapshot_goes_first(make: Make) -> None:
    drive = make(1)
    old = ready(drive, 0, session_id="a")
    handles = [drive.ready(name) for name in "bcd"]
    assert evictable(drive) == [6]
    drive.reserved("z")
    assert drive.state(old) is State.READY
    assert [drive.state(handle) for handle in handles] == [State.ABORTED, State.READY, State.READY]


@pytest.mark.parametrize("how", ["drained", "exit"])
def test_proof_makes_it_a_victim_the_most_recently_used(make: Make, how: str) -> None:
    drive = make(2)
    first = ready(drive, 1, session_id="a", writer_id=5)
    others = [drive.ready(name) for name in "bcd"]
    if how == "exit":
        drive.tell(e.WriterGone, writer_id=5)
    else:
        drive.drained(first, rank=1)
    assert list(drive.machine.books.victims.victims()) == [*others, first]
    assert evictable(drive) == [8, 8]
    drive.look_up("b")
    unchanged(drive, lambda: drive.drained(first))
    unchanged(drive, lambda: drive.drained(first, rank=0))
    unchanged(drive, lambda: drive.tell(e.WriterGone, writer_id=5))
    assert list(drive.machine.books.victims.victims())[-1] == others[0], "proof twice is no use"


@pytest.mark.parametrize("use", ["lookup", "lease"])
def test_use_does_not_make_it_a_victim(make: Make, use: str) -> None:
    drive = make(1)
    handle = ready(drive, 0)
    if use == "lookup":
        assert drive.look_up("s").slab_handle == handle
    else:
        lease_id = drive.lease(handle).lease_id
        assert drive.machine.num_leased == 1
        drive.vote_no(handle, 0, lease_id, Reason.INGEST_FAILED, keep=True)
    assert evictable(drive) == [0] and drive.machine.num_leased == 0


def test_proof_under_a_lease_makes_it_a_victim_when_the_lease_is_over(make: Make) -> None:
    drive = make(1)
    handle = ready(drive, 0)
    drive.lease(handle)
    drive.drained(handle)
    assert evictable(drive) == [0]
    drive.advance(10_000)
    assert evictable(drive) == [2]


# --- what is read as well


def still_read(drive: Driver, *, corrupt: bool = False, **fields: Any) -> tuple[int, int]:
    """End a READY attempt while rank 1, undrained, is read; return its handle and that lease."""
    handle = ready(drive, 0, 1, **fields) if corrupt else ready(drive, 1, **fields)
    ids = {rank: drive.lease(handle, rank).lease_id for rank in drive.ranks}
    reason = Reason.CHECKSUM_MISMATCH if corrupt else Reason.TOKEN_MISMATCH
    drive.vote_no(handle, 0, ids[0], reason)
    assert drive.quarantined_units(1) == 2
    return handle, ids[1]


@pytest.mark.parametrize("lease_ms", [10_000, 90_000])
def test_what_is_read_and_undrained_is_kept_for_the_longer_time(make: Make, lease_ms: int) -> None:
    drive = make(2, lease_ms=lease_ms)
    handle, _ = still_read(drive, conn_id=7)
    assert drive.tells[0].drain_wanted
    (held,) = drive.logged(r.SlabQuarantined, slab_handle=handle)
    (granted,) = drive.logged(r.LeaseGranted, slab_handle=handle, rank=1)
    assert held.why == "undrained"
    assert held.until_ns == max(granted.until_ns, held.at_ns + QUARANTINE_MS * 10**6)
    drive.advance((held.until_ns - drive.now_ns - 1) // 10**6)
    assert kept(drive) == [0, 2]
    drive.advance(1)
    assert freed(drive, handle)[-1] == (1, "quarantined", "time")


@pytest.mark.parametrize("proof", ["drained", "writer-gone"])
@pytest.mark.parametrize("vote_first", [False, True])
def test_what_is_read_and_undrained_needs_the_vote_and_the_proof(
    make: Make, proof: str, vote_first: bool
) -> None:
    drive = make(2)
    handle, lease_id = still_read(drive, writer_id=5)

    def prove() -> None:
        if proof == "drained":
            assert drive.drained(handle, rank=1) == e.Accepted(State.ABORTED)
        else:
            drive.tell(e.WriterGone, writer_id=5)

    def vote() -> None:
        decided = e.Decided(commit=False, reason=Reason.TOKEN_MISMATCH, state=State.ABORTED)
        assert drive.vote(handle, 1, lease_id) == decided

    acts = [vote, prove] if vote_first else [prove, vote]
    acts[0]()
    assert kept(drive) == [0, 2]
    if vote_first:
        for other in (lease_id, 0):
            assert refused(
                unchanged(drive, lambda other=other: drive.vote(handle, 1, other)), Reason.STALE_HANDLE
            )
    else:
        unchanged(drive, lambda: drive.vote(handle, 1, lease_id + 1))
        unchanged(drive, lambda: drive.drained(handle))
    acts[1]()
    assert freed(drive, handle)[-1] == (1, "quarantined", proof), "the first proof is the one that counts"
    assert drive.machine.books.handles_of_writer == {}


def test_bytes_that_did_not_match_are_released_by_time_only(make: Make) -> None:
    drive = make(2)
    handle, lease_id = still_read(drive, corrupt=True, writer_id=5)
    drive.vote(handle, 1, lease_id)
    drive.drained(handle)
    drive.tell(e.WriterGone, writer_id=5)
    assert kept(drive) == [2, 0]


# --- an exit that proves nothing


@pytest.mark.parametrize("started", [False, True])
def test_an_exit_without_proof_ends_the_attempt_and_keeps_its_bytes(make: Make, started: bool) -> None:
    drive = make(2)
    make_one = drive.transferring if started else drive.reserved
    handle = make_one(writer_id=5, conn_id=7)
    other = make_one("other", writer_id=6)
    drive.tell(e.WriterGone, writer_id=5, drained=False)
    assert (drive.state(handle), drive.reason(handle)) == (State.ABORTED, Reason.WRITER_GONE)
    assert drive.state(other) in (State.RESERVED, State.TRANSFERRING)
    assert kept(drive) == [2, 2]
    assert drive.tells == [e.EndTold(7, handle, "s", State.ABORTED, Reason.WRITER_GONE, True)]
    drive.advance(QUARANTINE_MS)
    assert freed(drive, handle) == [(0, "quarantined", "time"), (1, "quarantined", "time")]
    assert 5 not in drive.machine.books.handles_of_writer


@pytest.mark.parametrize("drained", [False, True])
def test_an_exit_without_proof_frees_only_a_drained_commit(make: Make, drained: bool) -> None:
    drive = make(2)
    handle = half_written(drive, drained=drained, writer_id=5)
    drive.tell(e.WriterGone, writer_id=5, drained=False)
    assert kept(drive) == [0 if drained else 2, 2]
    assert drive.drained(handle) == e.Accepted(State.ABORTED)
    assert kept(drive) == [0, 0]


def test_an_exit_with_proof_frees_an_undrained_commit(make: Make) -> None:
    drive = make(2)
    handle = half_written(drive, writer_id=5)
    drive.tell(e.WriterGone, writer_id=5)
    assert freed(drive, handle) == [(0, "live", "writer-gone"), (1, "live", "writer-gone")]


def test_an_exit_without_proof_releases_nothing_that_is_kept(make: Make) -> None:
    drive = make(2)
    handle = ready(drive, 1, writer_id=5)
    ingest(drive, handle)
    other = drive.transferring("b", writer_id=5)
    drive.abort(other)
    unchanged(drive, lambda: drive.tell(e.WriterGone, writer_id=5, drained=False))
    assert kept(drive) == [2, 4]
    unchanged(drive, lambda: drive.tell(e.WriterExited, slab_handle=handle, drained=False))


def test_an_exit_without_proof_leaves_a_ready_snapshot_undrained(make: Make) -> None:
    drive = make(2)
    handle = ready(drive, 1, writer_id=5)
    unchanged(drive, lambda: drive.tell(e.WriterGone, writer_id=5, drained=False))
    ingest(drive, handle)
    assert kept(drive) == [0, 2]
