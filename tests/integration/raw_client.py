"""A client made of a plain socket, so that hostile bytes can be sent, and what must hold after them."""

import contextlib
import itertools
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
from daemon_process import DaemonProcess

from snapd import wire as w
from snapd.core import records as r
from snapd.core.session import Statistics
from snapd.errors import Reason
from snapd.eventlog import Line, decode_line
from snapd.forensics.proof import Proof, Where
from snapd.layout import Layout, Namespace

T = TypeVar("T")
M = TypeVar("M", bound=w.Reply)
WAIT_S = 20.0
LAYOUT = Layout(k_stride_bytes=(64, 64), v_stride_bytes=(64, 64), page_size_tokens=4)
NUM_PLANES = LAYOUT.num_planes
FRAME_BYTES_MAX = 4 << 20


@contextlib.contextmanager
def running(**overrides: object) -> Iterator[DaemonProcess]:
    """Yield a daemon for a whole module; it must stop cleanly, and without having shown a traceback."""
    with tempfile.TemporaryDirectory(prefix="snapd-") as directory:
        daemon = DaemonProcess(Path(directory), overrides)
        try:
            yield daemon
        finally:
            daemon.stop()
        assert "Traceback" not in daemon.stderr, daemon.stderr


def wait_for(condition: Callable[[], T | None], what: str = "the condition", timeout_s: float = WAIT_S) -> T:
    """Return what *condition* returns once it is true."""
    deadline_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"{what} did not come true within {timeout_s} s"
        pause.wait(0.002)
    return found


def frame(payload: bytes) -> bytes:
    """Return *payload* behind its length."""
    return len(payload).to_bytes(4, "little") + payload


def frame_of(fields: object) -> bytes:
    """Return anything at all as one frame."""
    return frame(msgspec.msgpack.encode(fields))


class Closed(Exception):
    """The daemon closed the connection."""


