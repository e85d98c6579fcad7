"""One fault at a time, planted in a good log of the real core: each is found, once, at its lines."""

from collections.abc import Callable
from typing import Any

import pytest
from proof_cases import (
    GOOD,
    NS_PER_MS,
    UNITS,
    Log,
    aborted,
    corrupt,
    evicted,
    extents,
    failed,
    named,
    one_life,
    one_rank_aborted,
    pages,
    refused,
    revoked,
    started,
    stopped_while_read,
    two_lives,
    undrained,
    writer_gone,
)  # fmt: skip

from snapd.core import records as r
from snapd.errors import Reason
from snapd.forensics.proof import ViolationKind as K

T, A, Q, R = r.SessionTransition, r.SlabAllocated, r.SlabQuarantined, r.SlabReleased
G, E, D, X, S = r.LeaseGranted, r.LeaseEnded, r.SyncOutcome, r.SyncRefused, r.DaemonStopped
Lines = tuple[int, ...]
Plant = Callable[[Log], Lines]
CASES: list[Any] = []


def plants(kind: K, *logs: Callable[[], Log]) -> Callable[[Plant], Plant]:
    """Register a function that plants a fault of *kind* in each log, and returns the lines to be named."""

    def register(plant: Plant) -> Plant:
        for make in logs:
            name = next(name for name, other in GOOD.items() if other is make)
            CASES.append(pytest.param(kind, make, plant, id=f"{kind}-{plant.__name__}-{name}"))
        return plant

    return register


@pytest.mark.parametrize("make", GOOD.values(), ids=GOOD)
def test_what_the_core_writes_breaks_no_rule(make: Callable[[], Log]) -> None:
    report = make().prove()
    assert report.is_good and report.is_whole, report.violations
    assert report.open_attempts == report.open_leases == 0
    assert all(arena.free_bytes == arena.capacity_bytes for arena in report.arenas)


@pytest.mark.parametrize(("kind", "make", "plant"), CASES)
def test_planted_fault_is_found_at_its_lines(kind: K, make: Callable[[], Log], plant: Plant) -> None:
    log = make()
    lines = plant(log)
    report = log.prove()
    assert [named(violation) for violation in report.violations] == [(kind, lines)]
    assert report.counts == {kind: 1} and not report.is_good
    assert all(min(arena.live_bytes, arena.quarantined_bytes) >= 0 for arena in report.arenas)
    if isinstance(log[len(log)], S):
        assert report.open_attempts == report.open_leases == 0
    violation = report.violations[0]
    assert violation.message and violation.epoch == "e1"


def test_every_kind_has_a_planted_fault() -> None:
    # Copies come in several files: see test_proof_files.
    assert {case.values[0] for case in CASES} == set(K) - {K.COPIES_DIFFER}


# --- numbers, epochs, time ---------------------------------------------------------------------


@plants(K.SEQUENCE_GAP, one_life, aborted, refused)
def a_number_is_missing(log: Log) -> Lines:
    line = log.find(T, to_state="TRANSFERRING")
    log.entries[line - 1].skipped = 1
    return line - 1, line


@plants(K.SEQUENCE_GAP, one_life)
def a_line_comes_twice(log: Log) -> Lines:
    line = log.find(E)
    log.insert(line + 1, log[line])
    log.entries[line].skipped = -1
    return line, line + 1


@plants(K.EPOCH_ORDER, one_life)
def a_line_follows_the_stop(log: Log) -> Lines:
    line = log.find(S)
    log.insert(line + 1, r.SyncRefused(
        at_ns=log[line].at_ns, session_id="s", reason=Reason.DRAINING, num_tokens=1, token_start=0, bytes=1,
    ))  # fmt: skip
    return line, line + 1


@plants(K.EPOCH_ORDER, two_lives)
def the_daemon_starts_twice(log: Log) -> Lines:
    line = log.find(T, nth=4)
    return 1, log.insert(line, started(at_ns=log[line].at_ns))


@plants(K.EPOCH_ORDER, one_life)
def an_attempt_of_a_former_epoch_is_closed_late(log: Log) -> Lines:
    line = log.find(T, to_state="READY")
    log.insert(line, r.SyncOutcome(
        at_ns=log[line].at_ns, session_id="s", slab_handle=9, ok=False, reason=Reason.DAEMON_RESTARTED,
        num_tokens=1, token_start=0, bytes=1, duration_ms=0.0, reserved_ms=0.0, transferring_ms=0.0,
        ready_ms=0.0, former_epoch="e0",
    ))  # fmt: skip
    return 1, line


@plants(K.CLOCK_BACKWARDS, two_lives)
def time_goes_back(log: Log) -> Lines:
    line = log.find(T, 4)
    log.insert(line, r.SyncRefused(
        at_ns=log[line - 1].at_ns - 1, session_id="s", reason=Reason.DRAINING, num_tokens=1, token_start=0,
        bytes=1,
    ))  # fmt: skip
    log.insert(line + 1, _refusal_outcome(log, line))
    log.change(line + 1, at_ns=log[line - 1].at_ns)
    return log.find(D) - 5, line


# --- transitions -------------------------------------------------------------------------------


@plants(K.ILLEGAL_TRANSITION, one_life)
def a_transition_is_left_out(log: Log) -> Lines:
    log.delete(log.find(T, to_state="TRANSFERRING"))
    return log.find(T), log.find(T, to_state="READY")


