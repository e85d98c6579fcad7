"""P's side over a real daemon: what reaches the pool and the tree, and what never does."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from kv_cases import (
    KINDS,
    MHA,
    ODD,
    STEP_BYTES,
    corrupt_plane,
    finish_all,
    first_turn,
    paged,
    paired,
    record,
    settle,
    tokens_of,
)
from raw_client import LogFollower, running, wait_for

from snapd.client import Client
from snapd.core import records as rec
from snapd.core.events import State
from snapd.errors import InvalidRequest, InvariantBroken, Reason
from snapd.kv.copy import ScatterJob
from snapd.kv.ingest import Ingester
from snapd.kv.push import Pusher
from snapd.layout import Namespace
from snapd.wire import SnapshotFinalizeIngestReqInput

# Long beside an ingest on a busy machine.
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


# --- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_p_holds_ds_bytes_and_no_other_slot_is_touched(daemon: Any, kind: str, num_ranks: int) -> None:
    tokens = tokens_of(71)
    with paired(daemon, KINDS[kind], num_ranks=num_ranks) as pair:
        assert KINDS[kind].page_size_tokens == 1 or len(tokens) % KINDS[kind].page_size_tokens, (
            "a partial page"
        )
        handle = pair.ready("s", tokens)
        answers = pair.ingest("s", tokens, handle)
        assert [(x.ok, x.reason, x.num_tokens) for x in answers] == [(True, Reason.OK, 71)] * num_ranks
        for tree in pair.trees:
            assert tree.tokens("s") == tokens
            assert len(tree.touched) == 71
        assert pair.view(handle).state is State.INGESTED
        assert pair.is_all_free()
        outcome = record(daemon, rec.SyncOutcome, handle)
        assert (outcome.ok, outcome.bytes) == (True, 71 * pair.token_bytes * num_ranks)
    ranks_differ = {bytes(pool.planes[0].rows[0].tolist()) for pool in pair.d_pools.values()}
    assert len(ranks_differ) == num_ranks, "each rank has bytes of its own"


def test_a_prompt_that_goes_on_after_the_snapshot_gets_the_snapshots_tokens(daemon: Any) -> None:
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(40))
        (answer,) = pair.ingest("s", tokens_of(55), handle)
        assert (answer.ok, answer.num_tokens) == (True, 40)
        assert pair.tree.tokens("s") == tokens_of(40)


def test_finalize_ingest_answers_the_orchestrators_request(daemon: Any) -> None:
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(9))
        found = pair.ingesters[0].lookup("s")
        assert (found.slab_handle, found.num_tokens) == (handle, 9)
        request = SnapshotFinalizeIngestReqInput(session_id="s", token_ids=tokens_of(9), slab_handle=handle)
        assert pair.ingesters[0].finalize_ingest(request).ok
        again = pair.ingesters[0].finalize_ingest(request)
        assert (again.ok, again.reason, again.num_tokens) == (False, Reason.STALE_HANDLE, 0)
        assert pair.tree.inserts == ["s"]
        assert pair.ingesters[0].lookup("s").slab_handle == 0


def test_a_result_is_not_to_be_had_before_the_end(daemon: Any) -> None:
    with paired(daemon) as pair:
        (job,) = pair.start_ingest("s", tokens_of(9), pair.ready("s", tokens_of(9)))
        assert not job.done
        with pytest.raises(InvalidRequest):
            job.result  # noqa: B018
        job.wait()  # There are bytes to move: nothing is waited for.
        assert not job.done
        finish_all([job])
        assert job.done and job.step(1)
        assert job.times.bytes == 9 * pair.token_bytes
        assert job.times.total_ms >= job.times.scatter_ms > 0


# --- suffixes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mha", "odd", "mha, pages", "odd, pages", "fp8"])
def test_an_explicit_suffix_goes_onto_the_prefix_that_p_holds(daemon: Any, kind: str) -> None:
    with paired(daemon, KINDS[kind]) as pair:
        first_turn(pair, "s", 48)
        result = pair.push("s", tokens_of(75), token_start=32, use_resident_hint=False)
        assert (result.ok, result.token_start, result.num_tokens) == (True, 32, 43)
        assert result.bytes == 43 * pair.token_bytes
        (answer,) = pair.ingest("s", tokens_of(75), result.slab_handle)
        assert (answer.ok, answer.num_tokens) == (True, 43)
        assert pair.tree.tokens("s") == tokens_of(75)
        assert pair.tree.allocations == [48, 75 - 48], "what is resident is not allocated again"


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("kind", "sent_from"), [("mha", 37), ("odd", 37), ("mha, pages", 32), ("odd, pages", 32)]
)
def test_the_second_turn_sends_the_new_tokens_only(
    daemon: Any, kind: str, sent_from: int, num_ranks: int
) -> None:
    """With pages the partial tail page is sent again, as it is whole pages that P keeps."""
    with paired(daemon, KINDS[kind], num_ranks=num_ranks) as pair:
        first_turn(pair, "s", 37)
        result = pair.push("s", tokens_of(90))
        new_tokens = 90 - sent_from
        assert (result.ok, result.token_start, result.num_tokens) == (True, sent_from, new_tokens)
        assert result.bytes == new_tokens * pair.token_bytes * num_ranks
        answers = pair.ingest("s", tokens_of(90), result.slab_handle)
        assert [(x.ok, x.num_tokens) for x in answers] == [(True, new_tokens)] * num_ranks
        assert all(tree.allocations == [37, new_tokens] for tree in pair.trees)
        assert all(tree.tokens("s") == tokens_of(90) for tree in pair.trees)
        outcome = record(daemon, rec.SyncOutcome, result.slab_handle)
        assert (outcome.token_start, outcome.num_tokens, outcome.bytes) == (
            sent_from,
            new_tokens,
            result.bytes,
        )


def test_a_third_turn_builds_on_the_second(daemon: Any) -> None:
    with paired(daemon, paged(ODD)) as pair:
        sent: list[int] = []
        for num_tokens in (20, 50, 51, 100):
            result = pair.push("s", tokens_of(num_tokens))
            sent.append(result.num_tokens)
            assert pair.ingest("s", tokens_of(num_tokens), result.slab_handle)[0].ok
            pair.check()
        assert sent == [20, 50 - 16, 51 - 48, 100 - 48]


@pytest.mark.parametrize("keep", [True, False])
def test_without_its_prefix_a_suffix_is_not_ingested_and_the_next_push_is_full(
    daemon: Any, keep: bool
) -> None:
    with paired(daemon, keep_on_missing_prefix=keep) as pair:
        first_turn(pair, "s", 30)
        suffix = pair.push("s", tokens_of(50))
        assert suffix.token_start == 30
        pair.tree.evict("s")
        (answer,) = pair.ingest("s", tokens_of(50), suffix.slab_handle)
        assert (answer.ok, answer.reason) == (False, Reason.PREFIX_NOT_RESIDENT)
        assert pair.view(suffix.slab_handle).state is (State.READY if keep else State.ABORTED)
        assert "s" not in pair.tree and pair.tree.allocations == [30], "nothing is allocated for it"
        pair.check()
        assert pair.ingesters[0].lookup("s").resident_hint_tokens == 0
        full = pair.push("s", tokens_of(50))
        assert (full.token_start, full.num_tokens) == (0, 50)
        assert pair.view(suffix.slab_handle).reason == (
            Reason.SUPERSEDED if keep else Reason.PREFIX_NOT_RESIDENT
        )
        assert pair.ingest("s", tokens_of(50), full.slab_handle)[0].ok


@pytest.mark.parametrize("kind", ["mha", "odd", "mha, pages", "odd, pages"])
@pytest.mark.parametrize(("held", "pushed"), [(48, 75), (50, 75), (75, 75)])
def test_of_a_snapshot_that_p_holds_in_part_the_rest_is_allocated(
    daemon: Any, kind: str, held: int, pushed: int
) -> None:
    """P may hold everything: then there is nothing to allocate and nothing to insert."""
    page = KINDS[kind].page_size_tokens
    missing = pushed - held // page * page
    with paired(daemon, KINDS[kind]) as pair:
        first_turn(pair, "s", held)
        result = pair.push("s", tokens_of(pushed), use_resident_hint=False)
        assert (result.ok, result.num_tokens) == (True, pushed)
        assert pair.ingest("s", tokens_of(pushed), result.slab_handle)[0].ok
        assert pair.tree.allocations == ([held, missing] if missing else [held])
        assert pair.tree.inserts == (["s", "s"] if missing else ["s"])
        assert pair.view(result.slab_handle).state is State.INGESTED


@pytest.mark.parametrize("kind", ["mha", "odd", "odd, pages"])
@pytest.mark.parametrize("held", [37, 75])
def test_a_corrupt_byte_in_the_part_that_p_holds_already_is_noticed(
    daemon: Any, kind: str, held: int
) -> None:
    """Odd strides: P's part ends inside a word of the plane."""
    with paired(daemon, KINDS[kind]) as pair:
        first_turn(pair, "s", held)
        result = pair.push("s", tokens_of(75), use_resident_hint=False)
        corrupt_plane(daemon, pair, result.slab_handle, offset_bytes=9)
        (answer,) = pair.ingest("s", tokens_of(75), result.slab_handle)
        assert (answer.ok, answer.reason) == (False, Reason.CHECKSUM_MISMATCH)
        assert pair.tree.inserts == ["s"] and pair.tree.tokens("s") == tokens_of(held)


