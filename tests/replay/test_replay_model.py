"""The compute and bandwidth model, and what can be set in it."""

import pytest
from replay_cases import small

from snapd.errors import ConfigError
from snapd.replay.model import Model, parse_settings, replace_checked
from snapd.units import GIB, MIB, NS_PER_S


def test_the_default_token_has_the_bytes_of_qwen3_30b_a3b():
    model = Model()
    assert model.token_bytes == 98_304
    assert model.layout().token_bytes == 98_304
    assert model.layout().num_planes == 96
    assert model.buffer_tokens == 87_381


def test_the_default_pool_is_what_four_h200_have_left():
    assert Model().kv_pool_tokens == pytest.approx((4 * 141e9 * 0.88 - 61e9) / 98_304, rel=0.01)


def test_prefill_time_is_linear_work_and_attention():
    model = Model()
    tokens = 10_000
    flop = tokens * 2 * 3.3e9 + 4 * 48 * 32 * 128 * tokens**2 / 2
    assert model.prefill_ns(0, tokens) == pytest.approx(flop / 1_580e12 * NS_PER_S, rel=1e-6)


def test_chunks_cost_together_what_the_whole_costs():
    model = Model()
    parts = model.prefill_ns(0, 700) + model.prefill_ns(700, 9_000) + model.prefill_ns(9_000, 9_001)
    assert parts == pytest.approx(model.prefill_ns(0, 9_001), abs=3)


def test_later_tokens_cost_more():
    model = Model()
    assert model.prefill_ns(100_000, 101_000) > 3 * model.prefill_ns(0, 1_000)


def test_bytes_take_their_time_at_each_bandwidth():
    model = Model()
    assert model.link_ns(1_000_000) == pytest.approx(98.304e9 / 160e9 * NS_PER_S)
    assert model.copy_ns(1_000_000) == pytest.approx(98.304e9 / 7_840e9 * NS_PER_S, rel=1e-6)
    assert replace_checked(model, buffer_in="host").copy_ns(1_000) > 30 * model.copy_ns(1_000)
    assert model.hbm_ns(1_000_000) == pytest.approx(98.304e9 / 19_200e9 * NS_PER_S, rel=1e-6)


def test_a_buffer_on_the_device_is_taken_from_the_pool():
    model = Model()
    assert model.snapshot_pool_tokens == model.kv_pool_tokens - model.buffer_tokens
    assert replace_checked(model, buffer_in="host").snapshot_pool_tokens == model.kv_pool_tokens


def test_a_buffer_that_leaves_no_pool_is_refused():
    with pytest.raises(ConfigError, match="leaves nothing"):
        _ = small(kv_pool_tokens=4_096).snapshot_pool_tokens


@pytest.mark.parametrize(
    "changes",
    [{"prefill_tflops": 0}, {"kv_pool_tokens": 0}, {"policy": "fifo"}, {"seed": -1}, {"hybrid_fill": 2}],
)
def test_figures_out_of_range_are_refused(changes):
    with pytest.raises(ConfigError, match="the model cannot be so"):
        small(**changes)


def test_words_set_figures_of_every_kind():
    words = ("tpot_ms=20", "resend=false", "buffer_bytes=2GiB", "ingest=hybrid", "chunk_tokens=512")
    model = replace_checked(Model(), **parse_settings(words, ()))
    assert (model.tpot_ms, model.resend, model.buffer_bytes, model.ingest, model.chunk_tokens) == (
        20.0, False, 2 * GIB, "hybrid", 512,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "given", "said"),
    [
        (("tpot_ms",), (), "NAME=VALUE"),
        (("tpot=1",), (), "did you mean tpot_ms"),
        (("zzz=1",), (), "known are layers"),
        (("tpot_ms=soon",), (), "tpot_ms=soon"),
        (("tpot_ms=1", "tpot_ms=2"), (), "twice"),
        (("ingest=eager",), ("ingest",), "twice"),
        (("chunk_tokens=-1",), (), "chunk_tokens=-1"),
    ],
)
def test_words_that_set_nothing_say_why(words, given, said):
    with pytest.raises(ConfigError, match=said):
        replace_checked(Model(), **parse_settings(words, given))


def test_the_small_model_has_the_sizes_that_tests_count_on():
    assert (small().token_bytes, small().buffer_tokens, 4 * MIB) == (1_024, 4_096, small().buffer_bytes)
