"""Mapping an arena that lies on a GPU into this process, by the CUDA IPC handle that the daemon hands over.

CUDA knows no mapping for reading only: whoever opens the handle can write. What is read is compared with
checksums all the same, so a stray write is noticed.

Source: design, sections 4 and 5.
"""

import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self, TypeAlias

import structlog

from snapd import cuda
from snapd.cuda import CudaError
from snapd.daemonlife import DaemonLife
from snapd.errors import ConnectionLost, ProtocolError
from snapd.lifewatch import WATCH
from snapd.units import format_bytes
from snapd.wire import CudaMemory

_log: Final = structlog.get_logger("snapd.cudamapping")


class Opening:
    """An allocation of another process, opened here; closed after the last reference to this object.

    Closing waits for all that the GPU was told before, so it is done in a thread of its own.

    Attributes:
        address: of the first byte in this process.
        size_bytes: of the allocation.
        context: of the GPU that uses it: the one that it lies on, or another that reaches it.
        home_device: where it lies.
    """

    def __init__(self, context: cuda.Context, key: "_Key", home_device: str) -> None:
        self.context = context
        self.home_device = home_device
        try:
            self.address, self.size_bytes = context.open_ipc(key[0])
        except CudaError:
            context.release()
            raise
        finalizer = weakref.finalize(self, _close_later, key, context, self.address, os.getpid())
        finalizer.atexit = False  # At exit a thread may still use it; the driver closes it then.
        _open[key] = threading.Event()


# A handle, the epoch of the daemon that gave it, and the GPU that uses it.
_Key: TypeAlias = tuple[bytes, str, str]
# One for each handle of a life of the daemon, as long as anything of it is used.
_openings: Final["weakref.WeakValueDictionary[_Key, Opening]"] = weakref.WeakValueDictionary()
# What is open, until it is closed; the driver opens a handle once a context. From the beginning, as another
# thread can see that the last reference is gone before anything is done about it.
_open: Final[dict[_Key, threading.Event]] = {}
os.register_at_fork(after_in_child=_open.clear)
# A collection of garbage may close one while another is being opened by the same thread.
_lock: Final = threading.RLock()