@pytest.mark.parametrize("kind", ["mha", "odd"])
def test_a_corrupt_byte_at_the_cut_is_noticed(daemon: Any, kind: str) -> None:
    with paired(daemon, KINDS[kind]) as pair:
        first_turn(pair, "s", 37)
        for offset_bytes in (-1, 0):
            result = pair.push("s", tokens_of(75), use_resident_hint=False)
            width = pair.pusher.layout.k_stride_bytes[0]
            corrupt_plane(daemon, pair, result.slab_handle, 37 * width + offset_bytes)
            (answer,) = pair.ingest("s", tokens_of(75), result.slab_handle)
            assert answer.reason == Reason.CHECKSUM_MISMATCH
        assert pair.tree.inserts == ["s"]


# --- a part of a snapshot ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mha", "odd", "mha, pages", "odd, pages"])
@pytest.mark.parametrize("held", [0, 16])
def test_a_prompt_that_shares_a_prefix_gets_that_prefix_only(daemon: Any, kind: str, held: int) -> None:
    with paired(daemon, KINDS[kind]) as pair:
        if held:
            first_turn(pair, "s", held)
        result = pair.push("s", tokens_of(75), use_resident_hint=False)
        (job,) = [x.start("s", tokens_of(48), result.slab_handle, wanted_tokens=48) for x in pair.ingesters]
        (answer,) = finish_all([job])
        assert (answer.ok, answer.num_tokens) == (True, 48)
        assert job.times.bytes == 75 * pair.token_bytes, "all of it is read"
        assert pair.tree.tokens("s") == tokens_of(48)
        assert pair.tree.allocations[-1] == 48 - held
        assert pair.view(result.slab_handle).state is State.INGESTED
        assert pair.is_all_free()


