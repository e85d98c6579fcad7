"""What connects an exchange to a socket: without waiting, for threads, and for an event loop.

``Channel`` does whatever can be done at once. ``Link`` adds waiting, for any number of threads:
one of them, the leader, sleeps in poll(2) and works for all. ``AsyncLink`` has the event loop
watch the same socket.

Source: design, section 5.
"""

import errno
import io
import os
import select
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Final, TypeVar

from snapd.address import Resolver, TcpAddress, parse_address
from snapd.calls import Call
from snapd.errors import ConnectionLost, DaemonUnreachable, RequestTimeout, SnapdError
from snapd.exchange import Errand, Exchange
from snapd.streams import Stream, open_tcp, open_unix
from snapd.units import KIB, MS_PER_S
from snapd.wire import HelloRep

if TYPE_CHECKING:
    import asyncio

_T = TypeVar("_T")
EpochHook = Callable[[HelloRep], None]

READ_BYTES: Final = 64 * KIB
# One look at the socket takes at most so many reads, so that a poll comes back from a flood.
READS_MAX: Final = 16
# How often to look again when the daemon's accept queue is full: no event tells when it is not.
RETRY_S: Final = 0.02
# A signal that comes just before a wait, or to another thread, has its handler run after it.
WAIT_S_MAX: Final = 1.0

_ADVICE: Final = {
    errno.ENOENT: "there is no such socket: is the daemon running, and is this its socket_path?",
    errno.ECONNREFUSED: "nobody listens there: the daemon has ended, or is another program's socket this?",
    errno.EACCES: "permission denied: run as the daemon's user, or have this user put into allowed_uids",
    errno.EPERM: "permission denied: run as the daemon's user, or have this user put into allowed_uids",
}


_TCP_ADVICE: Final = {
    errno.ECONNREFUSED: "nobody listens there: does the daemon run, and is this its tcp_address?",
}


def unreachable(where: str | TcpAddress, error: OSError | ValueError) -> DaemonUnreachable:
    """Return the error for a socket that cannot be connected to: where, why, what to do."""
    number = (error.errno if isinstance(error, OSError) else None) or 0
    text = getattr(error, "strerror", None) or str(error)
    if isinstance(where, str):
        return DaemonUnreachable(f"no daemon at {where}: {_ADVICE.get(number, text)}")
    if where.tls is not None and number in (0, errno.ECONNRESET, errno.EPIPE):
        text += ". Are ca, cert and key right, and does the daemon know this client's CA?"
    return DaemonUnreachable(f"no daemon at {where.text}: {_TCP_ADVICE.get(number, text)}")


def tell_new_epochs(exchange: Exchange, hook: EpochHook | None) -> None:
    """Tell the client's owner that the daemon was restarted. What the hook raises is logged only."""
    while exchange.new_epochs:
        hello = exchange.new_epochs.pop(0)
        try:
            if hook is not None:
                hook(hello)
        except Exception:
            # It must not cost the caller the reply that came with the same read.
            import logging

            logging.getLogger("snapd.client").exception("on_new_epoch failed")


