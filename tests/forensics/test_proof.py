"""Epochs, crashes, missing lines: what is claimed of a log, and what is not."""

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from proof_cases import (
    FILE,
    GOOD,
    NS_PER_MS,
    UNITS,
    Driver,
    Log,
    aborted,
    extents,
    log_of,
    named,
    one_life,
    one_rank_aborted,
    pages,
    prove,
    prove_lines,
    refused,
    started,
    two_lives,
)  # fmt: skip

from snapd.core import records as r
from snapd.core.events import State
from snapd.errors import Reason
from snapd.eventlog import Line, TornLine, decode_line
from snapd.forensics import memory
from snapd.forensics import proof as proof_module
from snapd.forensics.epochproof import EpochProof
from snapd.forensics.memory import Attempt, EndedHandles, Overdue
from snapd.forensics.proof import KIND_HELP, OLDER_REASONS_MAX, OTHER_REASONS, Proof, Where
from snapd.forensics.proof import ViolationKind as K
from snapd.forensics.shards import Shard, ShardMap
from snapd.forensics.violations import Findings
from snapd.logrecovery import FormerEpoch, OpenAttempt, closing_records

Step = r.SessionTransition


def crashed() -> Log:
    """A daemon that died with one attempt RESERVED, one READY and one in quarantine."""
    drive = Driver(2, units=UNITS)
    drive.reserved("a")
    drive.abort(drive.reserved("b"))
    drive.ready("c")
    return log_of(drive, is_stopped=False)


def closings(log: Log, at_ns: int = 5) -> list[r.Record]:
    """What the next start writes, by the code that it writes it with."""
    attempts: dict[int, OpenAttempt] = {}
    for number, entry in enumerate(log.entries):
        record = entry.record
        if isinstance(record, Step):
            spent = attempts[record.slab_handle] if record.from_state else None
            times = {"reserved_ms": 0.0, "transferring_ms": 0.0, "ready_ms": 0.0}
            if spent is not None:
                times = {name: getattr(spent, name) for name in times}
                times[f"{record.from_state.lower()}_ms"] = record.duration_ms
            attempts[record.slab_handle] = OpenAttempt(
                epoch=entry.epoch, session_id=record.session_id, slab_handle=record.slab_handle,
                state=str(record.to_state), reason=record.reason, num_tokens=record.num_tokens,
                token_start=record.token_start, bytes=record.bytes,
                entered=((str(record.to_state), float(number)),), ended_ts=float(len(log)), **times,
            )  # fmt: skip
        elif isinstance(record, r.SyncOutcome):
            attempts.pop(record.slab_handle, None)
    former = FormerEpoch(epoch="e1", ended_ts=0.0, attempts=tuple(attempts.values()))
    return closing_records(former, at_ns)


def restarted(log: Log, **fields: Any) -> Log:
    """The log of a daemon that died, and of the next one, which closes it and serves one attempt."""
    records = closings(log)
    count = sum(1 for record in records if isinstance(record, r.SyncOutcome))
    later = one_life()
    values = {"at_ns": 5, "former_epoch": "e1", "closed_attempts": count} | fields
    return log + Log(started(**values), *records, *(entry.record for entry in later.entries[1:]), epoch="e2")


def proof_of(log: Log) -> Proof:
    proof = Proof()
    for number, raw in enumerate(log.raw(), 1):
        proof.feed(decode_line(raw), Where(FILE, number))
    return proof


def test_lease_of_an_attempt_that_has_its_outcome_is_not_open() -> None:
    log = one_life()
    outcome = log[log.find(r.SyncOutcome)]
    del log.entries[log.find(r.LeaseGranted, 1) :]
    log.insert(len(log) + 1, msgspec.structs.replace(outcome, at_ns=log[len(log)].at_ns))
    report = log.prove()
    assert report.counts == {K.WRONG_OUTCOME: 1} and report.open_leases == report.open_attempts == 0


# --- epochs ------------------------------------------------------------------------------------


def test_attempts_of_a_daemon_that_died_are_closed_by_the_next() -> None:
    log = restarted(crashed())
    report = log.prove()
    assert report.is_good and report.is_whole, report.violations
    assert (report.epochs, report.crashed_epochs) == (2, 1)
    assert report.outcomes == {"client-abort": 1, "daemon-restarted": 2, "ok": 1}
    assert report.attempts == 4 and report.open_attempts == 0


def test_attempt_that_had_ended_lacks_its_outcome_only() -> None:
    log = two_lives()
    del log.entries[log.find(r.SyncOutcome, -1) - 1 :]
    report = restarted(log).prove()
    assert report.is_good and report.is_whole, report.violations
    assert report.outcomes == {"ok": 3}


def test_open_attempts_and_leases_at_the_end_of_a_log_are_counted_and_no_violation() -> None:
    drive = Driver(2, units=UNITS)
    drive.lease(drive.ready())
    drive.reserved("other")
    report = log_of(drive, is_stopped=False).prove()
    assert report.is_good and report.is_whole
    assert (report.open_attempts, report.open_leases) == (2, 1)
    live_bytes = drive.live_units() * 256
    assert [arena.live_bytes for arena in report.arenas] == [live_bytes, live_bytes]
    assert [arena.free_bytes for arena in report.arenas] == [UNITS * 256 - live_bytes] * 2


def test_what_a_start_has_still_to_close_is_open() -> None:
    log = restarted(crashed())
    del log.entries[log.find(r.SyncOutcome, reason=Reason.DAEMON_RESTARTED) :]
    report = log.prove()
    assert report.is_good and report.open_attempts == 1


def test_what_is_left_by_a_start_that_died_is_closed_by_the_one_after_it() -> None:
    log = crashed()
    records = closings(log)
    second = Log(started(at_ns=5, former_epoch="e1", closed_attempts=2), *records[:2], epoch="e2")
    third = Log(started(at_ns=5, former_epoch="e2", closed_attempts=1), *records[2:], epoch="e3")
    whole = log + second + third
    whole.insert(len(whole) + 1, r.DaemonStopped(at_ns=6, reason="SIGTERM", attempts=0, attempts_ok=0))
    report = whole.prove()
    assert report.is_good and report.is_whole, report.violations
    assert report.crashed_epochs == 2


