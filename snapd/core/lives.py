"""The actions that the table in fsm.py names: how one attempt lives and ends.

Source: design, section 3.
"""

from collections.abc import Iterable
from typing import Final

from snapd.core import events as e
from snapd.core import records as r
from snapd.core.attempt import Lease, Session, Shard
from snapd.core.course import Course, commit_key, repeat_key
from snapd.core.events import ABORTED, INGESTED, OK, READY, RESERVED, TRANSFERRING, State
from snapd.core.fsm import NEVER_KEPT, STATE_TIMER_REASON, TRANSFER_FAILED_REASONS, VOTE_NO_REASONS
from snapd.core.session import STARTER
from snapd.errors import Reason
from snapd.units import ms_to_ns

# The same vote, cast again because no answer has come yet.
VOTES_WAITING_MAX: Final = 64


class Lives(Course):
    """The actions, one a cell of the table."""

    # --- writing -------------------------------------------------------------------------------

    def start_transfer(self, session: Session, event: e.TransferStarted) -> None:
        """RESERVED: D is about to write."""
        session.told_conn_ids[STARTER] = event.conn_id
        self._enter(session, TRANSFERRING, OK)
        # Not kept for a repeat: once the attempt has ended, "go ahead" would be wrong.
        self._out.reply(e.Accepted(session.state))

    def commit_rank(self, session: Session, event: e.RankCommitted) -> None:
        """RESERVED, TRANSFERRING: one rank's bytes are there; READY once every rank's are."""
        shard = session.shards.get(event.rank)
        if shard is None:
            self._out.refuse(Reason.WRONG_RANK, f"the attempt has ranks {sorted(session.shards)}")
            return
        if shard.is_committed:
            self._repeat(session, event, f"rank {event.rank} has committed other figures")
            return
        num_planes = session.planes.num_planes
        if len(event.checksums) != num_planes:
            self._out.refuse(
                Reason.INVALID_REQUEST, f"{len(event.checksums)} checksums for {num_planes} planes"
            )
            return
        session.told_conn_ids[event.rank] = event.conn_id
        if (event.num_bytes, event.num_tokens) != (session.shard_bytes, session.num_tokens):
            detail = (
                f"committed {event.num_tokens} tokens, {event.num_bytes} bytes; "
                f"granted {session.num_tokens} tokens, {session.shard_bytes} bytes"
            )
            self._end(session, ABORTED, Reason.PARTIAL_TRANSFER)
            self._answer(session, event, e.Refused(Reason.PARTIAL_TRANSFER, detail))
            return
        if session.state is RESERVED:
            self._enter(session, TRANSFERRING, OK)
        shard.is_committed = True
        shard.is_drained = event.drained
        packed_checksums = e.pack_checksums(event.checksums)
        shard.packed_checksums = packed_checksums
        self._books.bytes_committed += session.shard_bytes
        if _is_committed(session):
            self._make_ready(session)
        accepted = e.Accepted(session.state)
        self._remember(session, commit_key(event, packed_checksums), accepted)
        self._out.reply(accepted)

    def _make_ready(self, session: Session) -> None:
        directory = self._books.directory
        older = directory.ready(session.key)
        self._enter(session, READY, OK)
        directory.make_ready(session)
        self._books.add_ready(session)
        if older is not None:
            self._take(e.SupersededBy(at_ns=self._out.now_ns, slab_handle=older, newer_handle=session.handle))

    def fail_transfer(self, session: Session, event: e.TransferFailed) -> None:
        """RESERVED, TRANSFERRING: D says that it failed, or no longer has the session."""
        if event.reason not in TRANSFER_FAILED_REASONS:
            self._out.refuse(Reason.INVALID_REQUEST, f"a transfer does not fail with {event.reason}")
            return
        if event.rank is not None and event.rank not in session.shards:
            self._out.refuse(Reason.WRONG_RANK, f"the attempt has ranks {sorted(session.shards)}")
            return
        drained_ranks = [event.rank] if event.rank is not None else list(session.shards)
        self._end(session, ABORTED, event.reason, drained_ranks if event.drained else ())
        self._answer(session, event, e.Accepted(session.state))

    def lose_writer(self, session: Session, event: e.WriterExited) -> None:
        """RESERVED, TRANSFERRING: the process that was writing is gone, and begins no write any more."""
        drained_ranks = tuple(session.shards) if event.drained else ()
        self._end(session, ABORTED, Reason.WRITER_GONE, drained_ranks, "writer-gone")

    def note_exit(self, session: Session, event: e.WriterExited) -> None:
        """READY: the process that wrote it is gone."""
        if event.drained:
            self._note_proof(session, session.shards)

    def note_drained(self, session: Session, event: e.WriterDrained) -> None:
        """TRANSFERRING, READY: nothing can still land in what is committed; the rest may yet be written."""
        if event.rank is not None and event.rank not in session.shards:
            self._out.refuse(Reason.WRONG_RANK, f"the attempt has ranks {sorted(session.shards)}")
            return
        ranks = [rank for rank, shard in session.shards.items() if shard.is_committed]
        if event.rank is not None:
            ranks = [rank for rank in ranks if rank == event.rank]
        if not ranks:
            self._out.refuse(Reason.WRONG_STATE, f"the attempt is {session.state} and that is not committed")
            return
        self._note_proof(session, ranks)
        self._out.reply(e.Accepted(session.state))

    def _note_proof(self, session: Session, ranks: Iterable[int]) -> None:
        """Remember that nothing can still land in committed shards: their bytes are freed at the end."""
        was_drained = session.is_drained
        for rank in ranks:
            session.shards[rank].is_drained = True
        if session.is_drained and not was_drained:
            self._settle(session)

    # --- reading -------------------------------------------------------------------------------

    def grant_lease(self, session: Session, event: e.LeaseAsked) -> None:
        """READY: a rank may read its shard until the lease's deadline."""
        shard = session.shards.get(event.rank)
        if shard is None:
            self._out.refuse(Reason.WRONG_RANK, f"the attempt has ranks {sorted(session.shards)}")
            return
        if event.session_id not in ("", session.session_id):
            self._out.refuse(Reason.STALE_HANDLE, "the handle is of another session")
            return
        if event.layout_fingerprint != session.key[0]:
            self._out.refuse(Reason.LAYOUT_MISMATCH, f"the snapshot's layout is {session.key[0]}")
            return
        if session.abort_wanted is not None:
            self._out.refuse(session.abort_wanted, "the attempt ends as soon as its readers are done")
            return
        self._revoke_overdue(session)
        lease = shard.lease
        if lease is not None and lease.has_voted:
            self._out.refuse(Reason.WRONG_STATE, f"rank {event.rank} has voted and waits for the decision")
            return
        if lease is not None and lease.round != session.round:
            # The rank asks afresh, so it reads no more under the lease of a round that is over.
            self._end_lease(session, shard, Reason.ROUND_ABORTED)
            lease = None
        if lease is None:
            lease = self._new_lease(session, shard, event.conn_id)
        lease.conn_id = event.conn_id or lease.conn_id
        self._out.reply(
            e.Leased(
                slab_handle=session.handle,
                session_id=session.session_id,
                lease_id=lease.lease_id,
                deadline_ns=lease.deadline_ns,
                num_tokens=session.num_tokens,
                token_start=session.token_start,
                token_digest=session.token_digest,
                packed_checksums=shard.packed_checksums,
                layout=session.layout,
                shard=e.ShardGrant(
                    shard.rank,
                    shard.extents,
                    session.planes.offsets_bytes(
                        session.num_tokens, shard.extents, self._books.buffer.alignment_bytes
                    ),
                ),
            )
        )

    def _new_lease(self, session: Session, shard: Shard, conn_id: int) -> Lease:
        self._last_lease_id += 1
        now_ns = self._out.now_ns
        deadline_ns = now_ns + ms_to_ns(self._books.settings.lease_ms)
        lease = Lease(self._last_lease_id, session.round, now_ns, deadline_ns, conn_id)
        if not session.is_leased:
            # Once for all ranks: how many there are says nothing about how much it is wanted.
            self._books.victims.use(session.handle)
        shard.lease = lease
        self._books.withhold(session.handle)
        self._out.record(
            r.LeaseGranted(
                at_ns=now_ns,
                cause_id=self._out.cause_id,
                session_id=session.session_id,
                slab_handle=session.handle,
                rank=shard.rank,
                lease_id=lease.lease_id,
                round=lease.round,
                until_ns=deadline_ns,
            )
        )
        self._arm_lease(session.handle, shard.rank, deadline_ns)
        return lease

    def _arm_lease(self, handle: int, rank: int, deadline_ns: int) -> None:
        timer = e.LeaseTimedOut(at_ns=0, slab_handle=handle, rank=rank, deadline_ns=deadline_ns)
        self._out.arm((e.TimerKind.LEASE, handle, rank), timer)

    def count_vote(self, session: Session, event: e.VoteCast) -> None:
        """READY: a rank has read. One "no" is "abort" for all; every "ok" together is "commit"."""
        shard = session.shards.get(event.rank)
        if shard is None or _is_lease_of_another(session, shard, event.lease_id):
            self._out.refuse(Reason.WRONG_RANK, f"lease {event.lease_id} is not one of rank {event.rank}")
            return
        if not event.ok and event.reason not in VOTE_NO_REASONS:
            self._out.refuse(Reason.INVALID_REQUEST, f"{event.reason} is no reason for a vote of no")
            return
        self._revoke_overdue(session)
        lease = shard.lease
        if lease is None or lease.lease_id != event.lease_id:
            answer = session.answers.get(repeat_key(event) or ())
            if answer is not None:
                self._out.reply(answer)
            else:
                self._out.refuse(Reason.LEASE_EXPIRED, "the lease is over; do not insert")
            return
        if lease.has_voted:
            if event.ok:
                if len(lease.waiting) >= VOTES_WAITING_MAX:
                    # The oldest: whoever asks over a new connection has given the former ones up.
                    refusal = e.Refused(Reason.LIMIT_REACHED, "the same vote was cast too often")
                    self._out.reply(refusal, lease.waiting.pop(0))
                lease.waiting.append(self._out.cause_id)
            else:
                self._out.refuse(Reason.WRONG_STATE, f"rank {event.rank} has voted ok already")
            return
        is_kept = event.ok or (event.keep and event.reason not in NEVER_KEPT)
        if not event.ok and event.reason is Reason.PREFIX_NOT_RESIDENT:
            self._books.directory.set_hint(session.key, 0)
        if not is_kept:
            self._count_last_no(session, shard, event)
        elif lease.round != session.round:
            self._end_lease(session, shard, Reason.ROUND_ABORTED)
            self._leave_round(session, event, Reason.ROUND_ABORTED)
        elif event.ok:
            self._count_yes(session, lease)
        else:
            self._end_lease(session, shard, event.reason)
            self._abort_round(session, event.reason)
            self._leave_round(session, event, event.reason)

    def _count_yes(self, session: Session, lease: Lease) -> None:
        lease.waiting.append(self._out.cause_id)
        if _have_all_voted(session):
            self._books.directory.set_hint(session.key, session.end_tokens)
            self._books.bytes_ingested += session.total_bytes
            self._end(session, INGESTED, OK)

    def _leave_round(self, session: Session, event: e.VoteCast, reason: Reason) -> None:
        decided = e.Decided(commit=False, reason=reason, state=self._state_to_come(session))
        self._answer(session, event, decided)
        self._settle(session)

    def _count_last_no(self, session: Session, shard: Shard, event: e.VoteCast) -> None:
        self._end_lease(session, shard, event.reason)
        corrupt_rank = shard.rank if event.reason is Reason.CHECKSUM_MISMATCH else None
        self._end(session, ABORTED, event.reason, corrupt_rank=corrupt_rank)
        self._answer(session, event, e.Decided(commit=False, reason=event.reason, state=session.state))

    def revoke_lease(self, session: Session, event: e.LeaseTimedOut) -> None:
        """READY: a rank did not vote in time, or the others did not while it waited."""
        shard = session.shards[event.rank]
        lease = shard.lease
        if lease is None or lease.deadline_ns != event.deadline_ns:
            return
        if self._out.now_ns < lease.deadline_ns:
            self._arm_lease(session.handle, shard.rank, lease.deadline_ns)
            return
        self._revoke_overdue(session)

    def _revoke_overdue(self, session: Session) -> None:
        """End every lease whose time is over, whether or not its timer has come yet.

        A daemon that stood still may see a vote before the timer. A rank whose vote waited for too long
        has given up by then, so nobody may hear "commit" any more.
        """
        for shard in session.shards.values():
            lease = shard.lease
            if lease is None or self._out.now_ns < lease.deadline_ns:
                continue
            self._end_lease(session, shard, Reason.LEASE_EXPIRED, self._state_to_come(session))
            if lease.round == session.round:
                self._abort_round(session, Reason.ROUND_ABORTED)
            self._settle(session)

    def _abort_round(self, session: Session, reason: Reason) -> None:
        """Whoever has voted is told; whoever reads still may go on until its lease ends, for nothing."""
        session.round += 1
        state = self._state_to_come(session)
        for shard in session.shards.values():
            if shard.lease is not None and shard.lease.has_voted:
                self._end_lease(session, shard, reason, state)

    @staticmethod
    def _state_to_come(session: Session) -> State:
        """Return the state once the round is over: a wanted abort takes effect when nobody reads."""
        if session.abort_wanted is None:
            return session.state
        leases = [shard.lease for shard in session.shards.values()]
        is_read = any(lease is not None and not lease.has_voted for lease in leases)
        return session.state if is_read else ABORTED

    def _settle(self, session: Session) -> None:
        """A lease has ended: do what waited for it, or let the snapshot be evictable again."""
        if session.state is not READY or session.is_leased:
            return
        if session.abort_wanted is not None:
            self._end(session, ABORTED, session.abort_wanted)
        else:
            self._books.offer(session)

    def touch(self, session: Session, event: e.LookedUp) -> None:
        """READY: somebody found it by name or by prefix."""
        del event
        self._books.victims.use(session.handle)

    # --- ending --------------------------------------------------------------------------------

    def abort(self, session: Session, event: e.AbortAsked) -> None:
        """A client or an operator wants it to end; a leased one ends when its readers are done."""
        pending = self._end_when_unleased(
            session, Reason.CLIENT_ABORT, tuple(session.shards) if event.drained else ()
        )
        self._answer(session, event, e.Accepted(session.state, pending))

    def expire_state(self, session: Session, event: e.TimerEvent) -> None:
        """The present state has lasted too long; a timer that fired early is armed again."""
        if event.deadline_ns != session.deadline_ns:
            return
        if self._out.now_ns < session.deadline_ns:
            self._arm_state(session)
            return
        self._end_when_unleased(session, STATE_TIMER_REASON[session.state])

    def supersede(self, session: Session, event: e.SupersededBy) -> None:
        """A newer attempt of the same session takes over."""
        session.newer_handle = event.newer_handle
        self._end_when_unleased(session, Reason.SUPERSEDED)

    def evict(self, session: Session, event: e.VictimChosen) -> None:
        """READY: makes room for another."""
        del event
        self._end(session, ABORTED, Reason.EVICTED)

    def stop(self, session: Session, event: e.DaemonStopping) -> None:
        """The daemon is about to exit; no lease holds it up."""
        del event
        self._end(session, ABORTED, Reason.DAEMON_STOPPED)

    def _end_when_unleased(
        self, session: Session, reason: Reason, drained_ranks: tuple[int, ...] = ()
    ) -> bool:
        """End the attempt now, or note why it ends once nobody reads; return whether it waits."""
        if session.is_leased:
            self._note_proof(session, drained_ranks)
            session.abort_wanted = session.abort_wanted or reason
            return True
        self._end(session, ABORTED, reason, drained_ranks)
        return False


# Loops and not generators: these are asked for every commit and vote.


def _is_committed(session: Session) -> bool:
    """Return whether every rank has committed."""
    for shard in session.shards.values():  # noqa: SIM110
        if not shard.is_committed:
            return False
    return True


def _have_all_voted(session: Session) -> bool:
    """Return whether every rank has voted in the present round."""
    for shard in session.shards.values():
        lease = shard.lease
        if lease is None or not lease.waiting or lease.round != session.round:
            return False
    return True


def _is_lease_of_another(session: Session, shard: Shard, lease_id: int) -> bool:
    """Return whether the lease is one of another rank."""
    for other in session.shards.values():
        lease = other.lease
        if lease is not None and lease.lease_id == lease_id and other is not shard:
            return True
    return False
