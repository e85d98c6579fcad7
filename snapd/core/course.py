"""What every action on an attempt is made of: its state and clock, the answers it gave, its end.

Source: design, section 3.
"""

import hashlib
from collections.abc import Callable
from typing import Final

from snapd.core import events as e
from snapd.core import records as r
from snapd.core.attempt import Lease, Session, Shard, transfer_time_ns
from snapd.core.books import Books
from snapd.core.events import FINAL_STATES, INGESTED, OK, READY, RESERVED, TRANSFERRING, State
from snapd.core.fsm import STATE_TIMER
from snapd.core.quarantine import Quarantine
from snapd.errors import InvariantBroken, Reason
from snapd.units import NS_PER_MS, ms_to_ns

# Start, fail, abort, drained, a commit and some rounds of votes.
ANSWERS_MAX_PER_RANK: Final = 32
_STATE_TIMER: Final = e.TimerKind.STATE
_LEASE_TIMER: Final = e.TimerKind.LEASE


def repeat_key(event: e.SessionEvent) -> tuple[object, ...] | None:
    """Return what a message and its exact repeat share; None: nobody waits for an answer."""
    match event:
        case e.TransferStarted():
            return ("start",)
        case e.RankCommitted():
            return commit_key(event, e.pack_checksums(event.checksums))
        case e.TransferFailed():
            return ("fail", event.rank, event.reason)
        case e.AbortAsked():
            return ("abort",)
        case e.VoteCast(ok=True):
            return _yes_key(event.rank, event.lease_id)
        case e.VoteCast():
            return ("vote", event.rank, event.lease_id, False, event.reason, event.keep)
        case e.WriterDrained():
            return ("drained", event.rank)
        case e.LeaseAsked():
            return ("lease", event.rank)
    return None


def commit_key(event: e.RankCommitted, packed_checksums: bytes) -> tuple[object, ...]:
    """Return what a commit and its exact repeat share.

    Without ``drained``: what the first one said of it holds, until a proof comes.
    """
    # The history holds very many keys, and the sums of one commit can take 13 KB.
    digest = hashlib.blake2b(packed_checksums, digest_size=16).digest()
    return ("commit", event.rank, event.num_bytes, event.num_tokens, digest)


def _yes_key(rank: int, lease_id: int) -> tuple[object, ...]:
    # Why not, and whether to keep it all the same, mean nothing with a "yes".
    return ("vote", rank, lease_id, True)