def test_stop_because_of_a_bug_leaves_attempts_to_the_next_start() -> None:
    log = crashed()
    log.insert(
        len(log) + 1, r.DaemonStopped(at_ns=2 << 40, reason="internal-error", attempts=9, attempts_ok=9)
    )
    assert restarted(log).prove().is_good


@pytest.mark.parametrize("kept", range(1, 40))
def test_what_a_bug_cut_off_in_the_middle_of_an_event_is_no_fault_of_the_log(kept: int) -> None:
    """Records of one event are written together; a bug can come between any two of them."""
    log = one_life()
    kept = min(kept, len(log) - 1)
    del log.entries[kept:]
    stopped = r.DaemonStopped(at_ns=log[kept].at_ns + 5, reason="internal-error", attempts=9, attempts_ok=9)
    log.insert(kept + 1, stopped)
    assert log.prove().is_good


def test_a_refusal_that_a_bug_cut_off_from_its_outcome_is_no_fault_of_the_log() -> None:
    log = refused()
    del log.entries[log.find(r.SyncRefused) :]
    stopped = r.DaemonStopped(at_ns=2 << 40, reason="internal-error", attempts=0, attempts_ok=0)
    log.insert(len(log) + 1, stopped)
    assert log.prove().is_good
    log.change(len(log), reason="SIGTERM")
    assert K.MISSING_OUTCOME in log.prove().counts


def test_what_is_cut_off_without_a_bug_is_a_fault() -> None:
    log = one_life()
    outcome = log.find(r.SyncOutcome)
    del log.entries[outcome - 1 :]
    log.insert(len(log) + 1, r.DaemonStopped(at_ns=2 << 40, reason="SIGKILL", attempts=9, attempts_ok=9))
    assert K.MISSING_OUTCOME in log.prove().counts


OLDER = (
    b'{"ts": 1767225600.5, "session_id": "s1", "ok": false, "reason": "alloc-failed", "num_tokens": 9}\n',
    b'{"timestamp": 1767225601, "status": "session-not-resident", "sid": "s2"}\n',
    b'{"ts": 1767225602, "session_id": "s3", "ok": true}\n',
)


def test_lines_of_the_design_before_are_counted_by_themselves_wherever_they_stand() -> None:
    ours = one_life().raw()
    alone = prove(ours)
    report = prove([*OLDER, *ours[:3], OLDER[0], *ours[3:], OLDER[0]])
    assert report.older == {"alloc-failed": 3, "ok": 1, "session-not-resident": 1}
    assert report.is_good and report.is_whole and report.torn_lines == 0
    assert (report.attempts, report.outcomes, report.epochs) == (alone.attempts, alone.outcomes, alone.epochs)
    assert report.lines == alone.lines + 5 and alone.older == {}


def test_a_damaged_line_of_snapd_is_none_of_the_design_before() -> None:
    ours = one_life().raw()
    number = next(number for number, line in enumerate(ours) if b'"sync.outcome"' in line)
    damaged = ours[number].replace(b'"event":"sync.outcome"', b'"evemt":"sync.outcome"')
    report = prove([*ours[:number], damaged, *ours[number + 1 :]])
    assert report.older == {} and report.torn_lines == 1
    assert K.SEQUENCE_GAP in report.counts


def test_reasons_of_the_design_before_are_bounded() -> None:
    lines = [b'{"ok": false, "session_id": "a", "reason": "because %d"}\n' % number for number in range(300)]
    report = prove(lines)
    assert sum(report.older.values()) == 300 and len(report.older) == OLDER_REASONS_MAX + 1
    assert report.older[OTHER_REASONS] == 300 - OLDER_REASONS_MAX


def test_epochs_that_were_stopped_in_order_follow_each_other() -> None:
    second = one_life()
    report = (aborted() + Log(*(entry.record for entry in second.entries), epoch="e2")).prove()
    assert report.is_good and report.is_whole and report.crashed_epochs == 0


def _find_closing(log: Log, kind: type[r.Record], nth: int = 0) -> int:
    return log.find(kind, nth, former_epoch="e1")


def unclosed(log: Log) -> tuple[int, ...]:
    line = _find_closing(log, Step)
    log.delete(line)
    log.delete(line)
    log.change(log.find(r.DaemonStarted, 1), closed_attempts=1)
    return log.find(Step), log.find(r.DaemonStarted, 1), log.find(Step, from_state="", nth=3)


def unclosed_and_not_named(log: Log) -> tuple[int, ...]:
    start = log.find(r.DaemonStarted, 1)
    return start - 1, log.change(start, former_epoch="e7")


def closed_twice(log: Log) -> tuple[int, ...]:
    line = _find_closing(log, r.SyncOutcome)
    log.change(log.find(r.DaemonStarted, 1), closed_attempts=3)
    return log.find(r.DaemonStarted, 1), log.insert(line + 1, log[line])


def closed_and_never_begun(log: Log) -> tuple[int, ...]:
    line = _find_closing(log, r.SyncOutcome)
    log.insert(line + 1, log[line])
    log.change(line + 1, former_epoch="e0")
    log.change(log.find(r.DaemonStarted, 1), closed_attempts=3)
    return log.find(r.DaemonStarted, 1), line + 1


def closed_from_another_state(log: Log) -> tuple[int, ...]:
    return log.find(Step), log.change(_find_closing(log, Step), from_state="READY")


def closed_for_another_reason(log: Log) -> tuple[int, ...]:
    line = log.change(_find_closing(log, Step), reason=Reason.SUPERSEDED, newer_handle=7)
    log.change(line + 1, reason=Reason.SUPERSEDED)
    return log.find(Step), line


def closed_as_ingested(log: Log) -> tuple[int, ...]:
    line = log.change(_find_closing(log, Step), to_state="INGESTED")
    log.change(line + 1, ok=True)
    return log.find(Step), line


