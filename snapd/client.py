"""The client library: ``Client`` for plain code and scheduler loops, ``AsyncClient`` for asyncio.

Both have the same operations, made from the functions in ``snapd.calls``, where they are
described. Errors are those of ``snapd.errors``. A client connects when it is first used, and
again when the daemon was restarted::

    with Client("/run/kv-snapd/snapd.sock") as client:
        grant = client.prepare_receive("chat-17", 4096, layout_fingerprint)
        ...
        client.commit(grant.slab_handle, 0, num_bytes, 4096, checksums, epoch=grant.epoch)

Source: design, section 5.
"""

import inspect
from collections.abc import Callable, Coroutine
from contextlib import suppress
from math import inf
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar, get_args

from snapd import calls
from snapd.calls import Call
from snapd.errors import ConnectionLost, ConnectionProblem, DaemonUnreachable, RequestTimeout
from snapd.exchange import ENDED_MAX, IN_FLIGHT_MAX, Errand, Exchange, WatchPush
from snapd.links import AsyncLink, EpochHook, Link
from snapd.wire import HelloRep, SessionEnded, TransferNotified

if TYPE_CHECKING:
    import asyncio
    from collections import deque

    from snapd.mapping import AnyMappedArena

_P = ParamSpec("_P")
_T = TypeVar("_T")

TIMEOUT_S: Final = 5.0
# How often connect() looks whether the daemon is up yet: at first, and at last.
_CONNECT_POLL_S_MIN: Final = 0.01
_CONNECT_POLL_S_MAX: Final = 0.25
assert _CONNECT_POLL_S_MIN < _CONNECT_POLL_S_MAX


