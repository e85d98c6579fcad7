"""The rules of one epoch: how attempts begin, go on and end, and that each has one outcome.

Source: design, sections 3, 6 and 12.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from snapd.core import records as r
from snapd.errors import Reason
from snapd.forensics import rules
from snapd.forensics.epochstate import EpochState, K, is_equal_ms
from snapd.forensics.memory import Attempt
from snapd.forensics.shards import LIVE
from snapd.forensics.slabproof import SlabProof
from snapd.forensics.violations import Findings, Where

Handler: TypeAlias = Callable[[Any, Where], None]


class EpochProof(SlabProof):
    """Takes the lines of one epoch, in order."""

    def __init__(
        self,
        name: str,
        findings: Findings,
        grace_ns: int,
        close_former: Callable[[r.SessionTransition | r.SyncOutcome, Where], None],
    ) -> None:
        super().__init__(name, findings, grace_ns)
        self._close_former = close_former
        self.handlers: dict[type[r.Record], Handler] = {
            r.SessionTransition: self.transition,
            r.SlabAllocated: self.allocated,
            r.SlabQuarantined: self.quarantine,
            r.SlabReleased: self.release,
            r.LeaseGranted: self.grant,
            r.LeaseEnded: self.end_lease,
            r.SyncOutcome: self.outcome,
            r.SyncRefused: self.refuse,
            r.DaemonStopped: self.stop,
        }

    def retire(self) -> None:
        """Another epoch has begun: let go of what holds this one."""
        self.forget_leases()
        self.handlers.clear()

    def feed(self, handler: Handler, record: r.Record, where: Where) -> None:
        """Take the next record, by the one of ``handlers`` that is for its kind."""
        if type(record) is r.DaemonStopped and record.reason == Reason.INTERNAL_ERROR:
            # What the bug has cut off need not be whole: the next start closes it.
            self._blocks.clear()
            self._refused = None
        if record.at_ns != self.at_ns:
            self.advance(record.at_ns, where)
        if self._refused is not None and handler != self.outcome:
            self._miss_refusal(where)
        handler(record, where)

    # --- attempts ------------------------------------------------------------------------------

    def transition(self, record: r.SessionTransition, where: Where) -> None:
        """An attempt begins, or changes its state."""
        if record.former_epoch:
            self._close_former(record, where)
            return
        attempt = self.open.get(record.slab_handle)
        reasons = rules.MAY_FOLLOW.get((record.from_state, record.to_state))
        is_legal = reasons is not None and record.reason in reasons
        if not record.from_state:
            self._begin(record, where, attempt, is_legal=is_legal)
            return
        if attempt is None:
            if not self.stranger(record, where):
                return
            attempt = self.adopt(record, record.from_state, where)
        if attempt.state != record.from_state:
            message = f"it goes from {record.from_state} to {record.to_state} and was {attempt.state}"
            self.report(K.ILLEGAL_TRANSITION, record, message, attempt.entered, where)
            attempt.created_ns = -1
        elif not is_legal:
            message = f"{record.reason} does not lead from {record.from_state} to {record.to_state}"
            self.report(K.ILLEGAL_TRANSITION, record, message, attempt.entered, where)
            attempt.created_ns = -1  # Its times say nothing more.
        elif not self.is_time(record.duration_ms, attempt.since_ns, record.at_ns):
            message = f"it was not {record.from_state} for {record.duration_ms} ms"
            self.report(K.ACCOUNTING, record, message, attempt.entered, where)
            attempt.created_ns = -1
        if record.reason in rules.NAMES_NEWER and not record.newer_handle:
            message = f"{record.reason}, and the line does not say by which attempt"
            self.report(K.ILLEGAL_TRANSITION, record, message, where)
        check_same(self, attempt, record, where)
        attempt.spent_ms[record.from_state] = record.duration_ms
        if record.to_state in rules.FINAL:
            self._check_readers(attempt, record, where)
            self.follow(attempt)
        attempt.state, attempt.reason = record.to_state, record.reason
        attempt.since_ns, attempt.entered = record.at_ns, where

    def _begin(
        self, record: r.SessionTransition, where: Where, other: Attempt | None, *, is_legal: bool
    ) -> None:
        handle = record.slab_handle
        if other is not None or handle in self.ended:
            message = f"its handle is that of an earlier attempt{'' if other is None else ', which is open'}"
            earlier = self.ended.where(handle) if other is None else other.begun
            self.report(K.HANDLE_REUSED, record, message, earlier, where)
            if other is not None:
                return
        if not is_legal:
            message = f"an attempt does not begin {record.to_state}, {record.reason}"
            self.report(K.ILLEGAL_TRANSITION, record, message, where)
        if record.duration_ms:
            message = f"it begins, and was something else for {record.duration_ms} ms before"
            self.report(K.ACCOUNTING, record, message, where)
        self._findings.attempts += 1
        self.attempts += 1
        attempt = Attempt(handle, record.session_id, record.to_state, where, is_whole=True)
        attempt.num_tokens, attempt.token_start = record.num_tokens, record.token_start
        attempt.bytes = record.bytes
        attempt.created_ns = attempt.since_ns = record.at_ns
        self.open[handle] = attempt
        self.follow(attempt)

    def _check_readers(self, attempt: Attempt, record: r.SessionTransition, where: Where) -> None:
        """An attempt ends when nobody reads; INGESTED is what every rank was told, and nothing else is."""
        for lease in attempt.leases.values():
            message = f"it is {record.to_state} while rank {lease.rank} holds lease {lease.lease_id}"
            self.report(K.WRONG_LEASE, record, message, lease.granted, where)
        self._drop_leases(attempt)
        if record.to_state != rules.INGESTED:
            if attempt.ok_ranks:
                message = f"ranks {list(attempt.ok_ranks)} were told to commit, and it is {record.to_state}"
                self.report(K.RANKS_DIFFER, record, message, attempt.ok, where)
        elif attempt.is_whole and sorted(attempt.ok_ranks) != sorted(attempt.shards):
            message = (
                f"ranks {sorted(attempt.ok_ranks)} were told to commit, and it has ranks "
                f"{sorted(attempt.shards)}"
            )
            self.report(K.RANKS_DIFFER, record, message, attempt.begun, attempt.ok, where)

    # --- outcomes ------------------------------------------------------------------------------

    def outcome(self, record: r.SyncOutcome, where: Where) -> None:
        """An attempt or a refusal is over: once, for the reason that it ended with."""
        if record.former_epoch:
            self._close_former(record, where)
            return
        refused = self._refused
        if refused is not None and record.slab_handle:
            self._miss_refusal(where)
        self._findings.outcomes[record.reason] = self._findings.outcomes.get(record.reason, 0) + 1
        if not record.slab_handle:
            self._refused = None
            self._end_refusal(refused, record, where)
            return
        attempt = self.open.pop(record.slab_handle, None)
        if attempt is None:
            if record.slab_handle in self.ended:
                message = "a second outcome"
                self.report(K.SECOND_OUTCOME, record, message, self.ended.where(record.slab_handle), where)
                return
            if self.stranger(record, where):
                self._findings.unproved_attempts += 1
                self.ended.add(record.slab_handle, where)
            return
        self.ended.add(record.slab_handle, where)
        self.attempts_ok += record.ok
        attempt.has_outcome = True
        if attempt.state not in rules.FINAL:
            message = f"it has an outcome and is {attempt.state}"
            self.report(K.WRONG_OUTCOME, record, message, attempt.entered, where)
            self._drop_leases(attempt)
            return
        if check_outcome(self, attempt, record, where) and attempt.created_ns >= 0:
            self._check_times(attempt, record, where)
        if attempt.is_whole:
            self._check_shards(attempt, record, where)

    def _check_times(self, attempt: Attempt, record: r.SyncOutcome, where: Where) -> None:
        told_ms = (record.reserved_ms, record.transferring_ms, record.ready_ms)
        for state, ms in zip((rules.RESERVED, rules.TRANSFERRING, rules.READY), told_ms, strict=True):
            spent_ms = attempt.spent_ms.get(state, 0.0)
            if not is_equal_ms(ms, spent_ms):
                message = f"its outcome says that it was {state} for {ms} ms, and its lines {spent_ms} ms"
                self.report(K.ACCOUNTING, record, message, attempt.begun, where)
                return

    def _check_shards(self, attempt: Attempt, record: r.SyncOutcome, where: Where) -> None:
        """What has ended owns nothing, in any rank, and its bytes went the way that its end allows."""
        shards = attempt.shards
        if sorted(record.ranks) != sorted(shards):
            message = f"its outcome names ranks {list(record.ranks)}, and it had slabs in {sorted(shards)}"
            self.report(K.RANKS_DIFFER, record, message, attempt.begun, where)
        if attempt.allocated_bytes != attempt.bytes and not attempt.is_reported:
            self.report(K.RANKS_DIFFER, record, attempt.slabs_say(), attempt.begun, where)
        freed_as_final = 0
        corrupt = 0
        for shard in shards.values():
            if shard.use == LIVE:
                message = f"it has ended and still holds {shard.mapped_bytes} bytes of arena {shard.rank}"
                self.report(K.ACCOUNTING, record, message, shard.allocated, where)
            freed_as_final += shard.why == "final"
            corrupt += shard.why == "corrupt"
        if shards and freed_as_final == len(shards) and rules.READY not in attempt.spent_ms:
            message = "every rank's bytes were freed as committed, and it was never READY"
            self.report(K.RELEASE_WITHOUT_PROOF, record, message, attempt.entered, where)
        if attempt.reason == "checksum-mismatch" and not corrupt:
            message = "a checksum was wrong, and no rank's bytes were kept as corrupt"
            self.report(K.RELEASE_WITHOUT_PROOF, record, message, attempt.entered, where)

    def _drop_leases(self, attempt: Attempt) -> None:
        for lease in attempt.leases.values():
            lease.is_over = True
            self.leases.pop(lease.lease_id, None)

    # --- refusals ------------------------------------------------------------------------------

    def refuse(self, record: r.SyncRefused, where: Where) -> None:
        """A prepare was refused: its outcome is the next line."""
        self._findings.refused += 1
        if record.reason not in rules.REFUSALS:
            message = f"a prepare of {record.session_id} is not refused with {record.reason}"
            self._findings.report(
                K.WRONG_OUTCOME, message, where, session_id=record.session_id, epoch=self.name
            )
        self._refused = (record, where)

    def _miss_refusal(self, where: Where) -> None:
        assert self._refused is not None
        record, refused_at = self._refused
        self._refused = None
        message = f"a prepare of {record.session_id} was refused and has no outcome"
        self._findings.report(
            K.MISSING_OUTCOME, message, refused_at, where, session_id=record.session_id, epoch=self.name
        )

    def _end_refusal(
        self, refused: tuple[r.SyncRefused, Where] | None, record: r.SyncOutcome, where: Where
    ) -> None:
        if refused is None:
            if self.seq == self.lost_seq:
                self._findings.unproved_lines += 1  # The refusal may have been the line before.
            else:
                self.report(K.SECOND_OUTCOME, record, "an outcome, and nothing was refused", where)
            return
        refusal, refused_at = refused
        told = (record.session_id, record.reason, record.num_tokens, record.token_start, record.bytes)
        meant = (refusal.session_id, refusal.reason, refusal.num_tokens, refusal.token_start, refusal.bytes)
        spent_ms = record.duration_ms + record.reserved_ms + record.transferring_ms + record.ready_ms
        if told != meant or record.ok or record.ranks or spent_ms:
            message = "its outcome is not that of the refusal before it"
            self.report(K.WRONG_OUTCOME, record, message, refused_at, where)

    # --- the end -------------------------------------------------------------------------------

    def stop(self, record: r.DaemonStopped, where: Where) -> None:
        """The last line. An orderly stop has ended every attempt before."""
        self.is_stopped = True
        self.stopped = where
        if record.reason == Reason.INTERNAL_ERROR:
            return
        self.is_stopped_in_order = True
        for attempt in self.open.values():
            if not attempt.is_reported:
                message = f"the daemon was stopped, and it is {attempt.state} without outcome"
                self.report(K.MISSING_OUTCOME, attempt, message, attempt.begun, attempt.entered, where)
        self.open.clear()
        self.forget_leases()
        told = (record.attempts, record.attempts_ok)
        if self.is_complete and told != (self.attempts, self.attempts_ok):
            message = (
                f"the daemon counts {told[0]} attempts, {told[1]} ok, and the log "
                f"{self.attempts} and {self.attempts_ok}"
            )
            self._findings.report(K.ACCOUNTING, message, self.started, where, epoch=self.name)


def check_same(
    epoch: EpochState, attempt: Attempt, record: r.SessionTransition | r.SyncOutcome, where: Where
) -> None:
    """Every line of an attempt tells of the same session, tokens and bytes."""
    if attempt.num_tokens < 0:
        attempt.num_tokens, attempt.token_start = record.num_tokens, record.token_start
        attempt.bytes = record.bytes
    is_same = (
        record.num_tokens == attempt.num_tokens
        and record.token_start == attempt.token_start
        and record.bytes == attempt.bytes
        and record.session_id == attempt.session_id
    )
    if not is_same:
        told = (record.session_id, record.num_tokens, record.token_start, record.bytes)
        message = (
            f"this line is of session {told[0]}, {told[1]} tokens from {told[2]}, {told[3]} bytes; it began "
            f"as session {attempt.session_id}, {attempt.num_tokens} tokens from {attempt.token_start}, "
            f"{attempt.bytes} bytes"
        )
        epoch.report(K.ATTEMPT_CHANGED, record, message, attempt.begun, where)


def check_outcome(epoch: EpochState, attempt: Attempt, record: r.SyncOutcome, where: Where) -> bool:
    """The outcome is that of the attempt's last state; return whether its times add up."""
    is_ok = attempt.state == rules.INGESTED
    if record.ok != is_ok or record.reason != attempt.reason:
        message = (
            f"its outcome is {record.reason}, ok {record.ok}, and it is {attempt.state}, {attempt.reason}"
        )
        epoch.report(K.WRONG_OUTCOME, record, message, attempt.entered, where)
    check_same(epoch, attempt, record, where)
    sum_ms = record.reserved_ms + record.transferring_ms + record.ready_ms
    adds_up = is_equal_ms(sum_ms, record.duration_ms)
    if not adds_up:
        message = f"the times in its states are {sum_ms} ms in all, and it took {record.duration_ms} ms"
        epoch.report(K.ACCOUNTING, record, message, attempt.begun, where)
    return adds_up
