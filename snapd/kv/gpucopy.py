"""Gather and scatter on a GPU: one launch for all layers, checksums in the same pass.

Triton is imported when the first job is made, not before. Without it, see ``torchcopy``; which of the two a
device gets, ``devicecopy`` says.

Source: design, section 8.
"""

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from snapd.errors import ExtraMissing, InvalidRequest, InvariantBroken
from snapd.kv import copy as cpu_copy
from snapd.kv.checksum import PlaneChecksum
from snapd.kv.devicejob import DeviceJob, finish
from snapd.kv.pool import KVPool, PlaneRows, widest_word_bytes

if TYPE_CHECKING:
    from snapd.kv import gpukernels

_UNIT_BYTES_MAX: Final = 8
# Slabs and engines align planes at least so far; what is compiled ahead supposes it.
_ALIGNMENT_BYTES: Final = 256


@functools.cache
def _kernels() -> ModuleType:
    """Return the kernels' module.

    Raises:
        ExtraMissing: there is no Triton.
    """
    try:
        from snapd.kv import gpukernels
    except ImportError as error:
        raise ExtraMissing(f"copies on a GPU need Triton ({error}): pip install triton") from error
    return gpukernels


def _by_word(places: Sequence[PlaneRows], plane_addresses: Sequence[int]) -> dict[int, list[int]]:
    """Return planes, by index, under the widest word, in bytes (16 to 1), that divides all that is theirs."""
    by_word: dict[int, list[int]] = {}
    for index, (place, address) in enumerate(zip(places, plane_addresses, strict=True)):
        multiples = (place.stride_bytes, place.pitch_bytes, place.rows.data_ptr(), address)
        by_word.setdefault(widest_word_bytes(*multiples), []).append(index)
    return by_word


