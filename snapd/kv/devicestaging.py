"""The staging ring on a GPU: one allocation of the driver's own, out of which a transport writes.

It is not torch's: a CUDA IPC handle opens a whole allocation, of which torch's allocator may have lent the
rest to others, and with expandable segments there is none to open.

Source: design, sections 7 and 8.
"""

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

import structlog
import torch

from snapd import cuda
from snapd.cuda import CudaError
from snapd.errors import InvalidRequest, InvariantBroken, TransportError
from snapd.kv.staging import PAGE_BYTES, StagingBuffer, allocate_host
from snapd.units import align_up, format_bytes

# One is gathered into while another is written.
BUFFERS_MIN: Final = 2
_log: Final = structlog.get_logger("snapd.kv")
# What is lent may be read by a transport, whoever has forgotten the ring meanwhile.
_lent: Final[dict[tuple[int, int], StagingBuffer]] = {}


def array_interface(address: int, size_bytes: int) -> dict[str, Any]:
    """Return how ``torch.as_tensor`` and others are told of bytes of a GPU."""
    return {
        "version": 3,
        "shape": (size_bytes,),
        "typestr": "|u1",
        "data": (address, False),
        "strides": None,
        "stream": None,
    }


class _GpuMemory:
    """Memory of a GPU for ``torch.as_tensor``; freed after the last tensor of it."""

    def __init__(self, context: cuda.Context, size_bytes: int) -> None:
        address = context.allocate(size_bytes)
        finalizer = weakref.finalize(self, _free, context, address, os.getpid())
        finalizer.atexit = False  # At exit a thread may still use it; the driver takes it back then.
        self.__cuda_array_interface__: Final = array_interface(address, size_bytes)


def _free(context: cuda.Context, address: int, pid: int) -> None:
    if os.getpid() != pid:
        return  # In a forked child CUDA cannot be used, and the memory is the parent's.
    try:
        context.free(address)
        context.release()
    except CudaError as error:
        _log.warning("staging memory on a GPU was not given back", error=str(error))


def allocate_gpu(device: torch.device, size_bytes: int) -> torch.Tensor:
    """Return memory of *device* that is an allocation of its own, full of zeros; uint8, shape [size_bytes].

    Waits for what the GPU was told before.

    Raises:
        TransportError: it cannot be had; says what to change.
    """
    try:
        driver = cuda.driver()
        index = torch.cuda.current_device() if device.index is None else device.index
        context = cuda.Context(driver, driver.gpus[index])
        try:
            memory = _allocate(context, size_bytes)
        except CudaError:
            context.release()
            raise
    except CudaError as error:
        raise TransportError(
            f"{format_bytes(size_bytes)} of staging memory on {device} cannot be had ({error}): lower "
            "PushSettings.ring_bytes and gpu_piece_bytes, or leave the GPU more free memory"
        ) from None
    tensor = torch.as_tensor(memory, device=device)
    if tensor.data_ptr() != memory.__cuda_array_interface__["data"][0]:
        raise InvariantBroken("torch copied the staging memory instead of sharing it")
    return tensor


def _allocate(context: cuda.Context, size_bytes: int) -> _GpuMemory:
    try:
        return _GpuMemory(context, size_bytes)
    except CudaError as error:
        if error.code != cuda.OUT_OF_MEMORY:
            raise
    # torch keeps what it does not use.
    torch.cuda.empty_cache()
    return _GpuMemory(context, size_bytes)


