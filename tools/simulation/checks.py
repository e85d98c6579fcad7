"""What is watched while a run goes on: after every event of the core, at every byte, and at the end.

``EpochChecks`` belongs to one life of the daemon. After every event it has the records proved, runs
``Machine.validate``, compares the books that the log alone gives with the core's, and, once the executor has
done its part, the timers with the deadlines.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from snapd.core import events as e
from snapd.core import records as r
from snapd.core.events import State
from snapd.core.machine import Machine
from snapd.core.slab import SlabAllocator
from snapd.errors import InvariantBroken
from snapd.eventlog import Header, Line
from snapd.executor import Executor
from snapd.forensics.proof import Proof, Where
from tools.simulation.bugs import Bugs
from tools.simulation.failure import Broken

# Released so, bytes may still be written to by who had them: nobody said or saw that he has stopped.
_UNPROVED: Final = frozenset({"time"})


class EpochChecks:
    """Watches one life of the daemon.

    Args:
        epoch: its id.
        started: the first record.
        grace_ms: how late a deadline may be seen to.

    Attributes:
        open: state of the attempts that are open, by handle.
        held: what a shard holds: extents by (handle, rank).
        released: why the bytes of a shard were given back, by (handle, rank).
        reasons: why attempts, refusals and leases ended.
        clock_jumps: of the daemon's clock.
        late_landings: writes that landed in bytes that had been given back because their time was over.
        num_events: that the core took.
        machine, executor, plan_look: set before the first event; the last plans ``look_at_timers``.
    """

    def __init__(self, epoch: str, started: r.DaemonStarted, grace_ms: int) -> None:
        self.epoch = epoch
        self.open: dict[int, str] = {}
        self.held: dict[tuple[int, int], int] = {}
        self.released: dict[tuple[int, int], str] = {}
        self.reasons: Counter[str] = Counter()
        self._outcomes: Counter[str] = Counter()
        self.clock_jumps = 0
        self.late_landings = 0
        self.machine: Machine
        self.executor: Executor
        self.plan_look: Callable[[], None]
        self._is_look_planned = False
        self._proof = Proof(overdue_grace_ms=grace_ms)
        self._seq = 0
        self.num_events = 0
        self._leases: dict[int, int] = {}
        self._ranks: dict[int, set[int]] = {}
        self._committed: dict[int, set[int]] = {}
        self._voted: dict[int, set[int]] = {}
        self._held_bytes: dict[int, int] = {arena.rank: 0 for arena in started.arenas}
        self._quarantined_shards = 0
        # What the former epoch left open is proved with the files.
        self._prove(r.DaemonStarted(
            at_ns=started.at_ns, version="", protocol=1, pid=1, transport="shm", arenas=started.arenas,
            quarantine_ms=started.quarantine_ms,
        ))  # fmt: skip

    # --- after every event ---------------------------------------------------------------------

    def after(self, event: e.Event, instructions: list[e.Instruction]) -> None:
        """Check what an event of the core has led to."""
        if type(event) is e.RankCommitted:
            self._committed.setdefault(event.slab_handle, set()).add(event.rank)
        elif type(event) is e.VoteCast and event.ok:
            self._voted.setdefault(event.slab_handle, set()).add(event.rank)
        for instruction in instructions:
            if type(instruction) is e.RecordWritten:
                record = instruction.record
                if record.at_ns != event.at_ns or record.cause_id != event.cause_id:
                    raise Broken("record", f"{record} does not belong to {event}")
                self._take(record)
        self.num_events += 1
        self._check_counters()
        self._cross_check()
        if not self._is_look_planned:
            # Timers are compared once the executor has done what it was told.
            self._is_look_planned = True
            self.plan_look()

    def _check_counters(self) -> None:
        books = self.machine.books
        if len(self.open) != len(books.open):
            raise Broken(
                "books", f"{len(self.open)} attempts are open by the log, {len(books.open)} in the core"
            )
        if books.buffer.num_quarantined != self._quarantined_shards:
            raise Broken("books", "the shards in quarantine are not those of the log")
        if len(self._leases) != self.machine.num_leased:
            raise Broken(
                "books",
                f"{len(self._leases)} attempts are leased by the log, {self.machine.num_leased} in the core",
            )
        for rank, arena in books.buffer.arenas.items():
            if arena.free_bytes + self._held_bytes[rank] != arena.capacity_bytes:
                raise Broken("books", f"arena {rank}: free + live + quarantined is not the capacity")
        if sum(books.num_by_state.values()) != len(books.open) + len(books.ended):
            raise Broken("books", "the number of attempts in each state is wrong")

    def _take(self, record: Any) -> None:
        """Take note of a record, and have it proved."""
        self._prove(record)
        match record:
            case r.SessionTransition():
                self.open[record.slab_handle] = record.to_state
                self._check_all_said(record)
            case r.SlabAllocated():
                self._ranks.setdefault(record.slab_handle, set()).add(record.rank)
                self.held[record.slab_handle, record.rank] = sum(x.size_bytes for x in record.extents)
                self._held_bytes[record.rank] += self.held[record.slab_handle, record.rank]
            case r.SlabQuarantined():
                self._quarantined_shards += 1
            case r.SlabReleased():
                self._quarantined_shards -= record.was == "quarantined"
                self._held_bytes[record.rank] -= self.held.pop((record.slab_handle, record.rank))
                self.released[record.slab_handle, record.rank] = record.why
            case r.LeaseGranted():
                self._leases[record.slab_handle] = self._leases.get(record.slab_handle, 0) + 1
            case r.LeaseEnded():
                self._leases[record.slab_handle] -= 1
                if not self._leases[record.slab_handle]:
                    del self._leases[record.slab_handle]
                if not record.ok:
                    self.reasons[record.reason] += 1
            case r.SyncOutcome():
                self.open.pop(record.slab_handle, None)
                for said in (self._ranks, self._committed, self._voted):
                    said.pop(record.slab_handle, None)
                self.reasons[record.reason] += 1
                self._outcomes[str(record.reason)] += 1
            case _:
                pass

    def _check_all_said(self, record: r.SessionTransition) -> None:
        """READY is what every rank has committed, INGESTED what every rank has voted for; drains hold."""
        if not record.from_state and self.machine.books.is_draining:
            raise Broken("draining", f"attempt {record.slab_handle} begins while the daemon drains")
        said = {State.READY: self._committed, State.INGESTED: self._voted}.get(State(record.to_state))
        if said is None:
            return
        missing = self._ranks[record.slab_handle] - said.get(record.slab_handle, set())
        if missing:
            message = (
                f"attempt {record.slab_handle} is {record.to_state}, and ranks {sorted(missing)} said nothing"
            )
            raise Broken("ranks-missing", message)

    def _prove(self, record: r.Record) -> None:
        self._seq += 1
        tag = str(record.__struct_config__.tag)
        header = Header(ts=0.0, at_ns=record.at_ns, seq=self._seq, epoch=self.epoch, event=tag)
        self._proof.feed(Line(header, record), Where(self.epoch, self._seq))
        if self._proof.violations:
            violation = self._proof.violations[0]
            raise Broken(f"proof/{violation.kind}", violation.message)

    def _cross_check(self) -> None:
        try:
            self.machine.validate()
        except InvariantBroken as error:
            raise Broken("validate", str(error)) from error
        self._compare_books()

    def _compare_books(self) -> None:
        """Hold the books that the log alone gives against the core's own."""
        statistics, books = self.machine.statistics(), self._proof.books()
        for view, arena in zip(statistics.arenas, books.arenas, strict=True):
            mine = (view.capacity_bytes, view.free_bytes, view.live_bytes, view.quarantined_bytes)
            told = (arena.capacity_bytes, arena.free_bytes, arena.live_bytes, arena.quarantined_bytes)
            if mine != told:
                raise Broken("books", f"arena {view.rank}: {mine} in the core, {told} by the log")
            if books.extents[view.rank] != list(self.machine.books.buffer.arenas[view.rank].live()):
                raise Broken("books", f"arena {view.rank}: other extents by the log than in the core")
        if statistics.quarantined_shards != books.quarantined_shards:
            raise Broken("books", "the shards in quarantine are not those of the log")
        if statistics.outcomes_by_reason != dict(sorted(self._outcomes.items())):
            raise Broken("books", "the core counts other outcomes than the log")
        if (statistics.attempts, statistics.attempts_ok) != (books.attempts, books.attempts_ok):
            raise Broken("books", "the core counts other attempts than the log")
        states = {handle: str(session.state) for handle, session in self.machine.books.open.items()}
        if {handle: attempt.state for handle, attempt in books.open.items()} != states:
            raise Broken("books", "the attempts that are open are not those of the log")
        leases = {
            shard.lease.lease_id: (handle, rank)
            for handle, session in self.machine.books.open.items()
            for rank, shard in session.shards.items()
            if shard.lease
        }
        if leases != books.leases:
            raise Broken("books", "the leases are not those of the log")

    def look_at_timers(self) -> None:
        """Every deadline that an attempt, a lease or a quarantine has is armed, and no other.

        Raises:
            Broken: one is not, or another is.
        """
        self._is_look_planned = False
        books = self.machine.books
        now_ns = books.outbox.now_ns
        wanted: dict[tuple[e.TimerKind, int, int], int] = {}
        for handle, session in books.open.items():
            # A READY snapshot that has expired waits for its readers, and they have timers of their own.
            if session.abort_wanted is None or session.deadline_ns > now_ns:
                wanted[e.TimerKind.STATE, handle, 0] = session.deadline_ns
            for rank, shard in session.shards.items():
                if shard.lease:
                    wanted[e.TimerKind.LEASE, handle, rank] = shard.lease.deadline_ns
        for handle, by_rank in books.buffer.quarantine.items():
            for rank, item in by_rank.items():
                wanted[e.TimerKind.QUARANTINE, handle, rank] = item.until_ns
        armed = {key: entry[0] for key, entry in self.executor._timers._armed.items()}
        if armed != wanted:
            odd = sorted(str(item) for item in armed.items() ^ wanted.items())
            raise Broken("timers", f"what is armed is not what is wanted: {', '.join(odd[:4])}")

    # --- bytes ---------------------------------------------------------------------------------

    def check_landing(self, handle: int, rank: int) -> None:
        """A write of an attempt lands: its bytes are its own still, or were given back for want of time only.

        Raises:
            Broken: somebody had said, or the daemon had seen, that no write could land any more.
        """
        if (handle, rank) in self.held:
            return
        why = self.released.get((handle, rank), "nothing")
        if why not in _UNPROVED:
            raise Broken(
                "write-after-free",
                f"a write of attempt {handle} lands in rank {rank}'s arena, freed as {why}",
            )
        self.late_landings += 1

    def check_reading(self, handle: int, rank: int) -> None:
        """A rank reads under a lease that is not over: the bytes must be the attempt's still.

        Raises:
            Broken: they were given back.
        """
        if (handle, rank) not in self.held and not self.clock_jumps:
            raise Broken(
                "read-after-free",
                f"rank {rank} reads attempt {handle} under a lease, and its bytes were freed",
            )

    # --- the end -------------------------------------------------------------------------------

    def at_rest(self) -> None:
        """Nothing happens any more: every attempt has ended, and every byte is free.

        Raises:
            Broken: something is left.
        """
        self._cross_check()
        self.look_at_timers()
        books = self.machine.books
        if books.open or books.buffer.quarantine or self._leases:
            raise Broken(
                "leak", f"at rest {list(books.open)} are open, {list(books.buffer.quarantine)} in quarantine"
            )
        if any(arena.free_bytes != arena.capacity_bytes for arena in books.buffer.arenas.values()):
            raise Broken("leak", "at rest not every byte is free")
        if self.executor.num_waiting or self.executor.num_timers:
            waiting, timers = self.executor.num_waiting, self.executor.num_timers
            raise Broken("leak", f"at rest {waiting} requests wait, {timers} timers are armed")
        if books.handles_of_writer:
            raise Broken("leak", "at rest a writer is still kept for attempts")


class CheckedMachine(Machine):
    """The core, with everything checked after every event."""

    checks: EpochChecks
    bugs: Bugs

    def handle(self, event: e.Event) -> list[e.Instruction]:
        """Take one event, as ever, and check what came of it.

        Raises:
            Broken: it is not as it must be, or a bug came up before and the daemon goes on.
        """
        bugs = self.bugs
        if bugs.raised:
            raise Broken("went-on", f"a bug has come up, and the core is given {event}")
        bugs.pass_by("event")
        instructions = super().handle(event)
        self.checks.after(event, instructions)
        bugs.pass_by("core")
        return instructions


def empty_arenas(sizes_bytes: dict[int, int], piece_bytes: int) -> dict[int, SlabAllocator]:
    """Return an empty allocator a rank."""
    return {rank: SlabAllocator(size, piece_bytes=piece_bytes) for rank, size in sizes_bytes.items()}
