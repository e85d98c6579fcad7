"""What a client writes to and reads from without ever waiting: a unix socket, TCP, or TLS over TCP.

TLS is spoken in memory (``ssl.MemoryBIO``), so that the same few calls do for threads and for event loops.

Source: design, section 5.
"""

import contextlib
import socket
from typing import TYPE_CHECKING, Final, Protocol

from snapd.address import Resolver, TcpAddress, TlsFiles
from snapd.units import KIB

if TYPE_CHECKING:
    import ssl

# What is encrypted at a time: little waits in memory for a peer that does not read.
_WRITE_BYTES: Final = 64 * KIB
_READ_BYTES: Final = 64 * KIB
# Of both sides. The other's host may vanish without a word; it is found out about in a minute or so.
TCP_OPTIONS: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class Stream(Protocol):
    """A connection that never waits.

    Attributes:
        is_established: the daemon is there. What goes wrong before means that it cannot be reached.
        has_ended: all that will ever come was read; the next ``recv`` says so.
    """

    is_established: bool
    has_ended: bool

    @property
    def wants_write(self) -> bool:
        """It has something of its own to write."""
        ...

    @property
    def takes_output(self) -> bool:
        """``send`` may take something, once the socket is writable."""
        ...

    def fileno(self) -> int:
        """Return the socket's."""
        ...

    def flush(self) -> None:
        """Write what it has of its own, as far as the socket takes it; may raise ``OSError``."""
        ...

    def send(self, data: memoryview) -> int:
        """Take some of *data* and return how much; raises ``BlockingIOError`` or another ``OSError``."""
        ...

    def recv(self, num_bytes: int) -> bytes:
        """Return what has come, ``b""`` at the end; raises ``BlockingIOError`` or another ``OSError``."""
        ...

    def close(self) -> None:
        """Close the socket."""
        ...


class PlainStream:
    """A socket as it is."""

    wants_write = False
    takes_output = True
    has_ended = False

    def __init__(self, sock: socket.socket, *, is_established: bool) -> None:
        self.is_established = is_established
        self._sock = sock
        self.fileno = sock.fileno
        self.close = sock.close

    def flush(self) -> None:
        """Do nothing."""

    def send(self, data: memoryview) -> int:
        """Write some of *data*."""
        num_bytes = self._sock.send(data)
        self.is_established = True
        return num_bytes

    def recv(self, num_bytes: int) -> bytes:
        """Read what has come."""
        return self._sock.recv(num_bytes)


class TlsStream:
    """TLS 1.3 as the client, over a socket that may not be connected yet."""

    def __init__(self, sock: socket.socket, context: "ssl.SSLContext", server_name: str) -> None:
        import ssl

        self.is_established = False
        self.has_ended = False
        self._sock = sock
        self._want_read = ssl.SSLWantReadError
        self._ends = (ssl.SSLZeroReturnError, ssl.SSLEOFError)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_name)
        self._pending = memoryview(b"")
        self._is_shaken = False
        self._shake()

    @property
    def wants_write(self) -> bool:
        """Something encrypted waits, of a handshake or of what was sent."""
        return bool(self._pending) or self._outgoing.pending > 0

    @property
    def takes_output(self) -> bool:
        """The handshake is over."""
        return self._is_shaken

    def fileno(self) -> int:
        """Return the socket's."""
        return self._sock.fileno()

    def send(self, data: memoryview) -> int:
        """Encrypt some of *data* and write what can be written."""
        self.flush()
        if not self._is_shaken or self.wants_write:
            raise BlockingIOError
        num_bytes = self._tls.write(data[:_WRITE_BYTES])
        self.flush()
        return num_bytes

    def recv(self, num_bytes: int) -> bytes:
        """Read what has come; all of what it holds in plain text is returned."""
        with contextlib.suppress(BlockingIOError):
            data = self._sock.recv(num_bytes)
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()
        if not self._is_shaken:
            self._shake()
        parts: list[bytes] = []
        while self._is_shaken:
            try:
                part = self._tls.read(_READ_BYTES)
            except self._want_read:
                break
            except self._ends:
                part = b""
            if not part:
                self.has_ended = True
                break
            parts.append(part)
        # An answer of TLS's own, such as to a key update.
        with contextlib.suppress(OSError):
            self.flush()
        if parts:
            self.is_established = True
            return b"".join(parts)
        if self.has_ended:
            if not self.is_established:
                raise ConnectionResetError("the daemon hung up after the handshake")
            return b""
        raise BlockingIOError

    def close(self) -> None:
        """Say that it is over, as far as that goes without waiting, and close the socket."""
        with contextlib.suppress(OSError, ValueError):
            self._tls.unwrap()
        with contextlib.suppress(OSError):
            self.flush()
        self._sock.close()

    def _shake(self) -> None:
        try:
            self._tls.do_handshake()
        except self._want_read:
            return
        except self._ends:
            raise ConnectionResetError("the daemon hung up in the handshake") from None
        finally:
            # What is wrong with its certificate is told to the daemon.
            with contextlib.suppress(OSError):
                self.flush()
        self._is_shaken = True

    def flush(self) -> None:
        """Write what is encrypted, as far as the socket takes it."""
        while True:
            if not self._pending:
                self._pending = memoryview(self._outgoing.read())
                if not self._pending:
                    return
            try:
                num_bytes = self._sock.send(self._pending)
            except BlockingIOError:
                return
            self._pending = self._pending[num_bytes:]


def client_context(files: TlsFiles) -> "ssl.SSLContext":
    """Return how a client speaks TLS. The files are read for every connection, so they may be renewed.

    Raises:
        OSError, ValueError: a file cannot be read, or is no PEM file.
    """
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(files.ca_path)
    # A key with a passphrase would ask for it on the terminal.
    context.load_cert_chain(files.certificate_path, files.key_path, password="")
    return context


def open_unix(path: str) -> PlainStream:
    """Connect to a unix socket.

    Raises:
        BlockingIOError: its queue is full; try again.
        OSError: nobody is there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return PlainStream(sock, is_established=True)


def open_tcp(address: TcpAddress, resolver: Resolver) -> Stream:
    """Begin to connect over TCP.

    Raises:
        BlockingIOError: the host's address is not known yet; try again.
        OSError, ValueError: it cannot be known, or the files of TLS cannot be read.
    """
    found = resolver.take()
    if found is None:
        raise BlockingIOError
    context = client_context(address.tls) if address.tls is not None else None
    family, where = found
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        for option in TCP_OPTIONS:
            sock.setsockopt(*option)
        with contextlib.suppress(BlockingIOError):
            sock.connect(where)
        if context is None or address.tls is None:
            return PlainStream(sock, is_established=False)
        return TlsStream(sock, context, address.tls.server_name)
    except BaseException:
        sock.close()
        raise
