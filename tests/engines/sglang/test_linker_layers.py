"""Loads that come layer by layer: what is there when, and what becomes of one that fails under way."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from linker_stage import (
    PAGE,
    PATIENCE_S,
    POISON,
    Gate,
    Stage,
    keys_of,
    serving,
    slots_of,
    staged,
    truth,
    wait_until,
)

from snapd.core.events import State
from snapd.engines import sglang_layers
from snapd.engines.sglang_layers import LayerLoads, LoadBatch, LoadFailed
from snapd.errors import ConnectionLost, Reason, RequestTimeout
from snapd.kv.copy import ScatterJob
from snapd.kv.ingestjob import _Phase
from snapd.kv.layerpages import LayerPagesJob
from snapd.wire import VoteRep
from tests.integration.daemon_process import DaemonProcess
from tests.integration.fake_device import FakeDevice

LAYERS = 3


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    # A lease that nobody gives back stays.
    with serving(lease_ms=600_000, ready_ttl_ms=3_600_000) as served:
        yield served


@pytest.fixture
def stage(daemon: DaemonProcess) -> Iterator[Stage]:
    with staged(daemon) as made:
        yield made


def loaded(
    stage: Stage, keys: Sequence[str], pages: Sequence[int], rid: str = "r", first_page: int = 1
) -> None:
    """Have D push pages, and P accept the load of them."""
    assert stage.offload(keys, first_page=first_page)
    assert stage.loader.lookup(rid, keys) == len(keys)
    assert stage.loader.load(rid, keys, slots_of(pages))


def layers_of(stage: Stage, keys: Sequence[str], pages: Sequence[int]) -> list[str]:
    """Return what is in the slots of each layer: D's bytes, poison, or something else."""
    found = []
    for planes in stage.p_pool.layers:
        kinds = set()
        for index in planes:
            for key, page in zip(keys, pages, strict=True):
                rows = stage.p_pool.planes[index].rows[page * PAGE : (page + 1) * PAGE]
                is_there = torch.equal(rows, truth(key, index, rows.shape))
                kinds.add("there" if is_there else "poison" if bool((rows == POISON).all()) else "other")
        found.append("/".join(sorted(kinds)))
    return found


def is_leased(stage: Stage) -> bool:
    return any(session.is_leased for session in stage.attempts(State.READY))


