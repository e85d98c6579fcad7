"""D's side of Mooncake: writes into one arena that begin in order, and are polled until they are final.

Nothing here waits for a peer. The first contact can take long when the peer is stopped, so it happens in
a thread; what is submitted meanwhile waits, and fails with nothing begun when the contact fails or takes
longer than ``connect_timeout_s``.

* ``DONE`` was acknowledged by the target, so nothing can land any more. A write that failed may land all
  the same, when a stopped peer goes on: its ticket is not drained.
* The first failed write in a row does not make the peer rest, so that a piece can be tried again within
  its push; the second does, and so does a first contact that fails.
* Out of a GPU, beginning a write may wait for what the GPU is doing, so it happens in a thread, in order.
  There a writer takes feeds, too, which two threads of its own write.
* A writer is for one life of a daemon. It goes on when its peer was only away; a daemon that was started
  anew has another epoch, and needs another writer.

Source: design, section 7.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from snapd.errors import TransportError
from snapd.transport.base import Progress, TicketState, Write, WriteFeed
from snapd.transport.mooncake_calls import CALLS
from snapd.transport.mooncake_engine import MooncakeEngine, WriteState
from snapd.transport.mooncake_engines import MooncakeEngines, Opening
from snapd.transport.mooncake_feed import Feeder, Feeding
from snapd.transport.mooncake_submitter import Current, Submission
from snapd.units import MIB

IN_FLIGHT_BYTES_MAX: Final = 256 * MIB
# Over TCP the engine takes about 2,000 writes a peer at a time; of more, some fail and some hang.
IN_FLIGHT_WRITES_MAX: Final = 64
NOTIFICATIONS_MAX: Final = 8
TICKETS_MAX: Final = 4_096
CONNECT_TIMEOUT_S: Final = 10.0


class _Notice:
    """A write with a notification under way, in a thread of its own: the call waits for the peer."""

    def __init__(
        self, engine: MooncakeEngine, segment_name: str, write: Write, text: str, current: Current
    ) -> None:
        self.state = WriteState.RUNNING
        self.error = ""
        self._call = (segment_name, write, text)
        self._engine = engine
        self._current = current
        threading.Thread(target=self._run, name=f"snapd-notify-{segment_name}", daemon=True).start()

    def _run(self) -> None:
        try:
            with CALLS.under_way(), self._current():
                self._engine.notify(*self._call)
        except Exception as error:  # Whatever it was, whoever polls must hear of it.
            self.error = str(error) or type(error).__name__
            self.state = WriteState.FAILED
        else:
            self.state = WriteState.DONE


class _Flight(msgspec.Struct):
    """A write that has begun, or will: asked for by its id, or whoever begins it. Or a feed."""

    size_bytes: int
    began: int | _Notice | Submission | Feeding

    @property
    def in_flight_bytes(self) -> int:
        return self.began.in_flight_bytes if isinstance(self.began, Feeding) else self.size_bytes


class _Ticket(msgspec.Struct):
    waiting: deque[Write | WriteFeed]
    begun_in_round: int
    deadline_s: float
    text: str | None = None
    flying: list[_Flight] = msgspec.field(default_factory=list)
    failure: str = ""
    is_drained: bool = True
    is_cancelled: bool = False
    has_written: bool = False


class MooncakeWriter:
    """An ``ArenaWriter`` over Mooncake. Every method may be called from any thread; none waits.

    Args:
        engines: of this process.
        segment_name: of the daemon's engine.
        epoch: the daemon's life.
        base_ptr: where the daemon says that the arena starts.
        size_bytes: of the arena.
        in_flight_bytes_max: how much is under way at a time, of all tickets together; one write at least.
        connect_timeout_s: how long a ticket waits for the first contact.
        clock: seconds, monotonic.

    Raises:
        ExtraMissing, TransportError: there is no engine yet and it cannot be made.
    """

    def __init__(
        self,
        engines: MooncakeEngines,
        segment_name: str,
        epoch: str,
        base_ptr: int,
        size_bytes: int,
        *,
        in_flight_bytes_max: int = IN_FLIGHT_BYTES_MAX,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines = engines
        self._engine = engines.acquire(segment_name, epoch)
        self._segment_name = segment_name
        self._peer = (segment_name, epoch)
        self._base_ptr = base_ptr
        self._size_bytes = size_bytes
        self._in_flight_bytes_max = in_flight_bytes_max
        self._connect_timeout_s = connect_timeout_s
        self._clock = clock
        self._sources: list[tuple[int, int]] = []
        self._tickets: dict[int, _Ticket] = {}
        self._last_ticket = 0
        self._opening: Opening | None = None
        self._feeder = Feeder(engines.current)
        self._is_closed = False
        self._is_released = False
        self._lock = threading.RLock()

    # --- the contract --------------------------------------------------------------------------

    def register_source(self, address: int, size_bytes: int) -> None:
        """Make memory of this process known. Writers of a process may share it; ``close`` takes it back.

        Raises:
            TransportError: it cannot be registered, or the writer is closed.
        """
        with self._lock:
            self._check_open()
            self._engines.register_source(address, size_bytes)
            self._sources.append((address, size_bytes))

    def submit(self, writes: Sequence[Write]) -> int:
        """Begin the writes, in order and as room allows, and return a ticket.

        Raises:
            TransportError: a write is outside the arena or reads from memory that is not registered, too
                many tickets are open, the writer is closed, or the peer rests (``PeerResting``). Nothing
                began.
        """
        with self._lock:
            self._check_open()
            for write in writes:
                self._check_write(write)
            return self._open_ticket(write for write in writes if write.size_bytes)

    def submit_notification(self, write: Write, text: str) -> int:
        """Begin a write that is followed by a text for the daemon, and return a ticket.

        Submit it when what it announces is done: the peer takes it in no order with other tickets. A
        ticket that is done says that the text was sent; one that failed does not say that it was not.

        Raises:
            TransportError: as ``submit``.
        """
        with self._lock:
            self._check_open()
            self._check_write(write)
            return self._open_ticket([write], text)

    @property
    def takes_feeds(self) -> bool:
        """Whether the sources are on a GPU: elsewhere beginning a write does not wait."""
        return self._engines.submitter is not None

    def submit_feed(self, feed: WriteFeed) -> int:
        """Write all that a feed gives, two writes at a time, and return a ticket.

        It is asked when the feeds before it are over. What it has under way counts for other tickets, but
        does not wait for them: it would have to be woken.

        Raises:
            TransportError: as ``submit``; a write that must not begin fails the ticket.
        """
        with self._lock:
            self._check_open()
            return self._open_ticket([feed])

    def poll(self, ticket: int) -> Progress:
        """Return how far a ticket has come, and begin what there is room for, of all tickets.

        Raises:
            TransportError: there is no such ticket, or its end was told already.
        """
        with self._lock:
            found = self._ticket(ticket)
            self._advance()
            if found.flying or found.waiting:
                return Progress(TicketState.RUNNING)
            del self._tickets[ticket]
            self._release_if_over()
        if found.failure:
            return Progress(TicketState.FAILED, found.is_drained, found.failure)
        if found.is_cancelled:
            return Progress(TicketState.CANCELLED, is_drained=True)
        if found.has_written:
            self._engines.backoff.succeeded(self._peer)
        return Progress(TicketState.DONE, is_drained=True)

    def cancel(self, ticket: int) -> None:
        """Begin no further write of a ticket. If all have begun it has no effect.

        Raises:
            TransportError: there is no such ticket, or its end was told already.
        """
        with self._lock:
            self._cancel(self._ticket(ticket))

    def close(self) -> None:
        """Cancel every ticket. Those that are open can still be polled. Twice is fine.

        The sources are unregistered when no write is under way any more: until the tickets are final
        their memory must stay.
        """
        with self._lock:
            self._is_closed = True
            for ticket in self._tickets.values():
                self._cancel(ticket)
            if not self._settle():
                self._engines.keep(self._settle)

    # --- inside --------------------------------------------------------------------------------

    def _open_ticket(self, waiting: Iterable[Write | WriteFeed], text: str | None = None) -> int:
        if len(self._tickets) >= TICKETS_MAX:
            raise TransportError(f"{TICKETS_MAX} tickets are open: poll them until they are final")
        self._advance()  # Whether the peer has failed meanwhile.
        begun_in_round = self._engines.backoff.begin(self._peer)
        # The one that is under way will be found again; the failure of one that is over is past.
        self._opening = None
        self._last_ticket += 1
        deadline_s = self._clock() + self._connect_timeout_s
        self._tickets[self._last_ticket] = _Ticket(deque(waiting), begun_in_round, deadline_s, text)
        self._advance()
        return self._last_ticket

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportError("the writer is closed")

    def _check_write(self, write: Write) -> None:
        start = write.target_ptr - self._base_ptr
        if write.size_bytes < 0 or start < 0 or start + write.size_bytes > self._size_bytes:
            raise TransportError(
                f"a write of {write.size_bytes} bytes at {start} is outside an arena of "
                f"{self._size_bytes} bytes"
            )
        if not self._engines.covers(write.source_address, write.size_bytes):
            raise TransportError(f"a write reads from {write.source_address:#x}, which is not registered")

    def _ticket(self, ticket: int) -> _Ticket:
        found = self._tickets.get(ticket)
        if found is None:
            raise TransportError(f"no ticket {ticket}")
        return found

    def _cancel(self, ticket: _Ticket) -> None:
        if ticket.waiting:
            ticket.waiting.clear()
            ticket.is_cancelled = True
        if self._withdraw(ticket):
            ticket.is_cancelled = True

    def _withdraw(self, ticket: _Ticket) -> bool:
        """Keep from beginning what a thread was to begin; return whether there was something.

        A feed says itself, when it is looked at, whether it was cancelled.
        """
        for flight in ticket.flying:
            if isinstance(flight.began, Feeding):
                self._feeder.cancel(flight.began)
        before = len(ticket.flying)
        ticket.flying = [
            flight
            for flight in ticket.flying
            if not (isinstance(flight.began, Submission) and flight.began.withdraw())
        ]
        return len(ticket.flying) < before

    def _advance(self) -> None:
        """See which writes have ended, and begin what there is room for."""
        for ticket in self._tickets.values():
            if ticket.flying:
                ticket.flying = [flight for flight in ticket.flying if not self._has_ended(ticket, flight)]
                if ticket.failure:
                    self._withdraw(ticket)
        if any(ticket.waiting for ticket in self._tickets.values()) and self._is_reached():
            self._begin()

    def _has_ended(self, ticket: _Ticket, flight: _Flight) -> bool:
        began = flight.began
        if isinstance(began, Feeding):
            return self._has_fed(ticket, began)
        detail = f"a write to {self._segment_name} failed"
        if isinstance(began, _Notice):
            state, detail = began.state, began.error
        elif isinstance(began, Submission):
            state, detail = began.check(), began.error or detail
        else:
            state = self._engine.check(began)
        if state is WriteState.RUNNING:
            return False
        if state is WriteState.FAILED:
            if not isinstance(began, Submission) or began.may_land:
                ticket.is_drained = False
                detail = f"{detail}; it may still land"
            self._fail(ticket, detail, may_retry_once=True)
        return True

    def _has_fed(self, ticket: _Ticket, feeding: Feeding) -> bool:
        progress = feeding.progress
        ticket.is_cancelled = progress.state is TicketState.CANCELLED
        if progress.state is TicketState.FAILED:
            ticket.is_drained = progress.is_drained
            if feeding.is_peers_failure:
                self._fail(ticket, progress.detail, may_retry_once=True)
            else:
                ticket.failure = progress.detail
        return progress.is_final

    def _fail(self, ticket: _Ticket, detail: str, *, may_retry_once: bool) -> None:
        ticket.waiting.clear()
        if not ticket.failure:
            ticket.failure = detail
            self._engines.backoff.failed(self._peer, ticket.begun_in_round, may_retry_once=may_retry_once)

    def _is_reached(self) -> bool:
        """Return whether the segment is open; else see to it, and fail what has waited too long."""
        if self._engine.is_open(self._segment_name):
            return True
        if self._opening is None:
            self._opening = self._engines.open_soon(self._engine, self._segment_name, self._base_ptr)
        error = self._opening.error if self._opening.is_over else ""
        now_s = self._clock()
        for ticket in self._tickets.values():
            if not ticket.waiting:
                continue
            if error:
                self._fail(ticket, error, may_retry_once=False)
            elif now_s >= ticket.deadline_s:
                self._fail(
                    ticket,
                    f"{self._segment_name} did not answer within {self._connect_timeout_s:g} s",
                    may_retry_once=False,
                )
        return False

    def _begin(self) -> None:
        flying = [flight for ticket in self._tickets.values() for flight in ticket.flying]
        flying_bytes = sum(flight.in_flight_bytes for flight in flying)
        flying_writes = sum(not isinstance(flight.began, Feeding) for flight in flying)
        notices = sum(isinstance(flight.began, _Notice) for flight in flying)
        # Commits first: a feed may wait for the buffer that one of them holds, so none waits for a feed.
        for ticket in sorted(self._tickets.values(), key=lambda ticket: ticket.text is None):
            while ticket.waiting:
                first = ticket.waiting[0]
                size_bytes = first.size_bytes if isinstance(first, Write) else 0
                is_full = flying_bytes > 0 and flying_bytes + size_bytes > self._in_flight_bytes_max
                # A commit is a few bytes, and would find no gap in what a feed has under way.
                if is_full and ticket.text is None:
                    return
                if flying_writes >= IN_FLIGHT_WRITES_MAX or notices >= NOTIFICATIONS_MAX:
                    return
                if not self._threads_have_room(first):
                    return
                ticket.waiting.popleft()
                try:
                    began = self._begin_one(first, ticket.text)
                except TransportError as error:
                    self._fail(ticket, str(error), may_retry_once=True)
                    break
                except BaseException as error:
                    # Interrupted, for instance: nobody knows whether it began.
                    ticket.waiting.clear()
                    ticket.failure = f"{str(error) or type(error).__name__}; it may still land"
                    ticket.is_drained = False
                    raise
                notices += isinstance(began, _Notice)
                ticket.has_written = True
                ticket.flying.append(_Flight(size_bytes, began))
                flying_bytes += size_bytes
                flying_writes += 1

    def _threads_have_room(self, first: Write | WriteFeed) -> bool:
        if not isinstance(first, Write):
            return self._feeder.has_room
        return self._engines.submitter is None or self._engines.submitter.has_room

    def _begin_one(self, write: Write | WriteFeed, text: str | None) -> int | _Notice | Submission | Feeding:
        """Begin a write, or a feed.

        Raises:
            TransportError: it did not begin.
        """
        if not isinstance(write, Write):
            feeding = Feeding(self._engine, self._segment_name, write, self._check_write)
            self._feeder.submit(feeding)
            return feeding
        if text is not None:
            return _Notice(self._engine, self._segment_name, write, text, self._engines.current)
        if self._engines.submitter is not None:
            return self._engines.submitter.submit(self._engine, self._segment_name, write)
        return self._engine.submit(self._segment_name, write)

    def _settle(self) -> bool:
        """See which writes have ended after ``close``; return whether nothing is under way any more."""
        with self._lock:
            self._advance()
            return self._release_if_over()

    def _release_if_over(self) -> bool:
        if not self._is_closed or any(ticket.flying for ticket in self._tickets.values()):
            return False
        if not self._is_released:
            self._is_released = True
            # A registration that stays is refused as an overlap when somebody wants it again: not silently.
            for address, size_bytes in self._sources:
                with contextlib.suppress(TransportError):
                    self._engines.unregister_source(address, size_bytes)
            with contextlib.suppress(TransportError):
                self._engines.release(self._engine, self._segment_name)
            self._feeder.close()
        return True
