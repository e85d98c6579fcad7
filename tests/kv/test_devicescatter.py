"""Sums of what no scatter moves, and a scatter of a part of a shard, on whatever device: here the CPU."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from snapd.errors import InvalidRequest
from snapd.kv import devicescatter, torchcopy
from snapd.kv.checksum import ChecksumAccumulator, plane_checksum
from snapd.kv.copy import ScatterJob
from snapd.kv.devicejob import CopyInterrupted, DeviceMemoryFull
from snapd.kv.devicescatter import DeviceScatter, PrivateMemory
from snapd.kv.hostscatter import HostScatter
from snapd.kv.planes import SlabPlanes
from snapd.kv.torchcopy import Summing, TorchScatterJob, sum_parts
from tests.kv.device_cases import WIDTHS, Stores, planes_in, random_u8, slab_bytes, slots_of

sys.path.append(str(Path(__file__).parents[1] / "integration"))

from fake_device import FakeStream

CPU = torch.device("cpu")
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
    """Can be launched at the second step, as when slots are on their way to be checked."""

    looks = 0

    def bring_slots(self) -> bool:
        self.looks += 1
        return self.looks > 1

    def step(self, max_bytes: int) -> bool:
        return self.looks > 1 and super().step(max_bytes)


def new_scatter(
    stores: Stores,
    planes: Sequence[torch.Tensor],
    slots: torch.Tensor | None,
    skip_tokens: int,
    verify: bool = True,
    kind: Callable[..., Any] = TorchScatterJob,
    private: PrivateMemory | None = None,
    stream: Any = None,
    stop_tokens: int | None = None,
    summing: Summing = torchcopy.SUMMING,
) -> tuple[list[torch.Tensor], DeviceScatter]:
    targets = stores.poisoned()
    scatter = DeviceScatter(
        kind,
        stores.pool(targets),
        planes,
        slots,
        skip_tokens,
        planes[0].numel() // stores.widths[0],
        stop_tokens=stop_tokens,
        verify=verify,
        stream_of=lambda device: stream,
        after=None,
        private=private or PrivateMemory(CPU, None),
        summing=summing,
    )
    return targets, scatter


def scatter_into(*arguments: Any, **others: Any) -> tuple[list[torch.Tensor], DeviceScatter]:
    targets, scatter = new_scatter(*arguments, **others)
    steps = 0
    while not scatter.step(1):
        steps += 1
        assert steps < 1_000
    assert steps >= len(scatter._parts) - 1, "one is launched at a time"
    return targets, scatter


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("skip_tokens", [0, 1, 5, 8, 16, 77])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS.keys())
def test_what_is_moved_and_summed_is_what_the_host_does(
    monkeypatch: pytest.MonkeyPatch, widths: list[int], skip_tokens: int, verify: bool
) -> None:
    monkeypatch.setattr(devicescatter, "PRIVATE_BYTES", 10_000)
    monkeypatch.setattr(torchcopy, "SUMMED_BYTES", 5_000)
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


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(("skip", "stop"), [(0, 1), (0, 40), (5, 16), (8, 75), (16, 76), (9, 9)])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS.keys())
def test_what_is_not_wanted_is_summed_and_not_moved(
    monkeypatch: pytest.MonkeyPatch, widths: list[int], skip: int, stop: int, verify: bool
) -> None:
    monkeypatch.setattr(devicescatter, "PRIVATE_BYTES", 10_000)
    monkeypatch.setattr(torchcopy, "SUMMED_BYTES", 5_000)
    stores = Stores(widths, 128)
    planes = planes_in(random_u8(slab_bytes(widths, 77)), widths, 77, 0)
    wanted = stop - skip
    slots = slots_of("random", 128, wanted) if wanted else None
    targets, scatter = scatter_into(stores, planes, slots, skip, verify, stop_tokens=stop)
    host_targets = stores.poisoned()
    host_pool = stores.pool(host_targets)
    host = HostScatter(ScatterJob, host_pool, planes, slots, skip, 77, stop_tokens=stop, verify=verify)
    while not host.step(1):
        pass
    assert all(torch.equal(one, other) for one, other in zip(targets, host_targets, strict=True))
    for place, plane, width in zip(host_pool.planes, planes, widths, strict=True):
        moved = plane.view(77, width)[skip:stop]
        assert slots is None or torch.equal(place.rows[slots], moved)
        untouched = torch.ones(128, dtype=torch.bool)
        untouched[[] if slots is None else slots] = False
        assert len(place.rows[untouched].unique()) == 1, "poison, and nothing else"
    if verify:
        assert scatter.checksums() == tuple(plane_checksum(plane) for plane in planes) == host.checksums()


def test_private_memory_is_bounded_unless_one_plane_is_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = [7, 7, 7, 300]
    monkeypatch.setattr(devicescatter, "PRIVATE_BYTES", 2_000)
    planes = planes_in(random_u8(slab_bytes(widths, 77)), widths, 77, 0)
    private = PrivateMemory(CPU, None)
    stores, slots = Stores(widths, 128), slots_of("random", 128, 76)
    _, scatter = new_scatter(stores, planes, slots, 1, private=private)
    assert [part for part, _ in scatter._parts] == [[0, 1], [2], [3]]
    assert private.size_bytes == 0, "nothing is taken before the first step"
    assert not scatter.step(1)
    assert private.size_bytes == 2_000
    while not scatter.step(1):
        pass
    assert private.size_bytes == -(-300 * 77 // 256) * 256
    private.close()
    assert private.size_bytes == 0


@pytest.mark.parametrize("kind", [TorchScatterJob, LateScatter], ids=["at once", "when slots have come"])
def test_two_scatters_take_turns_with_the_private_memory(
    monkeypatch: pytest.MonkeyPatch, kind: type[TorchScatterJob]
) -> None:
    """What one has copied there is used before the other copies, however small a step is."""
    widths = [7, 13, 300]
    monkeypatch.setattr(devicescatter, "PRIVATE_BYTES", 3_000)
    monkeypatch.setattr(torchcopy, "SUMMED_BYTES", 100)
    stores, slots, private = Stores(widths, 128), slots_of("random", 128, 76), PrivateMemory(CPU, None)
    slabs = [planes_in(random_u8(slab_bytes(widths, 77)), widths, 77, 0) for _ in range(2)]
    pairs = [new_scatter(stores, planes, slots, 1, kind=kind, private=private) for planes in slabs]
    while not all(scatter.is_done for _, scatter in pairs):
        for _, scatter in pairs:
            scatter.step(1)
    for planes, (targets, scatter) in zip(slabs, pairs, strict=True):
        assert scatter.checksums() == tuple(plane_checksum(plane) for plane in planes)
        alone, _ = scatter_into(stores, planes, slots, 1, True)
        assert all(torch.equal(one, other) for one, other in zip(targets, alone, strict=True))


def full(*arguments: Any, **others: Any) -> torch.Tensor:
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB.\nMore of it.")


@pytest.mark.parametrize("where", ["private memory", "sums"])
def test_a_full_device_is_told_with_what_to_lower(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    planes = planes_in(random_u8(slab_bytes([7], 77)), [7], 77, 0)
    summing = Summing(full, is_copying=True) if where == "sums" else torchcopy.SUMMING
    _, scatter = new_scatter(Stores([7], 128), planes, slots_of("random", 128, 76), 1, summing=summing)
    if where == "private memory":
        monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(DeviceMemoryFull, match=r"Tried to allocate 256.00 MiB.\).*mem_fraction_static"):
        scatter.step(1)
    monkeypatch.undo()
    with pytest.raises(DeviceMemoryFull):
        scatter.step(1)
    assert scatter.is_idle and not scatter.is_launched


def test_private_memory_that_is_not_to_be_had_is_told_with_what_to_lower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when it is taken before there is a copy."""
    private = PrivateMemory(CPU, None)
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(DeviceMemoryFull, match="mem_fraction_static"):
        private.take(1)
    monkeypatch.undo()
    assert private.size_bytes == 0 and private.take(1).numel() == devicescatter.PRIVATE_BYTES