def closed_without_abort(log: Log) -> tuple[int, ...]:
    line = _find_closing(log, Step)
    log.delete(line)
    return log.find(Step), line


def closed_for_no_reason(log: Log) -> tuple[int, ...]:
    line = _find_closing(log, Step)
    log.delete(line)
    return log.find(Step), log.change(line, reason=Reason.OK)


def closed_with_another_outcome(log: Log) -> tuple[int, ...]:
    line = _find_closing(log, r.SyncOutcome)
    return line - 1, log.change(line, reason=Reason.EVICTED)


def closed_with_times_that_do_not_add_up(log: Log) -> tuple[int, ...]:
    line = _find_closing(log, r.SyncOutcome)
    return log.find(Step), log.change(line, duration_ms=log[line].duration_ms + 1)


def closed_as_another_session(log: Log) -> tuple[int, ...]:
    return log.find(Step), log.change(_find_closing(log, Step), session_id="other")


def closed_before_the_start(log: Log) -> tuple[int, ...]:
    return log.find(r.DaemonStarted, 1), log.change(_find_closing(log, Step), at_ns=4)


def number_of_closed_attempts(log: Log) -> tuple[int, ...]:
    start = log.find(r.DaemonStarted, 1)
    log.change(start, closed_attempts=3)
    return start, log.find(Step, from_state="", nth=3)


def line_of_the_dead_epoch(log: Log) -> tuple[int, ...]:
    line = log.find(Step, from_state="", nth=3)
    start = log.find(r.DaemonStarted, 1)
    return start, log.insert(line, log[start - 1], epoch="e1")


def start_without_start(log: Log) -> tuple[int, ...]:
    start = log.find(r.DaemonStarted, 1)
    del log.entries[start - 1 : log.find(Step, from_state="", nth=3) - 1]
    log.entries[start - 1].skipped = 0
    return (start,)


def start_with_a_later_number(log: Log) -> tuple[int, ...]:
    start = log.find(r.DaemonStarted, 1)
    del log.entries[start - 1 : log.find(Step, from_state="", nth=3) - 1]
    log.entries[start - 1].skipped = 7
    return start - 1, start


@pytest.mark.parametrize(
    ("kind", "plant"),
    [
        (K.MISSING_OUTCOME, unclosed), (K.EPOCH_ORDER, unclosed_and_not_named),
        (K.UNKNOWN_ATTEMPT, closed_twice), (K.UNKNOWN_ATTEMPT, closed_and_never_begun),
        (K.ILLEGAL_TRANSITION, closed_from_another_state), (K.ILLEGAL_TRANSITION, closed_for_another_reason),
        (K.ILLEGAL_TRANSITION, closed_as_ingested), (K.WRONG_OUTCOME, closed_without_abort),
        (K.WRONG_OUTCOME, closed_with_another_outcome), (K.ACCOUNTING, closed_with_times_that_do_not_add_up),
        (K.ATTEMPT_CHANGED, closed_as_another_session),
        (K.CLOCK_BACKWARDS, closed_before_the_start), (K.WRONG_OUTCOME, closed_for_no_reason),
        (K.ACCOUNTING, number_of_closed_attempts),
        (K.EPOCH_ORDER, line_of_the_dead_epoch), (K.EPOCH_ORDER, start_without_start),
        (K.SEQUENCE_GAP, start_with_a_later_number),
    ],
)  # fmt: skip
def test_fault_between_two_epochs_is_found(kind: K, plant: Callable[[Log], tuple[int, ...]]) -> None:
    log = restarted(crashed())
    lines = plant(log)
    found = [named(violation) for violation in log.prove().violations]
    assert found == [(kind, lines)]


def test_epoch_that_was_not_stopped_and_is_not_named_is_a_fault() -> None:
    """So is a lost daemon.stopped line."""
    first, second = one_life(), one_life()
    first.delete(len(first))
    log = first + Log(*(entry.record for entry in second.entries), epoch="e2")
    assert [named(one) for one in log.prove().violations] == [(K.EPOCH_ORDER, (len(first), len(first) + 1))]


def test_epoch_that_goes_on_after_the_next_is_one_fault_however_many_lines_it_has_left() -> None:
    """One line with another epoch, and the rest of the log belongs to one that was over."""
    log = two_lives()
    log.entries[5].epoch, log.entries[5].skipped, log.entries[6].skipped = "e9", 5, 1
    report = log.prove()
    assert [(named(one), one.epoch) for one in report.violations] == [
        ((K.SEQUENCE_GAP, (5, 6)), "e9"), ((K.EPOCH_ORDER, (7,)), "e1"),
    ]  # fmt: skip
    assert report.counts == {K.SEQUENCE_GAP: 1, K.EPOCH_ORDER: 1}
    # The lines after it, and the changed one.
    assert report.unproved_lines == len(log) - 6 + 1 and not report.is_whole


def test_epochs_that_go_on_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof_module, "EPOCHS_REMEMBERED_MAX", 3)
    proof = Proof()
    before: list[bytes] = []
    for number in range(12):
        raw = Log(*(entry.record for entry in one_life().entries), epoch=f"e{number}").raw()
        for line in [*raw, *before]:
            proof.feed(decode_line(line), Where(FILE, 1))
        before = raw[3:5]
    assert proof.finish().counts == {K.EPOCH_ORDER: 11}
    assert len(proof._gone_on) <= 3


def test_each_epoch_that_goes_on_after_the_next_is_told() -> None:
    log = two_lives() + Log(*(entry.record for entry in one_life().entries), epoch="e2")
    third = Log(*(entry.record for entry in one_life().entries), epoch="e3")
    late = [decode_line(raw) for raw in [*log.raw()[3:5], *log.raw()[-5:-2]]]
    report = prove_lines([*map(decode_line, [*log.raw(), *third.raw()]), *late])
    assert report.counts == {K.EPOCH_ORDER: 2}
    assert [one.epoch for one in report.violations] == ["e1", "e2"]


def test_arenas_of_a_new_epoch_are_empty_whatever_the_dead_one_held() -> None:
    report = restarted(crashed()).prove()
    assert report.is_good and all(arena.free_bytes == arena.capacity_bytes for arena in report.arenas)


