"""The arenas of all ranks, and what lies in them in quarantine.

Bytes of an arena are free (in the allocator's holes), live (a session owns them) or
quarantined (nobody does, and nobody may reuse them yet). The three add up to the capacity.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from snapd.core.extent import Extent
from snapd.core.planes import Planes
from snapd.core.session import ArenaView, Quarantined
from snapd.core.slab import SlabAllocator
from snapd.errors import InvariantBroken
from snapd.units import align_up

__all__ = ["Buffer", "Quarantined"]

PlaneSizes: TypeAlias = Sequence[int]
# Victims that an eviction tries before it looks whether all of them would help.
_TRIED_BLINDLY: Final = 64


class Buffer:
    """One allocator a rank, with exact books."""

    def __init__(self, arenas: Mapping[int, SlabAllocator], alignment_bytes: int) -> None:
        if not arenas:
            raise ValueError("a buffer needs at least one arena")
        self.alignment_bytes = alignment_bytes
        self.arenas = dict(sorted(arenas.items()))
        self.quarantine: dict[int, dict[int, Quarantined]] = {}
        self.num_quarantined = 0  # shards
        self._quarantined_bytes = dict.fromkeys(self.arenas, 0)
        # The ranks that have an arena, in order.
        self.ranks: Final = tuple(self.arenas)

    def fits_ever(self, ranks: Iterable[int], plane_sizes_bytes: PlaneSizes) -> bool:
        """Return whether empty arenas could take the slab."""
        return all(self.arenas[rank].fits_ever(plane_sizes_bytes) for rank in ranks)

    def could_fit(self, ranks: Iterable[int], plane_sizes_bytes: PlaneSizes) -> bool:
        """Return whether every arena of *ranks* has room now."""
        for rank in ranks:  # noqa: SIM110 - at every prepare, and a generator takes longer
            if not self.arenas[rank].could_fit(plane_sizes_bytes):
                return False
        return True

    def take(
        self, ranks: tuple[int, ...], planes: Planes, num_tokens: int
    ) -> dict[int, tuple[Extent, ...]] | None:
        """Take a slab in every arena of *ranks*; None: one has no room now, and nothing changed."""
        if len(ranks) == 1 and planes.even_bytes:
            # The usual case: one arena need not be asked first, and the planes need not be looked at.
            arena = self.arenas[ranks[0]]
            extents = arena.allocate_even(planes.even_bytes * num_tokens, planes.num_planes)
            return None if extents is None else {ranks[0]: extents}
        plane_sizes_bytes = planes.sizes_bytes(num_tokens)
        return self.allocate(ranks, plane_sizes_bytes) if self.could_fit(ranks, plane_sizes_bytes) else None

    def allocate(self, ranks: Iterable[int], plane_sizes_bytes: PlaneSizes) -> dict[int, tuple[Extent, ...]]:
        """Take a slab in every arena of *ranks*. Ask ``could_fit`` first.

        Raises:
            InvariantBroken: an arena has no room after all.
        """
        taken: dict[int, tuple[Extent, ...]] = {}
        for rank in ranks:
            extents = self.arenas[rank].allocate(plane_sizes_bytes)
            if extents is None:
                raise InvariantBroken(f"arena {rank} had room and now has none")
            taken[rank] = extents
        return taken

    def plan_eviction(
        self,
        ranks: Sequence[int],
        plane_sizes_bytes: PlaneSizes,
        victims: Iterable[int],
        extents_of: Callable[[int], Mapping[int, tuple[Extent, ...]]],
        evictable_bytes: Callable[[int], int],
        kept: Callable[[], Iterable[int]] | None = None,
    ) -> list[int] | None:
        """Return which victims, in their order, make room; None if evicting them all would not.

        Nothing is changed. A victim that has no shard in an arena that lacks room is passed over.

        Args:
            ranks: the arenas that need room.
            plane_sizes_bytes: of the slab, in each of them.
            victims: candidates, best first.
            extents_of: what an attempt holds, by rank.
            evictable_bytes: what all candidates together hold in an arena.
            kept: the attempts that hold something and are no candidates; None: not known.
        """
        need_bytes = sum(align_up(size_bytes, self.alignment_bytes) for size_bytes in plane_sizes_bytes)
        lacking = [rank for rank in ranks if not self.arenas[rank].could_fit(plane_sizes_bytes)]
        # The sums decide most refusals without a walk over the victims.
        if any(self.arenas[rank].free_bytes + evictable_bytes(rank) < need_bytes for rank in lacking):
            return None
        trials = {rank: self.arenas[rank].trial(plane_sizes_bytes) for rank in lacking}
        chosen: list[int] = []
        try:
            for handle in victims:
                extents_by_rank = extents_of(handle)
                helped = [rank for rank in trials if rank in extents_by_rank]
                if not helped:
                    continue
                chosen.append(handle)
                for rank in helped:
                    if trials[rank].free(extents_by_rank[rank]):
                        trials.pop(rank).close()
                if not trials:
                    return chosen
                # Few victims make room as a rule. After many, see whether all of them would, before the
                # whole loop waits for a walk in vain.
                if (
                    kept is not None
                    and len(chosen) == _TRIED_BLINDLY
                    and not self._could_ever_help(trials, plane_sizes_bytes, extents_of, kept())
                ):
                    return None
            return None
        finally:
            for trial in trials.values():
                trial.close()

    def _could_ever_help(
        self,
        ranks: Iterable[int],
        plane_sizes_bytes: PlaneSizes,
        extents_of: Callable[[int], Mapping[int, tuple[Extent, ...]]],
        kept: Iterable[int],
    ) -> bool:
        """Return whether every arena of *ranks* would have room with nothing in it but what is kept."""
        held: dict[int, list[Extent]] = {rank: [] for rank in ranks}
        for handle in kept:
            extents_by_rank = extents_of(handle)
            for rank, extents in held.items():
                extents += extents_by_rank.get(rank, ())
        for by_rank in self.quarantine.values():
            for rank, extents in held.items():
                if rank in by_rank:
                    extents += by_rank[rank].extents
        return all(
            self.arenas[rank].fits_beside(extents, plane_sizes_bytes) for rank, extents in held.items()
        )

    def free(self, rank: int, extents: tuple[Extent, ...]) -> None:
        """Give live extents back for reuse."""
        self.arenas[rank].free(extents)

    def put_in_quarantine(self, handle: int, rank: int, item: Quarantined) -> None:
        """Turn live extents into quarantined ones."""
        by_rank = self.quarantine.setdefault(handle, {})
        if rank in by_rank:
            raise InvariantBroken(f"attempt {handle} has extents of rank {rank} in quarantine already")
        by_rank[rank] = item
        self.num_quarantined += 1
        self._quarantined_bytes[rank] += sum(extent.size_bytes for extent in item.extents)

    def release(self, handle: int, rank: int) -> Quarantined:
        """Give quarantined extents back for reuse, and return what they were."""
        by_rank = self.quarantine[handle]
        item = by_rank.pop(rank)
        self.num_quarantined -= 1
        if not by_rank:
            del self.quarantine[handle]
        self.arenas[rank].free(item.extents)
        self._quarantined_bytes[rank] -= sum(extent.size_bytes for extent in item.extents)
        return item

    def first_release_ns(self) -> int | None:
        """Return about when the next quarantine ends, or None when there is none."""
        for by_rank in self.quarantine.values():
            return min(item.until_ns for item in by_rank.values())
        return None

    def view(self, rank: int, evictable_bytes: int) -> ArenaView:
        """Return the books of one arena."""
        arena = self.arenas[rank]
        quarantined_bytes = self._quarantined_bytes[rank]
        return ArenaView(
            rank=rank,
            capacity_bytes=arena.capacity_bytes,
            free_bytes=arena.free_bytes,
            live_bytes=arena.live_bytes - quarantined_bytes,
            quarantined_bytes=quarantined_bytes,
            evictable_bytes=evictable_bytes,
            largest_hole_bytes=arena.largest_hole_bytes,
            num_holes=arena.num_holes,
        )

    def validate(self, owned: Mapping[int, list[Extent]]) -> None:
        """Check that owned and quarantined extents are exactly the allocators' live ones.

        Args:
            owned: the extents that sessions own, by rank.

        Raises:
            InvariantBroken: they are not.
        """
        for rank, arena in self.arenas.items():
            arena.validate()
            kept = [x for by in self.quarantine.values() if rank in by for x in by[rank].extents]
            if sum(extent.size_bytes for extent in kept) != self._quarantined_bytes[rank]:
                raise InvariantBroken(f"arena {rank}: quarantined bytes do not add up")
            if sorted(kept + owned.get(rank, [])) != list(arena.live()):
                raise InvariantBroken(f"arena {rank}: owned and quarantined extents are not the live ones")
            if arena.free_bytes + arena.live_bytes != arena.capacity_bytes:
                raise InvariantBroken(f"arena {rank}: free + live + quarantined is not the capacity")
        if self.num_quarantined != sum(map(len, self.quarantine.values())):
            raise InvariantBroken("the number of shards in quarantine is wrong")
        if any(not by_rank for by_rank in self.quarantine.values()):
            raise InvariantBroken("an empty entry is left in the quarantine")