class Course:
    """Moves one attempt along.

    Attributes:
        allowed: the successors that the table gives for the present event.
    """

    def __init__(self, books: Books, quarantine: Quarantine, take: Callable[[e.SessionEvent], None]) -> None:
        self._books = books
        self._out = books.outbox
        self._quarantine = quarantine
        self._take = take
        self._last_lease_id = 0
        self.allowed: tuple[State, ...] = ()

    # --- the state itself ----------------------------------------------------------------------

    def _enter(self, session: Session, state: State, reason: Reason) -> None:
        """Change the state: the one place that does.

        Raises:
            InvariantBroken: the table does not let the event lead there.
        """
        if state not in self.allowed or session.state in FINAL_STATES:
            raise InvariantBroken(f"attempt {session.handle} may not go from {session.state} to {state}")
        out = self._out
        now_ns = out.now_ns
        from_state = session.state
        spent_ns = now_ns - session.state_since_ns
        out.record(
            r.SessionTransition(
                at_ns=now_ns,
                cause_id=out.cause_id,
                session_id=session.session_id,
                slab_handle=session.handle,
                from_state=from_state,
                to_state=state,
                reason=reason,
                num_tokens=session.num_tokens,
                token_start=session.token_start,
                bytes=session.total_bytes,
                duration_ms=spent_ns / NS_PER_MS,
                newer_handle=session.newer_handle,
            )
        )
        session.spent_ns[from_state] = spent_ns
        num_by_state = self._books.num_by_state
        num_by_state[from_state] -= 1
        num_by_state[state] += 1
        session.state = state
        session.reason = reason
        self.start_clock(session)

    def start_clock(self, session: Session) -> None:
        """Start the clock of the state just entered; a final state has none."""
        now_ns = self._out.now_ns
        settings = self._books.settings
        state = session.state
        session.state_since_ns = now_ns
        if state is RESERVED:
            session.deadline_ns = now_ns + ms_to_ns(settings.reserve_timeout_ms)
        elif state is TRANSFERRING:
            bytes_ns = transfer_time_ns(session.total_bytes, settings.transfer_min_mb_per_s)
            session.deadline_ns = now_ns + ms_to_ns(settings.transfer_timeout_ms) + bytes_ns
        elif state is READY:
            session.deadline_ns = now_ns + ms_to_ns(settings.ready_ttl_ms)
        else:
            session.deadline_ns = 0
            self._out.cancel((_STATE_TIMER, session.handle, 0))
            return
        self._arm_state(session)

    def _arm_state(self, session: Session) -> None:
        timer = STATE_TIMER[session.state]
        self._out.arm(
            (_STATE_TIMER, session.handle, 0),
            timer(at_ns=0, slab_handle=session.handle, deadline_ns=session.deadline_ns),
        )

    # --- the end -------------------------------------------------------------------------------

    def _end(
        self,
        session: Session,
        state: State,
        reason: Reason,
        drained_ranks: tuple[int, ...] | list[int] = (),
        proof: r.ReleaseWhy = "drained",
        corrupt_rank: int | None = None,
    ) -> None:
        """End the attempt: leases, state, bytes, tables, outcome, in that order.

        Args:
            session: the attempt.
            state: INGESTED or ABORTED.
            reason: why.
            drained_ranks: shards in which no write can still land, whatever their commits said.
            proof: how that is known.
            corrupt_rank: the shard whose bytes did not match: whoever wrote there may go on.
        """
        conn_ids = set(session.told_conn_ids.values())
        reading: dict[int, Lease] = {}
        for shard in session.shards.values():
            if shard.lease is not None:
                conn_ids.add(shard.lease.conn_id)
                if not shard.lease.has_voted:
                    reading[shard.rank] = shard.lease
                self._end_lease(session, shard, reason, state)
        self._enter(session, state, reason)
        drain_wanted = False
        for shard in session.shards.values():
            extents, shard.extents = shard.extents, ()
            if shard.rank == corrupt_rank:
                self._quarantine.hold(session, shard.rank, extents, "corrupt")
            elif not shard.is_drained and shard.rank not in drained_ranks:
                drain_wanted = True
                self._quarantine.hold(session, shard.rank, extents, "undrained", reading.get(shard.rank))
            elif shard.rank in reading:
                self._quarantine.hold(session, shard.rank, extents, "leased", reading[shard.rank])
            else:
                self._quarantine.free(session, shard.rank, extents, "final" if shard.is_drained else proof)
        self._record_outcome(session)
        for conn_id in sorted(conn_ids - {0}):
            self._out.tell(
                e.EndTold(conn_id, session.handle, session.session_id, state, reason, drain_wanted)
            )
        self._books.bury(session)

    def _record_outcome(self, session: Session) -> None:
        self._books.outcomes[session.reason] += 1
        now_ns = self._out.now_ns
        spent_ns = session.spent_ns
        self._out.record(
            r.SyncOutcome(
                at_ns=now_ns,
                cause_id=self._out.cause_id,
                session_id=session.session_id,
                slab_handle=session.handle,
                ok=session.state is INGESTED,
                reason=session.reason,
                num_tokens=session.num_tokens,
                token_start=session.token_start,
                bytes=session.total_bytes,
                duration_ms=(now_ns - session.created_ns) / NS_PER_MS,
                reserved_ms=spent_ns.get(RESERVED, 0) / NS_PER_MS,
                transferring_ms=spent_ns.get(TRANSFERRING, 0) / NS_PER_MS,
                ready_ms=spent_ns.get(READY, 0) / NS_PER_MS,
                ranks=tuple(session.shards),
                peer=session.peer,
            )
        )

    def _end_lease(self, session: Session, shard: Shard, reason: Reason, state: State | None = None) -> None:
        """End a rank's lease; a vote that waits is answered with the decision.

        Args:
            session: the attempt.
            shard: whose lease.
            reason: of the decision; ``ok`` is "commit".
            state: the attempt's state after the decision; the present one by default.
        """
        lease = shard.lease
        assert lease is not None
        shard.lease = None
        is_ok = reason is OK
        self._out.cancel((_LEASE_TIMER, session.handle, shard.rank))
        self._out.record(
            r.LeaseEnded(
                at_ns=self._out.now_ns,
                cause_id=self._out.cause_id,
                session_id=session.session_id,
                slab_handle=session.handle,
                rank=shard.rank,
                lease_id=lease.lease_id,
                ok=is_ok,
                reason=reason,
                duration_ms=(self._out.now_ns - lease.granted_ns) / NS_PER_MS,
            )
        )
        decided = e.Decided(commit=is_ok, reason=reason, state=state or session.state)
        for cause_id in lease.waiting:
            self._out.reply(decided, cause_id)
        if lease.has_voted:
            self._remember(session, _yes_key(shard.rank, lease.lease_id), decided)

    # --- answers -------------------------------------------------------------------------------

    def _answer(self, session: Session, event: e.SessionEvent, result: e.Result) -> None:
        """Answer, and keep the answer for an exact repeat."""
        key = repeat_key(event)
        if key is not None:
            self._remember(session, key, result)
        self._out.reply(result)

    @staticmethod
    def _remember(session: Session, key: tuple[object, ...], result: e.Result) -> None:
        session.answers[key] = result
        # Only votes that keep the snapshot can go on for ever; their oldest answers go first.
        while len(session.answers) > ANSWERS_MAX_PER_RANK * len(session.shards):
            del session.answers[next(kept for kept in session.answers if kept[0] == "vote")]

    def _repeat(self, session: Session, event: e.SessionEvent, detail: str) -> None:
        """Give an exact repeat its first answer; anything else is refused."""
        answer = session.answers.get(repeat_key(event) or ())
        if answer is not None:
            self._out.reply(answer)
        else:
            self._out.refuse(Reason.WRONG_STATE, detail)