# --- lines that are missing --------------------------------------------------------------------


@pytest.mark.parametrize("make", [*GOOD.values(), lambda: restarted(crashed())], ids=[*GOOD, "restarted"])
def test_log_without_its_beginning_is_no_violation(make: Callable[[], Log]) -> None:
    raw = make().raw()
    for cut in range(1, len(raw) + 1):
        report = prove(raw[cut:])
        assert report.is_good, (cut, report.violations)
        is_start = cut < len(raw) and b"daemon.started" in raw[cut]
        assert report.is_beginning_known is is_start
        assert report.lines == len(raw) - cut


def test_what_is_unknown_at_the_beginning_is_counted() -> None:
    raw = two_lives().raw()
    report = prove(raw[5:])  # Its first attempt is TRANSFERRING.
    assert report.is_good and not report.is_whole
    assert report.unproved_attempts == 1
    assert report.attempts == 1 and report.outcomes == {"ok": 2}
    assert report.unproved_lines > 0
    assert all(arena.free_bytes == arena.capacity_bytes == -1 for arena in report.arenas)


def test_what_begins_after_the_missing_lines_is_proved_as_ever() -> None:
    log = two_lives()
    second = log.find(Step, from_state="", nth=1)
    log.delete(log.find(Step, to_state="TRANSFERRING", nth=1))
    found = [named(violation) for violation in prove(log.raw()[5:]).violations]
    assert found == [(K.ILLEGAL_TRANSITION, (second - 5, log.find(Step, to_state="READY", nth=1) - 5))]


def test_ended_attempt_of_an_unknown_beginning_stays_ended() -> None:
    log = two_lives()
    line = log.find(r.SyncOutcome)
    log.insert(line + 1, log[line])
    found = [named(violation) for violation in prove(log.raw()[8:]).violations]
    assert found == [(K.SECOND_OUTCOME, (line - 8, line - 7))]


def test_lease_that_began_before_the_first_line_may_end_and_one_that_began_later_ends_once() -> None:
    log = two_lives()
    line = log.find(r.LeaseEnded, 2)
    log.insert(line + 1, log[line])
    found = [named(violation) for violation in prove(log.raw()[8:]).violations]
    assert found == [(K.WRONG_LEASE, (log.find(Step, to_state="READY", nth=1) - 8, line + 1 - 8))]


def test_outcome_of_which_nothing_else_is_known_is_the_only_one() -> None:
    log = two_lives()
    line = log.find(r.SyncOutcome)
    log.insert(line + 1, log[line])
    report = prove(log.raw()[line - 1 :])
    assert [named(violation) for violation in report.violations] == [(K.SECOND_OUTCOME, (1, 2))]
    assert report.unproved_attempts == 1


def test_every_line_that_could_not_be_checked_is_counted() -> None:
    raw = one_life().raw()
    counts = [prove(raw[cut:]).unproved_lines for cut in range(len(raw))]
    # The most are missed without the leases: two that end, the last step, and two releases.
    assert counts == [0, 0, 1, 2, 3, 3, 3, 4, 5, 4, 3, 3, 2, 1, 0]


def test_bytes_that_an_attempt_never_held_are_not_freed_by_it_whatever_is_missing_before() -> None:
    log = two_lives()
    line = log.find(r.SlabReleased, 2)
    log.insert(line, log[line])
    log.change(line, rank=7)
    found = [named(violation) for violation in prove(log.raw()[8:]).violations]
    assert found == [(K.ACCOUNTING, (log.find(Step, from_state="", nth=1) - 8, line - 8))]


def test_bytes_that_are_first_seen_in_quarantine_leave_it_whole() -> None:
    log = aborted()
    held, freed = log.find(r.SlabQuarantined), log.find(r.SlabReleased)
    log.change(freed, extents=extents((0, 1)))
    found = [named(violation) for violation in prove(log.raw()[held - 1 :]).violations]
    assert found == [(K.ACCOUNTING, (1, freed - held + 1))]


def test_quarantine_that_began_before_the_first_line_keeps_its_bytes_once_it_is_seen() -> None:
    log = aborted()
    line = log.find(r.SlabQuarantined)
    report = prove(log.raw()[line - 1 : -3])
    assert report.is_good and [arena.quarantined_bytes for arena in report.arenas] == [512, 512]


def test_drops_that_are_told_are_no_violation_and_counted() -> None:
    log = two_lives()
    first, last = log.find(r.SlabAllocated, 1), log.find(Step, to_state="READY")
    at_ns = log[last].at_ns
    del log.entries[first - 1 : last]
    log.insert(first, r.EventsDropped(at_ns=at_ns, count=3, why="queue-full"))
    report = log.prove()
    assert report.is_good and report.is_beginning_known and not report.is_whole, report.violations
    assert report.events_dropped == 3
    # Its first half, and what is seen of it afterwards.
    assert report.unproved_attempts == 2


def test_bytes_that_were_held_when_lines_were_dropped_may_be_free_by_now() -> None:
    log = two_lives()
    begin, end = log.find(Step, to_state="TRANSFERRING"), log.find(r.SyncOutcome)
    at_ns = log[end].at_ns
    del log.entries[begin - 1 : end]
    log.insert(begin, r.EventsDropped(at_ns=at_ns, count=10, why="write-failing:ENOSPC"))
    assert log.prove().is_good


def test_drops_while_former_attempts_are_closed_leave_nothing_to_claim() -> None:
    log = restarted(crashed())
    line = _find_closing(log, Step)
    log.delete(line)
    log.delete(line)
    log.insert(line, r.EventsDropped(at_ns=5, count=2, why="queue-full"))
    assert log.prove().is_good


def test_gap_while_former_attempts_are_closed_leaves_nothing_to_claim() -> None:
    log = restarted(crashed())
    raw = log.raw()
    line = _find_closing(log, Step)
    del raw[line - 1 : line + 1]
    assert [named(one) for one in prove(raw).violations] == [(K.SEQUENCE_GAP, (line - 1, line))]


