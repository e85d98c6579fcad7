"""P's copy out of an arena on a GPU, with what P holds already: launched in bounded steps, and summed.

Planes on the pool's GPU are scattered where they lie, in one pass. They are copied to private memory of that
GPU first, some planes at a time, when they are on another GPU of the host, which no kernel of this one has to
be able to reach; or when what P holds ends inside a checksum word, so that what is summed is what is used.

Source: design, section 8.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from snapd.errors import InvalidRequest
from snapd.kv import torchcopy
from snapd.kv.checksum import SUM_MODULUS, WORD_BYTES, PlaneChecksum
from snapd.kv.devicejob import CopyInterrupted, DeviceJob, Streams, has_passed, memory_errors, to_host
from snapd.kv.hostscatter import one_group
from snapd.kv.planes import SlabPlanes, cut, extents_of, select
from snapd.kv.pool import KVPool
from snapd.kv.torchcopy import SUMMING, Summing
from snapd.units import MIB, align_down, align_up

# Bounds the private memory of all ingests of a pool, unless one plane is larger; large enough that a copy's
# start is cheap beside it.
PRIVATE_BYTES: Final = 256 * MIB
_PLANE_ALIGNMENT_BYTES: Final = 256
# A range that starts at a multiple of 8 tokens starts at a whole word, whatever the width.
_GRANULE_TOKENS: Final = WORD_BYTES


class PrivateMemory:
    """Memory of a pool's GPU that planes are copied to before they are used; all ingests of a pool share it.

    They use it in turn and never wait for it: whoever takes it launches everything that reads what he has
    put there before anybody else can take it, and a stream keeps the order.

    Args:
        device: the pool's.
        stream: what everything that uses it runs on; None: the device has none.
        least_bytes: allocated at once, so that it need not grow; None: ``PRIVATE_BYTES``.
    """

    def __init__(
        self, device: torch.device, stream: torch.cuda.Stream | None, least_bytes: int | None = None
    ) -> None:
        self.device = device
        self._stream = stream
        self._least_bytes = PRIVATE_BYTES if least_bytes is None else least_bytes
        self._buffer: torch.Tensor | None = None

    @property
    def size_bytes(self) -> int:
        """What is allocated."""
        return 0 if self._buffer is None else self._buffer.numel()

    def take(self, size_bytes: int) -> torch.Tensor:
        """Return the memory, uint8, shape [*size_bytes* or more]; it is allocated when it is first needed.

        Raises:
            DeviceMemoryFull: the device has none.
        """
        if self._buffer is None or self._buffer.numel() < size_bytes:
            self._buffer = None  # Before the next: with both there would be too much of it.
            with torch.cuda.stream(self._stream), memory_errors(self.device):
                self._buffer = torch.empty(
                    max(self._least_bytes, size_bytes), dtype=torch.uint8, device=self.device
                )
        return self._buffer

    def close(self) -> None:
        """Give it back, when what was launched has run."""
        self._buffer = None


class ReadingLane:
    """Streams and private memory for passes that only read an arena.

    They wait for no forward pass, as they write no slots; and another thread may launch copies meanwhile.
    Nothing of a GPU is asked for before the first use.

    Args:
        device: the pool's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = Streams()

    def stream_of(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return the stream on *device*, always the same; None: it has none."""
        return self._streams.on(device)

    @functools.cached_property
    def private(self) -> PrivateMemory:
        """What planes are copied to that the pool's GPU does not reach."""
        return PrivateMemory(self._device, self.stream_of(self._device))

    def close(self) -> None:
        """Give the memory back, when what was launched has run."""
        if "private" in self.__dict__:
            self.private.close()


class DeviceScatter:
    """Scatters the tokens of a shard that are wanted, and sums all of them, beside other work of the GPU.

    Tokens before *skip_tokens* are in the pool already, and those from *stop_tokens* on are not wanted: they
    are summed and not moved. Everything runs on *stream*; nothing here waits for it.

    With *groups* the work is launched a group after the other, and each has its end seen on its own.

    Attributes:
        is_launched: all work is queued, so nothing more of the arena will be asked for.
    """

    def __init__(
        self,
        make_job: Callable[..., DeviceJob],
        pool: KVPool,
        planes: Sequence[torch.Tensor],
        slots: torch.Tensor | None,
        skip_tokens: int,
        num_tokens: int,
        *,
        stop_tokens: int | None = None,
        verify: bool,
        stream_of: Callable[[torch.device], torch.cuda.Stream | None],
        after: Sequence[torch.cuda.Event] | None,
        private: PrivateMemory,
        groups: Sequence[Sequence[int]] | None = None,
        summing: Summing = SUMMING,
    ) -> None:
        """Check what can be checked, before anything is launched.

        Args:
            make_job: an asynchronous scatter of ``devicecopy``.
            pool: P's.
            planes: of the slab, uint8, shape [num_tokens * stride_bytes]; on the pool's device, or all on
                another of its kind.
            slots: for the tokens from *skip_tokens* up to *stop_tokens*, as ``DeviceJob`` wants them; None:
                there are none.
            skip_tokens: how many P holds.
            num_tokens: how many the slab holds.
            stop_tokens: where what P wants ends; None: with the slab.
            verify: whether to sum.
            stream_of: the stream to use on a device; None: it has none.
            after: events that the move waits for; None: all that the current stream was given until now.
            private: memory for planes that are copied first; used on the stream of the pool's device.
            groups: see ``HostScatter``; slots are best on the host then.
            summing: how what is not moved is summed.

        Raises:
            InvalidRequest: something does not fit.
        """
        self._make_job = make_job
        self._pool = pool
        self._sources = planes if isinstance(planes, SlabPlanes) else tuple(planes)
        self._summing = summing
        self._slots = slots
        self._skip_tokens = skip_tokens
        self._stop_tokens = num_tokens if stop_tokens is None else stop_tokens
        self._num_tokens = num_tokens
        # Behind a plane of a slab there is another one, or none.
        if not 0 <= skip_tokens <= self._stop_tokens <= num_tokens:
            raise InvalidRequest(
                f"tokens {skip_tokens} to {self._stop_tokens} are wanted of a slab of {num_tokens}"
            )
        self._verify = verify
        self._stream = stream_of(pool.device)
        source_device = self._sources[0].device
        is_elsewhere = source_device != pool.device
        self._source_stream = stream_of(source_device) if is_elsewhere else None
        self._sizes_bytes = [size_bytes for _, size_bytes in extents_of(self._sources)]
        self._widths = [size_bytes // num_tokens for size_bytes in self._sizes_bytes]
        # A cut is inside a word: what is before it cannot be summed without what is behind it.
        cuts_tokens = {skip_tokens, self._stop_tokens} - {num_tokens}
        self._is_whole = verify and any(
            width * tokens % WORD_BYTES for width in self._widths for tokens in cuts_tokens
        )
        self._private = private if is_elsewhere or self._is_whole else None
        self._groups = one_group(self._sources) if groups is None else tuple(groups)
        self._parts = self._plan_parts()
        self._jobs: list[tuple[DeviceJob, Sequence[int]]] = []
        self._summed: list[tuple[torch.Tensor, Sequence[int]]] = []
        # Of each group that is launched, in order: its jobs, and the event after its last sum.
        self._ends: list[tuple[Sequence[DeviceJob], torch.cuda.Event | None]] = []
        self._ended_jobs = self._ended_sums = 0
        self._groups_done = 0
        self._mark: torch.cuda.Event | None = None
        self._error: Exception | None = None
        self.is_launched = False
        # Not on the own stream: without events it waits for what is current.
        self._after = self._events(after)
        self._first_job: DeviceJob | None = None
        if self._private is None:
            self._first_job = self._new_job(self._parts[0][0], self._places(self._parts[0][0]), self._after)
        self._work = self._launching()

    def _events(self, after: Sequence[torch.cuda.Event] | None) -> Sequence[torch.cuda.Event] | None:
        if self._slots is None or self._pool.device.type != "cuda":
            return after
        if after is not None and not self._slots.is_cuda:
            return after
        # The owner may have made the slots on the current stream, a moment ago.
        return (*(after or ()), torch.cuda.current_stream(self._pool.device).record_event())

    def _plan_parts(self) -> list[tuple[list[int], bool]]:
        """Return the planes that are moved at once, by index, and whether their group ends with them."""
        parts: list[tuple[list[int], bool]] = []
        for group in self._groups:
            pending: list[int] = []
            for index in group:
                is_full = self._private is not None and (
                    self._offsets_bytes([*pending, index])[-1] > PRIVATE_BYTES
                )
                if pending and is_full:
                    parts.append((pending, False))
                    pending = []
                pending = [*pending, index]
            parts.append((pending, True))
        return parts

    def _offsets_bytes(self, part: Sequence[int]) -> list[int]:
        """Return where each plane of a part starts in the private memory, and at last where they end."""
        sizes = (align_up(self._sizes_bytes[index], _PLANE_ALIGNMENT_BYTES) for index in part)
        return list(itertools.accumulate(sizes, initial=0))

    def _places(self, part: Sequence[int]) -> Sequence[torch.Tensor]:
        """Return the planes of a part where they are summed and scattered from."""
        if self._private is None:
            return select(self._sources, part)
        starts = self._offsets_bytes(part)
        buffer = self._private.take(starts[-1])
        sizes_bytes = [self._sizes_bytes[index] for index in part]
        return SlabPlanes(buffer, list(zip(starts, sizes_bytes, strict=False)))

    def _new_job(
        self,
        part: Sequence[int],
        places: Sequence[torch.Tensor],
        after: Sequence[torch.cuda.Event] | None,
    ) -> DeviceJob | None:
        if self._slots is None:
            return None
        widths = [self._widths[index] for index in part]
        moved = cut(places, [(self._skip_tokens * width, self._stop_tokens * width) for width in widths])
        has_sums = self._verify and not self._is_whole
        job = self._make_job(
            self._pool, self._slots, moved, checksum=has_sums, stream=self._stream, after=after, part=part
        )
        self._jobs.append((job, part))
        return job

    # --- how far it is -------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Nothing that was launched is still to run, however it went: slots and memory may be given back."""
        if self._stream is not None:
            return has_passed(self._mark)
        return not any(job.is_launched and not job.done for job, _ in self._jobs)

    @property
    def is_done(self) -> bool:
        """Everything was moved, and the sums are here."""
        return self.is_launched and self.is_idle and all(job.done for job, _ in self._jobs)

    @property
    def groups_done(self) -> int:
        """So many groups, from the first on, are in their slots, with their sums here."""
        while self._groups_done < len(self._ends):
            jobs, event = self._ends[self._groups_done]
            if not has_passed(event) or not all(job.done for job in jobs):
                break
            self._groups_done += 1
        return self._groups_done

    @property
    def finished(self) -> torch.cuda.Event | None:
        """The event after the last byte and sum, once all work is queued; None before."""
        return self._mark if self.is_launched else None

    def step(self, max_bytes: int) -> bool:
        """Launch about *max_bytes*, or look how far it is, without waiting; return whether it is done.

        Raises:
            InvalidRequest: slots that were on the device are not the pool's own.
            DeviceMemoryFull: the device has no memory for it.
            CopyInterrupted: an earlier step was interrupted, so that not all is launched.
        """
        if self._error is not None:
            raise self._error
        if not self.is_launched:
            self._launch(max_bytes)
        return self.is_done

    def _launch(self, max_bytes: int) -> None:
        launched_bytes = 0
        # Tensors of an engine may have been made in inference mode.
        with self._on_stream(), torch.inference_mode():
            try:
                with memory_errors(self._pool.device):
                    for size_bytes in self._work:
                        launched_bytes += size_bytes or 0
                        if size_bytes is None or launched_bytes >= max_bytes:
                            return
                self.is_launched = True
            except BaseException as error:
                self._error = error if isinstance(error, Exception) else CopyInterrupted()
                raise
            finally:
                if self._stream is not None:
                    self._mark = self._stream.record_event()

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            # torch copies between devices on the current stream of the one that is read.
            for stream in (self._source_stream, self._stream):
                if stream is not None:
                    stack.enter_context(torch.cuda.stream(stream))
            yield

    # --- what is launched ----------------------------------------------------------------------

    def _launching(self) -> Iterator[int | None]:
        """Launch everything, and yield the bytes of each piece; None: the device has to come first."""
        for part, is_last in self._parts:
            places = self._places(part)
            job, self._first_job = self._first_job or self._new_job(part, places, self._after), None
            self._after = ()  # The stream keeps the order.
            while job is not None and not job.bring_slots():
                yield None
            pieces = self._launch_part(part, places, job, is_last)
            if self._private is None:
                yield from pieces
            else:
                # At once: nobody else may take the memory before all is launched that reads it.
                yield sum(pieces)

    def _launch_part(
        self, part: Sequence[int], places: Sequence[torch.Tensor], job: DeviceJob | None, is_last: bool
    ) -> Iterator[int]:
        if self._private is not None:
            for place, index in zip(places, part, strict=True):
                place.copy_(self._sources[index], non_blocking=True)
                yield place.numel()
        yield from self._sum_still(part, places)
        moved_bytes = 0
        if job is not None:
            job.step(job.bytes_total)
            moved_bytes = job.bytes_total
        if is_last:
            self._end_group()
        yield moved_bytes

    def _end_group(self) -> None:
        """Have the sums of the group that was launched come to the host, and its end be seen."""
        jobs, summed = self._jobs[self._ended_jobs :], self._summed[self._ended_sums :]
        self._summed[self._ended_sums :] = [(to_host(sums, self._stream), part) for sums, part in summed]
        self._ended_jobs, self._ended_sums = len(self._jobs), len(self._summed)
        mark = None if self._stream is None else self._stream.record_event()
        self._ends.append(([job for job, _ in jobs], mark))

    def _sum_still(self, group: Sequence[int], places: Sequence[torch.Tensor]) -> Iterator[int]:
        """Sum what no job sums: the tokens that P holds and those that it does not want, or all."""
        if not self._verify:
            return
        ranges = [(0, self._skip_tokens), (self._stop_tokens, self._num_tokens)]
        for first, last in [(0, self._num_tokens)] if self._is_whole else ranges:
            if first < last:
                yield from self._sum_range(group, places, first, last)

    def _sum_range(
        self, group: Sequence[int], places: Sequence[torch.Tensor], first: int, last: int
    ) -> Iterator[int]:
        """Sum tokens ``[first, last)``; *first* is at a whole word of every plane."""
        by_width: dict[int, list[int]] = {}
        for at, index in enumerate(group):
            by_width.setdefault(self._widths[index], []).append(at)
        for width, members in by_width.items():
            token_bytes = width * len(members)
            of_width = select(places, members)
            step_tokens = last - first
            if self._summing.is_copying:
                step_tokens = align_down(torchcopy.SUMMED_BYTES // token_bytes, _GRANULE_TOKENS)
                step_tokens = max(_GRANULE_TOKENS, step_tokens)
            total: torch.Tensor | None = None
            for start in range(first, last, step_tokens):
                stop = min(start + step_tokens, last)
                parts = cut(of_width, [(start * width, stop * width)] * len(members))
                sums = self._summing.sum_parts(parts, start * width // WORD_BYTES)
                total = sums if total is None else total + sums
                yield (stop - start) * token_bytes
            assert total is not None
            self._summed.append((total, [group[at] for at in members]))

    def checksums(self) -> tuple[PlaneChecksum, ...]:
        """Return the checksum of every plane, shape [num_planes].

        Raises:
            InvalidRequest: it is not done.
        """
        if not self.is_done:
            raise InvalidRequest("the copy is not done: step it until it is")
        return tuple(self.checksum_of(index) for index in range(len(self._widths)))

    def checksum_of(self, index: int) -> PlaneChecksum:
        """Return the checksum of a plane whose group is done."""
        total0 = total1 = 0
        for summed, part in self._summed:
            if index in part:
                still0, still1 = summed[part.index(index)].tolist()
                total0, total1 = total0 + still0, total1 + still1
        for job, part in self._jobs:
            # There are no sums where all was summed here.
            if index in part and job.checksums:
                moved0, moved1 = job.checksums[part.index(index)]
                # The positions of what was moved start at 1; this puts them where they are in the plane.
                skipped_words = self._widths[index] * self._skip_tokens // WORD_BYTES
                total0, total1 = total0 + moved0, total1 + moved1 + skipped_words * moved0
        return (total0 % SUM_MODULUS, total1 % SUM_MODULUS)
