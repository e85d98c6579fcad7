# ruff: noqa: N802 - the names are the driver's
"""A CUDA driver over host memory, for machines without a GPU: ``install`` puts it in the real one's place.

It has what ``snapd.cuda`` uses, with the real argument types, and keeps to the real rules: a context must be
current, what is freed twice is refused, and the process that has the memory cannot open its own handle. The
memory is a memfd, so that another process on this machine that has the fake as well can open it.
"""

import ctypes
import mmap
import os
import struct
import threading
import traceback
from dataclasses import dataclass, field

from snapd import cuda, cudamapping

GIB = 1 << 30
MIB = 1 << 20
INVALID_VALUE = 1
INVALID_DEVICE = 101
INVALID_CONTEXT = 201
INVALID_HANDLE = 400
BROKEN = 999
_NAMES = {
    1: (b"CUDA_ERROR_INVALID_VALUE", b"invalid argument"),
    2: (b"CUDA_ERROR_OUT_OF_MEMORY", b"out of memory"),
    3: (b"CUDA_ERROR_NOT_INITIALIZED", b"initialization error"),
    46: (b"CUDA_ERROR_DEVICE_UNAVAILABLE", b"CUDA-capable device(s) is/are busy or unavailable"),
    100: (b"CUDA_ERROR_NO_DEVICE", b"no CUDA-capable device is detected"),
    201: (b"CUDA_ERROR_INVALID_CONTEXT", b"invalid device context"),
    400: (b"CUDA_ERROR_INVALID_HANDLE", b"invalid resource handle"),
    700: (b"CUDA_ERROR_ILLEGAL_ADDRESS", b"an illegal memory access was encountered"),
    999: (b"CUDA_ERROR_UNKNOWN", b"unknown error"),
}
_HANDLE = struct.Struct("<QQQQ")
_MAGIC = 0x66616B65
# On the stack in front of a driver's context; a real one is a pointer too.
_FIRST_CONTEXT = 0x1000


@dataclass
class Memory:
    """Bytes of an allocation, here."""

    gpu: int
    fd: int
    size_bytes: int
    map: mmap.mmap
    address: int


