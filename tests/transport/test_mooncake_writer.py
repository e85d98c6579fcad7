"""D's writer over an engine that does what the test says."""

from collections.abc import Callable

import pytest
from fake_engine import FakeEngine
from target import wait_for
from test_backoff import Clock

from snapd.errors import PeerResting, TransportError
from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport import mooncake_writer
from snapd.transport.backoff import Backoff
from snapd.transport.base import Progress, TicketState, Write
from snapd.transport.mooncake_engine import WriteState
from snapd.transport.mooncake_engines import MooncakeEngines
from snapd.transport.mooncake_writer import IN_FLIGHT_WRITES_MAX, NOTIFICATIONS_MAX, MooncakeWriter

BASE = 1 << 30
SIZE_BYTES = 1 << 20
SOURCE = 1 << 44
RUNNING = Progress(TicketState.RUNNING)
DONE = Progress(TicketState.DONE, is_drained=True)
CANCELLED = Progress(TicketState.CANCELLED, is_drained=True)
MakeWriter = Callable[..., MooncakeWriter]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def engines(engine: FakeEngine, clock: Clock) -> MooncakeEngines:
    made = [engine]  # The first one; the others are nobody's.
    return MooncakeEngines(
        MooncakeConfig(),
        make=lambda config: made.pop() if made else FakeEngine(config),
        backoff=Backoff(clock=clock),
    )


@pytest.fixture
def new_writer(engines: MooncakeEngines, clock: Clock) -> MakeWriter:
    def make(segment_name: str = "p:1", epoch: str = "e1", **settings: int) -> MooncakeWriter:
        writer = MooncakeWriter(engines, segment_name, epoch, BASE, SIZE_BYTES, clock=clock, **settings)
        writer.register_source(SOURCE, SIZE_BYTES)
        return writer

    return make


@pytest.fixture
def writer(new_writer: MakeWriter) -> MooncakeWriter:
    return new_writer(in_flight_bytes_max=1000)


@pytest.fixture
def ready(writer: MooncakeWriter) -> MooncakeWriter:
    """A writer whose first contact is over."""
    return contact(writer)


def contact(writer: MooncakeWriter) -> MooncakeWriter:
    engine = writer._engine
    assert isinstance(engine, FakeEngine)
    ticket = writer.submit([write(0, 1)])
    wait_for(lambda: writer.poll(ticket) is not None and bool(engine.flying))
    engine.end()
    assert writer.poll(ticket) == DONE
    engine.begun.clear()
    return writer


def write(offset: int, size_bytes: int = 100) -> Write:
    return Write(SOURCE + offset, BASE + offset, size_bytes)


def writes(count: int, size_bytes: int = 100) -> list[Write]:
    return [write(number * size_bytes, size_bytes) for number in range(count)]


# --- the first contact -------------------------------------------------------------------------


def test_submit_and_poll_do_not_wait_for_the_first_contact(
    writer: MooncakeWriter, engine: FakeEngine
) -> None:
    engine.may_open.clear()
    ticket = writer.submit(writes(3))
    assert writer.poll(ticket) == RUNNING
    assert engine.begun == []
    engine.may_open.set()
    wait_for(lambda: writer.poll(ticket) == RUNNING and engine.begun == writes(3))
    assert engine.opened == [("p:1", BASE)]


def test_a_first_contact_that_fails_fails_what_waits_with_nothing_begun(
    writer: MooncakeWriter, engine: FakeEngine
) -> None:
    engine.open_error = TransportError("nobody answers at p:1")
    engine.may_open.clear()
    tickets = [writer.submit(writes(3)) for _ in range(2)]
    engine.may_open.set()
    for ticket in tickets:
        found: list[Progress] = []
        wait_for(lambda ticket=ticket, found=found: found.append(writer.poll(ticket)) or found[-1].is_final)
        assert found[-1] == Progress(TicketState.FAILED, is_drained=True, detail="nobody answers at p:1")
    assert engine.begun == []
    assert len(engine.opened) == 1
    with pytest.raises(PeerResting) as caught:
        writer.submit(writes(1))
    assert caught.value.retry_after_ms == 100, "two tickets of one contact are one failure"


