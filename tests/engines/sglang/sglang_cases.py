"""SGLang's real pools, allocators and trees on the CPU, and KV that follows from the tokens before it."""

import functools
import itertools
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from snapd.kv.pool import KVPool

SIZE_TOKENS = 256
TREES = ("radix", "unified-python", "unified-rust")
PAGES = (1, 16)
POOLS = ("mha", "mla")
KINDS = tuple(itertools.product(POOLS, TREES, PAGES))
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 63) - 1


def kind_id(kind: tuple[str, str, int]) -> str:
    return f"{kind[0]}, {kind[1]}, page {kind[2]}"


def make_pool(kind: str, page_size: int, size: int = SIZE_TOKENS, **fields: Any) -> Any:
    """Return one of SGLang's pools, of poison."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    common = {
        "size": size,
        "page_size": page_size,
        "dtype": torch.bfloat16,
        "layer_num": 2,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if kind == "mha":
        pool = MHATokenToKVPool(**{**common, "head_num": 2, "head_dim": 8, "v_head_dim": 12, **fields})
    else:
        pool = MLATokenToKVPool(**{**common, "kv_lora_rank": 24, "qk_rope_head_dim": 8, **fields})
    for buffer in (pool.k_buffer + pool.v_buffer) if kind == "mha" else pool.kv_buffer:
        buffer.view(torch.uint8).fill_(0xA5)
    return pool


def make_allocator(pool: Any, *, need_sort: bool = False) -> Any:
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

    if pool.page_size == 1:
        return TokenToKVPoolAllocator(pool.size, pool.dtype, "cpu", pool, need_sort=need_sort)
    return PagedTokenToKVPoolAllocator(
        pool.size, pool.page_size, pool.dtype, "cpu", pool, need_sort=need_sort
    )


def make_tree(kind: str, allocator: Any, **fields: Any) -> Any:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    requests = ReqToTokenPool(size=8, max_context_len=512, device="cpu", enable_memory_saver=False)
    params = CacheInitParams(
        **{
            "disable": False,
            "req_to_token_pool": requests,
            "token_to_kv_pool_allocator": allocator,
            "page_size": allocator.page_size,
            **fields,
        }
    )
    if kind == "radix":
        return RadixCache(params)
    params.tree_components = params.tree_components or (ComponentType.FULL,)
    params.tree_core_backend = kind.removeprefix("unified-")
    return UnifiedRadixCache(params)


def key_of(token_ids: Sequence[int], **names: Any) -> Any:
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return RadixKey(array("q", token_ids), **names)


def tree_slots(tree: Any, token_ids: Sequence[int], **names: Any) -> torch.Tensor:
    """Return where the tree holds *token_ids*, as far as it does; asked in SGLang's own way."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

    whole = len(token_ids) // tree.page_size * tree.page_size
    found = tree.match_prefix(MatchPrefixParams(key=key_of(token_ids[:whole], **names)))
    return tree.path_device_indices(found.last_device_node)[: found.device_prefix_len]


def truth(pool: KVPool, token_ids: Sequence[int]) -> list[torch.Tensor]:
    """Return the rows of each plane for these tokens: a token's depend on all tokens before it, as KV does.

    Shapes [len(token_ids), stride_bytes], uint8.
    """
    return _truth(tuple(plane.stride_bytes for plane in pool.planes), tuple(token_ids))


@functools.lru_cache(maxsize=512)
def _truth(strides_bytes: tuple[int, ...], token_ids: tuple[int, ...]) -> list[torch.Tensor]:
    state, states = 1, []
    for token in token_ids:
        state = (state * _MIX + token + 1) & _MASK
        states.append(state)
    seeds = torch.tensor(states, dtype=torch.int64)[:, None]
    planes = []
    for index, stride_bytes in enumerate(strides_bytes):
        words = seeds * (2 * index + 1) + torch.arange(-(-stride_bytes // 8))
        planes.append(words.view(torch.uint8)[:, :stride_bytes].contiguous())
    return planes


def write_truth(pool: KVPool, token_ids: Sequence[int], slots: torch.Tensor, start: int = 0) -> None:
    """Put KV of tokens from *start* on into *slots*, as a forward pass does."""
    for plane, rows in zip(pool.planes, truth(pool, token_ids), strict=True):
        plane.rows[slots] = rows[start : start + len(slots)]


def is_true(pool: KVPool, token_ids: Sequence[int], slots: torch.Tensor) -> bool:
    """Return whether *slots* hold the KV of the first ``len(slots)`` tokens."""
    pairs = zip(pool.planes, truth(pool, token_ids), strict=True)
    return all(torch.equal(plane.rows[slots], rows[: len(slots)]) for plane, rows in pairs)
