"""What is logged in a turn of the loop waits until the turn's replies are out, and no longer."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from snapd import eventlog
from snapd import wire as w
from snapd.compiling import is_compiled
from snapd.config import Config
from snapd.core import records as r
from snapd.eventlog import TurnRecords
from snapd.server import Connection, Server


def record(number: int) -> r.Record:
    return r.DaemonStopped(at_ns=number, reason="SIGTERM", attempts=number, attempts_ok=0)


class Log:
    """Keeps what it is given, each time for itself."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def write_all(self, records: Sequence[r.Record]) -> None:
        self.batches.append([record.at_ns for record in records])


@pytest.fixture
def log() -> Log:
    return Log()


def test_outside_a_turn_a_record_goes_to_the_log_at_once(log: Log) -> None:
    records = TurnRecords(log)
    records.write(record(1))
    records.write(record(2))
    assert log.batches == [[1], [2]]


def test_in_a_turn_records_wait_for_its_end_in_order(log: Log) -> None:
    records = TurnRecords(log)
    records.hold()
    for number in (1, 2, 3):
        records.write(record(number))
    assert log.batches == []
    records.let_go()
    assert log.batches == [[1, 2, 3]]
    records.write(record(4))
    assert log.batches == [[1, 2, 3], [4]]


def test_a_turn_inside_another_ends_with_the_outer_one(log: Log) -> None:
    records = TurnRecords(log)
    records.hold()
    records.hold()
    records.write(record(1))
    records.let_go()
    assert log.batches == []
    records.let_go()
    assert log.batches == [[1]]


def test_a_turn_without_records_says_nothing(log: Log) -> None:
    records = TurnRecords(log)
    records.hold()
    records.let_go()
    records.flush()
    assert log.batches == []


def test_however_many_come_in_a_turn_only_so_many_wait(log: Log) -> None:
    """An eviction can end very many attempts in one turn."""
    records = TurnRecords(log)
    records.hold()
    for number in range(3 * eventlog._HELD_MAX + 7):
        records.write(record(number))
    assert [len(batch) for batch in log.batches] == [eventlog._HELD_MAX] * 3
    records.let_go()
    assert [number for batch in log.batches for number in batch] == list(range(3 * eventlog._HELD_MAX + 7))


def test_what_waits_can_be_asked_for(log: Log) -> None:
    records = TurnRecords(log)
    records.hold()
    records.write(record(1))
    records.flush()
    assert log.batches == [[1]]
    records.let_go()
    assert log.batches == [[1]]


class Transport:
    """Takes everything."""

    def __init__(self, order: list[str]) -> None:
        self._order = order

    def write(self, data: bytes) -> None:
        self._order.append("reply")

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_extra_info(self, name: str) -> None:
        raise OSError("there is no socket")

    def resume_reading(self) -> None: ...

    def pause_reading(self) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


class Service:
    """Logs something for each request, and then answers it; or fails after it was logged."""

    def __init__(self, records: TurnRecords) -> None:
        self._records = records
        self.error: BaseException | None = None

    def take(self, caller: Connection, request: w.PingReq) -> None:
        self._records.write(record(request.id))
        if self.error is not None:
            raise self.error
        caller.send(w.PingRep(id=request.id, epoch="e"))


class Shell:
    """A connection whose transport and log note what comes when."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.order: list[str] = []
        server = Server(Config(), loop, lambda _: None, lambda _: False)  # type: ignore[arg-type]
        server.records = records = TurnRecords(self)
        self.service: Any = Service(records)
        server.service = self.service
        self.connection = server.new_connection()
        self.connection.connection_made(Transport(self.order))  # type: ignore[arg-type]
        # Without a socket the peer cannot be looked at, and it was turned away.
        self.connection._is_closed = False
        self.order.clear()

    def write_all(self, records: Sequence[r.Record]) -> None:
        self.order += [f"line {record.at_ns}" for record in records]


@pytest.fixture
def shell() -> Iterator[Shell]:
    loop = asyncio.new_event_loop()
    yield Shell(loop)
    loop.close()


replaces_the_service = pytest.mark.skipif(
    is_compiled(), reason="what is compiled takes no service but its own"
)


@replaces_the_service
def test_the_replies_of_a_turn_are_out_before_its_lines_are_made(shell: Shell) -> None:
    shell.connection.data_received(w.encode_frame(w.PingReq(id=1)) + w.encode_frame(w.PingReq(id=2)))
    assert shell.order == ["reply", "line 1", "line 2"]
    shell.connection.data_received(w.encode_frame(w.PingReq(id=3)))
    assert shell.order[3:] == ["reply", "line 3"]


@replaces_the_service
def test_a_turn_that_breaks_off_leaves_nothing_unlogged(shell: Shell) -> None:
    shell.service.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        shell.connection.data_received(w.encode_frame(w.PingReq(id=1)))
    assert shell.order == ["line 1"]
