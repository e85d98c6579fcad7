"""Staging memory of pushers that were closed or forgotten with something under way."""

import gc
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from test_push_gpu import FakeGpu, GpuStage, gpu
from test_push_staged import PIECE_BYTES, Stage, finish, step

from snapd.errors import Reason, TransportError
from snapd.kv import devicestaging, staging
from snapd.kv import flights as flights_module
from snapd.kv.keeper import KEEPER, Keeper

__all__ = ["gpu"]

PATIENCE_S = 20.0
real_sleep = time.sleep


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s, "it does not come"
        real_sleep(0.001)


def lent_of(stage: Stage) -> set[tuple[int, int]]:
    """Return which buffers are lent now; the stage's pusher is the only one that lends."""
    del stage
    return {*staging._lent, *devicestaging._lent}


@pytest.fixture(autouse=True)
def _no_other_pusher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_lent", {})
    monkeypatch.setattr(devicestaging, "_lent", {})


def forget(stage: Stage) -> None:
    """Let go of the pusher."""
    gone = weakref.ref(stage.pusher)
    del stage.pusher
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("is_forgotten", [False, True], ids=["kept", "forgotten"])
def test_a_closed_pusher_gets_its_buffers_back_when_their_writes_are_final(is_forgotten: bool) -> None:
    stage = Stage()
    stage.writer.plan("stuck", "stuck")
    job = stage.start()
    step(job, 5)
    job.cancel()
    ring, writer = stage.pusher._ring, stage.writer
    stage.pusher.close()
    assert ring.lent == 2 and ring.allocated_bytes == 2 * PIECE_BYTES
    if is_forgotten:
        del job
        forget(stage)
    writer.unstick()
    wait_for(lambda: ring.lent == 0)
    wait_for(lambda: ring.allocated_bytes == 0)
    assert lent_of(stage) == set()


@pytest.mark.parametrize("is_ended", [True, False], ids=["ended", "under way"])
@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "open"])
def test_a_forgotten_pusher_leaves_nothing_lent(is_ended: bool, is_closed: bool) -> None:
    stage = Stage()
    stage.writer.plan("stuck", "stuck", "stuck", "stuck")
    job = stage.start()
    step(job, 7)
    if is_ended:
        job.cancel()
    if is_closed:
        stage.pusher.close()
    writer = stage.writer if not is_closed else stage.fleet.of(0)
    assert len(lent_of(stage)) >= 4
    del job
    forget(stage)
    wait_for(lambda: writer._closed)
    assert len(lent_of(stage)) >= 4, "they are being read"
    writer.unstick()
    wait_for(lambda: lent_of(stage) == set())


@pytest.mark.parametrize("is_ended", [True, False], ids=["ended", "under way"])
def test_a_gpu_that_still_fills_buffers_keeps_them_and_no_longer(gpu: FakeGpu, is_ended: bool) -> None:
    gpu.is_busy = True
    stage = GpuStage()
    job = stage.start()
    step(job, 6)
    ring = stage.ring
    if is_ended:
        job.cancel()
    del job
    forget(stage)
    gpu.run(1)
    wait_for(lambda: ring.lent <= 3)
    assert ring.allocated_bytes == 4 * PIECE_BYTES
    assert len(lent_of(stage)) == 3
    gpu.run()
    wait_for(lambda: ring.allocated_bytes == 0)
    assert lent_of(stage) == set()


def test_a_pusher_that_only_connected_leaves_nothing_registered(gpu: FakeGpu) -> None:
    """Memory that is mapped anew at a registered address cannot be registered."""
    stage = GpuStage()
    stage.pusher.connect()
    ring, writer = stage.ring, stage.writer
    forget(stage)
    wait_for(lambda: writer._closed and ring.allocated_bytes == 0)


def test_a_gpu_that_nobody_can_ask_keeps_its_buffers(gpu: FakeGpu) -> None:
    gpu.is_busy = True
    stage = GpuStage(buffers=2)
    job = stage.start()
    step(job, 3)
    buffers = stage.ring.buffers
    filler = buffers[0].filler
    assert filler is not None

    class Broken:
        @property
        def is_over(self) -> bool:
            raise RuntimeError("CUDA error")

    buffers[0].filler = Broken()
    assert not stage.ring.reclaim()
    gpu.run()
    assert not stage.ring.reclaim()
    assert stage.ring.lent == 1
    buffers[0].filler = filler
    assert stage.ring.reclaim()
    assert [buffer.filler for buffer in buffers] == [None, None], "what is here keeps nothing"


def test_a_fork_leaves_its_parents_writers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    assert stage.push().ok
    kept: list[Any] = []
    monkeypatch.setattr(KEEPER, "keep", kept.append)
    remains = stage.pusher._remains
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: remains._pid + 1)
        remains.abandon()
        assert kept == []
    remains.abandon()
    assert len(kept) == 1


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_a_job_keeps_its_pusher(request: pytest.FixtureRequest, is_on_gpu: bool) -> None:
    if is_on_gpu:
        request.getfixturevalue("gpu")
    stage = GpuStage() if is_on_gpu else Stage()
    job = stage.start()
    pusher = weakref.ref(stage.pusher)
    del stage
    gc.collect()
    assert pusher() is not None
    assert finish(job).result.ok
    del job
    gc.collect()
    assert pusher() is None