class RawClient:
    """One connection.

    Attributes:
        pushes: what the daemon sent unasked, in order.
    """

    def __init__(self, socket_path: Path | str, receive_buffer_bytes: int = 0) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if receive_buffer_bytes:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(str(socket_path))
        self.pushes: list[w.AnyPush] = []
        self._splitter = w.FrameSplitter(1 << 30)
        self._answers: list[Any] = []
        self._ids = itertools.count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()

    def new_id(self) -> int:
        return next(self._ids)

    def send(self, data: bytes | w.Request) -> None:
        """Send bytes as they are, or a request as a frame."""
        self.sock.sendall(data if isinstance(data, bytes) else w.encode_frame(data))

    def receive(self) -> Any:
        """Return the next reply or push.

        Raises:
            Closed: the daemon closed the connection.
        """
        while not self._answers:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionResetError:
                data = b""
            if not data:
                raise Closed
            self._answers += [w.decode_answer(payload) for payload in self._splitter.feed(data)]
        return self._answers.pop(0)

    def reply_to(self, request_id: int) -> Any:
        """Return the next reply, which must be to that request; pushes before it are kept."""
        while isinstance(answer := self.receive(), w.Push):
            self.pushes.append(answer)
        assert answer.id == request_id, answer
        return answer

    def ask(self, kind: type[w.Request], **fields: Any) -> Any:
        """Send a request and return its reply."""
        request_id = self.new_id()
        self.send(w.encode_frame(kind(id=request_id, **fields)))
        return self.reply_to(request_id)

    def ask_fields(self, kind: str, **fields: Any) -> Any:
        """Send a request that may be of any form; return the reply."""
        request_id = self.new_id()
        self.send(frame_of({"type": kind, "id": request_id} | fields))
        return self.reply_to(request_id)

    def refusal(self, kind: type[w.Request], **fields: Any) -> Reason:
        """Send a request that must be refused, and return the reason."""
        reply = self.ask(kind, **fields)
        assert isinstance(reply, (w.ErrorRep, w.SnapshotPrepareReceiveReqOutput)), reply
        assert not getattr(reply, "ok", False)
        assert reply.detail, "a refusal says more than its reason"
        return reply.reason

    def push(self) -> Any:
        """Return the next push."""
        return self.pushes.pop(0) if self.pushes else self.receive()

    def until_closed(self) -> list[Any]:
        """Return everything that comes before the daemon closes the connection."""
        answers = []
        with contextlib.suppress(Closed):
            while True:
                answers.append(self.receive())
        return answers

    # --- the usual steps

    def declare(self, layout: Layout = LAYOUT, rank: int = 0) -> str:
        reply = self.ask(w.DeclareLayoutReq, rank=rank, layout=layout)
        assert isinstance(reply, w.DeclareLayoutRep), reply
        return reply.layout_fingerprint

    def prepare(self, session_id: str = "s", num_tokens: int = 8, **fields: Any) -> Any:
        """Ask for a slab of the layout that every test has; in the arena of rank 0, unless told otherwise."""
        fingerprint = fields.pop("layout_fingerprint", None) or self.declare()
        fields.setdefault("ranks", (0,))
        return self.ask(
            w.SnapshotPrepareReceiveReqInput,
            session_id=session_id,
            num_tokens=num_tokens,
            layout_fingerprint=fingerprint,
            **fields,
        )

    def granted(self, session_id: str = "s", num_tokens: int = 8, **fields: Any) -> int:
        """Prepare, and return the handle."""
        reply = self.prepare(session_id, num_tokens, **fields)
        assert reply.ok, reply
        return reply.slab_handle

    def start(self, handle: int) -> w.AckRep:
        reply = self.ask(w.TransferStartedReq, slab_handle=handle)
        assert isinstance(reply, w.AckRep) and reply.state == "TRANSFERRING", reply
        return reply

    def commit(self, handle: int, granted_tokens: int = 8, rank: int = 0, **fields: Any) -> Any:
        """Commit what was granted, or other figures."""
        usual = {
            "num_bytes": granted_tokens * LAYOUT.token_bytes,
            "num_tokens": granted_tokens,
            "checksums": ((1, 2),) * NUM_PLANES,
        }
        return self.ask(w.CommitReq, slab_handle=handle, rank=rank, **(usual | fields))

    def ready(self, session_id: str = "s", num_tokens: int = 8, **fields: Any) -> int:
        """Bring an attempt to READY, and return its handle."""
        handle = self.granted(session_id, num_tokens, **fields)
        assert self.commit(handle, num_tokens).state == "READY"
        return handle

    def lease(self, handle: int, rank: int = 0) -> w.BeginIngestRep:
        reply = self.ask(w.BeginIngestReq, slab_handle=handle, rank=rank, layout_fingerprint=self.declare())
        assert isinstance(reply, w.BeginIngestRep), reply
        return reply

    def vote(self, handle: int, lease_id: int, rank: int = 0, ok: bool = True, **fields: Any) -> Any:
        return self.ask(w.VoteReq, slab_handle=handle, rank=rank, lease_id=lease_id, ok=ok, **fields)

    def ingest(self, handle: int) -> None:
        """Lease and vote ok; the attempt is INGESTED and its bytes are free."""
        decision = self.vote(handle, self.lease(handle).lease_id)
        assert isinstance(decision, w.VoteRep) and decision.commit, decision

    def stats(self) -> w.StatsRep:
        reply = self.ask(w.StatsReq)
        assert isinstance(reply, w.StatsRep), reply
        return reply

    def view(self, handle: int) -> Any:
        reply = self.ask(w.GetReq, slab_handle=handle)
        assert isinstance(reply, w.GetRep), reply
        return reply.session


def other_layout() -> Layout:
    """A layout that nobody declares."""
    return Layout(k_stride_bytes=(32,), namespace=Namespace(model="other"))


def check_sums(core: Statistics) -> None:
    """Free, live and quarantined bytes are the capacity, in every arena."""
    for arena in core.arenas:
        assert min(arena.free_bytes, arena.live_bytes, arena.quarantined_bytes) >= 0
        assert arena.free_bytes + arena.live_bytes + arena.quarantined_bytes == arena.capacity_bytes


def is_all_free(core: Statistics) -> bool:
    return all(arena.free_bytes == arena.capacity_bytes for arena in core.arenas)


