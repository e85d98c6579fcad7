"""What a transport is: on the daemon's side it offers arenas, on D's side it writes into them.

One contract, kept by every transport and by the fake with faults that tests use:

* A set of writes is submitted and gets a *ticket*; the ticket is polled until its state is final.
* A final state says whether the writes are *drained*: no write of the ticket can still land. A write
  that failed may land all the same (its bytes may lie in a socket's buffer of a peer that was stopped),
  so ``FAILED`` alone proves nothing.
* ``cancel`` keeps what has not begun from beginning. What is under way cannot be called back.
* A *feed* is a ticket whose writes come one after the other, while it runs.
* A peer that failed is tried again, after a pause that grows; it is never given up for good.

Source: design, section 7.
"""

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec


class Write(msgspec.Struct, frozen=True):
    """One contiguous write.

    Attributes:
        source_address: first byte, in this process.
        target_ptr: first byte, in the transport's address space: base pointer plus offset.
        size_bytes: how many.
    """

    source_address: int
    target_ptr: int
    size_bytes: int


class TicketState(enum.Enum):
    """How far a set of writes has come. All but the first are final."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Progress(msgspec.Struct, frozen=True):
    """What polling a ticket says.

    Attributes:
        state: how far it has come.
        is_drained: no write of the ticket can still land. Always so when it is done, never while it runs.
        detail: why it failed, for a person.
    """

    state: TicketState
    is_drained: bool = False
    detail: str = ""

    @property
    def is_final(self) -> bool:
        """Whether the ticket is over; it is forgotten once this was told."""
        return self.state is not TicketState.RUNNING


class ArenaMemory(Protocol):
    """What a transport needs to know of an arena, on the host (``cpu``) or on a GPU."""

    rank: int
    size_bytes: int

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda:N``."""
        ...

    def map(self) -> int:
        """Return where it starts in this process."""
        ...

    def current(self) -> AbstractContextManager[None]:
        """Make the GPU that it lies on the calling thread's, if it lies on one."""
        ...


class ArenaOfferer(Protocol):
    """The daemon's side: registers arenas once, at start.

    Attributes:
        name: of the transport.
        is_exit_drain_proof: the exit of a local process that writes proves that nothing of it can land.
    """

    name: str
    is_exit_drain_proof: bool

    def register(self, arena: ArenaMemory) -> int:
        """Register an arena and return where its first byte is in the transport's address space.

        Raises:
            StartupError: it cannot be registered; says why and what to try.
        """
        ...

    def address(self) -> str:
        """Return what a writer must know to reach the arenas."""
        ...

    def close(self) -> None:
        """Take the registrations back."""
        ...


class ArenaWriter(Protocol):
    """D's side: writes into one rank's arena, in one life of the daemon."""

    def register_source(self, address: int, size_bytes: int) -> None:
        """Make memory of this process known, from which writes will read. Once; it must stay there.

        Raises:
            TransportError: it cannot be registered; says why and what to try.
        """
        ...

    def submit(self, writes: Sequence[Write]) -> int:
        """Begin the writes, in order and as room allows, and return a ticket. Waits for no peer and no GPU.

        The source bytes must stay as they are until the ticket is final.

        Raises:
            TransportError: a write is outside the arena, the writer is closed, or the peer failed a moment
                ago (``PeerResting``, which says when to try again). Nothing began.
        """
        ...

    def poll(self, ticket: int) -> Progress:
        """Return how far it has come, and begin what there is room for; never waits.

        A final state is told once; then the ticket is forgotten.

        Raises:
            TransportError: there is no such ticket.
        """
        ...

    def cancel(self, ticket: int) -> None:
        """Begin no further write of a ticket. Its state is final once those under way are: poll it.

        Raises:
            TransportError: there is no such ticket.
        """
        ...

    def close(self) -> None:
        """Begin nothing any more and let go of the arena. Writes under way may still land."""
        ...


class WriteFeed(Protocol):
    """Writes that a transport asks for, one after the other, each when its source is ready to be read.

    Several threads of the transport ask at once. Nothing but ``next`` waits, or raises.
    """

    def next(self) -> Write | None:
        """Return the next write, and wait until it can be begun; None: there is no more, or it was stopped.

        Raises:
            Exception: there can be none, so the whole feed has failed.
        """
        ...

    def over(self, write: Write, *, may_land: bool) -> None:
        """Take note that a write is final, or never began, so that nothing reads its source any more.

        Args:
            write: which ``next`` returned.
            may_land: it failed, and something may read its source all the same.
        """
        ...

    def stop(self) -> None:
        """Give no more: ``next`` returns None soon, also where it waits. Twice is fine."""
        ...

    def ended(self) -> None:
        """Take note that the ticket is final, so that whoever polls it need not wait."""
        ...


class FeedWriter(ArenaWriter, Protocol):
    """An ``ArenaWriter`` that may take feeds."""

    @property
    def takes_feeds(self) -> bool:
        """Whether it does, for the sources that it has."""
        ...

    def submit_feed(self, feed: WriteFeed) -> int:
        """Write all that a feed gives, and return a ticket; it is done when every write is. Never waits.

        How much is under way at a time is the feed's to say, as far as there are threads that ask.

        Raises:
            TransportError: as ``submit``.
        """
        ...
