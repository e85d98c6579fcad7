"""Surveys are shared, taken in turns, and followed by a rest."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from core_driver import Driver

from snapd.core import events as e
from snapd.core.machine import Machine
from snapd.core.overview import Overview
from snapd.core.records import SyncOutcome
from snapd.core.session import Settings
from snapd.core.slab import SlabAllocator
from snapd.core.survey import PeerCounts
from snapd.executor import Executor
from snapd.overviews import REST_TIMES, TURN_MAX, Overviews

Make = Callable[..., Driver]
TURN_NS = 1_000


class Loop:
    """A clock that each look at it moves, and calls that run when told."""

    def __init__(self) -> None:
        self.time_ns = 0
        self.calls: list[Loop.Call] = []

    def now_ns(self) -> int:
        self.time_ns += TURN_NS
        return self.time_ns

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> "Loop.Call":
        assert delay_s == 0
        self.calls.append(Loop.Call(callback))
        return self.calls[-1]

    def run_one(self) -> None:
        self.calls.pop(0).run()

    def run(self) -> None:
        while self.calls:
            self.run_one()

    class Call:
        def __init__(self, callback: Callable[[], None]) -> None:
            self.callback: Callable[[], None] | None = callback

        def run(self) -> None:
            if self.callback is not None:
                self.callback()

        def cancel(self) -> None:
            self.callback = None


@pytest.fixture
def loop() -> Loop:
    return Loop()


def filled(make: Make, attempts: int) -> Driver:
    drive = make(1, units=2 * attempts + 8)
    for number in range(attempts):
        drive.reserved(f"s{number}", 8)
    return drive


def overviews_of(drive: Driver, loop: Loop) -> Overviews:
    return Overviews(drive.machine.books, PeerCounts(), loop, loop.call_later)


@contextlib.contextmanager
def many_of(drive: Driver, number: int) -> Iterator[None]:
    """Let an attempt be there many times over: a survey only reads it."""
    books = drive.machine.books
    many = dict.fromkeys(range(10_000, 10_000 + number), next(iter(books.open.values())))
    books.open.update(many)
    yield
    for handle in many:
        del books.open[handle]


def test_few_attempts_are_looked_at_at_once(make: Make, loop: Loop) -> None:
    answers: list[Overview] = []
    overviews_of(filled(make, 5), loop).ask("age", answers.append)
    assert len(answers) == 1 and len(answers[0].attempts) == 5
    assert loop.calls == []


def test_many_are_looked_at_in_turns_and_whoever_asks_meanwhile_gets_the_same(make: Make, loop: Loop) -> None:
    drive = filled(make, 3)
    overviews = overviews_of(drive, loop)
    answers: list[tuple[str, Overview]] = []
    with many_of(drive, 2 * TURN_MAX):
        overviews.ask("age", lambda overview: answers.append(("age", overview)))
        assert answers == [] and len(loop.calls) == 1
        overviews.ask("bytes", lambda overview: answers.append(("bytes", overview)))
        assert len(loop.calls) == 1
        turns = 0
        while loop.calls:
            assert answers == []
            loop.run_one()
            turns += 1
        # Two for each attempt, in turns of TURN_MAX, the first of which was taken at once.
        assert turns == 4
    assert [order for order, _ in answers] == ["age", "bytes"]
    assert answers[0][1].surveyed_ns == answers[1][1].surveyed_ns
    assert answers[0][1].groups[0].count == 3 + 2 * TURN_MAX


def test_after_a_survey_there_is_none_for_a_multiple_of_its_time(make: Make, loop: Loop) -> None:
    drive = filled(make, 2)
    overviews = overviews_of(drive, loop)
    answers: list[Overview] = []
    overviews.ask("age", answers.append)
    done_ns = loop.time_ns
    drive.reserved("new", 8)
    overviews.ask("age", answers.append)
    assert answers[1].surveyed_ns == answers[0].surveyed_ns and answers[1].groups[0].count == 2
    loop.time_ns = done_ns + REST_TIMES * TURN_NS
    overviews.ask("age", answers.append)
    assert answers[2].surveyed_ns > answers[0].surveyed_ns and answers[2].groups[0].count == 3


def test_nothing_is_looked_at_while_nobody_asks(make: Make, loop: Loop) -> None:
    overviews_of(filled(make, 5), loop)
    assert loop.calls == [] and loop.time_ns == 0


def test_after_the_end_no_turn_is_taken_and_nobody_is_answered(make: Make, loop: Loop) -> None:
    drive = filled(make, 1)
    overviews = overviews_of(drive, loop)
    answers: list[Overview] = []
    with many_of(drive, TURN_MAX):
        overviews.ask("age", answers.append)
        overviews.close()
        assert len(loop.calls) == 1
        ended_ns = loop.time_ns
        loop.run()
    assert answers == [] and loop.time_ns == ended_ns


# --- the executor ------------------------------------------------------------------------------


class Shell(Loop):
    """An executor's surroundings."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Any] = []
        machine = Machine(Settings(), {0: SlabAllocator(1 << 20)})
        self.executor = Executor(machine, self, self, self.later, lambda told: None, lambda record: None)

    def write(self, record: Any) -> None:
        self.records.append(record)

    def later(self, delay_s: float, callback: Callable[[], None]) -> Loop.Call:
        return Loop.Call(callback) if delay_s else self.call_later(delay_s, callback)


def test_the_executor_counts_outcomes_by_worker_and_stops_looking_when_it_is_closed() -> None:
    shell = Shell()
    executor = shell.executor

    def event(at_ns: int, cause_id: int) -> e.Event:
        return e.PrepareAsked(
            at_ns=at_ns, cause_id=cause_id, slab_handle=5, session_id="s", layout_fingerprint="none",
            num_tokens=1, token_start=0, token_digest="", page_keys=(), ranks=(), use_resident_hint=False,
            peer="d-7",
        )  # fmt: skip

    executor.ask(event, lambda result: None)
    assert [type(record) for record in shell.records][-1] is SyncOutcome
    answers: list[Overview] = []
    executor.overviews.ask("age", answers.append)
    (line,) = answers[0].peers
    assert (line.peer, line.refused, line.last_problem) == ("d-7", 1, "layout-mismatch")
    closed: list[Overview] = []
    executor.overviews._running = executor.overviews._last
    executor.overviews.ask("age", closed.append)
    executor.close()
    assert executor.overviews._waiting == [] and closed == []
