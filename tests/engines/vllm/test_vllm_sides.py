"""Both sides of the connector around a real daemon, without vLLM: what is loaded, held and reported."""

from typing import Any

import pytest
import torch
from raw_client import wait_for
from vllm_cases import (
    BASE,
    BLOCK,
    D_BLOCKS,
    NEXT,
    NUM_BLOCKS,
    P_BLOCKS,
    PATIENCE_S,
    SENT,
    TURN,
    Engine,
    flip,
    pair,
    running_daemon,
    session_of,
    tokens_of,
    view_of,
    wait_declared,
)

from snapd.client import Client
from snapd.core.events import State
from snapd.engines.vllm.tally import total
from snapd.errors import Reason
from snapd.layout import fingerprint

# --- a turn ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("session", ["chat", ""])
def test_p_starts_from_what_d_computed(daemon: Any, session: str) -> None:
    """The session's name is not needed: the snapshot is found by its tokens too."""
    with pair(daemon) as (d, p):
        handle = d.push("r1", TURN, D_BLOCKS, session=session)
        before = [cache.clone() for cache in p.caches[0]]
        assert p.load("r2", NEXT, P_BLOCKS) == SENT
        assert p.failed == [set()]
        assert p.holds(P_BLOCKS[:5], d, D_BLOCKS[:5])
        others = [block for block in range(NUM_BLOCKS) if block not in P_BLOCKS[:5]]
        assert all(torch.equal(a[others], b[others]) for a, b in zip(p.caches[0], before, strict=True))
        assert session_of(daemon, handle).state is State.INGESTED
        assert (p.count("loads", "ok"), p.count("loaded_tokens")) == (1, SENT)
        assert (d.count("pushes", "ok"), d.count("pushed_tokens")) == (1, SENT)


def test_the_answer_names_the_session_and_the_attempt(daemon: Any) -> None:
    with pair(daemon) as (d, _):
        held, answer = d.finish("r1", TURN, D_BLOCKS)
        assert held and answer["session_id"] == "vllm-r1" and answer["tokens"] == SENT
        assert session_of(daemon, answer["slab_handle"]).session_id == "vllm-r1"
        held, answer = d.finish("r2", TURN, D_BLOCKS, session="chat")
        assert held and answer["session_id"] == "chat"


def test_past_what_p_holds_whole_blocks_are_loaded(daemon: Any) -> None:
    with pair(daemon) as (d, p):
        d.push("r1", TURN, D_BLOCKS)
        assert p.load("r2", NEXT, P_BLOCKS, resident=8) == SENT - 8
        assert p.holds(P_BLOCKS[2:5], d, D_BLOCKS[2:5])
        assert not p.holds(P_BLOCKS[:1], d, D_BLOCKS[:1])


def test_the_second_turn_sends_what_p_lacks_and_it_goes_onto_what_p_holds(daemon: Any) -> None:
    with pair(daemon) as (d, p):
        d.push("r1", TURN, D_BLOCKS, session="chat")
        assert p.load("r2", NEXT, P_BLOCKS, session="chat") == SENT
        handle = d.push("r3", NEXT, [*D_BLOCKS[:5], 50, 51, 52], session="chat")
        view = session_of(daemon, handle)
        assert (view.token_start, view.num_tokens) == (SENT, 8)
        third = [*NEXT, *tokens_of(9, seed=2)]
        assert p.load("r4", third, [*P_BLOCKS[:5], 60, 61, 62, 63], resident=SENT, session="chat") == 8
        assert p.holds([60, 61], d, [50, 51])


def test_without_hints_everything_is_sent(daemon: Any) -> None:
    with pair(daemon, use_resident_hint=False) as (d, p):
        d.push("r1", TURN, D_BLOCKS, session="chat")
        assert p.load("r2", NEXT, P_BLOCKS, session="chat") == SENT
        handle = d.push("r3", NEXT, [*D_BLOCKS[:5], 50, 51, 52], session="chat")
        assert session_of(daemon, handle).token_start == 0


