"""Replies of one turn go out together, in order, and never more than is allowed to wait."""

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest

from snapd import wire as w
from snapd.compiling import is_compiled
from snapd.config import Config
from snapd.errors import Reason
from snapd.server import Connection, Server
from snapd.units import KIB

pytestmark = pytest.mark.skipif(is_compiled(), reason="what is compiled takes no service but its own")


class FakeTransport:
    """Takes everything, and remembers in which pieces it came."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.waiting_bytes = 0
        self.is_closed = False
        self.writes_before_close = -1

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def get_write_buffer_size(self) -> int:
        return self.waiting_bytes

    def set_write_buffer_limits(self, high: int) -> None:
        self.high_bytes = high

    def get_extra_info(self, name: str) -> None:
        raise OSError("there is no socket")

    def resume_reading(self) -> None: ...

    def pause_reading(self) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True
        self.writes_before_close = len(self.writes)


class Echo:
    """A service that answers each ping at once, with as long an epoch as the test wants."""

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch

    def take(self, caller: Connection, request: w.PingReq) -> None:
        caller.send(w.PingRep(id=request.id, epoch=self.epoch))


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def connected(
    loop: asyncio.AbstractEventLoop, epoch: str = "e", **config: int
) -> tuple[Connection, FakeTransport]:
    server = Server(Config(**config), loop, lambda _: None, lambda _: False)  # type: ignore[arg-type]
    server.service = Echo(epoch)  # type: ignore[assignment]
    connection, transport = server.new_connection(), FakeTransport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    # Without a socket the peer cannot be looked at, and it was turned away.
    connection._is_closed = transport.is_closed = False
    transport.writes.clear()
    return connection, transport


def pings(count: int) -> bytes:
    return b"".join(w.encode_frame(w.PingReq(id=number + 1)) for number in range(count))


def ids_of(writes: list[bytes]) -> list[int]:
    return [w.decode_answer(payload).id for payload in w.FrameSplitter(1 << 20).feed(b"".join(writes))]  # type: ignore[union-attr]


def test_the_replies_of_one_turn_are_one_write(loop: asyncio.AbstractEventLoop) -> None:
    connection, transport = connected(loop)
    connection.data_received(pings(20))
    assert len(transport.writes) == 1
    assert ids_of(transport.writes) == list(range(1, 21))


def test_whoever_asked_is_told_of_a_bug_also_when_the_answer_cannot_be_encoded(
    loop: asyncio.AbstractEventLoop,
) -> None:
    connection, transport = connected(loop, "\ud800")
    loop.set_exception_handler(lambda loop, context: None)
    connection._server.service.refused = Counter()  # type: ignore[union-attr]
    connection.data_received(pings(1))
    (payload,) = w.FrameSplitter(1 << 20).feed(b"".join(transport.writes))
    told = w.decode_answer(payload)
    assert isinstance(told, w.ErrorRep) and (told.id, told.reason) == (1, Reason.INTERNAL_ERROR)
    assert transport.is_closed and connection._last_chance is not None
    connection._last_chance.cancel()


def test_what_is_sent_outside_a_turn_is_written_at_once(loop: asyncio.AbstractEventLoop) -> None:
    connection, transport = connected(loop)
    connection.hint(w.TransferNotified(slab_handle=1, session_id="s", rank=0))
    assert len(transport.writes) == 1


def test_long_replies_are_written_before_too_much_is_gathered(loop: asyncio.AbstractEventLoop) -> None:
    connection, transport = connected(loop, "e" * 5 * KIB)
    connection.data_received(pings(20))
    assert ids_of(transport.writes) == list(range(1, 21))
    assert max(map(len, transport.writes)) < (16 + 6) * KIB


def test_where_nothing_may_wait_nothing_is_gathered(loop: asyncio.AbstractEventLoop) -> None:
    """One reply and no more fits reply_buffer_bytes_max."""
    limit = 4 << 20
    connection, transport = connected(loop, frame_bytes_max=limit, reply_buffer_bytes_max=limit)
    assert transport.high_bytes == 0
    connection.data_received(pings(5))
    assert len(transport.writes) == 5


def test_what_is_gathered_and_what_waits_leave_room_for_a_reply_of_any_size(
    loop: asyncio.AbstractEventLoop,
) -> None:
    for spare_bytes in (0, 10, 10_000, 100_000, 10_000_000):
        limit = 4 << 20
        connection, transport = connected(
            loop, frame_bytes_max=limit, reply_buffer_bytes_max=limit + spare_bytes
        )
        assert transport.high_bytes + connection._gathered_bytes_max <= spare_bytes


def test_a_refusal_of_bytes_comes_after_the_replies_before_it_and_before_the_end(
    loop: asyncio.AbstractEventLoop,
) -> None:
    connection, transport = connected(loop)
    connection.data_received(pings(3) + w.encode_frame(w.PingReq(id=4))[:4] + b"\xc1" * 30)
    assert ids_of(transport.writes) == [1, 2, 3, 0]
    assert transport.is_closed and transport.writes_before_close == len(transport.writes)
    if connection._last_chance is not None:
        connection._last_chance.cancel()