def test_of_a_prefix_that_p_holds_already_nothing_is_moved(daemon: Any) -> None:
    with paired(daemon) as pair:
        first_turn(pair, "s", 48)
        result = pair.push("s", tokens_of(75), use_resident_hint=False)
        job = pair.ingesters[0].start("s", tokens_of(32), result.slab_handle, wanted_tokens=32)
        (answer,) = finish_all([job])
        assert (answer.ok, answer.num_tokens) == (True, 32)
        assert pair.tree.inserts == ["s"] and pair.tree.tokens("s") == tokens_of(48)


@pytest.mark.parametrize("kind", ["mha", "odd"])
@pytest.mark.parametrize("at", [9, 40, 48, 74])
def test_a_corrupt_byte_anywhere_in_the_snapshot_is_noticed_when_a_part_is_wanted(
    daemon: Any, kind: str, at: int
) -> None:
    with paired(daemon, KINDS[kind]) as pair:
        handle = pair.ready("s", tokens_of(75))
        width = pair.pusher.layout.k_stride_bytes[0]
        corrupt_plane(daemon, pair, handle, at * width)
        job = pair.ingesters[0].start("s", tokens_of(48), handle, wanted_tokens=48)
        (answer,) = finish_all([job])
        assert (answer.ok, answer.reason) == (False, Reason.CHECKSUM_MISMATCH)
        assert not pair.tree.inserts


