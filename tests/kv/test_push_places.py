"""What a push finds out before it asks for a slab, and what it makes ready so that no step has to wait."""

import inspect
from typing import Any

import msgspec
import pytest
import torch
from structlog.testing import capture_logs
from test_push_gpu import CPU, PIECE_BYTES, TOKENS, FakeGpu, GpuStage, gpu
from test_push_staged import NotifyStage, Stage, finish, planes_of, pools_of, step

from snapd.core.slab import Extent
from snapd.cudamapping import MappedCudaArena
from snapd.errors import (
    ConfigError,
    ConnectionLost,
    InvalidRequest,
    PeerResting,
    PermissionDenied,
    Reason,
    StaleHandle,
    TransportError,
)
from snapd.kv import devicepush
from snapd.kv.devicepush import GpuSide, check_planes
from snapd.kv.devicestaged import JobGather, TritonGather
from snapd.kv.devicestaging import DeviceRing
from snapd.mapping import MapFailed
from snapd.units import KIB
from snapd.wire import HelloRep, MooncakeAddress

__all__ = ["gpu"]


def hello_with(hello: HelloRep, device: str, protocol: str = "") -> HelloRep:
    arenas = tuple(msgspec.structs.replace(arena, device=device) for arena in hello.arenas)
    address = None
    if protocol:
        address = MooncakeAddress(segment_name="p:1", protocol=protocol, metadata_server="P2PHANDSHAKE")
    return msgspec.structs.replace(hello, arenas=arenas, mooncake=address)


# --- what is made ready --------------------------------------------------------------------------------


def test_the_staging_memory_of_a_gpu_is_registered_when_the_pusher_is_connected(gpu: FakeGpu) -> None:
    stage = GpuStage(num_ranks=2)
    stage.pusher.connect()
    ring = (stage.ring.buffers[0].address, 4 * PIECE_BYTES)
    assert [stage.fleet.of(rank).sources for rank in (0, 1)] == [[ring], [ring]]
    assert stage.push().ok
    assert [stage.fleet.of(rank).sources for rank in (0, 1)] == [[ring], [ring]]


def test_memory_that_cannot_be_registered_is_known_before_a_slab_is_asked_for(gpu: FakeGpu) -> None:
    stage = GpuStage()

    def refuse(address: int, size_bytes: int) -> None:
        raise TransportError("Mooncake cannot register it")

    stage.writer.register_source = refuse  # type: ignore[method-assign]
    result = stage.push()
    assert not result.ok and "cannot register" in result.detail
    assert stage.control.said == []


def test_a_peer_that_rests_is_asked_for_no_slab_by_a_gpu_either(gpu: FakeGpu) -> None:
    stage = GpuStage()
    stage.writer.resting_ms = 250
    with pytest.raises(PeerResting):
        stage.pusher.connect()
    assert stage.push().retry_after_ms == 250
    assert stage.control.said == []


# --- a daemon that is restarted between two questions --------------------------------------------------


@pytest.mark.parametrize("is_fine", [True, False])
def test_a_daemon_that_was_restarted_before_it_granted_is_looked_at_again(is_fine: bool) -> None:
    stage = Stage()
    prepare, hello = stage.control.prepare, stage.control.hello

    def restart_and_prepare(request: Any) -> Any:
        stage.control.epoch = "two"
        if not is_fine:
            stage.control.hello = lambda: hello_with(hello(), "cuda:0")  # type: ignore[method-assign]
        return prepare(request)

    stage.control.prepare = restart_and_prepare  # type: ignore[method-assign]
    result = stage.push()
    assert result.ok == is_fine
    if not is_fine:
        assert "cuda:0" in result.detail
        assert stage.control.about("failed") == [("failed", 1, Reason.TRANSFER_FAILED, True)]
        assert all(not writer.submitted for writer in stage.fleet.made.values())


def test_a_gpus_staging_memory_is_there_for_a_daemon_that_was_restarted_before_it_granted(
    gpu: FakeGpu,
) -> None:
    stage = GpuStage()
    prepare = stage.control.prepare

    def restart_and_prepare(request: Any) -> Any:
        stage.control.epoch = "two"
        stage.ring.trim()
        return prepare(request)

    stage.control.prepare = restart_and_prepare  # type: ignore[method-assign]
    job = finish(stage.start())
    assert job.result.ok
    assert stage.fleet.of(0, "two").sources == [(stage.ring.buffers[0].address, 4 * PIECE_BYTES)]


# --- arenas that are mapped all the same ---------------------------------------------------------------


class OneArena:
    """``Slabs`` whose only arena a GPU uses, or that cannot be mapped."""

    def __init__(self, device: str, error: Exception | None = None) -> None:
        self.made = object.__new__(MappedCudaArena)
        self.made.device = device
        self.error = error
        self.asked = 0

    def arena(self, rank: int, epoch: str) -> Any:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.made