def test_epoch_whose_start_was_dropped_is_unknown_and_no_violation() -> None:
    log = restarted(crashed())
    start, first = log.find(r.DaemonStarted, 1), log.find(Step, from_state="", nth=3)
    count = first - start
    del log.entries[start - 1 : first - 1]
    log.insert(start, r.EventsDropped(at_ns=5, count=count, why="queue-full"), epoch="e2")
    report = log.prove()
    assert report.is_good and report.events_dropped == count, report.violations
    report = prove(log.raw()[start - 1 :])
    assert report.is_good and not report.is_beginning_known


def test_attempts_of_an_epoch_that_is_not_there_are_closed_and_counted() -> None:
    log = restarted(crashed())
    report = prove(log.raw()[log.find(r.DaemonStarted, 1) - 1 :])
    assert report.is_good and report.is_beginning_known and not report.is_whole
    assert (report.unproved_attempts, report.unproved_lines) == (2, 4)


def test_start_with_another_number_than_one_is_no_beginning() -> None:
    log = one_life()
    log.entries[0].skipped = 4
    report = log.prove()
    assert not report.is_beginning_known
    assert [named(one) for one in report.violations] == [(K.EPOCH_ORDER, (1,))]


def test_former_epochs_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof_module, "EPOCHS_REMEMBERED_MAX", 3)
    log = Log()
    for number in range(9):
        log += Log(*(entry.record for entry in one_life().entries), epoch=f"e{number}")
    proof = proof_of(log)
    assert proof.finish().is_good and proof.finish().epochs == 9
    assert list(proof._seen) == ["e5", "e6", "e7"]
    # What a forgotten epoch left open, nobody can say.
    late = closings(crashed())
    end = Log(started(former_epoch="e8", closed_attempts=2), *late, epoch="e9")
    for entry in end.entries[1:]:
        entry.record = msgspec.structs.replace(entry.record, former_epoch="e1")
    log.delete(len(log))
    report = proof_of(log + end).finish()
    assert report.is_good and report.unproved_attempts == 2, report.violations


def test_handles_that_are_forgotten_are_counted_over_all_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "ENDED_PER_GENERATION_MAX", 1)
    log = two_lives() + Log(*(entry.record for entry in two_lives().entries), epoch="e2")
    assert log.prove().handles_forgotten == 2


def test_gap_that_is_not_told_is_one_violation_and_no_more_follow_from_it() -> None:
    for make in GOOD.values():
        whole = make()
        for line in range(2, len(whole)):
            raw = whole.raw()
            del raw[line - 1]
            found = [named(violation) for violation in prove(raw).violations]
            assert found == [(K.SEQUENCE_GAP, (line - 1, line))]


def test_torn_last_line_is_tolerated_and_so_is_one_where_a_daemon_died() -> None:
    log = restarted(crashed())
    raw = log.raw()
    start = log.find(r.DaemonStarted, 1)
    raw.insert(start - 1, raw[start - 2][:50])
    raw.append(raw[-1][:70])
    report = prove(raw)
    assert report.is_good and report.is_whole and report.torn_lines == 2
    assert report.lines == len(raw)


def test_torn_line_in_the_middle_shows_as_a_gap() -> None:
    raw = one_life().raw()
    raw[6] = raw[6][:60]
    report = prove(raw)
    assert [named(violation) for violation in report.violations] == [(K.SEQUENCE_GAP, (6, 8))]
    assert report.torn_lines == 1


def test_line_of_a_later_version_has_its_number_and_is_counted() -> None:
    log = one_life()
    raw = log.raw()
    for line in (log.find(r.LeaseGranted), len(raw)):
        fields = json.loads(raw[line - 1]) | {"event": "session.renamed"}
        report = prove([*raw[: line - 1], json.dumps(fields).encode(), *raw[line:]])
        assert report.unknown_lines == 1
        assert K.SEQUENCE_GAP not in report.counts
    fields = json.loads(raw[0]) | {"event": "daemon.begun"}
    report = prove([json.dumps(fields).encode(), *raw[1:]])
    assert report.is_good and not report.is_beginning_known


@pytest.mark.parametrize(
    ("make", "kind"), [(aborted, r.SlabQuarantined), (one_life, r.SlabAllocated), (one_life, r.LeaseGranted)]
)
def test_nothing_is_known_to_be_open_or_held_after_a_drop(
    make: Callable[[], Log], kind: type[r.Record]
) -> None:
    log = make()
    line = log.find(kind, -1)
    at_ns = log[line].at_ns
    del log.entries[line:]
    log.insert(line + 1, r.EventsDropped(at_ns=at_ns, count=1, why="queue-full"))
    proof = proof_of(log)
    books, report = proof.books(), proof.finish()
    assert not (books.open or books.leases or books.quarantined_shards or any(books.extents.values()))
    assert [(one.live_bytes, one.quarantined_bytes) for one in report.arenas] == [(0, 0), (0, 0)]
    assert {one.free_bytes for one in report.arenas} == {-1}
    assert {one.capacity_bytes for one in report.arenas} == {UNITS * 256}
    assert report.unproved_attempts == 1


def test_extents_of_a_slab_may_be_named_in_any_order() -> None:
    log = pages()
    line = log.find(r.SlabReleased, session_id="wide", rank=0)
    assert len(log[line].extents) == 2
    log.change(line, extents=log[line].extents[::-1])
    assert log.prove().is_good


def test_time_that_went_back_is_measured_by_the_latest_time() -> None:
    log = aborted()
    latest, line = log.find(r.SyncOutcome) - 3, log.find(r.SlabReleased)
    at_ns = log[latest].at_ns
    for shift_ns in (1, 2):
        refusal = {
            "session_id": "x",
            "reason": Reason.DRAINING,
            "num_tokens": 1,
            "token_start": 0,
            "bytes": 1,
        }
        log.insert(line, r.SyncRefused(at_ns=at_ns - shift_ns, **refusal))
        spent = {"duration_ms": 0.0, "reserved_ms": 0.0, "transferring_ms": 0.0, "ready_ms": 0.0}
        log.insert(line + 1, r.SyncOutcome(at_ns=at_ns, ok=False, **refusal, **spent))
    found = [named(one) for one in log.prove().violations]
    assert found == [(K.CLOCK_BACKWARDS, (latest, line)), (K.CLOCK_BACKWARDS, (latest, line + 2))]
    log.change(line + 1, at_ns=at_ns - 1)
    assert log.prove().counts == {K.CLOCK_BACKWARDS: 3}


