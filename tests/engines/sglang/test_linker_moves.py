"""Pages from D's pool through a real daemon into P's, as SGLang's scheduler asks for them."""

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from linker_stage import (
    NUM_SLOTS,
    PAGE,
    Stage,
    keys_of,
    make_pool,
    serving,
    settings_of,
    slots_of,
    staged,
    wait_until,
)

from snapd.client import Client
from snapd.core.events import State
from snapd.engines import sglang_load, sglang_offload
from snapd.engines.sglang_load import Loader, Warner
from snapd.engines.sglang_offload import KnownPages, Offloader
from snapd.engines.support import EngineSettings
from snapd.errors import ConfigError, InvalidRequest, Reason
from snapd.kv.devicescatter import DeviceScatter
from snapd.kv.ingest import Ingester
from snapd.kv.ingestpages import LentSlots, PagesJob
from snapd.kv.push import Pusher
from snapd.kv.pushjob import PushJob
from snapd.layout import Namespace, token_digest
from tests.integration.daemon_process import DaemonProcess
from tests.integration.fake_device import FakeDevice


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with serving() as served:
        yield served


@pytest.fixture
def stage(daemon: DaemonProcess) -> Iterator[Stage]:
    with staged(daemon) as made:
        yield made


@pytest.fixture
def whole(daemon: DaemonProcess) -> Iterator[Stage]:
    """A P that moves a load before it accepts it."""
    with staged(daemon, layer_wise=False) as made:
        yield made


# --- what goes well ----------------------------------------------------------------------------


def test_what_d_offloads_p_finds_by_its_keys_and_loads(stage: Stage) -> None:
    keys = keys_of(12)
    assert stage.offload(keys)
    assert stage.loader.lookup("r", (*keys, *keys_of(3, seed=9))) == 12
    assert stage.load(keys, range(40, 52))
    stage.assert_loaded(keys, range(40, 52))
    assert stage.sessions() == [] and stage.sessions(State.INGESTED)


def test_a_load_that_is_moved_whole_is_there_when_it_is_accepted(whole: Stage) -> None:
    """And every layer is told at once when its batch begins; what is corrupt is refused."""
    keys = keys_of(12)
    assert whole.offload(keys)
    assert whole.loader.lookup("r", keys) == 12
    assert whole.loader.load("r", keys, slots_of(range(40, 52))) and whole.loader.has_queued
    whole.assert_loaded(keys, range(40, 52))
    assert whole.sessions(State.INGESTED)
    batch = whole.begin()
    assert whole.layers == [0, 1, 2] and batch.has_ended and whole.loader.finish(batch)
    assert not whole.loader.has_queued
    more = keys_of(5, seed=1)
    assert whole.offload(more)
    for _ in range(2):
        assert whole.loader.lookup("r", more) == 5
        assert not whole.loader.forget("r")
    assert whole.loader.lookup("r", more) == 5
    assert whole.loader.load("r", more, slots_of(range(60, 65)))
    assert whole.loader.forget("r") and not whole.loader.has_queued and not whole.loader.forget("r")
    last = keys_of(5, seed=2)
    assert whole.offload(last)
    assert whole.loader.lookup("r", last) == 5
    whole.corrupt()
    assert not whole.loader.load("r", last, slots_of(range(70, 75))) and not whole.loader.has_queued


def test_p_loads_only_the_pages_that_it_lacks(stage: Stage) -> None:
    keys = keys_of(12)
    assert stage.offload(keys)
    assert stage.loader.lookup("r", keys[5:]) == 7
    assert stage.load(keys[5:], range(40, 47))
    stage.assert_loaded(keys[5:], range(40, 47))


def test_a_prompt_that_shares_only_the_beginning_leaves_the_snapshot_for_others(stage: Stage) -> None:
    keys = keys_of(12)
    assert stage.offload(keys)
    assert stage.loader.lookup("r", (*keys[:7], *keys_of(3, seed=9))) == 7
    assert stage.load(keys[:7], range(40, 47))
    stage.assert_loaded(keys[:7], range(40, 47))
    assert len(stage.sessions()) == 1
    assert stage.loader.lookup("other", keys) == 12
    assert stage.load(keys, range(40, 52), rid="other")
    stage.assert_loaded(keys, range(40, 52))
    assert stage.sessions() == []


