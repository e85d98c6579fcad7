"""The control socket: connections, framing, back-pressure and watchers.

Whatever a client does concerns its own connection only: it is cut off when it sends what is no
frame, leaves one unfinished, or does not read its replies.

Source: design, section 5.
"""

import asyncio
import os
import socket
from collections import Counter, deque
from collections.abc import Callable
from typing import Final, cast

import structlog

from snapd import wire as w
from snapd.access import Access, Rights
from snapd.compiling import mypyc_attr
from snapd.config import Config
from snapd.core import events as e
from snapd.core.records import Record, SessionTransition, SyncRefused
from snapd.errors import ProtocolError, Reason
from snapd.eventlog import TurnRecords
from snapd.peers import Peer, ProcessWatch, peer_of
from snapd.service import Service
from snapd.units import KIB, MS_PER_S

_log: Final = structlog.get_logger("snapd.server")
_NOBODY: Final = Rights("", roles=frozenset())
# One client with some rights only may have this part of all connections.
_SHARE_OF_CONNECTIONS: Final = 2
# Requests of one connection that are answered before the others get their turn.
_TURN_REQUESTS_MAX: Final = 64
# Replies of one turn are written together, until they are this long: every write is a system call.
_GATHERED_BYTES: Final = 16 * KIB


@mypyc_attr(allow_interpreted_subclasses=True)
class RateLimitedWarnings:
    """Says each kind of warning at most once in a while, with how many were left out.

    A flood of bad peers must not become a flood of lines.

    Args:
        now_s: the time.
        interval_ms: between two warnings of one kind.

    Attributes:
        counts: how often each kind came up.
    """

    def __init__(self, now_s: Callable[[], float], interval_ms: int) -> None:
        self.counts: Counter[str] = Counter()
        self._now_s = now_s
        self._interval_s = interval_ms / MS_PER_S
        self._last: dict[str, tuple[float, int]] = {}

    def warn(self, kind: str, **facts: object) -> None:
        """Write the warning, or count it. *kind* comes from a closed set in this file."""
        self.counts[kind] += 1
        now_s = self._now_s()
        last_s, left_out = self._last.get(kind, (-self._interval_s, 0))
        if now_s - last_s < self._interval_s:
            self._last[kind] = (last_s, left_out + 1)
            return
        self._last[kind] = (now_s, 0)
        _log.warning(kind, left_out=left_out, **facts)


