"""Pushes through a ring on a GPU whose pieces a transport's threads ask for, over Mooncake's writer and an
engine that does what the test says."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_control import FakeControl, pools_of
from test_push_gpu import PIECE_BYTES, FakeGpu, GpuStage
from test_push_staged import SHARD_BYTES

from snapd.core.slab import Extent
from snapd.errors import Reason, TransportError
from snapd.kv import devicepush
from snapd.kv import flights as flights_module
from snapd.kv import ringfeed as ringfeed_module
from snapd.kv import stagedjob as stagedjob_module
from snapd.kv.control import NotifyControl
from snapd.kv.devicecopy import CopyJobs
from snapd.kv.devicestaged import JobGather
from snapd.kv.devicestaging import DeviceRing
from snapd.kv.flights import NOTICE_BYTES, FeedFlight
from snapd.kv.push import PushJob
from snapd.kv.ringfeed import RingFeed, Room
from snapd.kv.staging import StagingBuffer
from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport import mooncake_feed, mooncake_writer
from snapd.transport.backoff import Backoff
from snapd.transport.base import Write
from snapd.transport.mooncake_calls import Calls
from snapd.transport.mooncake_engines import MooncakeEngines
from snapd.transport.mooncake_writer import MooncakeWriter
from tests.transport.copying_engine import CopyingEngine

PATIENCE_S = 20.0
NUM_PIECES = 10  # Of a shard.


class ThreadsGpu(FakeGpu):
    """A ``FakeGpu`` that any thread may use."""

    def __init__(self) -> None:
        super().__init__()
        self.made_by: set[threading.Thread] = set()

    def make(self, *arguments: Any, **options: Any) -> Any:
        self.made_by.add(threading.current_thread())
        return super().make(*arguments, **options)

    def run(self, count: int = 1_000) -> None:
        for _ in range(count):
            with contextlib.suppress(IndexError):
                self.launched.pop(0).finish()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ThreadsGpu:
    torch.manual_seed(0)
    fake = ThreadsGpu()
    monkeypatch.setattr(devicepush, "choose_copy", lambda device: fake.jobs)
    return fake


class FeedStage(GpuStage):
    """A ``GpuStage`` whose writers are Mooncake's, over one engine."""

    def __init__(self, *, is_notifying: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.engine = CopyingEngine(self._put)
        self.engines = MooncakeEngines(
            MooncakeConfig(),
            make=lambda _: self.engine,
            backoff=Backoff(clock=self.clock),
            current=contextlib.nullcontext,
        )

        def writer_for(hello: Any, rank: int, epoch: str) -> MooncakeWriter:
            arena = self.control.arenas[rank]
            return MooncakeWriter(self.engines, "p:1", epoch, arena.base_ptr, len(arena.memory))

        self.fleet = writer_for  # type: ignore[assignment]
        self.pusher = self.make(NotifyControl(self.control.hello()) if is_notifying else None)

    def _put(self, write: Write) -> None:
        self.control.arenas[(write.target_ptr >> 40) - 1].put(write, write.size_bytes)

    @property
    def flights(self) -> Any:
        return self.pusher._flights

    def begun(self, job: PushJob) -> PushJob:
        """Step until the first feed is begun."""
        step_until(job, lambda: bool(self.flights._feeds))
        return job

    def check_idle(self) -> None:
        wait_until(lambda: self.pusher.poll() or not (self.flights._feeds or self.pusher.lingering))
        super().check_idle()


def wait_until(condition: Any) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come about"
        time.sleep(0.000_2)


def step_until(job: PushJob, condition: Any) -> None:
    def is_so() -> bool:
        assert not job.step(1) and not job.wait()
        return bool(condition())

    wait_until(is_so)


def finish(job: PushJob) -> PushJob:
    wait_until(lambda: job.step(1) or job.wait())
    return job


@pytest.fixture
def stage(gpu: ThreadsGpu) -> Iterator[FeedStage]:
    made = FeedStage()
    yield made
    gpu.run()
    made.engine.unstick()


# --- what arrives --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("is_scattered", [False, True])
def test_the_arena_holds_the_slots_bytes_and_the_daemon_their_sums(
    gpu: ThreadsGpu, num_ranks: int, is_scattered: bool
) -> None:
    stage = FeedStage(num_ranks=num_ranks, is_scattered=is_scattered)
    job = finish(stage.start())
    assert job.result.ok and job.result.drained, job.result
    assert job.bytes_done == job.result.bytes == num_ranks * SHARD_BYTES
    assert job.result.retried_pieces == 0 and job.result.gather_ms > 0
    assert threading.current_thread() not in gpu.made_by
    assert len(stage.engine.begun) >= num_ranks * NUM_PIECES
    stage.check_arrived(job)
    stage.check_idle()


def test_tritons_gather_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("snapd.kv.gpukernels", reason="Triton is not installed")
    if not kernels.is_interpreted():
        pytest.skip("Triton runs on the GPU here: tests/gpu has this")
    never: Any = None
    jobs = CopyJobs("triton", never, never, is_async=True)
    monkeypatch.setattr(devicepush, "choose_copy", lambda device: jobs)
    monkeypatch.setattr(devicepush, "warm_up", lambda pool, jobs: jobs)
    stage = FeedStage()
    job = finish(stage.start())
    assert job.result.ok, job.result
    stage.check_arrived(job)
    stage.check_idle()


def test_two_pushes_of_one_pusher_arrive(stage: FeedStage) -> None:
    first, second = stage.start("first"), stage.start("second")
    while not all([first.step(1), second.step(1)]):
        first.wait()
    for job in (first, second):
        stage.check_arrived(job)
    stage.check_idle()


def test_a_wait_ends_with_the_feed(stage: FeedStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stagedjob_module, "FEED_WAIT_S", 1_000)
    stage.engine.plan.append("stuck")
    job = stage.start()
    job.step(1)
    wait_until(lambda: stage.pusher.poll() or stage.engine.stuck)
    job.step(1)
    threading.Timer(0.01, stage.engine.unstick).start()
    job.wait()
    assert stage.flights._flying[0].feed._has_ended.is_set()
    assert finish(job).result.ok


def test_without_a_control_connection_the_commit_goes_behind_the_last_piece(gpu: ThreadsGpu) -> None:
    stage = FeedStage(is_notifying=True, buffers=2)
    job = finish(stage.pusher.start_granted(stage.control.grant(100), stage.slots[:100]))
    assert job.result.ok, job.result
    ((_, write, text),) = stage.engine.notified
    last = max(stage.engine.begun, key=lambda begun: begun.target_ptr)
    assert (write.target_ptr, write.size_bytes) == (last.target_ptr, NOTICE_BYTES)
    assert '"slab_handle"' in text
    memory = stage.control.arenas[0].memory
    held = next(buffer for buffer in stage.ring.buffers if buffer.address == write.source_address)
    offset = write.target_ptr - stage.control.arenas[0].base_ptr
    assert held.memory[:NOTICE_BYTES].numpy().tobytes() == bytes(memory[offset : offset + NOTICE_BYTES])
    stage.check_idle()


@pytest.mark.parametrize(("flying_max", "feeds_max"), [(2, 8), (8, 1)])
def test_commits_wait_for_no_feeds_which_may_wait_for_their_buffers(
    gpu: ThreadsGpu, monkeypatch: pytest.MonkeyPatch, flying_max: int, feeds_max: int
) -> None:
    monkeypatch.setattr(mooncake_writer, "IN_FLIGHT_WRITES_MAX", flying_max)
    monkeypatch.setattr(mooncake_feed, "FEEDS_MAX", feeds_max)
    stage = FeedStage(is_notifying=True, buffers=2)
    stage.engine.open("p:1", 0)
    stage.engine.plan.extend(["stuck", "stuck"])
    jobs = [stage.pusher.start_granted(stage.control.grant(100), stage.slots[:100]) for _ in range(5)]
    assert not any([job.step(1) for job in jobs])  # noqa: C419 - all of them
    wait_until(lambda: len(stage.engine.stuck) == 2)
    stage.engine.plan.clear()
    stage.engine.unstick()
    kept_max = min(feeds_max, 2)
    wait_until(lambda: sum(feed._kept is not None for feed in stage.flights._feeds) == kept_max)
    wait_until(lambda: [job.step(1) for job in jobs] == [True] * 5)
    assert all(job.result.ok for job in jobs) and len(stage.engine.notified) == 5
    stage.check_idle()


# --- the feed alone ------------------------------------------------------------------------------------


def feed_of(num_tokens: int, *, keeps_last: bool = False) -> tuple[RingFeed, DeviceRing, ThreadsGpu]:
    """A feed of two pieces a hundred tokens."""
    gpu = ThreadsGpu()
    pool = pools_of((64,), 256)[0]
    source = JobGather(
        gpu.jobs,
        pool,
        torch.arange(num_tokens),
        [0],
        [Extent(0, 1 << 20)],
        PIECE_BYTES,
        stream=None,
        after=(),
    )
    ring = DeviceRing(torch.device("cpu"), 4 * PIECE_BYTES, PIECE_BYTES)
    ring.allocate()
    return RingFeed(source, ring, 1 << 40, Room(1 << 20), keeps_last=keeps_last), ring, gpu


def test_the_last_piece_is_kept_until_it_is_taken_or_the_feed_is_stopped() -> None:
    for is_taken in (True, False):
        feed, ring, _ = feed_of(100, keeps_last=True)
        first, last = feed.next(), feed.next()
        assert first and last and feed.next() is None
        feed.over(last, may_land=False)
        feed.over(first, may_land=False)
        assert feed.settle() and ring.lent == 1
        if is_taken:
            kept = feed.take_last()
            assert kept is not None and kept[1] == last and feed.take_last() is None
        feed.stop()
        assert ring.lent == is_taken


def test_a_stopped_feed_keeps_no_last_piece() -> None:
    feed, ring, _ = feed_of(64, keeps_last=True)
    write = feed.next()
    assert write is not None
    feed.stop()
    assert not feed.settle() and feed.in_flight_bytes == write.size_bytes
    feed.over(write, may_land=False)
    assert feed.settle() and (ring.lent, feed.in_flight_bytes) == (0, 0)


def test_a_stopped_feed_launches_nothing_and_is_not_settled_before_its_threads_are_out() -> None:
    feed, ring, gpu = feed_of(100)
    got: list[Write | None] = []
    thread = threading.Thread(target=lambda: got.append(feed.next()))
    with feed._sourcing:
        thread.start()
        wait_until(lambda: ring.lent == 1)
        feed.stop()
        assert not feed.settle()
    thread.join()
    assert got == [None] and gpu.made == []
    assert feed.settle() and ring.lent == 0 and feed.next() is None


def test_a_stopped_feed_may_yet_take_a_buffer_while_a_thread_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    feed, ring, _ = feed_of(100)
    may_take, asked = threading.Event(), threading.Event()

    def take_soon(is_unwanted: object) -> StagingBuffer | None:
        asked.set()
        assert may_take.wait(PATIENCE_S)
        return ring.take()

    monkeypatch.setattr(ring, "take_soon", take_soon)
    thread = threading.Thread(target=feed.next)
    thread.start()
    assert asked.wait(PATIENCE_S)
    feed.stop()
    assert not feed.settle()
    may_take.set()
    thread.join()
    assert feed.settle() and ring.lent == 0


def test_in_a_process_that_is_ending_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    calls.rest(0)
    monkeypatch.setattr(ringfeed_module, "CALLS", calls)
    feed, ring, gpu = feed_of(100)
    with pytest.raises(TransportError, match="ending") as caught:
        feed.next()
    assert feed.error is caught.value
    assert gpu.made == [] and ring.lent == 0


# --- how much at a time --------------------------------------------------------------------------------


def test_what_all_feeds_have_under_way_is_bounded(gpu: ThreadsGpu) -> None:
    stage = FeedStage(num_ranks=3, buffers=8, in_flight_pieces=2)
    stage.engine.plan.extend(["stuck"] * 3 * NUM_PIECES)
    job = stage.start()
    step_until(job, lambda: len(stage.engine.stuck) == 2)
    # The others have their gathers behind them, and wait.
    step_until(job, lambda: stage.ring.lent == 6 and job.bytes_done > 4 * PIECE_BYTES)
    assert PIECE_BYTES < stage.pusher.in_flight_bytes <= 2 * PIECE_BYTES
    assert len(stage.engine.stuck) == 2 and not stage.flights.has_room(PIECE_BYTES)
    stage.engine.plan.clear()
    stage.engine.unstick()
    finish(job)
    assert stage.engine.most_flying_bytes <= 2 * PIECE_BYTES
    stage.check_arrived(job)
    stage.check_idle()


def test_a_feed_waits_for_buffers_that_another_has(stage: FeedStage) -> None:
    held = [stage.ring.take() for _ in range(4)]
    job = stage.begun(stage.start())
    for _ in range(3):
        job.step(1)
        job.wait()
    assert job.bytes_done == 0
    give_back(stage, held[:1])
    finish(job)
    stage.check_arrived(job)
    give_back(stage, held[1:])
    stage.check_idle()


def test_a_push_that_is_cancelled_waits_for_no_buffer(stage: FeedStage) -> None:
    held = [stage.ring.take() for _ in range(4)]
    job = stage.begun(stage.start())
    step_until(job, lambda: stage.flights._feeds[0]._askers == 2)
    assert job.cancel().drained
    wait_until(lambda: stage.pusher.poll() or not stage.flights._feeds)
    assert stage.engine.begun == []
    give_back(stage, held)
    stage.check_idle()


def test_a_push_that_is_cancelled_waits_for_no_room(gpu: ThreadsGpu) -> None:
    stage = FeedStage(num_ranks=2, buffers=8, in_flight_pieces=1)
    stage.engine.plan.append("stuck")
    job = stage.start()
    step_until(job, lambda: stage.engine.stuck and stage.ring.lent == 4)
    step_until(job, lambda: job.bytes_done > 3 * PIECE_BYTES)
    assert not job.cancel().drained
    # Its threads let go of what they held when they have come to know of it.
    wait_until(lambda: stage.pusher.poll() or (len(stage.flights._feeds) == stage.ring.lent == 1))
    stage.engine.unstick()
    stage.check_idle()


def give_back(stage: FeedStage, buffers: list[StagingBuffer | None]) -> None:
    for buffer in buffers:
        assert buffer is not None
        stage.ring.give_back(buffer)


# --- what fails ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ending", "is_drained"), [("refused", True), ("fails", False), ("unknown", False)])
def test_a_feed_of_which_a_write_failed_begins_anew(
    stage: FeedStage, gpu: ThreadsGpu, ending: Any, is_drained: bool
) -> None:
    stage.engine.plan.extend(["lands", "lands", "lands", ending])
    job = finish(stage.start())
    assert job.result.ok and job.result.retried_pieces == 1, job.result
    assert job.result.drained == is_drained
    assert stage.control.about("commit")[0][-1] == is_drained
    assert job.bytes_done == job.result.bytes
    stage.check_arrived(job)
    stage.check_idle()


def test_a_feed_that_fails_too_often_ends_the_push(stage: FeedStage) -> None:
    stage.engine.plan.extend(["fails"] * 100)
    job = stage.start()
    deadline_s = time.monotonic() + PATIENCE_S
    while not job.step(1):
        assert time.monotonic() < deadline_s
        stage.clock.now_s += 1  # The peer rests.
    assert not job.result.ok and not job.result.drained
    assert "failed 4 times" in job.result.detail
    assert job.result.retried_pieces == 3
    stage.check_idle()


def test_a_peer_that_rests_is_waited_for(stage: FeedStage) -> None:
    peer = ("p:1", "one")
    job = stage.start()
    backoff = stage.engines.backoff
    backoff.failed(peer, backoff.begin(peer), may_retry_once=False)
    for _ in range(10):
        assert not job.step(1)
    assert stage.flights._feeds == []
    stage.clock.now_s += 1
    assert finish(job).result.ok


def test_a_first_contact_that_fails_is_tried_again(stage: FeedStage) -> None:
    stage.engine.open_error = TransportError("nobody answers")
    job = stage.start()
    step_until(job, lambda: len(stage.engine.opened) == 1 and job._retried_pieces == 1)
    stage.engine.open_error = None
    stage.clock.now_s += 1
    assert finish(job).result.ok and job.result.drained
    stage.check_arrived(job)
    stage.check_idle()


def test_a_launch_that_fails_ends_the_push_with_what_it_said(stage: FeedStage, gpu: ThreadsGpu) -> None:
    gpu.fail_next = RuntimeError("the GPU is lost")
    job = stage.start()
    with pytest.raises(RuntimeError, match="lost"):
        finish(job)
    assert job.result.reason is Reason.TRANSFER_FAILED and job.result.drained
    stage.check_idle()
    gpu.fail_next = None
    assert finish(stage.start("next")).result.ok


def test_a_buffer_stays_as_it_is_while_a_failed_write_may_still_read_it(stage: FeedStage) -> None:
    stage.engine.plan.extend(["stuck", "stuck"])
    job = stage.start()
    step_until(job, lambda: len(stage.engine.stuck) == 2)
    failed, landed = stage.engine.stuck
    stage.engine.unstick("fails", count=1)
    stage.engine.unstick()
    finish(job)
    assert job.result.ok and not job.result.drained, job.result
    again = {write.source_address for write in stage.engine.begun[2:]}
    assert failed.source_address not in again and landed.source_address in again
    stage.check_arrived(job)
    stage.check_idle()


def test_one_buffer_at_least_is_left_to_begin_anew_with(gpu: ThreadsGpu) -> None:
    stage = FeedStage(buffers=2)
    for session_id in ("first", "second"):
        stage.engine.begun.clear()
        stage.engine.plan.extend(["stuck", "stuck"])
        job = stage.start(session_id)
        step_until(job, lambda: len(stage.engine.stuck) == 2)
        stage.engine.unstick("fails")
        assert finish(job).result.ok
        assert len({write.source_address for write in stage.engine.begun[2:]}) == 1
        stage.check_arrived(job)
        stage.check_idle()


def test_a_pusher_that_is_closed_waits_for_no_write_that_failed(stage: FeedStage) -> None:
    stage.engine.plan.append("fails")
    held = [stage.ring.take() for _ in range(3)]
    job = stage.start()
    step_until(job, lambda: job._retried_pieces == 1)
    give_back(stage, held)
    assert stage.ring.lent > 0
    stage.pusher.close()
    wait_until(lambda: stage.pusher.staging_bytes == 0)


def test_a_push_whose_pusher_was_closed_makes_no_writer_anew(stage: FeedStage) -> None:
    stage.engine.plan.extend(["stuck", "stuck"])
    job = stage.start()
    step_until(job, lambda: len(stage.engine.stuck) == 2)
    stage.pusher.close()
    stage.engine.unstick()
    finish(job)
    assert not job.result.ok and "closed" in job.result.detail
    assert len(stage.engine.begun) == 2
    stage.check_idle()


def test_a_ring_that_is_let_go_of_as_soon_as_it_is_asked_for_is_no_crash(
    stage: FeedStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it may be when a push goes on and its pusher was closed."""
    stage.engine.plan.extend(["stuck", "stuck"])
    job = stage.start()
    step_until(job, lambda: len(stage.engine.stuck) == 2)
    stage.pusher.close()
    real = DeviceRing.allocate

    def allocate(ring: DeviceRing) -> tuple[StagingBuffer, ...]:
        buffers = real(ring)
        ring.trim()
        return buffers

    monkeypatch.setattr(DeviceRing, "allocate", allocate)
    stage.engine.unstick()
    finish(job)
    assert not job.result.ok and "closed" in job.result.detail
    stage.check_idle()


class Times:
    """A clock for ``ringfeed`` that moves when it is told."""

    perf_counter = staticmethod(time.perf_counter)
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def test_for_a_push_that_is_not_stepped_nothing_is_written(
    stage: FeedStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon may have ended the attempt meanwhile."""
    monkeypatch.setattr(ringfeed_module, "time", times := Times())
    held = [stage.ring.take() for _ in range(4)]
    job = stage.begun(stage.start())
    (feed,) = stage.flights._feeds
    step_until(job, lambda: feed._askers == 2)
    times.now_s += 1.5 * ringfeed_module.UNASKED_S_MAX
    give_back(stage, held)
    wait_until(feed._has_ended.is_set)
    assert stage.engine.begun == []
    finish(job)
    assert job.result.ok and job.result.drained and job.result.retried_pieces == 1, job.result
    stage.check_arrived(job)
    stage.check_idle()


def test_for_a_push_that_is_stepped_a_feed_waits_as_long_as_it_takes(
    stage: FeedStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ringfeed_module, "time", times := Times())
    held = [stage.ring.take() for _ in range(4)]
    job = stage.begun(stage.start())
    for _ in range(3):
        times.now_s += ringfeed_module.UNASKED_S_MAX
        job.step(1)
    give_back(stage, held)
    finish(job)
    assert job.result.ok and job.result.retried_pieces == 0, job.result
    stage.check_idle()


@pytest.mark.parametrize("is_open", [False, True])
def test_a_push_that_is_interrupted_while_its_feed_begins_writes_no_more_and_proves_nothing(
    stage: FeedStage, monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    begin, stop = threading.Thread.start, stage.flights.stop

    def interrupted(thread: threading.Thread) -> None:
        begin(thread)
        if thread.name == "snapd-feed":
            raise KeyboardInterrupt

    def stop_later(*arguments: Any, **options: Any) -> Any:
        feeder = stage.pusher._writers._writers[0]._writer._feeder  # type: ignore[attr-defined]
        wait_until(lambda: stage.engine.stuck or not feeder._waiting)
        return stop(*arguments, **options)

    if is_open:
        stage.engine.open("p:1", 0)
    stage.engine.plan.extend(["stuck"] * NUM_PIECES)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    monkeypatch.setattr(stage.flights, "stop", stop_later)
    with pytest.raises(KeyboardInterrupt):
        stage.pusher.push("s", range(100), stage.slots[:100])
    assert stage.control.about("failed")[0][-1] is False
    stage.check_idle()
    assert stage.engine.begun == []


# --- what is cancelled ---------------------------------------------------------------------------------


def test_drain_proof_comes_when_the_writes_under_way_are_over_and_nothing_is_written_then(
    stage: FeedStage,
) -> None:
    stage.engine.plan.extend(["lands", "stuck", "stuck"])
    job = stage.start()
    step_until(job, lambda: len(stage.engine.stuck) == 2)
    assert not job.cancel().drained
    stage.engine.unstick(count=1)
    wait_until(lambda: len(stage.engine.flying) == 1)
    stage.pusher.poll()
    assert stage.pusher.lingering == 1 and stage.control.about("drained") == []
    stage.engine.unstick()
    wait_until(lambda: stage.pusher.poll() or not stage.pusher.lingering)
    assert stage.control.about("drained") == [("drained", 1, 0)]
    stage.check_idle()
    assert len(stage.engine.begun) == 3


def test_buffers_of_a_cancelled_push_come_back_when_their_gathers_are_over(
    stage: FeedStage, gpu: ThreadsGpu
) -> None:
    gpu.is_busy = True
    job = stage.start()
    step_until(job, lambda: len(gpu.launched) >= 2)
    assert job.cancel().drained, "nothing was written to the arena"
    (feed,) = stage.flights._feeds
    wait_until(lambda: feed._askers == 0)
    stage.pusher.poll()
    assert stage.ring.lent == 2, "the GPU still writes there"
    gpu.is_busy = False
    gpu.run()
    stage.check_idle()
    assert stage.engine.begun == []
    assert finish(stage.start("next")).result.ok


def test_a_push_that_is_cancelled_when_all_was_written_keeps_no_piece(gpu: ThreadsGpu) -> None:
    stage = FeedStage(is_notifying=True)
    job = stage.pusher.start_granted(stage.control.grant(100), stage.slots[:100])
    assert not job.step(1)
    wait_until(lambda: stage.pusher.poll() or (stage.ring.lent == 1 and not stage.flights._flying))
    job.cancel()
    stage.check_idle()


def test_a_gather_that_a_thread_is_just_launching_is_waited_for(
    stage: FeedStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_launch, is_launching = threading.Event(), threading.Event()
    launch_now = JobGather._launch

    def launch(self: JobGather, *arguments: Any) -> None:
        is_launching.set()
        assert may_launch.wait(PATIENCE_S)
        launch_now(self, *arguments)

    monkeypatch.setattr(JobGather, "_launch", launch)
    job = stage.start()
    step_until(job, is_launching.is_set)
    job.cancel()
    assert stage.flights._is_gpu_at_work
    may_launch.set()
    wait_until(lambda: stage.pusher.poll() or not stage.flights._is_gpu_at_work)
    stage.check_idle()


def test_what_lingers_takes_no_room(gpu: ThreadsGpu) -> None:
    stage = FeedStage(buffers=8)
    stage.engine.plan.extend(["stuck", "stuck"])
    job = stage.start()
    step_until(job, lambda: len(stage.engine.stuck) == 2)
    assert not job.cancel().drained
    # The daemon is restarted, so there is another writer.
    old_engine, stage.engine = stage.engine, CopyingEngine(stage._put)
    stage.control.epoch = "two"
    job = finish(stage.start("next"))
    assert job.result.ok, job.result
    stage.check_arrived(job)
    old_engine.unstick()
    stage.check_idle()


def test_what_begins_when_its_attempt_is_over_takes_no_room() -> None:
    feed, ring, _ = feed_of(100)
    first = feed.next()
    feed.let_go()
    feed.let_go()
    assert feed._room._taken_bytes == 0
    last = feed.next()
    assert first and last and feed._room._taken_bytes == 0
    feed.over(first, may_land=True)
    feed.over(last, may_land=False)
    assert feed._room._taken_bytes == 0 and ring.lent == 0


def test_a_pusher_that_is_closed_behind_a_gather_that_does_not_end_keeps_its_memory_until_it_does(
    stage: FeedStage, gpu: ThreadsGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flights_module, "CLOSE_WAIT_S", 0)
    gpu.is_busy = True
    job = stage.start()
    step_until(job, lambda: len(gpu.launched) >= 2)
    assert stage.flights._is_gpu_at_work
    job.cancel()
    stage.pusher.close()
    assert stage.pusher.staging_bytes > 0
    gpu.is_busy = False
    gpu.run()
    wait_until(lambda: stage.pusher.staging_bytes == 0)


def test_a_pusher_that_is_closed_in_mid_write_gives_its_memory_back_when_that_is_over(
    stage: FeedStage,
) -> None:
    stage.engine.plan.extend(["stuck", "stuck"])
    job = stage.start()
    step_until(job, lambda: len(stage.engine.stuck) == 2)
    job.cancel()
    stage.pusher.close()
    assert stage.pusher.staging_bytes > 0 and stage.engine.registered
    stage.engine.unstick()
    wait_until(lambda: stage.pusher.staging_bytes == 0 and not stage.engine.registered)


def test_a_writer_that_takes_no_feeds_is_given_pieces(gpu: ThreadsGpu) -> None:
    stage = GpuStage()
    job = stage.start()
    job.step(1)
    job.step(1)
    assert isinstance(stage.control, FakeControl)
    assert not any(isinstance(flight, FeedFlight) for flight in stage.pusher._flights._flying)
    assert finish(job).result.ok