def test_a_prompt_is_put_together_from_several_snapshots(stage: Stage) -> None:
    keys = keys_of(12)
    assert stage.offload(keys[:5])
    assert stage.offload(keys[5:9], first_page=20)
    assert stage.offload(keys[9:], first_page=30)
    assert stage.loader.lookup("r", keys) == 12
    assert stage.load(keys, range(40, 52))
    stage.assert_loaded(keys, range(40, 52))


def test_sglang_may_load_fewer_pages_than_were_found(stage: Stage) -> None:
    """Another rank may have found fewer."""
    keys = keys_of(12)
    assert stage.offload(keys)
    assert stage.loader.lookup("r", keys) == 12
    assert stage.load(keys[:3], range(40, 43))
    stage.assert_loaded(keys[:3], range(40, 43))
    assert len(stage.sessions()) == 1


def test_pages_in_any_order_of_the_pool_are_moved(stage: Stage) -> None:
    keys, pages = keys_of(6), [9, 3, 11, 4, 30, 2]
    assert stage.offloader.offer(keys, stage.write(keys, pages)) and stage.told()
    assert stage.loader.lookup("r", keys) == 6
    assert stage.load(keys, [50, 41, 47, 60, 44, 42])
    stage.assert_loaded(keys, [50, 41, 47, 60, 44, 42])


def test_pages_that_were_pushed_are_not_pushed_again(stage: Stage) -> None:
    keys = keys_of(12)
    assert stage.offload(keys[:5])
    assert stage.offload(keys, first_page=20)
    assert stage.offloader.pushed_pages == 12
    assert stage.offload(keys)
    assert stage.offloader.pushed_pages == 12


def test_pages_that_p_has_taken_are_not_pushed_again(stage: Stage) -> None:
    keys = keys_of(5)
    assert stage.offload(keys)
    assert stage.loader.lookup("r", keys) == 5 and stage.load(keys, range(40, 45))
    assert stage.offload(keys)
    assert stage.offloader.pushed_pages == 5


def test_pages_that_nobody_has_any_more_are_pushed_again(stage: Stage) -> None:
    keys = keys_of(5)
    assert stage.offload(keys)
    for session in stage.attempts(State.READY):
        stage.client.abort(session.slab_handle)
    assert stage.offload(keys)
    assert stage.offloader.pushed_pages == 10
    assert stage.loader.lookup("r", keys) == 5


def test_the_snapshot_carries_sglangs_session_id(stage: Stage) -> None:
    keys = keys_of(5)
    assert stage.offload(keys, session_id="chat-17")
    (name,) = stage.sessions()
    assert name.startswith("chat-17/")


def test_other_weights_have_other_pages(stage: Stage) -> None:
    keys = keys_of(5)
    old, new = stage.namespace, Namespace(weight_version="2")
    assert stage.offload(keys)
    stage.namespace = new
    # The keeper notices, and then the daemon is asked for the new weights' pages.
    assert stage.loader.lookup("r", keys) == 0
    wait_until(lambda: stage.loader._made is not None and stage.loader._made[0] == new, "renewed")
    assert stage.loader.lookup("r", keys) == 0
    assert stage.offload(keys)
    wait_until(lambda: stage.loader.lookup("r", keys) == 5, "found")
    stage.namespace = old
    assert not stage.load(keys, range(40, 45))


def test_short_pushes_and_short_loads_can_be_left_out(daemon: DaemonProcess) -> None:
    with staged(daemon, min_push_tokens=3 * PAGE, min_load_tokens=5 * PAGE) as stage:
        keys = keys_of(5)
        assert stage.offload(keys[:2]) and stage.sessions() == []
        assert stage.offload(keys, first_page=20)
        assert stage.loader.lookup("few", keys[:4]) == 0
        assert stage.loader.lookup("enough", keys) == 5


def test_a_push_of_more_keys_than_the_daemon_takes_is_cut_up() -> None:
    with serving(page_keys_max=4) as daemon, staged(daemon) as stage:
        keys = keys_of(10)
        assert stage.offload(keys)
        assert len(stage.sessions()) == 3
        assert stage.loader.lookup("r", keys) == 4


