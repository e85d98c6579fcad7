"""The life of this process, for what takes it for the daemon."""

import socket

from snapd.daemonlife import DaemonLife


def own_life() -> DaemonLife:
    """Return a life that is not over before this process ends."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        return DaemonLife(ours)
