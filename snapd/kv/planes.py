"""The planes of a slab as parts of one tensor, which are made only where a tensor is needed.

A snapshot has about a hundred planes, and each tensor costs some microseconds; all that a launch needs to
know of a plane is where it starts and how long it is.

Source: design, section 8.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias, overload

import torch

from snapd.errors import InvalidRequest
from snapd.kv.checksum import check_plane

# Where a plane starts in what it is part of, and its size, in bytes.
Place: TypeAlias = tuple[int, int]


class SlabPlanes(Sequence[torch.Tensor]):
    """Planes, uint8 of shape [size_bytes] each, that share one tensor's memory.

    Args:
        whole: uint8, 1-D and contiguous.
        places: of each plane, inside *whole*; the caller has checked them.
    """

    def __init__(self, whole: torch.Tensor, places: Sequence[Place]) -> None:
        self.whole = whole
        self.places = tuple(places)

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> "SlabPlanes": ...

    def __getitem__(self, index: int | slice) -> "torch.Tensor | SlabPlanes":
        if isinstance(index, slice):
            return SlabPlanes(self.whole, self.places[index])
        start, size_bytes = self.places[index]
        return self.whole[start : start + size_bytes]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self.whole[start : start + size_bytes] for start, size_bytes in self.places)


def extents_of(planes: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the address and the size in bytes of each plane; planes are uint8, 1-D and contiguous."""
    if isinstance(planes, SlabPlanes):
        base = planes.whole.data_ptr()
        return [(base + start, size_bytes) for start, size_bytes in planes.places]
    return [(plane.data_ptr(), plane.numel()) for plane in planes]


def select(planes: Sequence[torch.Tensor], part: Sequence[int]) -> Sequence[torch.Tensor]:
    """Return the planes of *part*, by index."""
    if isinstance(planes, SlabPlanes):
        return SlabPlanes(planes.whole, [planes.places[index] for index in part])
    return [planes[index] for index in part]


def cut(planes: Sequence[torch.Tensor], ranges: Sequence[Place]) -> Sequence[torch.Tensor]:
    """Return a range of each plane: its first byte and one past its last one."""
    if isinstance(planes, SlabPlanes):
        return SlabPlanes(
            planes.whole,
            [
                (start + first, last - first)
                for (start, _), (first, last) in zip(planes.places, ranges, strict=True)
            ],
        )
    return [plane[first:last] for plane, (first, last) in zip(planes, ranges, strict=True)]


def owners(planes: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return tensors of all memory that *planes* are in."""
    return (planes.whole,) if isinstance(planes, SlabPlanes) else planes


def check_planes(
    planes: Sequence[torch.Tensor], sizes_bytes: Sequence[int], device: torch.device
) -> tuple[int, ...]:
    """Check that *planes* are what is wanted, and that none shares bytes; return their addresses.

    Args:
        planes: uint8, 1-D, contiguous, on *device*.
        sizes_bytes: of each of them.
        device: where they are to be.

    Raises:
        InvalidRequest: they are not; the message says which.
    """
    if len(planes) != len(sizes_bytes):
        raise InvalidRequest(f"{len(planes)} planes for a pool of {len(sizes_bytes)}")
    for index, plane in enumerate(owners(planes)):
        check_plane(plane, f"plane {index}", device)
    extents = extents_of(planes)
    for index, ((_, size_bytes), wanted_bytes) in enumerate(zip(extents, sizes_bytes, strict=True)):
        if size_bytes != wanted_bytes:
            raise InvalidRequest(f"plane {index} has {size_bytes} bytes, and {wanted_bytes} are wanted")
    in_order = sorted(extents)
    for (start, size_bytes), (next_start, _) in itertools.pairwise(in_order):
        if next_start < start + size_bytes:
            raise InvalidRequest("two planes share bytes")
    if isinstance(planes, SlabPlanes) and in_order:
        first, whole = planes.whole.data_ptr(), planes.whole
        if in_order[0][0] < first or sum(in_order[-1]) > first + whole.numel():
            raise InvalidRequest(f"a plane leaves the {whole.numel()} bytes that it is to be part of")
    return tuple(address for address, _ in extents)
