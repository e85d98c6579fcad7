"""Writing: start, commit, fail; exact figures per rank, and nothing readable before the last commit."""

from collections.abc import Callable
from typing import Any

import pytest
from core_driver import TWO_PLANES, UNIT, Driver, refused, unchanged

from snapd.core import events as e
from snapd.core import records as r
from snapd.core.events import State
from snapd.errors import Reason
from snapd.units import MB

Make = Callable[..., Driver]
NUM_BYTES = 16 * TWO_PLANES.token_bytes


def test_start_leads_to_transferring_and_starts_its_clock(make: Make) -> None:
    """A state's clock starts when the state does, not when the attempt was made."""
    drive = make(1)
    handle = drive.reserved()
    drive.jump(9_000)
    assert drive.start(handle) == e.Accepted(State.TRANSFERRING)
    (timer,) = drive.timers.values()
    assert isinstance(timer, e.TransferTimedOut)
    bytes_ns = NUM_BYTES * 10**9 // (100 * MB)
    assert timer.deadline_ns == drive.now_ns + 30_000 * 10**6 + bytes_ns
    transition = drive.logged(r.SessionTransition)[-1]
    assert (transition.from_state, transition.to_state) == ("RESERVED", "TRANSFERRING")
    assert transition.duration_ms == 9_000.000001


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_transfer_time_grows_with_the_bytes_of_all_ranks(make: Make, ranks: int) -> None:
    drive = make(ranks, units=2 * 40_000, transfer_min_mb_per_s=1, transfer_timeout_ms=7)
    handle = drive.reserved("s", 16 * 32_768)
    drive.start(handle)
    (timer,) = drive.timers.values()
    num_bytes = ranks * 16 * 32_768 * 32
    assert timer.deadline_ns == drive.now_ns + 7 * 10**6 + num_bytes * 10**9 // MB


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_is_ready_once_every_rank_has_committed(make: Make, ranks: int) -> None:
    drive = make(ranks)
    handle = drive.transferring()
    for rank in range(ranks):
        assert drive.state(handle) is State.TRANSFERRING
        assert refused(drive.lease(handle, rank), Reason.WRONG_STATE), "only a commit makes bytes readable"
        last = rank == ranks - 1
        assert drive.commit(handle, rank) == e.Accepted(State.READY if last else State.TRANSFERRING)
        assert drive.machine.statistics().bytes_committed == NUM_BYTES * (rank + 1)
    assert drive.state(handle) is State.READY
    (timer,) = drive.timers.values()
    assert isinstance(timer, e.ReadyExpired) and timer.deadline_ns == drive.now_ns + 300_000 * 10**6


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_commit_straight_from_reserved_is_recorded_as_both_steps(make: Make, ranks: int) -> None:
    drive = make(ranks)
    handle = drive.reserved()
    for rank in range(ranks):
        drive.commit(handle, rank)
    steps = [(x.from_state, x.to_state) for x in drive.logged(r.SessionTransition, slab_handle=handle)]
    assert steps == [("", "RESERVED"), ("RESERVED", "TRANSFERRING"), ("TRANSFERRING", "READY")]


def test_an_early_commit_starts_the_clock_of_the_transfer(make: Make) -> None:
    drive = make(2)
    handle = drive.reserved()
    drive.commit(handle, 1)
    assert drive.state(handle) is State.TRANSFERRING
    (timer,) = drive.timers.values()
    assert isinstance(timer, e.TransferTimedOut)
    assert drive.start(handle) == e.Accepted(State.TRANSFERRING), "a start that comes after it is no error"
    assert drive.commit(handle, 0) == e.Accepted(State.READY)


def test_a_commit_does_not_extend_the_time_of_the_others(make: Make) -> None:
    drive = make(2)
    handle = drive.transferring()
    before = dict(drive.timers)
    drive.jump(1_000)
    drive.commit(handle, 0)
    assert drive.timers == before


