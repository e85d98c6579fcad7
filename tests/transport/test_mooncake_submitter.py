"""Writes out of a GPU: a thread begins them, over an engine whose submit waits until the test lets it."""

import contextlib
import threading
from collections.abc import Iterator

import pytest
from fake_engine import FakeEngine
from target import wait_for
from test_mooncake_writer import (
    BASE,
    CANCELLED,
    DONE,
    RUNNING,
    SIZE_BYTES,
    SOURCE,
    Clock,
    contact,
    write,
    writes,
)

from snapd.errors import PeerResting, TransportError
from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport import mooncake_submitter
from snapd.transport.backoff import Backoff
from snapd.transport.base import Progress, TicketState, Write
from snapd.transport.mooncake_engine import WriteState
from snapd.transport.mooncake_engines import MooncakeEngines
from snapd.transport.mooncake_writer import MooncakeWriter

_current = threading.local()


@contextlib.contextmanager
def device() -> Iterator[None]:
    _current.device = 3
    yield
    _current.device = None


def device_here() -> int | None:
    return getattr(_current, "device", None)


class SlowEngine(FakeEngine):
    """Begins a write only when it may, as Mooncake does behind a GPU's default stream."""

    def __init__(self) -> None:
        super().__init__()
        self.may_submit = threading.Event()
        self.may_submit.set()
        self.error: Exception | None = None
        self.entered: list[Write] = []
        self.called_from: list[tuple[str, threading.Thread, int | None]] = []

    def _note(self, what: str) -> None:
        self.called_from.append((what, threading.current_thread(), device_here()))

    def open(self, segment_name: str, target_ptr: int) -> None:
        self._note("open")
        super().open(segment_name, target_ptr)

    def submit(self, segment_name: str, write: Write) -> int:
        self._note("submit")
        self.entered.append(write)
        assert self.may_submit.wait(20)
        if self.error is not None:
            raise self.error
        return super().submit(segment_name, write)

    def notify(self, segment_name: str, write: Write, text: str) -> None:
        self._note("notify")
        super().notify(segment_name, write, text)


@pytest.fixture
def engine() -> Iterator[SlowEngine]:
    slow = SlowEngine()
    yield slow
    slow.may_submit.set()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def writer(engine: SlowEngine, clock: Clock) -> MooncakeWriter:
    """A writer out of a GPU whose first contact is over."""
    engines = MooncakeEngines(
        MooncakeConfig(), make=lambda _: engine, backoff=Backoff(clock=clock), current=device
    )
    made = MooncakeWriter(engines, "p:1", "e1", BASE, SIZE_BYTES, clock=clock)
    made.register_source(SOURCE, SIZE_BYTES)
    contact(made)
    engine.entered.clear()
    return made


def final(writer: MooncakeWriter, ticket: int) -> Progress:
    found: list[Progress] = []
    wait_for(lambda: found.append(writer.poll(ticket)) or found[-1].is_final)
    return found[-1]


def test_nothing_waits_for_an_engine_that_does(writer: MooncakeWriter, engine: SlowEngine) -> None:
    engine.may_submit.clear()
    tickets = [writer.submit([write(number)]) for number in range(3)]
    assert [writer.poll(ticket) for ticket in tickets] == [RUNNING] * 3
    wait_for(lambda: engine.entered == [write(0)])
    assert engine.begun == []
    engine.may_submit.set()
    wait_for(lambda: len(engine.begun) == 3)
    assert engine.begun == [write(0), write(1), write(2)], "in order"
    engine.end()
    assert [final(writer, ticket) for ticket in tickets] == [DONE] * 3


def test_one_thread_begins_all_and_every_thread_has_the_device(
    writer: MooncakeWriter, engine: SlowEngine
) -> None:
    tickets = [writer.submit(writes(4)), writer.submit_notification(write(0), "text")]
    wait_for(lambda: len(engine.begun) == 4 and bool(engine.notified))
    engine.end()
    assert [final(writer, ticket) for ticket in tickets] == [DONE] * 2
    assert {what for what, _, _ in engine.called_from} == {"open", "submit", "notify"}
    assert {at for _, _, at in engine.called_from} == {3}
    submitted_from = {thread for what, thread, _ in engine.called_from if what == "submit"}
    assert len(submitted_from) == 1 and threading.current_thread() not in submitted_from


