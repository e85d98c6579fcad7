"""A shard in pieces of memory of this process, for transports that cannot map the arena.

A piece is one contiguous range of the arena, as long as it can be: the number of writes is what costs.
So it runs on over neighbouring planes, and over the padding between them, which belongs to the slab. It
ends where it is full, at the end of an extent, and at a plane that does not follow.

Source: design, sections 4, 7 and 8.
"""

import abc
import bisect
import ctypes
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol

import torch

from snapd.core.slab import Extent
from snapd.errors import InvalidRequest
from snapd.kv.checksum import (
    CHUNK_BYTES,
    WORD_BYTES,
    ChecksumAccumulator,
    PlaneChecksum,
    PlaneSums,
    check_plane,
)
from snapd.kv.copy import Gathers, Piece
from snapd.kv.pool import KVPool
from snapd.units import align_down

# A cut inside a plane is at a multiple of it, so that what follows is aligned in the buffer as in the arena.
CUT_BYTES: Final = 16
assert CUT_BYTES % WORD_BYTES == 0, "every part but a plane's last is whole checksum words"


@dataclasses.dataclass(frozen=True)
class StagedPiece:
    """What a buffer holds, from its first byte on.

    Attributes:
        offset_bytes: where it goes in the arena.
        size_bytes: how long it is.
    """

    offset_bytes: int
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class Section:
    """Bytes ``[start, stop)`` of one plane, and where they begin in the piece."""

    plane_index: int
    start: int
    stop: int
    at: int


@dataclasses.dataclass
class PiecePlan:
    """A piece to come."""

    offset_bytes: int
    extent: Extent
    sections: list[Section] = dataclasses.field(default_factory=list)
    size_bytes: int = 0


def _extent_of(offset_bytes: int, size_bytes: int, extents: Sequence[Extent]) -> Extent:
    """Return which of *extents*, in order, holds a plane."""
    index = bisect.bisect_right(extents, offset_bytes, key=lambda extent: extent.offset_bytes) - 1
    if index < 0 or offset_bytes + size_bytes > extents[index].end_bytes:
        raise InvalidRequest(f"a plane of {size_bytes} bytes at {offset_bytes} leaves its extents")
    return extents[index]


def plan_pieces(
    sizes_bytes: Sequence[int],
    granules_bytes: Sequence[int],
    offsets_bytes: Sequence[int],
    extents: Sequence[Extent],
    piece_bytes: int,
) -> list[PiecePlan]:
    """Return the pieces of a shard, in order of its planes.

    Args:
        sizes_bytes: of each plane.
        granules_bytes: of each plane; where it may be cut, at most *piece_bytes*.
        offsets_bytes: where each plane starts in the arena.
        extents: of the slab.
        piece_bytes: the longest piece.

    Raises:
        InvalidRequest: the planes are not as many as the offsets, leave the extents or share bytes.
    """
    if len(offsets_bytes) != len(sizes_bytes) or min(sizes_bytes, default=0) < 1:
        raise InvalidRequest(f"{len(offsets_bytes)} offsets for planes of {list(sizes_bytes)} bytes")
    for (start, size_bytes), (next_start, _) in itertools.pairwise(
        sorted(zip(offsets_bytes, sizes_bytes, strict=True))
    ):
        if next_start < start + size_bytes:
            raise InvalidRequest("two planes share bytes")
    in_order = sorted(extents)
    plans: list[PiecePlan] = []
    for index, (size_bytes, granule_bytes, offset_bytes) in enumerate(
        zip(sizes_bytes, granules_bytes, offsets_bytes, strict=True)
    ):
        extent = _extent_of(offset_bytes, size_bytes, in_order)
        done = 0
        while done < size_bytes:
            start, left = offset_bytes + done, size_bytes - done
            plan = plans[-1] if plans else None
            if (
                plan is None
                or plan.extent != extent
                or start < plan.offset_bytes + plan.size_bytes
                or start - plan.offset_bytes + min(granule_bytes, left) > piece_bytes
            ):
                plan = PiecePlan(start, extent)
                plans.append(plan)
            at = start - plan.offset_bytes
            room = piece_bytes - at
            taken = left if left <= room else align_down(room, granule_bytes)
            plan.sections.append(Section(index, done, done + taken, at))
            plan.size_bytes = at + taken
            done += taken
    return plans


