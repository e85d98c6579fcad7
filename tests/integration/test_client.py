"""Both clients against a daemon that does what the test says, and against the real one."""

import asyncio
import inspect
import itertools
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from client_cases import PATIENCE_S, AsyncDriver, FakeDaemon, Peer, SyncDriver, hello_rep

from snapd import calls, exchange, links
from snapd.client import AsyncClient, Client
from snapd.core.events import State
from snapd.errors import (
    ERROR_BY_REASON,
    BufferFull,
    ConnectionLost,
    DaemonUnreachable,
    InvalidRequest,
    LimitReached,
    PermissionDenied,
    ProtocolError,
    Reason,
    RequestError,
    RequestTimeout,
    StaleHandle,
    WrongRank,
)
from snapd.exchange import CONNECTIONS_AN_ERRAND_MAX, PUSHES_MAX
from snapd.layout import Layout
from snapd.wire import (
    AckRep,
    CommitReq,
    DeclareLayoutRep,
    DeclareLayoutReq,
    ErrorRep,
    HelloReq,
    LookupReq,
    PingRep,
    PingReq,
    RankGrant,
    SessionEnded,
    SnapshotPrepareReceiveReqInput,
    SnapshotPrepareReceiveReqOutput,
    VoteRep,
    VoteReq,
    WatchLost,
    WatchReq,
    WatchTransition,
    encode_frame,
)

OPERATIONS = [
    "abort", "begin_ingest", "commit", "declare_layout", "drain", "drained", "get", "list_sessions", "lookup",
    "ping", "prepare_receive", "stats", "transfer_failed", "transfer_started", "vote",
]  # fmt: skip
LAYOUT = Layout((64, 64), (64, 64))
VOTE = calls.vote(7, 0, 1, True)
COMMIT = calls.commit(7, 0, 256, 1, ((1, 2),))
PREPARE = calls.prepare_receive("s", 10, "f" * 32)
SHORT_S = 0.05


@pytest.fixture
def daemon(tmp_path):
    fake = FakeDaemon(tmp_path / "snapd.sock")
    yield fake
    fake.stop()


@pytest.fixture(params=[SyncDriver, AsyncDriver], ids=["sync", "async"])
def drive(request, daemon):
    """Make a driver; it is closed at the end."""
    drivers = []

    def make(**options):
        drivers.append(request.param(daemon.path, **options))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.end()


def begin(driver, daemon, *wanted, **changes):
    """Submit calls on a new connection; return its peer, after hello, and what was submitted."""
    pendings = [driver.submit(call) for call in wanted]
    peer = daemon.accept()
    peer.greet(**changes)
    driver.pump()
    return peer, *pendings


def ended(slab_handle):
    return SessionEnded(
        slab_handle=slab_handle,
        session_id="s",
        state=State.ABORTED,
        reason=Reason.EVICTED,
        drain_wanted=False,
    )


def transition(at_ns):
    return WatchTransition(
        at_ns=at_ns, session_id="s", slab_handle=1, from_state="", to_state="RESERVED", reason=Reason.OK,
        num_tokens=1, token_start=0, bytes=1, duration_ms=0.0,
    )  # fmt: skip


# --- the operations ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_one_definition_and_both_clients_show_it(name):
    make = getattr(calls, name)
    sync_method, async_method = getattr(Client, name), getattr(AsyncClient, name)
    assert sync_method.__doc__ == async_method.__doc__ == make.__doc__
    wanted = list(inspect.signature(make).parameters.values())
    for method in (sync_method, async_method):
        signature = inspect.signature(method)
        assert list(signature.parameters.values())[1:] == wanted
        assert (signature.return_annotation,) == inspect.signature(make).return_annotation.__args__
    assert inspect.iscoroutinefunction(async_method)
    assert not inspect.iscoroutinefunction(sync_method)
    assert "timeout_s" in inspect.signature(make).parameters


def test_both_clients_have_the_same_surface():
    def surface(cls):
        return {name for name in dir(cls) if not name.startswith("_")}

    assert surface(Client) == surface(AsyncClient)


def test_an_operation_of_the_client_sends_its_request_and_returns_the_result(daemon):
    seen = []

    def script():
        peer = daemon.accept()
        peer.greet()
        seen.append(peer.ack())
        seen.append(peer.ack())

    async def in_async():
        async with AsyncClient(daemon.path) as client:
            return await client.commit(7, 1, 256, 2, ((1, 2),), epoch="epoch-1")

    with daemon.playing(script), Client(daemon.path) as client:
        assert client.commit(7, 1, 256, 2, ((1, 2),), epoch="epoch-1") == AckRep(id=seen[0].id)
        assert client.drain(False) == AckRep(id=seen[1].id)
    assert seen[0] == CommitReq(
        id=seen[0].id,
        slab_handle=7,
        epoch="epoch-1",
        rank=1,
        num_bytes=256,
        num_tokens=2,
        checksums=((1, 2),),
    )
    with daemon.playing(script):
        script_done = seen.append
        script_done(None)
        asyncio.run(_twice(daemon.path))
    del in_async


async def _twice(path):
    async with AsyncClient(path) as client:
        assert isinstance(await client.commit(7, 1, 256, 2, ((1, 2),)), AckRep)
        assert isinstance(await client.abort(7), AckRep)


def test_hello_says_who_the_client_is_and_what_it_answers_can_be_read(daemon, drive):
    driver = drive(name="engine-3")
    with pytest.raises(DaemonUnreachable, match="connect"):
        _ = driver.client.hello
    assert driver.client.epoch == ""
    pending = driver.submit(calls.greet())
    peer = daemon.accept()
    assert peer.greet().client == "engine-3"
    assert driver.wait(pending) == driver.client.hello
    assert (driver.client.epoch, driver.client.hello.version) == ("epoch-1", "9.9")
    assert driver.connect().epoch == "epoch-1"
    assert not peer.has_more()


