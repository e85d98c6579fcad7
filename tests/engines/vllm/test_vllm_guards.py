"""What keeps a request's blocks, its tokens and the engine's time safe when things come in another order."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import torch
from raw_client import wait_for
from vllm_cases import (
    BASE,
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

from snapd import calls
from snapd.client import Client
from snapd.engines.vllm import scheduling
from snapd.engines.vllm.orders import Orders
from snapd.engines.vllm.settings import VllmSettings
from snapd.engines.vllm.working import WorkerSide
from snapd.errors import ConfigError, ConnectionLost, LimitReached, Reason
from snapd.kv.ingest import Ingester
from snapd.kv.push import Pusher
from snapd.kvevents.hashes import unpack_token_ids
from snapd.layout import Layout

# --- a key --------------------------------------------------------------------------------------------------


def key_file(directory: Path, seed: int) -> str:
    path = directory / f"key{seed}"
    path.write_bytes(bytes((seed * 91 + at * 37) % 256 for at in range(64)))
    path.chmod(0o600)
    return str(path)


@pytest.mark.parametrize("ranks", [1, 2])
def test_with_a_key_on_both_sides_a_turn_is_loaded(daemon: Any, tmp_path: Path, ranks: int) -> None:
    key = {"integrity_key_path": key_file(tmp_path, 1), "integrity_algorithm": "blake2b"}
    with pair(daemon, ranks=ranks, **key) as (d, p):
        d.push("r1", TURN, D_BLOCKS, session="chat")
        assert p.load("r2", NEXT, P_BLOCKS, session="chat") == SENT
        assert p.failed == [set()] * ranks and p.holds(P_BLOCKS[:5], d, D_BLOCKS[:5])
        d.push("r3", NEXT, [*D_BLOCKS[:5], 50, 51, 52], session="chat")
        edited = [*NEXT[:26], *tokens_of(20, seed=3)]
        assert p.load("r4", edited, [*P_BLOCKS[:5], 60, 61], SENT, session="chat") == 4, "a part of it"
        assert p.failed == [set()] * ranks and p.holds([60], d, [50])


@pytest.mark.parametrize("keys", [(1, 2), (1, 0), (0, 1)], ids=["another key", "D's only", "P's only"])
def test_without_the_same_key_on_both_sides_nothing_is_used(
    daemon: Any, tmp_path: Path, keys: tuple[int, int]
) -> None:
    with pair(daemon):
        of_d, of_p = (
            {"integrity_key_path": key_file(tmp_path, key), "integrity_algorithm": "blake2b"} if key else {}
            for key in keys
        )
        with (
            Engine("D", daemon.socket_path, seed=1, **of_d) as d,
            Engine("P", daemon.socket_path, **of_p) as p,
        ):
            d.push("r1", TURN, D_BLOCKS)
            assert p.load("r2", NEXT, P_BLOCKS) == SENT
            assert p.failed == [set(P_BLOCKS[:5])]
            assert p.count("loads", "checksum-mismatch") == 1


@pytest.mark.parametrize(
    ("settings", "device", "told"),
    [({"verify": False}, "cpu", "verify is off"), ({}, "cuda:0", "pools on the host")],
)
def test_a_key_that_cannot_be_used_is_refused_when_the_engine_starts(
    tmp_path: Path, settings: dict[str, Any], device: str, told: str
) -> None:
    given = VllmSettings(
        socket_path=str(tmp_path / "none.sock"), integrity_key_path=key_file(tmp_path, 1),
        integrity_algorithm="blake2b", **settings,
    )  # fmt: skip
    pool: Any = SimpleNamespace(device=torch.device(device), page_size_tokens=4)
    with pytest.raises(ConfigError, match=told):
        WorkerSide(
            pool, BASE, given, rank=0, num_ranks=1, is_producer=True, is_consumer=True, name="test"
        )  # fmt: skip


# --- one thing after another --------------------------------------------------------------------------------


def test_a_request_that_is_given_up_while_it_is_loaded_for_is_not_pushed_as_well(daemon: Any) -> None:
    """Of one that was preempted and had answered already: its blocks would be given back twice."""
    with pair(daemon) as (d, _), Engine("DP", daemon.socket_path, seed=3) as both:
        d.push("r1", TURN, D_BLOCKS)
        assert both.match("r2", NEXT) == SENT
        both.scheduler.allocated(view_of("r2", NEXT), P_BLOCKS, SENT)
        held, answer = both.finish("r2", NEXT, P_BLOCKS, num_output_tokens=3)
        assert (held, answer["reason"]) == (False, "still-loading")
        both.wait_loaded("r2")
        assert both.finish("r2", NEXT, P_BLOCKS, num_output_tokens=3)[0], "all of it is there by now"
        both.wait_sent("r2")


def test_what_was_begun_before_a_reset_is_not_pushed_after_it(daemon: Any) -> None:
    """Its KV may be of the weights before, and those of the weights after."""
    with pair(daemon) as (d, _):
        d.scheduler.arrived("r1")
        d.scheduler.arrived("r2")
        assert d.finish("r2", TURN, D_BLOCKS)[0]
        d.scheduler.forget_all()
        held, answer = d.finish("r1", TURN, D_BLOCKS)
        assert (held, answer["reason"]) == (False, "outdated")
        for request_id in ("r1", "r2"):
            d.scheduler.arrived(request_id)
            assert d.finish(request_id, TURN, D_BLOCKS)[1].get("reason") != "outdated", "a new one"


def test_of_many_new_requests_a_step_looks_for_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "HASHED_TOKENS_MAX", 40)
    with Engine("P", tmp_path / "none.sock", start=False) as p:
        views = [view_of(f"r{at}", NEXT) for at in range(3)]
        assert [p.scheduler.match(view, 0) for view in views] == [0, 0, None]
        p.scheduler.orders()
        assert [p.scheduler.match(view, 0) for view in views] == [0, 0, 0]


def test_keys_are_made_of_no_more_tokens_than_the_daemon_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    keys = scheduling.page_keys

    def counted(token_ids: list[int], block_tokens: int) -> tuple[str, ...]:
        hashed.append(len(token_ids))
        return keys(token_ids, block_tokens)

    monkeypatch.setattr(scheduling, "page_keys", counted)
    with running_daemon(page_keys_max=3) as daemon, pair(daemon) as (d, _):
        assert d.finish("r1", TURN, D_BLOCKS)[1]["reason"] == "invalid-request", "it has not said so yet"
        assert d.finish("r2", TURN, D_BLOCKS)[0]
        d.wait_sent("r2")
    assert hashed == [SENT, 12]


def test_a_namespace_that_p_met_while_the_daemon_was_away_is_declared_when_it_is_back() -> None:
    with running_daemon() as daemon:
        daemon.kill()
        with Engine("P", daemon.socket_path) as p, Engine("D", daemon.socket_path) as d:
            assert p.match("r1", NEXT, cache_salt="pepper") == 0
            p.step()
            worker = p.workers[0]
            wait_for(lambda: not worker._new_layouts, "the worker has taken it", PATIENCE_S)
            daemon.restart()

            def is_held() -> bool:
                d.step()
                return d.finish("r2", TURN, D_BLOCKS, cache_salt="pepper")[0]

            wait_for(is_held, "P has declared it", PATIENCE_S)
            d.wait_sent("r2")
            assert not worker._undeclared


@pytest.mark.parametrize(("error", "times"), [(ConnectionLost("x"), 2), (LimitReached("x"), 1)])
def test_a_layout_that_the_daemon_did_not_hear_of_is_declared_again_and_one_that_it_refused_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, times: int
) -> None:
    told: list[Layout] = []

    def first_time(self: Client, rank: int, layout: Layout) -> None:
        del self, rank
        told.append(layout)
        if len(told) == 1:
            raise error

    monkeypatch.setattr(Client, "declare_layout", first_time)
    now = [0.0]
    layout = Layout(k_stride_bytes=(8,))
    with Engine("P", tmp_path / "none.sock", start=False, worker_clock=lambda: now[0]) as p:
        (worker,) = p.workers
        worker.take(Orders(layouts=[layout]))
        worker._declare()
        assert told == [layout], "and not again at once"
        now[0] += 1.0
        worker._declare()
        worker._declare()
        assert told == [layout] * times


# --- bugs ---------------------------------------------------------------------------------------------------


class BrokenJob:
    """A load or push whose every step raises."""

    done = False
    is_waiting = False
    is_on_device = False
    bytes_done = 0
    steps = 0
    cancelled = 0

    def step(self, max_bytes: int) -> bool:
        del max_bytes
        self.steps += 1
        raise ZeroDivisionError

    def cancel(self, reason: Reason = Reason.TRANSFER_FAILED) -> bool:
        del reason
        self.cancelled += 1
        return True


def test_blocks_that_a_gpu_still_writes_to_are_not_given_back_because_of_a_bug(
    daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = BrokenJob()
    job.is_on_device = True
    with pair(daemon) as (d, p), structlog.testing.capture_logs():
        d.push("r1", TURN, D_BLOCKS)
        assert p.match("r2", NEXT) == SENT
        monkeypatch.setattr(Ingester, "start", lambda *_, **__: job)
        p.scheduler.allocated(view_of("r2", NEXT), P_BLOCKS, SENT)
        p.step()
        wait_for(lambda: job.steps > 2, "the bug was met", PATIENCE_S)
        p.step()
        assert p.loaded == [set()] and p.failed == [set()]
        job.is_on_device = False
        p.wait_loaded("r2")
        assert p.failed == [set(P_BLOCKS[:5])]


def test_a_push_with_a_bug_is_cancelled(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds staging memory, and the daemon waits for it."""
    job = BrokenJob()
    monkeypatch.setattr(Pusher, "start_granted", lambda *_, **__: job)
    with pair(daemon) as (d, _), structlog.testing.capture_logs():
        assert d.finish("r1", TURN, D_BLOCKS)[0]
        d.wait_sent("r1")
        wait_for(lambda: job.cancelled == 1, "it is cancelled", PATIENCE_S)