@dataclass
class FakeDriver:
    """The library, as ``ctypes`` would give it.

    Attributes:
        uuids: of the GPUs that this process sees, in its order.
        total_bytes: memory of each.
        fails: functions that return a code instead of doing anything.
        opens_own: a handle may be opened by the process that has the memory, as no real driver does.
        has_peers: every GPU reaches the memory of every other one.
        calls: names in order, those that ask for nothing but a name or text left out.
        copied: (to, from, size) of every copy.
    """

    uuids: tuple[bytes, ...] = (bytes(range(16)), bytes(range(16, 32)))
    total_bytes: int = GIB
    fails: dict[str, int] = field(default_factory=dict)
    opens_own: bool = False
    has_peers: bool = True

    def __post_init__(self):
        self.calls = []
        self.copied = []
        self.errors = []
        self.allocated: dict[int, Memory] = {}
        self.opened: dict[int, Memory] = {}
        self.open_counts: dict[int, int] = {}
        self.retained = [0] * len(self.uuids)
        self.pid = 0
        self._stacks = threading.local()
        for name, types in cuda.SIGNATURES.items():
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *types)(self._guarded(name)))

    def _guarded(self, name):
        function = getattr(self, f"_{name}")

        def call(*arguments):
            try:
                if not name.startswith("cuGetError"):
                    self.calls.append(name)
                if name in self.fails:
                    return self.fails[name]
                if name != "cuInit" and not name.startswith("cuGetError") and self.pid != os.getpid():
                    return cuda.NOT_INITIALIZED
                return function(*arguments) or 0
            except Exception:
                # In a callback nobody would see it.
                self.errors.append(traceback.format_exc())
                return BROKEN

        return call

    @property
    def stack(self):
        """The calling thread's contexts, as GPU numbers."""
        if not hasattr(self._stacks, "value"):
            self._stacks.value = []
        return self._stacks.value

    def used_bytes(self, gpu=0):
        """Return what is allocated on a GPU by this process."""
        return sum(memory.size_bytes for memory in self.allocated.values() if memory.gpu == gpu)

    def check_clean(self):
        """Check that nothing is allocated, open, held or current, and that the fake itself was right."""
        cudamapping.wait_closed()
        assert not self.errors, self.errors[0]
        assert (self.allocated, self.opened, self.stack) == ({}, {}, [])
        assert self.retained == [0] * len(self.uuids)

    # --- the functions -------------------------------------------------------------------------

    def _cuInit(self, flags):
        assert flags == 0
        if self.pid not in (0, os.getpid()):
            return cuda.NOT_INITIALIZED
        self.pid = os.getpid()
        return 0 if self.uuids else cuda.NO_DEVICE

    def _cuGetErrorName(self, code, text):
        if code not in _NAMES:
            return INVALID_VALUE
        text[0] = _NAMES[code][0]
        return 0

    def _cuGetErrorString(self, code, text):
        if code not in _NAMES:
            return INVALID_VALUE
        text[0] = _NAMES[code][1]
        return 0

    def _cuDeviceGetCount(self, count):
        count[0] = len(self.uuids)

    def _cuDeviceGet(self, handle, index):
        if not 0 <= index < len(self.uuids):
            return INVALID_DEVICE
        handle[0] = 40 + index  # Not the index itself: whoever mixes them up must notice.
        return 0

    def _cuDeviceGetName(self, text, size, handle):
        name = f"Fake GPU {handle - 40}".encode() + b"\0"
        assert len(name) <= size
        for at, byte in enumerate(name):
            text[at] = byte

    def _cuDeviceGetUuid_v2(self, uuid, handle):
        uuid[0][:] = self.uuids[handle - 40]

    def _cuDeviceCanAccessPeer(self, can_access, handle, other):
        if handle == other:
            return INVALID_DEVICE  # Whoever asks has mixed something up.
        can_access[0] = self.has_peers
        return 0

    def _cuDevicePrimaryCtxRetain(self, context, handle):
        self.retained[handle - 40] += 1
        context[0] = _FIRST_CONTEXT + handle - 40

    def _cuDevicePrimaryCtxRelease_v2(self, handle):
        if self.retained[handle - 40] == 0:
            return INVALID_CONTEXT
        self.retained[handle - 40] -= 1
        return 0

    def _cuCtxPushCurrent_v2(self, context):
        gpu = (context or 0) - _FIRST_CONTEXT
        if not 0 <= gpu < len(self.uuids) or not self.retained[gpu]:
            return INVALID_CONTEXT
        self.stack.append(gpu)
        return 0

    def _cuCtxPopCurrent_v2(self, context):
        if not self.stack:
            return INVALID_CONTEXT
        context[0] = _FIRST_CONTEXT + self.stack.pop()
        return 0

    def _cuCtxSynchronize(self):
        return 0 if self.stack else INVALID_CONTEXT

    def _cuStreamSynchronize(self, stream):
        assert stream is None
        return 0 if self.stack else INVALID_CONTEXT

    def _cuMemGetInfo_v2(self, free, total):
        if not self.stack:
            return INVALID_CONTEXT
        free[0] = self.total_bytes - self.used_bytes(self.stack[-1])
        total[0] = self.total_bytes
        return 0

    def _cuMemAlloc_v2(self, address, size_bytes):
        if not self.stack:
            return INVALID_CONTEXT
        if size_bytes > self.total_bytes - self.used_bytes(self.stack[-1]):
            return cuda.OUT_OF_MEMORY
        fd = os.memfd_create("gpu", os.MFD_CLOEXEC)
        os.ftruncate(fd, size_bytes)
        memory = self._map(self.stack[-1], fd, size_bytes)
        # What a former process has left there.
        memory.map[:64] = b"\xaa" * 64
        memory.map[-64:] = b"\xaa" * 64
        self.allocated[memory.address] = memory
        address[0] = memory.address
        return 0

    def _map(self, gpu, fd, size_bytes):
        mapped = mmap.mmap(fd, size_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        return Memory(gpu, fd, size_bytes, mapped, address)

    def _cuMemFree_v2(self, address):
        memory = self.allocated.pop(address, None)
        if memory is None or not self.stack or self.stack[-1] != memory.gpu:
            return INVALID_VALUE
        os.close(memory.fd)
        return 0

    def _find(self, address):
        for memory in (*self.allocated.values(), *self.opened.values()):
            if memory.address <= address < memory.address + memory.size_bytes:
                return memory
        return None

    def _cuMemsetD8_v2(self, address, value, size_bytes):
        memory = self._find(address)
        if memory is None or not self.stack or self.stack[-1] != memory.gpu:
            return INVALID_VALUE
        ctypes.memset(address, value, size_bytes)
        return 0

    def _cuMemcpy(self, to_address, from_address, size_bytes):
        if not self.stack:
            return INVALID_CONTEXT
        self.copied.append((to_address, from_address, size_bytes))
        ctypes.memmove(to_address, from_address, size_bytes)
        return 0

    def _cuMemGetAddressRange_v2(self, base, size_bytes, address):
        memory = self._find(address)
        if memory is None or not self.stack:
            return INVALID_VALUE
        base[0], size_bytes[0] = memory.address, memory.size_bytes
        return 0

    def _cuIpcGetMemHandle(self, handle, address):
        memory = self.allocated.get(address)
        if memory is None or not self.stack:
            return INVALID_VALUE
        packed = _HANDLE.pack(_MAGIC, os.getpid(), memory.fd, memory.size_bytes)
        packed += self.uuids[memory.gpu]
        handle[0].reserved[: len(packed)] = packed
        return 0

    def _cuIpcOpenMemHandle_v2(self, address, handle, flags):
        assert flags == 1
        content = bytes(handle)
        magic, pid, fd, size_bytes = _HANDLE.unpack_from(content)
        if magic != _MAGIC:
            return INVALID_HANDLE
        if not self.stack or (pid == os.getpid() and not self.opens_own):
            return INVALID_CONTEXT
        # A context of the GPU where the memory is, or of one that reaches it.
        assert self.uuids[self.stack[-1]] == content[_HANDLE.size : _HANDLE.size + 16] or self.has_peers
        try:
            own_fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return INVALID_HANDLE
        memory = self._map(self.stack[-1], own_fd, size_bytes)
        self.opened[memory.address] = memory
        address[0] = memory.address
        return 0

    def _cuIpcCloseMemHandle(self, address):
        memory = self.opened.pop(address, None)
        if memory is None or not self.stack or self.stack[-1] != memory.gpu:
            return INVALID_VALUE
        os.close(memory.fd)
        return 0


def install(fake=None):
    """Let ``snapd.cuda`` find *fake*, or a new one, in this process from now on, and return it."""
    fake = fake or FakeDriver()
    cuda.load_library = lambda: fake
    cuda._driver = None
    return fake


if __name__ == "__main__":
    # A daemon on a machine that has a GPU, as it were: the arguments are those of the command line.
    from snapd.cli.main import main

    install()
    main()