class StagedSource(Protocol):
    """A shard that is moved piece by piece into buffers that the caller hands in.

    Attributes:
        num_pieces: how many there are.
        piece_bytes_max: of the longest.
        plane_sizes_bytes: shape [num_planes].
        bytes_total: payload bytes of the shard.
        bytes_done: payload bytes moved so far.
    """

    num_pieces: int
    piece_bytes_max: int
    plane_sizes_bytes: tuple[int, ...]
    bytes_total: int
    bytes_done: int

    @property
    def done(self) -> bool:
        """Whether every piece was filled."""
        ...

    @property
    def checksums(self) -> tuple[PlaneChecksum, ...]:
        """The checksum of each plane, shape [num_planes].

        Raises:
            InvalidRequest: the job is not done.
        """
        ...

    def begin(self, buffer: torch.Tensor) -> None:
        """Fill *buffer* next.

        Args:
            buffer: uint8, contiguous, on the CPU, of ``piece_bytes_max`` bytes at least; this process's own
                memory, as it is summed where it lies.

        Raises:
            InvalidRequest: there is no such piece, one is being filled, or the buffer does not fit.
        """
        ...

    def step(self, max_bytes: int, moved_bytes: int = 0) -> StagedPiece | None:
        """Move some bytes into the buffer, as ``CopyJob.step``; return the piece when it is filled.

        Args:
            max_bytes: how many.
            moved_bytes: how many of them were moved before; if some were, none has to be moved now.

        Raises:
            InvalidRequest: no piece is being filled.
        """
        ...


class _Pieces(abc.ABC):
    """The pieces of a shard, filled one after another."""

    bytes_done: int

    def _lay_out(self, sizes_bytes: Sequence[int], plans: list[PiecePlan]) -> None:
        self.plane_sizes_bytes = tuple(sizes_bytes)
        self._plans = plans
        self._next_piece = 0
        self._buffer: torch.Tensor | None = None
        self._parts: Iterator[tuple[int, Piece, torch.Tensor]] = iter(())
        self._next_part: tuple[int, Piece, torch.Tensor] | None = None
        self.num_pieces = len(plans)
        self.piece_bytes_max = max(plan.size_bytes for plan in plans)

    @property
    def done(self) -> bool:
        """Whether every piece was filled."""
        return self._next_piece == len(self._plans)

    def begin(self, buffer: torch.Tensor) -> None:
        """Fill *buffer* next; see ``StagedSource``."""
        if self._buffer is not None or self.done:
            raise InvalidRequest("a piece is being filled" if self._buffer is not None else "all is filled")
        check_plane(buffer, "buffer")
        if buffer.numel() < self.piece_bytes_max:
            raise InvalidRequest(f"a buffer of {buffer.numel()} bytes for pieces of {self.piece_bytes_max}")
        plan = self._plans[self._next_piece]
        end = 0
        for section in plan.sections:
            # What the buffer held before is nobody's business.
            buffer[end : section.at].zero_()
            end = section.at + section.stop - section.start
        self._buffer = buffer
        self._parts = self._parts_of(plan, buffer)
        self._next_part = next(self._parts)

    def step(self, max_bytes: int, moved_bytes: int = 0) -> StagedPiece | None:
        """Move some bytes; see ``StagedSource``."""
        if self._buffer is None:
            raise InvalidRequest("no piece is being filled")
        step_bytes = moved_bytes
        with torch.inference_mode():
            while self._next_part is not None:
                plane_index, piece, part = self._next_part
                if step_bytes and step_bytes + part.numel() > max_bytes:
                    return None
                self._fill_part(plane_index, piece, part)
                step_bytes += part.numel()
                self._next_part = next(self._parts, None)
        plan = self._plans[self._next_piece]
        self._next_piece += 1
        self._buffer = None
        return StagedPiece(plan.offset_bytes, plan.size_bytes)

    def fill(self, buffer: torch.Tensor) -> StagedPiece | None:
        """Fill *buffer* with the next piece at once; None when all was filled.

        Raises:
            InvalidRequest: the buffer does not fit, or a piece is being filled.
        """
        if self.done:
            return None
        self.begin(buffer)
        return self.step(self.piece_bytes_max)

    @abc.abstractmethod
    def _parts_of(self, plan: PiecePlan, buffer: torch.Tensor) -> Iterator[tuple[int, Piece, torch.Tensor]]:
        """Yield what to move at once: of which plane, what of it, and to where."""

    @abc.abstractmethod
    def _fill_part(self, plane_index: int, piece: Piece, part: torch.Tensor) -> None:
        """Fill *part*, sum it and count it."""


