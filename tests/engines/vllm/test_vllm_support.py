"""Which configurations of vLLM are refused, and with what advice."""

from types import SimpleNamespace
from typing import Any

import pytest

from snapd.engines.vllm.support import block_tokens_of, check_config
from snapd.errors import ConfigError, SnapdError, UnsupportedEngine


class FullAttentionSpec(SimpleNamespace):
    pass


class MLAAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


def spec(kind: type[SimpleNamespace] = FullAttentionSpec, **changes: Any) -> Any:
    fields = {"block_size": 16, "sliding_window": None, "attention_chunk_size": None, "tokens_per_state": 1}
    return kind(**(fields | changes))


def cache(*specs: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=one) for one in specs or [spec()]]
    return SimpleNamespace(kv_cache_groups=groups)


def config(**changes: Any) -> Any:
    """Return a configuration; names such as ``kv_transfer_config__is_kv_consumer`` change a part of it."""
    made = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(is_kv_consumer=True, kv_load_failure_policy="recompute"),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        speculative_config=None,
        model_config=SimpleNamespace(is_encoder_decoder=False, enable_sleep_mode=False),
    )
    for path, value in changes.items():
        *parents, name = path.split("__")
        owner = made
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, value)
    return made


@pytest.mark.parametrize("one", [spec(), spec(MLAAttentionSpec), SimpleNamespace(
    block_size=16, kv_cache_specs={"a": spec(), "b": spec(num_kv_heads=3)})])  # fmt: skip
def test_full_attention_is_supported(one: Any) -> None:
    check_config(config(), cache(one))
    assert block_tokens_of(cache(one)) == 16


def test_p_is_refused_unless_what_cannot_be_loaded_is_computed() -> None:
    fails = {"kv_transfer_config__kv_load_failure_policy": "fail"}
    with pytest.raises(ConfigError, match='"kv_load_failure_policy": "recompute"'):
        check_config(config(**fails), cache())
    check_config(config(**fails, kv_transfer_config__is_kv_consumer=False), cache())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill_context_parallel_size"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, "eagle"),
        ({"model_config__is_encoder_decoder": True}, "encoder"),
        ({"model_config__enable_sleep_mode": True}, "sleep"),
    ],
)
def test_a_way_to_run_that_would_give_wrong_kv_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UnsupportedEngine, match=told):
        check_config(config(**changes), cache())


def test_drafts_without_a_cache_of_their_own_are_supported() -> None:
    check_config(config(speculative_config=SimpleNamespace(method="ngram")), cache())


@pytest.mark.parametrize(
    ("specs", "told"),
    [
        ([spec(), spec()], "2 groups"),
        ([spec(SlidingWindowSpec)], "SlidingWindowSpec"),
        ([spec(sliding_window=64)], "window"),
        ([spec(attention_chunk_size=64)], "window"),
        ([spec(tokens_per_state=4)], "several tokens"),
        ([SimpleNamespace(block_size=16, kv_cache_specs={"a": spec(), "b": spec(block_size=8)})], "lengths"),
        (
            [SimpleNamespace(block_size=16, kv_cache_specs={"a": spec(), "b": spec(SlidingWindowSpec)})],
            "Sliding",
        ),
    ],
)
def test_a_model_without_full_attention_everywhere_is_refused(specs: list[Any], told: str) -> None:
    with pytest.raises(UnsupportedEngine, match=told):
        check_config(config(), cache(*specs))


def test_a_model_without_any_cache_is_refused() -> None:
    with pytest.raises(SnapdError, match="0 groups"):
        check_config(config(), SimpleNamespace(kv_cache_groups=[]))