def test_a_copy_on_a_gpu_is_waited_for(whole: Stage) -> None:
    """In host memory: whoever is told that pages are loaded may read them at once."""
    stage, keys = whole, keys_of(12)
    assert stage.offload(keys)
    ingester = stage.loader._made[1]  # type: ignore[index]
    device = FakeDevice(looks=5)
    ingester.copies = device.copies
    assert stage.loader.lookup("r", keys) == 12
    assert stage.load(keys, range(40, 52))
    stage.assert_loaded(keys, range(40, 52))
    assert len(device.launched) == 1
    other = keys_of(12, seed=2)
    assert stage.offload(other)
    assert stage.loader.lookup("r", other) == 12
    stage.corrupt()
    assert not stage.load(other, range(60, 72))
    assert [job.looks for job in device.launched] == [0, 0]


def test_slots_are_not_given_back_while_a_gpu_may_write_them(
    whole: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is raised while it copies."""
    stage, keys = whole, keys_of(12)
    assert stage.offload(keys)
    ingester = stage.loader._made[1]  # type: ignore[index]
    device = FakeDevice(looks=5)
    ingester.copies = device.copies
    step = DeviceScatter.step

    def step_once(scatter: DeviceScatter, max_bytes: int) -> bool:
        if scatter.is_launched:
            raise RuntimeError("the engine's own fault")
        return step(scatter, max_bytes)

    assert stage.loader.lookup("r", keys) == 12
    with monkeypatch.context() as patch:
        patch.setattr(DeviceScatter, "step", step_once)
        assert not stage.load(keys, range(40, 52))
    assert [job.looks for job in device.launched] == [0]
    assert stage.loader.lookup("r", keys) == 12
    assert stage.load(keys, range(40, 52))
    stage.assert_loaded(keys, range(40, 52))
    assert ingester._ending == []


# --- what goes wrong ---------------------------------------------------------------------------


def test_corrupt_bytes_are_computed_instead(stage: Stage) -> None:
    keys = keys_of(12)
    assert stage.offload(keys)
    assert stage.loader.lookup("r", keys) == 12
    stage.corrupt()
    with structlog.testing.capture_logs() as logs:
        assert not stage.load(keys, range(40, 52))
    assert any(log["event"].startswith("checksum-mismatch") for log in logs)
    assert stage.outcomes() == ["checksum-mismatch"]
    assert stage.loader.lookup("again", keys) == 0


def test_corrupt_bytes_behind_those_that_are_wanted_count_as_well(stage: Stage) -> None:
    keys = keys_of(12)
    assert stage.offload(keys)
    assert stage.loader.lookup("r", keys[:3]) == 3
    stage.corrupt()
    assert not stage.load(keys[:3], range(40, 43))


def test_without_verification_corrupt_bytes_are_loaded(daemon: DaemonProcess) -> None:
    """The control: what is corrupted does reach the pool, so the tests above can fail."""
    with staged(daemon, verify=False) as stage:
        keys = keys_of(12)
        assert stage.offload(keys)
        assert stage.loader.lookup("r", keys) == 12
        stage.corrupt()
        assert stage.load(keys, range(40, 52))
        with pytest.raises(AssertionError, match="plane 0"):
            stage.assert_loaded(keys, range(40, 52))


def test_one_bad_snapshot_of_several_has_all_computed(stage: Stage) -> None:
    keys = keys_of(12)
    assert stage.offload(keys[:5])
    assert stage.offload(keys[5:], first_page=20)
    assert stage.loader.lookup("r", keys) == 12
    for session in stage.attempts(State.READY):
        if session.num_tokens == 7 * PAGE:
            stage.client.abort(session.slab_handle)
    assert not stage.load(keys, range(40, 52))


def test_a_snapshot_that_vanished_is_computed_instead(stage: Stage) -> None:
    keys = keys_of(5)
    assert stage.offload(keys)
    assert stage.loader.lookup("r", keys) == 5
    for session in stage.attempts(State.READY):
        stage.client.abort(session.slab_handle)
    assert not stage.load(keys, range(40, 45))
    stage.assert_loaded((), ())


def test_a_load_that_was_not_looked_up_is_refused(stage: Stage) -> None:
    keys = keys_of(5)
    assert stage.offload(keys)
    with structlog.testing.capture_logs() as logs:
        assert not stage.load(keys, range(40, 45))
    assert logs == []
    assert stage.loader.lookup("r", keys) == 5
    assert not stage.load(keys_of(5, seed=3), range(40, 45))
    assert stage.loader.lookup("r", keys) == 5
    stage.loader.forget("r")
    assert not stage.load(keys, range(40, 45))


def test_more_pages_than_were_found_are_not_loaded(stage: Stage) -> None:
    keys = keys_of(8)
    assert stage.offload(keys[:5])
    assert stage.loader.lookup("r", keys) == 5
    assert not stage.load(keys, range(40, 48))
    stage.assert_loaded((), ())


def test_a_snapshot_of_another_end_is_not_read(stage: Stage) -> None:
    """The name says how its digest begins; a snapshot whose digest is another is not what was found."""
    keys = keys_of(5)
    assert stage.offload(keys)
    (session,) = stage.attempts(State.READY)
    ingester = stage.loader._made[1]  # type: ignore[index]

    def job(digest: str, *, num_pages: int = 5, keep_rest: bool = False) -> PagesJob:
        return PagesJob(
            ingester, session.session_id, session.slab_handle, slots_of(range(40, 40 + num_pages)),
            skip_tokens=0, digest=digest, keep_rest=keep_rest, vote_timeout_s=30.0,
        )  # fmt: skip

    assert job("f" * 64).result.reason is Reason.TOKEN_MISMATCH
    assert job(keys[-1], num_pages=6).result.reason is Reason.TOKEN_MISMATCH
    assert job(keys[-1], num_pages=4).result.reason is Reason.TOKEN_MISMATCH
    assert job(keys[-1], keep_rest=True).result.reason is Reason.TOKEN_MISMATCH
    stage.assert_loaded((), ())
    assert len(stage.sessions()) == 1


def test_a_snapshot_that_counts_its_tokens_otherwise_is_not_read(stage: Stage) -> None:
    tokens = range(3 * PAGE)
    pusher = Pusher(stage.client, {0: stage.d_pool}, stage.namespace)
    pushed = pusher.push("x", tokens, slots_of([1, 2, 3]), token_start=PAGE, use_resident_hint=False)
    assert pushed.ok
    ingester = stage.loader._made[1]  # type: ignore[index]
    job = PagesJob(
        ingester, "x", pushed.slab_handle, slots_of([40, 41]), skip_tokens=0, digest=token_digest(tokens),
        keep_rest=False, vote_timeout_s=30.0,
    )  # fmt: skip
    assert job.result.reason is Reason.TOKEN_MISMATCH
    stage.assert_loaded((), ())
    pusher.close()


def test_all_questions_of_a_lookup_share_its_time(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    asked_s: list[float] = []
    with staged(daemon) as stage:
        keys = keys_of(8)
        assert stage.offload(keys[:5])
        assert stage.offload(keys[5:], first_page=20)
        settings = settings_of(daemon, retry_s=3_600.0)
        loader = Loader(settings, 0, stage.p_pool, lambda: stage.namespace, clock=lambda: now_s[0])
        lookup = loader._client.lookup

        def slow(*arguments: Any, timeout_s: float, **options: Any) -> Any:
            asked_s.append(timeout_s)
            now_s[0] += 20.0
            return lookup(*arguments, **options)

        monkeypatch.setattr(loader._client, "lookup", slow)
        assert loader.lookup("r", keys) == 0
        assert asked_s == [30.0, 10.0]
        assert loader.lookup("other", keys) == 0 and loader.counts.resting_lookups == 1
        loader.close()


def test_pages_are_read_only_for_an_engine_that_keeps_its_slots(stage: Stage) -> None:
    owner = LentSlots()
    ingester = Ingester(stage.client, 0, make_pool(), owner, stage.namespace)
    ingester.owner = object()  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match="of its own"):
        PagesJob(
            ingester, "x", 1, slots_of([1]), skip_tokens=0, digest="", keep_rest=False, vote_timeout_s=1.0
        )
    owner.lend(0, slots_of([1, 2]))
    assert owner.allocate(PAGE) is None
    ingester.close()


def test_on_several_ranks_one_that_cannot_has_all_compute(daemon: DaemonProcess) -> None:
    """Every rank is asked once a load, whatever became of its own part."""
    heard: list[bool] = []

    def agree(is_ok: bool) -> bool:
        heard.append(is_ok)
        return False

    with staged(daemon) as stage:
        keys = keys_of(5)
        loader = Loader(settings_of(daemon), 0, stage.p_pool, lambda: stage.namespace, agree=agree)
        assert stage.offload(keys)
        assert loader.lookup("r", keys) == 5
        assert not loader.load("r", keys, slots_of(range(40, 45)))
        assert not loader.load("never looked up", keys, slots_of(range(40, 45)))
        assert heard == [True, False]
        loader.close()


def test_two_ranks_use_a_load_or_neither_does() -> None:
    """Each has bytes of its own; those of one are corrupt, and the other one's are not used either."""
    barrier, verdicts = threading.Barrier(2), {}

    def agree(rank: int) -> Callable[[bool], bool]:
        def ask(is_ok: bool) -> bool:
            verdicts[rank] = is_ok
            barrier.wait()
            answer = all(verdicts.values())
            barrier.wait()
            return answer

        return ask

    with (
        serving(ranks=2) as daemon,
        staged(daemon, rank=0, agree=agree(0)) as first,
        staged(daemon, rank=1, agree=agree(1)) as second,
    ):
        for seed, is_sound in ((1, True), (2, False)):
            keys = keys_of(5, seed)
            heard: dict[int, bool] = {}
            for stage in (first, second):
                assert stage.offload(keys)
                assert stage.loader.lookup("r", keys) == 5
            if not is_sound:
                second.corrupt()

            def load(stage: Stage, keys: tuple[str, ...] = keys, heard: dict[int, bool] = heard) -> None:
                heard[stage.rank] = stage.load(keys, range(40, 45))

            threads = [threading.Thread(target=load, args=(stage,)) for stage in (first, second)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert heard == {0: is_sound, 1: is_sound}
        assert verdicts == {0: True, 1: False}


def test_a_full_daemon_has_pages_stay_where_they_are() -> None:
    with serving(size="1MiB", reserve_timeout_ms=3_600_000) as daemon, staged(daemon) as stage:
        filler = stage.client.prepare_receive("filler", 10_900, stage.fingerprint)
        keys = keys_of(12)
        with structlog.testing.capture_logs() as logs:
            assert not stage.offload(keys)
            assert not stage.offload(keys)
        warnings = [log for log in logs if log["event"].startswith("pages were not pushed")]
        assert [log["reason"] for log in warnings] == ["snapshot-buf-full"]
        assert stage.loader.lookup("r", keys) == 0
        stage.client.transfer_failed(filler.slab_handle, drained=True)
        assert stage.offload(keys)


def test_with_a_key_on_both_sides_only_its_holders_bytes_are_used(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    """The digest that a MAC is bound to is the last page's key; a part of a snapshot is checked as well."""
    names = ("mine", "other")
    for index, name in enumerate(names):
        (tmp_path / name).write_bytes(bytes((index * 91 + at * 37) % 256 for at in range(64)))
        (tmp_path / name).chmod(0o600)
    mine, other = (
        {"integrity_key_path": str(tmp_path / name), "integrity_algorithm": "blake2b"} for name in names
    )
    with staged(daemon, **mine) as stage:
        keys = keys_of(12)
        assert stage.offload(keys)
        assert stage.loader.lookup("r", keys[:4]) == 4 and stage.load(keys[:4], range(40, 44))
        assert stage.loader.lookup("r", keys) == 12 and stage.load(keys, range(40, 52))
        stage.assert_loaded(keys, range(40, 52))
        more = keys_of(5, seed=3)
        assert stage.offload(more)
        stranger = Loader(settings_of(daemon, **other), 0, stage.p_pool, lambda: stage.namespace)
        assert stranger.lookup("r", more) == 5
        assert not stranger.load("r", more, slots_of(range(60, 65)))
        assert stage.outcomes() == ["checksum-mismatch", "ok"]
        stranger.close()


@pytest.mark.parametrize("side", [Loader, Offloader])
def test_a_key_that_cannot_be_read_stops_the_engine_from_starting(
    daemon: DaemonProcess, tmp_path: Path, side: type[Loader] | type[Offloader]
) -> None:
    settings = settings_of(daemon, integrity_key_path=str(tmp_path / "none"))
    with pytest.raises(ConfigError):
        side(settings, 0, make_pool(), Namespace)


def test_a_key_is_not_for_a_d_on_a_gpu(daemon: DaemonProcess, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(range(64)))
    key.chmod(0o600)
    settings = settings_of(daemon, integrity_key_path=str(key), integrity_algorithm="blake2b")
    pool = make_pool()
    pool.device = torch.device("meta")
    with pytest.raises(ConfigError, match="meta"):
        Offloader(settings, 0, pool, Namespace)


# --- a daemon that is away ---------------------------------------------------------------------


def test_without_a_daemon_p_and_d_go_on_and_find_it_when_it_comes(tmp_path: Path) -> None:
    with serving() as daemon:
        daemon.stop()
        with staged(daemon) as stage:
            keys = keys_of(5)
            assert stage.loader.lookup("r", keys) == 0
            assert not stage.load(keys, range(40, 45))
            assert not stage.offload(keys)
            daemon.restart()
            # P is idle, and yet D's layout is known soon.
            wait_until(lambda: stage.offload(keys), "pushed")
            wait_until(lambda: stage.loader.lookup("r", keys) == 5, "found")
            assert stage.load(keys, range(40, 45))
            stage.assert_loaded(keys, range(40, 45))


def test_a_restart_forgets_what_was_not_taken_and_p_declares_its_layout_again() -> None:
    with serving() as daemon, staged(daemon) as stage:
        keys = keys_of(5)
        assert stage.offload(keys)
        assert stage.loader.lookup("r", keys) == 5
        daemon.kill()
        daemon.restart()
        assert not stage.load(keys, range(40, 45))
        stage.assert_loaded((), ())
        wait_until(lambda: stage.offload(keys), "pushed again")
        wait_until(lambda: stage.loader.lookup("r", keys) == 5, "found")


def test_a_daemon_that_hangs_costs_its_time_once_and_then_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as daemon, staged(daemon, timeout_s=1.0, retry_s=3_600.0) as stage:
        keys = keys_of(5)
        wait_until(lambda: stage.offload(keys), "pushed")
        assert stage.loader.lookup("r", keys) == 5
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            assert not stage.load(keys, range(40, 45))
            for attempt in range(20):
                assert stage.loader.lookup(f"r{attempt}", keys) == 0
            # Twenty timeouts would have been asked; none was.
            assert stage.loader.counts.resting_lookups == 20
            more = keys_of(5, seed=8)
            assert not stage.offload(more)
            asked: list[Namespace] = []
            monkeypatch.setattr(stage.offloader, "_pusher_for", asked.append)
            assert not stage.offload(more)
            assert not asked
        finally:
            daemon.process.send_signal(signal.SIGCONT)


def test_a_daemon_that_is_killed_in_the_middle_of_a_push_leaves_d_with_its_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving() as daemon, staged(daemon) as stage:
        started, killed = threading.Event(), threading.Event()
        finish = stage.offloader._finish

        def interrupted(job: PushJob) -> PushJob:
            if not started.is_set():
                # One plane of six.
                assert not job.step(1)
                started.set()
                killed.wait()
            return finish(job)

        monkeypatch.setattr(stage.offloader, "_finish", interrupted)
        keys = keys_of(60)
        assert stage.offloader.offer(keys, stage.write(keys, range(1, 61)))
        started.wait()
        assert stage.sessions(State.TRANSFERRING)
        daemon.kill()
        killed.set()
        assert not stage.told()
        daemon.restart()
        wait_until(lambda: stage.offload(keys), "pushed again")
        wait_until(lambda: stage.loader.lookup("r", keys) == 60, "found")
        assert stage.load(keys, range(61, 121))
        stage.assert_loaded(keys, range(61, 121))


def test_a_daemon_of_which_p_cannot_use_the_arena_stops_p_from_starting(daemon: DaemonProcess) -> None:
    with Client(str(daemon.socket_path)) as client:
        rank = max(arena.rank for arena in client.connect().arenas) + 1
    with pytest.raises(Exception, match=r"arena"):
        Loader(settings_of(daemon), rank, make_pool(), Namespace)


def test_a_daemon_that_goes_on_hanging_does_not_hold_the_scheduler_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the keeper asks, until there is an answer."""
    with serving() as daemon, staged(daemon, timeout_s=0.2, retry_s=0.01) as stage:
        keys, loader = keys_of(5), stage.loader
        wait_until(lambda: stage.offload(keys), "pushed")
        wait_until(lambda: loader.lookup("r", keys) == 5, "found")
        rests: list[str] = []
        rest = loader._rest

        def resting(why: str) -> None:
            rests.append(why)
            rest(why)

        monkeypatch.setattr(loader, "_rest", resting)
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            # The keeper has asked in vain several times, and its time to rest has passed.
            wait_until(lambda: len(rests) >= 3, "asked in vain")
            with monkeypatch.context() as patch:
                patch.setattr(loader._client, "lookup", lambda *_, **__: pytest.fail("the scheduler asks"))
                assert loader.lookup("other", keys) == 0
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        wait_until(lambda: loader.lookup("again", keys) == 5, "found again")


# --- what waits is bounded ---------------------------------------------------------------------


def test_d_takes_no_more_than_a_share_of_its_pool(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that wait are locked; SGLang keeps what is refused, and offers it again."""
    gate = threading.Event()
    push = stage.offloader._push

    def held(offer: object) -> object:
        gate.wait()
        return push(offer)  # type: ignore[arg-type]

    monkeypatch.setattr(stage.offloader, "_push", held)
    share_pages = NUM_SLOTS // PAGE // 4
    keys = keys_of(share_pages + 1)
    # One alone is taken however long it is: nothing of its pages would ever be pushed otherwise.
    assert stage.offloader.offer(keys, stage.write(keys, range(1, 2 + share_pages)))
    assert not stage.offloader.offer(keys[:1], slots_of([1]))
    gate.set()
    assert stage.told()
    assert stage.offloader._waiting_tokens == 0
    assert stage.offload(keys_of(1, seed=4))


def test_d_takes_no_more_than_so_many_offers(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_offload, "OFFERS_MAX", 2)
    gate = threading.Event()
    monkeypatch.setattr(stage.offloader, "_push", lambda _: gate.wait())
    offers = [stage.offloader.offer(keys_of(1), slots_of([1])) for _ in range(5)]
    # One is being pushed by now, or waits as well.
    assert offers.count(True) in (2, 3) and not offers[-1]
    gate.set()
    for _ in range(offers.count(True)):
        assert stage.told()


def test_a_reset_gives_up_what_waits_and_what_is_under_way(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A plane at a time.
    monkeypatch.setattr(sglang_offload, "_STEP_BYTES", 1)
    is_in_push = threading.Event()
    finish = stage.offloader._finish

    def stalled(job: PushJob) -> PushJob:
        is_in_push.set()
        wait_until(lambda: stage.offloader._is_stopping, "asked to stop")
        return finish(job)

    monkeypatch.setattr(stage.offloader, "_finish", stalled)
    keys = keys_of(20)
    assert stage.offloader.offer(keys, stage.write(keys, range(1, 21)))
    is_in_push.wait()
    assert stage.offloader.offer(keys[:1], slots_of([1]))
    stage.offloader.reset()
    assert stage.offloader.completed() == 0
    assert stage.offloader._waiting_tokens == 0
    assert stage.sessions() == []
    monkeypatch.undo()
    assert stage.offload(keys)
    assert stage.loader.lookup("r", keys) == 20


def test_a_failure_of_its_own_is_told_and_the_next_offer_is_pushed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(stage.offloader, "_push", lambda _: 1 // 0)
        assert not stage.offload(keys_of(1))
    assert [log["event"] for log in logs] == ["an offload failed"]
    assert stage.offload(keys_of(1))


def test_wrong_slots_are_a_failure_and_nothing_is_written(stage: Stage) -> None:
    keys = keys_of(2)
    assert stage.offload(keys)
    assert stage.loader.lookup("r", keys) == 2
    assert not stage.loader.load("r", keys, torch.arange(2 * PAGE) + 1)
    stage.assert_loaded((), ())


def test_plans_of_requests_that_never_load_are_forgotten(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_load, "PLANS_MAX", 3)
    for index in range(5):
        stage.loader.lookup(f"r{index}", keys_of(1))
    assert list(stage.loader._plans) == ["r2", "r3", "r4"]
    stage.loader.forget_all()
    assert not stage.loader._plans


def test_what_was_found_for_requests_that_never_load_is_bounded_in_keys(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt has thousands of keys; those of pages that the daemon lacks are not kept at all."""
    monkeypatch.setattr(sglang_load, "PLAN_KEYS_MAX", 10)
    keys, loader = keys_of(6), stage.loader
    assert stage.offload(keys)
    assert loader.lookup("nothing", keys_of(100, seed=5)) == 0
    assert loader.lookup("all", keys) == 6 and loader.lookup("some", keys[:4]) == 4
    assert list(loader._plans) == ["nothing", "all", "some"] and loader._plan_keys == 10
    assert loader.lookup("more", keys[:1]) == 1
    assert list(loader._plans) == ["some", "more"] and loader._plan_keys == 5
    loader.forget("some")
    assert loader.lookup("more", keys[:3]) == 3
    assert loader._plan_keys == 3
    loader.forget_all()
    assert loader._plan_keys == 0
    monkeypatch.setattr(sglang_load, "PLAN_KEYS_MAX", 5)
    # One alone is kept however long it is.
    assert loader.lookup("all", keys) == 6 and list(loader._plans) == ["all"]
    assert stage.load(keys, range(40, 46), rid="all")
    assert loader._plan_keys == 0


def test_a_prompt_that_goes_another_way_is_another_question(stage: Stage) -> None:
    """Also in the same moment, and as long."""
    keys = keys_of(5)
    assert stage.offload(keys)
    assert stage.loader.lookup("r", (*keys, *keys_of(1, seed=3))) == 5
    assert stage.loader.lookup("r", keys_of(6, seed=4)) == 0


def test_a_request_that_waits_is_not_looked_up_at_every_step(daemon: DaemonProcess) -> None:
    now_s = [100.0]
    namespace = Namespace(tenant="waiting")
    loader = Loader(settings_of(daemon), 0, make_pool(), lambda: namespace, clock=lambda: now_s[0])
    asked: list[Callable[..., object]] = []
    loader._cover = lambda keys: asked.append(keys) or ()  # type: ignore[assignment, method-assign, func-returns-value]
    for _ in range(3):
        loader.lookup("r", keys_of(2))
    assert len(asked) == 1
    loader.lookup("r", keys_of(3))
    assert len(asked) == 2
    now_s[0] += sglang_load.PLAN_FRESH_S
    loader.lookup("r", keys_of(3))
    assert len(asked) == 3
    loader.close()


def test_known_pages_are_bounded_and_follow_their_attempts() -> None:
    known = KnownPages(keys_max=4)
    known.add(1, "abc")
    known.add(2, "cd")
    assert list(known.missing("xabcdx")) == [0, 1, 2, 3, 4, 5]
    assert list(known.missing("abxcd")) == [2]
    assert list(known.missing("abcd")) == []
    # c was brought over by both; the first one's end says nothing of it.
    known.ended(1, is_ingested=False)
    assert list(known.missing("abcd")) == [0, 1]
    known.ended(2, is_ingested=True)
    known.forget_open()
    assert list(known.missing("cd")) == []
    known.add(3, "efg")
    assert len(known) == 4 and list(known.missing("cdefg")) == [0]
    # One of its keys is one too many: nothing of it is known any more.
    known.add(4, "hij")
    assert len(known) == 3 and list(known.missing("defghij")) == [0, 1, 2, 3]


def test_the_same_warning_is_said_once_in_a_while() -> None:
    now_s = [0.0]
    warn = Warner(lambda: now_s[0])
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            warn("a", error="x")
        warn("b")
        now_s[0] = sglang_load.WARN_S
        warn("a")
    assert [(log["event"], log.get("unsaid")) for log in logs] == [("a", None), ("b", None), ("a", 2)]


def test_settings_that_lead_nowhere_are_a_daemon_that_is_away(tmp_path: Path) -> None:
    settings = EngineSettings(socket_path=f"{tmp_path}/nobody.sock", retry_s=0.01)
    offloader = Offloader(settings, 0, make_pool(), Namespace)
    assert offloader.offer(keys_of(1), slots_of([1]))
    wait_until(lambda: offloader.completed() == 1, "told")
    assert not offloader.take()
    offloader.close()
    assert not offloader.offer(keys_of(1), slots_of([1]))


def test_threads_work_on_the_gpu_of_their_pool(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    with staged(daemon) as stage:
        assert used == []
        stage.loader._stop.set()
        stage.p_pool.device = torch.device("cuda:1")
        stage.loader._keep()
        stage.offloader.close()
        stage.d_pool.device = torch.device("cuda:2")
        stage.offloader._run()
        layers = stage.loader._layers
        assert layers is not None
        layers.close()
        layers._device = torch.device("cuda:3")
        layers._given.put(None)
        layers._run()
        assert used == [torch.device("cuda:1"), torch.device("cuda:2"), torch.device("cuda:3")]
        stage.d_pool.device = stage.p_pool.device = torch.device("cpu")
