"""What a client has going on with the daemon, without any I/O.

``Exchange`` knows which requests are under way, what has to be written next, what a reply
belongs to, and what becomes of everything when the connection ends:

* A connection starts with hello. If the epoch is another one than before, every layout that
  was declared is declared again. Only then do requests go out.
* When a connection ends, a request that was written whole may have had its effect. It is
  written once more on a new connection only if its class says that this does no harm.
  A frame that was not written whole was not processed, so any request is then sent again.
  No request is tried on more than two connections.
* A request that nobody waits for any more is forgotten; its late reply is ignored.

Nothing here is thread safe, and nothing here knows a socket or a clock.

Source: design, section 5.
"""

import enum
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, TypeAlias, TypeVar

import msgspec

from snapd.calls import Call
from snapd.errors import (
    ConnectionLost,
    InvalidRequest,
    LimitReached,
    ProtocolError,
    RequestError,
    RequestTimeout,
    SnapdError,
    StaleHandle,
    error_for,
)
from snapd.layout import Layout
from snapd.units import MIB
from snapd.wire import (
    LENGTH_BYTES,
    PROTOCOL_VERSION,
    AnyReply,
    DeclareLayoutRep,
    DeclareLayoutReq,
    ErrorRep,
    FrameSplitter,
    HandleRequest,
    HelloRep,
    HelloReq,
    Push,
    SessionEnded,
    TransferNotified,
    WatchLost,
    WatchRefused,
    WatchTransition,
    decode_answer,
    encode_frame,
)

_T = TypeVar("_T")

# Hello says how long the daemon's frames may be; until then, as long as hello can be.
HELLO_BYTES_MAX: Final = MIB
IN_FLIGHT_MAX: Final = 1_024
ENDED_MAX: Final = 1_024
PUSHES_MAX: Final = 1_024
LAYOUTS_REMEMBERED_MAX: Final = 256
CONNECTIONS_AN_ERRAND_MAX: Final = 2

WatchPush: TypeAlias = WatchTransition | WatchRefused | WatchLost


class Phase(enum.Enum):
    """How far a connection has come."""

    CLOSED = "closed"
    GREETING = "greeting"
    DECLARING = "declaring"
    OPEN = "open"


class Errand(Generic[_T]):
    """A call that is under way.

    Attributes:
        deadline_s: monotonic time at which it is given up.
        on_done: called once, when there is an outcome.
        is_done: there is an outcome.
        is_sent: its frame is written whole to the present connection.
        may_have_acted: its frame was written whole to some connection.
        losses: connections that ended while it was under way.
    """

    __slots__ = (
        "_error", "_result", "call", "deadline_s", "frame", "id", "is_done", "is_sent", "losses",
        "may_have_acted", "on_done",
    )  # fmt: skip

    def __init__(self, call: Call[_T], request_id: int, frame: bytes, deadline_s: float) -> None:
        self.call = call
        self.id = request_id
        self.frame = frame
        self.deadline_s = deadline_s
        self.on_done: Callable[[], None] | None = None
        self.is_done = False
        self.is_sent = False
        self.may_have_acted = False
        self.losses = 0
        self._result: _T | None = None
        self._error: SnapdError | None = None

    @property
    def is_repeatable(self) -> bool:
        """It may be written again although it may have had its effect."""
        return self.call.request is None or self.call.request.IS_REPEATABLE

    def finish(self, result: _T | None, error: SnapdError | None = None) -> None:
        """Set the outcome."""
        self._result, self._error, self.is_done, self.frame = result, error, True, b""
        if self.on_done is not None:
            self.on_done()

    def outcome(self) -> _T:
        """Return the result, or raise the error. Only when done."""
        if self._error is not None:
            raise _another(self._error)
        assert self.is_done and self._result is not None
        return self._result


def _another(error: SnapdError) -> SnapdError:
    """Return an error like *error*, to be raised in its place.

    What is raised holds the frames that it passes, and they the errand. If the errand held it in turn, what
    they have at hand would stay until garbage is collected: the arena of a daemon that is gone, still mapped.
    """
    another = type(error).__new__(type(error), *error.args)
    another.__dict__.update(error.__dict__)
    another.__cause__, another.__suppress_context__ = error.__cause__, error.__suppress_context__
    return another


