"""Everything that the core remembers, and the instructions that it is about to give."""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Final

from snapd.core import events as e
from snapd.core.attempt import Session
from snapd.core.buffer import Buffer
from snapd.core.directory import Directory
from snapd.core.events import State
from snapd.core.eviction import Snapshot, VictimOrder, victim_order
from snapd.core.records import Record
from snapd.core.session import Settings
from snapd.core.slab import SlabAllocator
from snapd.errors import Reason

_EVICTED: Final = Reason.EVICTED


class Outbox:
    """The instructions of one event, in order.

    Attributes:
        now_ns: the event's time.
        cause_id: the request behind it, or 0.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.cause_id = 0
        self._out: list[e.Instruction] = []
        self.requests_refused = 0

    def begin(self, event: e.Event) -> list[e.Instruction]:
        """Start with an empty list and return it; what follows is added to it."""
        self.now_ns = event.at_ns
        self.cause_id = event.cause_id
        self._out = []
        return self._out

    def record(self, record: Record) -> None:
        """Write a line of the log."""
        self._out.append(e.RecordWritten(record))

    def reply(self, result: e.Result, cause_id: int | None = None) -> None:
        """Answer the request behind the event, or an earlier one that was kept waiting."""
        if cause_id is None:
            cause_id = self.cause_id
        if cause_id:
            self._out.append(e.Replied(cause_id, result))

    def refuse(self, reason: Reason, detail: str = "", retry_after_ms: int = 0) -> None:
        """Answer that nothing was done; nobody asked, nobody is answered."""
        self.requests_refused += bool(self.cause_id)
        self.reply(e.Refused(reason, detail, retry_after_ms))

    def tell(self, told: e.EndTold) -> None:
        """Tell a connection how an attempt ended."""
        self._out.append(told)

    def arm(self, key: tuple[e.TimerKind, int, int], event: e.TimerEvent | e.QuarantineTimedOut) -> None:
        """Let *event* come once its deadline has passed; replaces the timer under *key*."""
        self._out.append(e.TimerArmed(key, event))

    def cancel(self, key: tuple[e.TimerKind, int, int]) -> None:
        """Forget the timer under *key*."""
        self._out.append(e.TimerCancelled(key))


class Books:
    """The tables and counters of one epoch. All bounded, all in one place.

    Attributes:
        open: attempts that have not ended, by handle.
        ended: the latest attempts that have, oldest first, for exact repeats of late messages.
        victims: what can be evicted: READY, unleased, drained, and not waiting to be aborted.
        undrained: what could be, but that a write may still land: evicting it makes no room.
        handles_of_writer: attempts that a local process's exit is drain proof for.
        num_by_state: attempts in ``open`` and ``ended``, by state; see ``count``.
    """

    def __init__(
        self,
        settings: Settings,
        arenas: Mapping[int, SlabAllocator],
        alignment_bytes: int,
        victims: VictimOrder | None = None,
    ) -> None:
        self.settings = settings
        self.outbox = Outbox()
        self.buffer = Buffer(arenas, alignment_bytes)
        self.directory = Directory(settings.layouts_max, settings.session_history_max)
        self.victims: VictimOrder = (
            victim_order(settings.eviction_policy, settings.session_history_max)
            if victims is None
            else victims
        )
        self.undrained: set[int] = set()
        self.open: dict[int, Session] = {}
        self.ended: OrderedDict[int, Session] = OrderedDict()
        self.handles_of_writer: dict[int, set[int]] = {}
        self.num_by_state: dict[State, int] = dict.fromkeys(State, 0)
        # Page keys that open attempts hold, repeats of others' included.
        self.page_keys_held = 0
        self.is_draining = False
        self.outcomes: Counter[Reason] = Counter()
        self.attempts = 0
        self.messages_absorbed = 0
        self.bytes_committed = 0
        self.bytes_ingested = 0

    def find(self, handle: int) -> Session | None:
        """Return the attempt, open or remembered."""
        session = self.open.get(handle)
        return self.ended.get(handle) if session is None else session

    def begin(self, session: Session) -> None:
        """Enter a new attempt."""
        self.open[session.handle] = session
        self.num_by_state[session.state] += 1
        self.attempts += 1
        self.page_keys_held += len(session.page_keys)
        self.directory.add_writing(session)
        if session.writer_id:
            self.handles_of_writer.setdefault(session.writer_id, set()).add(session.handle)

    def bury(self, session: Session) -> None:
        """Move an ended attempt from the open ones to the bounded history."""
        self.forget(session)
        self.directory.remove(session)
        self.page_keys_held -= len(session.page_keys)
        # The history keeps what a repeat needs; page keys and checksums can be many.
        session.page_keys = ()
        for shard in session.shards.values():
            shard.packed_checksums = b""
        del self.open[session.handle]
        self.ended[session.handle] = session
        if session.handle not in self.buffer.quarantine:
            self.forget_writer(session.writer_id, session.handle)
        while len(self.ended) > self.settings.ended_history_max:
            _, oldest = self.ended.popitem(last=False)
            self.num_by_state[oldest.state] -= 1

    def add_ready(self, session: Session) -> None:
        """The attempt became READY, which counts as use."""
        bytes_by_rank = {
            rank: sum([extent.size_bytes for extent in shard.extents])
            for rank, shard in session.shards.items()
        }
        snapshot = Snapshot(session.key, session.token_start, session.num_tokens, bytes_by_rank)
        self.victims.insert(session.handle, snapshot)
        self.offer(session)

    def offer(self, session: Session) -> None:
        """Nobody reads a READY attempt: make it evictable, or let it be once it is drained."""
        if not session.is_drained:
            self.undrained.add(session.handle)
            return
        self.undrained.discard(session.handle)
        self.victims.offer(session.handle)

    def withhold(self, handle: int) -> None:
        """The attempt is leased: it is no victim until the lease has ended."""
        self.victims.withhold(handle)
        self.undrained.discard(handle)

    def forget(self, session: Session) -> None:
        """The attempt has ended."""
        self.victims.discard(session.handle, evicted=session.reason is _EVICTED)
        self.undrained.discard(session.handle)

    def forget_writer(self, writer_id: int, handle: int) -> None:
        """The writer's exit proves nothing more about this attempt."""
        handles = self.handles_of_writer.get(writer_id)
        if handles is not None:
            handles.discard(handle)
            if not handles:
                del self.handles_of_writer[writer_id]
