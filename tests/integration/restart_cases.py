"""A D over Mooncake in a process of its own, told what to do, and networks in which ports come again."""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import itertools
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import pytest
from daemon_process import clean_environment
from kv_cases import HERE, PATIENCE_S, Pair, records
from late_cases import WIDE, end_with_the_tests
from raw_client import log_events, outcomes, wait_for

from snapd.core import records as rec
from snapd.kv.push import PushResult
from snapd.layout import Namespace
from snapd.units import KIB

NUM_SLOTS = 384
PIECE_BYTES = 64 * KIB
IN_FLIGHT_BYTES_MAX = 4 * PIECE_BYTES
RING_BYTES = 8 * PIECE_BYTES
# 1 MiB, in 16 pieces; and how many of them are submitted when D stands still.
NUM_TOKENS = 64
HELD_PIECES = 5
TOKENS = tuple(range(NUM_TOKENS))
# Mooncake waits for 30 s for a peer unless it is told otherwise.
IMPATIENT = {"MC_TCP_PROGRESS_TIMEOUT_SEC": "1", "MC_TCP_STATUS_TIMEOUT_SEC": "1"}
# Longer than D waits for the daemon's answer.
TOLD_S = 2 * PATIENCE_S
_tenants = itertools.count()


class AskedFor(msgspec.Struct, frozen=True, kw_only=True):
    """A D.

    Attributes:
        socket_path: the daemon's.
        tenant: of its namespace.
        retries_max: see ``PushSettings``.
        mooncake: Mooncake's variables.
        network: a path to the network namespace that it shall enter; empty: none.
    """

    socket_path: str
    tenant: str
    retries_max: int
    mooncake: dict[str, str]
    network: str = ""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A push.

    Attributes:
        seed: which slots.
        hold_after: stand still once so many pieces were submitted, until a line comes; 0: do not.
    """

    session_id: str
    num_tokens: int = NUM_TOKENS
    seed: int = 7
    hold_after: int = 0
    renew: bool = True


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What D says: ``begun``, ``held``, ``write-failed`` or ``result``.

    Attributes:
        is_drained: the write that failed cannot land any more.
        target_ptr, size_bytes: where it went.
    """

    event: str
    pid: int = 0
    is_drained: bool = True
    target_ptr: int = 0
    size_bytes: int = 0
    result: PushResult | None = None


@functools.cache
def _nursery() -> str:
    """Start ``restart_child``, once in this process, and return where it is spoken to."""
    directory = tempfile.mkdtemp(prefix="snapd-")
    atexit.register(shutil.rmtree, directory)
    path = f"{directory}/d.sock"
    process = subprocess.Popen(
        [sys.executable, str(HERE / "restart_child.py"), path],
        stdin=subprocess.DEVNULL, env=clean_environment(), preexec_fn=end_with_the_tests,
    )  # fmt: skip
    atexit.register(process.kill)
    wait_for(Path(path).exists, "Ds can be had", PATIENCE_S)
    return path


class Decoder:
    """A process of ``restart_child``: one Pusher, one engine, as long as it lives.

    Attributes:
        pid: its process.

    Args:
        pair: P, whose D it stands for.
        retries_max: see ``PushSettings``.
        mooncake: Mooncake's variables.
    """

    def __init__(self, pair: Pair, retries_max: int, mooncake: dict[str, str]) -> None:
        self._pair = pair
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(TOLD_S)
        path = _nursery()
        wait_for(lambda: self._sock.connect_ex(path) == 0, "a D can be had", PATIENCE_S)
        self._lines = self._sock.makefile("r")
        asked_for = AskedFor(
            socket_path=str(pair.daemon.socket_path),
            tenant=pair.pusher.layout.namespace.tenant,
            retries_max=retries_max,
            mooncake=mooncake,
            network=f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net" if _is_inside[0] else "",
        )
        self._say(msgspec.json.encode(asked_for).decode())
        self.pid = self.hear("begun").pid

    def hear(self, event: str) -> Told:
        """Return the next thing of this kind that it says; writes that fail are passed over."""
        while True:
            line = self._lines.readline()
            assert line, "D has ended"
            told = msgspec.json.decode(line, type=Told)
            if told.event == event:
                return told
            assert told.event == "write-failed", told

    def end(self) -> None:
        """Kill it, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{self.pid}").exists(), "D is gone", PATIENCE_S)
        self._lines.close()
        self._sock.close()

    def ask(self, session_id: str, **fields: Any) -> None:
        """Have it begin a push; P's side takes note of what it must find."""
        asked = Asked(session_id=session_id, **fields)
        slots = self._pair.slots(asked.num_tokens, asked.seed)
        (pool,) = self._pair.d_pools.values()
        self._pair._truth[0, session_id] = [plane.rows[slots].clone() for plane in pool.planes]
        self._say(msgspec.json.encode(asked).decode())

    def go_on(self) -> None:
        """End its hold."""
        self._say("go on")

    def result(self) -> PushResult:
        result = self.hear("result").result
        assert result is not None
        return result

    def push(self, session_id: str, **fields: Any) -> PushResult:
        self.ask(session_id, **fields)
        return self.result()

    def _say(self, line: str) -> None:
        self._sock.sendall(line.encode() + b"\n")


@contextlib.contextmanager
def decoder(pair: Pair, retries_max: int = 3, mooncake: dict[str, str] = IMPATIENT) -> Iterator[Decoder]:
    started = Decoder(pair, retries_max, mooncake)
    try:
        yield started
    finally:
        started.end()