@pytest.mark.parametrize("at", ["socket_path", "socket_paths"])
def test_an_address_that_is_none_is_refused_when_the_engine_starts(at: str) -> None:
    """And not when the first request names it."""
    wrong = "tls://nowhere"
    with pytest.raises(ConfigError, match=wrong):
        Engine("D", wrong) if at == "socket_path" else Engine("D", "/x.sock", socket_paths=(wrong,))


# --- KV events ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sent", [True, False])
def test_token_ids_go_to_the_daemon_for_its_kv_events_when_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch, is_sent: bool
) -> None:
    sent: list[bytes] = []
    prepare = calls.prepare_receive

    def noted(*args: Any, **more: Any) -> Any:
        sent.append(more["token_ids"])
        return prepare(*args, **more)

    options = {"send_token_ids": True} if is_sent else {}
    with running_daemon(kv_events_address="tcp://127.0.0.1:0") as other, pair(other, **options) as (d, _):
        monkeypatch.setattr(calls, "prepare_receive", noted)
        d.push("r1", TURN, D_BLOCKS)
        d.push("r2", tokens_of(22, seed=5), D_BLOCKS)
    assert unpack_token_ids(sent[-1]) == (tokens_of(22, seed=5)[:SENT] if is_sent else [])


def test_no_token_ids_go_to_a_daemon_that_publishes_nothing(
    daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    prepare = calls.prepare_receive
    with pair(daemon, send_token_ids=True) as (d, _):
        d.push("r1", TURN, D_BLOCKS)
        monkeypatch.setattr(
            calls, "prepare_receive", lambda *a, **k: sent.append(k["token_ids"]) or prepare(*a, **k)
        )
        d.push("r2", TURN, D_BLOCKS)
    assert sent == [b""]
