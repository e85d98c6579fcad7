"""A daemon that is down, full, slow or another one, and what is bounded: the engine goes on."""

import signal
from typing import Any

import pytest
import structlog
from raw_client import log_events, wait_for
from vllm_cases import (
    BASE,
    BLOCK,
    D_BLOCKS,
    NEXT,
    P_BLOCKS,
    PATIENCE_S,
    SENT,
    TURN,
    Engine,
    pair,
    running_daemon,
    tokens_of,
    view_of,
)

from snapd.client import Client, Pending
from snapd.engines.vllm import working
from snapd.engines.vllm.orders import LoadOrder
from snapd.engines.vllm.scheduling import SchedulerSide
from snapd.engines.vllm.settings import VllmSettings
from snapd.errors import Reason
from snapd.kv.ingest import Ingester
from snapd.kv.push import Pusher
from snapd.layout import fingerprint

# --- a daemon that is down, full, slow, or another one ------------------------------------------------------


def test_without_a_daemon_nothing_is_held_and_nothing_waited_for(tmp_path: Any) -> None:
    path = tmp_path / "none.sock"
    with Engine("D", path) as d, Engine("P", path) as p:
        held, answer = d.finish("r1", TURN, D_BLOCKS)
        assert not held and answer["reason"] in ("daemon-unreachable", "daemon-resting")
        assert p.match("r2", NEXT) == 0


def test_a_full_daemon_refuses_and_the_blocks_go_back_at_once(daemon: Any) -> None:
    with (
        running_daemon(size="1MiB") as small,
        pair(small) as (d, _),
        Client(str(small.socket_path), timeout_s=PATIENCE_S) as client,
    ):
        layout = d.workers[0]._pool.layout(BASE)
        # Being written, so it cannot be evicted, and nothing more of a turn's size fits.
        client.prepare_receive(
            "large", (1 << 20) // layout.token_bytes // BLOCK * BLOCK - BLOCK, fingerprint(layout)
        )
        held, answer = d.finish("r1", TURN, D_BLOCKS)
        assert not held and answer["reason"] == "snapshot-buf-full"
        assert d.count("pushes", "snapshot-buf-full") == 1


def test_what_is_answered_late_is_taken_up_in_a_later_step(daemon: Any) -> None:
    with pair(daemon, answer_wait_s=0.0) as (d, p):
        held, _ = d.finish("r1", TURN, D_BLOCKS)
        assert held
        d.wait_sent("r1")
        assert d.count("pushes", "ok") == 1
        assert p.load("r2", NEXT, P_BLOCKS) == SENT and p.failed == [set()]


def test_what_is_refused_late_is_given_back(daemon: Any) -> None:
    with Engine("D", daemon.socket_path, answer_wait_s=0.0) as d:
        held, _ = d.finish("r1", TURN, D_BLOCKS, lora="nobody's")
        if held:
            d.wait_sent("r1")
        assert d.count("pushes", "layout-mismatch") == 1


def test_a_step_waits_once_for_a_daemon_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    wait = Pending.wait

    def counted(self: Any, timeout_s: float | None = None) -> Any:
        waits.append(timeout_s)
        return wait(self, timeout_s)

    with running_daemon() as daemon, pair(daemon, answer_wait_s=0.05, timeout_s=2.0) as (d, p):
        assert p.match("r0", NEXT) == 0
        p.step()
        d.step()
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            monkeypatch.setattr(Pending, "wait", counted)
            assert [p.scheduler.match(view_of(f"r{at}", NEXT), 0) for at in range(1, 20)] == [None] * 19
            assert len(waits) == 1
            assert [d.finish(f"r{at}", TURN, D_BLOCKS)[0] for at in range(20, 30)] == [True] * 10
            assert len(waits) == 2
            monkeypatch.setattr(Pending, "wait", wait)
            assert p.match("r1", NEXT) == 0, "computed, when the call's time is over"
            for at in range(20, 30):
                d.wait_sent(f"r{at}")
        finally:
            daemon.process.send_signal(signal.SIGCONT)


