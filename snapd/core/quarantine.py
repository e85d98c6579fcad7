"""Bytes that nobody owns and nobody may reuse yet: put there, heard about, released.

A timeout leads here and never to free; only a proof or the time leads out.

Source: design, sections 2 and 3.
"""

import msgspec

from snapd.core import events as e
from snapd.core import records as r
from snapd.core.attempt import Lease, Session
from snapd.core.books import Books
from snapd.core.events import State
from snapd.core.extent import Extent
from snapd.core.fsm import HEARD_BY_QUARANTINE
from snapd.core.session import Quarantined
from snapd.units import NS_PER_MS, ms_to_ns


class Quarantine:
    """Moves extents between live, quarantined and free, and records it."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def free(self, session: Session, rank: int, extents: tuple[Extent, ...], why: r.ReleaseWhy) -> None:
        """Give live extents back at once: no write and no read can touch them any more."""
        self._books.buffer.free(rank, extents)
        out = self._books.outbox
        out.record(
            r.SlabReleased(
                at_ns=out.now_ns,
                cause_id=out.cause_id,
                session_id=session.session_id,
                slab_handle=session.handle,
                rank=rank,
                bytes=session.shard_bytes,
                extents=extents,
                was="live",
                why=why,
                duration_ms=(out.now_ns - session.created_ns) / NS_PER_MS,
            )
        )

    def hold(
        self,
        session: Session,
        rank: int,
        extents: tuple[Extent, ...],
        why: r.QuarantineWhy,
        lease: Lease | None = None,
    ) -> None:
        """Keep live extents back for ``quarantine_ms``, until *lease* is over, or for the longer of both."""
        out = self._books.outbox
        until_ns = lease.deadline_ns if lease else 0
        if why != "leased":
            until_ns = max(until_ns, out.now_ns + ms_to_ns(self._books.settings.quarantine_ms))
        item = Quarantined(
            session_id=session.session_id,
            bytes=session.shard_bytes,
            extents=extents,
            since_ns=out.now_ns,
            until_ns=until_ns,
            why=why,
            lease_id=lease.lease_id if lease else 0,
            writer_id=session.writer_id,
            state=session.state,
        )
        self._books.buffer.put_in_quarantine(session.handle, rank, item)
        out.record(
            r.SlabQuarantined(
                at_ns=out.now_ns,
                cause_id=out.cause_id,
                session_id=session.session_id,
                slab_handle=session.handle,
                rank=rank,
                bytes=session.shard_bytes,
                extents=extents,
                until_ns=until_ns,
                why=why,
            )
        )
        self._arm(session.handle, rank, until_ns)

    def hear(self, event: e.SessionEvent) -> bool:
        """Take a drain proof or the end of a read; return whether it was about anything here.

        What may be written and is read needs both. Corrupt bytes hear nothing: their writer had said that
        it was done, and somebody wrote there.
        """
        by_rank = self._books.buffer.quarantine.get(event.slab_handle)
        if by_rank is None or type(event) not in HEARD_BY_QUARANTINE:
            return False
        if isinstance(event, e.VoteCast):
            return self._hear_vote(event, by_rank)
        if not (isinstance(event, e.WriterDrained) or getattr(event, "drained", False)):
            return False
        why: r.ReleaseWhy = "writer-gone" if isinstance(event, e.WriterExited) else "drained"
        only = getattr(event, "rank", None)
        heard = [rank for rank, item in by_rank.items() if item.why == "undrained" and only in (None, rank)]
        for rank in heard:
            item = by_rank[rank]
            if item.lease_id:
                by_rank[rank] = msgspec.structs.replace(item, proof=item.proof or why)
            else:
                self.release(event.slab_handle, rank, why)
        return bool(heard)

    def _hear_vote(self, event: e.VoteCast, by_rank: dict[int, Quarantined]) -> bool:
        """A vote says that this reader is done; it says nothing about writers."""
        item = by_rank.get(event.rank)
        if item is None or not item.lease_id or item.lease_id != event.lease_id:
            return False
        if item.why == "leased":
            self.release(event.slab_handle, event.rank, "lease-ended")
        elif item.proof is not None:
            self.release(event.slab_handle, event.rank, item.proof)
        else:
            by_rank[event.rank] = msgspec.structs.replace(item, lease_id=0)
        return True

    def state_of(self, handle: int) -> State | None:
        """Return how an attempt ended of which bytes are kept."""
        items = self._books.buffer.quarantine.get(handle, {}).values()
        return next((item.state for item in items), None)

    def time_out(self, event: e.QuarantineTimedOut) -> None:
        """Release what has been kept long enough; a timer that fired early is armed again."""
        item = self._books.buffer.quarantine.get(event.slab_handle, {}).get(event.rank)
        if item is None or item.until_ns != event.deadline_ns:
            return
        if self._books.outbox.now_ns < item.until_ns:
            self._arm(event.slab_handle, event.rank, item.until_ns)
            return
        self.release(event.slab_handle, event.rank, "lease-ended" if item.why == "leased" else "time")

    def release(self, handle: int, rank: int, why: r.ReleaseWhy) -> None:
        """Give quarantined extents back for reuse."""
        item = self._books.buffer.release(handle, rank)
        self._books.outbox.cancel((e.TimerKind.QUARANTINE, handle, rank))
        self._record_release(handle, rank, item, why)
        if handle not in self._books.buffer.quarantine:
            self._books.forget_writer(item.writer_id, handle)

    def _arm(self, handle: int, rank: int, until_ns: int) -> None:
        event = e.QuarantineTimedOut(at_ns=0, slab_handle=handle, rank=rank, deadline_ns=until_ns)
        self._books.outbox.arm((e.TimerKind.QUARANTINE, handle, rank), event)

    def _record_release(self, handle: int, rank: int, item: Quarantined, why: r.ReleaseWhy) -> None:
        out = self._books.outbox
        out.record(
            r.SlabReleased(
                at_ns=out.now_ns,
                cause_id=out.cause_id,
                session_id=item.session_id,
                slab_handle=handle,
                rank=rank,
                bytes=item.bytes,
                extents=item.extents,
                was="quarantined",
                why=why,
                duration_ms=(out.now_ns - item.since_ns) / NS_PER_MS,
            )
        )
