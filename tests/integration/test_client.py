"""Both clients against a daemon that does what the test says: calls, refusals, time, pushes."""

import asyncio
import errno
import inspect
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic

import pytest
from client_cases import (
    COMMIT,
    PATIENCE_S,
    PREPARE,
    SHORT_S,
    VOTE,
    AsyncDriver,
    FakeDaemon,
    Peer,
    SyncDriver,
    begin,
    connected,
    daemon,
    drive,
    ended,
    num_fds,
    serve_one_ping,
    transition,
    wait_until,
)

from snapd import calls, links
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
    Reason,
    RequestError,
    RequestTimeout,
    StaleHandle,
    WrongRank,
)
from snapd.wire import (
    AckRep,
    CommitReq,
    DrainReq,
    ErrorRep,
    HelloReq,
    PingRep,
    PingReq,
    RankGrant,
    SnapshotPrepareReceiveReqOutput,
    VoteRep,
    VoteReq,
    encode_frame,
)

OPERATIONS = [
    "abort", "begin_ingest", "commit", "declare_layout", "drain", "drained", "get", "list_sessions", "lookup",
    "ping", "prepare_receive", "stats", "transfer_failed", "transfer_started", "vote",
]  # fmt: skip


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


def test_an_operation_sends_its_request_and_returns_the_result(daemon):
    seen = []

    def script():
        peer = daemon.accept()
        peer.greet()
        seen.append(peer.ack())
        seen.append(peer.ack())

    async def in_async():
        async with AsyncClient(daemon.path) as client:
            return await client.commit(7, 1, 256, 2, ((1, 2),), epoch="epoch-1"), await client.drain(False)

    with daemon.playing(script), Client(daemon.path) as client:
        replies = client.commit(7, 1, 256, 2, ((1, 2),), epoch="epoch-1"), client.drain(False)
    with daemon.playing(script):
        replies += asyncio.run(in_async())
    assert replies == tuple(AckRep(id=request.id) for request in seen)
    for commit, drain in (seen[:2], seen[2:]):
        assert commit == CommitReq(
            id=commit.id,
            slab_handle=7,
            epoch="epoch-1",
            rank=1,
            num_bytes=256,
            num_tokens=2,
            checksums=((1, 2),),
        )
        assert drain == DrainReq(id=drain.id, draining=False)


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


@pytest.mark.skipif(os.geteuid() == 0, reason="root may use any socket")
def test_a_socket_that_may_not_be_used_is_unreachable_and_says_so(daemon, drive):
    Path(daemon.path).chmod(0)
    with pytest.raises(DaemonUnreachable, match="allowed_uids"):
        drive().call(calls.ping())


def test_missing_permission_is_explained():
    error = links.unreachable("/run/x.sock", PermissionError(errno.EACCES, "Permission denied"))
    assert "/run/x.sock" in str(error)
    assert "allowed_uids" in str(error)


def test_a_path_that_is_too_long_is_unreachable_and_says_so():
    for driver in (SyncDriver("/" + "x" * 200), AsyncDriver("/" + "x" * 200)):
        with pytest.raises(DaemonUnreachable, match="too long"):
            driver.call(calls.ping())
        driver.end()


def test_a_client_reaches_a_daemon_that_came_later(daemon, drive):
    daemon.stop()
    driver = drive()
    with pytest.raises(DaemonUnreachable):
        driver.call(calls.ping())
    daemon.restart()
    with daemon.playing(lambda: serve_one_ping(daemon)):
        assert driver.call(calls.ping()).epoch == "epoch-1"


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


def test_what_times_out_behind_a_frame_that_is_being_written_is_not_sent_later(daemon, drive):
    driver = drive()
    big = calls.lookup("f" * 32, page_keys=["k" * 32] * 50_000)
    peer, first, behind = begin(driver, daemon, big, calls.prepare_receive("s", 1, "f", timeout_s=SHORT_S))
    with pytest.raises(RequestTimeout, match="was not sent"):
        driver.wait(behind)

    def script():
        peer.send(ErrorRep(id=peer.read().id, reason=Reason.LIMIT_REACHED))

    with daemon.playing(script), pytest.raises(LimitReached):
        driver.wait(first)
    assert not peer.has_more()