@plants(K.ILLEGAL_TRANSITION, one_life)
def a_state_is_skipped(log: Log) -> Lines:
    log.delete(log.find(T, to_state="TRANSFERRING"))
    return log.find(T), log.change(log.find(T, to_state="READY"), from_state="RESERVED")


@plants(K.ILLEGAL_TRANSITION, aborted)
def a_reason_does_not_lead_there(log: Log) -> Lines:
    line = log.change(log.find(T, to_state="ABORTED"), reason=Reason.READY_EXPIRED)
    log.change(log.find(D), reason=Reason.READY_EXPIRED)
    return log.find(T, to_state="TRANSFERRING"), line


@plants(K.ILLEGAL_TRANSITION, one_life)
def an_attempt_begins_with_a_fault(log: Log) -> Lines:
    return (log.change(log.find(T), reason=Reason.SUPERSEDED, newer_handle=7),)


@plants(K.ILLEGAL_TRANSITION, evicted)
def nobody_took_over(log: Log) -> Lines:
    return (log.change(log.find(T, to_state="ABORTED", reason=Reason.EVICTED), newer_handle=0),)


@plants(K.ILLEGAL_TRANSITION, two_lives)
def an_attempt_goes_on_after_its_outcome(log: Log) -> Lines:
    line = log.find(D)
    step = log[log.find(T, to_state="READY")]
    log.insert(line + 1, step)
    log.change(line + 1, at_ns=log[line].at_ns)
    return line, line + 1


@plants(K.UNKNOWN_ATTEMPT, one_life)
def an_attempt_was_never_begun(log: Log) -> Lines:
    line = log.find(T, to_state="READY")
    log.insert(line, log[line])
    log.change(line, slab_handle=99)
    return (line,)


def _of_nobody(kind: type[r.Record], make: Callable[[], Log]) -> None:
    def a_line_is_about_nobody(log: Log) -> Lines:
        line = log.find(kind)
        log.insert(line + 1, log[line])
        return (log.change(line + 1, slab_handle=99),)

    a_line_is_about_nobody.__name__ += f"_{kind.__name__}"
    plants(K.UNKNOWN_ATTEMPT, make)(a_line_is_about_nobody)


_of_nobody(A, one_life)
_of_nobody(Q, aborted)
_of_nobody(G, stopped_while_read)
_of_nobody(D, one_life)


@plants(K.UNKNOWN_ATTEMPT, two_lives)
def a_slab_is_allocated_after_the_outcome(log: Log) -> Lines:
    line = log.find(D)
    log.insert(line + 1, log[log.find(A)])
    log.change(line + 1, at_ns=log[line].at_ns)
    return line, line + 1


@plants(K.HANDLE_REUSED, two_lives)
def a_handle_is_used_again(log: Log) -> Lines:
    first, second = log[log.find(T)].slab_handle, log[log.find(D, -1)].slab_handle
    for line in range(1, len(log) + 1):
        if getattr(log[line], "slab_handle", 0) == second:
            log.change(line, slab_handle=first)
    return log.find(D), log.find(T, from_state="", nth=1)


@plants(K.HANDLE_REUSED, one_life)
def an_open_attempt_begins_again(log: Log) -> Lines:
    line = log.find(T, to_state="READY")
    log.insert(line, log[log.find(T)])
    log.change(line, at_ns=log[line + 1].at_ns)
    return log.find(T), line


@plants(K.ATTEMPT_CHANGED, one_life)
def a_transition_is_of_another_session(log: Log) -> Lines:
    return log.find(T), log.change(log.find(T, to_state="READY"), session_id="other")


@plants(K.ATTEMPT_CHANGED, one_life)
def a_transition_has_other_tokens(log: Log) -> Lines:
    return log.find(T), log.change(log.find(T, to_state="READY"), num_tokens=17)


@plants(K.ATTEMPT_CHANGED, one_life)
def an_outcome_starts_at_another_token(log: Log) -> Lines:
    return log.find(T), log.change(log.find(D), token_start=4)


@plants(K.ATTEMPT_CHANGED, aborted)
def an_outcome_has_other_bytes(log: Log) -> Lines:
    return log.find(T), log.change(log.find(D), bytes=4)


def _other_session(kind: type[r.Record], *logs: Callable[[], Log]) -> None:
    def a_line_is_of_another_session(log: Log) -> Lines:
        return log.find(T), log.change(log.find(kind), session_id="other")

    a_line_is_of_another_session.__name__ += f"_{kind.__name__}"
    plants(K.ATTEMPT_CHANGED, *logs)(a_line_is_of_another_session)


_other_session(A, one_life)
_other_session(Q, aborted)
_other_session(R, one_life)
_other_session(G, one_life)
_other_session(E, one_life)


# --- outcomes ----------------------------------------------------------------------------------


@plants(K.MISSING_OUTCOME, one_life, aborted, corrupt)
def an_outcome_is_missing(log: Log) -> Lines:
    line = log.find(D)
    log.delete(line)
    stop = log.find(S)
    is_last = log[line].at_ns == log[stop].at_ns
    log.change(stop, attempts_ok=0)
    return log.find(T, -1), stop if is_last else line


@plants(K.MISSING_OUTCOME, one_life)
def an_attempt_is_open_when_the_daemon_stops(log: Log) -> Lines:
    ready = log.find(T, to_state="READY")
    del log.entries[ready : log.find(S) - 1]
    stop = log.change(log.find(S), attempts_ok=0)
    return log.find(T), ready, stop