def test_a_suffix_whose_prefix_p_has_evicted_is_ended_and_the_next_push_is_full(daemon: Any) -> None:
    with pair(daemon) as (d, p):
        d.push("r1", TURN, D_BLOCKS, session="chat")
        assert p.load("r2", NEXT, P_BLOCKS, session="chat") == SENT
        suffix = d.push("r3", NEXT, [*D_BLOCKS[:5], 50, 51, 52], session="chat")
        third = [*NEXT, *tokens_of(9, seed=2)]
        assert p.load("r4", third, P_BLOCKS, session="chat") == 0

        def is_ended() -> bool:
            p.step()
            return session_of(daemon, suffix).state is State.ABORTED

        wait_for(is_ended, "the suffix is ended", PATIENCE_S)
        assert session_of(daemon, suffix).reason is Reason.PREFIX_NOT_RESIDENT
        assert p.count("loads") == 1, "nobody waited for it"
        full = d.push("r5", third, [*D_BLOCKS[:5], 50, 51, 52, 53, 54], session="chat")
        assert session_of(daemon, full).token_start == 0


# --- which tokens, which session, which namespace ----------------------------------------------------------


def test_of_its_own_session_a_request_takes_the_prefix_that_it_shares(daemon: Any) -> None:
    edited = [*TURN[:14], *tokens_of(20, seed=3)]
    with pair(daemon) as (d, p):
        handle = d.push("r1", TURN, D_BLOCKS, session="chat")
        assert p.load("r2", edited, P_BLOCKS, session="chat") == 12
        assert p.failed == [set()] and p.holds(P_BLOCKS[:3], d, D_BLOCKS[:3])
        assert session_of(daemon, handle).state is State.INGESTED


def test_another_sessions_snapshot_is_left_to_it_unless_the_prompt_goes_on_from_it(daemon: Any) -> None:
    with pair(daemon) as (d, p):
        handle = d.push("r1", TURN, D_BLOCKS, session="chat")
        assert p.load("r2", [*TURN[:14], *tokens_of(20, seed=3)], P_BLOCKS, session="else") == 0
        assert session_of(daemon, handle).state is State.READY
        assert p.load("r3", NEXT, P_BLOCKS, session="else") == SENT


def test_other_tokens_find_nothing(daemon: Any) -> None:
    with pair(daemon) as (d, p):
        handle = d.push("r1", TURN, D_BLOCKS, session="chat")
        assert p.load("r2", [5, *NEXT[1:]], P_BLOCKS) == 0
        assert session_of(daemon, handle).state is State.READY


def test_what_was_found_by_name_and_has_other_tokens_is_not_used(daemon: Any) -> None:
    """As when the daemon keeps no page keys of it: the digest tells."""
    with pair(daemon) as (d, p):
        handle = d.push("r1", TURN, D_BLOCKS, session="chat")
        assert p.load("r2", [5, *NEXT[1:]], P_BLOCKS, session="chat") == SENT
        assert p.failed == [set(P_BLOCKS[:5])]
        assert session_of(daemon, handle).reason is Reason.TOKEN_MISMATCH
        assert p.count("loads", "token-mismatch") == 1


@pytest.mark.parametrize("namespace", [{"lora": "a"}, {"cache_salt": "pepper"}])
def test_each_namespace_has_snapshots_of_its_own(daemon: Any, namespace: dict[str, str]) -> None:
    with pair(daemon) as (d, p):
        held, answer = d.finish("r1", TURN, D_BLOCKS, **namespace)
        assert not held and answer["reason"] == "layout-mismatch", "no P has met it yet"
        assert p.match("r2", NEXT, **namespace) == 0

        def is_declared() -> bool:
            p.step()
            held, _ = d.finish("r3", TURN, D_BLOCKS, **namespace)
            return held

        wait_for(is_declared, "P has declared it", PATIENCE_S)
        d.wait_sent("r3")
        assert p.load("r4", NEXT, P_BLOCKS) == 0
        assert p.load("r5", NEXT, P_BLOCKS, lora="b") == 0
        assert p.load("r6", NEXT, P_BLOCKS, **namespace) == SENT
        assert p.failed == [set()]


def test_after_a_reset_of_both_only_what_came_later_is_used(daemon: Any) -> None:
    with pair(daemon) as (d, p):
        d.push("r1", TURN, D_BLOCKS)
        assert p.match("r2", NEXT) == SENT
        p.scheduler.forget_all()
        assert p.match("r2", NEXT) == 0, "what was found before"
        assert p.match("r3", NEXT) == 0
        held, answer = d.finish("r4", TURN, D_BLOCKS)
        assert not held or session_of(daemon, answer["slab_handle"]).layout_fingerprint == fingerprint(
            d.workers[0]._pool.layout(BASE)
        )
        assert p.match("r5", NEXT) == 0, "D was not told"
        d.scheduler.forget_all()

        def is_pushed() -> bool:
            p.step()
            held, _ = d.finish("r6", TURN, D_BLOCKS)
            return held

        wait_for(is_pushed, "P has declared the namespace after the reset", PATIENCE_S)
        d.wait_sent("r6")
        assert p.load("r7", NEXT, P_BLOCKS) == SENT


