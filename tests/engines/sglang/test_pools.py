"""SGLang's kv_pools as rows of bytes: which are known, and that the bytes are the ones that SGLang reads."""

from typing import Any

import pytest
import torch
from sglang_cases import PAGES, POOLS, make_pool

from snapd.engines.sglang_pools import attribute, kv_pool_of, sglang_module
from snapd.errors import UnsupportedEngine
from snapd.layout import Namespace, fingerprint

pytestmark = pytest.mark.usefixtures("sglang")
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("kind", POOLS)
def test_a_planes_rows_are_the_slots_that_sglang_addresses(kind: str, page_size: int) -> None:
    """By the addresses that SGLang gives out itself for transfers: a page is ``item_len`` bytes."""
    pool = make_pool(kind, page_size)
    ours = kv_pool_of(pool)
    addresses, sizes_bytes, page_bytes = pool.get_contiguous_buf_infos()
    assert len(ours.planes) == len(addresses) == (4 if kind == "mha" else 2)
    assert ours.page_size_tokens == page_size
    for plane, address, size_bytes, item_bytes in zip(
        ours.planes, addresses, sizes_bytes, page_bytes, strict=True
    ):
        assert plane.rows.data_ptr() == address
        assert plane.stride_bytes * page_size == item_bytes
        assert plane.rows.shape[0] * plane.stride_bytes == size_bytes
        assert plane.pitch_bytes == plane.stride_bytes


@pytest.mark.parametrize("kind", POOLS)
def test_what_is_written_in_a_row_is_what_a_layer_reads(kind: str) -> None:
    pool = make_pool(kind, 16)
    ours = kv_pool_of(pool)
    layers = [pool.get_key_buffer(layer) for layer in range(2)]
    if kind == "mha":
        layers += [pool.get_value_buffer(layer) for layer in range(2)]
    for index, (plane, layer) in enumerate(zip(ours.planes, layers, strict=True)):
        value = torch.arange(layer[5].numel(), dtype=torch.bfloat16).view(layer[5].shape) + index
        plane.rows[5] = value.view(torch.uint8).flatten()
        assert torch.equal(layer[5], value)


def test_k_and_v_of_one_width_share_an_allocation_and_are_two_planes() -> None:
    pool = make_pool("mha", 16, v_head_dim=8)
    assert pool.k_buffer[0].untyped_storage().data_ptr() == pool.v_buffer[0].untyped_storage().data_ptr()
    ours = kv_pool_of(pool)
    assert [plane.rows.data_ptr() for plane in ours.planes] == pool.get_contiguous_buf_infos()[0]


def test_two_kinds_of_fp8_are_two_layouts_though_sglang_stores_bytes() -> None:
    layouts = [
        kv_pool_of(make_pool("mha", 1, dtype=dtype)).layout(Namespace()) for dtype in (FP8, torch.float8_e5m2)
    ]
    assert [layout.dtype for layout in layouts] == ["float8_e4m3fn", "float8_e5m2"]
    assert len({fingerprint(layout) for layout in layouts}) == 2


@pytest.mark.parametrize("kind", POOLS)
def test_a_subclass_is_refused_by_name(kind: str) -> None:
    """It may keep its bytes in any way."""
    pool = make_pool(kind, 1)
    pool.__class__ = type("PackedPool", (type(pool),), {})
    with pytest.raises(UnsupportedEngine, match=r"PackedPool.*MHATokenToKVPool and MLATokenToKVPool"):
        kv_pool_of(pool)


def test_a_pool_of_another_kind_is_refused_by_name() -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPoolFP4

    with pytest.raises(UnsupportedEngine, match="MHATokenToKVPoolFP4"):
        kv_pool_of(MHATokenToKVPoolFP4.__new__(MHATokenToKVPoolFP4))
    with pytest.raises(UnsupportedEngine, match=r"builtins\.object"):
        kv_pool_of(object())


@pytest.mark.parametrize(
    ("kind", "name", "value", "why"),
    [
        ("mha", "layer_shard_enabled", True, "by layer"),
        ("mha", "requires_physical_write_loc", True, "virtual slots"),
        ("mha", "post_capture_active", True, "after the graphs"),
        ("mha", "quant_method", object(), "quantized"),
        ("mha", "kv_cache_layout", "vectorized_5d", "SGLANG_AITER_KV_CACHE_LAYOUT"),
        ("mha", "use_hnd", True, "SGLANG_USE_HND_KVCACHE"),
        ("mla", "layer_shard_enabled", True, "by layer"),
        ("mla", "use_dsa", True, "index"),
        ("mla", "kv_scale_buffer", [torch.zeros(1)], "scales"),
        ("mla", "size", 255, r"\[256, heads, dim\] is wanted"),
    ],
)
def test_a_known_class_set_up_in_another_way_is_refused(kind: str, name: str, value: Any, why: str) -> None:
    pool = make_pool(kind, 1)
    setattr(pool, name, value)
    with pytest.raises(UnsupportedEngine, match=why):
        kv_pool_of(pool)


def test_heads_before_slots_are_refused() -> None:
    """As with SGLANG_USE_HND_KVCACHE, by their shape alone."""
    pool = make_pool("mla", 1)
    pool.kv_buffer = [buffer[:, None] for buffer in pool.kv_buffer]
    with pytest.raises(UnsupportedEngine, match="has shape"):
        kv_pool_of(pool)


def test_a_release_without_a_name_that_is_needed_is_refused() -> None:
    with pytest.raises(UnsupportedEngine, match=r"no module sglang\.srt\.mem_cache\.nothing"):
        sglang_module("mem_cache.nothing")
    with pytest.raises(UnsupportedEngine, match="MHATokenToKVPool has no 'nothing'"):
        attribute(make_pool("mha", 1), "nothing")
