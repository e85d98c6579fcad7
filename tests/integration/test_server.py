"""The control socket: bounds, clients that do not read, watchers, and the buffer's descriptors."""

import asyncio
import contextlib
import fcntl
import mmap
import os
import resource
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from raw_client import (
    LAYOUT,
    Closed,
    LogFollower,
    RawClient,
    Stage,
    messages,
    rss_bytes,
    running,
    staged,
    wait_for,
)

from snapd import wire as w
from snapd.client import Client
from snapd.config import Config
from snapd.core import records as r
from snapd.core.events import State
from snapd.errors import Reason
from snapd.server import Connection, RateLimitedWarnings, Server
from snapd.units import KIB, MIB

NOBODY = 65_534
SMALL = {
    "ranks": 2, "connections_max": 8, "watchers_max": 2, "watch_queue_max": 50, "requests_in_flight_max": 4,
    "frame_bytes_max": 64 * KIB, "reply_buffer_bytes_max": 64 * KIB, "page_keys_max": 1_000,
    "frame_timeout_ms": 400, "quarantine_ms": 100,
}  # fmt: skip
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture(scope="module")
def small_daemon() -> Iterator[tuple[Any, LogFollower]]:
    """A daemon whose every bound is low."""
    with running(**SMALL) as daemon:
        yield daemon, LogFollower(daemon.log_path)


@pytest.fixture(scope="module")
def usual_daemon() -> Iterator[tuple[Any, LogFollower]]:
    with running(quarantine_ms=100) as daemon:
        yield daemon, LogFollower(daemon.log_path)


@pytest.fixture
def small(small_daemon: tuple[Any, LogFollower]) -> Iterator[Stage]:
    with staged(*small_daemon) as stage:
        yield stage


@pytest.fixture
def usual(usual_daemon: tuple[Any, LogFollower]) -> Iterator[Stage]:
    with staged(*usual_daemon) as stage:
        yield stage