@plants(K.MISSING_OUTCOME, stopped_while_read)
def an_attempt_is_read_when_the_daemon_stops(log: Log) -> Lines:
    line = log.find(G)
    del log.entries[line : log.find(S) - 1]
    return log.find(T), log.find(T, -1), log.find(S)


@plants(K.MISSING_OUTCOME, refused)
def a_refusal_has_no_outcome(log: Log) -> Lines:
    line = log.find(X)
    log.delete(line + 1)
    return line, line + 1


@plants(K.MISSING_OUTCOME, refused)
def a_refusal_is_followed_by_another_outcome(log: Log) -> Lines:
    line = log.find(D, -1)
    log.insert(line, log[log.find(X)])
    log.change(line, at_ns=log[line + 1].at_ns)
    return line, line + 1


@plants(K.MISSING_OUTCOME, aborted)
def bytes_leave_the_quarantine_before_the_outcome(log: Log) -> Lines:
    outcome = log.find(D)
    quarantined = log.find(Q)
    released = log.delete(log.find(R)).record
    log.insert(outcome, released)
    log.change(outcome, why="drained", at_ns=log[quarantined].at_ns, duration_ms=0.0)
    return quarantined, outcome


@plants(K.SECOND_OUTCOME, one_life, aborted)
def an_outcome_comes_twice(log: Log) -> Lines:
    line = log.find(D)
    log.insert(line + 1, log[line])
    return line, line + 1


@plants(K.SECOND_OUTCOME, refused)
def a_refusal_has_two_outcomes(log: Log) -> Lines:
    line = log.find(D)
    return (log.insert(line + 1, log[line]),)


@plants(K.WRONG_OUTCOME, aborted)
def an_outcome_has_another_reason(log: Log) -> Lines:
    return log.find(T, -1), log.change(log.find(D), reason=Reason.TRANSFER_FAILED)


@plants(K.WRONG_OUTCOME, aborted)
def an_aborted_attempt_is_ok(log: Log) -> Lines:
    log.change(log.find(S), attempts_ok=1)
    return log.find(T, -1), log.change(log.find(D), ok=True)


@plants(K.WRONG_OUTCOME, one_life)
def an_outcome_comes_before_the_end(log: Log) -> Lines:
    ready = log.find(T, to_state="READY")
    outcome = log.delete(log.find(D)).record
    del log.entries[ready : log.find(S) - 1]
    log.insert(ready + 1, outcome)
    return ready, log.change(ready + 1, at_ns=log[ready].at_ns)


@plants(K.WRONG_OUTCOME, stopped_while_read)
def an_outcome_comes_while_a_rank_reads(log: Log) -> Lines:
    line = log.find(G)
    outcome = log.delete(log.find(D)).record
    del log.entries[line : log.find(S) - 1]
    log.insert(line + 1, outcome)
    return line - 1, log.change(line + 1, at_ns=log[line].at_ns)


@plants(K.WRONG_OUTCOME, refused)
def a_refusal_has_a_reason_of_an_end(log: Log) -> Lines:
    line = log.change(log.find(X), reason=Reason.EVICTED)
    log.change(line + 1, reason=Reason.EVICTED)
    return (line,)


def _wrong_refusal(name: str, **fields: object) -> None:
    def the_outcome_of_a_refusal_is_another(log: Log) -> Lines:
        line = log.find(X)
        return line, log.change(line + 1, **fields)

    the_outcome_of_a_refusal_is_another.__name__ += f"_{name}"
    plants(K.WRONG_OUTCOME, refused)(the_outcome_of_a_refusal_is_another)


_wrong_refusal("reason", reason=Reason.DRAINING)
_wrong_refusal("session", session_id="other")
_wrong_refusal("tokens", num_tokens=1)
_wrong_refusal("start", token_start=4)
_wrong_refusal("bytes", bytes=1)
_wrong_refusal("ranks", ranks=(0,))
_wrong_refusal("time", duration_ms=1.0)


@plants(K.WRONG_OUTCOME, refused)
def a_refusal_is_ok(log: Log) -> Lines:
    line = log.find(X)
    return line, log.change(line + 1, ok=True)


# --- bytes -------------------------------------------------------------------------------------


def _move(log: Log, line: int, *pairs: tuple[int, int]) -> None:
    """Let a slab lie elsewhere, from its allocation to its release."""
    slab = log[line]
    for other in range(line, len(log) + 1):
        record = log[other]
        if isinstance(record, A | Q | R) and (record.slab_handle, record.rank) == (
            slab.slab_handle,
            slab.rank,
        ):
            log.change(other, extents=extents(*pairs))


@plants(K.OVERLAPPING_EXTENTS, evicted)
def live_bytes_are_handed_out(log: Log) -> Lines:
    _move(log, log.find(A, 2), (1, 2))
    return log.find(A), log.find(A, 2)


@plants(K.OVERLAPPING_EXTENTS, evicted)
def the_bytes_after_the_offset_are_live(log: Log) -> Lines:
    """The new extent begins in a hole and runs into what is there."""
    line = log.find(A, 8)
    assert log[line].extents == extents((0, 2))
    _move(log, line, (1, 2))
    return log.find(A, 2), line


@plants(K.OVERLAPPING_EXTENTS, pages)
def one_plane_of_a_slab_lies_on_another_slab(log: Log) -> Lines:
    line = log.find(A, session_id="wide", rank=0)
    assert log[line].extents == extents((0, 1), (2, 1))
    _move(log, line, (0, 1), (3, 1))
    return log.find(A, session_id="3"), line


