"""A gather or a scatter on a device: checked first, launched once, then only looked at.

What the kinds of copy share: checks, the stream and what it waits for, slots on their way to and from the
device, the sums' way back, and what is kept alive meanwhile. A kind says how a range of tokens is moved.

Source: design, section 8.
"""

import abc
import contextlib
from collections.abc import Iterator, Sequence
from typing import ClassVar, Final

import torch

from snapd.errors import InvalidRequest, SnapdError
from snapd.kv.checksum import SUM_MODULUS, WORD_BYTES, PlaneChecksum
from snapd.kv.planes import SlabPlanes, check_planes, owners
from snapd.kv.pool import CheckedSlots, KVPool
from snapd.kv.threads import torch_threads
from snapd.units import align_up

_INDEX_DTYPES: Final = (torch.int32, torch.int64)
# Pools of more slots are indexed by int64.
INT32_SLOTS_MAX: Final = 1 << 31


class DeviceMemoryFull(SnapdError):
    """A GPU has no memory for a copy; the message says what to lower. Nothing is wrong with the snapshot."""


class CopyInterrupted(SnapdError):
    """What launched a copy was interrupted, so that not all of it is launched. Nothing is wrong otherwise."""

    def __init__(self) -> None:
        super().__init__("the copy was interrupted while it was launched, and is not whole")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether *error* says that a GPU, or the host memory that it can copy from, is full."""
    # Triton and the runtime have no class for it.
    return isinstance(error, torch.cuda.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error)
    )


@contextlib.contextmanager
def memory_errors(device: torch.device) -> Iterator[None]:
    """Tell a full *device* as ``DeviceMemoryFull``; everything else passes."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        first_line = str(error).partition("\n")[0]
        raise DeviceMemoryFull(
            f"{device} has too little memory for a copy ({first_line}): leave more of it free, such as by a "
            "lower share for the engine (SGLang: mem_fraction_static, vLLM: gpu_memory_utilization)"
        ) from None


def to_host(
    tensor: torch.Tensor, stream: torch.cuda.Stream | None, host: torch.Tensor | None = None
) -> torch.Tensor:
    """Return *tensor* on the host, queued on *stream*, which is current; without one it is there already.

    Args:
        tensor: any.
        stream: that of its device.
        host: from ``pinned_like``; None: made now, which can take some tenths of a millisecond.
    """
    if stream is None:
        return tensor
    return (pinned_like(tensor) if host is None else host).copy_(tensor, non_blocking=True)


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return host memory for *tensor*, that a GPU can copy to while the host goes on."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def to_device(
    host: torch.Tensor, dtype: torch.dtype, device: torch.device, kept: list[torch.Tensor]
) -> torch.Tensor:
    """Return *host* as *dtype* on *device*, queued on the current stream of a GPU.

    Args:
        host: on the CPU.
        dtype: what is wanted.
        device: where.
        kept: gets what must stay until the copy is done.
    """
    if device.type != "cuda":
        return host.to(dtype)
    pinned = pinned_copy(host, dtype)
    kept.append(pinned)
    return pinned.to(device, non_blocking=True)


