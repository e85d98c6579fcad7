"""Feeds: two threads of a writer write what one gives, over an engine that does what the test says."""

import contextlib
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import pytest
from target import wait_for
from test_mooncake_submitter import device, device_here, final
from test_mooncake_writer import BASE, CANCELLED, DONE, RUNNING, SIZE_BYTES, SOURCE, Clock, write, writes

from snapd.errors import TransportError
from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport import mooncake_feed
from snapd.transport.backoff import Backoff
from snapd.transport.base import Progress, TicketState, Write
from snapd.transport.mooncake_calls import Calls
from snapd.transport.mooncake_engines import MooncakeEngines
from snapd.transport.mooncake_writer import MooncakeWriter
from snapd.transport.pauses import pause_s
from tests.transport.copying_engine import CopyingEngine, Ending


class ListFeed:
    """Gives the writes of a list, while it may."""

    def __init__(self, given: Sequence[Write]) -> None:
        self.left = deque(given)
        self.may_give = threading.Event()
        self.may_give.set()
        self.asked: list[tuple[threading.Thread, int | None]] = []
        self.given: list[Write] = []
        self.was_over: list[Write] = []
        self.may_land: list[Write] = []
        self.error: Exception | None = None
        self.is_stopped = False
        self.has_ended = threading.Event()

    def next(self) -> Write | None:
        self.asked.append((threading.current_thread(), device_here()))
        assert self.may_give.wait(20)
        if self.error is not None:
            raise self.error
        with contextlib.suppress(IndexError):
            # Also once it is stopped: whoever asks must not begin it then.
            self.given.append(self.left.popleft())
            return self.given[-1]
        return None

    def over(self, write: Write, *, may_land: bool) -> None:
        self.was_over.append(write)
        if may_land:
            self.may_land.append(write)

    def stop(self) -> None:
        self.is_stopped = True
        self.left.clear()

    def ended(self) -> None:
        assert not self.has_ended.is_set()
        self.has_ended.set()

    @property
    def is_back(self) -> bool:
        """Whether every write that was given is over."""
        return sorted(self.was_over, key=str) == sorted(self.given, key=str)


@pytest.fixture
def engine() -> Iterator[CopyingEngine]:
    made = CopyingEngine()
    yield made
    made.unstick()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def writer(engine: CopyingEngine, clock: Clock) -> MooncakeWriter:
    """A writer out of a GPU."""
    engines = MooncakeEngines(
        MooncakeConfig(), make=lambda _: engine, backoff=Backoff(clock=clock), current=device
    )
    made = MooncakeWriter(engines, "p:1", "e1", BASE, SIZE_BYTES, clock=clock, in_flight_bytes_max=250)
    made.register_source(SOURCE, SIZE_BYTES)
    return made


def test_a_ticket_is_done_when_every_write_of_its_feed_is(
    writer: MooncakeWriter, engine: CopyingEngine
) -> None:
    feed = ListFeed(writes(20))
    ticket = writer.submit_feed(feed)
    assert final(writer, ticket) == DONE
    assert feed.has_ended.wait(20) and feed.is_back and not feed.is_stopped
    assert sorted(engine.begun, key=str) == sorted(writes(20), key=str)
    with pytest.raises(TransportError, match="no ticket"):
        writer.poll(ticket)


def test_two_threads_with_the_device_write_and_no_more(writer: MooncakeWriter, engine: CopyingEngine) -> None:
    engine.plan.extend(["stuck"] * 4)
    feed = ListFeed(writes(4))
    ticket = writer.submit_feed(feed)
    wait_for(lambda: bool(writer.poll(ticket)) and len(engine.stuck) == 2)
    assert {at for _, at in feed.asked} == {3}
    assert len({thread for thread, _ in feed.asked}) == 2
    assert threading.current_thread() not in {thread for thread, _ in feed.asked}
    assert (len(feed.given), feed.was_over) == (2, [])
    engine.unstick(count=1)
    wait_for(lambda: len(engine.begun) == 3)
    assert len(feed.was_over) == 1
    engine.plan.clear()
    engine.unstick()
    assert final(writer, ticket) == DONE


