"""What needs a real GPU: streams, events, memory that outlives its tensors, offsets above 2^31."""

import os
from collections.abc import Sequence

import pytest
import torch

from snapd.errors import InvalidRequest
from snapd.kv import copy as cpu_copy
from snapd.kv import devicescatter
from snapd.kv.checksum import plane_checksum
from snapd.kv.devicecopy import choose_copy
from snapd.kv.devicejob import finish
from snapd.kv.devicescatter import DeviceScatter, PrivateMemory
from snapd.kv.gpucopy import GpuGatherJob, GpuScatterJob, gather_gpu, scatter_gpu, warm_up
from snapd.kv.pool import KVPool
from snapd.kv.torchcopy import TorchGatherJob, TorchScatterJob
from tests.kv.device_cases import POISON, WIDTHS, Jobs, Stores, check_both_ways, slots_of

if not torch.cuda.is_available():
    pytest.skip("there is no GPU that torch can use", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton is told to interpret; this is for the GPU", allow_module_level=True)

DEVICE = torch.device("cuda:0")
# Some tenths of a second: host code of a few ms runs meanwhile.
SLEEP_CYCLES = 1_000_000_000
TRITON = Jobs(GpuGatherJob, GpuScatterJob)
TORCH = Jobs(TorchGatherJob, TorchScatterJob)
both_kinds = pytest.mark.parametrize("jobs", [TRITON, TORCH], ids=["triton", "torch"])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    """Compiling and loading may wait for the device, so they come before what must not."""
    for jobs in (TRITON, TORCH):
        check_both_ways(jobs, DEVICE, Stores([1024, 1024], 64), torch.arange(50))


def filled_pool(value: int, num_slots: int = 4096, device: torch.device = DEVICE) -> KVPool:
    return KVPool.mha(
        *([torch.full((num_slots, 1024), value, dtype=torch.uint8, device=device)] for _ in "kv")
    )


def poisoned_planes(num_tokens: int) -> list[torch.Tensor]:
    return [torch.full((num_tokens * 1024,), POISON, dtype=torch.uint8, device=DEVICE) for _ in "kv"]


def sleep_on(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Keep *stream* busy; return the event at the end of it."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        return stream.record_event()


def all_equal(planes: Sequence[torch.Tensor], value: int) -> bool:
    return all(bool((plane == value).all()) for plane in planes)


@both_kinds
@pytest.mark.parametrize("kind", ["contiguous", "random"])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS.keys())
def test_large_copies_are_those_of_the_cpu(jobs: Jobs, widths: list[int], page: int, kind: str) -> None:
    check_both_ways(jobs, DEVICE, Stores(widths, 24_000, page), slots_of(kind, 24_000, 20_011, page))


@both_kinds
@pytest.mark.parametrize("pad_bytes", [1, 8, 16])
def test_padded_pools_at_odd_addresses(jobs: Jobs, pad_bytes: int) -> None:
    stores = Stores([1024, 132, 7], 6000, pad_bytes=pad_bytes, shift=pad_bytes)
    check_both_ways(jobs, DEVICE, stores, slots_of("random", 6000, 5001), plane_shift=pad_bytes)


@both_kinds
def test_pieces_add_up(jobs: Jobs) -> None:
    slots = slots_of("random", 24_000, 20_011)
    check_both_ways(jobs, DEVICE, Stores([1024, 132, 7], 24_000), slots, piece_bytes=1 << 20)


@pytest.mark.parametrize("width", [1023, 1024])
def test_offsets_above_2_to_the_31_bytes_and_units(width: int) -> None:
    num_tokens = 2**31 // width + 50_000
    buffer = torch.randint(-(1 << 62), 1 << 62, ((num_tokens + 8) * width // 8 + 1,), device=DEVICE)
    buffer = buffer.view(torch.uint8)[: (num_tokens + 8) * width].view(num_tokens + 8, width)
    pool = KVPool.mla([buffer])
    slots = torch.randperm(num_tokens + 8)[:num_tokens]
    plane = torch.full((num_tokens * width,), POISON, dtype=torch.uint8, device=DEVICE)
    sums = gather_gpu(pool, slots, [plane])
    at = slots.to(DEVICE)
    for first in range(0, num_tokens, 500_000):
        part = slice(first, min(first + 500_000, num_tokens))
        assert torch.equal(plane.view(num_tokens, width)[part], buffer[at[part]])
    host_plane = plane.cpu()
    assert sums == (plane_checksum(host_plane),)
    buffer.fill_(POISON)
    assert scatter_gpu([plane], pool, slots) == sums
    for first in range(0, num_tokens, 500_000):
        part = slice(first, min(first + 500_000, num_tokens))
        assert torch.equal(plane.view(num_tokens, width)[part], buffer[at[part]])


# --- order -------------------------------------------------------------------------------------------


@both_kinds
def test_a_gather_waits_for_the_pass_that_writes_the_pages(jobs: Jobs) -> None:
    pool, planes = filled_pool(1), poisoned_planes(3000)
    torch.cuda.synchronize()
    forward = torch.cuda.Stream(DEVICE)
    sleep_on(forward)
    with torch.cuda.stream(forward):
        for place in pool.planes:
            place.rows.fill_(2)
        written = forward.record_event()
    job = jobs.gather(pool, torch.arange(3000), planes, after=[written])
    assert not job.step(job.bytes_total)
    assert not written.query()
    sums = finish(job)
    assert all_equal(planes, 2)
    assert sums == (plane_checksum(planes[0].cpu()),) * 2


def test_without_an_event_a_gather_reads_what_was_there() -> None:
    """What the test above would see if events were not waited for."""
    pool, planes = filled_pool(1), poisoned_planes(3000)
    torch.cuda.synchronize()
    forward = torch.cuda.Stream(DEVICE)
    asleep = sleep_on(forward)
    with torch.cuda.stream(forward):
        pool.planes[0].rows.fill_(2)
    finish(GpuGatherJob(pool, torch.arange(3000), planes, after=()))
    assert not asleep.query()
    assert all_equal(planes, 1)
    torch.cuda.synchronize()


@both_kinds
def test_a_job_comes_after_all_that_the_current_stream_was_given(jobs: Jobs) -> None:
    pool, planes = filled_pool(1), poisoned_planes(3000)
    torch.cuda._sleep(SLEEP_CYCLES)
    for place in pool.planes:
        place.rows.fill_(2)
    finish(jobs.gather(pool, torch.arange(3000), planes))
    assert all_equal(planes, 2)


@both_kinds
def test_another_stream_can_wait_for_the_end(jobs: Jobs) -> None:
    pool, planes = filled_pool(1), poisoned_planes(3000)
    for plane in planes:
        plane.fill_(3)
    side, reader = torch.cuda.Stream(DEVICE), torch.cuda.Stream(DEVICE)
    torch.cuda.synchronize()
    asleep = sleep_on(side)
    job = jobs.scatter(pool, torch.arange(3000), planes, stream=side)
    with pytest.raises(InvalidRequest, match="not launched"):
        _ = job.finished
    assert not job.step(1)
    assert job.stream == side
    with torch.cuda.stream(reader):
        reader.wait_event(job.finished)
        seen = pool.planes[0].rows[:3000].clone()
    assert not asleep.query()
    reader.synchronize()
    assert bool((seen == 3).all())
    assert job.step(1)


@both_kinds
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_step_never_waits_for_the_device(jobs: Jobs, where: str) -> None:
    pool, planes = filled_pool(1), poisoned_planes(3000)
    slots = torch.arange(3000).to(DEVICE if where == "cuda" else "cpu")
    side = torch.cuda.Stream(DEVICE)
    # Pinned memory and this stream's device memory are there after a first job.
    finish(jobs.gather(pool, slots, planes, stream=side))
    torch.cuda.synchronize()
    asleep = sleep_on(side)
    job = jobs.gather(pool, slots, planes, stream=side, piece_bytes=1 << 20)
    for _ in range(100):
        assert not job.step(job.bytes_total)
        assert not job.done
        assert job.bytes_done == 0
    with pytest.raises(InvalidRequest, match="still to be moved"):
        _ = job.checksums
    assert not asleep.query()
    finish(job)
    assert job.bytes_done == job.bytes_total


def test_a_job_that_is_dropped_leaves_its_planes_alone_until_the_device_is_done() -> None:
    """Memory that a queued kernel will write is not handed to anyone else."""
    pool = filled_pool(1)
    torch.cuda.synchronize()
    planes = poisoned_planes(3000)
    addresses = {plane.data_ptr() for plane in planes}
    side = torch.cuda.Stream(DEVICE)
    torch.cuda.synchronize()
    asleep = sleep_on(side)
    job = GpuGatherJob(pool, torch.arange(3000), planes, stream=side)
    job.step(1)
    del job, planes
    others = poisoned_planes(3000)
    assert not asleep.query()
    assert addresses.isdisjoint(other.data_ptr() for other in others)
    torch.cuda.synchronize()
    assert all_equal(others, POISON)


# --- slots on the device -----------------------------------------------------------------------------


@both_kinds
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_slots_on_the_device(jobs: Jobs, dtype: torch.dtype) -> None:
    rows = torch.randint(0, 256, (4096, 1024), dtype=torch.uint8)
    slots = torch.randperm(4096)[:3000]
    host_plane = torch.zeros(3000 * 1024, dtype=torch.uint8)
    sums = cpu_copy.gather(KVPool.mla([rows]), slots, [host_plane])
    plane = torch.zeros(3000 * 1024, dtype=torch.uint8, device=DEVICE)
    pool = KVPool.mla([rows.to(DEVICE)])
    assert finish(jobs.gather(pool, slots.to(DEVICE, dtype), [plane])) == sums
    assert torch.equal(plane.cpu(), host_plane)


@both_kinds
@pytest.mark.parametrize("slots", [[0, 4096], [-1, 0], [3, 3], [2**32 + 5, 0], [5 - 2**32, 0]])
def test_wrong_slots_on_the_device_are_refused_and_nothing_moves(jobs: Jobs, slots: list[int]) -> None:
    pool, planes = filled_pool(1), poisoned_planes(2)
    for kind in (jobs.gather, jobs.scatter):
        job = kind(pool, torch.tensor(slots, device=DEVICE), planes)
        for _ in range(2):
            with pytest.raises(InvalidRequest):
                finish(job)
        assert not job.done
    torch.cuda.synchronize()
    assert all_equal(planes, POISON)
    assert all_equal([place.rows for place in pool.planes], 1)


@both_kinds
def test_slots_that_change_after_they_were_checked_are_not_used(jobs: Jobs) -> None:
    pool, planes = filled_pool(1), poisoned_planes(3000)
    slots = torch.arange(3000, device=DEVICE)
    job = jobs.gather(pool, slots, planes)
    job.step(1)
    job.wait()
    # What the job goes on with, if it is not done, is what it has checked.
    slots.fill_(1 << 40)
    finish(job)
    assert all_equal(planes, 1)


# --- devices -----------------------------------------------------------------------------------------


def test_this_gpu_gets_tritons_copies() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    assert choose_copy(DEVICE).name == "triton"


def test_after_a_warm_up_nothing_is_compiled() -> None:
    from snapd.kv import gpukernels

    stores = Stores([640, 640], 64)
    pool = stores.pool([store.to(DEVICE) for store in stores.random()])
    warm_up(pool)
    compiled = len(gpukernels._move.device_caches[0][0])
    planes = [torch.zeros(50 * 640, dtype=torch.uint8, device=DEVICE) for _ in "kv"]
    sums = gather_gpu(pool, torch.arange(50), planes)
    assert scatter_gpu(planes, pool, torch.arange(50)) == sums
    assert len(gpukernels._move.device_caches[0][0]) == compiled


@pytest.mark.parametrize("private_bytes", [1, 150_000])
def test_after_a_warm_up_nothing_is_compiled_for_a_part_of_a_pool(
    monkeypatch: pytest.MonkeyPatch, private_bytes: int
) -> None:
    """Planes with a cut word are scattered some at a time, and without sums."""
    from snapd.kv import gpukernels

    monkeypatch.setattr(devicescatter, "PRIVATE_BYTES", private_bytes)
    widths = [1024, 1024, 768, 768, 132, 656, 2048]
    stores = Stores(widths, 64)
    pool = stores.pool([store.to(DEVICE) for store in stores.random()])
    warm_up(pool)
    compiled = len(gpukernels._move.device_caches[0][0])
    planes = [torch.zeros(40 * width, dtype=torch.uint8, device=DEVICE) for width in widths]
    side = torch.cuda.Stream(DEVICE)
    for skip_tokens in (1, 2):
        scatter = DeviceScatter(
            GpuScatterJob, pool, planes, torch.arange(40 - skip_tokens), skip_tokens, 40,
            verify=True, stream_of=lambda _: side, after=None, private=PrivateMemory(DEVICE, side),
        )  # fmt: skip
        while not scatter.step(1 << 30):
            pass
        assert scatter.checksums() == ((0, 0),) * len(widths)
    assert len(gpukernels._move.device_caches[0][0]) == compiled


@both_kinds
def test_slots_on_the_device_can_be_brought_before_the_launch(jobs: Jobs) -> None:
    pool, planes = filled_pool(1), poisoned_planes(3000)
    torch.cuda.synchronize()
    job = jobs.gather(pool, torch.arange(3000, device=DEVICE), planes)
    while not job.bring_slots():
        job.wait()
    torch.cuda.synchronize()
    assert not job.is_launched and all_equal(planes, POISON)
    job.step(1)
    assert job.is_launched
    finish(job)
    assert all_equal(planes, 1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
@both_kinds
def test_a_pool_on_a_gpu_that_is_not_the_current_one(jobs: Jobs) -> None:
    assert torch.cuda.current_device() == 0
    other = torch.device("cuda:1")
    check_both_ways(jobs, other, Stores([1024, 132], 6000), slots_of("random", 6000, 5001))
    assert torch.cuda.current_device() == 0
    pool = filled_pool(1, device=other)
    with pytest.raises(InvalidRequest, match="plane 0 is on cuda:0"):
        jobs.gather(pool, torch.arange(2), poisoned_planes(2))
    planes = [plane.to(other) for plane in poisoned_planes(2)]
    with pytest.raises(InvalidRequest, match="the stream is on"):
        jobs.gather(pool, torch.arange(2), planes, stream=torch.cuda.Stream(DEVICE))
