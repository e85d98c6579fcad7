"""Direct injection over a real daemon into SGLang's real slots and trees."""

from collections.abc import Iterator
from typing import Any

import pytest
from inject_stage import STEP_BYTES, serving, staged, tokens_of
from sglang_cases import KINDS, SIZE_TOKENS, kind_id, truth

from snapd.core.events import State
from snapd.errors import InvalidRequest, Reason
from snapd.wire import SnapshotFinalizeIngestReqOutput
from tests.integration.daemon_process import DaemonProcess

pytestmark = pytest.mark.usefixtures("sglang")
every_kind = pytest.mark.parametrize("kind", KINDS, ids=kind_id)
# K and V and pages; each tree.
some_kinds = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[0] == "mha"], ids=kind_id)
PAGED = ("mha", "unified-rust", 16)


@pytest.fixture(scope="module")
def daemon(sglang: None) -> Iterator[DaemonProcess]:
    with serving() as daemon:
        yield daemon


def ok(num_tokens: int) -> SnapshotFinalizeIngestReqOutput:
    return SnapshotFinalizeIngestReqOutput(ok=True, reason=Reason.OK, num_tokens=num_tokens)


def no(reason: Reason) -> SnapshotFinalizeIngestReqOutput:
    return SnapshotFinalizeIngestReqOutput(ok=False, reason=reason)


# --- bytes ---------------------------------------------------------------------------------------------


@every_kind
def test_sglang_finds_ds_kv_in_its_tree(daemon: DaemonProcess, kind: Any) -> None:
    tokens = tokens_of(48)
    with staged(daemon, kind) as stage:
        handle = stage.ready("s", tokens)
        assert stage.ingest("s", tokens, handle) == ok(48)
        assert stage.p.resident(tokens) == 48
        assert stage.p.available == SIZE_TOKENS - 48
        assert stage.state(handle) is State.INGESTED
        assert stage.ingest("s", tokens, handle) == no(Reason.STALE_HANDLE), "it was answered before"
        assert stage.p.evict() == 48, "SGLang may evict it as any other"


@every_kind
def test_the_second_turn_brings_the_new_tokens_only(daemon: DaemonProcess, kind: Any) -> None:
    tokens = tokens_of(96)
    with staged(daemon, kind) as stage:
        assert stage.ingest("s", tokens[:48], stage.ready("s", tokens[:48])) == ok(48)
        assert stage.ingest("s", tokens, stage.ready("s", tokens, start=48)) == ok(48)
        assert stage.p.resident(tokens) == 96
        assert stage.p.available == SIZE_TOKENS - 96


@every_kind
@pytest.mark.parametrize(("held", "start"), [(32, 0), (64, 48), (96, 48), (96, 0)])
def test_of_what_the_tree_holds_already_nothing_is_allocated(
    daemon: DaemonProcess, kind: Any, held: int, start: int
) -> None:
    """P computed past the place where the snapshot begins, or all of it."""
    tokens = tokens_of(96)
    with staged(daemon, kind) as stage:
        stage.p.compute(tokens[:held])
        stage.p.hold("others", SIZE_TOKENS - 96)  # There is room for what is missing, and for no more.
        handle = stage.ready("s", tokens, start=start)
        assert stage.ingest("s", tokens, handle) == ok(96 - start)
        assert (stage.p.resident(tokens), stage.p.available) == (96, 0)
        assert stage.state(handle) is State.INGESTED


@every_kind
def test_of_a_session_that_went_another_way_the_common_part_is_kept(daemon: DaemonProcess, kind: Any) -> None:
    first, second = tokens_of(64), (*tokens_of(32), *tokens_of(48, seed=3))
    with staged(daemon, kind) as stage:
        assert stage.ingest("s", first, stage.ready("s", first)).ok
        assert stage.ingest("s", second, stage.ready("s", second)).ok
        assert (stage.p.resident(first), stage.p.resident(second)) == (64, 80)
        assert stage.p.available == SIZE_TOKENS - 64 - 48


@some_kinds
@pytest.mark.parametrize("num_tokens", [71, 80, 15])
def test_a_last_page_that_is_not_full_is_given_back(
    daemon: DaemonProcess, kind: Any, num_tokens: int
) -> None:
    """SGLang's tree holds whole pages. The bytes are verified all the same."""
    tokens = tokens_of(num_tokens)
    with staged(daemon, kind) as stage:
        assert stage.ingest("s", tokens, stage.ready("s", tokens)) == ok(num_tokens)
        whole = stage.p.whole(num_tokens)
        assert (stage.p.resident(tokens), stage.p.available) == (whole, SIZE_TOKENS - whole)