def test_a_grant_is_what_the_daemon_said_and_the_epoch_in_which_it_did(daemon, drive):
    driver = drive()
    peer, pending = begin(driver, daemon, PREPARE, epoch="epoch-5")
    rank = RankGrant(
        rank=3, snapshot_buf_base_ptr=4096, k_layer_offsets=(0,), v_layer_offsets=(), stride_k_bytes=(64,),
        stride_v_bytes=(), extents=(),
    )  # fmt: skip
    request = peer.read()
    peer.send(
        SnapshotPrepareReceiveReqOutput(
            id=request.id, ok=True, slab_handle=9, num_tokens=6, token_start=4, resident_hint_tokens=4,
            ranks=(rank,), expires_ms=10_000,
        )
    )  # fmt: skip
    grant = driver.wait(pending)
    assert (grant.slab_handle, grant.epoch, grant.session_id) == (9, "epoch-5", "s")
    assert (grant.num_tokens, grant.token_start, grant.resident_hint_tokens) == (6, 4, 4)
    assert grant.for_rank(3) == rank
    with pytest.raises(WrongRank):
        grant.for_rank(0)


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", [*ERROR_BY_REASON, Reason.PARTIAL_TRANSFER, Reason.LEASE_EXPIRED])
def test_a_refusal_is_raised_as_the_class_of_its_reason(daemon, drive, reason):
    driver = drive()
    peer, pending = begin(driver, daemon, COMMIT)
    peer.send(ErrorRep(id=peer.read().id, reason=reason, detail="because", retry_after_ms=30))
    with pytest.raises(RequestError, match="because") as caught:
        driver.wait(pending)
    assert type(caught.value) is ERROR_BY_REASON.get(reason, RequestError)
    assert (caught.value.reason, caught.value.retry_after_ms) == (reason, 30)
    assert driver.client.in_flight == 0


def test_a_prepare_that_is_refused_is_raised_with_when_to_try_again(daemon, drive):
    driver = drive()
    peer, pending = begin(driver, daemon, PREPARE)
    peer.send(
        SnapshotPrepareReceiveReqOutput(
            id=peer.read().id, ok=False, reason=Reason.SNAPSHOT_BUF_FULL, detail="full", retry_after_ms=70
        )
    )
    with pytest.raises(BufferFull) as caught:
        driver.wait(pending)
    assert caught.value.retry_after_ms == 70


def test_an_error_that_is_looked_at_twice_has_one_traceback(daemon):
    driver = SyncDriver(daemon.path)
    peer, pending = begin(driver, daemon, COMMIT)
    peer.send(ErrorRep(id=peer.read().id, reason=Reason.STALE_HANDLE))
    depths = []
    for _ in range(3):
        with pytest.raises(StaleHandle) as caught:
            pending.poll()
        depths.append(len(caught.traceback))
    assert len(set(depths)) == 1
    driver.end()


def test_a_handle_of_another_epoch_is_stale_without_asking(daemon, drive):
    driver = drive()
    old = calls.commit(7, 0, 256, 1, ((1, 2),), epoch="epoch-0")
    peer, first = begin(driver, daemon, old)
    with pytest.raises(StaleHandle, match="epoch-0"):
        driver.wait(first)
    with pytest.raises(StaleHandle):
        driver.call(old)
    assert not peer.has_more()


def test_a_request_that_the_daemon_would_hang_up_on_is_refused_here(daemon, drive):
    driver = drive()
    big = calls.lookup("f" * 32, page_keys=["k" * 32] * 4000)
    peer, pending = begin(driver, daemon, big, frame_bytes_max=65536)
    with pytest.raises(InvalidRequest, match="65536"):
        driver.wait(pending)
    assert not peer.has_more()
    assert driver.client.reconnects == 0


@pytest.mark.parametrize("value", [object(), 1 << 70], ids=["no-number", "too-large"])
def test_a_value_that_cannot_be_encoded_is_an_invalid_request(drive, value):
    driver = drive()
    with pytest.raises(InvalidRequest, match="CommitReq"):
        driver.submit(calls.commit(7, 0, 1, 1, ((value, 1),)))
    assert driver.client.in_flight == 0


# --- nobody there ------------------------------------------------------------------------------


def test_without_a_daemon_the_error_names_the_path_and_what_to_look_at(tmp_path):
    path = str(tmp_path / "none.sock")
    for driver in (SyncDriver(path), AsyncDriver(path)):
        for call in (calls.ping(), PREPARE):
            with pytest.raises(DaemonUnreachable, match=r"none\.sock.*socket_path"):
                driver.call(call)
        driver.end()


def test_a_socket_that_nobody_serves_any_more_is_unreachable(daemon, drive):
    daemon.stop()
    with pytest.raises(DaemonUnreachable, match="nobody listens"):
        drive().call(calls.ping())


def test_a_socket_that_may_not_be_used_is_unreachable_and_says_so(tmp_path, monkeypatch):
    def refuse(self, path):
        raise PermissionError(13, "Permission denied")

    assert "allowed_uids" in str(links.unreachable("/x", PermissionError(13, "Permission denied")))
    monkeypatch.setattr(links, "unreachable", lambda path, error: DaemonUnreachable(f"{path}: {error}"))
    client = Client("/" + "x" * 200)
    with pytest.raises(DaemonUnreachable, match="too long"):
        client.ping()
    client.close()


def test_a_client_reaches_a_daemon_that_came_later(daemon, drive):
    daemon.stop()
    driver = drive()
    with pytest.raises(DaemonUnreachable):
        driver.call(calls.ping())
    daemon.restart()
    with daemon.playing(lambda: serve_one_ping(daemon)):
        assert driver.call(calls.ping()).epoch == "epoch-1"


def serve_one_ping(daemon, epoch="epoch-1"):
    peer = daemon.accept()
    peer.greet(epoch)
    peer.send(PingRep(id=peer.read().id, epoch=epoch))
    return peer


def test_connect_can_wait_for_a_daemon_that_is_starting(daemon, monkeypatch):
    daemon.stop()
    client = Client(daemon.path)
    wait_for, threads = client._link.wait_for, []

    def wait_and_start(is_over, until_s):
        if not threads and not client.in_flight:
            daemon.restart()
            threads.append(threading.Thread(target=lambda: daemon.accept().greet(), daemon=True))
            threads[0].start()
        wait_for(is_over, until_s)

    monkeypatch.setattr(client._link, "wait_for", wait_and_start)
    assert client.connect(wait_s=PATIENCE_S).epoch == "epoch-1"
    threads[0].join()
    client.close()


def test_connect_of_the_async_client_can_wait_too(daemon):
    daemon.stop()

    async def main():
        async with AsyncClient(daemon.path) as client:
            task = asyncio.create_task(client.connect(wait_s=PATIENCE_S))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not task.done()
            daemon.restart()
            peer = await asyncio.to_thread(daemon.accept)
            await asyncio.to_thread(peer.greet)
            assert (await task).epoch == "epoch-1"

    asyncio.run(main())


def test_connect_stops_waiting_in_time(daemon, drive):
    daemon.stop()
    driver = drive()
    with pytest.raises(DaemonUnreachable):
        driver.connect(wait_s=SHORT_S)