class DeviceRing:
    """Buffers of one allocation on a device, taken and given back; see ``StagingRing``.

    All of its memory is allocated by ``allocate``, and a transport is told of all of it at once.

    Args:
        device: where.
        ring_bytes: all buffers together, at most.
        piece_bytes: the longest piece; a buffer is that, rounded up to whole pages.

    Raises:
        InvalidRequest: there is no room for ``BUFFERS_MIN`` buffers.
    """

    def __init__(self, device: torch.device, ring_bytes: int, piece_bytes: int) -> None:
        check_ring(ring_bytes, piece_bytes)
        self.device = device
        self._buffer_bytes = align_up(piece_bytes, PAGE_BYTES)
        self.buffers_max = ring_bytes // self._buffer_bytes
        self._buffers: tuple[StagingBuffer, ...] = ()
        self._free: list[StagingBuffer] = []
        self._withheld: list[StagingBuffer] = []
        self._pid = os.getpid()
        # Who keeps what a pusher left gives back in another thread, and so does who writes.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @property
    def buffers(self) -> tuple[StagingBuffer, ...]:
        """All buffers, taken or not; none before ``allocate``."""
        return self._buffers

    @property
    def allocated_bytes(self) -> int:
        """Memory that it holds."""
        return len(self._buffers) * self._buffer_bytes

    @property
    def lent(self) -> int:
        """Buffers that were taken and not given back."""
        return len(self._buffers) - len(self._free)

    def allocate(self) -> tuple[StagingBuffer, ...]:
        """Have its memory, and return all buffers.

        On a GPU this waits for what it was told before, the first time.

        Raises:
            TransportError: there is too little.
            RuntimeError: this is a fork of the process that made the ring.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("a pusher's staging memory is not for forks: make a Pusher in each process")
        with self._lock:
            if not self._buffers:
                size_bytes = self.buffers_max * self._buffer_bytes
                on_host = self.device.type == "cpu"
                # An engine may be in inference mode now and not when it is written to.
                with torch.inference_mode(False):
                    memory = allocate_host(size_bytes) if on_host else allocate_gpu(self.device, size_bytes)
                    parts = torch.split(memory, self._buffer_bytes)
                region = (memory.data_ptr(), size_bytes)
                self._buffers = tuple(StagingBuffer(part, region) for part in parts)
                self._free = list(reversed(self._buffers))
            return self._buffers

    def take(self) -> StagingBuffer | None:
        """Return a buffer, or None if all are lent; errors as ``allocate``."""
        with self._lock:
            self.allocate()
            if not self._free:
                return None
            buffer = self._free.pop()
            _lent[buffer.pid, buffer.address] = buffer
            return buffer

    def take_soon(self, is_unwanted: Callable[[], bool]) -> StagingBuffer | None:
        """Wait for a buffer, and return it; None: *is_unwanted* by now. Errors as ``allocate``.

        Whoever changes what *is_unwanted* says calls ``wake``.
        """
        with self._lock:
            while not is_unwanted():
                buffer = self.take()
                if buffer is not None:
                    return buffer
                self._changed.wait()
            return None

    def wake(self) -> None:
        """Have those that wait for a buffer see whether it is still wanted."""
        with self._lock:
            self._changed.notify_all()

    def withhold(self, buffer: StagingBuffer) -> bool:
        """Have a buffer stay lent until it is given back, unless it is the last that is left; return whether.

        For bytes that should not change, where it is worse to have nothing to go on with.
        """
        with self._lock:
            is_last = len(self._withheld) + 1 >= len(self._buffers)
            if not is_last:
                self._withheld.append(buffer)
            return not is_last

    def give_back(self, buffer: StagingBuffer) -> None:
        """Take a buffer back: nobody reads from it or writes to it any more.

        Raises:
            InvalidRequest: it is not lent.
        """
        with self._lock:
            if buffer not in self._buffers or buffer in self._free:
                raise InvalidRequest("a buffer that is not lent was given back")
            del _lent[buffer.pid, buffer.address]
            buffer.filler = None
            if buffer in self._withheld:
                self._withheld.remove(buffer)
            self._free.append(buffer)
            self._changed.notify_all()

    def trim(self) -> None:
        """Let go of the memory, unless something of it is lent; then it stays."""
        with self._lock:
            if not self.lent:
                self._buffers = ()
                self._free = []

    def reclaim(self) -> bool:
        """Take back what is lent, unless it is being filled; return whether nothing is lent then."""
        with self._lock:
            for buffer in self._buffers:
                if buffer not in self._free and not buffer.is_being_filled:
                    self.give_back(buffer)
            return not self.lent


def check_ring(ring_bytes: int, piece_bytes: int) -> None:
    """Check that a ring on a GPU has room for ``BUFFERS_MIN`` pieces.

    Raises:
        InvalidRequest: it has not.
    """
    if piece_bytes < 1 or ring_bytes // align_up(max(piece_bytes, 1), PAGE_BYTES) < BUFFERS_MIN:
        raise InvalidRequest(
            f"a ring of {format_bytes(ring_bytes)} on a GPU has no room for {BUFFERS_MIN} pieces of "
            f"{format_bytes(piece_bytes)}: raise ring_bytes or lower gpu_piece_bytes"
        )