@pytest.mark.parametrize(
    "figures",
    [
        {"num_bytes": NUM_BYTES - 1},
        {"num_bytes": NUM_BYTES + 1},
        {"num_bytes": 0},
        {"num_tokens": 15},
        {"num_tokens": 17},
        {"num_bytes": 17 * TWO_PLANES.token_bytes, "num_tokens": 17},
    ],
)
@pytest.mark.parametrize("started", [False, True])
def test_other_figures_than_granted_abort_the_attempt(
    make: Make, figures: dict[str, int], started: bool
) -> None:
    drive = make(2)
    handle = drive.transferring(conn_id=7) if started else drive.reserved(conn_id=7)
    drive.commit(handle, 0)
    result = drive.commit(handle, 1, **figures)
    assert refused(result, Reason.PARTIAL_TRANSFER)
    assert "granted 16 tokens, 512 bytes" in result.detail
    assert (drive.state(handle), drive.reason(handle)) == (State.ABORTED, Reason.PARTIAL_TRANSFER)
    assert (drive.free_units(0), drive.quarantined_units(1)) == (8, 2), "rank 0's writes were final"
    assert drive.machine.statistics().bytes_committed == NUM_BYTES
    assert drive.tells == [e.EndTold(7, handle, "s", State.ABORTED, Reason.PARTIAL_TRANSFER, True)]


def test_a_first_commit_with_wrong_figures_aborts_from_reserved(make: Make) -> None:
    drive = make(2)
    handle = drive.reserved()
    assert refused(drive.commit(handle, 0, num_tokens=1), Reason.PARTIAL_TRANSFER)
    (_, transition) = drive.logged(r.SessionTransition, slab_handle=handle)
    assert (transition.from_state, transition.to_state) == ("RESERVED", "ABORTED")
    assert drive.quarantined_units(0) == drive.quarantined_units(1) == 2


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"rank": 1}, Reason.WRONG_RANK),
        ({"rank": -1}, Reason.WRONG_RANK),
        ({"checksums": ()}, Reason.INVALID_REQUEST),
        ({"checksums": ((1, 2),)}, Reason.INVALID_REQUEST),
        ({"checksums": ((1, 2),) * 3}, Reason.INVALID_REQUEST),
    ],
)
def test_a_commit_that_makes_no_sense_changes_nothing(
    make: Make, started: bool, fields: dict[str, Any], reason: Reason
) -> None:
    drive = make(2)
    handle = drive.reserved(ranks=(0,))
    if started:
        drive.start(handle)
    assert refused(unchanged(drive, lambda: drive.commit(handle, conn_id=9, **fields)), reason)
    assert drive.commit(handle) == e.Accepted(State.READY)


@pytest.mark.parametrize("figures", [{"num_tokens": 3}, {"num_bytes": 3}, {"checksums": ((0, 0),) * 2}])
def test_a_rank_commits_once(make: Make, figures: dict[str, Any]) -> None:
    drive = make(2)
    handle = drive.transferring()
    drive.commit(handle, 0)
    result = unchanged(drive, lambda: drive.commit(handle, 0, conn_id=9, **figures))
    assert refused(result, Reason.WRONG_STATE), "other figures than the first time"
    drive.commit(handle, 1)
    assert refused(unchanged(drive, lambda: drive.commit(handle, 0, **figures)), Reason.WRONG_STATE)


def test_the_checksums_of_each_rank_go_to_its_reader(make: Make) -> None:
    drive = make(2)
    handle = drive.transferring(token_digest="digest", token_start=4)
    for rank in drive.ranks:
        drive.commit(handle, rank, checksums=((rank, 1), (rank, 2)))
    for rank in drive.ranks:
        leased = drive.lease(handle, rank)
        assert leased.checksums == ((rank, 1), (rank, 2))
        assert leased.shard == e.ShardGrant(rank, drive.session(handle).shards[rank].extents, (0, UNIT)), (
            "where to read is where was granted"
        )
        assert (leased.token_digest, leased.num_tokens, leased.token_start) == ("digest", 16, 4)
        assert (leased.slab_handle, leased.session_id) == (handle, "s")


# --- failing


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("reason", [Reason.TRANSFER_FAILED, Reason.SESSION_NOT_RESIDENT])
def test_a_failure_without_proof_puts_every_shard_in_quarantine(
    make: Make, started: bool, reason: Reason
) -> None:
    drive = make(2)
    handle = drive.transferring(conn_id=7) if started else drive.reserved(conn_id=7)
    assert drive.fail(handle, reason=reason) == e.Accepted(State.ABORTED)
    assert (drive.state(handle), drive.reason(handle)) == (State.ABORTED, reason)
    for rank in drive.ranks:
        assert (drive.free_units(rank), drive.quarantined_units(rank)) == (6, 2)
    quarantined = drive.logged(r.SlabQuarantined, slab_handle=handle, why="undrained")
    assert [x.rank for x in quarantined] == [0, 1]
    assert all(x.until_ns == drive.now_ns + 60_000 * 10**6 for x in quarantined)
    assert drive.tells == [e.EndTold(7, handle, "s", State.ABORTED, reason, True)]
    (outcome,) = drive.logged(r.SyncOutcome, slab_handle=handle)
    assert (outcome.ok, outcome.reason, outcome.ranks) == (False, reason, (0, 1))


