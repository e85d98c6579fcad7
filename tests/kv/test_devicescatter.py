"""Sums of what no scatter moves, and a scatter of a part of a shard, on whatever device: here the CPU."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from snapd.errors import InvalidRequest
from snapd.kv import devicescatter
from snapd.kv.checksum import ChecksumAccumulator, plane_checksum
from snapd.kv.copy import ScatterJob
from snapd.kv.devicescatter import DeviceScatter, sum_parts
from snapd.kv.hostscatter import HostScatter
from snapd.kv.torchcopy import TorchScatterJob
from tests.kv.device_cases import WIDTHS, Stores, planes_in, random_u8, slab_bytes, slots_of

_MOD = 1 << 64


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("size_bytes", [1, 7, 8, 2047, 2048, 2049, 2048 * 300, 2048 * 300 + 5])
@pytest.mark.parametrize("first_word", [0, 1, 1 << 33])
def test_sums_of_parts_are_those_of_the_checksum(size_bytes: int, first_word: int) -> None:
    store = random_u8(3 * size_bytes + 9)
    parts = [store[1 + index * (size_bytes + 1) :][:size_bytes] for index in range(3)]
    expected = []
    for part in parts:
        accumulator = ChecksumAccumulator()
        accumulator.add(part, first_word)
        expected.append(accumulator.value)
    sums = sum_parts(parts, first_word)
    assert [(sum0 % _MOD, sum1 % _MOD) for sum0, sum1 in sums.tolist()] == expected


class LateScatter(TorchScatterJob):
    """Is launched at the second step, as when slots are on their way to be checked."""

    steps = 0

    def step(self, max_bytes: int) -> bool:
        self.steps += 1
        return super().step(max_bytes) if self.steps > 1 else False


def scatter_into(
    stores: Stores,
    planes: Sequence[torch.Tensor],
    slots: torch.Tensor | None,
    skip_tokens: int,
    verify: bool,
    kind: type[TorchScatterJob] = TorchScatterJob,
) -> tuple[list[torch.Tensor], DeviceScatter]:
    targets = stores.poisoned()
    scatter = DeviceScatter(
        kind,
        stores.pool(targets),
        planes,
        slots,
        skip_tokens,
        planes[0].numel() // stores.widths[0],
        verify=verify,
        stream_of=lambda device: None,
        after=None,
    )
    steps = 0
    while not scatter.step(1):
        steps += 1
        assert steps < 1_000
    assert steps >= len(scatter._groups) - 1, "one is launched at a time"
    return targets, scatter


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("skip_tokens", [0, 1, 5, 8, 16, 77])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS.keys())
def test_what_is_moved_and_summed_is_what_the_host_does(
    monkeypatch: pytest.MonkeyPatch, widths: list[int], skip_tokens: int, verify: bool
) -> None:
    monkeypatch.setattr(devicescatter, "PRIVATE_BYTES", 10_000)
    monkeypatch.setattr(devicescatter, "SUMMED_BYTES", 5_000)
    stores = Stores(widths, 128, pad_bytes=2)
    slab = random_u8(slab_bytes(widths, 77))
    planes = planes_in(slab, widths, 77, 0)
    slots = slots_of("random", 128, 77 - skip_tokens) if skip_tokens < 77 else None
    before = slab.clone()
    targets, scatter = scatter_into(stores, planes, slots, skip_tokens, verify)
    host_targets = stores.poisoned()
    host_pool = stores.pool(host_targets)
    host = HostScatter(ScatterJob, host_pool, planes, slots, skip_tokens, 77, verify=verify)
    while not host.step(1):
        pass
    assert all(torch.equal(one, other) for one, other in zip(targets, host_targets, strict=True))
    assert torch.equal(slab, before)
    if verify:
        assert scatter.checksums() == tuple(plane_checksum(plane) for plane in planes) == host.checksums()
    assert scatter.is_launched and scatter.is_idle and scatter.finished is None


def test_private_memory_is_bounded_unless_one_plane_is_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = [7, 7, 7, 300]
    monkeypatch.setattr(devicescatter, "PRIVATE_BYTES", 2_000)
    planes = planes_in(random_u8(slab_bytes(widths, 77)), widths, 77, 0)
    _, scatter = scatter_into(Stores(widths, 128), planes, slots_of("random", 128, 76), 1, True)
    assert scatter._groups == [[0, 1], [2], [3]]
    assert scatter._buffer is not None and scatter._buffer.numel() == -(-300 * 77 // 256) * 256


def test_a_part_that_cannot_be_launched_yet_comes_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The private memory is the same for all of them."""
    widths = [7, 13, 300]
    monkeypatch.setattr(devicescatter, "PRIVATE_BYTES", 1)
    planes = planes_in(random_u8(slab_bytes(widths, 77)), widths, 77, 0)
    stores, slots = Stores(widths, 128), slots_of("random", 128, 76)
    late, scatter = scatter_into(stores, planes, slots, 1, True, LateScatter)
    assert len(scatter._groups) == 3
    other, _ = scatter_into(stores, planes, slots, 1, True)
    assert all(torch.equal(one, two) for one, two in zip(late, other, strict=True))


def test_wrong_slots_are_refused_before_anything_is_launched() -> None:
    widths = [8, 8]
    planes = planes_in(random_u8(slab_bytes(widths, 4)), widths, 4, 0)
    with pytest.raises(InvalidRequest, match="named twice"):
        scatter_into(Stores(widths, 16), planes, torch.tensor([1, 2, 3, 3]), 0, True)


def test_sums_are_not_to_be_had_before_the_end() -> None:
    planes = planes_in(random_u8(slab_bytes([8], 4)), [8], 4, 0)
    pool = Stores([8], 16).pool(Stores([8], 16).poisoned())
    options: dict[str, Any] = {"verify": True, "stream_of": lambda device: None, "after": None}
    scatter = DeviceScatter(TorchScatterJob, pool, planes, torch.arange(4), 0, 4, **options)
    assert scatter.is_idle and not scatter.is_done
    with pytest.raises(InvalidRequest, match="step it"):
        scatter.checksums()
