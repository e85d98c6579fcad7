"""Writes that land too late, over Mooncake: they meet bytes that nobody owns, or bytes that P refuses."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kv_cases import PATIENCE_S, TOKENS, Pair, child, paired, record, records
from late_cases import (
    HOUR_MS,
    ROGUE_BYTES,
    ROGUE_TOKENS,
    WIDE,
    Rogue,
    Watcher,
    check_books,
    overlap,
    rogue,
    stopped,
)
from raw_client import LogFollower, wait_for
from restart_cases import TOKENS as SENT
from restart_cases import Decoder, Told, decoder, hold, ingest, own_network, prefill, set_loopback

from snapd.core import records as rec
from snapd.core.events import State
from snapd.errors import Reason
from snapd.kv.ingest import IngestJob
from snapd.layout import Namespace
from snapd.units import MIB

pytest.importorskip("mooncake.engine", exc_type=ImportError)

StartDaemon = Callable[..., Any]
ARENA_BYTES = 4 * MIB
NUM_SLOTS = 384


@pytest.fixture
def mooncake(start_daemon: StartDaemon) -> StartDaemon:
    """A function that starts a daemon with Mooncake and a small arena."""

    def start(**settings: object) -> Any:
        return start_daemon(**({"transport": "mooncake", "size": f"{ARENA_BYTES}B"} | settings))

    return start


@contextlib.contextmanager
def watched(pair: Pair, late: Rogue) -> Iterator[Watcher]:
    """Yield a watcher; the rogue wrote when it began and writes when it ends."""
    with pair.ps[0].map_buffer(0) as arena:
        watcher = Watcher(arena, late.extents)
        watcher.wait_for_writes()
        yield watcher
        watcher.wait_for_writes()


# --- while the quarantine lasts -----------------------------------------------------------------------


def abort_by_operator(pair: Pair, late: Rogue) -> None:
    pair.ps[0].abort(late.handle)


def await_timeout(pair: Pair, late: Rogue) -> None:
    wait_for(lambda: pair.view(late.handle).state is State.ABORTED, "the timeout", PATIENCE_S)


def supersede(pair: Pair, late: Rogue) -> None:
    grant = pair.pusher.prepare("rogue", range(ROGUE_TOKENS))
    pair.d.abort(grant.slab_handle, drained=True)


ENDINGS: dict[Reason, tuple[Callable[[Pair, Rogue], None], dict[str, object]]] = {
    Reason.CLIENT_ABORT: (abort_by_operator, {}),
    # Long beside a push on a busy machine, as the others have the same.
    Reason.TRANSFER_TIMEOUT: (await_timeout, {"transfer_timeout_ms": 3_000}),
    Reason.SUPERSEDED: (supersede, {}),
}


def fill(pair: Pair, round_number: int) -> list[tuple[str, IngestJob, int]]:
    """Push sessions and lease each, so that none is evicted, until there is no room for another."""
    begun: list[tuple[str, IngestJob, int]] = []
    for number in range(ARENA_BYTES):
        session_id = f"s{round_number}-{number}"
        num_tokens = (40, 17, 25)[number % 3]
        result = pair.push(
            session_id, TOKENS[:num_tokens], pair.slots(num_tokens, seed=100 * round_number + number)
        )
        if not result.ok:
            assert result.reason == Reason.SNAPSHOT_BUF_FULL, result
            break
        (job,) = pair.start_ingest(session_id, TOKENS[:num_tokens], result.slab_handle)
        begun.append((session_id, job, result.slab_handle))
    return begun


@pytest.mark.parametrize("reason", ENDINGS)
def test_while_the_quarantine_lasts_late_writes_meet_nobodys_bytes(
    mooncake: StartDaemon, reason: Reason
) -> None:
    """The arena is filled around it, twice, and all of it arrives as it was committed."""
    end_it, settings = ENDINGS[reason]
    daemon = mooncake(quarantine_ms=HOUR_MS, **settings)
    follower = LogFollower(daemon.log_path)
    with paired(daemon, WIDE, num_slots=NUM_SLOTS) as pair, rogue(pair) as late, watched(pair, late) as seen:
        end_it(pair, late)
        assert pair.view(late.handle).reason == reason
        held = record(daemon, rec.SlabQuarantined, late.handle)
        assert (held.why, held.extents) == ("undrained", late.extents)
        for round_number in (1, 2):
            begun = fill(pair, round_number)
            (books,) = pair.core().arenas
            assert books.quarantined_bytes == ROGUE_BYTES
            assert books.largest_hole_bytes < len(TOKENS) * pair.token_bytes, "the rest of it is full"
            assert books.live_bytes > 2 * MIB and len(begun) > 3
            seen.wait_for_writes()
            for session_id, job, handle in begun:
                assert not overlap(record(daemon, rec.SlabAllocated, handle).extents, late.extents)
                wait_for(lambda job=job: job.step(MIB), "the ingest's end", PATIENCE_S)
                assert job.result.ok, (session_id, job.result)
            check_books(pair, follower)
            pair.check()
            for session_id, *_ in begun:
                pair.tree.evict(session_id)
        assert not records(daemon, rec.SlabReleased, late.handle), "it is quarantined to the end"


# --- later than that ----------------------------------------------------------------------------------

VICTIM = TOKENS[:ROGUE_TOKENS]


@contextlib.contextmanager
def outlived(daemon: Any, pair: Pair) -> Iterator[tuple[Rogue, Watcher]]:
    """Yield a rogue whose bytes are free again, by time alone, and that goes on writing there."""
    with rogue(pair) as late, pair.ps[0].map_buffer(0) as arena:
        watcher = Watcher(arena, late.extents)
        watcher.wait_for_writes()
        pair.ps[0].abort(late.handle)
        wait_for(pair.is_all_free, "the quarantine is over", PATIENCE_S)
        released = record(daemon, rec.SlabReleased, late.handle)
        assert (released.was, released.why) == ("quarantined", "time")
        watcher.wait_for_writes()
        yield late, watcher


def ready_over(pair: Pair, late: Rogue) -> int:
    """Have a session pushed and committed in the rogue's former bytes, and return its handle."""
    handle = pair.ready("victim", VICTIM)
    assert pair.view(handle).shards[0].extents == late.extents
    return handle


