"""Drives a machine as a shell would, with a clock that moves only when told, and checks every step."""

from collections.abc import Callable, Sequence
from types import GetSetDescriptorType
from typing import Any, TypeVar

from log_checker import LogChecker

from snapd.core import events as e
from snapd.core import records as r
from snapd.core.events import State
from snapd.core.eviction import VictimOrder
from snapd.core.machine import Machine
from snapd.core.session import Session, Settings
from snapd.core.slab import SlabAllocator
from snapd.errors import Reason
from snapd.layout import Layout, Namespace, fingerprint
from snapd.units import NS_PER_MS

UNIT = 256
T = TypeVar("T")
X = TypeVar("X", bound=r.Record)


def layout_of(
    planes: int = 2, *, model: str = "m", page_size_tokens: int = 4, stride_bytes: int = 16
) -> Layout:
    """Return a layout whose planes take one unit each for up to 16 tokens."""
    return Layout(
        (stride_bytes,) * planes, page_size_tokens=page_size_tokens, namespace=Namespace(model=model)
    )


TWO_PLANES = layout_of()


class Driver:
    """One machine, its clock, its timers, and all that it ever said.

    Attributes:
        replies: every answer, by cause id.
        records: the log.
        tells: what connections were told.
        timers: what is armed, by key.
    """

    def __init__(
        self,
        ranks: int = 1,
        *,
        units: int = 8,
        layouts: Sequence[Layout] = (TWO_PLANES,),
        piece_units: int = 0,
        victims: VictimOrder | None = None,
        **settings: Any,
    ) -> None:
        self.ranks = tuple(range(ranks))
        self.settings = Settings(**settings)
        arenas = {rank: SlabAllocator(units * UNIT, piece_bytes=piece_units * UNIT) for rank in self.ranks}
        self.machine = Machine(self.settings, arenas, victims=victims)
        self.log = LogChecker(dict.fromkeys(self.ranks, units * UNIT), UNIT)
        self.now_ns = 1_000_000_000
        self.cause_id = 0
        self.handle = 1_000
        self.replies: dict[int, list[e.Result]] = {}
        self.records: list[r.Record] = []
        self.tells: list[e.EndTold] = []
        self.timers: dict[tuple[e.TimerKind, int, int], e.TimerEvent | e.QuarantineTimedOut] = {}
        self.layout = layouts[0] if layouts else TWO_PLANES
        self.last: list[e.Instruction] = []
        for layout in layouts:
            for rank in self.ranks:
                self.post(e.LayoutDeclared, rank=rank, layout=layout)

    # --- events

    def handle_event(self, event: e.Event) -> list[e.Instruction]:
        """Post an event as it is, and check everything."""
        instructions = self.machine.handle(event)
        self.last = list(instructions)
        for instruction in instructions:
            match instruction:
                case e.Replied():
                    assert instruction.cause_id, "an answer goes to a request"
                    self.replies.setdefault(instruction.cause_id, []).append(instruction.result)
                    assert len(self.replies[instruction.cause_id]) == 1, "one answer a request"
                case e.EndTold():
                    assert instruction.conn_id
                    self.tells.append(instruction)
                case e.TimerArmed():
                    assert instruction.event.deadline_ns
                    self.timers[instruction.key] = instruction.event
                case e.TimerCancelled():
                    self.timers.pop(instruction.key, None)
                case e.RecordWritten():
                    assert instruction.record.cause_id == event.cause_id, "the cause runs through"
                    assert instruction.record.at_ns == event.at_ns
                    self.records.append(instruction.record)
                    self.log.feed(instruction.record)
        self.machine.validate()
        open_sessions = self.machine.books.open.values()
        assert self.machine.num_leased == sum(session.is_leased for session in open_sessions)
        self.log.compare(self.machine)
        self._check_timers()
        return self.last

    def post(self, kind: type[e.Event], **fields: Any) -> Any:
        """Post a request of its own cause, and return the answer; None while there is none."""
        self.cause_id += 1
        self.now_ns += 1
        self.handle_event(kind(at_ns=self.now_ns, cause_id=self.cause_id, **fields))
        return self.answer(self.cause_id)

    def tell(self, kind: type[e.Event], **fields: Any) -> list[e.Instruction]:
        """Post an event that nobody asked for."""
        self.now_ns += 1
        return self.handle_event(kind(at_ns=self.now_ns, **fields))

    def answer(self, cause_id: int) -> Any:
        """Return the answer to a request, or None."""
        return self.replies.get(cause_id, [None])[0]

    def _check_timers(self) -> None:
        """Every deadline that an attempt or a quarantine has is armed, and no other."""
        books = self.machine.books
        wanted = {
            (e.TimerKind.STATE, handle, 0): session.deadline_ns
            for handle, session in books.open.items()
            # A READY snapshot that has expired waits for its readers, and they have timers of their own.
            if session.abort_wanted is None or session.deadline_ns > self.now_ns
        }
        for handle, session in books.open.items():
            for rank, shard in session.shards.items():
                if shard.lease:
                    wanted[(e.TimerKind.LEASE, handle, rank)] = shard.lease.deadline_ns
        for handle, by_rank in books.buffer.quarantine.items():
            for rank, item in by_rank.items():
                wanted[(e.TimerKind.QUARANTINE, handle, rank)] = item.until_ns
        assert {key: timer.deadline_ns for key, timer in self.timers.items()} == wanted

    def fire(self, key: tuple[e.TimerKind, int, int]) -> None:
        """Fire an armed timer at the present time, be it due or not."""
        timer = self.timers.pop(key)
        fields = {name: getattr(timer, name) for name in timer.__struct_fields__}
        self.handle_event(type(timer)(**{**fields, "at_ns": self.now_ns}))

    def advance(self, duration_ms: int) -> None:
        """Let time pass; timers fire at their deadlines, in order."""
        target_ns = self.now_ns + duration_ms * NS_PER_MS
        while True:
            due = min(self.timers.items(), key=lambda item: item[1].deadline_ns, default=None)
            if due is None or due[1].deadline_ns > target_ns:
                break
            self.now_ns = max(self.now_ns, due[1].deadline_ns)
            self.fire(due[0])
        self.now_ns = target_ns

    def jump(self, duration_ms: int) -> None:
        """Let time pass without any timer."""
        self.now_ns += duration_ms * NS_PER_MS

    def close(self) -> None:
        """Stop: every attempt has ended once, and after the quarantine every byte is free."""
        self.post(e.StopAsked)
        self.advance(max(self.settings.quarantine_ms, self.settings.lease_ms))
        assert not self.timers
        self.log.end()
        self.log.compare(self.machine)
        for view in self.machine.statistics().arenas:
            assert view.free_bytes == view.capacity_bytes

    # --- shortcuts

    def prepare(self, session_id: str = "s", num_tokens: int = 16, **fields: Any) -> Any:
        """Ask for a slab under a fresh handle, kept in ``handle``."""
        self.handle += 1
        fields.setdefault("layout_fingerprint", fingerprint(self.layout))
        fields.setdefault("slab_handle", self.handle)
        return self.post(e.PrepareAsked, session_id=session_id, num_tokens=num_tokens, **fields)

    def reserved(self, session_id: str = "s", num_tokens: int = 16, **fields: Any) -> int:
        """Return the handle of a new RESERVED attempt."""
        result = self.prepare(session_id, num_tokens, **fields)
        assert isinstance(result, e.Granted), result
        return result.slab_handle

    def transferring(self, session_id: str = "s", num_tokens: int = 16, **fields: Any) -> int:
        """Return the handle of a new TRANSFERRING attempt."""
        handle = self.reserved(session_id, num_tokens, **fields)
        self.start(handle)
        return handle

    def ready(self, session_id: str = "s", num_tokens: int = 16, **fields: Any) -> int:
        """Return the handle of a new READY attempt."""
        handle = self.transferring(session_id, num_tokens, **fields)
        for rank in self.session(handle).shards:
            self.commit(handle, rank)
        assert self.state(handle) is State.READY
        return handle

    def ingested(self, session_id: str = "s", num_tokens: int = 16, **fields: Any) -> int:
        """Return the handle of a new INGESTED attempt."""
        handle = self.ready(session_id, num_tokens, **fields)
        lease_ids = {rank: self.lease(handle, rank).lease_id for rank in self.session(handle).shards}
        for rank, lease_id in lease_ids.items():
            self.vote(handle, rank, lease_id)
        assert self.state(handle) is State.INGESTED
        return handle

    def start(self, handle: int, **fields: Any) -> Any:
        return self.post(e.TransferStarted, slab_handle=handle, **fields)

    def commit(self, handle: int, rank: int = 0, **fields: Any) -> Any:
        """Commit a rank with the right figures, or with others."""
        session = self.session(handle)
        fields.setdefault("num_tokens", session.num_tokens)
        fields.setdefault("num_bytes", session.num_tokens * session.layout.token_bytes)
        fields.setdefault("checksums", ((handle, rank),) * session.layout.num_planes)
        return self.post(e.RankCommitted, slab_handle=handle, rank=rank, **fields)

    def fail(self, handle: int, **fields: Any) -> Any:
        return self.post(e.TransferFailed, slab_handle=handle, **fields)

    def abort(self, handle: int, **fields: Any) -> Any:
        return self.post(e.AbortAsked, slab_handle=handle, **fields)

    def drained(self, handle: int, **fields: Any) -> Any:
        return self.post(e.WriterDrained, slab_handle=handle, **fields)

    def lease(self, handle: int, rank: int = 0, **fields: Any) -> Any:
        session = self.machine.books.find(handle)
        fields.setdefault("layout_fingerprint", session.key[0] if session else fingerprint(self.layout))
        return self.post(e.LeaseAsked, slab_handle=handle, rank=rank, **fields)

    def vote(self, handle: int, rank: int, lease_id: int, ok: bool = True, **fields: Any) -> Any:
        return self.post(e.VoteCast, slab_handle=handle, rank=rank, lease_id=lease_id, ok=ok, **fields)

    def vote_no(self, handle: int, rank: int, lease_id: int, reason: Reason, *, keep: bool = False) -> Any:
        return self.vote(handle, rank, lease_id, False, reason=reason, keep=keep)

    def look_up(self, session_id: str = "", **fields: Any) -> Any:
        fields.setdefault("layout_fingerprint", fingerprint(self.layout))
        return self.post(e.LookupAsked, session_id=session_id, **fields)

    def session(self, handle: int) -> Session:
        """Return an attempt, open or remembered."""
        session = self.machine.books.find(handle)
        assert session is not None
        return session

    def state(self, handle: int) -> State:
        return self.session(handle).state

    def reason(self, handle: int) -> Reason:
        return self.session(handle).reason

    def hint(self, session_id: str = "s", layout: Layout | None = None) -> int:
        """Return what P is believed to hold, by asking."""
        found = self.look_up(session_id, layout_fingerprint=fingerprint(layout or self.layout))
        assert isinstance(found, e.Found)
        return found.resident_hint_tokens

    def free_units(self, rank: int = 0) -> int:
        return self.machine.statistics().arenas[rank].free_bytes // UNIT

    def live_units(self, rank: int = 0) -> int:
        return self.machine.statistics().arenas[rank].live_bytes // UNIT

    def quarantined_units(self, rank: int = 0) -> int:
        return self.machine.statistics().arenas[rank].quarantined_bytes // UNIT

    def logged(self, kind: type[X], **fields: Any) -> list[X]:
        """Return the records of a kind whose fields are these."""
        return [
            record
            for record in self.records
            if isinstance(record, kind)
            and all(getattr(record, name) == value for name, value in fields.items())
        ]

    def said_nothing(self) -> bool:
        """The last event led to no record, no timer and no telling; at most an answer."""
        return all(isinstance(instruction, e.Replied) for instruction in self.last)


