"""The executor: events into the core, instructions out to log, timers, connections and callers."""

import asyncio
import heapq
from collections.abc import Callable
from typing import Any

import pytest

from snapd import executor as executor_module
from snapd.compiling import is_compiled
from snapd.config import Config
from snapd.core import events as e
from snapd.core import records as r
from snapd.core.machine import Machine
from snapd.core.session import Settings
from snapd.core.slab import SlabAllocator
from snapd.daemon import _drain
from snapd.errors import Reason
from snapd.executor import HANDLE_BITS, Executor
from snapd.layout import Layout
from snapd.units import NS_PER_MS, NS_PER_S

LAYOUT = Layout(k_stride_bytes=(64,), v_stride_bytes=(64,))
CHECKSUMS = ((1, 1), (2, 2))
SETTINGS = Settings(reserve_timeout_ms=10, quarantine_ms=20, lease_ms=30, ready_ttl_ms=1_000)
OWNER = 7


class Shell:
    """An executor, and everything around it, made of lists. Time moves only when told."""

    def __init__(self) -> None:
        self.time_ns = 0
        self.order: list[str] = []
        self.records: list[r.Record] = []
        self.shown: list[r.Record] = []
        self.ends: list[e.EndTold] = []
        self.calls: list[tuple[int, int, Any]] = []
        self.machine = Machine(SETTINGS, {rank: SlabAllocator(1 << 20) for rank in (0, 1)})
        self.executor = Executor(self.machine, self, self, self.call_later, self.end, self.show)

    def now_ns(self) -> int:
        return self.time_ns

    def write(self, record: r.Record) -> None:
        self.order.append("record")
        self.records.append(record)

    def show(self, record: r.Record) -> None:
        self.order.append("shown")
        self.shown.append(record)

    def end(self, told: e.EndTold) -> None:
        self.order.append("end")
        self.ends.append(told)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> "Shell.Call":
        call = Shell.Call(callback)
        heapq.heappush(self.calls, (self.time_ns + round(delay_s * NS_PER_S), len(self.calls), call))
        return call

    class Call:
        def __init__(self, callback: Callable[[], None]) -> None:
            self.callback: Callable[[], None] | None = callback

        def cancel(self) -> None:
            self.callback = None

    def advance(self, duration_ms: int) -> None:
        until_ns = self.time_ns + duration_ms * NS_PER_MS
        while self.calls and self.calls[0][0] <= until_ns:
            at_ns, _, call = heapq.heappop(self.calls)
            self.time_ns = max(at_ns, self.time_ns)
            if call.callback is not None:
                call.callback()
        self.time_ns = until_ns

    def ask(self, kind: type[e.Event], **fields: Any) -> list[Any]:
        """Ask, and return the list in which the answer is, or will be."""
        answers: list[Any] = []

        def on_result(result: e.Result) -> None:
            self.order.append("reply")
            answers.append(result)

        self.executor.ask(lambda at_ns, cause_id: kind(at_ns=at_ns, cause_id=cause_id, **fields), on_result)
        self.machine.validate()
        return answers

    def granted(self, ranks: tuple[int, ...] = (0, 1)) -> int:
        names = [self.ask(e.LayoutDeclared, rank=rank, layout=LAYOUT)[0] for rank in ranks]
        handle = self.executor.new_handle()
        (grant,) = self.ask(
            e.PrepareAsked, slab_handle=handle, session_id="s", num_tokens=4, ranks=ranks, conn_id=OWNER,
            layout_fingerprint=names[0].layout_fingerprint,
        )  # fmt: skip
        assert isinstance(grant, e.Granted), grant
        return handle

    def leased(self) -> tuple[int, list[int]]:
        """Return a READY attempt that both ranks read, and their lease ids."""
        handle = self.granted()
        ids = []
        for rank in (0, 1):
            self.ask(
                e.RankCommitted, slab_handle=handle, rank=rank, num_bytes=4 * LAYOUT.token_bytes,
                num_tokens=4, checksums=CHECKSUMS, conn_id=OWNER,
            )  # fmt: skip
        name = self.machine.view(handle).layout_fingerprint  # type: ignore[union-attr]
        for rank in (0, 1):
            fields: dict[str, Any] = {"slab_handle": handle, "rank": rank, "layout_fingerprint": name}
            ids.append(self.ask(e.LeaseAsked, **fields)[0].lease_id)
        return handle, ids


@pytest.fixture
def shell() -> Shell:
    return Shell()


