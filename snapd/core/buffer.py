"""The arenas of all ranks, and what lies in them in quarantine.

Bytes of an arena are free (in the allocator's holes), live (a session owns them) or
quarantined (nobody does, and nobody may reuse them yet). The three add up to the capacity.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from snapd.core.events import State
from snapd.core.records import QuarantineWhy, ReleaseWhy
from snapd.core.session import ArenaView
from snapd.core.slab import Extent, SlabAllocator
from snapd.errors import InvariantBroken
from snapd.units import align_up

PlaneSizes: TypeAlias = Sequence[int]


class Quarantined(msgspec.Struct, frozen=True):
    """One rank's extents, kept back until *until_ns* or until a proof comes.

    Attributes:
        bytes: payload.
        since_ns: when that began.
        why: what may still touch them; see ``records.SlabQuarantined``.
        lease_id: the lease under which they may still be read; 0: nobody reads.
        writer_id: the process whose exit is drain proof; 0: there is no such process.
        proof: of drain, if it came while somebody read still.
        state: in which the attempt ended.
    """

    session_id: str
    bytes: int
    extents: tuple[Extent, ...]
    since_ns: int
    until_ns: int
    why: QuarantineWhy
    lease_id: int = 0
    writer_id: int = 0
    proof: ReleaseWhy | None = None
    state: State = State.ABORTED


class Buffer:
    """One allocator a rank, with exact books."""

    def __init__(self, arenas: Mapping[int, SlabAllocator], alignment_bytes: int) -> None:
        if not arenas:
            raise ValueError("a buffer needs at least one arena")
        self.alignment_bytes = alignment_bytes
        self.arenas = dict(sorted(arenas.items()))
        self.quarantine: dict[int, dict[int, Quarantined]] = {}
        self._quarantined_bytes = dict.fromkeys(self.arenas, 0)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have an arena, in order."""
        return tuple(self.arenas)

    def fits_ever(self, ranks: Iterable[int], plane_sizes_bytes: PlaneSizes) -> bool:
        """Return whether empty arenas could take the slab."""
        return all(self.arenas[rank].fits_ever(plane_sizes_bytes) for rank in ranks)

    def could_fit(self, ranks: Iterable[int], plane_sizes_bytes: PlaneSizes) -> bool:
        """Return whether every arena of *ranks* has room now."""
        return all(self.arenas[rank].could_fit(plane_sizes_bytes) for rank in ranks)

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
    ) -> list[int] | None:
        """Return which victims, in their order, make room; None if evicting them all would not.

        Nothing is changed. A victim that has no shard in an arena that lacks room is passed over.
        """
        need_bytes = sum(align_up(size_bytes, self.alignment_bytes) for size_bytes in plane_sizes_bytes)
        lacking = [rank for rank in ranks if not self.arenas[rank].could_fit(plane_sizes_bytes)]
        # The sums decide most refusals without a walk over the victims.
        if any(self.arenas[rank].free_bytes + evictable_bytes(rank) < need_bytes for rank in lacking):
            return None
        chosen: list[int] = []
        try:
            for handle in victims:
                extents_by_rank = extents_of(handle)
                if not any(rank in extents_by_rank for rank in lacking):
                    continue
                for rank, extents in extents_by_rank.items():
                    self.arenas[rank].free(extents)
                chosen.append(handle)
                lacking = [
                    rank for rank in lacking if not self._has_room(rank, plane_sizes_bytes, need_bytes)
                ]
                if not lacking:
                    return chosen
            return None
        finally:
            for handle in chosen:
                for rank, extents in extents_of(handle).items():
                    self.arenas[rank].retake(extents)

    def _has_room(self, rank: int, plane_sizes_bytes: PlaneSizes, need_bytes: int) -> bool:
        arena = self.arenas[rank]
        # The first look is cheap and answers for most victims.
        return arena.free_bytes >= need_bytes and arena.could_fit(plane_sizes_bytes)

    def free(self, rank: int, extents: tuple[Extent, ...]) -> None:
        """Give live extents back for reuse."""
        self.arenas[rank].free(extents)

    def put_in_quarantine(self, handle: int, rank: int, item: Quarantined) -> None:
        """Turn live extents into quarantined ones."""
        by_rank = self.quarantine.setdefault(handle, {})
        if rank in by_rank:
            raise InvariantBroken(f"attempt {handle} has extents of rank {rank} in quarantine already")
        by_rank[rank] = item
        self._quarantined_bytes[rank] += sum(extent.size_bytes for extent in item.extents)

    def release(self, handle: int, rank: int) -> Quarantined:
        """Give quarantined extents back for reuse, and return what they were."""
        by_rank = self.quarantine[handle]
        item = by_rank.pop(rank)
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
        if any(not by_rank for by_rank in self.quarantine.values()):
            raise InvariantBroken("an empty entry is left in the quarantine")
