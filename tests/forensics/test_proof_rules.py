"""Every reason in every place: which the design has there, and no other."""

from collections.abc import Callable

import pytest
from proof_cases import (
    NS_PER_MS,
    Driver,
    Log,
    corrupt,
    failed,
    made,
    named,
    refused,
    stopped_while_read,
    undrained,
)

from snapd.core import records as r
from snapd.errors import Reason
from snapd.forensics.proof import ViolationKind as K

EVERYWHERE = {"client-abort", "superseded", "daemon-stopped"}
WRITING = EVERYWHERE | {"partial-transfer", "transfer-failed", "session-not-resident", "writer-gone"}
VOTES = {
    "alloc-failed-on-finalize", "checksum-mismatch", "token-mismatch", "prefix-not-resident", "ingest-failed",
}  # fmt: skip
ENDS = {
    "RESERVED": WRITING | {"reserve-timeout"},
    "TRANSFERRING": WRITING | {"transfer-timeout"},
    "READY": EVERYWHERE | VOTES | {"evicted", "ready-expired"},
}
REFUSALS = {
    "snapshot-buf-full", "too-large", "layout-mismatch", "limit-reached", "draining", "invalid-request",
}  # fmt: skip
every_reason = pytest.mark.parametrize("reason", list(Reason), ids=str)

reserved_aborted = made(lambda drive: drive.abort(drive.reserved()))
transferring_aborted = made(lambda drive: drive.abort(drive.transferring()))


def _undrained_ready(drive: Driver) -> None:
    handle = drive.transferring()
    for rank in (0, 1):
        drive.commit(handle, rank, drained=False)
    drive.abort(handle)


ready_aborted = made(_undrained_ready)
OF_STATE = {"RESERVED": reserved_aborted, "TRANSFERRING": transferring_aborted, "READY": ready_aborted}


def kinds(log: Log) -> set[str]:
    return {named(violation)[0] for violation in log.prove().violations}


@every_reason
@pytest.mark.parametrize("state", ENDS)
def test_attempt_ends_for_the_reasons_of_its_state_only(state: str, reason: Reason) -> None:
    log = OF_STATE[state]()
    end = log.find(r.SessionTransition, to_state="ABORTED")
    assert log[end].from_state == state
    log.change(end, reason=reason, newer_handle=9)
    log.change(log.find(r.SyncOutcome), reason=reason)
    if reason is Reason.CHECKSUM_MISMATCH:
        log.change(log.find(r.SlabQuarantined), why="corrupt")
    if reason in ENDS[state]:
        assert not kinds(log)
    else:
        assert K.ILLEGAL_TRANSITION in kinds(log)


@pytest.mark.parametrize("reason", ["superseded", "evicted"])
def test_attempt_that_made_way_says_for_which(reason: str) -> None:
    log = ready_aborted()
    log.change(log.find(r.SessionTransition, -1), reason=Reason(reason))
    log.change(log.find(r.SyncOutcome), reason=Reason(reason))
    assert kinds(log) == {K.ILLEGAL_TRANSITION}
    log.change(log.find(r.SessionTransition, -1), newer_handle=9)
    assert not kinds(log)


@every_reason
@pytest.mark.parametrize("step", [("", "RESERVED"), ("RESERVED", "TRANSFERRING"), ("TRANSFERRING", "READY")])
def test_attempt_goes_on_without_a_reason_only(step: tuple[str, str], reason: Reason) -> None:
    log = ready_aborted()
    log.change(
        log.find(r.SessionTransition, from_state=step[0], to_state=step[1]), reason=reason, newer_handle=9
    )
    assert kinds(log) == (set() if reason is Reason.OK else {K.ILLEGAL_TRANSITION})


STATES = ("", "RESERVED", "TRANSFERRING", "READY", "INGESTED", "ABORTED")


@pytest.mark.parametrize("to_state", STATES[1:])
@pytest.mark.parametrize("from_state", STATES[1:])
def test_step_that_the_design_does_not_have_is_illegal(from_state: str, to_state: str) -> None:
    """The attempt is where the line says, so that the step alone is judged."""
    log = ready_aborted()
    line = log.find(r.SessionTransition, to_state="TRANSFERRING")
    log.change(line - 3, to_state=from_state)
    log.change(line, from_state=from_state, to_state=to_state)
    illegal = K.ILLEGAL_TRANSITION, (line - 3, line)
    found = [named(violation) for violation in log.prove().violations]
    legal = {("RESERVED", "TRANSFERRING"), ("TRANSFERRING", "READY"), ("READY", "INGESTED")}
    assert (illegal in found) is ((from_state, to_state) not in legal)


