"""The daemon is killed and comes back: what D and P are told, and that nothing old is inserted."""

from collections.abc import Callable
from typing import Any

import pytest
from kv_cases import (
    STEP_BYTES,
    TOKENS,
    begun,
    finish,
    finish_all,
    paired,
)
from raw_client import is_all_free, outcomes, wait_for

from snapd.client import Client
from snapd.errors import DaemonUnreachable, Reason


def test_a_push_ends_when_the_daemon_is_killed_and_the_next_one_maps_the_new_arena(
    start_daemon: Callable[..., Any],
) -> None:
    daemon = start_daemon()
    with paired(daemon) as pair:
        job, handle = begun(pair)
        # What is not on file yet is lost with the daemon, and has no outcome.
        wait_for(lambda: pair.d.stats().log.queued_lines == 0, "all is written")
        daemon.kill()
        result = finish(job).result
        assert (result.ok, result.reason) == (False, Reason.TRANSFER_FAILED)
        refused = pair.push("s", TOKENS)
        assert (refused.ok, refused.reason, refused.slab_handle) == (False, Reason.TRANSFER_FAILED, 0)
        daemon.restart()
        pair.ps[0].ping()  # P meets the new epoch, and its layout is declared by itself.
        again = pair.push("s", TOKENS)
        assert again.ok and again.token_start == 0
        assert pair.ingest("s", TOKENS, handle)[0].reason == Reason.STALE_HANDLE
        assert pair.tree.inserts == []
        assert pair.ingest("s", TOKENS, again.slab_handle)[0].ok
        assert outcomes(daemon.log_path)[handle] == ["daemon-restarted"]


def test_a_push_that_goes_on_after_a_restart_ends_as_stale(start_daemon: Callable[..., Any]) -> None:
    """It wrote into the old daemon's arena, which nobody reads; the new one hears nothing of it."""
    daemon = start_daemon(ranks=2)
    with paired(daemon, num_ranks=2) as pair:
        job, _ = begun(pair)
        daemon.kill()
        daemon.restart()
        result = finish(job).result
        assert (result.ok, result.reason) == (False, Reason.STALE_HANDLE)
        core = pair.core()
        assert core.attempts == 0 and is_all_free(core)
        for p in pair.ps:
            p.ping()
        assert all(x.ok for x in pair.ingest("s", TOKENS, pair.ready("s", TOKENS)))


def test_a_job_of_the_old_epoch_does_not_disturb_one_of_the_new(start_daemon: Callable[..., Any]) -> None:
    daemon = start_daemon(ranks=2)
    with paired(daemon, num_ranks=2) as pair:
        old, _ = begun(pair, "old")
        daemon.kill()
        daemon.restart()
        for p in pair.ps:
            p.ping()
        new, handle = begun(pair, "new")
        while not (old.step(1) & new.step(1)):
            pass
        assert (old.result.reason, new.result.reason) == (Reason.STALE_HANDLE, Reason.OK)
        assert all(x.ok for x in pair.ingest("new", TOKENS, handle))


def test_what_was_ready_before_a_restart_is_not_ingested_after_it(start_daemon: Callable[..., Any]) -> None:
    daemon = start_daemon()
    with paired(daemon) as pair:
        handle = pair.ready("s", TOKENS)
        daemon.kill()
        daemon.restart()
        (answer,) = pair.ingest("s", TOKENS, handle)
        assert (answer.ok, answer.reason) == (False, Reason.STALE_HANDLE)
        assert pair.tree.inserts == pair.tree.allocations == []
        assert pair.ps[0].reconnects == 1
        assert pair.ingest("s", TOKENS, pair.ready("s", TOKENS))[0].ok, "the layout is known again"
        assert pair.tree.inserts == ["s"]


def test_the_first_ingest_after_a_restart_succeeds_at_once(start_daemon: Callable[..., Any]) -> None:
    """P learns of the new epoch by the lease itself."""
    daemon = start_daemon()
    with paired(daemon) as pair:
        first = pair.ready("first", TOKENS)
        assert pair.ingest("first", TOKENS, first)[0].ok
        daemon.kill()
        daemon.restart()
        with Client(str(daemon.socket_path)) as other:
            other.declare_layout(0, pair.pusher.layout)
        handle = pair.ready("s", TOKENS)
        assert pair.ps[0].epoch != pair.d.epoch
        assert pair.ingest("s", TOKENS, handle)[0].ok


@pytest.mark.parametrize("is_back", [True, False])
def test_a_restart_between_lease_and_vote_inserts_nothing(
    start_daemon: Callable[..., Any], is_back: bool
) -> None:
    daemon = start_daemon()
    with paired(daemon) as pair:
        (job,) = pair.start_ingest("s", TOKENS, pair.ready("s", TOKENS))
        assert not job.step(1)
        daemon.kill()
        if is_back:
            daemon.restart()
        (answer,) = finish_all([job])
        assert (answer.ok, answer.reason) == (False, Reason.STALE_HANDLE if is_back else Reason.LEASE_EXPIRED)
        assert pair.tree.inserts == []
        pair.check()
        if not is_back:
            daemon.restart()
            pair.ps[0].ping()
        assert pair.ingest("s", TOKENS, pair.ready("s", TOKENS))[0].ok


def test_a_daemon_that_dies_before_the_decision_inserts_nothing_on_either_rank(
    start_daemon: Callable[..., Any],
) -> None:
    daemon = start_daemon(ranks=2)
    with paired(daemon, num_ranks=2) as pair:
        jobs = pair.start_ingest("s", TOKENS, pair.ready("s", TOKENS))
        wait_for(lambda: jobs[0].is_waiting or jobs[0].step(STEP_BYTES), "the vote")
        pair.ps[0].ping()
        daemon.kill()
        answers = finish_all(jobs)
        assert not any(answer.ok for answer in answers)
        assert [tree.inserts for tree in pair.trees] == [[], []]


def test_without_a_daemon_a_push_says_so(start_daemon: Callable[..., Any]) -> None:
    daemon = start_daemon()
    with paired(daemon) as pair:
        daemon.kill()
        result = pair.push("s", TOKENS)
        assert (result.ok, result.reason) == (False, Reason.TRANSFER_FAILED)
        assert "no daemon" in result.detail
        with pytest.raises(DaemonUnreachable):
            pair.ingesters[0].lookup("s")


def test_a_no_that_the_daemon_does_not_hear_is_a_no(
    start_daemon: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start_daemon()
    with paired(daemon) as pair:
        handle = pair.ready("s", TOKENS)

        def kill_and_refuse(_: int) -> None:
            daemon.kill()

        with monkeypatch.context() as patch:
            patch.setattr(pair.tree, "allocate", kill_and_refuse)
            (answer,) = pair.ingest("s", TOKENS, handle)
        assert (answer.ok, answer.reason) == (False, Reason.ALLOC_FAILED_ON_FINALIZE)
        pair.check()
