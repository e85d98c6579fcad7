"""Connections between clients and the daemon: ordered byte streams that lag, break, and fill up.

A connection is a pair of pipes. What is under way in a pipe arrives in order; when the connection is cut, a
part of it still does, which may end in the middle of a frame. A buffer holds so much and no more.
"""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol, Self

from snapd.units import KIB
from tools.simulation.clock import Node, Planned, Timeline
from tools.simulation.dice import Dice
from tools.simulation.failure import Broken

_UCRED: Final = struct.Struct("3i")
# What a socket's buffers hold in each direction: as little as makes full ones happen.
PIPE_BYTES: Final = 8 * KIB
# What may wait in the daemon for one client: reply_buffer_bytes_max of the plans, a frame, and some replies.
BUFFER_BYTES_MAX: Final = 64 * KIB


class Pipe:
    """One direction of a connection.

    Args:
        receiver: the process that reads.
        latency_ns: how long bytes are under way, at least.
        deliver: takes bytes that have arrived; empty: the end.

    Attributes:
        held_bytes: sent, and not read yet.
    """

    def __init__(
        self,
        timeline: Timeline,
        receiver: Node,
        dice: Dice,
        latency_ns: int,
        deliver: Callable[[bytes], None],
    ) -> None:
        self.held_bytes = 0
        self.latency_ns = latency_ns
        self._timeline = timeline
        self._receiver = receiver
        self._dice = dice
        self._deliver = deliver
        self._flying: deque[tuple[Planned, bytes]] = deque()
        self._last_ns = 0
        self._is_ended = False

    @property
    def room_bytes(self) -> int:
        """Bytes that the buffers still take."""
        return PIPE_BYTES - self.held_bytes

    def send(self, data: bytes) -> None:
        """Send bytes; now and then they arrive in two parts."""
        if self._is_ended:
            return
        self.held_bytes += len(data)
        if len(data) > 1 and self._dice.chance(6):
            cut = self._dice.between(1, len(data) - 1)
            self._fly(data[:cut])
            self._fly(data[cut:])
        else:
            self._fly(data)

    def end(self) -> None:
        """Nothing comes after what was sent."""
        if not self._is_ended:
            self._fly(b"")
            self._is_ended = True

    def cut(self) -> None:
        """Break: of what is under way only the first part arrives, and then the end."""
        if self._is_ended and not self._flying:
            return
        flying = b"".join(data for _, data in self._flying)
        for planned, _ in self._flying:
            planned.cancel()
        self._flying.clear()
        self._is_ended = False
        if kept := flying[: self._dice.below(len(flying) + 1)]:
            self._fly(kept)
        self.end()

    def _fly(self, data: bytes) -> None:
        latency_ns = self.latency_ns
        at_ns = max(self._timeline.now_ns + latency_ns + self._dice.below(latency_ns + 1), self._last_ns)
        self._last_ns = at_ns
        self._flying.append((self._timeline.at(at_ns, self._arrive, self._receiver), data))

    def _arrive(self) -> None:
        self._deliver(self._flying.popleft()[1])


class Reader(Protocol):
    """The client's end of a connection, as the network sees it."""

    def wake(self) -> None:
        """The socket can be read, or written again."""
        ...


class SimSocket:
    """The client's socket, as ``snapd.streams.Stream``: never waits."""

    is_established = True
    wants_write = False
    takes_output = True
    has_ended = False

    def __init__(self, wire: "Wire", reader: Reader) -> None:
        self._wire = wire
        self._reader = reader
        self._inbox = bytearray()
        self._has_ended = False
        self._wants_room = False
        self.is_closed = False

    def send(self, data: memoryview) -> int:
        """Write what there is room for.

        Raises:
            BlockingIOError: there is none.
            BrokenPipeError: the daemon has hung up.
        """
        if self._has_ended:
            raise BrokenPipeError
        room_bytes = self._wire.up.room_bytes
        if room_bytes <= 0:
            self._wants_room = True
            raise BlockingIOError
        part = bytes(data[:room_bytes])
        self._wire.up.send(part)
        return len(part)

    def recv(self, limit: int) -> bytes:
        """Return what has come; empty: the end.

        Raises:
            BlockingIOError: nothing has.
        """
        if not self._inbox:
            if self._has_ended:
                return b""
            raise BlockingIOError
        data = bytes(self._inbox[:limit])
        del self._inbox[:limit]
        self._wire.down.held_bytes -= len(data)
        self._wire.transport.room_came()
        return data

    def close(self) -> None:
        """Hang up."""
        if not self.is_closed:
            self.is_closed = True
            self._wire.up.end()
            self._wire.transport.reader_left()

    def fileno(self) -> int:
        """Return nothing that anybody could poll."""
        return -1

    def flush(self) -> None:
        """Do nothing: there is nothing of its own to write."""

    def arrived(self, data: bytes) -> None:
        """Take what the network brings."""
        if self.is_closed:
            return
        if data:
            self._inbox += data
        else:
            self._has_ended = True
        self._reader.wake()

    def room_came(self) -> None:
        """There is room to write again."""
        if self._wants_room and not self.is_closed:
            self._wants_room = False
            self._reader.wake()


