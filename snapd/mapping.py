"""Mapping an arena of the daemon into this process, by the file descriptor that it hands over.

One on a GPU comes without a file descriptor; see ``cudamapping``.

Source: design, sections 4 and 5.
"""

import ctypes
import errno
import mmap
import os
import socket
import struct
import weakref
from contextlib import suppress
from time import monotonic
from types import TracebackType
from typing import Final, Self, TypeAlias

from snapd.address import TcpAddress, parse_address
from snapd.cuda import CudaError
from snapd.cudamapping import MappedCudaArena, open_cuda_arena
from snapd.daemonlife import DaemonLife
from snapd.errors import ConnectionLost, InvalidRequest, ProtocolError, RequestTimeout, SnapdError, error_for
from snapd.exchange import HELLO_BYTES_MAX
from snapd.lifewatch import WATCH
from snapd.links import READ_BYTES, unreachable
from snapd.units import GIB, MIB, format_bytes
from snapd.wire import (
    AnyPush,
    AnyReply,
    ErrorRep,
    FrameSplitter,
    MapBufferRep,
    MapBufferReq,
    decode_answer,
    encode_frame,
)

# Linux 5.14 and newer; Python has no names for them.
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
# Between two pieces the clock is looked at. The older way maps anew, which must keep to hugepages.
_POPULATE_PIECE_BYTES: Final = 256 * MIB
_MAP_POPULATE_PIECE_BYTES: Final = GIB
assert _MAP_POPULATE_PIECE_BYTES % GIB == 0, "a piece is whole hugepages of any size"

_MAP_FIXED: Final = 0x10
_MAP_POPULATE: Final = 0x8000
_FDS_MAX: Final = 4
_INT_BYTES: Final = 4
_US_PER_S: Final = 1_000_000
# A timeout of 0 would mean: wait for ever.
_TIMEOUT_S_MIN: Final = 0.001

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


class MapFailed(SnapdError):
    """The daemon handed over an arena, and this process cannot map it; the message says why."""


class MappedArena:
    """One rank's arena, in this process.

    The memory stays mapped until no view of ``buffer``, nor a tensor made of one, is left, and it is closed
    or its daemon has ended: a view can never point at what is no longer there, and the memory of a daemon
    that died is free for the next one though this process does nothing. A forked child does not have it.

    Attributes:
        rank: whose arena.
        size_bytes: of the arena and of ``buffer``.
        writable: it may be written. If not, a write is refused, and one past Python's checks faults.
        epoch: the life of the daemon that owns it; in another life nobody reads it any more.
        address: of the first byte in this process.
        populated_bytes: so much of it was brought in already; the rest comes when it is touched.
        life: of the daemon.
    """

    def __init__(
        self,
        rank: int,
        size_bytes: int,
        writable: bool,
        epoch: str,
        address: int,
        populated_bytes: int,
        life: DaemonLife,
    ) -> None:
        self.rank = rank
        self.size_bytes = size_bytes
        self.writable = writable
        self.epoch = epoch
        self.address = address
        self.populated_bytes = populated_bytes
        self.life: Final = life
        self._is_closed = False
        memory = (ctypes.c_ubyte * size_bytes).from_address(address)
        # Every view holds on to this object, so it is unmapped after the last of them.
        finalizer = weakref.finalize(memory, _unmap, os.getpid(), address, size_bytes)
        finalizer.atexit = False  # At exit a thread may still be copying.
        self._memory: Final = weakref.ref(memory)
        view = memoryview(memory).cast("B")
        self._buffer: memoryview | None = view if writable else view.toreadonly()
        WATCH.add(self)

    @property
    def buffer(self) -> memoryview:
        """The arena's bytes, shape [size_bytes].

        Raises:
            ValueError: it is closed.
            ConnectionLost: the daemon is gone.
        """
        buffer = self._buffer
        if buffer is None:
            if self._is_closed:
                raise ValueError(f"the mapping of arena {self.rank} is closed")
            raise ConnectionLost(f"the daemon is gone, and arena {self.rank} was let go of")
        return buffer

    @property
    def is_abandoned(self) -> bool:
        """The daemon that owns it is gone, or this mapping is closed."""
        return self.life.is_over

    def check_alive(self) -> None:
        """Do nothing: views of this memory may be used when the daemon is gone.

        What became of an attempt is told by its commit or vote.
        """

    def hold(self) -> memoryview:
        """Return what keeps it mapped.

        Raises:
            ValueError: it is closed.
            ConnectionLost: the daemon is gone.
        """
        return self.buffer

    def copy_in(self, offset_bytes: int, source_address: int, size_bytes: int) -> None:
        """Copy from memory of this process.

        Raises:
            ValueError: the arena is closed, or the bytes are not all inside.
            ConnectionLost: the daemon is gone, and nobody holds the memory any more.
        """
        if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > self.size_bytes:
            raise ValueError(f"{size_bytes} bytes at {offset_bytes} leave an arena of {self.size_bytes}")
        # Until the copy is done, whoever closes it meanwhile. What somebody holds may be written to its end.
        held = None if self._is_closed else self._memory()
        if held is None:
            self.hold()
        # Releases the interpreter lock while it copies.
        ctypes.memmove(self.address + offset_bytes, source_address, size_bytes)
        del held

    def abandon(self) -> None:
        """Let go of the memory because the daemon is gone, from any thread."""
        self._buffer = None

    def close(self) -> None:
        """Let go of the memory. May be called twice."""
        self._is_closed = True
        self._buffer = None
        self.life.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _unmap(pid: int, address: int, size_bytes: int) -> None:
    # A forked child does not have it; whatever it has there is its own.
    if os.getpid() == pid:
        _libc.munmap(address, size_bytes)


