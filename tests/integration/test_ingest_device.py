"""Ingests whose copies run on a device beside everything else: a real daemon, and a device that is a fake."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from fake_device import FakeDevice, FakeStream
from kv_cases import (
    KINDS,
    ODD,
    STEP_BYTES,
    Pair,
    corrupt_plane,
    finish_all,
    first_turn,
    paired,
    settle,
    tokens_of,
)
from raw_client import LogFollower, running, wait_for
from structlog.testing import capture_logs

from snapd.client import Client
from snapd.core.events import State
from snapd.errors import ConfigError, ConnectionLost, InvalidRequest, InvariantBroken, Reason
from snapd.kv import devicescatter, ingest, ingestjob, torchcopy
from snapd.kv.ingest import Ingester, IngestJob
from snapd.mapping import MappedArena
from snapd.units import MS_PER_S
from snapd.wire import BeginIngestRep, HelloRep, SnapshotFinalizeIngestReqInput

LEASE_MS = 1_000


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Any, LogFollower]]:
    with running(ranks=2, size="4MiB", quarantine_ms=50) as daemon:
        yield daemon, LogFollower(daemon.log_path)


@pytest.fixture
def daemon(served: tuple[Any, LogFollower]) -> Iterator[Any]:
    """A daemon with two ranks; after each test all its bytes are free and its log has told the story."""
    yield served[0]
    settle(*served)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """What every pool is on."""
    fake = FakeDevice()
    monkeypatch.setattr(ingest, "choose_copy", lambda device: fake.copies)
    return fake


@pytest.fixture
def held(device: FakeDevice) -> FakeDevice:
    """The same, and it does nothing until it is released."""
    device.looks = None
    return device


def launched(pair: Pair, handle: int, num_tokens: int = 40) -> IngestJob:
    """Begin an ingest and launch its copy."""
    (job,) = pair.start_ingest("s", tokens_of(num_tokens), handle)
    assert not job.step(STEP_BYTES)
    assert job.is_on_device
    return job


# --- bytes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_p_holds_ds_bytes_and_no_other_slot_is_touched(
    daemon: Any, device: FakeDevice, kind: str, num_ranks: int
) -> None:
    with paired(daemon, KINDS[kind], num_ranks=num_ranks) as pair:
        handle = pair.ready("s", tokens_of(71))
        assert all(answer.ok for answer in pair.ingest("s", tokens_of(71), handle))
        assert len(device.launched) == num_ranks, "all planes at once"
        assert all(tree.tokens("s") == tokens_of(71) for tree in pair.trees)


@pytest.mark.parametrize("kind", ["mha", "odd", "mha, pages", "odd, pages", "fp8"])
@pytest.mark.parametrize(("had", "pushed"), [(48, 75), (50, 75), (75, 75)])
def test_of_a_snapshot_that_p_holds_in_part_the_rest_is_moved(
    daemon: Any, device: FakeDevice, monkeypatch: pytest.MonkeyPatch, kind: str, had: int, pushed: int
) -> None:
    monkeypatch.setattr(devicescatter, "PRIVATE_BYTES", 1_000)
    monkeypatch.setattr(torchcopy, "SUMMED_BYTES", 1_000)
    device.reads_at_launch = True
    page = KINDS[kind].page_size_tokens
    with paired(daemon, KINDS[kind]) as pair:
        first_turn(pair, "s", had)
        result = pair.push("s", tokens_of(pushed), use_resident_hint=False)
        device.launched.clear()
        assert pair.ingest("s", tokens_of(pushed), result.slab_handle)[0].ok
        missing = pushed - had // page * page
        assert pair.tree.allocations[1:] == ([missing] if missing else [])
        assert bool(device.launched) == bool(missing)
        if kind == "odd" and had == 50:
            assert len(device.launched) > 1, "in private memory, as much of it as there may be"


@pytest.mark.parametrize("kind", ["mha", "odd", "odd, pages"])
@pytest.mark.parametrize(("had", "at"), [(37, 9), (75, 9), (37, -1), (37, 0)])
def test_a_corrupt_byte_is_noticed_in_what_p_holds_and_at_the_cut(
    daemon: Any, device: FakeDevice, kind: str, had: int, at: int
) -> None:
    with paired(daemon, KINDS[kind]) as pair:
        first_turn(pair, "s", had)
        result = pair.push("s", tokens_of(75), use_resident_hint=False)
        width = pair.pusher.layout.k_stride_bytes[0]
        corrupt_plane(daemon, pair, result.slab_handle, at if at > 0 else had * width + at)
        (answer,) = pair.ingest("s", tokens_of(75), result.slab_handle)
        assert (answer.ok, answer.reason) == (False, Reason.CHECKSUM_MISMATCH)
        assert pair.tree.inserts == ["s"] and pair.tree.tokens("s") == tokens_of(had)


@pytest.mark.parametrize("kind", ["mha", "odd", "mha, pages", "odd, pages"])
def test_a_prompt_that_shares_a_prefix_gets_that_prefix_only(
    daemon: Any, device: FakeDevice, kind: str
) -> None:
    with paired(daemon, KINDS[kind]) as pair:
        handle = pair.ready("s", tokens_of(75))
        job = pair.ingesters[0].start("s", tokens_of(48), handle, wanted_tokens=48)
        assert finish_all([job])[0].num_tokens == 48
        assert pair.tree.tokens("s") == tokens_of(48)
        assert pair.view(handle).state is State.INGESTED


def test_without_verification_what_p_lacks_is_moved_all_the_same(daemon: Any, device: FakeDevice) -> None:
    with paired(daemon, ODD, verify=False) as pair:
        first_turn(pair, "s", 37)
        result = pair.push("s", tokens_of(75), use_resident_hint=False)
        assert pair.ingest("s", tokens_of(75), result.slab_handle)[0].ok


def test_an_explicit_suffix_goes_onto_the_prefix_that_p_holds(daemon: Any, device: FakeDevice) -> None:
    with paired(daemon, KINDS["odd, pages"]) as pair:
        first_turn(pair, "s", 48)
        result = pair.push("s", tokens_of(75), token_start=32, use_resident_hint=False)
        assert pair.ingest("s", tokens_of(75), result.slab_handle)[0].ok
        assert pair.tree.tokens("s") == tokens_of(75)


# --- nothing waits, and nothing is said too early ------------------------------------------------------


def test_a_step_comes_back_while_the_device_works_and_no_vote_is_cast(daemon: Any, held: FakeDevice) -> None:
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(40))
        job = launched(pair, handle)
        launched_s = time.monotonic()
        for _ in range(20):
            assert not job.step(STEP_BYTES)
        job.wait()
        assert not job.is_waiting and job.decision is None
        assert len(held.launched) == 1, "it is launched once"
        assert pair.view(handle).is_leased and pair.tree.inserts == []
        held_ms = (time.monotonic() - launched_s) * MS_PER_S
        held.release()
        assert finish_all([job])[0].ok
        assert not job.is_on_device
        assert job.times.scatter_ms >= held_ms > 0


def test_a_mismatch_is_known_before_the_vote(daemon: Any, held: FakeDevice) -> None:
    """The bytes change while the copy is under way."""
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(40))
        job = launched(pair, handle)
        corrupt_plane(daemon, pair, handle, offset_bytes=100)
        held.release()
        assert finish_all([job])[0].reason == Reason.CHECKSUM_MISMATCH
        assert pair.tree.inserts == [] and not job.is_waiting


def test_waiting_for_the_device_is_bounded(
    daemon: Any, held: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingestjob, "DEVICE_WAIT_S", 0.01)
    with paired(daemon) as pair:
        (job,) = pair.start_ingest("s", tokens_of(40), pair.ready("s", tokens_of(40)))
        job.wait()
        assert held.launched == [], "nothing is launched: there is nothing to wait for"
        job.step(STEP_BYTES)
        started_s = time.monotonic()
        job.wait()
        assert not job.done and time.monotonic() - started_s >= 0.01
        held.release()
        assert not job.is_on_device
        job.step(STEP_BYTES)
        assert job.is_waiting or job.done
        assert finish_all([job])[0].ok


def test_finalize_ingest_waits_for_the_device(
    daemon: Any, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.looks = 50
    steps: list[int] = []
    step = IngestJob.step

    def count_and_step(job: IngestJob, max_bytes: int) -> bool:
        steps.append(max_bytes)
        return step(job, max_bytes)

    monkeypatch.setattr(IngestJob, "step", count_and_step)
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(40))
        request = SnapshotFinalizeIngestReqInput(session_id="s", token_ids=tokens_of(40), slab_handle=handle)
        assert pair.ingesters[0].finalize_ingest(request).ok
        assert len(steps) < 70, "it looks a bounded number of times"


def test_a_pool_on_the_host_has_no_events(daemon: Any, device: FakeDevice) -> None:
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(40))
        with pytest.raises(InvalidRequest, match="no events"):
            pair.ingesters[0].start("s", tokens_of(40), handle, after=[object()])
        assert not pair.view(handle).is_leased
        job = launched(pair, handle)
        with pytest.raises(InvalidRequest, match="no copy is launched on a GPU"):
            _ = job.finished
        finish_all([job])
        assert pair.ingesters[0].stream_of(torch.device("cpu")) is None


# --- what is given up ends first ---------------------------------------------------------------------


def lent(pair: Pair) -> int:
    return len(pair.tree._lent)


def test_slots_and_lease_of_a_cancelled_ingest_go_back_when_its_copy_has_ended(
    daemon: Any, held: FakeDevice
) -> None:
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(40))
        job = launched(pair, handle)
        before = pair.core().requests_refused
        for _ in range(2):
            assert job.cancel()
            assert not job.step(STEP_BYTES)
            assert not job.done
            assert lent(pair) == 40, "the device may still write them"
            assert pair.view(handle).is_leased, "the device may still read the slab"
            assert pair.ingesters[0]._ending == [job], "once"
        held.release()
        assert job.step(STEP_BYTES)
        assert (job.result.ok, job.result.reason) == (False, Reason.INGEST_FAILED)
        assert lent(pair) == 0 and pair.tree.inserts == []
        view = pair.view(handle)
        assert (view.state, view.is_leased) == (State.READY, False)
        assert job.cancel() and job.step(1)
        assert pair.core().requests_refused == before, "one vote is cast"
        assert pair.ingest("s", tokens_of(40), handle)[0].ok


def test_before_its_copy_is_launched_an_ingest_ends_at_once(daemon: Any, held: FakeDevice) -> None:
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(40))
        (job,) = pair.start_ingest("s", tokens_of(40), handle)
        assert job.cancel() and job.done
        assert lent(pair) == 0 and held.launched == []
        assert not pair.view(handle).is_leased


@pytest.mark.parametrize("how", ["reap", "start"])
def test_a_cancelled_ingest_that_nobody_steps_is_given_back_all_the_same(
    daemon: Any, held: FakeDevice, how: str
) -> None:
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(40))
        launched(pair, handle).cancel()
        pair.ingesters[0].reap()
        assert lent(pair) == 40
        held.release()
        if how == "reap":
            pair.ingesters[0].reap()
        else:
            pair.ingesters[0].start("s", tokens_of(40), 12345)
        assert lent(pair) == 0
        assert not pair.view(handle).is_leased


def test_closing_waits_for_what_was_given_up(daemon: Any, held: FakeDevice) -> None:
    with paired(daemon) as pair:
        launched(pair, pair.ready("s", tokens_of(40))).cancel()
        held.launched[0].looks = 20
        pair.ingesters[0].close()
        assert lent(pair) == 0


def test_closing_does_not_wait_for_ever(
    daemon: Any, held: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "_CLOSE_S", 0.0)
    with paired(daemon) as pair:
        launched(pair, pair.ready("s", tokens_of(40))).cancel()
        with capture_logs() as logs:
            pair.ingesters[0].close()
        assert [x["log_level"] for x in logs] == ["warning"]
        assert lent(pair) == 40
        held.release()
        pair.ingesters[0].reap()


@pytest.mark.parametrize("error", [InvariantBroken("a bug"), RuntimeError("no kernel")], ids=["own", "other"])
def test_a_launch_that_fails_gives_back_after_what_was_launched_before_it(
    daemon: Any, held: FakeDevice, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(devicescatter, "PRIVATE_BYTES", 1_000)
    with paired(daemon, ODD) as pair:
        held.looks = 0
        first_turn(pair, "s", 37)
        handle = pair.push("s", tokens_of(75), use_resident_hint=False).slab_handle
        held.looks = None
        held.error[len(held.jobs) + 1] = error
        (job,) = pair.start_ingest("s", tokens_of(75), handle)
        if isinstance(error, RuntimeError):
            with pytest.raises(RuntimeError, match="no kernel"):
                job.step(STEP_BYTES)
        else:
            assert not job.step(STEP_BYTES)
        assert not job.step(STEP_BYTES) and not job.done
        assert lent(pair) == 75 - 37 and pair.view(handle).is_leased
        held.release()
        assert job.step(STEP_BYTES)
        assert job.result.reason == Reason.INGEST_FAILED
        assert lent(pair) == 0 and not pair.view(handle).is_leased
        assert pair.tree.inserts == ["s"]


@pytest.mark.parametrize("where", ["before the launch", "behind what was launched"])
def test_when_the_device_is_full_the_snapshot_stays_and_the_log_says_what_to_lower(
    daemon: Any, held: FakeDevice, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(devicescatter, "PRIVATE_BYTES", 1_000)
    full = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB")
    with paired(daemon, ODD) as pair:
        held.looks = 0
        first_turn(pair, "s", 37)
        handle = pair.push("s", tokens_of(75), use_resident_hint=False).slab_handle
        held.looks = None
        held.error[len(held.jobs) + (where != "before the launch")] = full
        (job,) = pair.start_ingest("s", tokens_of(75), handle)
        with capture_logs() as logs:
            job.step(STEP_BYTES)
            held.release()
            (answer,) = finish_all([job])
        assert (answer.ok, answer.reason) == (False, Reason.INGEST_FAILED)
        (told,) = logs
        assert told["log_level"] == "warning" and "mem_fraction_static" in told["error"]
        assert lent(pair) == 0 and pair.tree.inserts == ["s"]
        view = pair.view(handle)
        assert (view.state, view.is_leased) == (State.READY, False)
        assert pair.ingest("s", tokens_of(75), handle)[0].ok


def test_private_memory_is_taken_in_a_step_and_is_the_same_for_all_ingests(
    daemon: Any, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take turns, and none waits for another that nobody steps."""
    monkeypatch.setattr(devicescatter, "PRIVATE_BYTES", 1_500)
    device.reads_at_launch = True
    with paired(daemon, ODD) as pair:
        private = pair.ingesters[0].private
        handles = {}
        for session in ("s", "t", "u"):
            first_turn(pair, session, 37)
            handles[session] = pair.push(session, tokens_of(75), use_resident_hint=False).slab_handle
        jobs = [pair.start_ingest(session, tokens_of(75), handle)[0] for session, handle in handles.items()]
        assert private.size_bytes == 0
        jobs[0].step(1)
        buffer = private._buffer
        assert buffer is not None and private.size_bytes == 1_500
        assert all(answer.ok for answer in finish_all(jobs[1:]))
        assert finish_all(jobs[:1])[0].ok
        assert private._buffer is buffer
        pair.ingesters[0].close()
        assert private.size_bytes == 0


