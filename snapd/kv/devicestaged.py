"""A shard in pieces of memory on a GPU: gathers that are launched, and looked at until they are over.

The pieces are those of ``staged``. Several may be under way, each into a buffer of its own, and they end in
the order in which they were begun, as all run on one stream. Sums are those of the whole planes: a part adds
to them where it lies in its plane.

Source: design, sections 7 and 8.
"""

import abc
import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from snapd.core.slab import Extent
from snapd.errors import InvalidRequest
from snapd.kv.checksum import SUM_MODULUS, WORD_BYTES, PlaneChecksum
from snapd.kv.devicecopy import CopyJobs, SlotCopy
from snapd.kv.devicejob import has_passed, memory_errors, pinned_like, to_device, to_host
from snapd.kv.pool import KVPool, widest_word_bytes
from snapd.kv.staged import PiecePlan, Section, StagedPiece, plan_gather
from snapd.kv.staging import StagingBuffer

_UNIT_BYTES_MAX: Final = 8
# More holes than these are filled with zeros by one launch, over what lies between them too.
_HOLES_MAX: Final = 2


class PieceGathering:
    """The gather of one piece, launched.

    Attributes:
        staged: what its buffer holds when it is over.
        payload_bytes: of it, without padding.
    """

    def __init__(self, staged: StagedPiece, payload_bytes: int) -> None:
        self.staged = staged
        self.payload_bytes = payload_bytes
        self._jobs: list[SlotCopy] = []
        self._event: torch.cuda.Event | None = None

    @property
    def is_over(self) -> bool:
        """Whether every byte is in the buffer. Never waits."""
        return has_passed(self._event) and all(job.done for job in self._jobs)

    def wait(self) -> None:
        """Wait for the device, where there is something to wait for; other threads may run."""
        if self._event is not None:
            self._event.synchronize()