def test_a_contact_that_failed_unnoticed_is_noticed_by_the_next_submit(
    writer: MooncakeWriter, engine: FakeEngine
) -> None:
    engine.open_error = TransportError("nobody")
    engine.may_open.clear()
    ticket = writer.submit(writes(1))
    opening = writer._opening
    assert opening is not None
    engine.may_open.set()
    wait_for(lambda: opening.is_over)
    with pytest.raises(PeerResting):
        writer.submit(writes(1))
    assert writer.poll(ticket).detail == "nobody"


def test_a_contact_that_failed_after_its_tickets_is_no_failure_of_later_ones(
    writer: MooncakeWriter, engine: FakeEngine, clock: Clock
) -> None:
    engine.open_error = TransportError("nobody")
    engine.may_open.clear()
    ticket = writer.submit(writes(1))
    opening = writer._opening
    assert opening is not None
    clock.now_ms += 10_000
    assert writer.poll(ticket).state is TicketState.FAILED
    engine.may_open.set()
    wait_for(lambda: opening.is_over)
    clock.now_ms += 100
    engine.open_error = None
    again = writer.submit(writes(1))
    wait_for(lambda: writer.poll(again) == RUNNING and engine.begun == writes(1))


def test_a_cancelled_ticket_does_not_fail_with_the_contact(
    writer: MooncakeWriter, engine: FakeEngine
) -> None:
    engine.open_error = TransportError("nobody")
    engine.may_open.clear()
    cancelled, ticket = writer.submit(writes(1)), writer.submit(writes(1))
    writer.cancel(cancelled)
    engine.may_open.set()
    wait_for(lambda: writer.poll(ticket).is_final)
    assert writer.poll(cancelled) == CANCELLED


def test_an_unexpected_error_of_the_first_contact_is_told_as_well(
    writer: MooncakeWriter, engine: FakeEngine
) -> None:
    engine.open_error = MemoryError()
    ticket = writer.submit(writes(1))
    found: list[Progress] = []
    wait_for(lambda: found.append(writer.poll(ticket)) or found[-1].is_final)
    assert found[-1] == Progress(TicketState.FAILED, is_drained=True, detail="MemoryError")


def test_after_the_rest_the_contact_is_tried_anew(
    writer: MooncakeWriter, engine: FakeEngine, clock: Clock
) -> None:
    engine.open_error = TransportError("nobody")
    ticket = writer.submit(writes(1))
    wait_for(lambda: writer.poll(ticket).is_final)
    clock.now_ms += 100
    engine.open_error = None
    again = writer.submit(writes(1))
    wait_for(lambda: writer.poll(again) == RUNNING and engine.begun == writes(1))
    assert len(engine.opened) == 2


def test_a_ticket_waits_for_the_contact_no_longer_than_it_should(
    writer: MooncakeWriter, engine: FakeEngine, clock: Clock
) -> None:
    engine.may_open.clear()
    early = writer.submit(writes(1))
    clock.now_ms += 9_999
    late = writer.submit(writes(1))
    assert writer.poll(early) == RUNNING
    clock.now_ms += 1
    progress = writer.poll(early)
    assert (progress.state, progress.is_drained) == (TicketState.FAILED, True)
    assert progress.detail == "p:1 did not answer within 10 s"
    assert writer.poll(late) == RUNNING, "its own time has not passed"
    with pytest.raises(PeerResting):
        writer.submit(writes(1))
    # The contact comes about after all: what was told to have failed never begins.
    engine.may_open.set()
    wait_for(lambda: writer.poll(late) == RUNNING and bool(engine.begun))
    assert engine.begun == writes(1)


def test_one_contact_with_a_peer_is_under_way_at_a_time(
    new_writer: MakeWriter, engine: FakeEngine, clock: Clock
) -> None:
    engine.may_open.clear()
    writers = [new_writer(), new_writer()]
    for _ in range(3):
        for writer in writers:
            ticket = writer.submit(writes(1))
            clock.now_ms += 10_000
            assert writer.poll(ticket).state is TicketState.FAILED
            clock.now_ms += 30_000
    wait_for(lambda: bool(engine.opened))
    assert len(engine.opened) == 1
    engine.may_open.set()


def test_a_peer_that_does_not_answer_keeps_no_other_waiting(
    new_writer: MakeWriter, engine: FakeEngine
) -> None:
    other = contact(new_writer("q:1"))
    engine.may_open.clear()
    new_writer("p:1").submit(writes(1))
    ticket = other.submit(writes(1))
    engine.end()
    assert other.poll(ticket) == DONE
    engine.may_open.set()


