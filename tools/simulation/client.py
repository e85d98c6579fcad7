"""Clients: the library's exchange and channel on a simulated socket, and tasks that use them step by step.

A task is a generator: it yields what it waits for and is resumed with the answer, in its own process's time.
It waits for an ``Ask`` (a call of the client library), an int (so many ns), or a ``Signal``.
"""

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from snapd.calls import Call
from snapd.errors import ConnectionLost, DaemonUnreachable, SnapdError
from snapd.exchange import Errand, Exchange
from snapd.links import RETRY_S, Channel
from snapd.units import NS_PER_MS, NS_PER_S
from snapd.wire import HandleRequest, SessionEnded
from tools.simulation.clock import Action, Node, Planned
from tools.simulation.failure import Broken
from tools.simulation.network import SimSocket, Wire

if TYPE_CHECKING:
    from tools.simulation.world import World

TIMEOUT_MS: Final = 600
Steps: TypeAlias = Generator[Any, Any, None]


class Ask(NamedTuple):
    """A call to make; answered with its result, or with its error raised.

    Attributes:
        call: from ``snapd.calls``.
        timeout_ms: for all of it.
    """

    call: Call[Any]
    timeout_ms: int = TIMEOUT_MS


class Signal:
    """Something that several tasks wait for.

    Attributes:
        value: what it was; None: it has not been.
    """

    def __init__(self) -> None:
        self.value: Any = None
        self._waiting: list[Action] = []

    def set(self, value: Any) -> None:
        """Let it be; a second time changes nothing."""
        if self.value is None:
            self.value = value
            waiting, self._waiting = self._waiting, []
            for action in waiting:
                action()

    def then(self, action: Action) -> None:
        """Call *action* once it has been."""
        if self.value is None:
            self._waiting.append(action)
        else:
            action()


class _SimChannel(Channel):
    """The library's channel; only connecting is another."""

    def __init__(self, exchange: Exchange, connect: Callable[[], SimSocket | None]) -> None:
        super().__init__("sim", exchange)
        self._open_socket = connect

    def _connect(self) -> bool:
        sock = self._open_socket()
        if sock is None:
            self._exchange.unreachable(DaemonUnreachable("nobody listens"))
            return False
        self.sock = sock
        self._exchange.opened()
        return True


class SimLink:
    """What ``snapd.links.AsyncLink`` is to an event loop, for the run's clock.

    Args:
        world: where the daemon is.
        node: the process.
        name: what it calls itself.
        pid, uid: what the kernel says of it.
        latency_ns: of its connections.

    Attributes:
        name: what it calls itself.
        exchange: the protocol's state.
        wire: the connection, or the last one.
        is_reading: False: it leaves what comes in the socket.
    """

    def __init__(self, world: "World", node: Node, name: str, pid: int, uid: int, latency_ns: int) -> None:
        self.exchange = Exchange(name)
        self.wire: Wire | None = None
        self.is_reading = True
        self.latency_ns = latency_ns
        self.name = name
        self._world = world
        self._node = node
        self._pid = pid
        self._uid = uid
        self._channel = _SimChannel(self.exchange, self._connect)
        self._retry: Planned | None = None
        self._ended: dict[int, SessionEnded] = {}

    def submit(self, call: Call[Any], timeout_ms: int, on_done: Action) -> Errand[Any]:
        """Send a call; *on_done* is called when it is done, which may be at once.

        Raises:
            SnapdError: it cannot be sent.
        """
        if self.is_reading:
            self._channel.read()
        now_ns = self._node.now_ns()
        errand = self.exchange.add(call, (now_ns + timeout_ms * NS_PER_MS) / NS_PER_S, now_ns / NS_PER_S)
        if isinstance(call.request, HandleRequest):
            self._world.tape.append(call.request)
        expiry = self._node.after(timeout_ms * NS_PER_MS, lambda: self._expire(errand))

        def done() -> None:
            expiry.cancel()
            on_done()

        if errand.is_done:
            done()
        else:
            errand.on_done = done
        self._channel.flush()
        self._after_work()
        return errand

    def wake(self) -> None:
        """The socket can be read, or written again."""
        self._retry = None
        if self.is_reading:
            self._channel.read()
        self._channel.flush()
        self._after_work()

    def take_end(self, handle: int) -> SessionEnded | None:
        """Return how an attempt has ended, if that was told."""
        ended = self.exchange.ended
        while ended:
            told = ended.popleft()
            self._ended[told.slab_handle] = told
        return self._ended.get(handle)

    def close(self) -> None:
        """Hang up, as the kernel does for a process that is gone."""
        self._channel.drop(ConnectionLost("the process is gone"))

    def cut(self) -> None:
        """Break the connection."""
        if self.wire is not None and self._channel.sock is not None:
            self.wire.cut()

    @property
    def epoch(self) -> str:
        """The daemon's epoch, as of the last connection."""
        return self.exchange.hello.epoch if self.exchange.hello else ""

    def _connect(self) -> SimSocket | None:
        daemon = self._world.daemon
        if daemon is None or not daemon.is_listening:
            return None
        self.wire = daemon.connect(self._node, self, self._pid, self._uid, self.latency_ns)
        return self.wire.sock

    def _expire(self, errand: Errand[Any]) -> None:
        if not errand.is_done:
            self.exchange.expire(errand)
            if self.exchange.is_stuck:
                self._channel.lost()
            self._after_work()

    def _after_work(self) -> None:
        if self.exchange.new_epochs:
            # A handle of another epoch names another attempt.
            self.exchange.new_epochs.clear()
            self.exchange.ended.clear()
            self._ended.clear()
        if self._channel.sock is None and self.exchange.wants_connection and self._retry is None:
            self._retry = self._node.after(int(RETRY_S * NS_PER_S), self.wake)


class Task:
    """Runs a generator in a process.

    Args:
        world: counts what is answered.
        node: the process; once it is dead nothing of the task runs.
        link: what its calls go through.
        steps: the generator.
        on_end: called when it is over.
    """

    def __init__(
        self, world: "World", node: Node, link: SimLink, steps: Steps, on_end: Action | None = None
    ) -> None:
        self._world = world
        self._node = node
        self._link = link
        self._steps = steps
        self._on_end = on_end
        node.after(0, lambda: self._go_on(None, None))

    def _go_on(self, value: Any, error: SnapdError | None) -> None:
        try:
            wanted = self._steps.send(value) if error is None else self._steps.throw(error)
        except StopIteration:
            if self._on_end is not None:
                self._on_end()
            return
        except SnapdError as escaped:
            raise Broken("task", f"an error that nobody handled: {escaped!r}") from escaped
        if isinstance(wanted, Ask):
            self._ask(wanted)
        elif isinstance(wanted, Signal):
            wanted.then(lambda: self._resume(lambda: self._go_on(wanted.value, None)))
        else:
            self._node.after(wanted, lambda: self._go_on(None, None))

    def _resume(self, action: Action) -> None:
        self._node.after(0, action)

    def _ask(self, ask: Ask) -> None:
        self._world.note_ask(self._link.name, ask.call)
        errand: Errand[Any] | None = None

        def finish() -> None:
            assert errand is not None
            try:
                result = errand.outcome()
            except SnapdError as error:
                self._world.note_error(error)
                self._go_on(None, error)
            else:
                self._go_on(result, None)

        try:
            errand = self._link.submit(ask.call, ask.timeout_ms, lambda: self._resume(finish))
        except SnapdError as refused:
            error = refused
            self._resume(lambda: self._go_on(None, error))
