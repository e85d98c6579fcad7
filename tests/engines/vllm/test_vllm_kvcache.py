"""Which KV caches are recognised, what their pools share, and what is refused."""

import pytest
import torch

from snapd.engines.vllm.kvcache import pool_of
from snapd.errors import UnsupportedEngine
from snapd.kv.pool import KVPool
from snapd.layout import Namespace, fingerprint

BLOCKS, TOKENS, HEADS, CONTENT = 6, 4, 2, 8


def logical(order: str, layers: int = 2, blocks: int = BLOCKS, tokens: int = TOKENS) -> list[torch.Tensor]:
    """Return caches of shape [blocks, heads, tokens, content], in memory as *order* (of LBHNC) says."""
    sizes = {"L": layers, "B": blocks, "H": HEADS, "N": tokens, "C": CONTENT}
    store = torch.arange(layers * blocks * HEADS * tokens * CONTENT, dtype=torch.float32)
    memory = store.view([sizes[axis] for axis in order])
    whole = memory.permute([order.index(axis) for axis in "LBHNC"])
    return [whole[layer] for layer in range(layers)]


def pool(
    caches: list[torch.Tensor] | dict[str, torch.Tensor],
    *,
    blocks: int = BLOCKS,
    tokens: int = TOKENS,
    backend: str = "FLASH_ATTN",
    num_ranks: int = 1,
) -> KVPool:
    named = caches if isinstance(caches, dict) else {f"layers.{i}.attn": x for i, x in enumerate(caches)}
    return pool_of(named, num_blocks=blocks, block_tokens=tokens, backends=[backend], num_ranks=num_ranks)


def block_bytes(cache: torch.Tensor, block: int) -> bytes:
    """Return a block's bytes in memory's order."""
    part = cache[block]
    order = sorted(range(part.dim()), key=part.stride, reverse=True)
    return part.permute(order).contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
def test_a_block_of_a_fused_cache_is_a_page_of_one_plane(order: str) -> None:
    caches = logical(order)
    made = pool(caches)
    assert (made.num_slots, made.page_size_tokens, len(made.planes)) == (BLOCKS * TOKENS, TOKENS, 2)
    assert made.planes[0].stride_bytes == HEADS * CONTENT * 4
    for plane, cache in zip(made.planes, caches, strict=True):
        for block in range(BLOCKS):
            rows = plane.rows[block * TOKENS : (block + 1) * TOKENS]
            assert rows.contiguous().numpy().tobytes() == block_bytes(cache, block)


def test_what_is_written_through_the_pool_is_in_the_cache() -> None:
    (cache,) = logical("LBNHC", layers=1)
    plane = pool([cache]).planes[0]
    plane.rows[2 * TOKENS : 3 * TOKENS] = 0
    assert bool((cache[2] == 0).all()) and bool((cache[1] != 0).all()) and bool((cache[3] != 0).all())


@pytest.mark.parametrize("order", ["BLHNC", "BLNHC", "BHLNC", "LHBNC"])
def test_blocks_that_lie_apart_are_refused_with_what_to_set(order: str) -> None:
    with pytest.raises(UnsupportedEngine, match="VLLM_KV_CACHE_LAYOUT=LBNHC"):
        pool(logical(order))


def test_blocks_that_the_kernels_cut_up_are_whole_pages() -> None:
    (cache,) = logical("LBNHC", layers=1, blocks=2 * BLOCKS, tokens=TOKENS // 2)
    made = pool([cache])
    rows = made.planes[0].rows[TOKENS : 2 * TOKENS].contiguous().numpy().tobytes()
    assert rows == block_bytes(cache, 2) + block_bytes(cache, 3)
    assert made.dtype != pool(logical("LBNHC", layers=1)).dtype


def test_mla_has_one_latent_plane_a_layer() -> None:
    made = pool([torch.zeros(BLOCKS, TOKENS, 12, dtype=torch.bfloat16)] * 1)
    assert [plane.stride_bytes for plane in made.planes] == [24]


def test_k_and_v_in_one_block_are_one_plane() -> None:
    made = pool([torch.zeros(BLOCKS, 2, TOKENS, HEADS, 4)])
    assert [plane.stride_bytes for plane in made.planes] == [2 * HEADS * 4 * 4]


def test_k_and_v_of_all_blocks_apart_are_two_planes() -> None:
    caches = [torch.arange(2 * BLOCKS * TOKENS * HEADS * 4.0).view(2, BLOCKS, TOKENS, HEADS, 4) for _ in "ab"]
    made = pool(caches)
    layout = made.layout(Namespace())
    assert (len(layout.k_stride_bytes), len(layout.v_stride_bytes)) == (2, 2)
    v_of_first = made.planes[2].rows[TOKENS : 2 * TOKENS].contiguous().numpy().tobytes()
    assert v_of_first == block_bytes(caches[0][1], 1)


def test_layers_are_in_their_own_order_and_shared_ones_count_once() -> None:
    caches = logical("LBNHC", layers=12)
    named = {f"model.layers.{i}.attn": caches[i] for i in (10, 2, 0, 11, 1, 9, 8, 7, 6, 5, 4, 3)}
    named["model.layers.12.attn"] = caches[11]
    made = pool(named)
    assert [plane.rows.data_ptr() for plane in made.planes] == [cache.data_ptr() for cache in caches]


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(BLOCKS + 1, HEADS, TOKENS, CONTENT),
        torch.zeros(3, BLOCKS, TOKENS, HEADS, 4),
        torch.zeros(BLOCKS, 5),
        torch.zeros(BLOCKS, 1, 1, 6),
    ],
    ids=["blocks", "three", "flat", "tokens"],
)
def test_an_unknown_shape_is_refused_by_name(cache: torch.Tensor) -> None:
    with pytest.raises(UnsupportedEngine, match=r"layers\.0\.attn"):
        pool([cache])


def test_two_blocks_of_two_are_refused_as_they_may_be_either() -> None:
    with pytest.raises(UnsupportedEngine, match="no known layout"):
        pool([torch.zeros(2, 2, TOKENS, HEADS, 4)], blocks=2)


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(UnsupportedEngine, match="list"):
        pool({"mamba": [torch.zeros(1)]})  # type: ignore[dict-item]


def test_no_cache_and_mixed_caches_are_refused() -> None:
    with pytest.raises(UnsupportedEngine, match="no KV cache"):
        pool({})
    with pytest.raises(UnsupportedEngine, match="V apart"):
        pool([torch.zeros(BLOCKS, TOKENS, 12), torch.zeros(2, BLOCKS, TOKENS, HEADS, 4)])


def test_everything_that_a_blocks_bytes_depend_on_is_in_the_fingerprint() -> None:
    def name_of(made: KVPool) -> str:
        return fingerprint(made.layout(Namespace(model="m")))

    same = logical("LBNHC")
    names = {
        name_of(pool(same)),
        name_of(pool(logical("LBHNC"))),
        name_of(pool(same, backend="FLASHINFER")),
        name_of(pool(same, num_ranks=2)),
        name_of(pool([cache.to(torch.bfloat16) for cache in same])),
        name_of(pool(logical("LBNHC", layers=3))),
    }
    assert len(names) == 6
    assert name_of(pool(logical("LBNHC", blocks=9), blocks=9)) in names, (
        "the number of blocks is each one's own"
    )


def test_a_long_description_keeps_within_a_name() -> None:
    assert len(pool(logical("LBNHC"), backend="x" * 400).dtype) <= 256