@every_reason
def test_prepare_is_refused_for_the_reasons_of_a_refusal_only(reason: Reason) -> None:
    log = refused()
    for line in (2, 3):
        log.change(line, reason=reason)
    assert kinds(log) == (set() if reason in REFUSALS else {K.WRONG_OUTCOME})


@every_reason
def test_lease_ends_before_its_deadline_by_a_vote_a_lost_round_or_a_stop_only(reason: Reason) -> None:
    log = stopped_while_read()
    log.change(log.find(r.LeaseEnded), reason=reason)
    wanted = VOTES | {"round-aborted", "daemon-stopped"}
    assert kinds(log) == (set() if reason in wanted else {K.WRONG_LEASE})


@every_reason
def test_lease_ends_at_its_deadline_by_whatever_is_no_vote(reason: Reason) -> None:
    log = stopped_while_read()
    at_ns = log[log.find(r.LeaseEnded)].at_ns
    log.change(log.find(r.LeaseEnded), reason=reason)
    log.change(log.find(r.LeaseGranted), until_ns=at_ns)
    log.change(log.find(r.SlabQuarantined), until_ns=at_ns)
    if reason in {"lease-expired", "round-aborted", "daemon-stopped"}:
        assert not kinds(log)
    else:
        assert K.LEASE_PAST_END in kinds(log)


@pytest.mark.parametrize("reason", sorted(WRITING | {"transfer-timeout"}))
@pytest.mark.parametrize("why", ["final", "drained", "writer-gone", "lease-ended", "time"])
def test_live_bytes_are_freed_by_the_proof_that_the_end_brings(reason: str, why: str) -> None:
    log = failed()
    for kind in (r.SessionTransition, r.SyncOutcome):
        log.change(log.find(kind, -1), reason=Reason(reason))
    log.change(log.find(r.SessionTransition, -1), newer_handle=9)
    other = log.find(r.SlabReleased, 1)
    # The other rank is kept, so that one alone may be final.
    freed = log.delete(other).record
    log.insert(other, r.SlabQuarantined(
        at_ns=freed.at_ns, session_id="s", slab_handle=freed.slab_handle, rank=1, bytes=freed.bytes,
        extents=freed.extents, until_ns=freed.at_ns + log[1].quarantine_ms * NS_PER_MS, why="undrained",
    ))  # fmt: skip
    log.change(log.find(r.SlabReleased), why=why)
    proofs = {"client-abort": "drained", "transfer-failed": "drained", "session-not-resident": "drained"}
    may = why == "final" or why == (proofs | {"writer-gone": "writer-gone"}).get(reason)
    assert kinds(log) == (set() if may else {K.RELEASE_WITHOUT_PROOF})


@pytest.mark.parametrize(("make", "kept", "early"), [
    (undrained, "undrained", {"drained", "writer-gone"}), (corrupt, "corrupt", set()),
    (corrupt, "leased", {"lease-ended"}),
])  # fmt: skip
@pytest.mark.parametrize("why", ["final", "drained", "writer-gone", "lease-ended", "time"])
def test_quarantine_ends_by_its_proof_at_any_time_and_by_time_at_its_end(
    make: Callable[[], Log], kept: str, early: set[str], why: str
) -> None:
    for shift_ns in (-1, 0):
        log = make()
        held = log[log.find(r.SlabQuarantined, why=kept)]
        freed = log.delete(log.find(r.SlabReleased, rank=held.rank)).record
        at_ns = held.until_ns + shift_ns
        line = next(n for n in range(1, len(log) + 1) if n == len(log) or log[n].at_ns > at_ns)
        log.insert(line, freed)
        log.change(line, at_ns=at_ns, why=why, duration_ms=(at_ns - held.at_ns) / NS_PER_MS)
        may = why in early or (why == "time" and kept != "leased" and shift_ns == 0)
        assert kinds(log) == (set() if may else {K.RELEASE_WITHOUT_PROOF})