@pytest.mark.parametrize("asked", [(*tokens_of(74), 5), tokens_of(47)], ids=["digest", "too few"])
def test_tokens_that_can_be_compared_are_compared_when_a_part_is_wanted(
    daemon: Any, asked: Sequence[int]
) -> None:
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(75))
        job = pair.ingesters[0].start("s", asked, handle, wanted_tokens=48)
        (answer,) = finish_all([job])
        assert (answer.ok, answer.reason) == (False, Reason.TOKEN_MISMATCH)
        assert pair.tree.allocations == []


def test_a_part_before_the_suffix_is_none(daemon: Any) -> None:
    with paired(daemon) as pair:
        first_turn(pair, "s", 48)
        suffix = pair.push("s", tokens_of(75))
        job = pair.ingesters[0].start("s", tokens_of(32), suffix.slab_handle, wanted_tokens=32)
        (answer,) = finish_all([job])
        assert (answer.ok, answer.num_tokens) == (True, 0)
        assert pair.tree.tokens("s") == tokens_of(48)


def test_an_ingest_may_name_another_namespace_of_the_same_layout(daemon: Any) -> None:
    with paired(daemon) as pair:
        salted = Namespace(cache_salt="a", tenant="of its own")
        own = Pusher(pair.d, pair.d_pools, salted)
        pair.ps[0].declare_layout(0, own.layout)
        pair._truth[0, "s"] = [plane.rows[pair.slots(40)].clone() for plane in pair.d_pools[0].planes]
        handle = own.push("s", tokens_of(40), pair.slots(40)).slab_handle
        wrong = pair.ingesters[0].start("s", tokens_of(40), handle)
        assert wrong.result.reason is Reason.LAYOUT_MISMATCH
        right = pair.ingesters[0].start("s", tokens_of(40), handle, layout_fingerprint=own.layout_fingerprint)
        assert finish_all([right])[0].ok
        own.close()


def test_a_prefix_of_other_tokens_is_not_taken_for_the_sessions(daemon: Any) -> None:
    """The session went back and answered anew: what P holds is equal up to where they part."""
    with paired(daemon) as pair:
        first_turn(pair, "s", 30)
        tokens = (*tokens_of(12), *tokens_of(40, seed=1000))
        suffix = pair.push("s", tokens)
        assert suffix.token_start == 30
        assert pair.ingest("s", tokens, suffix.slab_handle)[0].reason == Reason.PREFIX_NOT_RESIDENT
        full = pair.push("s", tokens)
        assert pair.ingest("s", tokens, full.slab_handle)[0].ok
        assert pair.tree.allocations == [30, 40], "twelve tokens are shared"


# --- P is full ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mha", "mha, pages"])
def test_a_full_p_leaves_the_snapshot_ready_and_a_later_try_succeeds(daemon: Any, kind: str) -> None:
    with paired(daemon, KINDS[kind]) as pair:
        handle = pair.ready("s", tokens_of(40))
        pair.tree.limit_tokens = 39
        for _ in range(3):
            (answer,) = pair.ingest("s", tokens_of(40), handle)
            assert (answer.ok, answer.reason) == (False, Reason.ALLOC_FAILED_ON_FINALIZE)
            assert pair.view(handle).state is State.READY
            pair.check()
        pair.tree.limit_tokens = None
        assert pair.ingest("s", tokens_of(40), handle)[0].ok


def test_a_full_p_that_does_not_keep_ends_the_attempt(daemon: Any) -> None:
    with paired(daemon, keep_on_alloc_failure=False) as pair:
        handle = pair.ready("s", tokens_of(40))
        pair.tree.limit_tokens = 39
        (answer,) = pair.ingest("s", tokens_of(40), handle)
        assert (answer.ok, answer.reason) == (False, Reason.ALLOC_FAILED_ON_FINALIZE)
        view = pair.view(handle)
        assert (view.state, view.reason) == (State.ABORTED, Reason.ALLOC_FAILED_ON_FINALIZE)
        assert pair.is_all_free(), "every write was final, and nobody reads"


