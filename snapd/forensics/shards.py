"""What the log says of one arena: which bytes each attempt holds there, live or in quarantine.

Source: design, section 4.
"""

from typing import Final

from sortedcontainers import SortedList

from snapd.core.slab import Extent
from snapd.forensics.violations import Where
from snapd.units import align_down

LIVE: Final = "live"
QUARANTINED: Final = "quarantined"
FREE: Final = "free"


class Shard:
    """What one attempt has, or had, in one arena.

    Attributes:
        use: live, quarantined or free.
        why, until_ns: of the quarantine.
        since_ns: when the quarantine began.
        mapped_bytes: of its extents, padding included; less if some overlap what was there before.
        lease_ended_ns, lease_until_ns: of the last lease that ended; -1: none did.
    """

    __slots__ = (
        "allocated", "bytes", "extents", "handle", "lease_ended_ns", "lease_until_ns", "mapped_bytes",
        "quarantined", "rank", "since_ns", "until_ns", "use", "why",
    )  # fmt: skip

    def __init__(self, handle: int, rank: int, num_bytes: int, extents: tuple[Extent, ...]) -> None:
        self.handle = handle
        self.rank = rank
        self.bytes = num_bytes
        self.extents = extents
        self.use = LIVE
        self.why = ""
        self.until_ns = 0
        self.since_ns = 0
        self.mapped_bytes = 0
        self.lease_ended_ns = -1
        self.lease_until_ns = -1
        self.allocated: Where | None = None
        self.quarantined: Where | None = None

    @property
    def is_over(self) -> bool:
        """It is not in quarantine any more."""
        return self.use != QUARANTINED

    def has_extents(self, extents: tuple[Extent, ...]) -> bool:
        """Whether these are its extents, in any order."""
        return extents == self.extents or sorted(extents) == sorted(self.extents)


class ShardMap:
    """The shards of one arena, by place. No two in it overlap.

    Args:
        capacity_bytes: the arena's size; None: not known.
        alignment_bytes: every extent begins and ends on a multiple of it; 1: not known.
    """

    def __init__(self, capacity_bytes: int | None = None, alignment_bytes: int = 1) -> None:
        # The allocator leaves what is over after the last whole unit.
        self.capacity_bytes = (
            None if capacity_bytes is None else align_down(capacity_bytes, max(alignment_bytes, 1))
        )
        self.alignment_bytes = max(alignment_bytes, 1)
        self.live_bytes = 0
        self.quarantined_bytes = 0
        self._starts: SortedList = SortedList()
        self._held: dict[int, tuple[int, Shard]] = {}  # start -> end, shard

    def misplaced(self, extents: tuple[Extent, ...]) -> Extent | None:
        """Return the first extent that cannot be one of this arena, or None."""
        for extent in extents:
            start, size_bytes = extent.offset_bytes, extent.size_bytes
            if start < 0 or size_bytes <= 0:
                return extent
            if self.capacity_bytes is not None and start + size_bytes > self.capacity_bytes:
                return extent
            if start % self.alignment_bytes or size_bytes % self.alignment_bytes:
                return extent
        return None

    def put(self, shard: Shard) -> tuple[Extent, Shard] | None:
        """Enter a shard; return an overlap, if there is one, as its extent and who is there already.

        What overlaps is not entered: the older owner stays, so that one fault is told once.
        """
        starts, held = self._starts, self._held
        overlap: tuple[Extent, Shard] | None = None
        for extent in shard.extents:
            start = extent.offset_bytes
            end = start + extent.size_bytes
            index = starts.bisect_right(start)
            other: Shard | None = None
            if index:
                end_before, owner = held[starts[index - 1]]
                if end_before > start:
                    other = owner
            if index < len(starts) and starts[index] < end:
                other = held[starts[index]][1]
            if other is not None:
                overlap = (extent, other)
                continue
            held[start] = (end, shard)
            starts.add(start)
            shard.mapped_bytes += extent.size_bytes
        if shard.use == LIVE:
            self.live_bytes += shard.mapped_bytes
        else:
            self.quarantined_bytes += shard.mapped_bytes
        return overlap

    def quarantine(self, shard: Shard) -> None:
        """What was live is quarantined."""
        self.live_bytes -= shard.mapped_bytes
        self.quarantined_bytes += shard.mapped_bytes
        shard.use = QUARANTINED

    def free(self, shard: Shard) -> None:
        """What was live or quarantined is free."""
        if shard.use == LIVE:
            self.live_bytes -= shard.mapped_bytes
        else:
            self.quarantined_bytes -= shard.mapped_bytes
        for extent in shard.extents:
            entry = self._held.get(extent.offset_bytes)
            if entry is not None and entry[1] is shard:
                del self._held[extent.offset_bytes]
                self._starts.remove(extent.offset_bytes)
        shard.use = FREE

    def clear(self) -> None:
        """Forget what is held: it is not known any more."""
        self._starts, self._held = SortedList(), {}
        self.live_bytes = self.quarantined_bytes = 0

    def extents(self) -> list[Extent]:
        """Return every extent that is not free, in order."""
        return [Extent(start, self._held[start][0] - start) for start in self._starts]
