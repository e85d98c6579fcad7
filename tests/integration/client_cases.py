"""What the client tests share: a daemon that does what the test says, and drivers for both clients."""

import asyncio
import contextlib
import os
import socket
import threading
from pathlib import Path

import pytest

from snapd import calls
from snapd.client import AsyncClient, Client
from snapd.core.events import State
from snapd.errors import Reason
from snapd.wire import (
    AckRep,
    ArenaOffer,
    FrameSplitter,
    HelloRep,
    HelloReq,
    PingRep,
    SessionEnded,
    WatchTransition,
    decode_request,
    encode_frame,
)

# Far more than anything takes here; only a test that fails waits for it.
PATIENCE_S = 20.0
# For what must not come.
SHORT_S = 0.05

VOTE = calls.vote(7, 0, 1, True)
COMMIT = calls.commit(7, 0, 256, 1, ((1, 2),))
PREPARE = calls.prepare_receive("s", 10, "f" * 32)


def hello_rep(request_id, epoch="epoch-1", **changes):
    fields = {
        "protocol": 1,
        "version": "9.9",
        "arenas": (ArenaOffer(rank=0, device="cpu", size_bytes=4096, base_ptr=0),),
        "transport": "shm",
        "transport_address": "",
        "alignment_bytes": 256,
        "frame_bytes_max": 1 << 22,
        "requests_in_flight_max": 1024,
        "page_keys_max": 16384,
        "lease_ms": 10_000,
    }
    return HelloRep(id=request_id, epoch=epoch, **(fields | changes))


class Peer:
    """The daemon's end of one connection."""

    def __init__(self, sock):
        self.sock = sock
        sock.settimeout(PATIENCE_S)
        self._splitter = FrameSplitter(1 << 24)
        self._payloads = []

    def read(self):
        """Return the next request; None at the end."""
        while not self._payloads:
            try:
                data = self.sock.recv(65536)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._payloads += self._splitter.feed(data)
        return decode_request(self._payloads.pop(0))

    def has_more(self):
        """Whether anything was sent that was not read; the client has nothing left to write."""
        if self._payloads:
            return True
        self.sock.setblocking(False)
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return False
        finally:
            self.sock.settimeout(PATIENCE_S)

    def send(self, *messages):
        self.sock.sendall(b"".join(encode_frame(message) for message in messages))

    def greet(self, epoch="epoch-1", **changes):
        request = self.read()
        assert isinstance(request, HelloReq), request
        self.send(hello_rep(request.id, epoch, **changes))
        return request

    def ack(self):
        request = self.read()
        self.send(AckRep(id=request.id))
        return request

    def serve_pings(self, epoch="epoch-1"):
        """Answer pings until the client hangs up."""
        while (request := self.read()) is not None:
            self.send(PingRep(id=request.id, epoch=epoch))

    def close(self):
        self.sock.close()


class FakeDaemon:
    """A unix socket on which the test answers."""

    def __init__(self, path: Path):
        self.path = str(path)
        self.peers = []
        self.listener = None
        self.listen()

    def listen(self, backlog=64):
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.settimeout(PATIENCE_S)
        self.listener.bind(self.path)
        self.listener.listen(backlog)

    def accept(self):
        sock, _ = self.listener.accept()
        self.peers.append(Peer(sock))
        return self.peers[-1]

    def has_caller(self):
        """Whether a connection waits to be accepted."""
        self.listener.setblocking(False)
        try:
            self.accept()
        except BlockingIOError:
            return False
        finally:
            self.listener.settimeout(PATIENCE_S)
        return True

    def stop(self):
        """Die: hang up on everybody, and leave the socket file behind."""
        self.listener.close()
        for peer in self.peers:
            peer.close()
        self.peers.clear()

    def restart(self):
        self.stop()
        Path(self.path).unlink()
        self.listen()

    @contextlib.contextmanager
    def playing(self, script):
        """Run *script* in a thread meanwhile; what it raises is raised here."""
        errors = []

        def run():
            try:
                script()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the script has not ended"
        if errors:
            raise errors[0]


class SyncDriver:
    """``Client`` with the same words as ``AsyncDriver``."""

    def __init__(self, path, **options):
        self.client = Client(path, **{"timeout_s": PATIENCE_S} | options)
        self.submit = self.client.submit
        self.call = self.client.call
        self.connect = self.client.connect
        self.watch = self.client.watch

    def poll(self, pending):
        return pending.poll()

    def wait(self, pending):
        return pending.wait()

    def next_push(self, watch, timeout_s=PATIENCE_S):
        return watch.next(timeout_s)

    def close_watch(self, watch):
        watch.close()

    def pump(self):
        self.client._link.pump()

    def close(self):
        self.client.close()

    end = close


class AsyncDriver:
    """``AsyncClient`` on a loop that runs only while something is asked of it."""

    def __init__(self, path, **options):
        self.loop = asyncio.new_event_loop()
        self.client = AsyncClient(path, **{"timeout_s": PATIENCE_S} | options)

    def run(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    def submit(self, call):
        async def submit():
            return self.client.submit(call)

        return self.run(submit())

    def call(self, call):
        return self.run(self.client.call(call))

    def connect(self, wait_s=0.0):
        return self.run(self.client.connect(wait_s))

    def watch(self, session_id="", **options):
        return self.run(self.client.watch(session_id, **options))

    def poll(self, future):
        self.pump()
        return future.result() if future.done() else None

    def wait(self, future):
        async def wait():
            return await future

        return self.run(wait())

    def next_push(self, watch, timeout_s=PATIENCE_S):
        return self.run(watch.next(timeout_s))

    def close_watch(self, watch):
        self.run(watch.close())

    def pump(self):
        # Due timers run too, and whatever the loop has seen on the socket.
        for _ in range(3):
            self.run(asyncio.sleep(0))
        self.client._link.pump()

    def close(self):
        self.run(self.client.close())

    def end(self):
        self.close()
        self.loop.close()


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


def serve_one_ping(daemon, epoch="epoch-1"):
    peer = daemon.accept()
    peer.greet(epoch)
    peer.send(PingRep(id=peer.read().id, epoch=epoch))
    return peer


def connected(client, daemon):
    pending = client.submit(calls.greet())
    peer = daemon.accept()
    peer.greet()
    return peer, pending.wait()


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


def num_fds():
    return len(list(Path("/proc/self/fd").iterdir()))


# --- fixtures, for the files that import them -------------------------------------------------------


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