def test_an_event_carries_the_clock_s_time_and_a_cause_of_its_own(shell: Shell) -> None:
    seen: list[tuple[int, int]] = []

    def event(at_ns: int, cause_id: int) -> e.Event:
        seen.append((at_ns, cause_id))
        return e.DrainAsked(at_ns=at_ns, cause_id=cause_id)

    for shell.time_ns in (5, 9):
        shell.executor.ask(event, lambda result: None)
    assert seen == [(5, 1), (9, 2)]


def test_everything_else_is_done_before_anybody_is_answered(shell: Shell) -> None:
    handle = shell.granted()
    shell.order.clear()
    shell.ask(e.AbortAsked, slab_handle=handle)
    assert shell.order[-1] == "reply" and shell.order.count("reply") == 1
    assert {"record", "shown", "end"} <= set(shell.order)


def test_the_decision_of_a_round_is_told_when_it_has_been_carried_out(shell: Shell) -> None:
    """The core answers the votes while it ends the attempt; whoever hears of it finds the bytes free."""
    handle, lease_ids = shell.leased()
    shell.ask(e.VoteCast, slab_handle=handle, rank=0, lease_id=lease_ids[0], ok=True)
    shell.order.clear()
    shell.ask(e.VoteCast, slab_handle=handle, rank=1, lease_id=lease_ids[1], ok=True)
    assert shell.order.count("reply") == 2
    assert set(shell.order[-2:]) == {"reply"}