@plants(K.OVERLAPPING_EXTENTS, one_life)
def extents_of_one_slab_overlap(log: Log) -> Lines:
    for kind in (A, R):
        log.change(log.find(kind, rank=1), extents=extents((0, 2), (1, 2)))
    return (log.find(A, rank=1),)


@plants(K.REUSE_BEFORE_RELEASE, undrained, aborted)
def quarantined_bytes_are_handed_out(log: Log) -> Lines:
    line = log.find(R)
    at_ns = log[log.find(D)].at_ns
    new = [log[log.find(T)], log[log.find(A)], log[log.find(A, 1)]]
    for shift, record in enumerate(new):
        log.insert(line + shift, record)
        log.change(line + shift, slab_handle=7, at_ns=at_ns)
    log.change(line + 2, extents=extents((4, 2)))
    end = log.find(S)
    log.delete(end)  # The new attempt stays open.
    return log.find(Q), line + 1


def _misplaced(name: str, *pairs: tuple[int, int]) -> None:
    def an_extent_is_misplaced(log: Log) -> Lines:
        line = log.find(A, rank=1)
        moved = tuple(type(log[line].extents[0])(*pair) for pair in pairs)
        for other in (line, log.find(R, rank=1)):
            log.change(other, extents=moved)
        return 1, line

    an_extent_is_misplaced.__name__ += f"_{name}"
    plants(K.EXTENT_OUTSIDE_ARENA, one_life)(an_extent_is_misplaced)


_misplaced("beyond_the_end", ((UNITS - 1) * 256, 512))
_misplaced("before_the_beginning", (-256, 512))
_misplaced("at_an_odd_offset", (128, 512))
_misplaced("of_an_odd_size", (0, 700))
_misplaced("and_empty", (0, 512), (1024, 0))
_misplaced("and_negative", (0, 768), (1024, -256))


@plants(K.ACCOUNTING, one_life)
def a_slab_is_smaller_than_its_payload(log: Log) -> Lines:
    for kind in (A, R):
        log.change(log.find(kind, rank=1), extents=extents((0, 1)))
    return (log.find(A, rank=1),)


@plants(K.ACCOUNTING, one_life)
def slabs_without_payload(log: Log) -> Lines:
    for kind, rank in ((A, 0), (A, 1), (R, 0), (R, 1)):
        log.change(log.find(kind, rank=rank), bytes=0)
    for line in range(1, len(log) + 1):
        if isinstance(log[line], T | D):
            log.change(line, bytes=0)
    log.delete(log.find(A, rank=1))
    for kind in (G, E, R):
        log.delete(log.find(kind, rank=1))
    log.change(log.find(D), ranks=(0,))
    return (log.find(A),)


@plants(K.RELEASE_WITHOUT_PROOF, aborted)
def a_quarantine_is_too_short(log: Log) -> Lines:
    line = log.find(R)
    until_ns = log[log.find(Q)].until_ns
    log.change(line, at_ns=until_ns - 1, duration_ms=(until_ns - 1 - log[log.find(Q)].at_ns) / NS_PER_MS)
    return log.find(Q), line


def _released(name: str, make: Callable[[], Log], quarantined: int, **fields: object) -> None:
    def a_quarantine_ends_by_what_is_no_proof(log: Log) -> Lines:
        since = log.find(Q, quarantined)
        line = log.find(R, rank=log[since].rank, was="quarantined")
        return since, log.change(line, **fields)

    a_quarantine_ends_by_what_is_no_proof.__name__ += f"_{name}"
    plants(K.RELEASE_WITHOUT_PROOF, make)(a_quarantine_ends_by_what_is_no_proof)


_released("undrained_final", undrained, 0, why="final")
_released("undrained_lease_ended", undrained, 0, why="lease-ended")
_released("corrupt_drained", corrupt, 0, why="drained")
_released("corrupt_writer_gone", corrupt, 0, why="writer-gone")
_released("leased_time", corrupt, 1, why="time")
_released("leased_drained", corrupt, 1, why="drained")
_released("as_live", aborted, 0, was="live")


def _freed(name: str, make: Callable[[], Log], **fields: object) -> None:
    def live_bytes_are_freed_without_proof(log: Log) -> Lines:
        return log.find(T, -1), log.change(log.find(R), **fields)

    live_bytes_are_freed_without_proof.__name__ += f"_{name}"
    plants(K.RELEASE_WITHOUT_PROOF, make)(live_bytes_are_freed_without_proof)


_freed("ingested_drained", one_life, why="drained")
_freed("time", failed, why="time")
_freed("lease_ended", failed, why="lease-ended")
_freed("writer_gone", failed, why="writer-gone")
_freed("drained_writer", writer_gone, why="drained")
_freed("as_quarantined", one_life, was="quarantined")


@plants(K.RELEASE_WITHOUT_PROOF, failed)
def a_slab_that_was_not_committed_is_freed_as_final(log: Log) -> Lines:
    for rank in (0, 1):
        log.change(log.find(R, rank=rank), why="final")
    return log.find(T, -1), log.find(D)


@plants(K.RELEASE_WITHOUT_PROOF, failed)
def a_slab_that_nobody_wrote_is_freed_as_final(log: Log) -> Lines:
    start, end = log.find(T, to_state="TRANSFERRING"), log.find(T, -1)
    at_ns = log[start - 1].at_ns
    spent_ms = (log[end].at_ns - at_ns) / NS_PER_MS
    log.change(end, from_state="RESERVED", duration_ms=spent_ms)
    log.change(log.find(D), reserved_ms=spent_ms, transferring_ms=0.0)
    log.change(log.find(R), why="final")
    log.delete(start)
    return log.find(T, -1), log.find(R)


