"""Writes from one GPU into an arena that is mapped from another of the host: plain peer copies.

Source: design, section 7.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from snapd.cudamapping import MappedCudaArena
from snapd.errors import TransportError
from snapd.kv.devicestaging import array_interface
from snapd.transport.base import Progress, TicketState, Write


class _Bytes:
    """Memory of a GPU for ``torch.as_tensor``; somebody else keeps it."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = array_interface(address, size_bytes)


@dataclasses.dataclass(frozen=True)
class _Ticket:
    """Copies that were begun.

    Attributes:
        event: after the last of them; None: there was none, or it could not be recorded.
        targets: keep the arena mapped.
        failure: why not all of them were begun, or how far they are cannot be known.
    """

    event: torch.cuda.Event | None
    targets: tuple[torch.Tensor, ...]
    failure: str = ""


class PeerWriter:
    """An ``ArenaWriter`` that copies on a stream of its own; nothing here waits for it.

    A copy that is done has landed. None can be called back, so a ticket is never cancelled.
    The first one is made here, of nothing of anybody's: it opens the way between the GPUs, which waits.

    Args:
        arena: mapped; on any GPU.
        base_ptr: where the daemon says that it starts.
        device: the GPU that the sources are on.
    """

    def __init__(self, arena: MappedCudaArena, base_ptr: int, device: torch.device) -> None:
        self._arena = arena
        self._base_ptr = base_ptr
        self._device = device
        # A copy also comes after what the target's stream was told, and before what it is told next.
        self._streams = [
            torch.cuda.Stream(each)  # type: ignore[no-untyped-call]
            for each in (torch.device(arena.device), device)
            if each.type == "cuda"
        ]
        with self._on_streams():
            torch.empty(1, dtype=torch.uint8, device=arena.device).copy_(
                torch.empty(1, dtype=torch.uint8, device=device), non_blocking=True
            )
        self._tickets: dict[int, _Ticket] = {}
        self._last_ticket = 0

    def register_source(self, address: int, size_bytes: int) -> None:
        """Do nothing: a copy reads from anywhere on its GPU."""

    def submit(self, writes: Sequence[Write]) -> int:
        """Begin the copies, and return a ticket.

        A ticket of which some copies began and then one could not fails when those are over.

        Raises:
            TransportError: a write is outside the arena, the arena is closed, its daemon is gone, or no copy
                could begin.
        """
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        event: torch.cuda.Event | None = None
        failure = ""
        begun = 0
        try:
            self._arena.check_alive()
            for write in writes:
                offset_bytes = write.target_ptr - self._base_ptr
                target = self._tensor(
                    self._arena.view(offset_bytes, write.size_bytes),
                    self._arena.address + offset_bytes,
                    self._arena.device,
                )
                source = self._tensor(
                    _Bytes(write.source_address, write.size_bytes), write.source_address, self._device
                )
                pairs.append((target, source))
            with self._on_streams(), torch.inference_mode():
                try:
                    for target, source in pairs:
                        begun += 1  # One that fails may have begun.
                        target.copy_(source, non_blocking=True)
                except Exception:
                    event = self._record()
                    raise
                except BaseException:
                    self._wait()  # There will be no ticket to poll.
                    raise
                if begun:
                    event = self._record()
        except Exception as error:
            failure = f"a copy to {self._arena.device} could not begin: {error}"
            if not begun:
                raise TransportError(failure) from None
        self._last_ticket += 1
        targets = tuple(target for target, _ in pairs)
        self._tickets[self._last_ticket] = _Ticket(event, targets, failure)
        return self._last_ticket

    @contextlib.contextmanager
    def _on_streams(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            # The source's last: its GPU is the current one then.
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def _record(self) -> torch.cuda.Event | None:
        return self._streams[-1].record_event() if self._streams else None

    def _wait(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    def _tensor(self, memory: Any, address: int, device: torch.device | str) -> torch.Tensor:
        """Return memory as a tensor, shared.

        Raises:
            TransportError: torch copied it.
        """
        tensor = torch.as_tensor(memory, device=device)
        if tensor.data_ptr() != address:
            raise TransportError(f"torch copied {tensor.numel()} bytes on {device} instead of sharing them")
        return tensor

    def poll(self, ticket: int) -> Progress:
        """Return how far it has come.

        Raises:
            TransportError: there is no such ticket, or its end was told already.
        """
        self._check(ticket)
        found = self._tickets[ticket]
        failure = found.failure
        is_over = found.event is not None or not failure
        try:
            if found.event is not None and not found.event.query():  # type: ignore[no-untyped-call]
                return Progress(TicketState.RUNNING)
        except RuntimeError as error:
            is_over = False
            failure = f"nobody knows how far a copy to {self._arena.device} is: {error}"
        del self._tickets[ticket]
        if failure:
            return Progress(TicketState.FAILED, is_over, failure)
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