def pinned_copy(host: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of *host* as *dtype*, in memory that a GPU can copy from while the host goes on."""
    # Less work than waking torch's threads.
    with torch_threads(1):
        return torch.empty(host.shape, dtype=dtype, pin_memory=True).copy_(host)


class Streams:
    """One stream on each GPU, made when it is first asked for."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def on(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return the stream on *device*, always the same; None: it has none."""
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


def _check_slots_kind(slots: torch.Tensor, pool: KVPool) -> None:
    """Check what can be known of *slots* without reading them."""
    if slots.dtype not in _INDEX_DTYPES or slots.device not in (pool.device, torch.device("cpu")):
        raise InvalidRequest(
            f"slots are {slots.dtype} on {slots.device}; int32 or int64 on the CPU or on {pool.device} is "
            "wanted"
        )
    if slots.dim() != 1 or slots.numel() < 1:
        raise InvalidRequest(f"slots have shape {tuple(slots.shape)}; [num_tokens] is wanted")


def has_passed(event: torch.cuda.Event | None) -> bool:
    """Return whether the device has come to *event*; without a device, it has."""
    return event is None or bool(event.query())  # type: ignore[no-untyped-call]


class DeviceJob(abc.ABC):
    """A gather or a scatter on the device of its pool.

    Nothing runs on the device before everything was checked. ``step`` launches and then only looks whether it
    is done; it never waits for the device. The pool and the planes must stay as they are until the job is
    done, and slots may be given back only then: a job that is given up still runs, so ``wait`` first.

    Slots on the device are copied to the host, checked there and used as they were then, which takes one
    more ``step``.

    Attributes:
        bytes_total: bytes of all planes.
        stream: what the work runs on; None on the CPU, where the first step does everything.
    """

    # What the kind wants slots to be, in pools that are small enough.
    _index_dtype: ClassVar[torch.dtype] = torch.int32

    def __init__(
        self,
        pool: KVPool,
        slots: torch.Tensor | CheckedSlots,
        planes: Sequence[torch.Tensor],
        *,
        checksum: bool = True,
        stream: torch.cuda.Stream | None = None,
        after: Sequence[torch.cuda.Event] | None = None,
        piece_bytes: int | None = None,
        part: Sequence[int] | None = None,
    ) -> None:
        """Check both sides; slots on the device only as far as can be done without reading them.

        Args:
            pool: on any device.
            slots: int32 or int64, shape [num_tokens], on the CPU or the pool's device, as
                ``KVPool.check_slots`` wants them; or those that were checked before.
            planes: one for each of the pool's, or of *part*, uint8, shape [num_tokens * stride_bytes],
                contiguous, on its device, apart from each other.
            checksum: whether to sum the planes.
            stream: what to run on; None: one of the job's own.
            after: recorded events that the work waits for, such as that of the forward pass that wrote the
                pages. None: whatever was queued on the current stream until now, which is always safe. Memory
                that was allocated on another stream needs an event of that stream.
            piece_bytes: launch pieces of about so many bytes, between which other kernels get their turn;
                None: one launch.
            part: the pool's planes that are copied, by index; None: all.

        Raises:
            InvalidRequest: something does not fit; nothing was launched.
        """
        checked = slots if isinstance(slots, CheckedSlots) and slots.fit(pool) else None
        if isinstance(slots, CheckedSlots):
            slots = slots.slots
        _check_slots_kind(slots, pool)
        num_tokens = slots.numel()
        self._part = tuple(range(len(pool.planes)) if part is None else part)
        self._places = tuple(pool.planes[index] for index in self._part)
        sizes_bytes = [num_tokens * place.stride_bytes for place in self._places]
        self._plane_addresses = check_planes(planes, sizes_bytes, pool.device)
        if piece_bytes is not None and piece_bytes < 1:
            raise InvalidRequest(f"piece_bytes {piece_bytes} is below 1")
        self._check_device(pool.device)
        self._pool = pool
        self._planes = planes if isinstance(planes, SlabPlanes) else tuple(planes)
        self._num_tokens = num_tokens
        self._has_sums = checksum
        self._given_slots = slots
        self._checked_slots: torch.Tensor | None = None
        if slots.device.type == "cpu":
            self._checked_slots = self._check_slots(slots) if checked is None else checked.slots
        token_bytes = sum(place.stride_bytes for place in self._places)
        self.bytes_total = num_tokens * token_bytes
        # A range that starts at a multiple of 8 tokens starts at a whole word, whatever the width.
        step_tokens = (
            num_tokens if piece_bytes is None else align_up(max(1, piece_bytes // token_bytes), WORD_BYTES)
        )
        self._ranges = [
            (start, min(start + step_tokens, num_tokens)) for start in range(0, num_tokens, step_tokens)
        ]
        self._token_bytes = token_bytes
        self.stream: torch.cuda.Stream | None = None
        self._after: tuple[torch.cuda.Event, ...] = ()
        self._place_on_stream(stream, after)
        self._has_begun = False
        self._index: torch.Tensor | None = None
        self._slots_arrived: torch.cuda.Event | None = None
        self._launched: list[tuple[int, torch.cuda.Event | None]] = []
        self._finished: torch.cuda.Event | None = None
        self._is_launched = False
        self._error: Exception | None = None
        self._kept: list[torch.Tensor] = []
        self._host_sums: torch.Tensor | None = None

    def _place_on_stream(
        self, stream: torch.cuda.Stream | None, after: Sequence[torch.cuda.Event] | None
    ) -> None:
        device = self._pool.device
        if device.type != "cuda":
            if stream is not None or after:
                raise InvalidRequest(f"the pool is on {device}, which has no streams and events")
            return
        if stream is not None and stream.device != device:
            raise InvalidRequest(f"the stream is on {stream.device}, and the pool on {device}")
        self.stream = stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._after = (torch.cuda.current_stream(device).record_event(),) if after is None else tuple(after)

    def _check_slots(self, host_slots: torch.Tensor) -> torch.Tensor:
        slots = host_slots.to(torch.int64)
        self._pool.check_slots(slots, self._num_tokens)
        return slots

    @property
    def done(self) -> bool:
        """Whether every byte was moved and the sums are here."""
        if not self._is_launched or not has_passed(self._finished):
            return False
        # Nothing on the device needs them any more.
        self._kept.clear()
        self._planes = ()
        return True

    @property
    def bytes_done(self) -> int:
        """Bytes moved so far, by whole pieces."""
        return sum(size_bytes for size_bytes, event in self._launched if has_passed(event))

    @property
    def finished(self) -> torch.cuda.Event:
        """The event after the last byte and sum, for other streams to wait for.

        Raises:
            InvalidRequest: the work is not launched yet, or there are no events on this device.
        """
        if self._finished is None:
            raise InvalidRequest("the copy is not launched: step it until it is")
        return self._finished

    @property
    def is_launched(self) -> bool:
        """Whether all work is queued on the stream, so that ``finished`` is there."""
        return self._is_launched

    @property
    def checksums(self) -> tuple[PlaneChecksum, ...]:
        """The checksum of each plane, shape [num_planes]; empty if they were not asked for.

        Raises:
            InvalidRequest: the job is not done.
        """
        if not self.done:
            raise InvalidRequest(f"{self.bytes_total - self.bytes_done} bytes are still to be moved")
        if self._host_sums is None:
            return ()
        return tuple((sum0 % SUM_MODULUS, sum1 % SUM_MODULUS) for sum0, sum1 in self._host_sums.tolist())

    def step(self, max_bytes: int) -> bool:
        """Launch, or look how far it is, without waiting; return whether the job is done.

        Args:
            max_bytes: not used: what is launched is ``piece_bytes`` of the job.

        Raises:
            InvalidRequest: slots that were on the device are not the pool's own; nothing was moved.
            DeviceMemoryFull: the device has no memory for it.
            CopyInterrupted: an earlier step was interrupted, so that not all is launched.
        """
        del max_bytes
        self._check_error()
        if not self._is_launched:
            self._advance()
        return self.done

    def wait(self) -> None:
        """Block until what was launched so far has ended, however it went."""
        for event in (self._slots_arrived, self._finished):
            if event is not None:
                event.synchronize()

    # --- steps ---------------------------------------------------------------------------------

    def bring_slots(self) -> bool:
        """Have slots on the device checked, without waiting; return whether ``step`` would launch now.

        Raises:
            InvalidRequest: they are not the pool's own.
            DeviceMemoryFull: there is no memory for a copy of them.
        """
        self._check_error()
        if self._given_slots.device.type == "cpu" or self._is_launched:
            return True
        if self._index is None:
            self._advance(is_launching=False)
        return self._index is not None

    def _check_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _advance(self, *, is_launching: bool = True) -> None:
        """Launch, unless slots are still on their way to be checked."""
        try:
            # Tensors of an engine may have been made in inference mode; here they may be written as well.
            with memory_errors(self._pool.device), self._on_stream(), torch.inference_mode():
                if self._index is None:
                    self._index = self._device_slots()
                if is_launching and self._index is not None:
                    self._launch(self._index)
        except BaseException as error:
            self._error = error if isinstance(error, Exception) else CopyInterrupted()
            if self.stream is not None:
                # Part of it may be under way.
                self._finished = self.stream.record_event()
            raise

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            if not self._has_begun:
                self._has_begun = True
                for event in self._after:
                    self.stream.wait_event(event)
                self._keep_alive(self.stream)
            yield

    def _keep_alive(self, stream: torch.cuda.Stream) -> None:
        """Tell the allocator that *stream* uses what was allocated elsewhere, should the job be dropped."""
        self._pool.keep_for(stream)
        tensors = [*owners(self._planes), self._given_slots]
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors if tensor.is_cuda}
        for tensor in storages.values():
            tensor.record_stream(stream)

    def _device_slots(self) -> torch.Tensor | None:
        """Return checked slots on the device, or None while they are on their way to the host."""
        dtype = self._index_dtype if self._pool.num_slots <= INT32_SLOTS_MAX else torch.int64
        if self._given_slots.device.type == "cpu":
            assert self._checked_slots is not None
            return self._to_device(self._checked_slots, dtype)
        if self._slots_arrived is None:
            # A copy, so that what is checked is what is used; in the given type, as a narrower one would cut.
            self._kept = [self._given_slots.clone()]
            self._kept.append(to_host(self._kept[0], self.stream))
            assert self.stream is not None
            self._slots_arrived = self.stream.record_event()
        if not has_passed(self._slots_arrived):
            return None
        device_slots, host_slots = self._kept[:2]
        self._checked_slots = self._check_slots(host_slots)
        return device_slots.to(dtype)

    def _launch(self, slots: torch.Tensor) -> None:
        num_planes = len(self._planes)
        sums = (
            torch.zeros((num_planes, 2), dtype=torch.int64, device=self._pool.device)
            if self._has_sums
            else None
        )
        self._prepare()
        for start, stop in self._ranges:
            self._move(slots, sums, start, stop)
            event = None if self.stream is None else self.stream.record_event()
            self._launched.append(((stop - start) * self._token_bytes, event))
        if sums is not None:
            self._host_sums = to_host(sums, self.stream)
            self._kept.append(sums)
        self._kept.append(slots)
        if self.stream is not None:
            self._finished = self.stream.record_event()
        self._is_launched = True

    def _to_device(self, host: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return to_device(host, dtype, self._pool.device, self._kept)

    # --- what a kind says ----------------------------------------------------------------------

    @abc.abstractmethod
    def _check_device(self, device: torch.device) -> None:
        """Check that this kind of copy works on *device*.

        Raises:
            InvalidRequest: it does not.
            ExtraMissing: a package is missing for it.
        """

    @abc.abstractmethod
    def _prepare(self) -> None:
        """Make what every range needs; called once, on the stream."""

    @abc.abstractmethod
    def _move(self, slots: torch.Tensor, sums: torch.Tensor | None, start: int, stop: int) -> None:
        """Queue the move of tokens ``[start, stop)`` of all planes, and add to *sums*.

        Args:
            slots: of ``_index_dtype``, shape [num_tokens], on the device.
            sums: int64, shape [num_planes, 2], on the device; None: no sums.
            start: a multiple of 8.
            stop: a multiple of 8, or the number of tokens.
        """


def finish(job: DeviceJob) -> tuple[PlaneChecksum, ...]:
    """Step *job* to its end, waiting for the device; return the planes' checksums, shape [num_planes].

    Raises:
        InvalidRequest: slots that were on the device are not the pool's own; nothing was moved.
    """
    while not job.step(job.bytes_total):
        job.wait()
    return job.checksums