def _close_later(key: _Key, context: cuda.Context, address: int, pid: int) -> None:
    if os.getpid() != pid:
        return  # In a forked child CUDA cannot be used, and what is open is the parent's.
    # Not to be waited for at exit: the driver closes it then.
    thread = threading.Thread(target=_close, args=(key, context, address), name="snapd-unmap", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # The process ends, or has too many threads.
        _close(key, context, address)


def _close(key: _Key, context: cuda.Context, address: int) -> None:
    # Without the lock, as others must not wait for the GPU to open something else.
    steps: tuple[Callable[[], None], ...] = (lambda: context.close_ipc(address), context.release)
    try:
        for step in steps:
            try:
                step()
            except CudaError as error:
                _log.warning("an arena on a GPU was not closed cleanly", error=str(error))
    finally:
        _open.pop(key).set()


def wait_closed() -> None:
    """Wait until all that was let go of is unmapped; it takes as long as the GPUs have work."""
    for key in tuple(_open):
        if key not in _openings:
            _wait_closed(key)


def _wait_closed(key: _Key) -> None:
    is_closed = _open.get(key)
    if is_closed is not None:
        is_closed.wait()


class CudaBytes:
    """Bytes of an arena on a GPU, for ``torch.as_tensor`` and others that know the interface.

    They stay mapped as long as this object is there, and a tensor made of it keeps it.
    """

    def __init__(self, opening: Opening, offset_bytes: int, size_bytes: int) -> None:
        self._opening = opening
        self.__cuda_array_interface__: Final = cuda.array_interface(
            opening.address + offset_bytes, size_bytes
        )


class MappedCudaArena:
    """One rank's arena on a GPU, in this process. See ``mapping.MappedArena`` for one on the host.

    It stays open until it is closed and no ``view`` of it, nor a tensor made of one, is left; it is unmapped
    a little later, by a thread that waits for the GPU. A forked child cannot use it. Once the daemon is gone
    the memory is nobody's, and what has no view is unmapped: ``check_alive`` before every use.

    Attributes:
        rank: whose arena.
        size_bytes: of the arena.
        epoch: the life of the daemon that owns it.
        address: of the first byte, on the GPU, as this process sees it.
        device: the GPU that uses it, ``cuda:N`` as this process counts. torch takes what another GPU has, and
            this one reaches, for its own.
        home_device: the GPU that it lies on.
        life: of the daemon.
        writable: always, whatever was asked for.
    """

    writable: Final = True

    def __init__(self, rank: int, size_bytes: int, epoch: str, opening: Opening, life: DaemonLife) -> None:
        self.rank = rank
        self.size_bytes = size_bytes
        self.epoch = epoch
        self.address = opening.address
        self.device = opening.context.gpu.device
        self.home_device = opening.home_device
        self.life: Final = life
        self._opening: Opening | None = opening
        self._is_closed = False
        WATCH.add(self)

    @property
    def buffer(self) -> memoryview:
        """Not to be had.

        Raises:
            ValueError: always: the host does not see this memory.
        """
        raise ValueError(
            f"arena {self.rank} lies on {self.home_device}: the host does not see it; use view()"
        )

    @property
    def is_abandoned(self) -> bool:
        """The daemon that owns it is gone, or this mapping is closed."""
        return self.life.is_over

    def check_alive(self) -> None:
        """Check that the daemon that owns it lives.

        Raises:
            ConnectionLost: it does not; nothing of the arena may be read or written any more.
        """
        if self.is_abandoned:
            raise ConnectionLost(f"the daemon is gone, and arena {self.rank} on {self.home_device} with it")

    def hold(self) -> Opening:
        """Return what keeps it mapped.

        Raises:
            ValueError: it is closed.
            ConnectionLost: the daemon is gone.
            CudaError: this is a forked child.
        """
        opening = self._opening
        if opening is None:
            if not self._is_closed:
                self.check_alive()
            raise ValueError(f"the mapping of arena {self.rank} is closed")
        opening.context.check_process()
        return opening

    def view(self, offset_bytes: int, size_bytes: int) -> CudaBytes:
        """Return *size_bytes* of it from *offset_bytes* on.

        Raises:
            ValueError: it is closed, or they are not all inside.
            ConnectionLost: the daemon is gone.
            CudaError: this is a forked child.
        """
        self.check_range(offset_bytes, size_bytes)
        return CudaBytes(self.hold(), offset_bytes, size_bytes)

    def check_range(self, offset_bytes: int, size_bytes: int) -> None:
        """Check that bytes are inside.

        Raises:
            ValueError: they are not.
        """
        if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > self.size_bytes:
            raise ValueError(f"{size_bytes} bytes at {offset_bytes} leave an arena of {self.size_bytes}")

    def copy_in(self, offset_bytes: int, source_address: int, size_bytes: int) -> None:
        """Copy from memory of this process, host or GPU, and wait for it.

        It comes after what the default stream was told before; other streams are the caller's to wait for.

        Raises:
            ValueError: the arena is closed, or the bytes are not all inside.
            ConnectionLost: the daemon is gone.
            CudaError: the copy failed, or this is a forked child.
        """
        self.check_range(offset_bytes, size_bytes)
        held = self.hold()  # Until the copy is done, whoever lets go of it meanwhile.
        held.context.copy(self.address + offset_bytes, source_address, size_bytes)

    def abandon(self) -> None:
        """Let go of the memory because the daemon is gone, from any thread."""
        self._opening = None

    def close(self) -> None:
        """Let go of the memory, without waiting for the GPU. May be called twice."""
        self._is_closed = True
        self._opening = None
        self.life.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_cuda_arena(
    rank: int,
    size_bytes: int,
    epoch: str,
    memory: CudaMemory,
    life: DaemonLife,
    device: str | None = None,
) -> MappedCudaArena:
    """Open an arena that the daemon handed over.

    A GPU uses it, as fast as the link between the two is, if it reaches the one that the arena lies on.
    Otherwise copies from and to that GPU go through the host's memory.

    Args:
        rank: whose arena.
        size_bytes: of it, as the daemon says.
        epoch: of the daemon.
        memory: what opens it.
        life: of the daemon; the arena closes it.
        device: the GPU that is to use it, ``cuda:N`` in this process; None, or one that does not reach the
            arena's: the arena's own.

    Raises:
        CudaError: there is no driver, this process does not see the GPU, or it cannot be opened.
        ProtocolError: what came is no handle, or opens less than was said.
    """
    if len(memory.ipc_handle) != cuda.IPC_HANDLE_BYTES:
        raise ProtocolError(f"a CUDA IPC handle of {len(memory.ipc_handle)} bytes")
    driver = cuda.driver()
    gpu = next((gpu for gpu in driver.gpus if gpu.uuid == memory.gpu_uuid), None)
    if gpu is None:
        seen = ", ".join(gpu.uuid for gpu in driver.gpus) or "none"
        raise CudaError(
            f"arena {rank} lies on {memory.gpu_uuid} ({memory.device} of the daemon), and this process sees "
            f"other GPUs: {seen}; add it to CUDA_VISIBLE_DEVICES, or to the container"
        )
    user = _user(driver, gpu, device)
    try:
        opening = _opened(driver, user, gpu, memory.ipc_handle, epoch)
    except CudaError as error:
        if user == gpu:
            raise CudaError(
                f"{error}; containers must share the host's IPC and PID namespaces with the daemon's",
                error.code,
            ) from None
        # A GPU has few peers at a time. Copies go through the host's memory then.
        _log.warning("an arena could not be opened from another GPU", device=user.device, error=str(error))
        return open_cuda_arena(rank, size_bytes, epoch, memory, life)
    if not 0 < size_bytes <= opening.size_bytes:
        raise ProtocolError(
            f"an arena of {size_bytes} bytes in an allocation of {format_bytes(opening.size_bytes)}"
        )
    return MappedCudaArena(rank, size_bytes, epoch, opening, life)


def _opened(driver: cuda.Driver, user: cuda.Gpu, owner: cuda.Gpu, ipc_handle: bytes, epoch: str) -> Opening:
    """Return the opening of a handle for *user*, the one that there is or a new one.

    Raises:
        CudaError: it cannot be opened.
    """
    key = (ipc_handle, epoch, user.uuid)
    while True:
        with _lock:
            opening = _openings.get(key)
            if opening is None and key not in _open:
                opening = _openings[key] = Opening(cuda.Context(driver, user), key, owner.device)
        if opening is not None:
            return opening
        # Without the lock, as above.
        _wait_closed(key)


def _user(driver: cuda.Driver, owner: cuda.Gpu, device: str | None) -> cuda.Gpu:
    """Return the GPU of *device* if it reaches the memory of *owner*, and else *owner*."""
    wanted = next((gpu for gpu in driver.gpus if gpu.device == device), owner)
    if wanted == owner or not driver.can_access_peer(wanted, owner):
        return owner
    return wanted
