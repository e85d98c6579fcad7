"""What of vLLM's configuration the connector can work with, checked when an engine starts.

Reads the configuration by attribute, so that nothing of vLLM has to be imported.

Source: design, section 9.
"""

from typing import Any, Final

from snapd.errors import ConfigError, UnsupportedEngine

# Kinds of a layer's cache that hold every token of a request in whole blocks.
_SPECS: Final = ("FullAttentionSpec", "MLAAttentionSpec")
# Drafts that keep no KV cache of their own.
_SPECULATIVE: Final = ("ngram", "ngram_gpu", "suffix")


def check_config(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse what would give wrong KV, or none.

    Raises:
        UnsupportedEngine: the model or the way it is run is not supported; the message says which.
        ConfigError: a setting must be another one; the message says what to write.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            f'kv_load_failure_policy is "{transfer.kv_load_failure_policy}": with it a snapshot that is gone '
            'ends its request. Put "kv_load_failure_policy": "recompute" into --kv-transfer-config'
        )
    _check_parallel(vllm_config.parallel_config)
    _check_cache(kv_cache_config)
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in _SPECULATIVE:
        raise UnsupportedEngine(
            f'speculative decoding with "{speculative.method}" keeps KV of its own, which snapd does not '
            f"move: use one of {', '.join(_SPECULATIVE)}, or none"
        )
    if vllm_config.model_config.is_encoder_decoder:
        raise UnsupportedEngine("encoder-decoder models are not supported")
    if vllm_config.model_config.enable_sleep_mode:
        raise UnsupportedEngine("sleep mode takes the KV cache away while snapd may use it: do not enable it")


def _check_parallel(parallel: Any) -> None:
    if parallel.pipeline_parallel_size > 1:
        raise UnsupportedEngine("pipeline parallelism is not supported: use tensor parallelism")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UnsupportedEngine(f"{name} above 1 is not supported: it spreads a block over workers")


def _check_cache(kv_cache_config: Any) -> None:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise UnsupportedEngine(
            f"the model has {len(groups)} groups of KV caches (sliding windows, Mamba, or none): only models "
            "with full attention in every layer are supported"
        )
    spec = groups[0].kv_cache_spec
    specs = list(getattr(spec, "kv_cache_specs", {"": spec}).values())
    for one in specs:
        if type(one).__name__ not in _SPECS:
            raise UnsupportedEngine(f"a KV cache of kind {type(one).__name__} is not supported")
        if one.sliding_window is not None or one.attention_chunk_size is not None:
            raise UnsupportedEngine("layers that see only a window of the tokens are not supported")
        if one.tokens_per_state != 1:
            raise UnsupportedEngine("a KV cache that keeps one state for several tokens is not supported")
    if len({one.block_size for one in specs}) != 1:
        raise UnsupportedEngine("layers with blocks of different lengths are not supported")


def block_tokens_of(kv_cache_config: Any) -> int:
    """Return the tokens in a block of a configuration that was checked."""
    return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