AnyMappedArena: TypeAlias = MappedArena | MappedCudaArena


def map_arena(
    socket_path: str,
    rank: int,
    writable: bool = False,
    timeout_s: float = 5.0,
    *,
    populate: bool = True,
    device: str | None = None,
) -> AnyMappedArena:
    """Map *rank*'s arena, asked for on a connection of its own.

    One on a GPU is opened in the primary context of the GPU that uses it, the one that torch uses, and may
    be written whatever was asked for.

    Args:
        socket_path: the daemon's.
        rank: whose arena.
        writable: map it for writing too.
        timeout_s: for everything; bringing pages in stops when it is over, which is no error.
        populate: bring the pages in now, so that no copy waits for them later.
        device: for an arena on a GPU: which GPU of this process is to use it, ``cuda:N``; None, or one that
            does not reach the arena's: the arena's own.

    Raises:
        InvalidRequest: *socket_path* is an address, and not a unix socket's path.
        DaemonUnreachable: no daemon listens at *socket_path*.
        WrongRank: the daemon has no arena for *rank*.
        PermissionDenied: this user may not.
        ConnectionLost: the daemon hung up.
        RequestTimeout: no answer in time.
        ProtocolError: the answer is not of this protocol, or no file descriptor came with it.
        MapFailed: the memory cannot be mapped; for a GPU, also that this process does not see it.

    Source: design, sections 4 and 5.
    """
    if isinstance(parse_address(socket_path), TcpAddress):
        raise InvalidRequest(
            "an arena is mapped over the daemon's unix socket, by a process of the same host: connect there, "
            "or push over Mooncake"
        )
    deadline_s = monotonic() + timeout_s
    reply, life, fd = _ask(socket_path, MapBufferReq(id=1, rank=rank, writable=writable), deadline_s)
    try:
        if reply.rank != rank:
            raise ProtocolError(f"asked for arena {rank}, and arena {reply.rank} came")
        if reply.cuda is not None:
            return open_cuda_arena(rank, reply.size_bytes, reply.epoch, reply.cuda, life, device)
        assert fd is not None
        # A mapping beyond the end of the file would fault when it is touched.
        file_bytes = os.fstat(fd).st_size
        if not 0 < reply.size_bytes <= file_bytes:
            raise ProtocolError(f"an arena of {reply.size_bytes} bytes in a file of {file_bytes}")
        address, populated_bytes = _map(fd, reply.size_bytes, writable, populate, deadline_s)
        return MappedArena(rank, reply.size_bytes, writable, reply.epoch, address, populated_bytes, life)
    except CudaError as error:
        life.close()
        raise MapFailed(str(error)) from None
    except BaseException:
        life.close()
        raise
    finally:
        if fd is not None:
            os.close(fd)


# --- asking ------------------------------------------------------------------------------------