def test_a_daemon_that_does_not_serve_this_user_says_why(daemon, drive):
    driver = drive()
    pending = driver.submit(calls.ping())
    peer = daemon.accept()
    peer.send(ErrorRep(id=0, reason=Reason.PERMISSION_DENIED, detail="user 7 is not in allowed_uids"))
    peer.close()
    with pytest.raises(PermissionDenied, match="user 7"):
        driver.wait(pending)
    assert not daemon.has_caller()


def test_a_refusal_that_comes_before_hello_is_written_is_read_all_the_same(daemon, monkeypatch):
    client = Client(daemon.path)
    opened = client._exchange.opened

    def refuse_first():
        peer = daemon.accept()
        peer.send(ErrorRep(id=0, reason=Reason.LIMIT_REACHED, detail="1024 connections are open"))
        peer.close()
        opened()

    monkeypatch.setattr(client._exchange, "opened", refuse_first)
    with pytest.raises(LimitReached, match="1024 connections"):
        client.ping()
    client.close()


# --- time --------------------------------------------------------------------------------------


def test_a_call_without_a_reply_times_out_and_its_late_reply_is_ignored(daemon, drive):
    driver = drive()
    slow = calls.commit(7, 0, 256, 1, ((1, 2),), timeout_s=SHORT_S)
    peer, greeted = begin(driver, daemon, calls.greet())
    driver.wait(greeted)
    pending = driver.submit(slow)
    request = peer.read()
    with pytest.raises(RequestTimeout, match="may have had its effect"):
        driver.wait(pending)
    assert driver.client.in_flight == 0
    peer.send(AckRep(id=request.id))
    second = driver.submit(calls.ping())
    peer.send(PingRep(id=peer.read().id, epoch="epoch-1"))
    assert driver.wait(second).epoch == "epoch-1"
    assert (driver.client.late_replies, driver.client.reconnects) == (1, 0)


def test_the_clients_timeout_holds_unless_the_call_has_its_own(daemon, drive):
    driver = drive(timeout_s=SHORT_S)
    peer, short, long = begin(
        driver, daemon, calls.ping(timeout_s=PATIENCE_S), calls.ping(timeout_s=PATIENCE_S)
    )
    short = driver.submit(calls.ping())
    with pytest.raises(RequestTimeout):
        driver.wait(short)
    request = peer.read()
    request = peer.read()
    peer.send(PingRep(id=request.id, epoch="epoch-1"))
    assert driver.wait(long).epoch == "epoch-1"


def test_who_accepts_and_never_says_hello_is_left_for_another_connection(daemon, drive):
    driver = drive()
    with pytest.raises(RequestTimeout, match="was not sent"):
        driver.call(calls.ping(timeout_s=SHORT_S))
    silent = daemon.accept()
    assert isinstance(silent.read(), HelloReq)
    assert silent.read() is None
    with daemon.playing(lambda: serve_one_ping(daemon)):
        assert driver.call(calls.ping()).epoch == "epoch-1"


def test_one_callers_timeout_during_hello_leaves_the_connection_to_the_others(daemon, drive):
    driver = drive()
    patient = driver.submit(calls.ping())
    with pytest.raises(RequestTimeout):
        driver.call(calls.ping(timeout_s=SHORT_S))
    with daemon.playing(lambda: serve_one_ping(daemon)):
        assert driver.wait(patient).epoch == "epoch-1"
    assert not daemon.has_caller()


def test_what_timed_out_before_it_was_written_is_not_sent_later(daemon, drive):
    driver = drive()
    first, second = (
        driver.submit(calls.ping()),
        driver.submit(calls.prepare_receive("s", 1, "f", timeout_s=0)),
    )
    with pytest.raises(RequestTimeout):
        driver.wait(second)
    peer = daemon.accept()
    peer.greet()
    driver.pump()
    peer.send(PingRep(id=peer.read().id, epoch="epoch-1"))
    assert driver.wait(first)
    assert not peer.has_more()


def test_a_full_accept_queue_is_waited_for_within_the_timeout(tmp_path):
    daemon = FakeDaemon(tmp_path / "busy.sock")
    daemon.listener.listen(0)
    others = []
    for _ in range(100):
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        others.append(sock)
        try:
            sock.connect(daemon.path)
        except BlockingIOError:
            break
    for driver in (SyncDriver(daemon.path), AsyncDriver(daemon.path)):
        with pytest.raises(RequestTimeout):
            driver.call(calls.ping(timeout_s=SHORT_S))
        pending = driver.submit(calls.ping())
        for _ in others[:-1]:
            daemon.accept()
        with daemon.playing(lambda: serve_one_ping(daemon)):
            assert driver.wait(pending).epoch == "epoch-1"
        others = [socket.socket(socket.AF_UNIX) for _ in others]
        for sock in others[:-1]:
            sock.connect(daemon.path)
        driver.end()
    daemon.stop()


# --- several at a time -------------------------------------------------------------------------


def test_replies_may_come_in_any_order(daemon, drive):
    driver = drive()
    peer, *pendings = begin(driver, daemon, *[calls.ping() for _ in range(5)])
    requests = [peer.read() for _ in pendings]
    for request in reversed(requests):
        peer.send(PingRep(id=request.id, epoch=f"answer-{request.id}"))
    for request, pending in zip(requests, pendings, strict=True):
        assert driver.wait(pending).epoch == f"answer-{request.id}"


def test_a_vote_can_be_polled_while_other_calls_run(daemon):
    with Client(daemon.path) as client:
        vote = client.submit(VOTE)
        peer = daemon.accept()
        peer.greet()
        assert vote.poll() is None
        request = peer.read()
        assert isinstance(request, VoteReq)

        def script():
            for _ in range(3):
                peer.send(PingRep(id=peer.read().id, epoch="epoch-1"))

        with daemon.playing(script):
            for _ in range(3):
                client.ping()
                assert vote.poll() is None
        decision = VoteRep(id=request.id, commit=True, reason=Reason.OK, state=State.INGESTED)
        peer.send(decision)
        assert vote.poll() == decision
        assert vote.poll() == vote.wait() == decision
        assert client.in_flight == 0


def test_a_wait_that_is_shorter_than_the_call_leaves_it_under_way(daemon):
    with Client(daemon.path) as client:
        vote = client.submit(VOTE)
        peer = daemon.accept()
        peer.greet()
        with pytest.raises(RequestTimeout, match="still under way"):
            vote.wait(SHORT_S)
        assert client.in_flight == 1
        peer.send(VoteRep(id=peer.read().id, commit=False, reason=Reason.ROUND_ABORTED, state=State.READY))
        assert vote.wait(PATIENCE_S).commit is False


def test_poll_says_when_the_calls_time_is_over(daemon):
    with Client(daemon.path) as client:
        pending = client.submit(calls.ping(timeout_s=0))
        with pytest.raises(RequestTimeout):
            pending.poll()
        assert client.in_flight == 0


