"""The pure core: events in, instructions out. One method mutates.

``Machine.handle`` takes an event and returns what the shell is to do. It knows no clock, no
randomness and no I/O: time comes with the event, handles are made by the shell. Which event
does what in which state is the table in ``fsm.py``; the actions it names are in ``lives.py``.

Source: design, section 3.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, Final

from snapd.compiling import mypyc_attr
from snapd.core import events as e
from snapd.core.admission import Admission
from snapd.core.books import Books
from snapd.core.course import repeat_key
from snapd.core.events import FINAL_STATES, State
from snapd.core.eviction import VictimOrder
from snapd.core.fsm import ABSORBED, REJECTED, TRANSITIONS
from snapd.core.lives import Lives
from snapd.core.quarantine import Quarantine
from snapd.core.session import Session, SessionView, Settings, ShardView, Statistics
from snapd.core.slab import Extent, SlabAllocator
from snapd.errors import InvariantBroken, Reason
from snapd.units import NS_PER_MS

_ACTIONS: Final[dict[str, Callable[..., None]]] = {
    cell.action: getattr(Lives, cell.action) for row in TRANSITIONS.values() for cell in row.values()
}


@mypyc_attr(allow_interpreted_subclasses=True)
class Machine:
    """Every attempt of one epoch, and the only place where one changes its state.

    Args:
        settings: bounds and times.
        arenas: one empty allocator a rank.
        alignment_bytes: of the allocators; every plane starts on a multiple of it.
        victims: an empty order of one's own, in place of the one that *settings* name.
    """

    def __init__(
        self,
        settings: Settings,
        arenas: Mapping[int, SlabAllocator],
        *,
        alignment_bytes: int = 256,
        victims: VictimOrder | None = None,
    ) -> None:
        self.books = Books(settings, arenas, alignment_bytes, victims)
        self._out = self.books.outbox
        self._quarantine = Quarantine(self.books)
        self._lives = Lives(self.books, self._quarantine, self._take)
        self._admission = Admission(self.books, self._lives, self._take)
        self._handlers: dict[type[e.Event], Callable[[Any], None]] = {
            e.LayoutDeclared: self._admission.declare_layout,
            e.PrepareAsked: self._admission.prepare,
            e.LookupAsked: self._admission.look_up,
            e.QuarantineTimedOut: self._quarantine.time_out,
            e.WriterGone: self._writer_gone,
            e.DrainAsked: self._drain,
            e.StopAsked: self._stop,
        }

    # --- events in, instructions out -----------------------------------------------------------

    def handle(self, event: e.Event) -> list[e.Instruction]:
        """Take one event, change what it changes, and return the instructions in order."""
        out = self._out.begin(event)
        if isinstance(event, e.SessionEvent):
            self._take(event)
        else:
            self._handlers[type(event)](event)
        return out

    def _take(self, event: e.SessionEvent) -> None:
        """Look up, then act: an event that the table does not let act changes nothing."""
        session = self.books.find(event.slab_handle)
        if session is None:
            self._take_unknown(event)
            return
        kind = type(event)
        cell = TRANSITIONS[session.state].get(kind)
        if cell is not None:
            outer = self._lives.allowed
            self._lives.allowed = cell.successors
            _ACTIONS[cell.action](self._lives, session, event)
            if session.state not in cell.successors:
                raise InvariantBroken(f"{kind.__name__} left attempt {session.handle} in {session.state}")
            self._lives.allowed = outer
        elif kind in ABSORBED[session.state]:
            self._absorb(session, event)
        else:
            self._out.refuse(REJECTED[session.state][kind], f"the attempt is {session.state}")

    def _take_unknown(self, event: e.SessionEvent) -> None:
        """A handle that is not remembered: its bytes may be in quarantine still and hear a proof."""
        state = self._quarantine.state_of(event.slab_handle)
        if self._quarantine.hear(event) and isinstance(event, e.WriterDrained):
            self._out.reply(e.Accepted(state))
        else:
            self._out.refuse(Reason.STALE_HANDLE, f"no attempt {event.slab_handle} in this epoch")

    def _absorb(self, session: Session, event: e.SessionEvent) -> None:
        """Change nothing; an exact repeat gets its first answer, a drain proof is heard."""
        self.books.messages_absorbed += 1
        heard = self._quarantine.hear(event)
        kind = type(event)
        key = repeat_key(event)
        if key is None:
            return
        answer = session.answers.get(key)
        is_final = session.state in FINAL_STATES
        if answer is not None:
            if isinstance(event, e.RankCommitted) and not is_final:
                # D lost the reply with its connection; it is told on the new one.
                session.told_conn_ids[event.rank] = event.conn_id
            self._out.reply(answer)
        elif heard and kind is e.VoteCast:
            self._out.reply(e.Decided(commit=False, reason=session.reason, state=session.state))
        elif heard or kind is e.WriterDrained or (kind is e.TransferStarted and not is_final):
            self._out.reply(e.Accepted(session.state))
        elif is_final:
            self._out.refuse(Reason.STALE_HANDLE, f"the attempt is {session.state}: {session.reason}")
        else:
            self._out.refuse(Reason.WRONG_STATE, f"the attempt is {session.state}")

    def _writer_gone(self, event: e.WriterGone) -> None:
        for handle in sorted(self.books.handles_of_writer.get(event.writer_id, ())):
            self._take(e.WriterExited(at_ns=event.at_ns, slab_handle=handle, drained=event.drained))

    def _drain(self, event: e.DrainAsked) -> None:
        self.books.is_draining = event.draining
        self._out.reply(e.Accepted())

    def _stop(self, event: e.StopAsked) -> None:
        self.books.is_draining = True
        for handle in list(self.books.open):
            self._take(e.DaemonStopping(at_ns=event.at_ns, slab_handle=handle))
        self._out.reply(e.Accepted())

    # --- looking at it -------------------------------------------------------------------------

    def sessions(self) -> Iterator[Session]:
        """Yield the open attempts, oldest first, then the ended ones, oldest first."""
        yield from self.books.open.values()
        yield from self.books.ended.values()

    def page(
        self, states: Collection[State], session_id: str, offset: int, limit: int
    ) -> tuple[list[Session], int]:
        """Return some of the attempts in these states, and how many there are in all.

        The open ones come first, oldest first, then the ended ones, oldest first. There may be very many,
        and everybody else waits meanwhile: counts are kept, what is skipped is skipped by functions in C
        where no attempt has to be looked at, and none behind the page is looked at. Only one session's
        attempts are counted by looking at all.

        Args:
            states: those wanted.
            session_id: only this session's; empty: every session's.
            offset: attempts to skip.
            limit: attempts to return.
        """
        books = self.books
        tables: list[Collection[Session]] = []
        if not FINAL_STATES.issuperset(states):
            tables.append(books.open.values())
        if not FINAL_STATES.isdisjoint(states):
            tables.append(books.ended.values())
        if session_id:
            matching = [s for s in chain(*tables) if s.key[1] == session_id and s.state in states]
            return matching[offset : offset + limit], len(matching)
        total = sum(books.num_by_state[state] for state in states)
        if offset >= total:
            return [], total
        found: Iterable[Session] = chain(*tables)
        if total < sum(map(len, tables)):
            found = _in_states(found, states)
        return list(islice(found, offset, offset + limit)), total

    @property
    def num_leased(self) -> int:
        """Attempts that a rank reads: they are READY, and cannot be evicted."""
        books = self.books
        return len(books.open) - books.directory.num_writing - len(books.victims) - len(books.undrained)

    def view(self, handle: int) -> SessionView | None:
        """Return an attempt for an operator, or None."""
        session = self.books.find(handle)
        return None if session is None else view_session(session)

    def statistics(self) -> Statistics:
        """Return an immutable snapshot of the counters."""
        books = self.books
        return Statistics(
            sessions_by_state={
                state.value: count for state, count in books.num_by_state.items() if state not in FINAL_STATES
            },
            outcomes_by_reason={reason.value: count for reason, count in sorted(books.outcomes.items())},
            attempts=books.attempts,
            attempts_ok=books.outcomes[Reason.OK],
            open_sessions=len(books.open),
            quarantined_shards=books.buffer.num_quarantined,
            ended_history=len(books.ended),
            session_history=books.directory.num_hints,
            layouts=len(books.directory.layouts),
            page_keys=books.directory.num_page_keys,
            page_keys_held=books.page_keys_held,
            messages_absorbed=books.messages_absorbed,
            requests_refused=self._out.requests_refused,
            bytes_committed=books.bytes_committed,
            bytes_ingested=books.bytes_ingested,
            is_draining=books.is_draining,
            arenas=tuple(
                books.buffer.view(rank, books.victims.evictable_bytes(rank)) for rank in books.buffer.ranks
            ),
        )

    def validate(self) -> None:
        """Cross-check every table with every other. Costs O(everything): for tests and for doubt.

        Raises:
            InvariantBroken: two of them do not agree; the message says which.
        """
        books = self.books
        owned: dict[int, list[Extent]] = {}
        for handle, session in books.open.items():
            _check_open(handle, session, books.buffer.ranks)
            for rank, shard in session.shards.items():
                owned.setdefault(rank, []).extend(shard.extents)
            is_idle = session.state is State.READY and not session.is_leased
            if (handle in books.victims) != (is_idle and session.is_drained):
                raise InvariantBroken(f"attempt {handle}: whether it is evictable is wrong")
            if (handle in books.undrained) != (is_idle and not session.is_drained):
                raise InvariantBroken(f"attempt {handle}: whether only drain proof is missing is wrong")
        books.buffer.validate(owned)
        books.victims.validate()
        if not books.undrained <= books.open.keys():
            raise InvariantBroken("something that is not open waits for drain proof")
        if len(books.victims) != sum(1 for handle in books.open if handle in books.victims):
            raise InvariantBroken("something that is not open is evictable")
        for handle, session in books.ended.items():
            if session.state not in FINAL_STATES or any(
                s.extents or s.lease for s in session.shards.values()
            ):
                raise InvariantBroken(f"attempt {handle} has ended and holds something still")
        if books.open.keys() & books.ended.keys():
            raise InvariantBroken("an attempt is both open and ended")
        if len(books.ended) > books.settings.ended_history_max:
            raise InvariantBroken("the history is larger than ended_history_max")
        if books.page_keys_held != sum(len(session.page_keys) for session in books.open.values()):
            raise InvariantBroken("the number of page keys that are held is wrong")
        if books.page_keys_held > books.settings.page_keys_total_max:
            raise InvariantBroken("more page keys are held than page_keys_total_max")
        writing = {h: s for h, s in books.open.items() if s.state is not State.READY}
        ready = {h: s for h, s in books.open.items() if s.state is State.READY}
        if set(books.victims.handles()) != ready.keys():
            raise InvariantBroken("the order of victims does not know exactly what is READY")
        books.directory.validate(writing, ready)
        for writer_id, handles in books.handles_of_writer.items():
            if not handles or not handles <= books.open.keys() | books.buffer.quarantine.keys():
                raise InvariantBroken(f"writer {writer_id} is kept for attempts that are over")
        if Counter(session.state for session in self.sessions()) != Counter(books.num_by_state):
            raise InvariantBroken("the number of attempts in each state is wrong")


def _in_states(sessions: Iterable[Session], states: Collection[State]) -> Iterator[Session]:
    """Yield those that are in one of these states, looking at no more than are wanted."""
    for session in sessions:
        if session.state in states:
            yield session


def _check_open(handle: int, session: Session, ranks: tuple[int, ...]) -> None:
    if session.handle != handle or session.state in FINAL_STATES or not session.deadline_ns:
        raise InvariantBroken(f"attempt {handle} is open, and is not")
    if not session.shards or not set(session.shards) <= set(ranks):
        raise InvariantBroken(f"attempt {handle} has shards of unknown ranks")
    for shard in session.shards.values():
        if not shard.extents:
            raise InvariantBroken(f"attempt {handle} is open and holds nothing in arena {shard.rank}")
        if (shard.lease is not None or shard.is_committed) and session.state is State.RESERVED:
            raise InvariantBroken(f"attempt {handle} is RESERVED and was written or read")
        if shard.lease is not None and session.state is not State.READY:
            raise InvariantBroken(f"attempt {handle} is leased and not READY")
        if shard.lease is not None and shard.lease.has_voted and shard.lease.round != session.round:
            raise InvariantBroken(f"attempt {handle}: a vote of a round that is over waits")
    if (session.state is State.READY) != all(shard.is_committed for shard in session.shards.values()):
        raise InvariantBroken(f"attempt {handle} is {session.state} and that is not what its ranks say")
    if any(shard.is_drained and not shard.is_committed for shard in session.shards.values()):
        raise InvariantBroken(f"attempt {handle} has a shard that is drained and not committed")
    if session.abort_wanted is not None and not session.is_leased:
        raise InvariantBroken(f"attempt {handle} waits for readers and has none")


def view_session(session: Session) -> SessionView:
    """Return an immutable picture of an attempt."""
    return SessionView(
        slab_handle=session.handle,
        session_id=session.session_id,
        layout_fingerprint=session.key[0],
        state=session.state,
        reason=session.reason,
        num_tokens=session.num_tokens,
        token_start=session.token_start,
        bytes=session.total_bytes,
        created_ns=session.created_ns,
        state_since_ns=session.state_since_ns,
        deadline_ns=session.deadline_ns,
        is_leased=session.is_leased,
        abort_wanted=session.abort_wanted or "",
        spent_ms={state.value: ns / NS_PER_MS for state, ns in session.spent_ns.items()},
        shards=tuple(
            ShardView(
                rank=shard.rank,
                is_committed=shard.is_committed,
                extents=shard.extents,
                lease_id=shard.lease.lease_id if shard.lease else 0,
                lease_deadline_ns=shard.lease.deadline_ns if shard.lease else 0,
            )
            for shard in session.shards.values()
        ),
    )