class Exchange:
    """The client's side of the protocol.

    Args:
        client: the name that hello gives.
        in_flight_max: calls that may be under way; the daemon's own bound holds as well.
        ended_max: ``SessionEnded`` pushes kept until they are taken; the oldest goes first.

    Attributes:
        hello: what the daemon said last; None before the first connection.
        reconnects: connections that reached hello, after the first.
        ended: how attempts ended that this connection had to do with.
        ended_dropped: pushes that *ended* had no room for.
        notified: hints of transfers, as many as *ended*; the oldest goes first.
        notified_dropped: pushes that *notified* had no room for.
        late_replies: replies to calls that had been given up.
        pushes: what a watch gets; None: not watching, they are ignored.
        new_epochs: hellos of another life of the daemon that the owner has not been told about.
    """

    def __init__(
        self, client: str = "", *, in_flight_max: int = IN_FLIGHT_MAX, ended_max: int = ENDED_MAX
    ) -> None:
        self.hello: HelloRep | None = None
        self.reconnects = 0
        self.ended: deque[SessionEnded] = deque(maxlen=ended_max)
        self.ended_dropped = 0
        self.notified: deque[TransferNotified] = deque(maxlen=ended_max)
        self.notified_dropped = 0
        self.late_replies = 0
        self.pushes: deque[WatchPush] | None = None
        self.new_epochs: list[HelloRep] = []
        self._phase = Phase.CLOSED
        self._client = client
        self._in_flight_max = in_flight_max
        self._errands: dict[int, Errand[Any]] = {}
        self._last_id = 0
        self._hello_id = 0
        self._opened_epoch = ""
        self._layouts: dict[tuple[int, str], Layout] = {}
        self._declaring: set[int] = set()
        self._splitter = FrameSplitter(HELLO_BYTES_MAX)
        self._last_words = ""
        self._output: deque[tuple[bytes, Errand[Any] | None]] = deque()
        self._written_bytes = 0

    # --- calls ---------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """The connection stands, has said hello, and takes requests."""
        return self._phase is Phase.OPEN

    @property
    def in_flight(self) -> int:
        """Calls under way."""
        return len(self._errands)

    @property
    def wants_connection(self) -> bool:
        """Something is to be sent, and there is no connection."""
        return self._phase is Phase.CLOSED and bool(self._errands)

    @property
    def wants_read(self) -> bool:
        """There is room for what the daemon may send."""
        return self.pushes is None or len(self.pushes) < PUSHES_MAX

    def add(self, call: Call[_T], deadline_s: float, now_s: float) -> Errand[_T]:
        """Take up a call. It may be done already: refused without asking.

        Raises:
            InvalidRequest: a value of the request cannot be encoded.
            LimitReached: too many calls are under way.
        """
        limit = min(self._in_flight_max, self.hello.requests_in_flight_max if self.hello else IN_FLIGHT_MAX)
        if len(self._errands) >= limit:
            for overdue in [t for t in self._errands.values() if t.deadline_s <= now_s]:
                self.expire(overdue)
            if len(self._errands) >= limit:
                raise LimitReached(f"{limit} calls are under way on this client; wait for some of them")
        self._last_id += 1
        errand = Errand(call, self._last_id, self._encode(call, self._last_id), deadline_s)
        self._errands[errand.id] = errand
        if self._phase is Phase.OPEN:
            self._place(errand)
        return errand

    def forget(self, errand: Errand[Any], error: SnapdError) -> None:
        """Give up a call; a reply that comes later is ignored."""
        if self._errands.pop(errand.id, None) is not None:
            errand.finish(None, error)

    def expire(self, errand: Errand[Any]) -> None:
        """Give up a call whose time is over."""
        did = "was sent and may have had its effect" if errand.may_have_acted else "was not sent"
        self.forget(errand, RequestTimeout(f"no reply in time to {errand.call!r}; it {did}"))

    @property
    def is_stuck(self) -> bool:
        """The connection never got past hello, and nobody waits for it any more."""
        return self._phase in (Phase.GREETING, Phase.DECLARING) and not self._errands

    def fail_all(self, error: SnapdError) -> None:
        """End the connection and every call with *error*."""
        self._reset()
        for errand in list(self._errands.values()):
            self.forget(errand, error)

    def unreachable(self, error: SnapdError) -> None:
        """Nobody could be connected to: end every call."""
        self._reset()
        for errand in list(self._errands.values()):
            if errand.may_have_acted:
                lost = ConnectionLost(f"the connection ended before the reply to {errand.call!r}; {error}")
                self.forget(errand, lost)
            else:
                self.forget(errand, error)

    # --- the connection ------------------------------------------------------------------------

    def opened(self) -> None:
        """A connection was made: greet."""
        self._reset()
        self._phase = Phase.GREETING
        self._last_id += 1
        self._hello_id = self._last_id
        self._output.append((encode_frame(HelloReq(id=self._hello_id, client=self._client)), None))

    def lost(self) -> None:
        """The connection has ended: decide for every call whether it is sent again."""
        where = "in the middle of a frame" if self._splitter.is_inside_frame else "before the reply"
        where += self._last_words
        self._reset()
        for errand in list(self._errands.values()):
            errand.losses += 1
            is_harmless = errand.is_repeatable or not errand.is_sent
            errand.is_sent = False
            if errand.losses >= CONNECTIONS_AN_ERRAND_MAX or not is_harmless:
                did = "it may have had its effect" if errand.may_have_acted else "it was not sent"
                self.forget(errand, ConnectionLost(f"the daemon hung up {where}; {errand.call!r}: {did}"))

    def next_output(self) -> memoryview | None:
        """Return what is to be written next; None: nothing."""
        while self._output:
            frame, errand = self._output[0]
            if self._written_bytes == 0 and errand is not None and errand.is_done:
                self._output.popleft()  # Nobody waits for it any more, and nothing of it is out.
                continue
            return memoryview(frame)[self._written_bytes :]
        return None

    def wrote(self, num_bytes: int) -> None:
        """Take note that so many bytes of ``next_output`` were written."""
        frame, errand = self._output[0]
        self._written_bytes += num_bytes
        if self._written_bytes == len(frame):
            self._output.popleft()
            self._written_bytes = 0
            if errand is not None:
                errand.is_sent = errand.may_have_acted = True

    def received(self, data: bytes) -> None:
        """Take in what the daemon sent.

        Raises:
            ProtocolError: it is not of this protocol.
            RequestError: the daemon refused hello.
        """
        for payload in self._splitter.feed(data):
            answer = decode_answer(payload)
            if isinstance(answer, SessionEnded):
                self.ended_dropped += len(self.ended) == self.ended.maxlen
                self.ended.append(answer)
            elif isinstance(answer, TransferNotified):
                self.notified_dropped += len(self.notified) == self.notified.maxlen
                self.notified.append(answer)
            elif isinstance(answer, Push):
                if self.pushes is not None:
                    self.pushes.append(answer)
            elif answer is not None:
                self._on_reply(answer)
        self._splitter.check()

    # --- inside --------------------------------------------------------------------------------

    def _reset(self) -> None:
        self._phase = Phase.CLOSED
        self._splitter = FrameSplitter(HELLO_BYTES_MAX)
        self._last_words = ""
        self._output.clear()
        self._written_bytes = 0
        self._declaring.clear()

    @staticmethod
    def _encode(call: Call[Any], request_id: int) -> bytes:
        if call.request is None:
            return b""
        try:
            return encode_frame(msgspec.structs.replace(call.request, id=request_id))
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(f"{call!r} cannot be sent: {error}") from None

    def _place(self, errand: Errand[Any]) -> None:
        """Put a call's frame in line, unless it can be answered here."""
        assert self.hello is not None
        request = errand.call.request
        payload_bytes = len(errand.frame) - LENGTH_BYTES
        if request is None:
            del self._errands[errand.id]
            errand.finish(self.hello)
        elif isinstance(request, HandleRequest) and request.epoch not in ("", self.hello.epoch):
            self.forget(
                errand,
                StaleHandle(f"the handle is of epoch {request.epoch}; the daemon's is {self.hello.epoch}"),
            )
        elif payload_bytes > self.hello.frame_bytes_max:
            # Sent all the same, it would cost the connection, and everybody's calls on it.
            self.forget(
                errand,
                InvalidRequest(
                    f"{errand.call!r} takes {payload_bytes} bytes; the daemon's frame_bytes_max is "
                    f"{self.hello.frame_bytes_max}"
                ),
            )
        else:
            self._output.append((errand.frame, errand))

    def _on_reply(self, reply: AnyReply) -> None:
        if self._phase is Phase.GREETING:
            self._on_hello(reply)
        elif reply.id in self._declaring:
            # A layout that is refused stays remembered: the next epoch may take it, and until
            # then whoever uses it is told layout-mismatch.
            if not isinstance(reply, DeclareLayoutRep | ErrorRep):
                raise ProtocolError(f"a {type(reply).__name__} answers a layout declared again")
            self._declaring.discard(reply.id)
            if not self._declaring:
                self._open()
        else:
            self._on_answer(reply)

    def _on_hello(self, reply: AnyReply) -> None:
        if reply.id not in (self._hello_id, 0):
            raise ProtocolError(f"the daemon answered request {reply.id} before hello")
        if isinstance(reply, ErrorRep):
            raise error_for(reply.reason, reply.detail, reply.retry_after_ms)
        if not isinstance(reply, HelloRep):
            raise ProtocolError(f"a {type(reply).__name__} answers hello")
        if reply.protocol != PROTOCOL_VERSION:
            raise ProtocolError(
                f"snapd {reply.version} speaks protocol {reply.protocol}, this client {PROTOCOL_VERSION}"
            )
        if self._splitter.is_inside_frame:
            raise ProtocolError("the daemon sent more than hello before anything was asked")
        self._splitter = FrameSplitter(reply.frame_bytes_max)
        self.reconnects += self.hello is not None
        self.hello = reply
        if reply.epoch != self._opened_epoch:
            for (rank, _), layout in self._layouts.items():
                self._last_id += 1
                self._declaring.add(self._last_id)
                request = DeclareLayoutReq(id=self._last_id, rank=rank, layout=layout)
                self._output.append((encode_frame(request), None))
        self._phase = Phase.DECLARING
        if not self._declaring:
            self._open()

    def _open(self) -> None:
        assert self.hello is not None
        self._phase = Phase.OPEN
        if self._opened_epoch not in ("", self.hello.epoch):
            self.new_epochs.append(self.hello)
        self._opened_epoch = self.hello.epoch
        for errand in list(self._errands.values()):
            self._place(errand)

    def _on_answer(self, reply: AnyReply) -> None:
        assert self.hello is not None
        if isinstance(reply, ErrorRep) and reply.id == 0:
            self._last_words = f" ({reply.reason}: {reply.detail})"  # It hangs up next.
            return
        errand = self._errands.get(reply.id)
        if errand is None and 0 < reply.id <= self._last_id:
            self.late_replies += 1
            return
        if errand is None or not errand.is_sent:
            raise ProtocolError(f"a {type(reply).__name__} answers request {reply.id}, which was not sent")
        if isinstance(reply, ErrorRep):
            self.forget(errand, error_for(reply.reason, reply.detail, reply.retry_after_ms))
            return
        if not isinstance(reply, errand.call.reply_type):
            raise ProtocolError(f"a {type(reply).__name__} answers {errand.call!r}")
        try:
            result = errand.call.convert(reply, self.hello)
        except RequestError as error:
            self.forget(errand, error)
            return
        if isinstance(errand.call.request, DeclareLayoutReq):
            self._remember(errand.call.request, result)
        del self._errands[errand.id]
        errand.finish(result)

    def _remember(self, request: DeclareLayoutReq, layout_fingerprint: str) -> None:
        key = (request.rank, layout_fingerprint)
        self._layouts.pop(key, None)
        self._layouts[key] = request.layout
        if len(self._layouts) > LAYOUTS_REMEMBERED_MAX:
            del self._layouts[next(iter(self._layouts))]