@pytest.mark.parametrize("started", [False, True])
def test_a_failure_with_drain_proof_frees_every_shard_at_once(make: Make, started: bool) -> None:
    drive = make(2)
    handle = drive.transferring(conn_id=7) if started else drive.reserved(conn_id=7)
    drive.fail(handle, drained=True)
    assert [drive.free_units(rank) for rank in drive.ranks] == [8, 8]
    assert not drive.tells[0].drain_wanted and not drive.timers


def test_proof_for_one_rank_frees_that_rank_only(make: Make) -> None:
    """The first part that fails frees nothing that its siblings still write."""
    drive = make(3)
    handle = drive.transferring()
    drive.commit(handle, 0)
    drive.fail(handle, rank=1, drained=True)
    assert [drive.free_units(rank) for rank in drive.ranks] == [8, 8, 6]
    assert [drive.quarantined_units(rank) for rank in drive.ranks] == [0, 0, 2]


def test_a_failed_rank_without_proof_keeps_them_all(make: Make) -> None:
    drive = make(2)
    handle = drive.transferring()
    drive.fail(handle, rank=1)
    assert [drive.quarantined_units(rank) for rank in drive.ranks] == [2, 2]


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"reason": Reason.CLIENT_ABORT}, Reason.INVALID_REQUEST),
        ({"reason": Reason.OK, "drained": True}, Reason.INVALID_REQUEST),
        ({"rank": 1, "drained": True}, Reason.WRONG_RANK),
    ],
)
def test_a_failure_that_makes_no_sense_changes_nothing(
    make: Make, started: bool, fields: dict[str, Any], reason: Reason
) -> None:
    drive = make(2)
    handle = drive.reserved(ranks=(0,))
    if started:
        drive.start(handle)
    assert refused(unchanged(drive, lambda: drive.fail(handle, **fields)), reason)


def test_a_failure_after_the_last_commit_is_rejected(make: Make) -> None:
    drive = make(1)
    handle = drive.ready()
    assert refused(unchanged(drive, lambda: drive.fail(handle, drained=True)), Reason.WRONG_STATE)
    assert drive.state(handle) is State.READY


# --- who is told


def test_the_end_is_told_to_whoever_prepared_started_and_committed(make: Make) -> None:
    """The ranks of D may be processes of their own, and each must stop."""
    drive = make(2)
    handle = drive.reserved(conn_id=1)
    drive.start(handle, conn_id=2)
    drive.abort(handle)
    assert [told.conn_id for told in drive.tells] == [1, 2]
    handle = drive.reserved(conn_id=1)
    drive.start(handle)
    drive.commit(handle, 0, conn_id=3)
    drive.abort(handle)
    assert [told.conn_id for told in drive.tells[2:]] == [1, 3]


def test_the_end_is_told_on_the_connection_that_repeated_a_commit(make: Make) -> None:
    """The first one is gone, and the reply with it."""
    drive = make(1)
    handle = drive.reserved()
    drive.commit(handle, 0, conn_id=3)
    drive.commit(handle, 0, conn_id=4)
    drive.abort(handle)
    assert [told.conn_id for told in drive.tells] == [4]


def test_nobody_is_told_when_nobody_is_known(make: Make) -> None:
    drive = make(1)
    drive.abort(drive.reserved())
    assert drive.tells == []


# --- states that do not take part


@pytest.mark.parametrize("state", [State.RESERVED, State.TRANSFERRING])
def test_nothing_is_read_before_ready(make: Make, state: State) -> None:
    drive = make(1)
    handle = drive.reserved() if state is State.RESERVED else drive.transferring()
    result = unchanged(drive, lambda: drive.lease(handle))
    assert refused(result, Reason.WRONG_STATE) and state in result.detail
    assert refused(unchanged(drive, lambda: drive.vote(handle, 0, 1)), Reason.WRONG_STATE)
    assert refused(unchanged(drive, lambda: drive.drained(handle)), Reason.WRONG_STATE)
    unchanged(drive, lambda: drive.tell(e.VictimChosen, slab_handle=handle))
    unchanged(drive, lambda: drive.tell(e.LookedUp, slab_handle=handle))
    unchanged(drive, lambda: drive.tell(e.ReadyExpired, slab_handle=handle, deadline_ns=1))
    unchanged(drive, lambda: drive.tell(e.LeaseTimedOut, slab_handle=handle, rank=0, deadline_ns=1))