class LogFollower:
    """Reads a growing log, holds every line against the rules, and compares it with the daemon's counters."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset_bytes = 0
        self.lines: list[Line] = []
        self.proof = Proof()

    def follow(self) -> None:
        """Take the lines that have come since."""
        with self._path.open("rb") as file:
            file.seek(self._offset_bytes)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset_bytes += len(whole)
        for raw in whole.splitlines():
            line = decode_line(raw)
            assert isinstance(line, Line), line
            self.lines.append(line)
            self.proof.feed(line, Where(str(self._path), len(self.lines)))
        assert not self.proof.violations, self.proof.violations

    def agrees_with(self, core: Statistics) -> bool:
        """The log tells the same story as the counters: one outcome for each, and the same map."""
        books, report = self.proof.books(), self.proof.finish()
        assert report.is_whole, report
        arenas = [(arena.rank, arena.live_bytes, arena.quarantined_bytes) for arena in core.arenas]
        return (
            arenas == [(arena.rank, arena.live_bytes, arena.quarantined_bytes) for arena in books.arenas]
            and core.outcomes_by_reason == report.outcomes
            and core.attempts == books.attempts
            and core.open_sessions == len(books.open)
        )

    def end(self) -> None:
        """Nothing is left: every attempt has ended, every lease too, and every byte is free."""
        books = self.proof.books()
        assert not (books.open or books.leases or any(books.extents.values())), books


class Stage:
    """A daemon that is treated badly, and the checks that follow.

    Attributes:
        path: the socket.
        witness: another connection, which must always be served.
        declared: the fingerprint of ``LAYOUT``.
    """

    def __init__(self, daemon: Any, follower: LogFollower) -> None:
        self.daemon = daemon
        self.path = daemon.socket_path
        self.follower = follower
        self._clients: list[RawClient] = []
        self.witness = self.connect()
        self.declared = self.witness.declare()
        self.epoch = self.witness.ask(w.PingReq).epoch

    def connect(self, **options: Any) -> RawClient:
        client = RawClient(self.path, **options)
        self._clients.append(client)
        return client

    def core(self) -> Statistics:
        return self.witness.stats().core

    def check(self) -> None:
        """The witness is served, the books add up, and the log agrees with them."""
        assert self.witness.ask(w.PingReq).epoch == self.epoch

        def agree() -> bool:
            stats = self.witness.stats()
            check_sums(stats.core)
            assert stats.log.dropped == stats.log.write_errors == 0, stats.log
            self.follower.follow()
            return self.follower.agrees_with(stats.core)

        wait_for(agree, "the log and the counters agree")

    def settle(self) -> None:
        """Once the deadlines have passed, everything is free again."""
        self.check()
        wait_for(lambda: is_all_free(self.core()), "every byte is free")
        self.check()
        assert self.core().open_sessions == 0

    def close(self) -> None:
        for client in self._clients:
            client.close()


@contextlib.contextmanager
def staged(daemon: Any, follower: LogFollower) -> Iterator[Stage]:
    """Yield a stage; at its end everything has been checked, and every byte is free."""
    stage = Stage(daemon, follower)
    try:
        yield stage
        stage.settle()
    finally:
        stage.close()


def rss_bytes(pid: int) -> int:
    """Return the memory that a process holds at present."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def log_events(path: Path) -> list[Line]:
    """Return every whole line of a log; the daemon may be in the middle of the last one."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    lines = [decode_line(raw) for raw in whole.splitlines()]
    assert all(isinstance(line, Line) for line in lines)
    return lines  # type: ignore[return-value]


def outcomes(path: Path) -> dict[int, list[str]]:
    """Return the reasons of all outcomes in a log, by handle."""
    found: dict[int, list[str]] = {}
    for line in log_events(path):
        if isinstance(line.record, r.SyncOutcome):
            found.setdefault(line.record.slab_handle, []).append(str(line.record.reason))
    return found


def messages(stderr: str, event: str) -> list[str]:
    """Return the lines of stderr that tell of *event*."""
    return [line for line in stderr.splitlines() if re.search(rf'"event":"{event}"', line)]