def is_near(gpu: FakeGpu, slabs: Any, *, protocol: str, is_staged: bool = True, may_map: bool = True) -> bool:
    """Return whether bytes of a pool on the fake GPU go straight into the arena; see to the ring if not."""
    pools = pools_of((64, 48), 256, 1)
    side = GpuSide(pools, 4 * PIECE_BYTES, PIECE_BYTES, map_arenas=may_map)
    hello = hello_with(GpuStage().control.hello(), "cpu", protocol)
    side.check(hello, slabs, is_staged=is_staged, is_protocol_known=True)
    assert bool(side.staging_bytes) is not side.is_near
    return side.is_near


@pytest.fixture
def any_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of the host passes for one on a GPU."""
    monkeypatch.setattr(devicepush, "_check_place", lambda *_: None)


def test_over_nvlink_an_arena_that_the_pools_gpu_uses_is_written_to_directly(
    gpu: FakeGpu, any_place: None
) -> None:
    assert is_near(gpu, OneArena("cpu"), protocol="nvlink_intra")
    assert is_near(gpu, OneArena("cpu"), protocol="", is_staged=False)


def test_over_nvlink_an_arena_that_another_gpu_uses_is_written_by_mooncake(
    gpu: FakeGpu, any_place: None
) -> None:
    assert not is_near(gpu, OneArena("cuda:1"), protocol="nvlink_intra")


def test_other_protocols_and_whoever_does_not_want_it_ask_for_no_mapping(
    gpu: FakeGpu, any_place: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devicepush, "check_gpu_protocol", lambda protocol: None)
    for protocol, may_map in (("rdma", True), ("tcp", True), ("nvlink_intra", False)):
        slabs = OneArena("cpu")
        assert not is_near(gpu, slabs, protocol=protocol, may_map=may_map)
        assert slabs.asked == 0
    assert not is_near(gpu, None, protocol="nvlink_intra"), "without a control connection"


@pytest.mark.parametrize(
    "error", [MapFailed("no such GPU here"), PermissionDenied("no"), InvalidRequest("over TCP")]
)
def test_where_mapping_is_refused_mooncake_writes_and_over_shm_it_is_an_error(
    gpu: FakeGpu, any_place: None, error: Exception
) -> None:
    with capture_logs() as logs:
        assert not is_near(gpu, OneArena("cpu", error), protocol="nvlink_intra")
    assert [(log["log_level"], log["error"]) for log in logs] == [("warning", str(error))]
    with pytest.raises(type(error)):
        is_near(gpu, OneArena("cpu", error), protocol="", is_staged=False)


def test_that_an_arena_cannot_be_mapped_is_said_once_a_daemon(gpu: FakeGpu, any_place: None) -> None:
    slabs: Any = OneArena("cpu", MapFailed("no"))
    side = GpuSide(pools_of((64, 48), 256, 1), 4 * PIECE_BYTES, PIECE_BYTES)
    hello = hello_with(GpuStage().control.hello(), "cpu", "nvlink_intra")
    with capture_logs() as logs:
        for epoch in ("one", "one", "two"):
            side.check(
                msgspec.structs.replace(hello, epoch=epoch), slabs, is_staged=True, is_protocol_known=True
            )
    assert len(logs) == 2


def test_a_daemon_that_was_restarted_meanwhile_is_asked_again_and_gets_no_ring(
    gpu: FakeGpu, any_place: None
) -> None:
    with pytest.raises(StaleHandle):
        is_near(gpu, OneArena("cpu", StaleHandle("another epoch")), protocol="nvlink_intra")


def test_a_daemon_that_is_gone_is_not_taken_for_one_that_refuses(gpu: FakeGpu, any_place: None) -> None:
    with pytest.raises(ConnectionLost):
        is_near(gpu, OneArena("cpu", ConnectionLost("gone")), protocol="nvlink_intra")


# --- planes of the host --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "protocol", "is_refused"),
    [("cpu", "tcp", False), ("cpu", "", False), ("cpu", "nvlink_intra", True), ("cuda:0", "", True)],
)
def test_planes_of_the_host_go_to_arenas_of_the_host(device: str, protocol: str, is_refused: bool) -> None:
    hello = hello_with(Stage().control.hello(), device, protocol)
    if not is_refused:
        check_planes([0], hello)
        return
    with pytest.raises(ConfigError, match="use push with a pool on a GPU") as caught:
        check_planes([0], hello)
    assert device in str(caught.value) and protocol in str(caught.value)
    check_planes([5], hello)  # A rank that is not offered is for the daemon to refuse.


def test_planes_that_cannot_go_are_refused_before_a_slab_is_asked_for(gpu: FakeGpu) -> None:
    stage = GpuStage()
    stage.pusher._is_always_staged = False  # As if the writers were those of the daemon's transport.
    hello = hello_with(stage.control.hello(), "cuda:0", "nvlink_intra")
    stage.control.hello = lambda: hello  # type: ignore[method-assign]
    result = stage.pusher.push_planes("s", TOKENS, planes_of(stage))
    assert not result.ok and "push_planes" in result.detail
    assert stage.control.said == []
    assert stage.fleet.made == {}, "nothing of the host was registered"


# --- inference mode, and memory ------------------------------------------------------------------------


@pytest.mark.parametrize("is_made_inside", [True, False])
@pytest.mark.parametrize("is_used_inside", [True, False])
def test_a_ring_may_be_made_in_inference_mode_and_used_outside(
    gpu: FakeGpu, is_made_inside: bool, is_used_inside: bool
) -> None:
    stage = GpuStage((7, 13, 3))  # With holes between the planes.
    with torch.inference_mode(is_made_inside):
        stage.pusher.connect()
    assert not stage.ring.buffers[0].memory.is_inference()
    with torch.inference_mode(is_used_inside):
        job = finish(stage.start())
    assert job.result.ok, job.result
    stage.check_arrived(job)


def test_holes_of_a_buffer_that_was_made_in_inference_mode_are_filled(gpu: FakeGpu) -> None:
    pool = GpuStage((7, 13)).pools[0]
    ring = DeviceRing(CPU, 2 * PIECE_BYTES, PIECE_BYTES)
    buffer = ring.take()
    assert buffer is not None
    with torch.inference_mode():
        buffer.memory = buffer.memory.clone()
        buffer.memory.fill_(0xA5)
    source = JobGather(
        gpu.jobs, pool, torch.arange(9), [0, 256], [Extent(0, KIB)], PIECE_BYTES, stream=None, after=()
    )
    source.begin(buffer)
    assert int(buffer.memory[63:256].sum()) == 0


def test_a_gpu_without_memory_ends_the_push_with_what_to_change(gpu: FakeGpu) -> None:
    stage = GpuStage()
    job = stage.start()
    gpu.fail_next = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
    assert job.step(1), "it is no fault of the engine's"
    assert not job.result.ok and "too little memory" in job.result.detail
    stage.check_idle()


def test_one_table_serves_every_buffer() -> None:
    pytest.importorskip("snapd.kv.gpukernels", reason="Triton is not installed")
    from snapd.kv import gpukernels

    pool = Stage((64,) * 16, num_slots=64).pools[0]
    offsets = [index * 64 * 48 for index in range(16)]
    arguments = (pool, torch.arange(48), offsets, [Extent(0, 64 * KIB)], 32 * KIB)
    source = TritonGather(*arguments, stream=None, after=())
    rows = len(source._rows)
    assert rows == 17, "one a section"
    said = inspect.signature(gpukernels._move.fn).parameters["plane_base"].annotation
    assert str(said) == "int64", "an address and 0 share a kernel"
    if not gpukernels.is_interpreted():
        pytest.skip("Triton runs on the GPU here: tests/gpu has this")
    for count in (2, 16):
        ring = DeviceRing(CPU, count * 32 * KIB, 32 * KIB)
        source = TritonGather(*arguments, stream=None, after=())
        while source.has_more:
            buffer = ring.take()
            assert buffer is not None
            source.collect(source.begin(buffer))
        assert tuple(source._gathers._table.shape) == (rows, gpukernels.TABLE_COLUMNS)


# --- peers that rest, and daemons that nobody speaks to ------------------------------------------------


def test_a_peer_that_rests_now_and_then_does_not_end_a_long_push() -> None:
    stage = Stage(in_flight_pieces=1)
    job = stage.start()
    for _ in range(2 * stage.settings.retries_max):
        submitted = len(stage.writer.submitted)
        while len(stage.writer.submitted) == submitted:
            step(job, 1)
        stage.writer.resting_ms = 250
        step(job, 5)
        stage.writer.resting_ms = 0
        stage.clock.now_s += 0.25
    assert finish(job).result.ok
    stage.check_arrived(job)


def test_a_push_without_a_control_connection_ends_when_it_is_told_of_another_life() -> None:
    stage = NotifyStage()
    job: Any = stage.start_granted()
    step(job, 2)
    stage.control.epoch = "two"
    stage.pusher.control.renew(stage.control.hello())  # type: ignore[attr-defined]
    assert job.step(1)
    assert job.result.reason is Reason.STALE_HANDLE and "restarted" in job.result.detail
    with pytest.raises(InvalidRequest):
        stage.pusher.prepare("s", TOKENS)
    assert finish(stage.start_granted()).result.ok