def test_a_pending_can_be_forgotten(daemon):
    with Client(daemon.path) as client:
        pending = client.submit(VOTE)
        pending.forget()
        assert client.in_flight == 0
        with pytest.raises(RequestTimeout, match="given up"):
            pending.poll()


def test_calls_under_way_are_bounded(daemon, drive):
    driver = drive(in_flight_max=2)
    overdue = driver.submit(calls.ping(timeout_s=0 if isinstance(driver, SyncDriver) else PATIENCE_S))
    driver.submit(calls.ping())
    if isinstance(driver, SyncDriver):
        driver.submit(calls.ping())  # Takes the place of the one whose time is over.
        with pytest.raises(RequestTimeout):
            driver.wait(overdue)
    with pytest.raises(LimitReached):
        driver.submit(calls.ping())
    assert driver.client.in_flight == 2


def test_the_daemons_bound_on_calls_under_way_holds_too(daemon, drive):
    driver = drive()
    begin(driver, daemon, calls.ping(), requests_in_flight_max=1)
    with pytest.raises(LimitReached):
        driver.submit(calls.ping())


# --- pushes ------------------------------------------------------------------------------------


def test_pushes_between_replies_are_kept_until_they_are_taken(daemon, drive):
    driver = drive()
    peer, first, second = begin(driver, daemon, calls.ping(), calls.ping())
    ids = [peer.read().id, peer.read().id]
    peer.send(ended(1), PingRep(id=ids[0], epoch="a"), ended(2), PingRep(id=ids[1], epoch="b"), ended(3))
    assert [driver.wait(first).epoch, driver.wait(second).epoch] == ["a", "b"]
    assert [push.slab_handle for push in driver.client.take_ended()] == [1, 2, 3]
    assert driver.client.take_ended() == []
    peer.send(ended(4))
    assert [push.slab_handle for push in driver.client.take_ended()] == [4]


def test_of_pushes_that_nobody_takes_the_newest_are_kept_and_the_others_counted(daemon, drive):
    driver = drive(ended_max=3)
    peer, pending = begin(driver, daemon, calls.ping())
    peer.send(*[ended(handle) for handle in range(10)], PingRep(id=peer.read().id, epoch="a"))
    driver.wait(pending)
    assert [push.slab_handle for push in driver.client.take_ended()] == [7, 8, 9]
    assert driver.client.ended_dropped == 7


def test_pushes_of_an_unknown_kind_or_for_watchers_are_ignored(daemon, drive):
    driver = drive()
    peer, pending = begin(driver, daemon, calls.ping())
    payload = b"\x82\xa4type\xa3New\xa1x\x01"
    peer.sock.sendall(len(payload).to_bytes(4, "little") + payload)
    peer.send(transition(1), PingRep(id=peer.read().id, epoch="a"))
    assert driver.wait(pending).epoch == "a"
    assert driver.client.take_ended() == []


# --- the connection ends -----------------------------------------------------------------------


def test_a_repeatable_request_is_sent_once_more_when_the_connection_ends(daemon, drive):
    driver = drive()
    peer, pending = begin(driver, daemon, COMMIT)
    sent = peer.read()
    peer.close()
    driver.pump()
    again = daemon.accept()
    again.greet()
    driver.pump()
    assert again.read() == sent
    again.send(AckRep(id=sent.id, state=State.READY))
    assert driver.wait(pending).state is State.READY
    assert driver.client.reconnects == 1


def test_a_prepare_that_was_sent_is_not_sent_again(daemon, drive):
    driver = drive()
    peer, pending = begin(driver, daemon, PREPARE)
    assert isinstance(peer.read(), SnapshotPrepareReceiveReqInput)
    peer.close()
    with pytest.raises(ConnectionLost, match="may have had its effect"):
        driver.wait(pending)
    assert not daemon.has_caller()


def test_a_request_is_tried_on_two_connections_and_no_more(daemon, drive):
    driver = drive()
    pending = driver.submit(COMMIT)
    for _ in range(CONNECTIONS_AN_ERRAND_MAX):
        peer = daemon.accept()
        peer.greet()
        driver.pump()
        assert isinstance(peer.read(), CommitReq)
        peer.close()
        if CONNECTIONS_AN_ERRAND_MAX != len(daemon.peers):
            driver.pump()
    with pytest.raises(ConnectionLost):
        driver.wait(pending)
    assert not daemon.has_caller()


def test_a_daemon_that_hangs_up_before_hello_is_given_up_after_two_connections(daemon, drive):
    driver = drive()
    pending = driver.submit(PREPARE)
    daemon.accept().close()
    driver.pump()
    daemon.accept().close()
    with pytest.raises(ConnectionLost, match="was not sent"):
        driver.wait(pending)
    assert not daemon.has_caller()


def test_a_sent_request_is_lost_and_an_unsent_one_unreachable_when_the_daemon_is_gone(daemon, drive):
    driver = drive()
    peer, sent = begin(driver, daemon, COMMIT)
    assert isinstance(peer.read(), CommitReq)
    daemon.stop()
    with pytest.raises(ConnectionLost, match="nobody listens"):
        driver.wait(sent)
    with pytest.raises(DaemonUnreachable):
        driver.call(PREPARE)


def test_a_prepare_after_the_daemon_was_restarted_while_idle_is_sent_to_the_new_one(daemon, drive):
    driver = drive()
    peer, pending = begin(driver, daemon, calls.ping())
    peer.send(PingRep(id=peer.read().id, epoch="epoch-1"))
    driver.wait(pending)
    daemon.restart()
    peer, pending = begin(driver, daemon, PREPARE, epoch="epoch-2")
    request = peer.read()
    peer.send(SnapshotPrepareReceiveReqOutput(id=request.id, ok=True, slab_handle=4))
    grant = driver.wait(pending)
    assert (grant.slab_handle, grant.epoch) == (4, "epoch-2")


def test_a_prepare_that_was_not_written_whole_is_sent_again(daemon, drive):
    driver = drive()
    big = calls.prepare_receive("s", 1, "f", page_keys=["k" * 32] * 50_000)
    peer, pending = begin(driver, daemon, big)
    assert peer.sock.recv(100)
    peer.close()
    driver.pump()
    again = daemon.accept()
    again.greet()

    def script():
        request = again.read()
        assert len(request.page_keys) == 50_000
        again.send(SnapshotPrepareReceiveReqOutput(id=request.id, ok=True, slab_handle=4))

    with daemon.playing(script):
        assert driver.wait(pending).slab_handle == 4