class DeviceGather(abc.ABC):
    """Gathers a shard out of a pool on a device, piece by piece. Pool and slots must stay as they are.

    Args:
        pool: where from.
        slots: int64 on the CPU, shape [num_tokens], checked, and nobody else's.
        plane_offsets_bytes: where each plane starts in the arena.
        extents: of the slab.
        piece_bytes: the longest piece.
        stream: what everything runs on; None: there are none on this device.
        after: events that the first gather waits for.

    Raises:
        InvalidRequest: something does not fit; nothing was launched.
    """

    def __init__(
        self,
        pool: KVPool,
        slots: torch.Tensor,
        plane_offsets_bytes: Sequence[int],
        extents: Sequence[Extent],
        piece_bytes: int,
        *,
        stream: torch.cuda.Stream | None,
        after: Sequence[torch.cuda.Event],
    ) -> None:
        sizes, self._plans = plan_gather(pool, slots.numel(), plane_offsets_bytes, extents, piece_bytes)
        self._filled = [_filling(plan) for plan in self._plans]
        self.plane_sizes_bytes = tuple(sizes)
        self.piece_bytes_max = max(plan.size_bytes for plan in self._plans)
        self.bytes_total = sum(sizes)
        self.bytes_done = 0
        self._pool = pool
        self._slots = slots
        self._stream = stream
        self._after = tuple(after)
        self._next_piece = 0
        self._under_way: list[PieceGathering] = []

    @property
    def num_pieces(self) -> int:
        """How many there are, begun or not."""
        return len(self._plans)

    @property
    def has_more(self) -> bool:
        """Whether there are pieces that were not begun."""
        return self._next_piece < len(self._plans)

    @property
    def done(self) -> bool:
        """Whether every piece was collected and the sums are on the host. Never waits."""
        return not self.has_more and not self._under_way and self._has_sums()

    @property
    def checksums(self) -> tuple[PlaneChecksum, ...]:
        """The checksum of each plane, shape [num_planes].

        Raises:
            InvalidRequest: the gather is not done.
        """
        if not self.done:
            raise InvalidRequest(f"{self.bytes_total - self.bytes_done} bytes are still to be moved")
        return tuple((sum0 % SUM_MODULUS, sum1 % SUM_MODULUS) for sum0, sum1 in self._sums())

    def begin(self, buffer: StagingBuffer) -> PieceGathering:
        """Launch the gather of the next piece into *buffer*. Never waits for the device.

        Raises:
            InvalidRequest: there is no such piece, or the buffer does not fit; nothing was launched.
            DeviceMemoryFull: the device has no memory for what a launch needs.
            Exception: whatever a launch raises; nothing writes to the buffer any more then.
        """
        if not self.has_more:
            raise InvalidRequest("every piece was begun")
        if buffer.size_bytes < self.piece_bytes_max:
            raise InvalidRequest(
                f"a buffer of {buffer.size_bytes} bytes for pieces of {self.piece_bytes_max}"
            )
        plan = self._plans[self._next_piece]
        payload_bytes, holes = self._filled[self._next_piece]
        gathering = PieceGathering(StagedPiece(plan.offset_bytes, plan.size_bytes), payload_bytes)
        try:
            with memory_errors(self._pool.device):
                if holes:
                    with self._on_stream():
                        _fill_holes(holes, buffer.memory)
                self._launch(plan, buffer, gathering)
                if self._stream is not None:
                    gathering._event = self._stream.record_event()
        except BaseException:
            if self._stream is not None:
                self._stream.synchronize()
            raise
        buffer.filler = gathering
        self._next_piece += 1
        self._under_way.append(gathering)
        return gathering

    def collect(self, gathering: PieceGathering) -> StagedPiece:
        """Take note that a piece is over; return it."""
        self._under_way.remove(gathering)
        self._collected(gathering)
        self.bytes_done += gathering.payload_bytes
        return gathering.staged

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Have torch's operations run on the stream. It takes longer than a launch that is told of it."""
        stream = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        # Pool and ring may have been made in inference mode, and this may not be.
        with stream, torch.inference_mode():
            yield

    @abc.abstractmethod
    def _launch(self, plan: PiecePlan, buffer: StagingBuffer, gathering: PieceGathering) -> None:
        """Queue the moves of a piece on the stream, which need not be current."""

    @abc.abstractmethod
    def _collected(self, gathering: PieceGathering) -> None:
        """Take the sums of a piece that is over, if it has any of its own."""

    @abc.abstractmethod
    def _has_sums(self) -> bool:
        """Whether the sums of all that was launched are on the host."""

    @abc.abstractmethod
    def _sums(self) -> Sequence[PlaneChecksum]:
        """Return both sums of each plane, maybe negative."""


def _filling(plan: PiecePlan) -> tuple[int, list[tuple[int, int]]]:
    """Return the bytes of planes in a piece, and what is between them: first byte, and one past the last."""
    payload_bytes = end = 0
    holes = []
    for section in plan.sections:
        if end < section.at:
            holes.append((end, section.at))
        size_bytes = section.stop - section.start
        end = section.at + size_bytes
        payload_bytes += size_bytes
    # One launch fills many, with what lies between them.
    return payload_bytes, holes if len(holes) <= _HOLES_MAX else [(holes[0][0], holes[-1][1])]


def _fill_holes(holes: Sequence[tuple[int, int]], buffer: torch.Tensor) -> None:
    """Fill holes with zeros: what the buffer held before is nobody's business."""
    for start, stop in holes:
        buffer[start:stop].zero_()


def _runs(pool: KVPool, sections: Sequence[Section]) -> Iterator[tuple[int, int, list[Section]]]:
    """Yield neighbouring sections of equal tokens: first token, one past the last, sections."""

    def tokens(section: Section) -> tuple[int, int]:
        stride_bytes = pool.planes[section.plane_index].stride_bytes
        return section.start // stride_bytes, section.stop // stride_bytes

    for (start, stop), run in itertools.groupby(sections, tokens):
        yield start, stop, list(run)