class StagedGatherJob(_Pieces, Gathers):
    """Gathers a shard out of a pool, piece by piece. Pool and slots must stay as they are until it is done.

    Args:
        pool: on the CPU.
        slots: int64, shape [num_tokens], as ``KVPool.check_slots`` wants them.
        plane_offsets_bytes: where each plane starts in the arena.
        extents: of the slab.
        piece_bytes: the longest piece.
        sums: keyed ones, one a plane. They are made of bytes that are not in a buffer yet: a transport has
            that registered, so others may write there.

    Raises:
        InvalidRequest: something does not fit; nothing moved.
    """

    _is_part_own = True

    def __init__(
        self,
        pool: KVPool,
        slots: torch.Tensor,
        plane_offsets_bytes: Sequence[int],
        extents: Sequence[Extent],
        piece_bytes: int,
        sums: Sequence[PlaneSums] | None = None,
    ) -> None:
        sizes, plans = plan_gather(pool, slots.numel(), plane_offsets_bytes, extents, piece_bytes)
        super().__init__(pool, slots, checksum=True, sums=sums)
        self._is_part_own = sums is None
        self._lay_out(sizes, plans)

    def _parts_of(self, plan: PiecePlan, buffer: torch.Tensor) -> Iterator[tuple[int, Piece, torch.Tensor]]:
        for section in plan.sections:
            stride_bytes = self._pool.planes[section.plane_index].stride_bytes
            pieces = self._pieces[stride_bytes]
            start, stop = section.start // stride_bytes, section.stop // stride_bytes
            first = bisect.bisect_right(pieces, start, key=lambda piece: piece.start) - 1
            for index in range(first, len(pieces)):
                piece = pieces[index]
                if piece.start >= stop:
                    break
                clipped = Piece(max(piece.start, start), min(piece.stop, stop), piece.is_run)
                at = section.at + (clipped.start - start) * stride_bytes
                size_bytes = (clipped.stop - clipped.start) * stride_bytes
                yield section.plane_index, clipped, buffer[at : at + size_bytes]

    def _fill_part(self, plane_index: int, piece: Piece, part: torch.Tensor) -> None:
        self._move_piece(plane_index, piece, part)


def plan_gather(
    pool: KVPool,
    num_tokens: int,
    plane_offsets_bytes: Sequence[int],
    extents: Sequence[Extent],
    piece_bytes: int,
) -> tuple[list[int], list[PiecePlan]]:
    """Return the size of each plane of a shard of *pool*, and its pieces; a part of a plane is whole tokens.

    Raises:
        InvalidRequest: something does not fit.
    """
    check_piece_bytes((place.stride_bytes for place in pool.planes), piece_bytes)
    sizes = [num_tokens * place.stride_bytes for place in pool.planes]
    granules = [
        granule_tokens(place.stride_bytes, pool.page_size_tokens, piece_bytes) * place.stride_bytes
        for place in pool.planes
    ]
    return sizes, plan_pieces(sizes, granules, plane_offsets_bytes, extents, piece_bytes)


