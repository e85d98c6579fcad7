"""Arenas on a GPU: one allocation each, shared with local processes by CUDA IPC.

Source: design, section 4.
"""

import contextlib
from types import TracebackType
from typing import Final, Self

import structlog

from snapd import cuda
from snapd.cuda import CudaError
from snapd.errors import StartupError
from snapd.units import align_up, format_bytes

_log: Final = structlog.get_logger("snapd.cudaarena")
_DEVICE_PREFIX: Final = "cuda:"


class CudaArena:
    """Memory of one rank on a GPU. Whoever has its handle may read and write it.

    It is full of zeros at first. Clients must be done with it when it is closed: what the driver does with
    memory that is freed while another process has it open is not defined.

    Attributes:
        rank: whose arena.
        device: ``cuda:N`` as the daemon counts.
        size_bytes: of the memory; whole blocks of the driver, so that nothing else is shared with it.
        address: of the first byte, in this process.
        gpu: where it is.

    Args:
        rank: whose arena.
        device: ``cuda:N``.
        size_bytes: wanted.

    Raises:
        StartupError: it cannot be had or cannot be shared; says why and what to change.
    """

    def __init__(self, rank: int, device: str, size_bytes: int) -> None:
        self.rank = rank
        self.device = device
        self.size_bytes = align_up(size_bytes, cuda.BLOCK_BYTES)
        self.address = 0
        self._handle = b""
        index = int(device.removeprefix(_DEVICE_PREFIX))
        try:
            driver = cuda.driver()
            if index >= len(driver.gpus):
                seen = ", ".join(f"{gpu.device} {gpu.name}" for gpu in driver.gpus) or "none"
                raise StartupError(
                    f"arena {rank}: device {device} cannot be had: the GPUs of this process are: {seen}; "
                    "name one of them, or see CUDA_VISIBLE_DEVICES"
                )
            self.gpu = driver.gpus[index]
            self._context = cuda.Context(driver, self.gpu)
        except CudaError as error:
            raise StartupError(
                f"arena {rank}: device {device} cannot be had: {error}; use device = cpu or start the "
                "container with the GPU"
            ) from None
        try:
            self._take()
        except BaseException:
            self.close()
            raise

    def _take(self) -> None:
        free_bytes = total_bytes = 0
        try:
            free_bytes, total_bytes = self._context.memory_bytes()
            if self.size_bytes > free_bytes:
                raise CudaError("too little is free", cuda.OUT_OF_MEMORY)
            self.address = self._context.allocate(self.size_bytes)
        except CudaError as error:
            where = f"arena {self.rank}: {format_bytes(self.size_bytes)} of memory on {self.device}"
            if error.code == cuda.OUT_OF_MEMORY:
                raise StartupError(
                    f"{where} ({self.gpu.name}) are wanted, and {format_bytes(free_bytes)} of "
                    f"{format_bytes(total_bytes)} are free: lower size, or free memory of the GPU"
                ) from None
            raise StartupError(f"{where} cannot be had: {error}") from None
        try:
            self._handle = self._context.export_ipc(self.address)
        except CudaError as error:
            raise StartupError(
                f"arena {self.rank}: the memory on {self.device} cannot be shared with other processes: "
                f"{error}; use device = cpu"
            ) from None

    @property
    def gpu_uuid(self) -> str:
        """Which GPU it is on, for processes that count otherwise."""
        return self.gpu.uuid

    def ipc_handle(self) -> bytes:
        """Return what opens it in another process of this host, 64 bytes."""
        return self._handle

    def map(self) -> int:
        """Return where it starts: it is mapped from the beginning."""
        return self.address

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Make its GPU the calling thread's, as registering it wants it."""
        return self._context.current()

    def close(self) -> None:
        """Give the memory back. May be called twice."""
        address, self.address, self._handle = self.address, 0, b""
        try:
            if address:
                self._context.free(address)
            self._context.release()
        except CudaError as error:
            # The process ends soon, and the driver takes everything back then.
            _log.warning("the memory was not given back", rank=self.rank, error=str(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