def _sync(make: Callable[_P, Call[_T]]) -> Callable[Concatenate["Client", _P], _T]:
    """Return the method of ``Client`` that makes a call and waits for its result."""

    def method(self: "Client", /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self.call(make(*args, **kwargs))

    _describe(method, make, "Client")
    return method


def _async(
    make: Callable[_P, Call[_T]],
) -> Callable[Concatenate["AsyncClient", _P], Coroutine[Any, Any, _T]]:
    """Return the method of ``AsyncClient`` that makes a call and waits for its result."""

    async def method(self: "AsyncClient", /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await self.call(make(*args, **kwargs))

    _describe(method, make, "AsyncClient")
    return method


def _describe(method: Callable[..., object], make: Callable[..., Call[Any]], owner: str) -> None:
    """Give a method the name, the docstring and the parameters of the function behind it."""
    method.__name__ = make.__name__
    method.__qualname__ = f"{owner}.{make.__name__}"
    method.__doc__ = make.__doc__
    signature = inspect.signature(make)
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    (result,) = get_args(signature.return_annotation)
    method.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[self_parameter, *signature.parameters.values()], return_annotation=result
    )


class _Facts:
    """What both clients know of their connection."""

    _exchange: Exchange
    socket_path: str

    @property
    def hello(self) -> HelloRep:
        """What the daemon said last: its version, arenas and limits.

        Raises:
            DaemonUnreachable: there was no connection yet.
        """
        if self._exchange.hello is None:
            raise DaemonUnreachable(f"not connected to {self.socket_path} yet: call connect() first")
        return self._exchange.hello

    @property
    def epoch(self) -> str:
        """The daemon's epoch, as of the last connection; empty before the first."""
        return self._exchange.hello.epoch if self._exchange.hello else ""

    @property
    def reconnects(self) -> int:
        """Connections that were made after the first. Pushes may have been missed at each."""
        return self._exchange.reconnects

    @property
    def is_connected(self) -> bool:
        """There is a connection that has said hello, as far as is known without asking."""
        return self._exchange.is_open

    @property
    def in_flight(self) -> int:
        """Calls under way."""
        return self._exchange.in_flight

    @property
    def late_replies(self) -> int:
        """Replies that came after their call was given up."""
        return self._exchange.late_replies

    @property
    def ended_dropped(self) -> int:
        """``SessionEnded`` pushes that were dropped because ``take_ended`` was not called."""
        return self._exchange.ended_dropped

    @property
    def notified_dropped(self) -> int:
        """``TransferNotified`` pushes that were dropped because ``take_notified`` was not called."""
        return self._exchange.notified_dropped

    def _take_ended(self) -> list[SessionEnded]:
        return _take_all(self._exchange.ended)

    def _take_notified(self) -> list[TransferNotified]:
        return _take_all(self._exchange.notified)


def _take_all(pushes: "deque[_T]") -> list[_T]:
    taken: list[_T] = []
    # Asking first whether there is one would race with another thread that takes it.
    with suppress(IndexError):
        while True:
            taken.append(pushes.popleft())
    return taken


class Pending(Generic[_T]):
    """A call that was submitted: look for its result, or wait for it."""

    __slots__ = ("_errand", "_link")

    def __init__(self, link: Link, errand: Errand[_T]) -> None:
        self._link = link
        self._errand = errand

    def poll(self) -> _T | None:
        """Return the result, or None if it is not there yet. Never waits.

        Raises:
            SnapdError: the call failed, as its function in ``snapd.calls`` says; ``RequestTimeout``
                when the call's time is over.
        """
        self._link.look(self._errand)
        return self._errand.outcome() if self._errand.is_done else None

    def wait(self, timeout_s: float | None = None) -> _T:
        """Return the result when it comes.

        Args:
            timeout_s: how long to wait at most; None: until the call's own time is over.

        Raises:
            RequestTimeout: it did not come. Unless the call's own time is over too, it is still
                under way, and can be polled or waited for again.
            SnapdError: the call failed, as its function in ``snapd.calls`` says.
        """
        self._link.wait(self._errand, inf if timeout_s is None else monotonic() + timeout_s)
        if not self._errand.is_done:
            raise RequestTimeout(
                f"no reply to {self._errand.call!r} within {timeout_s} s; it is still under way"
            )
        return self._errand.outcome()

    def forget(self) -> None:
        """Give the call up; a reply that comes later is ignored."""
        self._link.forget(self._errand)


class Client(_Facts):
    """The client with plain blocking calls. No thread and no event loop of its own; thread safe.

    It belongs to the process that made it: in a forked child its calls raise ``RuntimeError``.

    Args:
        socket_path: the daemon's.
        timeout_s: for a whole call, connecting included, unless the call says otherwise.
        name: says in the daemon's log who this is.
        on_new_epoch: called after a reconnect to another life of the daemon, when the layouts have
            been declared again, by the thread that noticed. Handles from before are stale.
        in_flight_max: calls that may be under way.
        ended_max: pushes that are kept for ``take_ended``, and as many for ``take_notified``.
    """

    def __init__(
        self,
        socket_path: str,
        *,
        timeout_s: float = TIMEOUT_S,
        name: str = "",
        on_new_epoch: EpochHook | None = None,
        in_flight_max: int = IN_FLIGHT_MAX,
        ended_max: int = ENDED_MAX,
    ) -> None:
        self.socket_path = socket_path
        self.timeout_s = timeout_s
        self._name = name
        self._exchange = Exchange(name, in_flight_max=in_flight_max, ended_max=ended_max)
        self._link = Link(socket_path, self._exchange, timeout_s, on_new_epoch)

    ping = _sync(calls.ping)
    declare_layout = _sync(calls.declare_layout)
    prepare_receive = _sync(calls.prepare_receive)
    transfer_started = _sync(calls.transfer_started)
    commit = _sync(calls.commit)
    transfer_failed = _sync(calls.transfer_failed)
    abort = _sync(calls.abort)
    drained = _sync(calls.drained)
    begin_ingest = _sync(calls.begin_ingest)
    vote = _sync(calls.vote)
    lookup = _sync(calls.lookup)
    get = _sync(calls.get)
    list_sessions = _sync(calls.list_sessions)
    stats = _sync(calls.stats)
    drain = _sync(calls.drain)

    def call(self, call: Call[_T]) -> _T:
        """Send a call and return its result; raises as its function in ``snapd.calls`` says."""
        return self._link.call(call)

    def submit(self, call: Call[_T]) -> Pending[_T]:
        """Send a call without waiting for its reply, and return what to poll.

        Several may be under way; replies may come in any order. A pending that nobody polls is
        forgotten when its time is over and its place is needed.

        Raises:
            InvalidRequest: a value of the call cannot be sent.
            LimitReached: too many calls are under way.
            ConnectionLost: the client is closed.
        """
        return Pending(self._link, self._link.submit(call))

    def connect(self, wait_s: float = 0.0) -> HelloRep:
        """Connect, unless connected, and return what the daemon says of itself.

        Args:
            wait_s: if no daemon is there, look again for so long: it may be starting.

        Raises:
            DaemonUnreachable: no daemon listens at the path; the message says what to look at.
            PermissionDenied: the daemon does not serve this user.
            ProtocolError: what listens there does not speak this protocol.
        """
        until_s = monotonic() + wait_s
        pause_s = _CONNECT_POLL_S_MIN
        while True:
            try:
                return self.call(calls.greet())
            except (DaemonUnreachable, ConnectionLost):
                now_s = monotonic()
                if now_s >= until_s or self._link.is_closed:
                    raise
            self._link.wait_for(lambda: self._link.is_closed, min(now_s + pause_s, until_s))
            pause_s = min(2 * pause_s, _CONNECT_POLL_S_MAX)

    def take_ended(self) -> list[SessionEnded]:
        """Return, once, how attempts ended that this client prepared, wrote or read. Never waits.

        At most ``ended_max`` are kept, the newest; ``ended_dropped`` counts the others. What ends
        while the client is not connected is not told: see ``reconnects``.
        """
        self._link.pump()
        return self._take_ended()

    def take_notified(self) -> list[TransferNotified]:
        """Return, once, into which attempts of this client a transfer was said to be complete. Never waits.

        A hint to look: it may be lost, and it proves nothing. Bounded as ``take_ended``;
        ``notified_dropped`` counts the others.
        """
        self._link.pump()
        return self._take_notified()

    def map_buffer(
        self,
        rank: int,
        writable: bool = False,
        *,
        timeout_s: float | None = None,
        populate: bool = True,
        device: str | None = None,
    ) -> "AnyMappedArena":
        """Map *rank*'s arena into this process; see ``snapd.mapping.map_arena``."""
        from snapd.mapping import map_arena

        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        return map_arena(self.socket_path, rank, writable, timeout_s, populate=populate, device=device)

    def watch(self, session_id: str = "", *, timeout_s: float | None = None) -> "Watch":
        """Return every transition and refusal from now on, on a connection of its own.

        Args:
            session_id: only this session's; empty: all.
            timeout_s: for the beginning.

        Raises:
            LimitReached: too many connections watch.
        """
        link = Link(self.socket_path, Exchange(self._name), self.timeout_s)
        watch = Watch(link)
        try:
            link.call(calls.watch(session_id, timeout_s=timeout_s))
        except BaseException:
            watch.close()
            raise
        return watch

    def close(self) -> None:
        """Hang up, and end every call under way with ``ConnectionLost``. Final; may be called twice."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Watch:
    """What happens in the daemon: an iterator that ends when it is closed.

    What the daemon could not deliver, because nobody read, is counted by a ``WatchLost``. When
    the connection ends, ``ConnectionLost`` is raised: what happened meanwhile is not known.
    """

    def __init__(self, link: Link) -> None:
        from collections import deque

        self._link = link
        self._pushes: deque[WatchPush] = deque()
        link.exchange.pushes = self._pushes

    def next(self, timeout_s: float | None = None) -> WatchPush:
        """Return the next push.

        Args:
            timeout_s: how long to wait for it; None: for ever.

        Raises:
            RequestTimeout: there was none in time; the watch goes on.
            ConnectionLost: the daemon hung up, or the watch is closed.
        """
        link = self._link
        until_s = inf if timeout_s is None else monotonic() + timeout_s
        link.wait_for(lambda: bool(self._pushes) or not link.exchange.is_open, until_s)
        return _next_push(self._pushes, link.exchange, timeout_s)

    def close(self) -> None:
        """Hang up; whoever waits for a push stops waiting. May be called twice."""
        self._link.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> WatchPush:
        try:
            return self.next()
        except ConnectionProblem:
            if self._link.is_closed:
                raise StopIteration from None
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _next_push(pushes: "deque[WatchPush]", exchange: Exchange, timeout_s: float | None) -> WatchPush:
    """Return the push that is there, or raise the reason why there is none."""
    try:
        return pushes.popleft()
    except IndexError:
        pass
    if exchange.is_open:
        raise RequestTimeout(f"nothing happened within {timeout_s} s")
    raise ConnectionLost("the watch is over: the connection has ended")


class AsyncClient(_Facts):
    """The client for asyncio (or uvloop), for the tasks of one event loop. As ``Client``, awaited.

    Cancelling an await gives the call up: a reply that comes later is ignored. The request may
    have had its effect all the same.

    Args:
        socket_path: the daemon's.
        timeout_s: for a whole call, connecting included, unless the call says otherwise.
        name: says in the daemon's log who this is.
        on_new_epoch: called after a reconnect to another life of the daemon, when the layouts have
            been declared again. Handles from before are stale.
        in_flight_max: calls that may be under way.
        ended_max: pushes that are kept for ``take_ended``, and as many for ``take_notified``.
    """

    def __init__(
        self,
        socket_path: str,
        *,
        timeout_s: float = TIMEOUT_S,
        name: str = "",
        on_new_epoch: EpochHook | None = None,
        in_flight_max: int = IN_FLIGHT_MAX,
        ended_max: int = ENDED_MAX,
    ) -> None:
        self.socket_path = socket_path
        self.timeout_s = timeout_s
        self._name = name
        self._exchange = Exchange(name, in_flight_max=in_flight_max, ended_max=ended_max)
        self._link = AsyncLink(socket_path, self._exchange, timeout_s, on_new_epoch)

    ping = _async(calls.ping)
    declare_layout = _async(calls.declare_layout)
    prepare_receive = _async(calls.prepare_receive)
    transfer_started = _async(calls.transfer_started)
    commit = _async(calls.commit)
    transfer_failed = _async(calls.transfer_failed)
    abort = _async(calls.abort)
    drained = _async(calls.drained)
    begin_ingest = _async(calls.begin_ingest)
    vote = _async(calls.vote)
    lookup = _async(calls.lookup)
    get = _async(calls.get)
    list_sessions = _async(calls.list_sessions)
    stats = _async(calls.stats)
    drain = _async(calls.drain)

    async def call(self, call: Call[_T]) -> _T:
        """Send a call and return its result; raises as its function in ``snapd.calls`` says."""
        return await self._link.submit(call)

    def submit(self, call: Call[_T]) -> "asyncio.Future[_T]":
        """Send a call at once, and return the future of its result; see ``Client.submit``."""
        return self._link.submit(call)

    async def connect(self, wait_s: float = 0.0) -> HelloRep:
        """Connect, unless connected; see ``Client.connect``."""
        import asyncio

        until_s = monotonic() + wait_s
        pause_s = _CONNECT_POLL_S_MIN
        while True:
            try:
                return await self.call(calls.greet())
            except (DaemonUnreachable, ConnectionLost):
                remaining_s = until_s - monotonic()
                if remaining_s <= 0 or self._link.is_closed:
                    raise
            await asyncio.sleep(min(pause_s, remaining_s))
            pause_s = min(2 * pause_s, _CONNECT_POLL_S_MAX)

    def take_ended(self) -> list[SessionEnded]:
        """Return, once, how attempts ended that this client had to do with; see ``Client.take_ended``."""
        self._link.pump()
        return self._take_ended()

    def take_notified(self) -> list[TransferNotified]:
        """Return, once, which transfers were said to be complete; see ``Client.take_notified``."""
        self._link.pump()
        return self._take_notified()

    async def map_buffer(
        self,
        rank: int,
        writable: bool = False,
        *,
        timeout_s: float | None = None,
        populate: bool = True,
        device: str | None = None,
    ) -> "AnyMappedArena":
        """Map *rank*'s arena into this process, in a thread; see ``snapd.mapping.map_arena``."""
        import asyncio

        from snapd.mapping import map_arena

        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        return await asyncio.to_thread(
            map_arena, self.socket_path, rank, writable, timeout_s, populate=populate, device=device
        )

    async def watch(self, session_id: str = "", *, timeout_s: float | None = None) -> "AsyncWatch":
        """Return every transition and refusal from now on; see ``Client.watch``."""
        link = AsyncLink(self.socket_path, Exchange(self._name), self.timeout_s)
        watch = AsyncWatch(link)
        try:
            await link.submit(calls.watch(session_id, timeout_s=timeout_s))
        except BaseException:
            await watch.close()
            raise
        return watch

    async def close(self) -> None:
        """Hang up, and end every call under way with ``ConnectionLost``. Final; may be called twice."""
        self._link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncWatch:
    """What happens in the daemon: an async iterator that ends when it is closed. See ``Watch``."""

    def __init__(self, link: AsyncLink) -> None:
        import asyncio
        from collections import deque

        self._link = link
        self._pushes: deque[WatchPush] = deque()
        self._changed = asyncio.Event()
        link.exchange.pushes = self._pushes
        link.on_change = self._changed.set

    async def next(self, timeout_s: float | None = None) -> WatchPush:
        """Return the next push; see ``Watch.next``."""
        import asyncio

        exchange = self._link.exchange
        try:
            async with asyncio.timeout(timeout_s):
                while not self._pushes and exchange.is_open:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass  # Told apart below: a push may have come at the last moment.
        push = _next_push(self._pushes, exchange, timeout_s)
        if not self._pushes:
            self._link.pump()  # There is room again for what was left in the socket.
        return push

    async def close(self) -> None:
        """Hang up; whoever waits for a push stops waiting. May be called twice."""
        self._link.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WatchPush:
        try:
            return await self.next()
        except ConnectionProblem:
            if self._link.is_closed:
                raise StopAsyncIteration from None
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
