"""Parts of SGLang that direct injection does not know are refused by name, before a slot is touched."""

from typing import Any

import pytest
import torch
from sglang_cases import TREES, key_of, make_allocator, make_pool, make_tree

from snapd.engines.sglang_inject import namespaced_cache
from snapd.engines.sglang_inject_cache import SglangCache
from snapd.errors import ConfigError, UnsupportedEngine
from snapd.layout import Namespace

pytestmark = pytest.mark.usefixtures("sglang")


def parts(tree: str = "radix", page: int = 1, **fields: Any) -> tuple[Any, Any]:
    allocator = make_allocator(make_pool("mha", page))
    return allocator, make_tree(tree, allocator, **fields)


def subclass_of(thing: object, name: str) -> None:
    thing.__class__ = type(name, (type(thing),), {})


@pytest.mark.parametrize("page", [1, 16])
def test_an_allocator_that_is_not_known_is_refused(page: int) -> None:
    allocator, tree = parts(page=page)
    subclass_of(allocator, "SwapAllocator")
    with pytest.raises(UnsupportedEngine, match=r"SwapAllocator; TokenToKVPoolAllocator and Paged"):
        SglangCache(allocator, tree)


@pytest.mark.parametrize("tree", TREES)
def test_a_tree_that_is_not_known_is_refused(tree: str) -> None:
    """Who frees duplicates is another one there, or nobody."""
    allocator, tree = parts(tree)
    subclass_of(tree, "HiRadixCache")
    with pytest.raises(UnsupportedEngine, match=r"HiRadixCache; RadixCache and UnifiedRadixCache are known"):
        SglangCache(allocator, tree)


def test_a_class_of_the_same_name_from_elsewhere_is_not_known() -> None:
    allocator, _ = parts()
    other = type("RadixCache", (), {"__module__": "somewhere.else"})()
    with pytest.raises(UnsupportedEngine, match=r"somewhere\.else\.RadixCache"):
        SglangCache(allocator, other)


@pytest.mark.parametrize("tree", TREES[1:])
def test_a_core_that_is_not_known_is_refused(tree: str) -> None:
    allocator, tree = parts(tree)
    tree.tree_core = object()
    with pytest.raises(UnsupportedEngine, match=r"core is a builtins\.object; UnifiedTreeCore and Rust"):
        SglangCache(allocator, tree)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(
    ("field", "why"), [("disable", "--disable-radix-cache"), ("is_eagle", "pairs of tokens")]
)
def test_a_tree_that_is_off_or_has_other_keys_is_refused(tree: str, field: str, why: str) -> None:
    with pytest.raises(UnsupportedEngine, match=why):
        SglangCache(*parts(tree, **{field: True}))


def test_a_tree_of_more_than_full_attention_is_refused() -> None:
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    allocator, tree = parts("unified-python")
    tree.tree_components = (ComponentType.FULL, ComponentType.MAMBA)
    with pytest.raises(UnsupportedEngine, match="keeps full, mamba; only full attention"):
        SglangCache(allocator, tree)


@pytest.mark.parametrize("field", ["cache_controller", "linker"])
def test_a_tree_with_a_second_store_is_refused(field: str) -> None:
    allocator, tree = parts("unified-rust")
    setattr(tree, field, object())
    with pytest.raises(UnsupportedEngine, match="snapd's linker"):
        SglangCache(allocator, tree)


def test_a_pool_that_is_not_known_is_refused() -> None:
    allocator, tree = parts()
    subclass_of(allocator.get_kvcache(), "PackedPool")
    with pytest.raises(UnsupportedEngine, match="PackedPool"):
        SglangCache(allocator, tree)


def test_a_tree_over_other_slots_is_refused() -> None:
    with pytest.raises(UnsupportedEngine, match="another allocator"):
        SglangCache(parts()[0], parts()[1])


@pytest.mark.parametrize(("name", "value"), [("page_size", 2), ("size", 128)])
def test_parts_that_count_differently_are_refused(name: str, value: int) -> None:
    """As with context parallelism, where an allocator's page is several of the pool's."""
    allocator, tree = parts("radix")
    setattr(allocator, name, value)
    with pytest.raises(UnsupportedEngine, match=r"differ in page size .* or in tokens"):
        SglangCache(allocator, tree)


def test_a_release_whose_tree_lacks_an_attribute_is_refused() -> None:
    allocator, tree = parts("unified-python")
    del tree.linker
    with pytest.raises(UnsupportedEngine, match="UnifiedRadixCache has no 'linker'"):
        SglangCache(allocator, tree)


# --- namespaces ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("namespace", "extra_key", "why"),
    [(Namespace(lora="x"), None, "say as extra_key"), (Namespace(model="m"), "k", "name what")],
)
def test_a_namespace_that_the_tree_does_not_have_is_refused(
    namespace: Namespace, extra_key: str | None, why: str
) -> None:
    """Else the KV of a LoRA would be found by requests without it."""
    with pytest.raises(ConfigError, match=why):
        namespaced_cache(*parts(), namespace, extra_key)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(
    ("namespace", "names"),
    [
        (Namespace(), {}),
        (Namespace(cache_salt="salt"), {"cache_salt": "salt"}),
        (Namespace(lora="x"), {"extra_key": "id"}),
        (Namespace(tenant="t", cache_salt="salt"), {"extra_key": "id", "cache_salt": "salt"}),
    ],
)
def test_tokens_are_found_under_their_own_names_only(
    tree: str, namespace: Namespace, names: dict[str, str]
) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

    allocator, tree = parts(tree)
    cache = namespaced_cache(allocator, tree, namespace, names.get("extra_key"))
    slots = cache.allocate(8)
    assert slots is not None
    pinned = cache.pin(range(8))
    cache.insert(range(8), pinned, slots)
    cache.unpin(pinned)

    def found(**others: str) -> int:
        return int(tree.match_prefix(MatchPrefixParams(key=key_of(range(8), **others))).device_prefix_len)

    assert found(**names) == 8
    assert cache.pin(range(8)).slots.tolist() == slots.tolist()
    for others in ({}, {"cache_salt": "salt"}, {"extra_key": "id"}, {"cache_salt": "id"}):
        assert found(**others) == (8 if others == names else 0)


def test_slots_are_copies_that_sglang_does_not_change() -> None:
    allocator, tree = parts()
    cache = SglangCache(allocator, tree)
    slots = cache.allocate(8)
    assert slots is not None and (slots.dtype, slots.device.type) == (torch.int64, "cpu")
    assert slots.untyped_storage().data_ptr() != allocator.free_pages.untyped_storage().data_ptr()
