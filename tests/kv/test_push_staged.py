"""Pushes through a staging ring, over writers with faults and a daemon that records what it is told."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_control import Clock, FakeControl, Fleet, layout_of, pools_of

from snapd.errors import (
    DaemonUnreachable,
    ExtraMissing,
    InvalidRequest,
    Reason,
    RequestError,
    StaleHandle,
    TransportError,
)
from snapd.kv import flights as flights_module
from snapd.kv import stagedjob as stagedjob_module
from snapd.kv.checksum import plane_checksum
from snapd.kv.control import NotifyControl
from snapd.kv.copy import gather
from snapd.kv.push import Pusher, PushJob, PushResult, PushSettings
from snapd.kv.staged import StagedGatherJob
from snapd.units import KIB, ceil_div
from tests.transport.fake_writer import FakeWriter

STRIDES = (64, 48, 256)
TOKENS = tuple(range(100))
NUM_SLOTS = 256
PIECE_BYTES = 4 * KIB
SHARD_BYTES = sum(STRIDES) * len(TOKENS)
assert SHARD_BYTES > 8 * PIECE_BYTES, "several pieces"
PATIENCE_STEPS = 10_000


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    # The copies are small: threads would only wait for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Stage:
    """A pusher with everything around it."""

    def __init__(
        self,
        strides: tuple[int, ...] = STRIDES,
        *,
        num_ranks: int = 1,
        num_slots: int = NUM_SLOTS,
        piece_bytes: int = PIECE_BYTES,
        buffers: int = 16,
        in_flight_pieces: int = 4,
        polls: int = 1,
        writer_in_flight_bytes_max: int = 1 << 30,
        **options: Any,
    ) -> None:
        self.control = FakeControl(num_ranks=num_ranks, **options)
        self.pools = pools_of(strides, num_slots, num_ranks)
        self.control.layout = layout_of(self.pools)
        self.fleet = Fleet(self.control, polls=polls, in_flight_bytes_max=writer_in_flight_bytes_max)
        self.clock = Clock()
        self.slots = torch.randperm(num_slots)
        self.settings = PushSettings(
            piece_bytes=piece_bytes,
            ring_bytes=buffers * piece_bytes,
            in_flight_bytes_max=in_flight_pieces * piece_bytes,
        )
        self.pusher = self.make()

    def make(self, control: Any = None) -> Pusher:
        return Pusher(
            control or self.control,
            self.pools,
            settings=self.settings,
            writer_for=self.fleet,
            clock=self.clock,
        )

    @property
    def writer(self) -> FakeWriter:
        """Rank 0's; made if there is none yet."""
        if (0, self.control.epoch) not in self.fleet.made:
            self.pusher._writers.writer(self.control.hello(), 0)
        return self.fleet.of(0, self.control.epoch)

    def writer_of(self, rank: int) -> FakeWriter:
        self.pusher._writers.writer(self.control.hello(), rank)
        return self.fleet.of(rank)

    def start(self, session_id: str = "s", num_tokens: int = len(TOKENS)) -> PushJob:
        return self.pusher.start(session_id, range(num_tokens), self.slots[:num_tokens])

    def push(self, session_id: str = "s", num_tokens: int = len(TOKENS)) -> PushResult:
        return finish(self.start(session_id, num_tokens)).result

    def check_arrived(self, job: PushJob, slots: torch.Tensor | None = None) -> None:
        """Every plane is in the arena, and its sums were committed."""
        grant = job.grant
        assert grant is not None
        slots = self.slots[: grant.num_tokens] if slots is None else slots
        for rank_grant in grant.ranks:
            pool = self.pools[rank_grant.rank]
            planes = [
                torch.empty(grant.num_tokens * place.stride_bytes, dtype=torch.uint8) for place in pool.planes
            ]
            sums = gather(pool, slots, planes)
            memory = self.control.arenas[rank_grant.rank].memory
            for offset, plane in zip(rank_grant.k_layer_offsets, planes, strict=True):
                assert bytes(memory[offset : offset + plane.numel()]) == plane.numpy().tobytes()
            commit = self.control.commits[grant.slab_handle, rank_grant.rank]
            assert commit.checksums == sums
            assert (commit.num_tokens, commit.num_bytes) == (
                grant.num_tokens, sum(plane.numel() for plane in planes),
            )  # fmt: skip

    def check_idle(self) -> None:
        assert self.pusher._ring.lent == 0, "staging memory leaked"
        assert (self.pusher.in_flight_bytes, self.pusher.lingering) == (0, 0)


def finish(job: PushJob, max_bytes: int = 1 << 20) -> PushJob:
    for _ in range(PATIENCE_STEPS):
        if job.step(max_bytes):
            return job
    raise AssertionError("the push does not end")


def step(job: PushJob, times: int, max_bytes: int = PIECE_BYTES) -> None:
    for _ in range(times):
        assert not job.step(max_bytes)


@pytest.fixture(autouse=True)
def _no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stagedjob_module.time, "sleep", lambda _: None)


