"""What is counted, what is logged how often, and when a daemon is asked again."""

import pytest
import structlog

from snapd.engines.vllm.gate import WARN_EVERY_S, Gate, Warner
from snapd.engines.vllm.tally import Tally, add_counts, summary, total
from snapd.errors import DaemonUnreachable


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_counts_are_taken_once_and_add_up() -> None:
    tally = Tally()
    tally.count("pushes", "ok")
    tally.count("pushes", "snapshot-buf-full", 2)
    tally.count("pushed_tokens", amount=288)
    counts = tally.take()
    assert counts == {"pushes": {"ok": 1, "snapshot-buf-full": 2}, "pushed_tokens": {"": 288}}
    assert tally.take() == {}
    add_counts(counts, {"pushes": {"ok": 4}, "loads": {"ok": 1}})
    assert (total(counts, "pushes"), total(counts, "pushes", "ok"), total(counts, "loads")) == (7, 5, 1)
    line = summary(counts)
    assert (line["Pushes"], line["Pushes failed"], line["Pushed tokens"]) == (7, 2, 288)
    assert summary({})["Loads"] == 0


@pytest.mark.parametrize(("name", "reason"), [("pushes", ""), ("pushed_tokens", "ok"), ("nothing", "")])
def test_what_is_no_counter_is_a_bug(name: str, reason: str) -> None:
    with pytest.raises(AssertionError):
        Tally().count(name, reason)


def test_a_warning_is_logged_once_a_minute_with_how_many_there_were() -> None:
    clock = Clock()
    warner = Warner(clock)
    with structlog.testing.capture_logs() as logs:
        for _ in range(5):
            warner.warn("it broke", reason="x")
        warner.warn("another kind")
        clock.now_s += WARN_EVERY_S
        warner.warn("it broke", reason="y")
    assert [(x["event"], x["more_of_them"]) for x in logs] == [
        ("it broke", 0), ("another kind", 0), ("it broke", 4),
    ]  # fmt: skip


def test_a_daemon_that_failed_is_left_alone_for_a_while_and_told_of_when_it_is_back() -> None:
    clock = Clock()
    gate = Gate("/x.sock", 2.0, clock)
    with structlog.testing.capture_logs() as logs:
        assert gate.is_open
        for _ in range(30):
            gate.failed(DaemonUnreachable("gone"))
            assert not gate.is_open
            clock.now_s += 1.5
            assert not gate.is_open
            clock.now_s += 0.5
            assert gate.is_open
        gate.passed()
        gate.passed()
    assert [x["log_level"] for x in logs] == ["warning", "info"]
    assert "/x.sock" in str(logs[0])