# --- what is kept in mind ----------------------------------------------------------------------


def test_what_overlaps_is_not_entered_and_takes_nothing_with_it() -> None:
    arena = ShardMap(2048, 256)
    first, second, third = (
        Shard(n, 0, 1, extents(where)) for n, where in enumerate([(0, 2), (0, 1), (1, 2)])
    )
    assert arena.put(first) is None
    assert arena.put(second) == (second.extents[0], first)
    arena.free(second)
    assert arena.put(third) == (third.extents[0], first)
    arena.free(third)
    assert (arena.live_bytes, arena.extents()) == (512, list(first.extents))
    arena.free(first)
    assert (arena.live_bytes, arena.extents()) == (0, [])


def test_handles_are_remembered_for_two_generations_and_lines_for_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "RECENT_MAX", 3)
    monkeypatch.setattr(memory, "ENDED_PER_GENERATION_MAX", 10)
    ended = EndedHandles()
    for handle in range(34):
        ended.add(handle, Where(FILE, handle))
    assert [handle in ended for handle in (19, 20, 29, 30, 33)] == [False, True, True, True, True]
    assert ended.forgotten == 20
    assert [ended.where(handle) for handle in (30, 31, 33)] == [None, Where(FILE, 31), Where(FILE, 33)]


def test_what_is_overdue_is_told_once_its_grace_is_over_and_not_before() -> None:
    overdue = Overdue(10)
    late, over = (Shard(handle, 0, 1, ()) for handle in (1, 2))
    for shard, until_ns in ((late, 100), (over, 200)):
        shard.until_ns, shard.use = until_ns, "quarantined"
        overdue.add(shard)
    assert overdue.next_ns == 100
    assert overdue.pass_to(105) == [] and overdue.next_ns == 105
    assert overdue.pass_to(115) == []
    assert overdue.pass_to(116) == [late] and overdue.next_ns == 200
    assert overdue.pass_to(201) == []
    over.use = "free"
    assert overdue.pass_to(300) == [] and overdue.next_ns > 1 << 62


def test_running_daemon_has_a_tenth_of_the_grace_and_pauses_count_for_half_of_that() -> None:
    def told_at(*times: int) -> list[int]:
        overdue = Overdue(1_000)
        shard = Shard(1, 0, 1, ())
        shard.until_ns, shard.use = 100, "quarantined"
        overdue.add(shard)
        return [at_ns for at_ns in times if overdue.pass_to(at_ns)]

    # Time before the first line at or after the deadline does not count.
    assert told_at(90, 150, 200, 250, 251, 300) == [251]
    assert told_at(150, 600, 649, 650, 651, 652) == [651]
    assert told_at(150, 200, 900, 901) == [901]
    assert told_at(150, 1_150) == []


def test_running_time_of_an_earlier_deadline_does_not_count_for_a_later_one() -> None:
    overdue = Overdue(1_000)
    first, second = (Shard(handle, 0, 1, ()) for handle in (1, 2))
    for shard, until_ns in ((first, 100), (second, 180)):
        shard.until_ns, shard.use = until_ns, "quarantined"
        overdue.add(shard)
    found = [(at_ns, late) for at_ns in range(100, 400, 20) if (late := overdue.pass_to(at_ns))]
    assert found == [(220, [first]), (300, [second])]


def test_what_is_over_in_time_does_not_wait_for_its_grace() -> None:
    """Once it has ended, not every line is looked at for it."""
    overdue = Overdue(1_000)
    shard = Shard(1, 0, 1, ())
    shard.until_ns, shard.use = 100, "quarantined"
    overdue.add(shard)
    assert overdue.pass_to(100) == [] and overdue.next_ns == 100
    shard.use = "free"
    assert overdue.pass_to(101) == [] and overdue.next_ns > 1 << 62


def late(*pauses_ms: int) -> Log:
    """A lease whose timer fires after these pauses; before each of them something else is done."""
    drive = Driver(1, units=UNITS)
    drive.lease(drive.ready())
    drive.jump(10_000)
    for pause_ms in pauses_ms:
        drive.prepare("big", 10_000)
        drive.jump(pause_ms)
    drive.advance(0)
    return log_of(drive)


def test_lease_that_a_running_daemon_ends_more_than_a_second_late_is_told() -> None:
    assert late(*[100] * 9).prove().is_good
    log = late(*[100] * 9, 150)
    found = [named(one) for one in log.prove().violations]
    assert found == [(K.LEASE_PAST_END, (log.find(r.LeaseGranted), log.find(r.LeaseEnded)))]


def test_lease_that_ends_late_because_the_daemon_stood_still_is_no_fault() -> None:
    assert late(9_000).prove().is_good and late(100, 9_000, 100).prove().is_good
    assert late(5_000, 5_001).prove().counts == {K.LEASE_PAST_END: 1}


def long_read(quarantine_ms: int = 1_000) -> Log:
    """Bytes without drain proof, of which a reader may read for longer than the quarantine."""
    drive = Driver(1, units=UNITS, quarantine_ms=quarantine_ms)
    handle = drive.transferring()
    drive.commit(handle, 0, drained=False)
    drive.lease(handle)
    return log_of(drive)


def test_quarantine_lasts_for_as_long_as_its_reader_may_read_and_no_other_longer_time() -> None:
    log = long_read()
    line = log.find(r.SlabQuarantined)
    assert log[line].why == "undrained" and log[line].until_ns > log[line].at_ns + 1_000 * NS_PER_MS
    assert log.prove().is_good
    log.change(line, until_ns=log[line].until_ns - 1)
    assert [named(one) for one in log.prove().violations] == [(K.WRONG_QUARANTINE, (1, line))]


