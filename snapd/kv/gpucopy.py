"""Gather and scatter on a GPU: one launch for all layers, checksums in the same pass.

Triton is imported when the first job is made, not before. Without it, see ``torchcopy``; which of the two a
device gets, ``devicecopy`` says.

Source: design, section 8.
"""

import dataclasses
import functools
import weakref
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from snapd.errors import ExtraMissing, InvalidRequest, InvariantBroken
from snapd.kv import copy as cpu_copy
from snapd.kv import torchcopy
from snapd.kv.checksum import SUM_MODULUS, WORD_BYTES, PlaneChecksum
from snapd.kv.devicejob import DeviceJob, finish
from snapd.kv.planes import extents_of
from snapd.kv.pool import KVPool, PlaneRows, widest_word_bytes
from snapd.kv.torchcopy import Summing

if TYPE_CHECKING:
    from snapd.kv import gpukernels

_UNIT_BYTES_MAX: Final = 8
# What loads and stores are at most; planes at multiples of it are moved as their pool says.
_WIDEST_BYTES: Final = 16
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


@dataclasses.dataclass(frozen=True)
class _Group:
    """Planes that one launch moves.

    Attributes:
        members: which, by index into the part that is moved.
        how: what the kernel is compiled for.
        rows: of the kernel's table, on the host, but for where the planes are and how many tokens there are.
    """

    members: list[int]
    how: "gpukernels.Launch"
    rows: torch.Tensor


# Of pools, by the part that is moved. A job has a few microseconds, and a hundred planes.
_plans: Final[weakref.WeakKeyDictionary[KVPool, dict[tuple[int, ...], list[_Group]]]] = (
    weakref.WeakKeyDictionary()
)
# Parts of a pool are its groups of layers, a few; those of a private copy may be any.
_PLANS_MAX: Final = 64


def _plan(pool: KVPool, part: tuple[int, ...], plane_addresses: Sequence[int]) -> list[_Group]:
    """Return what is launched. A part of a pool is moved as the whole would be, by the same kernel."""
    if any(address % _WIDEST_BYTES for address in plane_addresses):
        return _new_plan(pool, part, plane_addresses)
    known = _plans.setdefault(pool, {})
    plan = known.get(part)
    if plan is None:
        if len(known) >= _PLANS_MAX:
            known.clear()
        plan = known[part] = _new_plan(pool, part, plane_addresses)
    return plan


def _new_plan(pool: KVPool, part: Sequence[int], plane_addresses: Sequence[int]) -> list[_Group]:
    places = pool.planes
    is_whole = len(part) == len(places)
    whole = {} if is_whole else _by_word(places, [_ALIGNMENT_BYTES] * len(places))
    plan = []
    for word_bytes, members in _by_word([places[index] for index in part], plane_addresses).items():
        indexes = [part[member] for member in members]
        like = whole.get(word_bytes, [])
        # Planes at odd addresses share other words than those that were compiled for.
        planned = like if set(indexes) <= set(like) else indexes
        rows = [_table_row(pool.planes[part[member]], word_bytes, member) for member in members]
        how = _how([places[index] for index in planned], word_bytes)
        plan.append(_Group(members, how, torch.tensor(rows, dtype=torch.int64)))
    return plan


def _table_row(place: PlaneRows, word_bytes: int, index: int) -> list[int]:
    """Return a row of the kernel's table, of a plane at 0 and no tokens; see ``gpukernels.table_row``."""
    unit_bytes = min(word_bytes, _UNIT_BYTES_MAX)
    pitch_units, width_units = place.pitch_bytes // unit_bytes, place.stride_bytes // unit_bytes
    row: list[int] = _kernels().table_row(place.rows.data_ptr(), 0, pitch_units, width_units, index, 0, 0)
    return row


def _table(plan: Sequence[_Group], plane_addresses: Sequence[int], num_tokens: int) -> torch.Tensor:
    """Return the kernel's table for all groups of a plan, one after the other, on the host."""
    kernels = _kernels()
    table = torch.cat([group.rows for group in plan])
    in_order = [plane_addresses[member] for group in plan for member in group.members]
    table[:, kernels.PLANE_ADDRESS_COLUMN] = torch.tensor(in_order, dtype=torch.int64)
    table[:, kernels.TOKEN_STOP_COLUMN] = num_tokens
    return table