def fill_until_the_daemon_stops_reading(client: RawClient, request: bytes) -> int:
    """Send one request again and again without reading; return how many bytes were taken."""
    client.sock.setblocking(False)
    data = request * (64 * KIB // len(request))
    sent_bytes = 0
    while select.select([], [client.sock], [], 0.3)[1]:
        offset = sent_bytes % len(request)
        sent_bytes += client.sock.send(data[offset : len(data) - len(request) + offset])
        assert sent_bytes < 64 * MIB, "the daemon takes everything from a client that reads nothing"
    client.sock.settimeout(20)
    return sent_bytes


def read_everything(client: RawClient, request: bytes, taken_bytes: int) -> None:
    """Read the answer to every request that was taken, and to the one that was taken by halves."""
    for _ in range(taken_bytes // len(request)):
        assert isinstance(client.receive(), w.StatsRep)
    if taken_bytes % len(request):
        client.send(request[taken_bytes % len(request) :])
        assert isinstance(client.receive(), w.StatsRep)


def forget_all_but(stage: Stage, num_connections: int = 1) -> None:
    wait_for(lambda: stage.witness.stats().connections == num_connections, "the others are forgotten")


# --- clients that send much, or do not read


@pytest.mark.parametrize("daemon", ["small", "usual"])
def test_10000_pipelined_requests_are_answered_to_a_client_that_reads(
    daemon: str, request: pytest.FixtureRequest
) -> None:
    stage: Stage = request.getfixturevalue(daemon)
    client = stage.connect()
    data = b"".join(w.encode_frame(w.StatsReq(id=i)) for i in range(10_000))
    sender = threading.Thread(target=client.send, args=(data,))
    sender.start()
    assert [client.receive().id for _ in range(10_000)] == list(range(10_000))
    sender.join()


def test_a_client_that_pipelines_does_not_keep_others_waiting(usual: Stage) -> None:
    """Its requests are answered some at a time, although they all came in one piece."""
    client, num_pairs = usual.connect(), 400
    name = client.declare()
    handles = [client.granted(str(i), layout_fingerprint=name) for i in range(1_000)]
    # A list takes a pass over all attempts; what is refused is counted, so that one can see how far it is.
    slow = w.encode_frame(w.ListReq(id=1, session_id="none"))
    counted = w.encode_frame(w.AbortReq(id=3, slab_handle=1))
    for _ in range(20):  # Who is not given the processor meanwhile sees nothing of it.
        before, seen = usual.core().requests_refused, set()
        client.send((slow + counted) * num_pairs)
        while (refused := usual.core().requests_refused - before) < num_pairs:
            seen.add(refused)
        for _ in range(2 * num_pairs):
            assert client.receive().id in (1, 3)
        if len(seen - {0}) > 1:
            break
    assert len(seen - {0}) > 1, "somebody else was answered in between"
    for handle in handles:
        usual.witness.ask(w.AbortReq, slab_handle=handle, drained=True)


@pytest.mark.parametrize("daemon", ["small", "usual"])
def test_a_client_that_never_reads_takes_bounded_memory_and_loses_nothing(
    daemon: str, request: pytest.FixtureRequest
) -> None:
    stage: Stage = request.getfixturevalue(daemon)
    ask = w.encode_frame(w.StatsReq(id=1))
    before_bytes = rss_bytes(stage.daemon.process.pid)
    clients = [stage.connect() for _ in range(3)]
    taken = [fill_until_the_daemon_stops_reading(client, ask) for client in clients]
    assert rss_bytes(stage.daemon.process.pid) - before_bytes < 8 * MIB
    stage.check()
    for client, taken_bytes in zip(clients, taken, strict=True):
        read_everything(client, ask, taken_bytes)
        assert client.ask(w.PingReq)


def test_a_client_that_never_reads_and_vanishes_leaves_nothing(small: Stage) -> None:
    client = small.connect()
    fill_until_the_daemon_stops_reading(client, w.encode_frame(w.StatsReq(id=1)))
    client.close()
    forget_all_but(small)


def test_a_frame_that_the_daemon_itself_leaves_unread_is_not_held_against_the_client(small: Stage) -> None:
    """It is congested for longer than frame_timeout_ms, with half a request taken."""
    client, clock = small.connect(), small.connect()
    ask = w.encode_frame(w.StatsReq(id=1))
    taken_bytes = fill_until_the_daemon_stops_reading(client, ask)
    clock.send(b"\x01")
    assert "not finished" in clock.until_closed()[-1].detail
    read_everything(client, ask, taken_bytes)


def test_a_client_that_does_not_read_what_it_is_told_is_cut_off(small: Stage) -> None:
    """Ends of attempts cannot be held back, so they count against reply_buffer_bytes_max."""
    client, other = small.connect(), small.connect()
    name, num_attempts = client.declare(), 1_500
    handles = [client.granted("x" * 400 + str(i), layout_fingerprint=name) for i in range(num_attempts)]
    for handle in handles:
        assert other.ask(w.AbortReq, slab_handle=handle, drained=True).state == "ABORTED"
    assert 0 < len(client.until_closed()) < num_attempts
    wait_for(lambda: messages(small.daemon.stderr, "client does not read"), "it says so")
    assert len(messages(small.daemon.stderr, "client does not read")) == 1


def test_a_client_that_is_cut_off_for_garbage_and_does_not_read_does_not_linger(tmp_path: Path) -> None:
    """Otherwise it would hold a full buffer as long as it likes. In this process, to see the buffer."""
    path = tmp_path / "s"
    config = Config(socket_path=str(path), log_path=str(tmp_path / "l"), frame_timeout_ms=100)

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        server = Server(config, loop, lambda writer_id: None, lambda writer_id: False)
        listener = await loop.create_unix_server(server.new_connection, str(path))
        client = RawClient(path)
        await until(lambda: server.connections)
        (connection,) = server.connections.values()
        transport = connection._transport
        assert transport is not None
        while not transport.get_write_buffer_size():
            for _ in range(10):
                connection.push(ended())
            await asyncio.sleep(0)
        client.send(bytes(4))
        await until(lambda: not server.connections)
        assert transport.is_closing()
        client.close()
        listener.close()
        server.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scene())


class FakeTransport:
    """Takes everything, and says that as much waits as it was told to say."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.written = b""
        self.waiting_bytes = 0
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda **_: self.calls.append(name)

    def get_extra_info(self, name: str) -> socket.socket:
        return self.sock

    def get_write_buffer_size(self) -> int:
        return self.waiting_bytes

    def write(self, data: bytes) -> None:
        self.written += data


class CountingService:
    """Leaves every request unanswered, as if all were votes that wait."""

    def __init__(self) -> None:
        self.taken: list[Any] = []

    def take(self, caller: Connection, request: Any) -> None:
        self.taken.append(request.id)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Callable[[Callable[..., Any]], None]]:
    """Run something with a connection in this process: its fake transport, and a service that counts."""
    config = Config(socket_path=str(tmp_path / "s"), log_path=str(tmp_path / "l"), frame_timeout_ms=30)
    pair = socket.socketpair(socket.AF_UNIX)

    def play(act: Callable[..., Any]) -> None:
        async def on_loop() -> None:
            loop = asyncio.get_running_loop()
            failures: list[Any] = []
            loop.set_exception_handler(lambda loop, context: failures.append(context))
            server = Server(config, loop, lambda writer_id: None, lambda writer_id: False)
            server.service = service = CountingService()  # type: ignore[assignment]
            connection, transport = server.new_connection(), FakeTransport(pair[0])
            connection.connection_made(transport)  # type: ignore[arg-type]
            await act(connection, transport, service, server)
            server.close()
            assert not failures

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(on_loop())

    yield play
    for sock in pair:
        sock.close()


def pings(number: int) -> bytes:
    return b"".join(w.encode_frame(w.PingReq(id=i)) for i in range(number))


def test_a_connection_that_is_lost_leaves_no_request_and_no_timer_behind(scene: Any) -> None:
    async def act(connection: Connection, transport: Any, service: CountingService, server: Server) -> None:
        warned: list[str] = []
        server.warnings.warn = lambda kind, **facts: warned.append(kind)  # type: ignore[method-assign]
        connection.data_received(pings(100) + b"\x01")
        assert service.taken == list(range(64)), "the rest would come at the next turn"
        connection.pause_writing()
        connection.show(b"a transition")
        connection.connection_lost(None)
        assert not server.connections and not connection._backlog and not connection._shown
        await asyncio.sleep(0)
        clock = asyncio.Event()
        server.loop.call_later(0.06, clock.set)  # Twice frame_timeout_ms.
        await clock.wait()
        assert (service.taken, warned, transport.written) == (list(range(64)), [], b"")
        connection.send(w.PingRep(id=1, epoch=""))
        connection.push(ended())
        connection.close()
        assert transport.written == b""

    scene(act)


def test_a_connection_that_is_lost_in_the_middle_of_a_frame_is_not_complained_about(scene: Any) -> None:
    async def act(connection: Connection, transport: Any, service: CountingService, server: Server) -> None:
        warned: list[str] = []
        server.warnings.warn = lambda kind, **facts: warned.append(kind)  # type: ignore[method-assign]
        connection.data_received(b"\x01")
        connection.connection_lost(None)
        clock = asyncio.Event()
        server.loop.call_later(0.06, clock.set)
        await clock.wait()
        assert warned == []

    scene(act)


def test_a_connection_that_is_not_read_from_is_not_blamed_for_half_a_frame_until_it_is(scene: Any) -> None:
    """The clock of a frame goes on only while the daemon reads; then it does go on."""

    async def act(connection: Connection, transport: Any, service: CountingService, server: Server) -> None:
        connection.data_received(pings(100) + b"\x01")
        connection._stop_frame_clock()
        connection._frame_timed_out()
        assert transport.written == b"", "there are requests before it that were not taken yet"
        connection.pause_writing()
        connection._stop_frame_clock()
        connection._frame_timed_out()
        assert transport.written == b"", "the client has to read first"
        connection.resume_writing()
        await until(lambda: transport.written)
        assert b"a frame was not finished" in transport.written
        assert transport.calls[-1] == "close"

    scene(act)


def test_a_connection_that_finishes_a_frame_in_many_pieces_has_one_clock(scene: Any) -> None:
    """None of the pieces leaves a timer behind that fires when the frame has long been whole."""

    async def act(connection: Connection, transport: Any, service: CountingService, server: Server) -> None:
        for byte in pings(1):
            connection.data_received(bytes([byte]))
        assert service.taken == [0]
        clock = asyncio.Event()
        server.loop.call_later(0.06, clock.set)
        await clock.wait()
        assert "close" not in transport.calls

    scene(act)


def test_processes_are_watched_until_the_server_closes(scene: Any) -> None:
    async def act(connection: Connection, transport: Any, service: CountingService, server: Server) -> None:
        assert connection.writer_id() > 0
        assert len(server.processes) == 1
        server.close()
        assert len(server.processes) == 0

    scene(act)


def test_a_connection_that_has_much_to_ask_gets_one_turn_at_a_time(scene: Any) -> None:
    async def act(connection: Connection, transport: Any, service: CountingService, server: Server) -> None:
        connection.data_received(pings(300))
        assert len(service.taken) == 64
        connection.data_received(pings(300))
        assert len(service.taken) == 128
        await asyncio.sleep(0)
        assert len(service.taken) == 192, "one turn was waiting, not two"
        assert transport.calls[-1] == "pause_reading"
        connection.pause_writing()
        await asyncio.sleep(0)
        assert len(service.taken) == 192 and connection._next_turn is None, "it does not spin while it waits"
        connection.resume_writing()
        await until(lambda: not connection._backlog)
        assert len(service.taken) == 600
        assert transport.calls[-1] == "resume_reading"

    scene(act)


def test_a_connection_that_is_lost_while_it_closes_leaves_no_timer_behind(scene: Any) -> None:
    async def act(connection: Connection, transport: Any, service: CountingService, server: Server) -> None:
        connection.close()
        connection.connection_lost(None)
        clock = asyncio.Event()
        server.loop.call_later(0.06, clock.set)
        await clock.wait()
        assert "abort" not in transport.calls

    scene(act)


def test_a_connection_that_is_closed_takes_and_writes_nothing_more(scene: Any) -> None:
    async def act(connection: Connection, transport: Any, service: CountingService, server: Server) -> None:
        connection.watch("")
        connection.data_received(pings(65))
        connection.close()
        assert not server.watchers
        connection.close()
        connection.data_received(pings(1))
        connection.data_received(bytes(4))
        assert server.warnings._last == {}, "nobody complains about what came too late"
        await asyncio.sleep(0)
        connection.push(ended())
        connection.resume_writing()
        assert (service.taken, transport.written) == (list(range(64)), b"")
        assert transport.calls.count("close") == 1
        assert not connection._backlog
        assert "resume_reading" not in transport.calls
        assert server.connections, "it is there, and is counted, until it is lost"

    scene(act)


def test_a_connection_that_is_cut_off_takes_and_writes_nothing_more(scene: Any) -> None:
    async def act(connection: Connection, transport: Any, service: CountingService, server: Server) -> None:
        connection.watch("")
        transport.waiting_bytes = server.config.reply_buffer_bytes_max
        connection.push(ended())
        assert "abort" not in transport.calls, "the limit itself is allowed"
        transport.waiting_bytes += 1
        connection.push(ended())
        assert transport.calls.count("abort") == 1
        written = transport.written
        connection.push(ended())
        connection.data_received(pings(1))
        assert (transport.written, service.taken, transport.calls.count("abort")) == (written, [], 1)
        assert not server.watchers

    scene(act)


def test_hints_of_transfers_are_dropped_while_the_client_does_not_read_and_never_cut_it_off(
    scene: Any,
) -> None:
    """Whoever reaches the transport can cause any number of them."""

    async def act(connection: Connection, transport: Any, service: CountingService, server: Server) -> None:
        hint = w.TransferNotified(slab_handle=1, session_id="s", rank=0)
        assert server.tell_notified(connection.conn_id, hint) is True
        assert transport.written == w.encode_frame(hint)
        connection.pause_writing()
        transport.waiting_bytes = server.config.reply_buffer_bytes_max + 1
        assert server.tell_notified(connection.conn_id, hint) is False
        assert transport.written == w.encode_frame(hint) and "abort" not in transport.calls
        transport.waiting_bytes = 0
        connection.resume_writing()
        assert server.tell_notified(connection.conn_id, hint) is True
        assert server.tell_notified(connection.conn_id + 1, hint) is False
        connection.close()
        assert server.tell_notified(connection.conn_id, hint) is False
        assert transport.written == 2 * w.encode_frame(hint)

    scene(act)


def test_a_watcher_that_reads_for_a_moment_gets_what_fits_and_hears_of_the_loss_last(scene: Any) -> None:
    async def act(connection: Connection, transport: Any, service: CountingService, server: Server) -> None:
        most = server.config.watch_queue_max
        connection.pause_writing()
        for i in range(most + 3):
            connection.show(b"%d," % i)
        transport.write = lambda data: (seen.append(data), connection.pause_writing())
        seen: list[bytes] = []
        connection.resume_writing()
        assert seen == [b"0,"], "it is congested again: nothing more, and no loss yet"
        transport.write = seen.append
        connection.resume_writing()
        assert seen == [*(b"%d," % i for i in range(most)), w.encode_frame(w.WatchLost(count=3))]
        connection.resume_writing()
        connection.show(b"next")
        assert seen[most + 1 :] == [b"next"], "a loss is told once"

    scene(act)


def ended() -> w.SessionEnded:
    return w.SessionEnded(
        slab_handle=1, session_id="s", state=State.ABORTED, reason=Reason.EVICTED, drain_wanted=False
    )


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what it waits for sets no event
            await asyncio.sleep(0.002)


def test_a_reply_over_the_frame_limit_says_so(small: Stage) -> None:
    client = small.connect()
    name = client.declare()
    handles = [client.granted("x" * 500 + str(i), layout_fingerprint=name) for i in range(100)]
    reply = client.ask(w.ListReq, limit=1_000)
    assert (reply.reason, "ask for less at a time" in reply.detail) == (Reason.LIMIT_REACHED, True)
    page = client.ask(w.ListReq, limit=20, offset=90)
    assert (len(page.sessions), page.total) == (10, 100)
    assert [view.slab_handle for view in page.sessions] == handles[90:]
    for handle in handles:
        client.ask(w.AbortReq, slab_handle=handle, drained=True)
        client.push()


# --- bounds


def test_connections_over_the_limit_are_told_and_closed(small: Stage) -> None:
    clients = [small.connect() for _ in range(SMALL["connections_max"] - 1)]
    for client in clients:
        assert client.ask(w.PingReq)
    for _ in range(30):
        with RawClient(small.path) as refused:
            (answer,) = refused.until_closed()
            assert (answer.id, answer.reason) == (0, Reason.LIMIT_REACHED)
            assert answer.detail == "8 connections are open (connections_max)"
    assert len(messages(small.daemon.stderr, "too many connections")) == 1, "one line for a flood"
    assert small.witness.stats().connections == 8
    clients[0].close()
    wait_for(lambda: small.witness.stats().connections == 7, "a place is free")
    assert small.connect().ask(w.PingReq)


def two_leases(client: RawClient) -> tuple[int, int, int]:
    client.declare(rank=1)
    handle = client.granted(ranks=(0, 1))
    for rank in (0, 1):
        client.commit(handle, rank=rank)
    return handle, client.lease(handle, 0).lease_id, client.lease(handle, 1).lease_id


def test_requests_in_flight_are_bounded_and_votes_that_wait_are_in_flight(small: Stage) -> None:
    client, other = small.connect(), small.connect()
    handle, first, second = two_leases(client)
    for i in range(4):
        client.send(w.VoteReq(id=100 + i, slab_handle=handle, rank=0, lease_id=first, ok=True))
    assert client.refusal(w.PingReq) is Reason.LIMIT_REACHED
    assert client.refusal(w.PingReq) is Reason.LIMIT_REACHED, "a refusal takes no place and frees none"
    assert small.witness.stats().requests_waiting == 4
    assert other.vote(handle, second, 1).commit
    assert all(client.reply_to(100 + i).commit for i in range(4))
    for _ in range(20):
        assert client.ask(w.PingReq)


def test_a_buffer_that_was_handed_over_is_no_longer_in_flight(small: Stage) -> None:
    client = small.connect()
    for _ in range(10):
        (fd,) = map_buffer(client)[1]
        os.close(fd)
    assert client.ask(w.PingReq)


def test_what_is_refused_by_its_form_takes_no_place_either(small: Stage) -> None:
    client = small.connect()
    for _ in range(20):
        assert client.ask_fields("NoSuchReq").reason is Reason.UNKNOWN_TYPE
        assert client.ask_fields("GetReq", slab_handle="x").reason is Reason.INVALID_REQUEST
        assert client.ask(w.GetReq, slab_handle=5).reason is Reason.STALE_HANDLE
    assert client.ask(w.PingReq)


# --- watchers


def test_a_watcher_sees_every_transition_and_refusal(usual: Stage) -> None:
    watcher, client = usual.connect(), usual.connect()
    assert isinstance(watcher.ask(w.WatchReq), w.AckRep)
    assert usual.witness.stats().watchers == 1
    handle = client.ready()
    client.ingest(handle)
    seen = [watcher.push() for _ in range(4)]
    assert [(x.from_state, x.to_state) for x in seen] == [
        ("", "RESERVED"), ("RESERVED", "TRANSFERRING"), ("TRANSFERRING", "READY"), ("READY", "INGESTED"),
    ]  # fmt: skip
    assert {(x.slab_handle, x.session_id, x.num_tokens, x.token_start, x.bytes) for x in seen} == {
        (handle, "s", 8, 0, 8 * LAYOUT.token_bytes)
    }
    assert {x.reason for x in seen} == {Reason.OK}
    assert [x.at_ns for x in seen] == sorted(x.at_ns for x in seen)
    assert seen[0].duration_ms == 0 < seen[3].duration_ms
    assert client.prepare(num_tokens=0).reason is Reason.INVALID_REQUEST
    refused = watcher.push()
    assert isinstance(refused, w.WatchRefused)
    assert (refused.session_id, refused.reason, refused.num_tokens) == ("s", Reason.INVALID_REQUEST, 0)
    assert refused.detail and refused.at_ns > seen[3].at_ns


def test_a_watcher_of_one_session_sees_no_other(usual: Stage) -> None:
    watcher, client = usual.connect(), usual.connect()
    watcher.ask(w.WatchReq, session_id="mine")
    for session_id in ("other", "mine", "min", ""):
        if session_id:
            client.ingest(client.ready(session_id))
        else:
            client.prepare("")
    assert [watcher.push().session_id for _ in range(4)] == ["mine"] * 4
    watcher.ask(w.PingReq)
    assert not watcher.pushes
    watcher.ask(w.WatchReq, session_id="other")
    client.ingest(client.ready("mine"))
    client.ingest(client.ready("other"))
    assert [watcher.push().session_id for _ in range(4)] == ["other"] * 4


def test_watchers_are_bounded_and_a_place_is_free_when_one_leaves(small: Stage) -> None:
    watchers = [small.connect() for _ in range(3)]
    for watcher in watchers[:2]:
        assert isinstance(watcher.ask(w.WatchReq), w.AckRep)
    reply = watchers[2].ask(w.WatchReq)
    assert reply.reason is Reason.LIMIT_REACHED
    assert reply.detail == "2 connections watch already (watchers_max)"
    again = watchers[0].ask(w.WatchReq, session_id="s")
    assert isinstance(again, w.AckRep), "who watches may change its mind"
    watchers[0].close()
    wait_for(lambda: small.witness.stats().watchers == 1, "a place is free")
    assert isinstance(watchers[2].ask(w.WatchReq), w.AckRep)
    watchers[1].send(bytes(4))
    watchers[1].until_closed()
    wait_for(lambda: small.witness.stats().watchers == 1, "garbage ends a watch too")


def test_a_watcher_that_does_not_read_loses_a_counted_number_and_nobody_waits_for_it(small: Stage) -> None:
    watcher, client = small.connect(), small.connect()
    watcher.ask(w.WatchReq)
    num_lives = 500
    for i in range(num_lives):
        client.ingest(client.ready("x" * 200 + str(i)))
        client.push()
    seen, lost = [], 0
    while len(seen) + lost < 4 * num_lives:
        push = watcher.push()
        if isinstance(push, w.WatchLost):
            assert push.count > 0
            lost += push.count
        else:
            seen.append(push)
    assert lost > 0, "it was told what it missed"
    assert [x.at_ns for x in seen] == sorted(x.at_ns for x in seen)
    assert len(seen) >= SMALL["watch_queue_max"]
    last = client.ready("after")
    client.ingest(last)
    assert [watcher.push().slab_handle for _ in range(4)] == [last] * 4, "from here on it misses nothing"


# --- the buffer's descriptors


def map_buffer(client: RawClient, rank: int = 0, writable: bool = False) -> tuple[Any, list[int]]:
    """Ask for a descriptor; return the reply, and what came with it."""
    client.send(w.MapBufferReq(id=1, rank=rank, writable=writable))
    data, fds, _, _ = socket.recv_fds(client.sock, 4_096, 4)
    (payload,) = w.FrameSplitter(4_096).feed(data)
    return w.decode_answer(payload), fds


def test_the_buffer_arrives_as_a_descriptor_of_the_right_size(usual: Stage) -> None:
    reader, writer = usual.connect(), usual.connect()
    reply, (read_fd,) = map_buffer(reader)
    assert reply == w.MapBufferRep(id=1, rank=0, size_bytes=16 * MIB, epoch=usual.epoch)
    _, (write_fd,) = map_buffer(writer, writable=True)
    assert os.fstat(read_fd).st_size == os.fstat(write_fd).st_size == 16 * MIB
    with (
        mmap.mmap(write_fd, 16 * MIB) as target,
        mmap.mmap(read_fd, 16 * MIB, prot=mmap.PROT_READ) as source,
    ):
        target[12_345:12_348] = b"abc"
        assert source[12_345:12_348] == b"abc", "both are the same memory"
    with pytest.raises(PermissionError):
        mmap.mmap(read_fd, 16 * MIB)
    for fd in (read_fd, write_fd):
        with pytest.raises(OSError, match=r"Operation not permitted|Invalid argument"):
            os.ftruncate(fd, 4_096)
        wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & wanted == wanted
        os.close(fd)
    assert reader.ask(w.PingReq), "the connection goes on"


@pytest.mark.parametrize("rank", [1, -1, 2**64 - 1, -(2**63)])
def test_a_buffer_of_a_rank_that_is_not_there_is_refused(usual: Stage, rank: int) -> None:
    client = usual.connect()
    assert client.refusal(w.MapBufferReq, rank=rank) is Reason.WRONG_RANK
    assert map_buffer(client)[1], "the next try may be right"


def test_a_buffer_is_refused_while_replies_are_under_way(usual: Stage) -> None:
    """The descriptor would overtake them."""
    reasons = set()
    for num_before in range(40, 200, 8):
        client = usual.connect()
        asked = w.encode_frame(w.StatsReq(id=1)) * num_before + w.encode_frame(w.MapBufferReq(id=2, rank=0))
        client.send(asked)
        for _ in range(10):
            usual.witness.ask(w.PingReq)  # All turns that its requests take have passed.
        for _ in range(num_before):
            assert isinstance(client.receive(), w.StatsRep)
        answer = client.receive()
        assert answer.id == 2
        reasons.add(getattr(answer, "reason", None))
        for _ in range(3):
            (fd,) = map_buffer(client)[1]
            os.close(fd)
        client.close()
    assert Reason.WRONG_STATE in reasons
    assert reasons <= {Reason.WRONG_STATE, None}


def num_fds(stage: Stage) -> int:
    return len(list(Path(f"/proc/{stage.daemon.process.pid}/fd").iterdir()))


def test_a_client_that_asks_for_buffers_and_does_not_take_them_is_cut_off(usual: Stage) -> None:
    forget_all_but(usual)
    before = num_fds(usual)
    client = usual.connect()
    ask = w.encode_frame(w.MapBufferReq(id=1, rank=0))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for _ in range(5_000):
            client.send(ask)
    forget_all_but(usual)
    assert num_fds(usual) == before, "no descriptor is left open for it"
    assert client.until_closed()


def test_descriptors_do_not_leak(usual: Stage) -> None:
    forget_all_but(usual)
    before = num_fds(usual)
    client = usual.connect()
    for _ in range(50):
        (fd,) = map_buffer(client)[1]
        os.close(fd)
        client.granted(is_only_writer=True)
        client.ask(w.TransferFailedReq, slab_handle=client.granted(is_only_writer=True), drained=True)
        client.pushes.clear()
    for view in client.ask(w.ListReq, limit=1_000).sessions:
        client.ask(w.AbortReq, slab_handle=view.slab_handle, drained=True)
    assert num_fds(usual) <= before + 2, "one for the connection, one to watch this process"


@pytest.mark.parametrize("num_left", [0, 1])
def test_without_descriptors_left_clients_hear_of_it_and_the_daemon_lives(
    usual: Stage, num_left: int
) -> None:
    client, other = usual.connect(), usual.connect()
    assert client.ask(w.PingReq) and other.ask(w.PingReq)
    pid = usual.daemon.process.pid
    old = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}
    free = [number for number in range(len(taken) + 2) if number not in taken]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[num_left], old[1]))
    try:
        if num_left:
            other.send(w.MapBufferReq(id=1, rank=0))
            assert other.until_closed() == [], "it is too late for an answer"
        else:
            assert other.refusal(w.MapBufferReq, rank=0) is Reason.LIMIT_REACHED
        wait_for(lambda: usual.witness.stats().connections == 3 - num_left, "it is gone, or served on")
        handle = client.granted(is_only_writer=True)
        assert client.ask(w.AbortReq, slab_handle=handle, drained=True).state == "ABORTED"
        late = [RawClient(usual.path) for _ in range(5)]
        assert client.ask(w.PingReq)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, old)
    for late_client in late:
        late_client.close()
    wait_for(lambda: is_served(usual.path), "new clients are served again")
    assert map_buffer(client)[1]


def is_served(path: Path) -> bool:
    with RawClient(path) as client:
        try:
            return bool(client.ask(w.PingReq))
        except (Closed, OSError):
            return False


# --- who may connect


def as_user(uid: int, do: Callable[[], bytes]) -> bytes:
    """Run *do* in a child that has become another user, and return what it returns."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.write(write_end, do())
        except BaseException as error:
            os.write(write_end, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


def ping_raw(path: Path) -> bytes:
    """Ping, and return the payload of the answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(10)
        sock.connect(str(path))
        with contextlib.suppress(BrokenPipeError):
            sock.sendall(w.encode_frame(w.PingReq(id=1)))
        (length,) = struct.unpack("<I", sock.recv(4))
        return sock.recv(length)


@is_root
def test_another_user_cannot_even_connect(usual: Stage) -> None:
    assert b"PermissionError" in as_user(NOBODY, lambda: ping_raw(usual.path))
    assert usual.path.stat().st_mode & 0o777 == 0o600


@is_root
def test_another_user_who_can_connect_is_refused(usual: Stage) -> None:
    """Somebody has opened the socket's mode; the peer's uid decides all the same."""
    usual.path.chmod(0o666)
    usual.path.parent.chmod(0o755)
    try:
        answer = w.decode_answer(as_user(NOBODY, lambda: ping_raw(usual.path)))
    finally:
        usual.path.chmod(0o600)
        usual.path.parent.chmod(0o700)
    assert answer == w.ErrorRep(
        id=0, reason=Reason.PERMISSION_DENIED, detail=f"user {NOBODY} is not in allowed_uids"
    )
    assert len(messages(usual.daemon.stderr, "peer refused")) == 1


@is_root
def test_a_user_who_is_allowed_is_served_and_a_third_one_is_not(start_daemon: Callable[..., Any]) -> None:
    daemon = start_daemon(allowed_uids=f"[{NOBODY}]")
    daemon.directory.chmod(0o755)
    served = w.decode_answer(as_user(NOBODY, lambda: ping_raw(daemon.socket_path)))
    assert isinstance(served, w.PingRep)
    refused = w.decode_answer(as_user(NOBODY - 1, lambda: ping_raw(daemon.socket_path)))
    assert isinstance(refused, w.ErrorRep) and refused.reason is Reason.PERMISSION_DENIED
    assert isinstance(w.decode_answer(ping_raw(daemon.socket_path)), w.PingRep)


# --- what an operator and a client are told


def test_hello_says_what_the_daemon_is(usual: Stage) -> None:
    hello = usual.connect().ask(w.HelloReq, client="test")
    assert (hello.protocol, hello.epoch, hello.transport) == (1, usual.epoch, "shm")
    assert hello.arenas == (w.ArenaOffer(rank=0, device="cpu", size_bytes=16 * MIB, base_ptr=0),)
    assert (hello.alignment_bytes, hello.frame_bytes_max, hello.lease_ms) == (256, 4 * MIB, 10_000)


def test_stats_say_how_things_stand(usual: Stage) -> None:
    client = usual.connect()
    handle = client.granted()
    stats = client.stats()
    assert (stats.pid, stats.epoch) == (usual.daemon.process.pid, usual.epoch)
    assert stats.core.sessions_by_state == {"RESERVED": 1, "TRANSFERRING": 0, "READY": 0}
    assert (stats.timers, stats.requests_waiting, stats.watchers) == (1, 0, 0)
    assert stats.log.path == str(usual.daemon.log_path)
    assert stats.limits["quarantine_ms"] == 100
    assert stats.uptime_ms > 0
    assert client.ask(w.AbortReq, slab_handle=handle, drained=True)
    assert client.stats().timers == 0


def test_stats_count_also_what_the_turn_has_logged_before_them(usual: Stage) -> None:
    client = usual.connect()
    handle = client.granted()

    def lines() -> int:
        log = client.stats().log
        return log.lines_written + log.queued_lines

    before = lines()
    abort = w.AbortReq(id=client.new_id(), slab_handle=handle, drained=True)
    stats = w.StatsReq(id=client.new_id())
    client.send(w.encode_frame(abort) + w.encode_frame(stats))
    assert isinstance(client.reply_to(abort.id), w.AckRep)
    log = client.reply_to(stats.id).log
    assert log.lines_written + log.queued_lines > before


def test_a_list_holds_what_was_asked_for(usual: Stage) -> None:
    client = usual.connect()
    handles = [client.granted("a"), client.ready("b"), client.ready("c")]
    ended = client.granted("b", 4)
    client.ask(w.AbortReq, slab_handle=ended, drained=True)
    everything = client.ask(w.ListReq)
    assert [view.slab_handle for view in everything.sessions] == handles
    ready = client.ask(w.ListReq, states=("READY",))
    assert [view.slab_handle for view in ready.sessions] == handles[1:]
    of_b = client.ask(w.ListReq, session_id="b", states=("READY", "ABORTED"))
    assert {x.slab_handle for x in of_b.sessions} == {handles[1], ended}
    for handle in handles:
        client.ask(w.AbortReq, slab_handle=handle, drained=True)


def test_a_grant_and_a_lease_name_the_same_planes(usual: Stage) -> None:
    client = usual.connect()
    grant = client.prepare(num_tokens=8, token_start=4)
    assert (grant.num_tokens, grant.token_start) == (8, 4)
    assert 0 < grant.expires_ms <= 10_000
    (rank,) = grant.ranks
    base = rank.extents[0].offset_bytes
    assert rank.k_layer_offsets == (base, base + 512) and rank.v_layer_offsets == (base + 1_024, base + 1_536)
    assert (rank.stride_k_bytes, rank.stride_v_bytes) == ((64, 64), (64, 64))
    client.commit(grant.slab_handle)
    lease = client.lease(grant.slab_handle)
    assert lease.grant == rank
    assert 0 < lease.lease_ms <= 10_000
    assert client.vote(grant.slab_handle, lease.lease_id).commit


def test_a_session_that_was_ingested_is_sent_from_there_on(usual: Stage) -> None:
    client = usual.connect()
    client.ingest(client.ready("hinted", num_tokens=8))
    found = client.ask(w.LookupReq, layout_fingerprint=usual.declared, session_id="hinted")
    assert (found.slab_handle, found.resident_hint_tokens) == (0, 8)
    grant = client.prepare("hinted", 12, use_resident_hint=True)
    assert (grant.token_start, grant.num_tokens, grant.resident_hint_tokens) == (8, 4, 8)
    assert client.commit(grant.slab_handle, 4).state == "READY"
    found = client.ask(w.LookupReq, layout_fingerprint=usual.declared, session_id="hinted")
    assert (found.slab_handle, found.ranks, found.matched_tokens) == (grant.slab_handle, (0,), 12)
    client.ingest(grant.slab_handle)


def test_a_commit_that_is_not_drained_is_ingested_and_its_bytes_are_kept(usual: Stage) -> None:
    raw = usual.connect()
    handle = raw.granted()
    with Client(str(usual.path)) as client:
        num_bytes = 8 * LAYOUT.token_bytes
        sums = ((1, 2),) * LAYOUT.num_planes
        assert client.commit(handle, 0, num_bytes, 8, sums, drained=False).state is State.READY
    assert raw.stats().core.arenas[0].evictable_bytes == 0
    raw.ingest(handle)

    def kept() -> list[str]:
        usual.follower.follow()
        records = [line.record for line in usual.follower.lines]
        return [x.why for x in records if isinstance(x, r.SlabQuarantined) and x.slab_handle == handle]

    wait_for(lambda: kept() == ["undrained"], "the log says so")


def test_drain_over_the_wire_refuses_new_attempts_until_it_is_taken_back(usual: Stage) -> None:
    client = usual.connect()
    handle = client.granted()
    assert isinstance(client.ask(w.DrainReq), w.AckRep)
    assert client.prepare().reason is Reason.DRAINING
    assert client.commit(handle).state == "READY"
    client.ingest(handle)
    assert isinstance(client.ask(w.DrainReq, draining=False), w.AckRep)
    client.ingest(client.ready())


def test_a_warning_of_one_kind_comes_at_most_once_in_a_while_with_a_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [0.0]
    lines: list[tuple[str, dict[str, object]]] = []

    class Lines:
        def warning(self, kind: str, **facts: object) -> None:
            lines.append((kind, facts))

    monkeypatch.setattr("snapd.server._log", Lines())
    warnings = RateLimitedWarnings(lambda: now_s[0], 5_000)
    for now_s[0] in (0.0, 1.0, 4.9):
        warnings.warn("a", pid=1)
    warnings.warn("b")
    now_s[0] = 5.0
    warnings.warn("a", pid=2)
    assert lines == [
        ("a", {"left_out": 0, "pid": 1}),
        ("b", {"left_out": 0}),
        ("a", {"left_out": 2, "pid": 2}),
    ]
