"""P's copy out of an arena on the host, for keyed integrity: what is hashed is what is used.

Whoever writes to the arena may do so at any time, between any two reads. So every byte is read from there
once: into memory of this process, out of which it is hashed and used. What is moved ends in the pool's slots,
which no tree knows before all planes were compared.

Source: design, sections 8 and 12.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from snapd.kv.checksum import CHUNK_BYTES, PlaneChecksum
from snapd.kv.copy import ScatterJob
from snapd.kv.hostscatter import one_group
from snapd.kv.integrity import PlaneMac, differing_planes
from snapd.kv.pool import KVPool


class KeyedScatter:
    """Scatters the tokens of a shard that are wanted, and makes the MAC of all of them, in token order.

    Tokens before *skip_tokens* are in the pool already, and those from *stop_tokens* on are not wanted: they
    are hashed and not moved.

    Args:
        pool: P's, on the CPU.
        planes: of the slab, uint8, shape [num_tokens * stride_bytes].
        slots: for the tokens from *skip_tokens* up to *stop_tokens*; None: there are none.
        skip_tokens: how many P holds.
        num_tokens: how many the slab holds.
        stop_tokens: where what P wants ends.
        macs: of the attempt, one a plane, with nothing added yet.
        groups: see ``HostScatter``.

    Raises:
        InvalidRequest: something does not fit; nothing moved.

    Attributes:
        groups_done: so many groups, from the first on, are hashed and in their slots.
        is_launched: never: what a step has moved is moved.
        is_idle: always: nothing goes on between two steps.
        finished: None: there is no device whose event it could be.
    """

    is_launched: Final = False
    is_idle: Final = True
    finished: Final = None

    def __init__(
        self,
        pool: KVPool,
        planes: Sequence[torch.Tensor],
        slots: torch.Tensor | None,
        skip_tokens: int,
        num_tokens: int,
        *,
        stop_tokens: int,
        macs: Sequence[PlaneMac],
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._macs = tuple(macs)
        self._groups = one_group(planes) if groups is None else tuple(groups)
        widths = [plane.numel() // num_tokens for plane in planes]
        cuts = [(width * skip_tokens, width * stop_tokens) for width in widths]
        self._before = [plane[:skip] for plane, (skip, _) in zip(planes, cuts, strict=True)]
        moved = [plane[skip:stop] for plane, (skip, stop) in zip(planes, cuts, strict=True)]
        self._behind = [plane[stop:] for plane, (_, stop) in zip(planes, cuts, strict=True)]
        self._moved_bytes = [part.numel() for part in moved]
        order = [index for group in self._groups for index in group]
        self._job = None if slots is None else ScatterJob(pool, slots, moved, sums=self._macs, order=order)
        self.groups_done = 0
        self._begin_group()

    def _begin_group(self) -> None:
        group = self._groups[self.groups_done] if self.groups_done < len(self._groups) else ()
        self._group_macs = [self._macs[index] for index in group]
        self._still_before = _Still(self._group_macs, [self._before[index] for index in group])
        self._still_behind = _Still(self._group_macs, [self._behind[index] for index in group])
        self._left_bytes = 0 if self._job is None else sum(self._moved_bytes[index] for index in group)
        self._is_moving = False

    def step(self, max_bytes: int) -> bool:
        """Hash and move some bytes, at least one piece, of one group at most; return whether all were."""
        left_bytes = self._still_before.step(max(max_bytes, 1))
        if not self._still_before.done or left_bytes <= 0:
            return False
        if self._job is not None and self._left_bytes:
            if not self._is_moving:
                self._is_moving = True
                for mac in self._group_macs:
                    mac.begin_part()
            before_bytes = self._job.bytes_done
            self._job.step(min(left_bytes, self._left_bytes))
            moved_bytes = self._job.bytes_done - before_bytes
            self._left_bytes -= moved_bytes
            if self._left_bytes:
                return False
            left_bytes -= moved_bytes
        self._still_behind.step(left_bytes)
        if not self._still_behind.done:
            return False
        if self.groups_done < len(self._groups):
            self.groups_done += 1
            self._begin_group()
        return self.groups_done == len(self._groups)

    def differing(self, expected: Sequence[PlaneChecksum]) -> list[int]:
        """Return the indexes of the planes whose MAC is not the one that was committed; none means equal."""
        return differing_planes(expected, self._macs)

    def differing_in(self, group: Sequence[int], expected: Sequence[PlaneChecksum]) -> list[int]:
        """Return those of the planes of a group that is done whose MAC is not the one of *expected*.

        Args:
            group: planes, by index.
            expected: of all planes.
        """
        differing = differing_planes([expected[index] for index in group], [self._macs[i] for i in group])
        return [group[at] for at in differing]


class _Still:
    """Parts of planes that are hashed and not used, a private copy at a time."""

    def __init__(self, macs: Sequence[PlaneMac], parts: Sequence[torch.Tensor]) -> None:
        self._todo = _chunks(macs, parts)
        self._next = next(self._todo, None)
        self._private = torch.empty(0, dtype=torch.uint8)

    @property
    def done(self) -> bool:
        return self._next is None

    def step(self, max_bytes: int) -> int:
        """Hash some bytes, one piece at least if *max_bytes* is positive; return what is left of it."""
        while self._next is not None and max_bytes > 0:
            mac, chunk = self._next
            if self._private.numel() < chunk.numel():
                self._private = torch.empty(chunk.numel(), dtype=torch.uint8)
            private = self._private[: chunk.numel()]
            # The hash must not see other bytes at its second look than at its first.
            private.copy_(chunk)
            mac.add(private)
            max_bytes -= chunk.numel()
            self._next = next(self._todo, None)
        return max_bytes


def _chunks(
    macs: Sequence[PlaneMac], parts: Sequence[torch.Tensor]
) -> Iterator[tuple[PlaneMac, torch.Tensor]]:
    for mac, part in zip(macs, parts, strict=True):
        for chunk in torch.split(part, CHUNK_BYTES) if part.numel() else ():
            yield mac, chunk