def test_an_ingest_whose_launch_was_interrupted_ends_and_the_snapshot_stays(
    daemon: Any, held: FakeDevice
) -> None:
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(40))
        held.error[len(held.jobs)] = KeyboardInterrupt()
        (job,) = pair.start_ingest("s", tokens_of(40), handle)
        with pytest.raises(KeyboardInterrupt):
            job.step(STEP_BYTES)
        assert job.step(STEP_BYTES)
        assert job.result.reason == Reason.INGEST_FAILED
        assert lent(pair) == 0 and pair.view(handle).state is State.READY
        held.release()
        assert pair.ingest("s", tokens_of(40), handle)[0].ok


# --- an owner that raises ------------------------------------------------------------------------------


class Broken:
    """A method of the owner that raises after it did its work, as often as it is called."""

    def __init__(self, act: Callable[..., Any], error: Exception) -> None:
        self.calls = 0
        self._act, self._error = act, error

    def __call__(self, *arguments: Any) -> None:
        self.calls += 1
        self._act(*arguments)
        raise self._error


@pytest.mark.parametrize("error", [RuntimeError("the engine's"), ConnectionLost("the engine's own")], ids=str)
@pytest.mark.parametrize("name", ["free", "unlock_prefix"])
def test_an_owner_that_raises_is_asked_once_and_stands_in_nobodys_way(
    daemon: Any, held: FakeDevice, name: str, error: Exception
) -> None:
    with paired(daemon) as pair:
        ingester = pair.ingesters[0]
        handles = {session: pair.ready(session, tokens_of(40)) for session in ("s", "t", "u")}
        jobs = [pair.start_ingest(session, tokens_of(40), handles[session])[0] for session in ("s", "t")]
        for job in jobs:
            job.step(STEP_BYTES)
            job.cancel()
        refused = pair.core().requests_refused
        broken = Broken(getattr(pair.tree, name), error)
        setattr(pair.tree, name, broken)
        held.release()
        with capture_logs() as logs:
            (other,) = pair.start_ingest("u", tokens_of(40), handles["u"])
        assert [x["log_level"] for x in logs] == ["error", "error"]
        assert broken.calls == 2 and all(job.done for job in jobs) and ingester._ending == []
        delattr(pair.tree, name)
        assert lent(pair) == 40, "of the one that goes on"
        assert finish_all([other])[0].ok
        assert pair.core().requests_refused == refused, "each has voted once"
        assert not any(pair.view(handles[session]).is_leased for session in ("s", "t"))


