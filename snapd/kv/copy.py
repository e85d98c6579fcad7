"""Gather and scatter on the CPU: kv_pool slots to planes and back, checksums in the same pass.

The sums are taken of bytes that only this process can change: the pool's own, or a private buffer
between pool and plane. A slab is shared memory, so a late write may land in it between a copy and a
sum; summing the slab would let that pass.

Source: design, sections 2 and 8.
"""

import abc
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from snapd.errors import InvalidRequest, InvariantBroken
from snapd.kv.checksum import (
    CHUNK_BYTES,
    WORD_BYTES,
    ChecksumAccumulator,
    PlaneChecksum,
    PlaneSums,
    is_aligned,
)
from snapd.kv.planes import check_planes
from snapd.kv.pool import KVPool, PlaneRows, bytes_as_words
from snapd.units import KIB, align_down, align_up

# From here on a plain copy of a run beats an index op, even with a shorter piece before and after it.
RUN_BYTES_MIN: Final = 256 * KIB


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens ``[start, stop)`` of one plane, moved at once; a *run* has consecutive slots."""

    start: int
    stop: int
    is_run: bool


def _runs(slots: torch.Tensor, tokens_min: int) -> list[tuple[int, int]]:
    """Return the token ranges of *tokens_min* and more consecutive slots, in token order."""
    breaks = torch.nonzero(slots[1:] != slots[:-1] + 1).flatten() + 1
    edges = torch.cat((torch.zeros(1, dtype=torch.int64), breaks, torch.tensor([slots.numel()])))
    starts, stops = edges[:-1], edges[1:]
    # All in one run counts however short it is.
    long = (stops - starts >= tokens_min) | (stops - starts == slots.numel())
    return list(zip(starts[long].tolist(), stops[long].tolist(), strict=True))


def _pieces(slots: torch.Tensor, stride_bytes: int, page_size_tokens: int) -> list[Piece]:
    """Return pieces that cover all tokens in order, each of about ``CHUNK_BYTES`` at most.

    Every piece but the last ends at a whole page and at a whole checksum word.
    """
    num_tokens = slots.numel()
    granule = math.lcm(page_size_tokens, WORD_BYTES // math.gcd(WORD_BYTES, stride_bytes))
    step = max(granule, align_down(CHUNK_BYTES // stride_bytes, granule))
    pieces: list[Piece] = []

    def cut(start: int, stop: int, is_run: bool) -> None:
        pieces.extend(Piece(at, min(at + step, stop), is_run) for at in range(start, stop, step))

    done = 0
    # A run gives up to a granule at either end to its neighbours.
    for start, stop in _runs(slots, RUN_BYTES_MIN // stride_bytes + 2 * granule):
        first = align_up(start, granule)
        last = stop if stop == num_tokens else align_down(stop, granule)
        cut(done, first, is_run=False)
        cut(first, last, is_run=True)
        done = last
    whole_pages = align_down(num_tokens, page_size_tokens)
    if done < whole_pages < num_tokens and whole_pages % granule == 0:
        # The partial last page is a run, and what is before it may then be moved by whole pages.
        cut(done, whole_pages, is_run=False)
        cut(whole_pages, num_tokens, is_run=True)
    else:
        cut(done, num_tokens, is_run=False)
    return pieces


def _as_rows(flat: torch.Tensor, rows: int, word_bytes: int) -> torch.Tensor:
    """Return *flat* (uint8, contiguous, aligned to *word_bytes*) as [rows, words a row]."""
    row_bytes = flat.numel() // rows
    shape = (rows, row_bytes // word_bytes)
    return bytes_as_words(flat.untyped_storage(), int(flat.storage_offset()), shape, row_bytes, word_bytes)


class SlotMoves(abc.ABC):
    """What every copy between the slots of a pool and planes is made of: what to move at once, and how.

    Attributes:
        bytes_total: bytes of all planes.
        bytes_done: bytes moved so far.
    """

    # The planes' memory is this process's own: it may be summed where it lies.
    _is_part_own: bool = False

    def __init__(
        self,
        pool: KVPool,
        slots: torch.Tensor,
        *,
        checksum: bool,
        sums: Sequence[PlaneSums] | None = None,
    ) -> None:
        """Check *slots* and plan the pieces.

        Args:
            pool: see ``CopyJob``.
            slots: see ``CopyJob``.
            checksum: whether to sum the planes.
            sums: what sums them, one a plane, in place of the usual checksum. Each gets its plane's bytes in
                token order.

        Raises:
            InvalidRequest: the pool is not on the CPU, or the slots are not its own.
        """
        if pool.device.type != "cpu":
            raise InvalidRequest(f"the pool is on {pool.device}; this copy is for the CPU")
        num_tokens = slots.numel()
        pool.check_slots(slots, num_tokens)
        self._pool = pool
        self._slots = slots.contiguous()
        self._sums: tuple[PlaneSums, ...] = ()
        if checksum:
            self._sums = tuple(ChecksumAccumulator() for _ in pool.planes) if sums is None else tuple(sums)
        self._page_numbers = self._slots[:: pool.page_size_tokens] // pool.page_size_tokens
        self._pieces = {
            stride_bytes: _pieces(self._slots, stride_bytes, pool.page_size_tokens)
            for stride_bytes in {place.stride_bytes for place in pool.planes}
        }
        self._private = torch.empty(0, dtype=torch.uint8)
        self.bytes_total = num_tokens * sum(place.stride_bytes for place in pool.planes)
        self.bytes_done = 0

    @property
    @abc.abstractmethod
    def done(self) -> bool:
        """Whether every byte was moved."""

    @property
    def checksums(self) -> tuple[PlaneChecksum, ...]:
        """The checksum of each plane, shape [num_planes]; empty if they were not asked for.

        Raises:
            InvalidRequest: the job is not done.
        """
        if not self.done:
            raise InvalidRequest(f"{self.bytes_total - self.bytes_done} bytes are still to be moved")
        return tuple(sums.value for sums in self._sums)

    def checksum_of(self, plane_index: int) -> PlaneChecksum:
        """Return the checksum of what was moved of a plane, so far; there must be sums."""
        return self._sums[plane_index].value

    def _move_piece(self, plane_index: int, piece: Piece, part: torch.Tensor) -> None:
        """Move a piece from or to *part*, the bytes of the plane that it fills, and sum it."""
        place = self._pool.planes[plane_index]
        if piece.is_run:
            own = self._move_run(place, int(self._slots[piece.start]), piece.stop - piece.start, part)
        else:
            own = self._move_indexed(place, piece, part)
        if self._sums:
            self._sums[plane_index].add(own, piece.start * place.stride_bytes // WORD_BYTES)
        self.bytes_done += part.numel()

    def _move_run(
        self, place: PlaneRows, first_slot: int, num_tokens: int, part: torch.Tensor
    ) -> torch.Tensor:
        if place.flat is not None:
            own = place.flat[first_slot * place.stride_bytes : (first_slot + num_tokens) * place.stride_bytes]
            self._copy(own, part)
            return part if self._is_part_own else own
        words = place.words[first_slot : first_slot + num_tokens]
        return self._through_private(part, num_tokens, place.word_bytes, words, None)

    def _move_indexed(self, place: PlaneRows, piece: Piece, part: torch.Tensor) -> torch.Tensor:
        page = self._pool.page_size_tokens
        if place.pages is not None and piece.start % page == 0 and piece.stop % page == 0:
            index = self._page_numbers[piece.start // page : piece.stop // page]
            return self._through_private(part, index.numel(), place.page_word_bytes, place.pages, index)
        index = self._slots[piece.start : piece.stop]
        return self._through_private(part, index.numel(), place.word_bytes, place.words, index)

    def _through_private(
        self, part: torch.Tensor, rows: int, word_bytes: int, table: torch.Tensor, index: torch.Tensor | None
    ) -> torch.Tensor:
        """Move *part* from or to *rows* rows of *table*, all or those of *index*; return what to sum."""
        if (self._is_part_own or not self._sums) and is_aligned(part, word_bytes):
            self._move_rows(table, index, _as_rows(part, rows, word_bytes))
            return part
        if self._private.numel() < part.numel():
            self._private = torch.empty(part.numel(), dtype=torch.uint8)
        private = self._private[: part.numel()]
        self._move_private(part, private, _as_rows(private, rows, word_bytes), table, index)
        return private

    @abc.abstractmethod
    def _copy(self, own: torch.Tensor, part: torch.Tensor) -> None:
        """Copy between consecutive bytes of the pool and of a plane."""

    @abc.abstractmethod
    def _move_rows(self, table: torch.Tensor, index: torch.Tensor | None, words: torch.Tensor) -> None:
        """Move between rows of the pool, shape [rows, words a row], and *words* of that shape."""

    @abc.abstractmethod
    def _move_private(
        self,
        part: torch.Tensor,
        private: torch.Tensor,
        words: torch.Tensor,
        table: torch.Tensor,
        index: torch.Tensor | None,
    ) -> None:
        """Move between the pool and a plane by way of *private*; *words* is a view of it."""


class CopyJob(SlotMoves):
    """A gather or a scatter that is done in bounded steps.

    Everything is checked when the job is made, before a byte moves. The planes, the pool and the slots must
    stay as they are until the job is done.
    """

    def __init__(
        self,
        pool: KVPool,
        slots: torch.Tensor,
        planes: Sequence[torch.Tensor],
        *,
        checksum: bool = True,
        sums: Sequence[PlaneSums] | None = None,
        order: Sequence[int] | None = None,
    ) -> None:
        """Check both sides and plan the pieces.

        Args:
            pool: on the CPU.
            slots: int64, shape [num_tokens], as ``KVPool.check_slots`` wants them.
            planes: one for each of the pool's, uint8, shape [num_tokens * stride_bytes], contiguous, on the
                CPU, apart from each other.
            checksum: whether to sum the planes; False is for benchmarks.
            sums: what sums them; None: the usual checksum.
            order: in which the planes are moved, by index; None: as they are.

        Raises:
            InvalidRequest: something does not fit; nothing moved.
        """
        super().__init__(pool, slots, checksum=checksum, sums=sums)
        sizes_bytes = [slots.numel() * place.stride_bytes for place in pool.planes]
        check_planes(planes, sizes_bytes, pool.device)
        self._planes = tuple(planes)
        order = range(len(self._planes)) if order is None else order
        self._todo = _all_pieces([(index, self._pieces[pool.planes[index].stride_bytes]) for index in order])
        self._next = next(self._todo, None)

    @property
    def done(self) -> bool:
        """Whether every byte was moved."""
        return self._next is None

    def step(self, max_bytes: int) -> bool:
        """Move some bytes; return whether the job is done.

        At least one piece is moved and then more, as long as all together stay within *max_bytes*. A piece is
        at most ``CHUNK_BYTES``, unless a page (or 8 tokens) is more.
        """
        step_bytes = 0
        with torch.inference_mode():
            while self._next is not None:
                plane_index, piece = self._next
                stride_bytes = self._pool.planes[plane_index].stride_bytes
                part = self._planes[plane_index][piece.start * stride_bytes : piece.stop * stride_bytes]
                if step_bytes and step_bytes + part.numel() > max_bytes:
                    break
                self._move_piece(plane_index, piece, part)
                step_bytes += part.numel()
                self._next = next(self._todo, None)
        return self.done


def _all_pieces(by_plane: list[tuple[int, list[Piece]]]) -> Iterator[tuple[int, Piece]]:
    # No method of the job: they would hold each other until garbage is collected, and with them the planes of
    # a job that was given up, which may lie in the arena of a daemon that is gone.
    for plane_index, pieces in by_plane:
        for piece in pieces:
            yield plane_index, piece


class Gathers(SlotMoves):
    """Moves from the pool into planes."""

    def _copy(self, own: torch.Tensor, part: torch.Tensor) -> None:
        part.copy_(own)

    def _move_rows(self, table: torch.Tensor, index: torch.Tensor | None, words: torch.Tensor) -> None:
        if index is None:
            words.copy_(table)
            return
        if words.shape != (index.numel(), table.shape[1]):
            # index_select would give *words* new storage, and the plane would stay as it was.
            raise InvariantBroken(f"rows of shape {tuple(words.shape)} for {index.numel()} slots")
        torch.index_select(table, 0, index, out=words)

    def _move_private(
        self,
        part: torch.Tensor,
        private: torch.Tensor,
        words: torch.Tensor,
        table: torch.Tensor,
        index: torch.Tensor | None,
    ) -> None:
        self._move_rows(table, index, words)
        part.copy_(private)


class GatherJob(Gathers, CopyJob):
    """Copies pool slots into planes."""


class ScatterJob(CopyJob):
    """Copies planes into pool slots; planes may be read-only."""

    def _copy(self, own: torch.Tensor, part: torch.Tensor) -> None:
        own.copy_(part)

    def _move_rows(self, table: torch.Tensor, index: torch.Tensor | None, words: torch.Tensor) -> None:
        if index is None:
            table.copy_(words)
        else:
            table.index_copy_(0, index, words)

    def _move_private(
        self,
        part: torch.Tensor,
        private: torch.Tensor,
        words: torch.Tensor,
        table: torch.Tensor,
        index: torch.Tensor | None,
    ) -> None:
        private.copy_(part)
        self._move_rows(table, index, words)


def _finish(job: CopyJob) -> tuple[PlaneChecksum, ...]:
    while not job.step(job.bytes_total):
        pass
    return job.checksums


def gather(
    pool: KVPool, slots: torch.Tensor, planes: Sequence[torch.Tensor], *, checksum: bool = True
) -> tuple[PlaneChecksum, ...]:
    """Copy *slots* of *pool* into *planes*; return the planes' checksums, shape [num_planes].

    Args:
        pool: on the CPU.
        slots: int64, shape [num_tokens], in token order, each once.
        planes: written in place; uint8, shape [num_tokens * stride_bytes], one for each of the pool's.
        checksum: whether to sum the planes; without it the result is empty.

    Raises:
        InvalidRequest: something does not fit; nothing moved.

    Source: design, section 8.
    """
    return _finish(GatherJob(pool, slots, planes, checksum=checksum))


def scatter(
    planes: Sequence[torch.Tensor], pool: KVPool, slots: torch.Tensor, *, checksum: bool = True
) -> tuple[PlaneChecksum, ...]:
    """Copy *planes* into *slots* of *pool*; return the checksums of what the pool got, shape [num_planes].

    Args:
        planes: only read; uint8, shape [num_tokens * stride_bytes], one for each of the pool's.
        pool: on the CPU; bytes outside *slots* stay as they are.
        slots: int64, shape [num_tokens], in token order, each once.
        checksum: whether to sum the planes; without it the result is empty.

    Raises:
        InvalidRequest: something does not fit; nothing moved.

    Source: design, section 8.
    """
    return _finish(ScatterJob(pool, slots, planes, checksum=checksum))