@pytest.mark.parametrize("wrong", ["too few", "misaligned", "out of range"])
def test_slots_that_do_not_fit_go_back_and_the_snapshot_stays(
    daemon: Any, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    with paired(daemon, paged(MHA)) as pair:
        handle = pair.ready("s", tokens_of(40))
        given: list[torch.Tensor] = []
        returned: list[torch.Tensor] = []

        def allocate(num_tokens: int) -> torch.Tensor:
            slots = torch.arange(num_tokens) + {"misaligned": 1, "out of range": 512}.get(wrong, 0)
            given.append(slots[:-1] if wrong == "too few" else slots)
            return given[-1]

        with monkeypatch.context() as patch:
            patch.setattr(pair.tree, "allocate", allocate)
            patch.setattr(pair.tree, "free", returned.append)
            (answer,) = pair.ingest("s", tokens_of(40), handle)
        assert (answer.ok, answer.reason) == (False, Reason.INVALID_REQUEST)
        assert [x.tolist() for x in returned] == [x.tolist() for x in given]
        assert "s" not in pair.tree
        assert not pair.view(handle).is_leased, "nobody has to wait for the lease's deadline"
        pair.check()
        assert pair.ingest("s", tokens_of(40), handle)[0].ok


# --- which tokens, which session, which model ----------------------------------------------------------


@pytest.mark.parametrize(
    "asked",
    [
        (*tokens_of(39), 5),
        tokens_of(39),
        (),
        tokens_of(40)[::-1],
        tokens_of(40, seed=1),
    ],
    ids=["last differs", "shorter", "none", "order", "all differ"],
)
def test_other_tokens_than_ds_are_refused_and_nothing_is_inserted(daemon: Any, asked: Sequence[int]) -> None:
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(40))
        (answer,) = pair.ingest("s", asked, handle)
        assert (answer.ok, answer.reason) == (False, Reason.TOKEN_MISMATCH)
        view = pair.view(handle)
        assert (view.state, view.reason) == (State.ABORTED, Reason.TOKEN_MISMATCH)
        assert pair.tree.allocations == pair.tree.inserts == []
        assert pair.is_all_free()


def test_a_suffix_is_refused_when_the_tokens_before_it_differ(daemon: Any) -> None:
    """KV of a token depends on every token before it."""
    with paired(daemon) as pair:
        first_turn(pair, "s", 30)
        suffix = pair.push("s", tokens_of(50))
        assert suffix.token_start == 30
        asked = (7, *tokens_of(50)[1:])
        assert pair.ingest("s", asked, suffix.slab_handle)[0].reason == Reason.TOKEN_MISMATCH
        assert pair.tree.inserts == ["s"]


def test_another_weight_version_is_refused_at_prepare(daemon: Any) -> None:
    with paired(daemon, namespace=Namespace(weight_version="1")) as pair:
        assert pair.ready("s", tokens_of(9))
    with (
        Client(str(daemon.socket_path)) as client,
        paired(daemon, namespace=Namespace(weight_version="1")) as pair,
    ):
        newer = Pusher(client, pair.d_pools, Namespace(weight_version="2"))
        result = newer.push("t", tokens_of(9), pair.slots(9))
        assert (result.ok, result.reason, result.slab_handle) == (False, Reason.LAYOUT_MISMATCH, 0)


def test_another_weight_version_is_refused_at_the_lease(daemon: Any) -> None:
    with paired(daemon, namespace=Namespace(weight_version="1")) as pair:
        handle = pair.ready("s", tokens_of(9))
        newer = Ingester(pair.ps[0], 0, pair.p_pools[0], pair.tree, Namespace(weight_version="2"))
        assert newer.lookup("s").slab_handle == 0
        (answer,) = finish_all([newer.start("s", tokens_of(9), handle)])
        assert (answer.ok, answer.reason) == (False, Reason.LAYOUT_MISMATCH)
        assert pair.view(handle).state is State.READY, "it is still there for whom it fits"
        assert pair.tree.allocations == []
        assert pair.ingest("s", tokens_of(9), handle)[0].ok


def test_a_handle_of_another_session_changes_nothing(daemon: Any) -> None:
    with paired(daemon) as pair:
        handle = pair.ready("mine", tokens_of(9))
        (answer,) = pair.ingest("other", tokens_of(9), handle)
        assert (answer.ok, answer.reason) == (False, Reason.STALE_HANDLE)
        assert pair.tree.inserts == pair.tree.allocations == []
        view = pair.view(handle)
        assert (view.state, view.is_leased) == (State.READY, False)
        assert pair.ingest("mine", tokens_of(9), handle)[0].ok


def test_a_handle_that_was_never_given_is_stale(daemon: Any) -> None:
    with paired(daemon) as pair:
        assert pair.ingest("s", tokens_of(9), 12345)[0].reason == Reason.STALE_HANDLE
        assert pair.tree.allocations == []