# --- writes under way --------------------------------------------------------------------------


def test_writes_begin_in_order_as_bytes_under_way_allow(ready: MooncakeWriter, engine: FakeEngine) -> None:
    first, second = ready.submit(writes(8)), ready.submit(writes(8))
    assert engine.begun == writes(8) + writes(2), "1,000 bytes, of both tickets"
    assert ready.poll(second) == RUNNING
    engine.end(count=3)
    assert ready.poll(second) == RUNNING
    assert engine.begun == writes(8) + writes(5)
    engine.end()
    assert ready.poll(first) == DONE
    engine.end()
    assert ready.poll(second) == DONE
    assert engine.begun == writes(8) + writes(8)


def test_a_write_larger_than_the_bound_goes_alone(ready: MooncakeWriter, engine: FakeEngine) -> None:
    ticket = ready.submit([write(0, 100), write(100, 5000), write(5100, 100)])
    seen = []
    for _ in range(3):
        seen.append([flight.size_bytes for flight in engine.flying.values()])
        engine.end()
        ready.poll(ticket)
    assert seen == [[100], [5000], [100]]


def test_only_so_many_writes_are_under_way_however_small(new_writer: MakeWriter, engine: FakeEngine) -> None:
    writer = contact(new_writer())
    writer.submit(writes(IN_FLIGHT_WRITES_MAX + 5, 1))
    assert len(engine.flying) == IN_FLIGHT_WRITES_MAX


def test_a_ticket_fails_once_all_its_writes_are_final_and_begins_none_meanwhile(
    ready: MooncakeWriter, engine: FakeEngine
) -> None:
    ticket = ready.submit(writes(20))
    engine.end(WriteState.FAILED, count=1)
    assert ready.poll(ticket) == RUNNING, "its siblings may still be written"
    assert len(engine.begun) == 10
    engine.end(count=8)
    assert ready.poll(ticket) == RUNNING
    engine.end()
    progress = ready.poll(ticket)
    assert (progress.state, progress.is_drained) == (TicketState.FAILED, False)
    assert progress.detail == "a write to p:1 failed; it may still land"
    assert len(engine.begun) == 10


def test_a_write_that_cannot_begin_fails_its_ticket_and_what_landed_is_drained(
    ready: MooncakeWriter, engine: FakeEngine
) -> None:
    ticket = ready.submit(writes(20))
    engine.takes_writes = False
    engine.end(count=1)
    assert ready.poll(ticket) == RUNNING
    engine.end()
    assert ready.poll(ticket) == Progress(
        TicketState.FAILED, is_drained=True, detail="a write could not begin"
    )
    assert len(engine.begun) == 10


def test_the_first_failure_of_a_ticket_is_told(ready: MooncakeWriter, engine: FakeEngine) -> None:
    ticket = ready.submit(writes(20))
    engine.takes_writes = False
    engine.end(count=1)
    assert ready.poll(ticket) == RUNNING
    engine.end(WriteState.FAILED)
    assert ready.poll(ticket) == Progress(TicketState.FAILED, detail="a write could not begin")


def test_another_ticket_goes_on_when_one_fails(ready: MooncakeWriter, engine: FakeEngine) -> None:
    bad, good = ready.submit(writes(1)), ready.submit(writes(1))
    engine.end(WriteState.FAILED, count=1)
    engine.end()
    assert ready.poll(good) == DONE
    assert ready.poll(bad).state is TicketState.FAILED


def test_empty_writes_are_done_without_the_engine(ready: MooncakeWriter, engine: FakeEngine) -> None:
    assert ready.poll(ready.submit([write(0, 0), write(SIZE_BYTES, 0)])) == DONE
    assert engine.begun == []


def test_a_cancelled_ticket_ends_when_what_has_begun_has(ready: MooncakeWriter, engine: FakeEngine) -> None:
    ticket = ready.submit(writes(20))
    ready.cancel(ticket)
    assert ready.poll(ticket) == RUNNING
    engine.end()
    assert ready.poll(ticket) == CANCELLED
    assert len(engine.begun) == 10