class PeerSocket:
    """What the daemon can ask a connection's socket: who connected."""

    def __init__(self, pid: int, uid: int) -> None:
        self.pid = pid
        self._uid = uid

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """Return SO_PEERCRED."""
        assert (level, option, size) == (socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        return _UCRED.pack(self.pid, self._uid, self._uid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class SimTransport(asyncio.Transport):
    """The daemon's end of a connection, as asyncio gives it to a protocol."""

    def __init__(self, wire: "Wire", loop: asyncio.AbstractEventLoop, peer: PeerSocket) -> None:
        super().__init__()
        self.peer = peer
        self._wire = wire
        self._loop = loop
        self._protocol: asyncio.Protocol | None = None
        self._buffer = bytearray()
        self._unread: deque[bytes] = deque()
        self._high_bytes = 64 * KIB
        self._is_paused = False
        self._is_writer_paused = False
        self._is_closing = False
        self._is_lost = False
        self._is_reader_gone = False

    def begin(self, protocol: asyncio.Protocol) -> None:
        """The connection was accepted."""
        self._protocol = protocol
        protocol.connection_made(self)

    # --- what the protocol calls ---------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the peer, asked for as the socket."""
        return self.peer if name == "socket" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Say how much may wait before the protocol is told to pause."""
        del low
        assert high is not None
        self._high_bytes = high

    def get_write_buffer_size(self) -> int:
        """Return the bytes that wait here, beyond the socket's own buffer."""
        return len(self._buffer)

    def write(self, data: "bytes | bytearray | memoryview[Any]") -> None:
        """Send, or keep for later."""
        if self._is_closing or self._is_reader_gone:
            return
        self._buffer += data
        self._flush()
        if len(self._buffer) > BUFFER_BYTES_MAX:
            raise Broken("unbounded", f"{len(self._buffer)} bytes wait for one client")
        if len(self._buffer) > self._high_bytes and not self._is_writer_paused and self._protocol:
            self._is_writer_paused = True
            self._protocol.pause_writing()

    def pause_reading(self) -> None:
        """Leave what comes in the socket."""
        self._is_paused = True

    def resume_reading(self) -> None:
        """Read again."""
        if self._is_paused:
            self._is_paused = False
            if self._unread:
                self._loop.call_soon(self._read)

    def close(self) -> None:
        """Close once what waits is out."""
        if not self._is_closing:
            self._is_closing = True
            if not self._buffer or self._is_reader_gone:
                self._lose()

    def abort(self) -> None:
        """Close now."""
        self._is_closing = True
        self._buffer.clear()
        self._lose()

    # --- what the network calls ----------------------------------------------------------------

    def arrived(self, data: bytes) -> None:
        """Take what the client sent; empty: it has hung up."""
        self._unread.append(data)
        if not self._is_paused:
            self._read()
        elif not data and self._buffer:
            self._lose()  # Writing fails, whether or not anybody reads.

    def room_came(self) -> None:
        """The client has read: send what waited."""
        if self._buffer and not self._is_lost:
            self._loop.call_soon(self._flush)

    def reader_left(self) -> None:
        """Nobody reads any more."""
        self._is_reader_gone = True

    def _read(self) -> None:
        while self._unread and not self._is_lost and not self._is_paused:
            data = self._unread.popleft()
            if not data:
                self._lose()
                return
            self._wire.up.held_bytes -= len(data)
            self._wire.sock.room_came()
            if self._protocol is not None and not self._is_closing:
                self._protocol.data_received(data)

    def _flush(self) -> None:
        room_bytes = self._wire.down.room_bytes
        if self._buffer and room_bytes > 0:
            part = bytes(self._buffer[:room_bytes])
            del self._buffer[: len(part)]
            self._wire.down.send(part)
        if self._is_closing and not self._buffer:
            self._lose()
        elif self._is_writer_paused and len(self._buffer) <= self._high_bytes // 4 and self._protocol:
            self._is_writer_paused = False
            self._protocol.resume_writing()

    def _lose(self) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        self._buffer.clear()
        self._wire.down.end()
        if self._protocol is not None:
            self._loop.call_soon(self._protocol.connection_lost, None)


class Wire:
    """One connection.

    Args:
        timeline: of the run.
        client: the connecting process.
        server: the daemon's.
        loop: the daemon's.
        reader: who reads at the client's end.
        peer: who connects, as the kernel says.
        dice: of this connection.
        latency_ns: of each direction.
    """

    def __init__(
        self,
        timeline: Timeline,
        client: Node,
        server: Node,
        loop: asyncio.AbstractEventLoop,
        reader: Reader,
        peer: PeerSocket,
        dice: Dice,
        latency_ns: int,
    ) -> None:
        self.sock = SimSocket(self, reader)
        self.transport = SimTransport(self, loop, peer)
        self.up = Pipe(timeline, server, dice, latency_ns, self.transport.arrived)
        self.down = Pipe(timeline, client, dice, latency_ns, self.sock.arrived)

    def cut(self) -> None:
        """Break the connection in both directions."""
        self.up.cut()
        self.down.cut()

    def lag(self, latency_ns: int) -> None:
        """Be slower, or as fast as before."""
        self.up.latency_ns = self.down.latency_ns = latency_ns

    def daemon_died(self) -> None:
        """What the daemon's socket held still arrives; what it had not taken is gone."""
        self.down.end()
