"""Whether the daemon that handed something over still lives.

Memory on a GPU belongs to the daemon's process and goes with it; a client looks before it touches it.

Source: design, section 4.
"""

import os
import select
import socket
import weakref
from typing import Final

from snapd.peers import has_exited, open_pidfd, peer_of


class DaemonLife:
    """The process at the other end of a unix socket.

    A pidfd tells. Where there is none (an old kernel, or a daemon in another pid namespace), the connection
    does, and is kept open for it.

    Args:
        sock: connected to the daemon; the caller may close it.
    """

    def __init__(self, sock: socket.socket) -> None:
        pidfd = open_pidfd(sock, peer_of(sock))
        self._is_pidfd = pidfd is not None
        self._fd: Final = os.dup(sock.fileno()) if pidfd is None else pidfd
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """It has exited, or this object is closed. Never waits; once over, always over."""
        if not self._is_over and (
            not self._close.alive or (has_exited(self._fd) if self._is_pidfd else _has_hung_up(self._fd))
        ):
            # Only ever set: another thread may have seen the end while this one looked.
            self._is_over = True
        return self._is_over

    def register(self, poller: "select.poll") -> None:
        """Have *poller* come back when it is over. It may also come back for nothing, after ``close``."""
        # Of a connection the other end's closing is told whatever is asked for.
        poller.register(self._fd, select.POLLIN if self._is_pidfd else 0)

    def close(self) -> None:
        """Look no more. May be called twice."""
        self._close()


def _has_hung_up(fd: int) -> bool:
    poller = select.poll()
    # The other end's closing is told whatever is asked for.
    poller.register(fd, 0)
    return bool(poller.poll(0))