class _TritonJob(DeviceJob):
    """Moves by one kernel for all planes that share a unit: one launch, unless widths are mixed oddly."""

    _is_scatter: ClassVar[bool]

    def _check_device(self, device: torch.device) -> None:
        if device.type != "cuda" and not (device.type == "cpu" and _kernels().is_interpreted()):
            raise InvalidRequest(f"the pool is on {device}; this copy is for a GPU")
        _kernels()

    def _prepare(self) -> None:
        plan = _plan(self._pool, self._part, self._plane_addresses)
        table = self._to_device(_table(plan, self._plane_addresses, self._num_tokens), torch.int64)
        self._kept.append(table)
        self._groups = []
        start = 0
        for group in plan:
            stop = start + len(group.members)
            self._groups.append((table[start:stop], group.how))
            start = stop

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


def sum_parts(parts: Sequence[torch.Tensor], first_word: int) -> torch.Tensor:
    """Return both sums of each part, on the device, int64 of shape [num_parts, 2], in one pass.

    Args and units as of ``torchcopy.sum_parts``, but that parts that all start at multiples of 8 bytes stay
    where they are, and may differ in size.
    """
    extents = extents_of(parts)
    if any(address % WORD_BYTES for address, _ in extents):
        return torchcopy.sum_parts(parts, first_word)
    device = parts[0].device
    rows = [
        [address, size_bytes, first_word, *[0] * (_kernels().SUMS_COLUMNS - 3)]
        for address, size_bytes in extents
    ]
    table = torch.tensor(rows, dtype=torch.int64)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    sums = torch.zeros((len(parts), 2), dtype=torch.int64, device=device)
    is_wide = not any(address % _WIDEST_BYTES for address, _ in extents)
    size_bytes_max = max(size_bytes for _, size_bytes in extents)
    # Triton launches on the current device, wherever the tensors are.
    with torch.cuda.device_of(sums):  # type: ignore[no-untyped-call]
        _kernels().launch_sums(table, sums, size_bytes_max, is_wide=is_wide)
    return sums


SUMMING: Final = Summing(sum_parts, is_copying=False)


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
    part = tuple(range(len(places)))
    for group in _plan(pool, part, [_ALIGNMENT_BYTES] * len(places)):
        table = group.rows.to(pool.device)
        for is_scatter in (False, True):
            for its_sums in (sums, None):
                _kernels().launch(table, slots, its_sums, 0, 0, group.how, is_scatter=is_scatter)


def _gather_twice(pool: KVPool, slots: torch.Tensor, planes: Sequence[torch.Tensor]) -> list[PlaneChecksum]:
    """Gather as pieces of a push are, the second time as those after the first; return the sums of both."""
    addresses = [plane.data_ptr() for plane in planes]
    plan = _new_plan(pool, range(len(planes)), addresses)
    table = _table(plan, addresses, slots.numel()).to(pool.device)
    sums = torch.zeros((len(planes), 2), dtype=torch.int64, device=pool.device)
    stream = torch.cuda.current_stream(pool.device) if pool.device.type == "cuda" else None
    gathers = _kernels().Gathers(table, slots.to(pool.device, torch.int32), sums, stream)
    for _ in range(2):
        start = 0
        for group in plan:
            stop = start + len(group.members)
            gathers.launch(start, stop, slots.numel(), 0, group.how)
            start = stop
    return [(sum0 % SUM_MODULUS, sum1 % SUM_MODULUS) for sum0, sum1 in sums.tolist()]


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
    is_same = gather_gpu(pool, slots, planes) == sums
    for plane in planes:
        plane.zero_()
    is_same = is_same and _gather_twice(pool, slots, planes) == [
        (2 * a % SUM_MODULUS, 2 * b % SUM_MODULUS) for a, b in sums
    ]
    is_same = is_same and scatter_gpu(planes, target, slots) == sums
    for place, plane, host_plane in zip(target.planes, planes, host_planes, strict=True):
        is_same = is_same and torch.equal(plane.cpu(), host_plane)
        is_same = is_same and torch.equal(place.rows[slots.to(device)].flatten().cpu(), host_plane)
    if not is_same:
        raise InvariantBroken(f"copies on {device} differ from the CPU's")
