"""Bugs to be planted in snapd, one at a time: each must be noticed by the simulation."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from snapd import service
from snapd import wire as w
from snapd.access import Access, Rights
from snapd.core import events as e
from snapd.core.admission import Admission
from snapd.core.books import Books
from snapd.core.course import Course
from snapd.core.events import State
from snapd.core.lives import Lives
from snapd.core.quarantine import Quarantine
from snapd.core.session import Lease, Session
from snapd.errors import Reason
from snapd.executor import Executor
from snapd.forensics import proof
from snapd.server import Connection
from snapd.service import Service
from tools.simulation import daemon as sim_daemon
from tools.simulation import prefill as sim_prefill

Plant = Callable[[pytest.MonkeyPatch], None]


def quarantine_skipped(patch: pytest.MonkeyPatch) -> None:
    """What may still be written to is given back at once."""

    def hold(
        self: Quarantine, session: Session, rank: int, extents: Any, why: Any, lease: Any = None
    ) -> None:
        self.free(session, rank, extents, "final")

    patch.setattr(Quarantine, "hold", hold)


def timeout_frees(patch: pytest.MonkeyPatch) -> None:
    """A transfer that timed out is taken for drained, and the log says that it was."""
    end = Course._end

    def trusting(
        self: Lives, session: Session, state: State, reason: Reason, *args: Any, **fields: Any
    ) -> None:
        if reason is Reason.TRANSFER_TIMEOUT:
            args = (tuple(session.shards),)
            reason = Reason.TRANSFER_FAILED
        end(self, session, state, reason, *args, **fields)

    patch.setattr(Course, "_end", trusting)


def lease_ignored_by_eviction(patch: pytest.MonkeyPatch) -> None:
    """A leased snapshot stays a candidate for eviction."""
    patch.setattr(Books, "withhold", lambda self, handle: None)


def lease_ignored_by_endings(patch: pytest.MonkeyPatch) -> None:
    """A snapshot ends while it is read: by an abort, an expiry or a newer one."""

    def end_now(self: Lives, session: Session, reason: Reason, drained_ranks: Any = ()) -> bool:
        self._end(session, State.ABORTED, reason, drained_ranks)
        return False

    patch.setattr(Lives, "_end_when_unleased", end_now)


def lease_never_ends(patch: pytest.MonkeyPatch) -> None:
    """A vote counts long after the lease's deadline."""
    patch.setattr(Lives, "_revoke_overdue", lambda self, session: None)


def vote_taken_twice(patch: pytest.MonkeyPatch) -> None:
    """A repeated yes counts for the rank that has not voted."""
    count = Lives.count_vote

    def count_vote(self: Lives, session: Session, event: e.VoteCast) -> None:
        shard = session.shards.get(event.rank)
        lease = shard.lease if shard else None
        if lease is not None and lease.has_voted and event.ok and lease.lease_id == event.lease_id:
            self._end(session, State.INGESTED, Reason.OK)
            return
        count(self, session, event)

    patch.setattr(Lives, "count_vote", count_vote)
    cells = sim_actions()
    patch.setitem(cells, "count_vote", count_vote)


def one_yes_is_enough(patch: pytest.MonkeyPatch) -> None:
    """The first rank that votes yes decides for all."""

    def count_yes(self: Lives, session: Session, lease: Lease) -> None:
        lease.waiting.append(self._out.cause_id)
        self._end(session, State.INGESTED, Reason.OK)

    patch.setattr(Lives, "_count_yes", count_yes)


def freed_before_the_last_rank(patch: pytest.MonkeyPatch) -> None:
    """A rank's bytes are given back when it has voted, not when all have."""
    count = Lives._count_yes

    def count_yes(self: Lives, session: Session, lease: Lease) -> None:
        shard = next(shard for shard in session.shards.values() if shard.lease is lease)
        extents, shard.extents = shard.extents, ()
        self._quarantine.free(session, shard.rank, extents, "final")
        count(self, session, lease)

    patch.setattr(Lives, "_count_yes", count_yes)


def checksum_not_compared(patch: pytest.MonkeyPatch) -> None:
    """P takes what it read for what D committed."""
    patch.setattr(sim_prefill, "sums_differ", lambda committed, planes: False)


def stale_epoch_accepted(patch: pytest.MonkeyPatch) -> None:
    """The daemon does not look of which epoch a handle is."""
    take = Service.take

    def careless(self: Service, caller: Any, request: Any) -> None:
        if isinstance(request, w.HandleRequest):
            request = msgspec.structs.replace(request, epoch="")
        take(self, caller, request)

    patch.setattr(Service, "take", careless)


def commit_counted_twice(patch: pytest.MonkeyPatch) -> None:
    """A repeated commit counts for the rank that has not committed."""
    commit = Lives.commit_rank

    def commit_rank(self: Lives, session: Session, event: e.RankCommitted) -> None:
        shard = session.shards.get(event.rank)
        if shard is not None and shard.is_committed:
            missing = [rank for rank, other in session.shards.items() if not other.is_committed]
            event = msgspec.structs.replace(event, rank=missing[0])
        commit(self, session, event)

    patch.setitem(sim_actions(), "commit_rank", commit_rank)