@pytest.mark.parametrize("name", ["free", "unlock_prefix"])
def test_what_an_owner_raises_comes_out_of_the_step_that_asked_it_and_all_else_is_done(
    daemon: Any, device: FakeDevice, name: str
) -> None:
    with paired(daemon) as pair:
        agreed: list[bool] = []
        pair.ingesters[0].agree = lambda _, commit: agreed.append(commit) or commit
        handle = pair.ready("s", tokens_of(40))
        corrupt_plane(daemon, pair, handle, offset_bytes=100)
        (job,) = pair.start_ingest("s", tokens_of(40), handle)
        broken = Broken(getattr(pair.tree, name), RuntimeError("the engine's"))
        setattr(pair.tree, name, broken)
        with pytest.raises(RuntimeError, match="the engine's"):
            finish_all([job])
        assert job.done and job.result.reason == Reason.CHECKSUM_MISMATCH
        assert broken.calls == 1 and agreed == [False]
        delattr(pair.tree, name)
        assert job.step(STEP_BYTES) and job.cancel()


def test_a_job_that_the_device_cannot_be_asked_about_is_told_of_once_and_the_others_go_on(
    daemon: Any, held: FakeDevice
) -> None:
    with paired(daemon) as pair:
        ingester = pair.ingesters[0]
        handles = {session: pair.ready(session, tokens_of(40)) for session in ("s", "t")}
        jobs = [pair.start_ingest(session, tokens_of(40), handle)[0] for session, handle in handles.items()]
        for job in jobs:
            job.step(STEP_BYTES)
            job.cancel()
        lost = jobs[0]._scatter
        assert isinstance(lost, devicescatter.DeviceScatter)
        stream = lost._stream = FakeStream()  # type: ignore[assignment]
        lost._mark = stream.record_event()  # type: ignore[assignment]
        lost._mark.query = raise_error  # type: ignore[method-assign]
        held.release()
        with capture_logs() as logs:
            for _ in range(3):
                ingester.reap()
            started_s = time.monotonic()
            ingester.close()
            assert time.monotonic() - started_s < 5, "that is nothing to wait for"
        assert [x["log_level"] for x in logs] == ["error", "warning"]
        assert ingester._ending == [jobs[0]] and jobs[1].done and lent(pair) == 40
        lost._stream = lost._mark = None
        ingester.reap()
        assert jobs[0].done


