"""P's copy out of an arena on the host, with what P holds already: moved in bounded steps, and summed.

Source: design, section 8.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from snapd.kv.checksum import (
    CHUNK_BYTES,
    SUM_MODULUS,
    WORD_BYTES,
    ChecksumAccumulator,
    PlaneChecksum,
    plane_checksum,
)
from snapd.kv.copy import ScatterJob
from snapd.kv.pool import KVPool


class HostScatter:
    """Scatters the tokens of a shard that are wanted, and sums all of them.

    Tokens before *skip_tokens* are in the pool already, and those from *stop_tokens* on are not wanted: they
    are summed where they lie and not moved.

    Args:
        make_job: ``ScatterJob``.
        pool: P's, on the CPU.
        planes: of the slab, uint8, shape [num_tokens * stride_bytes].
        slots: for the tokens from *skip_tokens* up to *stop_tokens*; None: there are none.
        skip_tokens: how many P holds.
        num_tokens: how many the slab holds.
        stop_tokens: where what P wants ends; None: with the slab.
        verify: whether to sum.
        groups: planes, by index, that are done with together, one group after the other; each plane is in
            one. None: all are one group.

    Raises:
        InvalidRequest: something does not fit; nothing moved.

    Attributes:
        groups_done: so many groups, from the first on, are summed and in their slots.
        is_launched: never: what a step has moved is moved.
        is_idle: always: nothing goes on between two steps.
        finished: None: there is no device whose event it could be.
    """

    is_launched: Final = False
    is_idle: Final = True
    finished: Final = None

    def __init__(
        self,
        make_job: Callable[..., ScatterJob],
        pool: KVPool,
        planes: Sequence[torch.Tensor],
        slots: torch.Tensor | None,
        skip_tokens: int,
        num_tokens: int,
        *,
        stop_tokens: int | None = None,
        verify: bool,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        stop_tokens = num_tokens if stop_tokens is None else stop_tokens
        self._groups = one_group(planes) if groups is None else tuple(groups)
        strides_bytes = [plane.numel() // num_tokens for plane in planes]
        self._cuts_bytes = [(width * skip_tokens, width * stop_tokens) for width in strides_bytes]
        self._whole: tuple[PlaneChecksum, ...] | None = None
        if any(_is_inside_word(plane, cuts) for plane, cuts in zip(planes, self._cuts_bytes, strict=True)):
            # A cut is inside a word: sum and scatter a private copy, so that what is summed is used.
            planes = [plane.clone() for plane in planes]
            self._whole = tuple(plane_checksum(plane) for plane in planes) if verify else ()
        self._still_sums = [ChecksumAccumulator() for _ in planes]
        self._still_planes = planes if verify and self._whole is None else ()
        moved = [plane[skip:stop] for plane, (skip, stop) in zip(planes, self._cuts_bytes, strict=True)]
        self._moved_bytes = [part.numel() for part in moved]
        order = [index for group in self._groups for index in group]
        self._job = None if slots is None else make_job(pool, slots, moved, checksum=verify, order=order)
        self.groups_done = 0
        self._begin_group()

    def _begin_group(self) -> None:
        group = self._groups[self.groups_done] if self.groups_done < len(self._groups) else ()
        still = group if self._still_planes else ()
        self._todo = _chunks(
            [(self._still_sums[index], self._still_planes[index], self._cuts_bytes[index]) for index in still]
        )
        self._next_still = next(self._todo, None)
        self._left_bytes = 0 if self._job is None else sum(self._moved_bytes[index] for index in group)

    def step(self, max_bytes: int) -> bool:
        """Sum or move some bytes, at least one piece, of one group at most; return whether all were."""
        done_bytes = 0
        while self._next_still is not None:
            if done_bytes >= max_bytes:
                return False
            sums, chunk, first_word = self._next_still
            sums.add(chunk, first_word)
            done_bytes += chunk.numel()
            self._next_still = next(self._todo, None)
        if self._job is not None and self._left_bytes:
            before_bytes = self._job.bytes_done
            self._job.step(min(max_bytes - done_bytes, self._left_bytes))
            self._left_bytes -= self._job.bytes_done - before_bytes
            if self._left_bytes:
                return False
        if self.groups_done < len(self._groups):
            self.groups_done += 1
            self._begin_group()
        return self.groups_done == len(self._groups)

    def checksums(self) -> tuple[PlaneChecksum, ...]:
        """Return the checksum of every plane, shape [num_planes]."""
        return tuple(self.checksum_of(index) for index in range(len(self._cuts_bytes)))

    def checksum_of(self, index: int) -> PlaneChecksum:
        """Return the checksum of a plane whose group is done."""
        if self._whole is not None:
            return self._whole[index]
        still0, still1 = self._still_sums[index].value
        moved0, moved1 = (0, 0) if self._job is None else self._job.checksum_of(index)
        # The positions of what was moved start at 1; this puts them where they are in the plane.
        moved1 += self._cuts_bytes[index][0] // WORD_BYTES * moved0
        return ((still0 + moved0) % SUM_MODULUS, (still1 + moved1) % SUM_MODULUS)


def one_group(planes: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """Return all planes, by index, as one group."""
    return (tuple(range(len(planes))),)


def _is_inside_word(plane: torch.Tensor, cuts_bytes: Sequence[int]) -> bool:
    """Return whether a cut that is not the plane's end divides a checksum word."""
    return any(cut_bytes % WORD_BYTES for cut_bytes in cuts_bytes if cut_bytes != plane.numel())


def _chunks(
    still: Sequence[tuple[ChecksumAccumulator, torch.Tensor, tuple[int, int]]],
) -> Iterator[tuple[ChecksumAccumulator, torch.Tensor, int]]:
    """Yield what lies outside the cuts of each plane, in order, and the word that it starts with."""
    for accumulator, plane, (skip_bytes, stop_bytes) in still:
        for start_bytes, part in ((0, plane[:skip_bytes]), (stop_bytes, plane[stop_bytes:])):
            at_bytes = start_bytes
            for chunk in torch.split(part, CHUNK_BYTES) if part.numel() else ():
                yield accumulator, chunk, at_bytes // WORD_BYTES
                at_bytes += chunk.numel()