def wrong_counts_accepted(patch: pytest.MonkeyPatch) -> None:
    """A rank may commit other counts than were granted."""
    commit = Lives.commit_rank

    def commit_rank(self: Lives, session: Session, event: e.RankCommitted) -> None:
        counts = {"num_bytes": session.shard_bytes, "num_tokens": session.num_tokens}
        commit(self, session, msgspec.structs.replace(event, **counts))

    patch.setitem(sim_actions(), "commit_rank", commit_rank)


def end_not_recorded(patch: pytest.MonkeyPatch) -> None:
    """An attempt that a dead daemon left open is not closed by the next one."""
    closing = sim_daemon.closing_records
    patch.setattr(sim_daemon, "closing_records", lambda former, at_ns: closing(former, at_ns)[2:])


def reply_lost(patch: pytest.MonkeyPatch) -> None:
    """A vote that waits is forgotten when the attempt is evicted, aborted or expires."""
    run = Executor._run

    def run_some(self: Executor, instructions: list[e.Instruction]) -> None:
        kept = [
            instruction
            for instruction in instructions
            if not (
                isinstance(instruction, e.Replied)
                and isinstance(instruction.result, e.Decided)
                and instruction.result.reason is Reason.ROUND_ABORTED
            )
        ]
        run(self, kept)

    patch.setattr(Executor, "_run", run_some)


def draining_ignored(patch: pytest.MonkeyPatch) -> None:
    """A daemon that drains takes new attempts."""
    prepare = Admission.prepare

    def eager(self: Admission, event: e.PrepareAsked) -> None:
        is_draining, self._books.is_draining = self._books.is_draining, False
        try:
            prepare(self, event)
        finally:
            self._books.is_draining = is_draining

    patch.setattr(Admission, "prepare", eager)


def rights_ignored(patch: pytest.MonkeyPatch) -> None:
    """Who may push for one tenant may do everything."""
    patch.setattr(service, "refusal", lambda rights, request, books: None)


def stranger_served(patch: pytest.MonkeyPatch) -> None:
    """A user whom no rule names may do everything."""
    of_uid = Access.of_uid

    def generous(self: Access, uid: int) -> Rights:
        return of_uid(self, uid) or Rights(f"uid {uid}", is_full=True)

    patch.setattr(Access, "of_uid", generous)


def recovery_forgets(patch: pytest.MonkeyPatch) -> None:
    """The log is not read back after a crash."""
    patch.setattr(sim_daemon, "read_open_attempts", lambda path, keep: None)


def bug_ignored(patch: pytest.MonkeyPatch) -> None:
    """After an exception that nobody foresaw the core goes on until the process has ended."""
    patch.setattr(Executor, "halt", lambda self: None)


def bug_swallowed(patch: pytest.MonkeyPatch) -> None:
    """Whoever asked is told of the bug, and the daemon serves on."""

    def tell(self: Connection, request_id: int, error: Exception, *, is_answered: bool) -> None:
        self._write(w.encode_frame(w.ErrorRep(id=request_id, reason=Reason.INTERNAL_ERROR)))

    patch.setattr(Connection, "_tell_bug", tell)


def internal_error_answered(patch: pytest.MonkeyPatch) -> None:
    """The service does not know what to make of an answer of the core."""
    reply = Service._reply

    def confused(self: Service, request_id: int, result: e.Result) -> w.AnyReply:
        if isinstance(result, e.Found):
            return w.ErrorRep(id=request_id, reason=Reason.INTERNAL_ERROR)
        return reply(self, request_id, result)

    patch.setattr(Service, "_reply", confused)


def older_lines_not_known(patch: pytest.MonkeyPatch) -> None:
    """Lines of the design before are taken for damage."""
    patch.setattr(proof, "older_reason", lambda raw: "")


def older_lines_counted(patch: pytest.MonkeyPatch) -> None:
    """Lines of the design before count as attempts of snapd."""
    take = proof.Proof._take_torn

    def take_torn(self: proof.Proof, line: Any, where: Any) -> None:
        if reason := proof.older_reason(line.raw):
            self._findings.outcomes[reason] = self._findings.outcomes.get(reason, 0) + 1  # type: ignore[index]
        take(self, line, where)

    patch.setattr(proof.Proof, "_take_torn", take_torn)


def sim_actions() -> dict[str, Callable[..., None]]:
    """Return the table by which the core finds its actions."""
    from snapd.core import machine

    return machine._ACTIONS


PLANTS: tuple[Plant, ...] = (
    quarantine_skipped,
    timeout_frees,
    lease_ignored_by_eviction,
    lease_ignored_by_endings,
    lease_never_ends,
    vote_taken_twice,
    one_yes_is_enough,
    freed_before_the_last_rank,
    checksum_not_compared,
    stale_epoch_accepted,
    commit_counted_twice,
    wrong_counts_accepted,
    end_not_recorded,
    reply_lost,
    draining_ignored,
    rights_ignored,
    stranger_served,
    recovery_forgets,
    bug_ignored,
    bug_swallowed,
    internal_error_answered,
    older_lines_not_known,
    older_lines_counted,
)
