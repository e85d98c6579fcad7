"""Runs of small traces: what becomes of each attempt, and why."""

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from replay_cases import generate, request, small, turns_of

from snapd.core import records as r
from snapd.errors import ConfigError, InvariantBroken
from snapd.replay.chains import chain_turns
from snapd.replay.clock import SimClock
from snapd.replay.decode import Decode
from snapd.replay.direct import DirectSync
from snapd.replay.link import Link
from snapd.replay.replay import replay, sweep
from snapd.replay.result import run_result
from snapd.replay.run import NEVER, Run, run_trace
from snapd.replay.snapshot import SnapshotSync, _Attempt
from snapd.replay.trace import Trace
from snapd.replay.tree import PrefixTree
from snapd.units import MIB


class Records:
    """A log in memory."""

    def __init__(self, records: list[r.Record]) -> None:
        self._records = records

    def write(self, record: r.Record) -> None:
        self._records.append(record)


def reasons(run: Run) -> dict[str, int]:
    return {reason.value: count for reason, count in run.sync.counts.reasons.items() if count}


def two_turns(gap_ms: float = 5_000, answer: int = 100):
    return turns_of(request(0, 1_300, answer, (1, 2)), request(gap_ms, 2_000, 9, (1, 2)))


def test_the_answer_is_reused_with_snapd_and_computed_again_without():
    turns = two_turns()
    assert [r.cached_tokens for r in run_trace("none", small(), turns).prefilled] == [0, 1_300]
    for ingest in ("eager", "on-demand", "hybrid"):
        run = run_trace("snapshot", small(ingest=ingest), turns)
        assert [r.cached_tokens for r in run.prefilled] == [0, 1_399]
        assert run.prefilled[1].unsynced_tokens == 1_300


def test_every_turn_with_two_output_tokens_makes_an_attempt():
    turns = turns_of(request(0, 600, 0, ()), request(1, 700, 1, ()), request(2, 800, 2, ()))
    for mode in ("direct", "snapshot"):
        counts = run_trace(mode, small(), turns).sync.counts
        assert (counts.attempts, counts.nothing_to_send) == (1, 2)


def test_a_turn_takes_its_prefill_its_transfer_and_its_decoding():
    turns = turns_of(request(0, 1_000, 100, ()))
    model = small()
    run = run_trace("none", model, turns)
    done_ns = model.prefill_ns(0, 1_000) + 1_000_000
    assert run.prefilled[0].done_ns == done_ns
    assert run.ended_ns[0] == done_ns + model.link_ns(1_000) + 500_000_000


def test_requests_are_served_in_order_and_small_ones_share_a_step():
    turns = turns_of(request(0, 500, 0, ()), request(0.0001, 400, 0, ()), request(0.0002, 400, 0, ()))
    run = run_trace("none", small(), turns)
    first, second, third = (result.done_ns for result in run.prefilled)
    assert first < second == third
    assert run.p_steps == 2


def test_a_full_pool_makes_prefills_wait_for_slots():
    model = small(kv_pool_tokens=6_000, link_gb_per_s=0.001)
    turns = turns_of(request(0, 4_000, 0, ()), request(1, 4_000, 0, ()))
    run = run_trace("none", model, turns)
    assert run.prefilled[1].began_ns >= run.prefilled[0].done_ns + model.link_ns(4_000)


def test_a_prompt_larger_than_the_pool_is_turned_away():
    run = run_trace("none", small(kv_pool_tokens=6_000), turns_of(request(0, 7_000, 5, ())))
    assert (run.p_rejected, run.ended_ns) == (1, [NEVER])


def test_direct_writes_find_no_slots_once_the_pool_has_been_filled():
    """The tree keeps what it has; nothing is evicted for a write, so the pool has no free slots."""
    turns = chain_turns(generate(1))
    run = run_trace("direct", small(), turns)
    found = reasons(run)
    assert found["alloc-failed"] > 0.5 * run.sync.counts.attempts
    evicting = run_trace("direct", small(direct_alloc="evict"), turns)
    assert reasons(evicting)["ok"] > 0.9 * evicting.sync.counts.attempts


def test_a_direct_suffix_whose_prompt_is_gone_is_not_resident():
    model = small(kv_pool_tokens=3_000, direct_send="suffix", direct_alloc="evict", tpot_ms=50)
    turns = turns_of(request(0, 1_300, 100, ()), request(500, 2_900, 0, ()))
    assert reasons(run_trace("direct", model, turns)) == {"session-not-resident": 1}


def test_snapshots_are_ingested_where_direct_writes_failed():
    turns = chain_turns(generate(1))
    run = run_trace("snapshot", small(), turns)
    assert reasons(run)["ok"] >= 0.95 * run.sync.counts.fitting


