"""Writes from one GPU into an arena that is mapped from another of the host: plain peer copies.

Source: design, section 7.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from snapd.cudamapping import MappedCudaArena
from snapd.errors import SnapdError, TransportError
from snapd.transport.base import Progress, TicketState, Write


@dataclasses.dataclass(frozen=True)
class _Bytes:
    """Memory of a GPU for ``torch.as_tensor``; somebody else keeps it."""

    address: int
    size_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": (self.size_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "stream": None,
        }


class PeerWriter:
    """An ``ArenaWriter`` that copies on a stream of its own; nothing here waits for it.

    A copy that is done has landed. None can be called back, so a ticket is never cancelled.

    Args:
        arena: mapped; on any GPU.
        base_ptr: where the daemon says that it starts.
        device: the GPU that the sources are on.
    """

    def __init__(self, arena: MappedCudaArena, base_ptr: int, device: torch.device) -> None:
        self._arena = arena
        self._base_ptr = base_ptr
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._tickets: dict[int, tuple[torch.cuda.Event | None, tuple[torch.Tensor, ...]]] = {}
        self._last_ticket = 0

    def register_source(self, address: int, size_bytes: int) -> None:
        """Do nothing: a copy reads from anywhere on its GPU."""

    def submit(self, writes: Sequence[Write]) -> int:
        """Begin the copies, and return a ticket.

        Raises:
            TransportError: a write is outside the arena, the arena is closed, its daemon is gone, or a copy
                could not begin.
        """
        event: torch.cuda.Event | None = None
        targets: list[torch.Tensor] = []
        try:
            self._arena.check_alive()
            for write in writes:
                view = self._arena.view(write.target_ptr - self._base_ptr, write.size_bytes)
                targets.append(torch.as_tensor(view, device=self._arena.device))
            with torch.cuda.stream(self._stream), torch.inference_mode():
                for write, target in zip(writes, targets, strict=True):
                    source = torch.as_tensor(
                        _Bytes(write.source_address, write.size_bytes), device=self._device
                    )
                    target.copy_(source, non_blocking=True)
                if writes:
                    event = self._stream.record_event()
        except (ValueError, RuntimeError, SnapdError) as error:
            raise TransportError(f"a copy to {self._arena.device} could not begin: {error}") from None
        self._last_ticket += 1
        # The targets keep the arena mapped.
        self._tickets[self._last_ticket] = (event, tuple(targets))
        return self._last_ticket

    def poll(self, ticket: int) -> Progress:
        """Return how far it has come.

        Raises:
            TransportError: there is no such ticket, or its end was told already.
        """
        self._check(ticket)
        event, _ = self._tickets[ticket]
        if event is not None and not event.query():  # type: ignore[no-untyped-call]
            return Progress(TicketState.RUNNING)
        del self._tickets[ticket]
        return Progress(TicketState.DONE, is_drained=True)

    def cancel(self, ticket: int) -> None:
        """Do nothing: it has begun.

        Raises:
            TransportError: there is no such ticket, or its end was told already.
        """
        self._check(ticket)

    def _check(self, ticket: int) -> None:
        if ticket not in self._tickets:
            raise TransportError(f"no ticket {ticket}")

    def close(self) -> None:
        """Do nothing: the arena is the caller's."""