@plants(K.RELEASE_WITHOUT_PROOF, one_life)
def bytes_of_an_open_attempt_are_freed(log: Log) -> Lines:
    line = log.find(R)
    record = log.delete(line).record
    ready = log.find(T, to_state="READY")
    log.insert(ready + 1, record)
    at_ns = log[ready].at_ns
    log.change(ready + 1, at_ns=at_ns, duration_ms=(at_ns - log[log.find(T)].at_ns) / NS_PER_MS)
    return ready, ready + 1


@plants(K.RELEASE_WITHOUT_PROOF, corrupt)
def corrupt_bytes_are_not_kept_as_such(log: Log) -> Lines:
    log.change(log.find(Q), why="undrained")
    return log.find(T, -1), log.find(D)


@plants(K.WRONG_QUARANTINE, aborted)
def bytes_are_kept_as_corrupt_and_no_checksum_was_wrong(log: Log) -> Lines:
    return log.find(T, -1), log.change(log.find(Q), why="corrupt")


@plants(K.WRONG_QUARANTINE, stopped_while_read)
def bytes_are_kept_for_longer_than_the_lease(log: Log) -> Lines:
    line = log.find(Q)
    return log.find(A), log.change(line, until_ns=log[line].until_ns + 1)


@plants(K.WRONG_QUARANTINE, aborted)
def bytes_are_kept_for_a_reader_that_is_none(log: Log) -> Lines:
    line = log.change(log.find(Q), why="leased")
    log.change(log.find(R), why="lease-ended")
    return log.find(A), line


@plants(K.WRONG_QUARANTINE, undrained)
def a_quarantine_has_no_time(log: Log) -> Lines:
    line = log.find(Q)
    return (log.change(line, until_ns=log[line].at_ns),)


@plants(K.WRONG_QUARANTINE, undrained, corrupt)
def a_quarantine_is_shorter_than_the_settings_say(log: Log) -> Lines:
    line = log.find(Q)
    return 1, log.change(line, until_ns=log[line].at_ns + 60_000 * NS_PER_MS - 1)


@plants(K.WRONG_QUARANTINE, undrained)
def a_quarantine_is_longer_than_the_settings_say(log: Log) -> Lines:
    line = log.find(Q)
    return 1, log.change(line, until_ns=log[line].at_ns + 60_000 * NS_PER_MS + 1)


@plants(K.WRONG_QUARANTINE, one_life)
def bytes_of_an_ingested_attempt_are_kept_for_a_reader(log: Log) -> Lines:
    line = log.find(R)
    live = log.delete(line).record
    log.insert(line, r.SlabQuarantined(
        at_ns=live.at_ns, session_id="s", slab_handle=live.slab_handle, rank=live.rank, bytes=live.bytes,
        extents=live.extents, until_ns=live.at_ns + 10, why="leased",
    ))  # fmt: skip
    stop = log.find(S)
    log.insert(stop, live)
    log.change(stop, at_ns=live.at_ns + 10, was="quarantined", why="lease-ended", duration_ms=10 / NS_PER_MS)
    return log.find(T, -1), line


@plants(K.WRONG_QUARANTINE, aborted)
def bytes_of_an_open_attempt_are_kept(log: Log) -> Lines:
    line = log.find(Q)
    record = log.delete(line).record
    at = log.find(T, to_state="TRANSFERRING") + 1
    log.insert(at, record)
    at_ns = log[at - 1].at_ns
    log.change(at, at_ns=at_ns)
    released = log.find(R)
    log.change(released, duration_ms=(log[released].at_ns - at_ns) / NS_PER_MS)
    return at - 1, at


@plants(K.QUARANTINE_PAST_END, two_lives)
def a_quarantine_goes_on(log: Log) -> Lines:
    line = log.find(R)
    live = log.delete(line).record
    log.insert(line, r.SlabQuarantined(
        at_ns=live.at_ns, session_id="a", slab_handle=live.slab_handle, rank=live.rank, bytes=live.bytes,
        extents=live.extents, until_ns=live.at_ns + 10, why="undrained",
    ))  # fmt: skip
    log.change(1, quarantine_ms=0)
    for other in (log.find(A, 2), log.find(R, 1)):
        log.change(other, extents=extents((4, 2)))
    return line, log.find(S)


# --- leases ------------------------------------------------------------------------------------


@plants(K.LEASE_PAST_END, one_life)
def a_vote_counts_after_the_lease(log: Log) -> Lines:
    line = log.find(G, rank=0)
    return log.change(line, until_ns=log[log.find(E)].at_ns), log.find(E)


@plants(K.LEASE_PAST_END, stopped_while_read)
def a_lease_is_over_when_it_begins(log: Log) -> Lines:
    line = log.find(G)
    log.change(log.find(Q), until_ns=log[line].at_ns)
    log.change(log.find(R, was="quarantined"), at_ns=log[line].at_ns + 1)
    kept_ms = (log[line].at_ns + 1 - log[log.find(Q)].at_ns) / NS_PER_MS
    log.change(log.find(R, was="quarantined"), duration_ms=kept_ms)
    return (log.change(line, until_ns=log[line].at_ns),)


