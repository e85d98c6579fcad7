"""The rules of slabs and of leases, for one epoch.

Source: design, sections 3, 4 and 12.
"""

from snapd.core import records as r
from snapd.core.slab import Extent
from snapd.forensics import rules
from snapd.forensics.epochstate import NS_PER_MS, EpochState, K
from snapd.forensics.memory import Attempt, Lease
from snapd.forensics.shards import LIVE, QUARANTINED, Shard
from snapd.forensics.violations import Where


class SlabProof(EpochState):
    """Takes the lines about bytes and readers."""

    # --- slabs ---------------------------------------------------------------------------------

    def allocated(self, record: r.SlabAllocated, where: Where) -> None:
        """Extents are live: nobody else may have them, and every rank gets the same."""
        self._findings.slabs_allocated += 1
        attempt = self.open.get(record.slab_handle)
        if attempt is None:
            if not self.stranger(record, where):
                return
            attempt = self.adopt(record, rules.RESERVED, where)
            attempt.created_ns = attempt.since_ns = record.at_ns
        elif not attempt.is_reported and (attempt.state, attempt.since_ns) != (rules.RESERVED, record.at_ns):
            message = f"a slab was allocated while it was {attempt.state}, not when it began"
            self.report(K.RANKS_DIFFER, record, message, attempt.begun, where)
            attempt.is_reported = True
        self._check_session(attempt, record, where)
        first = next(iter(attempt.shards.values()), None)
        if record.rank in attempt.shards:
            message = f"a second slab of rank {record.rank}"
            self.report(K.RANKS_DIFFER, record, message, attempt.shards[record.rank].allocated, where)
            return
        if first is not None and first.bytes != record.bytes:
            message = f"rank {record.rank} got {record.bytes} bytes, and rank {first.rank} {first.bytes}"
            self.report(K.RANKS_DIFFER, record, message, first.allocated, where)
        shard = Shard(record.slab_handle, record.rank, record.bytes, record.extents)
        shard.allocated = where
        attempt.shards[record.rank] = shard
        attempt.allocated_bytes += record.bytes
        self._place(shard, record, where)

    def _place(self, shard: Shard, record: r.SlabAllocated | r.SlabQuarantined, where: Where) -> None:
        """Enter a shard in its arena's map."""
        arena = self.arena(record.rank, record, where)
        outside = arena.misplaced(record.extents)
        if outside is not None:
            message = (
                f"extent {_text(outside)} does not fit arena {record.rank} of {arena.capacity_bytes} bytes, "
                f"aligned to {arena.alignment_bytes}"
            )
            self.report(K.EXTENT_OUTSIDE_ARENA, record, message, self.started, where)
        held_bytes = sum([extent.size_bytes for extent in record.extents])
        if not 0 < record.bytes <= held_bytes:
            message = f"{record.bytes} bytes of payload in extents of {held_bytes} bytes"
            self.report(K.ACCOUNTING, record, message, where)
        overlap = arena.put(shard)
        if overlap is None:
            return
        extent, other = overlap
        if other.use == QUARANTINED:
            kind, use, since = K.REUSE_BEFORE_RELEASE, "was in quarantine", other.quarantined
        else:
            kind, use, since = K.OVERLAPPING_EXTENTS, "was live", other.allocated
        message = (
            f"extent {_text(extent)} of arena {record.rank} was handed out while what attempt "
            f"{other.handle} had there {use}"
        )
        self.report(kind, record, message, since, where)

    def quarantine(self, record: r.SlabQuarantined, where: Where) -> None:
        """Nobody owns the extents any more, and nobody may have them yet."""
        self._findings.slabs_quarantined += 1
        attempt = self.open.get(record.slab_handle)
        if attempt is None:
            if not self.stranger(record, where):
                return
            shard = None
        else:
            self._check_session(attempt, record, where)
            shard = attempt.shards.get(record.rank)
        if shard is None:
            if attempt is not None and attempt.is_whole:
                message = f"it has no slab of rank {record.rank} that could be quarantined"
                self.report(K.ACCOUNTING, record, message, attempt.begun, where)
                return
            # From here on these bytes are known to be taken.
            shard = Shard(record.slab_handle, record.rank, record.bytes, record.extents)
            self._place(shard, record, where)
        elif shard.use != LIVE:
            message = f"its slab of rank {record.rank} was {shard.use}, and is quarantined"
            self.report(K.ACCOUNTING, record, message, shard.quarantined or shard.allocated, where)
            return
        else:
            self._check_extents(shard, record, where)
        if attempt is not None:
            wrong = rules.why_quarantine_is_wrong(record.why, attempt.state, attempt.reason)
            if wrong:
                self.report(K.WRONG_QUARANTINE, record, wrong, attempt.entered, where)
            else:
                self._check_until(shard, record, where, is_whole=attempt.is_whole)
        self.maps[record.rank].quarantine(shard)
        shard.why, shard.until_ns, shard.since_ns = record.why, record.until_ns, record.at_ns
        shard.quarantined = where
        self.quarantined[record.slab_handle, record.rank] = shard
        self._overdue.add(shard)

    def _check_until(self, shard: Shard, record: r.SlabQuarantined, where: Where, *, is_whole: bool) -> None:
        """A reader's quarantine lasts until its lease is over; another has a time of its own, at least."""
        if record.why != "leased":
            self._check_time(shard, record, where, is_whole=is_whole)
        elif is_whole and (shard.lease_ended_ns, shard.lease_until_ns) != (record.at_ns, record.until_ns):
            message = f"rank {record.rank} had no lease until {record.until_ns} ns that ended now"
            self.report(K.WRONG_QUARANTINE, record, message, shard.allocated, where)

    def _check_time(self, shard: Shard, record: r.SlabQuarantined, where: Where, *, is_whole: bool) -> None:
        """The time is that of the settings; longer only where somebody reads for longer."""
        told_ns = record.until_ns - record.at_ns
        if told_ns <= 0:
            message = f"the quarantine of rank {record.rank} is over when it begins"
            self.report(K.WRONG_QUARANTINE, record, message, where)
            return
        if self.start is None or not self.start.quarantine_ms:
            return  # A log of a version that did not say it.
        wanted_ns = self.start.quarantine_ms * NS_PER_MS
        is_read = record.why == "undrained" and shard.lease_ended_ns == record.at_ns
        may_be_longer = not is_whole or (is_read and told_ns == shard.lease_until_ns - record.at_ns)
        if told_ns < wanted_ns or (told_ns > wanted_ns and not may_be_longer):
            message = (
                f"the quarantine of rank {record.rank} is to last {told_ns / NS_PER_MS} ms, and "
                f"daemon.started says {self.start.quarantine_ms} ms"
            )
            self.report(K.WRONG_QUARANTINE, record, message, self.started, where)

    def release(self, record: r.SlabReleased, where: Where) -> None:
        """The extents are free: something must show that nobody can touch them any more."""
        self._findings.slabs_released += 1
        key = (record.slab_handle, record.rank)
        attempt = self.open.get(record.slab_handle)
        shard = self.quarantined.pop(key, None)
        if attempt is not None:
            shard = attempt.shards.get(record.rank, shard)
            self._check_session(attempt, record, where)
        if shard is None:
            if self.is_complete or (attempt is not None and attempt.is_whole):
                message = f"it holds nothing in arena {record.rank} that could be released"
                lines = (attempt.begun if attempt else self.ended.where(record.slab_handle), where)
                self.report(K.ACCOUNTING, record, message, *lines)
            else:
                self._findings.unproved_lines += 1
            return
        if shard.use not in (LIVE, QUARANTINED):
            message = f"its bytes in arena {record.rank} are free already"
            self.report(K.ACCOUNTING, record, message, shard.allocated, where)
            return
        self._check_extents(shard, record, where)
        if shard.use == QUARANTINED:
            self._check_quarantined(shard, record, where)
        elif attempt is not None:
            self._check_live(attempt, shard, record, where)
        self.maps[record.rank].free(shard)

    def _check_quarantined(self, shard: Shard, record: r.SlabReleased, where: Where) -> None:
        """What was quarantined is freed by a proof, or when its time has passed."""
        why = record.why
        wrong = ""
        if record.was != QUARANTINED:
            wrong = f"its bytes in arena {record.rank} were in quarantine, and were released as {record.was}"
        elif why == "time" and rules.ENDS_IN_TIME.get(shard.why) == why:
            if record.at_ns < shard.until_ns:
                wrong = (
                    f"what it had in arena {record.rank} left the quarantine before its time, at "
                    f"{record.at_ns} ns and not at {shard.until_ns} ns"
                )
        elif why not in rules.ENDS_EARLY.get(shard.why, ()):
            wrong = f"{why} does not end the quarantine of what is {shard.why} in arena {record.rank}"
        if wrong:
            self.report(K.RELEASE_WITHOUT_PROOF, record, wrong, shard.quarantined, where)
        elif record.slab_handle in self.open and not self.open[record.slab_handle].is_reported:
            message = f"arena {record.rank} was released from quarantine before the outcome"
            self.report(K.MISSING_OUTCOME, record, message, shard.quarantined, where)
        if not self.is_time(record.duration_ms, shard.since_ns, record.at_ns):
            message = f"arena {record.rank} was not in quarantine for {record.duration_ms} ms"
            self.report(K.ACCOUNTING, record, message, shard.quarantined, where)

    def _check_live(self, attempt: Attempt, shard: Shard, record: r.SlabReleased, where: Where) -> None:
        """What was live is freed when nothing can land any more."""
        wrong = rules.why_live_release_is_wrong(
            record.why, attempt.state, attempt.reason, was_started=attempt.was_started
        )
        if record.was != LIVE:
            wrong = f"its bytes in arena {record.rank} were live, and were released as {record.was}"
        if wrong:
            self.report(K.RELEASE_WITHOUT_PROOF, record, wrong, attempt.entered, where)
        shard.why = record.why
        if not self.is_time(record.duration_ms, attempt.created_ns, record.at_ns):
            message = f"arena {record.rank} was not live for {record.duration_ms} ms"
            self.report(K.ACCOUNTING, record, message, shard.allocated, where)

    def _check_extents(self, shard: Shard, record: r.SlabQuarantined | r.SlabReleased, where: Where) -> None:
        """All of a shard moves at once."""
        if shard.bytes != record.bytes or not shard.has_extents(record.extents):
            message = (
                f"{record.__struct_config__.tag} names other bytes of arena {record.rank} than it was given: "
                f"{len(record.extents)} extents, {record.bytes} bytes of payload"
            )
            self.report(K.ACCOUNTING, record, message, shard.allocated or shard.quarantined, where)

    def _check_session(
        self,
        attempt: Attempt,
        record: r.SlabAllocated | r.SlabQuarantined | r.SlabReleased | r.LeaseGranted | r.LeaseEnded,
        where: Where,
    ) -> None:
        if record.session_id != attempt.session_id:
            message = f"the attempt is one of session {attempt.session_id}"
            self.report(K.ATTEMPT_CHANGED, record, message, attempt.begun, where)

    # --- leases --------------------------------------------------------------------------------

    def grant(self, record: r.LeaseGranted, where: Where) -> None:
        """A rank may read: only what is READY, and only it."""
        self._findings.leases += 1
        attempt = self.open.get(record.slab_handle)
        if attempt is None:
            if not self.stranger(record, where):
                return
            attempt = self.adopt(record, rules.READY, where)
        self._check_session(attempt, record, where)
        wrong: str = ""
        other = attempt.entered
        if attempt.state != rules.READY:
            wrong = f"rank {record.rank} was given a lease while it was {attempt.state}"
        elif attempt.is_whole and record.rank not in attempt.shards:
            wrong = f"rank {record.rank} was given a lease and has no slab"
        elif record.lease_id <= self._last_lease_id:
            wrong = f"lease {record.lease_id} was granted after lease {self._last_lease_id}"
        elif record.rank in attempt.leases:
            wrong = f"rank {record.rank} was given a second lease"
            other = attempt.leases[record.rank].granted
        elif record.round < attempt.round:
            wrong = f"round {record.round} began after round {attempt.round}"
        if wrong:
            self.report(K.WRONG_LEASE, record, wrong, other, where)
        if record.until_ns <= record.at_ns:
            self.report(K.LEASE_PAST_END, record, f"lease {record.lease_id} is over when it begins", where)
        lease = Lease(attempt, record.rank, record.lease_id, record.round, where)
        lease.granted_ns, lease.until_ns = record.at_ns, record.until_ns
        attempt.round = max(attempt.round, record.round)
        attempt.leases[record.rank] = lease
        self.leases[record.lease_id] = lease
        self._last_lease_id = max(self._last_lease_id, record.lease_id)
        self._lease_id_floor = min(self._lease_id_floor, record.lease_id)
        self._overdue.add(lease)

    def end_lease(self, record: r.LeaseEnded, where: Where) -> None:
        """A rank reads no more, or must take it that the bytes are gone."""
        lease = self.leases.pop(record.lease_id, None)
        attempt = self.open.get(record.slab_handle)
        if attempt is not None:
            self._check_session(attempt, record, where)
        if lease is None:
            if record.lease_id >= self._lease_id_floor:
                message = f"lease {record.lease_id} ended and was not held"
                self.report(K.WRONG_LEASE, record, message, attempt.entered if attempt else None, where)
            else:
                self._findings.unproved_lines += 1
            return
        lease.is_over = True
        if lease.attempt.leases.get(lease.rank) is lease:
            del lease.attempt.leases[lease.rank]
        self._check_end(lease, record, where)
        if record.ok:
            self._note_ok(lease, where)
        shard = lease.attempt.shards.get(lease.rank)
        if shard is not None:
            shard.lease_ended_ns, shard.lease_until_ns = record.at_ns, lease.until_ns

    def _check_end(self, lease: Lease, record: r.LeaseEnded, where: Where) -> None:
        wrong = ""
        if (lease.handle, lease.rank) != (record.slab_handle, record.rank):
            wrong = f"lease {record.lease_id} is one of attempt {lease.handle}, rank {lease.rank}"
        elif record.reason not in rules.LEASE_ENDS:
            wrong = f"{record.reason} must wait for the reader of rank {record.rank}"
        elif record.ok != (record.reason == rules.OK):
            wrong = f"the lease of rank {record.rank} has ok {record.ok} and reason {record.reason}"
        if wrong:
            self.report(K.WRONG_LEASE, record, wrong, lease.granted, where)
        is_over = record.at_ns >= lease.until_ns
        if is_over and record.reason not in rules.ENDS_WITHOUT_VOTE:
            message = f"a vote of rank {record.rank} counted, {record.reason}, after its lease was over"
            self.report(K.LEASE_PAST_END, record, message, lease.granted, where)
        if not is_over and record.reason == "lease-expired":
            message = f"the lease of rank {record.rank} expired before its deadline"
            self.report(K.WRONG_LEASE, record, message, lease.granted, where)
        if not self.is_time(record.duration_ms, lease.granted_ns, record.at_ns):
            message = f"the lease of rank {record.rank} did not last {record.duration_ms} ms"
            self.report(K.ACCOUNTING, record, message, lease.granted, where)

    def _note_ok(self, lease: Lease, where: Where) -> None:
        """A rank is told to commit; then every rank is, now and in the same round."""
        attempt = lease.attempt
        if attempt.ok_ranks and attempt.ok_round != lease.round:
            message = (
                f"rank {lease.rank} was told to commit in round {lease.round}, another in {attempt.ok_round}"
            )
            self.report(K.RANKS_DIFFER, attempt, message, attempt.ok, where)
        attempt.ok_ranks += (lease.rank,)
        attempt.ok_round = lease.round
        attempt.ok = where
        self.follow(attempt)


def _text(extent: Extent) -> str:
    return f"[{extent.offset_bytes}, {extent.size_bytes}]"
