"""Holds what the core writes against the rules of the log, and the proof's books against the machine's own.

The rules are those of ``snapd.forensics.proof``, which uses nothing of the core but its records and extents.
"""

import msgspec

from snapd.core import records as r
from snapd.core.machine import Machine
from snapd.eventlog import Header, Line
from snapd.forensics.proof import Proof, Where

EPOCH = "core"
# Tests let hours pass without any timer.
NEVER_MS = 1 << 40


class LogChecker:
    """Takes records one by one and raises ``AssertionError`` at the first that cannot be true."""

    def __init__(self, capacity_bytes: dict[int, int], alignment_bytes: int) -> None:
        self.proof = Proof(overdue_grace_ms=NEVER_MS)
        self.num_records = 0
        self._seq = 0
        arenas = tuple(
            r.ArenaInfo(rank, "cpu", size_bytes, alignment_bytes)
            for rank, size_bytes in capacity_bytes.items()
        )
        start = r.DaemonStarted(at_ns=0, version="", protocol=1, pid=1, transport="shm", arenas=arenas)
        self._feed(start)

    def feed(self, record: r.Record) -> None:
        """Take the next record."""
        encoded = msgspec.json.encode(record)
        assert msgspec.json.decode(encoded, type=r.Record) == record, "a record survives the log"
        written = not isinstance(record, r.DaemonStarted | r.DaemonStopped | r.EventsDropped)
        assert written, f"the core does not write {record}"
        self.num_records += 1
        self._feed(record)

    def _feed(self, record: r.Record) -> None:
        self._seq += 1
        header = Header(
            ts=0.0, at_ns=record.at_ns, seq=self._seq, epoch=EPOCH, event=str(record.__struct_config__.tag)
        )
        self.proof.feed(Line(header, record), Where("log", self._seq))
        assert not self.proof.violations, f"{record}: {self.proof.violations}"

    def compare(self, machine: Machine) -> None:
        """Hold the rebuilt maps and counts against the machine's own."""
        statistics, books, report = machine.statistics(), self.proof.books(), self.proof.finish()
        for view, arena in zip(statistics.arenas, books.arenas, strict=True):
            assert (view.rank, view.capacity_bytes) == (arena.rank, arena.capacity_bytes)
            assert view.free_bytes == arena.free_bytes
            assert view.live_bytes == arena.live_bytes
            assert view.quarantined_bytes == arena.quarantined_bytes
            assert view.free_bytes + view.live_bytes + view.quarantined_bytes == view.capacity_bytes
            assert books.extents[view.rank] == list(machine.books.buffer.arenas[view.rank].live())
        assert statistics.quarantined_shards == books.quarantined_shards
        assert statistics.outcomes_by_reason == report.outcomes
        assert (statistics.attempts, statistics.attempts_ok) == (books.attempts, books.attempts_ok)
        assert {handle: attempt.state for handle, attempt in books.open.items()} == {
            handle: str(session.state) for handle, session in machine.books.open.items()
        }
        assert statistics.open_sessions == len(books.open) == sum(statistics.sessions_by_state.values())
        leases = {
            shard.lease.lease_id: (handle, rank)
            for handle, session in machine.books.open.items()
            for rank, shard in session.shards.items()
            if shard.lease
        }
        assert leases == books.leases
        assert report.is_whole, "nothing was left unproved"

    def end(self) -> None:
        """Nothing is left: every attempt has ended, every lease too, and every byte is free."""
        books = self.proof.books()
        assert not books.open
        assert not books.leases
        assert not any(books.extents.values())