def test_a_scatter_whose_launch_was_interrupted_is_never_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sums to compare nobody else would notice."""
    widths = [7, 13]
    monkeypatch.setattr(devicescatter, "PRIVATE_BYTES", 1)
    planes = planes_in(random_u8(slab_bytes(widths, 77)), widths, 77, 0)

    class Interrupted(TorchScatterJob):
        def bring_slots(self) -> bool:
            if self._part == (1,):
                raise KeyboardInterrupt
            return True

    stores, slots = Stores(widths, 128, pad_bytes=2), slots_of("random", 128, 76)
    private = PrivateMemory(CPU, None)
    _, scatter = new_scatter(stores, planes, slots, 1, kind=Interrupted, private=private)
    scatter._verify = False
    assert not scatter.step(1)
    with pytest.raises(KeyboardInterrupt):
        scatter.step(1)
    for _ in range(2):
        with pytest.raises(CopyInterrupted):
            scatter.step(1)
    assert not scatter.is_done


@pytest.mark.parametrize("fails", [False, True])
def test_a_scatter_is_idle_when_its_streams_last_event_has_passed(fails: bool) -> None:
    """Whether all of it could be launched or not."""
    stream = FakeStream()

    class Failing(TorchScatterJob):
        def step(self, max_bytes: int) -> bool:
            if fails:
                raise RuntimeError("no kernel")
            return super().step(max_bytes)

    def without_stream(*arguments: Any, **options: Any) -> Failing:
        assert options["stream"] is stream
        return Failing(*arguments, **(options | {"stream": None}))

    planes = planes_in(random_u8(slab_bytes([8, 8], 16)), [8, 8], 16, 0)
    stores, slots = Stores([8, 8], 32), torch.arange(16)
    _, scatter = new_scatter(stores, planes, slots, 0, False, kind=without_stream, stream=stream)
    assert scatter.is_idle and scatter.finished is None, "nothing was launched"
    if fails:
        with pytest.raises(RuntimeError, match="no kernel"):
            scatter.step(1)
    else:
        assert not scatter.step(1) and not scatter.step(1)
        assert scatter.finished is stream.events[-1]
    for event in stream.events:
        assert not scatter.is_idle
        event.has_passed = True
    assert scatter.is_idle
    assert scatter.is_done is not fails


def test_a_part_that_cannot_be_launched_yet_comes_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The private memory is the same for all of them."""
    widths = [7, 13, 300]
    monkeypatch.setattr(devicescatter, "PRIVATE_BYTES", 1)
    planes = planes_in(random_u8(slab_bytes(widths, 77)), widths, 77, 0)
    stores, slots = Stores(widths, 128), slots_of("random", 128, 76)
    late, scatter = scatter_into(stores, planes, slots, 1, True, LateScatter)
    assert len(scatter._parts) == 3
    other, _ = scatter_into(stores, planes, slots, 1, True)
    assert all(torch.equal(one, two) for one, two in zip(late, other, strict=True))


