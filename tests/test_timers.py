"""The timers, on a clock that moves only when told."""

import heapq
import random
from collections.abc import Callable

import pytest

from snapd.timers import SystemClock, Timers
from snapd.units import NS_PER_MS, NS_PER_S


class FakeLoop:
    """A clock and a ``call_later``; ``advance`` moves both."""

    def __init__(self) -> None:
        self.time_ns = 1_000
        self.calls: list[tuple[int, int, Call]] = []
        self.num_calls = 0

    def now_ns(self) -> int:
        return self.time_ns

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> "Call":
        assert delay_s >= 0
        self.num_calls += 1
        call = Call(callback)
        heapq.heappush(self.calls, (self.time_ns + round(delay_s * NS_PER_S), self.num_calls, call))
        return call

    def pending(self) -> list["Call"]:
        return [call for _, _, call in self.calls if not call.is_cancelled]

    def advance(self, duration_ns: int) -> None:
        until_ns = self.time_ns + duration_ns
        while self.calls and self.calls[0][0] <= until_ns:
            at_ns, _, call = heapq.heappop(self.calls)
            self.time_ns = max(self.time_ns, at_ns)
            if not call.is_cancelled:
                call.callback()
        self.time_ns = max(self.time_ns, until_ns)


class Call:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


@pytest.fixture
def loop() -> FakeLoop:
    return FakeLoop()


@pytest.fixture
def fired() -> list[str]:
    return []


@pytest.fixture
def timers(loop: FakeLoop, fired: list[str]) -> Timers[str, str]:
    return Timers(loop, loop.call_later, fired.append)


def test_nothing_fires_before_its_deadline_and_everything_fires_after_it(
    loop: FakeLoop, timers: Timers[str, str], fired: list[str]
) -> None:
    timers.arm("a", loop.time_ns + 100, "A")
    loop.advance(99)
    assert (fired, len(timers)) == ([], 1)
    loop.advance(1)
    assert (fired, len(timers)) == (["A"], 0)
    loop.advance(NS_PER_S)
    assert fired == ["A"], "a timer fires once"


def test_what_is_due_comes_in_order_of_deadline_and_then_of_arming(
    loop: FakeLoop, timers: Timers[str, str], fired: list[str]
) -> None:
    for key, delay_ns in (("c", 30), ("a", 10), ("b2", 20), ("b1", 20)):
        timers.arm(key, loop.time_ns + delay_ns, key)
    loop.advance(100)
    assert fired == ["a", "b2", "b1", "c"]


def test_a_later_timer_does_not_delay_an_earlier_one(
    loop: FakeLoop, timers: Timers[str, str], fired: list[str]
) -> None:
    timers.arm("late", loop.time_ns + 1_000, "late")
    timers.arm("early", loop.time_ns + 10, "early")
    loop.advance(10)
    assert fired == ["early"]
    loop.advance(990)
    assert fired == ["early", "late"]


def test_one_loop_timer_serves_any_number_of_keys(loop: FakeLoop, timers: Timers[str, str]) -> None:
    for i in range(100):
        timers.arm(str(i), loop.time_ns + 1_000 - i, "")
        assert len(loop.pending()) == 1
    calls_before = loop.num_calls
    for i in range(100):
        timers.arm(f"later {i}", loop.time_ns + 2_000, "")
    assert loop.num_calls == calls_before, "a deadline that is not the first sets no loop timer"


def test_a_deadline_that_has_passed_fires_at_the_next_turn_and_not_inside_arm(
    loop: FakeLoop, timers: Timers[str, str], fired: list[str]
) -> None:
    timers.arm("a", 0, "A")
    assert fired == []
    loop.advance(0)
    assert fired == ["A"]


def test_a_cancelled_timer_does_not_fire(loop: FakeLoop, timers: Timers[str, str], fired: list[str]) -> None:
    timers.arm("a", loop.time_ns + 10, "A")
    timers.arm("b", loop.time_ns + 20, "B")
    timers.cancel("a")
    timers.cancel("never armed")
    assert len(timers) == 1
    loop.advance(100)
    assert fired == ["B"]


@pytest.mark.parametrize("second_ns", [5, 50], ids=["earlier", "later"])
def test_arming_again_replaces_the_deadline(
    loop: FakeLoop, timers: Timers[str, str], fired: list[str], second_ns: int
) -> None:
    start_ns = loop.time_ns
    timers.arm("a", start_ns + 10, "first")
    timers.arm("a", start_ns + second_ns, "second")
    assert len(timers) == 1
    loop.advance(second_ns - 1)
    assert fired == []
    loop.advance(1)
    assert fired == ["second"]
    loop.advance(100)
    assert fired == ["second"]