def test_a_prompt_that_goes_on_gets_the_snapshots_tokens(daemon: DaemonProcess) -> None:
    with staged(daemon, PAGED) as stage:
        assert stage.ingest("s", tokens_of(90), stage.ready("s", tokens_of(64))) == ok(64)
        assert stage.p.resident(tokens_of(90)) == 64


# --- prefixes ------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("keep", [True, False])
def test_a_suffix_whose_prefix_is_gone_is_refused(daemon: DaemonProcess, kind: Any, keep: bool) -> None:
    """It would land at the wrong positions."""
    tokens = tokens_of(96)
    with staged(daemon, kind, keep_on_missing_prefix=keep) as stage:
        assert stage.ingest("s", tokens[:48], stage.ready("s", tokens[:48])).ok
        handle = stage.ready("s", tokens, start=48)
        assert stage.p.evict() == 48
        assert stage.ingest("s", tokens, handle) == no(Reason.PREFIX_NOT_RESIDENT)
        assert (stage.p.resident(tokens), stage.p.available) == (0, SIZE_TOKENS)
        assert stage.state(handle) is (State.READY if keep else State.ABORTED)
        stage.p.compute(tokens[:48])
        assert stage.ingest("s", tokens, handle) == (ok(48) if keep else no(Reason.STALE_HANDLE))


def test_a_suffix_that_starts_inside_a_page_is_refused_before_a_byte_moves(daemon: DaemonProcess) -> None:
    with staged(daemon, PAGED) as stage:
        planes = {0: [rows[40:].flatten() for rows in truth(stage.p.pool, tokens_of(96))]}
        result = stage.pusher.push_planes("s", tokens_of(96), planes, token_start=40)
        assert (result.ok, result.reason, result.bytes) == (False, Reason.INVALID_REQUEST, 0)


# --- room ------------------------------------------------------------------------------------------------


@every_kind
def test_a_full_p_keeps_the_snapshot_and_a_later_try_succeeds(daemon: DaemonProcess, kind: Any) -> None:
    tokens = tokens_of(48)
    with staged(daemon, kind) as stage:
        stage.p.fill()
        handle = stage.ready("s", tokens)
        for _ in range(3):
            assert stage.ingest("s", tokens, handle) == no(Reason.ALLOC_FAILED_ON_FINALIZE)
        assert stage.state(handle) is State.READY
        stage.p.release("filler")
        assert stage.ingest("s", tokens, handle) == ok(48)


def test_a_full_p_may_have_the_attempt_ended(daemon: DaemonProcess) -> None:
    with staged(daemon, PAGED, keep_on_alloc_failure=False) as stage:
        stage.p.fill()
        handle = stage.ready("s", tokens_of(48))
        assert stage.ingest("s", tokens_of(48), handle) == no(Reason.ALLOC_FAILED_ON_FINALIZE)
        assert stage.state(handle) is State.ABORTED


@every_kind
def test_room_is_made_by_evicting_what_is_least_recently_used_and_not_the_prefix(
    daemon: DaemonProcess, kind: Any
) -> None:
    tokens, old, new = tokens_of(96), tokens_of(80, seed=1), tokens_of(32, seed=2)
    with staged(daemon, kind) as stage:
        # The prefix is what was used longest ago.
        for own in (tokens[:48], old, new):
            stage.p.compute(own)
        stage.p.hold("others", stage.p.available)
        assert stage.ingest("s", tokens, stage.ready("s", tokens, start=48)) == ok(48)
        assert [stage.p.resident(x) for x in (tokens, old, new)] == [96, 0, 32]


@every_kind
def test_nothing_is_evicted_where_that_would_not_make_enough_room(daemon: DaemonProcess, kind: Any) -> None:
    tokens, other = tokens_of(64), tokens_of(48, seed=1)
    with staged(daemon, kind) as stage:
        stage.p.compute(other)
        stage.p.hold("others", stage.p.available)
        assert stage.ingest("s", tokens, stage.ready("s", tokens)) == no(Reason.ALLOC_FAILED_ON_FINALIZE)
        assert stage.p.resident(other) == 48


