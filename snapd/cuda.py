"""What snapd needs of CUDA's driver API, by ctypes: the daemon has neither torch nor the toolkit.

Every return code is checked. Everything happens in a GPU's primary context, which is the one that torch and
the CUDA runtime (and so Mooncake) use; a function puts it on the calling thread for as long as it runs, so
any thread may call. A forked child cannot use CUDA: the driver's state stays with the parent.

Source: design, section 4.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from snapd.errors import SnapdError

LIBRARY: Final = "libcuda.so.1"
IPC_HANDLE_BYTES: Final = 64
# The driver carves smaller allocations out of blocks of this size, and an IPC handle opens the whole block.
BLOCK_BYTES: Final = 2 * 1024 * 1024

OUT_OF_MEMORY: Final = 2
NOT_INITIALIZED: Final = 3
DEVICE_UNAVAILABLE: Final = 46
NO_DEVICE: Final = 100
INVALID_CONTEXT: Final = 201
_HELP: Final = {
    NOT_INITIALIZED: "CUDA cannot be used in a forked child; start the process with spawn",
    DEVICE_UNAVAILABLE: "another process may have it for itself: nvidia-smi -c DEFAULT lets several use it",
    NO_DEVICE: "no GPU is visible here; see CUDA_VISIBLE_DEVICES, and whether the container has the GPU",
    INVALID_CONTEXT: "the process that has the memory cannot open its own handle",
}

_NAME_BYTES: Final = 96
_LAZY_ENABLE_PEER_ACCESS: Final = 1
_UUID_BYTES: Final = 16


class IpcHandle(ctypes.Structure):
    """``CUipcMemHandle``: passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES)]


def array_interface(address: int, size_bytes: int) -> dict[str, Any]:
    """Return ``__cuda_array_interface__`` of plain bytes on a GPU, for ``torch.as_tensor`` and others."""
    return {
        "version": 3,
        "shape": (size_bytes,),
        "typestr": "|u1",
        "data": (address, False),
        "strides": None,
        "stream": None,
    }


_Uuid = ctypes.c_ubyte * _UUID_BYTES
_ADDRESS: Final = ctypes.c_uint64
SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuDeviceGetCount": (ctypes.POINTER(ctypes.c_int),),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDeviceGetName": (ctypes.POINTER(ctypes.c_char), ctypes.c_int, ctypes.c_int),
    "cuDeviceGetUuid_v2": (ctypes.POINTER(_Uuid), ctypes.c_int),
    "cuDeviceCanAccessPeer": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuDevicePrimaryCtxRelease_v2": (ctypes.c_int,),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(ctypes.c_void_p),),
    "cuCtxSynchronize": (),
    "cuStreamSynchronize": (ctypes.c_void_p,),
    "cuMemGetInfo_v2": (ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)),
    "cuMemAlloc_v2": (ctypes.POINTER(_ADDRESS), ctypes.c_size_t),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemsetD8_v2": (_ADDRESS, ctypes.c_ubyte, ctypes.c_size_t),
    "cuMemcpy": (_ADDRESS, _ADDRESS, ctypes.c_size_t),
    "cuMemGetAddressRange_v2": (ctypes.POINTER(_ADDRESS), ctypes.POINTER(ctypes.c_size_t), _ADDRESS),
    "cuIpcGetMemHandle": (ctypes.POINTER(IpcHandle), _ADDRESS),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_ADDRESS), IpcHandle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_ADDRESS,),
}


class CudaError(SnapdError):
    """The driver is not there or refused; the message says which function, and what it said.

    Attributes:
        code: the driver's; 0: it was not asked.
    """

    def __init__(self, message: str, code: int = 0) -> None:
        self.code = code
        super().__init__(message)


class Gpu(msgspec.Struct, frozen=True):
    """A GPU that this process sees.

    Attributes:
        index: N of ``cuda:N`` in this process; another process may count otherwise.
        name: such as ``NVIDIA H200``.
        uuid: the same in every process.
        handle: the driver's.
    """

    index: int
    name: str
    uuid: str
    handle: int

    @property
    def device(self) -> str:
        """``cuda:N``, in this process."""
        return f"cuda:{self.index}"


def load_library() -> Any:
    """Return the driver's library.

    Raises:
        OSError: it is not there.
    """
    return ctypes.CDLL(LIBRARY)