@plants(K.LEASE_PAST_END, revoked)
def a_lease_is_kept_after_its_end(log: Log) -> Lines:
    """Another daemon would have revoked it 11 s before."""
    granted, ended, again = log.find(G), log.find(E), log.find(G, 1)
    log.delete(again)
    log.delete(ended)
    line = ended
    at_ns = log[granted].until_ns
    for shift in (0, 11_000 * NS_PER_MS):
        log.insert(line, r.SyncRefused(
            at_ns=at_ns + shift, session_id="x", reason=Reason.DRAINING, num_tokens=1, token_start=0, bytes=1,
        ))  # fmt: skip
        log.insert(line + 1, _refusal_outcome(log, line))
        line += 2
    end = log.find(E)
    for other in range(end, len(log) + 1):
        if log[other].at_ns == log[end].at_ns and other != end:
            log.change(other, at_ns=at_ns + 12_000 * NS_PER_MS)
    _retime(log, end, at_ns + 12_000 * NS_PER_MS, granted)
    return granted, line - 2


def _retime(log: Log, end: int, at_ns: int, granted: int) -> None:
    """Let the attempt of *revoked* end at another time, under its first lease."""
    begun_ns = log[log.find(T)].at_ns
    ready_ns = log[log.find(T, to_state="READY")].at_ns
    log.change(
        end, at_ns=at_ns, lease_id=log[granted].lease_id, duration_ms=(at_ns - log[granted].at_ns) / NS_PER_MS
    )
    ready_ms, whole_ms = (at_ns - ready_ns) / NS_PER_MS, (at_ns - begun_ns) / NS_PER_MS
    log.change(log.find(T, -1), duration_ms=ready_ms)
    log.change(log.find(D, -1), duration_ms=whole_ms, ready_ms=ready_ms)
    log.change(log.find(R, was="live"), duration_ms=whole_ms)
    log.change(log.find(Q), until_ns=log[granted].until_ns)
    released = log.find(R, was="quarantined")
    log.change(released, at_ns=at_ns, duration_ms=0.0)


@plants(K.WRONG_LEASE, one_life)
def a_lease_before_the_snapshot_is_ready(log: Log) -> Lines:
    line = log.find(G)
    record = log.delete(line).record
    ready = log.find(T, to_state="READY")
    log.insert(ready, record)
    at_ns = log[ready - 1].at_ns
    log.change(ready, at_ns=at_ns)
    end = log.find(E)
    log.change(end, duration_ms=(log[end].at_ns - at_ns) / NS_PER_MS)
    return ready - 1, ready


@plants(K.WRONG_LEASE, stopped_while_read)
def a_lease_of_a_rank_without_slab(log: Log) -> Lines:
    line = log.find(G)
    log.insert(line + 1, log[line])
    log.change(line + 1, rank=5, lease_id=2)
    log.insert(line + 3, log[line + 2])
    log.change(line + 3, rank=5, lease_id=2, duration_ms=1e-6)
    return log.find(T, to_state="READY"), line + 1


@plants(K.WRONG_LEASE, one_life)
def a_lease_id_is_used_again(log: Log) -> Lines:
    line = log.find(E)
    log.insert(line, log[log.find(G)])
    at_ns = log[line - 1].at_ns
    log.change(line, at_ns=at_ns, lease_id=2, rank=0)
    log.insert(line, log[line + 1])
    reason = Reason.ROUND_ABORTED
    spent_ms = (at_ns - log[log.find(G)].at_ns) / NS_PER_MS
    log.change(line, at_ns=at_ns, ok=False, reason=reason, duration_ms=spent_ms)
    log.change(line + 1, lease_id=1)
    log.change(line + 2, duration_ms=(log[line + 2].at_ns - at_ns) / NS_PER_MS)
    return log.find(T, to_state="READY"), line + 1


@plants(K.WRONG_LEASE, revoked)
def the_last_lease_id_is_used_again(log: Log) -> Lines:
    log.change(log.find(E, 1), lease_id=1)
    return log.find(T, to_state="READY"), log.change(log.find(G, 1), lease_id=1)


@plants(K.WRONG_LEASE, stopped_while_read)
def a_rank_gets_a_second_lease(log: Log) -> Lines:
    line = log.find(G)
    log.insert(line + 1, log[line])
    log.change(line + 1, lease_id=2)
    log.insert(line + 2, log[line + 2])
    log.change(line + 3, lease_id=2)
    return line, line + 1


@plants(K.WRONG_LEASE, revoked)
def a_round_goes_back(log: Log) -> Lines:
    log.change(log.find(G), round=3)
    return log.find(T, to_state="READY"), log.find(G, 1)


@plants(K.WRONG_LEASE, two_lives)
def a_lease_after_the_outcome(log: Log) -> Lines:
    line = log.find(D)
    log.insert(line + 1, log[log.find(G)])
    log.change(line + 1, at_ns=log[line].at_ns)
    return line, line + 1


@plants(K.WRONG_LEASE, one_life)
def a_lease_that_is_not_held_ends(log: Log) -> Lines:
    line = log.find(E)
    log.insert(line, log[line])
    log.change(line, lease_id=9)
    return log.find(T, to_state="READY"), line


@plants(K.WRONG_LEASE, one_life)
def a_lease_of_another_rank_ends(log: Log) -> Lines:
    return log.find(G, rank=0), log.change(log.find(E), rank=1)


@plants(K.WRONG_LEASE, stopped_while_read)
def a_lease_ends_because_of_an_eviction(log: Log) -> Lines:
    return log.find(G), log.change(log.find(E), reason=Reason.EVICTED)