class Channel:
    """A connection that feeds an exchange. Never waits; not thread safe.

    Args:
        address: the daemon's socket, or its address as ``parse_address`` takes it.
        exchange: what is fed.

    Attributes:
        sock: the connection; None: there is none.
        before_close: called with the socket still open, just before it is closed.

    Raises:
        ConfigError: *address* is none.
    """

    def __init__(self, address: str, exchange: Exchange) -> None:
        self.sock: Stream | None = None
        self.before_close: Callable[[], None] | None = None
        self._where = parse_address(address)
        self._resolver = (
            Resolver(self._where.host, self._where.port) if isinstance(self._where, TcpAddress) else None
        )
        self._exchange = exchange

    @property
    def wants_write(self) -> bool:
        """Something waits for the socket to be writable."""
        if self.sock is None:
            return False
        return self.sock.wants_write or (self.sock.takes_output and self._exchange.next_output() is not None)

    def read(self) -> None:
        """Take in what has come."""
        for _ in range(READS_MAX):
            # A stream that has ended is read once more: no event tells of it.
            if self._read_once() < READ_BYTES and not (self.sock is not None and self.sock.has_ended):
                break

    def flush(self) -> None:
        """Write what can be written now; connect for it if there is no connection."""
        while True:
            if self.sock is None and not (self._exchange.wants_connection and self._connect()):
                return
            output = self._exchange.next_output()
            if self.sock is None or (output is None and not self.sock.wants_write):
                return
            try:
                self.sock.flush()
                if output is None:
                    return
                num_bytes = self.sock.send(output)
            except BlockingIOError:
                return
            except OSError as error:
                if self._is_unreachable(error):
                    return
                # The daemon has hung up. What it said last may be answers, or why.
                while self._read_once():
                    pass
                self.lost()
            else:
                self._exchange.wrote(num_bytes)

    def lost(self) -> None:
        """Close the connection, if there is one; what is under way may go over another."""
        if self.sock is not None:
            self._close()
            self._exchange.lost()

    def drop(self, error: SnapdError) -> None:
        """Close the connection and end everything under way with *error*."""
        self._close()
        self._exchange.fail_all(error)

    def _read_once(self) -> int:
        """Read once and return how many bytes came; 0: none, or the connection has ended."""
        if self.sock is None or not self._exchange.wants_read:
            return 0
        try:
            data = self.sock.recv(READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError as error:
            if self._is_unreachable(error):
                return 0
            data = b""
        if not data:
            self.lost()
            return 0
        try:
            self._exchange.received(data)
        except SnapdError as error:
            self.drop(error)
            return 0
        return len(data)

    def _connect(self) -> bool:
        try:
            if isinstance(self._where, TcpAddress):
                assert self._resolver is not None
                self.sock = open_tcp(self._where, self._resolver)
            else:
                self.sock = open_unix(self._where)
        except BlockingIOError:
            return False
        except (OSError, ValueError) as error:
            self._exchange.unreachable(unreachable(self._where, error))
            return False
        self._exchange.opened()
        return True

    def _is_unreachable(self, error: OSError) -> bool:
        """End everything under way if the connection never came about."""
        if self.sock is None or self.sock.is_established:
            return False
        if self._resolver is not None:
            self._resolver.doubt()
        self._close()
        self._exchange.unreachable(unreachable(self._where, error))
        return True

    def _close(self) -> None:
        if self.sock is not None:
            if self.before_close is not None:
                self.before_close()
            self.sock.close()
            self.sock = None


class Link:
    """A channel that threads can wait on. Thread safe.

    Of the threads that wait, one is the leader: it sleeps in poll(2) without the lock, then reads
    for all. The others sleep on the condition. Any thread may write, or look, at any time; it
    wakes the leader, which may be watching for too little or have its answer already.
    """

    def __init__(
        self, address: str, exchange: Exchange, timeout_s: float, on_new_epoch: EpochHook | None = None
    ) -> None:
        self.exchange = exchange
        self.timeout_s = timeout_s
        self.is_closed = False
        self._on_new_epoch = on_new_epoch
        self._channel = Channel(address, exchange)
        self._changed = threading.Condition(threading.Lock())
        self._has_leader = False
        self._wake = io.FileIO(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), "r+")
        self._pid = os.getpid()

    def submit(self, call: Call[_T]) -> Errand[_T]:
        """Send a call without waiting for its reply.

        Raises:
            InvalidRequest: it cannot be encoded.
            LimitReached: too many calls are under way.
            ConnectionLost: the link is closed.
            RuntimeError: this is a forked child.
        """
        self._check_process()
        timeout_s = self.timeout_s if call.timeout_s is None else call.timeout_s
        with self._changed:
            if self.is_closed:
                raise ConnectionLost("this client is closed")
            # First see whether the daemon has hung up meanwhile: what is then sent goes elsewhere.
            self._channel.read()
            now_s = monotonic()
            errand = self.exchange.add(call, now_s + timeout_s, now_s)
            self._channel.flush()
            self._wake_others()
        return errand

    def wait(self, errand: Errand[_T], until_s: float) -> None:
        """Return when the errand is done, or its deadline or *until_s* has come."""
        self.wait_for(lambda: errand.is_done, min(until_s, errand.deadline_s))
        # A reply that came in time counts, also when nobody looked until now: it may say "commit".
        self.look(errand)

    def look(self, errand: Errand[_T]) -> None:
        """Take in what has come, without waiting."""
        self._check_process()
        with self._changed:
            if not errand.is_done:
                self._pump()
                self._expire_if_due(errand)
        self._tell()

    def pump(self) -> None:
        """Take in what has come, without waiting."""
        self._check_process()
        with self._changed:
            self._pump()
        self._tell()

    def call(self, call: Call[_T]) -> _T:
        """Send a call and return its result."""
        errand = self.submit(call)
        try:
            self.wait(errand, errand.deadline_s)
        except BaseException:
            self.forget(errand)
            raise
        return errand.outcome()

    def forget(self, errand: Errand[_T]) -> None:
        """Give up a call; its reply is ignored."""
        with self._changed:
            self.exchange.forget(errand, RequestTimeout(f"{errand.call!r} was given up by the caller"))

    def wait_for(self, is_over: Callable[[], bool], until_s: float) -> None:
        """Return when *is_over*, which is asked after everything that happens, or *until_s* has come."""
        self._check_process()
        with self._changed:
            while not is_over():
                remaining_s = min(until_s - monotonic(), WAIT_S_MAX)
                if remaining_s <= 0:
                    break
                if self._has_leader:
                    self._changed.wait(remaining_s)
                else:
                    self._lead(remaining_s)
        self._tell()

    def close(self) -> None:
        """End the connection and everything under way. Final; may be called twice."""
        with self._changed:
            self.is_closed = True
            self._channel.drop(ConnectionLost("this client was closed"))
            self._wake_others()
            if not self._has_leader:
                self._wake.close()

    def _check_process(self) -> None:
        """Keep a forked child from the parent's socket, lock and wake-ups.

        The daemon would take what the child writes for the parent's, and the parent's exit for its end.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(f"this client belongs to process {self._pid}: make one after the fork")

    def _pump(self) -> None:
        self._channel.read()
        self._channel.flush()
        self._wake_others()

    def _wake_others(self) -> None:
        if self._has_leader:
            self._wake.write((1).to_bytes(8, "little"))
            self._changed.notify_all()

    def _lead(self, remaining_s: float) -> None:
        """Sleep until something happens on the socket, at most so long; then read and write."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        sock = self._channel.sock
        if sock is not None:
            events = select.POLLIN if self.exchange.wants_read else 0
            if self._channel.wants_write:
                events |= select.POLLOUT
            poller.register(sock, events)
        elif self.exchange.wants_connection:
            remaining_s = min(remaining_s, RETRY_S)
        self._has_leader = True
        self._changed.release()
        try:
            poller.poll(remaining_s * MS_PER_S)
        finally:
            self._changed.acquire()
            self._has_leader = False
            self._changed.notify_all()
            if self.is_closed:
                self._wake.close()
            else:
                self._wake.read(8)
        self._pump()

    def _expire_if_due(self, errand: Errand[_T]) -> None:
        if not errand.is_done and monotonic() >= errand.deadline_s:
            self.exchange.expire(errand)
            if self.exchange.is_stuck:
                # Whoever accepted does not say hello. The next call tries another connection.
                self._channel.lost()

    def _tell(self) -> None:
        if self.exchange.new_epochs:
            tell_new_epochs(self.exchange, self._on_new_epoch)


