"""Notifications: bounded work, bounded memory, and hints that never cut a client off."""

from collections.abc import Callable
from typing import Any

import pytest

from snapd import wire as w
from snapd.core.session import PREPARER
from snapd.errors import ProtocolError
from snapd.limits import Limits
from snapd.mooncakeconfig import MooncakeConfig
from snapd.notifications import TURN_MAX, Notifications

EPOCH = "epoch"
LIMITS = Limits()


class FakeLoop:
    """Runs what was asked for later when it is told to."""

    def __init__(self) -> None:
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.cancelled = 0

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> "FakeLoop":
        self.later.append((delay_s, callback))
        return self

    def cancel(self) -> None:
        self.cancelled += 1

    def turn(self) -> float:
        """Run the one that waits; return after which delay it wanted to be run."""
        ((delay_s, callback),) = self.later
        self.later = []
        callback()
        return delay_s


class FakeServer:
    """Takes hints, as long as it is told to."""

    def __init__(self) -> None:
        self.told: list[tuple[int, w.TransferNotified]] = []
        self.takes = True
        self.warned: list[str] = []
        self.warnings = self

    def tell_notified(self, conn_id: int, push: w.TransferNotified) -> bool:
        self.told.append((conn_id, push))
        return self.takes

    def warn(self, kind: str, **_: object) -> None:
        self.warned.append(kind)


class FakeSession:
    handle = 5
    session_id = "chat"
    shards = {0: None, 1: None}
    told_conn_ids = {PREPARER: 7, 0: 8}


class FakeExecutor:
    """A core with one open attempt."""

    def __init__(self) -> None:
        self.machine = self.books = self
        self.open = {5: FakeSession()}
        self.events: list[Any] = []

    def ask(self, event: Callable[[int, int], object], on_result: Callable[[object], None]) -> None:
        self.events.append(event(1, 2))
        on_result(None)


class Bench:
    def __init__(self, notify: str = "hint", poll_ms: int = 20) -> None:
        self.loop, self.server, self.executor = FakeLoop(), FakeServer(), FakeExecutor()
        self.sent: list[str] = []
        config = MooncakeConfig(notify=notify, notify_poll_ms=poll_ms)  # type: ignore[arg-type]
        fakes: tuple[Any, ...] = (self.executor, self.server, self.loop)
        self.notifications = Notifications(config, LIMITS, EPOCH, *fakes, self.take)

    def take(self) -> list[str]:
        taken, self.sent = self.sent, []
        return taken

    @property
    def counts(self) -> tuple[int, int, int]:
        counts = self.notifications.counts
        return counts.taken, counts.refused, counts.ignored


def text(**fields: Any) -> str:
    return w.encode_notification(
        w.TransferNotification(**({"slab_handle": 5, "epoch": EPOCH, "rank": 0} | fields))
    )


@pytest.mark.parametrize(("notify", "poll_ms", "pause_s"), [("hint", 50, 0.05), ("off", 50, 1.0)])
def test_it_looks_at_a_constant_interval(notify: str, poll_ms: int, pause_s: float) -> None:
    bench = Bench(notify, poll_ms)
    assert [bench.loop.turn(), bench.loop.turn()] == [pause_s, pause_s]
    bench.notifications.close()
    assert bench.loop.cancelled == 1


def test_a_turn_handles_a_bounded_number_and_the_rest_follow_at_once_in_order() -> None:
    bench = Bench()
    bench.sent = [text(rank=number % 2) for number in range(TURN_MAX + 1)]
    bench.loop.turn()
    assert bench.counts == (TURN_MAX, 0, 0)
    bench.sent = [text(slab_handle=6)]
    assert bench.loop.turn() == 0.0
    assert bench.counts == (TURN_MAX + 1, 0, 0)
    assert [push.rank for _, push in bench.server.told] == [number % 2 for number in range(TURN_MAX + 1)]
    assert bench.loop.turn() == 0.02
    assert bench.counts == (TURN_MAX + 1, 0, 1)


def test_more_than_can_wait_are_ignored_and_counted() -> None:
    bench = Bench()
    bench.sent = [text()] * (LIMITS.notifications_max + 3)
    bench.loop.turn()
    assert bench.counts == (TURN_MAX, 0, 3)
    assert bench.server.warned == ["too many notifications"]
    for _ in range(LIMITS.notifications_max // TURN_MAX):
        bench.loop.turn()
    assert bench.counts == (LIMITS.notifications_max, 0, 3)


def test_a_hint_is_for_the_connection_that_prepared() -> None:
    bench = Bench()
    bench.sent = [text(rank=1)]
    bench.loop.turn()
    assert bench.server.told == [(7, w.TransferNotified(slab_handle=5, session_id="chat", rank=1))]
    bench.server.takes = False
    bench.sent = [text()]
    bench.loop.turn()
    assert bench.counts == (1, 0, 1)
    assert bench.executor.events == []


def test_a_text_that_is_too_long_is_not_even_parsed() -> None:
    bench = Bench("commit")
    bench.sent = [text() + " " * LIMITS.notification_chars_max]
    bench.loop.turn()
    assert bench.counts == (0, 0, 1) and bench.server.warned == ["notifications too long"]
    assert bench.executor.events == []


def test_texts_that_wait_are_bounded_in_number_and_in_length() -> None:
    bench = Bench("commit")
    long = text() + " " * (LIMITS.notification_chars_max - len(text()))
    bench.sent = [long + " "] * 5 + [long] * 100
    bench.loop.turn()
    taken = LIMITS.notifications_chars_max // LIMITS.notification_chars_max
    assert bench.counts == (0, taken, 105 - taken)
    assert bench.server.warned == ["notifications too long", "too many notifications"]


@pytest.mark.parametrize("drained", [True, False])
def test_a_commit_is_the_event_of_a_commit_request_with_nobody_to_tell(drained: bool) -> None:
    bench = Bench("commit")
    bench.sent = [text(rank=1, num_bytes=2, num_tokens=3, checksums=((4, 5),), drained=drained)]
    bench.loop.turn()
    (event,) = bench.executor.events
    assert (event.slab_handle, event.rank, event.num_bytes, event.num_tokens) == (5, 1, 2, 3)
    assert (event.checksums, event.drained, event.conn_id) == (((4, 5),), drained, 0)
    assert bench.counts == (0, 1, 0) and bench.server.told == []


@pytest.mark.parametrize(
    "bad",
    ["", "null", "[" * 100_000, "\udcff", '{"slab_handle":5,"epoch":"epoch"}', text().replace("5", "5.5"),
     text().replace("5", str(2**64)), text(checksums=((7, 0),)).replace("7", str(2**64))],
)  # fmt: skip
def test_what_is_no_notification_is_a_protocol_error(bad: str) -> None:
    with pytest.raises(ProtocolError, match="no notification"):
        w.decode_notification(bad)


def test_a_notification_is_read_as_it_was_written() -> None:
    whole = w.TransferNotification(
        slab_handle=2**53 - 1,
        epoch="e",
        rank=3,
        num_bytes=4,
        num_tokens=5,
        checksums=((2**64 - 1, 0),),
        drained=False,
    )
    assert w.decode_notification(w.encode_notification(whole)) == whole
