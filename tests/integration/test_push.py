"""D's side over a real daemon: pushes in steps, how they end, and what is left when D or the daemon goes."""

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from kv_cases import (
    MHA,
    PATIENCE_S,
    TOKENS,
    Kind,
    Pair,
    begun,
    child,
    finish,
    finish_all,
    make_pool,
    num_mappings,
    paired,
    record,
    records,
    settle,
)
from raw_client import LogFollower, running, wait_for

from snapd.client import Client
from snapd.core import records as rec
from snapd.core.events import State
from snapd.core.slab import Extent
from snapd.errors import InvalidRequest, LayoutMismatch, Reason
from snapd.kv.checksum import plane_checksum
from snapd.kv.copy import GatherJob, gather
from snapd.kv.mappedjob import few_writes
from snapd.kv.push import Pusher
from snapd.layout import Namespace
from snapd.links import Link
from snapd.transport.base import Progress, TicketState, Write
from snapd.transport.shm import ShmWriter
from snapd.units import MIB
from snapd.wire import BeginIngestReq, GetReq, HandleRequest

# Long enough that what ends sooner was ended by a proof.
QUARANTINE_MS = 2_000
# Long beside the first steps of a push on a busy machine.
TIMEOUT_MS = 1_000


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Any, LogFollower]]:
    with running(ranks=2, size="4MiB", quarantine_ms=QUARANTINE_MS) as daemon:
        yield daemon, LogFollower(daemon.log_path)


@pytest.fixture
def daemon(served: tuple[Any, LogFollower]) -> Iterator[Any]:
    """A daemon with two ranks; after each test all its bytes are free and its log has told the story."""
    yield served[0]
    settle(*served)


# --- steps -----------------------------------------------------------------------------------------


def test_small_steps_leave_room_for_other_calls_on_the_same_client(daemon: Any) -> None:
    with paired(daemon, num_ranks=2) as pair:
        job = pair.start("s", TOKENS, pair.slots(len(TOKENS)))
        assert job.grant is not None and not job.done
        handle = job.grant.slab_handle
        states: list[State] = []
        done_bytes = [job.bytes_done]
        while not job.step(1):
            states.append(pair.d.get(handle).session.state)
            done_bytes.append(job.bytes_done)
        assert len(states) >= 2 * pair.pusher.layout.num_planes - 1, "a plane of a rank a step"
        assert set(states) == {State.TRANSFERRING}
        assert done_bytes == sorted(set(done_bytes)), "every step moves something"
        assert pair.view(handle).state is State.READY
        result = job.result
        assert (result.ok, result.reason, result.slab_handle) == (True, Reason.OK, handle)
        assert result.bytes == len(TOKENS) * pair.token_bytes * 2
        assert result.total_ms >= result.gather_ms > 0
        assert job.step(1), "a push that has ended stays ended"
        assert all(answer.ok for answer in pair.ingest("s", TOKENS, handle))


def test_a_result_is_not_to_be_had_before_the_end(daemon: Any) -> None:
    with paired(daemon) as pair:
        job, _ = begun(pair)
        with pytest.raises(InvalidRequest):
            job.result  # noqa: B018
        assert finish(job).result.ok


def test_several_jobs_on_one_client_end_each_in_its_own_way(daemon: Any) -> None:
    with paired(daemon) as pair, Client(str(daemon.socket_path)) as operator:
        started = [begun(pair, f"s{number}") for number in range(4)]
        jobs, handles = [job for job, _ in started], [handle for _, handle in started]
        operator.abort(handles[1])
        jobs[2].cancel(Reason.SESSION_NOT_RESIDENT)
        pair.d.ping()  # Behind it on the socket is nothing of the abort any more.
        assert not jobs[0].step(1), "what ended is another job's attempt"
        assert finish(jobs[0]).result.ok and finish(jobs[3]).result.ok
        assert jobs[1].step(1), "it was told although its siblings looked first"
        assert [job.result.reason for job in jobs] == [
            Reason.OK, Reason.CLIENT_ABORT, Reason.SESSION_NOT_RESIDENT, Reason.OK,
        ]  # fmt: skip
        for session_id, handle in (("s0", handles[0]), ("s3", handles[3])):
            assert pair.ingest(session_id, TOKENS, handle)[0].ok
        assert pair.is_all_free()