def test_a_cancelled_ticket_with_a_write_that_failed_is_not_drained(
    ready: MooncakeWriter, engine: FakeEngine
) -> None:
    ticket = ready.submit(writes(20))
    ready.cancel(ticket)
    engine.end(WriteState.FAILED, count=1)
    engine.end()
    progress = ready.poll(ticket)
    assert (progress.state, progress.is_drained) == (TicketState.FAILED, False)


def test_a_ticket_cancelled_before_the_contact_begins_nothing(
    writer: MooncakeWriter, engine: FakeEngine
) -> None:
    engine.may_open.clear()
    ticket = writer.submit(writes(1))
    writer.cancel(ticket)
    assert writer.poll(ticket) == CANCELLED
    engine.may_open.set()
    wait_for(lambda: engine.is_open("p:1"))
    assert writer.poll(writer.submit([])) == DONE
    assert engine.begun == []


def test_only_so_many_tickets_are_open(ready: MooncakeWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_writer, "TICKETS_MAX", 3)
    tickets = [ready.submit([]) for _ in range(3)]
    with pytest.raises(TransportError, match="3 tickets are open"):
        ready.submit([])
    ready.poll(tickets[0])
    ready.submit([])


# --- a peer that fails -------------------------------------------------------------------------


def fail_once(writer: MooncakeWriter, engine: FakeEngine) -> None:
    ticket = writer.submit(writes(1))
    engine.end(WriteState.FAILED)
    assert writer.poll(ticket).state is TicketState.FAILED


def test_a_failed_write_may_be_tried_again_at_once_and_the_second_failure_rests(
    ready: MooncakeWriter, engine: FakeEngine, clock: Clock
) -> None:
    fail_once(ready, engine)
    fail_once(ready, engine)
    with pytest.raises(PeerResting) as caught:
        ready.submit(writes(1))
    assert caught.value.retry_after_ms == 100
    clock.now_ms += 100
    fail_once(ready, engine)
    with pytest.raises(PeerResting) as caught:
        ready.submit(writes(1))
    assert caught.value.retry_after_ms == 200


def test_tickets_that_fail_together_are_one_failure(ready: MooncakeWriter, engine: FakeEngine) -> None:
    tickets = [ready.submit(writes(1)) for _ in range(5)]
    engine.end(WriteState.FAILED)
    for ticket in tickets:
        assert ready.poll(ticket).state is TicketState.FAILED
    ready.submit(writes(1))


def test_a_write_that_cannot_begin_is_a_failure_of_the_peer(
    ready: MooncakeWriter, engine: FakeEngine
) -> None:
    engine.takes_writes = False
    for _ in range(2):
        assert ready.poll(ready.submit(writes(1))).state is TicketState.FAILED
    with pytest.raises(PeerResting):
        ready.submit(writes(1))


def test_a_success_makes_failures_forgotten(ready: MooncakeWriter, engine: FakeEngine) -> None:
    fail_once(ready, engine)
    ticket = ready.submit(writes(1))
    engine.end()
    assert ready.poll(ticket) == DONE
    fail_once(ready, engine)
    ready.submit(writes(1))


def test_an_empty_set_is_no_success_of_the_peer(ready: MooncakeWriter, engine: FakeEngine) -> None:
    fail_once(ready, engine)
    assert ready.poll(ready.submit([])) == DONE
    fail_once(ready, engine)
    with pytest.raises(PeerResting):
        ready.submit([])


def test_a_rest_is_for_one_life_of_a_peer(
    ready: MooncakeWriter, engine: FakeEngine, new_writer: MakeWriter
) -> None:
    for _ in range(2):
        fail_once(ready, engine)
    with pytest.raises(PeerResting):
        new_writer("p:1").submit(writes(1))
    new_writer("q:1").submit(writes(1))
    new_writer("p:1", "e2").submit(writes(1))


# --- notifications -----------------------------------------------------------------------------


def test_a_notification_does_not_wait_and_is_done_when_it_was_sent(
    ready: MooncakeWriter, engine: FakeEngine
) -> None:
    engine.may_notify.clear()
    ticket = ready.submit_notification(write(0, 8), "text")
    assert ready.poll(ticket) == RUNNING
    engine.may_notify.set()
    found: list[Progress] = []
    wait_for(lambda: found.append(ready.poll(ticket)) or found[-1].is_final)
    assert found[-1] == DONE
    assert engine.notified == [("p:1", write(0, 8), "text")]