def test_a_suffix_whose_prompt_is_gone_is_sent_again_whole():
    model = small(kv_pool_tokens=7_000, tpot_ms=50, buffer_bytes=2 << 20)
    turns = turns_of(request(0, 1_300, 100, ()), request(500, 4_900, 0, ()))
    run = run_trace("snapshot", model, turns)
    assert reasons(run) == {"prefix-not-resident": 1, "ok": 1}
    assert (run.resent, run.sync.counts.sent_tokens) == (1, 99 + 1_399)
    run = run_trace("snapshot", small(resend=False, **_changed(model)), turns)
    assert (reasons(run), run.resent) == ({"prefix-not-resident": 1}, 0)


def _changed(model):
    return {name: getattr(model, name) for name in ("kv_pool_tokens", "tpot_ms", "buffer_bytes")}


def test_the_resident_hint_shortens_what_later_turns_send():
    turns = turns_of(request(0, 1_300, 100, (1, 2)), request(5_000, 2_000, 100, (1, 2, 3)))
    sent = {send: run_trace("snapshot", small(send=send), turns).sync.counts.sent_tokens
            for send in ("suffix", "hint", "session")}  # fmt: skip
    assert sent == {"suffix": 99 + 99, "hint": 1_399 + (2_099 - 1_399), "session": 1_399 + 2_099}


def test_a_snapshot_that_no_buffer_holds_is_too_large_and_does_not_count_as_fitting():
    run = run_trace("snapshot", small(send="session"), turns_of(request(0, 5_000, 100, ())))
    assert reasons(run) == {"too-large": 1}
    assert (run.sync.counts.attempts, run.sync.counts.fitting) == (1, 0)


def test_d_asks_again_when_the_buffer_is_full():
    """Three turns end within the time of one transfer, and the buffer holds one snapshot."""
    model = small(send="session", link_gb_per_s=0.02, prepare_retries=0)
    turns = turns_of(*(request(at, 3_000, 300 - 106 * at, ()) for at in range(3)))
    assert reasons(run_trace("snapshot", model, turns)) == {"ok": 1, "snapshot-buf-full": 2}
    found = reasons(
        run_trace("snapshot", small(send="session", link_gb_per_s=0.02, prepare_retries=9), turns)
    )
    assert found["ok"] == 3


def test_on_demand_leaves_what_is_not_asked_for_in_the_buffer_until_it_expires():
    model = small(ingest="on-demand", ready_ttl_ms=60_000)
    turns = turns_of(
        request(0, 1_300, 100, (1, 2)), request(5_000, 2_000, 0, (1, 2)), request(9_000, 900, 50, ())
    )
    assert reasons(run_trace("snapshot", model, turns)) == {"ok": 1, "ready-expired": 1}


def test_on_demand_evicts_what_the_policy_chooses():
    """The first snapshot is needed again and the second never; only somebody who looks ahead keeps it."""
    changes = {
        "ingest": "on-demand",
        "send": "session",
        "kv_pool_tokens": 5_000 + 4_096,
        "ready_ttl_ms": 90_000,
    }
    turns = turns_of(
        request(0, 1_300, 100, (1, 2)),
        request(1_000, 1_300, 100, ()),
        request(2_000, 1_300, 100, ()),
        request(4_000, 4_500, 0, ()),
        request(9_000, 2_000, 0, (1, 2)),
    )
    lru = run_trace("snapshot", small(**changes), turns)
    assert lru.prefilled[4].cached_tokens == 0
    belady = run_trace("snapshot", small(policy="clairvoyant", **changes), turns)
    assert belady.prefilled[4].cached_tokens == 1_399
    assert belady.own_tokens[4] == 0


def test_hybrid_ingests_while_p_has_free_slots_and_when_the_buffer_fills():
    turns = turns_of(request(0, 1_300, 100, ()))
    assert reasons(run_trace("snapshot", small(ingest="hybrid"), turns)) == {"ok": 1}
    full = small(ingest="hybrid", kv_pool_tokens=4_096 + 1_310, hybrid_fill=1.0)
    assert reasons(run_trace("snapshot", full, turns)) == {"ready-expired": 1}
    full = small(ingest="hybrid", kv_pool_tokens=4_096 + 1_410, hybrid_fill=0.0)
    assert reasons(run_trace("snapshot", full, turns)) == {"ok": 1}


def test_a_snapshot_for_which_p_has_no_slots_is_tried_again():
    """While a long prompt is on its slow way to D, its slots cannot be had."""
    model = small(kv_pool_tokens=4_096 + 4_300, link_gb_per_s=0.002, tpot_ms=1)
    turns = turns_of(request(0, 300, 100, ()), request(100, 3_990, 0, ()))
    run = run_trace("snapshot", model, turns)
    assert reasons(run) == {"ok": 1}
    assert run.sync.counts.bounced > 0