def test_corrupt_bytes_rest_for_the_time_of_the_settings_whoever_reads() -> None:
    drive = Driver(2, units=UNITS, quarantine_ms=1_000)
    handle = drive.ready()
    lease_ids = [drive.lease(handle, rank).lease_id for rank in drive.ranks]
    drive.vote_no(handle, 0, lease_ids[0], Reason.CHECKSUM_MISMATCH)
    log = log_of(drive)
    assert log.prove().is_good
    line = log.find(r.SlabQuarantined, why="corrupt")
    log.change(line, until_ns=log[log.find(r.LeaseGranted, rank=0)].until_ns)
    assert K.WRONG_QUARANTINE in log.prove().counts


def test_lease_that_had_ended_before_does_not_make_a_quarantine_longer() -> None:
    drive = Driver(1, units=UNITS, quarantine_ms=1_000)
    handle = drive.transferring()
    drive.commit(handle, 0, drained=False)
    drive.vote_no(handle, 0, drive.lease(handle).lease_id, Reason.PREFIX_NOT_RESIDENT, keep=True)
    drive.abort(handle)
    log = log_of(drive)
    assert log.prove().is_good
    line = log.find(r.SlabQuarantined, why="undrained")
    log.change(line, until_ns=log[log.find(r.LeaseGranted)].until_ns)
    assert K.WRONG_QUARANTINE in log.prove().counts


def test_time_of_a_quarantine_is_not_known_in_a_log_that_does_not_say_it() -> None:
    log = long_read(60_000)
    line = log.find(r.SlabQuarantined)
    log.change(line, until_ns=log[line].at_ns + 1)
    assert log.prove().counts == {K.WRONG_QUARANTINE: 1}
    log.change(1, quarantine_ms=0)
    assert log.prove().is_good


def test_quarantine_of_an_attempt_whose_lease_is_not_known_is_not_too_long_but_may_be_too_short() -> None:
    log = long_read()
    line, ended = log.find(r.SlabQuarantined), log.find(r.SessionTransition, -1)
    dropped = r.EventsDropped(at_ns=log[ended].at_ns, count=1, why="queue-full")
    log.entries[ended - 2].record = dropped
    assert log.prove().is_good
    log.change(line, until_ns=log[line].at_ns + 1)
    assert log.prove().counts == {K.WRONG_QUARANTINE: 1}


def test_deadlines_of_what_is_not_known_any_more_are_forgotten() -> None:
    overdue = Overdue(10)
    for until_ns in (100, 200):
        shard = Shard(1, 0, 1, ())
        shard.until_ns, shard.use = until_ns, "quarantined"
        overdue.add(shard)
    overdue.pass_to(150)
    overdue.clear()
    assert overdue.next_ns > 1 << 62
    assert overdue.pass_to(1_000) == [] and overdue.next_ns > 1 << 62


def test_deadlines_that_are_over_do_not_pile_up() -> None:
    overdue = Overdue(10)
    shard = Shard(1, 0, 1, ())
    shard.until_ns = 1 << 60
    for _ in range(10_000):
        overdue.add(shard)  # Not in quarantine, so it is over.
    assert len(overdue._heap) <= memory._STALE_MAX + 1


def test_what_is_over_is_let_go_of_without_a_garbage_collection() -> None:
    """Whoever reads a large log may have switched it off."""
    drive = Driver(2, units=UNITS)
    drive.lease(drive.ready("a"))
    dropped = r.EventsDropped(at_ns=drive.now_ns + 1, count=1, why="queue-full")
    log = log_of(drive, is_stopped=False)
    second = Log(started(former_epoch="e1"), *(entry.record for entry in one_life().entries[1:]), epoch="e2")
    gc.collect()
    gc.disable()
    try:
        for is_dropped in (True, False):
            proof = proof_of(log)
            lease = next(iter(proof._epoch.leases.values()))
            epoch = weakref.ref(proof._epoch)
            end = Log(dropped, epoch="e1") if is_dropped else second
            if is_dropped:
                end.entries[0].skipped = len(log)
            for raw in end.raw():
                proof.feed(decode_line(raw), Where(FILE, 1))
            assert not lease.attempt.leases
            assert is_dropped or epoch() is None
    finally:
        gc.enable()


def test_blocks_of_one_moment_do_not_pile_up() -> None:
    """A clock that stands still is no reason to keep every attempt."""
    epoch = EpochProof("e", Findings(), 1, lambda record, where: None)
    for handle in range(20_000):
        epoch.follow(Attempt(handle, "s", "READY", Where(FILE, 1), is_whole=True))
    assert len(epoch._blocks) <= 4_096


def steps_at_once(log: Log) -> None:
    """Let the attempt be started in the nanosecond in which it began."""
    begin, start = log.find(Step), log.find(Step, to_state="TRANSFERRING")
    begun_ns, left = log[begin].at_ns, log.find(Step, from_state="TRANSFERRING")
    log.change(start, at_ns=begun_ns, duration_ms=0.0)
    spent_ms = (log[left].at_ns - begun_ns) / 1e6
    log.change(left, duration_ms=spent_ms)
    log.change(log.find(r.SyncOutcome), reserved_ms=0.0, transferring_ms=spent_ms)


@pytest.mark.parametrize("make", [one_life, aborted])
def test_several_steps_of_one_nanosecond_are_no_fault(make: Callable[[], Log]) -> None:
    log = make()
    steps_at_once(log)
    assert log.prove().is_good


def test_slab_that_is_missing_is_seen_also_if_the_attempt_goes_on_at_once() -> None:
    log = one_rank_aborted()
    steps_at_once(log)
    for line in (log.find(Step), *(log.find(Step, n) for n in (1, 2)), log.find(r.SyncOutcome)):
        log.change(line, bytes=1024)
    end = log.find(Step, to_state="ABORTED")
    assert [named(one) for one in log.prove().violations] == [(K.RANKS_DIFFER, (2, end))]