@mypyc_attr(allow_interpreted_subclasses=True)
class Server:
    """Accepts connections and knows which are there.

    Args:
        config: bounds.
        loop: the running loop.
        service: answers requests; set before the socket listens.
        on_writer_gone: told of a local process that has exited.
        is_writer_needed: whether a writer id still stands for an attempt.
    """

    def __init__(
        self,
        config: Config,
        loop: asyncio.AbstractEventLoop,
        on_writer_gone: Callable[[int], None],
        is_writer_needed: Callable[[int], bool],
    ) -> None:
        self.config = config
        self.loop = loop
        self.service: Service | None = None
        # What is logged in a turn waits here until the turn's replies are out.
        self.records: TurnRecords | None = None
        self.access = Access(config.access, {0, os.geteuid(), *config.allowed_uids})
        self.processes = ProcessWatch(loop, on_writer_gone, is_writer_needed, config.connections_max)
        self.warnings = RateLimitedWarnings(loop.time, config.limits.warning_interval_ms)
        self.connections: dict[int, Connection] = {}
        self.watchers: dict[int, Connection] = {}
        # Those of ``connections`` that came over TCP.
        self.tcp_connections: set[int] = set()
        # How many connections each client has that has some rights only.
        self.owners: Counter[str] = Counter()
        self._last_conn_id = 0

    def new_connection(self) -> "Connection":
        """Return the protocol of a connection that is being accepted."""
        return Connection(self, self.next_conn_id())

    def next_conn_id(self) -> int:
        """Return an id for a connection that is being accepted."""
        self._last_conn_id += 1
        return self._last_conn_id

    def tell_end(self, told: e.EndTold) -> None:
        """Tell a connection how an attempt ended, if it is still there."""
        connection = self.connections.get(told.conn_id)
        if connection is not None:
            connection.push(
                w.SessionEnded(
                    slab_handle=told.slab_handle,
                    session_id=told.session_id,
                    state=told.state,
                    reason=told.reason,
                    drain_wanted=told.drain_wanted,
                )
            )

    def tell_notified(self, conn_id: int, push: w.TransferNotified) -> bool:
        """Pass a hint on; False: the connection is gone, or reads too slowly for hints."""
        connection = self.connections.get(conn_id)
        return connection is not None and connection.hint(push)

    def usage(self) -> dict[str, int]:
        """Return how much of its bounds is in use, by setting; of what each client has, the most of any."""
        connections = list(self.connections.values())
        loads = [connection.load() for connection in connections] or [(0, 0, 0)]
        in_flight, unread_bytes, shown = map(max, zip(*loads, strict=True))
        return {
            "connections_max": len(connections) - len(self.tcp_connections),
            "tcp_connections_max": len(self.tcp_connections),
            "watchers_max": len(self.watchers),
            "watch_queue_max": shown,
            "reply_buffer_bytes_max": unread_bytes,
            "requests_in_flight_max": in_flight,
        }

    def show_record(self, record: Record) -> None:
        """Push a transition or a refusal to whoever watches."""
        if not self.watchers:
            return
        push: w.WatchTransition | w.WatchRefused
        match record:
            case SessionTransition():
                push = w.WatchTransition(
                    at_ns=record.at_ns,
                    session_id=record.session_id,
                    slab_handle=record.slab_handle,
                    from_state=record.from_state,
                    to_state=record.to_state,
                    reason=record.reason,
                    num_tokens=record.num_tokens,
                    token_start=record.token_start,
                    bytes=record.bytes,
                    duration_ms=record.duration_ms,
                )
            case SyncRefused():
                push = w.WatchRefused(
                    at_ns=record.at_ns,
                    session_id=record.session_id,
                    reason=record.reason,
                    num_tokens=record.num_tokens,
                    detail=record.detail,
                )
            case _:
                return
        frame = w.encode_frame(push)
        for connection in list(self.watchers.values()):
            if connection.watched_session_id in ("", record.session_id):
                connection.show(frame)

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self.connections.values()):
            connection.close()
        self.processes.close()