# --- what goes wrong ---------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("start", [0, 48])
def test_bytes_that_are_not_ds_never_reach_the_tree(daemon: DaemonProcess, kind: Any, start: int) -> None:
    """Also where P holds them already and they would not be copied."""
    tokens = tokens_of(96)
    with staged(daemon, kind) as stage:
        stage.p.compute(tokens[:64])
        handle = stage.ready("s", tokens, start=start)
        stage.corrupt(handle, 3)
        assert stage.ingest("s", tokens, handle) == no(Reason.CHECKSUM_MISMATCH)
        assert (stage.p.resident(tokens), stage.p.available) == (64, SIZE_TOKENS - 64)


def test_without_verification_they_would(daemon: DaemonProcess) -> None:
    with staged(daemon, PAGED, verify=False) as stage:
        handle = stage.ready("s", tokens_of(48))
        stage.corrupt(handle, 3)
        assert stage.ingest("s", tokens_of(48), handle) == ok(48)
        with pytest.raises(AssertionError, match="other bytes"):
            stage.p.resident(tokens_of(48))


@every_kind
def test_other_tokens_than_ds_are_refused(daemon: DaemonProcess, kind: Any) -> None:
    with staged(daemon, kind) as stage:
        handle = stage.ready("s", tokens_of(48))
        assert stage.ingest("s", tokens_of(48, seed=1), handle) == no(Reason.TOKEN_MISMATCH)
        assert stage.p.available == SIZE_TOKENS


@every_kind
def test_an_ingest_that_is_given_up_gives_everything_back(daemon: DaemonProcess, kind: Any) -> None:
    tokens = tokens_of(96)
    with staged(daemon, kind) as stage:
        stage.p.compute(tokens[:48])
        handle = stage.ready("s", tokens, start=48)
        job = stage.p.injector.start(stage.request("s", tokens, handle))
        assert not job.done and (stage.p.injector.lent_tokens, stage.p.pinned()) == (48, 48)
        assert job.cancel() and job.done and not job.result.ok
        stage.p.check()
        assert stage.state(handle) is State.READY
        assert stage.ingest("s", tokens, handle) == ok(48)


@every_kind
def test_what_p_computed_meanwhile_stays_and_the_duplicates_are_given_back(
    daemon: DaemonProcess, kind: Any
) -> None:
    """Exactly those: before the prefix everything is the tree's, behind P's part everything is new."""
    tokens = tokens_of(96)
    with staged(daemon, kind) as stage:
        stage.p.compute(tokens[:32])
        job = stage.p.injector.start(stage.request("s", tokens, stage.ready("s", tokens)))
        stage.p.compute(tokens[:64])
        before = stage.p.injector.cache.pin(tokens[:64])
        stage.p.injector.cache.unpin(before)
        while not job.step(STEP_BYTES):
            job.wait()
        assert job.result == ok(96)
        assert (stage.p.resident(tokens), stage.p.available) == (96, SIZE_TOKENS - 96)
        after = stage.p.injector.cache.pin(tokens)
        stage.p.injector.cache.unpin(after)
        assert after.slots[:64].tolist() == before.slots.tolist()


@every_kind
def test_an_aborted_round_gives_everything_back(daemon: DaemonProcess, kind: Any) -> None:
    """The decision is the daemon's: an abort comes after this rank has voted."""
    tokens = tokens_of(96)
    with staged(daemon, kind) as stage:
        stage.p.compute(tokens[:48])
        handle = stage.ready("s", tokens)
        stage.p.injector.ingester.agree = lambda handle, commit: False
        assert stage.ingest("s", tokens, handle) == no(Reason.ROUND_ABORTED)
        assert (stage.p.resident(tokens), stage.p.available) == (48, SIZE_TOKENS - 48)


@every_kind
@pytest.mark.parametrize("refilled", [False, True])
def test_a_flush_while_bytes_are_copied_ends_the_ingest_and_no_slot_comes_back_twice(
    daemon: DaemonProcess, kind: Any, refilled: bool
) -> None:
    tokens, other = tokens_of(96), tokens_of(240, seed=1)
    with staged(daemon, kind) as stage:
        stage.p.compute(tokens[:48])
        handle = stage.ready("s", tokens)
        job = stage.p.injector.start(stage.request("s", tokens, handle))
        stage.p.flush()
        if refilled:
            stage.p.compute(other)
        assert job.step(STEP_BYTES) and not job.result.ok
        assert stage.p.resident(other) == (240 if refilled else 0), "nothing was written over it"
        assert stage.p.resident(tokens) == 0
        stage.p.check()
        assert stage.state(handle) is State.READY
        stage.p.evict()
        assert stage.ingest("s", tokens, handle) == ok(96)