@pytest.mark.parametrize(
    "request_",
    [
        {"is_plain": False},
        {"params": {"snapd": {"push": False}}},
        {"num_output_tokens": 0},
        {"num_computed_tokens": 3},
    ],
    ids=["images", "not wanted", "given up", "too short"],
)
def test_what_d_does_not_send_is_not_held(daemon: Any, request_: dict[str, Any]) -> None:
    with pair(daemon) as (d, _):
        held, answer = d.finish("r1", TURN, D_BLOCKS, **request_)
        assert not held and answer["reason"] in ("not-wanted", "too-short")
        assert d.count("pushes") == 0


def test_a_request_whose_blocks_are_gone_is_not_sent(daemon: Any) -> None:
    """As of one that was preempted while its last token was under way."""
    with pair(daemon) as (d, _):
        assert d.finish("r1", TURN, [])[0] is False


@pytest.mark.parametrize("request_", [{"is_plain": False}, {"params": {"snapd": {"load": False}}}])
def test_what_p_is_not_to_load_it_does_not_look_for(daemon: Any, request_: dict[str, Any]) -> None:
    with pair(daemon) as (d, p):
        d.push("r1", TURN, D_BLOCKS)
        assert p.match("r2", NEXT, **request_) == 0
        assert p.count("lookups") == 0


def test_what_saves_too_little_is_not_looked_for(daemon: Any) -> None:
    with pair(daemon, min_load_tokens=29) as (_, p):
        assert p.match("r2", NEXT) == 0
        assert p.count("lookups") == 0


def test_a_request_may_name_another_daemon_that_is_configured(daemon: Any) -> None:
    with running_daemon() as second, pair(daemon, socket_paths=(str(second.socket_path),)) as (d, _):
        with Engine("P", second.socket_path, seed=3) as p:
            wait_declared(d, second)
            there = {"snapd": {"socket_path": str(second.socket_path)}}
            d.push("r1", TURN, D_BLOCKS, params=there)
            assert p.load("r2", NEXT, P_BLOCKS) == SENT
        held, answer = d.finish("r3", TURN, D_BLOCKS, params={"snapd": {"socket_path": "/else.sock"}})
        assert not held and answer["reason"] == "socket-not-allowed"