# --- what arrives --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("is_scattered", [False, True])
@pytest.mark.parametrize("max_bytes", [1, 1 << 20])
def test_the_arena_holds_the_slots_bytes_and_the_daemon_their_sums(
    num_ranks: int, is_scattered: bool, max_bytes: int
) -> None:
    stage = Stage(num_ranks=num_ranks, is_scattered=is_scattered, polls=2)
    job = finish(stage.start(), max_bytes)
    result = job.result
    assert (result.ok, result.reason, result.drained) == (True, Reason.OK, True)
    assert (result.retried_pieces, result.attempts) == (0, 1)
    assert result.bytes == SHARD_BYTES * num_ranks == job.bytes_done
    assert result.total_ms >= result.gather_ms > 0
    stage.check_arrived(job)
    stage.check_idle()
    assert stage.control.said_kinds() == ["prepare", "started"] + ["commit"] * num_ranks


def test_a_push_of_a_suffix_sends_the_suffix() -> None:
    stage = Stage()
    job = finish(stage.pusher.start("s", TOKENS, stage.slots[:100], token_start=60))
    assert job.result.ok and job.result.num_tokens == 40
    stage.check_arrived(job, stage.slots[60:100])


def test_a_rank_is_committed_when_every_write_of_it_is_done_and_not_before() -> None:
    stage = Stage(num_ranks=2, polls=1)
    stage.writer_of(0).plan("stuck")
    job = stage.start()
    for _ in range(50):
        assert not job.step(1 << 20)
    assert [said[2] for said in stage.control.about("commit")] == [1], "one rank does not wait for another"
    stage.fleet.of(0).unstick()
    assert finish(job).result.ok
    stage.check_arrived(job)


