"""What a transport is: on the daemon's side it offers arenas, on D's side it writes into them.

Source: design, section 7.
"""

import enum
from collections.abc import Sequence
from typing import Protocol

import msgspec

from snapd.arena import HostArena


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
    """How far a set of writes has come. The last two are final."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class ArenaOfferer(Protocol):
    """The daemon's side: registers arenas once, at start."""

    name: str

    def register(self, arena: HostArena) -> int:
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
    """D's side: writes into one rank's arena.

    A set of writes is submitted, polled until it is final, and only then is committed.
    """

    def submit(self, writes: Sequence[Write]) -> int:
        """Begin the writes and return a ticket.

        Raises:
            TransportError: a write is outside the arena, or the peer cannot be reached. Nothing began.
        """
        ...

    def poll(self, ticket: int) -> TicketState:
        """Return how far it has come; a final state is forgotten once it was returned."""
        ...

    def is_drained(self) -> bool:
        """Return whether no write that was ever submitted can still land."""
        ...

    def close(self) -> None:
        """Let go of the arena. Writes under way may still land, unless it is drained."""
        ...
