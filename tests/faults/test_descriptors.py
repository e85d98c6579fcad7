"""A daemon without a file descriptor left: who is connected is served, others once there are some again."""

import contextlib
import resource
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_cases import num_fds, serve
from kv_cases import PATIENCE_S, paired
from raw_client import wait_for

from snapd import wire as w
from snapd.client import Client
from snapd.errors import SnapdError
from snapd.units import KIB

NUM_HOGS = 60
LEFT = 8
SERVED_MEANWHILE = 10
IMPATIENT_S = 0.5


@contextlib.contextmanager
def descriptors_left(pid: int, left: int) -> Iterator[int]:
    """Let a process have so many file descriptors more; yield how many it may have."""
    old = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    limit = max(int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()) + 1 + left
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, old[1]))
    yield limit
    resource.prlimit(pid, resource.RLIMIT_NOFILE, old)


class Hog:
    """A connection that asks once, and stays."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(str(path))
        with contextlib.suppress(BrokenPipeError):
            self.sock.sendall(w.encode_frame(w.PingReq(id=1)))
        self.sock.setblocking(False)
        self._heard = b""
        self.is_closed = False

    @property
    def fate(self) -> str:
        """Say what became of it so far."""
        with contextlib.suppress(BlockingIOError):
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionResetError:
                data = b""
            self.is_closed = self.is_closed or not data
            self._heard += data
        if self._heard:
            return "served" if isinstance(self._answer(), w.PingRep) else "refused"
        return "closed" if self.is_closed else "waiting"

    def _answer(self) -> Any:
        (payload, *_) = w.FrameSplitter(1 << 20).feed(self._heard)
        return w.decode_answer(payload)


@pytest.mark.slow
def test_without_descriptors_left_who_is_connected_is_served(start_daemon: Callable[..., Any]) -> None:
    """New clients are told or wait; when others go they are served, and so is the log's rotation."""
    daemon = start_daemon(log_rotate_bytes=8 * KIB, log_rotate_keep=100)
    pid = daemon.process.pid
    with paired(daemon) as pair:
        serve(pair)
        # What has been asked for once is known: a D, P and the buffer. More than that is not needed.
        base = num_fds(pid)
        with descriptors_left(pid, LEFT) as limit:
            hogs = [Hog(daemon.socket_path) for _ in range(NUM_HOGS)]
            wait_for(lambda: num_fds(pid) >= limit - 1, "nothing is left", PATIENCE_S)
            for _ in range(SERVED_MEANWHILE):
                serve(pair)
            fates = [hog.fate for hog in hogs]
            assert fates.count("served") >= 1
            assert fates.count("served") <= LEFT < NUM_HOGS
            with pytest.raises(SnapdError), Client(str(daemon.socket_path), timeout_s=IMPATIENT_S) as late:
                late.connect()
            for hog in hogs:
                hog.sock.close()
            wait_for(lambda: num_fds(pid) <= base, "those who went took nothing with them", PATIENCE_S)
            with Client(str(daemon.socket_path), timeout_s=PATIENCE_S) as late:
                late.ping()
            with paired(daemon) as other:
                serve(other)
                serve(pair)
        wait_for(lambda: serve(pair) and pair.d.stats().log.rotations, "the log is rotated", PATIENCE_S)
        assert pair.is_all_free()
        assert pair.d.stats().log.dropped == 0
        wait_for(lambda: num_fds(pid) <= base, "nothing leaked", PATIENCE_S)
    daemon.stop()
    assert "Traceback" not in daemon.stderr
