"""Keeps the sockets of a library that listens everywhere inside this host.

Mooncake's engine listens on all addresses, whatever host it is given; ``MC_TCP_BIND_ADDRESS`` changes
only the address that peers are told. Whoever reaches these sockets can write to registered memory. So the
listening sockets are bound to the loopback device: the kernel then refuses connections from other hosts,
and those of this host that are not made to a loopback address.

Source: design, section 7.
"""

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Final

from snapd.errors import TransportError

_OWN_FDS: Final = Path("/proc/self/fd")
_DEVICE: Final = b"lo"
# What a file descriptor answers that is closed, or stands for a file by now.
_GONE: Final = (errno.EBADF, errno.ENOTSOCK)


def is_loopback(host: str) -> bool:
    """Return whether *host* is a loopback address or ``localhost``.

    Other names are not looked up: a host's own name is often 127.0.1.1 to itself, and not to its peers.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


@contextlib.contextmanager
def listening_inside_only(ports: Container[int] | None = None) -> Iterator[None]:
    """Sockets that come to listen inside the block take connections from this host only.

    Args:
        ports: only sockets that listen on these, for a process whose other threads may open sockets
            meanwhile. None: whatever comes to listen; and whoever connected from elsewhere before the
            sockets were bound is cut off, so no other thread may open sockets meanwhile.

    Raises:
        TransportError: the kernel does not allow it; says what to do.
    """
    before = {inode for inode, _ in _internet_sockets()}
    yield
    opened = [fd for inode, fd in _internet_sockets() if inode not in before]
    for fd in opened:
        try:
            with contextlib.closing(socket.socket(fileno=os.dup(fd))) as sock:
                is_listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if is_listening and (ports is None or sock.getsockname()[1] in ports):
                    _bind_to_device(sock)
        except OSError as error:
            # Another thread's socket may be closed by now; whatever else it is, nothing may stay open.
            if error.errno not in _GONE:
                raise
    if ports is not None:
        return
    for inode, fd in _internet_sockets():
        if inode not in before:
            _cut_off_foreigner(fd)


def _internet_sockets() -> list[tuple[int, int]]:
    """Return inode and file descriptor of every IPv4 and IPv6 stream socket of this process."""
    found = []
    for entry in list(_OWN_FDS.iterdir()):
        # The descriptor that listed the directory is gone by now.
        with contextlib.suppress(OSError):
            fd = int(entry.name)
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with contextlib.closing(socket.socket(fileno=os.dup(fd))) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    found.append((os.fstat(fd).st_ino, fd))
    return found


def _bind_to_device(sock: socket.socket) -> None:
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _DEVICE)
    except OSError as error:
        raise TransportError(
            f"Mooncake listens on every address, and the kernel does not let port {sock.getsockname()[1]} be "
            f"kept to this host ({error.strerror}): before Linux 5.7 that takes CAP_NET_RAW; or set "
            "mooncake.host to this host's address in a network whose every host may write to the arenas"
        ) from None


def _cut_off_foreigner(fd: int) -> None:
    # It is no longer there, or has no peer.
    with contextlib.suppress(OSError), contextlib.closing(socket.socket(fileno=os.dup(fd))) as sock:
        # A client of IPv4 has a mapped address on a socket that takes both.
        if not is_loopback(str(sock.getpeername()[0]).removeprefix("::ffff:")):
            sock.shutdown(socket.SHUT_RDWR)