class JobGather(DeviceGather):
    """Gathers with jobs of ``devicecopy``, one for each run of planes of a piece.

    Args:
        jobs: of the pool's device.
        others: see ``DeviceGather``.
    """

    def __init__(self, jobs: CopyJobs, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._make_job = jobs.gather
        self._totals = [[0, 0] for _ in self._pool.planes]
        self._parts: dict[PieceGathering, list[tuple[int, list[Section]]]] = {}

    def _launch(self, plan: PiecePlan, buffer: StagingBuffer, gathering: PieceGathering) -> None:
        parts: list[tuple[int, list[Section]]] = []
        for start, stop, sections in _runs(self._pool, plan.sections):
            # Bytes, one slot at a time: a part may begin in the middle of a page.
            pool = KVPool.mla([self._pool.planes[section.plane_index].rows for section in sections])
            planes = [
                buffer.memory[section.at : section.at + section.stop - section.start] for section in sections
            ]
            options: dict[str, Any] = {}
            if self._stream is not None:
                options = {"stream": self._stream, "after": self._after}
            with self._on_stream():
                job = self._make_job(pool, self._slots[start:stop], planes, **options)
                gathering._jobs.append(job)
                job.step(job.bytes_total)
            parts.append((start, sections))
        self._parts[gathering] = parts

    def _collected(self, gathering: PieceGathering) -> None:
        for job, (_, sections) in zip(gathering._jobs, self._parts.pop(gathering), strict=True):
            for section, (sum0, sum1) in zip(sections, job.checksums, strict=True):
                total = self._totals[section.plane_index]
                total[0] += sum0
                # The job's positions start at 1; this moves them to where the part lies in its plane.
                total[1] += sum1 + section.start // WORD_BYTES * sum0

    def _has_sums(self) -> bool:
        return True

    def _sums(self) -> Sequence[PlaneChecksum]:
        return [(sum0, sum1) for sum0, sum1 in self._totals]


@dataclasses.dataclass(frozen=True)
class _Launch:
    """One launch: rows of the table, the most tokens of one of them, and what the kernel is compiled for."""

    row_start: int
    row_stop: int
    span_tokens: int
    how: Any


class TritonGather(DeviceGather):
    """Gathers with Triton's kernel, in one launch a piece, from a table that is made once a shard.

    It takes as many as there are units, which is one unless widths are mixed oddly.

    A row of the table says where its plane would begin, from the buffer's first byte, if all of it lay in the
    buffer. So the kernel's tokens are those of the shard, and it adds to the sums of the whole plane.

    Args:
        others: see ``DeviceGather``.
    """

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        from snapd.kv import gpukernels

        self._kernels = gpukernels
        self._rows: list[list[int]] = []
        self._launches = self._plan_launches()
        self._kept: list[torch.Tensor] = []
        self._gathers: Any = None
        self._device_sums: torch.Tensor = torch.empty(0)
        self._pinned_sums: torch.Tensor | None = None
        self._host_sums: torch.Tensor | None = None
        self._sums_arrived: torch.cuda.Event | None = None

    def _plan_launches(self) -> list[list[_Launch]]:
        """Return the launches of each piece, and make the table's rows."""
        pieces: list[dict[int, list[Section]]] = []
        widths: dict[int, dict[int, int]] = {}
        for plan in self._plans:
            by_word: dict[int, list[Section]] = {}
            for section in plan.sections:
                by_word.setdefault(self._word_bytes(section), []).append(section)
            for word_bytes, alike in by_word.items():
                of_word = widths.setdefault(word_bytes, {})
                for section in alike:
                    stride_bytes = self._pool.planes[section.plane_index].stride_bytes
                    of_word[section.plane_index] = stride_bytes // min(word_bytes, _UNIT_BYTES_MAX)
            pieces.append(by_word)
        # As for the whole pool, so that what was compiled for it serves every part.
        how = {
            word_bytes: self._kernels.plan_launch(
                min(word_bytes, _UNIT_BYTES_MAX),
                [units[index] for index in sorted(units)],
                is_wide=word_bytes > _UNIT_BYTES_MAX,
            )
            for word_bytes, units in widths.items()
        }
        launches: list[list[_Launch]] = []
        for by_word in pieces:
            of_piece: list[_Launch] = []
            for word_bytes, alike in by_word.items():
                rows = [self._row(section, min(word_bytes, _UNIT_BYTES_MAX)) for section in alike]
                first = len(self._rows)
                self._rows += rows
                span_tokens = max(
                    row[self._kernels.TOKEN_STOP_COLUMN] - row[self._kernels.TOKEN_START_COLUMN]
                    for row in rows
                )
                of_piece.append(_Launch(first, len(self._rows), span_tokens, how[word_bytes]))
            launches.append(of_piece)
        return launches

    def _word_bytes(self, section: Section) -> int:
        # Of the pool's side; buffers are aligned to more than any word.
        word_bytes = self._pool.planes[section.plane_index].word_bytes
        shift_bytes = section.at - section.start
        return word_bytes if shift_bytes % word_bytes == 0 else widest_word_bytes(word_bytes, shift_bytes)

    def _row(self, section: Section, unit_bytes: int) -> list[int]:
        place = self._pool.planes[section.plane_index]
        stride_bytes = place.stride_bytes
        return self._kernels.table_row(
            place.rows.data_ptr(),
            section.at - section.start,
            place.pitch_bytes // unit_bytes,
            stride_bytes // unit_bytes,
            section.plane_index,
            section.start // stride_bytes,
            section.stop // stride_bytes,
        )

    def _prepare(self) -> None:
        """Bring slots and the table to the device; on the stream."""
        if self._stream is not None:
            for event in self._after:
                self._stream.wait_event(event)
            self._pool.keep_for(self._stream)
        device, rows = self._pool.device, torch.tensor(self._rows, dtype=torch.int64)
        table = to_device(rows, torch.int64, device, self._kept)
        slots = to_device(self._slots, torch.int32, device, self._kept)
        num_planes = len(self._pool.planes)
        self._device_sums = torch.zeros((num_planes, 2), dtype=torch.int64, device=self._pool.device)
        if self._stream is not None:
            self._pinned_sums = pinned_like(self._device_sums)
        self._gathers = self._kernels.Gathers(table, slots, self._device_sums, self._stream)

    def _launch(self, plan: PiecePlan, buffer: StagingBuffer, gathering: PieceGathering) -> None:
        del plan, gathering
        if self._gathers is None:
            with self._on_stream():
                self._prepare()
        for launch in self._launches[self._next_piece]:
            self._gathers.launch(
                launch.row_start, launch.row_stop, launch.span_tokens, buffer.address, launch.how
            )
        if self._next_piece == len(self._plans) - 1:
            with self._on_stream():
                self._bring_sums()

    def _bring_sums(self) -> None:
        self._host_sums = to_host(self._device_sums, self._stream, self._pinned_sums)
        if self._stream is not None:
            self._sums_arrived = self._stream.record_event()

    def _collected(self, gathering: PieceGathering) -> None:
        """The sums are those of all pieces."""

    def _has_sums(self) -> bool:
        return self._host_sums is not None and has_passed(self._sums_arrived)

    def _sums(self) -> Sequence[PlaneChecksum]:
        assert self._host_sums is not None
        return [(sum0, sum1) for sum0, sum1 in self._host_sums.tolist()]


def make_gather(jobs: CopyJobs, *arguments: Any, **others: Any) -> DeviceGather:
    """Return the gather that suits *jobs*; arguments and errors as of ``DeviceGather``."""
    if jobs.name == "triton":
        return TritonGather(*arguments, **others)
    return JobGather(jobs, *arguments, **others)