def in_thread(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


# --- what is there when --------------------------------------------------------------------------


def test_a_load_that_is_accepted_is_compared_and_not_moved(stage: Stage) -> None:
    keys = keys_of(12)
    loaded(stage, keys, range(40, 52))
    stage.assert_loaded((), ())
    assert stage.loader.has_queued and is_leased(stage)
    batch = stage.begin()
    assert not stage.loader.has_queued
    assert stage.loader.finish(batch) and batch.has_ended and stage.failed == []
    assert stage.layers == [0, 1, 2]
    stage.assert_loaded(keys, range(40, 52))
    assert stage.sessions() == [] and stage.outcomes() == ["ok"]


def test_the_first_layer_is_there_before_the_next_is_moved(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, layers=1)
    keys, pages = keys_of(12), range(40, 52)
    loaded(stage, keys, pages)
    batch = stage.begin()
    gate.wait()
    assert stage.layers == [0] and not batch.has_ended
    assert layers_of(stage, keys, pages) == ["there", "poison", "poison"]
    assert is_leased(stage), "the vote follows the last layer"
    gate.opened.set()
    assert stage.loader.finish(batch)
    assert stage.layers == [0, 1, 2]
    stage.assert_loaded(keys, pages)


def test_a_layer_is_told_when_every_load_of_the_batch_has_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many steps it takes for one of them, which has a rest that is summed; no load runs ahead."""
    monkeypatch.setattr(sglang_layers, "STEP_BYTES", 1)
    keys, more = keys_of(12), keys_of(7, seed=1)
    assert stage.offload((*keys, *keys_of(3, seed=5)))
    assert stage.loader.lookup("r", keys) == 12
    assert stage.loader.load("r", keys, slots_of(range(40, 52)))
    loaded(stage, more, range(60, 67), rid="s", first_page=20)
    told: list[list[str]] = []

    def tell(layer: int) -> None:
        del layer
        told.extend((layers_of(stage, keys, range(40, 52)), layers_of(stage, more, range(60, 67))))

    assert stage.loader.finish(stage.loader.start(tell, stage.failed.append))
    for layer in range(LAYERS):
        expected = ["there"] * (layer + 1) + ["poison"] * (LAYERS - layer - 1)
        assert told[2 * layer] == told[2 * layer + 1] == expected


def test_the_last_layer_is_told_before_the_daemon_has_answered_the_votes(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is INGESTED then, and one of which a rest stays."""
    gate = Gate(monkeypatch, layers=LAYERS)
    keys, more = keys_of(12), keys_of(7, seed=1)
    loaded(stage, keys, range(40, 52))
    assert stage.offload(more, first_page=20)
    assert stage.loader.lookup("s", more[:3]) == 3
    assert stage.loader.load("s", more[:3], slots_of(range(60, 63)))
    batch = stage.begin()
    gate.wait()
    assert stage.layers == [0, 1, 2] and len(stage.sessions()) == 2
    stage.assert_loaded((*keys, *more[:3]), (*range(40, 52), *range(60, 63)))
    gate.opened.set()
    assert stage.loader.finish(batch)
    assert len(stage.sessions()) == 1 and stage.outcomes() == ["ok"] and not is_leased(stage)


def test_a_batch_without_loads_is_there_at_once(stage: Stage) -> None:
    assert stage.loader.finish(stage.begin()) and stage.layers == [0, 1, 2]


# --- what changes between the passes -------------------------------------------------------------


def test_bytes_that_change_after_they_were_compared_fail_the_load(stage: Stage) -> None:
    keys = keys_of(12)
    loaded(stage, keys, range(40, 52))
    stage.corrupt()
    with structlog.testing.capture_logs() as logs:
        assert not stage.loader.finish(stage.begin())
    assert stage.layers == [] and [type(error) for error in stage.failed] == [LoadFailed]
    assert [log["log_level"] for log in logs if log["event"].startswith("checksum-mismatch")] == ["error"]
    assert stage.outcomes() == ["checksum-mismatch"]
    assert stage.loader.counts.failed_batches == 1
    # P goes on.
    more = keys_of(5, seed=1)
    loaded(stage, more, range(60, 65))
    assert stage.loader.finish(stage.begin())
    assert layers_of(stage, more, range(60, 65)) == ["there"] * LAYERS


def test_bytes_that_change_under_way_fail_the_load_at_their_layer(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, layers=1)
    keys, pages = keys_of(12), range(40, 52)
    loaded(stage, keys, pages)
    batch = stage.begin()
    gate.wait()
    stage.corrupt()
    gate.opened.set()
    assert not stage.loader.finish(batch)
    assert stage.layers == [0] and len(stage.failed) == 1
    assert layers_of(stage, keys, pages) == ["there", "other", "poison"]
    assert stage.outcomes() == ["checksum-mismatch"]


def test_with_a_key_bytes_that_change_fail_the_load_as_well(daemon: DaemonProcess, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes((at * 37) % 256 for at in range(64)))
    key.chmod(0o600)
    with staged(daemon, integrity_key_path=str(key), integrity_algorithm="blake2b") as stage:
        keys = keys_of(12)
        loaded(stage, keys[:4], range(40, 44))
        assert stage.loader.finish(stage.begin()) and stage.layers == [0, 1, 2]
        assert stage.offload(keys)
        assert stage.loader.lookup("r", keys[4:]) == 8
        assert stage.loader.load("r", keys[4:], slots_of(range(44, 52)))
        stage.corrupt()
        assert not stage.loader.finish(stage.begin())
        assert stage.layers == [] and stage.outcomes() == ["checksum-mismatch", "ok"]


def test_one_load_of_a_batch_that_fails_leaves_the_others_snapshots(stage: Stage) -> None:
    keys, more = keys_of(12), keys_of(7, seed=1)
    loaded(stage, keys, range(40, 52))
    loaded(stage, more, range(60, 67), rid="s", first_page=20)
    assert stage.loader._layers is not None
    (job,) = stage.loader._layers._queued["s"]
    job._lease_end_s = 0.0
    assert not stage.loader.finish(stage.begin())
    assert stage.layers == []
    assert len(stage.sessions()) == 2 and not is_leased(stage)
    assert stage.loader.lookup("again", keys) == 12
    assert stage.load(keys, range(40, 52), rid="again")


# --- leases --------------------------------------------------------------------------------------


@pytest.fixture
def hasty() -> Iterator[Stage]:
    """With leases that are over soon."""
    with serving(lease_ms=2_000) as served, staged(served) as made:
        yield made


def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerPagesJob, "is_late", False)