def test_a_snapshot_of_other_ranks_is_refused(daemon: Any) -> None:
    with paired(daemon, num_ranks=2) as pair:
        pair.d_pools.pop(1)
        pair.pusher = Pusher(pair.d, pair.d_pools, pair.pusher.layout.namespace)
        handle = pair.ready("s", tokens_of(9))
        (answer,) = finish_all([pair.ingesters[1].start("s", tokens_of(9), handle)])
        assert answer.reason == Reason.WRONG_RANK
        assert pair.trees[1].allocations == []


# --- leases --------------------------------------------------------------------------------------------


def test_a_reader_that_comes_too_late_must_not_insert(start_daemon: Callable[..., Any]) -> None:
    daemon = start_daemon(lease_ms=LEASE_MS)
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(40))
        (job,) = pair.start_ingest("s", tokens_of(40), handle)
        wait_for(lambda: not pair.view(handle).is_leased, "the lease is over")
        (answer,) = finish_all([job])
        assert (answer.ok, answer.reason) == (False, Reason.LEASE_EXPIRED)
        assert pair.tree.inserts == []
        pair.check()
        assert pair.ingest("s", tokens_of(40), handle)[0].ok


def test_an_abort_waits_for_the_reader_and_the_reader_wins(daemon: Any) -> None:
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(40))
        (job,) = pair.start_ingest("s", tokens_of(40), handle)
        assert pair.d.abort(handle).pending
        assert finish_all([job])[0].ok
        assert pair.view(handle).state is State.INGESTED


# --- P's own faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["lock_prefix", "allocate"])
def test_an_owner_that_raises_leaves_no_slot_lent_and_no_prefix_pinned(
    daemon: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(40))

        def fail(*_: object) -> None:
            raise RuntimeError("an engine's own fault")

        with monkeypatch.context() as patch:
            patch.setattr(pair.tree, method, fail)
            with pytest.raises(RuntimeError, match="own fault"):
                pair.ingest("s", tokens_of(40), handle)
        pair.check()
        assert not pair.view(handle).is_leased, "nobody has to wait for the lease's deadline"
        assert pair.ingest("s", tokens_of(40), handle)[0].ok


@pytest.mark.parametrize("waits", [True, False])
def test_an_insert_that_raises_leaves_no_prefix_pinned(
    daemon: Any, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """The slots stay with the tree, which may have them; the decision stands."""
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(40))
        insert = pair.tree.insert

        def insert_and_fail(*args: Any) -> None:
            insert(*args)
            raise RuntimeError("an engine's own fault")

        before = pair.core()
        with monkeypatch.context() as patch:
            patch.setattr(pair.tree, "insert", insert_and_fail)
            (job,) = pair.start_ingest("s", tokens_of(40), handle)
            wait_for(lambda: job.is_waiting or job.step(STEP_BYTES), "the vote")
            with pytest.raises(RuntimeError, match="own fault"):
                if waits:
                    job.wait()
                finish_all([job])
        assert job.result.reason == Reason.INGEST_FAILED
        pair.check()
        after = pair.core()
        assert (after.requests_refused, after.messages_absorbed) == (
            before.requests_refused,
            before.messages_absorbed,
        ), "no second vote is cast"


def test_a_copy_that_is_refused_ends_the_attempt(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(40))
        (job,) = pair.start_ingest("s", tokens_of(40), handle)

        def refuse(*_: object) -> None:
            raise InvariantBroken("rows of another shape")

        with monkeypatch.context() as patch:
            patch.setattr(ScatterJob, "step", refuse)
            assert job.step(1)
        assert job.result.reason == Reason.INGEST_FAILED
        assert pair.view(handle).reason == Reason.INGEST_FAILED
        assert pair.tree.inserts == [] and pair.is_all_free()


def test_a_copy_that_raises_gives_slots_and_lease_back(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(40))
        (job,) = pair.start_ingest("s", tokens_of(40), handle)

        def fail(*_: object) -> None:
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(ScatterJob, "step", fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                job.step(1)
        assert job.result.reason == Reason.INGEST_FAILED
        pair.check()
        assert not pair.view(handle).is_leased
        assert pair.ingest("s", tokens_of(40), handle)[0].ok