def raise_error() -> bool:
    raise RuntimeError("CUDA error: unspecified launch failure")


# --- leases and the daemon's death ---------------------------------------------------------------------


def test_after_the_leases_end_nothing_is_read(start_daemon: Callable[..., Any], held: FakeDevice) -> None:
    daemon = start_daemon(lease_ms=LEASE_MS)
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(40))
        (job,) = pair.start_ingest("s", tokens_of(40), handle)
        wait_for(lambda: not pair.view(handle).is_leased, "the lease is over")
        wait_for(lambda: time.monotonic() > job._lease_end_s, "and its reader knows")
        assert job.step(STEP_BYTES)
        assert job.result.reason == Reason.LEASE_EXPIRED
        assert held.launched == [] and lent(pair) == 0
        assert pair.view(handle).state is State.READY


def test_a_lease_is_not_over_later_here_than_at_the_daemon(daemon: Any, device: FakeDevice) -> None:
    """However long the answer is on its way."""
    asked_s: list[float] = []
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(40))
        begin = pair.ps[0].begin_ingest

        def begin_ingest(*arguments: Any, **fields: Any) -> BeginIngestRep:
            asked_s.append(time.monotonic())
            return begin(*arguments, **fields)

        pair.ps[0].begin_ingest = begin_ingest  # type: ignore[method-assign]
        (job,) = pair.start_ingest("s", tokens_of(40), handle)
        assert job._lease_end_s - job._lease.lease_ms / MS_PER_S <= asked_s[0]
        assert finish_all([job])[0].ok