@contextlib.contextmanager
def prefill(daemon: Any) -> Iterator[Pair]:
    """Yield P; at its end its pool, slots and tree are checked against D's pool."""
    pair = Pair(daemon, WIDE, num_slots=NUM_SLOTS, namespace=Namespace(tenant=f"D-{next(_tenants)}"))
    try:
        yield pair
        pair.check()
    finally:
        pair.close()


def outcome(daemon: Any, handle: int) -> str:
    """Return how an attempt ended, once the log tells: that of a former epoch is closed beside the start."""
    (reason,) = wait_for(lambda: outcomes(daemon.log_path).get(handle), "an outcome")
    return reason


def meet_again(pair: Pair) -> None:
    """Have P notice that the daemon was restarted: its layout is declared again by itself."""
    pair.ps[0].ping()


def ingest(pair: Pair, session_id: str, result: PushResult) -> None:
    """Ingest what D has pushed, all of it, bit by bit what D has."""
    assert result.ok, result
    (answer,) = pair.ingest(session_id, TOKENS[: result.num_tokens], result.slab_handle)
    assert answer.ok, answer
    pair.check()


def epochs(daemon: Any) -> list[str]:
    """Return the lives of the daemon that the log tells of, in order."""
    return [
        line.header.epoch
        for line in log_events(daemon.log_path)
        if isinstance(line.record, rec.DaemonStarted)
    ]


def hold(pair: Pair, d: Decoder, session_id: str, **fields: Any) -> int:
    """Have D stand still in the middle of a push; return its handle, once the log tells of it."""
    d.ask(session_id, hold_after=HELD_PIECES, **fields)
    d.hear("held")
    sessions = pair.ps[0].list_sessions().sessions
    (handle,) = (session.slab_handle for session in sessions if session.session_id == session_id)
    wait_for(lambda: records(pair.daemon, rec.SlabAllocated, handle), "the log tells of it")
    return handle


@contextlib.contextmanager
def metadata_server() -> Iterator[str]:
    """Yield the address of Mooncake's own metadata server."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "mooncake.http_metadata_server", "--host", "127.0.0.1"]
    process = subprocess.Popen(
        [*command, "--port", str(port)], stdin=subprocess.DEVNULL, preexec_fn=end_with_the_tests
    )
    try:

        def listens() -> bool:
            assert process.poll() is None, "Mooncake's metadata server has ended"
            with socket.socket() as sock:
                return sock.connect_ex(("127.0.0.1", port)) == 0

        wait_for(listens, "the metadata server listens", PATIENCE_S)
        yield f"http://127.0.0.1:{port}/metadata"
    finally:
        process.kill()
        process.wait()


# --- a network of one's own ------------------------------------------------------------------------

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x4000_0000
_SIOCSIFFLAGS, _SIOCSIFADDR = 0x8914, 0x8916
_IFF_UP = 1
_is_inside = [False]
_NO_TIME_WAIT = Path("/proc/sys/net/ipv4/tcp_max_tw_buckets")


@contextlib.contextmanager
def own_network() -> Iterator[None]:
    """Inside, this thread and the processes that it starts have a loopback that nobody else uses.

    Ports are free again at once. Skips the test where that is not permitted.
    """
    with Path("/proc/thread-self/ns/net").open("rb") as before:
        if _LIBC.unshare(_CLONE_NEWNET) != 0:
            pytest.skip(f"no network namespace of its own: {os.strerror(ctypes.get_errno())}")
        try:
            _set_up()
            try:
                _NO_TIME_WAIT.write_text("0")
            except OSError as error:
                pytest.skip(f"{_NO_TIME_WAIT} cannot be written: {error}")
            _is_inside[0] = True
            yield
        finally:
            _is_inside[0] = False
            enter_network(before.fileno())


def enter_network(fd: int) -> None:
    """Have this thread, and what it starts, use another network."""
    assert _LIBC.setns(fd, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


def _set_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", _IFF_UP))


def set_loopback(*, is_there: bool) -> None:
    """Give this network its address back or take it away: then nobody is reached any more, nor answered."""
    address = socket.inet_aton("127.0.0.1" if is_there else "0.0.0.0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCSIFADDR, struct.pack("16sHH4s16x", b"lo", socket.AF_INET, 0, address))


# Each is as good as even.
SAME_PORT_TRIES = 40
_FIRST_PORT = 22_200


class Address(NamedTuple):
    """Where a daemon's engine listens.

    Attributes:
        rpc_port: in its segment's name.
        data_port: what it tells about where bytes go.
    """

    rpc_port: int
    data_port: int


class Ports:
    """Three ports for the daemon's engine, of which all but the one or two that it may take are in use.

    The engine takes two of its range, at random. The third is held by a socket of this process.
    """

    def __init__(self) -> None:
        self._all = range(_FIRST_PORT, _FIRST_PORT + 3)
        self._held = socket.socket()
        self._hold(self._all[-1])

    @property
    def settings(self) -> dict[str, int]:
        """The daemon's."""
        return {
            "mooncake__settings__MC_MIN_RPC_PORT": self._all[0],
            "mooncake__settings__MC_MAX_RPC_PORT": self._all[-1],
        }

    def of(self, pair: Pair) -> Address:
        """Return where the daemon listens now."""
        rpc_port = int(pair.ps[0].connect().transport_address.rpartition(":")[2])
        held_port = self._held.getsockname()[1]
        (data_port,) = (port for port in self._all if port not in (rpc_port, held_port))
        return Address(rpc_port, data_port)

    def free_another_for_data(self, first: Address) -> None:
        """Take *first*'s data port away: its rpc port may come again, and then with another one for data."""
        self._hold(first.data_port)

    def _hold(self, port: int) -> None:
        self._held.close()
        self._held = socket.socket()
        # Connections of the one who had it may be closing still.
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("", port))
        self._held.listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()
