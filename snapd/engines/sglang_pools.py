"""SGLang's kv_pools as rows of bytes, and the parts of SGLang that the adapters are made for.

A pool is known by its class, exactly: a subclass keeps its bytes in another way, and bytes that are put where
they do not belong are a wrong answer that nobody notices.

Source: design, sections 8 and 9.
"""

import importlib
from typing import Any, Final

import torch

from snapd.errors import ExtraMissing, UnsupportedEngine
from snapd.kv.pool import KVPool

# Releases that the tests have run with.
TESTED_VERSIONS: Final = ("0.5.23",)
DISTRIBUTIONS: Final = ("sglang",)


def sglang_module(name: str) -> Any:
    """Return the module ``sglang.srt.<name>``.

    Raises:
        ExtraMissing: SGLang is not installed here, or cannot be imported.
        UnsupportedEngine: this release has no such module.
    """
    try:
        return importlib.import_module(f"sglang.srt.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("sglang.srt."):
            raise UnsupportedEngine(f"this release of SGLang has no module {error.name}") from error
        raise ExtraMissing(f"SGLang cannot be imported: {error}") from error
    except ImportError as error:
        raise ExtraMissing(f"SGLang cannot be imported: {error}") from error


def attribute(thing: object, name: str) -> Any:
    """Return an attribute of a part of SGLang.

    Raises:
        UnsupportedEngine: it has none of that name: the release is not one that is known.
    """
    try:
        return getattr(thing, name)
    except AttributeError:
        raise UnsupportedEngine(
            f"SGLang's {type(thing).__name__} has no {name!r}: snapd knows the releases {TESTED_VERSIONS}"
        ) from None


def kv_pool_of(pool: object) -> KVPool:
    """Return SGLang's kv_pool as rows of bytes, sharing its memory.

    Slot 0, and with pages the whole page 0, is where SGLang lets padding tokens write; it is part of the pool
    all the same, so that slots are SGLang's own.

    Args:
        pool: an ``MHATokenToKVPool`` or an ``MLATokenToKVPool``, with its buffers allocated.

    Raises:
        UnsupportedEngine: another class, or one of these with bytes where they are not looked for; the
            message says which setting of SGLang that comes from, where there is one.
        ExtraMissing: SGLang cannot be imported.
        LayoutMismatch: the buffers do not make a pool.
    """
    memory_pool = sglang_module("mem_cache.memory_pool")
    kind = type(pool)
    if kind is attribute(memory_pool, "MHATokenToKVPool"):
        _check_common(pool)
        _check_mha(pool)
        return KVPool.mha(_buffers(pool, "k_buffer"), _buffers(pool, "v_buffer"), _page_size_tokens(pool))
    if kind is attribute(memory_pool, "MLATokenToKVPool"):
        _check_common(pool)
        _check_mla(pool)
        return KVPool.mla(_buffers(pool, "kv_buffer"), _page_size_tokens(pool))
    raise UnsupportedEngine(
        f"SGLang's kv_pool is a {kind.__module__}.{kind.__qualname__}; MHATokenToKVPool and MLATokenToKVPool "
        "are known (no sliding window, no state-space layers, no sparse attention, no packed FP4 or MXFP8)"
    )


def _check_common(pool: object) -> None:
    if attribute(pool, "layer_shard_enabled"):
        raise UnsupportedEngine("SGLang's kv_pool is split by layer over the ranks, which is not supported")
    if attribute(pool, "requires_physical_write_loc"):
        raise UnsupportedEngine("SGLang's kv_pool has virtual slots, which are not supported")
    if attribute(pool, "post_capture_active"):
        raise UnsupportedEngine(
            "SGLang's kv_pool gets its memory after the graphs are captured, which is not supported: "
            "switch that off"
        )


def _check_mha(pool: object) -> None:
    if attribute(pool, "is_quantized_kv_cache"):
        raise UnsupportedEngine("SGLang's kv_pool is quantized, with scales of its own: not supported")
    layout = attribute(pool, "kv_cache_layout")
    if layout != "nhd" or attribute(pool, "use_hnd"):
        raise UnsupportedEngine(
            f"SGLang's kv_pool has the layout {layout!r}; 'nhd' is wanted: unset SGLANG_USE_HND_KVCACHE and "
            "SGLANG_AITER_KV_CACHE_LAYOUT"
        )


def _check_mla(pool: object) -> None:
    if attribute(pool, "use_dsa") or attribute(pool, "kv_scale_buffer") is not None:
        raise UnsupportedEngine("SGLang's kv_pool has an index or scales beside its latents: not supported")


def _page_size_tokens(pool: object) -> int:
    return int(attribute(pool, "page_size"))


def _buffers(pool: object, name: str) -> list[torch.Tensor]:
    """Return one buffer a layer, shape [size + page_size, heads, dim], of the type that the model has.

    SGLang stores FP8 as uint8; seen as FP8 again, two kinds of it are two layouts.

    Raises:
        UnsupportedEngine: a buffer has other rows.
    """
    num_slots = int(attribute(pool, "size")) + _page_size_tokens(pool)
    buffers = [buffer.view(attribute(pool, "dtype")) for buffer in attribute(pool, name)]
    for layer, buffer in enumerate(buffers):
        if buffer.dim() != 3 or buffer.shape[0] != num_slots:
            raise UnsupportedEngine(
                f"SGLang's {name}[{layer}] has shape {tuple(buffer.shape)}; "
                f"[{num_slots}, heads, dim] is wanted"
            )
    return buffers