class Driver:
    """The driver in this process, with the GPUs that it shows.

    Attributes:
        gpus: by index.

    Raises:
        CudaError: there is no driver, it is too old, or it does not start.
    """

    def __init__(self) -> None:
        try:
            library = load_library()
        except OSError:
            raise CudaError(f"no NVIDIA driver in this process: {LIBRARY} cannot be loaded") from None
        self._pid = os.getpid()
        self._functions: dict[str, Any] = {}
        for name, types in SIGNATURES.items():
            try:
                function = getattr(library, name)
            except AttributeError:
                raise CudaError(f"the NVIDIA driver is too old: it has no {name}") from None
            function.argtypes = types
            function.restype = ctypes.c_int
            self._functions[name] = function
        self.call("cuInit", 0)
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        self.gpus = tuple(self._gpu(index) for index in range(count.value))

    def _gpu(self, index: int) -> Gpu:
        handle = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(handle), index)
        name = ctypes.create_string_buffer(_NAME_BYTES)
        self.call("cuDeviceGetName", name, _NAME_BYTES, handle)
        uuid = _Uuid()
        self.call("cuDeviceGetUuid_v2", ctypes.byref(uuid), handle)
        digits = bytes(uuid).hex()
        parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
        return Gpu(index, name.value.decode(errors="replace"), f"GPU-{'-'.join(parts)}", handle.value)

    def can_access_peer(self, gpu: Gpu, other: Gpu) -> bool:
        """Return whether *gpu* can read and write memory of *other*, another one, by itself.

        Raises:
            CudaError: the driver does not say.
        """
        can_access = ctypes.c_int()
        self.call("cuDeviceCanAccessPeer", ctypes.byref(can_access), gpu.handle, other.handle)
        return can_access.value != 0

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of ``SIGNATURES``.

        Raises:
            CudaError: it did not return 0.
        """
        code = self._functions[name](*arguments)
        if code != 0:
            help_text = f" ({_HELP[code]})" if code in _HELP else ""
            error_name, text = self._said("cuGetErrorName", code), self._said("cuGetErrorString", code)
            raise CudaError(f"{name}: {error_name or 'error'} {code}: {text or 'unknown'}{help_text}", code)

    def _said(self, name: str, code: int) -> str:
        text = ctypes.c_char_p()
        if self._functions[name](code, ctypes.byref(text)) != 0 or text.value is None:
            return ""  # An error that even the driver does not know.
        return text.value.decode(errors="replace")

    def check_process(self) -> None:
        """Check that this is still the process that started the driver.

        Raises:
            CudaError: it is a forked child.
        """
        if os.getpid() != self._pid:
            raise CudaError(_HELP[NOT_INITIALIZED], NOT_INITIALIZED)


_driver: Driver | None = None
_driver_lock: Final = threading.Lock()


def driver() -> Driver:
    """Return this process's driver; it is started on the first call.

    Raises:
        CudaError: there is none, it does not start, or this is a forked child of a process that has it.
    """
    global _driver
    with _driver_lock:
        if _driver is None:
            _driver = Driver()
        _driver.check_process()
        return _driver


class Context:
    """A GPU's primary context, held until ``release``.

    Attributes:
        gpu: whose.

    Raises:
        CudaError: it cannot be had.
    """

    def __init__(self, of: Driver, gpu: Gpu) -> None:
        self.gpu = gpu
        self._driver = of
        self._handle = ctypes.c_void_p()
        of.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._handle), gpu.handle)
        self._is_held = True

    def check_process(self) -> None:
        """Check that this is not a forked child.

        Raises:
            CudaError: it is.
        """
        self._driver.check_process()

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make it the calling thread's context; what was there before comes back afterwards."""
        self._driver.call("cuCtxPushCurrent_v2", self._handle)
        try:
            yield
        finally:
            self._driver.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def memory_bytes(self) -> tuple[int, int]:
        """Return the GPU's free and total memory."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with self.current():
            self._driver.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, size_bytes: int) -> int:
        """Return the address of new memory on the GPU, of its own and full of zeros."""
        address = _ADDRESS()
        with self.current():
            self._driver.call("cuMemAlloc_v2", ctypes.byref(address), size_bytes)
            try:
                # What a former process left there must not be read through this one.
                self._driver.call("cuMemsetD8_v2", address, 0, size_bytes)
                self._driver.call("cuCtxSynchronize")
            except CudaError:
                self._driver.call("cuMemFree_v2", address)
                raise
        return address.value

    def free(self, address: int) -> None:
        """Give memory back."""
        with self.current():
            self._driver.call("cuMemFree_v2", address)

    def export_ipc(self, address: int) -> bytes:
        """Return what opens an allocation in another process, ``IPC_HANDLE_BYTES`` bytes."""
        handle = IpcHandle()
        with self.current():
            self._driver.call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open_ipc(self, handle: bytes) -> tuple[int, int]:
        """Return the address and size, here, of an allocation of another process; once a handle.

        Raises:
            CudaError: it cannot be opened.
        """
        address, base, size_bytes = _ADDRESS(), _ADDRESS(), ctypes.c_size_t()
        with self.current():
            self._driver.call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(address),
                IpcHandle.from_buffer_copy(handle),
                _LAZY_ENABLE_PEER_ACCESS,
            )
            try:
                self._driver.call(
                    "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size_bytes), address
                )
            except CudaError:
                self._driver.call("cuIpcCloseMemHandle", address)
                raise
        return address.value, base.value + size_bytes.value - address.value

    def close_ipc(self, address: int) -> None:
        """Close what ``open_ipc`` opened, when everything that this GPU was told to do is done.

        It waits for that, a whole forward pass perhaps: not for the thread of a scheduler.
        """
        with self.current():
            try:
                # A kernel that reads the memory may have been launched and not have run.
                self._driver.call("cuCtxSynchronize")
            finally:
                self._driver.call("cuIpcCloseMemHandle", address)

    def copy(self, to_address: int, from_address: int, size_bytes: int) -> None:
        """Copy, on the GPU or between it and the host, after what the default stream was told before.

        All bytes are there when this returns.
        """
        with self.current():
            self._driver.call("cuMemcpy", to_address, from_address, size_bytes)
            # The driver waits for a copy between GPU and host, not for one inside the GPU. Waiting for
            # this stream only: others may have much to do.
            self._driver.call("cuStreamSynchronize", None)

    def release(self) -> None:
        """Hold the context no more; it stays as long as anybody else holds it. May be called twice."""
        if self._is_held:
            self._is_held = False
            self._driver.call("cuDevicePrimaryCtxRelease_v2", self.gpu.handle)