def test_a_copy_that_outlasts_its_lease_is_not_inserted(
    start_daemon: Callable[..., Any], held: FakeDevice
) -> None:
    daemon = start_daemon(lease_ms=LEASE_MS)
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(40))
        job = launched(pair, handle)
        wait_for(lambda: not pair.view(handle).is_leased, "the lease is over")
        assert lent(pair) == 40
        held.release()
        (answer,) = finish_all([job])
        assert (answer.ok, answer.reason) == (False, Reason.LEASE_EXPIRED)
        assert pair.tree.inserts == [] and lent(pair) == 0


def test_when_the_daemon_is_gone_nothing_is_read(
    daemon: Any, held: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(40))
        (job,) = pair.start_ingest("s", tokens_of(40), handle)

        def gone(arena: MappedArena) -> None:
            raise ConnectionLost("the daemon is gone")

        with monkeypatch.context() as patch:
            patch.setattr(MappedArena, "check_alive", gone)
            assert job.step(STEP_BYTES)
        assert job.result.reason == Reason.LEASE_EXPIRED
        assert held.launched == [] and lent(pair) == 0 and pair.tree.inserts == []
        assert pair.view(handle).state is State.READY, "nothing is wrong with it"


def test_a_mismatch_after_the_leases_end_says_nothing_of_the_snapshot(
    start_daemon: Callable[..., Any], held: FakeDevice
) -> None:
    """Others may write there by then, and rightly so."""
    daemon = start_daemon(lease_ms=LEASE_MS)
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(40))
        job = launched(pair, handle)
        wait_for(lambda: not pair.view(handle).is_leased, "the lease is over")
        corrupt_plane(daemon, pair, handle, offset_bytes=100)
        held.release()
        (answer,) = finish_all([job])
        assert (answer.ok, answer.reason) == (False, Reason.LEASE_EXPIRED)
        assert pair.tree.inserts == [] and lent(pair) == 0
        assert pair.view(handle).state is State.READY


