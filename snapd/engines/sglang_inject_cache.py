"""SGLang's slots and radix tree: what may be asked of them, the same way for every kind that is known.

The kinds differ in who frees the slots of tokens that the tree has already, and one that is not known may
differ in anything: it is refused. All of it belongs to the scheduler's thread, between two batches.

Source: design, section 9.
"""

import dataclasses
from array import array
from collections.abc import Sequence
from typing import Any, Final

import torch

from snapd.engines.sglang_pools import attribute, kv_pool_of, sglang_module
from snapd.errors import UnsupportedEngine
from snapd.units import align_down, align_up

# By class: does the caller of ``insert`` free the slots of tokens that the tree had? If not, the tree does.
_TREES: Final = {
    ("mem_cache.radix_cache", "RadixCache"): True,
    ("mem_cache.unified_radix_cache", "UnifiedRadixCache"): False,
}
_CORES: Final = (
    ("mem_cache.unified_cache.unified_tree_core", "UnifiedTreeCore"),
    ("mem_cache.rust_tree_core.adapter", "RustUnifiedTreeCore"),
)
_ALLOCATORS: Final = (
    ("mem_cache.allocator.token", "TokenToKVPoolAllocator"),
    ("mem_cache.allocator.paged", "PagedTokenToKVPoolAllocator"),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Pinned:
    """A prefix that the tree holds and does not evict.

    Attributes:
        slots: where its tokens are, int64 on the CPU, shape [num_tokens]; whole pages.
        lock: SGLang's receipt.
        life: of the tree, at that time.
    """

    slots: torch.Tensor
    lock: Any
    life: Any

    @property
    def num_tokens(self) -> int:
        """Tokens that are pinned."""
        return self.slots.numel()


class SglangCache:
    """The slots and the tree of one scheduler.

    A flush empties both without asking; what was pinned or lent before is then nobody's any more. ``life``
    tells the two apart: what comes back from an earlier life is dropped.

    Args:
        allocator: SGLang's, with its kv_pool.
        tree: SGLang's, over the same allocator.
        extra_key: what SGLang keeps these tokens apart by, such as the id of a LoRA.
        cache_salt: the same for a salt.

    Attributes:
        pool: the kv_pool as rows of bytes.
        page_size_tokens: the tree holds whole pages only.
        size_tokens: slots that there are.

    Raises:
        UnsupportedEngine: a class or a setting is not known; the message says which.
        ExtraMissing: SGLang cannot be imported.
        LayoutMismatch: the buffers do not make a pool.
    """

    def __init__(
        self, allocator: Any, tree: Any, *, extra_key: str | None = None, cache_salt: str | None = None
    ) -> None:
        _check_allocator(allocator)
        self._is_caller_freeing = _check_tree(tree)
        _check_sizes(allocator, tree)
        self.pool = kv_pool_of(allocator.get_kvcache())
        self.page_size_tokens = int(allocator.page_size)
        self.size_tokens = int(allocator.size)
        self._allocator = allocator
        self._tree = tree
        self._names = {"extra_key": extra_key, "cache_salt": cache_salt}
        self._params = sglang_module("mem_cache.base_prefix_cache")
        self._key_class = sglang_module("mem_cache.radix_cache").RadixKey

    @property
    def life(self) -> Any:
        """Changes when the tree is emptied as a whole: its root is another one then."""
        return self._tree.root_node_handle()

    @property
    def available_tokens(self) -> int:
        """Slots that nobody holds."""
        return int(self._allocator.available_size())

    @property
    def evictable_tokens(self) -> int:
        """Slots that the tree would give up."""
        return int(self._tree.evictable_size())

    @property
    def pinned_tokens(self) -> int:
        """Slots that the tree holds and may not give up."""
        return int(self._tree.protected_size())

    def pin(self, token_ids: Sequence[int]) -> Pinned:
        """Return what the tree holds of *token_ids*, from the first on, and keep it there until ``unpin``."""
        found = self._tree.match_prefix(self._params.MatchPrefixParams(key=self._key(token_ids)))
        node = found.last_device_node
        path = self._tree.path_device_indices(node)[: found.device_prefix_len]
        slots = path.to("cpu", torch.int64, copy=True)
        return Pinned(slots=slots, lock=self._tree.lock(node), life=self.life)

    def unpin(self, pinned: Pinned) -> None:
        """Undo ``pin``, once. Nothing is left to undo when the tree was emptied since."""
        if pinned.life == self.life:
            self._tree.unlock(pinned.lock)

    def allocate(self, num_tokens: int) -> torch.Tensor | None:
        """Return slots for *num_tokens*, int64 on the CPU, in whole pages but for the end; None: no room.

        What the tree may give up is evicted, if that makes room; else nothing is.
        """
        wanted_tokens = align_up(num_tokens, self.page_size_tokens)
        short_tokens = wanted_tokens - self.available_tokens
        if short_tokens > self.evictable_tokens:
            return None
        if short_tokens > 0:
            self._tree.evict(self._params.EvictParams(num_tokens=short_tokens))
        # The whole of the last page: paged allocators round down without a word.
        slots: torch.Tensor | None = self._allocator.alloc(wanted_tokens)
        return None if slots is None else slots.to("cpu", torch.int64, copy=True)[:num_tokens]

    def free(self, slots: torch.Tensor, life: Any) -> None:
        """Take slots of ``allocate`` back, with all of their last page; not if the pool was emptied since."""
        if life == self.life:
            self._allocator.free(slots.to(self._allocator.device))

    def insert(self, token_ids: Sequence[int], pinned: Pinned, slots: torch.Tensor) -> None:
        """Put tokens into the tree behind a pinned prefix.

        Slots that are not needed come back: those of tokens that came into the tree since it was matched, and
        those of a last page that is not full, which the tree does not take.

        Args:
            token_ids: from the first token on; the first ``pinned.num_tokens`` are what is pinned.
            pinned: in this life of the tree.
            slots: of the tokens behind it, as ``allocate`` gave them, whole or cut.
        """
        whole_tokens = align_down(len(token_ids), self.page_size_tokens)
        kept_slots = slots[: whole_tokens - pinned.num_tokens]
        tail_slots = slots[kept_slots.numel() :]
        value = torch.cat((pinned.slots, kept_slots)).to(self._allocator.device)
        result = self._tree.insert(
            self._params.InsertParams(
                key=self._key(token_ids), value=value, prev_prefix_len=pinned.num_tokens
            )
        )
        if self._is_caller_freeing:
            self.free(value[pinned.num_tokens : result.prefix_len], pinned.life)
        self.free(tail_slots, pinned.life)

    def _key(self, token_ids: Sequence[int]) -> Any:
        # SGLang cuts it to whole pages.
        return self._key_class(array("q", token_ids), **self._names)


def _is_known(thing: object, known: Sequence[tuple[str, str]]) -> bool:
    """Return whether *thing* is of one of SGLang's classes, and of no subclass."""
    kind = type(thing)
    return any(
        kind.__qualname__ == name and kind.__module__ == f"sglang.srt.{module}" for module, name in known
    )


def _refuse(what: str, thing: object, known: Sequence[tuple[str, str]]) -> UnsupportedEngine:
    kind = type(thing)
    names = " and ".join(name for _, name in known)
    return UnsupportedEngine(f"SGLang's {what} is a {kind.__module__}.{kind.__qualname__}; {names} are known")


def _check_allocator(allocator: Any) -> None:
    if not _is_known(allocator, _ALLOCATORS):
        raise _refuse("allocator", allocator, _ALLOCATORS)


def _check_tree(tree: Any) -> bool:
    """Return whether the caller of ``insert`` frees duplicates.

    Raises:
        UnsupportedEngine: this tree is not known, or does more than is known here.
    """
    known = [place for place in _TREES if _is_known(tree, (place,))]
    if not known:
        raise _refuse("radix tree", tree, tuple(_TREES))
    if attribute(tree, "disable"):
        raise UnsupportedEngine("SGLang's radix tree is switched off: leave out --disable-radix-cache")
    core = tree
    if not _TREES[known[0]]:
        core = attribute(tree, "tree_core")
        if not _is_known(core, _CORES):
            raise _refuse("radix tree's core", core, _CORES)
        components = [str(component) for component in attribute(tree, "tree_components")]
        if components != ["full"]:
            raise UnsupportedEngine(
                f"SGLang's radix tree keeps {', '.join(components)}; only full attention is supported"
            )
        if attribute(tree, "cache_controller") is not None or attribute(tree, "linker") is not None:
            raise UnsupportedEngine(
                "SGLang's radix tree has a second store behind it (hierarchical cache or external linker): "
                "use snapd's linker in place of direct injection"
            )
    if attribute(core, "is_eagle"):
        raise UnsupportedEngine("SGLang's radix tree has pairs of tokens as keys, for EAGLE: not supported")
    return _TREES[known[0]]


def _check_sizes(allocator: Any, tree: Any) -> None:
    pool = allocator.get_kvcache()
    if attribute(tree, "token_to_kv_pool_allocator") is not allocator:
        raise UnsupportedEngine("SGLang's radix tree is over another allocator than the one given")
    page_sizes = {int(attribute(part, "page_size")) for part in (allocator, tree, pool)}
    sizes = {int(attribute(part, "size")) for part in (allocator, pool)}
    if len(page_sizes) != 1 or len(sizes) != 1:
        raise UnsupportedEngine(
            f"SGLang's pool, allocator and radix tree differ in page size {sorted(page_sizes)} or in tokens "
            f"{sorted(sizes)}: context parallelism in decode is not supported"
        )