def test_what_a_feed_has_under_way_counts_for_other_tickets(
    writer: MooncakeWriter, engine: CopyingEngine
) -> None:
    engine.plan.extend(["stuck"] * 2)
    ticket = writer.submit_feed(ListFeed(writes(2)))
    wait_for(lambda: bool(writer.poll(ticket)) and len(engine.stuck) == 2)
    assert final(writer, writer.submit_notification(write(500), "a commit")) == DONE, "it does not wait"
    other = writer.submit([write(500)])
    assert writer.poll(other) == RUNNING
    assert writer._tickets[other].waiting
    engine.unstick()
    assert final(writer, other) == DONE
    assert final(writer, ticket) == DONE


@pytest.mark.parametrize(
    ("ending", "is_drained", "words"),
    [
        ("fails", False, "p:1 failed; it may still land"),
        ("unknown", False, "CUDA error; it may still land"),
        ("refused", True, "could not begin"),
    ],
)
def test_the_first_write_that_fails_is_the_last_that_begins(
    writer: MooncakeWriter, engine: CopyingEngine, ending: Ending, is_drained: bool, words: str
) -> None:
    engine.plan.extend(["stuck", "lands", ending])
    feed = ListFeed(writes(10))
    ticket = writer.submit_feed(feed)
    wait_for(lambda: bool(writer.poll(ticket)) and feed.is_stopped)
    assert writer.poll(ticket) == RUNNING, "one is under way"
    engine.unstick()
    failed = final(writer, ticket)
    assert (failed.state, failed.is_drained) == (TicketState.FAILED, is_drained)
    assert failed.detail.endswith(words)
    wait_for(lambda: feed.is_back)
    assert len(feed.may_land) == (0 if is_drained else 1)
    assert len(engine.begun) == (2 if ending == "refused" else 3)