def test_a_key_that_is_cancelled_and_armed_again_for_the_same_time_fires_once(
    loop: FakeLoop, timers: Timers[str, str], fired: list[str]
) -> None:
    timers.arm("a", loop.time_ns + 10, "first")
    timers.cancel("a")
    timers.arm("a", loop.time_ns + 10, "second")
    loop.advance(100)
    assert fired == ["second"]


def test_a_loop_that_fires_early_fires_nothing_before_its_deadline(
    loop: FakeLoop, timers: Timers[str, str], fired: list[str]
) -> None:
    """uvloop may be up to about 1.5 ms early; the clock decides, and the loop timer is set again."""
    timers.arm("a", loop.time_ns + 10 * NS_PER_MS, "A")
    loop.advance(9 * NS_PER_MS)
    (wake_up,) = loop.pending()
    wake_up.is_cancelled = True
    wake_up.callback()
    assert (fired, len(timers), len(loop.pending())) == ([], 1, 1)
    loop.advance(NS_PER_MS)
    assert fired == ["A"]


def test_what_fires_may_cancel_what_is_due_at_the_same_time(loop: FakeLoop) -> None:
    fired: list[str] = []

    def fire(value: str) -> None:
        fired.append(value)
        timers.cancel("b")

    timers: Timers[str, str] = Timers(loop, loop.call_later, fire)
    timers.arm("a", loop.time_ns + 10, "A")
    timers.arm("b", loop.time_ns + 10, "B")
    loop.advance(100)
    assert fired == ["A"]


def test_what_fires_may_arm_again_at_once_and_the_loop_gets_its_turn_in_between(loop: FakeLoop) -> None:
    fired: list[int] = []

    def fire(value: int) -> None:
        fired.append(value)
        if value < 5:
            timers.arm("a", loop.time_ns, value + 1)

    timers: Timers[str, int] = Timers(loop, loop.call_later, fire)
    timers.arm("a", loop.time_ns, 1)
    (wake_up,) = loop.pending()
    wake_up.is_cancelled = True
    wake_up.callback()
    assert fired == [1], "one wake-up ends, whatever is armed in it"
    loop.advance(100)
    assert fired == [1, 2, 3, 4, 5]


def test_an_exception_loses_no_other_deadline(loop: FakeLoop) -> None:
    fired: list[str] = []

    def fire(value: str) -> None:
        fired.append(value)
        if value == "bad":
            raise RuntimeError(value)

    timers: Timers[str, str] = Timers(loop, loop.call_later, fire)
    for key in ("bad", "good", "later"):
        timers.arm(key, loop.time_ns + (20 if key == "later" else 10), key)
    with pytest.raises(RuntimeError, match="bad"):
        loop.advance(10)
    loop.advance(0)
    assert fired == ["bad", "good"]
    loop.advance(10)
    assert fired == ["bad", "good", "later"]


def test_after_close_nothing_fires_and_the_loop_timer_is_gone(
    loop: FakeLoop, timers: Timers[str, str], fired: list[str]
) -> None:
    timers.arm("a", loop.time_ns + 10, "A")
    timers.close()
    assert (len(timers), loop.pending(), timers._heap) == (0, [], [])
    loop.advance(100)
    assert fired == []
    timers.close()
    timers.arm("b", loop.time_ns + 10, "B")
    loop.advance(10)
    assert fired == ["B"]


def test_memory_stays_in_proportion_to_what_is_armed(loop: FakeLoop, timers: Timers[str, str]) -> None:
    """A lease that is taken and given back a million times leaves nothing behind."""
    for i in range(20_000):
        timers.arm(str(i % 10), loop.time_ns + NS_PER_S + i, "")
    assert len(timers) == 10
    assert len(timers._heap) <= 2 * 10 + 1_024 + 1


def test_a_random_run_agrees_with_a_plain_table(loop: FakeLoop) -> None:
    rng = random.Random(20)
    armed: dict[int, int] = {}
    fired: list[int] = []
    timers: Timers[int, int] = Timers(loop, loop.call_later, fired.append)
    for _ in range(5_000):
        key = rng.randrange(50)
        if rng.random() < 0.6:
            armed[key] = loop.time_ns + rng.randrange(1, 100)
            timers.arm(key, armed[key], key)
        elif rng.random() < 0.5:
            armed.pop(key, None)
            timers.cancel(key)
        else:
            loop.advance(rng.randrange(20))
            due = sorted((deadline_ns, k) for k, deadline_ns in armed.items() if deadline_ns <= loop.time_ns)
            assert sorted(fired) == sorted(k for _, k in due)
            assert [armed[k] for k in fired] == sorted(armed[k] for k in fired)
            for k in fired:
                del armed[k]
            fired.clear()
        assert len(timers) == len(armed)
        assert len(loop.pending()) <= 1


def test_the_system_clock_does_not_run_backwards() -> None:
    clock = SystemClock()
    times_ns = [clock.now_ns() for _ in range(100)]
    assert times_ns == sorted(times_ns)
