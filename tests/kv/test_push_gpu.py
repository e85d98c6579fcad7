"""Pushes of pools on a GPU, over copies that go on by themselves only when the test says so, and writers with
faults. The real ones are in tests/gpu."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from fake_control import Clock, FakeControl, layout_of, pools_of
from test_push_staged import Stage, finish, step

from snapd.calls import Grant
from snapd.core.slab import Extent
from snapd.errors import ConfigError, ConnectionLost, InvalidRequest, Reason, TransportError
from snapd.kv import devicemapped as devicemapped_module
from snapd.kv import devicepush
from snapd.kv import flights as flights_module
from snapd.kv import stagedjob as stagedjob_module
from snapd.kv.control import Attempts
from snapd.kv.copy import GatherJob, gather
from snapd.kv.devicecopy import CopyJobs
from snapd.kv.devicemapped import DeviceMappedJob
from snapd.kv.devicestaged import JobGather, TritonGather
from snapd.kv.devicestaging import DeviceRing
from snapd.kv.flights import Flights
from snapd.kv.pool import KVPool
from snapd.kv.push import Pusher, PushSettings
from snapd.kv.staged import plan_gather
from snapd.units import KIB

PIECE_BYTES = 4 * KIB
TOKENS = range(100)


class FakeGpu:
    """Copies that were launched wait here; ``run`` has them done, in order."""

    def __init__(self) -> None:
        self.launched: list[AsyncGather] = []
        self.made: list[AsyncGather] = []
        self.is_busy = False
        self.fail_next: BaseException | None = None
        self.options: tuple[str, ...] = ()  # What jobs are made with, besides.
        self.jobs = CopyJobs("fake", self.make, self.make, is_async=True)

    def make(
        self, pool: KVPool, slots: torch.Tensor, planes: list[torch.Tensor], **options: Any
    ) -> "AsyncGather":
        assert tuple(options) == self.options
        job = AsyncGather(self, pool, slots, planes)
        self.made.append(job)
        return job

    def run(self, count: int = 1_000) -> None:
        for job in self.launched[:count]:
            job.finish()
        del self.launched[:count]


class AsyncGather:
    """A ``DeviceJob`` as far as a push knows it. Once launched it writes when the GPU comes to it."""

    def __init__(self, gpu: FakeGpu, pool: KVPool, slots: torch.Tensor, planes: list[torch.Tensor]) -> None:
        self._gpu = gpu
        self._real = GatherJob(pool, slots, planes)
        self._is_launched = False
        self.planes = planes

    @property
    def bytes_total(self) -> int:
        return self._real.bytes_total

    @property
    def bytes_done(self) -> int:
        return self._real.bytes_done

    @property
    def done(self) -> bool:
        return self._real.done

    @property
    def checksums(self) -> Any:
        return self._real.checksums

    def step(self, max_bytes: int) -> bool:
        if not self._is_launched:
            self._is_launched = True
            if self._gpu.fail_next is not None:
                raise self._gpu.fail_next
            self._gpu.launched.append(self)
            if not self._gpu.is_busy:
                self._gpu.run()
        return self.done

    def finish(self) -> None:
        while not self._real.step(self._real.bytes_total):
            pass


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(stagedjob_module.time, "sleep", lambda _: None)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """The pools' device has this fake's copies."""
    fake = FakeGpu()
    monkeypatch.setattr(devicepush, "choose_copy", lambda device: fake.jobs)
    return fake


class GpuStage(Stage):
    """A ``Stage`` whose ring is on the fake GPU."""

    def __init__(self, *arguments: Any, buffers: int = 4, in_flight_pieces: int = 2, **options: Any) -> None:
        self._gpu_settings = PushSettings(
            piece_bytes=PIECE_BYTES,
            gpu_piece_bytes=PIECE_BYTES,
            ring_bytes=buffers * PIECE_BYTES,
            gpu_in_flight_bytes_max=in_flight_pieces * PIECE_BYTES,
        )
        super().__init__(*arguments, buffers=buffers, in_flight_pieces=in_flight_pieces, **options)

    def make(self, control: Any = None) -> Pusher:
        self.settings = self._gpu_settings
        return super().make(control)

    @property
    def ring(self) -> DeviceRing:
        return self.pusher._gpus.ring_for(0)

    def check_idle(self) -> None:
        super().check_idle()
        assert self.ring.lent == 0, "staging memory leaked"


# --- through the ring ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("is_scattered", [False, True])
@pytest.mark.parametrize("polls", [1, 3])
def test_the_arena_holds_the_slots_bytes_and_the_daemon_their_sums(
    gpu: FakeGpu, num_ranks: int, is_scattered: bool, polls: int
) -> None:
    stage = GpuStage(num_ranks=num_ranks, is_scattered=is_scattered, polls=polls)
    job = finish(stage.start())
    assert job.result.ok and job.result.drained, job.result
    assert job.bytes_done == job.result.bytes
    stage.check_arrived(job)
    stage.check_idle()
    assert stage.pusher.staging_bytes == 4 * PIECE_BYTES, "one ring for all ranks of a GPU"


@pytest.mark.parametrize("strides", [(7, 13, 3), (16, 24), (1152, 1152)])
def test_planes_of_any_width_arrive_with_their_sums(gpu: FakeGpu, strides: tuple[int, ...]) -> None:
    stage = GpuStage(strides)
    job = finish(stage.start())
    assert job.result.ok, job.result
    stage.check_arrived(job)


def test_a_piece_is_written_only_when_its_gather_is_over(gpu: FakeGpu) -> None:
    gpu.is_busy = True
    stage = GpuStage()
    job = stage.start()
    step(job, 20)
    assert stage.writer.submitted == [] and job.bytes_done == 0
    assert len(gpu.launched) >= 4, "gathers go into every buffer that is free"
    assert stage.ring.lent == 4
    done = gpu.launched[0]
    gpu.run(1)
    while len(gpu.launched) > 0 and not stage.writer.submitted:
        step(job, 1)
        if not stage.writer.submitted:
            gpu.run(1)
    assert len(stage.writer.submitted) == 1 and done.done
    gpu.is_busy = False
    gpu.run()
    assert finish(job).result.ok
    stage.check_arrived(job)
    stage.check_idle()


def test_the_next_gather_is_launched_while_a_piece_is_written(gpu: FakeGpu) -> None:
    stage = GpuStage(buffers=2, in_flight_pieces=2)
    stage.writer.plan("stuck")
    job = stage.start()
    step(job, 5)
    assert len(stage.writer.submitted) >= 2
    assert stage.pusher.in_flight_bytes > 0
    stage.writer.unstick()
    assert finish(job).result.ok
    stage.check_arrived(job)


def test_a_buffer_is_gathered_into_again_only_when_its_write_is_final(gpu: FakeGpu) -> None:
    stage = GpuStage(buffers=2)
    stage.writer.plan("stuck", "stuck")
    job = stage.start()
    step(job, 20)
    held = [plane.data_ptr() for made in gpu.made for plane in made.planes]
    assert stage.ring.lent == 2
    step(job, 20)
    assert [plane.data_ptr() for made in gpu.made for plane in made.planes] == held
    stage.writer.unstick()
    assert finish(job).result.ok
    stage.check_arrived(job)


def test_a_step_launches_what_it_is_told_to_and_one_piece_at_least(gpu: FakeGpu) -> None:
    gpu.is_busy = True
    stage = GpuStage()
    job = stage.start()
    assert not job.step(1)
    assert stage.ring.lent == 1
    assert not job.step(1)
    assert stage.ring.lent == 2
    assert not job.step(2 * PIECE_BYTES + 1)
    assert stage.ring.lent == 4
    job.cancel()


def test_a_write_that_failed_is_written_again(gpu: FakeGpu) -> None:
    stage = GpuStage()
    stage.writer.plan("lands", "fails", "half")
    job = finish(stage.start())
    assert job.result.ok and job.result.retried_pieces == 2 and not job.result.drained
    stage.check_arrived(job)
    stage.check_idle()


def test_a_cancelled_push_keeps_the_buffers_that_the_gpu_still_writes_to(gpu: FakeGpu) -> None:
    gpu.is_busy = True
    stage = GpuStage()
    job = stage.start()
    step(job, 10)
    assert stage.ring.lent == 4
    result = job.cancel(Reason.SESSION_NOT_RESIDENT)
    assert result.drained, "nothing was written to the arena"
    assert stage.ring.lent == 4
    stage.pusher.poll()
    assert stage.ring.lent == 4
    gpu.run()
    stage.pusher.poll()
    stage.check_idle()
    gpu.is_busy = False
    assert stage.push("next").ok


def test_buffers_of_a_cancelled_push_come_back_for_another(gpu: FakeGpu) -> None:
    gpu.is_busy = True
    stage = GpuStage()
    first, second = stage.start("first"), stage.start("second")
    step(first, 10)
    first.cancel()
    step(second, 5)
    assert second.bytes_done == 0
    gpu.is_busy = False
    gpu.run()
    assert finish(second).result.ok
    stage.check_arrived(second)
    stage.check_idle()


def test_a_closed_pusher_waits_for_what_the_gpu_does(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights_module.time, "sleep", lambda _: gpu.run(1))
    gpu.is_busy = True
    stage = GpuStage()
    job = stage.start()
    step(job, 10)
    job.cancel()
    stage.pusher.close()
    assert gpu.launched == []
    assert stage.pusher.staging_bytes == 0


def test_a_launch_that_fails_ends_the_push_and_leaves_nothing(gpu: FakeGpu) -> None:
    stage = GpuStage()
    job = stage.start()
    gpu.fail_next = RuntimeError("the GPU is lost")
    with pytest.raises(RuntimeError, match="lost"):
        finish(job)
    assert job.result.reason is Reason.TRANSFER_FAILED
    assert stage.control.about("failed") == [("failed", 1, Reason.TRANSFER_FAILED, True)]
    stage.check_idle()


def test_slots_that_change_after_the_start_are_not_used(gpu: FakeGpu) -> None:
    stage = GpuStage()
    slots = stage.slots[:100].clone()
    job = stage.pusher.start("s", TOKENS, slots)
    slots.fill_(1 << 40)
    assert finish(job).result.ok
    stage.check_arrived(job)


def test_the_ring_is_made_known_to_a_writer_as_one(gpu: FakeGpu) -> None:
    stage = GpuStage(num_ranks=2)
    assert stage.push().ok and stage.push().ok
    first = stage.ring.buffers[0]
    for rank in (0, 1):
        assert stage.fleet.of(rank).sources == [(first.address, 4 * PIECE_BYTES)]


def test_a_wait_looks_for_the_gpu_and_sleeps_when_nothing_comes(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(stagedjob_module.time, "sleep", slept.append)
    gpu.is_busy = True
    stage = GpuStage()
    job = stage.start()
    step(job, 10)
    for _ in range(stagedjob_module.BUSY_WAITS_MAX):
        job.wait()
        step(job, 1)
    assert set(slept) == {stagedjob_module.POLL_S}
    slept.clear()
    job.wait()
    assert slept == [stagedjob_module.WAIT_S]
    gpu.run(2)
    step(job, 1)
    slept.clear()
    step(job, 1)
    gpu.run()
    job.wait()
    assert slept == [], "something came, so it looked again"
    job.cancel()


def test_without_a_control_connection_the_last_piece_is_kept_for_the_commit(gpu: FakeGpu) -> None:
    from test_push_staged import NotifyStage

    class Both(NotifyStage, GpuStage):
        pass

    stage = Both()
    job = finish(stage.start_granted())
    assert job.result.ok, job.result
    assert len(stage.notifying[0].texts) == 1
    stage.check_idle()


# --- what is refused -----------------------------------------------------------------------------------


def test_a_ring_on_a_gpu_has_room_for_two_pieces(gpu: FakeGpu) -> None:
    with pytest.raises(InvalidRequest, match="no room for 2 pieces"):
        Pusher(
            FakeControl(),
            pools_of((8,), 8),
            settings=PushSettings(gpu_piece_bytes=8 * KIB, ring_bytes=12 * KIB, piece_bytes=4 * KIB),
        )


def test_a_pusher_that_is_connected_has_its_staging_memory_before_the_first_push(gpu: FakeGpu) -> None:
    stage = GpuStage(buffers=3)
    assert stage.pusher.staging_bytes == 0
    assert stage.pusher.connect().epoch == stage.control.epoch
    assert stage.pusher.staging_bytes == stage.settings.ring_bytes
    assert stage.control.about("prepare") == []


def test_pools_of_both_kinds_need_a_pusher_each(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = iter([FakeGpu().jobs, CopyJobs("cpu", GatherJob, GatherJob, is_async=False)])
    monkeypatch.setattr(devicepush, "choose_copy", lambda device: next(kinds))
    with pytest.raises(InvalidRequest, match="one Pusher for each"):
        Pusher(FakeControl(), pools_of((8,), 8, num_ranks=2))


def test_events_are_for_pools_on_a_gpu() -> None:
    stage = Stage()
    event: Any = object()
    with pytest.raises(InvalidRequest, match="no event"):
        stage.pusher.start("s", TOKENS, stage.slots[:100], after=[event])
    with pytest.raises(InvalidRequest, match="no event"):
        stage.pusher.push("s", TOKENS, stage.slots[:100], after=[event])
    assert stage.control.said == []


CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


@pytest.mark.parametrize(
    ("pool_device", "arena_device", "protocol", "words"),
    [
        (CPU, "cuda:1", "tcp", 'device = "cpu"'),
        (CUDA, "cpu", "tcp", 'device = "cuda:N"'),
        (CUDA, "cpu", "", "nvlink_intra"),
        (CPU, "cpu", "nvlink_intra", "tcp"),
        (CPU, "cpu", "tcp", None),
        (CPU, "cpu", "", None),
        (CUDA, "cuda:3", "nvlink_intra", None),
    ],
)
def test_bytes_go_from_host_to_host_and_from_gpu_to_gpu(
    pool_device: torch.device, arena_device: str, protocol: str, words: str | None
) -> None:
    if words is None:
        devicepush._check_place(5, pool_device, arena_device, protocol)
        return
    with pytest.raises(ConfigError, match=words) as caught:
        devicepush._check_place(5, pool_device, arena_device, protocol)
    assert str(pool_device) in str(caught.value) and arena_device in str(caught.value)
    assert "rank 5" in str(caught.value)


def test_a_push_to_memory_of_the_other_kind_is_refused_before_a_slab_is_asked_for() -> None:
    stage = Stage()
    hello = stage.control.hello()
    arenas = tuple(msgspec.structs.replace(arena, device="cuda:0") for arena in hello.arenas)
    stage.control.hello = lambda: msgspec.structs.replace(hello, arenas=arenas)  # type: ignore[method-assign]
    result = stage.push()
    assert (result.ok, result.reason) == (False, Reason.TRANSFER_FAILED)
    assert "cuda:0" in result.detail
    assert stage.control.said == []


def test_a_mooncake_that_knows_no_gpu_does_not_read_from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from snapd.kv.writers import check_gpu_protocol
    from snapd.transport import mooncake_package

    module = SimpleNamespace(SUPPORT_CUDA=False)
    monkeypatch.setattr(mooncake_package, "load_engine_module", lambda: module)
    check_gpu_protocol("nvlink_intra")
    for protocol in ("tcp", "rdma"):
        with pytest.raises(ConfigError, match="nvlink_intra"):
            check_gpu_protocol(protocol)
    module.SUPPORT_CUDA = True
    check_gpu_protocol("tcp")


# --- the ring ------------------------------------------------------------------------------------------


def test_a_ring_lends_each_buffer_once_and_lets_go_only_of_what_nobody_has() -> None:
    ring = DeviceRing(CPU, 3 * PIECE_BYTES, PIECE_BYTES)
    assert (ring.allocated_bytes, ring.lent, ring.buffers) == (0, 0, ())
    taken = [ring.take() for _ in range(4)]
    first, second, third, none = taken
    assert none is None and first and second and third
    assert ring.lent == 3
    assert {buffer.region for buffer in ring.buffers} == {(first.address, 3 * PIECE_BYTES)}
    assert second.address == first.address + PIECE_BYTES
    ring.give_back(second)
    with pytest.raises(InvalidRequest, match="not lent"):
        ring.give_back(second)
    assert ring.take() is second
    ring.trim()
    assert ring.allocated_bytes == 3 * PIECE_BYTES
    for buffer in (first, second, third):
        ring.give_back(buffer)
    ring.trim()
    assert ring.allocated_bytes == 0


def test_no_staging_memory_on_a_gpu_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    from snapd import cuda
    from snapd.kv.devicestaging import allocate_gpu

    def refuse() -> Any:
        raise cuda.CudaError("no NVIDIA driver")

    monkeypatch.setattr(cuda, "driver", refuse)
    with pytest.raises(TransportError, match="ring_bytes"):
        allocate_gpu(CUDA, 1 << 20)


# --- the two gathers -----------------------------------------------------------------------------------


def stage_shard(
    name: str, strides: tuple[int, ...], page: int, num_tokens: int, is_scattered: bool
) -> tuple[Any, list[bytes], Any]:
    """Gather a shard in pieces; return sums, what each plane got, and the same from the CPU's copy."""
    control = FakeControl(is_scattered=is_scattered)
    pools = pools_of(strides, 256, page=page)
    pool = pools[0]
    control.layout = layout_of(pools)
    slots = (torch.randperm(256 // page)[:, None] * page + torch.arange(page)).flatten()[:num_tokens]
    grant = control.grant(num_tokens).ranks[0]
    ring = DeviceRing(CPU, 3 * PIECE_BYTES, PIECE_BYTES)
    ring.allocate()
    arguments = (pool, slots, list(grant.k_layer_offsets), grant.extents, PIECE_BYTES)
    source: Any
    if name == "triton":
        source = TritonGather(*arguments, stream=None, after=())
    else:
        source = JobGather(FakeGpu().jobs, *arguments, stream=None, after=())
    arena = control.arenas[0].memory
    while source.has_more:
        buffer = ring.take()
        assert buffer is not None
        buffer.memory.fill_(0xA5)
        gathering = source.begin(buffer)
        assert gathering.is_over
        staged = source.collect(gathering)
        arena[staged.offset_bytes : staged.offset_bytes + staged.size_bytes] = bytes(
            buffer.memory[: staged.size_bytes].numpy().tobytes()
        )
        ring.give_back(buffer)
    planes = [torch.empty(num_tokens * stride, dtype=torch.uint8) for stride in strides]
    sums = gather(pool, slots, planes)
    got = [
        bytes(arena[offset : offset + plane.numel()])
        for offset, plane in zip(grant.k_layer_offsets, planes, strict=True)
    ]
    for offset, plane in zip(grant.k_layer_offsets, planes, strict=True):
        padding = arena[offset + plane.numel() : offset + plane.numel() + -plane.numel() % 256]
        assert set(padding) <= {0}, "padding shows what the buffer held before"
    assert got == [plane.numpy().tobytes() for plane in planes]
    assert source.done
    return source.checksums, got, sums


@pytest.mark.parametrize("name", ["jobs", "triton"])
@pytest.mark.parametrize(
    ("strides", "page", "num_tokens", "is_scattered"),
    [
        ((64, 48, 256), 1, 100, False),
        ((64, 48, 256), 16, 99, True),
        ((7, 13, 3), 1, 77, False),
        ((1152, 1152, 132), 1, 37, False),
        ((16,) * 12, 1, 33, False),
    ],
)
def test_the_pieces_of_a_shard_are_the_planes_and_their_sums(
    name: str, strides: tuple[int, ...], page: int, num_tokens: int, is_scattered: bool
) -> None:
    if name == "triton":
        kernels = pytest.importorskip("snapd.kv.gpukernels", reason="Triton is not installed")
        if not kernels.is_interpreted():
            pytest.skip("Triton runs on the GPU here: tests/gpu has this")
    sums, _, wanted = stage_shard(name, strides, page, num_tokens, is_scattered)
    assert sums == wanted


def test_one_launch_moves_a_piece_however_many_planes_are_in_it() -> None:
    kernels = pytest.importorskip("snapd.kv.gpukernels", reason="Triton is not installed")
    assert kernels is not None
    pool = pools_of((64,) * 16, 64)[0]
    offsets = [index * 64 * 48 for index in range(16)]
    ring = DeviceRing(CPU, 64 * KIB, 32 * KIB)
    ring.allocate()
    source = TritonGather(
        pool, torch.arange(48), offsets, [Extent(0, 64 * KIB)], 32 * KIB, stream=None, after=()
    )
    _, plans = plan_gather(pool, 48, offsets, [Extent(0, 64 * KIB)], 32 * KIB)
    assert [len(plan.sections) for plan in plans] == [11, 6]
    assert [len(launches) for launches in source._launches] == [1, 1], "a part of a plane, and whole ones"
    assert [launches[0].span_tokens for launches in source._launches] == [48, 48]


def test_a_gather_that_does_not_fit_is_refused_and_nothing_moves() -> None:
    pool = pools_of((64,), 256)[0]
    gpu = FakeGpu()
    source = JobGather(
        gpu.jobs, pool, torch.arange(100), [0], [Extent(0, 64 * KIB)], 2 * PIECE_BYTES, stream=None, after=()
    )
    small = DeviceRing(CPU, 2 * PIECE_BYTES, PIECE_BYTES).take()
    assert small is not None
    with pytest.raises(InvalidRequest, match="a buffer of"):
        source.begin(small)
    with pytest.raises(InvalidRequest, match="still to be moved"):
        _ = source.checksums
    large = DeviceRing(CPU, 4 * PIECE_BYTES, 2 * PIECE_BYTES).take()
    assert large is not None
    source.collect(source.begin(large))
    with pytest.raises(InvalidRequest, match="every piece"):
        source.begin(large)


# --- straight into the arena ---------------------------------------------------------------------------


class FakeMapping:
    """A mapped arena, as far as it can be gone."""

    def __init__(self) -> None:
        self.is_gone = False

    def check_alive(self) -> None:
        if self.is_gone:
            raise ConnectionLost("the daemon is gone")


class FakeSlabs:
    def __init__(self) -> None:
        self.planes_of: dict[int, list[torch.Tensor]] = {}
        self.mapping = FakeMapping()

    def arena(self, rank: int, epoch: str) -> FakeMapping:
        return self.mapping

    def planes(self, grant: Any, num_tokens: int, epoch: str) -> list[torch.Tensor]:
        strides = (*grant.stride_k_bytes, *grant.stride_v_bytes)
        self.planes_of[grant.rank] = [
            torch.zeros(stride * num_tokens, dtype=torch.uint8) for stride in strides
        ]
        return self.planes_of[grant.rank]


class MappedStage:
    """A job that gathers straight into planes, with everything around it."""

    def __init__(self, gpu: FakeGpu, num_ranks: int = 1) -> None:
        self.control: Any = FakeControl(num_ranks=num_ranks)
        self.pools = pools_of((64, 48), 256, num_ranks)
        self.control.layout = layout_of(self.pools)
        self.slabs: Any = FakeSlabs()
        self.clock = Clock()
        self.flights = Flights(self.control, 1, self.clock)
        self.slots = torch.randperm(256)[:100]
        self.grant: Grant = self.control.grant(100)
        self.job = DeviceMappedJob(
            self.grant, self.control.layout, self.control, Attempts(self.control), 0.0,
            slabs=self.slabs, pools=self.pools, jobs=dict.fromkeys(self.pools, gpu.jobs), slots=self.slots,
            after=(), stream_for=lambda device: None, flights=self.flights,
        )  # fmt: skip

    @property
    def committed(self) -> list[tuple[int, tuple[Any, ...]]]:
        return [(rank, commit.checksums) for (_, rank), commit in self.control.commits.items()]


@pytest.fixture(autouse=True)
def _no_sleep(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(devicemapped_module.time, "sleep", lambda _: None)
    yield


def test_every_rank_is_gathered_into_its_arena_and_committed_with_its_sums(gpu: FakeGpu) -> None:
    stage = MappedStage(gpu, num_ranks=2)
    job = finish(stage.job)
    assert job.result.ok and job.result.drained and job.result.bytes == 2 * 100 * 112 == job.bytes_done
    assert [rank for rank, _ in stage.committed] == [0, 1]
    for rank, sums in stage.committed:
        planes = [
            torch.empty(100 * place.stride_bytes, dtype=torch.uint8) for place in stage.pools[rank].planes
        ]
        assert sums == gather(stage.pools[rank], stage.slots, planes)
        for got, plane in zip(stage.slabs.planes_of[rank], planes, strict=True):
            assert torch.equal(got, plane)


def test_a_rank_is_committed_when_its_gather_is_over_and_not_before(gpu: FakeGpu) -> None:
    gpu.is_busy = True
    stage = MappedStage(gpu, num_ranks=2)
    step(stage.job, 20)
    assert len(gpu.launched) == 2, "all at once"
    assert stage.committed == []
    gpu.run(1)
    stage.job.wait()
    step(stage.job, 1)
    assert [rank for rank, _ in stage.committed] == [0]
    gpu.run()
    assert finish(stage.job).result.ok


def test_a_wait_for_a_gather_ends_when_it_is_over_or_its_time_is(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.is_busy = True
    stage = MappedStage(gpu)
    step(stage.job, 1)
    now_s = 50.0
    naps = 0

    def nap(seconds: float) -> None:
        nonlocal now_s, naps
        now_s, naps = now_s + seconds, naps + 1
        assert naps < 1_000, "it waits for ever"
        if naps == wake_at:
            gpu.run()

    monkeypatch.setattr(devicemapped_module.time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(devicemapped_module.time, "sleep", nap)
    wake_at = 0
    stage.job.wait()
    assert 0 < now_s - 50.0 <= devicemapped_module.WAIT_S + 1e-4
    naps, wake_at = 0, 3
    stage.job.wait()
    assert naps == 3
    assert finish(stage.job).result.ok


def test_no_step_waits_for_the_answer_to_a_commit_and_ranks_commit_together(gpu: FakeGpu) -> None:
    stage = MappedStage(gpu, num_ranks=2)
    stage.control.polls_left = 5
    step(stage.job, 2)
    assert [rank for rank, _ in stage.committed] == [0, 1]
    assert not stage.job.done and stage.job.bytes_done == 2 * 100 * 112
    stage.job.wait()
    assert stage.control.about("waited") == [("waited",)]
    assert finish(stage.job).result.ok


def test_a_commit_whose_answer_says_that_p_has_it_already_is_what_counts(gpu: FakeGpu) -> None:
    stage = MappedStage(gpu)
    stage.control.polls_left = 1
    step(stage.job, 2)
    assert stage.committed
    stage.control.end(stage.grant.slab_handle, Reason.OK)
    assert finish(stage.job).result.ok


def test_a_push_that_is_cancelled_forgets_the_answer(gpu: FakeGpu) -> None:
    stage = MappedStage(gpu)
    stage.control.polls_left = 5
    step(stage.job, 2)
    stage.job.cancel()
    assert stage.control.commitments[-1].is_forgotten


def test_drain_proof_of_a_cancelled_push_comes_after_its_gather(gpu: FakeGpu) -> None:
    gpu.is_busy = True
    stage = MappedStage(gpu, num_ranks=2)
    step(stage.job, 2)
    gpu.run(1)
    step(stage.job, 1)
    result = stage.job.cancel(Reason.SESSION_NOT_RESIDENT)
    assert not result.drained
    assert stage.control.about("failed", "drained") == [
        ("failed", 1, Reason.SESSION_NOT_RESIDENT, False),
        ("drained", 1, 0),
    ]
    stage.flights.poll()
    assert stage.flights.lingering == 1
    gpu.run()
    stage.flights.poll()
    assert stage.control.about("drained") == [("drained", 1, 0), ("drained", 1, 1)]
    assert stage.flights.lingering == 0


def test_a_push_that_is_cancelled_before_its_first_step_is_drained(gpu: FakeGpu) -> None:
    stage = MappedStage(gpu)
    assert stage.job.cancel().drained
    assert gpu.made == []


def test_the_gathers_of_a_closed_pusher_are_waited_for(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights_module.time, "sleep", lambda _: gpu.run(1))
    gpu.is_busy = True
    stage = MappedStage(gpu)
    step(stage.job, 1)
    stage.job.cancel()
    stage.flights.close()
    assert gpu.launched == []
    assert stage.control.about("drained") == [("drained", 1, 0)]


@pytest.mark.parametrize("steps", [0, 2])
def test_memory_of_a_daemon_that_is_gone_is_neither_written_nor_committed(gpu: FakeGpu, steps: int) -> None:
    gpu.is_busy = True
    stage = MappedStage(gpu)
    step(stage.job, steps)
    stage.slabs.mapping.is_gone = True
    gpu.run()
    assert stage.job.step(1)
    assert not stage.job.result.ok and "gone" in stage.job.result.detail
    assert len(gpu.made) == (1 if steps else 0)
    assert stage.committed == []


def test_it_is_the_mapping_of_this_push_that_must_be_alive(gpu: FakeGpu) -> None:
    """Another push may have mapped the arena of the next daemon meanwhile."""
    gpu.is_busy = True
    stage = MappedStage(gpu)
    step(stage.job, 1)
    stage.slabs.mapping.is_gone = True
    stage.slabs.mapping = FakeMapping()
    gpu.run()
    assert stage.job.step(1)
    assert not stage.job.result.ok and stage.committed == []


class FakeEvent:
    """An event of a stream: passed when the test says so."""

    def __init__(self) -> None:
        self.is_passed = False

    def query(self) -> bool:
        return self.is_passed


class FakeStream:
    def __init__(self) -> None:
        self.events: list[FakeEvent] = []
        self.failure: BaseException | None = None

    def record_event(self) -> FakeEvent:
        if self.failure is not None:
            raise self.failure
        self.events.append(FakeEvent())
        return self.events[-1]


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_launch_that_fails_or_is_interrupted_is_over_when_its_stream_is(
    gpu: FakeGpu, kind: type[BaseException]
) -> None:
    """A part of it may have been launched."""
    stage = MappedStage(gpu)
    stream = FakeStream()
    gpu.options = ("stream", "after")
    stage.job._stream_for = lambda device: stream  # type: ignore[assignment,return-value]
    gpu.fail_next = kind("during the launch")
    with pytest.raises(kind):
        stage.job.step(1)
    result = stage.job.cancel()
    assert not result.drained and stage.flights.lingering == 1
    assert stage.control.about("failed")[0][-1] is False
    stage.flights.poll()
    assert stage.control.about("drained") == []
    stream.events[-1].is_passed = True
    stage.flights.poll()
    assert stage.control.about("drained") == [("drained", 1, 0)]


def test_a_launch_that_nobody_can_ask_about_is_never_drained(gpu: FakeGpu) -> None:
    stage = MappedStage(gpu)
    stream = FakeStream()
    stream.failure = RuntimeError("the GPU is lost")
    gpu.options = ("stream", "after")
    stage.job._stream_for = lambda device: stream  # type: ignore[assignment,return-value]
    with pytest.raises(RuntimeError, match="lost"):
        stage.job.step(1)
    assert not stage.job.result.drained
    stage.flights.poll()
    assert stage.control.about("drained") == [] and stage.flights.lingering == 1


def test_a_step_after_an_interrupted_one_launches_the_ranks_that_are_left(gpu: FakeGpu) -> None:
    stage = MappedStage(gpu, num_ranks=2)
    gpu.fail_next = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        stage.job.step(1)
    gpu.fail_next = None
    step(stage.job, 1)
    assert len(gpu.made) == 2
    stage.job.cancel()


def test_an_arena_on_another_gpu_is_not_written_by_a_kernel(gpu: FakeGpu) -> None:
    stage = MappedStage(gpu)
    planes = stage.slabs.planes
    stage.slabs.planes = lambda *arguments: [plane.to("meta") for plane in planes(*arguments)]
    assert stage.job.step(1)
    assert stage.job.result.reason is Reason.INVALID_REQUEST
    assert gpu.made == []