@plants(K.WRONG_LEASE, corrupt)
def a_lease_ends_ok_for_a_reason_that_is_not(log: Log) -> Lines:
    return log.find(G, rank=0), log.change(log.find(E), reason=Reason.OK)


@plants(K.WRONG_LEASE, revoked)
def a_lease_expires_too_soon(log: Log) -> Lines:
    line = log.find(G)
    return log.change(line, until_ns=log[line].until_ns + 1), log.find(E)


@plants(K.WRONG_LEASE, stopped_while_read)
def an_attempt_ends_under_a_lease(log: Log) -> Lines:
    log.delete(log.find(E))
    line = log.find(Q)
    held = log.delete(line).record
    log.insert(line, r.SlabReleased(
        at_ns=held.at_ns, session_id="s", slab_handle=held.slab_handle, rank=held.rank, bytes=held.bytes,
        extents=held.extents, was="live", why="final", duration_ms=log[line].duration_ms,
    ))  # fmt: skip
    log.delete(log.find(R, was="quarantined"))
    for after_ms in (20_000, 40_000):
        stop = log.find(S)
        log.insert(stop, r.SyncRefused(
            at_ns=held.at_ns + after_ms * NS_PER_MS, session_id="x", reason=Reason.DRAINING, num_tokens=1,
            token_start=0, bytes=1,
        ))  # fmt: skip
        log.insert(stop + 1, _refusal_outcome(log, stop))
    return log.find(G), log.find(T, -1)


# --- ranks -------------------------------------------------------------------------------------


@plants(K.RANKS_DIFFER, one_life)
def a_rank_got_no_slab(log: Log) -> Lines:
    for kind in (A, G, E, R):
        log.delete(log.find(kind, rank=1))
    log.change(log.find(D), ranks=(0,))
    return log.find(T), log.find(T, to_state="TRANSFERRING")


@plants(K.RANKS_DIFFER, failed)
def no_rank_got_a_slab(log: Log) -> Lines:
    for kind in (A, A, R, R):
        log.delete(log.find(kind))
    log.change(log.find(D), ranks=())
    return log.find(T), log.find(T, to_state="TRANSFERRING")


@plants(K.RANKS_DIFFER, one_life)
def a_rank_got_fewer_bytes(log: Log) -> Lines:
    for kind in (A, R):
        log.change(log.find(kind, rank=0), bytes=520, extents=extents((0, 3)))
        log.change(log.find(kind, rank=1), bytes=504)
    return log.find(A), log.find(A, 1)


@plants(K.RANKS_DIFFER, one_life)
def a_rank_got_two_slabs(log: Log) -> Lines:
    line = log.find(A)
    log.insert(line + 1, log[line])
    log.change(line + 1, extents=extents((4, 2)))
    return line, line + 1


@plants(K.RANKS_DIFFER, one_life)
def a_slab_comes_later(log: Log) -> Lines:
    line = log.find(A, rank=1)
    record = log.delete(line).record
    log.insert(line + 1, record)
    return log.find(T), log.change(line + 1, at_ns=log[line].at_ns) - 1


@plants(K.RANKS_DIFFER, one_rank_aborted)
def a_slab_comes_in_addition(log: Log) -> Lines:
    line = log.find(T, to_state="TRANSFERRING")
    for kind in (A, Q, R):
        other = log.find(kind)
        log.insert(other + 1, log[other])
        log.change(other + 1, rank=1)
    added = log.delete(log.find(A, rank=1)).record
    log.insert(line + 1, added)
    log.change(log.find(D), ranks=(0, 1))
    return log.find(T), log.change(line + 1, at_ns=log[line].at_ns)


@plants(K.RANKS_DIFFER, one_life)
def an_arena_is_not_there(log: Log) -> Lines:
    for kind in (A, G, E, R):
        log.change(log.find(kind, rank=1), rank=4)
    log.change(log.find(D), ranks=(0, 4))
    return 1, log.find(A, 1)


@plants(K.RANKS_DIFFER, one_life)
def two_arenas_have_one_rank(log: Log) -> Lines:
    return (log.change(1, arenas=log[1].arenas + log[1].arenas[:1]),)


@plants(K.RANKS_DIFFER, one_life)
def a_rank_was_not_told_to_commit(log: Log) -> Lines:
    log.change(log.find(E, rank=1), ok=False, reason=Reason.ROUND_ABORTED)
    return log.find(T), log.find(E), log.find(T, -1)


@plants(K.RANKS_DIFFER, one_life)
def ranks_commit_in_two_rounds(log: Log) -> Lines:
    log.change(log.find(G, rank=1), round=2)
    return log.find(E), log.find(E, 1)


@plants(K.RANKS_DIFFER, corrupt)
def a_rank_was_told_to_commit_and_the_attempt_was_aborted(log: Log) -> Lines:
    line = log.change(log.find(E, rank=1), ok=True, reason=Reason.OK)
    return line, log.find(T, -1)


@plants(K.RANKS_DIFFER, revoked)
def a_rank_was_told_to_commit_and_the_attempt_goes_on(log: Log) -> Lines:
    line = log.find(E)
    at_ns = log[line].at_ns - 1
    log.change(line, ok=True, reason=Reason.OK, at_ns=at_ns)
    log.change(line, duration_ms=(at_ns - log[log.find(G)].at_ns) / NS_PER_MS)
    end = log.find(T, -1)
    del log.entries[line + 1 :]
    assert end > line
    return line, line + 1


