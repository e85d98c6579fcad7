"""Scatters that are done with a group of planes after the other: every kind, on the CPU."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from snapd.kv import devicescatter, torchcopy
from snapd.kv.checksum import PlaneChecksum, plane_checksum
from snapd.kv.copy import ScatterJob
from snapd.kv.devicescatter import DeviceScatter, PrivateMemory, ReadingLane
from snapd.kv.hostscatter import HostScatter
from snapd.kv.integrity import AttemptContext, KeyedIntegrity
from snapd.kv.keyedscatter import KeyedScatter
from snapd.kv.layerpages import layer_groups
from snapd.kv.pool import KVPool
from snapd.kv.torchcopy import TorchScatterJob
from tests.kv.device_cases import POISON, Stores, planes_in, random_u8, slab_bytes, slots_of

sys.path.append(str(Path(__file__).parents[1] / "integration"))

from fake_device import FakeDevice, FakeStream

CPU = torch.device("cpu")
NUM_TOKENS, NUM_SLOTS = 77, 128
# K of three layers, then V of them.
GROUPS = ((0, 3), (1, 4), (2, 5))
WIDTHS = {"words": [64, 64, 64, 64, 64, 64], "odd": [7, 13, 300, 8, 24, 5]}
CONTEXT = AttemptContext(
    epoch="e", slab_handle=1, rank=0, layout_fingerprint="f", token_start=0, num_tokens=NUM_TOKENS,
    token_digest="d",
)  # fmt: skip
INTEGRITY = KeyedIntegrity(bytes(range(64)), algorithm="blake2b")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Case:
    """A slab, a pool of poison, and a scatter between them."""

    def __init__(self, kind: str, widths: Sequence[int], skip: int, stop: int, **options: Any) -> None:
        self.planes = planes_in(random_u8(slab_bytes(widths, NUM_TOKENS)), widths, NUM_TOKENS, 0)
        stores = Stores(widths, NUM_SLOTS)
        self.stores = stores.poisoned()
        self.pool: KVPool = stores.pool(self.stores)
        self.slots = slots_of("random", NUM_SLOTS, stop - skip)
        self.skip, self.stop, self.is_keyed = skip, stop, kind == "keyed"
        self.sums: list[PlaneChecksum] = [plane_checksum(plane) for plane in self.planes]
        macs = INTEGRITY.macs(CONTEXT, len(self.planes))
        if self.is_keyed:
            for mac, plane in zip(macs, self.planes, strict=True):
                mac.add(plane.clone())
            self.sums = [mac.value for mac in macs]
        self.scatter = self._new(kind, {"groups": GROUPS, "stop_tokens": stop} | options)

    def _new(self, kind: str, options: dict[str, Any]) -> Any:
        common = (self.pool, self.planes, self.slots, self.skip, NUM_TOKENS)
        if kind == "keyed":
            macs = INTEGRITY.accepted_macs(CONTEXT, len(self.planes))
            return KeyedScatter(*common, macs=macs, **options)
        if kind == "host":
            return HostScatter(ScatterJob, *common, verify=True, **options)
        defaults: dict[str, Any] = {
            "stream_of": lambda _: None, "after": None, "private": PrivateMemory(CPU, None),
            "make_job": TorchScatterJob,
        }  # fmt: skip
        options = defaults | options
        return DeviceScatter(options.pop("make_job"), *common, verify=True, **options)

    def is_moved(self, index: int) -> bool:
        width = self.planes[index].numel() // NUM_TOKENS
        wanted = self.planes[index].view(NUM_TOKENS, width)[self.skip : self.stop]
        return torch.equal(self.pool.planes[index].rows[self.slots], wanted)

    def is_poison(self, index: int) -> bool:
        return bool((self.pool.planes[index].rows == POISON).all())

    def differing(self, group: Sequence[int]) -> list[int]:
        if self.is_keyed:
            return list(self.scatter.differing_in(group, self.sums))
        return [index for index in group if self.scatter.checksum_of(index) != self.sums[index]]

    def check(self) -> None:
        """Groups that are done are there, and equal; those after the one under way are not touched."""
        done = self.scatter.groups_done
        for group in GROUPS[:done]:
            assert all(self.is_moved(index) for index in group) and self.differing(group) == []
        for group in GROUPS[done + 1 :]:
            assert all(self.is_poison(index) for index in group)


KINDS = pytest.mark.parametrize("kind", ["host", "keyed", "device"])
CUTS = pytest.mark.parametrize(("skip", "stop"), [(0, 77), (5, 40), (8, 16), (0, 8), (76, 77)])


@pytest.mark.parametrize("step_bytes", [1, 1 << 30])
@CUTS
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS.keys())
@KINDS
def test_a_group_is_there_and_compared_before_the_next_begins(
    monkeypatch: pytest.MonkeyPatch, kind: str, widths: list[int], skip: int, stop: int, step_bytes: int
) -> None:
    monkeypatch.setattr(devicescatter, "PRIVATE_BYTES", 10_000)
    monkeypatch.setattr(torchcopy, "SUMMED_BYTES", 5_000)
    case = Case(kind, widths, skip, stop)
    steps = seen = 0
    while not case.scatter.step(step_bytes):
        case.check()
        assert case.scatter.groups_done <= seen + 1 or kind == "device", "a group a step, at most"
        seen = case.scatter.groups_done
        steps += 1
        assert steps < 1_000
    assert case.scatter.groups_done == len(GROUPS)
    case.check()
    assert case.scatter.step(1), "it stays done"


def test_a_device_is_given_a_group_at_a_time() -> None:
    case = Case("device", WIDTHS["words"], 0, NUM_TOKENS)
    for done in (1, 2, 3):
        case.scatter.step(1)
        assert case.scatter.groups_done == done
        case.check()


@CUTS
@KINDS
def test_what_differs_is_told_with_its_group(kind: str, skip: int, stop: int) -> None:
    """A byte that is moved, or one that is only summed."""
    case = Case(kind, WIDTHS["words"], skip, stop)
    case.planes[4][0] ^= 1
    while not case.scatter.step(1 << 30):
        pass
    assert [case.differing(group) for group in GROUPS] == [[], [4], []]


@KINDS
def test_without_groups_all_planes_are_one(kind: str) -> None:
    case = Case(kind, WIDTHS["odd"], 8, 40, groups=None)
    moved = [case.is_moved(index) for index in range(6)]
    while not case.scatter.step(1):
        moved = [case.is_moved(index) for index in range(6)]
        assert all(moved) or case.scatter.groups_done == 0
    assert case.scatter.groups_done == 1


def test_a_group_on_a_device_is_done_when_its_own_work_has_ended() -> None:
    device = FakeDevice(looks=None)
    case = Case("device", WIDTHS["words"], 5, 40, make_job=device.copies.scatter)
    assert not case.scatter.step(1 << 30)
    assert case.scatter.is_launched and case.scatter.groups_done == 0
    assert [job._job._part for job in device.launched] == list(GROUPS)
    device.launched[1].looks = 0
    assert case.scatter.groups_done == 0, "they are told in order"
    device.launched[0].looks = 0
    assert case.scatter.groups_done == 2 and not case.scatter.is_done
    device.release()
    assert case.scatter.groups_done == 3 and case.scatter.is_done


def test_a_group_on_a_device_is_not_done_before_its_sums_are_on_the_host() -> None:
    stream = FakeStream()

    class OnStream(TorchScatterJob):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options | {"stream": None, "after": None})

    case = Case("device", WIDTHS["words"], 0, NUM_TOKENS, make_job=OnStream)
    case.scatter._stream = stream
    while not case.scatter.is_launched:
        case.scatter.step(1)
    assert case.scatter.groups_done == 0
    for event in stream.events:
        event.has_passed = True
    assert case.scatter.groups_done == 3


def test_groups_share_no_copy_in_private_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devicescatter, "PRIVATE_BYTES", 23_500)
    case = Case("device", WIDTHS["odd"], 5, 40)
    assert case.scatter._parts == [([0, 3], True), ([1, 4], True), ([2], False), ([5], True)]


@KINDS
def test_a_pass_that_only_reads_sums_everything_and_writes_nothing(kind: str) -> None:
    case = Case(kind, WIDTHS["odd"], 0, NUM_TOKENS)

    def no_job(*_: object, **__: object) -> Any:
        raise AssertionError("there is nothing to move")

    arguments = (case.pool, case.planes, None, NUM_TOKENS, NUM_TOKENS)
    lane = ReadingLane(CPU)
    scatter: HostScatter | KeyedScatter | DeviceScatter
    if kind == "host":
        scatter = HostScatter(no_job, *arguments, verify=True)
    elif kind == "keyed":
        macs = INTEGRITY.accepted_macs(CONTEXT, len(case.planes))
        scatter = KeyedScatter(*arguments, stop_tokens=NUM_TOKENS, macs=macs)
    else:
        options: dict[str, Any] = {"after": (), "stream_of": lane.stream_of, "private": lane.private}
        scatter = DeviceScatter(no_job, *arguments, verify=True, **options)
    while not scatter.step(1_000):
        pass
    assert all(case.is_poison(index) for index in range(len(case.planes)))
    if isinstance(scatter, KeyedScatter):
        assert scatter.differing(case.sums) == []
    else:
        assert list(scatter.checksums()) == case.sums


def test_memory_to_read_by_is_the_lanes_own_and_not_made_before_it_is_used() -> None:
    lane = ReadingLane(CPU)
    lane.close()
    assert "private" not in vars(lane)
    assert lane.private is lane.private and lane.stream_of(CPU) is None
    lane.private.take(1)
    assert lane.private.size_bytes > 0
    lane.close()
    assert lane.private.size_bytes == 0


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda one: KVPool.mha([one] * 3, [one] * 3), ((0, 3), (1, 4), (2, 5))),
        (lambda one: KVPool.mla([one] * 3), ((0,), (1,), (2,))),
    ],
)
def test_a_layer_is_its_k_and_v_or_its_latent(
    make: Callable[[torch.Tensor], KVPool], expected: tuple[tuple[int, ...], ...]
) -> None:
    assert make(torch.zeros((4, 1, 8))).layers == expected


def test_layers_are_cut_into_no_more_groups_than_wanted() -> None:
    layers = tuple((layer, 48 + layer) for layer in range(48))
    for groups_max, sizes in ((48, [1] * 48), (8, [6] * 8), (5, [10, 10, 10, 10, 8]), (100, [1] * 48)):
        groups = layer_groups(layers, groups_max)
        assert [len(group) for group in groups] == sizes
        assert tuple(layer for group in groups for layer in group) == layers
