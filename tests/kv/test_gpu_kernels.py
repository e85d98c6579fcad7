"""The device copies against the CPU's: Triton's kernel and torch's own operations.

On a machine with a GPU they run there, else Triton's interpreter runs the kernel.
"""

import contextlib
import gc
import inspect
import os
import types
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapd.errors import ExtraMissing, InvalidRequest, InvariantBroken
from snapd.kv import copy as cpu_copy
from snapd.kv import devicejob, devicescatter, gpucopy, torchcopy
from snapd.kv.checksum import ChecksumAccumulator, plane_checksum
from snapd.kv.devicejob import CopyInterrupted, DeviceMemoryFull, finish
from snapd.kv.devicescatter import DeviceScatter, PrivateMemory
from snapd.kv.gpucopy import GpuGatherJob, GpuScatterJob, gather_gpu, scatter_gpu
from snapd.kv.planes import SlabPlanes
from snapd.kv.pool import KVPool, check_slots_of
from snapd.kv.torchcopy import TorchGatherJob, TorchScatterJob
from tests.kv.device_cases import (
    POISON,
    WIDTHS,
    Jobs,
    Stores,
    check_both_ways,
    on_device,
    planes_in,
    random_u8,
    slab_bytes,
    slots_of,
)

triton = pytest.importorskip("triton", reason="Triton is not installed")
gpukernels = pytest.importorskip("snapd.kv.gpukernels")

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not IS_INTERPRETED and not torch.cuda.is_available():
    pytest.skip("there is no GPU, and Triton was imported without its interpreter", allow_module_level=True)
DEVICE = torch.device("cpu") if IS_INTERPRETED else torch.device("cuda:0")
interpreted_only = pytest.mark.skipif(not IS_INTERPRETED, reason="looks into the interpreter")