def test_a_next_turn_that_comes_before_the_answer_is_there_reuses_the_prompt_alone():
    turns = two_turns(gap_ms=400)
    run = run_trace("snapshot", small(), turns)
    assert run.prefilled[1].cached_tokens == 1_300
    assert reasons(run) == {"ok": 2}


def test_d_that_has_no_room_lets_turns_wait():
    model = small(decode_pool_tokens=1_500)
    run = run_trace("none", model, turns_of(request(0, 1_000, 100, ()), request(1, 1_000, 100, ())))
    assert run.d_waited == 1
    assert run.ended_ns[1] > run.ended_ns[0] + 500_000_000


def test_a_turn_larger_than_the_pool_of_d_is_decoded_elsewhere_and_can_be_sent_from_there():
    run = run_trace("snapshot", small(decode_pool_tokens=900), turns_of(request(0, 1_000, 100, ())))
    assert run.ended_ns[0] > 500_000_000
    assert reasons(run) == {"ok": 1}


def test_a_newer_turn_supersedes_a_transfer_whose_bytes_are_free_once_d_has_stopped():
    """Somebody else's snapshot is on the slow link when both answers of a session end."""
    model = small(send="session", link_gb_per_s=0.002, tpot_ms=1, buffer_bytes=8 * MIB)
    turns = turns_of(request(0, 1_300, 670, ()), request(1, 1_300, 10, (1, 2)), request(2, 1_400, 10, (1, 2)))
    records: list[r.Record] = []
    run = run_trace("snapshot", model, turns, Records(records))
    assert reasons(run) == {"superseded": 1, "ok": 2}
    assert [each.why for each in records if isinstance(each, r.SlabReleased)] == ["final", "drained", "final"]


def test_turns_wait_for_d_in_order_though_a_later_one_would_fit():
    model = small(decode_pool_tokens=1_500)
    turns = turns_of(*(request(at, tokens, 100, ()) for at, tokens in enumerate((1_000, 1_000, 300))))
    assert run_trace("none", model, turns).d_waited == 2


def test_what_is_decoded_elsewhere_takes_and_gives_d_no_room():
    model = small(decode_pool_tokens=900, tpot_ms=1)
    turns = turns_of(request(0, 1_000, 100, ()), request(5_000, 500, 200, ()), request(5_001, 500, 200, ()))
    assert run_trace("none", model, turns).d_waited == 1


def test_d_drops_a_turn_when_the_next_one_comes_and_keeps_the_others():
    other, first, second = turns_of(
        request(0, 1_100, 100, ()), request(10, 1_300, 100, (1, 2)), request(20, 2_000, 9, (1, 2))
    )
    clock = SimClock()
    decode = Decode(small(decode_pool_tokens=3_500), clock, lambda turn: None)
    for turn in (other, first):
        decode.reserve(turn, lambda turn=turn: decode.begin(turn))
        clock.run()
    assert decode.has(other) and decode.has(first)
    decode.reserve(second, lambda: decode.begin(second))
    assert decode.has(other) and not decode.has(first)


def test_what_d_has_dropped_is_not_sent(monkeypatch):
    turns = two_turns()
    full = small(send="session", link_gb_per_s=0.02, prepare_retries=9)
    three = turns_of(*(request(at, 3_000, 300 - 106 * at, ()) for at in range(3)))
    gone = small(kv_pool_tokens=7_000, tpot_ms=50, buffer_bytes=2 << 20)
    evicted = turns_of(request(0, 1_300, 100, ()), request(500, 4_900, 0, ()))
    monkeypatch.setattr(Decode, "has", lambda self, turn: False)
    assert reasons(run_trace("direct", small(), turns)) == {"session-not-resident": 2}
    assert reasons(run_trace("snapshot", full, three)) == {"ok": 1, "snapshot-buf-full": 2}
    assert reasons(run_trace("snapshot", gone, evicted)) == {"prefix-not-resident": 1}


def test_a_prompt_that_goes_while_d_writes_its_rest_is_not_resident():
    model = small(kv_pool_tokens=3_000, direct_send="suffix", link_gb_per_s=0.002)
    first = request(0, 1_300, 100, ())
    ended_ms = run_trace("none", model, turns_of(first)).ended_ns[0] / 1e6
    run = run_trace("direct", model, turns_of(first, request(ended_ms + 5, 2_900, 0, ())))
    assert reasons(run) == {"session-not-resident": 1}
    assert run.sync.counts.sent_tokens == 99