def test_after_a_restart_of_the_daemon_p_declares_without_being_asked_and_pushes_go_on(daemon: Any) -> None:
    with running_daemon() as other, pair(other) as (d, p):
        d.push("r1", TURN, D_BLOCKS)
        other.kill()
        other.restart()

        def is_pushed() -> bool:
            d.step()
            return d.finish("r2", TURN, D_BLOCKS)[0]

        wait_for(is_pushed, "P has declared its layout again", PATIENCE_S)
        d.wait_sent("r2")
        assert p.load("r3", NEXT, P_BLOCKS) == SENT
        assert p.failed == [set()] and p.holds(P_BLOCKS[:5], d, D_BLOCKS[:5])


def test_what_was_found_in_a_daemon_that_died_is_reported(daemon: Any) -> None:
    with running_daemon() as other, pair(other, timeout_s=1.0) as (d, p):
        d.push("r1", TURN, D_BLOCKS)
        assert p.match("r2", NEXT) == SENT
        other.kill()
        p.scheduler.allocated(view_of("r2", NEXT), P_BLOCKS, SENT)
        p.wait_loaded("r2")
        assert p.failed == [set(P_BLOCKS[:5])]
        other.restart()


# --- the first step ---------------------------------------------------------------------------------------


def scheduler_without_layout(role: str, now: list[float]) -> SchedulerSide:
    return SchedulerSide(
        VllmSettings(socket_path="/nowhere.sock", timeout_s=2.0), block_tokens=BLOCK, ranks=(0,),
        is_producer="D" in role, is_consumer="P" in role, name="test", is_one_process=True,
        clock=lambda: now[0],
    )  # fmt: skip


def test_the_first_request_waits_for_the_step_that_brings_the_layout_and_not_for_ever() -> None:
    now = [50.0]
    side = scheduler_without_layout("P", now)
    assert not side.has_layout
    assert side.match(view_of("r1", NEXT), 0) is None
    now[0] += 1.9
    assert side.match(view_of("r1", NEXT), 0) is None
    now[0] += 0.2
    assert side.match(view_of("r1", NEXT), 0) == 0
    side.close()


def test_a_d_without_layout_neither_waits_nor_holds() -> None:
    side = scheduler_without_layout("D", [50.0])
    assert side.match(view_of("r1", NEXT), 0) == 0
    assert side.finished(view_of("r1", TURN), D_BLOCKS) == (False, None)
    side.close()


# --- bounds ------------------------------------------------------------------------------------------------


def test_so_many_requests_are_held_and_no_more(daemon: Any) -> None:
    with pair(daemon, held_requests_max=2) as (d, _):
        answers = [d.finish(f"r{at}", TURN, D_BLOCKS) for at in range(3)]
        assert [held for held, _ in answers] == [True, True, False]
        assert answers[2][1]["reason"] == "too-many-held"
        d.wait_sent("r0")
        d.wait_sent("r1")
        assert d.finish("r3", TURN, D_BLOCKS)[0]


def test_blocks_are_held_for_so_long_and_no_longer(daemon: Any) -> None:
    now = [0.0]
    with (
        pair(daemon),
        Engine("D", daemon.socket_path, start=False, worker_clock=lambda: now[0], hold_s=30.0) as d,
    ):
        assert d.finish("r1", TURN, D_BLOCKS)[0]
        d.step()
        now[0] = 31.0
        d.start()
        d.wait_sent("r1")
        assert d.count("pushes", "held-too-long") == 1