@mypyc_attr(allow_interpreted_subclasses=True)
class Connection(asyncio.Protocol):
    """One client.

    Attributes:
        conn_id: never used again in this epoch.
        label: what the client calls itself, else its process; for the log.
        rights: what it may do.
        is_local: it is on this host, over the unix socket: file descriptors can be handed over.
        watched_session_id: which session's transitions it wants; empty: all.
    """

    is_local = True

    def __init__(self, server: Server, conn_id: int) -> None:
        self.conn_id = conn_id
        self.label = ""
        self.rights = _NOBODY
        self.watched_session_id = ""
        self._server = server
        self._config = server.config
        self._splitter = w.FrameSplitter(server.config.frame_bytes_max)
        self._transport: asyncio.Transport | None = None
        self._peer = Peer(0, 0)
        self._in_flight = 0
        self._is_congested = False
        self._is_closed = False
        self._backlog: deque[bytes | ProtocolError] = deque()
        self._is_gathering = False
        self._is_paused = False
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self._gathered_bytes_max = 0
        self._next_turn: asyncio.Handle | None = None
        self._frame_deadline: asyncio.TimerHandle | None = None
        self._last_chance: asyncio.TimerHandle | None = None
        self._shown: deque[bytes] = deque()
        self._num_lost = 0
        # Since a descriptor was last handed over.
        self._has_replied = False

    # --- what the loop calls -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let the client in, or say why not."""
        # A transport of uvloop has the methods, and not the class.
        self._transport = cast("asyncio.Transport", transport)
        room_bytes = self._config.reply_buffer_bytes_max - self._config.frame_bytes_max
        # Whoever is not congested can take one more reply of any size, with what was gathered before it,
        # without being cut off.
        congested_bytes = min(self._config.limits.congested_bytes, room_bytes)
        self._gathered_bytes_max = min(_GATHERED_BYTES, congested_bytes // 2)
        self._transport.set_write_buffer_limits(high=congested_bytes - self._gathered_bytes_max)
        refusal = self._identify() or self._too_many()
        if refusal is None:
            self._server.connections[self.conn_id] = self
            if not self.rights.is_full:
                self._server.owners[self.rights.owner] += 1
        else:
            self._refuse_connection(*refusal)

    def _identify(self) -> tuple[Reason, str] | None:
        """Find out who the client is and what it may do; return why it is not let in."""
        warn = self._server.warnings.warn
        try:
            with self._socket() as sock:
                self._peer = peer_of(sock)
        except OSError as error:
            warn("peer unknown", error=error.strerror)
            return Reason.LIMIT_REACHED, f"the peer cannot be looked at: {error.strerror}"
        rights = self._server.access.of_uid(self._peer.uid)
        if rights is None:
            warn("peer refused", uid=self._peer.uid, pid=self._peer.pid)
            return Reason.PERMISSION_DENIED, f"user {self._peer.uid} is not in allowed_uids"
        self.rights = rights
        self.label = f"pid {self._peer.pid}" if rights.is_full else rights.owner
        return None

    def _too_many(self) -> tuple[Reason, str] | None:
        connections_max = self._config.connections_max
        # Those over TCP have a bound of their own, so that they cannot keep local ones out.
        if len(self._server.connections) - len(self._server.tcp_connections) < connections_max:
            return self._too_many_of_one(connections_max, "connections_max")
        self._server.warnings.warn("too many connections", connections_max=connections_max)
        return Reason.LIMIT_REACHED, f"{connections_max} connections are open (connections_max)"

    def _too_many_of_one(self, connections_max: int, setting: str) -> tuple[Reason, str] | None:
        """Return why a client with some rights only has as many as it may have: half of all, or one."""
        share = max(1, connections_max // _SHARE_OF_CONNECTIONS)
        owner = self.rights.owner
        if self.rights.is_full or self._server.owners[owner] < share:
            return None
        self._server.warnings.warn("too many connections of one client", **self._who(), share=share)
        return Reason.LIMIT_REACHED, f"{owner} has {share} connections open (half of {setting})"

    def _who(self) -> dict[str, object]:
        """Return who the client is, for a warning."""
        return {"pid": self._peer.pid}

    def _refuse_connection(self, reason: Reason, detail: str) -> None:
        assert self._transport is not None
        self._transport.write(w.encode_frame(w.ErrorRep(id=0, reason=reason, detail=detail)))
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client. Its attempts go on: it may come back and commit."""
        del exc
        self._transport = None
        if self._server.connections.pop(self.conn_id, None) is not None and not self.rights.is_full:
            self._server.owners -= Counter((self.rights.owner,))
        self._server.watchers.pop(self.conn_id, None)
        self._is_closed = True
        # A vote that waits keeps this object for a while.
        self._shown.clear()
        self._backlog.clear()
        for timer in (self._next_turn, self._last_chance):
            if timer is not None:
                timer.cancel()
        self._stop_frame_clock()

    def data_received(self, data: bytes) -> None:
        """Take every request that is whole."""
        if self._is_closed:
            return
        try:
            payloads = self._splitter.feed(data)
            self._backlog += payloads
            self._splitter.check()
        except ProtocolError as error:
            # After the requests that came before it.
            self._backlog.append(error)
        else:
            if payloads and self._frame_deadline is not None:
                self._stop_frame_clock()
            self._watch_frame()
        self._take_turn()

    def pause_writing(self) -> None:
        """The client does not read: take nothing more from it until it does."""
        self._is_congested = True

    def resume_writing(self) -> None:
        """The client reads again."""
        self._is_congested = False
        while self._shown and not self._is_congested:
            self._write(self._shown.popleft())
        if self._num_lost and not self._is_congested:
            lost, self._num_lost = self._num_lost, 0
            self._write(w.encode_frame(w.WatchLost(count=lost)))
        self._take_turn()

    # --- requests ------------------------------------------------------------------------------

    def _take_turn(self) -> None:
        """Answer some of what has come; the rest when the others had their turn and the client reads."""
        records = self._server.records
        if records is None:
            self._answer_some()
        else:
            records.hold()
            try:
                self._answer_some()
            finally:
                # The client need not wait for lines to be made; nobody else gets a turn before they are.
                records.let_go()
        if self._is_closed:
            self._backlog.clear()
            return
        is_idle = not self._backlog and not self._is_congested
        if is_idle is self._is_paused:
            assert self._transport is not None
            self._is_paused = not is_idle
            if is_idle:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()
        if self._backlog and not self._is_congested and self._next_turn is None:
            self._next_turn = self._server.loop.call_soon(self._turn_comes)

    def _answer_some(self) -> None:
        backlog = self._backlog
        self._is_gathering = True
        try:
            for _ in range(_TURN_REQUESTS_MAX):
                if not backlog or self._is_congested or self._is_closed:
                    break
                item = backlog.popleft()
                try:
                    if isinstance(item, ProtocolError):
                        raise item
                    self._take(item)
                except ProtocolError as error:
                    self._refuse_bytes(error)
        finally:
            self._is_gathering = False
            self._write_gathered()

    def _turn_comes(self) -> None:
        self._next_turn = None
        self._take_turn()

    def _take(self, payload: bytes) -> None:
        request = w.decode_request(payload)
        if isinstance(request, w.ErrorRep):
            self._write(w.encode_frame(request))
            return
        if self._in_flight >= self._config.requests_in_flight_max:
            detail = f"{self._in_flight} requests of this connection wait (requests_in_flight_max)"
            error = w.ErrorRep(id=request.id, reason=Reason.LIMIT_REACHED, detail=detail)
            self._write(w.encode_frame(error))
            return
        assert self._server.service is not None
        self._in_flight += 1
        in_flight = self._in_flight
        try:
            self._server.service.take(self, request)
        except Exception as error:
            self._tell_bug(request.id, error, is_answered=self._in_flight < in_flight)

    def _tell_bug(self, request_id: int, error: Exception, *, is_answered: bool) -> None:
        """A bug: the loop's handler ends the daemon. Whoever asked is told, unless it has its answer."""
        assert self._server.service is not None
        if not is_answered:
            self._server.service.refused[Reason.INTERNAL_ERROR] += 1
            detail = "a bug in snapd: the daemon ends, and what the request has done is not known"
            self._write(
                w.encode_frame(w.ErrorRep(id=request_id, reason=Reason.INTERNAL_ERROR, detail=detail))
            )
        self._server.loop.call_exception_handler({"message": "a request", "exception": error})
        self.close()

    def _refuse_bytes(self, error: ProtocolError) -> None:
        self._server.warnings.warn("bad frame", **self._who(), error=str(error))
        self._write(w.encode_frame(w.ErrorRep(id=0, reason=Reason.INVALID_REQUEST, detail=str(error))))
        self.close()

    def _watch_frame(self) -> None:
        if self._splitter.is_inside_frame and self._frame_deadline is None:
            self._start_frame_clock()

    def _start_frame_clock(self) -> None:
        self._frame_deadline = self._server.loop.call_later(
            self._config.frame_timeout_ms / MS_PER_S, self._frame_timed_out
        )

    def _frame_timed_out(self) -> None:
        self._frame_deadline = None
        if self._is_congested or self._backlog:
            # The rest may have been sent: it is the daemon that does not read at present.
            self._watch_frame()
            return
        self._server.warnings.warn("unfinished frame", **self._who())
        detail = f"a frame was not finished within {self._config.frame_timeout_ms} ms"
        self._write(w.encode_frame(w.ErrorRep(id=0, reason=Reason.INVALID_REQUEST, detail=detail)))
        self.close()

    def _stop_frame_clock(self) -> None:
        if self._frame_deadline is not None:
            self._frame_deadline.cancel()
            self._frame_deadline = None

    # --- service.Caller ------------------------------------------------------------------------

    def send(self, message: w.AnyReply) -> None:
        """Answer a request."""
        frame = w.encode_frame(message)
        # Not before: what cannot be encoded is no answer.
        self._in_flight -= 1
        if len(frame) - w.LENGTH_BYTES > self._config.frame_bytes_max:
            detail = f"the reply would have {len(frame)} bytes (frame_bytes_max); ask for less at a time"
            frame = w.encode_frame(w.ErrorRep(id=message.id, reason=Reason.LIMIT_REACHED, detail=detail))
        self._write(frame)

    def writer_id(self) -> int:
        """Return the id under which the client's process is watched, or 0."""
        try:
            with self._socket() as sock:
                return self._server.processes.writer_id(sock, self._peer)
        except OSError:
            # No file descriptor is left: the attempt does without this kind of drain proof.
            return 0

    def watch(self, session_id: str) -> bool:
        """Push transitions to the client from now on."""
        watchers = self._server.watchers
        if self.conn_id not in watchers and len(watchers) >= self._config.watchers_max:
            return False
        self.watched_session_id = session_id
        watchers[self.conn_id] = self
        return True

    def hand_over(self, message: w.MapBufferRep, fd: int) -> bool:
        """Answer with a file descriptor, past the loop's own buffer, which must be empty for that."""
        assert self._transport is not None
        self._write_gathered()
        if self._transport.get_write_buffer_size():
            return False
        frame = w.encode_frame(message)
        try:
            # A frame this small goes whole or not at all into an empty socket buffer.
            with self._socket() as sock:
                is_sent = socket.send_fds(sock, [frame], [fd]) == len(frame)
        except OSError as error:
            if self._has_replied and isinstance(error, BlockingIOError):
                return False  # Replies fill the socket, and not descriptors that the client does not take.
            is_sent = False
        self._in_flight -= 1
        self._has_replied = False
        if not is_sent:
            self.close()
        return True

    # --- pushes --------------------------------------------------------------------------------

    def push(self, message: w.SessionEnded) -> None:
        """Tell the client something that it did not ask for."""
        self._write(w.encode_frame(message))

    def hint(self, message: w.TransferNotified) -> bool:
        """Tell the client what it can do without: nothing, and False, while it does not read.

        Anybody who reaches the transport can cause hints; they must not cut a client off.
        """
        if self._is_closed or self._is_congested:
            return False
        self._write(w.encode_frame(message))
        return True

    def show(self, frame: bytes) -> None:
        """Push a transition; to a client that does not read, as many as may wait, and a count of the rest."""
        if not self._is_congested:
            self._write(frame)
        elif len(self._shown) < self._config.watch_queue_max:
            self._shown.append(frame)
        else:
            self._num_lost += 1

    def load(self) -> tuple[int, int, int]:
        """Return requests under way, bytes that the client has not read, and transitions that wait for it."""
        unread_bytes = self._transport.get_write_buffer_size() if self._transport is not None else 0
        return self._in_flight, unread_bytes, len(self._shown)

    def close(self) -> None:
        """Close the connection once what was written is out, or was not read for a while."""
        self._write_gathered()
        if self._is_closed:
            return
        assert self._transport is not None
        self._is_closed = True
        self._server.watchers.pop(self.conn_id, None)
        self._transport.close()
        self._last_chance = self._server.loop.call_later(
            self._config.frame_timeout_ms / MS_PER_S, self._transport.abort
        )

    def _write(self, frame: bytes) -> None:
        if self._is_closed:
            return
        if self._is_gathering:
            self._gathered.append(frame)
            self._gathered_bytes += len(frame)
            if self._gathered_bytes > self._gathered_bytes_max:
                self._write_gathered()
        else:
            self._write_now(frame)

    def _write_gathered(self) -> None:
        if self._gathered:
            frames = b"".join(self._gathered) if len(self._gathered) > 1 else self._gathered[0]
            self._gathered.clear()
            self._gathered_bytes = 0
            self._write_now(frames)

    def _write_now(self, frames: bytes) -> None:
        if self._is_closed:
            return
        assert self._transport is not None
        self._transport.write(frames)
        self._has_replied = True
        if self._transport.get_write_buffer_size() > self._config.reply_buffer_bytes_max:
            self._server.warnings.warn("client does not read", **self._who())
            self._is_closed = True
            self._server.watchers.pop(self.conn_id, None)
            self._transport.abort()

    def _socket(self) -> socket.socket:
        """Return a socket object of one's own for the connection; the caller closes it."""
        assert self._transport is not None
        return socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno()))