def test_a_close_waits_for_gpus_and_not_for_ever(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.is_busy = True
    stage = GpuStage()
    job = stage.start()
    step(job, 5)
    job.cancel()

    def sleep(seconds: float) -> None:
        stage.clock.now_s += 0.5

    before_s = stage.clock.now_s
    monkeypatch.setattr(flights_module.time, "sleep", sleep)
    stage.pusher.close()
    assert flights_module.CLOSE_WAIT_S <= stage.clock.now_s - before_s <= flights_module.CLOSE_WAIT_S + 1
    assert stage.ring.lent > 0
    gpu.run()
    wait_for(lambda: stage.ring.allocated_bytes == 0)


def test_a_close_waits_for_copies_between_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapd.kv.writers.RankWriter.is_local_copy", True)
    stage = Stage()
    stage.writer.plan("stuck")
    job = stage.start()
    step(job, 3)
    job.cancel()
    monkeypatch.setattr(flights_module.time, "sleep", lambda _: stage.writer.unstick())
    stage.pusher.close()
    assert stage.pusher._ring.lent == 0
    assert stage.control.about("drained") == [("drained", 1, 0)], "it is said as long as that may be"


def test_drain_proof_is_not_given_by_another_thread() -> None:
    stage = Stage()
    stage.writer.plan("stuck")
    job = stage.start()
    step(job, 3)
    job.cancel()
    writer = stage.writer
    stage.pusher.close()
    writer.unstick()
    wait_for(lambda: stage.pusher._ring.lent == 0)
    assert stage.control.about("drained") == []


def test_what_raises_is_asked_again_and_the_others_are_kept_meanwhile() -> None:
    keeper = Keeper()
    keeper.ensure()
    keeper.ensure()
    calls: list[str] = []

    def raises() -> bool:
        calls.append("raises")
        if len(calls) < 3:
            raise RuntimeError("CUDA error")
        return True

    keeper.keep(raises)
    wait_for(lambda: len(calls) == 3)
    keeper.keep(lambda: calls.append("other") or True)  # type: ignore[func-returns-value]
    wait_for(lambda: len(calls) == 4)
    assert calls == ["raises"] * 3 + ["other"]


# --- proof -----------------------------------------------------------------------------------------


def poll_that_raises(error: Exception) -> Any:
    def poll(ticket: int) -> Any:
        raise error

    return poll


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), TransportError("no ticket")])
def test_writes_that_nobody_can_ask_about_are_no_drain_proof(gpu: FakeGpu, error: Exception) -> None:
    stage = GpuStage(buffers=2)
    stage.writer.plan("stuck", "stuck")
    job = stage.start()
    step(job, 5)
    stage.writer.poll = poll_that_raises(error)  # type: ignore[method-assign]
    result = job.cancel()
    assert not result.drained
    assert stage.control.about("failed") == [("failed", 1, Reason.TRANSFER_FAILED, False)]
    assert job.done and job.step(1)


def test_an_end_that_goes_wrong_is_an_end_without_drain_proof(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = GpuStage(buffers=2, num_ranks=2)
    stage.writer_of(0).plan("stuck", "stuck")
    job: Any = stage.start()
    step(job, 5)
    flying = list(job._shards[0].flying)
    assert flying

    def stop(*arguments: Any, **options: Any) -> bool:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(stage.pusher._flights, "stop", stop)
    with pytest.raises(RuntimeError, match="CUDA"):
        job.cancel()
    assert job.done and not job.result.drained
    assert stage.control.about("failed", "drained") == [("failed", 1, Reason.TRANSFER_FAILED, False)]
    assert job._shards[0].flying == flying, "what was not stopped is not forgotten"
    assert job.step(1)


def test_a_gather_that_nobody_can_ask_about_ends_the_push_and_keeps_its_buffer(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.is_busy = True
    stage = GpuStage()
    job: Any = stage.start()
    step(job, 3)
    lent = stage.ring.lent
    with monkeypatch.context() as patch:

        def broken(self: object) -> bool:
            raise RuntimeError("CUDA error")

        patch.setattr("test_push_gpu.AsyncGather.done", property(broken))
        with pytest.raises(RuntimeError, match="CUDA"):
            job.step(1)
        assert job.done and stage.ring.lent == lent
        stage.pusher.poll()
        assert stage.ring.lent == lent
    gpu.run()
    stage.pusher.poll()
    assert stage.ring.lent == 0


def test_a_job_that_is_done_keeps_nothing_of_a_gpu(gpu: FakeGpu) -> None:
    stage = GpuStage()
    job: Any = finish(stage.start())
    assert job.bytes_done == job.result.bytes
    assert [shard.source for shard in job._shards] == [None]
