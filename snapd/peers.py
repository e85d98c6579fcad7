"""Who is at the other end of a unix socket, and whether that process still lives.

The exit of a local process is drain proof for what it wrote (design, section 3). A pidfd names
a process and not a number, so that a pid which is used again cannot be taken for the old one.
"""

import asyncio
import errno
import os
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_UCRED: Final = struct.Struct("3i")
# Linux 6.5 and newer; Python has no name for it.
SO_PEERPIDFD: Final = 77


@dataclass(slots=True)
class Peer:
    """The process that connected.

    Attributes:
        pid: 0 when it is not in a pid namespace that the daemon sees.
        uid: its user.
    """

    pid: int
    uid: int


def peer_of(sock: socket.socket) -> Peer:
    """Return who connected to *sock*."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(pid, uid)


def open_pidfd(sock: socket.socket, peer: Peer) -> int | None:
    """Return a pidfd of the peer, or None when it cannot be had. The caller closes it."""
    if peer.pid <= 0:
        return None
    try:
        return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            return None  # The peer is gone, and its pid may be another's by now.
    # An older kernel: the pid is still the peer's as long as the peer lives.
    try:
        return os.pidfd_open(peer.pid)
    except OSError:
        return None


def has_exited(pidfd: int) -> bool:
    """Return whether the process is gone."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


@dataclass(slots=True)
class _Writer:
    writer_id: int
    pidfd: int
    pid: int


class ProcessWatch:
    """Names local processes that write, and says when one has exited.

    Args:
        loop: watches the pidfds.
        on_exit: called once with the writer id of a process that is gone.
        is_needed: whether a writer id still stands for any attempt.
        writers_max: more processes are not watched; their attempts lack this kind of drain proof.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_exit: Callable[[int], None],
        is_needed: Callable[[int], bool],
        writers_max: int,
    ) -> None:
        self._loop = loop
        self._on_exit = on_exit
        self._is_needed = is_needed
        self._writers_max = writers_max
        self._by_pid: dict[int, _Writer] = {}
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._by_pid)

    def writer_id(self, sock: socket.socket, peer: Peer) -> int:
        """Return the id of the peer's process, which is watched from here on; 0: it cannot be watched.

        Nor can one that is gone. Whoever asks over its connection is another process, a child perhaps or
        one that got the same pid, and can write still.
        """
        known = self._by_pid.get(peer.pid)
        if known is not None:
            return 0 if has_exited(known.pidfd) else known.writer_id
        if len(self._by_pid) >= self._writers_max:
            self._forget_idle()
            if len(self._by_pid) >= self._writers_max:
                return 0
        pidfd = open_pidfd(sock, peer)
        if pidfd is None:
            return 0
        if has_exited(pidfd):
            os.close(pidfd)
            return 0
        self._last_id += 1
        writer = _Writer(self._last_id, pidfd, peer.pid)
        self._by_pid[peer.pid] = writer
        self._loop.add_reader(pidfd, self._exited, writer)
        return writer.writer_id

    def close(self) -> None:
        """Watch nobody any more."""
        for writer in list(self._by_pid.values()):
            self._drop(writer)

    def _exited(self, writer: _Writer) -> None:
        self._drop(writer)
        self._on_exit(writer.writer_id)

    def _forget_idle(self) -> None:
        for writer in list(self._by_pid.values()):
            if not self._is_needed(writer.writer_id):
                self._drop(writer)

    def _drop(self, writer: _Writer) -> None:
        del self._by_pid[writer.pid]
        self._loop.remove_reader(writer.pidfd)
        os.close(writer.pidfd)