def _how(places: Sequence[PlaneRows], word_bytes: int) -> "gpukernels.Launch":
    """Return how planes that share a word are moved."""
    unit_bytes = min(word_bytes, _UNIT_BYTES_MAX)
    widths_units = [place.stride_bytes // unit_bytes for place in places]
    how: gpukernels.Launch = _kernels().plan_launch(
        unit_bytes, widths_units, is_wide=word_bytes > _UNIT_BYTES_MAX
    )
    return how


def _plan(
    pool: KVPool, part: Sequence[int], plane_addresses: Sequence[int]
) -> list[tuple[list[int], int, "gpukernels.Launch"]]:
    """Return what is launched: planes as indexes into *part*, the word that they share, and how.

    A part of a pool is moved as the whole would be, so that what was compiled for that serves it too.
    """
    places = pool.planes
    is_whole = len(part) == len(places)
    whole = {} if is_whole else _by_word(places, [_ALIGNMENT_BYTES] * len(places))
    plan = []
    for word_bytes, members in _by_word([places[index] for index in part], plane_addresses).items():
        indexes = [part[member] for member in members]
        like = whole.get(word_bytes, [])
        # Planes at odd addresses share other words than those that were compiled for.
        planned = like if set(indexes) <= set(like) else indexes
        plan.append((members, word_bytes, _how([places[index] for index in planned], word_bytes)))
    return plan


def _table_row(
    place: PlaneRows, plane_address: int, word_bytes: int, index: int, num_tokens: int
) -> list[int]:
    """Return a row of the kernel's table for all tokens of a plane; see ``gpukernels.table_row``."""
    unit_bytes = min(word_bytes, _UNIT_BYTES_MAX)
    pitch_units, width_units = place.pitch_bytes // unit_bytes, place.stride_bytes // unit_bytes
    row: list[int] = _kernels().table_row(
        place.rows.data_ptr(), plane_address, pitch_units, width_units, index, 0, num_tokens
    )
    return row


class _TritonJob(DeviceJob):
    """Moves by one kernel for all planes that share a unit: one launch, unless widths are mixed oddly."""

    _is_scatter: ClassVar[bool]

    def _check_device(self, device: torch.device) -> None:
        if device.type != "cuda" and not (device.type == "cpu" and _kernels().is_interpreted()):
            raise InvalidRequest(f"the pool is on {device}; this copy is for a GPU")
        _kernels()

    def _prepare(self) -> None:
        addresses = [plane.data_ptr() for plane in self._planes]
        plan = _plan(self._pool, self._part, addresses)
        rows = [
            _table_row(self._places[member], addresses[member], word_bytes, member, self._num_tokens)
            for members, word_bytes, _ in plan
            for member in members
        ]
        table = self._to_device(torch.tensor(rows, dtype=torch.int64))
        self._kept.append(table)
        self._groups = []
        start = 0
        for members, _, how in plan:
            self._groups.append((table[start : start + len(members)], how))
            start += len(members)

    def _move(self, slots: torch.Tensor, sums: torch.Tensor | None, start: int, stop: int) -> None:
        for table, how in self._groups:
            _kernels().launch(table, slots, sums, start, stop, how, is_scatter=self._is_scatter)


class GpuGatherJob(_TritonJob):
    """Copies pool slots into planes."""

    _is_scatter = False


class GpuScatterJob(_TritonJob):
    """Copies planes into pool slots; what is summed is what the pool got."""

    _is_scatter = True


def gather_gpu(
    pool: KVPool,
    slots: torch.Tensor,
    planes: Sequence[torch.Tensor],
    *,
    checksum: bool = True,
    stream: torch.cuda.Stream | None = None,
    after: Sequence[torch.cuda.Event] | None = None,
) -> tuple[PlaneChecksum, ...]:
    """Copy *slots* of *pool* into *planes*, and wait; return the planes' checksums, shape [num_planes].

    Args and errors as of ``DeviceJob``.

    Source: design, section 8.
    """
    return finish(GpuGatherJob(pool, slots, planes, checksum=checksum, stream=stream, after=after))


def scatter_gpu(
    planes: Sequence[torch.Tensor],
    pool: KVPool,
    slots: torch.Tensor,
    *,
    checksum: bool = True,
    stream: torch.cuda.Stream | None = None,
    after: Sequence[torch.cuda.Event] | None = None,
) -> tuple[PlaneChecksum, ...]:
    """Copy *planes* into *slots* of *pool*, and wait; return the checksums of what the pool got.

    Args and errors as of ``DeviceJob``.

    Source: design, section 8.
    """
    return finish(GpuScatterJob(pool, slots, planes, checksum=checksum, stream=stream, after=after))


def warm_up(pool: KVPool) -> None:
    """Compile and load what jobs of *pool* need, so that the first of them does not; moves nothing.

    It waits for the GPU. Compiling takes a second or two when Triton's cache is empty.

    Raises:
        InvalidRequest: the pool is not on a GPU.
        ExtraMissing: there is no Triton.
    """
    if pool.device.type != "cuda":
        raise InvalidRequest(f"the pool is on {pool.device}; this copy is for a GPU")
    with torch.cuda.device(pool.device):
        launch_nothing(pool)
        torch.cuda.synchronize(pool.device)


def launch_nothing(pool: KVPool) -> None:
    """Launch every kernel that jobs of *pool* may need, for no tokens: compiled is not loaded yet."""
    places = pool.planes
    slots = torch.zeros(1, dtype=torch.int32, device=pool.device)
    sums = torch.zeros((len(places), 2), dtype=torch.int64, device=pool.device)
    for members, word_bytes, how in _plan(pool, range(len(places)), [_ALIGNMENT_BYTES] * len(places)):
        rows = [_table_row(places[index], _ALIGNMENT_BYTES, word_bytes, index, 0) for index in members]
        table = torch.tensor(rows, dtype=torch.int64, device=pool.device)
        for is_scatter in (False, True):
            for its_sums in (sums, None):
                _kernels().launch(table, slots, its_sums, 0, 0, how, is_scatter=is_scatter)


def probe(device: torch.device) -> None:
    """Gather and scatter a few rows on *device* and compare with the CPU.

    Raises:
        ExtraMissing: there is no Triton.
        InvariantBroken: bytes or sums differ.
        Exception: whatever Triton says when it cannot compile or run here.
    """
    slots = torch.tensor([5, 2, 7])
    host = [torch.arange(8 * width, dtype=torch.int64).to(torch.uint8).view(8, width) for width in (48, 6)]
    host_pool, pool = KVPool.mla(host), KVPool.mla([buffer.to(device) for buffer in host])
    host_planes = [torch.zeros(3 * width, dtype=torch.uint8) for width in (48, 6)]
    planes = [torch.zeros_like(plane, device=device) for plane in host_planes]
    sums = cpu_copy.gather(host_pool, slots, host_planes)
    target = KVPool.mla([torch.zeros_like(buffer, device=device) for buffer in host])
    is_same = gather_gpu(pool, slots, planes) == sums and scatter_gpu(planes, target, slots) == sums
    for place, plane, host_plane in zip(target.planes, planes, host_planes, strict=True):
        is_same = is_same and torch.equal(plane.cpu(), host_plane)
        is_same = is_same and torch.equal(place.rows[slots.to(device)].flatten().cpu(), host_plane)
    if not is_same:
        raise InvariantBroken(f"copies on {device} differ from the CPU's")