# --- bytes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [NEXT, [*TURN[:14], *tokens_of(20, seed=3)]], ids=["all", "a part"])
def test_a_corrupt_snapshot_is_reported_and_never_used(daemon: Any, wanted: list[int]) -> None:
    with pair(daemon) as (d, p):
        handle = d.push("r1", TURN, D_BLOCKS, session="chat")
        flip(daemon, handle)
        num_tokens = p.load("r2", wanted, P_BLOCKS, session="chat")
        assert p.failed == [set(P_BLOCKS[: num_tokens // BLOCK])] and num_tokens
        assert p.count("loads", "checksum-mismatch") == 1
        assert session_of(daemon, handle).reason is Reason.CHECKSUM_MISMATCH
        assert p.match("r2", wanted) == 0, "a request tries once"


def test_without_verification_a_corrupt_byte_gets_through(daemon: Any) -> None:
    """The control: the test above can fail."""
    with pair(daemon, verify=False) as (d, p):
        flip(daemon, d.push("r1", TURN, D_BLOCKS))
        assert p.load("r2", NEXT, P_BLOCKS) == SENT
        assert p.failed == [set()] and not p.holds(P_BLOCKS[:5], d, D_BLOCKS[:5])


def test_a_snapshot_that_vanished_after_it_was_found_is_reported(daemon: Any) -> None:
    with pair(daemon) as (d, p):
        handle = d.push("r1", TURN, D_BLOCKS)
        assert p.match("r2", NEXT) == SENT
        with Client(str(daemon.socket_path), timeout_s=PATIENCE_S) as client:
            client.abort(handle, drained=True)
        p.scheduler.allocated(view_of("r2", NEXT), P_BLOCKS, SENT)
        p.wait_loaded("r2")
        assert p.failed == [set(P_BLOCKS[:5])]


def test_of_two_that_race_for_a_snapshot_one_gets_it(daemon: Any) -> None:
    with pair(daemon) as (d, p), Engine("P", daemon.socket_path, seed=4) as other:
        d.push("r1", TURN, D_BLOCKS)
        assert p.match("r2", NEXT) == other.match("r3", NEXT) == SENT
        p.scheduler.allocated(view_of("r2", NEXT), P_BLOCKS, SENT)
        p.wait_loaded("r2")
        other.scheduler.allocated(view_of("r3", NEXT), P_BLOCKS, SENT)
        other.wait_loaded("r3")
        assert p.failed == [set()] and p.holds(P_BLOCKS[:5], d, D_BLOCKS[:5])
        assert other.failed == [set(P_BLOCKS[:5])]


# --- several workers ---------------------------------------------------------------------------------------


def test_every_worker_has_a_shard_of_its_own(daemon: Any) -> None:
    with pair(daemon, ranks=2) as (d, p):
        handle = d.push("r1", TURN, D_BLOCKS)
        assert not torch.equal(d.caches[0][0], d.caches[1][0])
        assert p.load("r2", NEXT, P_BLOCKS) == SENT
        assert p.failed == [set(), set()] and p.holds(P_BLOCKS[:5], d, D_BLOCKS[:5])
        assert session_of(daemon, handle).state is State.INGESTED


def test_when_one_shard_is_corrupt_no_worker_says_that_it_has_it(daemon: Any) -> None:
    with pair(daemon, ranks=2) as (d, p):
        flip(daemon, d.push("r1", TURN, D_BLOCKS), rank=1)
        assert p.load("r2", NEXT, P_BLOCKS) == SENT
        assert p.failed == [set(P_BLOCKS[:5])] * 2


def test_a_worker_that_waits_in_vain_for_another_gives_up(daemon: Any) -> None:
    now = [0.0]
    with (
        pair(daemon, ranks=2) as (d, _),
        Engine("P", daemon.socket_path, ranks=2, start=False, worker_clock=lambda: now[0]) as p,
    ):
        d.push("r1", TURN, D_BLOCKS)
        p.workers[0].start()
        assert p.match("r2", NEXT) == SENT
        p.scheduler.allocated(view_of("r2", NEXT), P_BLOCKS, SENT)

        def is_voting() -> bool:
            p.step()
            loads = p.workers[0]._loads
            return bool(loads) and loads[0].job is not None and loads[0].job.is_waiting

        wait_for(is_voting, "rank 0 has voted", PATIENCE_S)
        now[0] = 1_000.0

        def is_reported() -> bool:
            p.step()
            return "r2" in p.loaded[0]

        wait_for(is_reported, "rank 0 gives up", PATIENCE_S)
        assert p.failed[0] == set(P_BLOCKS[:5])
        assert total(p.counts, "loads", "load-timeout") == 1, "before the lease was over"


def test_a_worker_whose_push_fails_speaks_for_its_own_shard_only() -> None:
    now = [0.0]

    def quarantined(client: Client) -> list[bool]:
        return [arena.quarantined_bytes > 0 for arena in client.stats().core.arenas]

    with (
        running_daemon(ranks=2) as daemon,
        pair(daemon, ranks=2),
        Engine("D", daemon.socket_path, ranks=2, start=False, worker_clock=lambda: now[0]) as d,
        Client(str(daemon.socket_path), timeout_s=PATIENCE_S) as client,
    ):
        held, answer = d.finish("r1", TURN, D_BLOCKS)
        assert held
        d.step()
        now[0] = 1_000.0  # Longer than blocks are held.
        d.workers[1].start()
        handle = answer["slab_handle"]
        wait_for(lambda: client.get(handle).session.state is State.ABORTED, "rank 1 has failed", PATIENCE_S)
        wait_for(lambda: quarantined(client) == [True, False], "rank 0 may still be writing", PATIENCE_S)
        d.workers[0].start()
        wait_for(lambda: quarantined(client) == [False, False], "rank 0 writes no more", PATIENCE_S)


def test_shards_of_another_number_of_workers_are_not_taken(daemon: Any) -> None:
    """Their layouts differ already; the daemon is not even asked."""
    with pair(daemon, ranks=2) as (d, _), Engine("P", daemon.socket_path) as p:
        d.push("r1", TURN, D_BLOCKS)
        assert p.match("r2", NEXT) == 0