def test_a_write_that_outlives_the_quarantine_never_reaches_the_tree(mooncake: StartDaemon) -> None:
    """Another session owns the bytes by then, and its D has committed them with checksums."""
    daemon = mooncake(quarantine_ms=100)
    follower = LogFollower(daemon.log_path)
    with (
        paired(daemon, WIDE, num_slots=NUM_SLOTS) as pair,
        outlived(daemon, pair) as (late, watcher),
    ):
        handle = ready_over(pair, late)
        watcher.wait_for_writes()
        (answer,) = pair.ingest("victim", VICTIM, handle)
        assert (answer.ok, answer.reason) == (False, Reason.CHECKSUM_MISMATCH)
        assert pair.tree.inserts == [] and pair.tree.allocations == [ROGUE_TOKENS]
        pair.tree.check()
        view = pair.view(handle)
        assert (view.state, view.reason) == (State.ABORTED, Reason.CHECKSUM_MISMATCH)
        held = record(daemon, rec.SlabQuarantined, handle)
        assert (held.why, held.extents) == ("corrupt", late.extents)
        outcome = record(daemon, rec.SyncOutcome, handle)
        assert (outcome.ok, outcome.reason) == (False, Reason.CHECKSUM_MISMATCH)
        check_books(pair, follower)


def test_without_the_late_writes_the_same_bytes_are_ingested(mooncake: StartDaemon) -> None:
    """The control: it is the rogue and nothing else that P refused."""
    daemon = mooncake(quarantine_ms=100)
    with paired(daemon, WIDE, num_slots=NUM_SLOTS) as pair, outlived(daemon, pair) as (late, _):
        late.end()
        assert pair.ingest("victim", VICTIM, ready_over(pair, late))[0].ok
        assert pair.tree.inserts == ["victim"]


def test_without_verification_the_late_bytes_would_be_in_the_pool(mooncake: StartDaemon) -> None:
    """The control: it is the checksums and nothing else that kept them out."""
    daemon = mooncake(quarantine_ms=100)
    pair = Pair(daemon, WIDE, num_slots=NUM_SLOTS, verify=False)
    try:
        with outlived(daemon, pair) as (late, watcher):
            handle = ready_over(pair, late)
            watcher.wait_for_writes()
            assert pair.ingest("victim", VICTIM, handle)[0].ok
            with pytest.raises(AssertionError, match="rank 0, plane"):
                pair.check()
    finally:
        pair.close()


# --- D or the daemon stands still ---------------------------------------------------------------------


def let_a_write_fail(pair: Pair, d: Decoder) -> tuple[int, Told]:
    """Stop the daemon in the middle of a push until D has seen a write fail; return its handle and the write.

    The write was not there then; it is when this returns.
    """
    handle = hold(pair, d, "s")
    base_ptr = pair.d.connect().arenas[0].base_ptr
    with pair.ps[0].map_buffer(0) as arena:

        def is_there(told: Told) -> bool:
            start = told.target_ptr - base_ptr
            return any(arena.buffer[start : start + told.size_bytes])

        with stopped(pair.daemon.process.pid):
            d.go_on()
            told = d.hear("write-failed")
            assert not is_there(told)
        wait_for(lambda: is_there(told), "it lands late", PATIENCE_S)
    return handle, told


def test_a_write_that_failed_lands_late_and_meets_quarantined_bytes(mooncake: StartDaemon) -> None:
    """What D says when it gives up is no drain proof."""
    daemon = mooncake(quarantine_ms=HOUR_MS)
    follower = LogFollower(daemon.log_path)
    with prefill(daemon) as pair, decoder(pair, retries_max=0) as d:
        handle, told = let_a_write_fail(pair, d)
        assert not told.is_drained
        result = d.result()
        assert (result.ok, result.reason, result.drained) == (False, Reason.TRANSFER_FAILED, False)
        held = record(daemon, rec.SlabQuarantined, handle)
        assert (held.why, held.extents) == ("undrained", record(daemon, rec.SlabAllocated, handle).extents)
        assert record(daemon, rec.SyncOutcome, handle).reason == Reason.TRANSFER_FAILED
        # By another D: of this one, more that was under way may fail yet.
        again = pair.push("s", SENT)
        assert not overlap(record(daemon, rec.SlabAllocated, again.slab_handle).extents, held.extents)
        ingest(pair, "s", again)
        check_books(pair, follower)
        assert not records(daemon, rec.SlabReleased, handle)