def test_an_arena_is_mapped_before_the_first_ingest(daemon: Any, device: FakeDevice) -> None:
    with paired(daemon) as pair:
        (arena,) = pair.ingesters[0].slabs._arenas.values()
        handle = pair.ready("s", tokens_of(40))
        pair.ps[0].map_buffer = None  # type: ignore[method-assign, assignment]
        assert pair.ingest("s", tokens_of(40), handle)[0].ok
        assert list(pair.ingesters[0].slabs._arenas.values()) == [arena]


def test_an_ingest_of_a_dead_daemon_reads_nothing_whatever_was_mapped_since(
    start_daemon: Callable[..., Any], device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own arena is what counts, as memory on a GPU goes with its daemon."""
    daemon, dead = start_daemon(), set[str]()

    def check_alive(arena: MappedArena) -> None:
        if arena.epoch in dead or arena._buffer is None:
            raise ConnectionLost("the daemon is gone")

    monkeypatch.setattr(MappedArena, "check_alive", check_alive)
    with paired(daemon) as pair:
        (lost,) = pair.start_ingest("s", tokens_of(40), pair.ready("s", tokens_of(40)))
        daemon.kill()
        dead.add(lost._epoch)
        daemon.restart()
        for client in (pair.d, *pair.ps):
            client.connect(wait_s=30)
        (other,) = pair.start_ingest("t", tokens_of(40), pair.ready("t", tokens_of(40)))
        assert lost.step(STEP_BYTES)
        assert device.launched == []
        assert lost.result.reason == Reason.LEASE_EXPIRED
        assert finish_all([other])[0].ok
        assert pair.tree.inserts == ["t"] and lent(pair) == 0


def test_an_ingest_that_is_not_launched_when_its_ingester_is_closed_launches_nothing(
    daemon: Any, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_alive(arena: MappedArena) -> None:
        if arena._buffer is None:
            raise ConnectionLost("closed")

    monkeypatch.setattr(MappedArena, "check_alive", check_alive)
    with paired(daemon) as pair:
        (job,) = pair.start_ingest("s", tokens_of(40), pair.ready("s", tokens_of(40)))
        pair.ingesters[0].close()
        assert job.step(STEP_BYTES)
        assert device.launched == [] and lent(pair) == 0


def test_a_daemon_that_dies_while_the_copy_runs_makes_it_no(
    start_daemon: Callable[..., Any], held: FakeDevice
) -> None:
    daemon = start_daemon()
    with paired(daemon) as pair:
        job = launched(pair, pair.ready("s", tokens_of(40)))
        daemon.kill()
        assert not job.step(STEP_BYTES) and lent(pair) == 40
        held.release()
        (answer,) = finish_all([job])
        assert (answer.ok, answer.reason) == (False, Reason.LEASE_EXPIRED)
        assert pair.tree.inserts == [] and lent(pair) == 0


# --- the ranks agree -----------------------------------------------------------------------------------


def test_every_rank_takes_part_in_the_agreement_when_one_was_cancelled_in_its_copy(
    daemon: Any, held: FakeDevice
) -> None:
    with paired(daemon, num_ranks=2) as pair:
        heard: list[tuple[int, bool]] = []
        for rank, ingester in enumerate(pair.ingesters):
            ingester.agree = lambda _, commit, rank=rank: heard.append((rank, commit)) or commit
        handle = pair.ready("s", tokens_of(40))
        jobs = pair.start_ingest("s", tokens_of(40), handle)
        for job in jobs:
            job.step(STEP_BYTES)
        assert jobs[1].cancel()
        assert heard == []
        held.release()
        assert not any(answer.ok for answer in finish_all(jobs))
        assert sorted(heard) == [(0, False), (1, False)]
        assert all(tree.inserts == [] for tree in pair.trees)


# --- where pool and arena are ----------------------------------------------------------------------------


def elsewhere(hello: HelloRep, device: str = "cuda:3") -> HelloRep:
    arenas = tuple(msgspec.structs.replace(arena, device=device) for arena in hello.arenas)
    return msgspec.structs.replace(hello, arenas=arenas)


@pytest.mark.parametrize(
    ("pool", "arena", "told"),
    [("cuda:1", "cpu", 'device = "cuda:1" for arena 1'), ("cpu", "cuda:1", 'device = "cpu" for arena 1')],
)
def test_a_pool_and_an_arena_that_do_not_go_together_are_told_what_to_set(
    daemon: Any, pool: str, arena: str, told: str
) -> None:
    with Client(str(daemon.socket_path)) as client:
        arenas = elsewhere(client.connect(), arena).arenas
    with pytest.raises(ConfigError, match=told):
        ingestjob.check_places(torch.device(pool), 1, arenas)
    ingestjob.check_places(torch.device(pool), 2, arenas)


@pytest.mark.parametrize(("pool", "arena"), [("cuda:1", "cuda:1"), ("cuda:1", "cuda:0"), ("cpu", "cpu")])
def test_a_pool_may_be_where_its_arena_is_or_on_a_peer(daemon: Any, pool: str, arena: str) -> None:
    with Client(str(daemon.socket_path)) as client:
        ingestjob.check_places(torch.device(pool), 1, elsewhere(client.connect(), arena).arenas)


def test_an_ingester_for_the_wrong_arena_is_not_made_and_declares_nothing(
    daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with paired(daemon) as pair, Client(str(daemon.socket_path)) as client:
        hello, declared = client.connect(), []
        monkeypatch.setattr(client, "connect", lambda: elsewhere(hello))
        monkeypatch.setattr(client, "declare_layout", lambda *args: declared.append(args))
        with pytest.raises(ConfigError, match='on cpu, and its arena on cuda:3: set device = "cpu"'):
            Ingester(client, 0, pair.p_pools[0], pair.tree)
        assert declared == []


def test_a_daemon_that_comes_back_with_its_arena_elsewhere_is_told_in_the_log(daemon: Any) -> None:
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(40))
        exchange = pair.ps[0]._exchange
        hello = exchange.hello
        assert hello is not None
        exchange.hello = elsewhere(hello)
        with capture_logs() as logs:
            (answer,) = pair.ingest("s", tokens_of(40), handle)
        exchange.hello = hello
        assert (answer.ok, answer.reason) == (False, Reason.INGEST_FAILED)
        assert ['device = "cpu"' in x["error"] for x in logs] == [True]
        assert lent(pair) == 0 and pair.view(handle).state is State.READY
        assert pair.ingest("s", tokens_of(40), handle)[0].ok