def test_a_frame_that_times_out_while_it_is_written_is_written_whole(daemon, drive):
    driver = drive()
    big = calls.lookup("f" * 32, page_keys=["k" * 32] * 50_000, timeout_s=SHORT_S)
    peer, greeted = begin(driver, daemon, calls.greet())
    driver.wait(greeted)
    first, behind = driver.submit(big), driver.submit(calls.ping())
    with pytest.raises(RequestTimeout):
        driver.wait(first)

    def script():
        assert len(peer.read().page_keys) == 50_000
        peer.send(PingRep(id=peer.read().id, epoch="epoch-1"))

    with daemon.playing(script):
        assert driver.wait(behind).epoch == "epoch-1"


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


@pytest.mark.parametrize("timeout_s", [None, 0.0], ids=["wait", "wait-0"])
def test_a_reply_that_is_there_counts_although_nobody_looked_for_it_in_time(daemon, timeout_s):
    """A process may be stopped between its vote and its wait, and must not miss that all ranks insert."""
    with Client(daemon.path) as client:
        peer, _ = connected(client, daemon)
        pending = client.submit(calls.vote(7, 0, 1, True, timeout_s=SHORT_S))
        peer.send(VoteRep(id=peer.read().id, commit=True, reason=Reason.OK, state=State.INGESTED))
        wait_until(lambda: monotonic() > pending._errand.deadline_s)
        assert pending.wait(timeout_s).commit


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


def test_a_reply_that_comes_with_the_cancellation_is_ignored(daemon):
    driver = AsyncDriver(daemon.path)
    peer, greeted = begin(driver, daemon, calls.greet())
    driver.wait(greeted)

    async def main():
        future = driver.client.submit(calls.ping())
        peer.send(PingRep(id=peer.read().id, epoch="epoch-1"))
        future.cancel()
        driver.client._link.pump()
        with pytest.raises(asyncio.CancelledError):
            await future

    driver.run(main())
    assert driver.client.in_flight == 0
    driver.end()


def test_the_loop_watches_for_room_only_while_something_is_to_be_written(daemon):
    driver = AsyncDriver(daemon.path)
    big = calls.lookup("f" * 32, page_keys=["k" * 32] * 50_000)
    peer, pending = begin(driver, daemon, big)
    fd = driver.client._link._channel.sock.fileno()

    def script():
        peer.send(ErrorRep(id=peer.read().id, reason=Reason.LIMIT_REACHED))

    with daemon.playing(script), pytest.raises(LimitReached):
        driver.wait(pending)
    assert not driver.loop.remove_writer(fd)
    driver.end()


def test_the_loop_does_not_watch_a_connection_that_has_ended(daemon):
    driver = AsyncDriver(daemon.path)
    begin(driver, daemon, calls.prepare_receive("s", 1, "f", page_keys=["k" * 32] * 50_000))
    fd = driver.client._link._channel.sock.fileno()
    daemon.stop()
    driver.pump()
    assert not driver.loop.remove_writer(fd)
    assert not driver.loop.remove_reader(fd)
    driver.end()


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
            is_over = asyncio.Event()
            client._link.on_change = is_over.set
            peer.close()
            await is_over.wait()
            assert not client._exchange.is_open

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


# --- descriptors and imports -------------------------------------------------------------------


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


def test_close_gives_the_descriptors_back_at_once(daemon):
    before = num_fds()
    clients = [Client(daemon.path) for _ in range(3)]
    for client in clients:
        connected(client, daemon)
        client.close()
    assert num_fds() == before + len(daemon.peers)


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