def test_slab_that_is_missing_is_seen_also_if_the_attempt_ends_at_once() -> None:
    log = one_rank_aborted()
    begun_ns = log[log.find(Step)].at_ns
    for line in range(2, log.find(r.SyncOutcome) + 1):
        changed = {"at_ns": begun_ns}
        if isinstance(log[line], r.SlabQuarantined):
            changed["until_ns"] = begun_ns + log[1].quarantine_ms * NS_PER_MS
        if isinstance(log[line], Step | r.SyncOutcome):
            changed |= {"bytes": 1024, "duration_ms": 0.0}
        log.change(line, **changed)
    outcome = log.change(log.find(r.SyncOutcome), reserved_ms=0.0, transferring_ms=0.0)
    released = log.find(r.SlabReleased)
    log.change(released, duration_ms=(log[released].at_ns - begun_ns) / 1e6)
    assert [named(one) for one in log.prove().violations] == [(K.RANKS_DIFFER, (2, outcome))]


# --- what cannot be read ------------------------------------------------------------------------


GARBAGE = b"\x00 no line"


def test_more_torn_lines_than_one_at_the_end_are_not_read_and_the_first_ones_are_named() -> None:
    raw = one_life().raw()[:-2]
    one, many = prove([*raw, GARBAGE]), prove([*raw, *[GARBAGE] * 500])
    assert one.is_good and one.is_whole and one.is_read and one.torn_lines == 1
    assert many.is_good and not many.is_whole and not many.is_read
    assert (many.torn_lines, many.unread_lines) == (500, 500)
    first = len(raw) + 1
    assert [line.where.line_no for line in many.unreadable] == list(range(first, first + 5))
    assert "malformed" in many.unreadable[0].why
    assert one.unread_lines == 0 and len(one.unreadable) == 1


def test_what_is_said_of_a_torn_line_is_short() -> None:
    proof = Proof()
    proof.feed(TornLine(b"", "x" * 10_000), Where(FILE, 1))
    assert len(proof.finish().unreadable[0].why) == 200


def test_torn_lines_where_an_epoch_ends_are_not_read_and_elsewhere_the_numbers_say_if_any_is_lost() -> None:
    log = restarted(crashed())
    start = log.find(r.DaemonStarted, 1)
    raw = log.raw()
    between = prove([*raw[: start - 1], GARBAGE, GARBAGE, *raw[start - 1 :]])
    assert between.is_good and not between.is_whole and between.unread_lines == 2
    inside = prove([*raw[:start], GARBAGE, GARBAGE, *raw[start:]])
    assert inside.is_good and inside.is_whole and (inside.torn_lines, inside.unread_lines) == (2, 0)
    apart = prove([*raw[: start - 1], GARBAGE, *raw[start - 1 :], GARBAGE])
    assert apart.is_good and apart.is_whole and (apart.torn_lines, apart.unread_lines) == (2, 0)


# --- the report --------------------------------------------------------------------------------


def test_facts_are_those_of_the_log() -> None:
    log = refused()
    report = log.prove()
    assert report.lines == len(log)
    assert (report.attempts, report.refused, report.leases) == (1, 1, 2)
    assert report.outcomes == {"ok": 1, "too-large": 1}
    assert (report.slabs_allocated, report.slabs_quarantined, report.slabs_released) == (2, 0, 2)
    assert [(one.rank, one.capacity_bytes) for one in report.arenas] == [(0, UNITS * 256), (1, UNITS * 256)]


def test_violations_that_are_kept_are_bounded_by_kind_and_all_are_counted() -> None:
    raw = one_life().raw()
    report = prove([raw[0], *[raw[0]] * 500, *[raw[5]] * 300], kept_per_kind=7)
    # Every repetition, and the numbers between the two lines.
    assert report.counts == {K.SEQUENCE_GAP: 500 + 1 + 299}
    assert len(report.violations) == 7 and report.num_violations == 800


def test_violation_names_attempt_session_epoch_and_files() -> None:
    log = one_life()
    log.change(log.find(Step, to_state="READY"), session_id="other")
    violation = log.prove().violations[0]
    assert (violation.slab_handle, violation.session_id, violation.epoch) == (1001, "other", "e1")
    assert str(violation.lines[0]) == f"{FILE}:2"
    assert set(KIND_HELP) == set(K)


def test_files_of_a_rotated_log_are_named_each() -> None:
    log = one_life()
    line = log.find(Step, to_state="READY")
    log.delete(log.find(Step, to_state="TRANSFERRING"))
    proof = Proof()
    for number, raw in enumerate(log.raw()):
        first = number < 4
        proof.feed(decode_line(raw), Where("log.1" if first else "log", number + 1 if first else number - 3))
    assert line == 6
    assert [str(where) for where in proof.violations[0].lines] == ["log.1:2", "log:1"]


def test_books_are_what_is_open_and_held() -> None:
    drive = Driver(2, units=UNITS)
    handle = drive.ready("a")
    lease = drive.lease(handle, 1)
    drive.abort(drive.transferring("b"))
    proof = proof_of(log_of(drive, is_stopped=False))
    books = proof.books()
    assert {number: (one.session_id, one.state) for number, one in books.open.items()} == {
        handle: ("a", State.READY)
    }
    assert books.leases == {lease.lease_id: (handle, 1)}
    assert books.extents == {rank: list(extents((0, 2), (2, 2))) for rank in (0, 1)}
    assert (books.quarantined_shards, books.attempts, books.attempts_ok) == (2, 2, 0)
    assert not proof.num_violations and not proof.violations


def test_record_decoded_by_somebody_else_is_as_good() -> None:
    lines = [decode_line(raw) for raw in one_life().raw()]
    assert all(isinstance(line, Line) for line in lines)
    proof = Proof()
    for number, line in enumerate(lines, 1):
        proof.feed(line, Where("", number))
    assert proof.finish().is_good


def test_proof_needs_neither_torch_nor_a_database_nor_the_core_itself() -> None:
    code = """
import sys, snapd.forensics.proof
heavy = {"torch", "duckdb", "pandas", "uvloop", "snapd.core.machine", "snapd.core.fsm", "snapd.kv"}
sys.exit(len(heavy & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