@plants(K.RANKS_DIFFER, one_life)
def an_outcome_names_other_ranks(log: Log) -> Lines:
    return log.find(T), log.change(log.find(D), ranks=(0,))


# --- what does not add up ----------------------------------------------------------------------


@plants(K.ACCOUNTING, one_life, aborted)
def a_rank_keeps_its_bytes(log: Log) -> Lines:
    line = log.find(R, rank=1) if log.find(D) > log.find(R) else log.find(Q, rank=1)
    log.delete(line)
    released = [number for number in range(1, len(log)) if isinstance(log[number], R) and log[number].rank]
    if released:
        log.delete(released[0])
    return log.find(A, rank=1), log.find(D)


@plants(K.ACCOUNTING, one_life)
def bytes_are_freed_twice(log: Log) -> Lines:
    line = log.find(R)
    return log.find(A), log.insert(line + 1, log[line])


@plants(K.ACCOUNTING, two_lives)
def bytes_are_freed_again_after_the_outcome(log: Log) -> Lines:
    line = log.find(D)
    return line, log.insert(line + 1, log[log.find(R)])


@plants(K.ACCOUNTING, one_life)
def bytes_are_freed_that_were_never_held(log: Log) -> Lines:
    line = log.find(R)
    log.insert(line, log[line])
    return log.find(T), log.change(line, rank=7)


@plants(K.ACCOUNTING, one_life, failed)
def fewer_bytes_are_freed(log: Log) -> Lines:
    return log.find(A), log.change(log.find(R), extents=extents((0, 1)))


@plants(K.ACCOUNTING, aborted)
def other_bytes_are_quarantined(log: Log) -> Lines:
    return log.find(A), log.change(log.find(Q), extents=extents((0, 3)))


@plants(K.ACCOUNTING, one_life)
def the_payload_freed_is_another(log: Log) -> Lines:
    return log.find(A), log.change(log.find(R), bytes=511)


@plants(K.ACCOUNTING, aborted)
def bytes_are_quarantined_twice(log: Log) -> Lines:
    line = log.find(Q)
    return line, log.insert(line + 1, log[line])


@plants(K.ACCOUNTING, failed)
def bytes_are_quarantined_that_are_free(log: Log) -> Lines:
    line = log.find(R)
    freed = log[line]
    log.insert(line + 1, r.SlabQuarantined(
        at_ns=freed.at_ns, session_id="s", slab_handle=freed.slab_handle, rank=freed.rank, bytes=freed.bytes,
        extents=freed.extents, until_ns=freed.at_ns + 10, why="undrained",
    ))  # fmt: skip
    return log.find(A), line + 1


@plants(K.ACCOUNTING, aborted)
def bytes_are_quarantined_that_were_never_held(log: Log) -> Lines:
    line = log.find(Q)
    log.insert(line, log[line])
    return log.find(T), log.change(line, rank=7)


def _wrong_time(name: str, make: Callable[[], Log], kind: type[r.Record], since: Plant, nth: int = 0) -> None:
    def a_time_is_wrong(log: Log) -> Lines:
        line = log.find(kind, nth)
        log.change(line, duration_ms=log[line].duration_ms + 1e-6)
        return (*since(log), line)

    a_time_is_wrong.__name__ += f"_{name}"
    plants(K.ACCOUNTING, make)(a_time_is_wrong)


_wrong_time("live", one_life, R, lambda log: (log.find(A),))
_wrong_time("quarantined", aborted, R, lambda log: (log.find(Q),))
_wrong_time("lease", one_life, E, lambda log: (log.find(G),))
_wrong_time("begin", one_life, T, lambda log: ())


@plants(K.ACCOUNTING, one_life)
def a_state_did_not_last_so_long(log: Log) -> Lines:
    line = log.find(T, to_state="READY")
    return line - 1, log.change(line, duration_ms=log[line].duration_ms + 1e-6)


@plants(K.ACCOUNTING, one_life, aborted)
def the_times_in_the_states_do_not_add_up(log: Log) -> Lines:
    line = log.find(D)
    return log.find(T), log.change(line, duration_ms=log[line].duration_ms + 1e-6)


@plants(K.ACCOUNTING, one_life)
def the_outcome_tells_another_time_of_a_state(log: Log) -> Lines:
    line = log.find(D)
    log.change(line, ready_ms=log[line].ready_ms + 1e-6, reserved_ms=log[line].reserved_ms - 1e-6)
    return log.find(T), line


@plants(K.MISSING_OUTCOME, one_life)
def the_outcome_is_written_later(log: Log) -> Lines:
    line = log.find(D)
    return log.find(T, -1), log.change(line, at_ns=log[line].at_ns + 1)


@plants(K.ACCOUNTING, one_life)
def the_daemon_counts_other_attempts(log: Log) -> Lines:
    return 1, log.change(log.find(S), attempts=2)


@plants(K.ACCOUNTING, aborted)
def the_daemon_counts_other_successes(log: Log) -> Lines:
    return 1, log.change(log.find(S), attempts_ok=1)


def _refusal_outcome(log: Log, line: int) -> r.SyncOutcome:
    refusal = log[line]
    return r.SyncOutcome(
        at_ns=refusal.at_ns, session_id=refusal.session_id, ok=False, reason=refusal.reason,
        num_tokens=refusal.num_tokens, token_start=refusal.token_start, bytes=refusal.bytes, duration_ms=0.0,
        reserved_ms=0.0, transferring_ms=0.0, ready_ms=0.0,
    )  # fmt: skip