def test_after_the_leases_end_nothing_is_read(hasty: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    patient(monkeypatch)
    keys = keys_of(12)
    loaded(hasty, keys, range(40, 52))
    assert hasty.loader._layers is not None
    (job,) = hasty.loader._layers._queued["r"]
    wait_until(lambda: not is_leased(hasty) and time.monotonic() > job._lease_end_s, "the lease is over")
    batch = hasty.begin()
    assert not hasty.loader.finish(batch) and "lease-expired" in batch.error
    hasty.assert_loaded((), ())
    assert len(hasty.sessions()) == 1
    assert hasty.loader.lookup("again", keys) == 12 and hasty.load(keys, range(40, 52), rid="again")


def test_a_vote_that_comes_after_the_leases_end_fails_the_load(
    hasty: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient(monkeypatch)
    gate = Gate(monkeypatch, layers=LAYERS)
    loaded(hasty, keys_of(12), range(40, 52))
    batch = hasty.begin()
    gate.wait()
    assert hasty.layers == [0, 1, 2]
    wait_until(lambda: not is_leased(hasty), "the lease is over")
    gate.opened.set()
    assert not hasty.loader.finish(batch) and not batch.is_unanswered
    assert hasty.failed and len(hasty.sessions()) == 1


def test_a_load_that_took_long_to_compare_is_moved_before_it_is_accepted(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes wrong then is computed, as the lease might be over before the batch begins."""
    monkeypatch.setattr(LayerPagesJob, "is_late", True)
    keys = keys_of(12)
    loaded(stage, keys, range(40, 52))
    stage.assert_loaded(keys, range(40, 52))
    assert stage.outcomes() == ["ok"]
    assert stage.loader.finish(stage.begin()) and stage.layers == [0, 1, 2]
    more = keys_of(7, seed=1)
    assert stage.offload(more)
    assert stage.loader.lookup("s", more) == 7
    bring_in = LayerLoads.bring_in

    def corrupted(layers: LayerLoads, jobs: Sequence[LayerPagesJob]) -> LoadBatch:
        stage.corrupt()
        return bring_in(layers, jobs)

    monkeypatch.setattr(LayerLoads, "bring_in", corrupted)
    with structlog.testing.capture_logs() as logs:
        assert not stage.loader.load("s", more, slots_of(range(60, 67)))
    assert any(log["event"].endswith("P computes instead") for log in logs)
    assert not stage.loader.has_queued and stage.outcomes() == ["checksum-mismatch", "ok"]


def test_a_load_that_has_waited_long_for_its_batch_is_moved_before_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, more = keys_of(12), keys_of(7, seed=1)
    patient(monkeypatch)
    loaded(stage, keys, range(40, 52))
    assert stage.offload(more, first_page=20)
    assert stage.loader.lookup("s", more) == 7
    monkeypatch.setattr(LayerPagesJob, "is_late", property(lambda job: not job.layers_done and job is first))
    assert stage.loader._layers is not None
    (first,) = stage.loader._layers._queued["r"]
    assert stage.loader.load("s", more, slots_of(range(60, 67)))
    wait_until(lambda: stage.outcomes() == ["ok"], "the first is moved")
    batch = stage.begin()
    assert stage.loader.finish(batch) and stage.layers == [0, 1, 2]
    stage.assert_loaded((*keys, *more), (*range(40, 52), *range(60, 67)))


def test_half_of_the_lease_is_left_for_the_second_pass(stage: Stage) -> None:
    loaded(stage, keys_of(3), range(40, 43))
    assert stage.loader._layers is not None
    (job,) = stage.loader._layers._queued["r"]
    lease_s = job._lease.lease_ms / 1_000
    job._lease_end_s = time.monotonic() + 0.9 * lease_s
    assert not job.is_late
    job._lease_end_s = time.monotonic() + 0.5 * lease_s
    assert job.is_late
    job._lease_end_s = time.monotonic() + lease_s
    assert stage.loader.finish(stage.begin())


# --- the same snapshot twice ---------------------------------------------------------------------


def test_two_requests_of_a_batch_that_share_a_beginning_both_have_it(stage: Stage) -> None:
    """The first is moved at once then: a rank has one lease for a snapshot, and a vote ends it."""
    keys = keys_of(12)
    assert stage.offload(keys)
    for rid, pages in (("r", range(40, 43)), ("s", range(60, 63))):
        assert stage.loader.lookup(rid, keys[:3]) == 3
        assert stage.loader.load(rid, keys[:3], slots_of(pages))
    stage.assert_loaded(keys[:3], range(40, 43))
    assert stage.loader.finish(stage.begin()) and stage.layers == [0, 1, 2]
    stage.assert_loaded((*keys[:3], *keys[:3]), (*range(40, 43), *range(60, 63)))
    assert len(stage.sessions()) == 1 and not is_leased(stage)


def test_a_second_request_for_all_of_a_snapshot_is_computed(stage: Stage) -> None:
    keys = keys_of(12)
    loaded(stage, keys, range(40, 52))
    stage.loader._plans["s"] = stage.loader._plans["r"] = _plan_of(stage, keys)
    assert not stage.loader.load("s", keys, slots_of(range(60, 72)))
    assert stage.loader.finish(stage.begin())
    stage.assert_loaded(keys, range(40, 52))


def _plan_of(stage: Stage, keys: Sequence[str]) -> Any:
    stage.loader.lookup("plan", keys)
    plan = stage.loader._take_plan("plan")
    assert plan is not None and len(plan.keys) == len(keys)
    return plan


def test_a_load_waits_for_one_of_the_same_snapshot_that_is_under_way(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, layers=1)
    keys = keys_of(12)
    assert stage.offload(keys)
    assert stage.loader.lookup("r", keys[:3]) == 3
    assert stage.loader.load("r", keys[:3], slots_of(range(40, 43)))
    assert stage.loader.lookup("s", keys) == 12
    batch = stage.begin()
    gate.wait()
    leases = stage.client.stats().core
    waits = threading.Event()
    wait = LoadBatch.wait
    monkeypatch.setattr(LoadBatch, "wait", lambda one: waits.set() or wait(one))  # type: ignore[func-returns-value]
    heard: list[bool] = []
    thread = in_thread(lambda: heard.append(stage.loader.load("s", keys, slots_of(range(60, 72)))))
    assert waits.wait(PATIENCE_S) and heard == []
    assert stage.client.stats().core == leases or is_leased(stage)
    gate.opened.set()
    thread.join()
    assert heard == [True] and batch.has_ended and stage.loader.finish(batch)
    assert stage.loader.finish(stage.begin())
    stage.assert_loaded((*keys[:3], *keys), (*range(40, 43), *range(60, 72)))


# --- given up ------------------------------------------------------------------------------------


def test_a_load_that_is_cancelled_before_its_batch_writes_nothing(stage: Stage) -> None:
    keys = keys_of(12)
    loaded(stage, keys, range(40, 52))
    assert stage.loader.forget("r") and not stage.loader.forget("r")
    assert not stage.loader.has_queued
    wait_until(lambda: not is_leased(stage), "its lease is given back")
    assert stage.loader.finish(stage.begin())
    stage.assert_loaded((), ())
    assert len(stage.sessions()) == 1
    assert stage.loader.lookup("s", keys) == 12 and stage.load(keys, range(60, 72), rid="s")
    stage.assert_loaded(keys, range(60, 72))


def test_what_was_compared_for_a_load_that_is_refused_is_given_back(stage: Stage) -> None:
    keys = keys_of(12)
    assert stage.offload(keys[:5])
    assert stage.offload(keys[5:], first_page=20)
    assert stage.loader.lookup("r", keys) == 12
    for session in stage.attempts(State.READY):
        if session.num_tokens == 7 * PAGE:
            stage.client.abort(session.slab_handle)
    assert not stage.loader.load("r", keys, slots_of(range(40, 52)))
    wait_until(lambda: not is_leased(stage), "the first one's lease is given back")
    assert len(stage.sessions()) == 1
    stage.assert_loaded((), ())


def test_a_request_that_is_loaded_twice_has_its_first_load_given_up(stage: Stage) -> None:
    keys, more = keys_of(12), keys_of(7, seed=1)
    loaded(stage, keys, range(40, 52))
    loaded(stage, more, range(60, 67), first_page=20)
    assert stage.loader.finish(stage.begin())
    stage.assert_loaded(more, range(60, 67))
    assert len(stage.sessions()) == 1 and not is_leased(stage)


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_flush_returns_when_no_slot_is_written_any_more(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, is_closed: bool
) -> None:
    """And the end of the engine."""
    gate = Gate(monkeypatch, layers=1)
    keys, pages = keys_of(12), range(40, 52)
    loaded(stage, keys, pages)
    loaded(stage, keys_of(7, seed=1), range(60, 67), rid="s", first_page=20)
    batch = stage.begin()
    gate.wait()
    waiting = keys_of(5, seed=2)
    loaded(stage, waiting, range(70, 75), rid="t", first_page=30)
    ended: list[bool] = []
    flush = stage.loader.close if is_closed else stage.loader.forget_all
    thread = in_thread(lambda: (flush(), ended.append(batch.has_ended)))  # type: ignore[func-returns-value]
    wait_until(lambda: batch.is_stopping, "asked to stop")
    assert ended == [] and not batch.has_ended
    gate.opened.set()
    thread.join()
    assert ended == [True] and not batch.has_landed
    # The job that was held has moved one layer more, at most; nothing of what waited was moved.
    assert stage.layers == [0] and len(stage.failed) == 1
    assert layers_of(stage, waiting, range(70, 75)) == ["poison"] * LAYERS
    assert len(stage.sessions()) == 3
    if is_closed:
        return
    assert not is_leased(stage) and not stage.loader.has_queued
    assert stage.loader.lookup("again", keys) == 12 and stage.load(keys, pages, rid="again")
    assert layers_of(stage, keys, pages) == ["there"] * LAYERS


def test_a_fault_of_its_own_fails_the_load_and_the_next_one_comes(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(12)
    loaded(stage, keys, range(40, 52))
    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(ScatterJob, "step", lambda *_: 1 // 0)
        batch = stage.begin()
        assert not stage.loader.finish(batch)
    assert [type(error) for error in stage.failed] == [ZeroDivisionError]
    assert any(log["event"].startswith("a load failed, and its requests") for log in logs)
    assert len(stage.sessions()) == 1 and not is_leased(stage)
    assert stage.loader.lookup("again", keys) == 12 and stage.load(keys, range(40, 52), rid="again")


def test_slots_that_are_not_the_pools_are_refused_before_the_load_is_accepted(stage: Stage) -> None:
    keys = keys_of(2)
    for slots in (torch.arange(2 * PAGE) + 1, slots_of([1, 1]), slots_of([1, 4_000])):
        assert stage.offload(keys)
        assert stage.loader.lookup("r", keys) == 2
        assert not stage.loader.load("r", keys, slots)
        assert not is_leased(stage)
    stage.assert_loaded((), ())


def test_a_load_that_began_before_its_batch_writes_nothing_once_it_is_cancelled(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang lends the slots to others as soon as it hears that."""
    patient(monkeypatch)
    keys, pages, more = keys_of(12), range(40, 52), keys_of(7, seed=1)
    loaded(stage, keys, pages)
    assert stage.offload(more, first_page=20)
    assert stage.loader.lookup("s", more) == 7
    assert stage.loader._layers is not None
    (first,) = stage.loader._layers._queued["r"]
    monkeypatch.setattr(LayerPagesJob, "is_late", property(lambda job: not job.layers_done and job is first))
    gate = Gate(monkeypatch, layers=1)
    assert stage.loader.load("s", more, slots_of(range(60, 67)))
    gate.wait()
    (ahead,) = (batch for batch in stage.loader._layers._running if first in batch.jobs)
    ended: list[tuple[bool, bool]] = []
    thread = in_thread(lambda: ended.append((stage.loader.forget("r"), ahead.has_ended)))
    wait_until(lambda: ahead.is_stopping, "asked to stop")
    assert ended == []
    gate.opened.set()
    thread.join()
    assert ended == [(True, True)]
    # The step that was held has moved one layer more, at most.
    assert layers_of(stage, keys, pages)[-1] == "poison"
    assert stage.loader.finish(stage.begin())
    assert layers_of(stage, more, range(60, 67)) == ["there"] * LAYERS
    assert len(stage.sessions()) == 1 and not is_leased(stage)


def test_an_engine_that_cannot_be_told_of_a_failure_has_the_next_load_all_the_same(stage: Stage) -> None:
    keys = keys_of(12)
    loaded(stage, keys, range(40, 52))
    stage.corrupt()
    with structlog.testing.capture_logs() as logs:
        assert not stage.loader.finish(stage.loader.start(lambda _: None, lambda _: 1 // 0))
    assert any(log["event"].endswith("the engine could not be told") for log in logs)
    assert stage.offload(keys)
    assert stage.loader.lookup("again", keys) == 12
    assert stage.loader.load("again", keys, slots_of(range(40, 52)))
    batch = stage.begin()
    wait_until(lambda: batch.has_ended, "the thread goes on")
    assert stage.loader.finish(batch)


def test_a_load_that_cannot_be_given_back_leaves_the_others_of_its_batch_to_be(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, more = keys_of(12), keys_of(7, seed=1)
    loaded(stage, keys, range(40, 52))
    loaded(stage, more, range(60, 67), rid="s", first_page=20)
    assert stage.loader._layers is not None
    (job,) = stage.loader._layers._queued["r"]
    cancel = LayerPagesJob.cancel
    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(LayerPagesJob, "cancel", lambda one: 1 // 0 if one is job else cancel(one))
        stage.corrupt()
        assert not stage.loader.finish(stage.begin())
    assert any(log["event"].endswith("given back cleanly") for log in logs)
    assert [session.num_tokens for session in stage.attempts(State.READY)] == [7 * PAGE]
    assert not is_leased(stage)


# --- the daemon ----------------------------------------------------------------------------------


def test_a_load_outlives_the_daemon_that_it_was_verified_with() -> None:
    """On the host: its memory stays mapped, and what is moved is compared again."""
    with serving() as daemon, staged(daemon) as stage:
        keys = keys_of(12)
        loaded(stage, keys, range(40, 52))
        daemon.kill()
        batch = stage.begin()
        assert stage.loader.finish(batch) and batch.is_unanswered
        assert stage.layers == [0, 1, 2] and stage.failed == []
        stage.assert_loaded(keys, range(40, 52))
        daemon.restart()
        wait_until(lambda: stage.offload(keys), "pushed again")
        wait_until(lambda: stage.loader.lookup("s", keys) == 12, "found")
        assert stage.load(keys, range(60, 72), rid="s")


def test_a_load_outlives_a_restart_of_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new one knows nothing of the lease, which says nothing of the bytes."""
    with serving() as daemon, staged(daemon) as stage:
        gate = Gate(monkeypatch, layers=1)
        keys = keys_of(12)
        loaded(stage, keys, range(40, 52))
        batch = stage.begin()
        gate.wait()
        epoch = stage.loader._client.epoch
        daemon.kill()
        daemon.restart()
        wait_until(lambda: stage.loader._client.epoch != epoch, "P has found the new one")
        gate.opened.set()
        assert stage.loader.finish(batch) and batch.is_unanswered
        stage.assert_loaded(keys, range(40, 52))


def test_without_the_daemon_bytes_that_changed_fail_the_load_all_the_same() -> None:
    with serving() as daemon, staged(daemon) as stage:
        loaded(stage, keys_of(12), range(40, 52))
        stage.corrupt()
        daemon.kill()
        assert not stage.loader.finish(stage.begin())
        assert stage.layers == [] and len(stage.failed) == 1
        daemon.restart()


def test_a_daemon_that_does_not_answer_the_vote_is_not_asked_at_once_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import signal

    with serving() as daemon, staged(daemon, timeout_s=1.0, retry_s=3_600.0) as stage:
        keys = keys_of(12)
        wait_until(lambda: stage.offload(keys), "pushed")
        wait_until(lambda: stage.loader.lookup("r", keys) == 12, "found")
        assert stage.loader.load("r", keys, slots_of(range(40, 52)))
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            batch = stage.begin()
            assert stage.loader.finish(batch) and batch.is_unanswered
            assert stage.loader.lookup("s", keys) == 0
            assert stage.loader.counts.resting_lookups == 1
        finally:
            daemon.process.send_signal(signal.SIGCONT)


def test_a_daemon_that_hangs_is_waited_for_once_for_all_votes_of_a_batch(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rid, seed, pages in (("r", 0, range(40, 52)), ("s", 1, range(60, 72))):
        loaded(stage, keys_of(12, seed), pages, rid)
    assert stage.loader._layers is not None
    (job,) = stage.loader._layers._queued["r"]
    votes: list[int] = []

    class Hanging:
        def poll(self) -> None:
            return None

        def wait(self) -> None:
            raise RequestTimeout("no reply in time")

    monkeypatch.setattr(job._in.client, "submit", lambda _: votes.append(len(stage.layers)) or Hanging())  # type: ignore[func-returns-value]
    batch = stage.begin()
    assert stage.loader.finish(batch) and batch.is_unanswered
    assert votes == [LAYERS, LAYERS]


def test_an_answer_that_comes_when_the_vote_is_cast_again_counts(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(stage, keys_of(12), range(40, 52))
    assert stage.loader._layers is not None
    (job,) = stage.loader._layers._queued["r"]
    answers: list[Any] = [
        ConnectionLost("gone"),
        VoteRep(id=0, commit=False, reason=Reason.ROUND_ABORTED, state=State.READY),
    ]

    class Answer:
        def poll(self) -> VoteRep:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        wait = poll

    monkeypatch.setattr(job._in.client, "submit", lambda _: Answer())
    batch = stage.begin()
    assert not stage.loader.finish(batch) and not batch.is_unanswered and answers == []
    assert stage.layers == [0, 1, 2]


# --- several ranks -------------------------------------------------------------------------------


def test_a_rank_that_fails_under_way_holds_no_other_up() -> None:
    """Each has a snapshot of its own. SGLang uses what has landed on every rank, and this has not."""
    with serving(ranks=2) as daemon, staged(daemon, rank=0) as first, staged(daemon, rank=1) as second:
        keys = keys_of(5)
        for stage in (first, second):
            loaded(stage, keys, range(40, 45))
        second.corrupt()
        batches = [stage.begin() for stage in (first, second)]
        assert [first.loader.finish(batches[0]), second.loader.finish(batches[1])] == [True, False]
        assert first.layers == [0, 1, 2] and second.layers == []
        first.assert_loaded(keys, range(40, 45))


# --- a GPU, in host memory -----------------------------------------------------------------------


@pytest.fixture
def device(stage: Stage) -> Iterator[FakeDevice]:
    """P's copies, which go on until they are let end."""
    fake = FakeDevice(looks=None)
    stage.loader._made[1].copies = fake.copies  # type: ignore[index]
    yield fake
    fake.release()


def test_on_a_gpu_groups_of_layers_are_launched_ahead_and_told_as_they_end(
    stage: Stage, device: FakeDevice
) -> None:
    keys = keys_of(12)
    assert stage.offload(keys)
    assert stage.loader.lookup("r", keys) == 12
    assert stage.loader.load("r", keys, slots_of(range(40, 52)))
    assert device.launched == []
    batch = stage.begin()
    wait_until(lambda: len(device.launched) == LAYERS, "all are launched")
    assert [job._job._part for job in device.launched] == [(0, 3), (1, 4), (2, 5)]
    assert stage.layers == []
    device.launched[0].looks = 0
    wait_until(lambda: stage.layers == [0], "the first layer is there")
    assert layers_of(stage, keys, range(40, 52)) == ["there", "poison", "poison"]
    device.release()
    assert stage.loader.finish(batch) and stage.layers == [0, 1, 2]
    stage.assert_loaded(keys, range(40, 52))


def test_on_a_gpu_comparing_and_moving_have_streams_of_their_own(stage: Stage, device: FakeDevice) -> None:
    """What is moved waits for a forward pass; what is only compared must not wait behind it."""
    assert device.launched == []
    asked: list[str] = []
    ingester = stage.loader._made[1]  # type: ignore[index]
    ingester.reading.stream_of = lambda _: asked.append("reading")  # type: ignore[method-assign, assignment]
    ingester.stream_of = lambda _: asked.append("moving")  # type: ignore[method-assign, assignment]
    loaded(stage, keys_of(12), range(40, 52))
    assert set(asked[:-1]) == {"reading"} and asked[-1] == "moving"
    device.release()
    device.looks = 0
    assert stage.loader.finish(stage.begin())


def test_on_a_gpu_a_load_that_fails_ends_when_its_copies_have(stage: Stage, device: FakeDevice) -> None:
    keys = keys_of(12)
    loaded(stage, keys, range(40, 52))
    assert stage.loader._layers is not None
    (job,) = stage.loader._layers._queued["r"]
    batch = stage.begin()
    wait_until(lambda: len(device.launched) == LAYERS, "all are launched")
    stage.corrupt()
    device.launched[0].looks = 0
    wait_until(lambda: job._phase is _Phase.ENDING, "the first layer is not what it was")
    assert not batch.has_ended and is_leased(stage)
    assert stage.loader._made[1]._ending == []  # type: ignore[index]
    device.release()
    assert not stage.loader.finish(batch)
    assert stage.layers == [] and stage.outcomes() == ["checksum-mismatch"]


def test_on_a_gpu_a_flush_waits_for_the_copies(stage: Stage, device: FakeDevice) -> None:
    keys = keys_of(12)
    loaded(stage, keys, range(40, 52))
    batch = stage.begin()
    wait_until(lambda: len(device.launched) == LAYERS, "all are launched")
    thread = in_thread(stage.loader.forget_all)
    wait_until(lambda: bool(stage.failed), "given up")
    assert thread.is_alive() and not batch.has_ended and is_leased(stage)
    device.release()
    thread.join()
    assert batch.has_ended and not is_leased(stage) and len(stage.sessions()) == 1


def test_on_a_gpu_the_daemons_death_fails_the_load_before_anything_is_launched(
    stage: Stage, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is gone with it."""
    loaded(stage, keys_of(12), range(40, 52))
    assert stage.loader._layers is not None
    (job,) = stage.loader._layers._queued["r"]

    def gone() -> None:
        raise ConnectionLost("the daemon is gone")

    monkeypatch.setattr(job._arena, "check_alive", gone)
    batch = stage.begin()
    assert not stage.loader.finish(batch)
    assert device.launched == [] and stage.layers == [] and len(stage.sessions()) == 1


# --- any order -----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_in_any_order_a_load_that_lands_is_ds_and_nothing_stays_leased(
    daemon: DaemonProcess, data: st.DataObject
) -> None:
    """Pushes, loads of all or the beginning, cancelled ones, corruption and flushes, in any order."""
    with staged(daemon) as stage:
        accepted: dict[str, tuple[Sequence[str], range]] = {}
        free = 1
        for turn in range(data.draw(st.integers(1, 10), "turns")):
            act = data.draw(st.sampled_from(["load", "load", "load", "cancel", "corrupt", "run", "flush"]))
            if act == "load" and free < 100:
                keys = keys_of(
                    data.draw(st.integers(1, 6), "pages"), seed=data.draw(st.integers(0, 2), "seed")
                )
                assert stage.offload(keys)
                found = stage.loader.lookup(f"r{turn}", keys)
                wanted = data.draw(st.integers(1, found), "wanted") if found else 0
                pages = range(free, free + wanted)
                free += wanted
                if wanted and stage.loader.load(f"r{turn}", keys[:wanted], slots_of(pages)):
                    accepted[f"r{turn}"] = (keys[:wanted], pages)
            elif act == "cancel" and accepted:
                rid = data.draw(st.sampled_from(sorted(accepted)))
                assert stage.loader.forget(rid)
                del accepted[rid]
            elif act == "corrupt":
                stage.corrupt()
            elif act == "flush":
                stage.loader.forget_all()
                accepted.clear()
            elif act == "run" and stage.loader.has_queued:
                assert accepted
                if stage.loader.finish(stage.begin()):
                    for keys, pages in accepted.values():
                        assert layers_of(stage, keys, pages) == ["there"] * LAYERS
                    assert stage.layers == [0, 1, 2]
                else:
                    assert len(stage.failed) == 1
                accepted.clear()
            assert stage.loader.has_queued is bool(accepted)
        stage.loader.forget_all()
        assert not is_leased(stage)