def test_a_piece_that_was_written_again_is_ingested_and_its_slab_is_quarantined(
    mooncake: StartDaemon,
) -> None:
    """The first try may land after the commit: with the same bytes, and before others own the place."""
    daemon = mooncake(quarantine_ms=HOUR_MS)
    follower = LogFollower(daemon.log_path)
    with prefill(daemon) as pair, decoder(pair, retries_max=3) as d:
        handle, _ = let_a_write_fail(pair, d)
        result = d.result()
        assert (result.ok, result.drained) == (True, False) and result.retried_pieces > 0
        ingest(pair, "s", result)
        assert pair.view(handle).state is State.INGESTED
        held = record(daemon, rec.SlabQuarantined, handle)
        assert (held.why, held.extents) == ("undrained", record(daemon, rec.SlabAllocated, handle).extents)
        check_books(pair, follower)
        assert not records(daemon, rec.SlabReleased, handle)
        ingest(pair, "next", d.push("next", seed=8))


def test_a_d_that_stands_still_is_waited_for_in_quarantine_until_it_gives_proof(
    mooncake: StartDaemon,
) -> None:
    daemon = mooncake(quarantine_ms=HOUR_MS, transfer_timeout_ms=2_000)
    follower = LogFollower(daemon.log_path)
    with prefill(daemon) as pair, decoder(pair) as d:
        handle = hold(pair, d, "s")
        with stopped(d.pid):
            wait_for(lambda: pair.view(handle).state is State.ABORTED, "the timeout", PATIENCE_S)
            assert record(daemon, rec.SlabQuarantined, handle).why == "undrained"
            check_books(pair, follower)
            assert not records(daemon, rec.SlabReleased, handle)
        d.go_on()
        result = d.result()
        assert (result.ok, result.reason) == (False, Reason.TRANSFER_TIMEOUT)
        if not result.drained:
            # It looks after its writes when it has something to do.
            d.push("next")
        released = record(daemon, rec.SlabReleased, handle)
        assert (released.was, released.why) == ("quarantined", "drained")


def test_writes_that_arrive_after_their_attempt_are_over_and_then_d_gives_proof(
    mooncake: StartDaemon,
) -> None:
    """The network is away in the middle of a push, for longer than the daemon waits and not as long as D."""
    with own_network():
        daemon = mooncake(quarantine_ms=HOUR_MS, transfer_timeout_ms=2_000)
        follower = LogFollower(daemon.log_path)
        with prefill(daemon) as pair, decoder(pair, mooncake={}) as d:
            handle = hold(pair, d, "s")
            set_loopback(is_there=False)
            d.go_on()
            result = d.result()
            assert (result.ok, result.reason, result.drained) == (False, Reason.TRANSFER_TIMEOUT, False)
            assert record(daemon, rec.SlabQuarantined, handle).why == "undrained"
            check_books(pair, follower)
            assert not records(daemon, rec.SlabReleased, handle)
            set_loopback(is_there=True)

            def is_released() -> bool:
                d.push("next")
                return bool(records(daemon, rec.SlabReleased, handle))

            wait_for(is_released, "drain proof", PATIENCE_S)
            released = record(daemon, rec.SlabReleased, handle)
            assert (released.was, released.why) == ("quarantined", "drained")


# --- D is gone ----------------------------------------------------------------------------------------


def test_over_tcp_the_exit_of_d_is_no_drain_proof(mooncake: StartDaemon) -> None:
    daemon = mooncake(quarantine_ms=300)
    with prefill(daemon) as pair:
        with decoder(pair) as d:
            handle = hold(pair, d, "s")
        assert record(daemon, rec.SyncOutcome, handle).reason == Reason.WRITER_GONE
        held = record(daemon, rec.SlabQuarantined, handle)
        assert held.why == "undrained"
        released = record(daemon, rec.SlabReleased, handle)
        assert (released.was, released.why) == ("quarantined", "time")
        assert released.at_ns >= held.until_ns
        assert pair.is_all_free()


def test_over_shared_memory_it_is(start_daemon: StartDaemon) -> None:
    """The contrast: a mapping does not outlive its process."""
    daemon = start_daemon(quarantine_ms=HOUR_MS)
    with paired(daemon, namespace=Namespace()) as pair:
        with child(daemon, "s", num_tokens=80, steps=2) as d:
            handle = d.handle
        assert record(daemon, rec.SyncOutcome, handle).reason == Reason.WRITER_GONE
        released = record(daemon, rec.SlabReleased, handle)
        assert (released.was, released.why) == ("live", "writer-gone")
        assert not records(daemon, rec.SlabQuarantined, handle)
        assert pair.is_all_free()