def test_wrong_slots_are_refused_before_anything_is_launched() -> None:
    widths = [8, 8]
    planes = planes_in(random_u8(slab_bytes(widths, 4)), widths, 4, 0)
    with pytest.raises(InvalidRequest, match="named twice"):
        scatter_into(Stores(widths, 16), planes, torch.tensor([1, 2, 3, 3]), 0, True)


@pytest.mark.parametrize(("skip", "stop"), [(0, 78), (-1, 76), (40, 39)])
def test_tokens_that_the_slab_does_not_hold_are_refused_before_anything_is_launched(
    skip: int, stop: int
) -> None:
    """Behind a plane of a slab lies the next: where it ends, the tensor that it is part of does not."""
    slab = random_u8(2 * 8_192)
    planes = SlabPlanes(slab, [(1_024, 77 * 64), (8_192, 77 * 64)])
    slots = slots_of("random", 128, max(1, stop - skip))
    with pytest.raises(InvalidRequest, match=f"tokens {skip} to {stop} are wanted of a slab of 77"):
        new_scatter(Stores([64, 64], 128), planes, slots, skip, stop_tokens=stop)


def test_sums_are_not_to_be_had_before_the_end() -> None:
    planes = planes_in(random_u8(slab_bytes([8], 4)), [8], 4, 0)
    pool = Stores([8], 16).pool(Stores([8], 16).poisoned())
    options: dict[str, Any] = {"verify": True, "stream_of": lambda device: None, "after": None}
    options["private"] = PrivateMemory(CPU, None)
    scatter = DeviceScatter(TorchScatterJob, pool, planes, torch.arange(4), 0, 4, **options)
    assert scatter.is_idle and not scatter.is_done
    with pytest.raises(InvalidRequest, match="step it"):
        scatter.checksums()