def test_on_the_host_no_thread_is_between(clock: Clock) -> None:
    engine = SlowEngine()
    engines = MooncakeEngines(MooncakeConfig(), make=lambda _: engine)
    writer = MooncakeWriter(engines, "p:1", "e1", BASE, SIZE_BYTES, clock=clock)
    writer.register_source(SOURCE, SIZE_BYTES)
    contact(writer)
    writer.submit([write(0)])
    assert engine.begun == [write(0)]
    assert engine.called_from[-1] == ("submit", threading.current_thread(), None)


def test_what_could_not_begin_is_the_tickets_failure_with_nothing_begun(
    writer: MooncakeWriter, engine: SlowEngine
) -> None:
    engine.takes_writes = False
    failed = final(writer, writer.submit([write(0)]))
    assert failed == Progress(TicketState.FAILED, is_drained=True, detail="a write could not begin")
    with pytest.raises(PeerResting):
        # The second in a row makes the peer rest.
        final(writer, writer.submit([write(0)]))
        writer.submit([write(0)])


def test_after_an_error_that_nobody_knows_a_write_may_land(
    writer: MooncakeWriter, engine: SlowEngine
) -> None:
    engine.error = RuntimeError("CUDA error")
    failed = final(writer, writer.submit([write(0)]))
    assert (failed.state, failed.is_drained) == (TicketState.FAILED, False)
    assert "CUDA error" in failed.detail and "may still land" in failed.detail
    engine.error = None
    ticket = writer.submit([write(0)])
    wait_for(lambda: len(engine.begun) == 1)
    engine.end()
    assert final(writer, ticket) == DONE, "the thread goes on"


def test_the_first_write_that_fails_keeps_those_after_it_from_beginning(
    writer: MooncakeWriter, engine: SlowEngine
) -> None:
    engine.may_submit.clear()
    ticket = writer.submit(writes(3))
    first = writer.submit([write(500)])
    wait_for(lambda: len(engine.entered) == 1)
    engine.error = TransportError("a write could not begin")
    # Those behind it are withdrawn before the thread comes to them.
    submissions = [flight.began for flight in writer._tickets[ticket].flying]
    writer._fail(writer._tickets[ticket], "a write failed", may_retry_once=True)
    assert writer.poll(ticket) == RUNNING
    assert [submission.is_withdrawn for submission in submissions] == [False, True, True]  # type: ignore[union-attr]
    engine.may_submit.set()
    assert final(writer, ticket).state is TicketState.FAILED
    assert final(writer, first).state is TicketState.FAILED
    assert engine.entered == [write(0), write(500)]


def test_a_cancel_keeps_from_beginning_what_the_thread_has_not_come_to(
    writer: MooncakeWriter, engine: SlowEngine
) -> None:
    engine.may_submit.clear()
    first, second = writer.submit([write(0)]), writer.submit([write(1)])
    wait_for(lambda: engine.entered == [write(0)])
    writer.cancel(first)
    writer.cancel(second)
    assert writer.poll(second) == CANCELLED
    assert writer.poll(first) == RUNNING, "nobody knows whether it has begun"
    engine.may_submit.set()
    wait_for(lambda: engine.begun == [write(0)])
    engine.end()
    assert final(writer, first) == DONE
    third = writer.submit([write(2)])
    wait_for(lambda: engine.begun == [write(0), write(2)])
    writer.cancel(third)
    assert engine.entered == [write(0), write(2)]


def test_sources_stay_until_the_thread_is_done_with_a_closed_writer(
    writer: MooncakeWriter, engine: SlowEngine
) -> None:
    engine.may_submit.clear()
    ticket = writer.submit([write(0)])
    wait_for(lambda: engine.entered == [write(0)])
    writer.close()
    assert engine.registered == {SOURCE: SIZE_BYTES}
    engine.may_submit.set()
    wait_for(lambda: len(engine.begun) == 1)
    engine.end(WriteState.DONE)
    assert final(writer, ticket) == DONE
    assert engine.registered == {}


def test_what_waits_for_the_thread_is_bounded(
    writer: MooncakeWriter, engine: SlowEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_submitter, "QUEUE_MAX", 2)
    engine.may_submit.clear()
    first = writer.submit([write(0)])
    wait_for(lambda: len(engine.entered) == 1)
    rest = writer.submit(writes(5))
    assert writer.poll(rest) == RUNNING
    assert len(writer._tickets[rest].waiting) == 3
    engine.may_submit.set()
    wait_for(lambda: writer.poll(rest) == RUNNING and len(engine.begun) == 6)
    engine.end()
    assert [final(writer, ticket) for ticket in (first, rest)] == [DONE, DONE]
