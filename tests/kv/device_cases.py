"""Pools and planes on a host and a device with the same bytes, and a comparison of all of them."""

import dataclasses
from collections.abc import Sequence

import torch

from snapd.kv import copy as cpu_copy
from snapd.kv.devicejob import DeviceJob, finish
from snapd.kv.planes import SlabPlanes
from snapd.kv.pool import KVPool

POISON = 0xA5
GAP_BYTES = 256


@dataclasses.dataclass(frozen=True)
class Jobs:
    """One kind of copy."""

    gather: type[DeviceJob]
    scatter: type[DeviceJob]


def random_u8(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def on_device(store: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of its own, on the CPU too."""
    return store.clone() if device.type == "cpu" else store.to(device)


class Stores:
    """The storages of a pool's buffers, padding and all.

    Every buffer starts *shift* bytes into its storage, and its slots are *pad_bytes* further apart than their
    rows are wide.
    """

    def __init__(
        self, widths: Sequence[int], num_slots: int, page: int = 1, pad_bytes: int = 0, shift: int = 0
    ) -> None:
        self.widths, self.num_slots, self.page = list(widths), num_slots, page
        self.pad_bytes, self.shift = pad_bytes, shift
        self.sizes = [num_slots * (width + pad_bytes) + shift for width in widths]

    def random(self) -> list[torch.Tensor]:
        return [random_u8(size) for size in self.sizes]

    def poisoned(self) -> list[torch.Tensor]:
        return [torch.full((size,), POISON, dtype=torch.uint8) for size in self.sizes]

    def pool(self, stores: Sequence[torch.Tensor]) -> KVPool:
        buffers = [
            store[self.shift :].view(self.num_slots, width + self.pad_bytes)[:, :width]
            for store, width in zip(stores, self.widths, strict=True)
        ]
        half = len(buffers) // 2
        if len(buffers) % 2:
            return KVPool.mla(buffers, self.page)
        return KVPool.mha(buffers[:half], buffers[half:], self.page)


def planes_in(slab: torch.Tensor, widths: Sequence[int], num_tokens: int, shift: int) -> list[torch.Tensor]:
    """Planes with gaps between them, each *shift* bytes past a multiple of 256."""
    planes = []
    start = GAP_BYTES + shift
    for width in widths:
        planes.append(slab[start : start + num_tokens * width])
        start = -(-(start + num_tokens * width + GAP_BYTES) // 256) * 256 + shift
    return planes


def slab_bytes(widths: Sequence[int], num_tokens: int) -> int:
    return sum(num_tokens * width + 3 * GAP_BYTES for width in widths) + 3 * GAP_BYTES


def slots_of(kind: str, num_slots: int, num_tokens: int, page: int = 1) -> torch.Tensor:
    pages = num_slots // page
    wanted = -(-num_tokens // page)
    order = torch.arange(pages - wanted, pages) if kind == "contiguous" else torch.randperm(pages)[:wanted]
    return (order[:, None] * page + torch.arange(page)).flatten()[:num_tokens]


def check_both_ways(
    jobs: Jobs,
    device: torch.device,
    stores: Stores,
    slots: torch.Tensor,
    *,
    plane_shift: int = 0,
    checksum: bool = True,
    piece_bytes: int | None = None,
    is_slab: bool = False,
) -> None:
    """Gather and scatter on *device*; compare every byte of both sides, and the sums, with the CPU's copy."""
    num_tokens = slots.numel()
    host_stores = stores.random()
    device_stores = [on_device(store, device) for store in host_stores]
    host_slab = torch.full((slab_bytes(stores.widths, num_tokens),), POISON, dtype=torch.uint8)
    slab = on_device(host_slab, device)
    host_planes = planes_in(host_slab, stores.widths, num_tokens, plane_shift)
    planes: Sequence[torch.Tensor] = planes_in(slab, stores.widths, num_tokens, plane_shift)
    if is_slab:
        planes = SlabPlanes(slab, [(plane.data_ptr() - slab.data_ptr(), plane.numel()) for plane in planes])

    sums = cpu_copy.gather(stores.pool(host_stores), slots, host_planes, checksum=checksum)
    job = jobs.gather(stores.pool(device_stores), slots, planes, checksum=checksum, piece_bytes=piece_bytes)
    assert finish(job) == sums
    assert job.bytes_done == job.bytes_total == sum(plane.numel() for plane in planes)
    assert torch.equal(slab.cpu(), host_slab)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(device_stores, host_stores, strict=True))

    host_targets = stores.poisoned()
    targets = [on_device(store, device) for store in host_targets]
    cpu_copy.scatter(host_planes, stores.pool(host_targets), slots)
    job = jobs.scatter(stores.pool(targets), slots, planes, checksum=checksum, piece_bytes=piece_bytes)
    assert finish(job) == sums
    assert all(torch.equal(one.cpu(), other) for one, other in zip(targets, host_targets, strict=True))
    assert torch.equal(slab.cpu(), host_slab)


WIDTHS = {
    "mha": [64, 64, 64, 64],
    "wide rows": [2048, 4096],
    "K and V differ": [48, 256, 72, 24],
    "mla bf16": [1152],
    "mla fp8 with scales": [656, 656, 656],
    "no multiple of 8": [3, 6, 132, 656],
    "index of fp8": [132],
    "bytes": [1, 5, 7],
}
