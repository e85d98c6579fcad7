"""A P rank's own bookkeeping: pages of its kv_pool, and which session's prefix is in them.

Prefill work and cached sessions share the pages. Whoever needs pages may evict sessions that are
over, least recently used first; only a large prompt may evict an idle one as well. So an ingest fails
to allocate while P is busy, and now and then a prefix is gone.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence

import torch

from snapd.demo.plan import PAGE_SIZE_TOKENS
from snapd.units import ceil_div


@dataclasses.dataclass(slots=True)
class _Entry:
    """A session in the tree: its tokens, the slot of each, and whether it is over."""

    token_ids: Sequence[int]
    slots: torch.Tensor
    is_over: bool = False


class PagedCache:
    """Pages and tree of one rank. Implements ``snapd.kv.ingest.KVOwner``.

    Args:
        num_slots: of the pool.
        prefill_slots_max: what P's own work may hold at one time.

    Attributes:
        total_slots: slots of the pool, whole pages.
        evicted: sessions evicted so far.
        alloc_failures: times that an ingest got nothing.
    """

    def __init__(self, num_slots: int, prefill_slots_max: int) -> None:
        self._prefill_pages_max = prefill_slots_max // PAGE_SIZE_TOKENS
        self._prefill_pages = 0
        self.total_slots = num_slots // PAGE_SIZE_TOKENS * PAGE_SIZE_TOKENS
        self.evicted = 0
        self.alloc_failures = 0
        self._free_pages = list(range(self.total_slots // PAGE_SIZE_TOKENS))
        # Least recently used first.
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._pins: dict[str, int] = {}

    # --- KVOwner -------------------------------------------------------------------------------

    def lock_prefix(self, session_id: str, token_ids: Sequence[int]) -> int:
        """Return how many tokens of *token_ids* are in the tree, and pin them."""
        self._pins[session_id] = self._pins.get(session_id, 0) + 1
        entry = self._entries.get(session_id)
        if entry is None:
            return 0
        self._entries.move_to_end(session_id)
        shared = min(len(entry.token_ids), len(token_ids))
        if tuple(entry.token_ids[:shared]) == tuple(token_ids[:shared]):
            return shared
        return next(at for at in range(shared) if entry.token_ids[at] != token_ids[at])

    def unlock_prefix(self, session_id: str) -> None:
        """Undo ``lock_prefix``."""
        self._pins[session_id] -= 1
        if not self._pins[session_id]:
            del self._pins[session_id]

    def allocate(self, num_tokens: int) -> torch.Tensor | None:
        """Return slots for an ingest, shape [num_tokens]; None: there are not enough."""
        wanted_pages = ceil_div(num_tokens, PAGE_SIZE_TOKENS)
        self._evict(wanted_pages)
        if wanted_pages > len(self._free_pages):
            self.alloc_failures += 1
            return None
        pages = self._take_pages(wanted_pages)
        slots = torch.tensor(pages).repeat_interleave(PAGE_SIZE_TOKENS) * PAGE_SIZE_TOKENS
        return (slots + torch.arange(len(slots)) % PAGE_SIZE_TOKENS)[:num_tokens]

    def free(self, slots: torch.Tensor) -> None:
        """Take the pages of *slots* back."""
        self._free_pages += torch.unique(slots // PAGE_SIZE_TOKENS).tolist()

    def insert(
        self, session_id: str, token_ids: Sequence[int], resident_tokens: int, slots: torch.Tensor
    ) -> None:
        """Put tokens from *resident_tokens* on, whose KV is in *slots*, into the tree."""
        entry = self._entries.get(session_id)
        if entry is not None and len(entry.slots) > resident_tokens:
            # The partial last page came again, in a page of its own.
            self.free(entry.slots[resident_tokens:])
        kept = torch.empty(0, dtype=torch.int64) if entry is None else entry.slots[:resident_tokens]
        self._entries[session_id] = _Entry(token_ids, torch.cat((kept, slots)))
        self._entries.move_to_end(session_id)

    # --- prefill -------------------------------------------------------------------------------

    def take_for_prefill(self, num_tokens: int, *, idle_victims: int = 0) -> list[int]:
        """Return pages for P's own work: those of *num_tokens*, or as many as there are and it may have.

        Sessions that are over go for it, and then up to *idle_victims* others; with those it may have all.
        """
        most_pages = self.total_slots // PAGE_SIZE_TOKENS if idle_victims else self._prefill_pages_max
        room_pages = most_pages - self._prefill_pages
        wanted_pages = max(0, min(ceil_div(num_tokens, PAGE_SIZE_TOKENS), room_pages))
        self._evict(wanted_pages, idle_victims)
        pages = self._take_pages(min(wanted_pages, len(self._free_pages)))
        self._prefill_pages += len(pages)
        return pages

    def end_prefill(self, pages: Sequence[int]) -> None:
        """Take the pages of a prefill back."""
        self._prefill_pages -= len(pages)
        self._free_pages += pages

    def mark_over(self, session_id: str) -> None:
        """Let a session that has ended go before others."""
        entry = self._entries.get(session_id)
        if entry is not None:
            entry.is_over = True
            self._entries.move_to_end(session_id, last=False)

    # --- looking at it -------------------------------------------------------------------------

    def slots_of(self, session_id: str) -> torch.Tensor:
        """Return the slots of a session in the tree, in token order."""
        return self._entries[session_id].slots

    def resident(self) -> dict[str, int]:
        """Return what is in the tree: tokens by session."""
        return {session_id: len(entry.slots) for session_id, entry in self._entries.items()}

    @property
    def free_slots(self) -> int:
        """Slots of free pages."""
        return len(self._free_pages) * PAGE_SIZE_TOKENS

    @property
    def cached_slots(self) -> int:
        """Slots of the pages that the tree holds."""
        return sum(
            ceil_div(len(entry.slots), PAGE_SIZE_TOKENS) * PAGE_SIZE_TOKENS
            for entry in self._entries.values()
        )

    def drop_all(self) -> None:
        """Let go of the whole tree."""
        for session_id in list(self._entries):
            self._drop(session_id)

    def _drop(self, session_id: str) -> None:
        self.free(self._entries.pop(session_id).slots)

    def _evict(self, wanted_pages: int, idle_victims: int = 0) -> None:
        """Throw sessions out until *wanted_pages* are free, or nothing is left that may go."""
        for session_id in list(self._entries):
            if len(self._free_pages) >= wanted_pages:
                break
            entry = self._entries[session_id]
            if session_id in self._pins or not (entry.is_over or idle_victims):
                continue
            idle_victims -= not entry.is_over
            self.evicted += 1
            self._drop(session_id)

    def _take_pages(self, num_pages: int) -> list[int]:
        cut = len(self._free_pages) - num_pages
        taken, self._free_pages = self._free_pages[cut:], self._free_pages[:cut]
        return taken