def test_ends_of_attempts_that_no_job_writes_any_more_are_kept(daemon: Any) -> None:
    with paired(daemon) as pair:
        handle = pair.ready("first", TOKENS)
        assert pair.ingest("first", TOKENS, handle)[0].ok
        pair.d.ping()
        job, _ = begun(pair, "second")
        assert [(x.slab_handle, x.state) for x in pair.pusher.ended] == [(handle, State.INGESTED)]
        assert finish(job).result.ok


# --- how a push ends early ---------------------------------------------------------------------------


def test_a_session_that_d_evicts_is_cancelled_and_its_slab_is_free_at_once(daemon: Any) -> None:
    with paired(daemon) as pair:
        job, handle = begun(pair)
        result = job.cancel(Reason.SESSION_NOT_RESIDENT)
        assert (result.ok, result.reason, result.slab_handle) == (False, Reason.SESSION_NOT_RESIDENT, handle)
        assert job.done and job.step(1)
        assert pair.view(handle).reason == Reason.SESSION_NOT_RESIDENT
        assert pair.is_all_free(), "no copy is under way between steps"
        assert job.cancel() == result, "cancelled twice is cancelled once"


def test_a_push_that_is_done_is_not_cancelled(daemon: Any) -> None:
    with paired(daemon) as pair:
        job = finish(begun(pair)[0])
        assert job.cancel().ok
        assert pair.view(job.result.slab_handle).state is State.READY


def test_an_abort_by_an_operator_is_noticed_between_steps_and_answered_with_drain_proof(daemon: Any) -> None:
    with paired(daemon) as pair, Client(str(daemon.socket_path)) as operator:
        job, handle = begun(pair)
        done_bytes = job.bytes_done
        operator.abort(handle)
        assert record(daemon, rec.SlabQuarantined, handle).why == "undrained"
        pair.d.ping()
        assert job.step(1)
        assert job.bytes_done <= done_bytes, "not a byte more was written"
        assert (job.result.ok, job.result.reason) == (False, Reason.CLIENT_ABORT)
        assert pair.is_all_free()
        assert record(daemon, rec.SlabReleased, handle).why == "drained"