@every_kind
def test_a_flush_after_the_vote_ends_the_ingest(daemon: DaemonProcess, kind: Any) -> None:
    tokens = tokens_of(96)
    with staged(daemon, kind) as stage:
        stage.p.compute(tokens[:48])
        handle = stage.ready("s", tokens)

        def flush(slab_handle: int, commit: bool) -> bool:
            stage.p.flush()
            return commit

        stage.p.injector.ingester.agree = flush
        assert stage.ingest("s", tokens, handle) == no(Reason.INGEST_FAILED)
        assert (stage.p.resident(tokens), stage.p.available) == (0, SIZE_TOKENS)


@some_kinds
def test_a_tree_that_raises_leaves_nothing_pinned(
    daemon: DaemonProcess, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(96)
    with staged(daemon, kind) as stage:
        stage.p.compute(tokens[:48])

        def fail(params: object) -> None:
            raise RuntimeError("no")

        with monkeypatch.context() as patched:
            patched.setattr(stage.p.tree, "insert", fail)
            with pytest.raises(RuntimeError):
                stage.ingest("s", tokens, stage.ready("s", tokens))
        assert stage.p.pinned() == 0
        with monkeypatch.context() as patched:
            patched.setattr(stage.p.tree, "match_prefix", fail)
            with pytest.raises(RuntimeError):
                stage.ingest("s", tokens, stage.ready("s", tokens))
        assert (stage.p.pinned(), stage.p.injector.lent_tokens) == (0, 0)
        # What was being inserted may be in the tree: it is lost until the next flush, not freed twice.
        assert stage.p.available == SIZE_TOKENS - 96
        stage.p.flush()


def test_a_session_is_ingested_once_at_a_time(daemon: DaemonProcess) -> None:
    """The second's prefix would be unpinned with the first's."""
    tokens = tokens_of(64)
    with staged(daemon, PAGED) as stage:
        first, second = stage.ready("s", tokens), stage.ready("t", tokens)
        job = stage.p.injector.start(stage.request("s", tokens, first))
        other = stage.p.injector.start(stage.request("t", tokens, second))
        assert not other.done, "of another session there may be one"
        stage.p.check(under_way=[job_slots(job), job_slots(other)])
        newer = stage.ready("s", tokens_of(80))
        again = stage.p.injector.start(stage.request("s", tokens_of(80), newer))
        assert again.done and again.result == no(Reason.WRONG_STATE)
        assert stage.state(newer) is State.READY
        for under_way in (job, other):
            while not under_way.step(STEP_BYTES):
                under_way.wait()
            assert under_way.result == ok(64)
        stage.p.check()
        assert stage.p.available == SIZE_TOKENS - 64, "they were the same tokens"
        assert stage.ingest("s", tokens_of(80), newer) == ok(80)


def job_slots(job: Any) -> Any:
    return job._job._slots


def test_with_several_ranks_there_are_no_steps(daemon: DaemonProcess) -> None:
    class Alone:
        def all_of(self, mine: bool) -> bool:
            return mine

    with staged(daemon, PAGED, agreement=Alone()) as stage:
        request = stage.request("s", tokens_of(32), stage.ready("s", tokens_of(32)))
        with pytest.raises(InvalidRequest, match="finalize_ingest"):
            stage.p.injector.start(request)
        assert stage.p.injector.finalize_ingest(request) == ok(32)


def test_an_idle_p_that_pings_has_its_layout_declared_after_a_restart() -> None:
    """Without the ping D is refused: nobody has declared the layout in this life of the daemon."""
    tokens = tokens_of(48)
    with serving() as daemon, staged(daemon, PAGED) as stage:
        daemon.kill()
        daemon.restart()
        with pytest.raises(AssertionError, match="layout-mismatch"):
            stage.ready("s", tokens)
        stage.clients[1].ping()
        assert stage.ingest("s", tokens, stage.ready("s", tokens)) == ok(48)
        assert stage.p.resident(tokens) == 48


def test_what_is_ready_can_be_looked_up(daemon: DaemonProcess) -> None:
    with staged(daemon, PAGED) as stage:
        handle = stage.ready("s", tokens_of(32))
        assert stage.p.injector.lookup("s").slab_handle == handle
        assert stage.p.injector.lookup("t").slab_handle == 0
