"""Two ranks of P: both insert or none does, whatever happens to one of them."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from kv_cases import (
    MLA,
    PATIENCE_S,
    STEP_BYTES,
    corrupt_plane,
    finish_all,
    first_turn,
    paged,
    paired,
    records,
    settle,
    tokens_of,
)
from raw_client import LogFollower, running, wait_for

from snapd.core import records as rec
from snapd.core.events import State
from snapd.errors import ConnectionLost, Reason, RequestTimeout, SnapdError, StaleHandle
from snapd.kv.ingest import IngestJob
from snapd.units import MS_PER_S
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


def until_voted(job: Any) -> None:
    """Step a rank until it waits for the decision."""
    wait_for(lambda: job.is_waiting or job.step(STEP_BYTES), "the vote", PATIENCE_S)
    assert job.is_waiting and not job.done


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("keep", [True, False])
def test_one_rank_that_cannot_allocate_is_no_for_both(daemon: Any, keep: bool, first: int) -> None:
    """The other has scattered and voted ok; its slots go back, and it inserts nothing."""
    with paired(daemon, MLA, num_ranks=2, keep_on_alloc_failure=keep) as pair:
        handle = pair.ready("s", tokens_of(40))
        pair.trees[1 - first].limit_tokens = 39
        voted = pair.ingesters[first].start("s", tokens_of(40), handle)
        until_voted(voted)
        refusing = pair.ingesters[1 - first].start("s", tokens_of(40), handle)
        answers = finish_all([voted, refusing])
        assert [x.reason for x in answers] == [Reason.ALLOC_FAILED_ON_FINALIZE] * 2
        assert voted.decision is not None and not voted.decision.commit
        assert pair.trees[0].inserts == pair.trees[1].inserts == []
        pair.check()
        assert pair.view(handle).state is (State.READY if keep else State.ABORTED)
        if keep:
            pair.trees[1 - first].limit_tokens = None
            assert all(x.ok for x in pair.ingest("s", tokens_of(40), handle))
            assert [tree.inserts for tree in pair.trees] == [["s"], ["s"]]
        assert pair.is_all_free()


def test_a_no_that_comes_first_is_told_to_the_rank_that_votes_later(daemon: Any) -> None:
    with paired(daemon, num_ranks=2) as pair:
        handle = pair.ready("s", tokens_of(40))
        slow = pair.ingesters[0].start("s", tokens_of(40), handle)
        pair.trees[1].limit_tokens = 0
        (refused,) = finish_all([pair.ingesters[1].start("s", tokens_of(40), handle)])
        (late,) = finish_all([slow])
        assert (refused.reason, late.reason) == (Reason.ALLOC_FAILED_ON_FINALIZE, Reason.ROUND_ABORTED)
        assert pair.trees[0].inserts == []


@pytest.mark.parametrize("without", [0, 1])
def test_a_prefix_that_one_rank_has_evicted_is_missing_for_both(daemon: Any, without: int) -> None:
    with paired(daemon, paged(MLA), num_ranks=2) as pair:
        first_turn(pair, "s", 32)
        suffix = pair.push("s", tokens_of(50))
        assert suffix.token_start == 32
        pair.trees[without].evict("s")
        voted = pair.ingesters[1 - without].start("s", tokens_of(50), suffix.slab_handle)
        until_voted(voted)
        lacking = pair.ingesters[without].start("s", tokens_of(50), suffix.slab_handle)
        assert [x.reason for x in finish_all([voted, lacking])] == [Reason.PREFIX_NOT_RESIDENT] * 2
        assert [tree.inserts for tree in pair.trees] == [["s"], ["s"]]
        pair.check()
        full = pair.push("s", tokens_of(50))
        assert full.token_start == 0
        assert all(x.ok for x in pair.ingest("s", tokens_of(50), full.slab_handle))
        assert pair.trees[without].allocations[-1] == 50
        assert pair.trees[1 - without].allocations[-1] == 18


@pytest.mark.parametrize("corrupt_rank", [0, 1])
def test_a_rank_with_other_bytes_is_no_for_both(daemon: Any, corrupt_rank: int) -> None:
    with paired(daemon, num_ranks=2) as pair:
        handle = pair.ready("s", tokens_of(40))
        corrupt_plane(daemon, pair, handle, offset_bytes=100, rank=corrupt_rank)
        answers = pair.ingest("s", tokens_of(40), handle)
        assert [x.reason for x in answers] == [Reason.CHECKSUM_MISMATCH] * 2
        assert pair.trees[0].inserts == pair.trees[1].inserts == []
        held = wait_for(lambda: records(daemon, rec.SlabQuarantined, handle))
        assert [x.rank for x in held if x.why == "corrupt"] == [corrupt_rank]


def test_finalize_ingest_waits_for_the_other_rank_without_turning_in_circles(
    daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[IngestJob] = []
    step = IngestJob.step

    def count_and_step(job: IngestJob, max_bytes: int) -> bool:
        steps.append(job)
        return step(job, max_bytes)

    with paired(daemon, num_ranks=2) as pair, ThreadPoolExecutor(1) as threads:
        handle = pair.ready("s", tokens_of(40))
        request = SnapshotFinalizeIngestReqInput(session_id="s", token_ids=tokens_of(40), slab_handle=handle)
        monkeypatch.setattr(IngestJob, "step", count_and_step)
        waiting = threads.submit(pair.ingesters[0].finalize_ingest, request)
        wait_for(lambda: pair.d.stats().requests_waiting, "the first vote")
        assert not waiting.done()
        assert pair.ingesters[1].finalize_ingest(request).ok
        assert waiting.result(PATIENCE_S).ok
        assert len(steps) == 2 * 2, "one to move the bytes, and one that finds the decision"


def test_finalize_ingest_answers_no_when_the_daemon_dies_while_it_waits(
    start_daemon: Callable[..., Any],
) -> None:
    daemon = start_daemon(ranks=2)
    with paired(daemon, num_ranks=2) as pair, ThreadPoolExecutor(1) as threads:
        handle = pair.ready("s", tokens_of(40))
        request = SnapshotFinalizeIngestReqInput(session_id="s", token_ids=tokens_of(40), slab_handle=handle)
        waiting = threads.submit(pair.ingesters[0].finalize_ingest, request)
        wait_for(lambda: pair.d.stats().requests_waiting, "the first vote")
        daemon.kill()
        answer = waiting.result(PATIENCE_S)
        assert (answer.ok, answer.reason) == (False, Reason.LEASE_EXPIRED)
        assert pair.trees[0].inserts == []


LEASES_AND_WAITS = """
import sys
from snapd.client import Client
with Client(sys.argv[1]) as client:
    client.begin_ingest(int(sys.argv[2]), 1, sys.argv[3])
    print("leased", flush=True)
    sys.stdin.read()