def test_a_push_that_does_not_end_is_cancelled_when_its_time_is_over(
    daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Endless:
        bytes_done = 0
        done = False
        cancelled = 0

        def step(self, max_bytes: int) -> bool:
            return False

        def cancel(self, reason: Reason = Reason.TRANSFER_FAILED) -> None:
            self.cancelled += 1

    now, job = [0.0], Endless()
    monkeypatch.setattr(Pusher, "start_granted", lambda *_, **__: job)
    with pair(daemon), Engine("D", daemon.socket_path, worker_clock=lambda: now[0], hold_s=30.0) as d:
        assert d.finish("r1", TURN, D_BLOCKS)[0]
        d.step()
        wait_for(lambda: d.workers[0]._new_pushes[0].job is job, "it is under way", PATIENCE_S)
        assert not d.workers[0].finished()[0]
        now[0] = 31.0
        d.wait_sent("r1")
        assert job.cancelled == 1 and d.count("pushes", "held-too-long") == 1


def test_a_request_is_loaded_for_once_however_often_its_blocks_are_told(daemon: Any) -> None:
    with pair(daemon) as (d, p):
        d.push("r1", TURN, D_BLOCKS)
        assert p.match("r2", NEXT) == SENT
        for num_external_tokens in (0, SENT, 0, SENT):
            p.scheduler.allocated(view_of("r2", NEXT), P_BLOCKS, num_external_tokens)
        (order,) = p.scheduler.orders().loads
        assert order.block_ids == P_BLOCKS[:5]


def test_what_p_has_evicted_since_it_looked_counts(daemon: Any) -> None:
    with pair(daemon) as (d, p):
        d.push("r1", TURN, D_BLOCKS, session="chat")
        assert p.load("r2", NEXT, P_BLOCKS, session="chat") == SENT
        d.push("r3", NEXT, [*D_BLOCKS[:5], 50, 51, 52], session="chat")
        third = [*NEXT, *tokens_of(9, seed=2)]
        assert p.match("r4", third, SENT, session="chat") == 8
        assert p.match("r4", third, SENT + 4, session="chat") == 4
        assert p.match("r4", third, SENT - 4, session="chat") == 0, "the suffix starts later"


def test_a_daemon_that_failed_is_not_asked_for_a_while(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    submit = Client.submit
    with Engine("DP", tmp_path / "none.sock", start=False, retry_s=600.0) as both:
        monkeypatch.setattr(Client, "submit", lambda *args: asked.append(1) or submit(*args))
        for at in range(5):
            assert both.match(f"p{at}", NEXT) == 0
            assert both.finish(f"d{at}", TURN, D_BLOCKS)[0] is False
        assert len(asked) == 1
        assert both.count("lookups", "daemon-resting") == 4


@pytest.mark.parametrize(("block_ids", "fits"), [([3, 1], True), ([3], False), ([3, 1, 2], False)])
def test_blocks_that_are_not_as_many_as_are_missing_are_not_filled(block_ids: list[int], fits: bool) -> None:
    blocks = working.OrderedBlocks(BLOCK)
    blocks.order = LoadOrder(
        request_id="r", session_id="s", slab_handle=1, layout_fingerprint="", token_ids=[],
        resident_tokens=4, wanted_tokens=12, block_ids=block_ids,
    )  # fmt: skip
    slots = blocks.allocate(8)
    assert (slots is not None) is fits
    assert slots is None or slots.tolist() == [12, 13, 14, 15, 4, 5, 6, 7]


def test_a_request_that_was_given_up_while_it_was_loaded_is_reported_all_the_same(daemon: Any) -> None:
    with pair(daemon) as (d, p):
        d.push("r1", TURN, D_BLOCKS)
        assert p.match("r2", NEXT) == SENT
        p.scheduler.allocated(view_of("r2", NEXT), P_BLOCKS, SENT)
        assert p.scheduler.finished(view_of("r2", NEXT, num_output_tokens=0), P_BLOCKS) == (False, None)
        p.wait_loaded("r2")


def test_a_bug_in_a_load_is_reported_as_its_failure_and_the_next_one_goes_on(
    daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    with pair(daemon) as (d, p), structlog.testing.capture_logs() as logs:
        d.push("r1", TURN, D_BLOCKS)
        with monkeypatch.context() as patch:
            patch.setattr(Ingester, "start", broken)
            assert p.load("r2", NEXT, P_BLOCKS) == SENT
        assert p.failed == [set(P_BLOCKS[:5])]
        assert p.load("r3", NEXT, P_BLOCKS) == SENT
        assert p.count("loads", "ok") == 1
    assert any("bug" in line["event"] for line in logs)


def test_a_bug_in_a_push_gives_the_blocks_back(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    with pair(daemon) as (d, _):
        with monkeypatch.context() as patch:
            patch.setattr(Pusher, "start_granted", broken)
            assert d.finish("r1", TURN, D_BLOCKS)[0]
            d.wait_sent("r1")
        assert d.count("pushes", "bug") == 1
        assert d.finish("r2", TURN, D_BLOCKS)[0]
        d.wait_sent("r2")
        assert d.count("pushes", "ok") == 1


def test_the_daemons_log_says_who_pushed(daemon: Any) -> None:
    with pair(daemon) as (d, _):
        handle = d.push("r1", TURN, D_BLOCKS)
        peers = {
            getattr(line.record, "peer", "")
            for line in log_events(daemon.log_path)
            if getattr(line.record, "slab_handle", 0) == handle
        }
        assert "test D scheduler" in peers