def granule_tokens(stride_bytes: int, page_size_tokens: int, piece_bytes: int) -> int:
    """Return of how many tokens a plane's part in a piece is a multiple: pages, if they are short enough."""
    word_tokens = CUT_BYTES // math.gcd(CUT_BYTES, stride_bytes)
    page_tokens = math.lcm(page_size_tokens, word_tokens)
    return page_tokens if page_tokens * stride_bytes <= piece_bytes else word_tokens


def check_piece_bytes(plane_stride_bytes: Iterable[int], piece_bytes: int) -> None:
    """Check that a piece can hold the least part of each plane.

    Raises:
        InvalidRequest: it cannot; says what is wanted.
    """
    for stride_bytes in plane_stride_bytes:
        least_bytes = math.lcm(CUT_BYTES, stride_bytes)
        if least_bytes > piece_bytes:
            raise InvalidRequest(
                f"piece_bytes is {piece_bytes}; rows of {stride_bytes} bytes want {least_bytes} at least"
            )


class StagedCopyJob(_Pieces):
    """Copies planes that were gathered before, piece by piece. They must stay as they are until it is done.

    Args:
        planes: uint8, 1-D, contiguous, on the CPU, one for each of the grant's.
        plane_offsets_bytes: where each starts in the arena.
        extents: of the slab.
        piece_bytes: the longest piece.
        checksums: of the planes; None: they are summed on the way.
        sums: keyed ones, one a plane, in place of *checksums*; made of the planes, not of a buffer.

    Raises:
        InvalidRequest: something does not fit; nothing moved.
    """

    def __init__(
        self,
        planes: Sequence[torch.Tensor],
        plane_offsets_bytes: Sequence[int],
        extents: Sequence[Extent],
        piece_bytes: int,
        checksums: Sequence[PlaneChecksum] | None = None,
        sums: Sequence[PlaneSums] | None = None,
    ) -> None:
        for index, plane in enumerate(planes):
            check_plane(plane, f"plane {index}")
        if piece_bytes < CUT_BYTES:
            raise InvalidRequest(f"piece_bytes is {piece_bytes}; {CUT_BYTES} are wanted at least")
        self._planes = tuple(planes)
        self._given = None if checksums is None else tuple(checksums)
        self._is_keyed = sums is not None
        self._sums: tuple[PlaneSums, ...] = tuple(sums or ())
        if checksums is None and sums is None:
            self._sums = tuple(ChecksumAccumulator() for _ in planes)
        sizes = [plane.numel() for plane in planes]
        self.bytes_total = sum(sizes)
        self.bytes_done = 0
        self._lay_out(
            sizes, plan_pieces(sizes, [CUT_BYTES] * len(sizes), plane_offsets_bytes, extents, piece_bytes)
        )

    @property
    def checksums(self) -> tuple[PlaneChecksum, ...]:
        """The checksum of each plane, shape [num_planes].

        Raises:
            InvalidRequest: the job is not done.
        """
        if not self.done:
            raise InvalidRequest(f"{self.bytes_total - self.bytes_done} bytes are still to be moved")
        return self._given if self._given is not None else tuple(sums.value for sums in self._sums)

    def _parts_of(self, plan: PiecePlan, buffer: torch.Tensor) -> Iterator[tuple[int, Piece, torch.Tensor]]:
        for section in plan.sections:
            for start in range(section.start, section.stop, CHUNK_BYTES):
                stop = min(start + CHUNK_BYTES, section.stop)
                at = section.at + start - section.start
                yield section.plane_index, Piece(start, stop, True), buffer[at : at + stop - start]

    def _fill_part(self, plane_index: int, piece: Piece, part: torch.Tensor) -> None:
        # Not torch's copy: its threads would compete with those of the transport.
        source_address = self._planes[plane_index].data_ptr() + piece.start
        ctypes.memmove(part.data_ptr(), source_address, part.numel())
        if self._sums:
            own = self._planes[plane_index][piece.start : piece.stop] if self._is_keyed else part
            self._sums[plane_index].add(own, piece.start // WORD_BYTES)
        self.bytes_done += part.numel()
