"""Pushes over shared memory: the arena is mapped, and no copy is under way between two steps.

Source: design, section 8.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from snapd.calls import Grant
from snapd.core.slab import Extent
from snapd.errors import InvalidRequest, TransportError
from snapd.kv.checksum import PlaneChecksum, PlaneSums, plane_checksum
from snapd.kv.control import Attempts, ClientControl
from snapd.kv.copy import GatherJob
from snapd.kv.pool import KVPool
from snapd.kv.pushjob import GrantedJob
from snapd.kv.slabs import Slabs
from snapd.layout import Layout
from snapd.transport.base import TicketState, Write
from snapd.transport.shm import ShmWriter


class MappedJob(GrantedJob):
    """Gathers straight into the mapped arena: no copy is under way between two steps.

    Args:
        grant, layout, control, attempts, started_s: see ``GrantedJob``.
        slabs: the mapped arenas.
        pools: by rank.
        slots: of the tokens that are sent, shape [num_tokens].
        sums_for: keyed sums for a rank's planes; None of it: the usual checksum.
    """

    _control: ClientControl

    def __init__(
        self,
        grant: Grant,
        layout: Layout,
        control: ClientControl,
        attempts: Attempts,
        started_s: float,
        *,
        slabs: Slabs,
        pools: dict[int, KVPool],
        slots: torch.Tensor,
        sums_for: Callable[[int], Sequence[PlaneSums] | None],
    ) -> None:
        self._slabs = slabs
        self._sums_for = sums_for
        self._pools = pools
        self._slots = slots
        self._gather: GatherJob | None = None
        self._rank_index = 0
        super().__init__(grant, layout, control, attempts, started_s)

    @property
    def bytes_done(self) -> int:
        """Payload bytes written so far, over all ranks."""
        return self._rank_index * self._shard_bytes + (self._gather.bytes_done if self._gather else 0)

    def _advance(self, max_bytes: int) -> None:
        grant = self.grant
        rank_grant = grant.ranks[self._rank_index]
        started_s = time.monotonic()
        if self._gather is None:
            planes = self._slabs.planes(rank_grant, grant.num_tokens, grant.epoch)
            sums = self._sums_for(rank_grant.rank)
            self._gather = GatherJob(self._pools[rank_grant.rank], self._slots, planes, sums=sums)
        is_gathered = self._gather.step(max_bytes)
        self._gather_s += time.monotonic() - started_s
        if not is_gathered:
            return
        commit_now(self._control, grant, rank_grant.rank, self._shard_bytes, self._gather.checksums)
        self._gather = None
        self._rank_index += 1
        if self._rank_index == len(grant.ranks):
            self._succeed(drained=True)

    def _stop(self) -> dict[int, bool]:
        self._gather = None
        return {rank_grant.rank: True for rank_grant in self.grant.ranks}


class MappedPlanesJob(GrantedJob):
    """Writes planes that were gathered before into the mapped arena, a rank a step.

    Args:
        grant, layout, control, attempts, started_s: see ``GrantedJob``.
        slabs: the mapped arenas.
        planes, checksums: see ``Pusher.push_planes``.
        sums_for: see ``MappedJob``.
    """

    _control: ClientControl

    def __init__(
        self,
        grant: Grant,
        layout: Layout,
        control: ClientControl,
        attempts: Attempts,
        started_s: float,
        *,
        slabs: Slabs,
        planes: Mapping[int, Sequence[torch.Tensor]],
        checksums: Mapping[int, Sequence[PlaneChecksum]] | None,
        sums_for: Callable[[int], Sequence[PlaneSums] | None],
    ) -> None:
        self._slabs = slabs
        self._sums_for = sums_for
        self._planes = planes
        self._checksums = checksums
        self._rank_index = 0
        super().__init__(grant, layout, control, attempts, started_s)

    @property
    def bytes_done(self) -> int:
        """Payload bytes written so far, over all ranks."""
        return self._rank_index * self._shard_bytes

    def _advance(self, max_bytes: int) -> None:
        del max_bytes
        grant = self.grant
        rank_grant = grant.ranks[self._rank_index]
        source = self._planes[rank_grant.rank]
        target = self._slabs.planes(rank_grant, grant.num_tokens, grant.epoch)
        if [plane.numel() for plane in source] != [plane.numel() for plane in target]:
            raise InvalidRequest(f"rank {rank_grant.rank}: the planes are not those of the layout")
        sums = self._sums_of(source, rank_grant.rank)
        arena = self._slabs.arena(rank_grant.rank, grant.epoch)
        writer = ShmWriter(arena)
        ticket = writer.submit(few_writes(source, target, arena.address, rank_grant.extents))
        if writer.poll(ticket).state is not TicketState.DONE:
            raise TransportError(f"rank {rank_grant.rank}: the write failed")
        commit_now(self._control, grant, rank_grant.rank, self._shard_bytes, sums)
        self._rank_index += 1
        if self._rank_index == len(grant.ranks):
            self._succeed(drained=True)

    def _sums_of(self, source: Sequence[torch.Tensor], rank: int) -> Sequence[PlaneChecksum]:
        keyed = self._sums_for(rank)
        if keyed is not None:
            for sums, plane in zip(keyed, source, strict=True):
                sums.add(plane)
            return [sums.value for sums in keyed]
        return self._checksums[rank] if self._checksums else [plane_checksum(plane) for plane in source]

    def _stop(self) -> dict[int, bool]:
        return {rank_grant.rank: True for rank_grant in self.grant.ranks}


def few_writes(
    source: Sequence[torch.Tensor],
    target: Sequence[torch.Tensor],
    arena_address: int,
    extents: Sequence[Extent],
) -> list[Write]:
    """Return writes of all planes, one for as many neighbours as lie alike on both sides.

    The number of writes is what costs, so the padding between two planes is written too where it is both the
    slab's own and of the source's own storage.
    """
    writes: list[Write] = []
    for index, (plane, to_plane) in enumerate(zip(source, target, strict=True)):
        offset = to_plane.data_ptr() - arena_address
        if writes:
            last, before = writes[-1], source[index - 1]
            gap_bytes = offset - last.target_ptr - last.size_bytes
            is_alike = plane.data_ptr() == last.source_address + last.size_bytes + gap_bytes
            is_one_storage = plane.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
            is_one_extent = any(
                extent.offset_bytes <= last.target_ptr and offset < extent.end_bytes for extent in extents
            )
            if gap_bytes >= 0 and is_alike and is_one_storage and is_one_extent:
                size_bytes = last.size_bytes + gap_bytes + plane.numel()
                writes[-1] = Write(last.source_address, last.target_ptr, size_bytes)
                continue
        writes.append(Write(plane.data_ptr(), offset, plane.numel()))
    return writes


def commit_now(
    control: ClientControl, grant: Grant, rank: int, num_bytes: int, checksums: Sequence[PlaneChecksum]
) -> None:
    """Say that every write of one rank's shard is final, and wait for the answer."""
    control.client.commit(
        grant.slab_handle, rank, num_bytes, grant.num_tokens, tuple(checksums), epoch=grant.epoch
    )
