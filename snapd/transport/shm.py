"""Shared memory: D maps the arena, on the host or on a GPU of it, and copies. Needs no extra package.

A copy is done when ``submit`` returns, so every ticket is final and drained at once. On the host the
exit of the process is drain proof as well: a mapping does not outlive it, and children do not inherit it.
What a process has launched on a GPU may outlive it: a forked child keeps its context there.

Source: design, section 7.
"""

from collections.abc import Sequence
from typing import Final

from snapd.errors import SnapdError, TransportError
from snapd.mapping import AnyMappedArena
from snapd.transport.base import ArenaMemory, Progress, TicketState, Write

_DONE: Final = Progress(TicketState.DONE, is_drained=True)


class ShmOfferer:
    """The daemon's side. There is nothing to register: the control socket hands over all it takes."""

    name = "shm"

    def __init__(self) -> None:
        self.is_exit_drain_proof = True

    def register(self, arena: ArenaMemory) -> int:
        """Return 0: a target pointer is an offset into the arena."""
        if arena.device != "cpu":
            self.is_exit_drain_proof = False
        return 0

    def address(self) -> str:
        """Return nothing: the control socket hands the arenas over."""
        return ""

    def close(self) -> None:
        """Do nothing."""


class ShmWriter:
    """D's side: plain copies into a mapped arena.

    Args:
        arena: mapped writable.
        base_ptr: where the daemon says it starts.
    """

    def __init__(self, arena: AnyMappedArena, base_ptr: int = 0) -> None:
        self._arena = arena
        self._base_ptr = base_ptr
        self._tickets: set[int] = set()
        self._last_ticket = 0

    def register_source(self, address: int, size_bytes: int) -> None:
        """Do nothing: a copy reads from anywhere."""

    def submit(self, writes: Sequence[Write]) -> int:
        """Copy, and return a ticket that is final already.

        Raises:
            TransportError: a write is outside the arena, the arena is closed, or its daemon is gone; nothing
                was copied. Or a copy failed.
        """
        try:
            held = self._arena.hold()  # Until the copies are done, whoever closes it meanwhile.
            self._arena.check_alive()
        except (ValueError, SnapdError) as error:
            raise TransportError(str(error)) from None
        for write in writes:
            start = write.target_ptr - self._base_ptr
            if write.size_bytes < 0 or start < 0 or start + write.size_bytes > self._arena.size_bytes:
                raise TransportError(
                    f"a write of {write.size_bytes} bytes at {start} is outside an arena of "
                    f"{self._arena.size_bytes} bytes"
                )
        try:
            for write in writes:
                start = write.target_ptr - self._base_ptr
                self._arena.copy_in(start, write.source_address, write.size_bytes)
        except (ValueError, SnapdError) as error:
            raise TransportError(f"a copy failed: {error}") from None
        del held
        self._last_ticket += 1
        self._tickets.add(self._last_ticket)
        return self._last_ticket

    def poll(self, ticket: int) -> Progress:
        """Return ``DONE`` once.

        Raises:
            TransportError: there is no such ticket, or its end was told already.
        """
        self._check(ticket)
        self._tickets.discard(ticket)
        return _DONE

    def cancel(self, ticket: int) -> None:
        """Do nothing: it is done.

        Raises:
            TransportError: there is no such ticket, or its end was told already.
        """
        self._check(ticket)

    def _check(self, ticket: int) -> None:
        if ticket not in self._tickets:
            raise TransportError(f"no ticket {ticket}")

    def close(self) -> None:
        """Unmap the arena."""
        self._arena.close()
