"""The memory of a self-test's processes, on the host or on a GPU.

Bytes are made and compared on the host: those on a GPU are copied there and back by the driver.

Source: design, section 4.
"""

import contextlib
import ctypes
import mmap
from collections.abc import Iterator
from typing import Final

from snapd import cuda
from snapd.arena import HostArena
from snapd.cuda import CudaError
from snapd.cudaarena import CudaArena
from snapd.doctor.messages import HOST_DEVICE
from snapd.units import align_up, format_bytes

_CUDA_PREFIX: Final = "cuda:"


def index_of(device: str) -> int:
    """Return N of ``cuda:N``."""
    return int(device.removeprefix(_CUDA_PREFIX))


def neighbour_of(index: int, num_gpus: int) -> int:
    """Return the GPU from which an arena is written to beside its own; its own if there is no other."""
    return (index + 1) % num_gpus


class Buffer:
    """Bytes that a process makes or compares.

    Attributes:
        address: of the first, on the host or on a GPU.
        view: the same bytes on the host, shape [size_bytes]; of those on a GPU a copy.

    Args:
        address: see above.
        view: see above.
        context: of the GPU; None: they are on the host.
    """

    def __init__(self, address: int, view: memoryview, context: cuda.Context | None = None) -> None:
        self.address = address
        self.view = view
        self._context = context

    def upload(self) -> None:
        """Bring the bytes of ``view`` to where they belong.

        Raises:
            CudaError: the copy failed.
        """
        if self._context is not None:
            self._context.copy(self.address, _address_of(self.view), len(self.view))

    def download(self) -> None:
        """Bring the bytes into ``view``.

        Raises:
            CudaError: the copy failed.
        """
        if self._context is not None:
            self._context.copy(_address_of(self.view), self.address, len(self.view))

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Make their GPU, if they are on one, the calling thread's: Mooncake looks and copies from that."""
        return contextlib.nullcontext() if self._context is None else self._context.current()


def _address_of(memory: memoryview | mmap.mmap) -> int:
    # The object that holds the buffer goes at once: a mapping that is held cannot be closed.
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@contextlib.contextmanager
def arena_on(device: str, size_bytes: int) -> Iterator[tuple[HostArena | CudaArena, Buffer]]:
    """Make an arena as the daemon does, and a buffer of its first *size_bytes*.

    Raises:
        StartupError: it cannot be had; says why.
        CudaError: its GPU cannot be used.
    """
    if device == HOST_DEVICE:
        with HostArena(0, size_bytes, hugepages="off") as host_arena:
            address = host_arena.map()
            view = memoryview((ctypes.c_ubyte * size_bytes).from_address(address)).cast("B")
            yield host_arena, Buffer(address, view)
        return
    with CudaArena(0, device, size_bytes) as arena, _context_of(device) as context:
        yield arena, Buffer(arena.address, memoryview(bytearray(size_bytes)), context)


@contextlib.contextmanager
def source_on(device: str, size_bytes: int) -> Iterator[Buffer]:
    """Make memory to write from.

    Raises:
        CudaError: it cannot be had; says why.
    """
    if device == HOST_DEVICE:
        with mmap.mmap(-1, size_bytes) as memory, memoryview(memory) as view:
            yield Buffer(_address_of(memory), view)
        return
    with _context_of(device) as context:
        try:
            # Whole blocks: an IPC handle, and so a registration for NVLink, opens no less.
            address = context.allocate(align_up(size_bytes, cuda.BLOCK_BYTES))
        except CudaError as error:
            raise CudaError(
                f"{format_bytes(size_bytes)} of memory on {device} cannot be had to write from: {error}",
                error.code,
            ) from None
        try:
            yield Buffer(address, memoryview(bytearray(size_bytes)), context)
        finally:
            context.free(address)


@contextlib.contextmanager
def _context_of(device: str) -> Iterator[cuda.Context]:
    driver, index = cuda.driver(), index_of(device)
    if index >= len(driver.gpus):
        raise CudaError(
            f"this process sees {len(driver.gpus)} GPUs, and {device} is none of them; see "
            "CUDA_VISIBLE_DEVICES"
        )
    context = cuda.Context(driver, driver.gpus[index])
    try:
        yield context
    finally:
        context.release()