def test_a_failure_after_the_first_does_not_prove_that_it_was_drained(
    writer: MooncakeWriter, engine: CopyingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = writes(2)
    may_refuse = threading.Event()
    submit = engine.submit

    def refuse(segment_name: str, write: Write) -> int:
        if write == second:
            assert may_refuse.wait(20)
            raise TransportError("a write could not begin")
        return submit(segment_name, write)

    monkeypatch.setattr(engine, "submit", refuse)
    engine.plan.append("fails")
    feed = ListFeed([second, first])
    ticket = writer.submit_feed(feed)
    wait_for(lambda: writer.poll(ticket) == RUNNING and feed.was_over == [first])
    may_refuse.set()
    failed = final(writer, ticket)
    assert not failed.is_drained and "p:1 failed; it may still land" in failed.detail


def test_a_feed_that_is_done_is_not_stopped(writer: MooncakeWriter, engine: CopyingEngine) -> None:
    feed = ListFeed(writes(3))
    ticket = writer.submit_feed(feed)
    wait_for(lambda: bool(writer._tickets[ticket].flying or writer._advance()))  # type: ignore[func-returns-value]
    assert feed.has_ended.wait(20)
    writer.cancel(ticket)
    assert writer.poll(ticket) == DONE and not feed.is_stopped


def test_a_write_that_a_check_knows_nothing_of_may_land(
    writer: MooncakeWriter, engine: CopyingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(batch_id: int) -> None:
        raise RuntimeError("nobody knows")

    monkeypatch.setattr(engine, "check", check)
    failed = final(writer, writer.submit_feed(ListFeed(writes(1))))
    assert (failed.state, failed.is_drained) == (TicketState.FAILED, False)


def test_a_cancelled_feed_is_final_when_its_write_is(writer: MooncakeWriter, engine: CopyingEngine) -> None:
    engine.plan.append("stuck")
    feed = ListFeed([write(0)])
    ticket = writer.submit_feed(feed)
    wait_for(lambda: bool(writer.poll(ticket)) and len(engine.stuck) == 1)
    writer.cancel(ticket)
    assert feed.is_stopped and writer.poll(ticket) == RUNNING
    engine.unstick()
    assert feed.has_ended.wait(20)
    assert writer.poll(ticket) == CANCELLED


def test_what_a_cancelled_feed_gives_all_the_same_does_not_begin(
    writer: MooncakeWriter, engine: CopyingEngine
) -> None:
    """So it is drained at once, whatever its threads wait for."""
    feed = ListFeed([])
    feed.may_give.clear()
    ticket = writer.submit_feed(feed)
    wait_for(lambda: bool(writer.poll(ticket)) and len(feed.asked) == 2)
    writer.cancel(ticket)
    assert writer.poll(ticket) == CANCELLED
    feed.left.extend(writes(2))
    feed.may_give.set()
    wait_for(lambda: len(feed.given) == 2 and feed.is_back)
    assert engine.begun == []


def test_a_feed_that_is_cancelled_before_its_turn_is_never_asked(
    writer: MooncakeWriter, engine: CopyingEngine
) -> None:
    first, second, third = ListFeed(writes(3)), ListFeed(writes(3)), ListFeed(writes(3))
    first.may_give.clear()
    tickets = [writer.submit_feed(feed) for feed in (first, second, third)]
    wait_for(lambda: writer.poll(tickets[0]) == RUNNING and len(first.asked) == 2)
    writer.cancel(tickets[1])
    assert writer.poll(tickets[1]) == CANCELLED
    assert writer.poll(tickets[2]) == RUNNING and third.asked == [], "one feed after the other"
    first.may_give.set()
    assert [final(writer, ticket) for ticket in (tickets[0], tickets[2])] == [DONE, DONE]
    assert second.asked == [] and len(engine.begun) == 6


def test_feeds_that_are_cancelled_behind_one_that_does_not_end_are_forgotten(
    writer: MooncakeWriter, engine: CopyingEngine
) -> None:
    engine.plan.extend(["stuck", "stuck"])
    ticket = writer.submit_feed(ListFeed(writes(2)))
    wait_for(lambda: bool(writer.poll(ticket)) and len(engine.stuck) == 2)
    tickets = [writer.submit_feed(ListFeed(writes(1))) for _ in range(3)]
    for cancelled in tickets:
        writer.cancel(cancelled)
        assert writer.poll(cancelled) == CANCELLED
    assert len(writer._feeder._waiting) == 1
    writer.cancel(ticket)
    assert writer.poll(ticket) == RUNNING


def test_a_peer_whose_writes_do_not_end_holds_up_no_other(
    writer: MooncakeWriter, engine: CopyingEngine
) -> None:
    engine.plan.extend(["stuck", "stuck"])
    ticket = writer.submit_feed(ListFeed(writes(2)))
    wait_for(lambda: bool(writer.poll(ticket)) and len(engine.stuck) == 2)
    other = MooncakeWriter(writer._engines, "p:2", "e1", BASE, SIZE_BYTES)
    assert final(other, other.submit_feed(ListFeed(writes(20)))) == DONE
    assert writer.poll(ticket) == RUNNING


def test_a_feed_that_can_give_nothing_has_failed_and_its_peer_has_not(
    writer: MooncakeWriter, engine: CopyingEngine
) -> None:
    for _ in range(3):
        feed = ListFeed(writes(3))
        feed.error = ValueError("no memory")
        failed = final(writer, writer.submit_feed(feed))
        assert failed == Progress(TicketState.FAILED, is_drained=True, detail="no memory")
    assert engine.begun == []


def test_failed_writes_make_the_peer_rest(writer: MooncakeWriter, engine: CopyingEngine) -> None:
    engine.plan.extend(["fails", "fails"])
    for _ in range(2):
        assert final(writer, writer.submit_feed(ListFeed([write(0)]))).state is TicketState.FAILED
    with pytest.raises(TransportError, match="failed"):
        writer.submit_feed(ListFeed([write(0)]))


@pytest.mark.parametrize("wrong", [write(SIZE_BYTES), Write(SOURCE + SIZE_BYTES, BASE, 100)])
def test_a_write_from_or_to_elsewhere_does_not_begin(
    writer: MooncakeWriter, engine: CopyingEngine, wrong: Write
) -> None:
    feed = ListFeed([wrong])
    failed = final(writer, writer.submit_feed(feed))
    assert (failed.state, failed.is_drained) == (TicketState.FAILED, True)
    assert engine.begun == [] and feed.is_back


def test_without_a_first_contact_a_feed_is_not_asked(
    writer: MooncakeWriter, engine: CopyingEngine, clock: Clock
) -> None:
    engine.may_open.clear()
    feed, late = ListFeed(writes(1)), ListFeed(writes(1))
    ticket = writer.submit_feed(feed)
    assert writer.poll(ticket) == RUNNING
    clock.now_ms += 11_000
    assert "did not answer" in writer.poll(ticket).detail
    clock.now_ms += 60_000
    engine.open_error = TransportError("nobody answers at p:1")
    ticket = writer.submit_feed(late)
    engine.may_open.set()
    failed = final(writer, ticket)
    assert failed == Progress(TicketState.FAILED, is_drained=True, detail="nobody answers at p:1")
    assert feed.asked == late.asked == []


def test_sources_stay_until_the_writes_of_a_closed_writer_are_over(
    writer: MooncakeWriter, engine: CopyingEngine
) -> None:
    engine.plan.append("stuck")
    feed = ListFeed(writes(1))
    ticket = writer.submit_feed(feed)
    wait_for(lambda: bool(writer.poll(ticket)) and len(engine.stuck) == 1)
    writer.close()
    assert engine.registered == {SOURCE: SIZE_BYTES}
    engine.unstick()
    assert feed.has_ended.wait(20)
    writer._engines.settle()
    assert engine.registered == {}
    with pytest.raises(TransportError, match="closed"):
        writer.submit_feed(ListFeed(writes(1)))


def test_a_feed_that_never_gives_keeps_nobody_from_closing(
    writer: MooncakeWriter, engine: CopyingEngine
) -> None:
    feed = ListFeed(writes(1))
    feed.may_give.clear()
    ticket = writer.submit_feed(feed)
    wait_for(lambda: bool(writer.poll(ticket)) and len(feed.asked) == 2)
    writer.close()
    assert writer.poll(ticket) == CANCELLED
    assert engine.registered == {}
    feed.may_give.set()


def test_threads_go_on_until_their_writer_is_closed(writer: MooncakeWriter, engine: CopyingEngine) -> None:
    asked = set()
    for _ in range(2):
        feed = ListFeed(writes(2))
        assert final(writer, writer.submit_feed(feed)) == DONE
        asked |= {thread for thread, _ in feed.asked}
    threads = writer._feeder._threads
    # One may do it all, when the other is late.
    assert asked and asked <= set(threads) and all(thread.is_alive() for thread in threads)
    writer.close()
    writer._feeder.join(time.monotonic() + 20)
    assert not any(thread.is_alive() for thread in threads)


def test_a_writer_that_is_closed_while_it_writes_ends_its_threads_after_that(
    writer: MooncakeWriter, engine: CopyingEngine
) -> None:
    engine.plan.append("stuck")
    feed = ListFeed(writes(1))
    ticket = writer.submit_feed(feed)
    wait_for(lambda: bool(writer.poll(ticket)) and bool(engine.stuck))
    writer.close()
    engine.unstick()
    final(writer, ticket)
    writer._feeder.join(time.monotonic() + 20)
    assert not any(thread.is_alive() for thread in writer._feeder._threads)


def test_threads_that_were_closed_take_no_feed(writer: MooncakeWriter, engine: CopyingEngine) -> None:
    """As at the end of the process, while a push goes on."""
    writer._feeder.close()
    progress = final(writer, writer.submit_feed(ListFeed(writes(1))))
    assert progress.state is TicketState.FAILED and progress.is_drained and "have ended" in progress.detail
    assert engine.begun == []


@pytest.mark.parametrize(
    ("waited_s", "paused_s"), [(0.0, 0.000_02), (0.000_6, 0.000_02), (0.01, 0.000_3), (60.0, 0.000_5)]
)
def test_a_pause_is_a_part_of_what_was_waited_within_bounds(waited_s: float, paused_s: float) -> None:
    assert pause_s(waited_s, 0.000_5) == pytest.approx(paused_s)


AT_THE_END = """
import atexit, threading, time

def look():
    time.sleep(0.05)
    print([thread.name for thread in threading.enumerate() if thread.name == "snapd-feed"])

atexit.register(look)  # Before the import, so that it is called after what the module has at exit.
from snapd.transport.mooncake_feed import Feeder, Feeding
from snapd.transport.base import TicketState

class Nothing:
    def __init__(self, may_end): self.may_end = may_end
    def next(self): self.may_end.wait()
    def over(self, write, *, may_land): pass
    def stop(self): pass
    def ended(self): pass

import contextlib
feeder = Feeder(contextlib.nullcontext)
is_over = threading.Event()
is_over.set()
feeding = Feeding(None, "", Nothing(is_over), lambda write: None)
feeder.submit(feeding)
while feeding.progress.state is TicketState.RUNNING:
    time.sleep(0.001)
"""


@pytest.mark.parametrize("hangs", [False, True])
def test_threads_end_before_the_interpreter_does(hangs: bool) -> None:
    """One that hangs does not keep it from ending."""
    code = AT_THE_END
    if hangs:
        code += "feeder.submit(Feeding(None, '', Nothing(threading.Event()), lambda write: None))\n"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(["snapd-feed"] * 2 if hangs else [])


def test_feeds_that_wait_for_their_turn_are_bounded(
    writer: MooncakeWriter, engine: CopyingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_feed, "FEEDS_MAX", 2)
    feeds = [ListFeed(writes(1)) for _ in range(4)]
    feeds[0].may_give.clear()
    tickets = [writer.submit_feed(feed) for feed in feeds]
    wait_for(lambda: writer.poll(tickets[0]) == RUNNING and len(feeds[0].asked) == 2)
    assert [len(writer._tickets[ticket].waiting) for ticket in tickets] == [0, 0, 1, 1]
    feeds[0].may_give.set()
    assert [final(writer, ticket) for ticket in tickets] == [DONE] * 4


def test_a_fork_and_a_process_without_threads_hear_of_it(
    writer: MooncakeWriter, engine: CopyingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(mooncake_feed.os, "getpid", lambda: 0)
        assert "forks" in final(writer, writer.submit_feed(ListFeed(writes(1)))).detail

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(mooncake_feed.threading.Thread, "start", start)
        assert "no thread" in final(writer, writer.submit_feed(ListFeed(writes(1)))).detail
    assert engine.begun == []


def test_a_ticket_that_was_interrupted_while_its_feed_began_proves_nothing(
    writer: MooncakeWriter, engine: CopyingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    engine.may_open.clear()
    feed = ListFeed(writes(1))
    ticket = writer.submit_feed(feed)
    engine.may_open.set()
    wait_for(lambda: engine.is_open("p:1"))
    with monkeypatch.context() as patch:
        patch.setattr(mooncake_feed.threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            writer.poll(ticket)
    failed = final(writer, ticket)
    assert (failed.state, failed.is_drained) == (TicketState.FAILED, False)
    assert feed.asked == [] and not writer._feeder._waiting


def test_no_write_begins_in_a_process_that_is_ending(
    writer: MooncakeWriter, engine: CopyingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls()
    calls.rest(0)
    monkeypatch.setattr(mooncake_feed, "CALLS", calls)
    failed = final(writer, writer.submit_feed(ListFeed(writes(1))))
    assert (failed.state, failed.is_drained) == (TicketState.FAILED, True)
    assert engine.begun == []


def test_on_the_host_no_feeds_are_taken() -> None:
    engines = MooncakeEngines(MooncakeConfig(), make=lambda _: CopyingEngine())
    assert not MooncakeWriter(engines, "p:1", "e1", BASE, SIZE_BYTES).takes_feeds