def test_the_oldest_snapshot_waits_for_slots_before_the_others(monkeypatch):
    clock = SimClock()
    turns = two_turns()
    sync = SnapshotSync(small(), clock, PrefixTree(9_000, turns), Link(clock), turns, Records([]))
    asked: list[int] = []

    def bounce(attempt):
        asked.append(attempt.turn.index)
        sync.counts.bounced += 1
        return 0

    monkeypatch.setattr(sync, "_begin_copy", bounce)
    for turn in turns:
        sync._ready[turn.index] = _Attempt(turn.index + 1, turn)
    assert sync.ingest_before_step() == 0
    assert asked == [0]


def test_slots_that_are_never_given_back_are_a_bug(monkeypatch):
    monkeypatch.setattr(DirectSync, "_written", lambda self, turn, slots: None)
    with pytest.raises(InvariantBroken, match="in flight at the end"):
        run_trace("direct", small(), two_turns())


def test_counts_that_differ_from_the_core_s_are_a_bug(monkeypatch):
    ended = SnapshotSync._ended

    def twice(self, told):
        ended(self, told)
        self.counts.reasons["ok"] += 1

    monkeypatch.setattr(SnapshotSync, "_ended", twice)
    with pytest.raises(InvariantBroken, match="the core counts"):
        run_trace("snapshot", small(), two_turns())


def test_a_sweep_that_cannot_be_ends_before_it_begins():
    done: list[int] = []
    with pytest.raises(ConfigError, match="leaves nothing"):
        sweep(Trace("t", generate(1), ()), small(), (MIB, 1 << 40), done=done.append)
    assert done == []


def test_copies_take_p_time_and_the_result_says_how_much():
    turns = two_turns()
    model = small()
    none, run = run_trace("none", model, turns), run_trace("snapshot", model, turns)
    found = run_result(run, none, model, turns)
    assert found.copy_ms == pytest.approx((model.copy_ns(99) + model.copy_ns(8)) / 1e6, abs=1e-3)
    saved_ns = model.prefill_ns(1_300, 2_000) - model.prefill_ns(1_399, 2_000)
    assert found.ttft_saved_ms == pytest.approx(saved_ns / 1e6 - found.copy_ms, abs=1e-2)
    assert found.reused_from_sync_tokens == 99
    assert (found.reused_tokens, found.recomputed_tokens) == (1_399, 0)


# What is sent again for one snapshot evicts another that is about to be ingested.
@example(0, "snapshot", "hybrid", "suffix", 9_000, 0.5)
@settings(max_examples=20)
@given(
    st.integers(0, 10_000),
    st.sampled_from(["none", "direct", "snapshot"]),
    st.sampled_from(["eager", "on-demand", "hybrid"]),
    st.sampled_from(["suffix", "hint", "session"]),
    st.sampled_from([9_000, 14_000, 40_000]),
    st.sampled_from([0.005, 0.5]),
)
def test_every_request_is_served_and_every_attempt_has_one_outcome(seed, mode, ingest, send, pool, link):
    model = small(
        ingest=ingest, send=send, kv_pool_tokens=pool, link_gb_per_s=link, decode_pool_tokens=25_000,
        ready_ttl_ms=30_000, direct_send="suffix",
    )  # fmt: skip
    turns = chain_turns(generate(seed, sessions=25))
    run = run_trace(mode, model, turns)
    assert sum(reasons(run).values()) == run.sync.counts.attempts
    served = [turn for turn in turns if turn.input_tokens <= run.pool_tokens]
    assert all(run.prefilled[turn.index].done_ns > turn.at_ns for turn in served)
    assert run.p_rejected == len(turns) - len(served)
    assert all(run.ended_ns[t.index] >= run.prefilled[t.index].done_ns for t in served)
    assert all(run.prefilled[t.index].cached_tokens < t.input_tokens for t in served)


def test_the_same_trace_and_seed_give_the_same_result_and_another_seed_only_other_handles():
    trace = Trace("t", generate(5), ())
    model = small(ingest="on-demand", send="session")
    first = msgspec.json.encode(replay(trace, model))
    assert first == msgspec.json.encode(replay(trace, model))
    other = replay(trace, small(ingest="on-demand", send="session", seed=2))
    assert msgspec.json.encode(other.snapshot) == msgspec.json.encode(msgspec.json.decode(first)["snapshot"])


def test_the_three_runs_have_the_same_arrivals_and_facts_that_add_up():
    result = replay(Trace("t", generate(5), ()), small())
    for run in (result.none, result.direct, result.snapshot):
        assert run.reused_tokens + run.recomputed_tokens == result.trace.reusable_tokens
        assert run.prefilled == result.trace.requests
        assert sum(run.reasons.values()) == run.attempts
    assert result.none.added_wait_ms.mean_ms == 0
    assert result.none.attempts == 0
    assert result.direct.attempts == result.snapshot.attempts - result.snapshot.resent
    assert result.snapshot.reused_tokens <= result.optimal_reused_tokens