def test_a_frame_larger_than_the_socket_buffer_is_written_as_the_daemon_reads(daemon, drive):
    driver = drive()
    big = calls.lookup("f" * 32, page_keys=["k" * 32] * 50_000)
    peer, first, second = begin(driver, daemon, big, big)

    def script():
        for _ in range(2):
            request = peer.read()
            assert isinstance(request, LookupReq)
            assert len(request.page_keys) == 50_000
            peer.send(ErrorRep(id=request.id, reason=Reason.LIMIT_REACHED))

    with daemon.playing(script):
        for pending in (first, second):
            with pytest.raises(LimitReached):
                driver.wait(pending)


def test_what_the_daemon_said_before_it_hung_up_is_in_the_error(daemon, drive):
    driver = drive()
    peer, pending = begin(driver, daemon, PREPARE)
    peer.read()
    peer.send(ErrorRep(id=0, reason=Reason.INVALID_REQUEST, detail="a frame was not finished"))
    peer.close()
    with pytest.raises(ConnectionLost, match="a frame was not finished"):
        driver.wait(pending)


def test_a_reply_that_came_before_the_end_counts(daemon, drive):
    driver = drive()
    peer, pending = begin(driver, daemon, PREPARE)
    peer.send(SnapshotPrepareReceiveReqOutput(id=peer.read().id, ok=True, slab_handle=4))
    peer.close()
    assert driver.wait(pending).slab_handle == 4


# --- another epoch -----------------------------------------------------------------------------


def declare(driver, daemon, rank, fingerprint, peer=None):
    call = calls.declare_layout(rank, LAYOUT)
    if peer is None:
        peer, pending = begin(driver, daemon, call)
    else:
        pending = driver.submit(call)
    request = peer.read()
    assert isinstance(request, DeclareLayoutReq)
    peer.send(DeclareLayoutRep(id=request.id, layout_fingerprint=fingerprint))
    assert driver.wait(pending) == fingerprint
    return peer


def test_layouts_are_declared_again_in_another_epoch_before_anything_else(daemon, drive):
    hellos = []
    driver = drive(on_new_epoch=hellos.append)
    peer = declare(driver, daemon, 0, "aa")
    declare(driver, daemon, 1, "bb", peer)
    daemon.restart()
    peer, pending = begin(driver, daemon, PREPARE, epoch="epoch-2")
    again = [peer.read(), peer.read()]
    assert [(request.rank, request.layout) for request in again] == [(0, LAYOUT), (1, LAYOUT)]
    driver.pump()
    peer.send(DeclareLayoutRep(id=again[1].id, layout_fingerprint="bb"))
    driver.pump()
    assert not peer.has_more()
    assert hellos == []
    # A layout that is refused does not hold up the rest.
    peer.send(ErrorRep(id=again[0].id, reason=Reason.LIMIT_REACHED))
    driver.pump()
    assert [hello.epoch for hello in hellos] == ["epoch-2"]
    peer.send(SnapshotPrepareReceiveReqOutput(id=peer.read().id, ok=True, slab_handle=4))
    assert driver.wait(pending).epoch == "epoch-2"
    assert (driver.client.epoch, driver.client.reconnects) == ("epoch-2", 1)


def test_a_connection_that_ends_while_layouts_are_declared_declares_them_on_the_next(daemon, drive):
    driver = drive()
    declare(driver, daemon, 0, "aa")
    daemon.restart()
    peer, pending = begin(driver, daemon, calls.ping(), epoch="epoch-2")
    peer.read()
    peer.close()
    driver.pump()
    peer = daemon.accept()
    peer.greet("epoch-2")
    driver.pump()
    request = peer.read()
    assert isinstance(request, DeclareLayoutReq)
    peer.send(DeclareLayoutRep(id=request.id, layout_fingerprint="aa"))
    driver.pump()
    peer.send(PingRep(id=peer.read().id, epoch="epoch-2"))
    assert driver.wait(pending)


def test_in_the_same_epoch_nothing_is_declared_again_and_nobody_is_told(daemon, drive):
    hellos = []
    driver = drive(on_new_epoch=hellos.append)
    peer = declare(driver, daemon, 0, "aa")
    peer.close()
    peer, pending = begin(driver, daemon, calls.ping())
    request = peer.read()
    assert isinstance(request, PingReq)
    peer.send(PingRep(id=request.id, epoch="epoch-1"))
    driver.wait(pending)
    assert hellos == []
    assert driver.client.reconnects == 1


def test_a_layout_that_was_refused_is_not_declared_again(daemon, drive):
    driver = drive()
    peer, pending = begin(driver, daemon, calls.declare_layout(9, LAYOUT))
    peer.send(ErrorRep(id=peer.read().id, reason=Reason.WRONG_RANK))
    with pytest.raises(WrongRank):
        driver.wait(pending)
    daemon.restart()
    peer, pending = begin(driver, daemon, calls.ping(), epoch="epoch-2")
    assert isinstance(peer.read(), PingReq)


def test_layouts_that_are_remembered_are_bounded(daemon, drive, monkeypatch):
    monkeypatch.setattr(exchange, "LAYOUTS_REMEMBERED_MAX", 2)
    driver = drive()
    peer = declare(driver, daemon, 0, "aa")
    declare(driver, daemon, 1, "bb", peer)
    declare(driver, daemon, 2, "cc", peer)
    daemon.restart()
    peer, _ = begin(driver, daemon, calls.ping(), epoch="epoch-2")
    assert [peer.read().rank, peer.read().rank] == [1, 2]
    assert not peer.has_more()


def test_a_request_of_the_old_epoch_that_was_under_way_is_stale_in_the_new_one(daemon, drive):
    driver = drive()
    peer, pending = begin(driver, daemon, calls.commit(7, 0, 1, 1, (), epoch="epoch-1"))
    assert isinstance(peer.read(), CommitReq)
    daemon.restart()
    driver.pump()
    peer = daemon.accept()
    peer.greet("epoch-2")
    with pytest.raises(StaleHandle):
        driver.wait(pending)
    assert not peer.has_more()


def test_a_hook_that_fails_does_not_cost_the_reply(daemon, drive, caplog):
    def fail(hello):
        raise ValueError("my bug")

    driver = drive(on_new_epoch=fail)
    peer, pending = begin(driver, daemon, calls.ping())
    peer.send(PingRep(id=peer.read().id, epoch="epoch-1"))
    driver.wait(pending)
    daemon.restart()
    with daemon.playing(lambda: serve_one_ping(daemon, "epoch-2")):
        assert driver.call(calls.ping()).epoch == "epoch-2"
    assert "my bug" in caplog.text