def refused(result: object, reason: Reason) -> bool:
    """Return whether *result* is a refusal for *reason*; it says why in words."""
    return isinstance(result, e.Refused) and result.reason is reason and bool(result.detail)


def _fields(thing: object) -> dict[str, object]:
    """Return what an object holds; compiled ones have no dict."""
    if hasattr(thing, "__dict__"):
        return vars(thing)
    names = [
        name for name in dir(thing) if isinstance(getattr(type(thing), name, None), GetSetDescriptorType)
    ]
    return {name: getattr(thing, name) for name in names if name != "__dict__"}


def fingerprint_of(machine: Machine) -> tuple[object, ...]:
    """Return all that a machine remembers, as text: equal if nothing changed.

    Left out are the two counters of what had no effect, and the answers of the last event.
    """
    books, buffer, directory = machine.books, machine.books.buffer, machine.books.directory
    return (
        [repr(session) for session in books.open.values()],
        [repr(session) for session in books.ended.values()],
        [(rank, repr(list(a.live())), repr(list(a.holes()))) for rank, a in buffer.arenas.items()],
        repr(buffer.quarantine),
        repr(buffer._quarantined_bytes),
        list(books.victims.victims()),
        repr(_fields(books.victims)),
        sorted(books.undrained),
        [books.victims.evictable_bytes(rank) for rank in buffer.ranks],
        repr(directory.layouts),
        repr(directory._hints),
        repr((directory._writing, directory._ready, directory._by_page)),
        repr(sorted((writer_id, sorted(handles)) for writer_id, handles in books.handles_of_writer.items())),
        repr(sorted(books.outcomes.items())),
        (books.is_draining, books.attempts, books.bytes_committed, books.bytes_ingested),
        (machine._lives._last_lease_id, machine._lives.allowed),
    )


def unchanged(drive: Driver, act: Callable[[], T]) -> T:
    """Do something that must have no effect, and return its answer."""
    before = fingerprint_of(drive.machine)
    timers = dict(drive.timers)
    told = len(drive.tells)
    result = act()
    assert fingerprint_of(drive.machine) == before
    assert drive.said_nothing()
    assert (drive.timers, len(drive.tells)) == (timers, told)
    return result
