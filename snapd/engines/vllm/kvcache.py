"""vLLM's KV cache as a kv_pool: one row a token, one page a block, whatever is inside a block.

A block's bytes are moved as they are, so only whole blocks mean anything. What is inside one, and in which
order, goes into the fingerprint: P and D must have the same.

Known shapes of a layer's cache:

* ``[blocks, heads, tokens, content]`` and any order in memory of what is behind ``blocks`` (vLLM 0.32 calls
  them LBNHC and LBHNC; the CPU's backend has the second): K and V of a token are in ``content``;
* ``[blocks, tokens, latent]`` of MLA;
* ``[blocks, 2, tokens, heads, dim]`` (FlashInfer, Triton of earlier releases): K and V in one block;
* ``[2, blocks, tokens, heads, dim]`` (FlashAttention of earlier releases): K and V are planes of their own.

A layout where one block of a layer is not one run of bytes, or where a layer's blocks do not follow each
other, is refused.

Source: design, section 9.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence

import torch

from snapd.errors import UnsupportedEngine
from snapd.kv.pool import KVPool
from snapd.layout import NAME_CHARS_MAX

_ADVICE = "set VLLM_KV_CACHE_LAYOUT=LBNHC (or LBHNC) for both engines, or run them without snapd"


def pool_of(
    kv_caches: Mapping[str, torch.Tensor],
    *,
    num_blocks: int,
    block_tokens: int,
    backends: Sequence[str],
    num_ranks: int,
) -> KVPool:
    """Return the pool that the layers' caches make, which shares their memory.

    Args:
        kv_caches: by the layer's name.
        num_blocks: as the scheduler counts them.
        block_tokens: tokens in one of them.
        backends: names of the attention backends, which decide what the bytes of a block mean.
        num_ranks: tensor-parallel workers, as each holds heads of its own.

    Raises:
        UnsupportedEngine: a cache is of no known shape; the message says which and why.
    """
    k_rows: list[torch.Tensor] = []
    v_rows: list[torch.Tensor] = []
    shapes: list[str] = []
    places: set[int] = set()
    for name in sorted(kv_caches, key=_in_order):
        planes, shape = _planes(name, kv_caches[name], num_blocks, block_tokens)
        if planes[0].data_ptr() in places:
            continue  # A layer that shares the cache of another.
        places.add(planes[0].data_ptr())
        shapes.append(shape)
        k_rows.append(planes[0])
        v_rows += planes[1:]
    if not k_rows:
        raise UnsupportedEngine("the engine has no KV cache")
    if v_rows and len(v_rows) != len(k_rows):
        raise UnsupportedEngine(f"of {len(k_rows)} layers {len(v_rows)} keep V apart from K; {_ADVICE}")
    pool = KVPool.mha(k_rows, v_rows, block_tokens) if v_rows else KVPool.mla(k_rows, block_tokens)
    pool.dtype = _described(pool.dtype, backends, shapes, num_ranks)
    return pool


def _in_order(name: str) -> list[tuple[int, str]]:
    """Return a sorting key that puts layer 10 after layer 9."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _planes(
    name: str, cache: torch.Tensor, num_blocks: int, block_tokens: int
) -> tuple[list[torch.Tensor], str]:
    """Return a layer's planes as rows, shape [num_blocks * block_tokens, row], and the shape of a block."""
    if not isinstance(cache, torch.Tensor):
        raise UnsupportedEngine(
            f"the KV cache of {name} is a {type(cache).__name__}, not a tensor: {_ADVICE}"
        )
    shape = tuple(cache.shape)
    is_fused = cache.dim() >= 3 and shape[0] >= num_blocks and shape[0] % num_blocks == 0
    is_pair = cache.dim() >= 4 and shape[0] == 2 and shape[1] >= num_blocks and shape[1] % num_blocks == 0
    if is_fused == is_pair:
        # Neither, or a cache of two blocks that may be both.
        raise UnsupportedEngine(
            f"the KV cache of {name} has shape {shape}, and there are {num_blocks} blocks of {block_tokens} "
            f"tokens: no known layout; {_ADVICE}"
        )
    planes = [cache] if is_fused else [cache[0], cache[1]]
    shapes = [_block_shape(name, plane, num_blocks, block_tokens) for plane in planes]
    return [_rows(plane, num_blocks, block_tokens) for plane in planes], "+".join(shapes)


def _block_shape(name: str, plane: torch.Tensor, num_blocks: int, block_tokens: int) -> str:
    """Check that a block is one run of bytes and the next follows it; return its dimensions in memory."""
    # The engine's blocks may be cut into smaller ones for its kernels.
    num_parts = plane.shape[0] // num_blocks
    dims = [dim for dim in range(1, plane.dim()) if plane.shape[dim] > 1]
    dims.sort(key=plane.stride, reverse=True)
    size = 1
    for dim in reversed(dims):
        if plane.stride(dim) != size:
            raise UnsupportedEngine(
                f"the KV cache of {name} has shape {tuple(plane.shape)} and strides {plane.stride()} in "
                f"elements: a block is not one run of bytes; {_ADVICE}"
            )
        size *= plane.shape[dim]
    if plane.shape[0] > 1 and plane.stride(0) != size:
        raise UnsupportedEngine(
            f"the KV cache of {name} has blocks of {size} elements, {plane.stride(0)} apart: other layers "
            f"or padding lie between them; {_ADVICE}"
        )
    if size * num_parts % block_tokens:
        raise UnsupportedEngine(
            f"the KV cache of {name} has blocks of {size * num_parts} elements, which is no multiple of "
            f"{block_tokens} tokens"
        )
    return f"{num_parts}*" + ",".join(f"{dim}:{plane.shape[dim]}" for dim in dims)


def _rows(plane: torch.Tensor, num_blocks: int, block_tokens: int) -> torch.Tensor:
    row = plane.numel() // (num_blocks * block_tokens)
    return plane.as_strided((num_blocks * block_tokens, row), (row, 1), plane.storage_offset())


def _described(dtype: str, backends: Sequence[str], shapes: Sequence[str], num_ranks: int) -> str:
    """Return what stands for a dtype in the layout: everything that P and D must have alike."""
    names = "+".join(sorted({backend.rpartition(".")[2] for backend in backends}))
    digest = hashlib.blake2b(repr((sorted(backends), list(shapes))).encode(), digest_size=8).hexdigest()
    text = f"{dtype} {names} [{shapes[0]}] x{num_ranks} {digest}"
    return text if len(text) <= NAME_CHARS_MAX else f"{dtype} x{num_ranks} {digest}"