def _ask(path: str, request: MapBufferReq, deadline_s: float) -> tuple[MapBufferRep, DaemonLife, int | None]:
    """Return the reply, whose memory it is, and the file descriptor that came with it: None for a GPU's.

    The caller closes the last two.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            # With a timeout of Python's own, connect() would not wait for room in the accept queue.
            seconds, rest_s = divmod(max(deadline_s - monotonic(), _TIMEOUT_S_MIN), 1)
            timeval = struct.pack("ll", int(seconds), int(rest_s * _US_PER_S))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
            sock.connect(path)
        except BlockingIOError:
            raise RequestTimeout(f"the daemon at {path} did not accept a connection in time") from None
        except OSError as error:
            raise unreachable(path, error) from None
        fds: list[int] = []
        try:
            # A daemon that refuses the connection answers and hangs up, before or after this.
            with suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(encode_frame(request))
            reply = _receive(sock, fds, deadline_s)
            if isinstance(reply, ErrorRep):
                raise error_for(reply.reason, reply.detail, reply.retry_after_ms)
            if not isinstance(reply, MapBufferRep) or reply.id != request.id:
                raise ProtocolError(f"a {type(reply).__name__} answers {type(request).__name__}")
            num_wanted = 0 if reply.cuda else 1
            if len(fds) != num_wanted:
                raise ProtocolError(f"{len(fds)} file descriptors came with the reply, not {num_wanted}")
            try:
                life = DaemonLife(sock)
            except OSError as error:
                raise MapFailed(f"the daemon's process cannot be watched: {error.strerror}") from None
            return reply, life, (fds.pop() if fds else None)
        except TimeoutError:
            raise RequestTimeout(f"the daemon at {path} did not hand over the arena in time") from None
        finally:
            for fd in fds:
                os.close(fd)


def _receive(sock: socket.socket, fds: list[int], deadline_s: float) -> AnyReply | AnyPush | None:
    """Return the first answer, with the file descriptors that came on the way appended to *fds*."""
    splitter = FrameSplitter(HELLO_BYTES_MAX)
    while True:
        _set_timeout(sock, deadline_s)
        try:
            data, ancillary, flags, _ = sock.recvmsg(
                READ_BYTES, socket.CMSG_SPACE(_FDS_MAX * _INT_BYTES), socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionError:
            data, ancillary, flags = b"", [], 0
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds += memoryview(content[: len(content) // _INT_BYTES * _INT_BYTES]).cast("i").tolist()
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError(
                "more file descriptors came than can be taken (or this process has too many open)"
            )
        if not data:
            raise ConnectionLost("the daemon hung up before it handed over the arena")
        payloads = splitter.feed(data)
        if payloads:
            return decode_answer(payloads[0])


def _set_timeout(sock: socket.socket, deadline_s: float) -> None:
    remaining_s = deadline_s - monotonic()
    if remaining_s <= 0:
        raise TimeoutError
    sock.settimeout(remaining_s)


# --- mapping -----------------------------------------------------------------------------------


def _map(fd: int, size_bytes: int, writable: bool, populate: bool, deadline_s: float) -> tuple[int, int]:
    """Return where *fd* is mapped, and how many of its bytes were brought in."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = _mmap(None, size_bytes, protection, mmap.MAP_SHARED, fd)
    try:
        populated_bytes = 0
        if populate:
            populated_bytes = _populate(address, size_bytes, protection, fd, deadline_s)
        # A forked child must not have it. The daemon takes the exit of this process for proof
        # that its writes are over; a child that lives on could still write.
        if _libc.madvise(address, size_bytes, mmap.MADV_DONTFORK) != 0:
            raise MapFailed(f"the mapping cannot be kept from children: {_strerror()}")
    except BaseException:
        _libc.munmap(address, size_bytes)
        raise
    return address, populated_bytes


def _populate(address: int, size_bytes: int, protection: int, fd: int, deadline_s: float) -> int:
    """Bring pages in, piece by piece while there is time, and return how many bytes."""
    advice = _MADV_POPULATE_WRITE if protection & mmap.PROT_WRITE else _MADV_POPULATE_READ
    done_bytes = 0
    is_old_kernel = False
    while done_bytes < size_bytes and monotonic() < deadline_s:
        start = address + done_bytes
        piece_bytes = min(
            _MAP_POPULATE_PIECE_BYTES if is_old_kernel else _POPULATE_PIECE_BYTES, size_bytes - done_bytes
        )
        if is_old_kernel:
            flags = mmap.MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
            _mmap(start, piece_bytes, protection, flags, fd, done_bytes)
        elif _libc.madvise(start, piece_bytes, advice) != 0:
            if ctypes.get_errno() != errno.EINVAL:
                raise MapFailed(f"{format_bytes(size_bytes)} cannot be brought in: {_strerror()}")
            is_old_kernel = True
            continue
        done_bytes += piece_bytes
    return done_bytes


def _mmap(
    address: int | None, size_bytes: int, protection: int, flags: int, fd: int, offset_bytes: int = 0
) -> int:
    where = _libc.mmap(address, size_bytes, protection, flags, fd, offset_bytes)
    if where == _MAP_FAILED:
        raise MapFailed(f"{format_bytes(size_bytes)} cannot be mapped: {_strerror()}")
    return int(where)


def _strerror() -> str:
    return os.strerror(ctypes.get_errno())