@pytest.mark.parametrize("error", [TransportError("it failed"), MemoryError("it failed")])
def test_a_notification_that_failed_is_not_drained(
    ready: MooncakeWriter, engine: FakeEngine, error: Exception
) -> None:
    engine.notify_error = error
    ticket = ready.submit_notification(write(0, 8), "text")
    found: list[Progress] = []
    wait_for(lambda: found.append(ready.poll(ticket)) or found[-1].is_final)
    assert found[-1] == Progress(TicketState.FAILED, detail="it failed; it may still land")


def test_a_notification_is_checked_as_a_write_is(ready: MooncakeWriter) -> None:
    with pytest.raises(TransportError, match="outside"):
        ready.submit_notification(write(SIZE_BYTES, 8), "text")
    with pytest.raises(TransportError, match="not registered"):
        ready.submit_notification(Write(SOURCE - 1, BASE, 8), "text")


def test_a_notification_is_not_sent_once_the_contact_took_too_long(
    writer: MooncakeWriter, engine: FakeEngine, clock: Clock
) -> None:
    engine.may_open.clear()
    ticket = writer.submit_notification(write(0, 8), "text")
    clock.now_ms += 10_000
    progress = writer.poll(ticket)
    assert (progress.state, progress.is_drained) == (TicketState.FAILED, True)
    engine.may_open.set()
    wait_for(lambda: engine.is_open("p:1"))
    clock.now_ms += 100
    assert writer.poll(writer.submit([])) == DONE
    assert engine.notified == []


def test_only_so_many_notifications_are_under_way(ready: MooncakeWriter, engine: FakeEngine) -> None:
    engine.may_notify.clear()
    tickets = [ready.submit_notification(write(0, 8), str(n)) for n in range(NOTIFICATIONS_MAX + 3)]
    assert sum(len(ticket.flying) for ticket in ready._tickets.values()) == NOTIFICATIONS_MAX
    engine.may_notify.set()
    for ticket in tickets:
        wait_for(lambda ticket=ticket: ready.poll(ticket) == DONE)
    assert sorted(int(text) for *_, text in engine.notified) == list(range(NOTIFICATIONS_MAX + 3))


# --- close -------------------------------------------------------------------------------------


def test_close_gives_sources_back_when_nothing_is_under_way(
    ready: MooncakeWriter, engine: FakeEngine, engines: MooncakeEngines
) -> None:
    assert engine.registered
    ready.close()
    assert engine.registered == {}
    ready.close()
    with pytest.raises(TransportError, match="closed"):
        ready.register_source(SOURCE, 1)
    assert not engines.covers(SOURCE, 1)


def test_sources_stay_until_the_last_write_is_final(ready: MooncakeWriter, engine: FakeEngine) -> None:
    ticket = ready.submit(writes(20))
    ready.close()
    assert ready.poll(ticket) == RUNNING
    assert engine.registered
    engine.end()
    assert ready.poll(ticket) == CANCELLED
    assert engine.registered == {}
    assert len(engine.begun) == 10


def test_sources_are_given_back_once(
    ready: MooncakeWriter, engine: FakeEngine, engines: MooncakeEngines, new_writer: MakeWriter
) -> None:
    new_writer()
    ticket = ready.submit([])
    ready.close()
    assert ready.poll(ticket) == DONE
    assert engine.registered, "the other writer has it"
    assert [sum(use.writers.values()) for use in engines._uses] == [1]


def test_a_closed_writer_that_nobody_polls_is_settled_by_the_engines(
    ready: MooncakeWriter, engine: FakeEngine, engines: MooncakeEngines
) -> None:
    ready.submit(writes(5))
    ready.close()
    engines.settle()
    assert engine.registered
    engine.end()
    engines.register_source(SOURCE + 5, 7)
    assert engine.registered == {SOURCE + 5: 7}


def test_a_source_that_cannot_be_given_back_does_not_keep_the_others(
    ready: MooncakeWriter, engine: FakeEngine, engines: MooncakeEngines
) -> None:
    ready.register_source(1 << 45, 64)
    del engine.registered[SOURCE]
    ready.close()
    assert engine.registered == {}
    assert [use.writers for use in engines._uses] == [{}]


def test_a_writer_whose_engines_were_closed_says_so(ready: MooncakeWriter, engines: MooncakeEngines) -> None:
    engines.close()
    with pytest.raises(TransportError):
        ready.submit(writes(1))
    ready.close()