class AsyncLink:
    """A channel that an event loop watches. For the tasks of one loop.

    Attributes:
        on_change: called after everything that happens on the socket.
    """

    def __init__(
        self, address: str, exchange: Exchange, timeout_s: float, on_new_epoch: EpochHook | None = None
    ) -> None:
        self.exchange = exchange
        self.timeout_s = timeout_s
        self.is_closed = False
        self.on_change: Callable[[], None] | None = None
        self._on_new_epoch = on_new_epoch
        self._channel = Channel(address, exchange)
        self._channel.before_close = self._unregister
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_reading = False
        self._is_writing = False
        self._retry: asyncio.TimerHandle | None = None

    def submit(self, call: Call[_T]) -> "asyncio.Future[_T]":
        """Send a call and return the future of its result. Cancelling it gives the call up.

        Raises:
            InvalidRequest: it cannot be encoded.
            LimitReached: too many calls are under way.
            ConnectionLost: the link is closed.
            RuntimeError: no loop runs, or another than before.
        """
        loop = self._running_loop()
        if self.is_closed:
            raise ConnectionLost("this client is closed")
        timeout_s = self.timeout_s if call.timeout_s is None else call.timeout_s
        # First see whether the daemon has hung up meanwhile: what is then sent goes elsewhere.
        self._channel.read()
        now_s = monotonic()
        errand = self.exchange.add(call, now_s + timeout_s, now_s)
        future: asyncio.Future[_T] = loop.create_future()
        timer = loop.call_later(timeout_s, self._expire, errand)

        def settle() -> None:
            if future.done():
                return
            try:
                future.set_result(errand.outcome())
            except SnapdError as error:
                future.set_exception(error)

        def let_go(_: "asyncio.Future[_T]") -> None:
            timer.cancel()
            self.exchange.forget(errand, RequestTimeout(f"{call!r} was given up by the caller"))

        future.add_done_callback(let_go)
        if errand.is_done:
            settle()
        else:
            errand.on_done = settle
        self._channel.flush()
        self._after_work()
        return future

    def pump(self) -> None:
        """Take in what has come."""
        self._retry = None
        self._channel.read()
        self._channel.flush()
        self._after_work()

    def close(self) -> None:
        """End the connection and everything under way. Final; may be called twice."""
        self.is_closed = True
        self._channel.drop(ConnectionLost("this client was closed"))
        self._after_work()

    def _running_loop(self) -> "asyncio.AbstractEventLoop":
        import asyncio

        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise RuntimeError("an AsyncClient belongs to the event loop that used it first")
        return loop

    def _expire(self, errand: Errand[_T]) -> None:
        if not errand.is_done:
            self.exchange.expire(errand)
            if self.exchange.is_stuck:
                self._channel.lost()

    def _after_work(self) -> None:
        """Have the loop watch for what matters now, and tell whoever wants to know."""
        self._register()
        tell_new_epochs(self.exchange, self._on_new_epoch)
        if self.on_change is not None:
            self.on_change()

    def _register(self) -> None:
        sock, loop = self._channel.sock, self._loop
        if loop is None:
            return
        if sock is None:
            if self.exchange.wants_connection and self._retry is None:
                self._retry = loop.call_later(RETRY_S, self.pump)
            return
        wants_read = self.exchange.wants_read
        wants_write = self._channel.wants_write
        if wants_read and not self._is_reading:
            loop.add_reader(sock.fileno(), self.pump)
        elif self._is_reading and not wants_read:
            loop.remove_reader(sock.fileno())
        if wants_write and not self._is_writing:
            loop.add_writer(sock.fileno(), self.pump)
        elif self._is_writing and not wants_write:
            loop.remove_writer(sock.fileno())
        self._is_reading, self._is_writing = wants_read, wants_write

    def _unregister(self) -> None:
        sock, loop = self._channel.sock, self._loop
        if sock is not None and loop is not None and not loop.is_closed():
            if self._is_reading:
                loop.remove_reader(sock.fileno())
            if self._is_writing:
                loop.remove_writer(sock.fileno())
        self._is_reading = self._is_writing = False