TRITON = Jobs(GpuGatherJob, GpuScatterJob)
TORCH = Jobs(TorchGatherJob, TorchScatterJob)
both_kinds = pytest.mark.parametrize("jobs", [TRITON, TORCH], ids=["triton", "torch"])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles and chunks, so that small inputs take many programs, steps and chunks."""
    monkeypatch.setattr(gpukernels, "DEFAULT_TUNING", gpukernels.Tuning(tile_units=64, steps=3))
    monkeypatch.setattr(gpukernels, "_PROGRAMS_MIN", 1)
    monkeypatch.setattr(torchcopy, "CHUNK_BYTES", 2048)


@both_kinds
@pytest.mark.parametrize("kind", ["contiguous", "random"])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS.keys())
def test_all_bytes_arrive_and_no_others_change(jobs: Jobs, widths: list[int], page: int, kind: str) -> None:
    check_both_ways(jobs, DEVICE, Stores(widths, 96, page), slots_of(kind, 96, 77, page))


@both_kinds
@pytest.mark.parametrize("shift", [0, 8, 3])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS.keys())
def test_planes_may_be_parts_of_a_slab(jobs: Jobs, widths: list[int], shift: int) -> None:
    stores, slots = Stores(widths, 96), slots_of("random", 96, 77)
    check_both_ways(jobs, DEVICE, stores, slots, plane_shift=shift, is_slab=True)


def test_what_is_planned_for_a_pool_serves_other_slabs_and_other_numbers_of_tokens() -> None:
    stores = Stores([64, 48, 7], 96)
    buffers = [on_device(store, DEVICE) for store in stores.random()]
    pool = stores.pool(buffers)
    for num_tokens in (77, 5, 40):
        slots = slots_of("random", 96, num_tokens)
        for shift in (0, 3, 16):
            slab = on_device(random_u8(slab_bytes(stores.widths, num_tokens)), DEVICE)
            planes = planes_in(slab, stores.widths, num_tokens, shift)
            for part in ((0, 1, 2), (2, 0)):
                chosen = [planes[index] for index in part]
                sums = finish(GpuGatherJob(pool, slots, chosen, part=part))
                for index, its_sums in zip(part, sums, strict=True):
                    assert torch.equal(planes[index].view(num_tokens, -1), pool.planes[index].rows[slots])
                    assert its_sums == plane_checksum(planes[index].cpu())


def test_what_is_planned_for_a_pool_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpucopy, "_PLANS_MAX", 2)
    pool = Stores([64] * 4, 32).pool([on_device(store, DEVICE) for store in Stores([64] * 4, 32).random()])
    for index in range(4):
        plane = torch.zeros(64, dtype=torch.uint8, device=DEVICE)
        finish(GpuGatherJob(pool, torch.tensor([3]), [plane], part=(index,)))
        assert torch.equal(plane, pool.planes[index].rows[3])
    assert 0 < len(gpucopy._plans[pool]) <= 2
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("at", [0, 8, 3])
@pytest.mark.parametrize("first_word", [0, 1, 1 << 33])
@pytest.mark.usefixtures("small")
def test_sums_alone_are_those_of_the_checksum(
    monkeypatch: pytest.MonkeyPatch, first_word: int, at: int
) -> None:
    """Parts of any sizes, where they lie; at an odd address torch sums, which takes parts of one size."""
    monkeypatch.setattr(gpukernels, "_SUMS_WORDS", 64)
    sizes_bytes = [4096 + 7] * 3 if at % 8 else [1, 7, 8, 15, 16, 17, 64 * 8 * 7 + 9, 4096, 64 * 8 * 9]
    slab = random_u8(10 * 4 * 4096)
    places = [(4096 * 4 * index + at, size_bytes) for index, size_bytes in enumerate(sizes_bytes)]
    parts = SlabPlanes(on_device(slab, DEVICE), places)
    expected = []
    for start, size_bytes in places:
        accumulator = ChecksumAccumulator()
        accumulator.add(slab[start : start + size_bytes], first_word)
        expected.append(accumulator.value)
    for one in (parts, list(parts)):
        sums = gpucopy.sum_parts(one, first_word).tolist()
        assert [(sum0 % 2**64, sum1 % 2**64) for sum0, sum1 in sums] == expected


def test_sums_alone_are_launched_on_the_device_of_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton takes the current one, which need not be theirs: its kernel would read memory of another."""
    current: list[torch.device] = []
    launched: list[torch.device] = []

    @contextlib.contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        current.append(tensor.device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(gpukernels, "launch_sums", lambda *_, **__: launched.extend(current))
    gpucopy.sum_parts([torch.zeros(64, dtype=torch.uint8, device=DEVICE)], 0)
    assert launched == [DEVICE]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has not two GPUs")
def test_sums_alone_on_a_gpu_that_is_not_the_current_one() -> None:
    host = random_u8(4096 + 7)
    sums = gpucopy.sum_parts([host.to("cuda:1")], 0)
    assert [(sum0 % 2**64, sum1 % 2**64) for sum0, sum1 in sums.tolist()] == [plane_checksum(host)]


@both_kinds
@pytest.mark.parametrize(
    ("places", "match"),
    [
        ([(0, 64), (192, 128)], "leaves the 256 bytes"),
        ([(-64, 128), (64, 128)], "leaves the 256 bytes"),
        ([(128, 128), (192, 64)], "share bytes"),
    ],
)
def test_planes_that_leave_their_slab_or_overlap_are_refused(
    jobs: Jobs, places: list[tuple[int, int]], match: str
) -> None:
    """They are addresses only: no tensor is made of them that could be found too short."""
    pool = KVPool.mla([random_u8(8, size_bytes // 2).to(DEVICE) for _, size_bytes in places])
    slab = random_u8(3 * 256).to(DEVICE)[256:512]
    with pytest.raises(InvalidRequest, match=match):
        jobs.gather(pool, torch.arange(2), SlabPlanes(slab, places))


@both_kinds
def test_slots_that_were_checked_for_a_larger_pool_are_checked_again(jobs: Jobs) -> None:
    pools = [Stores([64], num_slots).pool([torch.zeros(num_slots * 64, dtype=torch.uint8, device=DEVICE)])
             for num_slots in (32, 64)]  # fmt: skip
    plane = torch.zeros(2 * 64, dtype=torch.uint8, device=DEVICE)
    checked = check_slots_of([pools[1]], torch.tensor([1, 40]), 2)
    finish(jobs.gather(pools[1], checked, [plane]))
    with pytest.raises(InvalidRequest, match="slots span 1 to 40, and the pool has 32"):
        jobs.gather(pools[0], checked, [plane])


@both_kinds
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("num_tokens", [1, 64, 131])
@pytest.mark.parametrize("widths", [[64, 48], [72, 3]], ids=str)
def test_many_programs_steps_and_pieces(jobs: Jobs, widths: list[int], num_tokens: int) -> None:
    slots = slots_of("random", 192, num_tokens)
    check_both_ways(jobs, DEVICE, Stores(widths, 192), slots)
    check_both_ways(jobs, DEVICE, Stores(widths, 192), slots, piece_bytes=37 * sum(widths))


@both_kinds
@pytest.mark.parametrize("pad_bytes", [1, 4, 8, 16])
def test_slots_that_are_further_apart_than_their_rows(jobs: Jobs, pad_bytes: int) -> None:
    check_both_ways(jobs, DEVICE, Stores([64, 132, 7], 64, 4, pad_bytes), slots_of("random", 64, 50, 4))


@both_kinds
@pytest.mark.parametrize("shift", [1, 2, 4, 8])
def test_any_address(jobs: Jobs, shift: int) -> None:
    slots = slots_of("random", 64, 50)
    check_both_ways(jobs, DEVICE, Stores([64, 656], 64, shift=shift), slots)
    check_both_ways(jobs, DEVICE, Stores([64, 656], 64), slots, plane_shift=shift)


@both_kinds
def test_without_sums_the_bytes_are_the_same(jobs: Jobs) -> None:
    check_both_ways(jobs, DEVICE, Stores([64, 132, 7], 64), slots_of("random", 64, 50), checksum=False)


@both_kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32], ids=str)
def test_engine_dtypes_keep_every_bit(jobs: Jobs, dtype: torch.dtype) -> None:
    """Signalling NaNs too: nothing passes through a float register as a value."""
    host = [random_u8(64, 2, 64).view(dtype), torch.full((64, 2, 32), 0xFF, dtype=torch.uint8).view(dtype)]
    host[0].view(torch.int32).view(-1)[::7] = 0x7F800001
    pool = KVPool.mla([on_device(buffer, DEVICE) for buffer in host])
    slots = torch.randperm(64)[:50]
    planes = [
        torch.full((50 * place.stride_bytes,), POISON, dtype=torch.uint8, device=DEVICE)
        for place in pool.planes
    ]
    sums = finish(jobs.gather(pool, slots, planes))
    for plane, buffer, actual in zip(planes, host, sums, strict=True):
        expected = buffer.view(torch.uint8).view(64, -1)[slots].flatten()
        assert torch.equal(plane.cpu(), expected)
        assert actual == plane_checksum(expected)


@both_kinds
def test_sums_wrap_as_they_do_on_the_cpu(jobs: Jobs) -> None:
    """Words of all ones: both sums leave 64 bits far behind."""
    pool = KVPool.mla([torch.full((64, 80), 0xFF, dtype=torch.uint8, device=DEVICE)])
    plane = torch.zeros(64 * 80, dtype=torch.uint8, device=DEVICE)
    (sums,) = finish(jobs.gather(pool, torch.arange(64), [plane]))
    assert sums == (-640 % 2**64, -(640 * 641 // 2) % 2**64)


@both_kinds
def test_slots_that_lie_more_than_2_to_the_31_bytes_apart(jobs: Jobs) -> None:
    """Memory that is never touched costs nothing, so this takes three rows of a huge pool."""
    pitch_bytes = 2**31 + 8
    store = torch.empty(2 * pitch_bytes + 64, dtype=torch.uint8, device=DEVICE)
    rows = store.as_strided((3, 64), (pitch_bytes, 1))
    rows.copy_(random_u8(3, 64))
    pool = KVPool.mla([rows])
    slots = torch.tensor([2, 0, 1])
    plane = torch.zeros(3 * 64, dtype=torch.uint8, device=DEVICE)
    sums = finish(jobs.gather(pool, slots, [plane]))
    assert torch.equal(plane.cpu(), rows.cpu()[slots].flatten())
    assert sums == (plane_checksum(plane.cpu()),)
    other = random_u8(3 * 64)
    assert finish(jobs.scatter(pool, slots, [on_device(other, DEVICE)])) == (plane_checksum(other),)
    assert torch.equal(rows.cpu()[slots].flatten(), other)


@pytest.mark.skipif(not IS_INTERPRETED, reason="every width is compiled, which takes long")
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_pool_and_any_slots(data: st.DataObject) -> None:
    page = data.draw(st.sampled_from([1, 2, 4, 16]))
    pages = data.draw(st.integers(1, 12))
    num_slots = pages * page + data.draw(st.integers(0, page - 1))
    order = data.draw(st.permutations(range(pages)))[: data.draw(st.integers(1, pages))]
    slots = [number * page + token for number in order for token in range(page)]
    num_tokens = len(slots) - data.draw(st.integers(0, page - 1))
    stores = Stores(
        data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)),
        num_slots,
        page,
        data.draw(st.sampled_from([0, 0, 1, 8])),
        data.draw(st.sampled_from([0, 0, 2, 8])),
    )
    for jobs in (TRITON, TORCH):
        check_both_ways(
            jobs, DEVICE, stores, torch.tensor(slots[:num_tokens]),
            plane_shift=data.draw(st.sampled_from([0, 0, 1, 8])),
        )  # fmt: skip


@pytest.mark.parametrize(
    "constants",
    [{"tile_units": 256, "steps": 1}, {"tile_units": 2048, "steps": 16, "num_warps": 8},
     {"load_cache": ".cg", "load_evict": "evict_first", "store_cache": ".cs"}],
    ids=str,
)  # fmt: skip
def test_constants_change_no_result(monkeypatch: pytest.MonkeyPatch, constants: dict[str, object]) -> None:
    monkeypatch.setattr(gpukernels, "DEFAULT_TUNING", gpukernels.Tuning(**constants))
    monkeypatch.setattr(gpukernels, "_PROGRAMS_MIN", 1)
    check_both_ways(TRITON, DEVICE, Stores([64, 80], 96), slots_of("random", 96, 77))


@pytest.mark.parametrize("widths_bytes", [[1024] * 8, [1024, 512], [48, 256, 72, 24]], ids=str)
def test_planes_that_words_divide_are_moved_by_one_launch(
    monkeypatch: pytest.MonkeyPatch, widths_bytes: list[int]
) -> None:
    """A launch for every plane would cost more than the copy of a short session."""
    launches = []
    original = gpukernels.launch
    monkeypatch.setattr(
        gpukernels, "launch", lambda *args, **kwargs: (launches.append(args), original(*args, **kwargs))
    )
    widths_bytes = [width if width % 16 == 0 else width + 8 for width in widths_bytes]
    check_both_ways(TRITON, DEVICE, Stores(widths_bytes, 16), torch.arange(16))
    assert len(launches) == 2


@given(
    widths=st.lists(st.integers(1, 5000), min_size=1, max_size=4), unit_bytes=st.sampled_from([1, 2, 4, 8])
)
def test_a_tile_is_a_power_of_two_wide_and_wastes_little(widths: list[int], unit_bytes: int) -> None:
    how = gpukernels.plan_launch(unit_bytes, widths, is_wide=False)
    assert how.columns & (how.columns - 1) == 0
    assert sum(-(-width // how.columns) * how.columns for width in widths) <= 1.25 * sum(widths)
    assert how.is_exact == (set(widths) == {how.columns})


def test_rows_that_fill_a_tile_take_the_exact_path() -> None:
    how = gpukernels.plan_launch(8, [128] * 96, is_wide=True)
    assert (how.columns, how.is_exact) == (128, True)


# K and V of other widths, an index beside them, and one that fills a tile alone.
MIXED = [1024, 1024, 768, 768, 132, 656, 2048]


class FakeKernel:
    """A compiled kernel that notes how it is launched; *signature* names what it takes."""

    def __init__(self, signature: list[str]) -> None:
        self.src = types.SimpleNamespace(signature=dict.fromkeys(signature, ""))
        self.launched: list[tuple[tuple[int, ...], tuple[object, ...], object]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, stream: self.launched.append((grid, arguments, stream))


@pytest.mark.parametrize("takes_constants", [True, False], ids=["triton-3.3", "triton-3.2"])
def test_gathers_after_the_first_are_launched_with_all_that_the_first_had(
    monkeypatch: pytest.MonkeyPatch, takes_constants: bool
) -> None:
    bound: list[tuple[dict[str, object], tuple[int, ...]]] = []
    signature = inspect.signature(gpukernels._move.fn)
    taken = [name for name in signature.parameters if takes_constants or not name.isupper()]
    kernel = FakeKernel(taken)

    def run(
        *arguments: object, grid: tuple[int, ...], num_warps: int, warmup: bool, **constants: object
    ) -> FakeKernel:
        assert num_warps == gpukernels.DEFAULT_TUNING.num_warps and not warmup
        bound.append((dict(signature.bind(*arguments, **constants).arguments), grid))
        return kernel

    monkeypatch.setattr(gpukernels, "_move", types.SimpleNamespace(run=run))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    table = torch.arange(9 * gpukernels.TABLE_COLUMNS).view(9, gpukernels.TABLE_COLUMNS)
    slots, sums = torch.arange(40, dtype=torch.int32), torch.zeros((9, 2), dtype=torch.int64)
    stream = types.SimpleNamespace(device=torch.device("cuda:1"), cuda_stream=77)
    wide, narrow = (gpukernels.plan_launch(8, [width], is_wide=True) for width in (128, 6))
    parts = [(2, 5, 40, 1 << 40, wide), (5, 6, 8, 3 << 40, narrow)]
    once = gpukernels.Gathers(table, slots, sums, stream)
    for part in parts * 2:
        once.launch(*part)
    assert len(bound) == len(kernel.launched) == len(parts), "bound once each"
    for (wanted, wanted_grid), (grid, arguments, its_stream) in zip(bound, kernel.launched, strict=True):
        assert its_stream == 77 and (*wanted_grid, 1)[:3] == (*grid, 1)[:3]
        got = signature.bind_partial(*arguments).arguments
        addresses = {
            name: value.data_ptr() if isinstance(value, torch.Tensor) else value
            for name, value in wanted.items()
            if name in taken
        }
        assert got == addresses and list(got) == list(addresses)


@pytest.mark.parametrize("private_bytes", [1, 150_000, 1 << 30])
def test_what_was_compiled_for_a_pool_serves_every_part_of_it(
    monkeypatch: pytest.MonkeyPatch, private_bytes: int
) -> None:
    """Planes of another GPU, and those with a cut word, are scattered some at a time."""
    launches: list[tuple[object, bool, bool]] = []
    original = gpukernels.launch

    def watched(table, slots, sums, start, stop, how, *, is_scatter):
        launches.append((how, sums is None, is_scatter))
        original(table, slots, sums, start, stop, how, is_scatter=is_scatter)

    monkeypatch.setattr(gpukernels, "launch", watched)
    monkeypatch.setattr(devicescatter, "PRIVATE_BYTES", private_bytes)
    stores = Stores(MIXED, 64)
    pool = stores.pool([on_device(store, DEVICE) for store in stores.poisoned()])
    gpucopy.launch_nothing(pool)
    compiled = set(launches)
    assert all(bool((place.rows == POISON).all()) for place in pool.planes)
    for skip_tokens, is_whole, verify in ((1, True, True), (2, False, True), (2, False, False)):
        launches.clear()
        slab = on_device(random_u8(slab_bytes(MIXED, 40)), DEVICE)
        planes = planes_in(slab, MIXED, 40, 0)
        scatter = DeviceScatter(
            GpuScatterJob, pool, planes, torch.arange(40 - skip_tokens), skip_tokens, 40,
            verify=verify, stream_of=lambda _: None, after=None, private=PrivateMemory(DEVICE, None),
        )  # fmt: skip
        assert scatter._is_whole == is_whole
        while not scatter.step(1 << 30):
            pass
        assert set(launches) <= compiled
        if verify:
            assert scatter.checksums() == tuple(plane_checksum(plane.cpu()) for plane in planes)


@both_kinds
def test_a_part_of_a_pools_planes_is_copied_by_index(jobs: Jobs) -> None:
    """The other planes stay as they are, whatever their addresses have in common."""
    widths, part = [64, 48, 1, 64], (3, 1, 2)
    for shift in (0, 1):
        stores = Stores(widths, 64)
        source = stores.pool([on_device(store, DEVICE) for store in stores.random()])
        target = stores.pool([on_device(store, DEVICE) for store in stores.poisoned()])
        of_part = [widths[index] for index in part]
        planes = planes_in(on_device(random_u8(slab_bytes(of_part, 50)), DEVICE), of_part, 50, shift)
        slots = slots_of("random", 64, 50)
        sums = finish(jobs.gather(source, slots, planes, part=part))
        assert finish(jobs.scatter(target, slots, planes, part=part)) == sums
        for plane, index, its_sums in zip(planes, part, sums, strict=True):
            assert torch.equal(target.planes[index].rows[slots], source.planes[index].rows[slots])
            assert its_sums == plane_checksum(plane.cpu())
        assert bool((target.planes[0].rows == POISON).all())
        with pytest.raises(InvalidRequest, match="3 planes for a pool of 2"):
            jobs.gather(source, slots, planes, part=(0, 1))


@interpreted_only
def test_what_the_kernel_sums_is_what_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write into the slab right after it was read leaves sums that are true of the pool."""
    from triton.runtime.interpreter import interpreter_builder

    plane, target = random_u8(50 * 64), torch.zeros(64, 64, dtype=torch.uint8)
    slots = torch.randperm(64)[:50]
    before = plane.clone()
    first, last = plane.data_ptr(), plane.data_ptr() + plane.numel()
    original = interpreter_builder.create_masked_load

    def late(ptrs, *args):
        loaded = original(ptrs, *args)
        if first <= int(ptrs.data.flat[0]) < last:
            plane.bitwise_not_()
        return loaded

    monkeypatch.setattr(interpreter_builder, "create_masked_load", late)
    (sums,) = finish(GpuScatterJob(KVPool.mla([target]), slots, [plane]))
    assert not torch.equal(plane, before)
    assert sums == plane_checksum(target[slots].flatten())


def test_what_the_fallback_sums_is_what_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    plane, target = random_u8(50 * 64).to(DEVICE), torch.zeros(64, 64, dtype=torch.uint8, device=DEVICE)
    slots = torch.randperm(64)[:50]
    original = torchcopy.sum_words

    def late(words, first_word):
        plane.zero_()
        return original(words, first_word)

    monkeypatch.setattr(torchcopy, "sum_words", late)
    (sums,) = finish(TorchScatterJob(KVPool.mla([target]), slots, [plane]))
    assert sums == plane_checksum(target.cpu()[slots].flatten())
    assert sums != plane_checksum(plane.cpu())


# --- what is refused ---------------------------------------------------------------------------------


def _bad_planes(planes: list[torch.Tensor], case: str) -> list[torch.Tensor]:
    return {
        "one too few": planes[:1],
        "too short": [planes[0], planes[1][:-1]],
        "too long": [planes[0], torch.zeros(planes[1].numel() + 1, dtype=torch.uint8, device=DEVICE)],
        "another dtype": [planes[0], planes[1].view(torch.int8)],
        "2-D": [planes[0], planes[1].view(1, -1)],
        "on another device": [planes[0], planes[1].to("meta")],
        "overlap": [planes[0], planes[0]],
        "not contiguous": [
            planes[0], torch.zeros(2 * planes[1].numel(), dtype=torch.uint8, device=DEVICE)[::2]
        ],
    }[case]  # fmt: skip


@both_kinds
@pytest.mark.parametrize(
    "case",
    ["one too few", "too short", "too long", "another dtype", "2-D", "on another device", "overlap",
     "not contiguous"],
)  # fmt: skip
def test_planes_that_do_not_fit_are_refused(jobs: Jobs, case: str) -> None:
    pool = KVPool.mha(*([torch.zeros(32, 64, dtype=torch.uint8, device=DEVICE)] for _ in "kv"))
    planes = [torch.full((20 * 64,), POISON, dtype=torch.uint8, device=DEVICE) for _ in "kv"]
    for kind in (jobs.gather, jobs.scatter):
        with pytest.raises(InvalidRequest):
            kind(pool, torch.arange(20), _bad_planes(planes, case))


@both_kinds
@pytest.mark.parametrize(
    "slots",
    [torch.tensor([0, 32]), torch.tensor([-1, 0]), torch.tensor([3, 3]), torch.tensor([0.0, 1.0]),
     torch.tensor([[0], [1]]), torch.tensor([], dtype=torch.int64), torch.tensor([0, 1], device="meta")],
    ids=["above", "below", "twice", "floats", "2-D", "none", "elsewhere"],
)  # fmt: skip
def test_slots_that_do_not_fit_are_refused(jobs: Jobs, slots: torch.Tensor) -> None:
    pool = KVPool.mla([torch.zeros(32, 64, dtype=torch.uint8, device=DEVICE)])
    plane = torch.zeros(2 * 64, dtype=torch.uint8, device=DEVICE)
    for kind in (jobs.gather, jobs.scatter):
        with pytest.raises(InvalidRequest):
            kind(pool, slots, [plane])


@both_kinds
@pytest.mark.parametrize("shape", [(2, 1), (0,), ()], ids=str)
def test_slots_of_another_shape_are_refused_before_they_are_read(jobs: Jobs, shape: tuple[int, ...]) -> None:
    pool = KVPool.mla([torch.zeros(32, 64, dtype=torch.uint8, device=DEVICE)])
    plane = torch.zeros(2 * 64, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(InvalidRequest, match=r"\[num_tokens\] is wanted"):
        jobs.gather(pool, torch.zeros(shape, dtype=torch.int64), [plane])


@both_kinds
def test_pages_whose_slots_are_apart_are_refused(jobs: Jobs) -> None:
    pool = KVPool.mla([torch.zeros(32, 64, dtype=torch.uint8, device=DEVICE)], 4)
    with pytest.raises(InvalidRequest, match="not consecutive"):
        jobs.gather(pool, torch.tensor([0, 2, 1, 3]), [torch.zeros(256, dtype=torch.uint8, device=DEVICE)])


@both_kinds
def test_slots_may_be_int32(jobs: Jobs) -> None:
    pool = KVPool.mla([random_u8(32, 64).to(DEVICE)])
    plane = torch.zeros(20 * 64, dtype=torch.uint8, device=DEVICE)
    slots = torch.randperm(32)[:20]
    finish(jobs.gather(pool, slots.to(torch.int32), [plane]))
    assert torch.equal(plane.view(20, 64), pool.planes[0].rows[slots.to(DEVICE)])


@both_kinds
def test_pieces_of_no_bytes_are_refused(jobs: Jobs) -> None:
    pool = KVPool.mla([torch.zeros(32, 64, dtype=torch.uint8, device=DEVICE)])
    with pytest.raises(InvalidRequest, match="piece_bytes"):
        jobs.gather(pool, torch.arange(1), [torch.zeros(64, dtype=torch.uint8, device=DEVICE)], piece_bytes=0)


def test_a_pool_that_is_on_no_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpukernels, "is_interpreted", lambda: False)
    pool = KVPool.mla([torch.zeros(32, 64, dtype=torch.uint8)])
    with pytest.raises(InvalidRequest, match="for a GPU"):
        gather_gpu(pool, torch.arange(1), [torch.zeros(64, dtype=torch.uint8)])
    with pytest.raises(InvalidRequest, match="for a GPU"):
        gpucopy.warm_up(pool)


def test_a_cpu_has_no_events_to_wait_for() -> None:
    pool = KVPool.mla([torch.zeros(32, 64, dtype=torch.uint8)])
    plane = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(InvalidRequest, match="no streams"):
        TorchGatherJob(pool, torch.arange(1), [plane], after=[object()])  # torch without CUDA has no events
    job = TorchGatherJob(pool, torch.arange(1), [plane])
    finish(job)
    with pytest.raises(InvalidRequest, match="not launched"):
        _ = job.finished


@both_kinds
def test_slots_on_the_host_are_there_already_and_the_device_is_told_nothing(jobs: Jobs) -> None:
    """So planes can be copied from elsewhere before what the job waits for has ended."""
    pool = KVPool.mla([random_u8(32, 64).to(DEVICE)])
    job = jobs.gather(pool, torch.arange(20), [torch.zeros(20 * 64, dtype=torch.uint8, device=DEVICE)])
    assert job.bring_slots()
    assert not job._has_begun and job._index is None
    finish(job)
    assert job.bring_slots()


@both_kinds
def test_nothing_moves_before_the_first_step_and_sums_wait_for_the_end(jobs: Jobs) -> None:
    pool = KVPool.mla([random_u8(32, 64).to(DEVICE)])
    plane = torch.full((20 * 64,), POISON, dtype=torch.uint8, device=DEVICE)
    job = jobs.gather(pool, torch.arange(20), [plane])
    assert not job.done
    assert not job.is_launched
    assert job.bytes_done == 0
    with pytest.raises(InvalidRequest, match="1280 bytes are still to be moved"):
        _ = job.checksums
    assert bool((plane == POISON).all())
    finish(job)
    assert job.done
    assert job.step(1)
    assert job.bytes_done == job.bytes_total == 1280


def test_an_error_at_the_launch_is_told_again_and_never_done(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def broken_once(*args, **kwargs):
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("no compiler")

    monkeypatch.setattr(gpukernels, "launch", broken_once)
    pool = KVPool.mla([torch.zeros(32, 64, dtype=torch.uint8, device=DEVICE)])
    job = GpuGatherJob(pool, torch.arange(1), [torch.zeros(64, dtype=torch.uint8, device=DEVICE)])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no compiler"):
            job.step(1)
    assert not job.done
    assert len(calls) == 1
    job.wait()


class FakeStream:
    """Says what it was asked for; torch without CUDA makes no use of a stream."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def record_event(self) -> object:
        self.events.append(object())
        return self.events[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a stream that is none")
def test_what_an_interrupted_launch_has_begun_is_waited_for_and_never_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TorchGatherJob, "_move", interrupted)
    job = TorchGatherJob(
        KVPool.mla([random_u8(8, 8)]), torch.arange(4), [torch.zeros(32, dtype=torch.uint8)], checksum=False
    )
    job.stream = stream = FakeStream()
    monkeypatch.setattr(job, "_to_device", lambda tensor, dtype: tensor.to(dtype))
    with pytest.raises(KeyboardInterrupt):
        job.step(1)
    assert job.finished is stream.events[-1]
    for _ in range(2):
        with pytest.raises(CopyInterrupted):
            job.step(1)


@both_kinds
def test_a_full_device_is_told_with_what_to_lower(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = KVPool.mla([torch.zeros(32, 64, dtype=torch.uint8, device=DEVICE)])
    job = jobs.gather(pool, torch.arange(1), [torch.zeros(64, dtype=torch.uint8, device=DEVICE)])

    def full(*args: object, **kwargs: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(DeviceMemoryFull, match=r"Tried to allocate 2.00 GiB.*gpu_memory_utilization"):
        job.step(1)


class SlotsElsewhere:
    """Slots on a device, in host memory."""

    def __init__(self, slots: torch.Tensor) -> None:
        self._slots = slots
        self.device = torch.device("cuda:0")
        self.is_cuda = False

    def clone(self) -> torch.Tensor:
        return self._slots.clone()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a stream that is none")
@pytest.mark.parametrize("wrong", [2**32 + 5, -(2**32) + 5, 2**63 - 1])
def test_slots_on_a_device_are_checked_as_they_were_given(
    monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    """In 32 bits the first two are slot 5."""
    monkeypatch.setattr(devicejob, "to_host", lambda tensor, stream: tensor)
    monkeypatch.setattr(devicejob, "has_passed", lambda event: True)
    moved: list[torch.Tensor] = []
    monkeypatch.setattr(TorchGatherJob, "_index_dtype", torch.int32)
    monkeypatch.setattr(TorchGatherJob, "_move", lambda job, slots, *arguments: moved.append(slots))
    for slot in (5, wrong):
        planes = [torch.zeros(8, dtype=torch.uint8)]
        job = TorchGatherJob(KVPool.mla([random_u8(8, 8)]), torch.arange(1), planes, checksum=False)
        job._given_slots, job._checked_slots = SlotsElsewhere(torch.tensor([slot])), None
        job.stream = FakeStream()
        if slot == 5:
            assert job.bring_slots() and not moved
            job.step(1)
            assert [(x.dtype, x.tolist()) for x in moved] == [(torch.int32, [5])]
        else:
            with pytest.raises(InvalidRequest, match="the pool has 8"):
                job.bring_slots()
            with pytest.raises(InvalidRequest, match="the pool has 8"):
                job.step(1)
    assert len(moved) == 1


@pytest.mark.parametrize(("limit", "dtype"), [(31, torch.int64), (32, torch.int32)])
def test_slots_that_32_bits_cannot_hold_get_64(
    monkeypatch: pytest.MonkeyPatch, limit: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(devicejob, "INT32_SLOTS_MAX", limit)
    used: list[torch.dtype] = []
    original = gpukernels.launch

    def watched(table, slots, *args, **kwargs):
        used.append(slots.dtype)
        original(table, slots, *args, **kwargs)

    monkeypatch.setattr(gpukernels, "launch", watched)
    pool = KVPool.mla([random_u8(32, 64).to(DEVICE)])
    plane = torch.zeros(3 * 64, dtype=torch.uint8, device=DEVICE)
    gather_gpu(pool, torch.tensor([31, 0, 7]), [plane])
    assert used == [dtype]
    assert torch.equal(plane.view(3, 64), pool.planes[0].rows[torch.tensor([31, 0, 7], device=DEVICE)])


@both_kinds
def test_a_pool_made_in_inference_mode_can_be_written_outside(jobs: Jobs) -> None:
    with torch.inference_mode():
        pool = KVPool.mla([random_u8(32, 64).to(DEVICE)])
    slots, plane = torch.randperm(32)[:20], random_u8(20 * 64)
    finish(jobs.scatter(pool, slots, [on_device(plane, DEVICE)]))
    assert torch.equal(pool.planes[0].rows.cpu()[slots].flatten(), plane)


def test_the_whole_calls_take_the_order_of_the_cpus() -> None:
    host = random_u8(32, 64)
    pool, target = (
        KVPool.mla([on_device(buffer, DEVICE)]) for buffer in (host, torch.zeros(32, 64, dtype=torch.uint8))
    )
    slots = torch.randperm(32)[:20]
    plane = torch.zeros(20 * 64, dtype=torch.uint8, device=DEVICE)
    sums = gather_gpu(pool, slots, [plane])
    assert scatter_gpu([plane], target, slots) == sums
    assert torch.equal(target.planes[0].rows.cpu()[slots], host[slots])
    host_plane = torch.zeros(20 * 64, dtype=torch.uint8)
    assert cpu_copy.gather(KVPool.mla([host]), slots, [host_plane]) == sums


# --- the probe ---------------------------------------------------------------------------------------


def test_a_device_that_copies_as_the_cpu_does_passes_the_probe() -> None:
    gpucopy.probe(DEVICE)


@pytest.mark.parametrize("fault", ["sums", "bytes"])
def test_a_device_that_copies_otherwise_fails_the_probe(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    original = gpukernels.launch

    def wrong(table, slots, sums, start, stop, how, **kwargs):
        original(table, slots, sums, start, stop if fault == "sums" else stop - 1, how, **kwargs)
        if fault == "sums":
            sums[0, 1] += 1

    monkeypatch.setattr(gpukernels, "launch", wrong)
    with pytest.raises(InvariantBroken, match="differ"):
        gpucopy.probe(DEVICE)


def test_without_triton_a_job_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    import snapd.kv

    monkeypatch.delattr(snapd.kv, "gpukernels")
    monkeypatch.setitem(sys.modules, "snapd.kv.gpukernels", None)
    gpucopy._kernels.cache_clear()
    pool = KVPool.mla([torch.zeros(32, 64, dtype=torch.uint8, device=DEVICE)])
    try:
        with pytest.raises(ExtraMissing, match="pip install triton"):
            GpuGatherJob(pool, torch.arange(1), [torch.zeros(64, dtype=torch.uint8, device=DEVICE)])
    finally:
        gpucopy._kernels.cache_clear()
