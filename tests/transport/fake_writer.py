"""A transport with faults: an arena in this process, and writes that end when the test says so.

Writes begin in order, at most *in_flight_bytes_max* at a time (one at least), and end at ``poll``. A test
plans how: by default each lasts *polls* polls and lands. ``plan`` says how the next writes that begin end.
"""

import ctypes
import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Literal

from snapd.errors import PeerResting, TransportError
from snapd.transport.base import Progress, TicketState, Write

# lands: done. fails: nothing was written. fails-late: nothing yet, and ``land_late`` writes it.
# half: the first half is written, then it fails. stuck: runs until ``unstick``.
Ending = Literal["lands", "fails", "fails-late", "half", "stuck"]


@dataclasses.dataclass
class _Flight:
    write: Write
    ending: Ending
    polls_left: int


@dataclasses.dataclass
class _Ticket:
    waiting: deque[Write]
    flying: list[_Flight]
    failure: str = ""
    is_drained: bool = True
    is_cancelled: bool = False


class FakeArena:
    """The target: bytes of this process."""

    def __init__(self, size_bytes: int, base_ptr: int = 1 << 40) -> None:
        self.memory = bytearray(size_bytes)
        self.base_ptr = base_ptr
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def put(self, write: Write, size_bytes: int) -> None:
        offset = write.target_ptr - self.base_ptr
        ctypes.memmove(self._address + offset, write.source_address, size_bytes)


class FakeWriter:
    """An ``ArenaWriter`` over a ``FakeArena``."""

    def __init__(self, arena: FakeArena, *, in_flight_bytes_max: int = 1 << 30, polls: int = 1) -> None:
        self.arena = arena
        self.sources: list[tuple[int, int]] = []
        self.submitted: list[Write] = []
        self.begun: list[Write] = []
        self.peer_up = True
        self.resting_ms = 0
        self.in_flight_bytes_seen_max = 0
        self._in_flight_bytes_max = in_flight_bytes_max
        self._polls = polls
        self._plan: deque[Ending] = deque()
        self._late: list[Write] = []
        self._tickets: dict[int, _Ticket] = {}
        self._last_ticket = 0
        self._closed = False

    # --- what a test says ----------------------------------------------------------------------

    def plan(self, *endings: Ending) -> None:
        """Say how the next writes that begin will end, in order; those after them land."""
        self._plan.extend(endings)

    def unstick(self, ending: Ending = "lands") -> None:
        """Let the writes that are stuck end."""
        for ticket in self._tickets.values():
            for flight in ticket.flying:
                if flight.ending == "stuck":
                    flight.ending = ending

    def land_late(self) -> int:
        """Let the writes that failed land after all, with what their source holds now."""
        for write in self._late:
            self.arena.put(write, write.size_bytes)
        count = len(self._late)
        self._late.clear()
        return count

    # --- the contract --------------------------------------------------------------------------

    def register_source(self, address: int, size_bytes: int) -> None:
        self.sources.append((address, size_bytes))

    def submit(self, writes: Sequence[Write]) -> int:
        if self._closed:
            raise TransportError("the writer is closed")
        if self.resting_ms:
            raise PeerResting("the peer failed a moment ago", self.resting_ms)
        for write in writes:
            start = write.target_ptr - self.arena.base_ptr
            if write.size_bytes < 0 or start < 0 or start + write.size_bytes > len(self.arena.memory):
                raise TransportError(f"a write of {write.size_bytes} bytes at {start} is outside the arena")
            if not any(
                address <= write.source_address and write.source_address + write.size_bytes <= address + size
                for address, size in self.sources
            ):
                raise TransportError("the source is not registered")
        self.submitted.extend(writes)
        self._last_ticket += 1
        self._tickets[self._last_ticket] = _Ticket(deque(writes), [])
        self._begin()
        return self._last_ticket

    def poll(self, ticket: int) -> Progress:
        found = self._ticket(ticket)
        # Writes of other tickets go on as well: whoever polls one of them must not wait for ever.
        for each in self._tickets.values():
            for flight in list(each.flying):
                flight.polls_left -= 1
                if flight.polls_left <= 0 and flight.ending != "stuck":
                    each.flying.remove(flight)
                    self._end(each, flight)
        self._begin()
        if found.flying or (found.waiting and not found.failure and not found.is_cancelled):
            return Progress(TicketState.RUNNING)
        del self._tickets[ticket]
        if found.failure:
            return Progress(TicketState.FAILED, found.is_drained, found.failure)
        if found.is_cancelled:
            return Progress(TicketState.CANCELLED, found.is_drained)
        return Progress(TicketState.DONE, is_drained=True)

    def cancel(self, ticket: int) -> None:
        found = self._ticket(ticket)
        # What has begun all the same will be done, not cancelled.
        if found.waiting:
            found.waiting.clear()
            found.is_cancelled = True

    def close(self) -> None:
        self._closed = True

    # --- inside --------------------------------------------------------------------------------

    def _ticket(self, ticket: int) -> _Ticket:
        if ticket not in self._tickets:
            raise TransportError(f"no ticket {ticket}")
        return self._tickets[ticket]

    def _begin(self) -> None:
        flying_bytes = sum(f.write.size_bytes for t in self._tickets.values() for f in t.flying)
        for ticket in self._tickets.values():
            while ticket.waiting and not ticket.failure:
                size_bytes = ticket.waiting[0].size_bytes
                if flying_bytes and flying_bytes + size_bytes > self._in_flight_bytes_max:
                    return
                write = ticket.waiting.popleft()
                if not self.peer_up:
                    # It never began.
                    ticket.failure = "the peer cannot be reached"
                    ticket.waiting.clear()
                    break
                ending = self._plan.popleft() if self._plan else "lands"
                ticket.flying.append(_Flight(write, ending, self._polls))
                self.begun.append(write)
                flying_bytes += size_bytes
                self.in_flight_bytes_seen_max = max(self.in_flight_bytes_seen_max, flying_bytes)

    def _end(self, ticket: _Ticket, flight: _Flight) -> None:
        write = flight.write
        if flight.ending == "lands":
            self.arena.put(write, write.size_bytes)
            return
        if flight.ending == "half":
            self.arena.put(write, write.size_bytes // 2)
        elif flight.ending == "fails-late":
            self._late.append(write)
        ticket.failure = "a write failed"
        ticket.is_drained = False
        ticket.waiting.clear()