def test_the_hook_may_use_the_client(daemon):
    seen = []
    client = Client(daemon.path, on_new_epoch=lambda hello: seen.append(client.ping().epoch))
    with daemon.playing(lambda: serve_one_ping(daemon)):
        client.ping()
    daemon.restart()

    def script():
        peer = daemon.accept()
        peer.greet("epoch-2")
        for _ in range(2):
            peer.send(PingRep(id=peer.read().id, epoch="epoch-2"))

    with daemon.playing(script):
        client.ping()
    assert seen == ["epoch-2"]
    client.close()


# --- what is no protocol -----------------------------------------------------------------------

GARBAGE = {
    "huge": b"\xff\xff\xff\x7f",
    "empty-frame": b"\0\0\0\0",
    "no-msgpack": b"\x03\0\0\0\xc1\xc1\xc1",
    "no-message": b"\x01\0\0\0\x07",
    "a-request": encode_frame(PingReq(id=1)),
    "other-reply": None,
    "not-asked": encode_frame(AckRep(id=10_000)),
    "negative-id": encode_frame(AckRep(id=-1)),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_ends_the_connection_with_a_protocol_error_and_the_next_call_works(daemon, drive, kind):
    driver = drive()
    peer, pending, other = begin(driver, daemon, calls.ping(), COMMIT)
    request = peer.read()
    peer.read()
    peer.sock.sendall(GARBAGE[kind] or encode_frame(AckRep(id=request.id)))
    for submitted in (pending, other):
        with pytest.raises(ProtocolError):
            driver.wait(submitted)
    assert peer.read() is None
    with daemon.playing(lambda: serve_one_ping(daemon)):
        assert driver.call(calls.ping()).epoch == "epoch-1"


HELLO_GARBAGE = {
    "other-protocol": lambda request: encode_frame(hello_rep(request.id, protocol=2)),
    "other-id": lambda request: encode_frame(hello_rep(request.id + 1)),
    "other-reply": lambda request: encode_frame(AckRep(id=request.id)),
    "more-than-hello": lambda request: encode_frame(hello_rep(request.id)) + b"\x09",
    "long": lambda request: (1 << 21).to_bytes(4, "little"),
    "http": lambda request: b"HTTP/1.1 400 Bad Request\r\n\r\n",
}


@pytest.mark.parametrize("kind", HELLO_GARBAGE)
def test_who_does_not_answer_hello_with_hello_is_not_spoken_to(daemon, drive, kind):
    driver = drive()
    pending = driver.submit(PREPARE)
    peer = daemon.accept()
    peer.sock.sendall(HELLO_GARBAGE[kind](peer.read()))
    with pytest.raises(ProtocolError):
        driver.wait(pending)
    assert peer.read() is None


def test_a_reply_that_does_not_answer_a_layout_declared_again_is_a_protocol_error(daemon, drive):
    driver = drive()
    declare(driver, daemon, 0, "aa")
    daemon.restart()
    peer, pending = begin(driver, daemon, calls.ping(), epoch="epoch-2")
    peer.send(AckRep(id=peer.read().id))
    with pytest.raises(ProtocolError):
        driver.wait(pending)


def test_a_reply_that_is_sent_before_its_request_is_a_protocol_error(daemon, drive):
    driver = drive()
    big = calls.lookup("f" * 32, page_keys=["k" * 32] * 50_000)
    peer, pending, behind = begin(driver, daemon, big, calls.ping())
    peer.send(PingRep(id=behind._errand.id if isinstance(driver, SyncDriver) else 2, epoch="epoch-1"))
    with pytest.raises(ProtocolError, match="not sent"):
        driver.wait(behind)


def test_the_end_inside_a_frame_is_a_lost_connection_that_says_so(daemon, drive):
    driver = drive()
    peer, pending = begin(driver, daemon, PREPARE)
    request = peer.read()
    frame = encode_frame(SnapshotPrepareReceiveReqOutput(id=request.id, ok=True, slab_handle=4))
    peer.sock.sendall(frame[:-1])
    driver.pump()
    peer.close()
    with pytest.raises(ConnectionLost, match="middle of a frame"):
        driver.wait(pending)


def test_half_a_frame_of_a_former_connection_does_not_spoil_the_next(daemon, drive):
    driver = drive()
    peer, pending = begin(driver, daemon, COMMIT)
    request = peer.read()
    peer.sock.sendall(encode_frame(AckRep(id=request.id))[:-1])
    driver.pump()
    peer.close()
    driver.pump()
    peer = daemon.accept()
    peer.greet()
    driver.pump()
    peer.send(AckRep(id=peer.read().id, state=State.READY))
    assert driver.wait(pending).state is State.READY


def test_a_frame_may_come_byte_by_byte(daemon, drive):
    driver = drive()
    pending = driver.submit(calls.ping())
    peer = daemon.accept()
    for byte in encode_frame(hello_rep(peer.read().id)):
        peer.sock.sendall(bytes([byte]))
        driver.pump()
    for byte in encode_frame(PingRep(id=peer.read().id, epoch="epoch-1")):
        assert driver.poll(pending) is None
        peer.sock.sendall(bytes([byte]))
    assert driver.poll(pending).epoch == "epoch-1"


# --- threads -----------------------------------------------------------------------------------


def test_threads_share_one_client_and_each_gets_its_own_answers(daemon):
    num_threads, num_calls = 8, 100
    errors = []

    def script():
        peer = daemon.accept()
        peer.greet()
        held = []
        for count in itertools.count(1):
            request = peer.read()
            if request is None:
                return
            held.append(request)
            # Turn the order round, but never wait for more than what is surely under way.
            if len(held) == 2 or not peer.has_more():
                peer.send(
                    *[
                        ErrorRep(id=r.id, reason=Reason.STALE_HANDLE, detail=f"<{r.slab_handle}>")
                        for r in held[::-1]
                    ]
                )
                held.clear()
            if count == num_threads * num_calls:
                return

    def work(number):
        try:
            for index in range(num_calls):
                handle = number * num_calls + index
                with pytest.raises(StaleHandle, match=f"<{handle}>"):
                    client.get(handle)
        except BaseException as error:
            errors.append(error)

    with Client(daemon.path, timeout_s=PATIENCE_S) as client, daemon.playing(script):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert client.in_flight == 0


def in_thread(work):
    """Start *work*; return a function that waits for its result."""
    outcome = []

    def run():
        try:
            outcome.append((work(), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join():
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        result, error = outcome[0]
        if error is not None:
            raise error
        return result

    return join


def wait_until(is_true):
    """Yield to the other threads until *is_true*."""
    for _ in range(10_000_000):
        if is_true():
            return
        os.sched_yield()
    raise AssertionError("it did not come to that")


def test_a_thread_that_waits_for_a_vote_does_not_hold_up_the_others(daemon):
    with Client(daemon.path, timeout_s=PATIENCE_S) as client:
        peer, _ = connected(client, daemon)
        join = in_thread(lambda: client.call(VOTE))
        vote = peer.read()
        with daemon.playing(lambda: [peer.send(PingRep(id=peer.read().id, epoch="e")) for _ in range(20)]):
            for _ in range(20):
                client.ping()
        peer.send(VoteRep(id=vote.id, commit=True, reason=Reason.OK, state=State.INGESTED))
        assert join().commit


def connected(client, daemon):
    pending = client.submit(calls.greet())
    peer = daemon.accept()
    peer.greet()
    return peer, pending.wait()


def test_a_reply_that_another_thread_reads_wakes_the_one_that_waits_for_it(daemon):
    with Client(daemon.path, timeout_s=PATIENCE_S) as client:
        peer, _ = connected(client, daemon)
        for _ in range(50):
            join = in_thread(lambda: client.call(calls.ping(timeout_s=PATIENCE_S)))
            request = peer.read()
            wait_until(lambda: client._link._has_leader)
            with client._link._changed:
                # Read under the leader's nose, before it can.
                peer.send(PingRep(id=request.id, epoch="e"))
                client._link._pump()
            assert join().epoch == "e"


def test_what_does_not_fit_the_socket_is_written_by_the_thread_that_sleeps(daemon):
    big = calls.lookup("f" * 32, page_keys=["k" * 32] * 50_000)
    with Client(daemon.path, timeout_s=PATIENCE_S) as client:
        peer, _ = connected(client, daemon)
        join = in_thread(lambda: client.call(VOTE))
        vote = peer.read()
        wait_until(lambda: client._link._has_leader)
        pending = client.submit(big)

        def script():
            request = peer.read()
            peer.send(ErrorRep(id=request.id, reason=Reason.LIMIT_REACHED))
            peer.send(VoteRep(id=vote.id, commit=True, reason=Reason.OK, state=State.INGESTED))

        with daemon.playing(script):
            # Nobody but the sleeping thread works until the vote is there.
            assert join().commit
        with pytest.raises(LimitReached):
            pending.poll()


def test_a_follower_takes_over_when_the_leader_is_done(daemon):
    with Client(daemon.path, timeout_s=PATIENCE_S) as client:
        peer, _ = connected(client, daemon)
        joins, requests = [], []
        for _ in range(3):
            joins.append(in_thread(client.ping))
            requests.append(peer.read())
        for request in requests:
            peer.send(PingRep(id=request.id, epoch=f"e-{request.id}"))
        assert {join().epoch for join in joins} == {f"e-{request.id}" for request in requests}


def test_close_ends_what_is_under_way_in_other_threads(daemon):
    client = Client(daemon.path, timeout_s=PATIENCE_S)
    peer, _ = connected(client, daemon)
    join = in_thread(lambda: client.call(VOTE))
    peer.read()
    wait_until(lambda: client._link._has_leader)
    client.close()
    with pytest.raises(ConnectionLost, match="closed"):
        join()
    assert peer.read() is None


def test_a_closed_client_stays_closed(daemon, drive):
    driver = drive()
    peer, pending = begin(driver, daemon, calls.ping())
    driver.close()
    driver.close()
    with pytest.raises(ConnectionLost, match="closed"):
        driver.wait(pending)
    with pytest.raises(ConnectionLost, match="closed"):
        driver.call(calls.ping())
    with pytest.raises(ConnectionLost, match="closed"):
        driver.connect(wait_s=PATIENCE_S)
    assert not daemon.has_caller()


def test_an_interrupted_call_is_forgotten(daemon, monkeypatch):
    with Client(daemon.path) as client:
        connected(client, daemon)

        def interrupt(errand, until_s):
            raise KeyboardInterrupt

        monkeypatch.setattr(client._link, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.ping()
        assert client.in_flight == 0


def test_poll_does_not_wait_for_a_flood_to_end(daemon, monkeypatch):
    monkeypatch.setattr(links, "READS_MAX", 2)
    monkeypatch.setattr(links, "READ_BYTES", 64)
    with Client(daemon.path) as client:
        peer, _ = connected(client, daemon)
        for handle in range(10):
            peer.send(ended(handle))
        assert 0 < len(client.take_ended()) < 10


# --- asyncio -----------------------------------------------------------------------------------


def test_a_cancelled_await_forgets_its_call_and_the_late_reply_is_ignored(daemon):
    async def main():
        async with AsyncClient(daemon.path) as client:
            connecting = asyncio.create_task(client.connect())
            peer = await asyncio.to_thread(daemon.accept)
            await asyncio.to_thread(peer.greet)
            await connecting
            task = asyncio.create_task(client.vote(7, 0, 1, True))
            vote = await asyncio.to_thread(peer.read)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.sleep(0)
            assert client.in_flight == 0
            peer.send(VoteRep(id=vote.id, commit=True, reason=Reason.OK, state=State.INGESTED))
            ping = asyncio.create_task(client.ping())
            request = await asyncio.to_thread(peer.read)
            peer.send(PingRep(id=request.id, epoch="epoch-1"))
            assert (await ping).epoch == "epoch-1"
            assert (client.late_replies, client.reconnects) == (1, 0)

    asyncio.run(main())


def test_a_call_that_is_cancelled_before_hello_is_never_sent(daemon):
    async def main():
        async with AsyncClient(daemon.path) as client:
            doomed = client.submit(PREPARE)
            ping = client.submit(calls.ping())
            doomed.cancel()
            await asyncio.to_thread(serve_one_ping, daemon)
            assert (await ping).epoch == "epoch-1"

    asyncio.run(main())


def test_tasks_share_one_connection(daemon):
    async def main():
        async with AsyncClient(daemon.path) as client:
            pings = asyncio.gather(*[client.ping() for _ in range(200)])
            peer = await asyncio.to_thread(daemon.accept)
            await asyncio.to_thread(peer.greet)
            requests = await asyncio.to_thread(lambda: [peer.read() for _ in range(200)])
            await asyncio.to_thread(
                peer.send, *[PingRep(id=request.id, epoch="e") for request in reversed(requests)]
            )
            assert len(await pings) == 200
            assert client.reconnects == 0

    asyncio.run(main())


def test_an_async_client_belongs_to_one_loop(daemon):
    client = AsyncClient(daemon.path)

    async def submit():
        return client.submit(calls.ping(timeout_s=PATIENCE_S))

    loop = asyncio.new_event_loop()
    loop.run_until_complete(submit())
    with pytest.raises(RuntimeError, match="event loop"):
        asyncio.run(submit())
    loop.run_until_complete(client.close())
    loop.close()


def test_an_async_client_works_on_uvloop_through_a_restart(daemon):
    import uvloop

    async def main():
        async with AsyncClient(daemon.path) as client:
            for epoch in ("epoch-1", "epoch-2", "epoch-3"):
                ping = asyncio.create_task(client.ping())
                await asyncio.to_thread(serve_one_ping, daemon, epoch)
                assert (await ping).epoch == epoch
                daemon.restart()
            assert client.reconnects == 2

    uvloop.run(main())


def test_an_idle_async_client_notices_the_end_of_the_connection_by_itself(daemon):
    async def main():
        async with AsyncClient(daemon.path) as client:
            ping = asyncio.create_task(client.ping())
            peer = await asyncio.to_thread(serve_one_ping, daemon)
            await ping
            peer.close()
            while client._exchange.is_open:
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


# --- watch -------------------------------------------------------------------------------------


def watching(driver, daemon, **options):
    peers = []

    def script():
        peer = daemon.accept()
        peer.greet()
        request = peer.ack()
        assert isinstance(request, WatchReq)
        peers.append((peer, request))

    with daemon.playing(script):
        watch = driver.watch(**options)
    return watch, *peers[0]


def test_a_watch_has_a_connection_of_its_own_and_gives_pushes_in_order(daemon, drive):
    driver = drive()
    watch, peer, request = watching(driver, daemon, session_id="s")
    assert request.session_id == "s"
    assert driver.client.epoch == ""
    sent = [transition(1), WatchLost(count=3), transition(2)]
    peer.send(*sent)
    assert [driver.next_push(watch) for _ in sent] == sent
    driver.close_watch(watch)
    assert peer.read() is None


def test_a_watch_in_which_nothing_happens_times_out_and_goes_on(daemon, drive):
    driver = drive()
    watch, peer, _ = watching(driver, daemon)
    with pytest.raises(RequestTimeout):
        driver.next_push(watch, SHORT_S)
    peer.send(transition(1))
    assert driver.next_push(watch) == transition(1)
    driver.close_watch(watch)


def test_a_watch_whose_daemon_hangs_up_says_so_after_the_last_push(daemon, drive):
    driver = drive()
    watch, peer, _ = watching(driver, daemon)
    peer.send(transition(1))
    peer.close()
    assert driver.next_push(watch) == transition(1)
    with pytest.raises(ConnectionLost):
        driver.next_push(watch)
    assert not daemon.has_caller()
    driver.close_watch(watch)


def test_a_watch_that_is_refused_is_raised_and_hangs_up(daemon, drive):
    driver = drive()
    peers = []

    def script():
        peers.append(daemon.accept())
        peers[0].greet()
        peers[0].send(ErrorRep(id=peers[0].read().id, reason=Reason.LIMIT_REACHED))

    with daemon.playing(script), pytest.raises(LimitReached):
        driver.watch()
    assert peers[0].read() is None


def test_a_watch_reads_no_more_than_it_has_room_for_and_loses_nothing(daemon, drive):
    driver = drive()
    watch, peer, _ = watching(driver, daemon)
    num_pushes = 20 * PUSHES_MAX
    most = 0
    with daemon.playing(lambda: peer.send(*[transition(at_ns) for at_ns in range(num_pushes)])):
        for at_ns in range(num_pushes):
            assert driver.next_push(watch).at_ns == at_ns
            most = max(most, len(watch._pushes))
    assert most < 3 * PUSHES_MAX
    driver.close_watch(watch)


def test_a_loop_over_a_watch_ends_when_another_thread_closes_it(daemon):
    driver = SyncDriver(daemon.path)
    watch, peer, _ = watching(driver, daemon)
    join = in_thread(lambda: list(watch))
    peer.send(transition(1))
    wait_until(lambda: watch._link._has_leader)
    watch.close()
    assert join() in ([transition(1)], [])
    with pytest.raises(ConnectionLost):
        watch.next(0)
    driver.end()


def test_a_loop_over_a_watch_raises_when_the_daemon_hangs_up(daemon):
    driver = SyncDriver(daemon.path)
    watch, peer, _ = watching(driver, daemon)
    peer.send(transition(1))
    peer.close()
    with pytest.raises(ConnectionLost):
        list(watch)
    watch.close()
    driver.end()


def test_an_async_loop_over_a_watch_ends_when_another_task_closes_it(daemon):
    driver = AsyncDriver(daemon.path)
    watch, peer, _ = watching(driver, daemon)

    async def main():
        task = asyncio.create_task(collect())
        await asyncio.sleep(0)
        await watch.close()
        return await task

    async def collect():
        return [push async for push in watch]

    assert driver.run(main()) == []
    driver.end()


def test_an_async_loop_over_a_watch_raises_when_the_daemon_hangs_up(daemon):
    driver = AsyncDriver(daemon.path)
    watch, peer, _ = watching(driver, daemon)
    peer.close()

    async def collect():
        return [push async for push in watch]

    with pytest.raises(ConnectionLost):
        driver.run(collect())
    driver.end()


# --- descriptors and imports -------------------------------------------------------------------


def num_fds():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "dropped"])
def test_no_descriptor_is_left_after_200_connections(daemon, is_closed):
    before = num_fds()
    for _ in range(200):
        client = Client(daemon.path)
        peer, _ = connected(client, daemon)
        if is_closed:
            client.close()
        del client
        peer.close()
    daemon.peers.clear()
    assert num_fds() <= before


def test_no_descriptor_is_left_after_200_reconnects_and_failures(daemon, drive):
    driver = drive()
    driver_fds = num_fds()
    for _ in range(200):
        peer, pending = begin(driver, daemon, calls.ping())
        peer.close()
        driver.pump()
        daemon.accept().close()
        with pytest.raises(ConnectionLost):
            driver.wait(pending)
    daemon.stop()
    for _ in range(20):
        with pytest.raises(DaemonUnreachable):
            driver.call(calls.ping())
    assert num_fds() <= driver_fds


def test_the_client_imports_nothing_heavy():
    script = (
        "import sys, snapd.client; "
        "print(*{'torch', 'numpy', 'asyncio', 'ctypes', 'logging', 'structlog', 'uvloop'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_peer_reads_what_a_client_writes():
    here, there = socket.socketpair()
    here.sendall(encode_frame(PingReq(id=1)))
    here.close()
    peer = Peer(there)
    assert (peer.read(), peer.read()) == (PingReq(id=1), None)
    peer.close()
