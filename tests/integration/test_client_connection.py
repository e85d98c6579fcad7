"""Both clients when the connection ends, the daemon is another one, or speaks something else."""

import pytest
from client_cases import (
    COMMIT,
    PREPARE,
    begin,
    daemon,
    drive,
    hello_rep,
    serve_one_ping,
)

from snapd import calls, exchange
from snapd.client import Client
from snapd.core.events import State
from snapd.errors import (
    ConnectionLost,
    DaemonUnreachable,
    LimitReached,
    ProtocolError,
    Reason,
    StaleHandle,
    WrongRank,
)
from snapd.exchange import CONNECTIONS_AN_ERRAND_MAX
from snapd.layout import Layout
from snapd.wire import (
    AckRep,
    CommitReq,
    DeclareLayoutRep,
    DeclareLayoutReq,
    ErrorRep,
    LookupReq,
    PingRep,
    PingReq,
    SnapshotPrepareReceiveReqInput,
    SnapshotPrepareReceiveReqOutput,
    encode_frame,
)

LAYOUT = Layout((64, 64), (64, 64))


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
        if len(daemon.peers) < CONNECTIONS_AN_ERRAND_MAX:
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


def test_what_the_daemon_said_on_a_former_connection_is_not_said_again(daemon, drive):
    driver = drive()
    pending = driver.submit(COMMIT)
    for words in ("first words", ""):
        peer = daemon.accept()
        peer.greet()
        driver.pump()
        assert isinstance(peer.read(), CommitReq)
        if words:
            peer.send(ErrorRep(id=0, reason=Reason.INVALID_REQUEST, detail=words))
        peer.close()
        # One look takes the words, the next one the end.
        driver.pump()
        driver.pump()
    with pytest.raises(ConnectionLost) as caught:
        driver.wait(pending)
    assert "first words" not in str(caught.value)


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
    peer, _, behind = begin(driver, daemon, big, calls.ping())
    peer.send(PingRep(id=driver.client._exchange._last_id, epoch="epoch-1"))
    with pytest.raises(ProtocolError, match="not sent"):
        driver.wait(behind)


def test_a_reply_to_what_is_not_sent_again_yet_is_a_protocol_error(daemon, drive):
    driver = drive()
    peer, pending = begin(driver, daemon, COMMIT)
    request = peer.read()
    peer.close()
    driver.pump()
    again = daemon.accept()
    again.sock.sendall(encode_frame(hello_rep(again.read().id)) + encode_frame(AckRep(id=request.id)))
    with pytest.raises(ProtocolError, match="not sent"):
        driver.wait(pending)


def test_a_reply_may_be_as_long_as_the_daemon_says(daemon, drive):
    driver = drive()
    peer, pending = begin(driver, daemon, COMMIT)
    detail = "x" * (2 << 20)
    with (
        daemon.playing(
            lambda: peer.send(ErrorRep(id=peer.read().id, reason=Reason.STALE_HANDLE, detail=detail))
        ),
        pytest.raises(StaleHandle, match="x" * 100),
    ):
        driver.wait(pending)


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