@pytest.mark.skipif(is_compiled(), reason="what is compiled cannot be replaced")
def test_an_answer_that_is_given_twice_arrives_once(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one to a question that nobody asked."""
    accepted = e.Accepted()
    answers = [e.Replied(1, accepted), e.Replied(1, accepted), e.Replied(99, accepted)]
    monkeypatch.setattr(shell.machine, "handle", lambda event: answers)
    assert shell.ask(e.DrainAsked) == [accepted]


def test_every_record_goes_to_the_log_and_then_to_the_watchers(shell: Shell) -> None:
    shell.granted()
    assert shell.records and shell.shown == shell.records
    kinds = [kind for kind in shell.order if kind != "reply"]
    assert kinds == ["record", "shown"] * len(shell.records)


def test_the_owner_is_told_how_its_attempt_ended(shell: Shell) -> None:
    handle = shell.granted()
    shell.ask(e.AbortAsked, slab_handle=handle)
    (told,) = shell.ends
    assert (told.conn_id, told.slab_handle, told.reason) == (OWNER, handle, Reason.CLIENT_ABORT)


def test_a_vote_waits_for_the_other_rank_and_is_answered_once(shell: Shell) -> None:
    handle, (first_id, second_id) = shell.leased()
    first = shell.ask(e.VoteCast, slab_handle=handle, rank=0, lease_id=first_id, ok=True)
    assert (first, shell.executor.num_waiting) == ([], 1)
    second = shell.ask(e.VoteCast, slab_handle=handle, rank=1, lease_id=second_id, ok=True)
    assert [x.commit for x in first + second] == [True, True]
    assert shell.executor.num_waiting == 0


def test_a_vote_that_waits_in_vain_is_answered_when_the_lease_is_over(shell: Shell) -> None:
    handle, (first_id, _) = shell.leased()
    answers = shell.ask(e.VoteCast, slab_handle=handle, rank=0, lease_id=first_id, ok=True)
    shell.advance(29)
    assert answers == []
    shell.advance(1)
    assert [x.commit for x in answers] == [False]
    assert shell.executor.num_waiting == 0


def test_a_timer_comes_back_as_an_event_of_the_time_at_which_it_fires(shell: Shell) -> None:
    shell.granted()
    shell.advance(9)
    assert not shell.ends
    shell.advance(1)
    assert [told.reason for told in shell.ends] == [Reason.RESERVE_TIMEOUT]
    assert shell.records[-1].at_ns == 10 * NS_PER_MS
    assert shell.executor.num_timers == 2, "one quarantine an arena"
    shell.advance(20)
    assert shell.executor.num_timers == 0
    released = [x for x in shell.records if isinstance(x, r.SlabReleased)]
    assert [(x.rank, x.why, x.at_ns) for x in released] == [
        (0, "time", 30 * NS_PER_MS),
        (1, "time", 30 * NS_PER_MS),
    ]


def test_a_cancelled_timer_does_not_come(shell: Shell) -> None:
    handle = shell.granted()
    shell.ask(e.AbortAsked, slab_handle=handle, drained=True)
    assert shell.executor.num_timers == 0
    num_records = len(shell.records)
    shell.advance(1_000)
    assert len(shell.records) == num_records


def test_what_is_posted_is_done_and_answered_to_nobody(shell: Shell) -> None:
    handle = shell.granted()
    shell.executor.post(lambda at_ns: e.StopAsked(at_ns=at_ns))
    assert [told.reason for told in shell.ends] == [Reason.DAEMON_STOPPED]
    assert shell.executor.num_waiting == 0
    assert shell.machine.view(handle).state == "ABORTED"  # type: ignore[union-attr]


def test_after_close_no_timer_comes(shell: Shell) -> None:
    shell.granted()
    shell.executor.close()
    assert shell.executor.num_timers == 0
    shell.advance(1_000)
    assert not shell.ends


def test_after_halt_nothing_comes_to_the_core_any_more(shell: Shell) -> None:
    handle = shell.granted()
    records = len(shell.records)
    shell.executor.halt()
    assert shell.ask(e.DrainAsked) == []
    taken: list[e.Result] = []
    shell.executor.take(e.DrainAsked(at_ns=shell.time_ns, cause_id=99), taken.append)
    shell.executor.post(lambda at_ns: e.StopAsked(at_ns=at_ns))
    shell.advance(60_000)
    assert (len(shell.records), taken, list(shell.machine.books.open)) == (records, [], [handle])
    assert not shell.machine.books.is_draining and shell.executor.num_timers == 0


def test_a_drain_does_not_wait_for_readers_once_the_core_takes_nothing_more(shell: Shell) -> None:
    """Nobody can vote any more: it would wait for the whole time, and everybody with it."""
    shell.leased()
    config = Config(drain_timeout_ms=3_600_000)

    async def drain() -> None:
        draining = asyncio.create_task(_drain(config, shell.executor))
        await asyncio.sleep(0)
        assert shell.machine.books.is_draining
        shell.executor.halt()
        await asyncio.wait_for(draining, 30)

    asyncio.run(drain())
    assert shell.machine.num_leased


def test_an_answer_that_asks_again_is_served(shell: Shell) -> None:
    answers: list[Any] = []

    def ask_again(result: e.Result) -> None:
        answers.append(result)
        if len(answers) < 3:
            shell.executor.ask(lambda at, cause: e.DrainAsked(at_ns=at, cause_id=cause), ask_again)

    shell.executor.ask(lambda at, cause: e.DrainAsked(at_ns=at, cause_id=cause), ask_again)
    assert len(answers) == 3
    assert shell.executor.num_waiting == 0


@pytest.mark.skipif(is_compiled(), reason="what is compiled cannot be replaced")
def test_a_handle_is_never_zero_never_in_use_and_exact_as_a_double(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = shell.granted()
    shell.executor._drawn.clear()
    monkeypatch.setattr(executor_module, "_draw_handles", lambda: [12, handle, 0])
    assert shell.executor.new_handle() == 12
    assert float(2**HANDLE_BITS - 1) == 2**HANDLE_BITS - 1
    assert float(2**HANDLE_BITS) == float(2**HANDLE_BITS + 1), "one bit more would not be exact"


@pytest.mark.skipif(is_compiled(), reason="what is compiled cannot be replaced")
def test_a_handle_that_is_only_in_quarantine_is_in_use_too(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be forgotten by the history while its bytes still wait for a drain proof under that name."""
    handle = shell.granted()
    shell.ask(e.AbortAsked, slab_handle=handle)
    shell.machine.books.ended.clear()
    shell.executor._drawn.clear()
    monkeypatch.setattr(executor_module, "_draw_handles", lambda: [12, handle])
    assert shell.executor.new_handle() == 12


def test_handles_are_drawn_from_the_kernel_each_of_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def urandom(num_bytes: int) -> bytes:
        asked.append(num_bytes)
        return b"".join(number.to_bytes(8, "little") for number in range((1 << 64) - num_bytes // 8, 1 << 64))

    monkeypatch.setattr(executor_module.os, "urandom", urandom)
    drawn = executor_module._draw_handles()
    assert len(drawn) == len(set(drawn)) == asked[0] // 8 > 1
    assert max(drawn) == 2**HANDLE_BITS - 1
    assert len(asked) == 1


def test_no_handle_is_drawn_twice(shell: Shell) -> None:
    """Also over the end of what is drawn at once."""
    assert len({shell.executor.new_handle() for _ in range(1_000)}) == 1_000
