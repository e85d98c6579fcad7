"""The staging ring: bounded memory of this process, out of which a transport writes.

Source: design, section 8.
"""

import mmap
import os
import threading
import weakref
from typing import Final, Protocol

import torch

from snapd.errors import InvalidRequest
from snapd.units import align_up, format_bytes

PAGE_BYTES: Final = mmap.PAGESIZE

# Memory that rings have let go of, by process and size. A transport may have it registered for some time
# yet, and memory that is mapped anew at a registered address cannot be registered.
_spare: Final[dict[tuple[int, int], list[torch.Tensor]]] = {}
# A collection of garbage may let go of a ring while the same thread holds it.
_spare_lock: Final = threading.RLock()
# What is lent may be read by a transport, whoever has forgotten the ring meanwhile.
# By process and address: a child may map its own memory where its parent's is, which must not be let go of
# there, as that would unmap the child's.
_lent: Final[dict[tuple[int, int], "StagingBuffer"]] = {}


class Filler(Protocol):
    """What fills a buffer without this thread, such as a GPU."""

    @property
    def is_over(self) -> bool:
        """Whether it fills it no more. Never waits."""
        ...


class Ring(Protocol):
    """Buffers of bounded memory, on the host or on a GPU."""

    @property
    def allocated_bytes(self) -> int:
        """Memory that it holds."""
        ...

    @property
    def lent(self) -> int:
        """Buffers that were taken and not given back."""
        ...

    def take(self) -> "StagingBuffer | None":
        """Return a buffer, or None if all are lent."""
        ...

    def give_back(self, buffer: "StagingBuffer") -> None:
        """Take a buffer back: nobody reads from it or writes to it any more."""
        ...

    def trim(self) -> None:
        """Let go of what is not lent."""
        ...

    def reclaim(self) -> bool:
        """Take back what is lent, unless it is being filled; return whether nothing is lent then."""
        ...


class StagingBuffer:
    """Page-aligned memory for one piece.

    Attributes:
        memory: uint8, shape [size_bytes].
        address: of its first byte.
        size_bytes: whole pages.
        region: address and size in bytes of what a transport is told of, the buffer and maybe its neighbours.
        pid: of the process that has it mapped; its children do not.
        filler: what fills it, if that is not this thread; None: nothing was told to.
    """

    __slots__ = ("address", "filler", "memory", "pid", "region", "size_bytes")

    def __init__(self, memory: torch.Tensor, region: tuple[int, int] | None = None) -> None:
        self.memory = memory
        self.address = memory.data_ptr()
        self.size_bytes = memory.numel()
        self.region = region or (self.address, self.size_bytes)
        self.pid = os.getpid()
        self.filler: Filler | None = None

    @property
    def is_being_filled(self) -> bool:
        """Whether something may write to it still."""
        try:
            return self.filler is not None and not self.filler.is_over
        except Exception:  # Whatever a driver says: it may.
            return True


class StagingRing:
    """Buffers that are taken and given back, for the process that made it.

    The last one given back is taken first, as its bytes are in the cache. Memory is allocated when it is
    first needed, and kept: a transport registers it once.

    Args:
        ring_bytes: all buffers together, at most.
        piece_bytes: the longest piece; a buffer is that, rounded up to whole pages.

    Raises:
        InvalidRequest: there is no room for one buffer.
    """

    def __init__(self, ring_bytes: int, piece_bytes: int) -> None:
        self._buffer_bytes = align_up(max(piece_bytes, 1), PAGE_BYTES)
        self.buffers_max = ring_bytes // self._buffer_bytes
        if piece_bytes < 1 or self.buffers_max < 1:
            raise InvalidRequest(
                f"a ring of {format_bytes(ring_bytes)} has no room for a piece of {format_bytes(piece_bytes)}"
            )
        self._free: list[StagingBuffer] = []
        self._lent: dict[int, StagingBuffer] = {}
        self._allocated = 0
        # Who keeps what a pusher left gives back in another thread.
        self._lock = threading.RLock()
        self._pid = os.getpid()
        weakref.finalize(self, _spare_all, self._free).atexit = False

    @property
    def allocated_bytes(self) -> int:
        """Memory that it holds."""
        return self._allocated * self._buffer_bytes

    @property
    def lent(self) -> int:
        """Buffers that were taken and not given back."""
        return len(self._lent)

    def take(self) -> StagingBuffer | None:
        """Return a buffer, or None if all are lent.

        Raises:
            RuntimeError: this is a fork of the process that made the ring, and the memory is not in it.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("a pusher's staging memory is not for forks: make a Pusher in each process")
        with self._lock:
            if self._free:
                buffer = self._free.pop()
            elif self._allocated < self.buffers_max:
                buffer = StagingBuffer(allocate_host(self._buffer_bytes))
                self._allocated += 1
            else:
                return None
            self._lent[buffer.address] = buffer
            _lent[buffer.pid, buffer.address] = buffer
            return buffer

    def give_back(self, buffer: StagingBuffer) -> None:
        """Take a buffer back: nobody reads from it any more.

        Raises:
            InvalidRequest: it is not lent.
        """
        with self._lock:
            if buffer.address not in self._lent:
                raise InvalidRequest("a buffer that is not lent was given back")
            del self._lent[buffer.address]
            del _lent[buffer.pid, buffer.address]
            self._free.append(buffer)

    def trim(self) -> None:
        """Let go of what is not lent."""
        with self._lock:
            self._allocated -= len(self._free)
            _spare_all(self._free)

    def reclaim(self) -> bool:
        """Take back what is lent, unless it is being filled; return whether nothing is lent then."""
        with self._lock:
            for buffer in [buffer for buffer in self._lent.values() if not buffer.is_being_filled]:
                self.give_back(buffer)
            return not self._lent


def _spare_all(buffers: list[StagingBuffer]) -> None:
    with _spare_lock:
        while buffers:
            buffer = buffers.pop()
            _spare.setdefault((buffer.pid, buffer.size_bytes), []).append(buffer.memory)


def allocate_host(size_bytes: int) -> torch.Tensor:
    """Return page-aligned memory of this process, uint8, shape [size_bytes]; whole pages."""
    with _spare_lock:
        spare = _spare.get((os.getpid(), size_bytes))
        if spare:
            return spare.pop()
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Pages that a device reads must stay this process's own when it forks.
    memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8)