def test_an_abort_that_is_noticed_at_the_commit_is_told_with_its_own_reason(
    daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with paired(daemon) as pair, Client(str(daemon.socket_path)) as operator:
        job, handle = begun(pair)
        step = GatherJob.step

        def step_and_abort(gathering: GatherJob, max_bytes: int) -> bool:
            is_done = step(gathering, max_bytes)
            if is_done:
                operator.abort(handle)
            return is_done

        monkeypatch.setattr(GatherJob, "step", step_and_abort)
        assert finish(job).result.reason == Reason.CLIENT_ABORT
        assert pair.is_all_free()


def test_a_newer_push_of_the_session_supersedes_one_under_way(daemon: Any) -> None:
    with paired(daemon) as pair:
        older, handle = begun(pair)
        newer, _ = begun(pair)
        assert older.step(1)
        assert older.result.reason == Reason.SUPERSEDED
        assert pair.view(handle).reason == Reason.SUPERSEDED
        assert pair.ingest("s", TOKENS, finish(newer).result.slab_handle)[0].ok


def test_an_attempt_that_ends_before_it_has_started_is_told_with_its_reason(
    daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Client.transfer_started

    def abort_and_start(client: Client, handle: int, **fields: Any) -> Any:
        client.abort(handle)
        return started(client, handle, **fields)

    with paired(daemon) as pair:
        monkeypatch.setattr(Client, "transfer_started", abort_and_start)
        job = pair.start("s", TOKENS, pair.slots(len(TOKENS)))
        assert job.done and job.result.reason == Reason.CLIENT_ABORT
        assert pair.is_all_free(), "drain proof was given"


def test_every_message_about_an_attempt_names_the_epoch(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[HandleRequest] = []
    submit = Link.submit

    def note_and_submit(link: Link, call: Any) -> Any:
        if isinstance(call.request, HandleRequest) and not isinstance(call.request, (BeginIngestReq, GetReq)):
            said.append(call.request)
        return submit(link, call)

    with paired(daemon) as pair:
        monkeypatch.setattr(Link, "submit", note_and_submit)
        job, _ = begun(pair)
        job.cancel()
        handle = pair.ready("s", TOKENS)
        pair.tree.limit_tokens = 0
        assert not pair.ingest("s", TOKENS, handle)[0].ok
        pair.tree.limit_tokens = None
        assert pair.ingest("s", TOKENS, handle)[0].ok
        wrong = gathered(pair)
        wrong[0].pop()
        assert not pair.pusher.push_planes("t", TOKENS, wrong).ok
        assert pair.pusher.push_planes("t", TOKENS, gathered(pair)).ok
        assert {type(request).__name__ for request in said} == {
            "TransferStartedReq", "CommitReq", "TransferFailedReq", "VoteReq",
        }  # fmt: skip
        assert {request.epoch for request in said} == {pair.d.epoch}


def test_a_closed_pusher_maps_nothing_once_its_jobs_have_ended(daemon: Any) -> None:
    before = num_mappings()
    with paired(daemon) as pair:
        assert num_mappings() == before + 1, "the ingester has its arena from the start"
        ended, cancelled = finish(begun(pair, "s")[0]), begun(pair, "t")[0]
        cancelled.cancel()
        assert num_mappings() == before + 2
        pair.pusher.close()
        assert ended.done and cancelled.done
        assert num_mappings() == before + 1, "a job that has ended keeps no plane"
        handle = pair.ready("u", TOKENS)
        (ingest,) = pair.start_ingest("u", TOKENS, handle)
        finish_all([ingest])
        pair.pusher.close()
        assert num_mappings() == before + 1
        pair.ingesters[0].close()
        assert ingest.done and num_mappings() == before


def test_a_copy_that_raises_ends_the_attempt(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with paired(daemon) as pair:
        job, handle = begun(pair)

        def fail(*_: object) -> None:
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(GatherJob, "step", fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                job.step(1)
        assert job.done and not job.result.ok
        assert pair.view(handle).reason == Reason.TRANSFER_FAILED
        assert pair.is_all_free()


# --- refusals ----------------------------------------------------------------------------------------


def test_a_full_buffer_is_refused_with_when_to_try_again(start_daemon: Callable[..., Any]) -> None:
    daemon = start_daemon(size=f"{MIB}B")
    with paired(daemon, Kind(k_rows=((2048,),) * 2)) as pair:
        tokens = range(100)
        job = pair.start("first", tokens, pair.slots(100))
        refused = pair.push("second", tokens)
        assert (refused.ok, refused.reason, refused.slab_handle) == (False, Reason.SNAPSHOT_BUF_FULL, 0)
        assert refused.retry_after_ms > 0 and "free" in refused.detail
        job.cancel()
        assert pair.push("second", tokens).ok


def test_a_push_that_an_empty_arena_could_not_hold_is_too_large(daemon: Any) -> None:
    with paired(daemon, Kind(k_rows=((8192,),) * 2)) as pair:
        job = pair.start("s", range(200), pair.slots(200))
        assert job.done and job.step(1), "there is nothing to step"
        assert (job.result.ok, job.result.reason) == (False, Reason.TOO_LARGE)
        assert job.bytes_done == 0 and job.cancel().reason == Reason.TOO_LARGE


def test_before_p_has_declared_its_layout_a_push_is_refused(daemon: Any) -> None:
    namespace = Namespace(tenant="early")
    with Client(str(daemon.socket_path)) as client:
        pusher = Pusher(client, {0: make_pool(MHA, 512, 1)}, namespace)
        refused = pusher.push("s", TOKENS, torch.arange(len(TOKENS)))
        assert (refused.ok, refused.reason) == (False, Reason.LAYOUT_MISMATCH)
    with paired(daemon, namespace=namespace) as pair:
        assert pair.push("s", TOKENS).ok


@pytest.mark.parametrize(
    "slots",
    [torch.arange(79), torch.arange(81), torch.arange(80) + 433, torch.zeros(80, dtype=torch.int64)],
    ids=["too few", "too many", "out of range", "named twice"],
)
def test_slots_that_do_not_fit_are_refused_before_the_daemon_is_asked(
    daemon: Any, slots: torch.Tensor
) -> None:
    with paired(daemon) as pair:
        attempts = pair.core().attempts
        with pytest.raises(InvalidRequest):
            pair.pusher.start("s", TOKENS, slots)
        assert pair.core().attempts == attempts


def test_a_second_ranks_pool_is_checked_too(daemon: Any) -> None:
    with paired(daemon, num_ranks=2) as pair:
        pair.pusher.pools[1] = make_pool(MHA, 100, 1)
        with pytest.raises(InvalidRequest, match="the pool has 100"):
            pair.pusher.start("s", TOKENS, torch.arange(80) + 200)


def test_pools_of_different_layouts_make_no_pusher(daemon: Any) -> None:
    with Client(str(daemon.socket_path)) as client:
        pools = {0: make_pool(MHA, 64, 1), 1: make_pool(Kind(k_rows=((3,),)), 64, 1)}
        with pytest.raises(LayoutMismatch):
            Pusher(client, pools)
        with pytest.raises(LayoutMismatch):
            Pusher(client, {})


def test_a_pool_that_is_not_the_declared_one_ends_the_attempt(daemon: Any) -> None:
    """A grant is for the layout that was asked for; planes of other widths are not written."""
    with paired(daemon) as pair:
        pair.pusher.pools[0] = make_pool(Kind(k_rows=((2, 8),) * 3, v_rows=((2, 8),) * 3), 512, 1)
        result = pair.push("s", TOKENS)
        assert (result.ok, result.reason) == (False, Reason.INVALID_REQUEST)
        assert pair.view(result.slab_handle).reason == Reason.TRANSFER_FAILED
        assert pair.is_all_free()


def test_a_session_longer_than_the_page_keys_that_a_request_may_have_is_pushed(daemon: Any) -> None:
    """With pages of one token that is 16,384 tokens; what is beyond is found by its session only."""
    kind = Kind(k_rows=((8,),), dtype=torch.uint8)
    with paired(daemon, kind, num_slots=20_000) as pair:
        result = pair.push("s", range(20_000))
        assert result.ok, result
        assert pair.core().page_keys == pair.d.hello.page_keys_max
        assert pair.ingest("s", range(20_000), result.slab_handle)[0].ok


def test_page_keys_are_not_sent_when_they_are_not_wanted(daemon: Any) -> None:
    with paired(daemon) as pair:
        pair.pusher = Pusher(pair.d, pair.d_pools, pair.pusher.layout.namespace, send_page_keys=False)
        handle = pair.ready("s", TOKENS)
        assert pair.core().page_keys == 0
        assert pair.ingest("s", TOKENS, handle)[0].ok


# --- planes that were gathered before ------------------------------------------------------------------


def gathered(pair: Pair) -> dict[int, list[torch.Tensor]]:
    slots = pair.slots(len(TOKENS))
    planes: dict[int, list[torch.Tensor]] = {}
    for rank, pool in pair.d_pools.items():
        sizes_bytes = [plane.stride_bytes * len(TOKENS) for plane in pool.planes]
        planes[rank] = [torch.empty(size_bytes, dtype=torch.uint8) for size_bytes in sizes_bytes]
        gather(pool, slots, planes[rank])
        pair._truth[rank, "s"] = [plane.rows[slots].clone() for plane in pool.planes]
    return planes


@pytest.mark.parametrize("with_sums", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_planes_that_were_gathered_before_arrive_as_they_are(
    daemon: Any, with_sums: bool, num_ranks: int
) -> None:
    with paired(daemon, num_ranks=num_ranks) as pair:
        planes = gathered(pair)
        sums = (
            {rank: [plane_checksum(plane) for plane in planes[rank]] for rank in planes}
            if with_sums
            else None
        )
        result = pair.pusher.push_planes("s", TOKENS, planes, sums)
        assert result.ok, result
        assert result.bytes == len(TOKENS) * pair.token_bytes * num_ranks
        assert all(answer.ok for answer in pair.ingest("s", TOKENS, result.slab_handle))


def test_planes_of_another_size_are_refused_and_nothing_is_left(daemon: Any) -> None:
    with paired(daemon) as pair:
        planes = gathered(pair)
        planes[0][-1] = planes[0][-1][:-1]
        result = pair.pusher.push_planes("s", TOKENS, planes)
        assert (result.ok, result.reason) == (False, Reason.INVALID_REQUEST)
        assert pair.view(result.slab_handle).state is State.ABORTED
        assert pair.is_all_free()


def test_checksums_that_are_not_the_planes_own_are_noticed_by_p(daemon: Any) -> None:
    with paired(daemon) as pair:
        planes = gathered(pair)
        sums = [plane_checksum(plane) for plane in planes[0]]
        sums[0], sums[1] = sums[1], sums[0]
        result = pair.pusher.push_planes("s", TOKENS, planes, {0: sums})
        assert pair.ingest("s", TOKENS, result.slab_handle)[0].reason == Reason.CHECKSUM_MISMATCH


def test_a_write_that_fails_ends_the_attempt(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with paired(daemon) as pair:
        monkeypatch.setattr(ShmWriter, "poll", lambda *_: Progress(TicketState.FAILED))
        result = pair.pusher.push_planes("s", TOKENS, gathered(pair))
        assert (result.ok, result.reason) == (False, Reason.TRANSFER_FAILED)
        assert pair.view(result.slab_handle).reason == Reason.TRANSFER_FAILED
        assert pair.is_all_free()


def test_before_the_first_write_the_transfer_has_started(
    daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From then on it is the transfer's clock that counts."""
    states: list[State] = []
    submit = ShmWriter.submit

    def look_and_submit(writer: ShmWriter, writes: Sequence[Write]) -> int:
        states.extend(session.state for session in pair.d.list_sessions().sessions)
        return submit(writer, writes)

    with paired(daemon) as pair:
        monkeypatch.setattr(ShmWriter, "submit", look_and_submit)
        assert pair.pusher.push_planes("s", TOKENS, gathered(pair)).ok
        assert states == [State.TRANSFERRING]


def test_planes_of_an_attempt_that_was_aborted_end_with_its_reason(
    daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = ShmWriter.submit
    with paired(daemon) as pair, Client(str(daemon.socket_path)) as operator:

        def abort_and_submit(writer: ShmWriter, writes: Sequence[Write]) -> int:
            (session,) = operator.list_sessions().sessions
            operator.abort(session.slab_handle)
            return submit(writer, writes)

        monkeypatch.setattr(ShmWriter, "submit", abort_and_submit)
        result = pair.pusher.push_planes("s", TOKENS, gathered(pair))
        assert (result.ok, result.reason) == (False, Reason.CLIENT_ABORT)
        assert pair.is_all_free(), "with drain proof"


def test_a_rank_without_planes_is_the_caller_s_fault_and_leaves_nothing(daemon: Any) -> None:
    with paired(daemon, num_ranks=2) as pair:
        planes = gathered(pair)
        del planes[1]
        with pytest.raises(KeyError):
            pair.pusher.push_planes("s", TOKENS, planes)
        assert pair.core().open_sessions == 0
        assert pair.is_all_free(), "with drain proof"


def test_planes_that_are_refused_say_why(daemon: Any) -> None:
    with paired(daemon) as pair:
        result = pair.pusher.push_planes("", TOKENS, gathered(pair))
        assert (result.ok, result.reason, result.slab_handle) == (False, Reason.INVALID_REQUEST, 0)


# --- D goes ------------------------------------------------------------------------------------------


def test_a_killed_d_is_gone_and_its_slab_is_free_at_once(start_daemon: Callable[..., Any]) -> None:
    """Its exit is drain proof: the quarantine's hour is not waited for."""
    daemon = start_daemon(quarantine_ms=3_600_000)
    with paired(daemon, namespace=Namespace()) as pair, child(daemon, "s", 80, steps=3) as d:
        assert pair.view(d.handle).state is State.TRANSFERRING and not pair.is_all_free()
        d.signal(signal.SIGKILL)
        wait_for(lambda: pair.view(d.handle).state is State.ABORTED, "the attempt has ended", PATIENCE_S)
        assert pair.view(d.handle).reason == Reason.WRITER_GONE
        assert pair.is_all_free()
        assert not records(daemon, rec.SlabQuarantined, d.handle)


def test_a_stopped_d_is_timed_out_and_its_drain_proof_ends_the_quarantine(
    start_daemon: Callable[..., Any],
) -> None:
    daemon = start_daemon(quarantine_ms=3_600_000, transfer_timeout_ms=TIMEOUT_MS)
    with paired(daemon, namespace=Namespace()) as pair, child(daemon, "s", 80, steps=3) as d:
        d.signal(signal.SIGSTOP)
        wait_for(lambda: pair.view(d.handle).state is State.ABORTED, "the attempt has ended", PATIENCE_S)
        assert pair.view(d.handle).reason == Reason.TRANSFER_TIMEOUT
        (arena,) = pair.core().arenas
        assert arena.quarantined_bytes > 0 and arena.live_bytes == 0
        result = d.finish()
        assert (result.ok, result.reason) == (False, Reason.TRANSFER_TIMEOUT)
        wait_for(pair.is_all_free, "the quarantine is over", PATIENCE_S)
        assert record(daemon, rec.SlabReleased, d.handle).why == "drained"


def test_a_killed_d_ends_the_quarantine_that_its_timeout_began(start_daemon: Callable[..., Any]) -> None:
    daemon = start_daemon(quarantine_ms=3_600_000, transfer_timeout_ms=TIMEOUT_MS)
    with paired(daemon, namespace=Namespace()) as pair, child(daemon, "s", 80, steps=3) as d:
        d.signal(signal.SIGSTOP)
        wait_for(lambda: pair.view(d.handle).state is State.ABORTED, "the attempt has ended", PATIENCE_S)
        assert not pair.is_all_free()
        d.signal(signal.SIGKILL)
        wait_for(pair.is_all_free, "the quarantine is over", PATIENCE_S)
        assert record(daemon, rec.SlabReleased, d.handle).why == "writer-gone"


def test_after_a_lost_connection_it_asks_before_another_byte_is_written(daemon: Any) -> None:
    """The end was told to a connection that is gone; the slab may have another owner by now."""
    with paired(daemon) as pair, Client(str(daemon.socket_path)) as operator:
        job, handle = begun(pair)
        written_bytes = job.bytes_done
        sock = pair.d._link._channel.sock
        assert sock is not None
        sock._sock.shutdown(socket.SHUT_RDWR)
        operator.abort(handle)
        assert job.step(1)
        assert (job.result.ok, job.result.reason) == (False, Reason.STALE_HANDLE)
        assert job.bytes_done <= written_bytes
        assert pair.is_all_free(), "with drain proof"


def test_a_lost_connection_alone_does_not_end_a_push(daemon: Any) -> None:
    with paired(daemon) as pair:
        job, handle = begun(pair)
        sock = pair.d._link._channel.sock
        assert sock is not None
        sock._sock.shutdown(socket.SHUT_RDWR)
        assert finish(job).result.ok
        assert pair.ingest("s", TOKENS, handle)[0].ok


# --- as few writes as there can be -------------------------------------------------------------------


def staged_planes(sizes_bytes: Sequence[int], gap_bytes: int) -> list[torch.Tensor]:
    storage = torch.zeros(sum(sizes_bytes) + gap_bytes * len(sizes_bytes), dtype=torch.uint8)
    planes, start = [], 0
    for size_bytes in sizes_bytes:
        planes.append(storage[start : start + size_bytes])
        start += size_bytes + gap_bytes
    return planes


def test_neighbours_that_lie_alike_are_one_write_with_the_padding_between_them() -> None:
    source, target = staged_planes([100, 50, 30], 28), staged_planes([100, 50, 30], 28)
    base = target[0].data_ptr() - 512
    assert few_writes(source, target, base, [Extent(512, 300)]) == [Write(source[0].data_ptr(), 512, 236)]


def test_planes_that_lie_otherwise_are_writes_of_their_own() -> None:
    source, target = staged_planes([100, 50], 0), staged_planes([100, 50], 28)
    base = target[0].data_ptr()
    assert few_writes(source, target, base, [Extent(0, 300)]) == [
        Write(source[0].data_ptr(), 0, 100), Write(source[1].data_ptr(), 128, 50),
    ]  # fmt: skip


def test_no_write_crosses_from_one_extent_into_another() -> None:
    source, target = staged_planes([100, 50], 28), staged_planes([100, 50], 28)
    writes = few_writes(source, target, target[0].data_ptr(), [Extent(0, 128), Extent(128, 128)])
    assert [write.size_bytes for write in writes] == [100, 50]


def test_nothing_is_read_between_two_allocations_that_only_happen_to_be_neighbours() -> None:
    whole = torch.zeros(256, dtype=torch.uint8)
    parts = [torch.frombuffer(whole.numpy(), dtype=torch.uint8, count=100, offset=at) for at in (0, 128)]
    target = staged_planes([100, 100], 28)
    assert len(few_writes(parts, target, target[0].data_ptr(), [Extent(0, 300)])) == 2


# --- without torch -----------------------------------------------------------------------------------


def test_without_torch_it_says_how_to_get_it() -> None:
    script = """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find_spec(name, *rest)
import snapd.kv
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "pip install 'kv-snapd[kv]'" in ended.stderr and ended.returncode == 1