"""


def test_a_rank_that_was_killed_is_no_at_the_leases_deadline_and_a_later_round_succeeds(
    start_daemon: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start_daemon(ranks=2, lease_ms=LEASE_MS)
    with paired(daemon, num_ranks=2) as pair:
        handle = pair.ready("s", tokens_of(40))
        killed = subprocess.Popen(
            [
                sys.executable, "-c", LEASES_AND_WAITS,
                str(daemon.socket_path), str(handle), pair.pusher.layout_fingerprint,
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        with killed:
            assert killed.stdout is not None
            assert killed.stdout.readline() == "leased\n"
            voted = pair.ingesters[0].start("s", tokens_of(40), handle)
            killed.kill()
        # The vote has the lease's time, whatever the client gives to other calls.
        with monkeypatch.context() as patch:
            patch.setattr(pair.ps[0]._link, "timeout_s", LEASE_MS / 100 / MS_PER_S)
            (answer,) = finish_all([voted])
        # On a slow machine the voter's own lease may be over too.
        assert not answer.ok and answer.reason in (Reason.ROUND_ABORTED, Reason.LEASE_EXPIRED)
        assert pair.trees[0].inserts == []
        pair.check()
        assert pair.view(handle).state is State.READY
        assert all(x.ok for x in pair.ingest("s", tokens_of(40), handle))
        ended = [(x.rank, x.reason) for x in records(daemon, rec.LeaseEnded, handle)]
        assert (1, Reason.LEASE_EXPIRED) in ended


# --- what the ranks agree on among themselves --------------------------------------------------------


class Silent:
    """A vote whose answer never comes: the connection is lost, or too slow."""

    def __init__(self, error: SnapdError) -> None:
        self._error = error

    def poll(self) -> None:
        raise self._error

    wait = poll


def test_every_rank_takes_part_in_the_agreement_once_whatever_came_of_it(daemon: Any) -> None:
    """A collective operation of the engine must find all ranks there."""
    with paired(daemon, num_ranks=2) as pair:
        heard: list[tuple[int, bool]] = []
        for rank, ingester in enumerate(pair.ingesters):
            ingester.agree = lambda _, commit, rank=rank: heard.append((rank, commit)) or commit
        handle = pair.ready("s", tokens_of(40))
        assert all(x.ok for x in pair.ingest("s", tokens_of(40), handle))
        assert sorted(heard) == [(0, True), (1, True)]
        heard.clear()
        handle = pair.ready("t", tokens_of(48))
        pair.trees[1].limit_tokens = 0
        pair.ingesters[1].keep_on_alloc_failure = False
        assert not any(x.ok for x in pair.ingest("t", tokens_of(48), handle))
        assert sorted(heard) == [(0, False), (1, False)]
        assert not any(x.ok for x in pair.ingest("t", tokens_of(48), handle)), "no lease"
        assert sorted(heard) == [(0, False)] * 2 + [(1, False)] * 2


@pytest.mark.parametrize("rank_0_heard", [True, False])
def test_a_rank_that_heard_nothing_does_as_rank_0_heard(
    daemon: Any, monkeypatch: pytest.MonkeyPatch, rank_0_heard: bool
) -> None:
    """The daemon died between its two answers."""
    with paired(daemon, num_ranks=2) as pair:
        handle = pair.ready("s", tokens_of(40))
        pair.ingesters[1].agree = lambda *_: rank_0_heard
        if not rank_0_heard:
            pair.ingesters[0].agree = lambda *_: False
        submit = pair.ps[1].submit

        def cast_and_hear_nothing(call: Any) -> Silent:
            submit(call)
            return Silent(ConnectionLost("the connection ended"))

        monkeypatch.setattr(pair.ps[1], "submit", cast_and_hear_nothing)
        answers = pair.ingest("s", tokens_of(40), handle)
        assert [answer.ok for answer in answers] == [rank_0_heard] * 2
        assert [len(tree.inserts) for tree in pair.trees] == [int(rank_0_heard)] * 2


def test_a_vote_whose_answer_was_lost_is_cast_once_more(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(40))
        submit = pair.ps[0].submit
        calls: list[Any] = []

        def lose_the_first_answer(call: Any) -> Any:
            calls.append(call)
            pending = submit(call)
            if len(calls) > 1:
                return pending
            pending.wait()
            return Silent(RequestTimeout("no reply"))

        monkeypatch.setattr(pair.ps[0], "submit", lose_the_first_answer)
        assert pair.ingest("s", tokens_of(40), handle)[0].ok
        assert len(calls) == 2


def test_a_vote_that_cannot_even_be_cast_again_is_no(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(40))
        answers: list[Any] = [Silent(ConnectionLost("gone")), StaleHandle("another epoch")]

        def next_answer(_: Any) -> Any:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(pair.ps[0], "submit", next_answer)
        answer = pair.ingest("s", tokens_of(40), handle)[0]
        assert (answer.ok, answer.reason) == (False, Reason.STALE_HANDLE)
        assert pair.trees[0].inserts == []


def test_an_ingest_can_be_given_up_until_its_vote_is_cast(daemon: Any) -> None:
    with paired(daemon, num_ranks=2) as pair:
        handle = pair.ready("s", tokens_of(40))
        job = pair.ingesters[0].start("s", tokens_of(40), handle)
        assert job.cancel()
        assert (job.result.ok, job.result.reason) == (False, Reason.INGEST_FAILED)
        assert job.cancel(), "again"
        pair.check()
        assert pair.view(handle).state is State.READY
        job = pair.ingesters[0].start("s", tokens_of(40), handle)
        while not job.is_waiting:
            job.step(1 << 20)
        assert not job.cancel(), "the others may insert"
        other = pair.ingesters[1].start("s", tokens_of(40), handle)
        assert all(x.ok for x in finish_all([job, other]))