@pytest.mark.parametrize("num_tokens", [16, 64, 256])
def test_the_number_of_writes_is_that_of_the_bytes_and_not_of_the_tokens_or_planes(num_tokens: int) -> None:
    shard_bytes = 1 << 18
    stage = Stage((shard_bytes // num_tokens // 16,) * 16, piece_bytes=1 << 15)
    assert stage.push(num_tokens=num_tokens).ok
    assert len(stage.writer.begun) == ceil_div(shard_bytes, 1 << 15)


def test_buffers_are_made_known_once_to_each_writer() -> None:
    stage = Stage(num_ranks=2, buffers=3)
    assert stage.push().ok and stage.push().ok
    for rank in (0, 1):
        sources = stage.fleet.of(rank).sources
        assert len(set(sources)) == len(sources) <= 3
        assert all(size_bytes == PIECE_BYTES for _, size_bytes in sources)


def test_what_reaches_the_writer_is_bounded_and_so_is_the_memory() -> None:
    stage = Stage(polls=7, in_flight_pieces=2)
    job = stage.start()
    finish(job)
    assert stage.writer.in_flight_bytes_seen_max <= 2 * PIECE_BYTES
    assert stage.pusher.staging_bytes <= 4 * PIECE_BYTES, "two fly, one waits, one is filled"
    stage.check_arrived(job)


def test_memory_is_allocated_as_it_is_needed_and_kept() -> None:
    stage = Stage()
    assert stage.pusher.staging_bytes == 0
    assert stage.push(num_tokens=2).ok
    assert stage.pusher.staging_bytes == PIECE_BYTES
    assert stage.push(num_tokens=2).ok
    assert stage.pusher.staging_bytes == PIECE_BYTES


def test_the_next_piece_is_gathered_while_earlier_ones_fly() -> None:
    stage = Stage(polls=1)
    stage.writer.plan("stuck", "stuck", "stuck")
    job = stage.start()
    step(job, 3)
    assert len(stage.writer.begun) == 3
    assert stage.pusher.in_flight_bytes >= job.bytes_done > 2 * PIECE_BYTES
    stage.writer.unstick()
    assert finish(job).result.ok


def test_a_step_moves_what_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapd.kv.copy.CHUNK_BYTES", 512)
    stage = Stage()
    job = stage.start()
    before = job.bytes_done
    step(job, 1, max_bytes=1)
    assert 0 < job.bytes_done - before <= 512
    before = job.bytes_done
    step(job, 1, max_bytes=2_000)
    assert 512 < job.bytes_done - before <= 2_000
    finish(job, 1)
    stage.check_arrived(job)


def test_two_jobs_of_one_pusher_take_turns() -> None:
    stage = Stage(buffers=2, in_flight_pieces=1, polls=2)
    first, second = stage.start("first"), stage.start("second", 60)
    for _ in range(PATIENCE_STEPS):
        ended = [job.step(PIECE_BYTES) for job in (first, second)]
        if all(ended):
            break
    assert first.result.ok and second.result.ok
    assert stage.writer.in_flight_bytes_seen_max <= PIECE_BYTES
    assert stage.pusher.staging_bytes <= 2 * PIECE_BYTES
    stage.check_arrived(first)
    stage.check_arrived(second)
    stage.check_idle()


def test_a_job_that_nobody_steps_holds_no_finished_write_of_the_others_back() -> None:
    stage = Stage(in_flight_pieces=1)
    idle, busy = stage.start("idle"), stage.start("busy")
    step(idle, 1)
    assert stage.pusher.in_flight_bytes == PIECE_BYTES
    assert finish(busy).result.ok
    assert finish(idle).result.ok
    stage.check_idle()


def test_a_write_that_another_job_saw_end_is_over_for_its_own() -> None:
    stage = Stage()
    first, second = stage.start("first"), stage.start("second")
    step(first, 1)
    step(second, 1)
    assert first.cancel().drained
    assert finish(second).result.ok
    stage.check_idle()


def test_when_the_ring_is_lent_out_a_push_waits() -> None:
    stage = Stage(buffers=1)
    stage.writer.plan("stuck")
    first, second = stage.start("first"), stage.start("second")
    step(first, 1)
    step(second, 3)
    assert second.bytes_done == 0
    stage.writer.unstick()
    assert finish(second).result.ok and finish(first).result.ok
    assert stage.pusher.staging_bytes == PIECE_BYTES


def test_a_wait_is_short_and_only_when_nothing_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(stagedjob_module.time, "sleep", slept.append)
    stage = Stage(buffers=1)
    stage.writer.plan("stuck")
    job = stage.start()
    step(job, 1)
    job.wait()
    assert slept == [], "it moved a piece"
    step(job, 1)
    job.wait()
    assert slept == [stagedjob_module.WAIT_S]
    stage.writer.unstick()
    finish(job)
    stage.writer.plan("stuck")
    job = stage.start("other")
    step(job, 2)
    job.cancel()
    job.wait()
    assert len(slept) == 1, "it is done"


def test_a_commit_that_is_under_way_is_polled_and_waited_for() -> None:
    stage = Stage()
    stage.control.polls_left = 3
    job = stage.start()
    for _ in range(PATIENCE_STEPS):
        if stage.control.about("commit"):
            break
        job.step(1 << 20)
    assert not job.done
    step(job, 1)
    job.wait()
    assert stage.control.about("waited") == [("waited",)]
    assert finish(job).result.ok


# --- writes that fail ----------------------------------------------------------------------------------


def test_a_write_that_never_began_is_repeated_and_takes_no_proof_away() -> None:
    stage = Stage()
    stage.writer.peer_up = False
    job = stage.start()
    step(job, 1)
    stage.writer.peer_up = True
    assert finish(job).result.ok
    assert (job.result.retried_pieces, job.result.drained) == (1, True)
    assert stage.control.commits[1, 0].drained
    stage.check_arrived(job)
    stage.check_idle()


@pytest.mark.parametrize("ending", ["fails", "half", "fails-late"])
def test_a_write_that_failed_is_repeated_from_the_same_buffer_and_the_commit_claims_no_proof(
    ending: Any,
) -> None:
    stage = Stage(num_ranks=2)
    stage.writer.plan("lands", ending, "lands")
    job = finish(stage.start())
    assert job.result.ok
    assert (job.result.retried_pieces, job.result.drained) == (1, False)
    assert stage.control.commits[1, 0].drained is False
    assert stage.control.commits[1, 1].drained is True, "another rank's writes were all drained"
    assert stage.writer.begun.count(stage.writer.begun[1]) == 2
    stage.check_arrived(job)
    stage.check_idle()


def test_a_piece_that_fails_too_often_ends_the_push() -> None:
    stage = Stage(buffers=1)
    stage.writer.plan(*["fails"] * 4)
    job = finish(stage.start())
    result = job.result
    assert (result.ok, result.reason, result.drained) == (False, Reason.TRANSFER_FAILED, False)
    assert "failed 4 times" in result.detail and result.retried_pieces == 3
    assert stage.control.about("failed", "drained") == [("failed", 1, Reason.TRANSFER_FAILED, False)]
    assert not stage.control.commits
    stage.check_idle()


def test_many_pieces_may_each_fail_a_few_times() -> None:
    stage = Stage(buffers=1)
    stage.writer.plan(*(["fails"] * 3 + ["lands"]) * 3)
    job = finish(stage.start())
    assert job.result.ok and job.result.retried_pieces == 9
    stage.check_arrived(job)


def test_a_push_whose_writes_never_began_ends_with_drain_proof() -> None:
    stage = Stage()
    stage.writer.peer_up = False
    result = stage.push()
    assert (result.ok, result.drained) == (False, True)
    assert stage.control.about("failed", "drained") == [("failed", 1, Reason.TRANSFER_FAILED, True)]
    stage.check_idle()


def test_siblings_of_a_write_that_failed_for_good_are_waited_for_before_there_is_proof() -> None:
    """A failed part must not free what its siblings still write."""
    stage = Stage()
    stage.writer.plan("stuck")
    job = stage.start()
    step(job, 1)
    stage.writer.peer_up = False
    assert not finish(job).result.ok
    assert stage.control.about("failed", "drained") == [("failed", 1, Reason.TRANSFER_FAILED, False)]
    assert (stage.pusher.lingering, stage.pusher._ring.lent) == (1, 1)
    stage.pusher.poll()
    assert stage.pusher.lingering == 1
    stage.writer.unstick()
    stage.pusher.poll()
    assert stage.control.about("drained") == [("drained", 1, 0)]
    stage.check_idle()


def test_a_writer_that_has_forgotten_a_ticket_gives_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    stage.writer.plan("stuck")
    job = stage.start()
    step(job, 1)
    stage.writer._tickets.clear()
    assert job.cancel().drained is False
    assert stage.control.about("failed", "drained") == [("failed", 1, Reason.TRANSFER_FAILED, False)]
    stage.check_idle()


# --- ends ----------------------------------------------------------------------------------------------


def stuck(stage: Stage, count: int = 1) -> PushJob:
    """A job whose first writes do not end."""
    stage.writer.plan(*["stuck"] * count)
    job = stage.start()
    step(job, count)
    return job


def test_a_cancelled_push_is_drained_once_its_last_write_is_over() -> None:
    stage = Stage()
    job = stuck(stage, 2)
    result = job.cancel(Reason.SESSION_NOT_RESIDENT)
    assert (result.ok, result.reason, result.drained) == (False, Reason.SESSION_NOT_RESIDENT, False)
    assert stage.control.about("failed") == [("failed", 1, Reason.SESSION_NOT_RESIDENT, False)]
    assert job.cancel() == result and job.step(1)
    (first, _) = stage.writer._tickets.values()
    first.flying[0].ending = "lands"
    stage.pusher.poll()
    assert stage.control.about("drained") == []
    stage.writer.unstick()
    # Any job's step sees to it.
    other = stage.start("other")
    assert stage.control.about("drained") == [("drained", 1, 0)]
    assert finish(other).result.ok
    assert stage.control.about("drained") == [("drained", 1, 0)], "once"
    stage.check_idle()


def test_a_step_of_any_job_sees_to_what_lingers() -> None:
    stage = Stage()
    job, other = stuck(stage), stage.start("other")
    job.cancel()
    stage.writer.unstick()
    step(other, 1)
    assert stage.control.about("drained") == [("drained", 1, 0)]
    finish(other)


def test_a_buffer_is_not_lent_before_the_write_that_reads_it_is_over() -> None:
    stage = Stage(buffers=2)
    stuck(stage).cancel()
    (held,) = stage.pusher._ring._lent
    other = finish(stage.start("other"))
    assert other.result.ok
    later = [write.source_address for write in stage.writer.begun[1:]]
    assert held not in later
    stage.check_arrived(other)
    stage.writer.unstick()
    stage.pusher.poll()
    stage.check_idle()


def test_what_lingers_takes_no_room_from_other_pushes() -> None:
    stage = Stage(buffers=4, in_flight_pieces=1)
    stuck(stage).cancel()
    assert stage.push("other").ok


@pytest.mark.parametrize("ending", ["fails", "half"])
def test_a_cancelled_push_whose_write_fails_later_claims_no_proof(ending: Any) -> None:
    stage = Stage()
    stuck(stage).cancel()
    stage.writer.unstick(ending)
    stage.pusher.poll()
    assert stage.control.about("drained") == []
    stage.check_idle()


def test_a_push_with_an_earlier_failure_gives_no_proof_when_its_last_write_lands() -> None:
    stage = Stage()
    stage.writer.plan("fails", "stuck", "stuck", "stuck")
    job = stage.start()
    step(job, 3)
    job.cancel()
    stage.writer.unstick()
    stage.pusher.poll()
    assert stage.control.about("failed", "drained") == [("failed", 1, Reason.TRANSFER_FAILED, False)]
    stage.check_idle()


def test_writes_that_had_not_begun_are_cancelled_and_proof_is_given_at_once() -> None:
    stage = Stage(writer_in_flight_bytes_max=1)
    stage.writer.plan("stuck")
    job = stage.start()
    step(job, 3)
    begun = list(stage.writer.begun)
    assert len(begun) == 1 < len(stage.writer.submitted)
    stage.writer.unstick()
    assert job.cancel().drained
    assert stage.writer.begun == begun
    assert stage.control.about("failed") == [("failed", 1, Reason.TRANSFER_FAILED, True)]
    stage.check_idle()


def test_ranks_that_are_drained_are_told_apart_from_those_that_are_not() -> None:
    stage = Stage(num_ranks=2)
    stage.writer_of(1).plan("stuck")
    job = stage.start()
    for _ in range(20):
        assert not job.step(1 << 20)
    job.cancel()
    assert stage.control.about("failed", "drained") == [
        ("failed", 1, Reason.TRANSFER_FAILED, False), ("drained", 1, 0),
    ]  # fmt: skip
    stage.fleet.of(1).unstick()
    stage.pusher.poll()
    assert stage.control.about("drained") == [("drained", 1, 0), ("drained", 1, 1)]
    stage.check_idle()


def test_after_some_time_nobody_wants_the_proof_any_more() -> None:
    stage = Stage()
    stuck(stage).cancel()
    stage.clock.now_s += flights_module.LINGER_S_MAX + 1
    stage.writer.unstick()
    stage.pusher.poll()
    assert stage.control.about("drained") == []
    stage.check_idle()


def test_another_life_of_the_daemon_is_given_no_proof() -> None:
    stage = Stage()
    stuck(stage).cancel()
    writer = stage.writer
    stage.control.epoch = "two"
    writer.unstick()
    stage.pusher.poll()
    assert stage.control.about("drained") == []
    stage.check_idle()


@pytest.mark.parametrize("reason", [Reason.SUPERSEDED, Reason.CLIENT_ABORT, Reason.TRANSFER_TIMEOUT])
def test_an_attempt_that_the_daemon_has_ended_is_written_no_more(reason: Reason) -> None:
    stage = Stage()
    job = stage.start()
    step(job, 2)
    begun = len(stage.writer.begun)
    stage.control.end(1, reason)
    assert job.step(PIECE_BYTES)
    assert (job.result.ok, job.result.reason, job.result.drained) == (False, reason, True)
    assert len(stage.writer.begun) == begun
    assert stage.control.about("failed") == [("failed", 1, Reason.TRANSFER_FAILED, True)]
    stage.check_idle()


def test_a_newer_push_goes_on_beside_what_lingers_of_the_one_it_superseded() -> None:
    stage = Stage()
    older = stuck(stage)
    newer = stage.start()
    stage.control.end(1, Reason.SUPERSEDED)
    step(newer, 1)
    assert older.step(1) and older.result.reason is Reason.SUPERSEDED
    assert finish(newer).result.ok
    stage.check_arrived(newer)
    assert stage.pusher.lingering == 1
    stage.writer.unstick()
    stage.pusher.poll()
    assert ("drained", 1, 0) in stage.control.said


def test_a_commit_that_is_refused_ends_the_push_with_its_reason() -> None:
    stage = Stage()
    stage.control.refuse_commit = RequestError("counts differ", reason=Reason.PARTIAL_TRANSFER)
    result = stage.push()
    assert (result.ok, result.reason, result.drained) == (False, Reason.PARTIAL_TRANSFER, True)
    stage.check_idle()


def to_the_commit(stage: Stage) -> PushJob:
    """A push whose bytes are written, and whose commit is not answered."""
    stage.control.polls_left = PATIENCE_STEPS
    job = stage.start()
    for _ in range(PATIENCE_STEPS):
        if stage.control.about("commit"):
            break
        job.step(1 << 20)
    assert not job.done
    return job


@pytest.mark.parametrize("reason", [Reason.OK, Reason.EVICTED])
def test_a_push_that_was_committed_and_then_ended_before_anybody_looked_is_ok(reason: Reason) -> None:
    stage = Stage()
    job = to_the_commit(stage)
    stage.control.end(1, reason)
    stage.control.polls_left = 0
    assert job.step(1) and job.result.ok
    assert stage.control.about("failed") == []
    stage.check_idle()


def test_after_a_lost_connection_the_answer_to_a_commit_is_waited_for() -> None:
    stage = Stage()
    job = to_the_commit(stage)
    stage.control.connections += 1
    stage.control.refuse_start = StaleHandle("it was ingested")
    step(job, 1)
    stage.control.polls_left = 0
    assert job.step(1) and job.result.ok


def test_a_commit_that_came_too_late_ends_the_push_as_its_attempt_ended() -> None:
    stage = Stage()
    job = to_the_commit(stage)
    stage.control.end(1, Reason.SUPERSEDED)
    stage.control.refuse_commit = StaleHandle("it has ended")
    assert job.step(1)
    assert (job.result.ok, job.result.reason) == (False, Reason.SUPERSEDED)
    stage.check_idle()


def test_a_rank_that_is_written_still_is_written_no_more_though_another_is_committed() -> None:
    stage = Stage(num_ranks=2)
    stage.writer_of(1).plan("stuck")
    job = stage.start()
    step(job, 100)
    assert [said[2] for said in stage.control.about("commit")] == [0]
    begun = len(stage.writer_of(1).begun)
    stage.control.end(1, Reason.SUPERSEDED)
    assert job.step(PIECE_BYTES) and job.result.reason is Reason.SUPERSEDED
    assert len(stage.writer_of(1).begun) == begun


@pytest.mark.parametrize("where", ["step", "wait"])
def test_a_push_that_is_interrupted_ends_its_attempt_and_holds_no_memory(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    stage = Stage(buffers=2, in_flight_pieces=1)
    if where == "wait":
        monkeypatch.setattr(stagedjob_module.time, "sleep", interrupt)
        stage.writer.plan("stuck")
    else:
        monkeypatch.setattr(StagedGatherJob, "_move_piece", interrupt)
    with pytest.raises(KeyboardInterrupt):
        stage.pusher.push("s", TOKENS, stage.slots[: len(TOKENS)])
    assert [said[0] for said in stage.control.about("failed")] == ["failed"]
    if where == "wait":
        stage.writer.unstick()
        stage.pusher.poll()
    stage.check_idle()


def test_a_push_that_is_cancelled_while_its_commit_is_under_way_asks_for_it_no_more() -> None:
    stage = Stage()
    stage.control.polls_left = PATIENCE_STEPS
    job = stage.start()
    for _ in range(50):
        job.step(1 << 20)
    assert stage.control.about("commit") and not job.done
    job.cancel()
    assert stage.control.commitments[0].is_forgotten
    stage.check_idle()


def test_a_start_that_is_refused_ends_the_push_before_a_byte_moves() -> None:
    stage = Stage()
    stage.control.refuse_start = StaleHandle("it has ended")
    job = stage.start()
    assert job.done and job.result.reason is Reason.STALE_HANDLE
    assert stage.writer.submitted == []
    stage.check_idle()


def test_after_a_lost_connection_it_asks_before_another_byte_is_written() -> None:
    stage = Stage()
    job = stage.start()
    step(job, 1)
    begun = len(stage.writer.begun)
    stage.control.connections += 1
    stage.control.refuse_start = StaleHandle("it has ended")
    assert job.step(PIECE_BYTES) and job.result.reason is Reason.STALE_HANDLE
    assert len(stage.writer.begun) == begun


def test_a_copy_that_raises_ends_the_attempt_and_holds_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    job = stage.start()
    step(job, 1, max_bytes=1)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(StagedGatherJob, "step", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        job.step(1)
    assert job.done and "out of memory" in job.result.detail
    assert stage.control.about("failed") == [("failed", 1, Reason.TRANSFER_FAILED, True)]
    stage.check_idle()


def test_a_closed_pusher_holds_no_memory_and_can_push_again() -> None:
    stage = Stage()
    assert stage.push().ok and stage.pusher.staging_bytes > 0
    stage.pusher.close()
    assert stage.pusher.staging_bytes == 0
    stage.fleet.made.clear()
    assert stage.push().ok


def test_a_closed_pusher_ends_its_jobs_and_cancels_what_has_not_begun() -> None:
    stage = Stage(writer_in_flight_bytes_max=1)
    stage.writer.plan("stuck")
    job = stage.start()
    step(job, 3)
    stage.pusher.close()
    stage.writer.unstick()
    assert finish(job).result.ok is False
    stage.pusher.poll()
    assert len(stage.writer.begun) == 1
    stage.check_idle()


# --- a peer that rests ---------------------------------------------------------------------------------


def test_a_peer_that_rests_is_asked_for_no_slab() -> None:
    stage = Stage()
    stage.writer.resting_ms = 250
    job = stage.start()
    assert job.done and job.grant is None
    assert (job.result.reason, job.result.retry_after_ms) == (Reason.TRANSFER_FAILED, 250)
    assert stage.pusher.push_planes("s", TOKENS, {}).retry_after_ms == 250
    assert stage.control.said == []
    stage.writer.resting_ms = 0
    assert stage.push().ok


def test_a_peer_that_begins_to_rest_is_tried_again_when_its_time_has_come() -> None:
    stage = Stage()
    job = stage.start()
    step(job, 2)
    stage.writer.resting_ms = 250
    step(job, 5)
    submitted = len(stage.writer.submitted)
    stage.writer.resting_ms = 0
    step(job, 5)
    assert len(stage.writer.submitted) == submitted, "its time has not come"
    stage.clock.now_s += 0.25
    assert finish(job).result.ok
    stage.check_arrived(job)
    stage.check_idle()


def test_while_a_failed_piece_waits_for_the_peer_its_rank_is_not_committed() -> None:
    stage = Stage()
    job = stage.start(num_tokens=4)
    stage.writer.plan("fails")
    step(job, 1)
    stage.writer.resting_ms = 250
    step(job, 5)
    assert stage.pusher.in_flight_bytes == 0 and job.bytes_done == 4 * sum(STRIDES)
    assert stage.control.about("commit") == []
    stage.writer.resting_ms = 0
    stage.clock.now_s += 0.25
    assert finish(job).result.ok
    stage.check_arrived(job)


def test_a_peer_that_rests_again_and_again_ends_the_push() -> None:
    stage = Stage()
    job = stage.start()
    step(job, 2)
    stage.writer.resting_ms = 250
    for _ in range(4):
        assert not job.done
        job.step(1)
        stage.clock.now_s += 0.25
    for _ in range(3):
        job.step(1)
    assert job.done
    assert (job.result.reason, job.result.retry_after_ms) == (Reason.TRANSFER_FAILED, 250)
    assert job.result.drained
    stage.check_idle()


def test_while_a_peer_rests_a_wait_is_longer_but_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(stagedjob_module.time, "sleep", slept.append)
    stage = Stage()
    job = stage.start()
    stage.writer.resting_ms = 30_000
    step(job, 2)
    job.wait()
    assert slept == [stagedjob_module.REST_WAIT_S_MAX]
    job.cancel()


# --- grants that do not fit ----------------------------------------------------------------------------


def test_a_grant_that_leaves_the_arena_is_not_written() -> None:
    stage = Stage(arena_bytes=1 << 14)
    result = stage.push()
    assert (result.ok, result.reason, result.drained) == (False, Reason.INVALID_REQUEST, True)
    assert stage.writer.submitted == []
    stage.check_idle()


def test_a_pool_that_is_not_the_declared_one_ends_the_attempt() -> None:
    stage = Stage()
    stage.pusher.pools[0] = pools_of((64, 48, 240), NUM_SLOTS)[0]
    result = stage.push()
    assert (result.ok, result.reason) == (False, Reason.INVALID_REQUEST)
    assert "planes are not those" in result.detail and stage.writer.submitted == []


def test_a_rank_that_the_daemon_does_not_offer_ends_the_push() -> None:
    stage = Stage(num_ranks=2)
    grant = stage.control.grant(100)
    del stage.control.arenas[1]
    result = finish(stage.pusher.start_granted(grant, stage.slots[:100])).result
    assert (result.ok, result.reason, result.drained) == (False, Reason.WRONG_RANK, True)
    stage.check_idle()


def test_a_ring_without_room_for_a_piece_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no room"):
        Pusher(
            FakeControl(), pools_of((8,), 8), settings=PushSettings(piece_bytes=8 * KIB, ring_bytes=4 * KIB)
        )


def test_pieces_that_are_too_short_for_a_row_are_refused_before_a_slab_is_asked_for() -> None:
    stage = Stage((PIECE_BYTES + 16,))
    result = stage.push(num_tokens=2)
    assert (result.ok, result.reason) == (False, Reason.INVALID_REQUEST)
    assert stage.control.said == []


@pytest.mark.parametrize("error", [TransportError("no engine"), ExtraMissing("no package")])
def test_a_writer_that_cannot_be_made_refuses_the_push_before_a_slab_is_asked_for(error: Exception) -> None:
    control = FakeControl()

    def fail(*_: object) -> Any:
        raise error

    pools = pools_of((8,), 8)
    control.layout = layout_of(pools)
    result = Pusher(control, pools, writer_for=fail).push("s", range(4), torch.arange(4))
    assert (result.ok, result.reason, result.detail) == (False, Reason.TRANSFER_FAILED, str(error))
    assert control.said == []


def test_a_daemon_that_cannot_be_asked_refuses_the_push(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()

    def fail(_: object) -> None:
        raise DaemonUnreachable("nobody listens")

    monkeypatch.setattr(FakeControl, "hello", fail)
    assert stage.start().result.reason is Reason.TRANSFER_FAILED
    assert stage.pusher.start_granted(stage.control.grant(10), stage.slots[:10]).done


# --- another life of the daemon ------------------------------------------------------------------------


def restart_after(stage: Stage, steps: int, monkeypatch: pytest.MonkeyPatch, lives: int = 2) -> None:
    """The daemon restarts after so many steps of the first job."""
    names = iter(["two", "three"][: lives - 1])
    done = 0
    poll = stage.pusher._flights.poll

    def poll_and_restart() -> None:
        nonlocal done
        done += 1
        if done % steps == 0 and (name := next(names, None)):
            stage.control.epoch = name
            stage.control.connections += 1
        poll()

    monkeypatch.setattr(stage.pusher._flights, "poll", poll_and_restart)


def test_a_push_is_prepared_once_more_when_the_daemon_was_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(polls=2)
    restart_after(stage, 5, monkeypatch)
    result = stage.pusher.push("s", TOKENS, stage.slots[:100])
    assert (result.ok, result.attempts, result.slab_handle) == (True, 2, 2)
    assert len(stage.control.about("prepare")) == 2
    assert {epoch for _, epoch in stage.fleet.made} == {"one", "two"}
    with pytest.raises(TransportError, match="closed"):
        stage.fleet.of(0, "one").submit(())
    stage.check_idle()


def test_it_is_not_prepared_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(polls=2)
    restart_after(stage, 5, monkeypatch, lives=3)
    result = stage.pusher.push("s", TOKENS, stage.slots[:100])
    assert (result.ok, result.reason, result.attempts) == (False, Reason.STALE_HANDLE, 2)
    assert len(stage.control.about("prepare")) == 2


def test_it_is_not_prepared_again_when_that_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(polls=2)
    restart_after(stage, 5, monkeypatch)
    result = stage.pusher.push("s", TOKENS, stage.slots[:100], renew=False)
    assert (result.ok, result.reason, result.attempts) == (False, Reason.STALE_HANDLE, 1)


def test_an_attempt_that_is_stale_in_the_same_life_is_not_prepared_again() -> None:
    stage = Stage()
    stage.control.refuse_start = StaleHandle("somebody ended it")
    result = stage.pusher.push("s", TOKENS, stage.slots[:100])
    assert (result.reason, result.attempts) == (Reason.STALE_HANDLE, 1)


def test_a_grant_of_another_life_is_not_written() -> None:
    stage = Stage()
    grant = stage.control.grant(100)
    stage.control.epoch = "two"
    stage.control.started = lambda _: None  # type: ignore[method-assign]
    job = finish(stage.pusher.start_granted(grant, stage.slots[:100]))
    assert job.result.reason is Reason.STALE_HANDLE
    assert stage.writer.submitted == []


# --- planes that were gathered before ------------------------------------------------------------------


def planes_of(stage: Stage) -> dict[int, list[torch.Tensor]]:
    planes = {
        rank: [torch.empty(100 * place.stride_bytes, dtype=torch.uint8) for place in pool.planes]
        for rank, pool in stage.pools.items()
    }
    for rank, pool in stage.pools.items():
        gather(pool, stage.slots[:100], planes[rank])
    return planes


@pytest.mark.parametrize("with_sums", [True, False])
@pytest.mark.parametrize("is_scattered", [True, False])
def test_planes_go_through_the_ring(with_sums: bool, is_scattered: bool) -> None:
    stage = Stage(num_ranks=2, is_scattered=is_scattered, polls=2)
    planes = planes_of(stage)
    sums = {rank: [plane_checksum(plane) for plane in planes[rank]] for rank in planes} if with_sums else None
    stage.writer.plan("lands", "fails")
    result = stage.pusher.push_planes("s", TOKENS, planes, sums)
    assert result.ok and result.retried_pieces == 1, result
    for rank_planes, rank in ((planes[0], 0), (planes[1], 1)):
        assert list(stage.control.commits[1, rank].checksums) == [plane_checksum(x) for x in rank_planes]
        memory = bytes(stage.control.arenas[rank].memory)
        assert all(plane.numpy().tobytes() in memory for plane in rank_planes)
    stage.check_idle()


def test_planes_of_another_size_end_the_attempt() -> None:
    stage = Stage()
    planes = planes_of(stage)
    planes[0][0], planes[0][1] = planes[0][1], planes[0][0]
    result = stage.pusher.push_planes("s", TOKENS, planes)
    assert (result.ok, result.reason) == (False, Reason.INVALID_REQUEST)
    assert stage.writer.submitted == []


def test_a_rank_without_planes_is_the_callers_fault_and_leaves_nothing() -> None:
    stage = Stage(num_ranks=2)
    planes = planes_of(stage)
    del planes[1]
    with pytest.raises(KeyError):
        stage.pusher.push_planes("s", TOKENS, planes)
    assert stage.control.about("failed") == [("failed", 1, Reason.TRANSFER_FAILED, True)]
    stage.check_idle()


# --- without a control connection ----------------------------------------------------------------------


class NotifyingWriter(FakeWriter):
    """Texts arrive when their write is done."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.texts: list[str] = []
        self._texts: dict[int, str] = {}

    def submit_notification(self, write: Any, text: str) -> int:
        ticket = self.submit([write])
        self._texts[ticket] = text
        return ticket

    def poll(self, ticket: int) -> Any:
        progress = super().poll(ticket)
        if progress.state.value == "done" and ticket in self._texts:
            self.texts.append(self._texts.pop(ticket))
        return progress


class NotifyStage(Stage):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.notifying: dict[int, NotifyingWriter] = {}

        def writer_for(hello: Any, rank: int, epoch: str) -> NotifyingWriter:
            self.notifying[rank] = NotifyingWriter(self.control.arenas[rank])
            return self.notifying[rank]

        self.fleet = writer_for  # type: ignore[assignment]
        self.pusher = self.make(NotifyControl(self.control.hello()))

    def start_granted(self) -> PushJob:
        return self.pusher.start_granted(self.control.grant(100), self.slots[:100])


def test_without_a_control_connection_the_commit_goes_with_the_transfer() -> None:
    stage = NotifyStage(num_ranks=2)
    job = finish(stage.start_granted())
    assert job.result.ok and job.result.bytes == 2 * SHARD_BYTES
    for rank, writer in stage.notifying.items():
        (text,) = writer.texts
        said = json.loads(text)
        pool = stage.pools[rank]
        planes = [torch.empty(100 * place.stride_bytes, dtype=torch.uint8) for place in pool.planes]
        sums = gather(pool, stage.slots[:100], planes)
        assert said["slab_handle"] == 1 and said["epoch"] == "one" and said["rank"] == rank
        assert (said["num_bytes"], said["num_tokens"]) == (SHARD_BYTES, 100)
        assert [tuple(pair) for pair in said["checksums"]] == list(sums)
        notice = writer.begun[-1]
        assert notice.size_bytes == flights_module.NOTICE_BYTES
        memory = bytes(stage.control.arenas[rank].memory)
        assert all(plane.numpy().tobytes() in memory for plane in planes), "the bytes stay what they are"
    assert stage.control.said == []
    stage.check_idle()


def test_a_notification_that_failed_is_repeated_and_says_so() -> None:
    stage = NotifyStage()
    job = stage.start_granted()
    while not stage.notifying.get(0) or not stage.notifying[0]._texts:
        assert not job.step(1 << 20)
        if job.bytes_done == SHARD_BYTES and 0 in stage.notifying:
            stage.notifying[0].plan("fails") if not stage.notifying[0]._plan else None
    finish(job)
    assert job.result.ok and job.result.retried_pieces >= 1 and not job.result.drained
    (text,) = stage.notifying[0].texts
    assert json.loads(text)["drained"] is False
    stage.check_idle()


def test_a_notification_that_is_under_way_at_the_end_keeps_its_buffer() -> None:
    stage = NotifyStage()
    job = stage.start_granted()
    while not stage.notifying.get(0) or not stage.notifying[0]._texts:
        if job.bytes_done == SHARD_BYTES and not stage.notifying[0]._plan:
            stage.notifying[0].plan(*["stuck"] * 3)
            stage.notifying[0].unstick()
        assert not job.step(1 << 20)
        if not stage.notifying[0]._texts:
            stage.notifying[0].unstick()
    assert job.cancel().drained is False
    assert (stage.pusher.lingering, stage.pusher._ring.lent) == (1, 1)
    stage.notifying[0].unstick()
    stage.pusher.poll()
    stage.check_idle()


def test_without_a_control_connection_nobody_prepares_here() -> None:
    stage = NotifyStage()
    result = stage.push()
    assert (result.ok, result.reason) == (False, Reason.INVALID_REQUEST)
    assert "start_granted" in result.detail


def test_a_transport_without_notifications_needs_a_control_connection() -> None:
    stage = Stage()
    pusher = stage.make(NotifyControl(stage.control.hello()))
    job = finish(pusher.start_granted(stage.control.grant(100), stage.slots[:100]))
    assert not job.result.ok and "control connection" in job.result.detail
    assert pusher._ring.lent == 0


def test_a_push_that_hears_nothing_gives_up_in_time() -> None:
    stage = NotifyStage()
    job = stage.start_granted()
    step(job, 1)
    stage.notifying[0].plan("stuck")
    step(job, 3)
    stage.clock.now_s += 29
    step(job, 1)
    stage.clock.now_s += 2
    assert job.step(1) and "30000 ms" in job.result.detail


def test_the_time_of_the_bytes_counts() -> None:
    control = NotifyControl(FakeControl().hello(), transfer_timeout_ms=1_000, transfer_min_mb_per_s=10)
    assert control.lifetime_ms(20_000_000) == 3_000


def test_over_shared_memory_a_control_connection_is_needed() -> None:
    control = FakeControl()
    hello = control.hello
    pools = pools_of((8,), 8)
    control.layout = layout_of(pools)
    import msgspec

    control.hello = lambda: msgspec.structs.replace(hello(), transport="shm")  # type: ignore[method-assign]
    result = Pusher(control, pools).push("s", range(4), torch.arange(4))
    assert not result.ok and "control connection" in result.detail
